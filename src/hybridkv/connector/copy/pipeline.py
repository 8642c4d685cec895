"""The staging, streams and lanes of one rank on a device, which the copiers of all arenas share.

    engine's thread   one gather and one event for a step's stores, one event for a load
    store lane        ring to slots, signatures
    load lane         slots to ring, scatters, proofs
    pinning lane      registers and unregisters the arenas' memory

The engine may overwrite a block as soon as `store` returns, because the gather is on its stream. It
may use a loaded block only after `done`.
"""

import ctypes
import logging
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from threading import Condition

import torch

from hybridkv.connector.copy.device import (
    CopyList,
    Device,
    DeviceMemoryError,
    JobQueue,
    Lane,
    Waitable,
    wait_in_lane,
)
from hybridkv.connector.copy.part import PartLayout
from hybridkv.connector.copy.pins import Pins, pinning_lane
from hybridkv.connector.copy.ring import Ring
from hybridkv.connector.copy.staging import (
    AttachedArena,
    CopySizes,
    Descriptors,
    DeviceContext,
    Staging,
)
from hybridkv.connector.copy.store_and_load import (
    Barrier,
    LoadJob,
    LoadLane,
    StoreLane,
    StoreTransfer,
)
from hybridkv.connector.copy.tables import ENTRY, NUMBER_BYTES, encoded_bytes, make_tables
from hybridkv.connector.metrics import Shed, stores_shed
from hybridkv.core.copies import CopyOp
from hybridkv.core.errors import HybridKVError
from hybridkv.core.metrics import Metric
from hybridkv.core.sizes import format_size
from hybridkv.shm.arena import Arena

logger = logging.getLogger("vllm.hybridkv")

STAGING_BYTES_MAX = 2 << 30  # Of the ring for stores.
FREE_SHARE = 4  # Each ring takes a quarter of what is free at most; the engine needs more later.


@dataclass(frozen=True, slots=True)
class Demand:
    """The staging that a model asks for, on one rank."""

    largest_bytes: int  # Of the largest part of an object.
    largest_blocks: int  # The most stored blocks of an object.
    step_bytes: int  # Of all that one step of the engine may complete.


class Latch(Waitable):
    """A wait that is over after `count` calls of `reach`. The last one calls `on_reached`."""

    def __init__(self, count: int, on_reached: Callable[[], None] = lambda: None) -> None:
        self._remaining = count
        self._on_reached = on_reached
        self._changed = Condition()

    def reach(self) -> None:
        """Count one call. Any thread may call it."""
        with self._changed:
            self._remaining -= 1
            self._changed.notify_all()
            is_last = not self._remaining
        if is_last:
            self._on_reached()

    def is_over(self) -> bool:
        return self._remaining <= 0

    def wait(self) -> None:
        with self._changed:
            self._changed.wait_for(self.is_over)


