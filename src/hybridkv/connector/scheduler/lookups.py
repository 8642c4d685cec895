"""Lookups: what the daemon is asked about requests, and the offers to the engine.

A prompt waits for tiers below RAM no longer than computing it takes (D18), for the daemon no longer
than a per cent of that, and for nothing that could not add to the engine's own hit.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from hybridkv.connector import metrics
from hybridkv.connector.messages import StepReport
from hybridkv.connector.scheduler.audits import Audits
from hybridkv.connector.scheduler.context import EngineLife, SchedulerContext
from hybridkv.connector.scheduler.listeners import EngineIdentity, Listener, Step
from hybridkv.connector.scheduler.requests import (
    NO_CHANGE,
    Change,
    RequestEvent,
    RequestLookup,
    RequestRegistry,
    RequestState,
    TrackedRequest,
    hit_chunks_max,
    longest_hit_tokens,
)
from hybridkv.connector.scheduler.session import DaemonSession
from hybridkv.core.coverage import lacking
from hybridkv.core.geometry import Geometry, GroupKind
from hybridkv.core.keys import HASH_BYTES
from hybridkv.core.policies import LoadPolicy
from hybridkv.core.speed import PrefillSpeed
from hybridkv.core.tails import first_tail_chunk, tail_names, tail_tokens
from hybridkv.vllm.block_room import ROOM_SECONDS
from hybridkv.vllm.hints import WHY_UNREAD
from hybridkv.vllm.step_outputs import why_computed
from hybridkv.wire.messages import Decline, Found, Lookup, Pending

ANSWER_SHARE = 0.01
"""The share of the seconds which computing takes that a request waits for a late answer at most."""
OUTRUN_LEASES_MAX = 256  # Leases of the last lookups that were outrun.


class TierWait(NamedTuple):
    """How long a prompt may wait for tiers below RAM."""

    seconds: float
    tokens_per_second: int
    """The speed of prefill, which tiers are compared with. 0 = they are not compared."""


@dataclass
class Patience:
    """How long requests wait for the daemon and for tiers below RAM, by the speed of prefill."""

    policy: LoadPolicy
    seconds_max: float  # The value of `Settings.load_timeout_seconds`.
    answer_seconds_min: float  # The value of `Settings.lookup_timeout_ms`, in seconds.
    prefill: PrefillSpeed = field(default_factory=PrefillSpeed)

    def tier_wait(self, tokens: int) -> TierWait:
        """Return how long a prompt of `tokens` tokens may wait."""
        if self.policy is LoadPolicy.NEVER:
            return TierWait(0.0, 0)
        if self.policy is LoadPolicy.ALWAYS:
            return TierWait(self.seconds_max, 0)
        seconds = min(self.seconds_max, self.prefill.prefill_seconds(tokens))
        return TierWait(seconds, int(self.prefill.speed.per_second))

    def answer_seconds(self, tokens: int) -> float:
        """Return how long a prompt of `tokens` tokens waits for an answer, by any policy."""
        share = ANSWER_SHARE * self.prefill.prefill_seconds(tokens)
        return min(self.seconds_max, max(self.answer_seconds_min, share))


def may_be_computed_elsewhere(geometry: Geometry, tokens: int) -> bool:
    """Return True if another engine that computes a prompt of `tokens` stores what is looked up.

    The state of a prompt of whole chunks stands at its very end, where no hit can end.

    >>> may_be_computed_elsewhere(qwen3next, 3 * 256), may_be_computed_elsewhere(qwen3next, 800)
    (False, True)
    """
    has_states = any(group.kind is GroupKind.RECURRENT for group in geometry.groups)
    return not has_states or bool(tokens % geometry.chunk_tokens)


class LookupNames(NamedTuple):
    """The names of what a request's tokens may be found by, as in wire.Lookup."""

    hashes: bytes
    tails: bytes = b""
    tails_from: int = 0


class Offer(NamedTuple):
    """The answer to the engine that asks what it can load of a request."""

    tokens: int | None  # Tokens beyond the engine's own hit. None = it is to ask again.
    change: Change = NO_CHANGE  # What changes of the request with it.


