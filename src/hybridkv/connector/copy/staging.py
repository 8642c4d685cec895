"""Device and pinned memory of one direction of the copies, with its streams.

    store   blocks =gather=> ring => slot        or ring => bounce buffer, then memmove => slot
    load    slot => ring =scatter=> blocks       or memmove slot => bounce buffer => ring

Kernels and copies have a stream each, so that they overlap.
"""

import ctypes
import logging
from collections import defaultdict, deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from functools import partial
from threading import Lock
from typing import Any, Generic, TypeVar

import torch

from hybridkv.connector.copy.device import CopyList, Device, Kernels, Lane, Waitable, wait_in_lane
from hybridkv.connector.copy.part import PartLayout
from hybridkv.connector.copy.pins import Pins
from hybridkv.connector.copy.ring import Ring
from hybridkv.connector.copy.tables import ENTRY, NUMBER_BYTES, BlockTables, KernelLaunch, encode
from hybridkv.connector.metrics import COPIES_UNPINNED
from hybridkv.core.copies import CopyOp
from hybridkv.core.metrics import Metric
from hybridkv.shm.arena import Arena
from hybridkv.shm.slots import PIECE_BYTES, piece_digests

logger = logging.getLogger("vllm.hybridkv")


@dataclass(frozen=True, slots=True)
class CopySizes:
    """The sizes of memory and of single copies. Tests make them small."""

    copy_bytes: int = 4 << 20  # The most of one copy: 98 % of the device's rate.
    batch_bytes: int = 128 << 20  # The most of several objects that one call copies.
    batch_objects: int = 64  # The most objects that one call copies.
    pin_bytes: int = 64 << 20  # The most that is pinned in one call.
    bounce_bytes: int = 32 << 20  # The bounce buffer of one direction.
    descriptor_bytes: int = 4 << 20  # Entries and block numbers of the stores in flight.
    load_ring_bytes: int = 512 << 20  # The staging of loads, at least two objects.
    depth: int = 4  # Batches of one direction that are in flight at once.


@dataclass(slots=True)
class DeviceContext:
    """The device of a rank, with all that stores and loads share on it."""

    device: Device
    tables: BlockTables
    kernels: Kernels
    device_rows: torch.Tensor  # The rows of `tables` on the device.
    sizes: CopySizes
    fatal_error: str = ""  # The error that ended the copier; it copies nothing any more.
    _counters: defaultdict[Metric, float] = field(default_factory=lambda: defaultdict(float))
    _lock: Lock = field(default_factory=Lock)

    def count_event(self, metric: Metric, amount: float = 1) -> None:
        """Add to a counter. Any thread may call it."""
        if amount:
            with self._lock:
                self._counters[metric] += amount

    def take_own_counts(self) -> dict[Metric, float]:
        """Return what was counted since the last call."""
        with self._lock:
            counters = dict(self._counters)
            self._counters.clear()
        return counters

    @property
    def digests_on_device(self) -> bool:
        """True if the device hashes: it can, and every part starts on a word of a digest."""
        return self.kernels.can_digest and self.tables.word_bytes == NUMBER_BYTES

    def enter_thread(self) -> bool:
        """Begin a lane's thread. False where it may not call the device, which ends the copier."""
        try:
            self.device.enter_thread()
        except Exception as error:  # noqa: BLE001  # `end` logs it
            self.on_fatal_error(error)
            return False
        return True

    def on_fatal_error(self, error: Exception) -> None:
        """Note and log the error that ended the copier. Later errors are those that follow it."""
        if not self.fatal_error:
            self.fatal_error = str(error) or type(error).__name__
            logger.error("hybridkv: the device failed; this worker copies nothing: %s", error)


@dataclass(frozen=True, slots=True)
class AttachedArena:
    """The arena of one copier, where this rank's parts are in it, and what of it is pinned."""

    arena: Arena
    part: PartLayout
    pins: Pins


@dataclass(slots=True)
class ObjectTransfer:
    """This rank's part of one object on its way between the engine's blocks and a slot."""

    attached: AttachedArena
    op: CopyOp
    part_bytes: int
    ring_offset: int
    entry_address: int = 0  # Of its entry (tables) on the device; `Descriptors.write` sets it.
    index: int = 0  # In its batch; `Staging.assign_indices` sets it.

    @property
    def arena_offset(self) -> int:
        """The part's offset in the arena."""
        return self.attached.part.part_offset(self.op, self.part_bytes)

    @property
    def memory(self) -> memoryview:
        """The part's bytes in the arena."""
        start = self.arena_offset
        return self.attached.arena.memory[start : start + self.part_bytes]


Transfer = TypeVar("Transfer", bound=ObjectTransfer)


