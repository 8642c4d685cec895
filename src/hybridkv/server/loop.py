"""The daemon's one loop: sockets in, `Daemon.handle`, sockets out. Everything that blocks is elsewhere."""

import contextlib
import errno
import importlib
import logging
import math
import os
import resource
import select
import selectors
import signal
import socket
import struct
import threading
import time
import uuid
from collections import Counter, deque
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

from hybridkv.core.errors import ConfigError
from hybridkv.core.eviction import Policy
from hybridkv.core.sizes import format_size
from hybridkv.core.tiers import TierSpec
from hybridkv.server.daemon import Daemon
from hybridkv.server.place import listen, make_private_directory, open_arena, take_lock
from hybridkv.server.sessions import Process
from hybridkv.server.snapshot import Snapshot
from hybridkv.server.spans import Spans
from hybridkv.server.status import Status
from hybridkv.server.threads import TierThreads
from hybridkv.server.web import serve_web
from hybridkv.shm.arena import is_no_space
from hybridkv.storage.line import Line
from hybridkv.storage.store import Store
from hybridkv.storage.tiers.make import make_tier
from hybridkv.storage.transfer import Job, Outcome
from hybridkv.wire.codec import Frames, WireError, decode_request, encode
from hybridkv.wire.messages import Error, Reply, Report, Stats
from hybridkv.wire.protocol import REFUSALS, ErrorCode

logger = logging.getLogger("hybridkv.daemon")

CONNECTIONS_MAX = 4096
LAST_WORDS_BYTES_MAX = 4 << 20
"""Read from a connection after its process ended; a socket's buffer holds less."""
RECEIVE_BYTES = 1 << 14
"""Taken from one client before the next one's turn."""
TURN_SECONDS = 0.002
"""After which the others have their turn: many small requests are also work."""
IDLE_SECONDS = 0.0005
"""While nobody says anything, the ceiling's arithmetic is done in pieces of so long."""
STATUS_SECONDS = 0.25
"""What clients are told of the status page is no older, and not made more often."""
SEND_QUEUE_BYTES_MAX = 64 << 20
"""A client that lets this much pile up is disconnected."""
GENERATION_BITS = 22
"""The bits above are a life's start in milliseconds, so that later lives give later generations."""
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
LISTEN_AGAIN_SECONDS = 0.2
"""After a connection could not be accepted, unless one of ours ends before."""
SHORTAGES = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS))
"""Errors that say nothing of what was asked for, and pass."""
DESCRIPTORS_MAX = 2 * CONNECTIONS_MAX + 64
"""That the daemon may come to need: a socket for each connection, and one more where its process is another one."""
OPEN_SECONDS = 2.0
"""Before the first client is heard, tiers have so long to say that their settings can never work."""
CLOSE_SECONDS = 2.0
"""At the end, a tier's threads have so long to finish what they are writing."""
RESERVE_STEP_BYTES = 32 << 20
RESERVE_AHEAD_BYTES = 256 << 20
"""Pages are made to exist this far ahead of the used part of the arena."""


class ServeOptions(NamedTuple):
    """What `hybridkv serve` was asked for."""

    socket_path: Path
    ram_bytes: int | None
    """None: as much as an earlier daemon left, else the default."""
    metrics_port: int
    fresh: bool = False
    """Start with an empty cache, even where an earlier daemon left one."""
    eviction: Policy = Policy.TWO_QUEUES
    salt_quota_bytes: int | None = None
    """The most that the objects of one `cache_salt` may take; None = no bound but the arena."""
    tiers: tuple[TierSpec, ...] = ()
    """Below RAM, the one that is asked first first."""
    node: str = ""
    """What tells this daemon from others that use the same tiers; the same in all its lives."""
    traces_url: str = ""
    """Of an OpenTelemetry collector; empty: nothing is traced."""


class _Peer:
    """One accepted socket and its buffers."""

    def __init__(self, sock: socket.socket, number: int, process: Process | None) -> None:
        self.sock = sock
        self.number = number
        self.process = process
        self.frames = Frames()
        self.said: deque[bytes] = deque()
        """Messages that were read and wait for their turn; nothing more is read before."""
        self.out = bytearray()
        self.closing = False


