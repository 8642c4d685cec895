"""MultiConnector's scheduler role: it asks all connectors, decides, and tells those not chosen."""

import dataclasses
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from functools import partial, partialmethod
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, SupportsHMA

from hybridkv.core.speed import PrefillSpeed
from hybridkv.multi import ranking
from hybridkv.multi.children import ChildConnector, ChildConnectors, MultiSettings
from hybridkv.multi.messages import NOBODY, MultiPlan, MultiReport
from hybridkv.multi.ranking import MISS, ChildAnswer, LoadDecision
from hybridkv.multi.stats import EVENTS, PENDING, SELECTION, ConnectorCounts, MultiKVConnectorStats
from hybridkv.vllm.block_room import ROOM_SECONDS, BlockRoom, Retention
from hybridkv.vllm.hook_guard import logger
from hybridkv.vllm.versions import CacheHitSource


@dataclass(eq=False, slots=True)
class ChildLoad:
    """An asynchronous load that has not ended."""

    child: int
    tokens: int
    started: float
    announced: bool = False  # Whether the workers know of it.


@dataclass(eq=False, slots=True)
class MultiLookup:
    """One request, which may be looked up several times."""

    refused: set[int] = field(default_factory=set)  # Children of which a load for it has failed.
    asked_at: float | None = None  # When the present lookup asked first; None = there is none.
    hit_at: float | None = None  # When the present lookup had its first hit; None = it has none.
    awaited: frozenset[int] = frozenset()  # Children that the present lookup may wait for.
    late: set[int] = field(default_factory=set)  # Children that it did wait for in vain.
    answers: dict[int, ChildAnswer] = field(default_factory=dict)
    decision: LoadDecision | None = None
    local_tokens: int = 0
    loader: int | None = None  # The child that was chosen last.
    blocks: frozenset[int] = frozenset()
    """The blocks that it loaded into, of an engine with a single group."""


