"""Loads: their plans, their room in the engine's block pool, and how they end."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hybridkv.connector.messages import LoadPlan, StepPlan
from hybridkv.connector.scheduler.requests import (
    RequestEvent,
    RequestRegistry,
    RequestState,
    TrackedRequest,
)
from hybridkv.core.copies import PlanError, plan_load
from hybridkv.core.sizes import format_size

logger = logging.getLogger("vllm.hybridkv")

RAM = "ram"
"""The tier that every load reads; the tiers below it have names of their own."""
_WAITING = (RequestState.WAITING_FOR_LOAD, RequestState.LOADING, RequestState.DRAINING)


@dataclass(eq=False)
class LoadPlanner:
    """Every load of one engine, from the blocks that it gets to its end."""

    requests: RequestRegistry
    to_plan: list[TrackedRequest] = field(default_factory=list)
    to_fail: list[str] = field(default_factory=list)

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
            if found is None or local + tokens != found.chunks * geometry.chunk_tokens:
                raise PlanError(f"the engine took {local + tokens} tokens of another offer")
            served = [tables[group.gid] for group in geometry.groups]
            slots = found.offsets, found.generations
            runs = plan_load(geometry, found.chunks, local, served, *slots)
            load.plan = LoadPlan(self.requests.session.boot, runs)
        except PlanError as error:
            self.requests.counters["plan_failed"] += 1
            tracked.why = "plan_failed", str(error)
            logger.warning("hybridkv: %s is computed: %s", request_id, error)
            load.plan = LoadPlan("", ())
        load.tokens, load.allocated_at = tokens, now
        self.requests.room.hold(request_id, tracked.request.num_tokens + 1)
        load.handed_over = False
        self.to_plan.append(tracked)

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
        requests = self.requests.by_id.values()
        lost = [t for t in requests if t.state in _WAITING and not t.load.handed_over]
        failed, self.to_fail, self.to_plan = self.to_fail, [], []
        for tracked in lost:
            tracked.load.handed_over = True
        return [*failed, *(tracked.request.request_id for tracked in lost)]

    def ended(self, tracked: TrackedRequest, failed: bool, now: float) -> None:
        """The workers reported the end of a load."""
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
        for run in load.plan.runs:
            group = geometry.groups[run.span.group_index]
            loaded_bytes += len(run.span.blocks) * group.block_bytes * geometry.parts(group)
        counters["loads"] += 1
        counters["tokens_loaded"] += load.tokens
        counters["bytes_loaded"] += loaded_bytes
        for tier, tokens in self.tiers_of(tracked).items():
            counters[f"tokens_loaded_from_{tier}"] += tokens
        seconds = now - load.allocated_at
        self.requests.meter.observe("load_seconds", seconds)
        logger.debug(
            "hybridkv: loaded %d tokens, %s, for %s in %.1f ms",
            load.tokens,
            format_size(loaded_bytes),
            tracked.request.request_id,
            1e3 * seconds,
        )
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
