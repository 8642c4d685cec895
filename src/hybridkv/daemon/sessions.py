"""Sessions of engines, their worker processes, and what ends with them.

A *session* is one greeting of an engine's scheduler. What it holds (write slots and read leases)
ends with processes, never with a timer. A worker may still copy after its scheduler died, so a
session whose scheduler is gone ends when each of the engine's worker processes is gone, or has said
that it copies nothing more for it.

A session that subscribed is told which objects of its identity RAM has no more, and which of them
a tier below has that knows at once what it has. These are looked at again, LOOKS_MAX a second, so
that it is told when no tier has them. While it sends nothing it is sent only UNHEARD_MAX messages,
and objects of which it is not told are queued. A queue of more than QUEUE_MAX is replaced by one
flag: any object may be gone.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain, islice
from typing import NamedTuple

from hybridkv.core.coverage import slot_shapes
from hybridkv.core.errors import HybridKVError
from hybridkv.core.geometry import Geometry, GroupKind
from hybridkv.shm.trailer import PROCESSES_MAX, WorkerProcess
from hybridkv.store.index import Namespace, Slot
from hybridkv.store.store import Store
from hybridkv.tiers.health import TierState
from hybridkv.tiers.record import RecordName
from hybridkv.wire import messages as wire
from hybridkv.wire.messages import WireModel
from hybridkv.wire.protocol import ConnectionState, ErrorCode

SESSIONS_MAX = 1024
NAMESPACES_MAX = 4096
QUEUE_MAX = 1 << 16
UNHEARD_MAX = 8
BELOW_MAX = 1 << 17  # Objects of which one session was told that a tier has them; no more are.
LOOKS_MAX = 2048  # Of these, how many are looked at again in LOOK_SECONDS.
LOOK_SECONDS = 1.0


class RequestError(HybridKVError):
    """A request that is refused with `code`."""

    def __init__(self, code: ErrorCode, message: str = "") -> None:
        super().__init__(message or code.meaning)
        self.code = code


class Process(NamedTuple):
    """A client's process; `started` tells it from a later one with the same id.

    Of another pid namespace the daemon knows neither: pid is 0, and `started` is the byte of the
    arena that a worker locks, or else the connection's number.
    """

    pid: int
    started: int


class CopyProgress(NamedTuple):
    """The connection of a worker's process, and the session before which it copies nothing more."""

    connection: int
    drained: int


@dataclass(eq=False)
class Session:
    """One greeting of an engine, and what it holds."""

    engine_id: str
    geometry: Geometry
    namespace: Namespace
    engine_connection: int | None
    number: int = 0  # The number of the engine's greeting.
    model: WireModel | None = None
    since: float = 0.0  # When it greeted, by the daemon's clock.
    leases: dict[int, list[Slot]] = field(default_factory=dict)
    asked: dict[int, tuple[float, int]] = field(default_factory=dict)
    """By lease: when it was asked for, and how fast the engine computes (tokens per second)."""
    spans: dict[int, tuple[float, object]] = field(default_factory=dict)
    """By lease, while spans are exported: when it began, and the span of its lookup."""
    writing: dict[int, Slot] = field(default_factory=dict)
    """Granted slots that are not committed, by offset."""
    writing_bytes: int = 0

    def unwritten(self, offset: int, generation: int) -> Slot | None:
        """The session's granted slot of that offset and generation, if it has one."""
        slot = self.writing.get(offset)
        return slot if slot is not None and slot.generation == generation else None


@dataclass
class ClientConnection:
    """One accepted socket, by its number."""

    number: int
    process: Process
    state: ConnectionState = ConnectionState.NEW
    engine_id: str = ""
    is_unmapped: bool = False  # Whether it is a worker that cannot map the arena.
    is_stale: bool = False  # Whether it is an engine that serves nothing until it is reset.
    session: Session = field(init=False, repr=False)  # The session that it opened, as an engine's.


