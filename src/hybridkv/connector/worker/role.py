"""The worker role: it maps the arena, copies what the plan says, and reports how that ended.

Plans are the scheduler role's. The worker refuses the copies that do not fit what it has now: its
weights, its adapters, its blocks.
"""

import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

from hybridkv.client.link import Link
from hybridkv.connector import metrics
from hybridkv.connector.copy.device import Device, DeviceError
from hybridkv.connector.copy.part import BadSlotError, PartLayout
from hybridkv.connector.messages import LoadPlan, StepPlan, StepReport
from hybridkv.connector.worker.audit import Auditor, layer_numbers
from hybridkv.connector.worker.copier_factory import (
    CopierFactory,
    MappedArena,
    ShardBlocks,
    open_pipeline,
)
from hybridkv.connector.worker.difference import LayerNumbers
from hybridkv.connector.worker.relay import Relay
from hybridkv.connector.worker.worker_settings import WorkerSettings
from hybridkv.core.copies import NULL_BLOCK, CopyOp
from hybridkv.core.errors import HybridKVError
from hybridkv.core.geometry import stages_of_node
from hybridkv.core.packed import SlotRef
from hybridkv.shm.arena import Arena, arena_seen, attach_arena, new_lock
from hybridkv.vllm.blocks import physical
from hybridkv.vllm.layout import WorkerLayout, block_views, is_replicated, worker_layout
from hybridkv.vllm.loaded_adapters import LoadedAdapters
from hybridkv.vllm.shards import shard_views
from hybridkv.vllm.stages import (
    BlockBytes,
    Exchange,
    exchange_in_pipeline,
    padding_view,
    stage_padding,
)
from hybridkv.vllm.weights import EngineWeights
from hybridkv.wire.messages import (
    GREETING_NEVER,
    PROTOCOL_VERSION,
    Drained,
    Hello,
    ReportMapping,
    Welcome,
)

logger = logging.getLogger("vllm.hybridkv")

ATTACH_SECONDS = 1.0  # How often an arena is tried that cannot be mapped.


@dataclass(frozen=True, slots=True)
class LoadStart:
    """The step and the weights with which a load began."""

    step: int  # The number of its plan.
    era: int  # That of the worker's weights, as far as it was known.


class DrainedGreetings(NamedTuple):
    """The greetings that a Drained message was for."""

    worker: int
    engine: int


