"""What the daemon decides: requests in, replies out. It has no socket, clock, thread or file."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from msgspec.structs import replace

from hybridkv.core.audit import AuditOutcome
from hybridkv.core.coverage import largest_hit, needed_chunks
from hybridkv.core.geometry import Geometry
from hybridkv.core.keys import HASH_BYTES
from hybridkv.core.packed import pack_u64
from hybridkv.core.tails import longest_tail, tail_chunk, tail_tokens, units_per_chunk
from hybridkv.daemon import slot_requests
from hybridkv.daemon.sessions import ClientConnection, RequestError, Session
from hybridkv.daemon.state import DaemonState
from hybridkv.daemon.view import DaemonView
from hybridkv.observe.history import RequestOutcome
from hybridkv.store.index import Namespace, Slot
from hybridkv.store.store import Store
from hybridkv.tiers.health import TierState
from hybridkv.tiers.jobs import JobKind, JobOutcome, TierJob
from hybridkv.tiers.load_or_compute import LookupRequest, PromptHit
from hybridkv.tiers.waiting_lookup import WaitingLookup
from hybridkv.wire import messages as wire
from hybridkv.wire.messages import BATCH_MAX, PROTOCOL_VERSION, Reply, Request
from hybridkv.wire.protocol import RULES, ErrorCode, refused

LEASES_MAX = 1 << 16
LATEST_MAX = 20
AUDIT_COUNTERS: Mapping[AuditOutcome, str] = {
    AuditOutcome.PASSED: "audits_passed",
    AuditOutcome.DIFFERED: "audits_differed",
    AuditOutcome.UNMADE: "audits_unmade",
}

_Present = tuple[list[bytes], Sequence[Sequence[Slot | None] | None], int]
"""What RAM has of some chunks: each group's mask; each chunk's slots by group index, None where RAM
has no object of the chunk; and the largest hit in chunks."""


class Daemon(DaemonState):
    """The state machine behind the socket. Times are seconds of one clock."""

    def __init__(
        self, store: Store, welcome: wire.Welcome, tiers: Sequence[TierState] = ()
    ) -> None:
        super().__init__(store, welcome, tiers)
        self.view = DaemonView(self)
        self._handlers: Mapping[type[Request], Callable[[ClientConnection, Any], Reply | None]] = {
            wire.Hello: self._hello,
            wire.Drained: self.sessions.drained,
            wire.ReportMapping: self._report_mapping,
            wire.ReportStale: self._report_stale,
            wire.Identify: self._identify,
            wire.Subscribe: self.subscriptions.subscribe,
            wire.Lookup: self._lookup,
            wire.Release: self._release,
            wire.Reserve: partial(slot_requests.reserve, self),
            wire.Commit: partial(slot_requests.commit, self),
            wire.Free: partial(slot_requests.free, self),
            wire.ReportCorrupt: partial(slot_requests.report_corrupt, self),
            wire.ReportRequest: self._report_request,
            wire.ReportIdentity: self._report_identity,
            wire.ReportAudit: self._report_audit,
            wire.Explain: self._explain,
            wire.Stats: self._stats,
            wire.ListEngines: self._list_engines,
            wire.Clear: partial(slot_requests.clear, self),
        }

    # Events

    def disconnect(self, connection_id: int) -> None:
        """A socket is closed; its process may still copy."""
        self.promotion.cancel(connection_id)
        self.subscriptions.forget(connection_id)
        self.sessions.disconnect(connection_id)

    def tick(self, now: float) -> None:
        """Do whatever is due: to be called after other events, and at `wakes_at`."""
        self.now = now
        for tier in self.tiers:
            tier.tick(now)
        if self.tiers:
            self._answer_ended(self.promotion.tick(now))
            self.demotion.tick(now)
        self.later.extend(self.subscriptions.due(now))
        self.view.tick(now)

    def wakes_at(self) -> float:
        """When something is due that no event tells of."""
        first = (self.promotion.wakes_at(), self.demotion.wakes_at(), self.view.wakes_at())
        return min(*first, *(tier.wakes_at() for tier in self.tiers))

    def transferred(self, job: TierJob, outcome: JobOutcome, now: float) -> None:
        """A job of a tier came back."""
        self.now = now
        tier = self.tiers[job.tier]
        was_open = tier.is_open
        tier.on_job_done(job, outcome, now)
        is_traced = job.kind in (JobKind.READ, JobKind.WRITE, JobKind.FIND)
        if self.spans is not None and is_traced:
            facts: dict[str, str | int] = {
                "tier": tier.name,
                "objects": len(job.items),
                "bytes": job.size_bytes,
            }
            error = "" if outcome.error is None else str(outcome.error)
            self.spans.put(f"tier {job.kind}", (job.submitted_at, now), facts, error=error)
        match job.kind:
            case JobKind.READ:
                self.demotion.queue_stored(self.promotion.on_read_done(job, outcome, now))
            case JobKind.FIND:
                self.promotion.on_find_done(job, outcome)
            case JobKind.WRITE:
                self.demotion.on_write_done(tier, job, outcome)
            case JobKind.USE:
                self.demotion.on_use_done(tier, job, outcome)
            case JobKind.OPEN if tier.is_open and not was_open:
                self.demotion.queue_all(self.sessions.slots())

    def handle(self, connection_id: int, request: Request, now: float = 0.0) -> Reply | None:
        """The reply to one request; None for a one-way message, and for a lookup that waits.

        The Found of a lookup that waits comes by `later`. After an Error whose code closes
        (wire.protocol), nothing more of this connection may be handled.
        """
        self.now = now
        connection = self.sessions.connections[connection_id]
        self.labelled["requests", type(request).__name__.lower()] += 1
        self.subscriptions.heard(connection_id)
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
        self.labelled["refused", str(code)] += 1
        return wire.Error(request_id, code, message[:4096])

    # Sessions

    def _hello(self, connection: ClientConnection, hello: wire.Hello) -> Reply:
        if hello.version != PROTOCOL_VERSION:
            versions = f"{PROTOCOL_VERSION}, not {hello.version}"
            fault = f"this daemon speaks protocol version {versions}; restart it"
            raise RequestError(ErrorCode.VERSION, fault)
        self.sessions.greet(connection, hello, self.now)
        return replace(self.welcome, id=hello.id)

    def _identify(self, connection: ClientConnection, request: wire.Identify) -> Reply:
        session = connection.session
        told = request.namespace, session.geometry, session.model
        try:
            session.namespace = self.sessions.named(*told)
        except RequestError as error:
            # The bytes are not of the old identity any more, so the connection ends.
            raise RequestError(ErrorCode.IDENTIFY) from error
        self.subscriptions.identified(connection)
        return wire.Done(request.id, 0)

    def _report_mapping(self, connection: ClientConnection, told: wire.ReportMapping) -> None:
        connection.is_unmapped = not told.is_mapped
        self.counters["mappings_failed"] += connection.is_unmapped

    def _report_stale(self, connection: ClientConnection, report: wire.ReportStale) -> None:
        self.counters["engines_gone_stale"] += report.is_stale > connection.is_stale
        connection.is_stale = report.is_stale

    # Lookups

    def _lookup(self, connection: ClientConnection, lookup: wire.Lookup) -> Reply:
        session = connection.session
        namespace, geometry = session.namespace, session.geometry
        if len(lookup.hashes) % HASH_BYTES:
            fault = f"{len(lookup.hashes)} bytes are no whole number of hashes"
            raise RequestError(ErrorCode.HASHES, fault)
        if lookup.tails and (len(lookup.tails) % HASH_BYTES or units_per_chunk(geometry) < 2):
            fault = f"{len(lookup.tails)} bytes are no names of tails of this session's chunks"
            raise RequestError(ErrorCode.HASHES, fault)
        is_waiting = self.promotion.is_waiting(connection.number, lookup.lease)
        is_taken = is_waiting or lookup.lease in session.leases
        if lookup.audit_lease:
            is_taken |= lookup.audit_lease in (lookup.lease, *session.leases)
        if is_taken or len(session.leases) >= LEASES_MAX:
            fault = f"lease {lookup.lease} is taken, or {LEASES_MAX} leases are open"
            raise RequestError(ErrorCode.LEASE, fault)
        # A hit of more chunks might need more slots than fit in a message.
        hashes = lookup.hashes[: BATCH_MAX // len(geometry.groups) * HASH_BYTES]
        present = masks, entries, chunks = resident_chunks(namespace, geometry, hashes)
        self.counters["lookups"] += 1
        self.counters["chunks_asked"] += len(entries)
        self.counters["tokens_asked"] += len(entries) * geometry.chunk_tokens
        names = connection.number, lookup.id, lookup.lease
        times = self.now, self.now + lookup.wait_ms / 1e3
        asked = LookupRequest(
            *(*names, namespace, geometry, hashes, *times, lookup.tokens_per_second),
            *(PromptHit(chunks, 0, chunks * geometry.chunk_tokens), lookup.tails),
            *(lookup.tails_from, lookup.audit_lease),
        )
        tail, tails = resident_tail(asked, masks, chunks)[0], len(lookup.tails) // HASH_BYTES
        asked = asked._replace(resident=asked.hit_of(chunks, tail))
        last = tail_chunk(geometry, lookup.tails_from, tails - 1) if tail < tails else -1
        why = ""
        if self.tiers and lookup.wait_ms and (chunks < len(entries) or last >= chunks):
            waiting = WaitingLookup(asked)
            if self.promotion.begin(waiting, masks, self.now):
                target = waiting.plan.target
                return wire.Pending(lookup.id, lookup.lease, lookup.wait_ms, target, masks)
            why = waiting.why
            if waiting.search.located:
                # Room for what then did not come may have been made at the cost of other chunks.
                present = resident_chunks(namespace, geometry, hashes)
        return self._found(asked, present, {}, why)

    def _answer_ended(self, ended: Iterable[WaitingLookup]) -> None:
        """Answer lookups that waited for tiers, from what RAM has now."""
        for waiting in ended:
            asked = waiting.request
            present = resident_chunks(asked.namespace, asked.geometry, asked.hashes)
            self.waits.add(self.now - asked.asked_at)
            found = self._found(asked, present, waiting.origins, waiting.why)
            self.later.append((asked.connection_id, found))
            self.store.unpin(waiting.held)

    def _found(
        self, asked: LookupRequest, present: _Present, origins: Mapping[int, str], why: str
    ) -> wire.Found:
        """Open the lease of a hit; the answer. `origins` are the tiers that chunks came from."""
        masks, entries, chunks = present
        session = self.sessions.connections[asked.connection_id].session
        geometry, identity = session.geometry, session.namespace.identity
        if asked.namespace is session.namespace:
            self.ceiling.answered(identity, geometry, asked.hashes, masks, chunks)
        else:
            # The engine has other weights by now.
            masks, chunks = [bytes(len(mask)) for mask in masks], 0
        slots: list[Slot] = []
        tokens, tail = chunks * geometry.chunk_tokens, 0
        if asked.tails and asked.namespace is session.namespace:
            tail, of_tail = resident_tail(asked, masks, chunks)
        if tail:
            chunks = tail_chunk(geometry, asked.tails_from, tail - 1) + 1
            tokens = tail_tokens(geometry, asked.tails_from, tail - 1)
            entries = [*entries[: chunks - 1], of_tail]
            self.counters["tails_hit"] += 1
        tiers: dict[str, int] = {}
        for _, name in sorted((chunk, name) for chunk, name in origins.items() if chunk < chunks):
            tiers[name] = tiers.get(name, 0) + 1
            self.labelled["tier_chunks_hit", name] += 1
        if chunks:
            for index, group in enumerate(geometry.groups):
                need = needed_chunks(geometry, group, chunks)
                needed = entries[need.start : need.stop]
                # Every entry of a hit is whole.
                slots += [entry[index] for entry in needed]  # type: ignore[index, misc]
            self.demotion.queue_hit(slots)
            self.store.pin(slots)
            session.leases[asked.lease] = slots
            session.asked[asked.lease] = asked.asked_at, asked.tokens_per_second
            self.counters["lookups_hit"] += 1
            self.counters["chunks_hit"] += chunks
            self.counters["tokens_hit"] += tokens
        audit = None
        if asked.audit_lease and not tail and asked.namespace is session.namespace:
            audit = self._audit_offer(session, asked, (masks, entries, chunks))
        packed = slot_requests.pack_slots(slots)
        if self.spans is not None:
            facts: dict[str, str | int] = {
                "engine": session.engine_id,
                "identity": identity.hex()[:12],
                "asked_tokens": len(entries) * geometry.chunk_tokens,
                "hit_tokens": tokens,
                "why": why,
                **{f"chunks_from_{name}": count for name, count in tiers.items()},
            }
            span = self.spans.put("lookup", (asked.asked_at, self.now), facts)
            if chunks:
                session.spans[asked.lease] = self.now, span
        why = why[: wire.FACT_MAX]  # An error's text may be of any length.
        return wire.Found(asked.id, asked.lease, chunks, masks, *packed, tiers, why, tail, audit)

    def _audit_offer(
        self, session: Session, asked: LookupRequest, present: _Present
    ) -> wire.AuditOffer | None:
        """Open the audit's lease on what can be compared; None where nothing can be.

        That is the last chunk of the hit, if the hit before it is one too. Else it is what the
        groups have of the chunk behind the hit, which the engine computes anyway.
        """
        masks, entries, chunks = present
        geometry = session.geometry
        shorter: list[Slot] = []
        is_last = chunks > 0 and largest_hit(geometry, masks, chunks - 1) == chunks - 1
        if is_last:
            for index, group in enumerate(geometry.groups):
                need = needed_chunks(geometry, group, chunks - 1)
                # Every entry of a hit is whole.
                shorter += [entry[index] for entry in entries[need.start : need.stop]]  # type: ignore[index, misc]
        chunk = chunks - is_last
        entry = entries[chunk] if chunk < len(entries) else None
        compared = [slot for slot in entry or () if slot is not None]
        is_taken = asked.audit_lease in session.leases or len(session.leases) >= LEASES_MAX
        if entry is None or not compared or is_taken:
            return None
        leased = [*shorter, *compared]
        self.store.hold(leased)  # A proof is no use.
        session.leases[asked.audit_lease] = leased
        session.asked[asked.audit_lease] = asked.asked_at, asked.tokens_per_second
        offsets = pack_u64([slot.offset if slot is not None else 0 for slot in entry])
        generations = pack_u64([slot.generation if slot is not None else 0 for slot in entry])
        names = asked.audit_lease, chunk
        return wire.AuditOffer(*names, offsets, generations, *slot_requests.pack_slots(shorter))

    def _release(self, connection: ClientConnection, release: wire.Release) -> None:
        session = connection.session
        self.promotion.cancel(connection.number, release.lease)
        slots = session.leases.pop(release.lease, None)
        if slots is not None:
            if release.tokens or release.failed:
                for slot in slots:
                    slot.is_doubted = release.failed
            self.store.unpin(slots)
        asked_at, speed = session.asked.pop(release.lease, (0.0, 0))
        if release.tokens or release.failed:
            self.saved.add(release.tokens, speed, self.now - asked_at)
        since, span = session.spans.pop(release.lease, (0.0, None))
        if self.spans is not None and span is not None:
            facts = {"tokens": release.tokens, "bytes": release.loaded_bytes}
            error = "the load failed" if release.failed else ""
            self.spans.put("load", (since, self.now), facts, span, error)
        self.counters["tokens_loaded"] += release.tokens
        self.counters["bytes_loaded"] += release.loaded_bytes
        self.counters["loads_failed"] += release.failed

    # What people ask

    def _stats(self, _: ClientConnection, stats: wire.Stats) -> Reply:
        values, tiers = self.view.values().named(), self.view.tiers()
        status = self.view.status(self.now) if stats.status else None
        return wire.Report(stats.id, values, tiers, self.metrics_url, status)

    def _list_engines(self, _: ClientConnection, request: wire.ListEngines) -> Reply:
        engines = []
        for one in self.sessions.all:
            about = wire.geometry_to_wire(one.geometry), one.model
            engines.append(wire.WireEngine(one.engine_id, one.namespace.identity, *about))
        return wire.Engines(request.id, engines)

    def _report_request(self, connection: ClientConnection, told: wire.ReportRequest) -> None:
        ended = told.request_id, connection.session.namespace.identity, told.explanation
        self.history.add_request(RequestOutcome(*ended, self.now))

    def _report_audit(self, connection: ClientConnection, told: wire.ReportAudit) -> None:
        self.counters[AUDIT_COUNTERS[told.outcome]] += 1
        known = self.history.known(told.request_id)
        if known is not None:
            explanation = replace(known.explanation, audit=told.outcome, audit_detail=told.detail)
            self.history.add_request(known._replace(explanation=explanation))

    def _report_identity(self, connection: ClientConnection, told: wire.ReportIdentity) -> None:
        in_use = {session.namespace.identity for session in self.sessions.all}
        self.history.add_identity(connection.session.namespace.identity, told.facts, in_use)

    def _explain(self, _: ClientConnection, explain: wire.Explain) -> Reply:
        history = self.history
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


def resident_chunks(namespace: Namespace, geometry: Geometry, hashes: bytes) -> _Present:
    """What RAM has of some chunks."""
    masks, entries = namespace.present(hashes)
    return masks, entries, largest_hit(geometry, masks, len(entries))


def resident_tail(
    asked: LookupRequest, masks: Sequence[bytes], chunks: int
) -> tuple[int, Sequence[Slot | None]]:
    """(the number from 1 on, the objects) of the longest tail that RAM has behind a hit of `chunks`
    chunks; 0 = none. `masks` are those of whole chunks.
    """
    geometry, entries = asked.geometry, asked.namespace.entries
    chunks_max = BATCH_MAX // len(geometry.groups)

    def objects(number: int) -> Sequence[Slot | None]:
        entry = entries.get(asked.tails[number * HASH_BYTES : (number + 1) * HASH_BYTES])
        return () if entry is None else entry.slots

    def is_whole(number: int) -> bool:
        there = objects(number)
        is_short = tail_chunk(geometry, asked.tails_from, number) < chunks_max
        return bool(there) and all(there) and is_short

    count = len(asked.tails) // HASH_BYTES
    tail = longest_tail(geometry, masks, chunks, asked.tails_from, count, is_whole)
    return tail, objects(tail - 1) if tail else ()
