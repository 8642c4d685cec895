"""Loads: each from the blocks that a request gets to its end, and where its tokens came from."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hybridkv.connector import metrics
from hybridkv.connector.messages import LoadPlan
from hybridkv.connector.scheduler.listeners import Listener, Step
from hybridkv.connector.scheduler.requests import (
    Change,
    RequestEvent,
    RequestRegistry,
    RequestState,
    TrackedRequest,
)
from hybridkv.core.copies import PlanError, plan_load
from hybridkv.core.sizes import format_size
from hybridkv.core.speed import Speed
from hybridkv.wire.messages import Decline

logger = logging.getLogger("vllm.hybridkv")

RAM = "ram"  # The tier that every load reads. The tiers below it have names of their own.
LOAD_SECONDS_MAX = 10.0  # A load copies memory. A load that takes longer is reported as overdue.


@dataclass(eq=False)
class LoadPlanner(Listener):
    """All loads of one engine, each from the blocks that it gets to its end."""

    requests: RequestRegistry
    to_fail: list[str] = field(default_factory=list)
    """Requests that wait for a load which nobody planned. The next plan fails them."""
    to_plan: dict[str, TrackedRequest] = field(default_factory=dict)
    """Requests whose loads no worker knows of, by id. They go into the next plan."""
    loading: dict[str, TrackedRequest] = field(default_factory=dict)
    """Requests whose loads have not ended, by id, the oldest first."""
    overdue: set[str] = field(default_factory=set)
    """Those of which the log has a line that the load does not end."""
    speed: Speed = Speed()  # Of loads, in bytes a second.

    def on_allocated(
        self, tracked: TrackedRequest, tables: Sequence[Sequence[int]], tokens: int, now: float
    ) -> None:
        """Prepare a load, because the engine has blocks for `tokens` tokens of the offer."""
        request_id, local = tracked.request.request_id, tracked.local_seen or 0
        self.requests.advance(tracked, Change(RequestEvent.ALLOCATED), now)
        if tracked.state is not RequestState.WAITING_FOR_LOAD:
            self.to_fail.append(request_id)
            return
        geometry, lookup, change = self.requests.geometry, tracked.lookup, Change()
        plan = LoadPlan("", ())
        try:
            if lookup.found is None or local + tokens != lookup.hit_tokens(geometry):
                raise PlanError(f"the engine took {local + tokens} tokens of another offer")
            runs = plan_load(
                geometry=geometry,
                hit_chunks=lookup.found.depth,
                local_tokens=local,
                tables=[tables[group.gid] for group in geometry.groups],
                tickets=lookup.found.slots,
            )
            plan = LoadPlan(self.requests.daemon.boot, runs, lookup.adapter)
        except PlanError as error:
            change = Change(declined=Decline.PLAN_FAILED, detail=str(error))
            logger.warning("hybridkv: %s is computed: %s", request_id, error)
        load = tracked.load._replace(plan=plan, local_tokens=local, tokens=tokens, allocated_at=now)
        self.requests.advance(tracked, change._replace(load=load), now)
        self.requests.room.count_load(request_id, tracked.request.num_tokens + 1)
        self.to_plan[request_id] = self.loading[request_id] = tracked

    def fail_load(self, request_id: str, tokens: int) -> None:
        """Fail the load of `tokens` tokens that the engine waits for, unless the next plan has it.

        0 = it waits for none.
        """
        if tokens and request_id not in self.to_plan:
            self.to_fail.append(request_id)

    def on_step_planned(self, step: Step, now: float) -> None:
        """Add all loads that have blocks to a plan, and all requests whose load must fail."""
        plan = step.plan
        plan.failed += self.to_fail
        for request_id, tracked in self.to_plan.items():
            if tracked.load.plan.runs and tracked.state is not RequestState.DRAINING:
                plan.loads[request_id] = tracked.load.plan
            else:
                plan.failed.append(request_id)
            self.requests.advance(tracked, Change(RequestEvent.PLANNED), now)
        self.requests.room.on_running(step.output.num_scheduled_tokens)

    def take_unsent(self) -> list[str]:
        """Forget all loads that no worker knows of. Returns their requests, which must fail now."""
        unsent = [*self.to_fail, *self.to_plan]
        self.on_handed_over()
        return unsent

    def on_handed_over(self) -> None:
        """Forget what the last plan has, because the workers get it."""
        self.to_plan.clear()
        self.to_fail.clear()

    def count_overdue(self, now: float) -> int:
        """Return the number of loads older than LOAD_SECONDS_MAX, and log each of them once.

        They are not failed: the engine would give their blocks to other requests, and a copy that
        goes on would write there.
        """
        overdue = 0
        for request_id, tracked in self.loading.items():
            if now - tracked.load.allocated_at <= LOAD_SECONDS_MAX:
                break
            overdue += 1
            if request_id not in self.overdue:
                self.overdue.add(request_id)
                text = "hybridkv: the load of %s has not ended for %d s, and the request waits"
                logger.warning(text, request_id, LOAD_SECONDS_MAX)
        return overdue

    def on_load_end(self, tracked: TrackedRequest, has_failed: bool, now: float) -> None:
        """Count a load whose end the workers reported, and release its lease."""
        self.loading.pop(tracked.request.request_id, None)
        self.overdue.discard(tracked.request.request_id)
        if has_failed:
            # The engine computes all of it now, and it is stored again although it was found.
            lookup = tracked.lookup._replace(found=None)
            change = Change(RequestEvent.FAILED, lookup, declined=Decline.LOAD_FAILED)
            self.requests.advance(tracked, change._replace(forgets_stored=True), now)
            return
        geometry, counters = self.requests.geometry, self.requests.counters
        load, loaded_bytes = tracked.load, 0
        if tracked.adapter is not None:
            tracked.adapter.blocks.note_blocks(load.plan.adapter)
        for run in load.plan.runs:
            group = geometry.groups[run.span.group_index]
            part_bytes = len(run.span.blocks) * group.block_bytes
            loaded_bytes += part_bytes * geometry.parts(group) * geometry.nodes
        counters[metrics.LOADS_DONE] += 1
        counters[metrics.TAILS_LOADED] += bool(tracked.lookup.tail_found())
        counters[metrics.TOKENS_LOADED] += load.tokens
        counters[metrics.BYTES_LOADED] += loaded_bytes
        for tier, tokens in self.tiers_of(tracked).items():
            counters[metrics.loaded_from(tier)] += tokens
        seconds = now - load.allocated_at
        self.speed = self.speed.measured(loaded_bytes, seconds, now)
        self.requests.meter.add_observation("load_seconds", seconds)
        request_id, size = tracked.request.request_id, format_size(loaded_bytes)
        text = "hybridkv: loaded %d tokens, %s, for %s in %.1f ms"
        logger.debug(text, load.tokens, size, request_id, 1e3 * seconds)
        loaded = load._replace(
            bytes=loaded_bytes,
            restored=range(load.local_tokens, load.local_tokens + load.tokens),
            loaded_tokens=load.loaded_tokens + load.tokens,
            loaded_bytes=load.loaded_bytes + loaded_bytes,
        )
        self.requests.advance(tracked, Change(RequestEvent.LOADED, load=loaded), now)

    def tiers_of(self, tracked: TrackedRequest) -> dict[str, int]:
        """Return the tokens of the request's load by the tier that they come from."""
        found = tracked.lookup.found
        tiers = found.tiers if found is not None else {}
        return tokens_by_tier(tracked.load.tokens, self.requests.geometry.chunk_tokens, tiers)


def tokens_by_tier(
    loaded_tokens: int, chunk_tokens: int, promoted: Mapping[str, int]
) -> dict[str, int]:
    """Return the tokens of one load by tier, without zeros. Their sum is `loaded_tokens`.

    `promoted` has the chunks of the hit that were promoted for it, by tier, prefix first
    (Found.tiers). They count as the last chunks of the hit: RAM evicts suffixes before prefixes,
    and the load leaves out the prefix that the engine has itself.

    `tokens_by_tier(750, 100, {"disk": 3, "s3": 1}) -> {"s3": 100, "disk": 300, "ram": 350}`
    """
    tokens: dict[str, int] = {}
    left = max(0, loaded_tokens)
    for tier, chunks in reversed(list(promoted.items())):
        tier_tokens = min(left, max(0, chunks) * chunk_tokens)
        if tier_tokens:
            tokens[tier] = tier_tokens
        left -= tier_tokens
    if left:
        tokens[RAM] = tokens.get(RAM, 0) + left
    return tokens