class Lookups(Listener):
    """The lookups of one engine, and the offers that follow. `now` is monotonic seconds.

    What a lookup comes to is returned, and `RequestRegistry.advance` writes it.
    """

    def __init__(
        self,
        context: SchedulerContext,
        life: EngineLife,
        requests: RequestRegistry,
        session: DaemonSession,
        audits: Audits,
    ) -> None:
        settings = context.settings
        self.with_tails = context.with_tails
        """True if hits may end inside a chunk (core.tails)."""
        self._weights = life.weights
        self._audits = audits
        self.patience = Patience(
            settings.load_policy, settings.load_timeout_seconds, settings.lookup_timeout_ms / 1e3
        )
        self._answer_seconds_max = settings.load_timeout_seconds
        """The longest time beyond its deadline for an answer that steps bring (scheduler.nodes)."""
        # A daemon knows the engines of its node alone.
        self._promises = context.promises and context.geometry.nodes == 1
        self._computed_elsewhere = context.is_consumer and context.geometry.nodes == 1
        self._must_wait = False
        """True after a request ended before its answer, and the answer lacked what the engine has.
        Else requests of one step would never store it again."""
        self._outrun_leases: deque[int] = deque(maxlen=OUTRUN_LEASES_MAX)
        self._requests = requests
        self.geometry = requests.geometry
        self._session = session
        self._counters = requests.counters
        self.queued: list[TrackedRequest] = []
        """Requests whose lookups leave with the next flush of the link."""

    def on_step_planned(self, step: Step, now: float) -> None:
        tokens = step.output.total_num_scheduled_tokens
        self.patience.prefill.on_step_planned(step.plan.number, tokens, now)

    def on_report(self, report: StepReport, now: float) -> None:
        self.patience.prefill.on_step_reported(report.number, now)

    def on_new_identity(self, identity: EngineIdentity, now: float) -> None:
        """Let everything be stored again and looked up again, by other names."""
        for tracked in [*self._requests.by_id.values()]:
            event = RequestEvent.RENEWED if tracked.is_prefetching else None
            if tracked.state is RequestState.OUTRUN:
                event = RequestEvent.SETTLED
            lookup = tracked.lookup._replace(found=None)
            change = Change(event, lookup, forgets_stored=True)
            self._requests.advance(tracked, change, now)
            if tracked.is_prefetching:
                self._requests.advance(tracked, self.look_up(tracked, now), now)

    def on_connection_lost(self, now: float) -> None:
        self.queued.clear()

    def look_up(self, tracked: TrackedRequest, now: float, latest: float = math.inf) -> Change:
        """Look a request up for the first time, or again: after its preemption, or by other names.

        Its deadline is `latest`, or earlier.
        """
        before, deadline = tracked.lookup, min(latest, now + self._answer_seconds(tracked))
        lookup = RequestLookup(before.hashes, deadline=deadline, answer=before.answer)
        return self.send_lookup(tracked, lookup, now, latest=latest)

    def send_lookup(
        self,
        tracked: TrackedRequest,
        lookup: RequestLookup,
        now: float,
        *,
        is_asked: bool = False,
        latest: float = math.inf,
    ) -> Change:
        """Send a lookup, settle the request, or leave the lookup for a later call.

        It is left while a report is on its way that says whether the adapter is loaded, and while
        the daemon is greeted. It is also left while nothing could be loaded, until the engine asks
        about the request (`is_asked`): the obstacle may be over by then.
        """
        request, adapter, session = tracked.request, tracked.adapter, self._session
        chunks = self._chunks_of(tracked)
        with_tails = self.with_tails and request.num_tokens > self.geometry.hash_tokens
        reason: Decline | None = None
        detail = ""
        if not chunks and not with_tails:
            reason = Decline.TOO_SHORT
        elif detail := why_computed(request) or ("" if tracked.hints.reads else WHY_UNREAD):
            reason = Decline.UNWANTED
        elif obstacle := self._obstacle():
            if not is_asked:
                return Change(lookup=lookup)
            reason = obstacle
        elif tracked.media is not None and not tracked.media.is_known():
            reason, detail = Decline.UNHASHABLE, tracked.media.why_unknown()
        elif adapter is not None and (adapter.is_reloaded or not tracked.has_hashes()):
            if adapter.is_awaited:
                return Change(lookup=lookup)
            reason, detail = Decline.ADAPTER, adapter.refusal
        elif not session.is_connected:
            if session.link.is_greeting and session.breaker.allows(now):
                return Change(lookup=lookup)
            reason = Decline.LOST if lookup.lost else Decline.NO_DAEMON
        elif not session.breaker.allows(now):
            reason = Decline.BREAKER_OPEN
        if reason:
            return Change(RequestEvent.SETTLED, lookup, declined=reason, detail=detail)
        lease = self._requests.next_lease()
        session.breaker = session.breaker.on_request(now)
        names = self.request_names(tracked)
        wait = self.patience.tier_wait(chunks * self.geometry.chunk_tokens)
        message = Lookup(
            lease,
            lease,
            names.hashes,
            wait_ms=round(wait.seconds * 1e3),
            tokens_per_second=wait.tokens_per_second,
            tails=names.tails,
            tails_from=names.tails_from,
            audit_lease=self._audits.lease_for_lookup(tracked),
            promises=self._promises and tracked.hints.writes,
            computed_elsewhere=self._computed_elsewhere
            and may_be_computed_elsewhere(self.geometry, request.num_tokens),
            is_scan=tracked.hints.low_priority,
        )
        self.queued.append(tracked)
        self._counters[metrics.LOOKUPS_ASKED] += 1
        sent = lookup._replace(
            hashes=names.hashes,
            tails=names.tails,
            tails_from=names.tails_from,
            adapter=adapter.weights if adapter is not None else None,
            sent=True,
            sent_at=now,
            deadline=min(latest, now + self._answer_seconds(tracked)),
            lease=lease,
        )
        return Change(lookup=sent, message=message)

    def request_names(self, tracked: TrackedRequest) -> LookupNames:
        """Return the names of all that ends before a request's last token, with its answer.

        Only for a request that `has_hashes`.
        """
        geometry, request = self.geometry, tracked.request
        hashes = tracked.chunk_hashes(geometry, 0, self._chunks_of(tracked))
        if not self.with_tails or request.num_tokens <= geometry.hash_tokens:
            return LookupNames(hashes)
        tokens = min(request.num_tokens, hit_chunks_max(geometry) * geometry.chunk_tokens)
        first = first_tail_chunk(geometry, tokens)
        names = tail_names(geometry, request.block_hashes, first, tokens)
        ends = [tail_tokens(geometry, first, number) for number in range(len(names))]
        return LookupNames(hashes, tracked.tail_hashes(names, ends), first)

    def _chunks_of(self, tracked: TrackedRequest) -> int:
        """Return the whole chunks before a request's last token that a lookup names."""
        whole = self.geometry.whole_chunks(tracked.request.num_tokens - 1)
        return min(whole, hit_chunks_max(self.geometry))

    def on_flush(self, now: float) -> None:
        """Begin the deadlines of queued lookups, because all that is queued leaves now.

        A paused engine takes no steps. The time that a lookup was queued is not the daemon's delay.
        """
        for tracked in self.queued:
            lookup = tracked.lookup
            deadline = lookup.deadline + (now - lookup.sent_at)
            lookup = lookup._replace(deadline=deadline, sent_at=now)
            self._requests.advance(tracked, Change(lookup=lookup), now)
        self.queued.clear()

    def on_pending(self, tracked: TrackedRequest, pending: Pending, now: float) -> Change:
        """Wait longer for a lookup, because the daemon reads tiers for it."""
        lookup = tracked.lookup
        if tracked.state is RequestState.OUTRUN:
            return self._outrun_answer(tracked, lookup, pending.masks)
        if not tracked.is_prefetching:
            return Change()
        # Each of several nodes may say so of one lookup.
        self._counters[metrics.LOOKUPS_PROMOTED] += lookup.pending is None
        if len(pending.masks) == len(self.geometry.groups):
            lookup = lookup._replace(pending=pending)
        deadline = now + pending.wait_ms / 1e3 + self._answer_seconds(tracked)
        return Change(lookup=lookup._replace(deadline=deadline))

    def on_found(self, tracked: TrackedRequest | None, found: Found, now: float) -> Change | None:
        """Keep the answer to a lookup. Returns None if no request waits for it any more."""
        if len(found.masks) != len(self.geometry.groups):
            return None
        is_outrun = tracked is not None and tracked.state is RequestState.OUTRUN
        if tracked is None or not (tracked.is_prefetching or is_outrun):
            is_short = found.depth < len(found.masks[0])
            self._must_wait |= is_short and found.lease in self._outrun_leases
            return None
        # A miss opens no lease.
        lease = tracked.lookup.lease if found.depth else 0
        lookup = tracked.lookup._replace(answer=found, lease=lease)
        self._counters[metrics.LOOKUPS_HIT if found.depth else metrics.LOOKUPS_MISSED] += 1
        self._counters[metrics.JUNCTIONS_FOUND] += len(found.junctions)
        if not found.tail and found.chunks * HASH_BYTES < len(lookup.hashes):
            self._count_limits(found)
        if is_outrun:
            return self._outrun_answer(tracked, lookup, found.masks)
        self._requests.meter.add_observation("lookup_wait_seconds", now - lookup.sent_at)
        return Change(lookup=lookup._replace(found=found))

    def tokens_to_load(self, tracked: TrackedRequest, local_tokens: int, now: float) -> Offer:
        """Return what a request that waits for its lookup can load beyond `local_tokens`."""
        lookup, request = tracked.lookup, tracked.request
        if lookup.found is None:
            return self._unanswered(tracked, local_tokens, now)
        if self._audits.is_cut_off:
            return Offer(0, Change(RequestEvent.SETTLED, declined=Decline.AUDIT))
        tokens = lookup.hit_tokens(self.geometry)
        if tokens >= request.num_tokens or tokens <= local_tokens:
            return Offer(0)
        adapter = tracked.adapter
        if adapter is not None and adapter.weights != lookup.adapter:
            # The engine has replaced the adapter's weights. It is looked up anew, within its time.
            if now < lookup.deadline:
                return Offer(None, Change(RequestEvent.RENEWED))
            late = Change(RequestEvent.SETTLED, declined=Decline.ADAPTER, detail=adapter.refusal)
            return Offer(0, late)
        if not self._weights.is_current:
            return self._wait(tracked, lookup, now, Decline.IDENTITY)
        if not self._session.workers_attached():
            return self._wait(tracked, lookup, now, Decline.LATE_WORKERS)
        if not self._requests.room.has_room(request.request_id, request.num_tokens + 1):
            return self._wait(tracked, lookup, now, Decline.LATE_ROOM)
        return Offer(tokens - local_tokens)

    def on_computed(self, tracked: TrackedRequest) -> Change:
        """Let the engine compute what it lacks of a request, because nothing is loaded for it.

        A lookup that was outrun goes on. Until it is answered its chunks count as stored.
        """
        lookup = tracked.lookup
        if tracked.state is RequestState.OUTRUN:
            return Change()
        is_open = tracked.is_prefetching and lookup.found is None and lookup.sent
        if not is_open or not lookup.outrun:
            return Change(RequestEvent.SETTLED)
        if lookup.pending is not None:
            event, masks = RequestEvent.SETTLED, lookup.pending.masks
        else:
            masks = [b"\1" * (len(lookup.hashes) // HASH_BYTES)] * len(self.geometry.groups)
            self._outrun_leases.append(lookup.lease)
            event = RequestEvent.OUTRUN
        return Change(event, lookup._replace(found=Found(0, 0, 0, masks, b"")))

    def _outrun_answer(
        self, tracked: TrackedRequest, lookup: RequestLookup, masks: Sequence[bytes]
    ) -> Change:
        """Let what RAM lacks of the engine's own hit be stored, and end the lookup.

        `masks` are those of the chunks that were looked up. What the request has stored meanwhile
        is after them.
        """
        if len(masks) != len(self.geometry.groups):
            return Change(RequestEvent.SETTLED, lookup)
        chunks = zip(masks, tracked.progress.next_chunk, strict=True)
        stored = [mask.ljust(count, b"\1") for mask, count in chunks]
        found = Found(0, 0, 0, stored, b"")
        return Change(RequestEvent.SETTLED, lookup._replace(found=found), forgets_stored=True)

    def _answer_seconds(self, tracked: TrackedRequest) -> float:
        """Return how long the request waits for the answer to its lookup."""
        return self.patience.answer_seconds(tracked.request.num_tokens)

    def _count_limits(self, found: Found) -> None:
        """Count the groups that lack the next chunk while others have it: they limit the hit."""
        groups = [group for group, _ in lacking(self.geometry, found.masks, found.chunks + 1)]
        if len(groups) < len(self.geometry.groups):
            for name in [f"{group.gid}:{group.kind}" for group in groups]:
                self._counters[metrics.hits_limited(name)] += 1

    def _obstacle(self) -> Decline | None:
        """Return the reason for which no hit could be loaded now. None = one could."""
        session = self._session
        if not session.is_connected:
            return None
        if self._weights.is_stale:
            return Decline.IDENTITY
        if self._audits.is_cut_off:
            return Decline.AUDIT
        return Decline.LATE_WORKERS if session.unmapped == session.boot else None

    def _unanswered(self, tracked: TrackedRequest, local_tokens: int, now: float) -> Offer:
        lookup, pending = tracked.lookup, tracked.lookup.pending
        if lookup.sent and (obstacle := self._obstacle()):
            return Offer(0, Change(RequestEvent.SETTLED, declined=obstacle))
        longest = longest_hit_tokens(self.geometry, tracked.request.num_tokens, self.with_tails)
        if pending is not None:
            longest = pending.depth * self.geometry.chunk_tokens
        is_outrun = longest <= local_tokens
        if is_outrun and self._must_wait:
            lookup, self._must_wait = lookup._replace(must_wait=True), False
        # While the engine lacks blocks it asks again, and its own hit may be shorter then.
        is_outrun = is_outrun and (pending is not None or not lookup.must_wait)
        if is_outrun != lookup.outrun:
            self._counters[metrics.LOOKUPS_OUTRUN] += is_outrun
            lookup = lookup._replace(outrun=is_outrun)
        if is_outrun:
            # No answer could add a token.
            return Offer(0, Change(lookup=lookup))
        reason = Decline.LATE_ANSWER if tracked.has_hashes() else Decline.LATE_ADAPTER
        if not self._session.is_connected:
            reason = Decline.LOST if lookup.lost else Decline.NO_DAEMON
        return self._wait(tracked, lookup, now, reason)

    def _wait(
        self, tracked: TrackedRequest, lookup: RequestLookup, now: float, reason: Decline
    ) -> Offer:
        """Let the engine ask again, or settle the request.

        It is settled, for this reason, once its deadline has passed or waiting is of no use.
        """
        extra_seconds = ROOM_SECONDS if reason is Decline.LATE_ROOM else 0.0
        if reason in (Decline.IDENTITY, Decline.LATE_WORKERS):
            # While weights are read or the arena is mapped a request waits no longer than it takes
            # to compute it.
            patience = self.patience.tier_wait(tracked.request.num_tokens).seconds
            extra_seconds = -math.inf if self._weights.is_stale else patience
        is_vain = reason is Decline.LATE_WORKERS and self._session.unmapped == self._session.boot
        if reason is Decline.LATE_ANSWER and not self._session.is_answer_due(lookup.lease):
            extra_seconds = self._answer_seconds_max
        is_under_way = lookup.sent or self._session.link.is_greeting
        may_wait = (is_under_way or reason is Decline.LATE_ADAPTER) and not is_vain
        if may_wait and now < lookup.deadline + extra_seconds:
            return Offer(None, Change(lookup=lookup))
        if reason in (Decline.LATE_ANSWER, Decline.NO_DAEMON, Decline.LOST):
            self._session.breaker = self._session.breaker.on_failure(now)
        elif reason is Decline.LATE_WORKERS:
            # Nobody waits for them again before they are there.
            self._session.unmapped = self._session.boot
        if reason is Decline.LATE_ANSWER:
            self._requests.meter.add_observation("lookup_wait_seconds", now - lookup.sent_at)
        return Offer(0, Change(RequestEvent.SETTLED, lookup, declined=reason))
