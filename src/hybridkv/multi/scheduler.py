"""MultiConnector's scheduler role: it asks all children, decides, and tells each the decision."""

import dataclasses
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from functools import partial, partialmethod
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, SupportsHMA

from hybridkv.core.metrics import Metric
from hybridkv.core.speed import PrefillSpeed
from hybridkv.multi import metrics, ranking
from hybridkv.multi.children import ChildConnector, ChildConnectors, ChildState
from hybridkv.multi.messages import NOBODY, MultiPlan, MultiReport
from hybridkv.multi.ranking import MISS, ChildAnswer, LoadDecision, WaitTimes, WeightedSpeed
from hybridkv.multi.stats import OWN, MultiKVConnectorStats, OwnStats
from hybridkv.vllm.block_room import ROOM_SECONDS, BlockRoom, Retention
from hybridkv.vllm.hook_guard import logger
from hybridkv.vllm.prometheus import StatsCollector
from hybridkv.vllm.versions import CacheHitSource

SETTLE_SECONDS = 10.0
"""How long after a child's fault the engine waits for the ends of its transfers."""


@dataclass(eq=False, slots=True)
class ChildLoad:
    """An asynchronous load that has not ended."""

    child: int  # The index of the child that loads, or NOBODY.
    tokens: int
    started_at: float
    is_announced: bool = False  # Whether the workers know of it.


@dataclass(eq=False, slots=True)
class MultiLookup:
    """A request, which may be looked up several times."""

    refused: set[int] = field(default_factory=set)  # Children of which a load for it has failed.
    asked_at: float | None = None  # When the present lookup asked first; None = there is none.
    hit_at: float | None = None  # When the present lookup had its first hit; None = it has none.
    awaited: frozenset[int] = frozenset()  # Children that the present lookup may wait for.
    late: set[int] = field(default_factory=set)  # Children that it waited for without an answer.
    answers: dict[int, ChildAnswer] = field(default_factory=dict)
    decision: LoadDecision | None = None
    local_tokens: int = 0
    loader: int | None = None  # The child that was chosen last.
    blocks: frozenset[int] = frozenset()
    """The blocks that it loaded into, of an engine with a single group."""


