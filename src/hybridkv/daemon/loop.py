"""The daemon's one loop over sockets, processes and threads. It never blocks."""

import contextlib
import errno
import importlib
import logging
import math
import os
import platform
import resource
import select
import selectors
import signal
import socket
import threading
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

from hybridkv.core.durations import format_duration
from hybridkv.core.errors import ConfigError
from hybridkv.core.sizes import format_size
from hybridkv.core.tier_urls import TierSpec, WritePolicy
from hybridkv.daemon import clients
from hybridkv.daemon.book_file import GROWTH_BYTES, BookFile
from hybridkv.daemon.filesystem import (
    AlreadyServedError,
    ServedSocket,
    open_arena,
    remove_unused_arenas,
    state_directory,
)
from hybridkv.daemon.handlers import Daemon
from hybridkv.daemon.orphan import leave_waiter
from hybridkv.daemon.quota_file import QuotaFile
from hybridkv.daemon.sessions import Process
from hybridkv.daemon.token_book import DescribedChunk
from hybridkv.observe.history import Snapshot
from hybridkv.observe.web import LOOPBACK_ADDRESS, serve_web
from hybridkv.shm.arena import SHM_DIR, Arena, book_beside
from hybridkv.store.store import Store
from hybridkv.tiers.disk.writers import book_of
from hybridkv.tiers.encryption import read_key
from hybridkv.tiers.factory import make_tier
from hybridkv.tiers.health import TierState
from hybridkv.tiers.jobs import JobKind, JobOutcome, TierJob, TierThreads
from hybridkv.wire.messages import PROTOCOL_VERSION, Welcome
from hybridkv.wire.status import DaemonSetup

logger = logging.getLogger("hybridkv.daemon")

IDLE_SECONDS = 0.0001  # While no message comes, the ceiling is computed for so long at a time.
GENERATION_BITS = 22
"""The bits above are a life's start in milliseconds, so that later lives give later generations."""
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
DESCRIPTORS_MAX = 2 * clients.CONNECTIONS_MAX + 64
"""Descriptors that the daemon may need: two for each connection (socket, process), and others."""
OPEN_SECONDS = 2.0
"""The time that tiers have, before the first client is heard, to find that a setting is wrong."""
CLOSE_SECONDS = 2.0  # The time that a tier's threads have at the end to finish their writes.
FILES_SECONDS = 1.0  # How often the daemon looks whether its socket is still there.
RESERVE_STEP_BYTES = 32 << 20
RESERVE_AHEAD_BYTES = 256 << 20  # Pages exist so far ahead of the used part of the arena.
RESERVE_RETRY_SECONDS = 1.0  # How often more memory is asked for while there is none.


class ServeOptions(NamedTuple):
    """The settings of `hybridkv serve`, all checked."""

    socket_path: Path
    ram_bytes: int | None  # None for as much as an earlier daemon left, or else the default.
    metrics_port: int | None  # None for the usual one, or a free one; -1 for no pages.
    fresh: bool = False  # True to start empty, even where an earlier daemon left an arena.
    salt_quota_bytes: int | None = None
    """The most that the objects of one `cache_salt` may take. None for no bound but the arena."""
    user_quota_bytes: int | None = None
    """The most that the objects of one user may take. Not both: an object counts once."""
    tiers: tuple[TierSpec, ...] = ()  # The tiers below RAM, in the order in which they are asked.
    node: str = ""  # This daemon's name, in all its lives, among those with the same tiers.
    shm_dir: Path = SHM_DIR  # The directory of the arena.
    arena_ttl_seconds: float = math.inf
    """The time for which the arena is kept for the next daemon after the end of this one."""
    metrics_host: str = LOOPBACK_ADDRESS
    metrics_token_file: str | None = None  # None where no token is asked for.
    group: int | None = None  # The members of this group of users are served too.
    traces_url: str = ""  # The URL of an OpenTelemetry collector; empty to trace nothing.


