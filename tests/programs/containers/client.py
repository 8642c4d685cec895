"""An engine with a worker in a container: `client SOCKET`.

It imports no vLLM. For each word that it reads it does that and prints a line of JSON: "store"
stores objects, "look" looks them up and reads them, "hold" takes leases and slots and keeps them.
Without a daemon all counts are zero, and it connects again at the next word.
"""

import json
import sys
from contextlib import ExitStack

from hybridkv.client.control import ControlClient, DaemonUnreachableError
from hybridkv.core.packed import pack_u64, unpack_slots
from hybridkv.shm.arena import Arena, arena_seen, attach_arena, new_lock
from hybridkv.shm.slots import payload_offset
from hybridkv.wire.messages import (
    PROTOCOL_VERSION,
    Commit,
    Found,
    Hello,
    Lookup,
    Release,
    Reserve,
    Reserved,
)
from tests.programs.daemon.holder import HASHES, OBJECTS, PART, engine_hello, take

START = payload_offset(1)


class WireEngine:
    """An engine of the wire alone. Without a daemon it finds nothing, and goes on."""

    def __init__(self, socket_path: str) -> None:
        self._socket_path = socket_path
        self._connected: ExitStack | None = None
        self._scheduler: ControlClient
        self._arena: Arena

    def obey(self, word: str) -> dict[str, object]:
        """Do what a word says; returns the line that is printed."""
        try:
            if self._connected is None:
                self._connect()
            answer: dict[str, object] = getattr(self, f"_{word}")()
            return answer
        except DaemonUnreachableError as error:
            self._lose()
            return {"hits": 0, "stored": 0, "why": str(error)}

    def _connect(self) -> None:
        lock = new_lock()
        worker = Hello(1, PROTOCOL_VERSION, "worker", "e", lock=lock)
        with ExitStack() as stack:
            copying = stack.enter_context(ControlClient(self._socket_path, hello=worker))
            self._scheduler = stack.enter_context(
                ControlClient(self._socket_path, hello=engine_hello("e"))
            )
            welcome = copying.welcome
            path = arena_seen(welcome.arena_path)
            self._arena = attach_arena(path, welcome.arena_bytes, pid=welcome.pid, lock=lock)
            stack.callback(self._arena.close)
            self._connected = stack.pop_all()

    def _lose(self) -> None:
        if self._connected is not None:
            self._connected.close()
        self._connected = None

    def _store(self) -> dict[str, object]:
        granted = self._scheduler.call(Reserve(3, PART, 1, OBJECTS))
        assert isinstance(granted, Reserved)
        for number, offset in enumerate([slot.offset for slot in unpack_slots(granted.slots)]):
            self._part(offset)[:] = bytes([number + 1]) * PART
        groups = pack_u64([0] * OBJECTS)
        self._scheduler.tell(Commit(granted.slots, groups, HASHES))
        return {"stored": int(self._scheduler.stats().values["objects_stored"])}

    def _look(self) -> dict[str, object]:
        found = self._scheduler.call(Lookup(5, 9, HASHES))
        assert isinstance(found, Found)
        offsets = [slot.offset for slot in unpack_slots(found.slots)]
        is_right = all(
            bytes(self._part(offset)) == bytes([number + 1]) * PART
            for number, offset in enumerate(offsets)
        )
        self._scheduler.tell(Release(9))
        return {"hits": found.chunks, "right": is_right}

    def _hold(self) -> dict[str, object]:
        take(self._scheduler)
        return {"held": True}

    def _part(self, offset: int) -> memoryview:
        return self._arena.memory[offset + START : offset + START + PART]


def main() -> None:
    engine = WireEngine(*sys.argv[1:])
    for line in sys.stdin:
        print(json.dumps(engine.obey(line.strip())), flush=True)


if __name__ == "__main__":
    main()
