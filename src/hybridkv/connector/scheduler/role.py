"""The scheduler role: the work of all hooks that vLLM calls in the scheduler's process.

No hook waits. A message to the daemon is queued, and leaves with the next hook that asks for
answers (`offer_hit`), ends the engine's scheduling (`plan_step`) or ends the step (`on_step_end`).
Every hook takes the daemon's replies that have come by then. `fallbacks` has what the hooks answer
where the role does not serve them.
"""

import logging
import sys
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

from vllm.distributed.kv_events import KVCacheEvent

from hybridkv.connector import metrics
from hybridkv.connector.messages import NodePlans, StepPlan, StepReport
from hybridkv.connector.metrics import Shed, hinted, stores_shed
from hybridkv.connector.scheduler.advice import RequestAdvice
from hybridkv.connector.scheduler.audits import Audits
from hybridkv.connector.scheduler.context import EngineLife, SchedulerContext
from hybridkv.connector.scheduler.drafted import DraftedBlocks
from hybridkv.connector.scheduler.identity import IdentityWatch
from hybridkv.connector.scheduler.junctions import Junctions
from hybridkv.connector.scheduler.kv_events import (
    IDLE_WITHDRAWN_MAX,
    WITHDRAWN_MAX,
    KVEventPublisher,
)
from hybridkv.connector.scheduler.listeners import EngineIdentity, Listener, Step, Tables
from hybridkv.connector.scheduler.loads import LoadPlanner
from hybridkv.connector.scheduler.lookups import Lookups
from hybridkv.connector.scheduler.promises import OwnPromises
from hybridkv.connector.scheduler.requests import (
    Change,
    RequestEvent,
    RequestRegistry,
    StoreProgress,
    TrackedRequest,
)
from hybridkv.connector.scheduler.session import DaemonSession
from hybridkv.connector.scheduler.stores import StorePlanner
from hybridkv.connector.stats import HybridKVStats
from hybridkv.core.hints import NO_HINTS, Hints
from hybridkv.core.keys import tenant_of
from hybridkv.core.metrics import Metric
from hybridkv.shm.access import group_id
from hybridkv.vllm.hashing import ChunkHashChain, is_hashable
from hybridkv.vllm.hints import NO_FORM, read_hints
from hybridkv.vllm.hook_guard import QUARANTINED, RESUMED
from hybridkv.vllm.media import RequestMedia
from hybridkv.wire import messages as wire

logger = logging.getLogger("vllm.hybridkv")
Result = TypeVar("Result")