def setup_of(options: ServeOptions, ram_bytes: int) -> DaemonSetup:
    """Return a daemon's settings as people are shown them. `ram_bytes` is the size of its arena."""
    quotas = {"salt-quota": options.salt_quota_bytes, "user-quota": options.user_quota_bytes}
    settings = {
        "ram": format_size(ram_bytes),
        **{name: "none" if quota is None else format_size(quota) for name, quota in quotas.items()},
        "node": options.node,
        "shm-dir": str(options.shm_dir),
        "group": "none" if options.group is None else str(options.group),
        "arena-ttl": format_duration(options.arena_ttl_seconds),
        **{f"tier {number}": tier.settings for number, tier in enumerate(options.tiers, 1)},
    }
    return DaemonSetup(platform.node(), str(options.socket_path), settings)


class FinishedJob(NamedTuple):
    """A job that a thread of a tier has ended, for the loop to take."""

    job: TierJob
    outcome: JobOutcome


class Waker:
    """Wakes the loop from other threads and from signal handlers."""

    def __init__(self) -> None:
        self.reader, self._writer = socket.socketpair()  # Readable from `wake` until `clear`.
        for end in (self.reader, self._writer):
            end.setblocking(False)

    def wake(self) -> None:
        """End the loop's sleep, now or the next time that it sleeps."""
        with contextlib.suppress(OSError):
            # A full buffer already wakes the loop, and a closed one has no loop to wake.
            self._writer.send(b"\0")

    def clear(self) -> None:
        """Forget every `wake` until now. The caller looks at every queue next."""
        with contextlib.suppress(BlockingIOError):
            # Another call has read the wake-up bytes already.
            self.reader.recv(4096)

    def close(self) -> None:
        """Close the pair of sockets. Later calls of `wake` do nothing."""
        self.reader.close()
        self._writer.close()