class Sessions:
    """Every connection, session, worker process and identity."""

    def __init__(self, store: Store, counters: Counter[str]) -> None:
        self._store = store
        self._counters = counters
        self.connections: dict[int, ClientConnection] = {}
        self.all: list[Session] = []
        self._workers: dict[bytes, dict[Process, CopyProgress]] = {}
        """By the engine's `owner_of`: every process that may copy for it."""
        self.held: dict[bytes, list[Slot]] = {}
        """Write slots of an earlier life of the daemon, by the engine that may still write them."""
        self.namespaces: dict[bytes, Namespace] = {}
        self.is_locked: Callable[[int], bool] = lambda number: False
        """Whether a worker has locked that byte of the arena, and so may copy."""
        self.geometries: dict[bytes, tuple[Geometry, str]] = {}
        """By identity: the geometry of the last engine that greeted with it, and its model."""

    def connect(self, connection_id: int, process: Process | None = None) -> None:
        """A socket was accepted; a client without a process ends with its connection."""
        process = process or Process(0, connection_id)
        self.connections[connection_id] = ClientConnection(connection_id, process)

    def recover(self, workers: Iterable[WorkerProcess]) -> None:
        """Take over what an earlier daemon left; `workers` are those of its workers that live."""
        self.namespaces, writing = self._store.recover()
        for owner, pid, started in workers:
            self._workers.setdefault(owner, {})[Process(pid, started)] = CopyProgress(0, 0)
        for slot in writing:
            self.held.setdefault(slot.owner, []).append(slot)
        for owner in list(self.held):
            self._retire(owner)
        self._counters["objects_recovered"] = self._store.objects

    def disconnect(self, connection_id: int) -> None:
        """A socket is closed; its process may still copy. The socket was closed before the call."""
        connection = self.connections.pop(connection_id)
        for session in self.all:
            if session.engine_connection == connection_id:
                session.engine_connection = None
        process = connection.process
        if not process.pid and not self.is_locked(process.started):
            # Whoever locks it from now on sees that the connection is closed, and copies nothing.
            self.process_ended(process)
        elif connection.engine_id:
            owner = owner_of(connection.engine_id)
            known = self._workers.get(owner, {}).get(process, CopyProgress(0, 0))
            if known.connection == connection_id and known.drained >= wire.NEVER:
                # It does not copy again, however long its process lives.
                self._forget_worker(owner, process)
            self._retire(owner)

    def process_ended(self, process: Process) -> None:
        """A process has ended."""
        for owner in [owner for owner, workers in self._workers.items() if process in workers]:
            self._forget_worker(owner, process)
        for owner in sorted({*self.held, *(owner_of(session.engine_id) for session in self.all)}):
            self._retire(owner)

    def look_at_locks(self) -> None:
        """Find the end of workers that only their locks tell of."""
        for process in {process for workers in self._workers.values() for process in workers}:
            is_open = any(one.process == process for one in self.connections.values())
            if not (process.pid or is_open or self.is_locked(process.started)):
                self.process_ended(process)

    def processes(self) -> set[Process]:
        """Every process whose end the daemon must be told."""
        return {process for workers in self._workers.values() for process in workers if process.pid}

    def greet(self, connection: ClientConnection, hello: wire.Hello, now: float) -> None:
        """Open the session of an engine, or add a worker. Raises RequestError."""
        if hello.role == ConnectionState.ENGINE:
            if hello.namespace is None or hello.geometry is None or not hello.engine_id:
                raise RequestError(ErrorCode.INCOMPLETE)
            try:
                geometry = wire.geometry_from_wire(hello.geometry)
            except HybridKVError as error:
                raise RequestError(ErrorCode.GEOMETRY, str(error)) from error
            if len(self.all) >= SESSIONS_MAX:
                raise RequestError(ErrorCode.SESSIONS, f"there are {SESSIONS_MAX} sessions already")
            namespace = self.named(hello.namespace, geometry, hello.model)
            told = connection.number, hello.session, hello.model
            connection.session = Session(hello.engine_id, geometry, namespace, *told, now)
            self.all.append(connection.session)
        elif hello.role == ConnectionState.WORKER:
            owner = owner_of(hello.engine_id)
            if not connection.process.pid and hello.lock:
                connection.process = Process(0, hello.lock)
            # What the process said before may be of an engine of the same name that has ended. A
            # worker that only lost its connection says it again.
            progress = CopyProgress(connection.number, 0)
            if connection.process.pid or hello.lock:
                worker = WorkerProcess(owner, *connection.process)
                if not self._store.trailer.remember(worker):
                    # The next daemon would give away slots into which it still writes.
                    fault = f"there are {PROCESSES_MAX} processes of workers already"
                    raise RequestError(ErrorCode.SESSIONS, fault)
            self._workers.setdefault(owner, {})[connection.process] = progress
        connection.state = ConnectionState(hello.role)
        if connection.state is not ConnectionState.CONTROL:
            connection.engine_id = hello.engine_id

    def drained(self, connection: ClientConnection, request: wire.Drained) -> None:
        """A worker copies nothing more that was planned before a greeting of its engine."""
        owner = owner_of(connection.engine_id)
        workers = self._workers.get(owner, {})
        known = workers.get(connection.process, CopyProgress(0, 0))
        if known.connection == connection.number:
            drained = max(known.drained, request.session)
            workers[connection.process] = CopyProgress(connection.number, drained)
            self._retire(owner)

    def slots(self) -> Iterable[Slot]:
        """Every slot that has an object."""
        return chain.from_iterable(one.objects() for one in self.namespaces.values())

    def named(self, identity: bytes, geometry: Geometry, model: WireModel | None) -> Namespace:
        """The namespace of an identity, as an engine told of it. Raises RequestError."""
        gids = tuple(group.gid for group in geometry.groups)
        shapes = tuple(frozenset(slot_shapes(geometry, group)) for group in geometry.groups)
        prefixes = tuple(group.kind is GroupKind.FULL for group in geometry.groups)
        known = self.namespaces.get(identity)
        if known is not None and not known.shapes:
            like = Namespace(identity, gids, shapes, prefixes)
            known = self.namespaces[identity] = self._store.regroup(known, like)
        if known is None:
            if len(self.namespaces) >= NAMESPACES_MAX:
                # Those that have neither objects nor sessions are forgotten.
                used = {session.namespace.identity for session in self.all}
                for other, namespace in list(self.namespaces.items()):
                    if not namespace.entries and other not in used:
                        self.namespaces.pop(other).is_current = False
                        self.geometries.pop(other, None)
            known = self.namespaces[identity] = Namespace(identity, gids, shapes, prefixes)
        if (known.gids, known.shapes, known.prefixes) != (gids, shapes, prefixes):
            raise RequestError(ErrorCode.IDENTITY)
        # An engine that names no model does not make an earlier one's forgotten.
        _, name = self.geometries.get(identity, (None, ""))
        self.geometries[identity] = geometry, (model.name if model is not None else "") or name
        return known

    def _forget_worker(self, owner: bytes, process: Process) -> None:
        del self._workers[owner][process]
        self._store.trailer.forget(WorkerProcess(owner, *process))
        if not self._workers[owner]:
            del self._workers[owner]

    def _retire(self, owner: bytes) -> None:
        """End what an engine held in earlier sessions and lives, if no worker can touch it."""
        workers = self._workers.get(owner, {}).values()
        drained = min((worker.drained for worker in workers), default=None)
        sessions = [session for session in self.all if owner_of(session.engine_id) == owner]
        # Greetings are counted by the engine, so every one of this life is later than those of an
        # earlier one.
        present = max((session.number for session in sessions), default=0)
        if drained is None or drained >= wire.NEVER or 0 < present <= drained:
            for slot in self.held.pop(owner, ()):
                self._store.free(slot)
        for session in sessions:
            may_copy = drained is not None and drained <= session.number
            if session.engine_connection is not None or may_copy:
                continue
            for slots in session.leases.values():
                self._store.unpin(slots)
            for slot in session.writing.values():
                self._store.free(slot)
            self.all.remove(session)
            self._counters["sessions_ended"] += 1