@dataclass(eq=False)
class MultiScheduler:
    """The scheduler role of one engine. Most public methods are vLLM's hooks of the same name.

    No hook raises, whatever a child does.
    """

    children: ChildConnectors
    group_ids: tuple[int, ...]  # The groups that a load restores by default.
    groups: Sequence[Retention]  # All groups of the engine.
    room: BlockRoom
    clock: Callable[[], float] = time.monotonic
    requests: dict[str, MultiLookup] = field(default_factory=dict)
    loads: dict[str, ChildLoad] = field(default_factory=dict)
    saves: defaultdict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    """The children that hold the blocks of a request, until its save has ended."""
    _new_saves: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """The saves that the next plan announces to the workers, as in `saves`."""
    _sync_blocks: defaultdict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    """The blocks that each child loads within the next step."""
    _bad_blocks: set[int] = field(default_factory=set)
    """The blocks of the next step that nobody loads."""
    _collector: StatsCollector = field(default_factory=StatsCollector)
    _prefill: PrefillSpeed = field(default_factory=PrefillSpeed)
    _plans: int = 0

    # Requests

    def on_new_request(self, request: Any) -> None:
        """Let every child begin its lookup."""
        self.requests[request.request_id] = MultiLookup()
        self.children.call_hooks("on_new_request", None, request, pauses=False)

    def get_num_new_matched_tokens(
        self, request: Any, local_tokens: int
    ) -> tuple[int | None, bool]:
        """Ask all children and decide. Returns the tokens of the best hit and whether it is async.

        (None, False) = ask again. A lookup lasts from its first question to the allocation.
        """
        now = self.clock()
        lookup = self.requests.setdefault(request.request_id, MultiLookup())
        self._ask_all(lookup, request, local_tokens, now)
        most = most_tokens(request, local_tokens)
        times = self._wait_times(lookup, most, now)
        children = self.children.all
        weighted = [WeightedSpeed(child.weight, child.speed) for child in children]
        decision = ranking.decide(
            [lookup.answers.get(child.index, MISS) for child in children],
            ranking.effective_weights(weighted, now),
            most,
            times,
        )
        if not decision.is_waiting:
            failed_seconds = max(times.patience_seconds, ranking.LATE_SECONDS)
            self._note_late(lookup, now if times.asked_seconds >= failed_seconds else None)
        if decision.is_async and not self._has_room(request):
            is_waiting = lookup.hit_at is not None and times.hit_seconds < ROOM_SECONDS
            decision = LoadDecision(None, is_waiting=is_waiting)
            if not is_waiting:
                self.children.count(metrics.LOOKUPS_LATE_ROOM)
        if decision.is_waiting:
            return None, False
        lookup.decision, lookup.loader, lookup.local_tokens = decision, decision.child, local_tokens
        return decision.tokens, decision.is_async and decision.tokens > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Tell the chosen child of its blocks, and all others that they load nothing (D13)."""
        lookup = self.requests.setdefault(request.request_id, MultiLookup())
        decision, lookup.decision, lookup.asked_at = lookup.decision, None, None
        chosen = decision.child if decision is not None and num_external_tokens else None
        for child in self.children.alive:
            tokens = num_external_tokens if child.index == chosen else 0
            child.call_hook("update_state_after_alloc", None, request, blocks, tokens, fatal=True)
        if decision is not None and request.num_preemptions <= 0:
            names = [child.name for child in self.children.all]
            counted = self.children.counters
            metrics.count_admission(counted, names, lookup.answers, chosen, num_external_tokens)
        if not num_external_tokens:
            return
        loaded = self._loaded_blocks(blocks, lookup.local_tokens, num_external_tokens)
        lookup.blocks = frozenset(loaded)
        if decision is not None and decision.is_async:
            load = ChildLoad(
                NOBODY if chosen is None else chosen, num_external_tokens, self.clock()
            )
            self.loads[request.request_id] = load
            self.room.count_load(request.request_id, _tokens_to_run(request))
        elif chosen is not None and self.children.all[chosen].is_alive:
            self._sync_blocks[chosen].update(loaded)
        else:
            self._bad_blocks.update(loaded)

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        """Returns the groups that the chosen child's load restores."""
        child = self._loader(request)
        if child is None:
            return self.group_ids
        hook = "get_loaded_kv_cache_group_ids"
        ids: tuple[int, ...] = child.call_hook(hook, self.group_ids, request, fatal=True)
        return ids

    def get_external_cache_hit_sources(
        self, request: Any, tokens: int
    ) -> dict[CacheHitSource, int]:
        """Returns the chosen child's tokens by source.

        Counts that do not add up to `tokens`, or are below 0, are replaced by `tokens` of unknown
        source. vLLM's counters end the server's statistics at a number below 0 (requirements B30).
        """
        if tokens <= 0:
            return {}
        child = self._loader(request)
        unknown = {CacheHitSource.EXTERNAL_UNSPECIFIED: tokens}
        if child is None:
            return unknown

        def ask() -> dict[CacheHitSource, int]:
            counts = child.connector.get_external_cache_hit_sources(request, tokens)
            sources = {CacheHitSource(source): int(count) for source, count in counts.items()}
            if sum(sources.values()) != tokens or min(sources.values()) < 0:
                self.children.count(metrics.SOURCES_WRONG)
                return unknown
            return sources

        return child.guard.run_hook("get_external_cache_hit_sources", ask, lambda: unknown)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Returns whether a child holds the blocks, and the parameters of all children together.

        The blocks are held until each child that holds them has reported, or is given up.
        """
        params: dict[str, Any] = {}
        for child in self.children.alive:
            # Without SupportsHMA the hybrid manager is off, so there is one group.
            is_hma = isinstance(child.connector, SupportsHMA)
            hook = "request_finished_all_groups" if is_hma else "request_finished"
            blocks = block_ids if is_hma else block_ids[0]
            holds, child_params = child.call_hook(hook, (False, None), request, blocks, fatal=True)
            if holds:
                self.saves[request.request_id].add(child.index)
            params = {**(child_params or {}), **params}
        self.requests.pop(request.request_id, None)
        self.room.on_running((request.request_id,))
        if request.request_id in self.saves:
            holders = sorted(self.saves[request.request_id])
            self._new_saves[request.request_id] = tuple(holders)
        return request.request_id in self.saves, params or None

    def register_finished_partial_tail(self, request: Any, *args: Any) -> bool:
        """Returns whether a child holds the last, partial blocks of a request about to finish."""
        hook = "register_finished_partial_tail"
        replies = self.children.call_hooks(hook, False, request, *args, fatal=True)
        holders = [reply.child.index for reply in replies if reply.value]
        if holders:
            self.saves[request.request_id].update(holders)
        return bool(holders)

    # Steps

    def build_connector_meta(self, output: Any) -> MultiPlan:
        """Returns this step's message to the workers."""
        self.children.step_begins()
        plans: list[KVConnectorMetadata | None] = []
        for child in self.children.all:
            plan = None
            if child.is_alive:
                plan = child.call_hook("build_connector_meta", None, output, fatal=True)
            if plan is None:
                self._bad_blocks.update(self._sync_blocks.pop(child.index, ()))
            plans.append(plan)
        self._plans += 1
        settled = self._give_up(self.clock())
        new_loads = {name: load for name, load in self.loads.items() if not load.is_announced}
        for load in new_loads.values():
            load.is_announced = True
        plan = MultiPlan(
            metadata=tuple(plans),
            loads={name: load.child for name, load in new_loads.items()},
            saves=self._new_saves,
            settled=settled,
            sync_blocks={index: tuple(ids) for index, ids in self._sync_blocks.items()},
            bad_blocks=tuple(self._bad_blocks),
            number=self._plans,
        )
        self._prefill.on_step_planned(self._plans, output.total_num_scheduled_tokens, self.clock())
        self._new_saves = {}
        self._sync_blocks.clear()
        self._bad_blocks.clear()
        self.room.on_running(output.num_scheduled_tokens)
        return plan

    def update_connector_output(self, output: Any) -> None:
        """Give each child its own loads, saves and messages, and the engine each end once."""
        report = output.kv_connector_worker_meta
        report = report if isinstance(report, MultiReport) else MultiReport()
        self.children.counters.update(report.counters)
        self._prefill.on_step_reported(report.number, self.clock())
        failed = set(output.failed_recving or ())
        ended_loads, ended_saves = self._end(output, failed)
        # A child that loaded into invalid blocks is not asked again for that request.
        for lookup in self.requests.values() if output.invalid_block_ids else ():
            if lookup.loader is not None and not lookup.blocks.isdisjoint(output.invalid_block_ids):
                lookup.refused.add(lookup.loader)
        for child in self.children.alive:
            index = child.index
            if index in report.dead:
                child.guard.switch_off_side("its part in a worker is")
                continue
            lost = "messages of several workers of %s are lost"
            message = child.attempt("aggregate", lost, None, report.message_of, index)
            events = child.attempt("kv_events", lost, None, report.events_of, index)
            own_loads = {name for name, load in ended_loads.items() if load.child == index}
            own_saves = {name for name, holders in ended_saves.items() if index in holders}
            view = dataclasses.replace(
                output,
                finished_recving=own_loads or None,
                failed_recving=own_loads & failed,
                finished_sending=own_saves or None,
                kv_connector_worker_meta=message,
                kv_cache_events=events,
            )
            child.call_hook("update_connector_output", None, view, fatal=True)

    def get_kv_connector_stats(self) -> MultiKVConnectorStats | None:
        """Returns what was counted, and the children's statistics, since the last call."""
        stats = MultiKVConnectorStats.from_children(self.children)
        loading = Counter(load.child for load in self.loads.values())
        pending = {
            Metric("pending_loads", (child.name,)): loading[child.index]
            for child in self.children.all
        }
        own = self._collector.take_payload(self.children.totals(), pending)
        if own is not None:
            stats.data[OWN] = OwnStats(own)
        return stats if stats.data else None

    def take_events(self) -> list[Any]:
        """Returns every child's KV events, and the last ones of a child that was switched off."""
        kv_events: list[Any] = []
        failure = "%s failed to withdraw what it announced"
        for child in self.children.all:
            connector = child.connector
            if child.is_alive:
                take = partial(_listed, connector, "take_events")
                kv_events += child.guard.run_hook("take_events", take, list[Any])
            elif not child.is_withdrawn:
                # With these it withdraws what it announced, so that routers forget it.
                child.is_withdrawn = True
                withdraw = partial(_listed, connector, "withdraw")
                kv_events += child.attempt("withdraw", failure, [], withdraw)
        return kv_events

    def _has(self, hook: str) -> bool:
        return any(reply.value for reply in self.children.call_hooks(hook, False, pauses=False))

    has_pending_block_frees = partialmethod(_has, "has_pending_block_frees")
    has_pending_push_work = partialmethod(_has, "has_pending_push_work")

    def reset_cache(self) -> bool:
        """Let all children forget what they have, as the weights may be others.

        A child that fails is switched off.
        """
        replies = self.children.call_hooks("reset_cache", True, fatal=True)
        return all(reply.value is not False for reply in replies)

    # Parts of the hooks

    def _ask_all(self, lookup: MultiLookup, request: Any, local_tokens: int, now: float) -> None:
        """Ask each child, and note when the lookup had its first question and its first hit."""
        if lookup.asked_at is None:
            lookup.asked_at, lookup.hit_at = now, None
            lookup.late.clear()
            awaited = [child for child in self.children.alive if child.breaker.allows(now)]
            lookup.awaited = frozenset(child.index for child in awaited)
            for child in awaited:
                child.breaker = child.breaker.on_request(now)
        lookup.answers = {
            child.index: self._ask(child, request, local_tokens, child.index in lookup.awaited)
            for child in self.children.alive
            if child.index not in lookup.refused
        }
        if lookup.hit_at is None and any(answer.tokens for answer in lookup.answers.values()):
            lookup.hit_at = now

    def _wait_times(self, lookup: MultiLookup, most: int, now: float) -> WaitTimes:
        """Returns how long a request that would compute up to `most` tokens may wait, and has."""
        return WaitTimes(
            patience_seconds=min(ranking.PATIENCE_SECONDS_MAX, self._prefill.prefill_seconds(most)),
            asked_seconds=_seconds_since(lookup.asked_at, now),
            hit_seconds=_seconds_since(lookup.hit_at, now),
        )

    def _has_room(self, request: Any) -> bool:
        return self.room.has_room(request.request_id, _tokens_to_run(request))

    def _ask(
        self, child: ChildConnector, request: Any, local_tokens: int, is_awaited: bool
    ) -> ChildAnswer:
        def ask() -> ChildAnswer:
            tokens, is_async = child.connector.get_num_new_matched_tokens(request, local_tokens)
            if tokens is None:
                return ChildAnswer(None, awaited=is_awaited)
            if tokens <= 0:
                return MISS
            # A longer hit would end the engine, and so would a prompt loaded whole within the step.
            if tokens > most_tokens(request, local_tokens) - (0 if is_async else 1):
                raise ValueError(
                    f"{tokens} tokens beyond {local_tokens} of {request.num_tokens} are too many"
                )
            if not is_async and len(self.groups) > 1:
                # There it has no way to fail, and recurrent models lose their state.
                if not child.guard.counters[metrics.SYNC_DECLINED]:
                    why = "it loads within the step"
                    logger.warning("hybridkv: hits of %s are declined: %s", child.name, why)
                child.guard.counters[metrics.SYNC_DECLINED] += 1
                return MISS
            return ChildAnswer(tokens, bool(is_async))

        answer = child.guard.run_hook("get_num_new_matched_tokens", ask, lambda: MISS)
        if answer.tokens is not None:
            child.breaker = child.breaker.on_success()
        return answer

    def _note_late(self, lookup: MultiLookup, failed_at: float | None) -> None:
        """Count the children that did not answer.

        They failed at `failed_at`. None = they did not have time enough to answer.
        """
        for index, answer in lookup.answers.items():
            if answer.tokens is None and answer.awaited and index not in lookup.late:
                child = self.children.all[index]
                lookup.late.add(index)
                child.guard.counters[metrics.PASSED_OVER] += 1
                if failed_at is not None:
                    child.breaker = child.breaker.on_failure(failed_at)

    def _loader(self, request: Any) -> ChildConnector | None:
        lookup = self.requests.get(request.request_id)
        if lookup is None or lookup.loader is None:
            return None
        child = self.children.all[lookup.loader]
        return child if child.is_alive else None

    def _loaded_blocks(self, blocks: Any, local_tokens: int, external_tokens: int) -> list[int]:
        """Returns the ids of the blocks that a hit is loaded into.

        [0, local) local hit    [local, local + external) to load

        There are none in an engine with several groups.
        """
        if len(self.groups) != 1:
            return []
        tokens_per_block = self.groups[0].tokens_per_block
        end = -(-(local_tokens + external_tokens) // tokens_per_block)
        table = blocks.blocks[0][local_tokens // tokens_per_block : end]
        return [block.block_id for block in table if not block.is_null]

    def _end(
        self, output: Any, failed: Container[str]
    ) -> tuple[dict[str, ChildLoad], dict[str, set[int]]]:
        """End what workers report, and leave in vLLM's `output` what the engine has to see.

        Returns the ended loads, and the children whose saves have ended, by request. A request may
        be aborted while it loads: then the engine frees its blocks with the first report that it
        sees, and would end with a second one.
        """
        received, sent = set(output.finished_recving or ()), set(output.finished_sending or ())
        loads, saves = received & self.loads.keys(), sent & self.saves.keys()
        output.finished_recving = {n for n in loads if n not in self.saves or n in saves} or None
        output.finished_sending = saves - self.loads.keys() or None
        if absorbed := len(received - loads) + len(sent - saves):
            self.children.count(metrics.REPORTS_ABSORBED, absorbed)
        now = self.clock()
        ended_loads = {name: self.loads.pop(name) for name in loads}
        ended_saves = {name: self.saves.pop(name) for name in saves}
        for request_id, load in ended_loads.items():
            if request_id in failed:
                self.children.count(metrics.LOADS_FAILED)
                if request_id in self.requests:
                    self.requests[request_id].refused.add(load.child)
            elif load.child != NOBODY:
                child = self.children.all[load.child]
                child.speed = child.speed.measured(load.tokens, now - load.started_at, now)
        return ended_loads, ended_saves

    def _give_up(self, now: float) -> frozenset[int]:
        """End the loads that dead children will not end. Returns the children that are SILENT.

        A load that no worker knows of fails at once. Other loads, and saves, end when the child is
        SILENT: its copies have had SETTLE_SECONDS to end.
        """
        dead, silent = {NOBODY}, set()
        for child in self.children.all:
            if child.is_alive:
                continue
            dead.add(child.index)
            child.off_since = now if child.off_since is None else child.off_since
            child.is_silent = now >= child.off_since + SETTLE_SECONDS
            if child.state is ChildState.SILENT:
                silent.add(child.index)
        for request_id, load in self.loads.items():
            if load.child in silent or (load.child in dead and not load.is_announced):
                load.child = NOBODY
                self.children.count(metrics.LOADS_GIVEN_UP)
                text = "hybridkv: the load of %s is given up: its connector is switched off"
                logger.warning(text, request_id)
        return frozenset(silent)


def most_tokens(request: Any, local_tokens: int) -> int:
    """The longest external hit with which vLLM's counts of tokens by source stay above 0."""
    total = request.num_tokens
    if request.num_preemptions <= 0:
        total = min(total, request.num_prompt_tokens)
    return int(total) - local_tokens


def _seconds_since(at: float | None, now: float) -> float:
    return 0.0 if at is None else now - at


def _tokens_to_run(request: Any) -> int:
    """The tokens of BlockRoom: those of the request, and the first that it computes."""
    return int(request.num_tokens) + 1


def _listed(connector: Any, hook: str) -> list[Any]:
    """A list of what the connector's hook yields. It is empty where there is no such hook."""
    return list(getattr(connector, hook, list)() or ())
