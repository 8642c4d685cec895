"""Live audits: which hits are audited, and what follows from what the workers find.

    offered   the daemon has named stored objects of a chunk that the engine may compute
    begun     the engine computes the chunk, which is stored once more, as after a miss
    compared  the workers compare both slots of each object before the new one is committed

There is one audit at a time. A request loses at most one chunk of its hit by it, and waits for
nothing. What is stored for an audit is a duplicate, which the daemon gives back.
"""

import logging
from dataclasses import dataclass, field

from msgspec.structs import replace

from hybridkv.connector.messages import ObjectPair, StepPlan, StepReport
from hybridkv.connector.scheduler.requests import (
    RequestRegistry,
    RequestState,
    TrackedRequest,
    wire_name,
)
from hybridkv.core.audit import AuditBudget, AuditOutcome, AuditVerdict, worst
from hybridkv.core.copies import CopyRun, SlotRef
from hybridkv.core.packed import U64, pack_u64, unpack_u64
from hybridkv.wire.messages import FACT_MAX, AuditOffer, Found, Release, ReportAudit, ReportCorrupt

logger = logging.getLogger("vllm.hybridkv")

AUDIT_STEPS_MAX = 32
"""Steps after that which computed the chunk, in which its objects may still be stored: slots may
be short, and not every recurrent layer's state is kept."""
AUDIT_SECONDS_MAX = 60.0  # The longest that workers may take to compare an object.


@dataclass(eq=False, slots=True)
class AuditedObject:
    """One object of the chunk that is stored for the second time."""

    run: CopyRun
    place: int  # In the run.
    pair: ObjectPair
    is_stored: bool = False  # Whether all ranks have written it.
    sent_at: float = 0.0  # When the workers were told to compare, in monotonic seconds.
    verdicts: dict[int, AuditVerdict] = field(default_factory=dict)  # By rank.
    verdict: AuditVerdict | None = None  # Of all ranks; None until it is over.


@dataclass(eq=False, slots=True)
class Audit:
    """The audit of one request's hit."""

    tracked: TrackedRequest
    identity: bytes
    offer: AuditOffer
    lease: int  # What keeps the stored objects of the chunk where they are.
    found: Found | None = None  # The hit that the request has instead; None until it is begun.
    steps: int = 0  # Steps since the chunk was computed.
    objects: dict[int, AuditedObject] = field(default_factory=dict)
    """By the number of the store run that each is in."""

    def stored(self, group_index: int) -> SlotRef | None:
        """The slot of a group's stored object; None where there is none."""
        at = group_index * U64
        (offset,) = unpack_u64(self.offer.offsets[at : at + U64])
        (generation,) = unpack_u64(self.offer.generations[at : at + U64])
        return SlotRef(offset, generation) if generation else None

    def is_complete(self, groups: int) -> bool:
        """Whether every object that is stored was compared."""
        over = {item.pair.group_index for item in self.objects.values() if item.verdict}
        return all(index in over or self.stored(index) is None for index in range(groups))