PUSH_SECONDS = 5.0
"""An engine without requests steps on for at most so long after its last store."""
NAMED_MAX = 32
"""The log names so many mistaken hints, each once."""
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
        self.events = KVEventPublisher(geometry, life.counters, context.publishes_events)
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
            is_producer=context.is_producer,
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
        self.requests = RequestRegistry(
            geometry, self.session, life.room, life.meter, life.counters
        )
        self.audits = Audits(self.requests, life.audit_budget, identity.namespace)
        self.lookups = Lookups(context, life, self.requests, self.session, self.audits)
        self.loads = LoadPlanner(self.requests, life.to_fail)
        self.stores = StorePlanner(context, life, self.requests, self.audits, self.events)
        self.promises = OwnPromises(self.requests, self.stores)
        self.advice = RequestAdvice(self.requests, self.lookups, self.stores)
        self._junctions = Junctions(self.requests)
        self.listeners: tuple[Listener, ...] = (
            self.loads,
            self._junctions,
            IdentityWatch(self.requests, life.weights, self.change_identity),
            self.audits,  # An object is compared before it is committed.
            self.stores,  # What is of the old weights is committed before these have a new name.
            self.session,
            self.requests,
            self.promises,
            self.advice,
            self.lookups,  # They ask by the new name.
            self.events,
        )
        """All that listen, in the order in which they hear of each moment."""
        self._context = context
        self._drafted: DraftedBlocks | None = None
        faults = context.faults
        is_unproven = faults.in_all_steps or faults.beside_adapters or life.had_unproven_session
        if context.drafter or is_unproven:
            self._follow_blocks()
        self._named: set[str] = set()  # The mistaken hints that the log has.
        self._push_until = 0.0  # When the engine stops waiting for the reports of stores.
        self._announce_until = 0.0  # The same for what the daemon announces.
        self._read_on_until = 0.0  # The same for workers that read late. 0.0 = none does.
        self.exchange_messages(time.monotonic())

    def _follow_blocks(self) -> None:
        """Follow from now on which blocks of the engine are proven. Those that it has are not."""
        self._drafted = DraftedBlocks(self._context, self.requests)
        self.listeners = (self._drafted, *self.listeners)

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
            tracked = TrackedRequest(request)
            reason = wire.Decline.UNHASHABLE if is_nameless else wire.Decline.UNWANTED
            detail = media.why_unknown() if media is not None and not is_named else ""
            change = Change(declined=reason, detail=detail or self._why_computed)
            self.requests.advance(tracked, change, now)
            self.requests.send_explanation(tracked, now)
            contents.on_untracked_request(request)
            return
        tracked = TrackedRequest(
            request,
            ChunkHashChain(request, self.geometry.chunk_tokens) if self._own_hashes else None,
            adapter,
            media=media,
            tenant=tenant_of(request.cache_salt),
            hints=self._read_hints(request),
            progress=StoreProgress([0] * len(self.geometry.groups)),
        )
        if not self.session.is_connected:
            self.exchange_messages(now)
        self.requests.by_id[request.request_id] = tracked
        self.requests.advance(tracked, self.lookups.look_up(tracked, now), now)

    def _read_hints(self, request: Any) -> Hints:
        """Return what a request asks of the cache. Count it, and name each mistake once."""
        read = read_hints(request)
        if read is NO_FORM:
            return NO_HINTS
        for mistake in read.mistakes:
            self._counters[metrics.HINTS_MISTAKEN] += 1
            if mistake.name not in self._named and len(self._named) < NAMED_MAX:
                self._named.add(mistake.name)
                logger.warning("hint of a request: %s", mistake.sentence)
        if read.shortened:
            self._counters[metrics.HINTS_SHORTENED] += read.shortened
        for hint in read.hints.asked_names():
            self._counters[hinted(hint)] += 1
        return read.hints

    def offer_hit(self, request: Any, local_tokens: int) -> int | None:
        """Return the tokens beyond `local_tokens` that can be loaded. None = ask in the next step.

        `local_tokens` are the tokens of the engine's own hit.
        """
        now = time.monotonic()
        self.exchange_messages(now)
        tracked = self.requests.by_id.get(request.request_id)
        if tracked is None:
            return 0
        if self.requests.on_asked(tracked, local_tokens, now):
            self.requests.advance(tracked, self.lookups.look_up(tracked, now), now)
        tokens = self._tokens_to_load(tracked, local_tokens, now)
        if tokens is not None:
            prefill, start = self.lookups.patience.prefill.speed, local_tokens + tokens
            self._junctions.on_offer(tracked, start, prefill, self.loads.speed)
        return tokens

    def _tokens_to_load(self, tracked: TrackedRequest, local_tokens: int, now: float) -> int | None:
        if tracked.is_prefetching and not tracked.lookup.sent:
            change = self.lookups.send_lookup(tracked, tracked.lookup, now, is_asked=True)
            self.requests.advance(tracked, change, now)
        if not tracked.is_prefetching:
            return 0
        if self.audits.current is not None:
            change = self.audits.offer_chunk(tracked, local_tokens, now)
            self.requests.advance(tracked, change, now)
        offer = self.lookups.tokens_to_load(tracked, local_tokens, now)
        deadline = tracked.lookup.deadline
        self.requests.advance(tracked, offer.change, now)
        if offer.change.event is RequestEvent.RENEWED:
            self.requests.advance(tracked, self.lookups.look_up(tracked, now, deadline), now)
        return offer.tokens if tracked.is_prefetching else 0

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
            self.loads.fail_load(request.request_id, external_tokens)
        elif external_tokens:
            self.loads.on_allocated(tracked, present_tables, external_tokens, now)
        else:
            self.requests.advance(tracked, self.lookups.on_computed(tracked), now)

    def plan_step(self, output: Any, tables: Tables) -> StepPlan | NodePlans:
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

    def make_plan(self, output: Any, tables: Tables) -> StepPlan:
        now, session, number = time.monotonic(), self.session, next(self.life.plan_numbers)
        plan = StepPlan(number, session.boot, session.link.greetings, session.reserved_bytes)
        plan.is_idle = not output.total_num_scheduled_tokens
        # Workers that were connected before this role map the arena as the first step begins, and
        # that step may be all of a prompt.
        can_store = session.attached_ranks is None or session.workers_attached()
        if session.is_connected and not can_store:
            self._counters[stores_shed(Shed.UNATTACHED)] += len(output.num_scheduled_tokens)
        step = Step(plan, output, tables, can_store and session.is_connected)
        for listener in self.listeners:
            listener.on_step_planned(step, now)
        if plan.stores:
            self._push_until = now + PUSH_SECONDS
        self.reserve_slots(now)
        self._flush(now)
        return plan

    def _on_nodes(self, plan: StepPlan) -> StepPlan | NodePlans:
        """Return the plan as workers take it: one for each node, where there are several."""
        nodes = self.session.nodes
        return plan if nodes is None else nodes.plan_nodes(plan)

    def plan_failures(self, scheduled: Collection[str], is_off: bool) -> StepPlan | NodePlans:
        """Return the plan after a fault in `plan_step`, or while the role is switched off.

        It fails loads that no worker knows of. A role that is off ends its session too, and with it
        the daemon gets back its leases and slots. `scheduled` are the requests of this step.
        """
        if is_off:
            self.close()
            self.room.on_running(scheduled)
        if self._drafted is not None:
            self._drafted.on_unobserved_steps(time.monotonic())
        # While it is off no greeting of the next number will come. With it the workers report that
        # they copy nothing that was planned under an earlier one.
        session, number = self.session.link.greetings + is_off, next(self.life.plan_numbers)
        plan = StepPlan(number, session=session, failed=self.loads.take_unsent())
        plan.question = self.weights.question
        self.weights.on_step_planned(number)
        self._adapters.on_step_planned(number, scheduled)
        return self._on_nodes(plan)

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
        self.session.attached_ranks = self.session.attached_ranks or {}
        if report is not None:
            for listener in self.listeners:
                listener.on_report(report, now)
            self._counters.update(report.counters)

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
        is_pushing = is_pending and now < self._push_until
        return (
            is_pushing
            or now < self._read_on_until
            or (self.events.has_more and now < self._announce_until)
        )

    def on_finished(self, request_id: str) -> None:
        """Forget a request that ended or was aborted, unless its load goes on."""
        self._adapters.on_request_ended(request_id)
        now, tracked = time.monotonic(), self.requests.by_id.get(request_id)
        if tracked is not None:
            self.audits.count_prefill(tracked)
            self.requests.advance(tracked, Change(RequestEvent.FINISHED), now)
            self.audits.end_if_over(now)
            self.advice.on_ended(tracked)
            self.stores.send_changes(now)
            is_over = self.advice.send_ended(now)
            if self.promises.end_kept_promises(now) or is_over:
                self._flush(now)  # Perhaps no step follows.

    def on_reset(self, is_empty: bool) -> bool:
        """Ask the workers for their weights, because the engine reset its prefix cache.

        The weights may have changed. `is_empty` is true if the engine has no block left. The
        question leaves with a step of its own where no step is due. Returns True: the role goes on.
        """
        now = time.monotonic()
        for listener in self.listeners:
            listener.on_reset(is_empty, now)
        if is_empty:
            self._adapters.on_cache_emptied()
        self._push_until = now + PUSH_SECONDS
        self._flush(now)
        return True

    def change_identity(self, identity: EngineIdentity) -> None:
        """Take another identity: the weights changed, and no block of the old weights is left."""
        now = time.monotonic()
        for listener in self.listeners:
            listener.on_new_identity(identity, now)
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
        now, is_idle = time.monotonic(), not self.requests.by_id
        self.stores.send_changes(now)
        self.promises.end_kept_promises(now)
        self.advice.send_ended(now)
        self.exchange_messages(now)
        if self.session.is_connected:
            for message in self.events.take_requests(is_idle):
                self.session.queue_message(message, now)
            self.session.link.flush(now)
        return self.events.take_new(now, IDLE_WITHDRAWN_MAX if is_idle else WITHDRAWN_MAX)

    def final_events(self) -> list[KVCacheEvent]:
        """Return the KV events that withdraw all chunks, because nothing is offered any more."""
        self.events.update(KVEventPublisher.withdraw_all)
        return self.events.take_new(time.monotonic(), sys.maxsize)

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
            self._on_found(reply, now)
        elif isinstance(reply, wire.Pending):
            self.session.breaker = self.session.breaker.on_success()
            tracked = self.requests.by_lease.get(reply.lease)
            if tracked is not None:
                self.requests.advance(tracked, self.lookups.on_pending(tracked, reply, now), now)
        elif isinstance(reply, wire.Reserved):
            session, shape = self.session, (reply.part_bytes, reply.parts)
            session.reserved_bytes = max(session.reserved_bytes, reply.reserved_bytes)
            self.stores.credits.on_granted(shape, reply.slots, now)
        elif isinstance(reply, wire.Removed):
            self.events.update(lambda events: events.on_removed(reply))
        elif isinstance(reply, wire.Announced):
            self._announce_until = now + PUSH_SECONDS
            self.events.update(lambda events: events.on_announced(reply))
        elif isinstance(reply, wire.Error):
            # The refused request may have been a commit.
            self.events.update(KVEventPublisher.withdraw_all)
            self._counters[metrics.daemon_refused(reply.code)] += 1
            logger.warning("hybridkv: the daemon refused a request: %s", reply.message)

    def _on_found(self, found: wire.Found, now: float) -> None:
        """Take the answer to a lookup. If its request does not wait any more, end its lease."""
        self.session.breaker = self.session.breaker.on_success()
        tracked = self.requests.by_lease.get(found.lease)
        change = self.lookups.on_found(tracked, found, now)
        if found.promised:
            self.promises.on_promised(tracked if change else None, found.lease, now)
        if tracked is not None and change is not None:
            self.requests.advance(tracked, change, now)
            self.events.update(lambda events: events.on_found(tracked, found))
        else:
            self.session.queue_message(wire.Release(found.lease), now)
        self.audits.on_answer(tracked if change is not None else None, found, now)

    def reserve_slots(self, now: float) -> None:
        """Ask the daemon for write slots, as many as are wanted, where there is a connection."""
        welcome = self.session.link.welcome
        if welcome is None or self._why_computed:
            return
        self.stores.credits.fit_arena(welcome.slots_bytes)
        for (part_bytes, parts), count in self.stores.credits.credit_requests(now):
            self.session.queue_message(wire.Reserve(part_bytes, part_bytes, parts, count), now)

    def _flush(self, now: float) -> None:
        self.advice.on_looked_up(self.lookups.queued, now)
        self.lookups.on_flush(now)
        self.session.link.flush(now)

    def _on_connection_lost(self) -> None:
        now = time.monotonic()
        for listener in self.listeners:
            listener.on_connection_lost(now)
