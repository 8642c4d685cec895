"""A library in a process of its own: its calls end in time, and both processes share memory.

    python -m hybridkv.tiers.isolated MODULE:CLASS LIFE MEMORY LANE...

IsolatedProcess starts it. The child makes one CLASS(memory). A call names one of its methods, which
returns a code for each item and may raise anything. Where the library crashes, only the child ends.

LIFE, MEMORY and LANE are file descriptors. LIFE ends with the parent. MEMORY is shared. It has the
bytes of records, and a call says where. Each LANE is a socket (SOCK_SEQPACKET) with a thread of the
child. A call is one packet, sent after the result of the call before.
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
from typing import Any, NamedTuple

import msgspec

from hybridkv.tiers.contract import TierError

ITEMS_MAX = 512  # Items in one call, so that a packet stays below what a socket takes.
PACKET_BYTES_MAX = 128 << 10
START_SECONDS = 10.0  # For Python and the library to load on a busy machine.
SETUP_SECONDS_MIN = 1.0
EXIT_SECONDS_MAX = 0.5  # For the exit of a process that has closed its lanes.


class LibraryCall(NamedTuple):
    """A call, as it is sent."""

    method: str
    arguments: list[Any]


class CallResult(NamedTuple):
    """The result of a call, as it is sent. The child's greeting is one too."""

    codes: list[int]  # A code for each item.
    error: str = ""  # Why the call as a whole failed. Empty = it did not.


class LaneSizes(NamedTuple):
    """How much a child can do at once."""

    lanes: int  # The number of lanes, each with a thread of the child.
    memory_bytes: int  # Shared memory of each lane.


_calls = msgspec.msgpack.Decoder(LibraryCall)
_results = msgspec.msgpack.Decoder(CallResult)


class DeadChildError(TierError):
    """The child has ended, or was killed because it did not answer."""


@dataclass(slots=True, eq=False)
class Lane:
    """A socket to the child and a part of the shared memory, for one thread at a time."""

    child: "IsolatedProcess"
    sock: socket.socket
    start: int  # Where `memory` starts in the shared memory.
    memory: memoryview

    def call_method(self, deadline: float, method: str, *arguments: object) -> list[int]:
        """Returns a code for each item. Raises TierError, and kills a child that is late."""
        request = LibraryCall(method, list(arguments))
        result = self.next_result(deadline, msgspec.msgpack.encode(request))
        if result.error:
            raise TierError(f"{self.child.name} failed: {result.error}")
        return result.codes

    def next_result(self, deadline: float, request: bytes = b"") -> CallResult:
        """Returns the next result, after sending `request` if there is one.

        Raises DeadChildError, and kills a child that is late.
        """
        what = ""
        try:
            self.sock.settimeout(max(deadline - time.monotonic(), 0.001))
            if request:
                self.sock.send(request)
            if packet := self.sock.recv(PACKET_BYTES_MAX):
                return _results.decode(packet)
        except TimeoutError:
            what = "did not answer in time and was ended"
        except OSError as error:
            what = f"is gone: {error.strerror}"
        except msgspec.MsgspecError as error:
            what = f"answered with no result: {error}"
        self.child.kill_child()
        raise DeadChildError(f"{self.child.name} {what or 'is gone' + self.child.describe_exit()}")


