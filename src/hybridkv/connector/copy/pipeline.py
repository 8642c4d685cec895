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

from hybridkv.connector.copy.device import Device, DeviceMemoryError, Jobs, Lane, Pieces, over
from hybridkv.connector.copy.lanes import Barrier, LoadJob, LoadLane, StoreFlight, StoreLane
from hybridkv.connector.copy.part import PartLayout
from hybridkv.connector.copy.pins import Pins, pinning_lane
from hybridkv.connector.copy.ring import Ring
from hybridkv.connector.copy.staging import CopySizes, Descriptors, Shared, Slots, Staging
from hybridkv.connector.copy.tables import ENTRY, NUMBER_BYTES, encoded_bytes, make_tables
from hybridkv.core.copies import CopyOp
from hybridkv.core.errors import HybridKVError
from hybridkv.core.sizes import format_size
from hybridkv.shm.arena import Arena

logger = logging.getLogger("vllm.hybridkv")

STAGING_BYTES_MAX = 2 << 30  # Of the ring for stores.
FREE_SHARE = 4  # Each ring takes a quarter of what is free at most; the engine needs more later.


@dataclass(frozen=True, slots=True)
class Demand:
    """What a model asks of the staging, on one rank."""

    largest_bytes: int  # Of the largest part of an object.
    largest_blocks: int  # The most stored blocks of an object.
    step_bytes: int  # Of all that one step of the engine may complete.


class Latch:
    """A wait that is over after `count` calls of `reach`; the last one calls `then`."""

    def __init__(self, count: int, then: Callable[[], None] = lambda: None) -> None:
        self._left = count
        self._then = then
        self._changed = Condition()

    def reach(self) -> None:
        """One of them."""
        with self._changed:
            self._left -= 1
            self._changed.notify_all()
            is_last = not self._left
        if is_last:
            self._then()

    def ready(self) -> bool:
        """See Waitable."""
        return self._left <= 0

    def wait(self) -> None:
        """See Waitable."""
        with self._changed:
            self._changed.wait_for(self.ready)


