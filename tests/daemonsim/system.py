"""A machine that is only a heap of events: clocks, processes, sockets, pidfds, shared memory.

`installed` puts it under the daemon's loop and client/link.py in place of the operating system. The
code above it is the real one.

Times are integers in microseconds of a clock that stands still while code runs. Nothing here
depends on the order of a set, on an id or on a hash, so that a seed repeats to the last byte.
"""

import contextlib
import errno
import hashlib
import heapq
import itertools
import math
import os
import random
import select
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType, SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

from hybridkv.client import link
from hybridkv.core.errors import HybridKVError
from hybridkv.core.tier_urls import TierSpec
from hybridkv.daemon import clients, loop
from hybridkv.daemon.quota_file import StoredQuotas
from hybridkv.daemon.sessions import Process
from hybridkv.daemon.token_book import DescribedChunk
from hybridkv.shm.slots import HEADER_BYTES, SLOT_ALIGN
from hybridkv.shm.trailer import Trailer, trailer_bytes
from hybridkv.tiers import demotion, object_search
from hybridkv.tiers.encryption import TierKey
from hybridkv.tiers.jobs import TierJob
from tests.daemonsim.sockets import (
    READ,
    WRITE,
    Listener,
    Poll,
    Selector,
    SimProcess,
    SimSocket,
    Waker,
)

SECOND = 1_000_000
SOCKET_PATH = Path("/daemonsim/daemon.sock")
EPOCH_MS = 1_700_000_000_000
FIRST_FD = 1000
LOCK_FD = 999
SLEEPLESS_MAX = 2000
"""Rounds of the loop in a row that want the next one at once."""
USELESS_WAITS_MAX = 20
"""Waits in a row for an event that has come already."""
TRACED = (
    "store/store.py",
    "store/extents.py",
    "store/index.py",
    "store/eviction.py",
    "shm/trailer.py",
    "shm/slots.py",
    "daemon/handlers.py",
    "daemon/sessions.py",
    "daemon/slot_requests.py",
    "tiers/promotion.py",
    "tiers/object_search.py",
    "tiers/shared_reads.py",
    "tiers/demotion.py",
    "tiers/health.py",
)
"""Files at any line of which the daemon can be killed."""
UNTRACED = ("owner_of",)
"""Cached functions of these files. Whether their lines run depends on earlier calls."""


_SETTLED = SimpleNamespace(error="", is_settled=True, close=lambda seconds: None)
"""The thread of a file that is written at once."""


class Delays(NamedTuple):
    """A range of random delays: low <= delay < high."""

    low: int
    high: int


class Event(NamedTuple):
    """An event of the machine. Those of one time come in the order of their numbers."""

    when: int
    number: int
    action: Callable[[], None]


class Killed(BaseException):
    """SIGKILL arrived at this line of the daemon."""


class WouldWaitError(Exception):
    """A thread of the daemon has nothing to do now."""


class GoneError(BaseException):
    """The process of a thread has ended."""


class Strand:
    """A thread of the daemon for a tier. It runs from `go_on` until it pauses or ends."""

    def __init__(self, system: "System", code: Callable[["Strand"], None]) -> None:
        self._system = system
        self._code = code
        self.job: TierJob | None = None
        """The job that it is doing."""
        self.due: int | None = None
        """The time at which it goes on. None while it hangs."""
        self.is_over = False
        self._is_gone = False
        self._error: BaseException | None = None
        self._mine, self._theirs = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def go_on(self) -> None:
        """Run until it pauses or ends. Raises AssertionError where it saw a fault."""
        assert not self.is_over
        self.due = None
        before, self._system.strand = self._system.strand, self
        self._mine.release()
        self._theirs.acquire()
        self._system.strand = before
        if self.is_over:
            self._thread.join()
        if self._error is not None:
            raise AssertionError(f"in a thread of a tier: {self._error}") from self._error

    def end(self) -> None:
        """End it, because its process is killed."""
        self._is_gone = True
        if not self.is_over:
            self.go_on()

    def wait(self) -> None:
        """Called by the thread itself: let others run until the next `go_on`."""
        self._theirs.release()
        self._mine.acquire()
        if self._is_gone:
            raise GoneError

    def _run(self) -> None:
        self._mine.acquire()
        try:
            if not self._is_gone:
                self._code(self)
        except GoneError:
            pass
        except BaseException as error:  # noqa: BLE001  # raised again by whoever told it to go on
            self._error = error
        self.is_over = True
        self._theirs.release()


