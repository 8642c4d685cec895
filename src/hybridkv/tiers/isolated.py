"""A library in a process of its own: calls that end in time, and memory that both processes have.

    python -m hybridkv.tiers.isolated MODULE:CLASS LIFE MEMORY LANE...

IsolatedProcess starts it.  The child makes one CLASS(memory).  A call names one of its methods,
which returns a code for each item and may raise anything.  Only the child ends where the library
crashes.

LIFE, MEMORY and LANE are file descriptors.  LIFE ends with the parent.  MEMORY is shared; bytes of
records are in it, and a call says where.  Each LANE is a socket (SOCK_SEQPACKET) with a thread of
the child.  A call is one packet on it, which follows the result of the call before.
"""

import contextlib
import fcntl
import importlib
import mmap
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from hybridkv.tiers.contract import TierError

ITEMS_MAX = 512  # Items in one call, so that a packet stays below what a socket takes.
PACKET_BYTES_MAX = 128 << 10
START_SECONDS = 10.0  # For Python and the library to load on a busy machine.
SETUP_SECONDS_MIN = 1.0
LAST_WORDS_SECONDS = 0.5  # For the end of a process that has hung up.


_calls = msgspec.msgpack.Decoder(tuple[str, list[Any]])
_results = msgspec.msgpack.Decoder(tuple[list[int], str])
"""A code for each item; the text, where it is not empty, says that the call as a whole failed."""


class DeadChildError(TierError):
    """The child is gone, or was killed because it did not answer."""


@dataclass(slots=True, eq=False)
class Lane:
    """Calls to the child, by one thread at a time, with a part of the shared memory."""

    child: "IsolatedProcess"
    sock: socket.socket
    start: int  # Where `memory` starts in the shared memory.
    memory: memoryview

    def call(self, deadline: float, method: str, *arguments: object) -> list[int]:
        """A code for each of the call's items; raises TierError, and kills a child that is late."""
        codes, error = self.hear(deadline, msgspec.msgpack.encode((method, arguments)))
        if error:
            raise TierError(f"{self.child.name} failed: {error}")
        return codes

    def hear(self, deadline: float, call: bytes = b"") -> tuple[list[int], str]:
        """What the child says, after a call if there is one; raises and kills as `call` does."""
        what = ""
        try:
            self.sock.settimeout(max(deadline - time.monotonic(), 0.001))
            if call:
                self.sock.send(call)
            if packet := self.sock.recv(PACKET_BYTES_MAX):
                return _results.decode(packet)
        except TimeoutError:
            what = "did not answer in time and was ended"
        except OSError as error:
            what = f"is gone: {error.strerror}"
        except msgspec.MsgspecError as error:
            what = f"answered with no result: {error}"
        self.child.kill()
        raise DeadChildError(f"{self.child.name} {what or 'is gone' + self.child.epitaph()}")


