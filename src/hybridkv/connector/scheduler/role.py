"""The scheduler role: every hook that vLLM calls in the scheduler's process, handed to its parts.

No hook waits. A message to the daemon is queued, and leaves with the next hook that asks for
answers (`matched`), ends the engine's scheduling (`planned`) or ends the step (`step_ended`). Any
hook takes in what the daemon has answered.
"""

import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from vllm.distributed.kv_events import KVCacheEvent

from hybridkv.connector.messages import StepPlan, StepReport
from hybridkv.connector.scheduler import requests
from hybridkv.connector.scheduler.audits import Audits
from hybridkv.connector.scheduler.drafted import DraftedBlocks
from hybridkv.connector.scheduler.hits import LoadPlanner, Lookups
from hybridkv.connector.scheduler.kv_events import KVEventPublisher
from hybridkv.connector.scheduler.session import DaemonSession
from hybridkv.connector.scheduler.stores import StorePlanner
from hybridkv.connector.scheduler.weights import WeightsWatch
from hybridkv.connector.stats import HybridKVStats, StatsCollector
from hybridkv.core.audit import AuditBudget
from hybridkv.core.geometry import Geometry
from hybridkv.core.keys import fingerprint, tenant_of
from hybridkv.core.packed import U64, batches, pack_u64
from hybridkv.core.settings import Settings
from hybridkv.shm.access import group_id
from hybridkv.vllm.adapters import Adapters
from hybridkv.vllm.block_room import BlockRoom, Retention, retention_of
from hybridkv.vllm.drafters import Drafter
from hybridkv.vllm.hashing import ChunkHashChain, is_hashable
from hybridkv.wire import messages as wire

logger = logging.getLogger("vllm.hybridkv")
Result = TypeVar("Result")

PUSH_SECONDS = 5.0
"""How long after its last store an engine without requests steps on to hear of the store's end."""