class CopyPipeline:
    """All copies of one rank: its staging, and the lanes that store, load and pin.

    `groups` has physical views. Raises DeviceError where the device has no room for the largest
    object.
    """

    def __init__(
        self,
        device: Device,
        groups: Sequence[Sequence[torch.Tensor]],
        demand: Demand,
        sizes: CopySizes | None = None,
    ) -> None:
        sizes = sizes or CopySizes()
        tables = make_tables(groups)
        self._device = device
        entry_bytes = NUMBER_BYTES * (ENTRY + demand.largest_blocks)
        room = device.free_bytes() // FREE_SHARE
        load_bytes = min(room, max(2 * demand.largest_bytes, sizes.load_ring_bytes))
        load_ring, load_memory = _allocate_ring(device, demand.largest_bytes, load_bytes)
        store_bytes = min(room, STAGING_BYTES_MAX, demand.step_bytes)
        store_ring, store_memory = _allocate_ring(device, demand.largest_bytes, store_bytes)
        self.staging_bytes = store_ring.size
        """The bytes of stores that may be planned and not reported."""
        if self.staging_bytes < demand.step_bytes:
            text = "hybridkv: %s of staging for stores instead of %s; long prompts are stored later"
            logger.warning(text, format_size(self.staging_bytes), format_size(demand.step_bytes))
        device_rows = _upload(device, tables.rows)
        kernels = device.make_kernels(tables, device_rows, groups, store_memory)
        self.context = DeviceContext(device, tables, kernels, device_rows, sizes)
        descriptor_bytes, largest_step = sizes.descriptor_bytes, sizes.descriptor_bytes // 2
        self._descriptor_ring = Ring(descriptor_bytes, largest_step)
        self._store_descriptors = Descriptors(self.context, descriptor_bytes + largest_step)
        stores = Staging(self.context, store_ring, store_memory, sizes.batch_bytes)
        # The link takes one batch while others are queued.
        batch_bytes = min(sizes.batch_bytes, load_ring.size // sizes.depth)
        loads = Staging(self.context, load_ring, load_memory, batch_bytes)
        self._store_lane = StoreLane(self.context, stores, self._descriptor_ring)
        load_descriptors = Descriptors(
            self.context, entry_bytes * sizes.batch_objects * sizes.depth
        )
        self._load_lane = LoadLane(self.context, loads, load_descriptors, entry_bytes)
        # Memory may come from the engine, whose queued work still uses it.
        device.wait_for(device.record(device.current_stream()))
        self._pinning_jobs: JobQueue[Callable[[], Lane] | None] = JobQueue()
        device.start_lane("hybridkv-store", self._store_lane.run_jobs())
        device.start_lane("hybridkv-load", self._load_lane.run_jobs())
        device.start_lane(
            "hybridkv-pin", pinning_lane(self.context.enter_thread, self._pinning_jobs)
        )

    @property
    def can_copy(self) -> bool:
        """True until an error ends all copies of this rank."""
        return not self.context.fatal_error

    def take_counters(self) -> dict[Metric, float]:
        """Return what was counted since the last call."""
        return self.context.take_own_counts()

    def attach(self, arena: Arena, part: PartLayout) -> AttachedArena:
        """Return an arena to copy from and to. `detach` ends its use."""
        return AttachedArena(arena, part, Pins(arena, self.context.sizes.pin_bytes))

    def pin_arena(self, attached: AttachedArena, reserved_bytes: int) -> None:
        """Pin the arena's memory below `reserved_bytes`, in the pinning lane.

        The engine's thread calls it in each step, so that refused memory is tried again.
        """

        def pin() -> Lane:
            if self.can_copy:
                yield from attached.pins.pin_pages(self._device, reserved_bytes)

        if attached.pins.request_pages(reserved_bytes):
            self._pinning_jobs.push(pin)

    def queue_store(
        self, attached: AttachedArena, ops: Sequence[CopyOp], done: Callable[[CopyOp, bool], None]
    ) -> None:
        """Launch the gather on the engine's stream. The store lane does the rest."""
        context, ring = self.context, self._store_lane.staging.ring
        descriptor_bytes = encoded_bytes(ops)
        descriptor_offset = self._descriptor_ring.reserve(descriptor_bytes)
        transfers: list[StoreTransfer] = []
        for op in ops:
            ring_offset, part_bytes = None, context.tables.part_bytes(op)
            if not context.fatal_error and context.tables.has_blocks(op):
                ring_offset = None if descriptor_offset is None else ring.reserve(part_bytes)
                context.count_event(stores_shed(Shed.STAGING_FULL), ring_offset is None)
            if ring_offset is None:
                done(op, False)
            else:
                transfers.append(StoreTransfer(attached, op, part_bytes, ring_offset, done=done))
        if descriptor_offset is None or not transfers:
            if descriptor_offset is not None:
                self._descriptor_ring.undo_reserve(descriptor_offset, descriptor_bytes)
            return
        transfers[-1].descriptor_bytes = descriptor_bytes
        try:
            device, stream, copies = self._device, self._device.current_stream(), CopyList()
            launch = self._store_descriptors.write(
                descriptor_offset, transfers, self._store_lane.staging.memory, copies
            )
            for target, source, size in copies:
                device.copy(target, source, size, stream)
            device.launch(partial(context.kernels.copy_blocks, launch, True), stream)
            gathered = device.record(stream)
            for transfer in transfers:
                transfer.gathered = gathered
        finally:
            # Whatever happened, the store lane releases what was reserved, in its order.
            self._store_lane.jobs.push(*transfers)

    def queue_load(
        self,
        attached: AttachedArena,
        ops: Sequence[CopyOp],
        done: Callable[[HybridKVError | None], None],
    ) -> None:
        """Copy in the load lane, after the present work of the engine's stream."""
        if not ops:
            done(None)
            return
        engine_event = self._device.record(self._device.current_stream())
        self._load_lane.jobs.push(LoadJob(attached, deque(ops), engine_event, done))

    def detach(self, attached: AttachedArena) -> Latch:
        """Unpin the arena once nothing is copied from or to it. The latch is over then."""
        attached.pins.is_closed = True
        unpinned = Latch(1)

        def unpin() -> Lane:
            try:
                attached.pins.unpin_pages(self._device)
            finally:
                unpinned.reach()
            yield from wait_in_lane(unpinned)

        drained = Latch(2, lambda: self._pinning_jobs.push(unpin))
        self._store_lane.jobs.push(Barrier(drained.reach))
        self._load_lane.jobs.push(Barrier(drained.reach))
        return unpinned

    def wait_for_latch(self, latch: Latch) -> None:
        """Block the caller, which may be any thread, until the latch is over."""
        self._device.wait_for(latch)

    def drain(self) -> None:
        """Wait until what is queued is over, so that no copy uses the device's memory."""
        latch = Latch(2)
        for jobs in (self._store_lane.jobs, self._load_lane.jobs):
            jobs.push(Barrier(latch.reach))
        self._device.wait_for(latch)

    def close(self) -> None:
        """Finish what is queued and end the lanes."""
        self.drain()
        for jobs in (self._store_lane.jobs, self._load_lane.jobs):
            jobs.push(Barrier(None))
        self._pinning_jobs.push(None)

    def check(self) -> None:
        """Assert that nothing is in flight and all staging was released. For tests."""
        rings = (self._store_lane.staging.ring, self._load_lane.staging.ring, self._descriptor_ring)
        for ring in rings:
            assert not ring.used_bytes, f"{ring.used_bytes} bytes were not released"


def _allocate_ring(device: Device, largest: int, size: int) -> tuple[Ring, torch.Tensor]:
    """Return a ring and its memory: `size` bytes, or a half, a quarter, ... as there is room."""
    size = max(size, largest)
    while True:
        try:
            return Ring(size, largest), device.allocate(size + largest)
        except DeviceMemoryError:
            if size == largest:
                raise
            size = max(size // 2, largest)


def _upload(device: Device, rows: "array[int]") -> torch.Tensor:
    """Return the rows on the device. Nothing else runs yet, so the caller waits."""
    rows_address, count = rows.buffer_info()
    size = count * NUMBER_BYTES
    device_rows = device.allocate(size)
    pinned = device.allocate(size, pinned=True)
    ctypes.memmove(pinned.data_ptr(), rows_address, size)
    stream = device.current_stream()
    device.copy(device_rows.data_ptr(), pinned.data_ptr(), size, stream)
    device.wait_for(device.record(stream))
    return device_rows