class Audits:
    """The audits of one engine. `now` is monotonic seconds."""

    def __init__(self, requests: RequestRegistry, budget: AuditBudget) -> None:
        self._requests = requests
        self._session = requests.session
        self._geometry = requests.geometry
        self._counters = requests.counters
        self.budget = budget
        self._audit: Audit | None = None

    @property
    def identity(self) -> bytes:
        """That of the session."""
        return self._session.hello.namespace or b""

    @property
    def is_cut_off(self) -> bool:
        """Whether an audit has differed: nothing is loaded or stored under this identity."""
        return self.identity in self.budget.cut_off

    def lease_for_lookup(self, tracked: TrackedRequest) -> int:
        """The number of the lease by which a lookup asks for an audit; 0 = none is due.

        Prompts with images are left out: what an encoder made of them differs by more than the last
        bits in the first layer.
        """
        if self._audit is not None or getattr(tracked.request, "mm_features", None):
            return 0
        if not self.budget.is_due(self.identity):
            return 0
        return self._requests.next_lease()

    def answered(self, tracked: TrackedRequest, found: Found, now: float) -> None:
        """Keep what an answer offers to audit, or end its lease."""
        offer = found.audit
        if offer is None:
            return
        packed = len(self._geometry.groups) * U64
        is_sound = len(offer.offsets) == packed == len(offer.generations) and not found.tail
        is_near = offer.chunk in (found.chunks, found.chunks - 1)
        if self._audit is None and is_sound and is_near and not self.is_cut_off:
            self._audit = Audit(tracked, self.identity, offer, offer.lease)
        else:
            self._release(offer.lease, now)

    def refused(self, found: Found, now: float) -> None:
        """End the lease of an answer that nobody waits for."""
        if found.audit is not None:
            self._release(found.audit.lease, now)

    def begin(self, tracked: TrackedRequest, local_tokens: int, now: float) -> None:
        """Give a request the shorter hit, if it is to be audited and the engine has not more.

        The engine asks about a request again and again; only the first time changes something.
        """
        audit, found = self._audit, tracked.lookup.found
        if audit is None or audit.tracked is not tracked or audit.found or found is None:
            return
        chunk = audit.offer.chunk
        if local_tokens > chunk * self._geometry.chunk_tokens:
            # The chunk, or its beginning, is the engine's own: nobody would compute it.
            self._drop(now)
            return
        masks = [mask[:chunk] + b"\0" + mask[chunk + 1 :] for mask in found.masks]
        if chunk < found.chunks:
            lookup, offer = tracked.lookup, audit.offer
            slots = offer.shorter_offsets, offer.shorter_generations
            found = replace(
                found, chunks=chunk, masks=masks, offsets=slots[0], generations=slots[1]
            )
            # From here on the load has the lease of the shorter hit, and the audit the other.
            self._requests.by_lease.pop(lookup.lease, None)
            audit.lease, lookup.lease = lookup.lease, audit.lease
            self._requests.by_lease[lookup.lease] = tracked
        else:
            found = replace(found, masks=masks)
        tracked.lookup.found = audit.found = found
        self.budget.spent_tokens += self._geometry.chunk_tokens

    def began(self, tracked: TrackedRequest, number: int, run: CopyRun) -> None:
        """A store run of whole chunks has begun, which may have an object to compare."""
        audit = self._audit
        if audit is None or audit.found is None or audit.tracked is not tracked:
            return
        span, place = run.span, audit.offer.chunk - run.span.first_chunk
        stored = audit.stored(span.group_index)
        if stored is None or not 0 <= place < run.objects:
            return
        at = place * U64
        (offset,) = unpack_u64(run.offsets[at : at + U64])
        (generation,) = unpack_u64(run.generations[at : at + U64])
        computed = SlotRef(offset, generation)
        pair = ObjectPair(span.group_index, audit.offer.chunk, span.count, stored, computed)
        audit.objects[number] = AuditedObject(run, place, pair)

    def must_wait(self, run: CopyRun, unstored: frozenset[int]) -> bool:
        """Whether a run that all ranks have reported must not be committed before it is compared.

        `unstored` are its objects that some rank did not write.
        """
        objects = self._audit.objects.values() if self._audit is not None else ()
        item = next((item for item in objects if item.run is run), None)
        if item is None or item.verdict is not None:
            return False
        if item.place in unstored:
            item.verdict = AuditVerdict(AuditOutcome.UNMADE)
            return False
        item.is_stored = True
        return True

    def put_into(self, plan: StepPlan, now: float) -> None:
        """Tell the workers what to compare, and end an audit that nothing more will come of."""
        audit = self._audit
        if audit is None:
            return
        request = audit.tracked.request
        if request.num_computed_tokens >= (audit.offer.chunk + 1) * self._geometry.chunk_tokens:
            audit.steps += 1
        self.settle(now)
        if self._audit is not audit:
            return
        for number, item in audit.objects.items():
            if item.is_stored and not item.sent_at and item.verdict is None:
                item.sent_at = now
                plan.audits[number] = item.pair

    def take(self, report: StepReport, now: float) -> bool:
        """Take what the workers found; whether the engine is cut off by it."""
        audit = self._audit
        if audit is None:
            return False
        for number, verdicts in report.audits.items():
            item = audit.objects.get(number)
            if item is None or item.verdict is not None:
                continue
            item.verdicts.update(verdicts)
            if len(item.verdicts) >= self._geometry.ranks:
                item.verdict = worst(list(item.verdicts.values()))
        self.settle(now)
        return self.is_cut_off

    def settle(self, now: float) -> None:
        """End the audit if it is over."""
        audit = self._audit
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
                item.verdict = AuditVerdict(AuditOutcome.UNMADE)
        verdicts = [item.verdict for item in audit.objects.values() if item.verdict]
        verdict = worst(verdicts)
        if verdict.outcome is not AuditOutcome.DIFFERED:
            if len(verdicts) < len(audit.objects):
                return
            is_over = tracked.state is RequestState.DONE or audit.steps > AUDIT_STEPS_MAX
            if not is_over and not audit.is_complete(len(self._geometry.groups)):
                return
        self._finish(audit, verdict, now)

    def reset(self, now: float) -> None:
        """What the engine computes from here on may be of other weights."""
        if self._audit is not None:
            self._drop(now)

    def identify(self, now: float) -> None:
        """The weights are others: the next hit is audited."""
        self.reset(now)
        self.budget.identify()

    def lost(self) -> None:
        """The connection is lost, and every lease with it."""
        self._audit = None

    def count_prefill(self, tracked: TrackedRequest) -> None:
        """A request ended: count the prompt tokens that were computed."""
        had = (tracked.local_seen or 0) + tracked.load.total[0]
        self.budget.prefilled_tokens += max(0, tracked.request.num_prompt_tokens - had)

    def _finish(self, audit: Audit, verdict: AuditVerdict, now: float) -> None:
        tracked = audit.tracked
        outcome, detail = verdict.outcome, verdict.sentence
        self.budget.ended(audit.identity, outcome)
        self._counters[f"audits_{outcome}"] += 1
        tracked.audited = verdict
        self._session.send(ReportAudit(wire_name(tracked), outcome, detail[:FACT_MAX]), now)
        if outcome is AuditOutcome.DIFFERED:
            text = (
                "hybridkv: the live audit of %s found that this engine computes other bytes than "
                "are stored under its identity (%s); it neither loads nor stores under it any "
                "more, and reset_prefix_cache drops what it has loaded"
            )
            logger.error(text, tracked.request.request_id, detail)
            differing = [
                item.pair.stored
                for item in audit.objects.values()
                if item.verdict and item.verdict.outcome is AuditOutcome.DIFFERED
            ]
            offsets = pack_u64([slot.offset for slot in differing])
            generations = pack_u64([slot.generation for slot in differing])
            self._session.send(ReportCorrupt(offsets, generations), now)
        self._drop(now)

    def _drop(self, now: float) -> None:
        audit, self._audit = self._audit, None
        if audit is not None:
            self._release(audit.lease, now)

    def _release(self, lease: int, now: float) -> None:
        self._session.send(Release(lease), now)
