"""Processes of the simulated machine, and the pipes, sockets and selectors that they talk over."""

import errno
import os
import random
import select
import selectors
import socket
import struct
from collections import deque
from collections.abc import Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from tests.daemonsim.system import System

READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE
BACKLOG_MAX = 16


class SimProcess:
    """A process of this machine."""

    def __init__(self, pid: int, started: int) -> None:
        self.pid = pid
        self.started = started
        self.alive = True
        self.stopped_until = 0
        self.sockets: list[SimSocket] = []
        self.is_foreign = False
        """True for a process of a pid namespace that the daemon cannot see."""


class Flight(NamedTuple):
    """Bytes on their way to a reader."""

    arrives_at: int
    data: bytes


class Pipe:
    """One direction of a connection: bytes arrive in order, each piece after a delay."""

    def __init__(self, system: "System", capacity: int, wakes: bool) -> None:
        self._system = system
        self._capacity = capacity
        self._wakes = wakes
        """True where its reader is the daemon."""
        self.flying: deque[Flight] = deque()
        self.ready = bytearray()
        self._bytes = 0
        self._last = 0
        self.ends_at: int | None = None
        """The time at which the reader sees that the writer has closed."""
        self.is_reset = False
        self.is_deaf = False
        """True once the reader is gone."""

    @property
    def room(self) -> int:
        """Bytes that can be written now."""
        return self._capacity - self._bytes

    def write(self, data: bytes) -> None:
        """Send bytes, for which there must be room."""
        self._bytes += len(data)
        self.flying.append(Flight(self._arrival(), data))

    def end(self) -> None:
        """Have the reader see, after all bytes, that the writer has closed."""
        if self.ends_at is None:
            self.ends_at = self._arrival()

    def cut(self, rng: random.Random) -> None:
        """Lose a random rest of the bytes that are on their way, then end."""
        keep = rng.randrange(len(self.flying) + 1)
        while len(self.flying) > keep:
            self.flying.pop()
        if self.flying and rng.random() < 0.5:
            last = self.flying.pop()
            kept = last.data[: rng.randrange(len(last.data) + 1)]
            self.flying.append(Flight(last.arrives_at, kept))
        self.is_reset = rng.random() < 0.5
        self.end()

    def arrive(self) -> None:
        """Make the bytes readable that have arrived by now."""
        while self.flying and self.flying[0].arrives_at <= self._system.now:
            self.ready += self.flying.popleft().data

    def read(self, size: int) -> bytes | None:
        """Return bytes, b"" at the end, or None where there is nothing yet."""
        self.arrive()
        if self.ready:
            received = bytes(self.ready[:size])
            del self.ready[:size]
            self._bytes -= len(received)
            return received
        return b"" if self.is_at_end else None

    @property
    def is_at_end(self) -> bool:
        """True once the reader sees the end, after all bytes."""
        return self.ends_at is not None and self.ends_at <= self._system.now and not self.flying

    @property
    def is_readable(self) -> bool:
        """True where `read` returns bytes or the end."""
        if self.flying:
            self.arrive()
        return bool(self.ready) or self.is_at_end

    def _arrival(self) -> int:
        self._last = max(self._last, self._system.now + self._system.latency())
        if self._wakes:
            self._system.wake_server(self._last)
        return self._last


class SimSocket:
    """Stands for socket.socket: a Unix socket of this machine, non-blocking."""

    def __init__(self, system: "System", process: SimProcess) -> None:
        self._system = system
        self.process = process
        self.peer: SimProcess | None = None
        self.inward: Pipe | None = None
        self.outward: Pipe | None = None
        self.is_closed = False
        process.sockets.append(self)

    def connect(self, path: str) -> None:
        """Connect to the daemon's listener, whatever the path."""
        listener = self._system.listener
        if listener is None:
            raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
        if len(listener.backlog) >= BACKLOG_MAX:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        far = SimSocket(self._system, self._system.server_process)
        far.peer, self.peer = self.process, far.process
        capacity = self._system.capacity
        self.outward = far.inward = Pipe(self._system, capacity, wakes=True)
        self.inward = far.outward = Pipe(self._system, capacity, wakes=False)
        listener.backlog.append(far)
        self._system.wake_server(self._system.now)

    def recv(self, size: int) -> bytes:
        assert self.inward is not None
        assert not self.is_closed, "a closed socket is read"
        received = self.inward.read(self._system.cut_of(size))
        if received is None:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        if not received and self.inward.is_reset:
            raise ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")
        if self.process is not self._system.server_process:
            self._system.wake_server(self._system.now)
        return received

    def recv_into(self, buffer: memoryview) -> int:
        received = self.recv(len(buffer))
        buffer[: len(received)] = received
        return len(received)

    def send(self, data: bytes | bytearray) -> int:
        assert self.outward is not None
        assert not self.is_closed, "a closed socket is written to"
        if self.is_hung_up:
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")
        size = min(len(data), self.outward.room)
        if size <= 0:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        self._system.trace("send", self.process.pid, bytes(data[:size]))
        self.outward.write(bytes(data[:size]))
        return size

    def close(self) -> None:
        """Close this end. The bytes that were sent still arrive."""
        if self.is_closed:
            return
        self.is_closed = True
        self.process.sockets.remove(self)
        if self.outward is None or self.inward is None:
            return
        self.inward.is_deaf = True
        if self.inward.ready or self.inward.flying:
            self.outward.is_reset = True
        self.outward.end()
        # A reader's end frees a writer that waits for room.
        self._system.wake_server(self._system.now)

    def cut(self) -> None:
        """Break the connection with bytes in flight in both directions."""
        assert self.inward is not None
        assert self.outward is not None
        self.inward.cut(self._system.rng)
        self.outward.cut(self._system.rng)

    def setblocking(self, flag: bool) -> None:
        """No socket here blocks."""
        assert not flag

    def getsockopt(self, level: int, option: int, size: int) -> bytes:
        """Return the credentials of the other end (SO_PEERCRED)."""
        assert (level, option, size) == (
            socket.SOL_SOCKET,
            socket.SO_PEERCRED,
            struct.calcsize("3i"),
        )
        assert self.peer is not None
        pid = 0 if self.peer.is_foreign else self.peer.pid
        return struct.pack("3i", pid, os.geteuid(), os.getegid())

    @property
    def is_hung_up(self) -> bool:
        """True once the other end is closed."""
        assert self.outward is not None
        return self.outward.is_deaf or self.outward.ends_at is not None

    def events(self, wanted: int) -> int:
        """Return those of the events `wanted` that select would report."""
        assert self.inward is not None
        assert self.outward is not None
        found = READ if self.inward.is_readable else 0
        if wanted & WRITE:
            found |= WRITE if self.is_hung_up or self.outward.room > 0 else 0
        return found