@dataclass(eq=False)
class MultiScheduler:
    """One engine's; its public methods are vLLM's hooks. None raises, whatever a child does."""

    _children: ChildConnectors
    _settings: MultiSettings
    _group_ids: tuple[int, ...]  # The groups that a load restores by default.
    _groups: Sequence[Retention]  # All groups of the engine.
    _room: BlockRoom
    _clock: Callable[[], float] = time.monotonic
    _requests: dict[str, MultiLookup] = field(default_factory=dict)
    _loads: dict[str, ChildLoad] = field(default_factory=dict)
    _saves: defaultdict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    """The children that hold the blocks of a request, until its save has ended."""
    _new_saves: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Those of which the workers do not know yet."""
    _sync_blocks: defaultdict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    _bad_blocks: set[int] = field(default_factory=set)
    _choices: ConnectorCounts = field(default_factory=ConnectorCounts)
    _pending_told: Counter[str] = field(default_factory=Counter)
    _prefill: PrefillSpeed = field(default_factory=PrefillSpeed)
    _plans: int = 0

    # Requests

    def on_new_request(self, request: Any) -> None:
        """Every child begins its lookup."""
        self._requests[request.request_id] = MultiLookup()
        self._children.call("on_new_request", None, request, pauses=False)

    def get_num_new_matched_tokens(
        self, request: Any, local_tokens: int
    ) -> tuple[int | None, bool]:
        """Ask all children and decide: (tokens of the best hit, whether its load is asynchronous).

        (None, False) = ask again. A lookup lasts from its first question to the allocation.
        """
        now = self._clock()
        lookup = self._requests.setdefault(request.request_id, MultiLookup())
        asked_seconds = self._ask_all(lookup, request, local_tokens, now)
        hit_seconds = now - lookup.hit_at if lookup.hit_at is not None else 0.0
        most = most_tokens(request, local_tokens)
        patience_seconds = ranking.patience(
            lookup.answers.values(), self._prefill.seconds(most), self._settings.patience_seconds
        )
        children = self._children.all
        decision = ranking.decide(
            [lookup.answers.get(child.index, MISS) for child in children],
            ranking.effective_weights([(one.weight, one.speed) for one in children], now),
            most,
            asked_seconds,
            hit_seconds,
            self._settings.grace_ms / 1e3,
            patience_seconds,
        )
        if not decision.wait:
            failed_seconds = max(patience_seconds, ranking.LATE_SECONDS)
            self._note_late(lookup, now if asked_seconds >= failed_seconds else None)
        if decision.is_async and not self._room.has_room(*_room_of(request)):
            is_waiting = lookup.hit_at is not None and hit_seconds < ROOM_SECONDS
            decision = LoadDecision(None, wait=is_waiting)
            if not is_waiting:
                self._children.counters["lookups_late_room"] += 1
        if decision.wait:
            return None, False
        lookup.decision, lookup.loader, lookup.local_tokens = decision, decision.child, local_tokens
        return decision.tokens, decision.is_async and decision.tokens > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Tell the chosen child of its blocks, and all others that they load nothing (D13)."""
        lookup = self._requests.setdefault(request.request_id, MultiLookup())
        decision, lookup.decision, lookup.asked_at = lookup.decision, None, None
        chosen = decision.child if decision is not None and num_external_tokens else None
        for child in self._children.alive:
            tokens = num_external_tokens if child.index == chosen else 0
            child.call("update_state_after_alloc", None, request, blocks, tokens, fatal=True)
        if decision is not None and request.num_preemptions <= 0:
            names = [child.name for child in self._children.all]
            self._choices.admitted(names, lookup.answers, chosen, num_external_tokens)
        if not num_external_tokens:
            return
        loaded = self._loaded_blocks(blocks, lookup.local_tokens, num_external_tokens)
        lookup.blocks = frozenset(loaded)
        if decision is not None and decision.is_async:
            load = ChildLoad(
                NOBODY if chosen is None else chosen, num_external_tokens, self._clock()
            )
            self._loads[request.request_id] = load
            self._room.hold(*_room_of(request))
        elif chosen is not None and self._children.all[chosen].alive:
            self._sync_blocks[chosen].update(loaded)
        else:
            self._bad_blocks.update(loaded)

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        """The groups that the chosen child's load restores."""
        child = self._loader(request)
        if child is None:
            return self._group_ids
        hook = "get_loaded_kv_cache_group_ids"
        ids: tuple[int, ...] = child.call(hook, self._group_ids, request, fatal=True)
        return ids

    def get_external_cache_hit_sources(
        self, request: Any, tokens: int
    ) -> dict[CacheHitSource, int]:
        """The chosen child's tokens by source.

        What does not add up to `tokens`, or is below 0, has the source for unknown ones: vLLM's
        counters end the server's statistics at anything below 0 (requirements B30).
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
                self._children.counters["sources_wrong"] += 1
                return unknown
            return sources

        return child.guard.run("get_external_cache_hit_sources", ask, lambda: unknown)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """(whether some child holds the blocks, the children's parameters together).

        The blocks are held until each of those children has reported, or is given up.
        """
        params: dict[str, Any] = {}
        for child in self._children.alive:
            # Without SupportsHMA the hybrid manager is off, so there is one group.
            is_hma = isinstance(child.connector, SupportsHMA)
            hook = "request_finished_all_groups" if is_hma else "request_finished"
            blocks = block_ids if is_hma else block_ids[0]
            holds, more = child.call(hook, (False, None), request, blocks, fatal=True)
            if holds:
                self._saves[request.request_id].add(child.index)
            params = {**(more or {}), **params}
        self._requests.pop(request.request_id, None)
        self._room.ran((request.request_id,))
        if request.request_id in self._saves:
            holders = sorted(self._saves[request.request_id])
            self._new_saves[request.request_id] = tuple(holders)
        return request.request_id in self._saves, params or None

    def register_finished_partial_tail(self, *args: Any) -> bool:
        """Just before a request is finished: whether some child holds its last, partial blocks."""
        said = self._children.call("register_finished_partial_tail", False, *args, fatal=True)
        holders = [child.index for child, holds in said if holds]
        if holders:
            self._saves[args[0].request_id].update(holders)
        return bool(holders)

    # Steps

    def build_connector_meta(self, output: Any) -> MultiPlan:
        """This step's message to the workers."""
        self._children.step_begins()
        plans: list[KVConnectorMetadata | None] = []
        for child in self._children.all:
            plan = None
            if child.alive:
                plan = child.call("build_connector_meta", None, output, fatal=True)
            if plan is None:
                self._bad_blocks.update(self._sync_blocks.pop(child.index, ()))
            plans.append(plan)
        self._plans += 1
        settled = self._give_up(self._clock())
        begun = {name: load for name, load in self._loads.items() if not load.announced}
        for load in begun.values():
            load.announced = True
        plan = MultiPlan(
            metadata=tuple(plans),
            loads={name: load.child for name, load in begun.items()},
            saves=self._new_saves,
            settled=settled,
            sync_blocks={index: tuple(ids) for index, ids in self._sync_blocks.items()},
            bad_blocks=tuple(self._bad_blocks),
            number=self._plans,
        )
        self._prefill.step_planned(self._plans, output.total_num_scheduled_tokens, self._clock())
        self._new_saves = {}
        self._sync_blocks.clear()
        self._bad_blocks.clear()
        self._room.ran(output.num_scheduled_tokens)
        return plan

    def update_connector_output(self, output: Any) -> None:
        """Each child hears of its own loads, saves and messages, the engine of each once."""
        report = output.kv_connector_worker_meta
        report = report if isinstance(report, MultiReport) else MultiReport()
        self._children.counters.update(report.counters)
        self._prefill.step_ended(report.number, self._clock())
        failed = set(output.failed_recving or ())
        loads, saves = self._end(output, failed)
        # Whoever loaded into invalid blocks is not asked again for that request.
        for lookup in self._requests.values() if output.invalid_block_ids else ():
            if lookup.loader is not None and not lookup.blocks.isdisjoint(output.invalid_block_ids):
                lookup.refused.add(lookup.loader)
        for child in self._children.alive:
            if child.index in report.dead:
                child.guard.end("its part in a worker is")
                continue
            index, lost = child.index, "messages of several workers of %s are lost"
            message = child.attempt("fault_aggregate", lost, None, report.message_of, index)
            events = child.attempt("fault_kv_events", lost, None, report.events_of, index)
            own = {name for name, load in loads.items() if load.child == index}
            view = dataclasses.replace(
                output,
                finished_recving=own or None,
                failed_recving=own & failed,
                finished_sending={name for name in saves if index in saves[name]} or None,
                kv_connector_worker_meta=message,
                kv_cache_events=events,
            )
            child.call("update_connector_output", None, view, fatal=True)

    def get_kv_connector_stats(self) -> MultiKVConnectorStats | None:
        """The choices and other counts since the last call, and the children's own statistics."""
        stats = MultiKVConnectorStats.taken_from(self._children)
        loading = Counter(load.child for load in self._loads.values())
        for child in self._children.all:
            if loading[child.index] != self._pending_told[child.name]:
                self._pending_told[child.name] = loading[child.index]
                self._choices.add(child.name, PENDING, loading[child.index])
        if not self._choices.is_empty():
            stats.data[SELECTION], self._choices = self._choices, ConnectorCounts()
        if added := self._children.take_counts():
            stats.data[EVENTS] = counts = ConnectorCounts()
            for counter, count in added.items():
                child_name, _, name = counter.rpartition(": ")
                counts.add(child_name, name, count)
        return stats if stats.data else None

    def take_events(self) -> list[Any]:
        """Every child's KV events, and the last ones of a child that was switched off."""
        taken: list[Any] = []
        says = "%s failed to withdraw what it announced"
        for child in self._children.all:
            connector = child.connector
            if child.alive:
                events = partial(_listed, connector, "take_events")
                taken += child.guard.run("take_events", events, list[Any])
            elif not child.withdrawn:
                # With these it withdraws what it announced, so that routers forget it.
                child.withdrawn = True
                taken += child.attempt("fault_withdraw", says, [], _listed, connector, "withdraw")
        return taken

    def _has(self, hook: str) -> bool:
        return any(said for _, said in self._children.call(hook, False, pauses=False))

    has_pending_block_frees = partialmethod(_has, "has_pending_block_frees")
    has_pending_push_work = partialmethod(_has, "has_pending_push_work")

    def reset_cache(self) -> bool:
        """All children forget what they have, or are switched off: the weights may be others."""
        said = self._children.call("reset_cache", True, fatal=True)
        return all(answer is not False for _, answer in said)

    # Parts of the hooks

    def _ask_all(self, lookup: MultiLookup, request: Any, local_tokens: int, now: float) -> float:
        """Ask each child; returns the seconds since the lookup's first question."""
        if lookup.asked_at is None:
            lookup.asked_at, lookup.hit_at = now, None
            lookup.late.clear()
            awaited = [child for child in self._children.alive if child.breaker.allows(now)]
            lookup.awaited = frozenset(child.index for child in awaited)
            for child in awaited:
                child.breaker = child.breaker.asked(now)
        lookup.answers = {
            child.index: self._ask(child, request, local_tokens, child.index in lookup.awaited)
            for child in self._children.alive
            if child.index not in lookup.refused
        }
        if lookup.hit_at is None and any(answer.tokens for answer in lookup.answers.values()):
            lookup.hit_at = now
        return now - lookup.asked_at

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
            if not is_async and len(self._groups) > 1:
                # There it has no way to fail, and recurrent models lose their state.
                if not child.guard.counters["sync_declined"]:
                    why = "it loads within the step"
                    logger.warning("hybridkv: hits of %s are declined: %s", child.name, why)
                child.guard.counters["sync_declined"] += 1
                return MISS
            return ChildAnswer(tokens, bool(is_async))

        answer = child.guard.run("get_num_new_matched_tokens", ask, lambda: MISS)
        if answer.tokens is not None:
            child.breaker = child.breaker.succeeded()
        return answer

    def _note_late(self, lookup: MultiLookup, failed_at: float | None) -> None:
        """Count the children that did not answer; `failed_at`: when they had time enough."""
        for index, answer in lookup.answers.items():
            if answer.tokens is None and answer.awaited and index not in lookup.late:
                child = self._children.all[index]
                lookup.late.add(index)
                child.guard.counters["passed_over"] += 1
                if failed_at is not None:
                    child.breaker = child.breaker.failed(failed_at)

    def _loader(self, request: Any) -> ChildConnector | None:
        lookup = self._requests.get(request.request_id)
        if lookup is None or lookup.loader is None:
            return None
        child = self._children.all[lookup.loader]
        return child if child.alive else None

    def _loaded_blocks(self, blocks: Any, local_tokens: int, external_tokens: int) -> list[int]:
        """Block ids that an external hit is loaded into; none where there are several groups.

        [0, local) local hit    [local, local + external) to load
        """
        if len(self._groups) != 1:
            return []
        tokens_per_block = self._groups[0].tokens_per_block
        end = -(-(local_tokens + external_tokens) // tokens_per_block)
        table = blocks.blocks[0][local_tokens // tokens_per_block : end]
        return [block.block_id for block in table if not block.is_null]

    def _end(
        self, output: Any, failed: Container[str]
    ) -> tuple[dict[str, ChildLoad], dict[str, set[int]]]:
        """End what workers report, and leave in vLLM's `output` what the engine has to see.

        Returns the loads, and the children that held the blocks of each save. Of a request that was
        aborted while it loaded, the engine frees the blocks with the first report that it sees, and
        ends with the second.
        """
        received, sent = set(output.finished_recving or ()), set(output.finished_sending or ())
        loads, saves = received & self._loads.keys(), sent & self._saves.keys()
        output.finished_recving = {n for n in loads if n not in self._saves or n in saves} or None
        output.finished_sending = saves - self._loads.keys() or None
        if absorbed := len(received - loads) + len(sent - saves):
            self._children.counters["reports_absorbed"] += absorbed
        ended, now = {name: self._loads.pop(name) for name in loads}, self._clock()
        for request_id, load in ended.items():
            if request_id in failed:
                self._children.counters["loads_failed"] += 1
                if request_id in self._requests:
                    self._requests[request_id].refused.add(load.child)
            elif load.child != NOBODY:
                child = self._children.all[load.child]
                child.speed = child.speed.measured(load.tokens, now - load.started, now)
        return ended, {name: self._saves.pop(name) for name in saves}

    def _give_up(self, now: float) -> frozenset[int]:
        """End what dead children will not end; returns those whose copies have had time to.

        A load that no worker knows of fails at once. Other loads, and saves, end when the copies of
        their connector have had time to end.
        """
        dead, settled = {NOBODY}, set()
        for child in self._children.all:
            if not child.alive:
                dead.add(child.index)
                child.dead_since = now if child.dead_since is None else child.dead_since
                if now >= child.dead_since + self._settings.settle_seconds:
                    settled.add(child.index)
        for request_id, load in self._loads.items():
            if load.child in settled or (load.child in dead and not load.announced):
                load.child = NOBODY
                self._children.counters["loads_given_up"] += 1
                says = "hybridkv: the load of %s is given up: its connector is switched off"
                logger.warning(says, request_id)
        return frozenset(settled)


def most_tokens(request: Any, local_tokens: int) -> int:
    """The longest external hit with which vLLM's counts of tokens by source stay above 0."""
    total = request.num_tokens
    if request.num_preemptions <= 0:
        total = min(total, request.num_prompt_tokens)
    return int(total) - local_tokens


def _room_of(request: Any) -> tuple[str, int]:
    """The arguments of BlockRoom: the request, and its tokens with the first that it computes."""
    return request.request_id, request.num_tokens + 1


def _listed(connector: Any, hook: str) -> list[Any]:
    return list(getattr(connector, hook, list)() or ())
