"""What the daemon decides: requests in, replies out. No socket, clock, thread or file.

A *session* is one engine: its scheduler's connection and its workers' connections.  What it holds (write slots and
read leases) ends with its processes, never with a timer: only when all of its connections are gone, because a
worker may still be copying after its scheduler died (DESIGN section 7).
"""

from collections import Counter
from dataclasses import dataclass, field

from hybridkv.core.coverage import largest_hit, needed_chunks, slot_shapes
from hybridkv.core.errors import HybridKVError
from hybridkv.core.geometry import Geometry
from hybridkv.core.keys import HASH_BYTES
from hybridkv.core.packed import pack_u64, unpack_u64
from hybridkv.server.history import History
from hybridkv.shm.slots import SlotState, slot_bytes
from hybridkv.storage.store import Namespace, Slot, Store
from hybridkv.wire.messages import (
    PROTOCOL_VERSION,
    Abandon,
    Clear,
    Commit,
    Condemn,
    Describe,
    Done,
    Engines,
    Error,
    Explain,
    Explained,
    Found,
    Granted,
    Hello,
    Identify,
    ListEngines,
    Lookup,
    Release,
    Reply,
    Report,
    Request,
    Stats,
    Tell,
    Want,
    Welcome,
    WireEngine,
    WireModel,
    geometry_from_wire,
    geometry_to_wire,
)

SESSION_SHARE = 4
"""One session may hold at most 1/4 of the arena in unwritten slots, all together at most half of it."""
LEASES_MAX = 1 << 16
SESSIONS_MAX = 1024
NAMESPACES_MAX = 4096
LATEST_MAX = 20