class SlotsMemory:
    """The slots as the daemon's store sees them.

    It writes headers and zeros only, and may die within a header.
    """

    def __init__(self, system: "System", view: memoryview) -> None:
        self._system = system
        self._view = view

    def __len__(self) -> int:
        return len(self._view)

    def __getitem__(self, at: slice) -> memoryview:
        return self._view[at]

    def __setitem__(self, at: slice, data: bytes) -> None:
        if at.start % SLOT_ALIGN and len(data) > 1:
            assert not any(data), "the daemon signs nothing by itself, and overwrites with zeros"
        if len(data) > 1 and not any(data):
            # Loads prove that it overwrites nothing that lives.
            assert at.stop - at.start == len(data)
            self._view[at] = data
            return
        if len(data) == 1:
            assert at.start % SLOT_ALIGN == HEADER_BYTES - 1, "the last byte says what was read"
            self._view[at] = data
            return
        assert at.start % SLOT_ALIGN == 0, "the daemon writes headers, and nothing else"
        assert len(data) == HEADER_BYTES == at.stop - at.start
        torn = self._system.tears()
        if torn is not None:
            self._view[at.start : at.start + torn] = data[:torn]
            raise Killed
        self._view[at] = data


class ArenaFile:
    """Stands for shm.arena.Arena: it outlives daemons, and its mappings outlive its name."""

    def __init__(self, system: "System", path: Path, slots_bytes: int) -> None:
        self._system = system
        self.path = path
        self.slots_bytes = slots_bytes
        self.size_bytes = slots_bytes + trailer_bytes(slots_bytes)
        self.bytes = memoryview(bytearray(self.size_bytes))
        self.granted: set[int] = set()
        """Every generation that a client was ever given here."""
        self.memory = self
        self.locks: dict[int, SimProcess] = {}  # The process that has mapped it with a lock.

    def is_locked(self, number: int) -> bool:
        return number in self.locks and self.locks[number].alive

    def __getitem__(self, at: slice) -> SlotsMemory:
        return SlotsMemory(self._system, self.bytes[at])

    def allocate_pages(self, start: int, stop: int) -> None:
        """Make pages exist. Raises OSError where the machine has no more."""
        assert start < stop <= self.slots_bytes
        if stop > self._system.pages_end:
            raise OSError(errno.ENOSPC, "No space left on device")

    def close(self) -> None:
        """Let go of the lock of the file."""
        # The next daemon may take the arena over as soon as this lock is given up.
        assert not self._system.strands, (
            "the arena is given up while a thread may still write into it"
        )

    def unlink(self) -> None:
        """Remove the file's name. Mappings stay valid."""
        if self in self._system.files:
            self._system.files.remove(self)


