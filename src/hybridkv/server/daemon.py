"""What the daemon decides: requests in, replies out. No socket, clock, thread or file.

A *session* is one greeting of an engine's scheduler.  What it holds (write slots and read leases) ends with processes,
never with a timer: a session whose scheduler is gone ends when each of the engine's worker processes is gone as well,
or says that it copies nothing for it any more, because a worker may still be copying after its scheduler died (DESIGN
section 7).
"""

from array import array
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from itertools import islice

from hybridkv.core.ceiling import Ceiling
from hybridkv.core.coverage import largest_hit, needed_chunks, slot_shapes
from hybridkv.core.errors import HybridKVError
from hybridkv.core.geometry import Geometry, Kind
from hybridkv.core.keys import HASH_BYTES
from hybridkv.core.packed import U64, pack_u64, unpack_u64
from hybridkv.server.history import History
from hybridkv.server.promote import Promotion, Waiting
from hybridkv.server.removals import Removals
from hybridkv.server.sessions import SESSIONS_MAX, Connection, Copying, Process, Session, model_of, session_of, tag_of
from hybridkv.server.showing import Showing, groups_of
from hybridkv.server.spans import Spans
from hybridkv.shm.slots import SlotState, slot_bytes
from hybridkv.shm.trailer import WorkerProcess
from hybridkv.storage.demote import Demotion
from hybridkv.storage.line import Line
from hybridkv.storage.store import Namespace, Slot, Store
from hybridkv.storage.transfer import Job, Outcome, Work
from hybridkv.wire.messages import (
    BATCH_MAX,
    CHANGES_MAX,
    NEVER,
    PROTOCOL_VERSION,
    Abandon,
    Clear,
    Commit,
    Condemn,
    Describe,
    Done,
    Drained,
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
    Pending,
    Release,
    Reply,
    Report,
    Request,
    Stats,
    Tell,
    Want,
    Watch,
    Welcome,
    WireEngine,
    geometry_from_wire,
    geometry_to_wire,
)
from hybridkv.wire.protocol import REFUSALS, RULES, ErrorCode, State, refused

SESSION_SHARE = 4
"""One session may hold at most 1/4 of the arena in unwritten slots, all together at most half of it."""
LEASES_MAX = 1 << 16
NAMESPACES_MAX = 4096
LATEST_MAX = 20
NO_PARENT = bytes(HASH_BYTES)


class RequestError(HybridKVError):
    """A request that is refused; `code` is a word for programs."""

    def __init__(self, code: ErrorCode, message: str = "") -> None:
        super().__init__(message or REFUSALS[code].meaning)
        self.code = code