@dataclass(slots=True)
class Batch(Generic[Transfer]):
    """Objects whose work is queued together. Their entries are one after another."""

    transfers: deque[Transfer] = field(default_factory=deque)
    index: int = 0  # Below `CopySizes.depth`; batches in flight have different ones.
    pieces_max: int = 0  # The most whole pieces (shm.slots) of an object.
    events: list[Waitable] = field(default_factory=list)
    bounce_copies: list["BounceCopy"] = field(default_factory=list)  # Those of stores.

    @property
    def checksum(self) -> str:
        """The value of `Settings.checksum`, which all parts of a worker share."""
        return self.transfers[0].attached.part.checksum


@dataclass(slots=True)
class BounceCopy:
    """One use of a piece of the bounce buffer."""

    event: Waitable  # Over when the device has copied from or to the buffer.
    arena_address: int  # Where the bytes are copied then (a store); 0 = nowhere any more.
    buffer_address: int
    size: int

    def finish_piece(self) -> Lane:
        """Wait until the buffer's piece is free again. A store's bytes are in the slot then."""
        yield from wait_in_lane(self.event)
        if self.arena_address:
            ctypes.memmove(self.arena_address, self.buffer_address, self.size)
            self.arena_address = 0


class Staging:
    """The ring, bounce buffer and streams of stores, or those of loads."""

    def __init__(
        self, context: DeviceContext, ring: Ring, memory: torch.Tensor, batch_bytes: int
    ) -> None:
        device, sizes = context.device, context.sizes
        self._context = context
        self.ring = ring
        self.memory = memory
        self.copy_stream = device.new_stream()
        # These kernels are short, and would wait for all that the engine has queued.
        self.kernel_stream = device.new_stream(is_urgent=True)
        self._bounce = device.allocate(sizes.bounce_bytes, pinned=True)
        bounce_pieces = sizes.bounce_bytes // sizes.copy_bytes
        self._bounce_copies: list[BounceCopy | None] = [None] * bounce_pieces
        self._next_bounce = self._next_batch = 0
        self._batch_bytes = batch_bytes
        digests_max = (ring.largest // PIECE_BYTES + 1) * sizes.batch_objects
        self._digest_bytes = digests_max * NUMBER_BYTES  # Of one batch.
        # Pinned: kernels write into the host's memory.
        self._digests = device.allocate(self._digest_bytes * sizes.depth, pinned=True)
        self._scratch: torch.Tensor | None = None  # Made when parts are first compared.

    def has_room_for(self, batch: Batch[Any], part_bytes: int) -> bool:
        """Return True if the batch can have one more object of so many bytes."""
        together = sum(transfer.part_bytes for transfer in batch.transfers) + part_bytes
        is_full = len(batch.transfers) == self._context.sizes.batch_objects
        return not batch.transfers or (not is_full and together <= self._batch_bytes)

    def assign_indices(self, batch: Batch[Any]) -> None:
        """Give the batch and its transfers their indices. The batch is complete."""
        batch.index = self._next_batch
        self._next_batch = (self._next_batch + 1) % self._context.sizes.depth
        largest = max(transfer.part_bytes for transfer in batch.transfers)
        batch.pieces_max = largest // PIECE_BYTES
        for index, transfer in enumerate(batch.transfers):
            transfer.index = index

    def copy_parts(self, batch: Batch[Any], copies: CopyList, into_slot: bool) -> Lane:
        """Queue `copies` and the copies of all parts. Their event is the batch's last one."""
        device = self._context.device
        for transfer in batch.transfers:
            start, arena_address = transfer.arena_offset, transfer.attached.arena.address
            staging_address = self.memory.data_ptr() + transfer.ring_offset - start
            pieces = transfer.attached.pins.cut(
                start, transfer.part_bytes, self._context.sizes.copy_bytes
            )
            for offset, size, is_pinned in pieces:
                if not is_pinned:
                    self._context.count_event(COPIES_UNPINNED)
                    yield from self._copy_unpinned(
                        batch, arena_address + offset, staging_address + offset, size, into_slot
                    )
                elif into_slot:
                    copies.append_copy(arena_address + offset, staging_address + offset, size)
                else:
                    copies.append_copy(staging_address + offset, arena_address + offset, size)
        device.copy_all(copies, self.copy_stream)
        batch.events.append(device.record(self.copy_stream))

    def queue_digests(self, batch: Batch[Any]) -> None:
        """Queue the kernel that hashes all whole pieces of the batch's parts in the ring."""
        if batch.pieces_max:
            work = partial(
                self._context.kernels.digest_pieces,
                batch.transfers[0].entry_address,
                len(batch.transfers),
                batch.pieces_max,
                self._digests.data_ptr() + batch.index * self._digest_bytes,
            )
            self._context.device.launch(work, self.kernel_stream)

    def read_digests(self, batch: Batch[Any], transfer: ObjectTransfer) -> bytes:
        """Return the digests of all pieces of a part, once the batch's events are over.

        The host hashes the last piece if it is not a whole one.
        """
        pieces = transfer.part_bytes // PIECE_BYTES
        first = transfer.index * batch.pieces_max
        offset = batch.index * self._digest_bytes + first * NUMBER_BYTES
        whole = ctypes.string_at(self._digests.data_ptr() + offset, pieces * NUMBER_BYTES)
        return whole + piece_digests(transfer.memory[pieces * PIECE_BYTES :])

    def finish_batch(self, batch: Batch[Any]) -> Lane:
        """Wait until all that was queued for a batch is over, and the slots have its bytes."""
        for event in batch.events:
            yield from wait_in_lane(event)
        for bounce_copy in batch.bounce_copies:
            yield from bounce_copy.finish_piece()

    def is_in_slot(self, transfer: ObjectTransfer) -> Generator[Waitable, None, bool]:
        """Copy the part back from the ring. Returns True if the slot has the same bytes."""
        device = self._context.device
        if self._scratch is None:
            self._scratch = device.allocate(self.ring.largest, pinned=True)
        scratch_address = self._scratch.data_ptr()
        ring_address = self.memory.data_ptr() + transfer.ring_offset
        device.copy(scratch_address, ring_address, transfer.part_bytes, self.kernel_stream)
        yield from wait_in_lane(device.record(self.kernel_stream))
        return ctypes.string_at(scratch_address, transfer.part_bytes) == transfer.memory

    def drain_pieces(self) -> Lane:
        """Wait for everything that is queued, and forget what the bounce buffer has."""
        for stream in (self.copy_stream, self.kernel_stream):
            yield from wait_in_lane(self._context.device.record(stream))
        self._bounce_copies = [None] * len(self._bounce_copies)

    def _copy_unpinned(
        self, batch: Batch[Any], arena_address: int, ring_address: int, size: int, into_slot: bool
    ) -> Lane:
        """Copy a piece through the bounce buffer, whose earlier use has to be over."""
        index = self._next_bounce
        self._next_bounce = (index + 1) % len(self._bounce_copies)
        earlier = self._bounce_copies[index]
        if earlier is not None:
            yield from earlier.finish_piece()
        device = self._context.device
        buffer_address = self._bounce.data_ptr() + index * self._context.sizes.copy_bytes
        if into_slot:
            device.copy(buffer_address, ring_address, size, self.copy_stream)
            event = device.record(self.copy_stream)
            bounce_copy = BounceCopy(event, arena_address, buffer_address, size)
            batch.bounce_copies.append(bounce_copy)
        else:
            ctypes.memmove(buffer_address, arena_address, size)
            device.copy(ring_address, buffer_address, size, self.copy_stream)
            event = device.record(self.copy_stream)
            bounce_copy = BounceCopy(event, 0, buffer_address, size)
        self._bounce_copies[index] = bounce_copy


class Descriptors:
    """Entries and block numbers in pinned memory, and their copies on the device."""

    def __init__(self, context: DeviceContext, size: int) -> None:
        self._context = context
        self._host = context.device.allocate(size, pinned=True)
        self._device = context.device.allocate(size)

    def write(
        self,
        offset: int,
        transfers: Sequence[ObjectTransfer],
        staging: torch.Tensor,
        copies: CopyList,
    ) -> KernelLaunch:
        """Write the transfers' entries `offset` bytes into this memory.

        Their copy to the device is added to `copies`. The launch that is returned reads them there.
        """
        tables = self._context.tables
        ops = [transfer.op for transfer in transfers]
        part_offsets = [transfer.ring_offset for transfer in transfers]
        groups = [tables.groups[index] for index in {op.group_index for op in ops}]
        words = encode(tables, ops, part_offsets, staging.data_ptr())
        words_address, count = words.buffer_info()
        size = count * NUMBER_BYTES
        descriptors = self._device[offset : offset + size]
        device_address, host_address = descriptors.data_ptr(), self._host.data_ptr() + offset
        for index, transfer in enumerate(transfers):
            transfer.entry_address = device_address + index * ENTRY * NUMBER_BYTES
        ctypes.memmove(host_address, words_address, size)
        copies.append_copy(device_address, host_address, size)
        return KernelLaunch(
            ops=ops,
            part_offsets=part_offsets,
            staging=staging,
            rows_address=self._context.device_rows.data_ptr(),
            descriptors=descriptors,
            rows_max=max(group.rows for group in groups),
            run_words_max=max(group.run_words for group in groups),
        )