@dataclass(eq=False)
class Subscriber:
    """One session that subscribed."""

    namespace: Namespace
    queue: dict[tuple[bytes, int], None] = field(default_factory=dict)
    """(chunk hash, group index) of objects that went and are not told, the oldest first."""
    everything: bool = False  # Whether more objects went than the queue takes.
    unheard: int = 0
    below: dict[tuple[bytes, int], bytes] = field(default_factory=dict)
    """Objects of which it was told that a tier has them, those first that were looked at first, and
    their keys in tiers."""


class Subscriptions:
    """Every session that subscribed, by its connection."""

    def __init__(self, tiers: Sequence[TierState]) -> None:
        self._subscribers: dict[int, Subscriber] = {}
        self._tiers = tiers
        self._look_at = 0.0
        self.overflows = 0
        self.untold = 0  # Objects that a tier has, and of which a session was not told.

    def __len__(self) -> int:
        """Sessions that subscribed."""
        return len(self._subscribers)

    def subscribe(self, connection: ClientConnection, _: wire.Subscribe | None = None) -> None:
        """Tell a session of objects that go from now on."""
        self._subscribers[connection.number] = Subscriber(connection.session.namespace)

    def identified(self, connection: ClientConnection) -> None:
        """The session has another identity, of whose objects it was told nothing."""
        if connection.number in self._subscribers:
            self.subscribe(connection)

    def forget(self, connection_id: int) -> None:
        """The connection has ended."""
        self._subscribers.pop(connection_id, None)

    def heard(self, connection_id: int) -> None:
        """The session sent a message, so it reads."""
        if self._subscribers and connection_id in self._subscribers:
            self._subscribers[connection_id].unheard = 0

    def object_changed(self, slot: Slot, is_there: bool) -> None:
        """The store has the slot's object from now on, or no longer."""
        entry = slot.entry
        if not self._subscribers or entry is None:
            return
        for subscriber in self._subscribers.values():
            if subscriber.namespace is not entry.namespace:
                continue
            if is_there:
                subscriber.queue.pop((entry.chunk_hash, slot.group_index), None)
                subscriber.below.pop((entry.chunk_hash, slot.group_index), None)
            else:
                self._queue(subscriber, entry.chunk_hash, slot.group_index)

    def missing(self, connection_id: int | None, chunk_hash: bytes, group_index: int) -> None:
        """A slot that a session committed did not become an object, which it does not know."""
        subscriber = self._subscribers.get(connection_id) if connection_id is not None else None
        if subscriber is not None and group_index < len(subscriber.namespace.gids):
            entry = subscriber.namespace.entries.get(chunk_hash)
            if entry is None or entry.slots[group_index] is None:
                self._queue(subscriber, chunk_hash, group_index)

    def due(self, now: float) -> Iterator[tuple[int, wire.Removed]]:
        """(connection, message) of everything that may be told now."""
        if self._tiers and now >= self._look_at:
            self._look_at = now + LOOK_SECONDS
            for subscriber in self._subscribers.values():
                self._look_below(subscriber)
        for number, subscriber in self._subscribers.items():
            while (subscriber.queue or subscriber.everything) and subscriber.unheard < UNHEARD_MAX:
                told = list(islice(subscriber.queue, wire.REMOVED_MAX))
                for one in told:
                    del subscriber.queue[one]
                everything, subscriber.everything = subscriber.everything, False
                subscriber.unheard += 1
                hashes = b"".join(chunk_hash for chunk_hash, _ in told)
                groups = bytes(group for _, group in told)
                below = bytes(self._tell_below(subscriber, one) for one in told if self._tiers)
                yield number, wire.Removed(0, hashes, groups, everything, below)

    def _tell_below(self, subscriber: Subscriber, one: tuple[bytes, int]) -> bool:
        """Whether a tier has an object; if so the session is told when that ends."""
        subscriber.below.pop(one, None)
        namespace, (chunk_hash, group_index) = subscriber.namespace, one
        key = RecordName(namespace.identity, namespace.gids[group_index], chunk_hash).key
        if not self._is_below(key):
            return False
        if len(subscriber.below) >= BELOW_MAX:
            self.untold += 1
            return False
        subscriber.below[one] = key
        return True

    def _is_below(self, key: bytes) -> bool:
        return any(tier.peek(key) for tier in self._tiers)

    def _look_below(self, subscriber: Subscriber) -> None:
        """Queue the next few objects of which tiers had been told and that none has any more."""
        for one, key in list(islice(subscriber.below.items(), LOOKS_MAX)):
            del subscriber.below[one]
            if self._is_below(key):
                subscriber.below[one] = key
            else:
                self._queue(subscriber, *one)

    def _queue(self, subscriber: Subscriber, chunk_hash: bytes, group_index: int) -> None:
        if len(subscriber.queue) >= QUEUE_MAX:
            subscriber.queue.clear()
            subscriber.below.clear()
            subscriber.everything = True
            self.overflows += 1
        if not subscriber.everything:
            subscriber.queue[chunk_hash, group_index] = None


@lru_cache(maxsize=SESSIONS_MAX)
def owner_of(engine_id: str) -> bytes:
    """The HASH_BYTES that name an engine in the arena."""
    return hashlib.sha256(engine_id.encode()).digest()