class IsolatedProcess:
    """The child, ready for calls as soon as `connect` has returned."""

    def __init__(
        self,
        name: str,
        library: str,
        lanes: tuple[int, int],
        environment: Mapping[str, str],
        log: str,
    ) -> None:
        """`lanes`: how many, and the bytes of memory of each; `log`: a file for output, or empty.

        Raises OSError, or RuntimeError where no thread can be started; nothing is left open then.
        """
        self.name = name  # For messages.
        self._changed = threading.Condition()
        self._lanes: list[Lane] = []
        self._dead = False
        lanes_max, lane_bytes = lanes
        size = lanes_max * lane_bytes
        with contextlib.ExitStack() as ours, contextlib.ExitStack() as theirs:
            life, self._life = os.pipe()
            theirs.callback(os.close, life)
            ours.callback(os.close, self._life)
            memory_fd = os.memfd_create("hybridkv-isolated", os.MFD_CLOEXEC)
            theirs.callback(os.close, memory_fd)
            os.ftruncate(memory_fd, size)
            memory = ours.enter_context(memoryview(ours.enter_context(mmap.mmap(memory_fd, size))))
            passed = [life, memory_fd]
            for start in range(0, size, lane_bytes):
                sock, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                theirs.callback(other.close)
                ours.callback(sock.close)
                passed.append(other.fileno())
                part = ours.enter_context(memory[start : start + lane_bytes])
                self._lanes.append(Lane(self, sock, start, part))
            # The first lane, which has the greeting, is the first one taken.
            self._free = self._lanes[::-1]
            output = theirs.enter_context(open(log or os.devnull, "ab"))
            self.process = subprocess.Popen(
                [sys.executable, "-m", "hybridkv.tiers.isolated", library, *map(str, passed)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=passed,
                env={**os.environ, **environment},
                cwd="/",
                process_group=0,
            )
            ours.callback(self.epitaph)
            ours.callback(self.process.kill)
            reaper = threading.Thread(target=self.process.wait, name="hybridkv-reaper", daemon=True)
            reaper.start()
            ours.pop_all()

    def connect(self, seconds: float, *arguments: object) -> list[int]:
        """Load the library and call its `setup`; returns the codes.

        Raises ImportError where the library cannot be loaded, and TierError; kills the child then.
        """
        try:
            with self.lane(time.monotonic() + START_SECONDS) as lane:
                _, missing = lane.hear(time.monotonic() + START_SECONDS)
                if missing:
                    raise ImportError(missing)
                seconds = max(seconds, SETUP_SECONDS_MIN)
                return lane.call(time.monotonic() + seconds, "setup", *arguments)
        except BaseException:
            self.kill()
            raise

    @property
    def alive(self) -> bool:
        """Whether calls may still be answered."""
        if self.process.poll() is not None:
            self.kill()
        return not self._dead

    @contextlib.contextmanager
    def lane(self, deadline: float) -> Iterator[Lane]:
        """A lane to call on, when one is free; raises TierError."""
        with self._changed:
            seconds = max(deadline - time.monotonic(), 0.0)
            self._changed.wait_for(lambda: self._free or self._dead, seconds)
            if self._dead:
                raise DeadChildError(f"{self.name} was ended")
            if not self._free:
                raise TierError(f"{self.name} was busy for too long")
            lane = self._free.pop()
        try:
            yield lane
        finally:
            with self._changed:
                if self._dead:
                    lane.sock.close()
                else:
                    self._free.append(lane)
                    self._changed.notify()

    def epitaph(self) -> str:
        """How the process ended, if it has."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(LAST_WORDS_SECONDS)
        code = self.process.returncode
        return "" if code is None else f", it ended with {code}"

    def stop(self, seconds: float) -> None:
        """Call the library's `close`, if that is possible in time; then the process is ended."""
        deadline = time.monotonic() + seconds
        with contextlib.suppress(TierError), self.lane(deadline) as lane:
            lane.call(deadline, "close")
        self.kill()

    def kill(self) -> None:
        """End the process, and every call with it; does not wait for the process."""
        with self._changed:
            if self._dead:
                return
            self._dead = True
            self.process.kill()
            for lane in self._lanes:  # threads that wait in those in use wake up, and close them
                with contextlib.suppress(OSError):
                    lane.sock.shutdown(socket.SHUT_RDWR)
                if lane in self._free:
                    lane.sock.close()
            self._free.clear()
            os.close(self._life)
            self._changed.notify_all()


def answer_calls(lane: socket.socket, library: object) -> None:
    """Serve one lane in the child, whose process ends with the lane, and after `close`."""
    method = ""
    while method != "close" and (packet := lane.recv(PACKET_BYTES_MAX)):
        method, arguments = _calls.decode(packet)
        try:
            result = getattr(library, method)(*arguments), ""
        except Exception as error:  # noqa: BLE001  # the parent raises it
            result = [], f"{type(error).__name__}: {error}"
        lane.send(msgspec.msgpack.encode(result))
    os._exit(0)


def end_with_parent(life: int) -> None:
    """Let the kernel end this process when `life` is closed, on which nothing is ever written.

    Nobody handles SIGIO here, so it ends the process even while a thread of the library holds the
    interpreter.  (The signal of PR_SET_PDEATHSIG is for the end of the *thread* that started us.)
    """
    fcntl.fcntl(life, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(life, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
    if select.select([life], [], [], 0)[0]:
        os._exit(0)


def main(name: str, *descriptors: str) -> None:
    """The child: serve until the parent closes a lane, or ends."""
    life, memory_fd, *lane_fds = map(int, descriptors)
    end_with_parent(life)
    first, *others = (socket.socket(fileno=fd) for fd in lane_fds)
    module, _, made = name.partition(":")
    try:
        make = getattr(importlib.import_module(module), made)
    except ImportError as error:
        first.send(msgspec.msgpack.encode(([], str(error))))
        return
    first.send(msgspec.msgpack.encode(([], "")))
    library = make(mmap.mmap(memory_fd, os.fstat(memory_fd).st_size))
    for lane in others:
        threading.Thread(target=answer_calls, args=(lane, library), daemon=True).start()
    answer_calls(first, library)


if __name__ == "__main__":
    main(*sys.argv[1:])
