"""MultiConnector's scheduler role: asks all children, decides, tells the losers, and knows who owes the engine what."""

import dataclasses
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, SupportsHMA
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from hybridkv.connector.children import Child, MultiSettings, all_counters
from hybridkv.connector.multimessages import MultiEvents, MultiPlan, MultiReport
from hybridkv.connector.multistats import EVENTS, SELECTION, EventStats, MultiKVConnectorStats, _SelectionStats
from hybridkv.connector.scheduler import ROOM_SECONDS
from hybridkv.core.choice import MISS, Answer, Decision, Limits, decide, effective_weights, patience
from hybridkv.core.coverage import Keeping, most_blocks
from hybridkv.core.selection import Selection

logger = logging.getLogger("vllm.hybridkv")


@dataclass(eq=False, slots=True)
class Asked:
    """A request, as far as the choice goes."""

    refused: set[int] = field(default_factory=set)
    """Children of which a load for it has failed."""
    asked_at: float | None = None
    """Of the attempt that is going on: the first question, None = none is going on."""
    hit_at: float | None = None
    awaited: frozenset[int] = frozenset()
    """Children that it may wait for."""
    late: set[int] = field(default_factory=set)
    """Those that it did wait for in vain."""
    answers: dict[int, Answer] = field(default_factory=dict)
    decision: Decision | None = None
    local_tokens: int = 0
    loader: int | None = None
    """The child that was chosen last."""
    blocks: frozenset[int] = frozenset()
    """Where it loaded to, of an engine with a single group."""


@dataclass(eq=False, slots=True)
class Load:
    """An asynchronous load that has not ended."""

    child: int
    tokens: int
    started: float
    announced: bool = False
    """Whether the workers know of it."""
    lost: bool = False
    """Whether the child never got to know of it."""
    given_up: bool = False