class Poll:
    """Stands for select.poll. It reports the other end's close alone."""

    def __init__(self) -> None:
        self._sockets: list[SimSocket] = []

    def register(self, sock: SimSocket, events: int) -> None:
        """Watch a socket for the close of its other end."""
        assert events == select.POLLHUP
        self._sockets.append(sock)

    def poll(self, timeout: int) -> list[SimSocket]:
        """Return the sockets whose other end is closed."""
        assert timeout == 0
        return [sock for sock in self._sockets if sock.is_hung_up]


class Listener:
    """Stands for the daemon's listening socket."""

    def __init__(self, system: "System") -> None:
        self._system = system
        self.backlog: deque[SimSocket] = deque()

    def accept(self) -> tuple[SimSocket, str]:
        if not self.backlog:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        return self.backlog.popleft(), ""

    def events(self, wanted: int) -> int:
        return READ if self.backlog else 0

    def close(self) -> None:
        """Refuse all clients that wait for `accept`."""
        self._system.listener = None
        for waiting in self.backlog:
            waiting.close()


class Waker:
    """Both ends of the daemon's socket pair, by which its threads wake the loop."""

    def __init__(self, system: "System") -> None:
        self._system = system
        self.is_rung = False

    def setblocking(self, flag: bool) -> None:
        """No socket here blocks."""
        assert not flag

    def send(self, data: bytes) -> int:
        """Wake the loop of the daemon."""
        self.is_rung = True
        self._system.wake_server(self._system.now)
        return len(data)

    def events(self, wanted: int) -> int:
        return READ if self.is_rung else 0

    def recv(self, size: int) -> bytes:
        """Take all bytes out of it."""
        self.is_rung = False
        return b"\0"

    def close(self) -> None:
        """Nothing to free."""


class Selector:
    """Stands for selectors.DefaultSelector. Ready objects come in any order."""

    def __init__(self, system: "System") -> None:
        self._system = system
        self._wanted: dict[Any, int] = {}
        self._data: dict[Any, Any] = {}

    def register(self, fileobj: Any, events: int, data: Any = None) -> None:
        assert fileobj not in self._wanted
        self._wanted[fileobj] = events
        self._data[fileobj] = data

    def modify(self, fileobj: Any, events: int, data: Any = None) -> None:
        assert fileobj in self._wanted
        self._wanted[fileobj] = events
        self._data[fileobj] = data

    def unregister(self, fileobj: Any) -> None:
        del self._wanted[fileobj]

    def close(self) -> None:
        self._wanted.clear()

    def select(self, timeout: float | None = None) -> list[tuple[SimpleNamespace, int]]:
        """Return the objects that are ready now. It never waits, whatever the `timeout`."""
        ready = [
            (SimpleNamespace(fileobj=fileobj, fd=fileobj, data=self._data[fileobj]), events)
            for fileobj, events in self._ready()
        ]
        if len(ready) > 1:
            self._system.rng.shuffle(ready)
        return ready

    def is_any_ready(self) -> bool:
        """Return True where `select` has an object to return."""
        return any(True for _ in self._ready())

    def _ready(self) -> Iterator[tuple[Any, int]]:
        dead = self._system.pidfds
        for fileobj, wanted in self._wanted.items():
            if isinstance(fileobj, int):
                events = 0 if dead[fileobj].alive else READ
            else:
                events = fileobj.events(wanted)
            if events:
                yield fileobj, events
