"""The scheduler role: asks the daemon about each request and plans its load; stores.py plans the stores.

Nothing here waits. The daemon's answers are picked up by whichever hook comes next. What a hook has to say is queued;
it leaves with the next of those that ask for answers (`matched`), end the engine's scheduling (`planned`), which is
never far from an arrival, or end the step (`step_ended`).
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vllm.distributed.kv_events import KVCacheEvent

from hybridkv.client.link import Link
from hybridkv.client.spawn import start_detached
from hybridkv.connector.adapters import Adapters
from hybridkv.connector.events import Events
from hybridkv.connector.hashing import OwnChain
from hybridkv.connector.metadata import LoadPlan, StepPlan, StepReport
from hybridkv.connector.stats import HybridKVStats, Meter
from hybridkv.connector.stores import Stores
from hybridkv.connector.story import describe, tell
from hybridkv.connector.tracked import Tracked
from hybridkv.core.breaker import Breaker
from hybridkv.core.coverage import held_blocks
from hybridkv.core.geometry import Geometry
from hybridkv.core.keys import tenant_of
from hybridkv.core.packed import U64, batches, pack_u64
from hybridkv.core.plans import CopyRun, PlanError, plan_load
from hybridkv.core.requests import Action, Event, State, advance
from hybridkv.core.settings import Settings
from hybridkv.core.sizes import format_size
from hybridkv.core.sources import tokens_by_tier
from hybridkv.core.tiers import LoadPolicy
from hybridkv.core.worth import Speed
from hybridkv.wire.messages import (
    CHANGES_MAX,
    CHUNKS_MAX,
    PROTOCOL_VERSION,
    TEXT_MAX,
    Condemn,
    Describe,
    Error,
    Found,
    Granted,
    Hello,
    Identify,
    Lookup,
    Pending,
    Release,
    Removed,
    Reply,
    Request,
    Tell,
    Want,
    Watch,
    WireModel,
    geometry_to_wire,
)

logger = logging.getLogger("vllm.hybridkv")

ROOM_SECONDS = 2.0
"""How much longer than for its answer a request waits until other loads leave it room in the engine's block pool."""
UNKNOWN_SECONDS = 2.0
UNKNOWN_SECONDS_PER_KI_TOKEN = 0.1
"""How long a prompt waits for tiers while nobody knows how long computing it would take."""
PREFILL_TOKENS_MIN = 64
"""A step of fewer tokens says nothing of the speed of prefill."""
RESPAWN_SECONDS = 5.0
"""A daemon of our own that died is started again at most this often."""


DECLINES = {
    "lookups_unhashable": "requests with prompt embeddings are not served: the engine's hashes do not name them",
    "lookups_adapter": "the LoRA adapter's weights are not known for sure",
    "lookups_late_adapter": "the LoRA adapter's files were not read in time",
    "lookups_too_short": "the prompt has no whole chunk before its last token",
    "lookups_unwanted": "the request asked not to use cached prefixes",
    "lookups_no_daemon": "no daemon was connected",
    "lookups_breaker_open": "the daemon did not answer other requests in time and is left alone for a moment",
    "lookups_late_answer": "the daemon's answer was late (lookup_timeout_ms)",
    "lookups_late_workers": "the workers were not attached to the daemon yet",
    "lookups_late_room": "other loads left no room in the engine's block pool",
    "lookups_lost": "the connection to the daemon was lost meanwhile",
    "lookups_identity": "the engine's weights changed meanwhile",
    "loads_failed": "the load failed, and the request was computed",
}
"""Counter of a decline, and what it means."""