class RequestError(HybridKVError):
    """A request that is refused; `code` is a word for programs."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(eq=False)
class Session:
    """One engine: who is connected, and what it holds."""

    engine_id: str
    geometry: Geometry
    namespace: Namespace
    engine_connection: int | None
    model: WireModel | None = None
    leases: dict[int, list[Slot]] = field(default_factory=dict)
    writing: dict[int, Slot] = field(default_factory=dict)
    writing_bytes: int = 0
    """Bytes in `writing`."""


@dataclass
class Connection:
    """One accepted socket, named by a number."""

    role: str = ""
    engine_id: str = ""
    session: Session | None = None


class Daemon:
    """The state machine behind the socket."""

    def __init__(self, store: Store, boot: str, arena_path: str, arena_bytes: int, pid: int) -> None:
        self.store = store
        self.boot = boot
        self._arena_path = arena_path
        self._arena_bytes = arena_bytes
        self._pid = pid
        self._connections: dict[int, Connection] = {}
        self._sessions: list[Session] = []
        self._namespaces: dict[bytes, Namespace] = {}
        self._history = History()
        self.counters: Counter[str] = Counter()

    # Events

    def connect(self, connection_id: int) -> None:
        """A socket was accepted."""
        self._connections[connection_id] = Connection()

    def disconnect(self, connection_id: int) -> None:
        """A socket is closed; the session ends with its last connection."""
        connection = self._connections.pop(connection_id)
        for session in self._sessions:
            if session.engine_connection == connection_id:
                session.engine_connection = None
        self._end_sessions(connection.engine_id)

    def handle(self, connection_id: int, request: Request) -> Reply | None:
        """The reply to one request; None for one-way messages."""
        connection = self._connections[connection_id]
        self.counters[f"requests_{type(request).__name__.lower()}"] += 1
        try:
            if not connection.role and not isinstance(request, Hello):
                raise RequestError("hello_first", "the first message of a connection must be hello")
            return self._answer(connection_id, connection, request)
        except RequestError as error:
            return self.refuse(getattr(request, "id", 0), error.code, str(error))

    def refuse(self, request_id: int, code: str, message: str) -> Error:
        """An error reply, counted."""
        self.counters[f"refused_{code}"] += 1
        return Error(request_id, code, message[:4096])

    # Requests

    def _answer(self, connection_id: int, connection: Connection, request: Request) -> Reply | None:
        match request:
            case Hello():
                return self._hello(connection_id, connection, request)
            case Stats():
                return self._stats(request)
            case ListEngines():
                return Engines(request.id, [_wire_engine(session) for session in self._sessions])
            case Clear():
                return Done(request.id, self.store.clear())
            case Identify():
                session = _session_of(connection)
                session.namespace = self._namespace(request.namespace, session.geometry)
                return Done(request.id, 0)
            case Lookup():
                return self._lookup(_session_of(connection), request)
            case Want():
                return self._want(_session_of(connection), request)
            case Release():
                self._release(_session_of(connection), request)
            case Commit():
                self._commit(_session_of(connection), request)
            case Abandon():
                self._abandon(_session_of(connection), request)
            case Condemn():
                _session_of(connection)
                self._condemn(request)
            case Tell():
                identity = _session_of(connection).namespace.identity
                self._history.told(request.request_id, identity, request.facts)
            case Describe():
                self._history.described(_session_of(connection).namespace.identity, request.facts)
            case Explain():
                return self._explain(request)
        return None

    def _hello(self, connection_id: int, connection: Connection, hello: Hello) -> Reply:
        if connection.role:
            raise RequestError("hello_twice", "hello comes once in a connection")
        if hello.version != PROTOCOL_VERSION:
            raise RequestError(
                "version",
                f"this daemon speaks protocol version {PROTOCOL_VERSION}, not {hello.version}; restart it",
            )
        if hello.role == "engine":
            if hello.namespace is None or hello.geometry is None or not hello.engine_id:
                raise RequestError("hello_incomplete", "an engine's hello needs engine_id, namespace and geometry")
            try:
                geometry = geometry_from_wire(hello.geometry)
            except HybridKVError as error:
                raise RequestError("geometry", str(error)) from error
            if len(self._sessions) >= SESSIONS_MAX:
                raise RequestError("sessions", f"there are {SESSIONS_MAX} sessions already")
            namespace = self._namespace(hello.namespace, geometry)
            session = Session(hello.engine_id, geometry, namespace, connection_id, hello.model)
            self._sessions.append(session)
            connection.session = session
        connection.role, connection.engine_id = hello.role, hello.engine_id
        return Welcome(hello.id, PROTOCOL_VERSION, self.boot, self._arena_path, self._arena_bytes, self._pid)

    def _lookup(self, session: Session, lookup: Lookup) -> Reply:
        if len(lookup.hashes) % HASH_BYTES:
            raise RequestError("hashes", f"{len(lookup.hashes)} bytes are no whole number of hashes")
        if lookup.lease in session.leases or len(session.leases) >= LEASES_MAX:
            raise RequestError("lease", f"lease {lookup.lease} is taken, or {LEASES_MAX} leases are open")
        entries_of = session.namespace.entries
        raw = lookup.hashes
        entries = [entries_of.get(raw[at : at + HASH_BYTES]) for at in range(0, len(raw), HASH_BYTES)]
        groups = range(len(session.geometry.groups))
        masks = [bytes([entry is not None and entry[index] is not None for entry in entries]) for index in groups]
        chunks = largest_hit(session.geometry, masks, len(entries))
        slots: list[Slot] = []
        for index, group in enumerate(session.geometry.groups):
            need = needed_chunks(session.geometry, group, chunks) if chunks else range(0)
            slots += [entry[index] for entry in entries[need.start : need.stop]]  # type: ignore[index, misc]
        self.counters["lookups"] += 1
        self.counters["chunks_asked"] += len(entries)
        if chunks:
            self.store.pin(slots)
            session.leases[lookup.lease] = slots
            self.counters["lookups_hit"] += 1
            self.counters["chunks_hit"] += chunks
        return Found(
            lookup.id,
            lookup.lease,
            chunks,
            masks,
            pack_u64([slot.offset for slot in slots]),
            pack_u64([slot.generation for slot in slots]),
        )

    def _release(self, session: Session, release: Release) -> None:
        slots = session.leases.pop(release.lease, None)
        if slots is not None:
            self.store.unpin(slots)
        self.counters["tokens_loaded"] += release.tokens
        self.counters["bytes_loaded"] += release.loaded_bytes
        self.counters["loads_failed"] += release.failed

    def _want(self, session: Session, want: Want) -> Reply:
        shape = want.part_bytes, want.parts
        if not any(shape in shapes for shapes in session.namespace.shapes):
            raise RequestError(
                "part_bytes", f"no group of this engine has objects of {want.parts} parts of {want.part_bytes} bytes"
            )
        size = slot_bytes(*shape)
        room = min(
            self._arena_bytes // SESSION_SHARE - session.writing_bytes,
            self._arena_bytes // 2 - self.store.writing_bytes,
        )
        slots = self.store.grant(shape, min(want.count, max(0, room) // size))
        session.writing.update((slot.offset, slot) for slot in slots)
        session.writing_bytes += size * len(slots)
        self.counters["slots_granted"] += len(slots)
        return Granted(
            want.id,
            want.part_bytes,
            want.parts,
            pack_u64([slot.offset for slot in slots]),
            pack_u64([slot.generation for slot in slots]),
            self.store.extents.limit_bytes,
        )

    def _commit(self, session: Session, commit: Commit) -> None:
        names = _named(commit.offsets, commit.generations)
        groups = [group for _, group in _named(commit.offsets, commit.groups)]
        if len(names) * HASH_BYTES != len(commit.hashes):
            raise RequestError("commit", f"{len(names)} slots with {len(commit.hashes)} bytes of hashes")
        # Prefix-first on the wire, suffix-first into the LRU order: what a longer hit needs last goes first.
        for at in reversed(range(len(names))):
            slot = session.writing.get(names[at][0])
            if slot is None or slot.generation != names[at][1]:
                self.counters["commits_unknown"] += 1
                continue
            group = groups[at]
            if group >= len(session.geometry.groups) or slot.shape not in session.namespace.shapes[group]:
                raise RequestError("commit", f"a slot of (bytes, parts) {slot.shape} is no object of group {group}")
            del session.writing[slot.offset]
            session.writing_bytes -= slot.size_bytes
            chunk_hash = commit.hashes[at * HASH_BYTES : (at + 1) * HASH_BYTES]
            size = slot.part_bytes * slot.parts
            if self.store.commit(slot, session.namespace, group, chunk_hash):
                self.counters["objects_stored"] += 1
                self.counters["bytes_stored"] += size
        self.counters["tokens_stored"] += commit.tokens

    def _abandon(self, session: Session, abandon: Abandon) -> None:
        for offset, generation in _named(abandon.offsets, abandon.generations):
            slot = session.writing.get(offset)
            if slot is not None and slot.generation == generation:
                del session.writing[offset]
                session.writing_bytes -= slot.size_bytes
                self.store.free(slot)

    def _condemn(self, condemn: Condemn) -> None:
        for offset, generation in _named(condemn.offsets, condemn.generations):
            slot = self.store.get(offset, generation)
            if slot is not None and slot.state is SlotState.COMMITTED:
                self.store.drop(slot)
                self.counters["objects_condemned"] += 1

    def _stats(self, stats: Stats) -> Reply:
        info = {"boot": self.boot, "arena": self._arena_path, "pid": str(self._pid)}
        for number, session in enumerate(self._sessions):
            groups = " ".join(f"{g.gid}:{g.kind}/{g.tokens_per_block}" for g in session.geometry.groups)
            info[f"session_{number}"] = (
                f"chunk {session.geometry.chunk_tokens} groups {groups} engine {session.engine_id} "
                f"identity {session.namespace.identity.hex()[:12]}"
            )
        return Report(stats.id, self.values(), info)

    def _explain(self, explain: Explain) -> Reply:
        latest = self._history.latest[:LATEST_MAX]
        known = self._history.request(explain.request_id)
        if known is None:
            return Explained(explain.id, {}, latest)
        identity, told = known
        facts = dict(told)
        facts["identity"] = identity.hex()
        first = bytes.fromhex(facts.pop("first_chunk", ""))
        for other in self._namespaces.values():
            if other.identity != identity and first in other.entries:
                differs = self._history.differences(identity, other.identity)
                named = "; ".join(f"{name}: {mine} here, {theirs} there" for name, (mine, theirs) in differs.items())
                facts[f"also under {other.identity.hex()[:12]}"] = named or "in what they differ was not told"
        return Explained(explain.id, facts, latest)

    # Inside

    def values(self) -> dict[str, float]:
        """Every counter and gauge by name."""
        return {
            **{name: float(value) for name, value in self.counters.items()},
            "objects": float(self.store.objects),
            "bytes_committed": float(self.store.committed_bytes),
            "bytes_writing": float(self.store.writing_bytes),
            "bytes_reserved": float(self.store.extents.limit_bytes),
            "bytes_arena": float(self._arena_bytes),
            "evicted": float(self.store.evicted),
            "duplicates": float(self.store.duplicates),
            "sessions": float(len(self._sessions)),
            "leases": float(sum(len(session.leases) for session in self._sessions)),
            "connections": float(len(self._connections)),
        }

    def check(self) -> None:
        """Re-derive what can be derived; raises AssertionError."""
        self.store.check()
        pins: Counter[Slot] = Counter()
        writing: set[Slot] = set()
        for session in self._sessions:
            for slots in session.leases.values():
                pins.update(slots)
            assert not writing & set(session.writing.values())
            assert session.writing_bytes == sum(slot.size_bytes for slot in session.writing.values())
            writing |= set(session.writing.values())
        for slot, count in pins.items():
            assert slot.pins == count
        assert sum(slot.size_bytes for slot in writing) == self.store.writing_bytes

    def _namespace(self, identity: bytes, geometry: Geometry) -> Namespace:
        gids = tuple(group.gid for group in geometry.groups)
        shapes = tuple(frozenset(slot_shapes(geometry, group)) for group in geometry.groups)
        known = self._namespaces.get(identity)
        if known is None:
            if len(self._namespaces) >= NAMESPACES_MAX:
                used = {session.namespace.identity for session in self._sessions}
                self._namespaces = {
                    key: value for key, value in self._namespaces.items() if value.entries or key in used
                }
            known = self._namespaces[identity] = Namespace(identity, gids, shapes)
        if (known.gids, known.shapes) != (gids, shapes):
            raise RequestError("identity", "this identity is in use with another geometry")
        return known

    def _end_sessions(self, engine_id: str) -> None:
        if any(connection.engine_id == engine_id for connection in self._connections.values()):
            return
        for session in [session for session in self._sessions if session.engine_id == engine_id]:
            for slots in session.leases.values():
                self.store.unpin(slots)
            for slot in session.writing.values():
                self.store.free(slot)
            self._sessions.remove(session)
            self.counters["sessions_ended"] += 1


def _wire_engine(session: Session) -> WireEngine:
    geometry = geometry_to_wire(session.geometry)
    return WireEngine(session.engine_id, session.namespace.identity, geometry, session.model)


def _session_of(connection: Connection) -> Session:
    if connection.session is None:
        raise RequestError("role", f"a connection of role {connection.role!r} has no session")
    return connection.session


def _named(offsets: bytes, generations: bytes) -> list[tuple[int, int]]:
    try:
        return list(zip(unpack_u64(offsets), unpack_u64(generations), strict=True))
    except ValueError as error:
        raise RequestError("packed", f"broken list of slots: {error}") from error
