"""Hits: what is looked up, what is offered to the engine, and its loads from blocks to their end.

A prompt waits for tiers below RAM no longer than computing it takes (D18).
"""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hybridkv.connector.messages import LoadPlan, StepPlan
from hybridkv.connector.scheduler.audits import Audits
from hybridkv.connector.scheduler.kv_events import KVEventPublisher
from hybridkv.connector.scheduler.requests import (
    RequestEvent,
    RequestRegistry,
    RequestState,
    TrackedRequest,
    hit_chunks_max,
)
from hybridkv.connector.scheduler.weights import WeightsWatch
from hybridkv.core.copies import PlanError, plan_load
from hybridkv.core.coverage import lacking
from hybridkv.core.keys import HASH_BYTES
from hybridkv.core.policies import LoadPolicy
from hybridkv.core.settings import Settings
from hybridkv.core.sizes import format_size
from hybridkv.core.speed import PrefillSpeed
from hybridkv.core.tails import first_tail_chunk, tail_names
from hybridkv.vllm.adapters import Adapter
from hybridkv.vllm.block_room import ROOM_SECONDS
from hybridkv.wire.messages import Found, Lookup, Pending, Release

logger = logging.getLogger("vllm.hybridkv")

RAM = "ram"  # The tier that every load reads; the tiers below it have names of their own.
_WAITING = (RequestState.WAITING_FOR_LOAD, RequestState.LOADING, RequestState.DRAINING)
LOAD_SECONDS_MAX = 10.0  # A load copies memory; one that takes longer is taken for one that hangs.


@dataclass
class Patience:
    """How long requests wait for tiers below RAM, by the speed of prefill."""

    policy: LoadPolicy
    most_seconds: float  # The value of `Settings.load_timeout_seconds`.
    prefill: PrefillSpeed = field(default_factory=PrefillSpeed)

    def of(self, tokens: int) -> tuple[float, int]:
        """(seconds that a prompt of `tokens` tokens may wait, tokens per second of prefill).

        Tiers are judged by that speed; 0 = it is not known, or they are not to be judged.
        """
        if self.policy is LoadPolicy.NEVER:
            return 0.0, 0
        if self.policy is LoadPolicy.ALWAYS:
            return self.most_seconds, 0
        rate = int(self.prefill.speed.per_second)
        return min(self.most_seconds, self.prefill.seconds(tokens)), rate


