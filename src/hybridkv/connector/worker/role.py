"""The worker role: maps the arena, copies what the plan says, and reports. It decides nothing."""

import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

from hybridkv.client.link import Link
from hybridkv.connector.copy.device import Device, DeviceError
from hybridkv.connector.copy.part import BadSlotError, Copier, PartLayout
from hybridkv.connector.messages import LoadPlan, StepPlan, StepReport
from hybridkv.connector.worker.audit import Auditor, layer_numbers
from hybridkv.connector.worker.copiers import Copiers, open_pipeline
from hybridkv.core.copies import NULL_BLOCK, CopyOp, SlotRef
from hybridkv.core.errors import HybridKVError
from hybridkv.shm.arena import Arena, arena_seen, attach_arena, new_lock
from hybridkv.vllm.blocks import physical
from hybridkv.vllm.layout import WorkerLayout, block_views, is_replicated, worker_layout
from hybridkv.vllm.loaded_adapters import LoadedAdapters
from hybridkv.vllm.weights import EngineWeights
from hybridkv.wire.messages import NEVER, PROTOCOL_VERSION, Drained, Hello, ReportMapping, Welcome

logger = logging.getLogger("vllm.hybridkv")

ATTACH_SECONDS = 1.0  # How often an arena is tried that cannot be mapped.


@dataclass(frozen=True, slots=True)
class LoadBegin:
    """When a load began."""

    step: int  # The number of its plan.
    era: int  # That of the worker's weights, as far as it was known.


