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
from hybridkv.connector.scheduler.audits import Audits
from hybridkv.connector.scheduler.kv_events import KVEventPublisher
from hybridkv.connector.scheduler.requests import (
    RequestEvent,
    RequestRegistry,
    RequestState,
    TrackedRequest,
    hit_chunks_max,
    longest_hit_tokens,
)
from hybridkv.connector.scheduler.weights import WeightsWatch
from hybridkv.core.coverage import lacking
from hybridkv.core.keys import HASH_BYTES
from hybridkv.core.policies import LoadPolicy
from hybridkv.core.settings import Settings
from hybridkv.core.speed import PrefillSpeed
from hybridkv.core.tails import first_tail_chunk, tail_names, tail_tokens
from hybridkv.vllm.adapters import Adapter
from hybridkv.vllm.block_room import ROOM_SECONDS
from hybridkv.vllm.step_outputs import why_computed
from hybridkv.wire.messages import Decline, Found, Lookup, Pending, Release

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


class Lookups:
    """The lookups of one engine, and the offers that follow. `now` is monotonic seconds."""

    def __init__(
        self,
        settings: Settings,
        requests: RequestRegistry,
        events: KVEventPublisher,
        weights: WeightsWatch,
        audits: Audits,
        with_tails: bool = False,
    ) -> None:
        self.with_tails = with_tails
        """True if hits may end inside a chunk (core.tails)."""
        self._weights = weights
        self._audits = audits
        self.patience = Patience(
            settings.load_policy, settings.load_timeout_seconds, settings.lookup_timeout_ms / 1e3
        )
        self._answer_seconds_max = settings.load_timeout_seconds
        """The longest time beyond its deadline for an answer that steps bring (scheduler.nodes)."""
        self._must_wait = False
        """True after a request ended before its answer, and the answer lacked what the engine has.
        Else requests of one step would never store it again."""
        self._outrun_leases: deque[int] = deque(maxlen=OUTRUN_LEASES_MAX)
        self._requests = requests
        self.geometry = requests.geometry
        self._session = requests.session
        self._counters = requests.counters
        self._events = events
        self.queued: list[TrackedRequest] = []
        """Requests whose lookups leave with the next flush of the link."""

    def look_up(self, tracked: TrackedRequest, now: float) -> None:
        """Look a request up for the first time, or again after its preemption."""
        lookup = tracked.lookup
        lookup.found, lookup.pending = None, None
        lookup.sent = lookup.lost = lookup.outrun = lookup.must_wait = False
        lookup.deadline = now + self._answer_seconds(tracked)
        self._send(tracked, now)

    def tokens_to_load(self, tracked: TrackedRequest, local_tokens: int, now: float) -> int | None:
        """Return the tokens beyond `local_tokens` to load. None = the engine is to ask again."""
        found, request = tracked.lookup.found, tracked.request
        if found is None:
            return self._unanswered(tracked, local_tokens, now)
        if self._audits.is_cut_off:
            self._requests.decline_lookup(tracked, Decline.AUDIT, now)
            return 0
        self._audits.offer_chunk(tracked, local_tokens, now)
        tokens = tracked.lookup.hit_tokens(self.geometry)
        if tokens >= request.num_tokens or tokens <= local_tokens:
            return 0
        if tracked.adapter is not None and tracked.adapter.weights != tracked.lookup.adapter:
            return self._look_up_again(tracked, tracked.adapter, now)
        if not self._weights.is_current:
            return self._wait(tracked, now, Decline.IDENTITY)
        if not self._session.workers_attached():
            return self._wait(tracked, now, Decline.LATE_WORKERS)
        if not self._requests.room.has_room(request.request_id, request.num_tokens + 1):
            return self._wait(tracked, now, Decline.LATE_ROOM)
        tracked.load.local_tokens = local_tokens
        return tokens - local_tokens

    def on_computed(self, tracked: TrackedRequest, now: float) -> None:
        """Let the engine compute what it lacks of a request, because nothing is loaded for it.

        A lookup that was outrun goes on. Until it is answered its chunks count as stored.
        """
        lookup, event = tracked.lookup, RequestEvent.SETTLED
        if tracked.state is RequestState.OUTRUN:
            return
        if tracked.is_prefetching and lookup.outrun and lookup.found is None and lookup.sent:
            masks = [b"\1" * (len(lookup.hashes) // HASH_BYTES)] * len(self.geometry.groups)
            if lookup.pending is not None:
                masks = lookup.pending.masks
            else:
                event = RequestEvent.OUTRUN
                self._outrun_leases.append(lookup.lease)
            lookup.found = Found(0, 0, 0, masks, b"")
        self._requests.advance(tracked, event, now)

    def _answer_seconds(self, tracked: TrackedRequest) -> float:
        """Return how long the request waits for the answer to its lookup."""
        return self.patience.answer_seconds(tracked.request.num_tokens)

    def _look_up_again(self, tracked: TrackedRequest, adapter: Adapter, now: float) -> int | None:
        """Look a request up with the adapter's new weights, within the deadline that it has.

        The engine has replaced the adapter's weights since the lookup. Returns what `offer` does.
        """
        deadline = tracked.lookup.deadline
        if now >= deadline:
            self._requests.decline_lookup(tracked, Decline.ADAPTER, now, adapter.refusal)
            return 0
        self._requests.end_lease(tracked, now)
        self.look_up(tracked, now)
        tracked.lookup.deadline = min(tracked.lookup.deadline, deadline)
        return None if tracked.is_prefetching else 0

    def on_pending(self, pending: Pending, now: float) -> None:
        """Wait longer for a lookup, because the daemon reads tiers for it."""
        self._session.breaker = self._session.breaker.on_success()
        tracked = self._requests.by_lease.get(pending.lease)
        if tracked is not None and tracked.state is RequestState.OUTRUN:
            self._on_outrun_answer(tracked, pending.masks, now)
        elif tracked is not None and tracked.is_prefetching:
            tracked.lookup.deadline = now + pending.wait_ms / 1e3 + self._answer_seconds(tracked)
            # Each of several nodes may say so of one lookup.
            self._counters[metrics.LOOKUPS_PROMOTED] += tracked.lookup.pending is None
            if len(pending.masks) == len(self.geometry.groups):
                tracked.lookup.pending = pending

    def on_found(self, found: Found, now: float) -> None:
        """Keep the answer to a lookup. If its request does not wait any more, end its lease."""
        self._session.breaker = self._session.breaker.on_success()
        tracked = self._requests.by_lease.get(found.lease)
        is_sound = len(found.masks) == len(self.geometry.groups)
        is_outrun = tracked is not None and tracked.state is RequestState.OUTRUN
        if tracked is None or not (tracked.is_prefetching or is_outrun) or not is_sound:
            self._requests.by_lease.pop(found.lease, None)
            self._session.queue_message(Release(found.lease), now)
            self._audits.on_unwanted_answer(found, now)
            is_short = is_sound and found.depth < len(found.masks[0])
            self._must_wait |= is_short and found.lease in self._outrun_leases
            return
        tracked.lookup.answer = found
        self._events.update(lambda events: events.on_found(tracked, found))
        if not found.depth:
            # A miss opens no lease.
            tracked.lookup.lease = 0
            del self._requests.by_lease[found.lease]
        if is_outrun:
            self._audits.on_unwanted_answer(found, now)
            self._on_outrun_answer(tracked, found.masks, now)
        else:
            tracked.lookup.found = found
            waited = now - tracked.lookup.sent_at
            self._requests.meter.add_observation("lookup_wait_seconds", waited)
            self._audits.on_answer(tracked, found, now)
        self._counters[metrics.LOOKUPS_HIT if found.depth else metrics.LOOKUPS_MISSED] += 1
        self._counters[metrics.JUNCTIONS_FOUND] += len(found.junctions)
        if not found.tail and found.chunks * HASH_BYTES < len(tracked.lookup.hashes):
            self._count_limits(found)

    def _on_outrun_answer(
        self, tracked: TrackedRequest, masks: Sequence[bytes], now: float
    ) -> None:
        """Let what RAM lacks of the engine's own hit be stored, and end the lookup.

        `masks` are those of the chunks that were looked up. What the request has stored meanwhile
        is after them.
        """
        if len(masks) == len(self.geometry.groups):
            stored = [
                mask.ljust(chunks, b"\1")
                for mask, chunks in zip(masks, tracked.next_chunk, strict=True)
            ]
            tracked.lookup.found = Found(0, 0, 0, stored, b"")
            tracked.next_chunk = [0] * len(stored)
        self._requests.advance(tracked, RequestEvent.SETTLED, now)

    def _count_limits(self, found: Found) -> None:
        """Count the groups that lack the next chunk while others have it: they limit the hit."""
        groups = [group for group, _ in lacking(self.geometry, found.masks, found.chunks + 1)]
        if len(groups) < len(self.geometry.groups):
            for name in [f"{group.gid}:{group.kind}" for group in groups]:
                self._counters[metrics.hits_limited(name)] += 1

    def on_flush(self, now: float) -> None:
        """Begin the deadlines of queued lookups, because all that is queued leaves now.

        A paused engine takes no steps. The time that a lookup was queued is not the daemon's delay.
        """
        for tracked in self.queued:
            tracked.lookup.deadline += now - tracked.lookup.sent_at
            tracked.lookup.sent_at = now
        self.queued.clear()

    def _send(self, tracked: TrackedRequest, now: float, is_asked: bool = False) -> None:
        """Send the lookup, settle the request, or leave it for a later call.

        It is left while a report is on its way that says whether the adapter is loaded, and while
        the daemon is greeted. It is also left while nothing could be loaded, until the engine asks
        about the request (`is_asked`): the obstacle may be over by then.
        """
        request, adapter, session = tracked.request, tracked.adapter, self._session
        chunks_max = hit_chunks_max(self.geometry)
        chunks = min(self.geometry.whole_chunks(request.num_tokens - 1), chunks_max)
        with_tails = self.with_tails and request.num_tokens > self.geometry.hash_tokens
        reason: Decline | None = None
        detail = ""
        if not chunks and not with_tails:
            reason = Decline.TOO_SHORT
        elif detail := why_computed(request):
            reason = Decline.UNWANTED
        elif obstacle := self._obstacle():
            if not is_asked:
                return
            reason = obstacle
        elif tracked.media is not None and not tracked.media.is_known():
            reason, detail = Decline.UNHASHABLE, tracked.media.why_unknown()
        elif adapter is not None and (adapter.is_reloaded or not tracked.has_hashes()):
            if adapter.is_awaited:
                return
            reason, detail = Decline.ADAPTER, adapter.refusal
        elif not session.is_connected:
            if session.link.is_greeting and session.breaker.allows(now):
                return
            reason = Decline.LOST if tracked.lookup.lost else Decline.NO_DAEMON
        elif not session.breaker.allows(now):
            reason = Decline.BREAKER_OPEN
        if reason:
            self._requests.decline_lookup(tracked, reason, now, detail)
            return
        lookup, lease = tracked.lookup, self._requests.open_lease(tracked)
        session.breaker = session.breaker.on_request(now)
        lookup.adapter = adapter.weights if adapter is not None else None
        lookup.hashes = tracked.chunk_hashes(self.geometry, 0, chunks)
        if with_tails:
            known = request.block_hashes
            tokens = min(request.num_tokens, chunks_max * self.geometry.chunk_tokens)
            first = lookup.tails_from = first_tail_chunk(self.geometry, tokens)
            names = tail_names(self.geometry, known, first, tokens)
            ends = [tail_tokens(self.geometry, first, number) for number in range(len(names))]
            lookup.tails = tracked.tail_hashes(names, ends)
        lookup.sent_at, lookup.deadline = now, now + self._answer_seconds(tracked)
        wait = self.patience.tier_wait(chunks * self.geometry.chunk_tokens)
        message = Lookup(
            lease,
            lease,
            lookup.hashes,
            wait_ms=round(wait.seconds * 1e3),
            tokens_per_second=wait.tokens_per_second,
            tails=lookup.tails,
            tails_from=lookup.tails_from,
            audit_lease=self._audits.lease_for_lookup(tracked),
        )
        lookup.sent = session.queue_message(message, now)
        self.queued.append(tracked)
        self._counters[metrics.LOOKUPS_ASKED] += 1

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

    def _unanswered(self, tracked: TrackedRequest, local_tokens: int, now: float) -> int | None:
        lookup, pending = tracked.lookup, tracked.lookup.pending
        if not lookup.sent:
            self._send(tracked, now, is_asked=True)
        elif obstacle := self._obstacle():
            self._requests.decline_lookup(tracked, obstacle, now)
        if not tracked.is_prefetching:
            return 0
        longest = longest_hit_tokens(self.geometry, tracked.request.num_tokens, self.with_tails)
        if pending is not None:
            longest = pending.chunks * self.geometry.chunk_tokens
        is_outrun = longest <= local_tokens
        if is_outrun and self._must_wait:
            lookup.must_wait, self._must_wait = True, False
        if is_outrun and (pending is not None or not lookup.must_wait):
            # No answer could add a token. While the engine lacks blocks it asks again, and its own
            # hit may be shorter then.
            self._counters[metrics.LOOKUPS_OUTRUN] += not lookup.outrun
            lookup.outrun = True
            return 0
        lookup.outrun = False
        reason = Decline.LATE_ANSWER if tracked.has_hashes() else Decline.LATE_ADAPTER
        if not self._session.is_connected:
            reason = Decline.LOST if lookup.lost else Decline.NO_DAEMON
        return self._wait(tracked, now, reason)

    def _wait(self, tracked: TrackedRequest, now: float, reason: Decline) -> int | None:
        """Return None, so that the engine asks again, or settle the request and return 0.

        It is settled, for this reason, once its deadline has passed or waiting is of no use.
        """
        lookup = tracked.lookup
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
            return None
        if reason in (Decline.LATE_ANSWER, Decline.NO_DAEMON, Decline.LOST):
            self._session.breaker = self._session.breaker.on_failure(now)
        elif reason is Decline.LATE_WORKERS:
            # Nobody waits for them again before they are there.
            self._session.unmapped = self._session.boot
        if reason is Decline.LATE_ANSWER:
            self._requests.meter.add_observation("lookup_wait_seconds", now - lookup.sent_at)
        self._requests.decline_lookup(tracked, reason, now)
        return 0