class Lookups:
    """The lookups of one engine. `now` is monotonic seconds."""

    def __init__(
        self,
        settings: Settings,
        requests: RequestRegistry,
        events: KVEventPublisher,
        weights: WeightsWatch,
        audits: Audits,
        with_tails: bool = False,
    ) -> None:
        """`with_tails`: hits may end inside a chunk (core.tails)."""
        self._weights = weights
        self._audits = audits
        self._with_tails = with_tails
        self.patience = Patience(settings.load_policy, settings.load_timeout_seconds)
        self._answer_seconds = settings.lookup_timeout_ms / 1e3
        self._most_seconds = min(self._answer_seconds, settings.load_timeout_seconds)
        self._requests = requests
        self._geometry = requests.geometry
        self._session = requests.session
        self._counters = requests.counters
        self._events = events
        self.queued: list[TrackedRequest] = []
        """Requests whose lookups leave with the next flush of the link."""

    def begin(self, tracked: TrackedRequest, now: float) -> None:
        """Look a request up for the first time, or again after its preemption."""
        lookup = tracked.lookup
        lookup.found, lookup.pending, lookup.sent = None, None, False
        lookup.deadline = now + self._most_seconds
        self._send(tracked, now)

    def offer(self, tracked: TrackedRequest, local_tokens: int, now: float) -> int | None:
        """Tokens beyond `local_tokens` to load; None = not known yet, so the engine asks again."""
        found, request = tracked.lookup.found, tracked.request
        if found is None:
            return self._unanswered(tracked, local_tokens, now)
        if self._audits.is_cut_off:
            self._requests.settle(tracked, "lookups_audit", now)
            return 0
        self._audits.begin(tracked, local_tokens, now)
        tokens = tracked.lookup.hit_tokens(self._geometry)
        if tokens >= request.num_tokens or tokens <= local_tokens:
            return 0
        if tracked.adapter is not None and tracked.adapter.weights != tracked.lookup.adapter:
            return self._begin_anew(tracked, tracked.adapter, now)
        if not self._weights.is_current:
            return self._wait(tracked, now, "weights")
        if not self._session.workers_attached():
            return self._wait(tracked, now, "workers")
        if not self._requests.room.has_room(request.request_id, request.num_tokens + 1):
            return self._wait(tracked, now, "room")
        tracked.load.local_tokens = local_tokens
        return tokens - local_tokens

    def _begin_anew(self, tracked: TrackedRequest, adapter: Adapter, now: float) -> int | None:
        """The engine has other weights of the adapter since the lookup; look these up in its time.

        As `offer`.
        """
        deadline = tracked.lookup.deadline
        if now >= deadline:
            self._requests.settle(tracked, "lookups_adapter", now, adapter.refusal)
            return 0
        self._requests.release(tracked, now)
        self.begin(tracked, now)
        tracked.lookup.deadline = min(tracked.lookup.deadline, deadline)
        return None if tracked.is_prefetching else 0

    def take_pending(self, pending: Pending, now: float) -> None:
        """The daemon lives, and reads tiers for a request."""
        self._session.breaker = self._session.breaker.succeeded()
        tracked = self._requests.by_lease.get(pending.lease)
        if tracked is not None and tracked.is_prefetching:
            tracked.lookup.deadline = now + pending.wait_ms / 1e3 + self._answer_seconds
            if len(pending.masks) == len(self._geometry.groups):
                tracked.lookup.pending = pending
            self._counters["lookups_promoted"] += 1

    def take_found(self, found: Found, now: float) -> None:
        """An answer; the lease of one that nobody waits for any more ends at once."""
        self._session.breaker = self._session.breaker.succeeded()
        tracked = self._requests.by_lease.get(found.lease)
        is_sound = len(found.masks) == len(self._geometry.groups)
        if tracked is None or not tracked.is_prefetching or not is_sound:
            self._requests.by_lease.pop(found.lease, None)
            self._session.send(Release(found.lease), now)
            self._audits.refused(found, now)
            return
        tracked.lookup.found = tracked.lookup.answer = found
        self._requests.meter.observe("lookup_wait_seconds", now - tracked.lookup.sent_at)
        self._events.update(lambda events: events.found(tracked, found))
        if not found.chunks:
            # A miss opens no lease.
            tracked.lookup.lease = 0
            del self._requests.by_lease[found.lease]
        self._audits.answered(tracked, found, now)
        self._counters["lookups_hit" if found.chunks else "lookups_miss"] += 1
        if not found.tail and found.chunks * HASH_BYTES < len(tracked.lookup.hashes):
            self._count_limits(found)

    def _count_limits(self, found: Found) -> None:
        """Count the groups that have less than others, and so are why the hit is no longer."""
        groups = [group for group, _ in lacking(self._geometry, found.masks, found.chunks + 1)]
        if len(groups) < len(self._geometry.groups):
            for name in [f"{group.gid}:{group.kind}" for group in groups]:
                self._counters[f"hits_limited_by_{name}"] += 1

    def flushed(self, now: float) -> None:
        """Everything queued leaves now, and deadlines begin now.

        A paused engine takes no steps: how long a lookup was queued is not the daemon's delay.
        """
        for tracked in self.queued:
            tracked.lookup.deadline += now - tracked.lookup.sent_at
            tracked.lookup.sent_at = now
        self.queued.clear()

    def _send(self, tracked: TrackedRequest, now: float, is_asked: bool = False) -> None:
        """Send the lookup, settle the request, or do neither.

        Neither is done before a report says whether the adapter is loaded, if one is on its way.
        While nothing could be loaded, neither is done before the engine asks about the request
        (`is_asked`): that may be over by then.
        """
        request, adapter, session = tracked.request, tracked.adapter, self._session
        chunks_max = hit_chunks_max(self._geometry)
        chunks = min(self._geometry.whole_chunks(request.num_tokens - 1), chunks_max)
        with_tails = self._with_tails and request.num_tokens > self._geometry.hash_tokens
        declined = detail = ""
        if not chunks and not with_tails:
            declined = "lookups_too_short"
        elif getattr(request, "skip_reading_prefix_cache", False):
            declined = "lookups_unwanted"
        elif vain := self._why_vain():
            if not is_asked:
                return
            declined = vain
        elif adapter is not None and (adapter.is_reloaded or not tracked.has_hashes()):
            if adapter.is_awaited:
                return
            declined, detail = "lookups_adapter", adapter.refusal
        elif not session.is_connected:
            declined = "lookups_no_daemon"
        elif not session.breaker.allows(now):
            declined = "lookups_breaker_open"
        if declined:
            self._requests.settle(tracked, declined, now, detail)
            return
        lookup, lease = tracked.lookup, self._requests.open_lease(tracked)
        session.breaker = session.breaker.asked(now)
        lookup.adapter = adapter.weights if adapter is not None else None
        lookup.hashes = tracked.chunk_hashes(self._geometry, 0, chunks)
        if with_tails:
            known = request.block_hashes
            tokens = min(request.num_tokens, chunks_max * self._geometry.chunk_tokens)
            first = lookup.tails_from = first_tail_chunk(self._geometry, tokens)
            names = tail_names(self._geometry, known, first, tokens)
            lookup.tails = tracked.tail_hashes(names)
        lookup.sent_at, lookup.deadline = now, now + self._most_seconds
        seconds, rate = self.patience.of(chunks * self._geometry.chunk_tokens)
        message = Lookup(
            lease,
            lease,
            lookup.hashes,
            wait_ms=round(seconds * 1e3),
            tokens_per_second=rate,
            tails=lookup.tails,
            tails_from=lookup.tails_from,
            audit_lease=self._audits.lease_for_lookup(tracked),
        )
        lookup.sent = session.send(message, now)
        self.queued.append(tracked)
        self._counters["lookups"] += 1

    def _why_vain(self) -> str:
        """The reason for which no hit could be loaded now; empty where one could."""
        session = self._session
        if not session.is_connected:
            return ""
        if self._weights.is_stale:
            return "lookups_identity"
        if self._audits.is_cut_off:
            return "lookups_audit"
        return "lookups_late_workers" if session.unmapped == session.boot else ""

    def _unanswered(self, tracked: TrackedRequest, local_tokens: int, now: float) -> int | None:
        lookup, pending = tracked.lookup, tracked.lookup.pending
        if pending is not None and pending.chunks * self._geometry.chunk_tokens <= local_tokens:
            # No tier can add to what the engine has. What RAM has need not be stored again.
            lookup.found = Found(0, 0, 0, pending.masks, b"", b"")
            self._counters["lookups_outrun"] += 1
            self._requests.advance(tracked, RequestEvent.SETTLED, now)
            return 0
        if not lookup.sent:
            self._send(tracked, now, is_asked=True)
        elif vain := self._why_vain():
            self._requests.settle(tracked, vain, now)
        if not tracked.is_prefetching:
            return 0
        return self._wait(tracked, now, "answer" if tracked.has_hashes() else "adapter")

    def _wait(self, tracked: TrackedRequest, now: float, reason: str) -> int | None:
        """None until the deadline has passed; then the request is settled and offered 0 tokens."""
        lookup = tracked.lookup
        more = ROOM_SECONDS if reason == "room" else 0.0
        if reason == "weights":
            # While they are read a request waits no longer than it takes to compute it.
            patience, _ = self.patience.of(tracked.request.num_tokens)
            more = -math.inf if self._weights.is_stale else patience
        is_vain = reason == "workers" and self._session.unmapped == self._session.boot
        may_wait = (lookup.sent or reason == "adapter") and not is_vain
        if may_wait and now < lookup.deadline + more:
            return None
        if reason == "answer":
            self._session.breaker = self._session.breaker.failed(now)
            self._requests.meter.observe("lookup_wait_seconds", now - lookup.sent_at)
        declined = "lookups_identity" if reason == "weights" else f"lookups_late_{reason}"
        self._requests.settle(tracked, declined, now)
        return 0


