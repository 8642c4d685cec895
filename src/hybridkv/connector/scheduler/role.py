"""The scheduler role: the work of all hooks that vLLM calls in the scheduler's process.

No hook waits. A message to the daemon is queued, and leaves with the next hook that asks for
answers (`offer_hit`), ends the engine's scheduling (`plan_step`) or ends the step (`on_step_end`).
Every hook takes the daemon's replies that have come by then. `fallbacks` has what the hooks answer
where the role does not serve them.
"""

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

from vllm.distributed.kv_events import KVCacheEvent

from hybridkv.connector import metrics
from hybridkv.connector.messages import NodePlans, StepPlan, StepReport
from hybridkv.connector.metrics import Shed, stores_shed
from hybridkv.connector.scheduler import requests
from hybridkv.connector.scheduler.audits import Audits
from hybridkv.connector.scheduler.context import EngineLife, SchedulerContext
from hybridkv.connector.scheduler.drafted import DraftedBlocks
from hybridkv.connector.scheduler.junctions import Junctions
from hybridkv.connector.scheduler.kv_events import KVEventPublisher
from hybridkv.connector.scheduler.loads import LoadPlanner
from hybridkv.connector.scheduler.lookups import Lookups
from hybridkv.connector.scheduler.session import DaemonSession, EngineIdentity
from hybridkv.connector.scheduler.stores import StoreLimits, StorePlanner
from hybridkv.connector.stats import HybridKVStats
from hybridkv.core.keys import tenant_of
from hybridkv.core.metrics import Metric
from hybridkv.shm.access import group_id
from hybridkv.vllm.drafters import NO_DRAFTER
from hybridkv.vllm.hashing import ChunkHashChain, is_hashable
from hybridkv.vllm.hook_guard import QUARANTINED, RESUMED
from hybridkv.vllm.media import RequestMedia
from hybridkv.vllm.weights import WeightsAnswer
from hybridkv.wire import messages as wire

logger = logging.getLogger("vllm.hybridkv")
Result = TypeVar("Result")

PUSH_SECONDS = 5.0
"""An engine without requests steps on for at most so long after its last store."""
READ_ON_SECONDS = 600.0
"""The same while its workers read weights for which a start had no time."""


