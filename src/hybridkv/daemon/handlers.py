"""The decisions of the daemon: requests in, replies out, without socket, clock, thread or file."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from msgspec.structs import replace

from hybridkv.core.audit import AuditOutcome
from hybridkv.core.coverage import largest_hit, whole_hit
from hybridkv.core.keys import HASH_BYTES
from hybridkv.core.tails import tail_chunk
from hybridkv.daemon import prefetch_requests, slot_requests
from hybridkv.daemon.sessions import (
    ClientConnection,
    CountedLookup,
    Lease,
    RequestError,
    Session,
    check_names,
)
from hybridkv.daemon.state import DaemonState
from hybridkv.daemon.subscriptions import OutgoingMessage
from hybridkv.daemon.view import DaemonView
from hybridkv.observe.history import RequestOutcome
from hybridkv.store.store import Store
from hybridkv.tiers.health import TierState
from hybridkv.tiers.jobs import JobKind, JobOutcome, TierJob
from hybridkv.tiers.object_search import LookupKey, LookupRequest, ObjectSearch
from hybridkv.tiers.prefetches import PromptNames
from hybridkv.tiers.promotion import WaitingLookup
from hybridkv.tiers.resident import ResidentHit, resident_hit, resident_of
from hybridkv.wire import messages as wire
from hybridkv.wire.messages import BATCH_MAX, PROTOCOL_VERSION, Reply, Request
from hybridkv.wire.protocol import RULES, ErrorCode, refused

LEASES_MAX = 1 << 16
LATEST_MAX = 20
AUDIT_COUNTERS: Mapping[AuditOutcome, str] = {
    AuditOutcome.PASSED: "audits_passed",
    AuditOutcome.DIFFERED: "audits_differed",
    AuditOutcome.INCONCLUSIVE: "audits_unmade",
}


class Daemon(DaemonState):
    """The daemon's answers to messages and events. Times are seconds of one clock."""

    def __init__(
        self, store: Store, welcome: wire.Welcome, tiers: Sequence[TierState] = ()
    ) -> None:
        super().__init__(store, welcome, tiers)
        self.view = DaemonView(self)
        self._handlers: Mapping[type[Request], Callable[[ClientConnection, Any], Reply | None]] = {
            wire.Hello: self._hello,
            wire.Drained: self.sessions.on_drained,
            wire.ReportMapping: self._report_mapping,
            wire.ReportStale: self._report_stale,
            wire.Identify: self._identify,
            wire.Subscribe: self.subscriptions.subscribe,
            wire.Describe: self.subscriptions.describe,
            wire.ReadAnnouncements: self.subscriptions.read_announcements,
            wire.Lookup: self._lookup,
            wire.Release: self._release,
            wire.Computing: self._computing,
            wire.Computed: self._computed,
            wire.Advise: self._advise,
            wire.Prefetch: partial(prefetch_requests.prefetch, self),
            wire.StartPrefetch: partial(prefetch_requests.start, self),
            wire.ReadPrefetches: partial(prefetch_requests.read, self),
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
            wire.Pin: self._pin,
            wire.ListObjects: self.inventory.read_page,
            wire.Forget: self.forgetting.forget_keys,
            wire.ReadQuotas: self.quotas.read_quotas,
            wire.SetQuota: self.quotas.change_quota,
        }

    # Events

    def on_disconnect(self, connection_id: int) -> None:
        """The socket of a connection was closed. Its process may still copy."""
        self.promotion.cancel(connection_id)
        self.promotion.node_waits.on_disconnect(connection_id)
        self.promotion.room_waits.on_disconnect(connection_id)
        self.promises.on_disconnect(connection_id)
        self.inventory.on_disconnect(connection_id)
        self.forgetting.on_disconnect(connection_id)
        self.subscriptions.on_disconnect(connection_id)
        self.sessions.on_disconnect(connection_id)

    def tick(self, now: float) -> None:
        """Do everything that is due. To be called after other events, and at `wakes_at`."""
        self.now = now
        for tier in self.tiers:
            tier.tick(now)
        self._answer_waiting(self.promotion.tick(now))
        self.advice.tick(now)
        self.prefetches.tick(now)
        if self.tiers:
            self.demotion.tick(now)
        self.forgetting.tick()
        self.quotas.tick()
        self.outgoing.extend(self.subscriptions.take_due(now))
        self.view.tick(now)

    def wakes_at(self) -> float:
        """Return when `tick` has something to do, if no event comes before."""
        return min(
            self.promotion.wakes_at(),
            self.advice.wakes_at(),
            self.prefetches.wakes_at(),
            self.demotion.wakes_at(),
            self.forgetting.wakes_at(),
            self.quotas.wakes_at(),
            self.view.wakes_at(),
            *(tier.wakes_at() for tier in self.tiers),
        )

    def on_job_done(self, job: TierJob, outcome: JobOutcome, now: float) -> None:
        """A thread of a tier has ended a job."""
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
            self.spans.add_span(f"tier {job.kind}", (job.submitted_at, now), facts, error=error)
        match job.kind:
            case JobKind.READ:
                self.demotion.queue_stored(self.promotion.on_read_done(job, outcome, now))
            case JobKind.FIND:
                self.promotion.on_find_done(job, outcome)
            case JobKind.WRITE:
                self.demotion.on_write_done(tier, job, outcome)
            case JobKind.USE:
                self.demotion.on_use_done(tier, job, outcome)
            case JobKind.LIST:
                self.inventory.on_page_read(job, outcome)
            case JobKind.ERASE:
                self.forgetting.on_erased(job, outcome)
            case JobKind.OPEN if tier.is_open and not was_open:
                self.demotion.queue_all(self.sessions.stored_slots())
                self.subscriptions.on_tier_opened()

    def handle(self, connection_id: int, request: Request, now: float = 0.0) -> Reply | None:
        """Handle a message and return the reply to it. None for a one-way message.

        The reply to a lookup that waits is Pending, and its Found comes by `outgoing`. After an
        Error whose code closes (wire.protocol), nothing more of this connection may be handled.
        """
        self.now = now
        connection = self.sessions.connections[connection_id]
        self.requests[type(request).__name__.lower()] += 1
        self.subscriptions.on_message(connection_id)
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
        """Return the Error for a refused request, and count it. The message is cut to fit."""
        self.refused[str(code)] += 1
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
        try:
            session.namespace = self.sessions.namespace_of(
                request.namespace, session.geometry, session.model
            )
        except RequestError as error:
            # The bytes are not of the old identity any more, so the connection ends.
            raise RequestError(ErrorCode.IDENTIFY) from error
        self.subscriptions.on_identified(connection)
        return wire.Done(request.id, 0)

    def _report_mapping(self, connection: ClientConnection, report: wire.ReportMapping) -> None:
        connection.is_unmapped = not report.is_mapped
        self.counters["mappings_failed"] += connection.is_unmapped

    def _report_stale(self, connection: ClientConnection, report: wire.ReportStale) -> None:
        connection.is_stale, connection.unread_modules = report.is_stale, report.unread

    # Lookups

    def _lookup(self, connection: ClientConnection, lookup: wire.Lookup) -> Reply:
        """Answer a lookup from RAM, or begin to wait for tiers. Raises RequestError."""
        session = connection.session
        namespace, geometry = session.namespace, session.geometry
        self._check_lookup(connection, lookup)
        # A hit of more chunks might need more slots than fit in a message.
        hashes = lookup.hashes[: BATCH_MAX // len(geometry.groups) * HASH_BYTES]
        resident = resident_hit(namespace, geometry, hashes, lookup.tails, lookup.tails_from)
        masks, hit, tails = resident.masks, resident.hit, len(lookup.tails) // HASH_BYTES
        self.counters["lookups"] += 1
        request = LookupRequest(
            connection_id=connection.number,
            id=lookup.id,
            lease=lookup.lease,
            namespace=namespace,
            geometry=geometry,
            hashes=hashes,
            asked_at=self.now,
            deadline=self.now + lookup.wait_ms / 1e3,
            tokens_per_second=lookup.tokens_per_second,
            resident=hit,
            tails=lookup.tails,
            tails_from=lookup.tails_from,
            audit_lease=lookup.audit_lease,
            promises=lookup.promises,
            computed_elsewhere=lookup.computed_elsewhere,
            is_scan=lookup.is_scan,
        )
        if self.tiers and hashes:
            self.recent_prompts.remember_prompt(
                PromptNames(namespace, geometry, hashes, lookup.tails, lookup.tails_from)
            )
        last = tail_chunk(geometry, lookup.tails_from, tails - 1) if hit.tail < tails else -1
        shortfall, known = "", masks
        is_short = hit.chunks < len(resident.entries) or last >= hit.chunks
        may_come = bool(self.tiers) or self.promises.has_promises(namespace)
        if may_come and lookup.wait_ms and is_short:
            waiting = WaitingLookup(request, ObjectSearch(request, masks))
            if self.promotion.begin(waiting, self.now):
                target = waiting.target_depth
                return wire.Pending(lookup.id, lookup.lease, lookup.wait_ms, target, masks)
            self.store.unpin(waiting.held)
            shortfall = waiting.why
            if waiting.search.located:
                # Chunks may have been evicted for objects that then were not read.
                known = waiting.search.masks()
                resident = resident_of(request)
        return self._answer_lookup(request, resident, known, {}, shortfall)

    def _check_lookup(self, connection: ClientConnection, lookup: wire.Lookup) -> None:
        """Raise RequestError where a lookup cannot be answered as it is."""
        session = connection.session
        check_names(session.geometry, lookup.hashes, lookup.tails)
        is_waiting = self.promotion.is_waiting(connection.number, lookup.lease)
        is_taken = is_waiting or lookup.lease in session.leases
        if lookup.audit_lease:
            is_taken |= lookup.audit_lease in (lookup.lease, *session.leases)
        if is_taken or len(session.leases) >= LEASES_MAX:
            fault = f"lease {lookup.lease} is taken, or {LEASES_MAX} leases are open"
            raise RequestError(ErrorCode.LEASE, fault)

    def _answer_waiting(self, ended: Iterable[WaitingLookup]) -> None:
        """Answer lookups whose wait for tiers has ended, from what RAM has now."""
        for waiting in ended:
            request = waiting.request
            if request.is_prefetch:
                self.prefetches.on_prefetch_read(waiting, self.now)
                continue
            resident = resident_of(request)
            self.waits.add_duration(self.now - request.asked_at)
            known = waiting.search.masks()
            found = self._answer_lookup(request, resident, known, waiting.origins, waiting.why)
            self.outgoing.append(OutgoingMessage(request.connection_id, found))
            self.store.unpin(waiting.held)

    def _answer_lookup(
        self,
        request: LookupRequest,
        resident: ResidentHit,
        known_masks: Sequence[bytes],
        origins: Mapping[int, str],
        shortfall: str,
    ) -> wire.Found:
        """Open the lease of a hit, and return the answer to the lookup.

        `known_masks` are the presence masks of what RAM or a tier is known to have. `origins` are
        the tiers from which chunks came for it. `shortfall` is why no more came.
        """
        session = self.sessions.connections[request.connection_id].session
        geometry, identity = session.geometry, session.namespace.identity
        is_current = request.namespace is session.namespace
        if not is_current:
            # The engine has other weights by now.
            nothing = [bytes(len(mask)) for mask in resident.masks]
            resident = ResidentHit(nothing, resident.entries, whole_hit(geometry, 0))
        hit = resident.hit
        # A prompt that goes on after a tail is about to store a tail of its own.
        goes_on = hit.tail < len(request.tails) // HASH_BYTES
        tiers = self._count_origins(origins, hit.depth)
        slots = resident.needed_slots()
        others = self.sessions.engines_of(session.namespace) > 1
        is_promised = (
            request.promises
            and is_current
            and others
            and self.promises.add_promise(request, hit, self.now)
        )
        lease = None
        if hit.depth:
            if request.is_scan:
                self.store.hold(slots)
            else:
                self.demotion.queue_hit(slots)
                self.store.pin(slots, filter(None, resident.tail) if goes_on else ())
            lease = Lease(slots, request.asked_at, request.tokens_per_second, opened_at=self.now)
            lease.lookup = CountedLookup(request, known_masks, hit)
            session.leases[request.lease] = lease
        elif is_current:
            self._count_lookup(CountedLookup(request, known_masks, hit))
        audit = None
        if request.audit_lease and not hit.tail and is_current:
            audit = self._offer_audit(session, request, resident)
        if self.spans is not None:
            facts: dict[str, str | int] = {
                "engine": session.engine_id,
                "identity": identity.hex()[:12],
                "asked_tokens": request.chunks * geometry.chunk_tokens,
                "hit_tokens": hit.tokens,
                "why": shortfall,
                **{f"chunks_from_{name}": count for name, count in tiers.items()},
            }
            span = self.spans.add_span("lookup", (request.asked_at, self.now), facts)
            if lease is not None:
                lease.span = span
        return wire.Found(
            id=request.id,
            lease=request.lease,
            depth=hit.depth,
            masks=resident.masks,
            slots=slot_requests.name_slots(slots),
            tiers=tiers,
            why=shortfall[: wire.FACT_MAX],  # An error's text may be of any length.
            tail=hit.tail,
            audit=audit,
            promised=is_promised,
            junctions=self.branches.junctions(
                request.geometry, known_masks, request.hashes, hit.depth, request.namespace.goes_on
            ),
        )

    def _count_origins(self, origins: Mapping[int, str], depth: int) -> dict[str, int]:
        """Return the number of a hit's chunks that came up for it, by tier, and count them."""
        tiers: dict[str, int] = {}
        for chunk, name in sorted(origins.items()):
            if chunk < depth:
                tiers[name] = tiers.get(name, 0) + 1
                self.tier_chunks_hit[name] += 1
        return tiers

    def _offer_audit(
        self, session: Session, request: LookupRequest, resident: ResidentHit
    ) -> wire.AuditOffer | None:
        """Open the audit's lease on objects that can be compared. None where there are none.

        These are the objects of the hit's last chunk, if the chunks before it are a hit too. Else
        they are those of the first chunk after the hit, which the engine computes anyway.
        """
        masks, entries, hit, _ = resident
        geometry, chunks = session.geometry, hit.chunks
        is_last = chunks > 0 and largest_hit(geometry, masks, chunks - 1) == chunks - 1
        shorter = (
            resident._replace(hit=whole_hit(geometry, chunks - 1)).needed_slots() if is_last else []
        )
        chunk = chunks - is_last
        entry = entries[chunk] if chunk < len(entries) else None
        is_taken = request.audit_lease in session.leases or len(session.leases) >= LEASES_MAX
        if entry is None or is_taken:
            return None
        compared = [slot for slot in entry.slots if slot is not None]
        leased = [*shorter, *compared]
        self.store.hold(leased)  # To compare an object is not to use it.
        session.leases[request.audit_lease] = Lease(
            leased, request.asked_at, request.tokens_per_second
        )
        return wire.AuditOffer(
            lease=request.audit_lease,
            chunk=chunk,
            slots=slot_requests.name_slots(entry.slots),
            shorter_slots=slot_requests.name_slots(shorter),
        )

    def _count_lookup(self, lookup: CountedLookup) -> None:
        """Count what was asked for and hit. A lookup is counted once, when its outcome is known."""
        request = lookup.request
        geometry, identity = request.geometry, request.namespace.identity
        self.counters["chunks_asked"] += request.chunks
        self.counters["tokens_asked"] += request.chunks * geometry.chunk_tokens
        self.counters["lookups_hit"] += bool(lookup.hit.depth)
        self.counters["chunks_hit"] += lookup.hit.depth
        self.counters["tokens_hit"] += lookup.hit.tokens
        self.ceiling.on_answered(
            identity, geometry, request.hashes, lookup.masks, lookup.hit.chunks
        )

    def _release(self, connection: ClientConnection, release: wire.Release) -> None:
        for waiting in self.promotion.cancel(connection.number, release.lease):
            # A lookup whose answer nobody needs any more is in no sum.
            if release.unused:
                masks, miss = waiting.search.masks(), whole_hit(waiting.request.geometry, 0)
                self._count_lookup(CountedLookup(waiting.request, masks, miss))
                self.counters["lookups_unused"] += 1
        lease = connection.session.leases.pop(release.lease, None)
        if lease is not None:
            self._end_lease(lease, release)
        self.counters["tokens_loaded"] += release.tokens
        self.counters["bytes_loaded"] += release.loaded_bytes
        self.counters["loads_failed"] += release.failed

    def _end_lease(self, lease: Lease, release: wire.Release) -> None:
        """Let go of the objects of a lease, and note the load that it was for, if there was one."""
        if lease.lookup is not None:
            is_unused = release.unused or release.failed
            self._count_lookup(lease.lookup.without_hit() if is_unused else lease.lookup)
            self.counters["lookups_unused"] += is_unused
        if release.tokens or release.failed:
            for slot in lease.slots:
                slot.replace_on_store = release.failed
            if lease.tokens_per_second:
                self.computing_seconds_spared += release.tokens / lease.tokens_per_second
                self.loading_seconds += self.now - lease.asked_at
        self.store.unpin(lease.slots)
        if self.spans is not None and lease.span is not None:
            times = lease.opened_at, self.now
            facts = {"tokens": release.tokens, "bytes": release.loaded_bytes}
            error = "the load failed" if release.failed else ""
            self.spans.add_span("load", times, facts, lease.span, error)

    def _computing(self, connection: ClientConnection, computing: wire.Computing) -> None:
        self.promises.begin_promise(LookupKey(connection.number, computing.lease), self.now)

    def _computed(self, connection: ClientConnection, computed: wire.Computed) -> None:
        self.promises.end_promise(LookupKey(connection.number, computed.lease))

    def _advise(self, connection: ClientConnection, advise: wire.Advise) -> None:
        self.advice.advise(connection, advise, self.now)

    # Questions of people and commands

    def _stats(self, _: ClientConnection, stats: wire.Stats) -> Reply:
        values = self.view.metric_values().named(stats.debug)
        status = self.view.status(self.now) if stats.status else None
        return wire.Report(stats.id, values, self.view.tiers(), self.metrics_url, status)

    def _list_engines(self, _: ClientConnection, request: wire.ListEngines) -> Reply:
        engines = [
            wire.WireEngine(
                engine_id=session.engine_id,
                namespace=session.namespace.identity,
                geometry=wire.geometry_to_wire(session.geometry),
                model=session.model,
            )
            for session in self.sessions.all
        ]
        return wire.Engines(request.id, engines)

    def _pin(self, connection: ClientConnection, pin: wire.Pin) -> Reply:
        return self.pins.answer(connection, pin, self.now)

    def _report_request(self, connection: ClientConnection, report: wire.ReportRequest) -> None:
        identity = connection.session.namespace.identity
        self.history.add_request(
            RequestOutcome(report.request_id, identity, report.explanation, self.now)
        )

    def _report_audit(self, connection: ClientConnection, report: wire.ReportAudit) -> None:
        self.counters[AUDIT_COUNTERS[report.outcome]] += 1
        known = self.history.known(report.request_id)
        if known is not None:
            explanation = replace(
                known.explanation, audit=report.outcome, audit_detail=report.detail
            )
            self.history.add_request(known._replace(explanation=explanation))

    def _report_identity(self, connection: ClientConnection, report: wire.ReportIdentity) -> None:
        in_use = {session.namespace.identity for session in self.sessions.all}
        self.history.add_identity(connection.session.namespace.identity, report.facts, in_use)

    def _explain(self, _: ClientConnection, explain: wire.Explain) -> Reply:
        history = self.history
        latest = [decision.request_id for decision in history.latest(LATEST_MAX)]
        known = history.find_request(explain.request_id)
        if known is None:
            return wire.Explained(explain.id, latest)
        others = [
            wire.OtherIdentity(
                namespace.identity, history.differences(known.identity, namespace.identity)
            )
            for namespace in self.sessions.namespaces.values()
            if namespace.identity != known.identity
            and known.explanation.first_chunk in namespace.entries
        ]
        return wire.Explained(explain.id, latest, known.identity, known.explanation, others)
