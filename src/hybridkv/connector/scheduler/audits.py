"""Live audits: which hits are audited, and what follows from the verdicts of the workers.

    offered   the daemon has named stored objects of a chunk that the engine may compute
    begun     the engine computes the chunk, which is stored once more, as after a miss
    compared  the workers compare both slots of each object before the new one is committed

There is one audit at a time. Its request loses at most one chunk of its hit, and waits for nothing.
The objects that are stored for an audit are duplicates, whose slots the daemon takes back.
"""

import logging
from dataclasses import dataclass, field

from msgspec.structs import replace

from hybridkv.connector.messages import ObjectPair, StepReport
from hybridkv.connector.metrics import audited
from hybridkv.connector.scheduler.listeners import EngineIdentity, Listener, Step
from hybridkv.connector.scheduler.requests import (
    Change,
    RequestRegistry,
    RequestState,
    TrackedRequest,
    wire_name,
)
from hybridkv.core.audit import AuditBudget, AuditOutcome, AuditVerdict, worst
from hybridkv.core.copies import CopyRun
from hybridkv.core.geometry import Geometry
from hybridkv.core.packed import batches
from hybridkv.wire.messages import (
    CHANGES_MAX,
    FACT_MAX,
    AuditOffer,
    Found,
    Release,
    ReportAudit,
    ReportCorrupt,
)

logger = logging.getLogger("vllm.hybridkv")

AUDIT_STEPS_MAX = 32
"""Steps in which the objects of a chunk that was computed may still be stored. Slots may be short,
and not every recurrent layer's state is kept."""
AUDIT_SECONDS_MAX = 60.0  # The longest that workers may take to compare an object.


@dataclass(eq=False, slots=True)
class AuditedObject:
    """One object of the chunk, which is stored for the second time."""

    run: CopyRun
    place: int  # The object's number in the run.
    pair: ObjectPair
    is_stored: bool = False  # True once all ranks have written it.
    sent_at: float = 0.0  # When the workers got the pair to compare, in monotonic seconds.
    verdicts: dict[int, AuditVerdict] = field(default_factory=dict)  # By rank.
    verdict: AuditVerdict | None = None  # The verdict of all ranks; None until it is known.


@dataclass(eq=False, slots=True)
class Audit:
    """The audit of one request's hit."""

    tracked: TrackedRequest
    identity: bytes
    offer: AuditOffer
    lease: int  # The lease that keeps the stored objects of the chunk in their slots.
    found: Found | None = None  # The shorter hit that the request has; None until it has it.
    steps: int = 0  # Steps since the chunk was computed.
    objects: dict[int, AuditedObject] = field(default_factory=dict)
    """The chunk's objects by the number of the store run that each is in."""

    def stored_ticket(self, group_index: int, size: int) -> bytes:
        """Return the ticket, of `size` bytes, of a group's stored object. Empty = there is none."""
        ticket = self.offer.slots[group_index * size : (group_index + 1) * size]
        return ticket if any(ticket) else b""

    def has_compared_all(self, geometry: Geometry) -> bool:
        """Return True if every stored object of the chunk was compared."""
        compared = {item.pair.group_index for item in self.objects.values() if item.verdict}
        size, groups = geometry.ticket_bytes, range(len(geometry.groups))
        return all(index in compared or not self.stored_ticket(index, size) for index in groups)


