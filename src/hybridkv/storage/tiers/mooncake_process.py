"""The Mooncake tier's side of a child process: its start, its lanes, its end. See storage.tiers.mooncake."""

import contextlib
import mmap
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping

import msgspec

from hybridkv.core.errors import ConfigError
from hybridkv.storage.tiers.base import TierError
from hybridkv.storage.tiers.mooncake_calls import PACKET_BYTES_MAX, Answer, Call, Setup, Stop

START_SECONDS = 10.0
"""For Python and the library to load, on a busy machine."""
SETUP_SECONDS_MIN = 1.0
LAST_WORDS_SECONDS = 0.5
"""For the end of a process that has hung up."""
_answers = msgspec.msgpack.Decoder(Answer)


class DeadChildError(TierError):
    """The child is gone, or was killed because it did not answer."""


class Lane:
    """A conversation with the child, for one thread at a time, with its own piece of the shared memory."""

    def __init__(self, child: "Child", sock: socket.socket, start: int, memory: memoryview) -> None:
        self._child = child
        self.sock = sock
        self.start = start
        """Where `memory` starts in the memory that is shared."""
        self.memory = memory

    def call(self, call: Call, deadline: float) -> list[int]:
        """A code for each of the call's items; raises TierError, and kills a child that has not answered in time."""
        try:
            self.sock.settimeout(max(deadline - time.monotonic(), 0.001))
            self.sock.send(msgspec.msgpack.encode(call))
            packet = self.sock.recv(PACKET_BYTES_MAX)
        except TimeoutError:
            self._child.kill()
            raise DeadChildError("Mooncake's client did not answer in time and was ended") from None
        except OSError as error:
            self._child.kill()
            raise DeadChildError(f"Mooncake's client is gone: {error.strerror}") from error
        if not packet:
            self._child.kill()
            raise DeadChildError(f"Mooncake's client is gone{self._child.epitaph()}")
        try:
            answer = _answers.decode(packet)
        except msgspec.MsgspecError as error:
            self._child.kill()
            raise DeadChildError(f"Mooncake's client answered with what is no answer: {error}") from error
        if answer.error:
            raise TierError(f"Mooncake's client failed: {answer.error}")
        return answer.codes


class Child:
    """A process with Mooncake's client, ready for calls."""

    def __init__(
        self, config: Mapping[str, str], environment: Mapping[str, str], log: str, lanes: int, lane_bytes: int
    ) -> None:
        """Raises OSError, or RuntimeError where no thread can be started; nothing is left open then."""
        self._config = dict(config)
        self._changed = threading.Condition()
        self._free: list[Lane] = []
        self._busy: set[Lane] = set()
        self._dead = False
        size = lanes * lane_bytes
        with contextlib.ExitStack() as ours, contextlib.ExitStack() as theirs:
            life, self._life = os.pipe()
            theirs.callback(os.close, life)
            ours.callback(os.close, self._life)
            memory_fd = os.memfd_create("hybridkv-mooncake", os.MFD_CLOEXEC)
            theirs.callback(os.close, memory_fd)
            os.ftruncate(memory_fd, size)
            memory = ours.enter_context(memoryview(ours.enter_context(mmap.mmap(memory_fd, size))))
            passed = [life, memory_fd]
            for start in range(0, size, lane_bytes):
                sock, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                theirs.callback(other.close)
                ours.callback(sock.close)
                passed.append(other.fileno())
                self._free.append(Lane(self, sock, start, ours.enter_context(memory[start : start + lane_bytes])))
            self._free.reverse()  # so that the first to be taken is the first lane, on which the child says hello
            output = theirs.enter_context(open(log or os.devnull, "ab"))
            self.process = subprocess.Popen(
                [sys.executable, "-m", "hybridkv.storage.tiers.mooncake_child", *map(str, passed)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=passed,
                env={**os.environ, **environment},
                cwd="/",
                process_group=0,
            )
            ours.callback(self._end)
            threading.Thread(target=self.process.wait, name="hybridkv-mooncake-end", daemon=True).start()
            ours.pop_all()

    def _end(self) -> None:
        """End a process that nobody waits for yet."""
        self.process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(LAST_WORDS_SECONDS)

    def connect(self, seconds: float) -> None:
        """Load the library and set it up. Raises ConfigError where it cannot be loaded, TierError; it is dead then."""
        try:
            with self.lane(time.monotonic() + START_SECONDS) as lane:
                self._hear_greeting(lane)
                (code,) = lane.call(Setup(self._config), time.monotonic() + max(seconds, SETUP_SECONDS_MIN))
        except BaseException:
            self.kill()
            raise
        if code:
            self.kill()
            raise TierError(f"Mooncake's client cannot be set up: {code}; the option log=PATH has its reasons")

    def _hear_greeting(self, lane: Lane) -> None:
        lane.sock.settimeout(START_SECONDS)
        try:
            packet = lane.sock.recv(PACKET_BYTES_MAX)
        except OSError as error:
            raise DeadChildError(f"Mooncake's client does not start: {error}") from error
        if not packet:
            raise DeadChildError(f"Mooncake's client does not start{self.epitaph()}")
        missing = _answers.decode(packet).error
        if missing:
            raise ConfigError(
                "the mooncake tier needs the package mooncake-transfer-engine-non-cuda (extra: hybridkv[mooncake])"
                f" and the system's libibverbs1 and libnuma1: {missing}"
            )

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
            self._changed.wait_for(lambda: self._free or self._dead, max(deadline - time.monotonic(), 0.0))
            if self._dead:
                raise DeadChildError("Mooncake's client was ended")
            if not self._free:
                raise TierError("Mooncake's client was busy for too long")
            lane = self._free.pop()
            self._busy.add(lane)
        try:
            yield lane
        finally:
            with self._changed:
                self._busy.discard(lane)
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
        """Leave the store in order, if that is possible in time; then the process is ended."""
        deadline = time.monotonic() + seconds
        with contextlib.suppress(TierError), self.lane(deadline) as lane:
            lane.call(Stop(), deadline)
        self.kill()

    def kill(self) -> None:
        """End the process, and with it every call; does not wait for it, which on a busy machine takes its time."""
        with self._changed:
            if self._dead:
                return
            self._dead = True
            self.process.kill()
            for lane in self._free:
                lane.sock.close()
            for lane in self._busy:  # their threads wake up, and close them
                with contextlib.suppress(OSError):
                    lane.sock.shutdown(socket.SHUT_RDWR)
            self._free.clear()
            os.close(self._life)
            self._changed.notify_all()