class WorkerRole:
    """One rank. Each step calls `start_loads`, `start_stores` and `collect` once, in this order."""

    device: Device | None = None  # Set before `register` to copy on another device than CUDA.

    def __init__(
        self,
        config: KVCacheConfig,
        socket_path: str,
        engine_id: str,
        rank: int,
        ranks: int,
        checksum: str,
        chunk_tokens: int | None = None,
        step_tokens: int = 0,
        shm_dir: str | None = None,
        group: int | None = None,
    ) -> None:
        """`chunk_tokens` and `shm_dir` are as configured.

        `step_tokens`: the most that one step computes. `group`: the daemon may be another user's.
        """
        self._configured = config, (chunk_tokens, step_tokens), shm_dir
        specs = enumerate(group.kv_cache_spec for group in _served(config))
        shared = frozenset(index for index, spec in specs if is_replicated(spec))
        self._part = PartLayout(rank, ranks, checksum, shared)
        hello = Hello(1, PROTOCOL_VERSION, "worker", engine_id, lock=new_lock())
        self._link = Link(socket_path, hello, lambda why: None, group)
        self._making: Copiers | None = None  # Once the engine's tensors are registered.
        self._lacks_room = False  # Whether the device had no room for the copies then.
        self._disabled_greeting = 0
        """The greeting in which the daemon heard that this worker copies nothing any more."""
        self.layout: WorkerLayout | None = None
        self._weights: EngineWeights | None = None  # None until the tensors are registered.
        self._adapters: LoadedAdapters | None = None  # As for the weights.
        self._auditor: Auditor | None = None  # None until the tensors are registered.
        self._boot = ""  # The daemon's life that welcomed this worker and whose arena is mapped.
        self._copiers: dict[str, tuple[Arena, Copier]] = {}
        """By the daemon's life: the present one, and the last one for loads planned from it."""
        self._attach_at = 0.0
        """When an arena that could not be mapped is tried again; 0.0 = the last one was mapped."""
        self._lock = threading.Lock()
        """Guards what the ends of copies write, because they may come from a copier's thread."""
        self._finished: set[str] = set()
        self._failed: set[str] = set()
        self._report = StepReport()
        self._expected: tuple[StepPlan | None, bool] = None, False
        """The last plan with stores, and whether a copier has them and will report each."""
        self._storing: dict[int, set[int]] = {}
        """Places of the objects that are not reported yet, by the number of the store run."""
        self._loading: dict[str, LoadPlan] = {}  # The loads that are running, by request.
        self._began: dict[str, LoadBegin] = {}
        """Loads that no call of `collect` has returned yet, by request."""
        self._session = 0  # The engine's greeting that the last plan was for.
        self._draining: set[int | str] = set()
        """Store runs and loads that were running when the first plan of that greeting came."""
        self._drained = (0, 0)
        """(this worker's greeting, the engine's greeting) of the last Drained that was sent."""

    def register(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Take the engine's tensors; raises GeometryError where a layout is not understood."""
        config, tokens, _ = self._configured
        views = block_views(config, kv_caches)
        self._weights = EngineWeights.of_caller(self.detach)
        self._adapters = LoadedAdapters(self._weights.runner)
        weights = self._weights.read().digest
        self.layout = replace(worker_layout(config, views), weights=weights)
        groups = [
            [physical(views[name]) for name in group.layer_names] for group in _served(config)
        ]
        try:
            pipeline = open_pipeline(
                *(config, self.layout, self._part.ranks, *tokens, groups, self.device)
            )
        except DeviceError as error:
            logger.warning("hybridkv: the device has no room to copy; nothing is cached: %s", error)
            self._lacks_room = True
            return
        if pipeline is not None:
            self.layout = replace(self.layout, staging_bytes=pipeline.staging_bytes)
        self._making = Copiers(groups, self._part, pipeline)
        numbers = [
            [layer_numbers(group.kv_cache_spec, name, views[name]) for name in group.layer_names]
            for group in _served(config)
        ]
        self._auditor = Auditor(numbers, self._part, self.layout.device == "cpu")
        self._link.poll(time.monotonic())

    @property
    def is_disabled(self) -> bool:
        """Whether no copy can succeed any more, for want of room on the device or of the device."""
        return self._lacks_room or (self._making is not None and not self._making.is_alive)

    def start_loads(self, plan: StepPlan) -> None:
        """Begin the plan's loads; those that cannot begin are reported as failed."""
        self._report.number = plan.number
        # vLLM has loaded the adapters of the step by now.
        adapters = self._adapters.look() if self._adapters is not None else {}
        if adapters:
            self._report.adapters = {self._part.rank: adapters}
        if self._weights is not None:
            is_idle = plan.is_idle and not plan.loads
            self._weights.step(plan.number, plan.question, is_idle=is_idle)
            if plan.is_idle:
                self._weights.give_way()
        self._attach(plan)
        refused: list[str] = []
        if plan.loads and not self._agrees(plan):
            self._report.counters["loads_other_weights"] += len(plan.loads)
            refused += plan.loads
        for request_id, load in plan.loads.items():
            if request_id not in refused and not self._has_adapter(load, adapters):
                self._report.counters["loads_other_adapter"] += 1
                refused.append(request_id)
        with self._lock:
            self._finished.update(plan.failed, refused)
            self._failed.update(plan.failed, refused)
        for request_id, load in plan.loads.items():
            if request_id not in refused:
                self._load(request_id, load, plan.number)
        if plan.audits and self._auditor is not None:
            arena, _ = self._copiers.get(plan.boot, (None, None))
            self._auditor.begin(arena, plan.audits)

    def start_stores(self, plan: StepPlan) -> None:
        """Copy out what the plan says; on return the blocks are the engine's again."""
        self._expect(plan)
        if self._weights is not None:
            self._weights.computed()
        _, copier = self._copiers.get(plan.boot, (None, None))
        # What is stored while the weights are not known is not committed before they are.
        agrees = self._agrees(plan) or self._is_asked(plan)
        if copier is None or not agrees:
            objects = sum(run.objects for run in plan.stores.values())
            reason = "unmapped" if agrees else "other_weights"
            self._report.counters[f"stores_{reason}"] += objects
            self.fail_stores(plan)
            return
        started = time.perf_counter()
        ops: list[CopyOp] = []
        places: dict[SlotRef, tuple[int, int]] = {}
        for number, run in plan.stores.items():
            for place, op in enumerate(run.copies()):
                if NULL_BLOCK in op.blocks:
                    self._report.counters["stores_hole"] += 1
                    self._stored(number, place, False)
                elif self._part.writes(op):
                    ops.append(op)
                    places[op.slot] = (number, place)
                else:
                    self._stored(number, place, True)
        copier.store(ops, lambda op, stored: self._stored(*places[op.slot], stored))
        self._expected = plan, True
        self._report.counters["store_seconds"] += time.perf_counter() - started

    def begin_anew(self) -> None:
        """Map the arena again with the next plan; copies that run end as they would have."""
        self._boot = ""
        self._close_old_copiers()

    def fail_all(self, plan: StepPlan) -> None:
        """Instead of `start_loads`, or after a fault there: loads that neither run nor ended fail.

        What the engine computes meanwhile is known to be of the same weights or not.
        """
        if self._weights is not None:
            self._weights.watch(plan.number, is_idle=plan.is_idle)
        with self._lock:
            lost = {*plan.loads, *plan.failed} - self._loading.keys() - self._finished
            self._finished |= lost
            self._failed |= lost
        if self._auditor is not None:
            self._auditor.begin(None, plan.audits)

    def fail_stores(self, plan: StepPlan) -> None:
        """After a fault in `start_stores`: what no copier has will not be stored."""
        self._expect(plan)
        _, is_handed_over = self._expected
        for number in () if is_handed_over else plan.stores:
            for place in list(self._storing.get(number, ())):
                self._stored(number, place, False)

    def collect(self) -> tuple[set[str], set[str]]:
        """(finished, failed) requests since the last call; failed ones are in both."""
        with self._lock:
            finished, self._finished = self._finished, set()
            failed, self._failed = self._failed, set()
        if self._weights is not None:
            self._weights.compare()
            for request_id in finished - failed:
                began = self._began[request_id]
                if self._weights.settled < began.step:
                    # A device has not said yet which weights it had when the load began.
                    finished.remove(request_id)
                    with self._lock:
                        self._finished.add(request_id)
                elif self._weights.era != began.era:
                    self._report.counters["loads_other_weights"] += 1
                    failed.add(request_id)
        for request_id in finished:
            self._began.pop(request_id, None)
        return finished, failed

    def report(self) -> StepReport:
        """What else this worker did since the last call."""
        with self._lock:
            report, self._report = self._report, StepReport()
            if self._making is not None and self._making.pipeline is not None:
                report.counters.update(self._making.pipeline.take_counters())
        # After an error of the device nothing is copied any more, so nothing may be offered.
        if self._boot and (self._making is None or self._making.is_alive):
            report.boots[self._boot] = 1
        report.is_disabled = self.is_disabled
        if self._auditor is not None:
            rank = self._part.rank
            report.audits = {
                number: {rank: verdict} for number, verdict in self._auditor.take().items()
            }
        if self._weights is not None:
            report.weights[self._part.rank] = self._weights.answer()
        return report

    def detach(self) -> None:
        """Finish the copies; the next plan maps the arena anew."""
        self._boot = ""
        for copier in {id(copier): copier for _, copier in self._copiers.values()}.values():
            copier.close()
        self._copiers.clear()
        if self._making is not None:
            self._making.drain()

    def close(self) -> None:
        """Finish the copies and end the connection; the daemon hears that nothing is copied."""
        if self._weights is not None:
            self._weights.close()
        self.detach()
        if self._making is not None:
            self._making.close()
            # An engine of the same process may outlive this role, and its memory must not.
            self._making = None
        self._link.close(Drained(NEVER))

    def _agrees(self, plan: StepPlan) -> bool:
        """Whether the plan was made for the weights that this worker has."""
        weights, rank = self._weights, self._part.rank
        if weights is None:
            return True
        is_known = weights.digest and plan.question == weights.question
        return bool(is_known) and plan.eras[rank : rank + 1] == (weights.era,)

    def _has_adapter(self, load: LoadPlan, adapters: Mapping[int, bytes]) -> bool:
        """Whether the load is for an adapter that is loaded now, or for none."""
        adapter = load.adapter
        return adapter is None or adapters.get(adapter.number) == adapter.digests[self._part.rank]

    def _is_asked(self, plan: StepPlan) -> bool:
        """Whether the plan was made while the answer to the last question was not known."""
        is_last = self._weights is not None and self._weights.question == plan.question
        return is_last and not plan.eras

    def _load(self, request_id: str, load: LoadPlan, step: int) -> None:
        started = time.perf_counter()
        self._loading[request_id] = load
        self._began[request_id] = LoadBegin(step, self._weights.era if self._weights else 0)

        def done(error: HybridKVError | None) -> None:
            with self._lock:
                if self._loading.get(request_id) is not load:
                    return
                del self._loading[request_id]
                self._finished.add(request_id)
                self._report.counters["load_seconds"] += time.perf_counter() - started
                if error is None:
                    return
                self._failed.add(request_id)
                self._report.counters["rank_loads_failed"] += 1
                if isinstance(error, BadSlotError):
                    self._report.corrupt.update(error.slots)
            text = "hybridkv: loading %s failed and is computed instead: %s"
            logger.warning(text, request_id, error)

        _, copier = self._copiers.get(load.boot, (None, None))
        if copier is None:
            done(HybridKVError("this worker is not attached to the daemon's arena"))
        else:
            try:
                copier.load([op for run in load.runs for op in run.ops()], done)
            except Exception as error:
                logger.exception("hybridkv: a load failed")
                done(HybridKVError(str(error)))

    def _expect(self, plan: StepPlan) -> None:
        """Note that every object of the plan must be reported, and each only once."""
        with self._lock:
            if self._expected[0] is not plan:
                self._expected = plan, False
                for number, run in plan.stores.items():
                    self._storing[number] = set(range(run.objects))

    def _stored(self, number: int, place: int, stored: bool) -> None:
        with self._lock:
            missing = self._storing.get(number)
            if missing is None or place not in missing:
                return
            missing.remove(place)
            if not stored:
                self._report.unstored.setdefault(number, set()).add(place)
            if not missing:
                del self._storing[number]
                self._report.done[number] = {self._part.rank}

    def _attach(self, plan: StepPlan) -> None:
        """Greet the daemon and map the arena of its present life, without waiting."""
        now = time.monotonic()
        self._link.poll(now)
        self._send_drained(plan.session, now)
        self._send_disabled(now)
        welcome = self._link.welcome
        is_asleep = self._weights is not None and self._weights.is_asleep
        is_new = welcome is not None and welcome.boot != self._boot and now >= self._attach_at
        is_new = is_new and not is_asleep
        if welcome is not None and is_new and self._making is not None:
            arena = self._mapped(welcome, now)
            if arena is None:
                return
            self._close_old_copiers()
            old, copier = self._copiers.get(self._boot, (None, None))
            if old and copier and old.inode == arena.inode and old.size_bytes == arena.size_bytes:
                # The daemon's new life uses the arena that is mapped already.
                arena.close()
                self._copiers[welcome.boot] = old, copier
            else:
                self._copiers[welcome.boot] = arena, self._making.make(arena)
            self._boot = welcome.boot
        is_ours = plan.reserved_bytes > 0 and plan.boot == self._boot
        if is_ours and self._making is not None:
            self._making.prepare(*self._copiers[self._boot], plan.reserved_bytes)

    def _mapped(self, welcome: Welcome, now: float) -> Arena | None:
        """The daemon's arena; None where it cannot be mapped, which the daemon is told."""
        sizes = welcome.arena_bytes, welcome.slots_bytes
        try:
            path = arena_seen(welcome.arena_path, self._configured[-1])
            pid, group = welcome.pid, self._link.group
            arena = attach_arena(path, *sizes, pid=pid, group=group, lock=self._link.lock)
        except HybridKVError as error:
            self._report.counters["attach_failed"] += 1
            if not self._attach_at:
                text = "hybridkv: nothing is loaded or stored: %s; engine and daemon need one %s"
                logger.warning(text, error, Path(welcome.arena_path).parent)
            self._link.send(ReportMapping(False), now)
            self._attach_at = now + ATTACH_SECONDS
            return None
        if not self._link.is_open:
            # The daemon may have looked for the lock before it was there.
            arena.close()
            return None
        if self._attach_at and not self.is_disabled:
            self._link.send(ReportMapping(True), now)
        self._attach_at = 0.0
        return arena

    def _close_old_copiers(self) -> None:
        """Keep the present life's copier alone."""
        for boot in [boot for boot in self._copiers if boot != self._boot]:
            _, copier = self._copiers.pop(boot)
            shared = any(copier is other for _, other in self._copiers.values())
            if self._making is not None and not shared:
                self._making.retire(copier)

    def _send_disabled(self, now: float) -> None:
        """Tell the daemon, once for each greeting, that this worker copies nothing any more."""
        greeting = self._link.greetings
        is_due = self.is_disabled and self._disabled_greeting != greeting
        if is_due and self._link.send(ReportMapping(False), now):
            self._disabled_greeting = greeting
            self._report.counters["workers_disabled"] += 1

    def _send_drained(self, session: int, now: float) -> None:
        """Send Drained once no copy runs that was planned before the engine's last greeting."""
        with self._lock:
            running: set[int | str] = {*self._storing, *self._loading}
        if session != self._session:
            self._session, self._draining = session, running
        self._draining &= running
        drained = self._link.greetings, self._session
        due = not self._draining and self._session and drained != self._drained
        if due and self._link.send(Drained(session), now):
            self._drained = drained


def _served(config: KVCacheConfig) -> list[KVCacheGroupSpec]:
    """The groups that have a prefix cache."""
    return [config.kv_cache_groups[gid] for gid in config.prefix_cacheable_group_ids]
