"""Sessions of engines, their worker processes, and what ends with them.

A *session* is one greeting of an engine's scheduler. Its write slots and read leases end with
processes, never with a timer. A worker may still copy after its scheduler died. So a session whose
scheduler is gone ends when each of the engine's worker processes is gone, or has reported that it
copies nothing more for the session.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from typing import NamedTuple

from hybridkv.core.coverage import Hit, slot_shapes, whole_hit
from hybridkv.core.errors import HybridKVError
from hybridkv.core.geometry import Geometry, GroupKind
from hybridkv.core.keys import HASH_BYTES
from hybridkv.core.tails import units_per_chunk
from hybridkv.shm.trailer import PROCESSES_MAX, WorkerProcess
from hybridkv.store.index import Namespace, Slot
from hybridkv.store.store import Store
from hybridkv.tiers.object_search import LookupRequest
from hybridkv.wire import messages as wire
from hybridkv.wire.messages import WireModel
from hybridkv.wire.protocol import ConnectionState, ErrorCode

SESSIONS_MAX = 1024
NAMESPACES_MAX = 4096


class RequestError(HybridKVError):
    """A request that is refused with `code`."""

    def __init__(self, code: ErrorCode, message: str = "") -> None:
        super().__init__(message or code.meaning)
        self.code = code


class Process(NamedTuple):
    """A client's process. `started` tells it from a later one with the same id.

    Of a process in another pid namespace the daemon knows neither. Its pid is 0, and `started` is
    the byte of the arena that the worker locks, or else the connection's number.
    """

    pid: int
    started: int


class CopyProgress(NamedTuple):
    """The progress of a worker's process with its copies."""

    connection_id: int  # The connection on which it reports.
    drained: int  # It copies nothing more that was planned before this greeting of its engine.


class IdentityModel(NamedTuple):
    """The model of the last engine that greeted with an identity."""

    geometry: Geometry
    name: str


class CountedLookup(NamedTuple):
    """A lookup as it is counted, with the hit that its engine uses."""

    request: LookupRequest
    masks: Sequence[bytes]  # By group, a byte for each chunk: 1 where RAM or a tier has the object.
    hit: Hit

    def without_hit(self) -> "CountedLookup":
        """Return the lookup as one whose hit is not used."""
        return self._replace(hit=whole_hit(self.request.geometry, 0))


@dataclass(eq=False, slots=True)
class Lease:
    """The objects that stay in RAM for one hit, until the engine releases them."""

    slots: list[Slot]
    asked_at: float  # When the lookup came.
    tokens_per_second: int  # The engine's computing speed, 0 = not known.
    opened_at: float = 0.0
    lookup: CountedLookup | None = None  # What is counted at its end; None for an audit's lease.
    span: object = None  # The span of the lookup, while spans are exported.


@dataclass(eq=False)
class Session:
    """One greeting of an engine, and what it holds."""

    engine_id: str
    geometry: Geometry
    namespace: Namespace
    engine_connection: int | None  # The connection of the scheduler; None once it is closed.
    number: int = 0  # The number of the engine's greeting.
    model: WireModel | None = None
    since: float = 0.0  # When it greeted, by the daemon's clock.
    is_producer: bool = False  # As in wire.Hello.
    leases: dict[int, Lease] = field(default_factory=dict)
    writing: dict[int, Slot] = field(default_factory=dict)
    """Granted slots that are not committed, by offset."""
    writing_bytes: int = 0

    def unwritten(self, offset: int, generation: int) -> Slot | None:
        """Return the session's granted slot of that offset and generation, if it has one."""
        slot = self.writing.get(offset)
        return slot if slot is not None and slot.generation == generation else None


