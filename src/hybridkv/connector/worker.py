"""The worker role: maps the arena, copies what the plan says, reports. It decides nothing."""

import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import torch
from vllm.v1.kv_cache_interface import KVCacheConfig

from hybridkv.client.link import Link
from hybridkv.connector.copier import BadSlotError, Copier, HostCopier, PartLayout
from hybridkv.connector.cuda import CudaCopier
from hybridkv.connector.layout import block_views, is_replicated, worker_layout
from hybridkv.connector.metadata import LoadPlan, StepPlan, StepReport, WorkerLayout
from hybridkv.core.errors import HybridKVError
from hybridkv.core.plans import NULL_BLOCK, CopyOp, SlotRef
from hybridkv.shm.arena import Arena, attach_arena
from hybridkv.wire.messages import NEVER, PROTOCOL_VERSION, Drained, Hello, Welcome

logger = logging.getLogger("vllm.hybridkv")


class WorkerSide:
    """One rank. `start_loads`, `start_stores` and `collect` are called once in every step, in this order."""

    def __init__(
        self, config: KVCacheConfig, socket_path: str, engine_id: str, rank: int, ranks: int, checksum: str
    ) -> None:
        self._config = config
        cacheable = [config.kv_cache_groups[gid].kv_cache_spec for gid in config.prefix_cacheable_group_ids]
        shared = frozenset(index for index, spec in enumerate(cacheable) if is_replicated(spec))
        self._part = PartLayout(rank, ranks, checksum, shared)
        self._link = Link(socket_path, Hello(1, PROTOCOL_VERSION, "worker", engine_id), lambda why: None)
        self._views: dict[str, torch.Tensor] = {}
        self.layout: WorkerLayout | None = None
        self._boot = ""
        """The daemon's life that knows of this worker and whose arena is mapped."""
        self._copiers: dict[str, tuple[Arena, Copier]] = {}
        """By daemon's life: the present one, and the one before for loads that were planned from it."""
        self._populated_bytes = 0
        self._lock = threading.Lock()
        """Guards what completions write: they may come from a copier's thread."""
        self._begun: set[str] = set()
        """Requests of this step's plan whose load will be reported by whoever copies."""
        self._finished: set[str] = set()
        self._failed: set[str] = set()
        self._report = StepReport()
        self._expected: StepPlan | None = None
        self._storing: dict[int, set[int]] = {}
        """Places of the objects that are not reported yet, by the number of their run."""
        self._counters: Counter[str] = Counter()
        self._loading: set[str] = set()
        """Requests whose load is running."""
        self._session = 0
        """The engine's greeting that the present plans are for."""
        self._draining: set[int | str] = set()
        """Runs and loads that were running when it came."""
        self._told = (0, 0)
        """(greeting of this worker, greeting of the engine) at which the daemon was told that those are over."""

    def register(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Take the engine's tensors; raises GeometryError where one is not understood."""
        self._views = block_views(self._config, kv_caches)
        self.layout = worker_layout(self._config, self._views)
        self._link.poll(time.monotonic())

    def start_loads(self, plan: StepPlan) -> None:
        """Begin the plan's loads and report those that cannot be."""
        self._begun.clear()
        self._attach(plan)
        with self._lock:
            self._finished.update(plan.failed)
            self._failed.update(plan.failed)
        for request_id, load in plan.loads.items():
            self._load(request_id, load)

    def start_stores(self, plan: StepPlan) -> None:
        """Copy out what the plan says; the blocks are the engine's again when this returns."""
        if not plan.stores:
            return
        self._expect(plan)
        copier = self._copier(plan.boot)
        if copier is None:
            self._counters["stores_unattached"] += sum(run.objects for run in plan.stores.values())
            self._give_up(plan)
            return
        started = time.perf_counter()
        ops: list[CopyOp] = []
        places: dict[SlotRef, tuple[int, int]] = {}
        for number, run in plan.stores.items():
            for place, op in enumerate(run.copies()):
                if NULL_BLOCK in op.blocks:
                    self._counters["stores_hole"] += 1
                    self._stored(number, place, False)
                elif self._part.writes(op):
                    ops.append(op)
                    places[op.slot] = (number, place)
                else:
                    self._stored(number, place, True)
        copier.store(ops, lambda op, stored: self._stored(*places[op.slot], stored))
        self._counters["store_seconds"] += time.perf_counter() - started  # type: ignore[assignment]

    def fail_all(self, plan: StepPlan) -> None:
        """After a fault in `start_loads`: every load that was not begun failed; the others report for themselves."""
        lost = {*plan.loads, *plan.failed} - self._begun
        with self._lock:
            self._finished |= lost
            self._failed |= lost

    def fail_stores(self, plan: StepPlan) -> None:
        """After a fault in `start_stores`: what was not stored before it is not."""
        self._expect(plan)
        self._give_up(plan)

    def collect(self) -> tuple[set[str], set[str]]:
        """(finished, failed) requests since the last call; failed ones are in both."""
        # The next step may be one of a side that is switched off, where nothing begins.
        self._begun.clear()
        with self._lock:
            finished, self._finished = self._finished, set()
            failed, self._failed = self._failed, set()
        return finished, failed

    def report(self) -> StepReport:
        """What else happened since the last call."""
        with self._lock:
            report, self._report = self._report, StepReport()
            report.counters = dict(self._counters)
            self._counters.clear()
        if self._boot:
            report.boots[self._boot] = 1
        return report

    def close(self) -> None:
        """Let go of the arena and of the daemon."""
        self._boot = ""
        for copier in {id(copier): copier for _, copier in self._copiers.values()}.values():
            copier.close()
        self._copiers.clear()
        self._link.close(Drained(NEVER))

    def _load(self, request_id: str, load: LoadPlan) -> None:
        started = time.perf_counter()
        ended = threading.Event()
        self._begun.add(request_id)
        self._loading.add(request_id)

        def done(error: HybridKVError | None) -> None:
            with self._lock:
                if ended.is_set():
                    return
                ended.set()
                self._loading.discard(request_id)
                self._finished.add(request_id)
                self._counters["load_seconds"] += time.perf_counter() - started  # type: ignore[assignment]
                if error is None:
                    return
                self._failed.add(request_id)
                self._counters["rank_loads_failed"] += 1
                if isinstance(error, BadSlotError):
                    self._report.condemned.add((error.op.slot.offset, error.op.slot.generation))
            logger.warning("hybridkv: loading %s failed and is computed instead: %s", request_id, error)

        copier = self._copier(load.boot)
        if copier is None:
            done(HybridKVError("this worker is not attached to the daemon's arena"))
        else:
            try:
                copier.load([op for run in load.runs for op in run.ops()], done)
            except Exception as error:
                logger.exception("hybridkv: a load failed")
                done(HybridKVError(str(error)))

    def _expect(self, plan: StepPlan) -> None:
        """Every object of the plan is to be reported, once."""
        with self._lock:
            if self._expected is not plan:
                self._expected = plan
                self._storing.update((number, set(range(run.objects))) for number, run in plan.stores.items())

    def _give_up(self, plan: StepPlan) -> None:
        for number in plan.stores:
            for place in list(self._storing.get(number, ())):
                self._stored(number, place, False)

    def _stored(self, number: int, place: int, stored: bool) -> None:
        with self._lock:
            waiting = self._storing.get(number)
            if waiting is None or place not in waiting:
                return
            waiting.remove(place)
            if not stored:
                self._report.unstored.setdefault(number, set()).add(place)
            if not waiting:
                del self._storing[number]
                self._report.done[number] = {self._part.rank}

    def _copier(self, boot: str) -> Copier | None:
        return self._copiers[boot][1] if boot in self._copiers else None

    def _attach(self, plan: StepPlan) -> None:
        """Follow the daemon: greet it, map its arena, never waiting."""
        now = time.monotonic()
        self._link.poll(now)
        self._tell_drained(plan.session, now)
        welcome = self._link.welcome
        if welcome is not None and welcome.boot != self._boot and self._keep_arena(welcome):
            self._boot = welcome.boot
        elif welcome is not None and welcome.boot != self._boot:
            try:
                arena = attach_arena(Path(welcome.arena_path), welcome.arena_bytes, welcome.slots_bytes)
            except HybridKVError as error:
                self._counters["attach_failed"] += 1
                logger.warning("hybridkv: %s", error)
                return
            self._let_go()
            names = [self._config.kv_cache_groups[gid].layer_names for gid in self._config.prefix_cacheable_group_ids]
            groups = [[self._views[name] for name in group] for group in names]
            make = CudaCopier if groups[0][0].device.type == "cuda" else HostCopier
            self._copiers[welcome.boot] = (arena, make(arena, groups, self._part))
            self._boot = welcome.boot
            self._populated_bytes = 0
        if plan.boot == self._boot and plan.reserved_bytes > self._populated_bytes:
            self._populate(plan.reserved_bytes)

    def _keep_arena(self, welcome: Welcome) -> bool:
        """Whether another life of the daemon took over the arena that is mapped already."""
        if self._boot not in self._copiers:
            return False
        arena, copier = self._copiers[self._boot]
        try:
            status = os.stat(welcome.arena_path)
        except OSError:
            return False
        if arena.inode != (status.st_dev, status.st_ino) or arena.size_bytes != welcome.arena_bytes:
            return False
        self._let_go()
        self._copiers[welcome.boot] = (arena, copier)
        return True

    def _let_go(self) -> None:
        """Keep only the present arena."""
        for boot in [boot for boot in self._copiers if boot != self._boot]:
            _, copier = self._copiers.pop(boot)
            if not any(copier is other for _, other in self._copiers.values()):
                # Beside the step: it may have copies to finish and gigabytes to unpin.
                threading.Thread(target=copier.close, daemon=True).start()

    def _tell_drained(self, session: int, now: float) -> None:
        """As soon as nothing runs that was planned before the engine's present greeting, the daemon hears of it."""
        with self._lock:
            running: set[int | str] = {*self._storing, *self._loading}
        if session != self._session:
            self._session, self._draining = session, running
        self._draining &= running
        told = self._link.greetings, self._session
        if not self._draining and self._session and told != self._told and self._link.send(Drained(session), now):
            self._told = told

    def _populate(self, reserved_bytes: int) -> None:
        """Map new pages ahead of their first use; beside the step, because it takes longer than one."""
        arena, copier = self._copiers[self._boot]
        start, self._populated_bytes = self._populated_bytes, reserved_bytes
        if isinstance(copier, CudaCopier):
            copier.pin(reserved_bytes)
        else:
            threading.Thread(target=lambda: arena.populate(start, reserved_bytes), daemon=True).start()
