"""What the daemon decides: requests in, replies out. It has no socket, clock, thread or file."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from hybridkv.core.coverage import largest_hit, needed_chunks
from hybridkv.core.keys import HASH_BYTES
from hybridkv.daemon import slot_requests
from hybridkv.daemon.sessions import ClientConnection, Process, RequestError, Session
from hybridkv.daemon.state import DaemonInfo, DaemonState
from hybridkv.daemon.view import DaemonView
from hybridkv.observe.history import RequestOutcome
from hybridkv.observe.spans import Facts
from hybridkv.shm.trailer import WorkerProcess
from hybridkv.store.index import Namespace, Slot
from hybridkv.store.store import Store
from hybridkv.tiers.jobs import JobKind, JobOutcome, TierJob
from hybridkv.tiers.lookups import LookupRequest, WaitingLookup
from hybridkv.tiers.state import TierState
from hybridkv.wire import messages as wire
from hybridkv.wire.messages import BATCH_MAX, PROTOCOL_VERSION, Found, Reply, Request
from hybridkv.wire.protocol import RULES, ErrorCode, refused

LEASES_MAX = 1 << 16
LATEST_MAX = 20
TRACED = (JobKind.READ, JobKind.WRITE, JobKind.FIND)
"""Jobs of tiers that are exported as spans."""

_Slots = Sequence[Slot | None] | None
"""A chunk's slots, by group index; None where RAM has no object of the chunk."""