class ArenaReserver:
    """Makes pages of the arena exist in a thread, since zeroing them takes milliseconds."""

    def __init__(
        self, arena: Arena, store: Store, wake: Callable[[], None], counters: Counter[str]
    ) -> None:
        self._arena = arena
        self._store = store
        self._wake = wake
        self._counters = counters
        self.reserved_bytes = store.extents.limit_bytes  # Pages below this exist.
        self._goal = min(self.reserved_bytes + RESERVE_AHEAD_BYTES, arena.slots_bytes)
        self._has_failed = False
        """True while the last attempt found no memory. The store does not grow meanwhile."""
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="reserve", daemon=True)
        self._thread.start()

    def adopt(self) -> None:
        """Give the store the pages that exist by now, and have the thread make the next ones."""
        extents = self._store.extents
        if self.reserved_bytes > extents.limit_bytes:
            self._store.grow_arena(self.reserved_bytes)
        is_full = self._has_failed
        self._store.bound_bytes = extents.limit_bytes if is_full else self._arena.slots_bytes
        used = extents.limit_bytes - extents.free_bytes
        goal = min(used + RESERVE_AHEAD_BYTES, self._arena.slots_bytes)
        if goal > self._goal:
            with self._changed:
                self._goal = goal
                self._changed.notify()

    def close(self) -> None:
        """End the thread, after the step that it is reserving."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                # While there is no memory, a goal does not matter.
                seconds = RESERVE_RETRY_SECONDS if self._has_failed else None
                self._changed.wait_for(self._is_wanted, seconds)
            if self._closed:
                return
            stop = min(self.reserved_bytes + RESERVE_STEP_BYTES, self._arena.slots_bytes)
            try:
                self._arena.allocate_pages(self.reserved_bytes, stop)
            except OSError as error:
                is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
                kind = "shared memory is used up" if is_full else error.strerror
                if not self._has_failed:
                    logger.warning("arena stays at %s: %s", format_size(self.reserved_bytes), kind)
                self._has_failed = True
                self._counters["reserves_failed"] += 1
            else:
                self.reserved_bytes, self._has_failed = stop, False
            self._wake()

    def _is_wanted(self) -> bool:
        return self._closed or (not self._has_failed and self.reserved_bytes < self._goal)


class DaemonServer:
    """The owner of the daemon's sockets, threads and arena. It runs until `stop`."""

    def __init__(self, options: ServeOptions) -> None:
        """Open the arena and the tiers, and listen. Raises ConfigError, AlreadyServedError."""
        with contextlib.ExitStack() as on_failure:
            self._start(options, on_failure)
            on_failure.pop_all()
        size, url = format_size(self.arena.slots_bytes), self.daemon.metrics_url
        logger.info("serving %s, ram %s, metrics %s", options.socket_path, size, url)

    def _start(self, options: ServeOptions, on_failure: contextlib.ExitStack) -> None:
        """Open everything. `on_failure` removes the files again where a later step fails."""
        self._socket = ServedSocket(options.socket_path, options.group)
        on_failure.callback(self._socket.close)
        self._files_due_at = 0.0  # When the files are looked at next.
        self._options = options
        self.selector = selectors.DefaultSelector()
        self._waker = Waker()
        self.selector.register(self._waker.reader, selectors.EVENT_READ, self._waker.clear)
        self.processes = clients.ProcessWatcher(self.selector)
        self._finished_jobs: deque[FinishedJob] = deque()
        if not self._open_daemon(options.fresh, on_failure):
            # A broken arena must not keep this daemon from serving.
            self.trailer.release_views()
            self.arena.unlink()
            self.arena.close()
            self._open_daemon(fresh=True, on_failure=on_failure)
            self.daemon.counters["recoveries_failed"] += 1
        self._keep_arena(time.monotonic())
        self.daemon.setup = setup_of(options, self.arena.slots_bytes)
        listener = self._socket.listen()
        self.clients = clients.ClientSockets(
            daemon=self.daemon,
            processes=self.processes,
            listener=listener,
            group=options.group,
            has_user_quotas=options.user_quota_bytes is not None,
        )
        self._snapshots: deque[Future[Snapshot]] = deque()  # Those that other threads wait for.
        self._work: deque[Callable[[], None]] = deque()  # What `run_in_loop` was given.
        self._running = True
        self._keeps_arena = True
        self._book_file = self._open_book()
        self._quota_file = self._open_quotas()
        self._await_tiers()
        self.reserver = ArenaReserver(
            self.arena, self.daemon.store, self._waker.wake, self.daemon.counters
        )
        if options.metrics_port != -1:
            self.daemon.metrics_url = serve_web(
                self._request_snapshot,
                options.metrics_port,
                options.metrics_host,
                options.metrics_token_file,
            )
        self._exporter = self._start_exporter() if options.traces_url else None

    @property
    def left_arena(self) -> Path | None:
        """The arena, if it is kept for the next daemon for a limited time. None otherwise."""
        is_left = self._keeps_arena and not math.isinf(self._options.arena_ttl_seconds)
        return self.arena.path if is_left else None

    def run(self) -> None:
        """Serve until `stop`, then remove the socket and end the threads."""
        try:
            while self._running:
                self.turn()
        finally:
            self._close()

    def turn(self) -> None:
        """Wait for events, handle each of them once, and do everything else that is due."""
        waiting = list(self.clients.waiting)
        ready = self.selector.select(self.sleep_seconds())
        for key, events in ready:
            match key.data:
                case clients.ClientSocket():
                    self.clients.handle_events(key.data, events)
                case Process():
                    self.clients.on_process_ended(key.data, key.fd)
                case accept_or_clear:
                    accept_or_clear()
        for client in waiting:
            self.clients.handle_messages(client, clients.TURN_SECONDS)
        self.reserver.adopt()
        self._take_finished_jobs()
        if time.monotonic() >= self._files_due_at:
            self._check_files()
        while self._work:
            self._work.popleft()()
        while self._snapshots:
            self._snapshots.popleft().set_result(self.daemon.view.snapshot(time.monotonic()))
        if not ready and not waiting:
            until = time.monotonic() + IDLE_SECONDS
            while self.daemon.ceiling.has_work and time.monotonic() < until:
                self.daemon.ceiling.work()

    def end_run(self, keep_arena: bool) -> None:
        """End `run`, and keep the arena for the next daemon or remove it.

        It may be called from signal handlers and other threads.
        """
        self._keeps_arena = keep_arena
        self._running = False
        self._waker.wake()

    def run_in_loop(self, work: Callable[[], None]) -> None:
        """Call `work` in the loop's next turn. It may be called from signal handlers."""
        self._work.append(work)
        self._waker.wake()

    def sleep_seconds(self) -> float | None:
        """Return the time for which the loop may sleep if nothing happens. None for any time."""
        if self.clients.waiting or self._finished_jobs or self.daemon.ceiling.has_work:
            return 0.0
        now = time.monotonic()
        due = min(self.clients.listens_at(now), self.daemon.wakes_at(), self._files_due_at)
        return None if due == math.inf else max(0.0, due - now)

    def _check_files(self) -> None:
        """Make the socket again where it was removed, and remove arenas that nobody uses."""
        self._keep_arena(time.monotonic())
        self.daemon.sessions.check_locks()
        try:
            listener = self._socket.restore_names()
            if listener is not None:
                self.clients.listen_at(listener)
            remove_unused_arenas(self._options.socket_path, self._options.shm_dir)
        except OSError:
            return  # No descriptor is left at this moment.
        except AlreadyServedError as error:
            # New engines connect to the other daemon, and no later one can take this arena over.
            logger.warning("%s; this one ends", error)
            self.end_run(keep_arena=False)

    def _keep_arena(self, now: float) -> None:
        """Move the end of the arena's time ahead, because the daemon lives."""
        self._files_due_at = now + FILES_SECONDS
        seconds = self._options.arena_ttl_seconds
        self.trailer.kept_until = 0.0 if math.isinf(seconds) else now + seconds

    def _await_tiers(self) -> None:
        """Wait up to OPEN_SECONDS for the tiers, so that the start reports settings that are wrong.

        Raises ConfigError.
        """
        until = time.monotonic() + OPEN_SECONDS
        self.daemon.tick(time.monotonic())
        # A tier that is being opened has no thread for opening it.
        while not all(tier.has_thread(JobKind.OPEN) for tier in self.daemon.tiers):
            left = until - time.monotonic()
            if left <= 0:
                break
            select.select([self._waker.reader], [], [], left)
            self._waker.clear()
            self._take_finished_jobs(is_start=True)

    def _take_finished_jobs(self, is_start: bool = False) -> None:
        """Take the outcomes of the tiers' threads, and send the messages that follow from them.

        Raises ConfigError, at the start only.
        """
        while self._finished_jobs:
            job, outcome = self._finished_jobs.popleft()
            if is_start and outcome.config:
                raise outcome.config
            self.daemon.on_job_done(job, outcome, time.monotonic())
        self.daemon.tick(time.monotonic())
        outgoing = self.daemon.outgoing
        while outgoing:
            connection_id, message = outgoing.popleft()
            client = self.clients.connected.get(connection_id)
            if client is not None and not client.is_closing:
                self.clients.queue_reply(client, message)

    def _open_daemon(self, fresh: bool, on_failure: contextlib.ExitStack) -> bool:
        """Open an arena with a daemon over it.

        Returns False where an earlier daemon's arena was opened and cannot be taken over.
        """
        options, boot = self._options, uuid.uuid4().hex
        opened = open_arena(
            socket_path=options.socket_path,
            ram_bytes=options.ram_bytes,
            fresh=fresh,
            boot=boot,
            directory=options.shm_dir,
            group=options.group,
        )
        self.arena, self.trailer = opened.arena, opened.trailer
        if not opened.is_earlier:
            on_failure.callback(self.arena.unlink)
        memory = self.arena.memory[: self.arena.slots_bytes]
        store = Store(
            memory=memory,
            first_generation=time.time_ns() // 10**6 << GENERATION_BITS,
            trailer=self.trailer,
            tenant_bytes=options.salt_quota_bytes or options.user_quota_bytes,
        )
        welcome = Welcome(
            id=0,
            version=PROTOCOL_VERSION,
            boot=boot,
            arena_path=str(self.arena.path),
            arena_bytes=self.arena.size_bytes,
            slots_bytes=self.arena.slots_bytes,
            pid=os.getpid(),
        )
        self.daemon = Daemon(store, welcome, self._make_tiers(memory))
        self.daemon.sessions.is_locked = self.arena.is_locked
        self.daemon.inventory.has_user_tenants = options.user_quota_bytes is not None
        self.daemon.inventory.started_at = time.monotonic()
        if not opened.is_earlier:
            return True
        try:
            living = []
            for worker in self.trailer.processes():
                process = Process(worker.pid, worker.started)
                is_watched = self.processes.watch(process) if worker.pid else False
                if is_watched or (not worker.pid and self.arena.is_locked(worker.started)):
                    living.append(worker)
                else:
                    self.trailer.remove_process(worker)
            self.daemon.sessions.recover_sessions(living)
        except Exception:
            # The daemon starts with an empty arena where the earlier daemon's cannot be taken over.
            logger.exception("what an earlier daemon left cannot be taken over; starting empty")
            del self.daemon
            return False
        logger.info("took over %d objects, %s", store.objects, format_size(store.committed_bytes))
        return True

    def _make_tiers(self, memory: memoryview) -> list[TierState]:
        """Make the tiers below RAM, each with threads that copy from and to `memory`.

        Of several tiers of one kind, the second is named "disk2", and so on.
        """
        tiers: list[TierState] = []
        self._threads: list[TierThreads] = []
        names: Counter[str] = Counter()
        for number, spec in enumerate(self._options.tiers):
            tier = make_tier(spec, self._options.node)
            names[tier.name] += 1
            name = tier.name if names[tier.name] == 1 else f"{tier.name}{names[tier.name]}"
            self._threads.append(TierThreads(tier, memory, self._on_job_done))
            tiers.append(TierState(number, name, tier, spec, self._threads[-1].start_or_queue))
        return tiers

    def _open_book(self) -> BookFile:
        """Open the token book's file: in the first directory that this daemon writes to, if any."""
        path, key = book_beside(self.arena.path), None
        if (spec := self._own_directory()) is not None:
            path = book_of(_root_of(spec), self._options.node)
            key = read_key(spec.key_path, f"tier {spec.shown}") if spec.key_path else None
        subscriptions = self.daemon.subscriptions
        subscriptions.on_described = self._keep_described
        subscriptions.on_forgotten = self._rewrite_book
        file = BookFile(
            path, key, lambda chunks: self.run_in_loop(lambda: subscriptions.on_book_read(chunks))
        )
        self.daemon.forgetting.book_is_settled = lambda: file.thread.is_settled
        self.daemon.forgetting.book_error = lambda: file.thread.error
        return file

    def _open_quotas(self) -> QuotaFile:
        """Open the file of quotas: beside the token book, or else in the user's directory."""
        quotas, options = self.daemon.quotas, self._options
        quotas.of_users = options.user_quota_bytes is not None
        quotas.served_default = options.salt_quota_bytes or options.user_quota_bytes
        spec, name = self._own_directory(), f"{options.node}.json"
        path = state_directory() / "quotas" / name
        if spec is not None:
            path = _root_of(spec) / "quotas" / name
        quotas.file = QuotaFile(
            path, lambda stored: self.run_in_loop(lambda: quotas.on_file_read(stored))
        )
        return quotas.file

    def _own_directory(self) -> TierSpec | None:
        """Return the first directory tier that this daemon writes to, if any."""
        return next(
            (
                spec
                for spec in self._options.tiers
                if spec.kind == "disk" and spec.write is not WritePolicy.OFF
            ),
            None,
        )

    def _keep_described(self, chunks: list[DescribedChunk]) -> None:
        """Write descriptions to the file, or all of them where much of the file is of no use."""
        book, file = self.daemon.subscriptions.book, self._book_file
        file.append_chunks(chunks)
        if file.size_bytes > 2 * book.held_bytes + GROWTH_BYTES:
            self._rewrite_book()

    def _rewrite_book(self) -> None:
        book = self.daemon.subscriptions.book
        self._book_file.rewrite_file(list(book.described()), book.held_bytes)

    def _start_exporter(self) -> Any:
        """Export spans from now on. Raises ConfigError where the library for it is missing."""
        try:
            traces = importlib.import_module("hybridkv.observe.traces")
        except ImportError as error:
            raise ConfigError(f"traces: {error}", "pip install 'hybridkv[otel]' works") from error
        exporter = traces.SpanExporter(self._options.traces_url, self._options.node)
        self.daemon.spans = exporter
        return exporter

    def _on_job_done(self, job: TierJob, outcome: JobOutcome) -> None:
        """A thread of a tier has ended a job, and calls this itself."""
        self._finished_jobs.append(FinishedJob(job, outcome))
        self._waker.wake()

    def _request_snapshot(self) -> Future[Snapshot]:
        """Have the loop make a snapshot for the calling thread."""
        snapshot: Future[Snapshot] = Future()
        self._snapshots.append(snapshot)
        self._waker.wake()
        return snapshot

    def _close(self) -> None:
        self._running = False
        self.reserver.close()
        for client in list(self.clients.connected.values()):
            self.clients.disconnect(client)
        for fd in self.processes.pidfds.values():
            os.close(fd)
        ended = [threads.close(CLOSE_SECONDS) for threads in self._threads]
        self._book_file.thread.close(CLOSE_SECONDS)
        self._quota_file.thread.close(CLOSE_SECONDS)
        if self._exporter is not None:
            self._exporter.close(CLOSE_SECONDS)
        self.selector.close()
        self.clients.listener.close()
        self._waker.close()
        if self._keeps_arena:
            self._keep_arena(time.monotonic())
        else:
            self.arena.unlink()
        if all(ended):
            self.arena.close()
        # Otherwise a thread may still read into the arena, which stays locked until the storage
        # answers and this process ends. The next daemon makes an arena of its own.
        self._socket.close()