class SchedulerRole:
    """One engine's scheduler. Its parts are public, so that tests and tools can look at them.

    Every method that `fallbacks` lists is the work of one hook, under supervision.
    """

    def __init__(
        self, context: SchedulerContext, life: EngineLife, identity: EngineIdentity
    ) -> None:
        settings, geometry = context.settings, context.geometry
        self.life = life
        self.geometry = geometry
        self._own_hashes = context.own_hashes
        self._why_computed = context.why_computed
        self._counters = life.counters
        self._adapters = life.adapters
        self.weights = life.weights
        self.room = life.room
        self.events = KVEventPublisher(
            geometry, life.counters, context.publishes_events, context.event_group
        )
        hello = wire.Hello(
            1,
            version=wire.PROTOCOL_VERSION,
            role="engine",
            engine_id=context.engine_id,
            namespace=identity.namespace,
            geometry=wire.geometry_to_wire(geometry),
            model=context.model,
            # Workers report that they are done with every greeting up to this number.
            session=life.last_greeting,
        )
        self.session = DaemonSession(
            socket_path=context.socket_path,
            hello=hello,
            facts=identity.facts,
            daemon_options=settings.daemon_options if settings.server == "auto" else None,
            subscribes=context.publishes_events,
            counters=life.counters,
            on_loss=self._on_connection_lost,
            geometry=geometry,
            group=group_id(settings.daemon.group),
        )
        self.requests = requests.RequestRegistry(
            geometry, self.session, life.room, life.meter, life.counters
        )
        self.audits = Audits(self.requests, life.audit_budget)
        self.lookups = Lookups(
            settings,
            self.requests,
            events=self.events,
            weights=life.weights,
            audits=self.audits,
            with_tails=context.with_tails,
        )
        self.loads = LoadPlanner(self.requests, life.to_fail)
        limits = StoreLimits(
            step_tokens=context.step_tokens,
            with_generated=settings.store_generated,
            with_tails=context.with_tails,
            staging_bytes=context.staging_bytes,
        )
        self.stores = StorePlanner(
            geometry, limits, life.counters, numbers=life.run_numbers, audits=self.audits
        )
        self._junctions = Junctions(geometry)
        self._context = context
        self._drafted: DraftedBlocks | None = None
        faults = context.faults
        is_unproven = faults.in_all_steps or faults.beside_adapters or life.had_unproven_session
        if context.drafter or is_unproven:
            self._follow_blocks()
        self._reported = wire.ReportStale(False)
        self._reported_greeting = 0  # The greeting in which the daemon heard it.
        self._push_until = 0.0  # When the engine stops waiting for the reports of stores.
        self._read_on_until = 0.0  # The same for workers that read late. 0.0 = none does.
        self.changes: list[wire.Commit | wire.Free] = []
        """Messages that leave with the end of the step."""
        self.exchange_messages(time.monotonic())

    @property
    def slots_fd(self) -> int | None:
        """The descriptor to wait on while slots are being reserved, outside of hooks, else None."""
        return self.session.link.fd if self.stores.credits.is_awaiting else None

    def _follow_blocks(self) -> None:
        """Follow from now on which blocks of the engine are proven. Those that it has are not."""
        context = self._context
        drafter, blocks = context.drafter or NO_DRAFTER, context.pool_blocks + 1
        self._drafted = DraftedBlocks(drafter, self.geometry, blocks, context.faults)

    def run_work(self, work: Callable[["SchedulerRole"], Result]) -> Result:
        """Return the result of a hook's work. A fault ends the connection and is raised again.

        Messages may be lost with the fault. With the connection the daemon ends the leases and
        slots that it lent, and this role ends its waits. Another connection is made.
        """
        try:
            return work(self)
        except Exception:
            self.session.link.drop_connection("a hook failed", time.monotonic())
            raise

    def on_new_request(self, request: Any) -> None:
        """Track a new request. Its lookup leaves with the engine's next question or next plan."""
        now = time.monotonic()
        adapter = self._adapters.on_new_request(request)
        self.life.note_session(request)
        if self.life.had_unproven_session and self._drafted is None:
            self._follow_blocks()
        ahead = self.geometry.chunk_tokens if self.geometry.lookahead_tokens else 0
        contents, media = self.life.media, None
        if request.mm_features or request.resumable:
            media = RequestMedia(request, contents)
        is_named = media is None or media.is_known()
        is_nameless = not is_named or not is_hashable(request, self._own_hashes, ahead)
        if is_nameless or self._why_computed:
            tracked = requests.TrackedRequest(request)
            reason = wire.Decline.UNHASHABLE if is_nameless else wire.Decline.UNWANTED
            detail = media.why_unknown() if media is not None and not is_named else ""
            self.requests.decline(tracked, reason, detail or self._why_computed)
            self.requests.send_explanation(tracked, now)
            contents.on_untracked_request(request)
            return
        tracked = requests.TrackedRequest(
            request,
            ChunkHashChain(request, self.geometry.chunk_tokens) if self._own_hashes else None,
            adapter,
            media=media,
            tenant=tenant_of(request.cache_salt),
            next_chunk=[0] * len(self.geometry.groups),
        )
        if not self.session.is_connected:
            self.exchange_messages(now)
        self.requests.by_id[request.request_id] = tracked
        self.lookups.look_up(tracked, now)

    def offer_hit(self, request: Any, local_tokens: int) -> int | None:
        """Return the tokens beyond `local_tokens` that can be loaded. None = ask in the next step.

        `local_tokens` are the tokens of the engine's own hit.
        """
        now = time.monotonic()
        self.exchange_messages(now)
        tracked = self.requests.by_id.get(request.request_id)
        if tracked is None:
            return 0
        tracked.local_seen = local_tokens
        # The engine asks while a request has no blocks. So it has lost all that a load restored.
        tracked.load.restored = range(0)
        is_resumed = request.num_preemptions > tracked.preemptions
        if is_resumed and tracked.state is requests.RequestState.OUTRUN:
            self.requests.advance(tracked, requests.RequestEvent.SETTLED, now)
        if is_resumed and tracked.state is requests.RequestState.READY:
            tracked.preemptions = request.num_preemptions
            self.requests.advance(tracked, requests.RequestEvent.RESUMED, now)
            self.lookups.look_up(tracked, now)
        tokens = (
            self.lookups.tokens_to_load(tracked, local_tokens, now) if tracked.is_prefetching else 0
        )
        if tokens is not None:
            prefill, start = self.lookups.patience.prefill.speed, local_tokens + tokens
            self._junctions.on_offer(tracked, start, prefill, self.loads.speed)
        return tokens

    def on_allocated(
        self, request: Any, tables: Callable[[], Sequence[Sequence[int]]], external_tokens: int
    ) -> None:
        """Plan a load, because the engine has blocks for `external_tokens` tokens of the offer.

        0 = the engine loads nothing. `tables` returns the request's block table of each of the
        engine's groups.
        """
        now, present_tables = time.monotonic(), tables()
        tracked = self.requests.by_id.get(request.request_id)
        if tracked is None:
            self.fail_load(request.request_id, external_tokens)
        elif external_tokens:
            self.loads.on_allocated(tracked, present_tables, external_tokens, now)
        else:
            self.lookups.on_computed(tracked, now)

    def fail_load(self, request_id: str, external_tokens: int) -> None:
        """Fail the load that a request waits for, if it waits for `external_tokens` > 0 tokens."""
        if external_tokens:
            self.loads.mark_load_failed(request_id)

    def plan_step(
        self, output: Any, tables: Callable[[str], Sequence[Sequence[int]]]
    ) -> StepPlan | NodePlans:
        """Return a step's copies: loads that have blocks, and stores of what the step completes.

        `output` is vLLM's SchedulerOutput. `tables` returns a request's present block tables, one
        for each of the engine's groups.
        """
        plan = self.make_plan(output, tables)
        loads_for = plan.eras if plan.loads else ()
        self.weights.on_step_planned(plan.number, loads_for=loads_for, computes=not plan.is_idle)
        self._adapters.on_step_planned(plan.number, output.num_scheduled_tokens)
        plans = self._on_nodes(plan)
        # This comes last, because workers never see a plan that a fault ends.
        self.loads.on_handed_over()
        return plans

    def _on_nodes(self, plan: StepPlan) -> StepPlan | NodePlans:
        """Return the plan as workers take it: one for each node, where there are several."""
        nodes = self.session.nodes
        return plan if nodes is None else nodes.plan_nodes(plan)

    def make_plan(self, output: Any, tables: Callable[[str], Sequence[Sequence[int]]]) -> StepPlan:
        now = time.monotonic()
        if self._drafted is not None:
            self._drafted.on_step(output, self.requests.by_id, tables)
        session = self.session
        greetings, number = session.link.greetings, next(self.life.plan_numbers)
        plan = StepPlan(number, session.boot, greetings, session.reserved_bytes)
        plan.question = self.weights.question
        plan.is_idle = not output.total_num_scheduled_tokens
        self.loads.add_loads(plan, now)
        self._junctions.move_wishes(output.num_scheduled_tokens, self.requests.by_id)
        plan.eras = self.weights.eras
        if session.is_connected:
            # Workers that were connected before this role map the arena as the first step begins,
            # and that step may be all of a prompt.
            is_attached = session.attached_ranks is None or session.workers_attached()
            if not is_attached:
                self._counters[stores_shed(Shed.UNATTACHED)] += len(output.num_scheduled_tokens)
            elif not self.weights.is_stale and not self.audits.is_cut_off:
                plan.stores = self.stores.plan_stores(output, self.requests.by_id, tables, number)
            self.audits.add_pairs(plan, now)
            self.reserve_slots(now)
        if plan.stores:
            self._push_until = now + PUSH_SECONDS
        self._report_staleness(now)
        self.lookups.patience.prefill.on_step_planned(
            number, output.total_num_scheduled_tokens, now
        )
        self.room.on_running(output.num_scheduled_tokens)
        self._flush(now)
        return plan

    def plan_after_fault(self, scheduled: Collection[str]) -> StepPlan | NodePlans:
        """Return the plan after a fault in `plan_step`. It fails loads that no worker knows of.

        `scheduled` are the requests that run in this step.
        """
        return self._on_nodes(self._plan_failures(scheduled))

    def _plan_failures(self, scheduled: Collection[str]) -> StepPlan:
        if self._drafted is not None:
            self._drafted.on_unobserved_steps(self.requests.by_id)
        greetings, number = self.session.link.greetings, next(self.life.plan_numbers)
        plan = StepPlan(number, session=greetings, failed=self.loads.take_unsent())
        plan.question = self.weights.question
        self.weights.on_step_planned(number)
        self._adapters.on_step_planned(number, scheduled)
        return plan

    def on_report(
        self, finished: Collection[str], failed: Collection[str], report: StepReport | None
    ) -> None:
        """Take the workers' results of a step: loads end, and stored objects are committed.

        `finished` are the requests whose loads ended, and `failed` those of them that failed.
        """
        now = time.monotonic()
        if report is not None:
            self._adapters.on_report(report.number, report.adapters)
        for request_id in finished:
            tracked = self.requests.by_id.get(request_id)
            if tracked is not None:
                self.loads.on_load_end(tracked, request_id in failed, now)
        session = self.session
        session.attached_ranks = session.attached_ranks or {}
        if report is None:
            return
        if session.nodes is not None:
            session.nodes.on_report(report.number, report.answers)
        session.attached_ranks = report.boots
        self.lookups.patience.prefill.on_step_reported(report.number, now)
        if report.is_disabled or report.counters.get(metrics.ATTACH_FAILED):
            session.unmapped = session.boot
        elif session.workers_attached():
            session.unmapped = ""
        for node, slots in report.corrupt.items():
            self._counters[metrics.SLOTS_CONDEMNED] += len(slots)
            session.condemn_slots(node, slots, now)
        self._take_weights(report.weights, now)
        if self.audits.on_report(report, now):
            self.stores.withdraw_stores()
        self.changes += self.stores.on_report(report, self.weights.is_proven)
        if session.is_connected:
            self.events.update(lambda events: events.on_committed(self.stores.committed))
        self._counters.update(report.counters)

    def _take_weights(self, answers: Mapping[int, WeightsAnswer], now: float) -> None:
        """Take what ranks answer about their weights, and the identity that follows from it."""
        was_stale = self.weights.is_stale
        digests = self.weights.on_answers(answers)
        if self.weights.is_stale and not was_stale:
            self.stores.withdraw_stores()
            self._counters[metrics.WEIGHTS_STALE] += 1
            logger.warning(
                "hybridkv: the weights changed, and the engine's own prefix cache has blocks of "
                "the old ones, or may have; nothing is loaded or stored until it is reset "
                "(reset_prefix_cache) while no request runs"
            )
        self._report_staleness(now)
        if digests is not None:
            self.change_identity(EngineIdentity.of_facts(self.weights.facts_of(digests)))
            self.weights.is_identified = True

    def _report_staleness(self, now: float) -> None:
        """Report to the daemon what is not served or shared, once in each greeting, and its end."""
        greeting = self.session.link.greetings
        report = wire.ReportStale(self.weights.is_stale, self.weights.unread)
        heard = self._reported if self._reported_greeting == greeting else wire.ReportStale(False)
        if self.session.is_connected and report != heard:
            self.session.queue_message(report, now)
            self._reported, self._reported_greeting = report, greeting

    def has_pending_work(self) -> bool:
        """Return True if the engine should step although no request runs.

        It should while stores are not committed, workers were not asked for their weights, or
        could read in such steps what was unread of them, for READ_ON_SECONDS in all.
        """
        is_unsent = self.stores.has_open_stores or self.session.link.has_unsent
        is_pending = is_unsent or self.weights.has_unasked_workers
        now = time.monotonic()
        if not self.weights.has_reading_workers:
            self._read_on_until = 0.0
        elif not self._read_on_until:
            self._read_on_until = now + READ_ON_SECONDS
        return (is_pending and now < self._push_until) or now < self._read_on_until

    def on_finished(self, request_id: str) -> None:
        """Forget a request that ended or was aborted, unless its load goes on."""
        self._adapters.on_request_ended(request_id)
        now, tracked = time.monotonic(), self.requests.by_id.get(request_id)
        if tracked is not None:
            self.audits.count_prefill(tracked)
            self.requests.advance(tracked, requests.RequestEvent.FINISHED, now)
            self.audits.end_if_over(now)

    def on_reset(self, is_empty: bool) -> bool:
        """Ask the workers for their weights, because the engine reset its prefix cache.

        The weights may have changed. `is_empty` is true if the engine has no block left. The
        question leaves with a step of its own where no step is due. Until all workers answered it,
        nothing is offered and no stored object is committed. Returns True: the role goes on.
        """
        now = time.monotonic()
        # The queued commits are of earlier weights. Objects that are being written may not be.
        self._send_changes(now)
        self.stores.withdraw_stores()
        self.audits.on_reset(now)
        self.weights.on_reset(is_empty)
        if is_empty:
            self._adapters.on_cache_emptied()
        self._push_until = now + PUSH_SECONDS
        self._flush(now)
        return True

    def change_identity(self, identity: EngineIdentity) -> None:
        """Take another identity: the weights changed, and no block of the old weights is left."""
        now = time.monotonic()
        # The queued commits are of the old weights.
        self._send_changes(now)
        self.session.send_identity(identity, now)
        self.stores.withdraw_stores()
        self.audits.on_new_identity(now)
        self.events.update(KVEventPublisher.withdraw_all)
        for tracked in [*self.requests.by_id.values()]:
            tracked.forget_stored()
            if tracked.state is requests.RequestState.OUTRUN:
                self.requests.advance(tracked, requests.RequestEvent.SETTLED, now)
            if tracked.is_prefetching:
                self.requests.end_lease(tracked, now)
                self.lookups.look_up(tracked, now)
        self._flush(now)

    def load_sources(self, request_id: str, external_tokens: int) -> dict[str, int]:
        """Return the load that `on_allocated` planned in tokens by tier. Empty = it is unknown."""
        tracked = self.requests.by_id.get(request_id)
        if tracked is None or tracked.load.tokens != external_tokens:
            return {}
        return self.loads.tiers_of(tracked)

    def take_stats(self, off_since: float = 0.0, off_seconds: float = 0.0) -> HybridKVStats | None:
        """Return the counters and values since the last call. None = there are none.

        `off_since` is the time at which this role was switched off, in Unix time, for
        `off_seconds` seconds. 0 = it is on.
        """
        counters = self._counters
        gauges = {
            "quarantined": counters[QUARANTINED] - counters[RESUMED],
            "quarantined_since": off_since,
            "quarantined_until": off_since and off_since + off_seconds,
            "breaker_open": int(self.session.breaker.is_open),
            "daemon_connected": int(self.session.is_connected),
            "weights_unread": self.weights.unread,
            "loads_pending": len(self.room),
            "loads_overdue": self.loads.count_overdue(time.monotonic()),
        }
        named = {Metric(name): value for name, value in gauges.items()}
        payload = self.life.meter.take_payload(counters, named)
        return None if payload is None else HybridKVStats(payload)

    def on_step_end(self) -> list[KVCacheEvent]:
        """Send the step's messages and take slots, in its last hook. Returns the KV events."""
        now = time.monotonic()
        self._send_changes(now)
        self.exchange_messages(now)
        return self.events.take_new()

    def final_events(self) -> list[KVCacheEvent]:
        """Return the KV events that withdraw all chunks, because nothing is offered any more."""
        self.events.update(KVEventPublisher.withdraw_all)
        return self.events.take_new()

    def plan_while_off(self, scheduled: Collection[str]) -> StepPlan | NodePlans:
        """Return the plan of a role that is switched off, and end the session.

        With the session the daemon gets back its leases and slots. `scheduled` are the requests
        that run in this step.
        """
        self.close()
        self.room.on_running(scheduled)
        plan = self._plan_failures(scheduled)
        # No greeting of this number will come. With it the workers report that they copy nothing
        # that was planned under an earlier one.
        plan.session = self.session.link.greetings + 1
        return self._on_nodes(plan)

    def close(self) -> None:
        """End the session with the daemon."""
        self.session.link.close()

    def hand_over(self) -> None:
        """Leave to the next role what it needs of this one, which was closed."""
        self.life.last_greeting = self.session.link.greetings + 1
        self.life.to_fail[:] = self.loads.take_unsent()

    def exchange_messages(self, now: float) -> None:
        """Send what is queued, and take the daemon's replies."""
        # A queued lookup's deadline begins before an answer is read that sets another one.
        self._flush(now)
        self._take_replies(now)
        if not self.session.is_connected:
            self._take_replies(now)  # A connection that was lost is made anew at once.
        if self.session.follow(now):
            self.reserve_slots(now)
        self._flush(now)

    def _take_replies(self, now: float) -> None:
        for reply in self.session.link.poll(now):
            self.on_reply(reply, now)
            if not self.session.is_connected:
                break  # The replies after this one are of a session that has ended.

    def on_reply(self, reply: wire.Reply, now: float) -> None:
        """Take one reply of the daemon."""
        if isinstance(reply, wire.Found):
            self.lookups.on_found(reply, now)
        elif isinstance(reply, wire.Pending):
            self.lookups.on_pending(reply, now)
        elif isinstance(reply, wire.Reserved):
            session, shape = self.session, (reply.part_bytes, reply.parts)
            session.reserved_bytes = max(session.reserved_bytes, reply.reserved_bytes)
            self.stores.credits.on_granted(shape, reply.slots, now)
        elif isinstance(reply, wire.Removed):
            self.events.update(lambda events: events.on_removed(reply))
        elif isinstance(reply, wire.Error):
            # The refused request may have been a commit.
            self.events.update(KVEventPublisher.withdraw_all)
            self._counters[metrics.daemon_refused(reply.code)] += 1
            logger.warning("hybridkv: the daemon refused a request: %s", reply.message)

    def reserve_slots(self, now: float) -> None:
        """Ask the daemon for write slots, as many as are wanted, where there is a connection."""
        welcome = self.session.link.welcome
        if welcome is None or self._why_computed:
            return
        self.stores.credits.fit_arena(welcome.slots_bytes)
        for (part_bytes, parts), count in self.stores.credits.credit_requests(now):
            self.session.queue_message(wire.Reserve(part_bytes, part_bytes, parts, count), now)

    def _flush(self, now: float) -> None:
        self.lookups.on_flush(now)
        self.session.link.flush(now)

    def _send_changes(self, now: float) -> None:
        changes, self.changes = self.changes, []
        for message in changes:
            self.session.queue_message(message, now)

    def _on_connection_lost(self) -> None:
        self.changes.clear()
        self.lookups.queued.clear()
        self.stores.on_connection_lost()
        self.audits.on_connection_lost()
        self.events.update(KVEventPublisher.withdraw_all)
        self.requests.on_connection_lost(time.monotonic())