class System:
    """The machine of one seed, and the daemon that runs on it."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.now = SECOND
        self._looks = 0
        self.wall_ms = EPOCH_MS
        """The time of day when `now` is 0. It steps where an administrator sets the clock."""
        self.events: list[Event] = []
        self._numbers = 0
        self._digest = hashlib.blake2b(digest_size=16)
        self.latencies = Delays(5, 200)
        self.capacity = 1 << 16
        self.pages_end = 1 << 60
        self.default_bytes = 48 * SLOT_ALIGN
        self.processes: dict[int, SimProcess] = {}
        self._last_pid = 100
        self._free_pids: list[int] = []
        self.reuses_pids = False
        self.has_foreign = False  # True where new processes may be of other pid namespaces.
        self.current = self.spawn()
        """The process whose code runs."""
        self.pidfds: dict[int, SimProcess] = {}
        self.files: list[ArenaFile] = []
        self.paths: dict[str, ArenaFile] = {}
        """Every arena there ever was, by its name."""
        self.listener: Listener | None = None
        self.server: loop.DaemonServer | None = None
        self._book: list[DescribedChunk] = []
        self.quotas: list[StoredQuotas] = []
        """What commands have set at run time, the latest last."""
        self.server_process = self.current
        self.lives = 0
        self.life_starts_ms: list[int] = []
        self._reserver: Callable[[], None] | None = None
        self._may_wait = False
        self._turns: set[int] = set()
        self._lines_left = 0
        self._writes_left = 0
        self.tiers: tuple[TierSpec, ...] = ()
        self.make_tier: Callable[..., Any] = lambda spec, node: None
        self.make_threads: Callable[..., Any] = lambda tier, memory, done: None
        self.has_quotas = True
        self.strands: list[Strand] = []
        """The threads of the living daemon's process."""
        self.strand: Strand | None = None
        """The thread that runs now."""
        self.never_hangs = False
        self._useless_waits = 0
        self._sleepless = 0
        self._timer_at = 0
        self.on_start: Callable[[loop.DaemonServer], None] = lambda server: None
        self.on_turn: Callable[[], None] = lambda: None
        self.on_death: Callable[[], None] = lambda: None

    @property
    def arena(self) -> ArenaFile | None:
        """The arena of the living daemon."""
        arena: Any = self.server.arena if self.server is not None else None
        assert arena is None or isinstance(arena, ArenaFile)
        return arena

    # Time

    def at(self, when: int, action: Callable[[], None]) -> None:
        """Do an action at a time."""
        self._numbers += 1
        heapq.heappush(self.events, Event(when, self._numbers, action))

    def after(self, low: int, high: int, action: Callable[[], None]) -> None:
        """Do an action after a random delay: low <= delay < high."""
        self.at(self.now + self.rng.randrange(low, high), action)

    def step(self) -> None:
        """Do the action of the next event, at its time."""
        event = heapq.heappop(self.events)
        self.now = max(self.now, event.when)
        event.action()

    def seconds(self) -> float:
        """Return the time of the clock that clients use."""
        return self.now / SECOND

    def time_ms(self) -> int:
        """Return the time of day in milliseconds."""
        return self.wall_ms + self.now // 1000

    def _monotonic(self) -> float:
        """Return the time in seconds. Each look within a round of the loop is a little later."""
        self._looks += 1
        return self.now / SECOND + self._looks * self.rng.choice((0.0, 0.0, 1e-6, 1e-4))

    def trace(self, *facts: object) -> None:
        """Make facts part of the run's digest."""
        self._digest.update(repr((self.now, *facts)).encode())

    def digest(self) -> str:
        """Return a digest of all that was traced, and of the bytes of every arena."""
        whole = self._digest.copy()
        for file in self.files:
            whole.update(file.bytes)
        return whole.hexdigest()

    def latency(self) -> int:
        """Return the time that a piece of a stream takes."""
        return self.rng.randrange(self.latencies.low, self.latencies.high)

    def cut_of(self, size: int) -> int:
        """Return the bytes that one read takes, because streams have no messages."""
        return self.rng.randrange(1, 200) if self.rng.random() < 0.1 else size

    # Processes

    def spawn(self) -> SimProcess:
        """Start a process, perhaps with the id of a dead one."""
        if self.reuses_pids and self._free_pids and self.rng.random() < 0.7:
            pid = self._free_pids.pop(self.rng.randrange(len(self._free_pids)))
        else:
            self._last_pid += 1
            pid = self._last_pid
        self._numbers += 1
        process = SimProcess(pid, self.now // 10_000 * 1000 + self._numbers % 1000)
        process.is_foreign = self.has_foreign and self.rng.random() < 0.7
        self.processes[pid] = process
        return process

    def kill(self, process: SimProcess) -> None:
        """End a process at once (SIGKILL). The kernel closes its sockets."""
        if not process.alive:
            return
        self.trace("kill", process.pid)
        process.alive = False
        del self.processes[process.pid]
        self._free_pids.append(process.pid)
        for sock in list(process.sockets):
            sock.close()
        self.wake_server(self.now)

    def process_of(self, pid: int) -> Process | None:
        """Stands for daemon.clients.process_of."""
        process = self.processes.get(pid)
        return Process(pid, process.started) if process is not None else None

    def pidfd_open(self, pid: int) -> int:
        if pid not in self.processes:
            raise ProcessLookupError(errno.ESRCH, "No such process")
        # The kernel also takes the lowest free number, so another process soon has it again.
        fd = next(number for number in itertools.count(FIRST_FD) if number not in self.pidfds)
        self.pidfds[fd] = self.processes[pid]
        return fd

    def close_fd(self, fd: int) -> None:
        self.pidfds.pop(fd, None)

    # The daemon

    def start_server(self, ram_bytes: int | None, fresh: bool = False) -> bool:
        """Start a daemon. Returns False where it was killed before it served."""
        assert self.server is None
        self.server_process = self.spawn()
        self.lives += 1
        self.life_starts_ms.append(self.time_ms())
        self.trace("start", self.time_ms(), ram_bytes, fresh)
        self._may_wait = False
        quota = (None, 3 * SLOT_ALIGN, 12 * SLOT_ALIGN)[self.lives % 3] if self.has_quotas else None
        options = loop.ServeOptions(
            socket_path=SOCKET_PATH,
            ram_bytes=ram_bytes,
            metrics_port=-1,
            fresh=fresh,
            salt_quota_bytes=quota,
            tiers=self.tiers,
            node="node",
        )
        server: list[loop.DaemonServer] = []
        if not self._runs(lambda: server.append(loop.DaemonServer(options))):
            return False
        self.server = server[0]
        self.on_start(self.server)
        self.wake_server(self.now)
        self.after(10, 3000, self._reserve)
        return True

    def stop_server(self, keep_arena: bool) -> None:
        """End the daemon by SIGTERM, which keeps the arena, or by SIGINT."""
        assert self.server is not None
        self.trace("stop", keep_arena)
        server = self.server
        server.end_run(keep_arena)
        if self._runs(server.run):
            self._server_ended()

    def kill_server(self) -> None:
        """End the daemon at once (SIGKILL)."""
        self.trace("kill server")
        self._server_ended()

    def arm(self, lines: int = 0, writes: int = 0) -> None:
        """Kill the daemon at the line, or within the header write, that comes so many later."""
        self._lines_left, self._writes_left = lines, writes

    def tears(self) -> int | None:
        """Return the bytes of this header that are written before the daemon dies, else None."""
        if not self._writes_left:
            return None
        self._writes_left -= 1
        return None if self._writes_left else self.rng.randrange(HEADER_BYTES + 1)

    def wake_server(self, when: int) -> None:
        """Have a round of the daemon's loop then."""
        if when not in self._turns:
            self._turns.add(when)
            self.at(when, lambda: self._turn(when))

    def _turn(self, when: int) -> None:
        self._turns.remove(when)
        server = self.server
        if server is None:
            return
        if self.now < self.server_process.stopped_until:
            self.wake_server(self.server_process.stopped_until)
            return
        self._looks = 0
        if not self._runs(server.turn):
            return
        self.on_turn()
        selector: Any = server.selector
        if server.clients.waiting or selector.is_any_ready():
            self.wake_server(self.now + self.rng.randrange(5, 60))
        patience = server.sleep_seconds()
        self._sleepless = self._sleepless + 1 if patience == 0.0 else 0
        assert self._sleepless < SLEEPLESS_MAX, "the loop spins"
        if patience is not None:
            self._timer_at = timer = self.now + max(1, math.ceil(patience * SECOND))
            self.at(timer, lambda: self._ring(server, timer))

    def _ring(self, server: loop.DaemonServer, timer: int) -> None:
        """The loop has slept as long as it wanted to."""
        if self.server is server and self._timer_at == timer:
            self.wake_server(self.now)

    @property
    def turn_is_due(self) -> bool:
        """True where the loop has a round at this time, before or after the event that runs."""
        return any(when <= self.now for when in self._turns) or 0 < self._timer_at <= self.now

    # The daemon's threads

    def start(self, strand: Strand) -> None:
        """Have a thread begin at this time."""
        self.strands.append(strand)
        self._continue(strand, self.now)

    def pause(self, low: int, high: int) -> None:
        """Called by a thread of the daemon: sleep a random time."""
        assert self.strand is not None
        self._continue(self.strand, self.now + self.rng.randrange(low, high))
        self.strand.wait()

    def hang(self, time: int | None) -> None:
        """Called by a thread of the daemon: sleep for a time, or until `awaken`."""
        assert self.strand is not None
        if self.never_hangs:
            return
        if time is not None:
            self._continue(self.strand, self.now + time)
        self.strand.wait()

    def awaken(self) -> None:
        """Every thread that hangs goes on soon, and none hangs again."""
        self.never_hangs = True
        for strand in self.strands:
            self._continue(strand, self.now + self.rng.randrange(1, SECOND))

    def run_strands(self, until: int, is_enough: Callable[[], bool]) -> None:
        """Run the daemon's threads alone, until a time or an event."""
        while not is_enough():
            dues = [strand.due for strand in self.strands if strand.due is not None]
            if not dues or min(dues) > until:
                self.now = max(self.now, until)
                return
            self.now = max(self.now, min(dues))
            self._go_on(next(strand for strand in self.strands if strand.due == min(dues)))

    def _continue(self, strand: Strand, when: int) -> None:
        strand.due = when
        self.at(
            when,
            lambda: self._go_on(strand) if strand.due == when and strand in self.strands else None,
        )

    def _go_on(self, strand: Strand) -> None:
        if self.server is not None and self.now < self.server_process.stopped_until:
            self._continue(strand, self.server_process.stopped_until)
            return
        strand.go_on()
        if strand.is_over:
            self.strands.remove(strand)

    def _select(self, read: Any, write: Any, error: Any, timeout: float) -> None:
        """select.select of a daemon that does not serve yet."""
        waker = read[0]
        self._useless_waits = self._useless_waits + 1 if waker.is_rung else 0
        assert self._useless_waits < USELESS_WAITS_MAX, "a daemon that waits for its tiers spins"
        self.run_strands(
            self.now + max(1, math.ceil(timeout * SECOND)), lambda: bool(waker.is_rung)
        )

    def _reserve(self) -> None:
        """One step of the daemon's thread that makes pages exist."""
        server, arena = self.server, self.arena
        if server is None or arena is None or self._reserver is None:
            return
        if self.now >= self.server_process.stopped_until:
            self._may_wait = True
            with contextlib.suppress(WouldWaitError):
                self._reserver()
        if server.reserver.reserved_bytes < arena.slots_bytes:
            self.after(500, 40_000, self._reserve)

    def _wait_for(self, predicate: Callable[[], bool], timeout_seconds: float | None) -> bool:
        """Stands for threading.Condition.wait_for of the thread that makes pages exist.

        It returns once for each step, unless the thread has nothing to do.
        """
        if not self._may_wait or (timeout_seconds is None and not predicate()):
            raise WouldWaitError
        self._may_wait = False
        return True

    def _runs(self, code: Callable[[], None]) -> bool:
        """Run the daemon's code. Returns False where it was killed as `arm` asked for."""
        traced = self._lines_left > 0
        before, self.current = self.current, self.server_process
        try:
            if traced:
                sys.settrace(self._trace_call)
            code()
        except Killed:
            sys.settrace(None)
            self.trace("killed within")
            self._server_ended()
            return False
        finally:
            if traced:
                sys.settrace(None)
            self.current = before
        return True

    def _trace_call(self, frame: FrameType, event: str, arg: object) -> Any:
        return self._trace_line if _is_traced(frame.f_code) else None

    def _trace_line(self, frame: FrameType, event: str, arg: object) -> Any:
        if event == "line" and self._lines_left:
            self._lines_left -= 1
            if not self._lines_left:
                raise Killed
        return self._trace_line

    def _server_ended(self) -> None:
        self.server = None
        for strand in self.strands:
            strand.end()
        self.strands = []
        self._timer_at = 0
        self._reserver = None
        self._lines_left = self._writes_left = 0
        self.listener = None
        self.kill(self.server_process)
        self.pidfds.clear()
        self.on_death()

    # Stand-ins for the operating system

    def open_arena(
        self,
        socket_path: Path,
        ram_bytes: int | None,
        fresh: bool,
        boot: str,
        directory: Path,
        group: int | None,
    ) -> SimpleNamespace:
        """Stands for daemon.filesystem.open_arena, for one user."""
        fitting = (
            file for file in self.files if not fresh and ram_bytes in (None, file.slots_bytes)
        )
        earlier = next(fitting, None)
        for file in list(self.files):
            if file is not earlier:
                file.unlink()
        arena = earlier
        if arena is None:
            arena = ArenaFile(self, Path(f"/daemonsim/{boot}"), ram_bytes or self.default_bytes)
            self.files.append(arena)
            self.paths[str(arena.path)] = arena
        trailer = Trailer(arena.bytes[arena.slots_bytes :], arena.slots_bytes)
        if earlier is None:
            trailer.write_fresh()
        return SimpleNamespace(arena=arena, trailer=trailer, is_earlier=earlier is not None)

    def attach(self, path: str, size_bytes: int, process: SimProcess, lock: int) -> ArenaFile:
        """Stands for shm.arena.attach_arena."""
        for file in self.files:
            if str(file.path) == path and file.size_bytes == size_bytes:
                file.locks[lock] = process
                return file
        raise HybridKVError(f"arena {path} is gone")

    def new_socket(self, *_: int) -> SimSocket:
        """Make a socket of the process that runs now."""
        return SimSocket(self, self.current)

    def _listen(self, *_: object) -> Listener:
        self.listener = Listener(self)
        return self.listener

    def _socketpair(self) -> tuple[Waker, Waker]:
        waker = Waker(self)
        return waker, waker

    def _uuid4(self) -> SimpleNamespace:
        self._numbers += 1
        return SimpleNamespace(hex=f"boot{self._numbers}")

    def _thread(self, target: Callable[[], None], **_: object) -> SimpleNamespace:
        self._reserver = target
        return SimpleNamespace(start=lambda: None, join=lambda: None)

    def _open_book(
        self, path: Path, key: TierKey | None, on_read: Callable[[list[DescribedChunk]], None]
    ) -> SimpleNamespace:
        """The file of the token book, which daemons leave to each other."""
        on_read(list(self._book))

        def rewrite(chunks: list[DescribedChunk], held_bytes: int) -> None:
            self._book[:] = chunks

        return SimpleNamespace(
            thread=_SETTLED, size_bytes=0, append_chunks=self._book.extend, rewrite_file=rewrite
        )

    def _open_quotas(self, path: Path, on_read: Callable[[StoredQuotas], None]) -> SimpleNamespace:
        """The file of quotas, which daemons leave to each other."""
        if self.quotas:
            on_read(self.quotas[-1])
        return SimpleNamespace(path=path, thread=_SETTLED, save_quotas=self.quotas.append)

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Stand for the operating system of the daemon's loop and of clients' links."""

        class Condition:
            """Stands for threading.Condition. Threads run between two rounds of the loop alone."""

            wait_for = staticmethod(self._wait_for)
            notify = staticmethod(lambda: None)

            def __enter__(self) -> None:
                """Nobody else runs."""

            def __exit__(self, *_: object) -> None:
                """Nobody else waits."""

        sockets = SimpleNamespace(
            **{name: getattr(socket, name) for name in dir(socket) if name.isupper()}
        )
        sockets.socket = self.new_socket
        sockets.socketpair = self._socketpair
        kernel = SimpleNamespace(
            pidfd_open=self.pidfd_open,
            close=self.close_fd,
            geteuid=os.geteuid,
            getpid=lambda: self.server_process.pid,
        )
        server = {
            "os": kernel,
            "socket": sockets,
            "selectors": SimpleNamespace(
                DefaultSelector=lambda: Selector(self), EVENT_READ=READ, EVENT_WRITE=WRITE
            ),
            "threading": SimpleNamespace(Condition=Condition, Thread=self._thread),
            "time": SimpleNamespace(
                time_ns=lambda: self.time_ms() * 10**6, monotonic=self._monotonic
            ),
            "uuid": SimpleNamespace(uuid4=self._uuid4),
            "select": SimpleNamespace(select=self._select),
            "make_tier": self.make_tier,
            "TierThreads": self.make_threads,
            "BookFile": self._open_book,
            "QuotaFile": self._open_quotas,
            "process_of": self.process_of,
            "open_arena": self.open_arena,
            "ServedSocket": lambda path, group: SimpleNamespace(
                listen=self._listen, restore_names=lambda: None, close=lambda: None
            ),
            # Nobody removes the daemon's files here.
            "remove_unused_arenas": lambda path, directory: None,
        }
        with contextlib.ExitStack() as stack:
            for name, value in server.items():
                for module in (loop, clients):
                    if hasattr(module, name):
                        stack.enter_context(mock.patch.object(module, name, value))
            # So that they matter to short prompts in short lives.
            stack.enter_context(mock.patch.object(demotion, "USE_SECONDS", 0.2))
            stack.enter_context(mock.patch.object(object_search, "FIND_KEYS_MAX", 6))
            stack.enter_context(mock.patch.object(object_search, "FIND_KEYS_FIRST", 3))
            stack.enter_context(mock.patch.object(link, "socket", sockets))
            polls = SimpleNamespace(POLLHUP=select.POLLHUP, poll=Poll)
            stack.enter_context(mock.patch.object(link, "select", polls))
            yield


@contextlib.contextmanager
def untraced() -> Iterator[None]:
    """Run code of the tests within the daemon's. It cannot be killed, and no line is counted."""
    trace = sys.gettrace()
    sys.settrace(None)
    try:
        yield
    finally:
        sys.settrace(trace)


def _is_traced(code: CodeType) -> bool:
    return code.co_filename.endswith(TRACED) and code.co_name not in UNTRACED