class CopyPipeline:
    """See above. Raises DeviceError where the device has no room for the largest object."""

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
        wanted = min(room, max(2 * demand.largest_bytes, sizes.load_ring))
        load_ring, load_memory = _allocate(device, demand.largest_bytes, wanted)
        wanted = min(room, STAGING_BYTES_MAX, demand.step_bytes)
        store_ring, store_memory = _allocate(device, demand.largest_bytes, wanted)
        self.staging_bytes = store_ring.size
        """The bytes of stores that may be planned and not reported."""
        if self.staging_bytes < demand.step_bytes:
            text = "hybridkv: %s of staging for stores instead of %s; long prompts are stored later"
            logger.warning(text, format_size(self.staging_bytes), format_size(demand.step_bytes))
        table = _upload(device, tables.rows)
        kernels = device.kernels(tables, table, groups, store_memory)
        self._shared = Shared(device, tables, kernels, table, sizes)
        self._descriptor_ring = Ring(sizes.descriptors, sizes.descriptors // 2)
        self._descriptors = Descriptors(self._shared, sizes.descriptors + sizes.descriptors // 2)
        stores = Staging(self._shared, store_ring, store_memory, sizes.batch)
        # The link takes one batch while others are queued.
        batch_bytes = min(sizes.batch, load_ring.size // sizes.depth)
        loads = Staging(self._shared, load_ring, load_memory, batch_bytes)
        self._stores = StoreLane(self._shared, stores, self._descriptor_ring)
        of_loads = Descriptors(self._shared, entry_bytes * sizes.batch_objects * sizes.depth)
        self._loads = LoadLane(self._shared, loads, of_loads, entry_bytes)
        # Memory may come from the engine, whose queued work still uses it.
        device.wait(device.record(device.current_stream()))
        self._pinning: Jobs[Callable[[], Lane] | None] = Jobs()
        device.start("hybridkv-store", self._stores.run())
        device.start("hybridkv-load", self._loads.run())
        device.start("hybridkv-pin", pinning_lane(self._shared.enter_thread, self._pinning))

    @property
    def is_alive(self) -> bool:
        """Whether nothing ended the copies."""
        return not self._shared.dead

    def take_counters(self) -> dict[str, float]:
        """What was counted since the last call."""
        return self._shared.take_counters()

    def attach(self, arena: Arena, part: PartLayout) -> Slots:
        """An arena to copy from and to."""
        return Slots(arena, part, Pins(arena, self._shared.sizes.pin))

    def pin(self, slots: Slots, reserved_bytes: int) -> None:
        """Pin the arena's memory below `reserved_bytes`, in the pinning lane.

        The engine's thread calls it in each step, so that refused memory is tried again.
        """

        def pin() -> Lane:
            if self.is_alive:
                yield from slots.pins.pin(self._device, reserved_bytes)

        if slots.pins.is_due(reserved_bytes):
            self._pinning.put(pin)

    def store(
        self, slots: Slots, ops: Sequence[CopyOp], done: Callable[[CopyOp, bool], None]
    ) -> None:
        """Launch the gather on the engine's stream; the store lane does the rest."""
        shared, ring = self._shared, self._stores.staging.ring
        size = encoded_bytes(ops)
        at = self._descriptor_ring.take(size)
        placed: list[StoreFlight] = []
        for op in ops:
            place, part_bytes = None, shared.tables.part_bytes(op)
            if not shared.dead and shared.tables.holds(op):
                place = None if at is None else ring.take(part_bytes)
                shared.count("stores_staging_full", place is None)
            if place is None:
                done(op, False)
            else:
                placed.append(StoreFlight(slots, op, part_bytes, place, done=done))
        if at is None or not placed:
            if at is not None:
                self._descriptor_ring.cancel(at, size)
            return
        placed[-1].descriptors = size
        try:
            device, stream, pieces = self._device, self._device.current_stream(), Pieces()
            move = self._descriptors.write(at, placed, self._stores.staging.memory, pieces)
            for target, source, piece_bytes in pieces:
                device.copy(target, source, piece_bytes, stream)
            device.launch(partial(shared.kernels.move, move, True), stream)
            gathered = device.record(stream)
            for flight in placed:
                flight.ready = gathered
        finally:
            # Whatever happened, the store lane gives back what was taken, in its order.
            self._stores.jobs.put(*placed)

    def load(
        self, slots: Slots, ops: Sequence[CopyOp], done: Callable[[HybridKVError | None], None]
    ) -> None:
        """Copy in the load lane, behind the present work of the engine's stream."""
        if not ops:
            done(None)
            return
        ready = self._device.record(self._device.current_stream())
        self._loads.jobs.put(LoadJob(slots, deque(ops), ready, done))

    def detach(self, slots: Slots) -> Latch:
        """Unpin the arena once nothing is copied from or to it, which the latch tells."""
        slots.pins.closed = True
        unpinned = Latch(1)

        def unpin() -> Lane:
            try:
                slots.pins.unpin(self._device)
            finally:
                unpinned.reach()
            yield from over(unpinned)

        drained = Latch(2, lambda: self._pinning.put(unpin))
        self._stores.jobs.put(Barrier(drained.reach))
        self._loads.jobs.put(Barrier(drained.reach))
        return unpinned

    def wait(self, latch: Latch) -> None:
        """Block the caller, which may be any thread, until the latch says so."""
        self._device.wait(latch)

    def drain(self) -> None:
        """Wait until what is queued is over; then nothing of the device's memory is in use."""
        latch = Latch(2)
        for jobs in (self._stores.jobs, self._loads.jobs):
            jobs.put(Barrier(latch.reach))
        self._device.wait(latch)

    def close(self) -> None:
        """Finish what is queued and end the lanes."""
        self.drain()
        for jobs in (self._stores.jobs, self._loads.jobs):
            jobs.put(Barrier(None))
        self._pinning.put(None)

    def check(self) -> None:
        """Assert that nothing is on its way and all staging was given back; for tests."""
        for ring in (self._stores.staging.ring, self._loads.staging.ring, self._descriptor_ring):
            assert not ring.out, f"{ring.out} bytes of staging were not given back"


def _allocate(device: Device, largest: int, wanted: int) -> tuple[Ring, torch.Tensor]:
    """A ring of the wanted size, or of the half, the quarter, ... as the device has room."""
    size = max(wanted, largest)
    while True:
        try:
            return Ring(size, largest), device.allocate(size + largest)
        except DeviceMemoryError:
            if size == largest:
                raise
            size = max(size // 2, largest)


def _upload(device: Device, rows: "array[int]") -> torch.Tensor:
    """The rows on the device. Nothing else runs yet, so the caller waits."""
    start, count = rows.buffer_info()
    size = count * NUMBER_BYTES
    table = device.allocate(size)
    pinned = device.allocate(size, pinned=True)
    ctypes.memmove(pinned.data_ptr(), start, size)
    stream = device.current_stream()
    device.copy(table.data_ptr(), pinned.data_ptr(), size, stream)
    device.wait(device.record(stream))
    return table