class WorkerRole:
    """One rank. Each step calls `start_loads`, `start_stores` and `collect` once, in this order."""

    device: Device | None = None  # Set before `register` to copy on another device than CUDA.
    exchange: Exchange = staticmethod(exchange_in_pipeline)
    """Set before `register_tensors` where the stages of a pipeline are in one process."""

    def __init__(self, config: KVCacheConfig, settings: WorkerSettings) -> None:
        self._config = config
        self._settings = settings
        specs = enumerate(group.kv_cache_spec for group in _served(config))
        replicated = frozenset(index for index, spec in specs if is_replicated(spec))
        self._parts = [
            PartLayout(
                rank=shard,
                ranks=settings.node_shards,
                checksum=settings.checksum,
                replicated=replicated,
                stages=stages_of_node(settings.stages, settings.nodes),
            )
            for shard in settings.own_shards
        ]
        hello = Hello(1, PROTOCOL_VERSION, "worker", settings.engine_id, lock=new_lock())
        self.link = Link(settings.socket_path, hello, lambda why: None, settings.group)
        self.relay: Relay | None = None
        """Passes messages on, in the first worker of each of several nodes."""
        if settings.has_relay:
            self.relay = Relay(settings.socket_path, settings.engine_id, settings.group)
        self.factory: CopierFactory | None = None  # Once the engine's tensors are registered.
        self._lacks_room = False  # Whether the device had no room for the copies then.
        self._disabled_greeting = 0
        """The greeting in which the daemon heard that this worker copies nothing any more."""
        self.layout: WorkerLayout | None = None
        self.weights: EngineWeights | None = None  # None until the tensors are registered.
        self.adapters: LoadedAdapters | None = None  # As for the weights.
        self.auditor: Auditor | None = None  # None until the tensors are registered.
        self.boot = ""  # The daemon's life that welcomed this worker and whose arena is mapped.
        self.mapped: dict[str, MappedArena] = {}
        """By the daemon's life: the present one, and the last one for loads planned from it."""
        self._attach_at = 0.0
        """When to try again an arena that could not be mapped. 0.0 = the last one was mapped."""
        self._lock = threading.Lock()
        """Guards what the ends of copies write, because they may come from a copier's thread."""
        self._finished: set[str] = set()  # Loads that ended since the last `collect`.
        self._failed: set[str] = set()  # Those of them that failed.
        self._report = StepReport()
        self._store_plan: StepPlan | None = None  # The last plan with stores.
        self._copier_has_stores = False  # Whether a copier has its stores, and will report each.
        self._storing: dict[int, set[int]] = {}
        """Positions of the objects that are not reported yet, by the number of the store run."""
        self._loading: dict[str, LoadPlan] = {}  # The loads that are running, by request.
        self._load_starts: dict[str, LoadStart] = {}
        """Loads that no call of `collect` has returned yet, by request."""
        self._session = 0  # The engine's greeting that the last plan was for.
        self._draining: set[int | str] = set()
        """Store runs and loads that were running when the first plan of that greeting came."""
        self._drained = DrainedGreetings(0, 0)  # Of the last Drained that was sent.

    def register_tensors(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Take the engine's tensors. Raises GeometryError where a layout is not understood."""
        config = self._config
        shards, layout = self._read_layers(kv_caches)
        self.weights = EngineWeights.of_caller(self.detach_arena)
        self.adapters = LoadedAdapters(self.weights.runner)
        weights = self.weights.read().digest
        self.layout = replace(layout, weights=weights)
        blocks = [
            ShardBlocks(part, self._physical_groups(views))
            for part, views in zip(self._parts, shards, strict=True)
        ]
        groups, numbers = blocks[0].groups, self._numbers(shards[0])
        try:
            pipeline = open_pipeline(self._settings, config, self.layout, groups, self.device)
        except DeviceError as error:
            logger.warning("hybridkv: the device has no room to copy; nothing is cached: %s", error)
            self._lacks_room = True
            return
        if pipeline is not None:
            self.layout = replace(self.layout, staging_bytes=pipeline.staging_bytes)
        self.factory = CopierFactory(blocks, pipeline)
        self.auditor = Auditor(numbers, self._parts, self.layout.device == "cpu")
        self.link.poll(time.monotonic())

    def _read_layers(
        self, kv_caches: Mapping[str, torch.Tensor]
    ) -> tuple[list[dict[str, torch.Tensor]], WorkerLayout]:
        """Return `shard_views` and the layout of one shard, with the padding of this stage.

        A worker that cannot read its layers tells the other stages so, which wait for it. Raises
        GeometryError.
        """
        own: BlockBytes | None = None
        try:
            views = block_views(self._config, kv_caches)
            shards = shard_views(self._config, views, len(self._parts))
            layout = worker_layout(self._config, shards[0])
            own = layout.padded_block_bytes
        finally:
            everyones = self.exchange(own) if self._settings.stages > 1 else [own]
        return shards, replace(layout, padding=stage_padding(own, everyones))

    def _physical_groups(self, views: Mapping[str, torch.Tensor]) -> list[list[torch.Tensor]]:
        """Return the physical views of each served group, with the padding of this stage."""
        assert self.layout is not None
        config, device = self._config, next(iter(views.values())).device
        groups: list[list[torch.Tensor]] = []
        for gid, group in zip(config.prefix_cacheable_group_ids, _served(config), strict=True):
            groups.append([physical(views[name]) for name in group.layer_names])
            if size := self.layout.padding.get(gid, 0):
                groups[-1].append(padding_view(size, config.num_blocks, device))
        return groups

    def _numbers(self, views: Mapping[str, torch.Tensor]) -> list[list[LayerNumbers]]:
        """Return where the numbers of each served group are, with the padding of this stage."""
        assert self.layout is not None
        config = self._config
        numbers: list[list[LayerNumbers]] = []
        for gid, group in zip(config.prefix_cacheable_group_ids, _served(config), strict=True):
            spec, names = group.kv_cache_spec, group.layer_names
            numbers.append([layer_numbers(spec, name, views[name]) for name in names])
            if size := self.layout.padding.get(gid, 0):
                numbers[-1].append(LayerNumbers("padding", size, ()))
        return numbers

    @property
    def node(self) -> int:
        """The number of this worker's node."""
        return self._settings.node

    @property
    def is_disabled(self) -> bool:
        """True if no copy can succeed any more: the device failed, or had no room for copies."""
        return self._lacks_room or (self.factory is not None and not self.factory.can_copy)

    def start_loads(self, plan: StepPlan) -> None:
        """Begin the plan's loads. Those that cannot begin are reported as failed."""
        self._report.number = plan.number
        if self.relay is not None and plan.mail is not None:
            self.relay.deliver(plan.mail, time.monotonic())
        # vLLM has loaded the adapters of the step by now.
        adapters = self.adapters.digests_now() if self.adapters is not None else {}
        if adapters:
            self._report.adapters = {self._settings.rank: adapters}
        if self.weights is not None:
            is_idle = plan.is_idle and not plan.loads
            self.weights.begin_step(plan.number, plan.question, is_idle=is_idle)
            if plan.is_idle:
                self.weights.yield_to_reading()
        self.attach_arena(plan)
        refused: list[str] = []
        if plan.loads and not self._has_weights_of(plan):
            self._report.counters[metrics.LOADS_OTHER_WEIGHTS] += len(plan.loads)
            refused += plan.loads
        for request_id, load in plan.loads.items():
            if request_id not in refused and not self._has_adapter(load, adapters):
                self._report.counters[metrics.LOADS_OTHER_ADAPTER] += 1
                refused.append(request_id)
        with self._lock:
            self._finished.update(plan.failed, refused)
            self._failed.update(plan.failed, refused)
        for request_id, load in plan.loads.items():
            if request_id not in refused:
                self.load_request(request_id, load, plan.number)
        if plan.audits and self.auditor is not None:
            mapped = self.mapped.get(plan.boot)
            self.auditor.compare_pairs(None if mapped is None else mapped.arena, plan.audits)

    def start_stores(self, plan: StepPlan) -> None:
        """Copy out what the plan says. On return the blocks are the engine's again."""
        self.expect_stores(plan)
        if self.weights is not None:
            self.weights.computed()
        mapped = self.mapped.get(plan.boot)
        # What is stored while the weights are not known is not committed before they are.
        agrees = self._has_weights_of(plan) or self._awaits_answer(plan)
        if mapped is None or not agrees:
            reason = metrics.Shed.UNMAPPED if agrees else metrics.Shed.OTHER_WEIGHTS
            objects = sum(run.objects for run in plan.stores.values())
            self._report.counters[metrics.stores_shed(reason)] += objects
            self.fail_stores(plan)
            return
        started = time.perf_counter()
        ops: list[CopyOp] = []
        run_numbers: dict[SlotRef, int] = {}
        for run_number, run in plan.stores.items():
            for position, op in enumerate(run.copies()):
                if NULL_BLOCK in op.blocks:
                    self._report.counters[metrics.stores_shed(metrics.Shed.HOLE)] += 1
                    self.on_store_done(run_number, position, False)
                elif any(part.writes(op) for part in self._parts):
                    ops.append(op)
                    run_numbers[op.slot] = run_number
                else:
                    self.on_store_done(run_number, position, True)

        first_chunks = {number: run.span.first_chunk for number, run in plan.stores.items()}

        def done(op: CopyOp, is_stored: bool) -> None:
            run_number = run_numbers[op.slot]
            self.on_store_done(run_number, op.chunk - first_chunks[run_number], is_stored)

        mapped.copier.store(ops, done)
        self._copier_has_stores = True
        self._report.counters[metrics.STORE_SECONDS] += time.perf_counter() - started

    def remap_arena(self) -> None:
        """Map the arena again with the next plan. Copies that run end as they would have."""
        self.boot = ""
        self._close_old_copiers()

    def fail_all(self, plan: StepPlan) -> None:
        """Instead of `start_loads`, or after a fault there: fail loads that neither run nor ended.

        The weights are watched as in `start_loads`, because the engine computes in this step too.
        """
        if self.weights is not None:
            self.weights.look_at_step(plan.number, is_idle=plan.is_idle)
        with self._lock:
            lost = {*plan.loads, *plan.failed} - self._loading.keys() - self._finished
            self._finished |= lost
            self._failed |= lost
        if self.auditor is not None:
            self.auditor.compare_pairs(None, plan.audits)

    def fail_stores(self, plan: StepPlan) -> None:
        """After a fault in `start_stores`: report as not stored what no copier has."""
        self.expect_stores(plan)
        if self._copier_has_stores:
            return
        for run_number in plan.stores:
            for position in list(self._storing.get(run_number, ())):
                self.on_store_done(run_number, position, False)

    def take_finished(self) -> tuple[set[str], set[str]]:
        """Return (finished, failed) requests since the last call. Failed ones are in both."""
        with self._lock:
            finished, self._finished = self._finished, set()
            failed, self._failed = self._failed, set()
        if self.weights is not None:
            self.weights.compare()
            for request_id in finished - failed:
                start = self._load_starts[request_id]
                if self.weights.settled < start.step:
                    # A device has not said yet which weights it had when the load began.
                    finished.remove(request_id)
                    with self._lock:
                        self._finished.add(request_id)
                elif self.weights.era != start.era:
                    self._report.counters[metrics.LOADS_OTHER_WEIGHTS] += 1
                    failed.add(request_id)
        for request_id in finished:
            self._load_starts.pop(request_id, None)
        return finished, failed

    def take_step_report(self) -> StepReport:
        """Return what else this worker did since the last call."""
        with self._lock:
            report, self._report = self._report, StepReport()
            if self.factory is not None and self.factory.pipeline is not None:
                report.counters.update(self.factory.pipeline.take_counters())
        # After an error of the device nothing is copied any more, so nothing may be offered.
        if self.boot and (self.factory is None or self.factory.can_copy):
            report.boots[self.boot] = 1
        report.is_disabled = self.is_disabled
        rank = self._settings.rank
        if self.auditor is not None:
            report.audits = {
                number: {rank: verdict} for number, verdict in self.auditor.take_verdicts().items()
            }
        if self.weights is not None:
            report.weights[rank] = self.weights.take_step_answer()
        if self.relay is not None:
            answers = self.relay.take_answers(time.monotonic())
            if answers is not None:
                report.answers[self._settings.node] = answers
        return report

    def detach_arena(self) -> None:
        """Finish the copies. The next plan maps the arena anew."""
        self.boot = ""
        copiers = (mapped.copier for mapped in self.mapped.values())
        for copier in {id(copier): copier for copier in copiers}.values():
            copier.close()
        self.mapped.clear()
        if self.factory is not None:
            self.factory.drain_copiers()

    def close(self) -> None:
        """Finish the copies and end the connection. The daemon hears that nothing is copied."""
        if self.weights is not None:
            self.weights.close()
        self.detach_arena()
        if self.factory is not None:
            self.factory.close()
            # An engine of the same process may outlive this role, and its memory must not.
            self.factory = None
        self.link.close(Drained(GREETING_NEVER))
        if self.relay is not None:
            self.relay.close()

    def _has_weights_of(self, plan: StepPlan) -> bool:
        """Return True if the plan was made for the weights that this worker has."""
        weights, rank = self.weights, self._settings.rank
        if weights is None:
            return True
        is_known = weights.digest and plan.question == weights.question
        return bool(is_known) and plan.eras[rank : rank + 1] == (weights.era,)

    def _has_adapter(self, load: LoadPlan, adapters: Mapping[int, bytes]) -> bool:
        """Return True if the load is for an adapter that is loaded now, or for none."""
        adapter, rank = load.adapter, self._settings.rank
        return adapter is None or adapters.get(adapter.number) == adapter.digests[rank]

    def _awaits_answer(self, plan: StepPlan) -> bool:
        """Return True if the scheduler role made the plan before it had our last answer.

        That is the answer to the question which weights this worker has.
        """
        is_last = self.weights is not None and self.weights.question == plan.question
        return is_last and not plan.eras

    def load_request(self, request_id: str, load: LoadPlan, step: int) -> None:
        started = time.perf_counter()
        self._loading[request_id] = load
        self._load_starts[request_id] = LoadStart(step, self.weights.era if self.weights else 0)

        def done(error: HybridKVError | None) -> None:
            with self._lock:
                if self._loading.get(request_id) is not load:
                    return
                del self._loading[request_id]
                self._finished.add(request_id)
                self._report.counters[metrics.LOAD_SECONDS] += time.perf_counter() - started
                if error is None:
                    return
                self._failed.add(request_id)
                self._report.counters[metrics.RANK_LOADS_FAILED] += 1
                if isinstance(error, BadSlotError):
                    corrupt = self._report.corrupt.setdefault(self._settings.node, set())
                    corrupt.update(error.slots)
            text = "hybridkv: loading %s failed and is computed instead: %s"
            logger.warning(text, request_id, error)

        mapped = self.mapped.get(load.boot)
        if mapped is None:
            done(HybridKVError("this worker is not attached to the daemon's arena"))
        else:
            try:
                mapped.copier.load([op for run in load.runs for op in run.ops()], done)
            except Exception as error:
                # A load that cannot begin is reported as failed, and the engine computes its
                # tokens.
                logger.exception("hybridkv: a load failed")
                done(HybridKVError(str(error)))

    def expect_stores(self, plan: StepPlan) -> None:
        """Note that every object of the plan must be reported, and each only once."""
        with self._lock:
            if self._store_plan is not plan:
                self._store_plan, self._copier_has_stores = plan, False
                for run_number, run in plan.stores.items():
                    self._storing[run_number] = set(range(run.objects))

    def on_store_done(self, run_number: int, position: int, is_stored: bool) -> None:
        """Report the object at this position in the run, and the run with its last object."""
        with self._lock:
            missing = self._storing.get(run_number)
            if missing is None or position not in missing:
                return
            missing.remove(position)
            if not is_stored:
                self._report.unstored.setdefault(run_number, set()).add(position)
            if not missing:
                del self._storing[run_number]
                self._report.done[run_number] = {self._settings.rank}

    def attach_arena(self, plan: StepPlan) -> None:
        """Greet the daemon and map the arena of its present life, without waiting."""
        now = time.monotonic()
        self.link.poll(now)
        self.send_drained(plan.session, now)
        self._send_disabled(now)
        welcome, factory = self.link.welcome, self.factory
        if factory is None:
            return
        if welcome is not None and self._may_map(welcome, now):
            arena = self._map_arena(welcome, now)
            if arena is None:
                return
            self._close_old_copiers()
            old = self.mapped.get(self.boot)
            if old is not None and _is_same_file(old.arena, arena):
                # The daemon's new life uses the arena that is mapped already.
                arena.close()
                self.mapped[welcome.boot] = old
            else:
                self.mapped[welcome.boot] = MappedArena(arena, factory.make_copier(arena))
            self.boot = welcome.boot
        if plan.reserved_bytes > 0 and plan.boot == self.boot:
            factory.prepare(self.mapped[self.boot], plan.reserved_bytes)

    def _may_map(self, welcome: Welcome, now: float) -> bool:
        """Return True if the arena of this life is to be mapped now."""
        is_asleep = self.weights is not None and self.weights.is_asleep
        return welcome.boot != self.boot and now >= self._attach_at and not is_asleep

    def _map_arena(self, welcome: Welcome, now: float) -> Arena | None:
        """Map the daemon's arena. Returns None where that fails, of which the daemon is told."""
        try:
            arena = attach_arena(
                arena_seen(welcome.arena_path, self._settings.shm_dir),
                welcome.arena_bytes,
                welcome.slots_bytes,
                pid=welcome.pid,
                group=self.link.group,
                lock=self.link.lock,
            )
        except HybridKVError as error:
            self._report.counters[metrics.ATTACH_FAILED] += 1
            if not self._attach_at:
                text = "hybridkv: nothing is loaded or stored: %s; engine and daemon need one %s"
                logger.warning(text, error, Path(welcome.arena_path).parent)
            self.link.send(ReportMapping(False), now)
            self._attach_at = now + ATTACH_SECONDS
            return None
        if not self.link.has_connection:
            # The daemon may have looked for the lock before it was there.
            arena.close()
            return None
        if self._attach_at and not self.is_disabled:
            self.link.send(ReportMapping(True), now)
        self._attach_at = 0.0
        return arena

    def _close_old_copiers(self) -> None:
        """Keep the present life's copier alone."""
        for boot in [boot for boot in self.mapped if boot != self.boot]:
            copier = self.mapped.pop(boot).copier
            is_shared = any(copier is mapped.copier for mapped in self.mapped.values())
            if self.factory is not None and not is_shared:
                self.factory.retire_copier(copier)

    def _send_disabled(self, now: float) -> None:
        """Tell the daemon, once for each greeting, that this worker copies nothing any more."""
        greeting = self.link.greetings
        is_due = self.is_disabled and self._disabled_greeting != greeting
        if is_due and self.link.send(ReportMapping(False), now):
            self._disabled_greeting = greeting
            self._report.counters[metrics.WORKERS_DISABLED] += 1

    def send_drained(self, session: int, now: float) -> None:
        """Send Drained once no copy runs that was planned before the engine's last greeting."""
        with self._lock:
            running: set[int | str] = {*self._storing, *self._loading}
        if session != self._session:
            self._session, self._draining = session, running
        self._draining &= running
        drained = DrainedGreetings(self.link.greetings, self._session)
        is_due = not self._draining and self._session and drained != self._drained
        if is_due and self.link.send(Drained(session), now):
            self._drained = drained


def _is_same_file(first: Arena, second: Arena) -> bool:
    """Return True if both map the same file with the same size."""
    return first.inode == second.inode and first.size_bytes == second.size_bytes


def _served(config: KVCacheConfig) -> list[KVCacheGroupSpec]:
    """Return the groups that have a prefix cache."""
    return [config.kv_cache_groups[gid] for gid in config.prefix_cacheable_group_ids]