@dataclass(eq=False)
class LoadPlanner:
    """Every load of one engine, from the blocks that it gets to its end."""

    requests: RequestRegistry
    to_plan: list[TrackedRequest] = field(default_factory=list)
    to_fail: list[str] = field(default_factory=list)
    loading: dict[str, TrackedRequest] = field(default_factory=dict)
    """Every load that the workers have not ended, the oldest first."""

    def allocated(
        self, tracked: TrackedRequest, tables: Sequence[Sequence[int]], tokens: int, now: float
    ) -> None:
        """The engine has blocks for `tokens` tokens of the offer."""
        request_id, load = tracked.request.request_id, tracked.load
        self.requests.advance(tracked, RequestEvent.ALLOCATED, now)
        if tracked.state is not RequestState.WAITING_FOR_LOAD:
            self.to_fail.append(request_id)
            return
        geometry, found, local = self.requests.geometry, tracked.lookup.found, load.local_tokens
        try:
            if found is None or local + tokens != tracked.lookup.hit_tokens(geometry):
                raise PlanError(f"the engine took {local + tokens} tokens of another offer")
            served = [tables[group.gid] for group in geometry.groups]
            slots = found.offsets, found.generations
            runs = plan_load(geometry, found.chunks, local, served, *slots)
            load.plan = LoadPlan(self.requests.session.boot, runs, tracked.lookup.adapter)
        except PlanError as error:
            self.requests.counters["plan_failed"] += 1
            tracked.why = "plan_failed", str(error)
            logger.warning("hybridkv: %s is computed: %s", request_id, error)
            load.plan = LoadPlan("", ())
        load.tokens, load.allocated_at = tokens, now
        self.requests.room.hold(request_id, tracked.request.num_tokens + 1)
        load.handed_over = load.is_overdue = False
        self.to_plan.append(tracked)
        self.loading[request_id] = tracked

    def must_fail(self, request_id: str) -> None:
        """The engine waits for a load of this request; it fails unless it is planned already."""
        tracked = self.requests.by_id.get(request_id)
        if tracked is None or tracked not in self.to_plan:
            self.to_fail.append(request_id)
            if tracked is not None:
                tracked.load.handed_over = True

    def put_into(self, plan: StepPlan, now: float) -> None:
        """Add every load that has blocks by now, and every request whose load must fail."""
        plan.failed += self.to_fail
        for tracked in self.to_plan:
            if tracked.load.plan.runs and tracked.state is not RequestState.DRAINING:
                plan.loads[tracked.request.request_id] = tracked.load.plan
            else:
                plan.failed.append(tracked.request.request_id)
            self.requests.advance(tracked, RequestEvent.PLANNED, now)

    def handed_over(self) -> None:
        """The workers get the plan that `put_into` made."""
        for tracked in self.to_plan:
            tracked.load.handed_over = True
        self.to_plan, self.to_fail = [], []

    def give_up(self) -> list[str]:
        """The requests that wait for a load that no worker knows of: they must fail now."""
        failed, self.to_fail, self.to_plan = self.to_fail, [], []
        for tracked in self.requests.by_id.values():
            if tracked.state in _WAITING and not tracked.load.handed_over:
                tracked.load.handed_over = True
                failed.append(tracked.request.request_id)
        return failed

    def count_overdue(self, now: float) -> int:
        """Loads that are older than LOAD_SECONDS_MAX; each is named in the log once.

        They are not failed: the engine would give their blocks to others, and a copy that goes on
        would write there.
        """
        overdue = 0
        for request_id, tracked in self.loading.items():
            if now - tracked.load.allocated_at <= LOAD_SECONDS_MAX:
                break
            overdue += 1
            if not tracked.load.is_overdue:
                tracked.load.is_overdue = True
                text = "hybridkv: the load of %s has not ended for %d s, and the request waits"
                logger.warning(text, request_id, LOAD_SECONDS_MAX)
        return overdue

    def ended(self, tracked: TrackedRequest, failed: bool, now: float) -> None:
        """The workers reported the end of a load."""
        self.loading.pop(tracked.request.request_id, None)
        if failed:
            self.requests.decline(tracked, "loads_failed")
            self.requests.release(tracked, now, None)
            # What was wrong there is computed now. It is stored again although it was found.
            tracked.lookup.found = None
            tracked.next_chunk = [0] * len(self.requests.geometry.groups)
            tracked.stored_states.clear()
            self.requests.advance(tracked, RequestEvent.FAILED, now)
            return
        geometry, counters = self.requests.geometry, self.requests.counters
        load, loaded_bytes = tracked.load, 0
        load.restored = load.local_tokens, load.local_tokens + load.tokens
        if tracked.adapter is not None:
            tracked.adapter.blocks.add(load.plan.adapter)
        for run in load.plan.runs:
            group = geometry.groups[run.span.group_index]
            loaded_bytes += len(run.span.blocks) * group.block_bytes * geometry.parts(group)
        counters["loads"] += 1
        counters["tails_loaded"] += bool(tracked.lookup.tail_found())
        counters["tokens_loaded"] += load.tokens
        counters["bytes_loaded"] += loaded_bytes
        for tier, tokens in self.tiers_of(tracked).items():
            counters[f"tokens_loaded_from_{tier}"] += tokens
        seconds = now - load.allocated_at
        self.requests.meter.observe("load_seconds", seconds)
        request_id, size = tracked.request.request_id, format_size(loaded_bytes)
        text = "hybridkv: loaded %d tokens, %s, for %s in %.1f ms"
        logger.debug(text, load.tokens, size, request_id, 1e3 * seconds)
        load.total = load.total[0] + load.tokens, load.total[1] + loaded_bytes
        self.requests.release(tracked, now, (load.tokens, loaded_bytes))
        self.requests.advance(tracked, RequestEvent.LOADED, now)

    def tiers_of(self, tracked: TrackedRequest) -> dict[str, int]:
        """The tokens of the request's load by the tier that they come from."""
        found = tracked.lookup.found
        tiers = found.tiers if found is not None else {}
        return tokens_by_tier(tracked.load.tokens, self.requests.geometry.chunk_tokens, tiers)


def tokens_by_tier(
    loaded_tokens: int, chunk_tokens: int, promoted: Mapping[str, int]
) -> dict[str, int]:
    """Non-zero tokens of one load by tier; their sum is `loaded_tokens`.

    `promoted` has the chunks of the hit that were promoted for it, by tier, prefix first
    (Found.tiers). They are taken for the last chunks of the hit: RAM evicts suffixes before
    prefixes, and the load leaves out the prefix that the engine has itself.
    """
    tokens: dict[str, int] = {}
    left = max(0, loaded_tokens)
    for tier, chunks in reversed(list(promoted.items())):
        given = min(left, max(0, chunks) * chunk_tokens)
        if given:
            tokens[tier] = given
        left -= given
    if left:
        tokens[RAM] = tokens.get(RAM, 0) + left
    return tokens