class Audits(Listener):
    """The audits of one engine. `now` is monotonic seconds."""

    def __init__(self, requests: RequestRegistry, budget: AuditBudget, identity: bytes) -> None:
        """`identity` is that of the engine at the daemon."""
        self._requests = requests
        self._daemon = requests.daemon
        self._geometry = requests.geometry
        self._counters = requests.counters
        self.budget = budget
        self.identity = identity
        self.current: Audit | None = None
        """The audit that is going on."""

    @property
    def is_cut_off(self) -> bool:
        """True once an audit has differed. Nothing is loaded or stored under this identity then."""
        return self.identity in self.budget.cut_off

    def lease_for_lookup(self, tracked: TrackedRequest) -> int:
        """Return the number of the lease by which a lookup asks for an audit. 0 = none is due.

        Prompts with images are left out: outputs of an encoder differ by more than the last bits in
        the first layer.
        """
        if self.current is not None or getattr(tracked.request, "mm_features", None):
            return 0
        if not self.budget.is_due(self.identity):
            return 0
        return self._requests.next_lease()

    def on_answer(self, tracked: TrackedRequest | None, found: Found, now: float) -> None:
        """Keep the audit that an answer offers, or end the lease of the offer.

        `tracked` is the request that takes the answer. None = there is none.
        """
        offer = found.audit
        if offer is None:
            return
        packed = len(self._geometry.groups) * self._geometry.ticket_bytes
        is_sound = len(offer.slots) == packed and not found.tail
        is_near = offer.chunk in (found.chunks, found.chunks - 1)
        is_free = self.current is None and not self.is_cut_off
        if tracked is not None and tracked.is_prefetching and is_free and is_sound and is_near:
            self.current = Audit(tracked, self.identity, offer, offer.lease)
        else:
            self._release(offer.lease, now)

    def offer_chunk(self, tracked: TrackedRequest, local_tokens: int, now: float) -> Change:
        """Give the audited request the shorter hit, unless the engine itself has the chunk.

        The engine asks about a request again and again. Only its first question changes something.
        """
        audit, found = self.current, tracked.lookup.found
        if audit is None or audit.tracked is not tracked or audit.found or found is None:
            return Change()
        chunk = audit.offer.chunk
        if local_tokens > chunk * self._geometry.chunk_tokens:
            # The engine has the chunk or its beginning, and would not compute it.
            self._drop(now)
            return Change()
        lookup, offer = tracked.lookup, audit.offer
        masks = [mask[:chunk] + b"\0" + mask[chunk + 1 :] for mask in found.masks]
        if chunk < found.chunks:
            found = replace(found, depth=chunk, masks=masks, slots=offer.shorter_slots)
            # From here on the load has the lease of the shorter hit, and the audit the other.
            lease, audit.lease = audit.lease, lookup.lease
            lookup = lookup._replace(lease=lease)
        else:
            found = replace(found, masks=masks)
        audit.found = found
        self.budget.spent_tokens += self._geometry.chunk_tokens
        return Change(lookup=lookup._replace(found=found))

    def on_store_begun(self, tracked: TrackedRequest, number: int, run: CopyRun) -> None:
        """Note the object to compare in a store run of whole chunks, if it has one."""
        audit = self.current
        if audit is None or audit.found is None or audit.tracked is not tracked:
            return
        span, place = run.span, audit.offer.chunk - run.span.first_chunk
        size = self._geometry.ticket_bytes
        stored = audit.stored_ticket(span.group_index, size)
        if not stored or not 0 <= place < run.objects:
            return
        tickets = stored + run.tickets[place * size : (place + 1) * size]
        pair = ObjectPair(span.group_index, audit.offer.chunk, span.count, tickets)
        audit.objects[number] = AuditedObject(run, place, pair)

    def must_wait(self, run: CopyRun, unstored: frozenset[int]) -> bool:
        """Return True if a run that all ranks have reported must be compared before its commit.

        `unstored` has the places in the run of objects that some rank did not write.
        """
        objects = self.current.objects.values() if self.current is not None else ()
        item = next((item for item in objects if item.run is run), None)
        if item is None or item.verdict is not None:
            return False
        if item.place in unstored:
            item.verdict = AuditVerdict(AuditOutcome.INCONCLUSIVE)
            return False
        item.is_stored = True
        return True

    def on_step_planned(self, step: Step, now: float) -> None:
        """Add the pairs to compare to a plan, and end an audit that has no more to wait for."""
        audit = self.current
        if audit is None:
            return
        request = audit.tracked.request
        if request.num_computed_tokens >= (audit.offer.chunk + 1) * self._geometry.chunk_tokens:
            audit.steps += 1
        self.end_if_over(now)
        if self.current is not audit:
            return
        for number, item in audit.objects.items():
            if item.is_stored and not item.sent_at and item.verdict is None:
                item.sent_at = now
                step.plan.audits[number] = item.pair

    def on_report(self, report: StepReport, now: float) -> None:
        """Take the verdicts of the workers."""
        audit = self.current
        if audit is None:
            return
        for number, verdicts in report.audits.items():
            item = audit.objects.get(number)
            if item is None or item.verdict is not None:
                continue
            item.verdicts.update(verdicts)
            if len(item.verdicts) >= self._geometry.ranks:
                item.verdict = worst(list(item.verdicts.values()))
        self.end_if_over(now)

    def end_if_over(self, now: float) -> None:
        """End the present audit if it is over."""
        audit = self.current
        if audit is None:
            return
        tracked = audit.tracked
        if audit.found is None:
            if not tracked.is_prefetching:
                self._drop(now)
            return
        if tracked.lookup.found is not audit.found and tracked.state is not RequestState.DONE:
            # The request is looked up anew, its load failed, or the weights are others.
            self._drop(now)
            return
        for item in audit.objects.values():
            if item.verdict is None and item.sent_at and now - item.sent_at > AUDIT_SECONDS_MAX:
                item.verdict = AuditVerdict(AuditOutcome.INCONCLUSIVE)
        verdicts = [item.verdict for item in audit.objects.values() if item.verdict]
        verdict = worst(verdicts)
        if verdict.outcome is not AuditOutcome.DIFFERED:
            if len(verdicts) < len(audit.objects):
                return
            is_over = tracked.state is RequestState.DONE or audit.steps > AUDIT_STEPS_MAX
            if not is_over and not audit.has_compared_all(self._geometry):
                return
        self.finish(audit, verdict, now)

    def on_reset(self, is_empty: bool, now: float) -> None:
        """Drop the audit, because the engine may compute with other weights from here on."""
        self._drop(now)

    def on_new_identity(self, identity: EngineIdentity, now: float) -> None:
        """Drop the audit, and make one due for the new weights."""
        self._drop(now)
        self.identity = identity.namespace
        self.budget.forget_audited()

    def on_connection_lost(self, now: float) -> None:
        self.current = None

    def count_prefill(self, tracked: TrackedRequest) -> None:
        """Count the prompt tokens that the engine computed for a request that ended."""
        cached_tokens = (tracked.local_seen or 0) + tracked.load.loaded_tokens
        self.budget.prefilled_tokens += max(0, tracked.request.num_prompt_tokens - cached_tokens)

    def finish(self, audit: Audit, verdict: AuditVerdict, now: float) -> None:
        tracked = audit.tracked
        outcome, detail = verdict.outcome, verdict.sentence
        self.budget.on_outcome(audit.identity, outcome)
        self._counters[audited(outcome)] += 1
        report = ReportAudit(wire_name(tracked), outcome, detail[:FACT_MAX])
        self._requests.advance(tracked, Change(audited=verdict, message=report), now)
        if outcome is AuditOutcome.DIFFERED:
            text = (
                "hybridkv: the live audit of %s found that this engine computes other bytes than "
                "are stored under its identity (%s), and nobody knows which of the two are wrong; "
                "it neither loads nor stores under it any more, reset_prefix_cache drops what it "
                "has loaded, and the objects of this hit are dropped for all engines"
            )
            logger.error(text, tracked.request.request_id, detail)
            self._drop_objects(audit, now)
        self._drop(now)

    def _drop_objects(self, audit: Audit, now: float) -> None:
        """Have the daemon drop all objects of an audited hit, whoever is wrong about them.

        What was computed wrongly in one chunk was so in the chunks around it, more or less.
        """
        offer, found = audit.offer, audit.found
        slots = offer.slots + (found.slots if found is not None else b"")
        for batch in batches(slots, CHANGES_MAX * self._geometry.ticket_bytes):
            self._daemon.queue_message(ReportCorrupt(batch), now)

    def _drop(self, now: float) -> None:
        audit, self.current = self.current, None
        if audit is not None:
            self._release(audit.lease, now)

    def _release(self, lease: int, now: float) -> None:
        self._daemon.queue_message(Release(lease), now)