@dataclass
class ClientConnection:
    """One accepted socket, by its number."""

    number: int
    process: Process
    state: ConnectionState = ConnectionState.NEW
    engine_id: str = ""
    is_unmapped: bool = False  # True for a worker that cannot map the arena.
    is_stale: bool = False  # True for an engine that serves nothing until it is reset.
    unread_modules: int = 0  # Of an engine; with any, it shares with no other.
    tenant: int = 0  # All that it stores counts against this tenant; 0 = those that it names.
    session: Session = field(init=False, repr=False)  # The session that an engine opened by it.


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
        """Tells of a byte of the arena whether a worker has locked it, and so may copy."""
        self.models: dict[bytes, IdentityModel] = {}  # By identity.

    def on_connect(
        self, connection_id: int, process: Process | None = None, tenant: int = 0
    ) -> None:
        """A socket was accepted. A client without a process ends with its connection."""
        process = process or Process(0, connection_id)
        self.connections[connection_id] = ClientConnection(connection_id, process, tenant=tenant)

    def engines_of(self, namespace: Namespace) -> int:
        """Return how many engines are connected that have this identity."""
        return sum(
            session.namespace is namespace and session.engine_connection is not None
            for session in self.all
        )

    def recover_sessions(self, workers: Iterable[WorkerProcess]) -> None:
        """Take over what an earlier daemon left. `workers` are those of its workers that live."""
        self.namespaces, writing = self._store.recover_slots()
        for owner, pid, started in workers:
            self._workers.setdefault(owner, {})[Process(pid, started)] = CopyProgress(0, 0)
        for slot in writing:
            self.held.setdefault(slot.owner, []).append(slot)
        for owner in list(self.held):
            self._retire(owner)
        self._counters["objects_recovered"] = self._store.objects

    def on_disconnect(self, connection_id: int) -> None:
        """The socket of a connection was closed. Its process may still copy."""
        connection = self.connections.pop(connection_id)
        for session in self.all:
            if session.engine_connection == connection_id:
                session.engine_connection = None
        process = connection.process
        if not process.pid and not self.is_locked(process.started):
            # A worker that locks the byte from now on sees that the connection is closed, and
            # copies nothing.
            self.on_process_ended(process)
        elif connection.engine_id:
            owner = owner_of(connection.engine_id)
            progress = self._workers.get(owner, {}).get(process, CopyProgress(0, 0))
            is_its_own = progress.connection_id == connection_id
            if is_its_own and progress.drained >= wire.GREETING_NEVER:
                # It does not copy again, however long its process lives.
                self._forget_worker(owner, process)
            self._retire(owner)

    def on_process_ended(self, process: Process) -> None:
        """A process has ended, so it copies nothing more for any engine."""
        for owner in [owner for owner, workers in self._workers.items() if process in workers]:
            self._forget_worker(owner, process)
        for owner in sorted({*self.held, *(owner_of(session.engine_id) for session in self.all)}):
            self._retire(owner)

    def check_locks(self) -> None:
        """Find workers of other pid namespaces that have ended, by their locks."""
        for process in {process for workers in self._workers.values() for process in workers}:
            is_open = any(connection.process == process for connection in self.connections.values())
            if not (process.pid or is_open or self.is_locked(process.started)):
                self.on_process_ended(process)

    def watched_processes(self) -> set[Process]:
        """Return every process whose end the daemon must notice."""
        return {process for workers in self._workers.values() for process in workers if process.pid}

    def greet(self, connection: ClientConnection, hello: wire.Hello, now: float) -> None:
        """Open the session of an engine, or add a worker to one. Raises RequestError."""
        if hello.role == ConnectionState.ENGINE:
            if hello.namespace is None or hello.geometry is None or not hello.engine_id:
                raise RequestError(ErrorCode.INCOMPLETE)
            try:
                geometry = wire.geometry_from_wire(hello.geometry)
            except HybridKVError as error:
                raise RequestError(ErrorCode.GEOMETRY, str(error)) from error
            if len(self.all) >= SESSIONS_MAX:
                raise RequestError(ErrorCode.SESSIONS, f"there are {SESSIONS_MAX} sessions already")
            connection.session = Session(
                engine_id=hello.engine_id,
                geometry=geometry,
                namespace=self.namespace_of(hello.namespace, geometry, hello.model),
                engine_connection=connection.number,
                number=hello.session,
                model=hello.model,
                since=now,
                is_producer=hello.is_producer,
            )
            self.all.append(connection.session)
        elif hello.role == ConnectionState.WORKER:
            owner = owner_of(hello.engine_id)
            if not connection.process.pid and hello.lock:
                connection.process = Process(0, hello.lock)
            # An earlier Drained of the process may be for an engine of the same name that has
            # ended. A worker that only lost its connection sends it again.
            progress = CopyProgress(connection.number, 0)
            process = connection.process
            if process.pid or hello.lock:
                worker = WorkerProcess(owner, process.pid, process.started)
                if not self._store.trailer.add_process(worker):
                    # The next daemon would give away slots into which it still writes.
                    fault = f"there are {PROCESSES_MAX} processes of workers already"
                    raise RequestError(ErrorCode.SESSIONS, fault)
            self._workers.setdefault(owner, {})[process] = progress
        connection.state = ConnectionState(hello.role)
        if connection.state is not ConnectionState.CONTROL:
            connection.engine_id = hello.engine_id

    def on_drained(self, connection: ClientConnection, request: wire.Drained) -> None:
        """A worker copies nothing more that was planned before a greeting of its engine."""
        owner = owner_of(connection.engine_id)
        workers = self._workers.get(owner, {})
        progress = workers.get(connection.process, CopyProgress(0, 0))
        if progress.connection_id == connection.number:
            drained = max(progress.drained, request.session)
            workers[connection.process] = CopyProgress(connection.number, drained)
            self._retire(owner)

    def stored_slots(self) -> Iterable[Slot]:
        """Return every slot that has an object."""
        return chain.from_iterable(
            namespace.slots_by_chunk() for namespace in self.namespaces.values()
        )

    def namespace_of(
        self, identity: bytes, geometry: Geometry, model: WireModel | None
    ) -> Namespace:
        """Return the namespace of an identity for an engine of this geometry and model.

        It is made where there is none. Raises RequestError where it has another geometry.
        """
        gids = tuple(group.gid for group in geometry.groups)
        shapes = tuple(frozenset(slot_shapes(geometry, group)) for group in geometry.groups)
        prefixes = tuple(group.kind is GroupKind.FULL for group in geometry.groups)
        known = self.namespaces.get(identity)
        if known is not None and not known.shapes:
            like = Namespace(identity, gids, shapes, prefixes)
            known = self.namespaces[identity] = self._store.regroup(known, like)
        if known is None:
            if len(self.namespaces) >= NAMESPACES_MAX:
                self._forget_unused_namespaces()
            known = self.namespaces[identity] = Namespace(identity, gids, shapes, prefixes)
        if (known.gids, known.shapes, known.prefixes) != (gids, shapes, prefixes):
            raise RequestError(ErrorCode.IDENTITY)
        name = model.name if model is not None else ""
        if not name and identity in self.models:
            # An engine that names no model does not make an earlier one's forgotten.
            name = self.models[identity].name
        self.models[identity] = IdentityModel(geometry, name)
        return known

    def _forget_unused_namespaces(self) -> None:
        """Forget the namespaces that have neither objects nor sessions."""
        used = {session.namespace.identity for session in self.all}
        for identity, namespace in list(self.namespaces.items()):
            if not namespace.entries and identity not in used:
                self.namespaces.pop(identity).is_current = False
                self.models.pop(identity, None)

    def _forget_worker(self, owner: bytes, process: Process) -> None:
        del self._workers[owner][process]
        worker = WorkerProcess(owner, process.pid, process.started)
        self._store.trailer.remove_process(worker)
        if not self._workers[owner]:
            del self._workers[owner]

    def _retire(self, owner: bytes) -> None:
        """Free what an engine holds of earlier sessions and of the daemon's earlier lives.

        Slots and leases that a worker may still use stay.
        """
        workers = self._workers.get(owner, {}).values()
        drained = min((worker.drained for worker in workers), default=None)
        sessions = [session for session in self.all if owner_of(session.engine_id) == owner]
        # The engine counts its greetings, so every greeting of this life of the daemon has a
        # greater number than those of an earlier life.
        present = max((session.number for session in sessions), default=0)
        if drained is None or drained >= wire.GREETING_NEVER or 0 < present <= drained:
            for slot in self.held.pop(owner, ()):
                self._store.free_slot(slot)
        for session in sessions:
            may_copy = drained is not None and drained <= session.number
            if session.engine_connection is not None or may_copy:
                continue
            for lease in session.leases.values():
                self._store.unpin(lease.slots)
            for slot in session.writing.values():
                self._store.free_slot(slot)
            self.all.remove(session)


def check_names(geometry: Geometry, hashes: bytes, tails: bytes) -> None:
    """Raise RequestError where these are no names of chunks and of tails (wire.Lookup)."""
    if len(hashes) % HASH_BYTES:
        fault = f"{len(hashes)} bytes are no whole number of hashes"
        raise RequestError(ErrorCode.HASHES, fault)
    if tails and (len(tails) % HASH_BYTES or units_per_chunk(geometry) <= 1):
        fault = f"{len(tails)} bytes are no names of tails of this session's chunks"
        raise RequestError(ErrorCode.HASHES, fault)


@lru_cache(maxsize=SESSIONS_MAX)
def owner_of(engine_id: str) -> bytes:
    """Return the HASH_BYTES that name an engine in the arena."""
    return hashlib.sha256(engine_id.encode()).digest()
