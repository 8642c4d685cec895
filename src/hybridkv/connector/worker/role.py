"""The worker role: maps the arena, copies what the plan says, and reports. It decides nothing."""

import logging
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import torch
from vllm.v1.kv_cache_interface import KVCacheConfig

from hybridkv.client.link import Link
from hybridkv.connector.copy.cuda import CudaCopier
from hybridkv.connector.copy.host import HostCopier
from hybridkv.connector.copy.part import BadSlotError, Copier, PartLayout
from hybridkv.connector.messages import LoadPlan, StepPlan, StepReport
from hybridkv.core.copies import NULL_BLOCK, CopyOp, SlotRef
from hybridkv.core.errors import HybridKVError
from hybridkv.shm.arena import Arena, attach_arena
from hybridkv.vllm.layout import WorkerLayout, block_views, is_replicated, worker_layout
from hybridkv.wire.messages import NEVER, PROTOCOL_VERSION, Drained, Hello

logger = logging.getLogger("vllm.hybridkv")


class WorkerRole:
    """One rank. Each step calls `start_loads`, `start_stores` and `collect` once, in this order."""

    def __init__(
        self,
        config: KVCacheConfig,
        socket_path: str,
        engine_id: str,
        rank: int,
        ranks: int,
        checksum: str,
    ) -> None:
        self._config = config
        self._served = [config.kv_cache_groups[gid] for gid in config.prefix_cacheable_group_ids]
        specs = enumerate(group.kv_cache_spec for group in self._served)
        shared = frozenset(index for index, spec in specs if is_replicated(spec))
        self._part = PartLayout(rank, ranks, checksum, shared)
        hello = Hello(1, PROTOCOL_VERSION, "worker", engine_id)
        self._link = Link(socket_path, hello, lambda why: None)
        self._groups: list[list[torch.Tensor]] = []  # Blocks of each layer of each served group.
        self.layout: WorkerLayout | None = None
        self._boot = ""  # The daemon's life that welcomed this worker and whose arena is mapped.
        self._copiers: dict[str, tuple[Arena, Copier]] = {}
        """By the daemon's life: the present one, and the last one for loads planned from it."""
        self._populated_bytes = 0
        self._lock = threading.Lock()
        """Guards what the ends of copies write, because they may come from a copier's thread."""
        self._finished: set[str] = set()
        self._failed: set[str] = set()
        self._report = StepReport()
        self._expected: StepPlan | None = None
        self._storing: dict[int, set[int]] = {}
        """Places of the objects that are not reported yet, by the number of the store run."""
        self._loading: dict[str, LoadPlan] = {}  # The loads that are running, by request.
        self._session = 0  # The engine's greeting that the last plan was for.
        self._draining: set[int | str] = set()
        """Store runs and loads that were running when the first plan of that greeting came."""
        self._drained = (0, 0)
        """(this worker's greeting, the engine's greeting) of the last Drained that was sent."""

    def register(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Take the engine's tensors; raises GeometryError where a layout is not understood."""
        views = block_views(self._config, kv_caches)
        self.layout = worker_layout(self._config, views)
        self._groups = [[views[name] for name in group.layer_names] for group in self._served]
        self._link.poll(time.monotonic())

    def start_loads(self, plan: StepPlan) -> None:
        """Begin the plan's loads; those that cannot begin are reported as failed."""
        self._attach(plan)
        with self._lock:
            self._finished.update(plan.failed)
            self._failed.update(plan.failed)
        for request_id, load in plan.loads.items():
            self._load(request_id, load)

    def start_stores(self, plan: StepPlan) -> None:
        """Copy out what the plan says; on return the blocks are the engine's again."""
        self._expect(plan)
        _, copier = self._copiers.get(plan.boot, (None, None))
        if copier is None:
            objects = sum(run.objects for run in plan.stores.values())
            self._report.counters["stores_unattached"] += objects
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
        self._report.counters["store_seconds"] += time.perf_counter() - started

    def fail_all(self, plan: StepPlan) -> None:
        """After a fault in `start_loads`: every load that neither runs nor ended failed."""
        with self._lock:
            lost = {*plan.loads, *plan.failed} - self._loading.keys() - self._finished
            self._finished |= lost
            self._failed |= lost

    def fail_stores(self, plan: StepPlan) -> None:
        """After a fault in `start_stores`: what is not stored by now will not be."""
        self._expect(plan)
        for number in plan.stores:
            for place in list(self._storing.get(number, ())):
                self._stored(number, place, False)

    def collect(self) -> tuple[set[str], set[str]]:
        """(finished, failed) requests since the last call; failed ones are in both."""
        with self._lock:
            finished, self._finished = self._finished, set()
            failed, self._failed = self._failed, set()
        return finished, failed

    def report(self) -> StepReport:
        """What else this worker did since the last call."""
        with self._lock:
            report, self._report = self._report, StepReport()
        if self._boot:
            report.boots[self._boot] = 1
        return report

    def close(self) -> None:
        """Finish the copies and end the connection; the daemon hears that nothing is copied."""
        self._boot = ""
        for copier in {id(copier): copier for _, copier in self._copiers.values()}.values():
            copier.close()
        self._copiers.clear()
        self._link.close(Drained(NEVER))

    def _load(self, request_id: str, load: LoadPlan) -> None:
        started = time.perf_counter()
        self._loading[request_id] = load

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
                    self._report.corrupt.add((error.op.slot.offset, error.op.slot.generation))
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
            if self._expected is not plan:
                self._expected = plan
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
        welcome = self._link.welcome
        if welcome is not None and welcome.boot != self._boot:
            path = Path(welcome.arena_path)
            try:
                arena = attach_arena(path, welcome.arena_bytes, welcome.slots_bytes)
            except HybridKVError as error:
                self._report.counters["attach_failed"] += 1
                logger.warning("hybridkv: %s", error)
                return
            self._close_old_copiers()
            old, copier = self._copiers.get(self._boot, (None, None))
            if old and copier and old.inode == arena.inode and old.size_bytes == arena.size_bytes:
                # The daemon's new life uses the arena that is mapped already.
                arena.close()
                self._copiers[welcome.boot] = old, copier
            else:
                make = CudaCopier if self._groups[0][0].device.type == "cuda" else HostCopier
                self._copiers[welcome.boot] = arena, make(arena, self._groups, self._part)
                self._populated_bytes = 0
            self._boot = welcome.boot
        if plan.boot == self._boot and plan.reserved_bytes > self._populated_bytes:
            # New pages are mapped ahead of their first use, which takes longer than a step.
            arena, copier = self._copiers[self._boot]
            new = self._populated_bytes, plan.reserved_bytes
            self._populated_bytes = plan.reserved_bytes
            if isinstance(copier, CudaCopier):
                copier.pin(plan.reserved_bytes)
            else:
                threading.Thread(target=arena.populate, args=new, daemon=True).start()

    def _close_old_copiers(self) -> None:
        """Keep the present life's copier alone."""
        for boot in [boot for boot in self._copiers if boot != self._boot]:
            _, copier = self._copiers.pop(boot)
            if not any(copier is other for _, other in self._copiers.values()):
                # In a thread, because it may have copies to finish and gigabytes to unpin.
                threading.Thread(target=copier.close, daemon=True).start()

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
