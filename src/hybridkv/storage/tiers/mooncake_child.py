"""The process that has Mooncake's client library in it, started by storage.tiers.mooncake, which says why.

    python -m hybridkv.storage.tiers.mooncake_child LIFE MEMORY LANE...

All are file descriptors: LIFE ends with the parent, MEMORY is shared with it, each LANE is a socket with a thread here.
"""

import ctypes
import fcntl
import mmap
import os
import select
import socket
import sys
import threading

import msgspec

from hybridkv.storage.tiers.mooncake_calls import PACKET_BYTES_MAX, Answer, Call, Find, Get, Put, Remove, Setup, Stop

try:
    from mooncake.store import MooncakeDistributedStore
except ImportError as error:
    LIBRARY_MISSING = str(error)
else:
    LIBRARY_MISSING = ""

INVALID_PARAMS = -600


class Client:
    """The library behind the calls."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._size = len(memory)
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._memory = memory
        self._store = MooncakeDistributedStore()

    def answer(self, call: Call) -> list[int]:
        """Codes for the call's items. Raises what the library raises."""
        match call:
            case Setup(config):
                code = self._store.setup(config) or self._store.register_buffer(self._base, self._size)
                return [code]
            case Find(keys):
                return list(self._store.batch_is_exist(keys))
            case Put(keys, offsets, sizes):
                return list(self._store.batch_put_from(keys, self._at(offsets), sizes))
            case Get(keys, offsets, sizes):
                codes = self._store.batch_get_into(keys, self._at(offsets), sizes)
                # "Invalid" is also what it says of an object that is larger than the memory given for it.
                return [
                    self._size_of(key, size) if code == INVALID_PARAMS else code
                    for key, size, code in zip(keys, sizes, codes, strict=True)
                ]
            case Remove(keys, force):
                return list(self._store.batch_remove(keys, force))
            case Stop():
                return [self._store.close()]

    def _at(self, offsets: list[int]) -> list[int]:
        return [self._base + offset for offset in offsets]

    def _size_of(self, key: str, asked: int) -> int:
        size = int(self._store.get_size(key))
        return INVALID_PARAMS if size == asked else size


def serve(lane: socket.socket, client: Client, calls: int | None = None) -> None:
    """Answer what comes in, or only so many calls; ends the process where the parent has closed the lane."""
    decoder: msgspec.msgpack.Decoder[Call] = msgspec.msgpack.Decoder(Call)
    while calls is None or calls > 0:
        calls = None if calls is None else calls - 1
        packet = lane.recv(PACKET_BYTES_MAX)
        if not packet:
            os._exit(0)
        call = decoder.decode(packet)
        try:
            answer = Answer(client.answer(call))
        except Exception as error:  # noqa: BLE001  # whatever the library raises, the parent is told
            answer = Answer(error=f"{type(error).__name__}: {error}")
        lane.send(msgspec.msgpack.encode(answer))
        if isinstance(call, Stop):
            os._exit(0)


def end_with_parent(life: int) -> None:
    """Let the kernel end this process when `life` is closed, on which nothing is ever written.

    By SIGIO, which nobody handles here: threads of the library may hold the interpreter for as long as they like. (The
    signal that Linux sends on a parent's death is one for the death of the *thread* that started us.)
    """
    fcntl.fcntl(life, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(life, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
    if select.select([life], [], [], 0)[0]:
        os._exit(0)


def main(arguments: list[str]) -> None:
    """Serve until the parent has had enough."""
    life, memory_fd, *lane_fds = (int(argument) for argument in arguments)
    end_with_parent(life)
    first, *others = (socket.socket(fileno=fd) for fd in lane_fds)
    first.send(msgspec.msgpack.encode(Answer(error=LIBRARY_MISSING)))
    if LIBRARY_MISSING:
        return
    client = Client(mmap.mmap(memory_fd, os.fstat(memory_fd).st_size))
    serve(first, client, calls=1)  # its Setup
    for lane in others:
        threading.Thread(target=serve, args=(lane, client), daemon=True).start()
    serve(first, client)


if __name__ == "__main__":
    main(sys.argv[1:])