class MultiScheduler:
    """One engine's scheduler. No method raises, whatever a child does."""

    def __init__(
        self,
        children: Sequence[Child],
        settings: MultiSettings,
        counters: Counter[str],
        group_ids: tuple[int, ...],
        groups: Sequence[Keeping],
        pool_blocks: int,
        tokens_per_step: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._children = children
        self._names = [child.name for child in children]
        self._settings = settings
        self._counters = counters
        self._group_ids = group_ids
        """What a load restores by default."""
        self._groups = groups
        """What each of the engine's groups keeps of a request."""
        self._pool_blocks = pool_blocks
        self._step_tokens = tokens_per_step
        self._held: dict[str, int] = {}
        """Blocks, at most, of the requests that had blocks for a load and did not run since."""
        self._clock = clock
        self._requests: dict[str, Asked] = {}
        self._loads: dict[str, Load] = {}
        self._saves: dict[str, set[int]] = {}
        self._new_saves: dict[str, tuple[int, ...]] = {}
        self._let_go: list[tuple[int, str]] = []
        self._sync_blocks: dict[int, set[int]] = {}
        self._bad_blocks: set[int] = set()
        self._selection = Selection()
        self._pending_told = dict.fromkeys(self._names, 0)
        self._counters_told: Counter[str] = Counter()

    # Requests

    def arrived(self, request: Any) -> None:
        """Every child begins its lookup."""
        self._requests[request.request_id] = Asked()
        for child in self._living():
            child.call("on_new_request", None, request)

    def matched(self, request: Any, local_tokens: int) -> tuple[int | None, bool]:
        """Ask all children at once and decide. One attempt lasts from the first question to `allocated`."""
        now = self._clock()
        asked = self._requests.setdefault(request.request_id, Asked())
        if asked.asked_at is None:
            asked.asked_at, asked.hit_at = now, None
            asked.late.clear()
            asked.awaited = frozenset(child.place for child in self._living() if child.breaker.allows(now))
            for child in self._children:
                if child.place in asked.awaited:
                    child.breaker = child.breaker.asked(now)
        asked.answers = {
            child.place: self._ask(child, request, local_tokens, child.place in asked.awaited)
            for child in self._living()
            if child.place not in asked.refused
        }
        answers = [asked.answers.get(child.place, MISS) for child in self._children]
        if asked.hit_at is None and any(answer.tokens for answer in answers):
            asked.hit_at = now
        limits = Limits(self._settings.grace_ms / 1e3, patience(request.num_tokens, self._settings.patience_seconds))
        decision = decide(
            answers,
            effective_weights([child.weight for child in self._children], [c.speed for c in self._children], now),
            most_tokens(request, local_tokens),
            now - asked.asked_at,
            now - asked.hit_at if asked.hit_at is not None else 0.0,
            limits,
        )
        self._note_late(asked, decision, now - asked.asked_at >= limits.patience_seconds, now)
        if decision.is_async and not self._has_room(request):
            decision = Decision(None, wait=asked.hit_at is not None and now - asked.hit_at < ROOM_SECONDS)
            if not decision.wait:
                self._counters["lookups_late_room"] += 1
        if decision.wait:
            return None, False
        asked.decision, asked.loader, asked.local_tokens = decision, decision.child, local_tokens
        return decision.tokens, decision.is_async and decision.tokens > 0

    def allocated(self, request: Any, blocks: Any, external_tokens: int) -> None:
        """Tell the chosen child of its blocks, and all others that they load nothing (requirements D13)."""
        name = request.request_id
        asked = self._requests.setdefault(name, Asked())
        decision, asked.decision, asked.asked_at = asked.decision, None, None
        chosen = decision.child if decision is not None and external_tokens else None
        is_async = decision is not None and decision.is_async
        for child in self._living():
            tokens = external_tokens if child.place == chosen else 0
            child.call("update_state_after_alloc", None, request, blocks, tokens, fatal=True)
        if external_tokens:
            loaded = self._loaded_blocks(blocks, asked.local_tokens, external_tokens)
            asked.blocks = frozenset(loaded)
            place = -1 if chosen is None else chosen
            if is_async:
                self._loads[name] = Load(place, external_tokens, self._clock(), lost=not self._is_alive(place))
                self._held[name] = self._most_blocks(request)
            elif self._is_alive(place):
                self._sync_blocks.setdefault(place, set()).update(loaded)
            else:
                self._bad_blocks.update(loaded)
        if decision is not None and request.num_preemptions <= 0:
            self._selection.admitted(self._names, asked.answers, chosen, external_tokens)

    def loaded_group_ids(self, request: Any) -> tuple[int, ...]:
        """The groups that the chosen child's load restores."""
        child = self._loader(request)
        if child is None:
            return self._group_ids
        ids: tuple[int, ...] = child.call("get_loaded_kv_cache_group_ids", self._group_ids, request)
        return ids

    def hit_sources(self, request: Any, tokens: int) -> dict[CacheHitSource, int]:
        """The chosen child's tokens by tier; what does not add up to `tokens`, or is below 0, is of no known tier.

        vLLM's counters end the server's statistics at anything below 0 (requirements B30).
        """
        if tokens <= 0:
            return {}
        child = self._loader(request)
        unknown = {CacheHitSource.EXTERNAL_UNSPECIFIED: tokens}
        if child is None:
            return unknown

        def ask() -> dict[CacheHitSource, int]:
            said = {
                CacheHitSource(source): int(count)
                for source, count in child.connector.get_external_cache_hit_sources(request, tokens).items()
            }
            if sum(said.values()) != tokens or min(said.values()) < 0:
                self._counters["sources_wrong"] += 1
                return unknown
            return said

        return child.run("get_external_cache_hit_sources", ask, unknown)

    def finished(self, request: Any, block_ids: tuple[list[int], ...]) -> tuple[bool, dict[str, Any] | None]:
        """(whether some child holds the blocks, the children's parameters together)."""
        name = request.request_id
        params: dict[str, Any] | None = None
        for child in self._living():
            if isinstance(child.connector, SupportsHMA):
                held = child.call("request_finished_all_groups", (False, None), request, block_ids, fatal=True)
            else:
                # The hybrid manager is off, so there is one group.
                held = child.call("request_finished", (False, None), request, block_ids[0], fatal=True)
            holds, more = held
            if holds:
                self._saves.setdefault(name, set()).add(child.place)
            if more:
                params = {**more, **(params or {})}
        self._requests.pop(name, None)
        self._held.pop(name, None)
        if name in self._saves:
            self._new_saves[name] = tuple(sorted(self._saves[name]))
        return name in self._saves, params

    def partial_tail(self, request: Any, block_ids: Any, offloads: Any) -> bool:
        """Just before `finished`: whether some child holds the blocks because of the last, partial ones."""
        held = False
        for child in self._living():
            args = request, block_ids, offloads
            if child.call("register_finished_partial_tail", False, *args, fatal=True):
                self._saves.setdefault(request.request_id, set()).add(child.place)
                held = True
        return held

    # Steps

    def planned(self, output: Any) -> MultiPlan:
        """This step's message to the workers."""
        metadata = [self._child_plan(child, output) for child in self._children]
        self._give_up(self._clock())
        plan = MultiPlan(
            metadata=tuple(metadata),
            loads={name: load.child for name, load in self._loads.items() if not load.announced},
            saves=self._new_saves,
            failed=tuple(name for name, load in self._loads.items() if load.given_up),
            let_go=tuple(self._let_go),
            sync_blocks={
                place: tuple(blocks) for place, blocks in self._sync_blocks.items() if self._children[place].alive
            },
            bad_blocks=tuple(self._bad_blocks),
        )
        for load in self._loads.values():
            load.announced = True
        self._new_saves, self._let_go = {}, []
        self._sync_blocks, self._bad_blocks = {}, set()
        for name in [name for name in self._held if name in output.num_scheduled_tokens]:
            del self._held[name]
        return plan

    def reported(self, output: Any) -> None:
        """What the workers did. Ends of transfers that nobody waits for are taken out of `output`."""
        report = output.kv_connector_worker_meta
        report = report if isinstance(report, MultiReport) else None
        events = output.kv_cache_events if isinstance(output.kv_cache_events, MultiEvents) else None
        now = self._clock()
        if report is not None:
            self._counters.update(report.counters)
            for place in report.dead:
                child = self._children[place]
                if child.alive:
                    child.supervisor.switch_off("its part in a worker is")
        finished = {name for name in output.finished_recving or () if name in self._loads}
        failed = {name for name in output.failed_recving or () if name in finished}
        sent = {name for name in output.finished_sending or () if name in self._saves}
        lost = len(output.finished_recving or ()) - len(finished) + len(output.finished_sending or ()) - len(sent)
        if lost:
            self._counters["reports_absorbed"] += lost
        # Of a request that was aborted while it loaded, the engine frees the blocks with the first report that it sees,
        # and ends with the second.
        output.finished_recving = {name for name in finished if name not in self._saves or name in sent} or None
        output.finished_sending = {name for name in sent if name not in self._loads} or None
        ended: dict[int, set[str]] = {}
        for name in finished:
            load = self._loads.pop(name)
            ended.setdefault(load.child, set()).add(name)
            self._load_ended(name, load, name in failed, now)
        if output.invalid_block_ids:
            self._refuse(output.invalid_block_ids)
        saved = {name: self._saves.pop(name) for name in sent}
        for child in self._living():
            mine = ended.get(child.place, set())
            view = dataclasses.replace(
                output,
                finished_recving=mine or None,
                failed_recving=mine & failed,
                finished_sending={name for name, places in saved.items() if child.place in places} or None,
                kv_connector_worker_meta=report.metadata[child.place] if report is not None else None,
                kv_cache_events=events.children.get(child.place) if events is not None else None,
            )
            child.call("update_connector_output", None, view, fatal=True)

    def stats(self) -> MultiKVConnectorStats | None:
        """The choices since the last call, and the children's own."""
        stats = child_stats(self._children) or MultiKVConnectorStats()
        pending = dict.fromkeys(self._names, 0)
        for load in self._loads.values():
            if load.child >= 0:
                pending[self._names[load.child]] += 1
        selection, self._selection = self._selection, Selection()
        selection.pending_loads = {name: level for name, level in pending.items() if level != self._pending_told[name]}
        self._pending_told = pending
        if selection.as_dict():
            stats.data[SELECTION] = _SelectionStats(selection)
        totals = all_counters(self._counters, self._children)
        if added := totals - self._counters_told:
            self._counters_told = totals
            stats.data[EVENTS] = EventStats.of(added)
        return stats if stats.data else None

    def events(self) -> list[Any]:
        """Every child's KV events."""
        taken: list[Any] = []
        for child in self._children:
            if child.alive:
                taken += child.run("take_events", partial(_events, child.connector), [])
            elif not child.withdrawn:
                child.withdrawn = True
                taken += _last_events(child)
        return taken

    def any_pending(self, hook: str) -> bool:
        """Whether some child says so."""
        return any(bool(child.call(hook, False)) for child in self._living())

    def reset_cache(self) -> bool:
        """A child that cannot forget what it has must not be used any more: the weights may be others now."""
        forgot = [child.call("reset_cache", True, fatal=True) is not False for child in self._living()]
        return all(forgot)

    # Small things

    def _is_alive(self, place: int) -> bool:
        return place >= 0 and self._children[place].alive

    def _living(self) -> list[Child]:
        return [child for child in self._children if child.alive]

    def _ask(self, child: Child, request: Any, local_tokens: int, is_awaited: bool) -> Answer:
        def ask() -> Answer:
            tokens, is_async = child.connector.get_num_new_matched_tokens(request, local_tokens)
            if tokens is None:
                return Answer(None, awaited=is_awaited)
            if tokens <= 0:
                return MISS
            # More than the engine can take would end it; so would a whole prompt that is loaded within the step.
            if tokens > most_tokens(request, local_tokens) - (0 if is_async else 1):
                raise ValueError(f"{tokens} tokens beyond {local_tokens} of {request.num_tokens} are too many")
            if not is_async and len(self._groups) > 1:
                # There it has no way to fail, and recurrent models lose their state.
                if not child.supervisor.counters["sync_declined"]:
                    logger.warning("hybridkv: hits of %s are declined: %s", child.name, "it loads within the step")
                child.supervisor.counters["sync_declined"] += 1
                return MISS
            return Answer(tokens, bool(is_async))

        answer = child.run("get_num_new_matched_tokens", ask, MISS)
        if answer.tokens is not None:
            child.breaker = child.breaker.succeeded()
        return answer

    def _has_room(self, request: Any) -> bool:
        """Whether every request that loads, from whichever child, can run as soon as its load ends.

        The same rule as HybridKVConnector's, which sees its own loads alone. A request whose load failed keeps its
        room: it stands before those whose loads ended, and vLLM 0.32 looks at none of them while it finds no blocks.
        """
        others = sum(blocks for name, blocks in self._held.items() if name != request.request_id)
        return not others or others + self._most_blocks(request) <= self._pool_blocks

    def _most_blocks(self, request: Any) -> int:
        return most_blocks(self._groups, request.num_tokens + 1, self._step_tokens)

    def _note_late(self, asked: Asked, decision: Decision, is_late: bool, now: float) -> None:
        if decision.wait:
            return
        for place, answer in asked.answers.items():
            if answer.tokens is None and answer.awaited and place not in asked.late:
                asked.late.add(place)
                self._children[place].supervisor.counters["passed_over"] += 1
                if is_late:
                    self._children[place].breaker = self._children[place].breaker.failed(now)

    def _loader(self, request: Any) -> Child | None:
        asked = self._requests.get(request.request_id)
        child = self._children[asked.loader] if asked is not None and asked.loader is not None else None
        return child if child is not None and child.alive else None

    def _loaded_blocks(self, blocks: Any, local_tokens: int, external_tokens: int) -> list[int]:
        """Block ids that an external hit is loaded into: named only where there is one group.

        [0, local) local hit    [local, local + external) to load
        """
        if len(self._groups) != 1:
            return []
        step = self._groups[0].tokens_per_block
        table = blocks.blocks[0][local_tokens // step : -(-(local_tokens + external_tokens) // step)]
        return [block.block_id for block in table if not block.is_null]

    def _child_plan(self, child: Child, output: Any) -> KVConnectorMetadata | None:
        plan: KVConnectorMetadata | None = None
        if child.alive:
            plan = child.call("build_connector_meta", None, output, fatal=True)
        if plan is None:
            self._bad_blocks.update(self._sync_blocks.get(child.place, ()))
        return plan

    def _give_up(self, now: float) -> None:
        """Loads that nobody was told of fail at once, others and saves when their child had time to end them."""
        for child in self._children:
            if not child.alive and child.dead_since is None:
                child.dead_since = now
        settled = {
            child.place
            for child in self._children
            if child.dead_since is not None and now >= child.dead_since + self._settings.settle_seconds
        }
        for name, load in self._loads.items():
            child_is_dead = load.child < 0 or self._children[load.child].dead_since is not None
            untold = not load.announced and (load.lost or child_is_dead)
            if not load.given_up and (untold or load.child in settled):
                load.given_up = True
                self._counters["loads_given_up"] += 1
                logger.warning("hybridkv: the load of %s is given up: its connector is switched off", name)
        for name, places in self._saves.items():
            for place in places & settled:
                self._let_go.append((place, name))

    def _load_ended(self, name: str, load: Load, failed: bool, now: float) -> None:
        asked = self._requests.get(name)
        if failed:
            self._counters["loads_failed"] += 1
            if asked is not None:
                asked.refused.add(load.child)
        elif load.child >= 0:
            child = self._children[load.child]
            child.speed = child.speed.measured(load.tokens, now - load.started, now)

    def _refuse(self, invalid_block_ids: set[int]) -> None:
        """Whoever loaded into these blocks is not asked again for that request."""
        for asked in self._requests.values():
            if asked.loader is not None and not asked.blocks.isdisjoint(invalid_block_ids):
                asked.refused.add(asked.loader)


def most_tokens(request: Any, local_tokens: int) -> int:
    """The longest external hit that vLLM can take without its counts of tokens by source going below 0."""
    total = request.num_tokens
    if request.num_preemptions <= 0:
        total = min(total, request.num_prompt_tokens)
    return int(total) - local_tokens


def _events(connector: Any) -> list[Any]:
    return list(connector.take_events() or ())


def _last_events(child: Child) -> list[Any]:
    """Of a child that is switched off, if it has such: otherwise routers believe for ever what it announced."""
    withdraw = getattr(child.connector, "withdraw", None)
    if withdraw is None:
        return []
    try:
        return list(withdraw())
    except Exception:  # the supervised boundary of a child that is switched off already
        logger.exception("hybridkv: %s failed to withdraw what it announced", child.name)
        return []


def child_stats(children: Sequence[Child]) -> MultiKVConnectorStats | None:
    """The children's own statistics since the last call, under their names."""
    stats: MultiKVConnectorStats | None = None
    for child in children:
        if not child.alive:
            continue
        taken = child.call("get_kv_connector_stats", None)
        if taken is not None:
            stats = stats or MultiKVConnectorStats()
            stats.put(child.name, type(child.connector), taken)
    return stats