class Daemon:
    """The state machine behind the socket. Times are seconds of one clock."""

    def __init__(self, store: Store, info: DaemonInfo, tiers: Sequence[TierState] = ()) -> None:
        """`tiers` are those below RAM, the fastest first."""
        self.state = DaemonState(info, store, tiers)
        self.store = store
        self.tiers = tiers
        self.sessions = self.state.sessions
        self.counters = self.state.counters
        self.ceiling = self.state.ceiling
        self.later = self.state.later
        self.demotion = self.state.demotion
        self.promotion = self.state.promotion
        self.view = DaemonView(self.state)
        self._handlers: Mapping[type[Request], Callable[[ClientConnection, Any], Reply | None]] = {
            wire.Hello: self._hello,
            wire.Drained: self.sessions.drained,
            wire.Identify: self._identify,
            wire.Subscribe: self._subscribe,
            wire.Lookup: self._lookup,
            wire.Release: self._release,
            wire.Reserve: partial(slot_requests.reserve, self.state),
            wire.Commit: partial(slot_requests.commit, self.state),
            wire.Free: partial(slot_requests.free, self.state),
            wire.ReportCorrupt: partial(slot_requests.report_corrupt, self.state),
            wire.ReportRequest: self._report_request,
            wire.ReportIdentity: self._report_identity,
            wire.Explain: self._explain,
            wire.Stats: self._stats,
            wire.ListEngines: self._list_engines,
            wire.Clear: partial(slot_requests.clear, self.state),
        }

    # Events

    def recover(self, workers: Iterable[WorkerProcess]) -> None:
        """Take over what an earlier daemon left; `workers` are those of its workers that live."""
        self.sessions.recover(workers)
        self.counters["objects_recovered"] = self.store.objects

    def connect(self, connection_id: int, process: Process | None = None) -> None:
        """A socket was accepted; a client without a process ends with its connection."""
        self.sessions.connect(connection_id, process)

    def disconnect(self, connection_id: int) -> None:
        """A socket is closed; its process may still copy."""
        self.promotion.cancel(connection_id)
        self.state.subscriptions.forget(connection_id)
        self.sessions.disconnect(connection_id)

    def tick(self, now: float) -> None:
        """Do whatever is due: to be called after other events, and at `wakes_at`."""
        self.state.now = now
        for tier in self.tiers:
            tier.tick(now)
        if self.tiers:
            self._answer_ended(self.promotion.tick(now))
            self.demotion.pump(now)
        self.later.extend(self.state.subscriptions.due())
        self.view.tick(now)

    def wakes_at(self) -> float:
        """When something is due that no event tells of."""
        first = (self.promotion.wakes_at(), self.demotion.wakes_at(), self.view.wakes_at())
        return min(*first, *(tier.wakes_at() for tier in self.tiers))

    def transferred(self, job: TierJob, outcome: JobOutcome, now: float) -> None:
        """A job of a tier came back."""
        self.state.now = now
        tier = self.tiers[job.tier]
        was_open = tier.is_open
        tier.finished(job, outcome, now)
        if self.state.spans is not None and job.kind in TRACED:
            facts: Facts = {"tier": tier.name, "objects": len(job.items), "bytes": job.size_bytes}
            error = "" if outcome.error is None else str(outcome.error)
            self.state.spans.put(f"tier {job.kind}", (job.submitted_at, now), facts, error=error)
        match job.kind:
            case JobKind.READ:
                self.demotion.stored(self.promotion.read(job, outcome, now))
            case JobKind.FIND:
                self.promotion.found(job, outcome)
            case JobKind.WRITE:
                self.demotion.finished(tier, job, outcome)
            case JobKind.OPEN if tier.is_open and not was_open:
                self.demotion.opened(self.sessions.slots())

    def handle(self, connection_id: int, request: Request, now: float = 0.0) -> Reply | None:
        """The reply to one request; None for a one-way message, and for a lookup that waits.

        The Found of a lookup that waits comes by `later`. After an Error whose code closes
        (wire.protocol), nothing more of this connection may be handled.
        """
        self.state.now = now
        connection = self.sessions.connections[connection_id]
        self.state.labelled["requests", type(request).__name__.lower()] += 1
        self.state.subscriptions.heard(connection_id)
        try:
            if (code := refused(connection.state, type(request))) is not None:
                raise RequestError(code)
            reply = self._handlers[type(request)](connection, request)
        except RequestError as error:
            return self.refuse(getattr(request, "id", 0), error.code, str(error))
        rule = RULES[type(request)]
        assert (None if reply is None else type(reply)) in (rule.reply, rule.first)
        return reply

    def refuse(self, request_id: int, code: ErrorCode, message: str) -> wire.Error:
        """An error reply, counted."""
        self.state.labelled["refused", str(code)] += 1
        return wire.Error(request_id, code, message[:4096])

    def check(self) -> None:
        """Compute again what can be derived; raises AssertionError where it differs."""
        self.store.check()
        pins, writing = self.sessions.check()
        pins.update(self.promotion.held())
        pins.update(self.demotion.held())
        assert all(slot.pins == count for slot, count in pins.items())
        writing |= set(self.promotion.slots())
        assert sum(slot.size_bytes for slot in writing) == self.store.writing_bytes

    # Sessions

    def _hello(self, connection: ClientConnection, hello: wire.Hello) -> Reply:
        if hello.version != PROTOCOL_VERSION:
            raise RequestError(
                ErrorCode.VERSION,
                f"this daemon speaks protocol version {PROTOCOL_VERSION}, not {hello.version}; "
                "restart it",
            )
        self.sessions.greet(connection, hello, self.state.now)
        return wire.Welcome(hello.id, PROTOCOL_VERSION, *self.state.info)

    def _identify(self, connection: ClientConnection, request: wire.Identify) -> Reply:
        self.sessions.identify(connection.session, request.namespace)
        self.state.subscriptions.identified(connection.number, connection.session.namespace)
        return wire.Done(request.id, 0)

    def _subscribe(self, connection: ClientConnection, request: wire.Subscribe) -> None:
        self.state.subscriptions.subscribe(connection.number, connection.session.namespace)

    # Lookups

    def _lookup(self, connection: ClientConnection, lookup: wire.Lookup) -> Reply:
        session, state = connection.session, self.state
        if len(lookup.hashes) % HASH_BYTES:
            fault = f"{len(lookup.hashes)} bytes are no whole number of hashes"
            raise RequestError(ErrorCode.HASHES, fault)
        is_waiting = self.promotion.is_waiting(connection.number, lookup.lease)
        if is_waiting or lookup.lease in session.leases or len(session.leases) >= LEASES_MAX:
            fault = f"lease {lookup.lease} is taken, or {LEASES_MAX} leases are open"
            raise RequestError(ErrorCode.LEASE, fault)
        # A hit of more chunks might need more slots than fit in a message.
        hashes = lookup.hashes[: BATCH_MAX // len(session.geometry.groups) * HASH_BYTES]
        masks, entries = self._present(session.namespace, hashes)
        chunks = largest_hit(session.geometry, masks, len(entries))
        self.counters["lookups"] += 1
        self.counters["chunks_asked"] += len(entries)
        self.counters["tokens_asked"] += len(entries) * session.geometry.chunk_tokens
        why = ""
        if self.tiers and lookup.wait_ms and chunks < len(entries):
            asked = LookupRequest(
                connection.number,
                lookup.id,
                lookup.lease,
                session.namespace,
                session.geometry,
                hashes,
                state.now,
                state.now + lookup.wait_ms / 1e3,
                lookup.tokens_per_second,
                chunks,
            )
            waiting = WaitingLookup(asked)
            if self.promotion.begin(waiting, masks, state.now):
                return wire.Pending(lookup.id, lookup.lease, lookup.wait_ms, waiting.target, masks)
            why = waiting.shortfall
            if waiting.located:
                # Room may have been made at the cost of this hit, for what then did not come.
                masks, entries = self._present(session.namespace, hashes)
                chunks = largest_hit(session.geometry, masks, len(entries))
        state.ceiling.answered(session.namespace.identity, session.geometry, hashes, masks, chunks)
        slots = self._take(session, lookup.lease, entries, chunks)
        found = Found(lookup.id, lookup.lease, chunks, masks, *slots, {}, why)
        self._export_lookup(session, found, state.now)
        return found

    def _present(self, namespace: Namespace, hashes: bytes) -> tuple[list[bytes], Sequence[_Slots]]:
        """What RAM has of some chunks: each group's mask, and each chunk's slots."""
        entries_of = namespace.entries
        found = [
            entries_of.get(hashes[at : at + HASH_BYTES]) for at in range(0, len(hashes), HASH_BYTES)
        ]
        entries = [None if entry is None else entry.slots for entry in found]
        groups = range(len(namespace.gids))
        return [
            bytes([entry is not None and entry[index] is not None for entry in entries])
            for index in groups
        ], entries

    def _take(
        self, session: Session, lease: int, entries: Sequence[_Slots], chunks: int
    ) -> tuple[bytes, bytes]:
        """Open the lease of a hit of `chunks`; the (offsets, generations) of its slots."""
        slots: list[Slot] = []
        for index, group in enumerate(session.geometry.groups):
            need = needed_chunks(session.geometry, group, chunks) if chunks else range(0)
            needed = entries[need.start : need.stop]
            # Every entry of a hit is whole.
            slots += [entry[index] for entry in needed]  # type: ignore[index, misc]
        if chunks:
            self.store.pin(slots)
            self.demotion.read(slots)
            session.leases[lease] = slots
            self.counters["lookups_hit"] += 1
            self.counters["chunks_hit"] += chunks
            self.counters["tokens_hit"] += chunks * session.geometry.chunk_tokens
        return slot_requests.pack_slots(slots)

    def _answer_ended(self, ended: Iterable[WaitingLookup]) -> None:
        """Answer lookups that waited for tiers."""
        for waiting in ended:
            self._found_at_last(waiting, waiting.request)
            self.store.unpin(waiting.held)

    def _found_at_last(self, waiting: WaitingLookup, asked: LookupRequest) -> None:
        """Answer a lookup that waited for tiers, from what RAM has now."""
        state = self.state
        session = self.sessions.connections[asked.connection_id].session
        masks, entries = self._present(asked.namespace, asked.hashes)
        chunks = largest_hit(asked.geometry, masks, len(entries))
        if session.namespace is not asked.namespace:
            # The engine has other weights by now.
            masks, chunks = [bytes(len(mask)) for mask in masks], 0
        else:
            identity = asked.namespace.identity
            state.ceiling.answered(identity, asked.geometry, asked.hashes, masks, chunks)
        state.waits.add(state.now - asked.asked_at)
        tiers = Counter(name for chunk, name in sorted(waiting.origins.items()) if chunk < chunks)
        for name, count in tiers.items():
            state.labelled["tier_chunks_hit", name] += count
        slots = self._take(session, asked.lease, entries, chunks)
        why = waiting.shortfall
        found = Found(asked.id, asked.lease, chunks, masks, *slots, dict(tiers), why)
        self._export_lookup(session, found, asked.asked_at)
        self.later.append((asked.connection_id, found))

    def _export_lookup(self, session: Session, found: Found, asked_at: float) -> None:
        if self.state.spans is None:
            return
        now = self.state.now
        facts: Facts = {
            "engine": session.engine_id,
            "identity": session.namespace.identity.hex()[:12],
            "asked_tokens": len(found.masks[0]) * session.geometry.chunk_tokens,
            "hit_tokens": found.chunks * session.geometry.chunk_tokens,
            "why": found.why,
            **{f"chunks_from_{name}": count for name, count in found.tiers.items()},
        }
        span = self.state.spans.put("lookup", (asked_at, now), facts)
        if found.chunks:
            session.spans[found.lease] = now, span

    def _release(self, connection: ClientConnection, release: wire.Release) -> None:
        session = connection.session
        self.promotion.cancel(connection.number, release.lease)
        slots = session.leases.pop(release.lease, None)
        if slots is not None:
            self.store.unpin(slots)
        since, span = session.spans.pop(release.lease, (0.0, None))
        if self.state.spans is not None and span is not None:
            facts = {"tokens": release.tokens, "bytes": release.loaded_bytes}
            error = "the load failed" if release.failed else ""
            self.state.spans.put("load", (since, self.state.now), facts, span, error)
        self.counters["tokens_loaded"] += release.tokens
        self.counters["bytes_loaded"] += release.loaded_bytes
        self.counters["loads_failed"] += release.failed

    # What people ask

    def _stats(self, _: ClientConnection, stats: wire.Stats) -> Reply:
        return wire.Report(
            stats.id,
            self.view.values().named(),
            self.view.tiers(),
            self.state.metrics_url,
            self.view.status(self.state.now) if stats.status else None,
        )

    def _list_engines(self, _: ClientConnection, request: wire.ListEngines) -> Reply:
        engines = [
            wire.WireEngine(
                session.engine_id,
                session.namespace.identity,
                wire.geometry_to_wire(session.geometry),
                session.model,
            )
            for session in self.sessions.all
        ]
        return wire.Engines(request.id, engines)

    def _report_request(self, connection: ClientConnection, told: wire.ReportRequest) -> None:
        identity, now = connection.session.namespace.identity, self.state.now
        outcome = RequestOutcome(told.request_id, identity, told.explanation, now)
        self.state.history.add_request(outcome)

    def _report_identity(self, connection: ClientConnection, told: wire.ReportIdentity) -> None:
        self.state.history.add_identity(connection.session.namespace.identity, told.facts)

    def _explain(self, _: ClientConnection, explain: wire.Explain) -> Reply:
        history = self.state.history
        latest = [decision.request_id for decision in history.latest(LATEST_MAX)]
        known = history.request(explain.request_id)
        if known is None:
            return wire.Explained(explain.id, latest)
        others = [
            wire.OtherIdentity(other.identity, history.differences(known.identity, other.identity))
            for other in self.sessions.namespaces.values()
            if other.identity != known.identity and known.explanation.first_chunk in other.entries
        ]
        return wire.Explained(explain.id, latest, known.identity, known.explanation, others)