def _root_of(spec: TierSpec) -> Path:
    return Path(spec.location.removeprefix("disk://"))


def serve(
    options: ServeOptions, on_serving: Callable[[], None], on_hangup: Callable[[], bool]
) -> None:
    """Run a daemon until SIGTERM, which keeps the arena for the next one, or SIGINT.

    `on_serving` is called once, when clients can connect. `on_hangup` is called after each SIGHUP;
    where it returns False, the daemon ends as after SIGTERM.
    """
    if os.sched_getscheduler(0) == os.SCHED_OTHER:
        # A message wakes the daemon on its sender's core more often than not. A batch task waits
        # there until another core is free or the engine pauses; any other would compute its answer
        # in the middle of the engine's step.
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    # The usual limit is for programs that use select(), and far below ours.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < DESCRIPTORS_MAX:
        most = DESCRIPTORS_MAX if hard == resource.RLIM_INFINITY else min(hard, DESCRIPTORS_MAX)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))

    def hang_up() -> None:
        if not on_hangup():
            server.end_run(keep_arena=True)

    # A signal that comes as soon as the socket is there waits for its handler.
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        server = DaemonServer(options)
        signal.signal(signal.SIGTERM, lambda *_: server.end_run(keep_arena=True))
        signal.signal(signal.SIGINT, lambda *_: server.end_run(keep_arena=False))
        signal.signal(signal.SIGHUP, lambda *_: server.run_in_loop(hang_up))
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    on_serving()
    server.run()
    if (arena := server.left_arena) is not None:
        leave_waiter(arena)