class SchedulerRole:
    """One engine's scheduler. Every public method is a hook's work, under supervision."""

    def __init__(
        self,
        settings: Settings,
        geometry: Geometry,
        namespace: bytes,
        engine_id: str,
        socket_path: str,
        tokens_per_step: int,
        counters: Counter[str],
        pool_blocks: int,
        own_hashes: bool = False,
        facts: Mapping[str, object] | None = None,
        model: wire.WireModel | None = None,
        events: KVEventPublisher | None = None,
        staging_bytes: int | None = None,
        inflight_tokens: int | None = None,
        before: "SchedulerRole | None" = None,
        weights: WeightsWatch | None = None,
        drafter: Drafter | None = None,
        keeps: Sequence[Retention] | None = None,
        with_tails: bool = False,
    ) -> None:
        """`events` publishes what RAM has, where routers are to hear of it.

        `weights` are those that `namespace` and `facts` are of; None = they never change.
        `own_hashes`: the engine's hashes cannot be used. `pool_blocks` is the size of the engine's
        block pool. `staging_bytes` is the least of all ranks (WorkerLayout). `inflight_tokens` are
        the most of all steps that the engine plans at once; None = those of one step. `before` is
        the role that was switched off: its requests are not tracked any more, but what workers may
        still report of it and what the engine keeps goes on. `drafter` is the one whose layers have
        a KV cache; None = there is none. `keeps` is what the engine keeps of a request in each
        group; None = what the groups say, without drafts. `with_tails`: hits may end inside a
        chunk, which needs the engine's own hashes (core.tails).
        """
        self._geometry = geometry
        self._own_hashes = own_hashes
        self._counters = counters
        self._adapters: Adapters = before._adapters if before else Adapters(geometry.ranks)
        self._meter: StatsCollector = before._meter if before else StatsCollector(counters)
        self._events = events or KVEventPublisher(geometry, counters, is_on=False)
        keeps = keeps or [*map(retention_of, geometry.groups)]
        self._room: BlockRoom = (
            before._room
            if before
            else BlockRoom(keeps, pool_blocks, inflight_tokens or tokens_per_step)
        )
        version, groups = wire.PROTOCOL_VERSION, wire.geometry_to_wire(geometry)
        # Workers say that they are done with every greeting up to the number of `quit`.
        greeted = before._session.link.greetings + 1 if before else 0
        hello = wire.Hello(1, version, "engine", engine_id, namespace, groups, model, greeted)
        options = settings.daemon_options if settings.server == "auto" else None
        self._session: DaemonSession = DaemonSession(
            *(socket_path, hello, facts or {}, options, bool(events), counters),
            *(self._connection_lost, group_id(settings.daemon.group)),
        )
        self._requests = requests.RequestRegistry(
            geometry, self._session, self._room, self._meter, counters
        )
        self._weights = weights or WeightsWatch()
        budget = before._audits.budget if before else AuditBudget(settings.audit)
        self._audits: Audits = Audits(self._requests, budget)
        self._lookups = Lookups(
            settings,
            self._requests,
            events=self._events,
            weights=self._weights,
            audits=self._audits,
            with_tails=with_tails,
        )
        self._loads = LoadPlanner(self._requests)
        # A late report of what `before` planned must not be taken for one of this role's plans.
        numbers = before._stores.numbers if before else None
        self._stores: StorePlanner = StorePlanner(
            *(geometry, tokens_per_step, settings.store_generated, counters),
            *(staging_bytes, numbers, with_tails),
        )
        self._stores.audits = self._audits
        self._drafted = DraftedBlocks(drafter, geometry, pool_blocks + 1) if drafter else None
        if before:
            self._loads.to_fail = before._loads.give_up()
        plans = before._plan_numbers if before else itertools.count(1)
        self._plan_numbers: Iterator[int] = plans
        self._stale_greeting = 0  # The greeting in which the daemon heard that nothing is served.
        self._push_until = 0.0  # When the engine stops waiting for the reports of stores.
        self._changes: list[wire.Commit | wire.Free] = []  # What leaves with the end of the step.
        self._poll(time.monotonic())

    @property
    def slots_fd(self) -> int | None:
        """A descriptor to wait on, outside of hooks, while slots are being reserved; else None."""
        return self._session.link.fd if self._stores.credits.awaited else None

    def run(self, work: Callable[["SchedulerRole"], Result]) -> Result:
        """The work of one hook; a fault in it ends the connection, and another one is made.

        Messages may be lost with the fault. With the connection the daemon ends what it lent, and
        this role what it waits for.
        """
        try:
            return work(self)
        except Exception:
            self._session.link.reset("a hook failed", time.monotonic())
            raise

    def arrived(self, request: Any) -> None:
        """A new request; its lookup leaves with the engine's next question, or its next plan."""
        now = time.monotonic()
        adapter = self._adapters.arrived(request)
        ahead = self._geometry.chunk_tokens if self._geometry.lookahead_tokens else 0
        if not is_hashable(request, self._own_hashes, ahead):
            tracked = requests.TrackedRequest(request)
            self._requests.decline(tracked, "lookups_unhashable")
            self._requests.report(tracked, now)
            return
        tracked = requests.TrackedRequest(
            request,
            ChunkHashChain(request, self._geometry.chunk_tokens) if self._own_hashes else None,
            adapter,
            tenant=tenant_of(request.cache_salt),
            next_chunk=[0] * len(self._geometry.groups),
        )
        if not self._session.is_connected:
            self._poll(now)
        self._requests.by_id[request.request_id] = tracked
        self._lookups.begin(tracked, now)

    def passed_by(self, request: Any) -> None:
        """A request that arrives while this role is switched off; it may have an adapter."""
        self._adapters.arrived(request)

    def matched(self, request: Any, local_tokens: int) -> int | None:
        """Tokens beyond `local_tokens` that can be loaded; None = ask again in the next step."""
        now = time.monotonic()
        self._poll(now)
        tracked = self._requests.by_id.get(request.request_id)
        if tracked is None:
            return 0
        tracked.local_seen = local_tokens
        # The engine asks while a request has no blocks: what a load left for it is not its own now.
        tracked.load.restored = 0, 0
        is_resumed = request.num_preemptions > tracked.preemptions
        if is_resumed and tracked.state is requests.RequestState.READY:
            tracked.preemptions = request.num_preemptions
            self._requests.advance(tracked, requests.RequestEvent.RESUMED, now)
            self._lookups.begin(tracked, now)
        return self._lookups.offer(tracked, local_tokens, now) if tracked.is_prefetching else 0

    def allocated(
        self, request: Any, tables: Sequence[Sequence[int]], external_tokens: int
    ) -> None:
        """The engine has blocks for `external_tokens` tokens of the offer; 0 = it took nothing."""
        now = time.monotonic()
        tracked = self._requests.by_id.get(request.request_id)
        if tracked is None:
            self.must_fail(request.request_id, external_tokens)
        elif external_tokens:
            self._loads.allocated(tracked, tables, external_tokens, now)
        else:
            self._requests.advance(tracked, requests.RequestEvent.SETTLED, now)

    def must_fail(self, request_id: str, external_tokens: int) -> None:
        """The engine waits for a load of `external_tokens` tokens that nobody planned."""
        if external_tokens:
            self._loads.must_fail(request_id)

    def planned(self, output: Any, tables: Callable[[str], Sequence[Sequence[int]]]) -> StepPlan:
        """This step's copies: loads that have blocks now, and stores of what the step completes.

        `tables` gives a request's present block tables, one for each of the engine's groups.
        """
        plan = self._planned(output, tables)
        loads_for = plan.eras if plan.loads else ()
        self._weights.planned(plan.number, loads_for=loads_for, computes=not plan.is_idle)
        self._adapters.planned(plan.number, output.num_scheduled_tokens)
        # Nothing may come after this: workers never see a plan that a fault ends.
        self._loads.handed_over()
        return plan

    def _planned(self, output: Any, tables: Callable[[str], Sequence[Sequence[int]]]) -> StepPlan:
        now = time.monotonic()
        if self._drafted is not None:
            self._drafted.step(output, self._requests.by_id, tables)
        session = self._session
        greetings, number = session.link.greetings, next(self._plan_numbers)
        plan = StepPlan(number, session.boot, greetings, session.reserved_bytes)
        plan.question = self._weights.question
        plan.is_idle = not output.total_num_scheduled_tokens
        self._loads.put_into(plan, now)
        plan.eras = self._weights.eras
        if session.is_connected:
            # Workers that were connected before this role map the arena as the first step begins,
            # and that step may be all of a prompt.
            is_attached = session.attached_ranks is None or session.workers_attached()
            if not is_attached:
                self._counters["stores_unattached"] += len(output.num_scheduled_tokens)
            elif not self._weights.is_stale and not self._audits.is_cut_off:
                plan.stores = self._stores.planned(output, self._requests.by_id, tables, number)
            self._audits.put_into(plan, now)
            self._reserve(now)
        if plan.stores:
            self._push_until = now + PUSH_SECONDS
        self._report_staleness(now)
        self._lookups.patience.prefill.step_planned(number, output.total_num_scheduled_tokens, now)
        self._room.ran(output.num_scheduled_tokens)
        self._flush(now)
        return plan

    def emergency(self, scheduled: Collection[str]) -> StepPlan:
        """The plan after a fault in `planned`: loads that no worker was told of fail.

        `scheduled`: the requests that run in this step.
        """
        if self._drafted is not None:
            self._drafted.missed(self._requests.by_id)
        greetings, number = self._session.link.greetings, next(self._plan_numbers)
        plan = StepPlan(number, session=greetings, failed=self._loads.give_up())
        plan.question = self._weights.question
        self._weights.planned(number)
        self._adapters.planned(number, scheduled)
        return plan

    def reported(self, finished: set[str], failed: set[str], report: StepReport | None) -> None:
        """What the workers did: loads end, and stored objects are committed."""
        now = time.monotonic()
        if report is not None:
            self._adapters.reported(report.number, report.adapters)
        for request_id in finished:
            tracked = self._requests.by_id.get(request_id)
            if tracked is not None:
                self._loads.ended(tracked, request_id in failed, now)
        session = self._session
        session.attached_ranks = session.attached_ranks or {}
        if report is None:
            return
        session.attached_ranks = report.boots
        self._lookups.patience.prefill.step_ended(report.number, now)
        if report.is_disabled or report.counters.get("attach_failed"):
            session.unmapped = session.boot
        elif session.workers_attached():
            session.unmapped = ""
        if report.corrupt:
            slots = sorted(report.corrupt)
            self._counters["slots_condemned"] += len(slots)
            columns = [(pack_u64(list(column)), U64) for column in zip(*slots, strict=True)]
            for some in batches(wire.CHANGES_MAX, *columns):
                session.send(wire.ReportCorrupt(*some), now)
        was_stale = self._weights.is_stale
        digests = self._weights.heard(report.weights)
        if self._weights.is_stale and not was_stale:
            self._stores.abort()
            self._counters["weights_stale"] += 1
            logger.warning(
                "hybridkv: the weights changed, and the engine's own prefix cache has blocks of "
                "the old ones, or may have; nothing is loaded or stored until it is reset "
                "(reset_prefix_cache) while no request runs"
            )
            self._report_staleness(now)
        if digests is not None:
            facts = self._weights.facts_of(digests)
            self.identify(fingerprint(facts), facts)
            self._weights.is_identified = True
        if self._audits.take(report, now):
            self._stores.abort()
        self._changes += self._stores.reported(report, self._weights.is_proven)
        if session.is_connected:
            self._events.update(lambda events: events.stored(self._stores.committed))
        self.counted(report)

    def _report_staleness(self, now: float) -> None:
        """Tell the daemon, once for each greeting, that nothing is served, and when that ends."""
        greeting, is_stale = self._session.link.greetings, self._weights.is_stale
        is_reported = self._stale_greeting == greeting
        if self._session.is_connected and is_stale != is_reported:
            self._session.send(wire.ReportStale(is_stale), now)
            self._stale_greeting = greeting if is_stale else 0

    def overheard(self, report: StepReport | None) -> None:
        """A report while this role is switched off, or after a fault in `reported`.

        It has counters, and the weights of steps. Other weights are named by the next report.
        """
        if report is not None:
            self._adapters.reported(report.number, report.adapters)
            self._weights.heard(report.weights)
            self.counted(report)

    def counted(self, report: StepReport) -> None:
        """Add what the workers counted."""
        self._counters.update(report.counters)

    def has_pending(self) -> bool:
        """Whether the engine should step although no request runs.

        Stores are not committed yet, or workers were not asked for their weights.
        """
        is_unsent = self._stores.is_awaited or self._session.link.has_unsent
        return (is_unsent or self._weights.is_untold) and time.monotonic() < self._push_until

    def finished(self, request_id: str) -> None:
        """The request ended or was aborted."""
        self._adapters.ended(request_id)
        now, tracked = time.monotonic(), self._requests.by_id.get(request_id)
        if tracked is not None:
            self._audits.count_prefill(tracked)
            self._requests.advance(tracked, requests.RequestEvent.FINISHED, now)
            self._audits.settle(now)

    def reset(self, is_empty: bool) -> None:
        """The engine reset its prefix cache (`is_empty`: nothing is left): weights may be others.

        The workers are asked, with a step of its own where none is due. Until they have answered
        nothing is offered, and what is stored is not committed.
        """
        now = time.monotonic()
        # What is committed by now was computed before; what is being written may not be.
        self._send_changes(now)
        self._stores.abort()
        self._audits.reset(now)
        self._weights.reset(is_empty)
        if is_empty:
            self._adapters.emptied()
        self._push_until = now + PUSH_SECONDS
        self._flush(now)

    def gone(self, request_id: str) -> None:
        """The request ended while this role is switched off: its blocks are the engine's."""
        self._room.ran((request_id,))
        self._adapters.ended(request_id)

    def emptied(self) -> None:
        """The engine's prefix cache was emptied while this role was switched off."""
        self._adapters.emptied()

    def identify(self, namespace: bytes, facts: Mapping[str, object]) -> None:
        """The weights are others, and the engine has no block of the old ones any more."""
        now = time.monotonic()
        # What is committed by now was computed before.
        self._send_changes(now)
        self._session.identify(namespace, facts, now)
        self._stores.abort()
        self._audits.identify(now)
        self._events.update(KVEventPublisher.lost)
        for tracked in [*self._requests.by_id.values()]:
            tracked.next_chunk = [0] * len(self._geometry.groups)
            tracked.stored_states.clear()
            tracked.lookup.found = None
            if tracked.is_prefetching:
                self._requests.release(tracked, now)
                self._lookups.begin(tracked, now)
        self._flush(now)

    def sources(self, request_id: str, external_tokens: int) -> dict[str, int]:
        """The load that `allocated` planned, in tokens by tier; empty where none is known."""
        tracked = self._requests.by_id.get(request_id)
        if tracked is None or tracked.load.tokens != external_tokens:
            return {}
        return self._loads.tiers_of(tracked)

    def take_stats(self, off_since: float = 0.0, off_seconds: float = 0.0) -> HybridKVStats | None:
        """What was counted and measured since the last call; None = nothing.

        `off_since` is when this role was switched off, in Unix time, and for `off_seconds`.
        """
        counters = self._counters
        gauges = {
            "quarantined": counters["quarantined"] - counters["begun_anew"],
            "quarantined_since": off_since,
            "quarantined_until": off_since and off_since + off_seconds,
            "breaker_open": int(self._session.breaker.is_open),
            "daemon_connected": int(self._session.is_connected),
            "loads_pending": len(self._room),
            "loads_overdue": self._loads.count_overdue(time.monotonic()),
        }
        return self._meter.take(gauges)

    def step_ended(self) -> list[KVCacheEvent]:
        """The last hook of a step: messages leave, slots come in; returns the KV events."""
        now = time.monotonic()
        self._send_changes(now)
        self._poll(now)
        return self._events.take()

    def withdraw(self) -> list[KVCacheEvent]:
        """The last KV events of a connector that is switched off: nothing is offered any more."""
        self._events.update(KVEventPublisher.lost)
        return self._events.take()

    def quit(self, scheduled: Collection[str]) -> StepPlan:
        """The plan of a role that is switched off: the daemon gets back all that it lent.

        `scheduled`: the requests that run in this step.
        """
        self.close()
        self._room.ran(scheduled)
        plan = self.emergency(scheduled)
        # No greeting of this number will come. With it the workers report that they copy nothing
        # that was planned under any other.
        plan.session = self._session.link.greetings + 1
        return plan

    def close(self) -> None:
        """End the session."""
        self._session.link.close()

    def _poll(self, now: float) -> None:
        # A queued lookup's deadline begins before an answer is read that sets another one.
        self._flush(now)
        for reply in self._session.link.poll(now):
            self._take(reply, now)
            if not self._session.is_connected:
                break  # The replies behind this one are of a session that has ended.
        if self._session.follow(now):
            self._reserve(now)
        self._flush(now)

    def _take(self, reply: wire.Reply, now: float) -> None:
        if isinstance(reply, wire.Found):
            self._lookups.take_found(reply, now)
        elif isinstance(reply, wire.Pending):
            self._lookups.take_pending(reply, now)
        elif isinstance(reply, wire.Reserved):
            session, shape = self._session, (reply.part_bytes, reply.parts)
            session.reserved_bytes = max(session.reserved_bytes, reply.reserved_bytes)
            self._stores.credits.granted(shape, reply.offsets, reply.generations, now)
        elif isinstance(reply, wire.Removed):
            self._events.update(lambda events: events.removed(reply))
        elif isinstance(reply, wire.Error):
            # The refused request may have been a commit.
            self._events.update(KVEventPublisher.lost)
            self._counters[f"refused_{reply.code}"] += 1
            logger.warning("hybridkv: the daemon refused a request: %s", reply.message)

    def _reserve(self, now: float) -> None:
        for (part_bytes, parts), count in self._stores.credits.wanted(now):
            self._session.send(wire.Reserve(part_bytes, part_bytes, parts, count), now)

    def _flush(self, now: float) -> None:
        self._lookups.flushed(now)
        self._session.link.flush(now)

    def _send_changes(self, now: float) -> None:
        changes, self._changes = self._changes, []
        for message in changes:
            self._session.send(message, now)

    def _connection_lost(self) -> None:
        self._changes.clear()
        self._lookups.queued.clear()
        self._stores.lost()
        self._audits.lost()
        self._events.update(KVEventPublisher.lost)
        self._requests.lost(time.monotonic())