class SchedulerSide:
    """One engine's scheduler. Every public method is a hook's work and is called under supervision."""

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
        model: WireModel | None = None,
        events: Events | None = None,
    ) -> None:
        """`events` is told what RAM has, where routers are to hear of it."""
        self._settings = settings
        self._geometry = geometry
        self._step_tokens = tokens_per_step
        self._pool_blocks = pool_blocks
        self._held: dict[str, int] = {}
        """Blocks, at most, of the requests that have blocks for a load and did not run since."""
        self._own_hashes = own_hashes
        self._adapters = Adapters(time.time_ns())
        self._about = describe(facts or {})
        self._gids = [group.gid for group in geometry.groups]
        self._counters = counters
        self._socket_path = socket_path
        self._engine_id = engine_id
        self._model = model
        self._link = Link(socket_path, self._hello(namespace), self._lost)
        self._stores = Stores(geometry, tokens_per_step, settings.store_generated, counters)
        self._breaker = Breaker()
        self._requests: dict[str, Tracked] = {}
        self._by_lease: dict[int, Tracked] = {}
        self._leases = 0
        self._unsaid: list[Request] = []
        """What leaves with the end of the step."""
        self._to_plan: list[Tracked] = []
        self._to_fail: list[str] = []
        self._prefill = Speed()
        """Tokens per second of steps that are mostly prefill."""
        self._step = 0, 0.0
        """Tokens of a step that is being computed and says something of prefill, else 0; and when it was planned."""
        self._boot = ""
        self._reserved_bytes = 0
        self._workers_on: dict[str, int] | None = None
        """Ranks by the daemon's life that they are attached to; None before the end of the first step."""
        self._respawn_at = 0.0
        self._meter = Meter(counters)
        self._events = events
        self._watching = 0
        """The greeting after which the daemon was asked to tell what RAM has no more."""
        self._poll(time.monotonic())

    @property
    def slots_fd(self) -> int | None:
        """What to wait on, outside of hooks, while write slots that were asked for are on their way; else None."""
        return self._link.fd if self._stores.credits.awaited else None

    # Hooks

    def arrived(self, request: Any) -> None:
        """A new request: its lookup leaves with the engine's next question, or with its next plan."""
        if request.prompt_embeds is not None:
            self._decline(Tracked(request), "lookups_unhashable", tell=True)
            return
        now = time.monotonic()
        chain = OwnChain(request, self._geometry.chunk_tokens) if self._own_hashes else None
        adapter = self._adapters.of(request.lora_request, now) if request.lora_request is not None else None
        tenant = tenant_of(request.cache_salt)
        tracked = Tracked(request, chain, adapter, tenant=tenant, next_chunk=[0] * len(self._geometry.groups))
        self._requests[request.request_id] = tracked
        self._ask(tracked, now)

    def matched(self, request: Any, local_tokens: int) -> int | None:
        """Tokens beyond `local_tokens` that the cache can load; None = ask again in the next step."""
        now = time.monotonic()
        self._poll(now)
        tracked = self._requests.get(request.request_id)
        if tracked is None:
            return 0
        tracked.local_seen = local_tokens
        if tracked.state is State.READY and tracked.storable and request.num_preemptions > tracked.preemptions:
            tracked.preemptions = request.num_preemptions
            self._advance(tracked, Event.RESUMED)
            self._ask(tracked, now)
        if tracked.state is not State.PREFETCHING:
            return 0
        if tracked.found is None and tracked.pending is not None:
            pending = tracked.pending
            if pending.chunks * self._geometry.chunk_tokens <= local_tokens:
                # Nothing that comes up could add to what the engine has; what RAM has need not be stored again.
                tracked.found = Found(0, 0, 0, pending.masks, b"", b"")
                self._counters["lookups_outrun"] += 1
                self._advance(tracked, Event.SETTLED)
                return 0
        if tracked.found is None:
            if not tracked.sent and tracked.adapter is not None:
                self._look_up(tracked, now)
            if tracked.state is not State.PREFETCHING:
                return 0
            return self._unanswered(tracked, now, waiting_for="answer" if tracked.is_named() else "adapter")
        tokens = tracked.found.chunks * self._geometry.chunk_tokens
        if tokens >= request.num_tokens or tokens <= local_tokens:
            return 0
        if not self._workers_attached():
            return self._unanswered(tracked, now, waiting_for="workers")
        if not self._has_room(request):
            return self._unanswered(tracked, now, waiting_for="room")
        tracked.local_tokens = local_tokens
        return tokens - local_tokens

    def allocated(self, request: Any, tables: Sequence[Sequence[int]], external_tokens: int) -> None:
        """The engine took `external_tokens` of the offer and has blocks for them; 0 = it took nothing."""
        tracked = self._requests.get(request.request_id)
        if tracked is None:
            if external_tokens:
                self._to_fail.append(request.request_id)
            return
        if not external_tokens:
            self._advance(tracked, Event.SETTLED)
            return
        self._advance(tracked, Event.ALLOCATED)
        if tracked.state is not State.WAITING_FOR_LOAD:
            self._to_fail.append(request.request_id)
            return
        try:
            tracked.load = LoadPlan(self._boot, self._plan_load(tracked, tables, external_tokens))
        except PlanError as error:
            self._counters["plan_failed"] += 1
            tracked.why = str(error)
            logger.warning("hybridkv: %s is computed: %s", request.request_id, error)
            tracked.load = LoadPlan("", ())
        tracked.load_tokens, tracked.allocated_at = external_tokens, time.monotonic()
        self._held[request.request_id] = self._most_blocks(request)
        tracked.handed_over = False
        self._to_plan.append(tracked)

    def must_fail(self, request_id: str, external_tokens: int) -> None:
        """After a fault in `allocated`: the engine waits for a load that nobody planned."""
        tracked = self._requests.get(request_id)
        if external_tokens and (tracked is None or tracked not in self._to_plan):
            self._to_fail.append(request_id)
            if tracked is not None:
                tracked.handed_over = True

    def planned(self, output: Any, tables: Callable[[str], Sequence[Sequence[int]]]) -> StepPlan:
        """This step's copies: loads that have blocks now, stores of what the step completes.

        `tables` gives a request's block tables as they are now, one for each of the engine's groups.
        """
        now = time.monotonic()
        plan = StepPlan(failed=list(self._to_fail))
        for tracked in self._to_plan:
            if tracked.load.runs and tracked.state is not State.DRAINING:
                plan.loads[tracked.request.request_id] = tracked.load
            else:
                plan.failed.append(tracked.request.request_id)
            self._advance(tracked, Event.PLANNED)
        plan.boot, plan.session, plan.reserved_bytes = self._boot, self._link.greetings, self._reserved_bytes
        if self._link.welcome is not None:
            if self._workers_on is None or self._workers_attached():
                # They said hello before us and attach as the first step begins, which may be all of a prompt.
                plan.stores = self._stores.planned(output, self._requests, tables)
            self._refill(now)
        if not self._step[0] and output.total_num_scheduled_tokens >= PREFILL_TOKENS_MIN:
            self._step = output.total_num_scheduled_tokens, now
        for tracked in self._to_plan:
            tracked.handed_over = True
        self._to_plan, self._to_fail = [], []
        for request_id in [name for name in self._held if name in output.num_scheduled_tokens]:
            del self._held[request_id]
        self._link.flush(now)
        return plan

    def emergency(self) -> StepPlan:
        """The plan after a fault in `planned`: every request that waits for a load nobody was told of is failed."""
        waiting = (State.WAITING_FOR_LOAD, State.LOADING, State.DRAINING)
        lost = [t for t in self._requests.values() if t.state in waiting and not t.handed_over]
        failed, self._to_fail, self._to_plan = self._to_fail, [], []
        for tracked in lost:
            tracked.handed_over = True
        return StepPlan(failed=[*failed, *(t.request.request_id for t in lost)], session=self._link.greetings)

    def reported(self, finished: set[str], failed: set[str], report: StepReport | None) -> None:
        """What the workers did: loads end, stored objects are committed."""
        now = time.monotonic()
        tokens, since = self._step
        if tokens:
            self._prefill = self._prefill.measured(tokens, now - since, now)
            self._step = 0, now
        for request_id in finished:
            tracked = self._requests.get(request_id)
            if tracked is not None:
                self._loaded(tracked, request_id in failed)
        self._workers_on = self._workers_on or {}
        if report is not None:
            self._workers_on = report.boots
            self._counters.update(report.counters)
            if report.condemned:
                names = sorted(report.condemned)
                self._counters["slots_condemned"] += len(names)
                offsets, generations = (pack_u64([name[at] for name in names]) for at in (0, 1))
                for some in batches(CHANGES_MAX, (offsets, U64), (generations, U64)):
                    self._send(Condemn(*some), now)
            self._unsaid += self._stores.reported(report)
            if self._link.welcome is not None:
                self._announce(lambda events: events.stored(self._stores.committed))

    def finished(self, request_id: str) -> None:
        """The request ended or was aborted."""
        tracked = self._requests.get(request_id)
        if tracked is not None:
            self._advance(tracked, Event.FINISHED)

    def identify(self, namespace: bytes, facts: Mapping[str, object]) -> None:
        """From here on bytes belong to another identity; what is being computed now belongs to neither."""
        now = time.monotonic()
        # What is committed now was computed before.
        self._say(now)
        self._link.greet_with(self._hello(namespace))
        self._about = describe(facts)
        self._send(Identify(1, namespace), now)
        self._send(Describe(self._about), now)
        self._stores.spoil()
        self._announce(Events.lost)
        for tracked in list(self._requests.values()):
            tracked.storable = False
            if tracked.state is State.PREFETCHING:
                self._decline(tracked, "lookups_identity")
                self._advance(tracked, Event.SETTLED)
        self._link.flush(now)

    def sources(self, request_id: str, external_tokens: int) -> dict[str, int]:
        """`external_tokens` of the load that `allocated` planned, by tier; nothing where no such load is known."""
        tracked = self._requests.get(request_id)
        if tracked is None or tracked.load_tokens != external_tokens:
            return {}
        return self._by_tier(tracked, external_tokens)

    def take_stats(self) -> HybridKVStats | None:
        """What was counted and measured since the last time; None = nothing."""
        gauges = {
            "breaker_open": int(self._breaker.is_open),
            "daemon_connected": int(self._link.welcome is not None),
            "loads_pending": len(self._held),
        }
        return self._meter.take(gauges)

    def step_ended(self) -> list[KVCacheEvent]:
        """After everything else of a step: what it has to say leaves, write slots come in; what routers are to hear."""
        now = time.monotonic()
        self._say(now)
        self._poll(now)
        return self.take_events()

    def take_events(self) -> list[KVCacheEvent]:
        """What routers are to hear since the last time."""
        return self._events.take() if self._events is not None else []

    def withdraw(self) -> list[KVCacheEvent]:
        """The last events of a connector that is switched off: nothing of what was announced will be loaded."""
        self._announce(Events.lost)
        return self.take_events()

    def quit(self) -> StepPlan:
        """The plan of a side that is switched off: the daemon gets back all that it held, once no worker uses it."""
        self._link.close()
        plan = self.emergency()
        # Of the greeting that will never come: with it the workers say that they are done with all others.
        plan.session = self._link.greetings + 1
        return plan

    def close(self) -> None:
        """End the session."""
        self._link.close()

    # Lookups

    def _ask(self, tracked: Tracked, now: float) -> None:
        tracked.found = tracked.pending = None
        tracked.sent = False
        tracked.deadline = now + min(self._settings.lookup_timeout_ms / 1e3, self._settings.load_timeout_seconds)
        self._look_up(tracked, now)

    def _look_up(self, tracked: Tracked, now: float) -> None:
        request, adapter = tracked.request, tracked.adapter
        chunks = min(self._geometry.whole_chunks(request.num_tokens - 1), CHUNKS_MAX)
        if not chunks or getattr(request, "skip_reading_prefix_cache", False):
            self._decline(tracked, "lookups_too_short" if not chunks else "lookups_unwanted")
            self._advance(tracked, Event.SETTLED)
            return
        if not tracked.is_named():
            if adapter is not None and adapter.refused:
                self._decline(tracked, "lookups_adapter", why=adapter.refused)
                self._advance(tracked, Event.SETTLED)
            return
        if self._link.welcome is None:
            self._poll(now)
        if self._link.welcome is None or not self._breaker.allows(now):
            self._decline(tracked, "lookups_no_daemon" if self._link.welcome is None else "lookups_breaker_open")
            self._advance(tracked, Event.SETTLED)
            return
        self._leases += 1
        tracked.lease = self._leases
        self._by_lease[tracked.lease] = tracked
        self._breaker = self._breaker.asked(now)
        hashes = tracked.chunk_hashes(self._geometry, 0, chunks)
        tracked.asked, tracked.asked_at = hashes, now
        wait, rate = self._patience(chunks * self._geometry.chunk_tokens)
        tracked.sent = self._send(Lookup(tracked.lease, tracked.lease, hashes, round(wait * 1e3), rate), now)
        self._counters["lookups"] += 1

    def _patience(self, tokens: int) -> tuple[float, int]:
        """How long a prompt may wait for tiers below RAM, and the prefill speed by which they are to be judged.

        No longer than computing it takes, where that is known (requirements D18).
        """
        cap, policy = self._settings.load_timeout_seconds, self._settings.load_policy
        if policy is LoadPolicy.NEVER:
            return 0.0, 0
        if policy is LoadPolicy.ALWAYS:
            return cap, 0
        rate = self._prefill.per_second
        wait = tokens / rate if rate else UNKNOWN_SECONDS + UNKNOWN_SECONDS_PER_KI_TOKEN * tokens / 1024
        return min(cap, wait), int(rate)

    def _take_pending(self, pending: Pending, now: float) -> None:
        """The daemon lives, and reads tiers for a request."""
        self._breaker = self._breaker.succeeded()
        tracked = self._by_lease.get(pending.lease)
        if tracked is not None and tracked.state is State.PREFETCHING:
            tracked.deadline = now + pending.wait_ms / 1e3 + self._settings.lookup_timeout_ms / 1e3
            if len(pending.masks) == len(self._gids):
                tracked.pending = pending
            self._counters["lookups_promoted"] += 1

    def _unanswered(self, tracked: Tracked, now: float, waiting_for: str = "answer") -> int | None:
        waits = tracked.sent or waiting_for == "adapter"
        if waits and now < tracked.deadline + (ROOM_SECONDS if waiting_for == "room" else 0.0):
            return None
        self._decline(tracked, f"lookups_late_{waiting_for}")
        if waiting_for == "answer":
            self._breaker = self._breaker.failed(now)
            self._meter.observe("lookup_wait_seconds", now - tracked.asked_at)
        self._advance(tracked, Event.SETTLED)
        return 0

    def _has_room(self, request: Any) -> bool:
        """Whether every request that loads, this one included, can run as soon as its load ends.

        The engine takes blocks back from running requests only: loads that fill its pool and leave none to run with
        would wait for each other for ever.
        """
        return not self._held or sum(self._held.values()) + self._most_blocks(request) <= self._pool_blocks

    def _most_blocks(self, request: Any) -> int:
        return held_blocks(self._geometry, request.num_tokens + 1, self._step_tokens)

    def _take_found(self, found: Found, now: float) -> None:
        self._breaker = self._breaker.succeeded()
        tracked = self._by_lease.get(found.lease)
        if tracked is None or tracked.state is not State.PREFETCHING or len(found.masks) != len(self._gids):
            self._by_lease.pop(found.lease, None)
            self._send(Release(found.lease), now)
            return
        tracked.found = tracked.answer = found
        self._meter.observe("lookup_wait_seconds", now - tracked.asked_at)
        self._announce(lambda events: events.found(tracked, found))
        if not found.chunks:
            # A miss opened no lease.
            tracked.lease = 0
            del self._by_lease[found.lease]
        self._counters["lookups_hit" if found.chunks else "lookups_miss"] += 1

    def _release(self, tracked: Tracked, tokens: int = 0, loaded_bytes: int = 0, failed: bool = False) -> None:
        if not tracked.lease:
            return
        self._by_lease.pop(tracked.lease, None)
        self._send(Release(tracked.lease, tokens, loaded_bytes, failed), time.monotonic())
        tracked.lease = 0

    # Loads

    def _plan_load(
        self, tracked: Tracked, tables: Sequence[Sequence[int]], external_tokens: int
    ) -> tuple[CopyRun, ...]:
        found = tracked.found
        total = tracked.local_tokens + external_tokens
        if found is None or total != found.chunks * self._geometry.chunk_tokens:
            raise PlanError(f"the engine took {total} tokens of another offer")
        mine = [tables[gid] for gid in self._gids]
        return plan_load(self._geometry, found.chunks, tracked.local_tokens, mine, found.offsets, found.generations)

    def _loaded(self, tracked: Tracked, failed: bool) -> None:
        if failed:
            self._decline(tracked, "loads_failed")
            self._release(tracked, failed=True)
            # Whatever was wrong there is computed now, and must be stored again although the lookup found it.
            tracked.found = None
            tracked.next_chunk = [0] * len(self._gids)
            tracked.offered.clear()
        else:
            self._counters["loads"] += 1
            loaded_bytes = self._load_bytes(tracked.load.runs)
            self._counters["tokens_loaded"] += tracked.load_tokens
            self._counters["bytes_loaded"] += loaded_bytes
            for tier, tokens in self._by_tier(tracked, tracked.load_tokens).items():
                self._counters[f"tokens_loaded_from_{tier}"] += tokens
            seconds = time.monotonic() - tracked.allocated_at
            self._meter.observe("load_seconds", seconds)
            logger.debug(
                "hybridkv: loaded %d tokens, %s, for %s in %.1f ms",
                tracked.load_tokens,
                format_size(loaded_bytes),
                tracked.request.request_id,
                1e3 * seconds,
            )
            tracked.loaded = tracked.loaded[0] + tracked.load_tokens, tracked.loaded[1] + loaded_bytes
            self._release(tracked, tracked.load_tokens, loaded_bytes)
        self._advance(tracked, Event.FAILED if failed else Event.LOADED)

    def _by_tier(self, tracked: Tracked, external_tokens: int) -> dict[str, int]:
        came_up = tracked.found.tiers if tracked.found is not None else {}
        return tokens_by_tier(external_tokens, self._geometry.chunk_tokens, came_up)

    def _load_bytes(self, runs: Sequence[CopyRun]) -> int:
        geometry = self._geometry
        groups = [geometry.groups[run.span.group_index] for run in runs]
        return sum(
            len(run.span.blocks) * group.block_bytes * geometry.parts(group)
            for run, group in zip(runs, groups, strict=True)
        )

    # The daemon

    def _hello(self, namespace: bytes) -> Hello:
        geometry = geometry_to_wire(self._geometry)
        return Hello(1, PROTOCOL_VERSION, "engine", self._engine_id, namespace, geometry, self._model)

    def _poll(self, now: float) -> None:
        for reply in self._link.poll(now):
            self._take(reply, now)
            if self._link.welcome is None:
                # It was lost over what was answered: the rest is of a session that has ended.
                break
        welcome = self._link.welcome
        if self._events is not None and welcome is not None and self._watching != self._link.greetings:
            # Before anything else is said, so that nothing which is known goes untold.
            self._watching = self._link.greetings
            self._send(Watch(), now)
        if welcome is None and self._boot and self._settings.server == "auto" and now >= self._respawn_at:
            self._respawn_at = now + RESPAWN_SECONDS
            threading.Thread(target=self._respawn, name="hybridkv-respawn", daemon=True).start()
        if welcome is not None and welcome.boot != self._boot:
            self._boot = welcome.boot
            self._reserved_bytes = 0
            self._breaker = Breaker()
            self._counters["connects"] += 1
            logger.info("hybridkv: connected to the daemon at %s", self._socket_path)
            if self._send(Describe(self._about), now):
                self._refill(now)
        self._link.flush(now)

    def _take(self, reply: Reply, now: float) -> None:
        if isinstance(reply, Found):
            self._take_found(reply, now)
        elif isinstance(reply, Pending):
            self._take_pending(reply, now)
        elif isinstance(reply, Granted):
            self._reserved_bytes = max(self._reserved_bytes, reply.reserved_bytes)
            self._stores.credits.granted((reply.part_bytes, reply.parts), reply.offsets, reply.generations, now)
        elif isinstance(reply, Removed):
            self._announce(lambda events: events.removed(reply))
        elif isinstance(reply, Error):
            # It may have been a commit.
            self._announce(Events.lost)
            self._counters[f"refused_{reply.code}"] += 1
            logger.warning("hybridkv: the daemon refused a request: %s", reply.message)

    def _refill(self, now: float) -> None:
        for (part_bytes, parts), count in self._stores.credits.wanted(now):
            self._send(Want(part_bytes, part_bytes, parts, count), now)

    def _say(self, now: float) -> None:
        messages, self._unsaid = self._unsaid, []
        for message in messages:
            self._send(message, now)

    def _send(self, message: Request, now: float) -> bool:
        sent = self._link.queue(message, now)
        if not sent:
            self._counters[f"unsent_{type(message).__name__.lower()}"] += 1
        return sent

    def _lost(self, why: str) -> None:
        self._counters["losses"] += 1
        if self._boot:
            logger.warning("hybridkv: lost the daemon (%s); requests are computed until it is back", why)
        self._unsaid.clear()
        self._stores.lost()
        self._announce(Events.lost)
        self._by_lease.clear()
        for tracked in self._requests.values():
            tracked.lease = 0
            if tracked.state is State.PREFETCHING:
                self._decline(tracked, "lookups_lost")
                self._advance(tracked, Event.SETTLED)

    def _respawn(self) -> None:
        try:
            start_detached(self._socket_path, self._settings.daemon_options())
        except OSError:
            logger.exception("hybridkv: the daemon could not be started again")

    def _workers_attached(self) -> bool:
        return self._workers_on is not None and self._workers_on.get(self._boot, 0) == self._geometry.ranks

    # Small things

    def _announce(self, work: Callable[[Events], None]) -> None:
        """Keep the events true; a fault there costs what was announced, and nothing that the daemon says."""
        if self._events is None:
            return
        try:
            work(self._events)
        except Exception:
            self._counters["fault_kv_events"] += 1
            logger.exception("hybridkv: KV events failed; what was announced is withdrawn")
            self._events.lost()

    def _decline(self, tracked: Tracked, reason: str, tell: bool = False, why: str = "") -> None:
        """Count why a request is not served, and remember it, or more exactly `why`, for whoever asks."""
        self._counters[reason] += 1
        tracked.why = why or DECLINES[reason]
        if tell:
            self._tell(tracked)

    def _tell(self, tracked: Tracked) -> None:
        """The request ended: what became of it goes to the daemon, for `hybridkv explain`."""
        if self._link.welcome is not None:
            story = tell(
                self._geometry,
                tracked.request.num_prompt_tokens,
                tracked.asked,
                tracked.answer,
                tracked.local_seen,
                tracked.loaded,
                tracked.stored,
                tracked.why,
            )
            self._send(Tell(str(tracked.request.request_id)[:TEXT_MAX], story), time.monotonic())

    def _advance(self, tracked: Tracked, event: Event) -> None:
        tracked.state, actions = advance(tracked.state, event)
        for action in actions:
            if action is Action.RELEASE_LEASE:
                self._release(tracked)
            else:
                self._tell(tracked)
                self._requests.pop(tracked.request.request_id, None)
                self._held.pop(tracked.request.request_id, None)