class Daemon:
    """The state machine behind the socket."""

    def __init__(
        self, store: Store, boot: str, arena_path: str, file_bytes: int, pid: int, lines: Sequence[Line] = ()
    ) -> None:
        """`lines` are the tiers below, fastest first."""
        self.store = store
        self.lines = lines
        self.demotion = Demotion(store, lines)
        self.promotion = Promotion(store, lines, self._found_at_last, self._is_current, self.demotion.stored)
        self.later: deque[tuple[int, Reply]] = deque()
        """(connection, reply) of lookups whose wait is over; to be sent."""
        self._now = 0.0
        self.boot = boot
        self._arena_path = arena_path
        self.arena_bytes = len(store)
        self._file_bytes = file_bytes
        self._pid = pid
        self.connections: dict[int, Connection] = {}
        self.sessions: list[Session] = []
        self._workers: dict[bytes, dict[Process, Copying]] = {}
        """Per engine (by its tag) every process that may copy for it."""
        self.held: dict[bytes, list[Slot]] = {}
        """Write slots of an earlier life of the daemon, by the tag of the engine that may still write into them."""
        self.namespaces: dict[bytes, Namespace] = {}
        self.geometries: dict[bytes, tuple[Geometry, str]] = {}
        """Of the identities that engines greeted with: (geometry, the model's name)."""
        self.history = History()
        self.removals = Removals()
        self.store.witness = self.removals.witness
        self.ceiling = Ceiling()
        self.counters: Counter[str] = Counter()
        self.spans: Spans | None = None
        """Where what was done is told, if anybody wants to know."""
        self.showing = Showing(self)

    # Events

    def recover(self, processes: Iterable[WorkerProcess]) -> None:
        """Take over what an earlier daemon left in the arena; `processes` are those of its workers that still live."""
        self.namespaces, writing = self.store.recover()
        for tag, pid, started in processes:
            self._workers.setdefault(tag, {})[Process(pid, started)] = Copying(0, 0)
        for slot in writing:
            self.held.setdefault(slot.owner, []).append(slot)
        for tag in list(self.held):
            self._retire(tag)
        self.counters["objects_recovered"] = self.store.objects

    def connect(self, connection_id: int, process: Process | None = None) -> None:
        """A socket was accepted; without a process its end is that of the connection."""
        self.connections[connection_id] = Connection(process or Process(0, connection_id))

    def disconnect(self, connection_id: int) -> None:
        """A socket is closed. Its process may still copy."""
        connection = self.connections.pop(connection_id)
        self.promotion.cancel(connection_id)
        self.removals.forget(connection_id)
        for session in self.sessions:
            if session.engine_connection == connection_id:
                session.engine_connection = None
        if not connection.process.pid:
            self.gone(connection.process)
        elif connection.engine_id:
            tag = tag_of(connection.engine_id)
            known = self._workers.get(tag, {}).get(connection.process)
            if known is not None and known.connection == connection_id and known.drained >= NEVER:
                # It will not copy again, however long its process lives.
                self._forget_worker(tag, connection.process)
            self._retire(tag)

    def gone(self, process: Process) -> None:
        """A process has ended."""
        for tag in [tag for tag, workers in self._workers.items() if process in workers]:
            self._forget_worker(tag, process)
        for tag in sorted({*self.held, *(tag_of(session.engine_id) for session in self.sessions)}):
            self._retire(tag)

    def processes(self) -> set[Process]:
        """Every process whose end must be told."""
        return {process for workers in self._workers.values() for process in workers if process.pid}

    def tick(self, now: float) -> None:
        """Whatever is due: to be called after other events, and at `wakes_at`; `now` in seconds of one clock."""
        self._now = now
        for line in self.lines:
            line.tick(now)
        if self.lines:
            self.promotion.tick(now)
            self.demotion.pump(now)
        self.later.extend(self.removals.due())
        self.showing.tick(now)

    def wakes_at(self) -> float:
        """When something is due that no event tells of."""
        lines = (line.wakes_at() for line in self.lines)
        return min([self.promotion.wakes_at(), self.demotion.wakes_at(), self.showing.wakes_at(), *lines])

    def transferred(self, job: Job, outcome: Outcome, now: float) -> None:
        """A job of a tier came back."""
        self._now = now
        line = self.lines[job.line]
        was_open = line.is_open
        line.finished(job, outcome, now)
        if self.spans is not None and job.work in (Work.READ, Work.WRITE, Work.FIND):
            facts: dict[str, str | int | bool] = {"tier": line.name, "objects": len(job.items), "bytes": job.size_bytes}
            error = "" if outcome.error is None else str(outcome.error)
            self.spans.put(f"tier {job.work}", job.submitted_at, now, facts, error=error)
        match job.work:
            case Work.READ:
                self.promotion.read(job, outcome, now)
            case Work.FIND:
                self.promotion.found(job, outcome, now)
            case Work.WRITE:
                self.demotion.finished(line, job, outcome)
            case Work.OPEN if line.is_open and not was_open:
                self.demotion.opened(
                    slot
                    for namespace in self.namespaces.values()
                    for entry in namespace.entries.values()
                    for slot in entry.slots
                    if slot is not None
                )

    def handle(self, connection_id: int, request: Request, now: float = 0.0) -> Reply | None:
        """The reply to one request; None for one-way messages, and for a lookup whose Found comes by `later`.

        After an Error whose code closes (wire.protocol), nothing more of this connection may be handled.
        """
        self._now = now
        connection = self.connections[connection_id]
        self.counters[f"requests_{type(request).__name__.lower()}"] += 1
        self.removals.heard(connection_id)
        try:
            if (code := refused(connection.state, type(request))) is not None:
                raise RequestError(code)
            reply = self._answer(connection_id, connection, request)
        except RequestError as error:
            return self.refuse(getattr(request, "id", 0), error.code, str(error))
        rule = RULES[type(request)]
        assert (None if reply is None else type(reply)) in (rule.reply, rule.first)
        return reply

    def refuse(self, request_id: int, code: ErrorCode, message: str) -> Error:
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
                return Engines(request.id, [_wire_engine(session) for session in self.sessions])
            case Clear():
                if request.tiers:
                    self._clear_tiers()
                return Done(request.id, self._clear())
            case Drained():
                self._drained(connection_id, connection, request)
            case Identify():
                reply = self._identify(session_of(connection), request)
                self.removals.identified(connection_id, session_of(connection).namespace)
                return reply
            case Watch():
                self.removals.watch(connection_id, session_of(connection).namespace)
            case Lookup():
                return self._lookup(connection_id, session_of(connection), request)
            case Want():
                return self._want(session_of(connection), request)
            case Release():
                self.promotion.cancel(connection_id, request.lease)
                self._release(session_of(connection), request)
            case Commit():
                self._commit(session_of(connection), request)
            case Abandon():
                self._abandon(session_of(connection), request)
            case Condemn():
                session_of(connection)
                self._condemn(request)
            case Tell():
                identity = session_of(connection).namespace.identity
                self.history.told(request.request_id, identity, request.facts, self._now)
            case Describe():
                self.history.described(session_of(connection).namespace.identity, request.facts)
            case Explain():
                return self._explain(request)
        return None

    def _hello(self, connection_id: int, connection: Connection, hello: Hello) -> Reply:
        if hello.version != PROTOCOL_VERSION:
            raise RequestError(
                ErrorCode.VERSION,
                f"this daemon speaks protocol version {PROTOCOL_VERSION}, not {hello.version}; restart it",
            )
        if hello.role == "engine":
            if hello.namespace is None or hello.geometry is None or not hello.engine_id:
                raise RequestError(ErrorCode.HELLO_INCOMPLETE)
            try:
                geometry = geometry_from_wire(hello.geometry)
            except HybridKVError as error:
                raise RequestError(ErrorCode.GEOMETRY, str(error)) from error
            if len(self.sessions) >= SESSIONS_MAX:
                raise RequestError(ErrorCode.SESSIONS, f"there are {SESSIONS_MAX} sessions already")
            namespace = self._namespace(hello.namespace, geometry)
            session = Session(hello.engine_id, geometry, namespace, connection_id, hello.session, hello.model)
            session.since = self._now
            self._describe(session)
            self.sessions.append(session)
            connection.session = session
        elif hello.role == "worker":
            tag = tag_of(hello.engine_id)
            # What its process said before may have been of another engine of the same name, which has ended; a worker
            # that only lost its connection says it again.
            self._workers.setdefault(tag, {})[connection.process] = Copying(connection_id, 0)
            if connection.process.pid:
                self.store.trailer.remember(WorkerProcess(tag, *connection.process))
        connection.state = State(hello.role)
        if connection.state is not State.CONTROL:
            connection.engine_id = hello.engine_id
        return Welcome(
            hello.id, PROTOCOL_VERSION, self.boot, self._arena_path, self._file_bytes, self.arena_bytes, self._pid
        )

    def _identify(self, session: Session, identify: Identify) -> Reply:
        try:
            session.namespace = self._namespace(identify.namespace, session.geometry)
        except RequestError as error:
            # Its bytes are not those of the old identity any more: the connection ends, and nothing else is heard.
            raise RequestError(ErrorCode.IDENTIFY) from error
        self._describe(session)
        return Done(identify.id, 0)

    def _lookup(self, connection_id: int, session: Session, lookup: Lookup) -> Reply:
        if len(lookup.hashes) % HASH_BYTES:
            raise RequestError(ErrorCode.HASHES, f"{len(lookup.hashes)} bytes are no whole number of hashes")
        taken = lookup.lease in session.leases or self.promotion.is_waiting(connection_id, lookup.lease)
        if taken or len(session.leases) >= LEASES_MAX:
            raise RequestError(ErrorCode.LEASE, f"lease {lookup.lease} is taken, or {LEASES_MAX} leases are open")
        # A hit of more chunks might need more slots than fit in a message.
        hashes = lookup.hashes[: BATCH_MAX // len(session.geometry.groups) * HASH_BYTES]
        masks, entries = self._present(session.namespace, hashes)
        chunks = largest_hit(session.geometry, masks, len(entries))
        self.counters["lookups"] += 1
        self.counters["chunks_asked"] += len(entries)
        self.counters["tokens_asked"] += len(entries) * session.geometry.chunk_tokens
        why = ""
        if self.lines and lookup.wait_ms and chunks < len(entries):
            waiting = Waiting(
                connection_id,
                lookup.id,
                lookup.lease,
                session.namespace,
                session.geometry,
                hashes,
                self._now + lookup.wait_ms / 1e3,
                lookup.tokens_per_second,
                chunks,
                asked_at=self._now,
            )
            if self.promotion.begin(waiting, masks, self._now):
                return Pending(lookup.id, lookup.lease, lookup.wait_ms, waiting.target, masks)
            why = waiting.why
            if waiting.located:
                # Room may have been made, at the cost of what this hit has, for what then did not come.
                masks, entries = self._present(session.namespace, hashes)
                chunks = largest_hit(session.geometry, masks, len(entries))
        self.ceiling.answered(session.namespace.identity, session.geometry, hashes, masks, chunks)
        found = self._found(session, lookup.id, lookup.lease, masks, entries, chunks, {}, why)
        self._span(session, found, self._now)
        return found

    def _present(self, namespace: Namespace, hashes: bytes) -> tuple[list[bytes], list[list[Slot | None] | None]]:
        """What RAM has of some chunks: per group the mask, and per chunk its slots."""
        entries_of = namespace.entries
        found = [entries_of.get(hashes[at : at + HASH_BYTES]) for at in range(0, len(hashes), HASH_BYTES)]
        entries = [None if entry is None else entry.slots for entry in found]
        groups = range(len(namespace.gids))
        return [
            bytes([entry is not None and entry[index] is not None for entry in entries]) for index in groups
        ], entries

    def _found(
        self,
        session: Session,
        request_id: int,
        lease: int,
        masks: list[bytes],
        entries: list[list[Slot | None] | None],
        chunks: int,
        tiers: dict[str, int],
        why: str,
    ) -> Found:
        """The answer to a lookup, with its lease."""
        slots: list[Slot] = []
        for index, group in enumerate(session.geometry.groups):
            need = needed_chunks(session.geometry, group, chunks) if chunks else range(0)
            slots += [entry[index] for entry in entries[need.start : need.stop]]  # type: ignore[index, misc]
        if chunks:
            self.store.pin(slots)
            self.demotion.read(slots)
            session.leases[lease] = slots
            self.counters["lookups_hit"] += 1
            self.counters["chunks_hit"] += chunks
            self.counters["tokens_hit"] += chunks * session.geometry.chunk_tokens
        offsets, generations = pack_u64([slot.offset for slot in slots]), pack_u64([slot.generation for slot in slots])
        return Found(request_id, lease, chunks, masks, offsets, generations, tiers, why)

    def _found_at_last(self, waiting: Waiting) -> None:
        """Answer a lookup that waited for tiers, from what RAM has now."""
        connection = self.connections[waiting.connection_id]
        session = session_of(connection)
        masks, entries = self._present(waiting.namespace, waiting.hashes)
        chunks = largest_hit(waiting.geometry, masks, len(entries))
        if session.namespace is not waiting.namespace:
            # The engine has other weights by now.
            masks, chunks = [bytes(len(mask)) for mask in masks], 0
        else:
            self.ceiling.answered(waiting.namespace.identity, waiting.geometry, waiting.hashes, masks, chunks)
        self.showing.waits.add(self._now - waiting.asked_at)
        tiers = Counter(name for chunk, name in sorted(waiting.origins.items()) if chunk < chunks)
        for name, count in tiers.items():
            self.counters[f"chunks_hit_{name}"] += count
        found = self._found(session, waiting.id, waiting.lease, masks, entries, chunks, dict(tiers), waiting.why)
        self._span(session, found, waiting.asked_at)
        self.later.append((waiting.connection_id, found))

    def _span(self, session: Session, found: Found, asked_at: float) -> None:
        """Tell of a lookup that is answered."""
        if self.spans is None:
            return
        facts: dict[str, str | int | bool] = {
            "engine": session.engine_id,
            "identity": session.namespace.identity.hex()[:12],
            "asked_tokens": len(found.masks[0]) * session.geometry.chunk_tokens,
            "hit_tokens": found.chunks * session.geometry.chunk_tokens,
            "why": found.why,
            **{f"chunks_from_{name}": count for name, count in found.tiers.items()},
        }
        number = self.spans.put("lookup", asked_at, self._now, facts)
        if found.chunks:
            session.found[found.lease] = self._now, number

    def _is_current(self, namespace: Namespace) -> bool:
        return self.namespaces.get(namespace.identity) is namespace

    def _release(self, session: Session, release: Release) -> None:
        slots = session.leases.pop(release.lease, None)
        if slots is not None:
            self.store.unpin(slots)
        since, number = session.found.pop(release.lease, (0.0, 0))
        if self.spans is not None and number:
            facts = {"tokens": release.tokens, "bytes": release.loaded_bytes}
            self.spans.put("load", since, self._now, facts, number, "the load failed" if release.failed else "")
        self.counters["tokens_loaded"] += release.tokens
        self.counters["bytes_loaded"] += release.loaded_bytes
        self.counters["loads_failed"] += release.failed

    def _want(self, session: Session, want: Want) -> Reply:
        shape = want.part_bytes, want.parts
        if not any(shape in shapes for shapes in session.namespace.shapes):
            raise RequestError(
                ErrorCode.PART_BYTES,
                f"no group of this engine has objects of {want.parts} parts of {want.part_bytes} bytes",
            )
        size = slot_bytes(*shape)
        room = min(
            self.arena_bytes // SESSION_SHARE - session.writing_bytes,
            self.arena_bytes // 2 - self.store.writing_bytes,
        )
        count = min(want.count, CHANGES_MAX, max(0, room) // size)
        slots = self.store.grant(shape, count, tag_of(session.engine_id))
        session.writing.update((slot.offset, slot) for slot in slots)
        session.writing_bytes += size * len(slots)
        self.counters["slots_granted"] += len(slots)
        self.counters["slots_short"] += min(want.count, CHANGES_MAX) - len(slots)
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
        if len(names) * HASH_BYTES != len(commit.hashes):
            raise RequestError(ErrorCode.COMMIT, f"{len(names)} slots with {len(commit.hashes)} bytes of hashes")
        groups = _for_each(commit.groups, len(names))
        tenants = _for_each(commit.tenants or bytes(U64), len(names))
        interior = commit.interior or bytes(len(names))
        parents = commit.parents or bytes(len(commit.hashes))
        if len(parents) == HASH_BYTES:
            parents = (parents + commit.hashes)[: len(commit.hashes)]
        columns = len(groups), len(tenants), len(interior), len(parents) // HASH_BYTES
        if columns != (len(names),) * 4 or len(parents) % HASH_BYTES:
            raise RequestError(ErrorCode.COMMIT, f"{len(names)} slots with more or less of what belongs to them")
        slots = [session.unwritten(offset, generation) for offset, generation in names]
        for slot, group in zip(slots, groups, strict=True):
            if slot is not None and not session.takes(slot, group):
                raise RequestError(
                    ErrorCode.COMMIT, f"a slot of (bytes, parts) {slot.shape} is no object of group {group}"
                )
        written: list[int] = []
        for at, slot in enumerate(slots):
            name = slice(at * HASH_BYTES, (at + 1) * HASH_BYTES)
            if slot is None or session.writing.pop(slot.offset, None) is None:
                self.counters["commits_unknown"] += 1
                self.removals.missing(session.engine_connection, commit.hashes[name], groups[at])
                continue
            written.append(at)
            session.writing_bytes -= slot.size_bytes
            parent = b"" if parents[name] == NO_PARENT else parents[name]
            size = slot.part_bytes * slot.parts
            if self.store.commit(
                slot,
                session.namespace,
                groups[at],
                commit.hashes[name],
                parent,
                bool(interior[at]),
                tenants[at],
            ):
                self.counters["objects_stored"] += 1
                self.counters["bytes_stored"] += size
                self.demotion.stored((slot,))
            else:
                self.removals.missing(session.engine_connection, commit.hashes[name], groups[at])
        self.counters["tokens_stored"] += commit.tokens
        stored = b"".join(commit.hashes[at * HASH_BYTES : (at + 1) * HASH_BYTES] for at in written)
        self.ceiling.stored(session.namespace.identity, [groups[at] for at in written], stored)

    def _abandon(self, session: Session, abandon: Abandon) -> None:
        for offset, generation in _named(abandon.offsets, abandon.generations):
            slot = session.unwritten(offset, generation)
            if slot is not None:
                del session.writing[offset]
                session.writing_bytes -= slot.size_bytes
                self.store.free(slot)

    def _condemn(self, condemn: Condemn) -> None:
        for offset, generation in _named(condemn.offsets, condemn.generations):
            slot = self.store.get(offset, generation)
            if slot is not None and slot.state is SlotState.COMMITTED:
                if slot.entry is not None:
                    self.ceiling.lost(slot.entry.namespace.identity, slot.group_index, slot.entry.chunk_hash)
                self.store.drop(slot)
                self.counters["objects_condemned"] += 1

    def _clear(self) -> int:
        """Drop some of the objects; how many."""
        self.ceiling.cleared()
        entries = (entry for namespace in self.namespaces.values() for entry in namespace.entries.values())
        slots = list(islice((slot for entry in entries for slot in entry.slots if slot is not None), CHANGES_MAX))
        for slot in slots:
            self.store.drop(slot)
        return len(slots)

    def _clear_tiers(self) -> None:
        for line in self.lines:
            if line.is_open and line.has_thread(Work.CLEAR):
                line.submit(Job(Work.CLEAR, line.number), self._now)

    def _stats(self, stats: Stats) -> Reply:
        info = {"boot": self.boot, "arena": self._arena_path, "pid": str(self._pid)}
        info.update((f"tier_{line.number}", line.describe()) for line in self.lines)
        for number, session in enumerate(self.sessions):
            groups = groups_of(session.geometry)
            info[f"session_{number}"] = (
                f"chunk {session.geometry.chunk_tokens} groups {groups} engine {session.engine_id} "
                f"identity {session.namespace.identity.hex()[:12]}"
            )
        return Report(stats.id, self.showing.values(), info)

    def _explain(self, explain: Explain) -> Reply:
        latest = [decision.request_id for decision in self.history.latest(LATEST_MAX)]
        known = self.history.request(explain.request_id)
        if known is None:
            return Explained(explain.id, {}, latest)
        identity, facts = known.identity, dict(known.facts)
        facts["identity"] = identity.hex()
        first = _hash_of(facts.pop("first_chunk", ""))
        for other in self.namespaces.values():
            if other.identity != identity and first in other.entries:
                differs = self.history.differences(identity, other.identity)
                named = "; ".join(f"{name}: {mine} here, {theirs} there" for name, (mine, theirs) in differs.items())
                facts[f"also under {other.identity.hex()[:12]}"] = named or "in what they differ was not told"
        return Explained(explain.id, facts, latest)

    # Inside

    def check(self) -> None:
        """Re-derive what can be derived; raises AssertionError."""
        self.store.check()
        pins: Counter[Slot] = Counter()
        writing: set[Slot] = set()
        for session in self.sessions:
            for slots in session.leases.values():
                pins.update(slots)
            assert not writing & set(session.writing.values())
            assert session.writing_bytes == sum(slot.size_bytes for slot in session.writing.values())
            writing |= set(session.writing.values())
        pins.update(self.promotion.held())
        pins.update(self.demotion.held())
        for slot, count in pins.items():
            assert slot.pins == count
        held = {slot for slots in self.held.values() for slot in slots}
        assert not held & writing
        writing |= set(self.promotion.slots())
        assert sum(slot.size_bytes for slot in held | writing) == self.store.writing_bytes

    def _namespace(self, identity: bytes, geometry: Geometry) -> Namespace:
        gids = tuple(group.gid for group in geometry.groups)
        shapes = tuple(frozenset(slot_shapes(geometry, group)) for group in geometry.groups)
        prefixes = tuple(group.kind is Kind.FULL for group in geometry.groups)
        known = self.namespaces.get(identity)
        if known is not None and not known.shapes:
            self.store.regroup(known, gids, shapes, prefixes)
        if known is None:
            if len(self.namespaces) >= NAMESPACES_MAX:
                used = {session.namespace.identity for session in self.sessions}
                self.namespaces = {key: value for key, value in self.namespaces.items() if value.entries or key in used}
                self.geometries = {key: value for key, value in self.geometries.items() if key in self.namespaces}
            known = self.namespaces[identity] = Namespace(identity, gids, shapes, prefixes)
        if (known.gids, known.shapes, known.prefixes) != (gids, shapes, prefixes):
            raise RequestError(ErrorCode.IDENTITY)
        return known

    def _describe(self, session: Session) -> None:
        """Remember what people want to know of an identity; an engine that told no model's name takes none away."""
        _, model = self.geometries.get(session.namespace.identity, (None, ""))
        self.geometries[session.namespace.identity] = session.geometry, model_of(session) or model

    def _forget_worker(self, tag: bytes, process: Process) -> None:
        del self._workers[tag][process]
        if process.pid:
            self.store.trailer.forget(WorkerProcess(tag, *process))
        if not self._workers[tag]:
            del self._workers[tag]

    def _drained(self, connection_id: int, connection: Connection, drained: Drained) -> None:
        tag = tag_of(connection.engine_id)
        workers = self._workers.get(tag, {})
        known = workers.get(connection.process)
        if known is not None and known.connection == connection_id:
            workers[connection.process] = Copying(connection_id, max(known.drained, drained.session))
            self._retire(tag)

    def _retire(self, tag: bytes) -> None:
        """End what an engine held in earlier sessions and lives of the daemon, if none of its workers can touch it."""
        drained = min((worker.drained for worker in self._workers.get(tag, {}).values()), default=None)
        sessions = [session for session in self.sessions if tag_of(session.engine_id) == tag]
        # Greetings are counted by the engine, so every one of this life is later than those of an earlier one.
        present = max((session.number for session in sessions), default=0)
        if drained is None or drained >= NEVER or 0 < present <= drained:
            for slot in self.held.pop(tag, ()):
                self.store.free(slot)
        for session in sessions:
            if session.engine_connection is not None or (drained is not None and drained <= session.number):
                continue
            for slots in session.leases.values():
                self.store.unpin(slots)
            for slot in session.writing.values():
                self.store.free(slot)
            self.sessions.remove(session)
            self.counters["sessions_ended"] += 1


def _wire_engine(session: Session) -> WireEngine:
    geometry = geometry_to_wire(session.geometry)
    return WireEngine(session.engine_id, session.namespace.identity, geometry, session.model)


def _hash_of(told: str) -> bytes:
    """The bytes of a hash in hexadecimal digits; an engine may have told anything."""
    try:
        return bytes.fromhex(told)
    except ValueError:
        return b""


def _numbers(packed: bytes) -> "array[int]":
    try:
        return unpack_u64(packed)
    except ValueError as error:
        raise RequestError(ErrorCode.PACKED, f"broken list of numbers: {error}") from error


def _for_each(packed: bytes, count: int) -> "array[int]":
    """Numbers, of which a single one is that of all `count` things."""
    numbers = _numbers(packed)
    return numbers * count if len(numbers) == 1 else numbers


def _named(offsets: bytes, generations: bytes) -> list[tuple[int, int]]:
    try:
        return list(zip(unpack_u64(offsets), unpack_u64(generations), strict=True))
    except ValueError as error:
        raise RequestError(ErrorCode.PACKED, f"broken list of slots: {error}") from error