class IsolatedProcess:
    """The child process. It takes calls as soon as `connect` has returned."""

    def __init__(
        self, name: str, library: str, sizes: LaneSizes, environment: Mapping[str, str], log: str
    ) -> None:
        """`library` is MODULE:CLASS. `log` is a file for the child's output. Empty = none.

        Raises OSError, or RuntimeError where no thread can start. Nothing is left open then.
        """
        self.name = name  # For messages.
        self._changed = threading.Condition()
        self._lanes: list[Lane] = []
        self._dead = False
        size = sizes.lanes * sizes.memory_bytes
        with contextlib.ExitStack() as ours, contextlib.ExitStack() as theirs:
            life, self._life = os.pipe()
            theirs.callback(os.close, life)
            ours.callback(os.close, self._life)
            memory_fd = os.memfd_create("hybridkv-isolated", os.MFD_CLOEXEC)
            theirs.callback(os.close, memory_fd)
            os.ftruncate(memory_fd, size)
            memory = ours.enter_context(memoryview(ours.enter_context(mmap.mmap(memory_fd, size))))
            child_fds = [life, memory_fd]
            for start in range(0, size, sizes.memory_bytes):
                sock, child_sock = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                theirs.callback(child_sock.close)
                ours.callback(sock.close)
                child_fds.append(child_sock.fileno())
                part = ours.enter_context(memory[start : start + sizes.memory_bytes])
                self._lanes.append(Lane(self, sock, start, part))
            # `connect` takes the first lane, on which the greeting comes.
            self.free_lanes = self._lanes[::-1]
            output = theirs.enter_context(open(log or os.devnull, "ab"))
            self.process = subprocess.Popen(
                [sys.executable, "-m", "hybridkv.tiers.isolated", library, *map(str, child_fds)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=child_fds,
                env={**os.environ, **environment},
                cwd="/",
                process_group=0,
            )
            ours.callback(self.describe_exit)
            ours.callback(self.process.kill)
            reaper = threading.Thread(target=self.process.wait, name="hybridkv-reaper", daemon=True)
            reaper.start()
            ours.pop_all()

    def load_library(self, seconds: float, *arguments: object) -> list[int]:
        """Load the library and call its `setup`. Returns the codes.

        Raises ImportError where the library cannot be loaded, and TierError. Kills the child then.
        """
        try:
            with self.lane(time.monotonic() + START_SECONDS) as lane:
                greeting = lane.next_result(time.monotonic() + START_SECONDS)
                if greeting.error:
                    raise ImportError(greeting.error)
                seconds = max(seconds, SETUP_SECONDS_MIN)
                return lane.call_method(time.monotonic() + seconds, "setup", *arguments)
        except BaseException:
            self.kill_child()
            raise

    @property
    def can_answer(self) -> bool:
        """True while the child may still answer calls."""
        if self.process.poll() is not None:
            self.kill_child()
        return not self._dead

    @contextlib.contextmanager
    def lane(self, deadline: float) -> Iterator[Lane]:
        """Waits for a free lane and lends it. Raises TierError where none is free in time."""
        with self._changed:
            seconds = max(deadline - time.monotonic(), 0.0)
            self._changed.wait_for(lambda: self.free_lanes or self._dead, seconds)
            if self._dead:
                raise DeadChildError(f"{self.name} was ended")
            if not self.free_lanes:
                raise TierError(f"{self.name} was busy for too long")
            lane = self.free_lanes.pop()
        try:
            yield lane
        finally:
            with self._changed:
                if self._dead:
                    lane.sock.close()
                else:
                    self.free_lanes.append(lane)
                    self._changed.notify()

    def describe_exit(self) -> str:
        """Returns how the process ended, ", it ended with -9". Empty = it has not ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            # The process has not ended, so the message says no exit status.
            self.process.wait(EXIT_SECONDS_MAX)
        code = self.process.returncode
        return "" if code is None else f", it ended with {code}"

    def close_or_kill(self, seconds: float) -> None:
        """Call the library's `close`, if that is possible in time. Then kill the process."""
        deadline = time.monotonic() + seconds
        with contextlib.suppress(TierError), self.lane(deadline) as lane:
            # A client that does not leave the store in order in time is killed.
            lane.call_method(deadline, "close")
        self.kill_child()

    def kill_child(self) -> None:
        """Kill the process, and end every call with it. Does not wait for the process."""
        with self._changed:
            if self._dead:
                return
            self._dead = True
            self.process.kill()
            for lane in self._lanes:  # A thread that waits in a lane wakes up and closes it.
                with contextlib.suppress(OSError):
                    # The child may have closed its end of the lane already.
                    lane.sock.shutdown(socket.SHUT_RDWR)
                if lane in self.free_lanes:
                    lane.sock.close()
            # The shared memory goes with the last lane that a thread still has.
            self.free_lanes.clear()
            self._lanes.clear()
            os.close(self._life)
            self._changed.notify_all()


def answer_calls(lane: socket.socket, library: object) -> None:
    """Serve one lane in the child. The process ends with the lane, and after `close`."""
    method = ""
    while method != "close" and (packet := lane.recv(PACKET_BYTES_MAX)):
        method, arguments = _calls.decode(packet)
        try:
            result = CallResult(getattr(library, method)(*arguments))
        except Exception as error:  # noqa: BLE001  # the parent raises it
            result = CallResult([], f"{type(error).__name__}: {error}")
        lane.send(msgspec.msgpack.encode(result))
    os._exit(0)


def end_with_parent(life: int) -> None:
    """Let the kernel end this process when the parent's end of `life` is closed.

    Nothing is ever written to `life`. Nobody handles SIGIO here, so it ends the process even while
    a thread of the library holds the interpreter. (PR_SET_PDEATHSIG would be for the end of the
    *thread* that started us.)
    """
    fcntl.fcntl(life, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(life, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
    if select.select([life], [], [], 0)[0]:
        os._exit(0)


def main(name: str, *descriptors: str) -> None:
    """Run the child: serve until the parent closes a lane, or ends."""
    life, memory_fd, *lane_fds = map(int, descriptors)
    end_with_parent(life)
    first, *later = (socket.socket(fileno=fd) for fd in lane_fds)
    module, _, class_name = name.partition(":")
    try:
        make = getattr(importlib.import_module(module), class_name)
    except ImportError as error:
        first.send(msgspec.msgpack.encode(CallResult([], str(error))))
        return
    first.send(msgspec.msgpack.encode(CallResult([])))
    library = make(mmap.mmap(memory_fd, os.fstat(memory_fd).st_size))
    for lane in later:
        threading.Thread(target=answer_calls, args=(lane, library), daemon=True).start()
    answer_calls(first, library)


if __name__ == "__main__":
    main(*sys.argv[1:])