class Server:
    """Owns the sockets and the arena; runs until `stop`."""

    def __init__(self, options: ServeOptions) -> None:
        make_private_directory(options.socket_path.parent, "socket")
        self._lock_fd = take_lock(options.socket_path)
        self._socket_path = options.socket_path
        self._selector = selectors.DefaultSelector()
        self._pidfds: dict[Process, int] = {}
        self._peers: dict[socket.socket, _Peer] = {}
        self._numbered: dict[int, _Peer] = {}
        """The same, by the number that the daemon knows them by."""
        self._threads: list[TierThreads] = []
        self._outcomes: deque[tuple[Job, Outcome]] = deque()
        """What the tiers' threads did, and the daemon was not told yet."""
        self._wake_read, self._wake_write = socket.socketpair()
        for end in (self._wake_read, self._wake_write):
            end.setblocking(False)
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._behind: dict[_Peer, None] = {}
        """Those whose messages wait for their turn."""
        if not self._open(options, options.fresh):
            # Whatever is wrong with what the last daemon left, it must not keep this one from serving.
            self._trailer.release()
            self._arena.close()
            self._open(options, fresh=True)
        self._listener = listen(options.socket_path, "socket")
        self._listen_at: float | None = None
        """While nobody can be accepted: when to try again, by the monotonic clock."""
        self._short = False
        """Whether the last one who came could not be served for lack of descriptors."""
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._numbers = 0
        self._asked: deque[Future[Snapshot]] = deque()
        self._status = Status(is_brief=True)
        self._told: tuple[float, str] | None = None
        """What clients were told of it last, and when."""
        self._running = True
        self._keeps_arena = True
        self._await_tiers()
        size = self._arena.slots_bytes
        self._reserved = self.daemon.store.extents.limit_bytes
        self._reserve_failed = False
        self._reserve_wanted = threading.Condition()
        self._reserve_goal = min(self._reserved + RESERVE_AHEAD_BYTES, size)
        self._reserver = threading.Thread(target=self._reserve, name="reserve", daemon=True)
        self._reserver.start()
        self.metrics_url = ""
        if options.metrics_port >= 0:
            self.metrics_url = serve_web(self._ask, options.metrics_port)
        self._exporter: Any = None
        if options.traces_url:
            self._exporter = self._trace(options)
        logger.info("serving %s, ram %s, metrics %s", options.socket_path, format_size(size), self.metrics_url)

    def _trace(self, options: ServeOptions) -> Any:
        """Raises ConfigError where the library is not there, which nothing else needs."""
        try:
            traces = importlib.import_module("hybridkv.server.traces")
        except ImportError as error:
            raise ConfigError(f"traces: {error}; pip install 'hybridkv[otel]' works") from error
        self.daemon.spans = Spans()
        return traces.Exporter(options.traces_url, self.daemon.spans, options.node)

    def run(self) -> None:
        """Serve until `stop`; then remove the socket."""
        try:
            while self._running:
                self.turn()
        finally:
            self._close()

    def turn(self) -> None:
        """One round: whatever is ready is served."""
        behind = list(self._behind)
        ready = self._selector.select(self._patience())
        for key, events in ready:
            if isinstance(key.data, Process):
                self._process_ended(key.data, key.fd)
            else:
                self._serve(key.fileobj, events)
        for peer in behind:
            self._answer(peer, TURN_SECONDS)
        self._adopt_reserved()
        self._take_outcomes()
        while self._asked:
            self._asked.popleft().set_result(self.daemon.showing.snapshot(time.monotonic()))
        if not ready and not behind:
            self._use_idle_time()

    def _use_idle_time(self) -> None:
        until = time.monotonic() + IDLE_SECONDS if self.daemon.ceiling.has_work else 0.0
        while self.daemon.ceiling.has_work and time.monotonic() < until:
            self.daemon.ceiling.work()

    def stop(self, keep_arena: bool) -> None:
        """End `run`; safe from signal handlers and other threads. The arena is kept for the next daemon, or not."""
        self._keeps_arena = keep_arena
        self._running = False
        self._wake()

    def _serve(self, fileobj: object, events: int) -> None:
        if fileobj is self._listener:
            self._accept()
        elif fileobj is self._wake_read:
            self._heed()
        else:
            peer = self._peers.get(fileobj)  # type: ignore[call-overload]  # a socket, as registered
            if peer is None:
                return
            if events & selectors.EVENT_READ and not peer.said:
                self._receive(peer, TURN_SECONDS)
            if events & selectors.EVENT_WRITE and peer.sock in self._peers:
                self._flush(peer)

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError as error:
            if error.errno in SHORTAGES:
                # Whoever waits stays in the listener's queue, which would wake the loop for ever.
                self._selector.unregister(self._listener)
                self._listen_at = time.monotonic() + LISTEN_AGAIN_SECONDS
                self._say_short(error)
            return
        sock.setblocking(False)
        raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        pid, uid, _ = struct.unpack("3i", raw)
        self._numbers += 1
        process, shortage = None, None
        try:
            process = process_of(pid)
            if process is not None and not self._watch(process):
                process = None
        except OSError as error:
            shortage = error
        peer = _Peer(sock, self._numbers, process)
        self._peers[sock] = self._numbered[peer.number] = peer
        self._selector.register(sock, selectors.EVENT_READ)
        self.daemon.connect(peer.number, peer.process)
        if uid != os.geteuid():
            message = f"this daemon belongs to user id {os.geteuid()} and serves nobody else; start your own"
            self._refuse(peer, ErrorCode.OTHER_USER, message)
        elif len(self._peers) > CONNECTIONS_MAX:
            message = f"there are {CONNECTIONS_MAX} connections already"
            self._refuse(peer, ErrorCode.CONNECTIONS, message)
        elif shortage is not None:
            # It would be taken for gone at the end of its connection, and might still be copying.
            message = f"process {pid} cannot be watched ({shortage.strerror}); a higher limit (ulimit -n) works"
            self._say_short(shortage)
            self._refuse(peer, ErrorCode.CONNECTIONS, message)
        else:
            self._short = False

    def _say_short(self, error: OSError) -> None:
        if not self._short:
            logger.warning("no more clients can be served: %s; a higher limit (ulimit -n) works", error.strerror)
        self._short = True

    def _patience(self) -> float | None:
        """Seconds that the loop may sleep; the listener is heard again when they are over."""
        if self._behind or self._outcomes or self.daemon.ceiling.has_work:
            return 0.0
        now = time.monotonic()
        if self._listen_at is not None and self._listen_at <= now:
            self._listen()
        due = min(self.daemon.wakes_at(), math.inf if self._listen_at is None else self._listen_at)
        return None if due == math.inf else max(0.0, due - now)

    def _listen(self) -> None:
        """Hear the listener again."""
        if self._listen_at is not None:
            self._listen_at = None
            self._selector.register(self._listener, selectors.EVENT_READ)

    def _receive(self, peer: _Peer, seconds: float) -> bool:
        """Read what has come, and serve it for some time; whether there was anything."""
        try:
            received = peer.sock.recv(RECEIVE_BYTES)
        except BlockingIOError:
            return False
        except OSError:
            received = b""
        if not received:
            self._drop(peer)
            return False
        if peer.closing:
            return True
        try:
            peer.said += peer.frames.feed(received)
        except WireError as error:
            self._refuse(peer, ErrorCode.WIRE, str(error))
            return True
        self._answer(peer, seconds)
        return True

    def _answer(self, peer: _Peer, seconds: float) -> None:
        """Handle what a client said, for so long; the rest in its next turn."""
        self._behind.pop(peer, None)
        until = time.monotonic() + seconds
        try:
            while peer.said and not peer.closing and peer.sock in self._peers:
                if time.monotonic() > until:
                    self._behind[peer] = None
                    return
                request = decode_request(peer.said.popleft())
                reply = self.daemon.handle(peer.number, request, time.monotonic())
                if isinstance(reply, Report):
                    reply.info["metrics"] = self.metrics_url
                    if isinstance(request, Stats) and request.status:
                        reply.info["status"] = self._status_text()
                if reply is not None:
                    peer.closing = isinstance(reply, Error) and REFUSALS[ErrorCode(reply.code)].closes
                    self._send(peer, reply)
        except WireError as error:
            self._refuse(peer, ErrorCode.WIRE, str(error))
        except Exception:  # the supervised boundary: one client's fault must not end the others'
            logger.exception("a request failed inside the daemon; its connection is closed")
            self._refuse(peer, ErrorCode.INTERNAL, "the daemon failed on this request")
        peer.said.clear()

    def _send(self, peer: _Peer, reply: Reply) -> None:
        try:
            frame = encode(reply)
        except WireError as error:
            frame = encode(self.daemon.refuse(reply.id, ErrorCode.TOO_LARGE, str(error)))
        peer.out += frame
        self._flush(peer)

    def _refuse(self, peer: _Peer, code: ErrorCode, message: str) -> None:
        """Refuse what has no reply of its own: a connection, or bytes that are no request."""
        peer.closing = REFUSALS[code].closes
        self._send(peer, self.daemon.refuse(0, code, message))

    def _flush(self, peer: _Peer) -> None:
        try:
            sent = peer.sock.send(peer.out) if peer.out else 0
        except BlockingIOError:
            sent = 0
        except OSError:
            self._drop(peer)
            return
        del peer.out[:sent]
        if len(peer.out) > SEND_QUEUE_BYTES_MAX or (peer.closing and not peer.out):
            self._drop(peer)
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.out else 0)
        self._selector.modify(peer.sock, events)

    def _drop(self, peer: _Peer) -> None:
        if self._peers.pop(peer.sock, None) is None:
            return
        self._behind.pop(peer, None)
        del self._numbered[peer.number]
        self._selector.unregister(peer.sock)
        peer.sock.close()
        self._listen()
        self.daemon.disconnect(peer.number)
        if peer.process is not None:
            self._unwatch(peer.process)

    # Processes are watched through descriptors, since a closed socket does not tell that nobody copies any more.

    def _watch(self, process: Process) -> bool:
        """Whether the end of a process will be noticed. Raises OSError where it would be, but for a shortage."""
        if process in self._pidfds:
            return True
        try:
            fd = os.pidfd_open(process.pid)
        except OSError as error:
            if error.errno in SHORTAGES:
                raise
            return False
        try:
            same = process_of(process.pid) == process
        except OSError:
            os.close(fd)
            raise
        if not same:
            os.close(fd)
            return False
        self._pidfds[process] = fd
        self._selector.register(fd, selectors.EVENT_READ, process)
        return True

    def _unwatch(self, process: Process) -> None:
        """Unless somebody still needs to know of its end."""
        used = any(peer.process == process for peer in self._peers.values()) or process in self.daemon.processes()
        if not used and process in self._pidfds:
            fd = self._pidfds.pop(process)
            self._selector.unregister(fd)
            os.close(fd)

    def _process_ended(self, process: Process, fd: int) -> None:
        if self._pidfds.get(process) != fd:
            # What was ready before it was served may have made it unwatched, and its descriptor another's.
            return
        for peer in [peer for peer in self._peers.values() if peer.process == process]:
            # Its last words, such as what it committed, may still be in the socket.
            self._answer(peer, math.inf)
            for _ in range(LAST_WORDS_BYTES_MAX // RECEIVE_BYTES):
                if peer.sock not in self._peers or not self._receive(peer, math.inf):
                    break
            self._drop(peer)
        self.daemon.gone(process)
        self._unwatch(process)

    # The tiers below RAM

    def _make_lines(self, options: ServeOptions, memory: memoryview) -> list[Line]:
        """A line and threads for each tier. Raises ConfigError."""
        names: Counter[str] = Counter()
        lines: list[Line] = []
        for number, spec in enumerate(options.tiers):
            tier = make_tier(spec, options.node)
            names[tier.name] += 1
            name = tier.name if names[tier.name] == 1 else f"{tier.name}{names[tier.name]}"
            threads = TierThreads(tier, memory, self._done)
            self._threads.append(threads)
            lines.append(Line(number, name, tier, spec, threads.submit))
        return lines

    def _done(self, job: Job, outcome: Outcome) -> None:
        """Called by the threads of a tier."""
        self._outcomes.append((job, outcome))
        self._wake()

    def _await_tiers(self) -> None:
        """Begin to open the tiers, and wait a moment: a setting that can never work is told at the start."""
        until = time.monotonic() + OPEN_SECONDS
        self.daemon.tick(time.monotonic())
        while any(line.is_opening for line in self.daemon.lines) and time.monotonic() < until:
            select.select([self._wake_read], [], [], max(0.0, until - time.monotonic()))
            self._heed()
            self._take_outcomes(is_start=True)

    def _take_outcomes(self, is_start: bool = False) -> None:
        """What the tiers' threads did, and what lookups waited for. Raises ConfigError at the start only."""
        while self._outcomes:
            job, outcome = self._outcomes.popleft()
            if is_start and outcome.config:
                raise ConfigError(outcome.config)
            self.daemon.transferred(job, outcome, time.monotonic())
        self.daemon.tick(time.monotonic())
        while self.daemon.later:
            number, reply = self.daemon.later.popleft()
            peer = self._numbered.get(number)
            if peer is not None and not peer.closing:
                self._send(peer, reply)

    # The arena

    def _open(self, options: ServeOptions, fresh: bool) -> bool:
        """Have an arena and a daemon over it; False where an earlier daemon's arena cannot be taken over."""
        boot = uuid.uuid4().hex
        self._arena, self._trailer, warm = open_arena(options.socket_path, options.ram_bytes, fresh, boot)
        memory = self._arena.memory[: self._arena.slots_bytes]
        first_generation = time.time_ns() // 10**6 << GENERATION_BITS
        store = Store(memory, first_generation, self._trailer, options.eviction, options.salt_quota_bytes)
        self._threads, self._outcomes = [], deque()
        lines = self._make_lines(options, memory)
        self.daemon = Daemon(store, boot, str(self._arena.path), self._arena.size_bytes, os.getpid(), lines)
        if not warm:
            return True
        try:
            living = []
            for known in self._trailer.processes():
                if self._watch(Process(known.pid, known.started)):
                    living.append(known)
                else:
                    self._trailer.forget(known)
            self.daemon.recover(living)
        except Exception:
            logger.exception("what an earlier daemon left cannot be taken over; starting empty")
            del self.daemon
            return False
        logger.info("took over %d objects, %s", store.objects, format_size(store.committed_bytes))
        return True

    def _ask(self) -> Future[Snapshot]:
        """What there is to show, taken by the loop on behalf of another thread."""
        asked: Future[Snapshot] = Future()
        self._asked.append(asked)
        self._wake()
        return asked

    def _status_text(self) -> str:
        """What the status page shows, for a client."""
        now = time.monotonic()
        if self._told is None or not 0.0 <= now - self._told[0] < STATUS_SECONDS:
            self._told = now, self._status.encode(self.daemon.showing.snapshot(now)).decode()
        return self._told[1]

    # Pages of the arena are made to exist by a thread, since zeroing them takes milliseconds.

    def _reserve(self) -> None:
        while self._running:
            with self._reserve_wanted:
                self._reserve_wanted.wait_for(lambda: self._reserved < self._reserve_goal or not self._running)
            if not self._running:
                return
            stop = min(self._reserved + RESERVE_STEP_BYTES, self._arena.slots_bytes)
            try:
                self._arena.reserve(self._reserved, stop)
            except OSError as error:
                kind = "shared memory is used up" if is_no_space(error) else str(error)
                logger.warning("arena stays at %s: %s", format_size(self._reserved), kind)
                self._reserve_failed = True
                self._wake()
                return
            self._reserved = stop
            self._wake()

    def _adopt_reserved(self) -> None:
        extents = self.daemon.store.extents
        if self._reserved > extents.limit_bytes:
            self.daemon.store.grow(self._reserved)
        if self._reserve_failed:
            self.daemon.store.bound_bytes = extents.limit_bytes
        used = extents.limit_bytes - extents.free_bytes
        goal = min(used + RESERVE_AHEAD_BYTES, self._arena.slots_bytes)
        if goal > self._reserve_goal:
            with self._reserve_wanted:
                self._reserve_goal = goal
                self._reserve_wanted.notify()

    def _heed(self) -> None:
        """Whatever the loop was woken for is seen to now."""
        with contextlib.suppress(BlockingIOError):
            self._wake_read.recv(4096)

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            self._wake_write.send(b"\0")

    def _close(self) -> None:
        self._running = False
        with self._reserve_wanted:
            self._reserve_wanted.notify()
        self._reserver.join()
        for peer in list(self._peers.values()):
            self._drop(peer)
        for fd in self._pidfds.values():
            os.close(fd)
        have_ended = [threads.close(CLOSE_SECONDS) for threads in self._threads]
        if self._exporter is not None:
            self._exporter.close(CLOSE_SECONDS)
        self._selector.close()
        self._listener.close()
        self._wake_read.close()
        self._wake_write.close()
        with contextlib.suppress(FileNotFoundError):
            self._socket_path.unlink()
        if not self._keeps_arena:
            self._arena.unlink()
        if all(have_ended):
            self._arena.close()
        # Otherwise a thread may still read into the arena: it stays locked until the storage answers and this process
        # ends.  The next daemon does not wait for that, it has an arena of its own.
        os.close(self._lock_fd)


def serve(options: ServeOptions) -> None:
    """Run a daemon until SIGTERM, which leaves the arena to the next one, or SIGINT, which removes it."""
    if os.sched_getscheduler(0) == os.SCHED_OTHER:
        # A message wakes the daemon on its sender's core more often than not. A batch task waits there until another
        # core is free or the engine pauses; any other would compute its answer in the middle of the engine's step.
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    _allow_descriptors()
    # A signal that comes as soon as the socket is there waits for its handler.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        server = Server(options)
        signal.signal(signal.SIGTERM, lambda *_: server.stop(keep_arena=True))
        signal.signal(signal.SIGINT, lambda *_: server.stop(keep_arena=False))
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    server.run()


def _allow_descriptors() -> None:
    """The usual limit is for programs that use select(), and far below ours."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < DESCRIPTORS_MAX:
        most = DESCRIPTORS_MAX if hard == resource.RLIM_INFINITY else min(hard, DESCRIPTORS_MAX)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def process_of(pid: int) -> Process | None:
    """A living process of this pid namespace, and its start in clock ticks since boot. Raises OSError on a shortage."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError as error:
        if error.errno in SHORTAGES:
            raise
        return None
    return Process(pid, int(stat.rpartition(")")[2].split()[19]))
