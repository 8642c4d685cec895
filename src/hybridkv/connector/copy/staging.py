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

from hybridkv.connector.copy.device import Device, Kernels, Lane, Pieces, Waitable, over
from hybridkv.connector.copy.part import PartLayout
from hybridkv.connector.copy.pins import Pins
from hybridkv.connector.copy.ring import Ring
from hybridkv.connector.copy.tables import ENTRY, NUMBER_BYTES, BlockTables, Move, encode
from hybridkv.core.copies import CopyOp
from hybridkv.shm.arena import Arena
from hybridkv.shm.slots import PIECE_BYTES, piece_digests

logger = logging.getLogger("vllm.hybridkv")


@dataclass(frozen=True, slots=True)
class CopySizes:
    """Bytes of memory and of single copies. Tests make them small."""

    piece: int = 4 << 20  # The most of one copy: 98 % of the device's rate.
    batch: int = 128 << 20  # The most of several objects that one call copies.
    batch_objects: int = 64
    pin: int = 64 << 20  # The most that is pinned in one call.
    bounce: int = 32 << 20  # The bounce buffer of one direction.
    descriptors: int = 4 << 20  # Entries and block numbers of the stores that are on their way.
    load_ring: int = 512 << 20  # The staging of loads, at least two objects.
    depth: int = 4  # Batches of one direction that are on their way at once.


@dataclass(slots=True)
class Shared:
    """What both directions use."""

    device: Device
    tables: BlockTables
    kernels: Kernels
    table: torch.Tensor  # The rows of `tables` on the device.
    sizes: CopySizes
    dead: str = ""  # The error that ended the copier; it copies nothing any more.
    _counters: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    _lock: Lock = field(default_factory=Lock)

    def count(self, name: str, more: float = 1) -> None:
        """Add to a counter; any thread may."""
        if more:
            with self._lock:
                self._counters[name] += more

    def take_counters(self) -> dict[str, float]:
        """What was counted since the last call."""
        with self._lock:
            taken = dict(self._counters)
            self._counters.clear()
        return taken

    @property
    def digests_on_device(self) -> bool:
        """Whether the device hashes: it can, and every part starts on a word of a digest."""
        return self.kernels.digests and self.tables.word_bytes == NUMBER_BYTES

    def enter_thread(self) -> bool:
        """Begin a lane's thread. False where it may not call the device, which ends the copier."""
        try:
            self.device.enter_thread()
        except Exception as error:  # noqa: BLE001  # `die` logs it
            self.die(error)
            return False
        return True

    def die(self, error: Exception) -> None:
        """Note the error that ended the copier."""
        if not self.dead:
            self.dead = str(error) or type(error).__name__
            logger.error("hybridkv: the device failed; this worker copies nothing: %s", error)


@dataclass(frozen=True, slots=True)
class Slots:
    """The arena of one copier, and how its parts are signed."""

    arena: Arena
    part: PartLayout
    pins: Pins


@dataclass(slots=True)
class Flight:
    """An object on its way."""

    slots: Slots
    op: CopyOp
    size: int  # Bytes of the part.
    place: int  # In the ring.
    ready: Waitable | None = None
    """From then on the ring has the part (a store), or the blocks may be written (a load)."""
    entry: int = 0  # The address of its entry (tables) on the device.
    number: int = 0  # In its batch.

    @property
    def start(self) -> int:
        """The part's offset in the arena."""
        return self.slots.part.payload(self.op, self.size)

    @property
    def memory(self) -> memoryview:
        """The part's bytes in the arena."""
        return self.slots.arena.memory[self.start : self.start + self.size]


F = TypeVar("F", bound=Flight)


@dataclass(slots=True)
class Batch(Generic[F]):
    """Objects whose work is queued together. Their entries are one after another."""

    flights: deque[F] = field(default_factory=deque)
    number: int = 0  # Of `CopySizes.depth`.
    pieces: int = 0  # The most whole pieces (shm.slots) of an object.
    events: list[Waitable] = field(default_factory=list)
    bounced: list["Bounced"] = field(default_factory=list)

    @property
    def checksum(self) -> str:
        """The value of `Settings.checksum`, which is one for all parts of a worker."""
        return self.flights[0].slots.part.checksum


@dataclass(slots=True)
class Bounced:
    """One use of a piece of the bounce buffer."""

    event: Waitable
    to: int  # The address in the arena that waits for the bytes; 0 if the device has them.
    source: int
    size: int

    def settle(self) -> Lane:
        """Wait until the buffer's piece is free again."""
        yield from over(self.event)
        if self.to:
            ctypes.memmove(self.to, self.source, self.size)
            self.to = 0


class Staging:
    """One direction."""

    def __init__(self, shared: Shared, ring: Ring, memory: torch.Tensor, batch_bytes: int) -> None:
        device, sizes = shared.device, shared.sizes
        self._shared = shared
        self.ring = ring
        self.memory = memory
        self.copies = device.new_stream()
        # These kernels are short, and would wait for all that the engine has queued.
        self.programs = device.new_stream(is_urgent=True)
        self._bounce = device.allocate(sizes.bounce, pinned=True)
        self._bounced: list[Bounced | None] = [None] * (sizes.bounce // sizes.piece)
        self._next_bounce = self._next_batch = 0
        self._batch_bytes = batch_bytes
        self._digests_bytes = (ring.largest // PIECE_BYTES + 1) * sizes.batch_objects * NUMBER_BYTES
        # Pinned: kernels write into the host's memory.
        self._digests = device.allocate(self._digests_bytes * sizes.depth, pinned=True)
        self._scratch: torch.Tensor | None = None

    def takes(self, batch: Batch[Any], size: int) -> bool:
        """Whether one more object of so many bytes may be in the batch."""
        together = sum(flight.size for flight in batch.flights) + size
        is_full = len(batch.flights) == self._shared.sizes.batch_objects
        return not batch.flights or (not is_full and together <= self._batch_bytes)

    def enter(self, batch: Batch[Any]) -> None:
        """Give the batch and its flights their numbers."""
        batch.number = self._next_batch
        self._next_batch = (self._next_batch + 1) % self._shared.sizes.depth
        batch.pieces = max(flight.size for flight in batch.flights) // PIECE_BYTES
        for number, flight in enumerate(batch.flights):
            flight.number = number

    def copy(self, batch: Batch[Any], pieces: Pieces, into_slot: bool) -> Lane:
        """Queue `pieces` and the copies of all parts; the batch has their event at its end."""
        device = self._shared.device
        for flight in batch.flights:
            base, address = flight.start, flight.slots.arena.address
            staging = self.memory.data_ptr() + flight.place - base
            cut = flight.slots.pins.cut(base, flight.size, self._shared.sizes.piece)
            for start, size, is_pinned in cut:
                if not is_pinned:
                    self._shared.count("copies_unpinned")
                    yield from self._copy_unpinned(
                        batch, address + start, staging + start, size, into_slot
                    )
                elif into_slot:
                    pieces.add(address + start, staging + start, size)
                else:
                    pieces.add(staging + start, address + start, size)
        device.copy_all(pieces, self.copies)
        batch.events.append(device.record(self.copies))

    def digest(self, batch: Batch[Any]) -> None:
        """Queue the digests of all parts' whole pieces."""
        if batch.pieces:
            entries, objects = batch.flights[0].entry, len(batch.flights)
            out = self._digests.data_ptr() + batch.number * self._digests_bytes
            work = partial(self._shared.kernels.digest, entries, objects, batch.pieces, out)
            self._shared.device.launch(work, self.programs)

    def digests(self, batch: Batch[Any], flight: Flight) -> bytes:
        """All digests, once the batch's events are over. The last piece may not be whole."""
        pieces = flight.size // PIECE_BYTES
        at = batch.number * self._digests_bytes + flight.number * batch.pieces * NUMBER_BYTES
        whole = ctypes.string_at(self._digests.data_ptr() + at, pieces * NUMBER_BYTES)
        return whole + piece_digests(flight.memory[pieces * PIECE_BYTES :])

    def settle(self, batch: Batch[Any]) -> Lane:
        """Wait until all that was queued for a batch is over."""
        for event in batch.events:
            yield from over(event)
        for bounced in batch.bounced:
            yield from bounced.settle()

    def matches(self, flight: Flight) -> Generator[Waitable, None, bool]:
        """Copy the part back from the ring; return whether the slot has the same bytes."""
        device = self._shared.device
        if self._scratch is None:
            self._scratch = device.allocate(self.ring.largest, pinned=True)
        address = self._scratch.data_ptr()
        device.copy(address, self.memory.data_ptr() + flight.place, flight.size, self.programs)
        yield from over(device.record(self.programs))
        return ctypes.string_at(address, flight.size) == flight.memory

    def drain(self) -> Lane:
        """Wait for everything that is queued, and forget what the bounce buffer has."""
        for stream in (self.copies, self.programs):
            yield from over(self._shared.device.record(stream))
        self._bounced = [None] * len(self._bounced)

    def _copy_unpinned(
        self, batch: Batch[Any], at: int, ring: int, size: int, into_slot: bool
    ) -> Lane:
        number = self._next_bounce
        self._next_bounce = (number + 1) % len(self._bounced)
        earlier = self._bounced[number]
        if earlier is not None:
            yield from earlier.settle()
        device, buffer = self._shared.device, number * self._shared.sizes.piece
        buffer += self._bounce.data_ptr()
        if into_slot:
            device.copy(buffer, ring, size, self.copies)
            bounced = Bounced(device.record(self.copies), at, buffer, size)
            batch.bounced.append(bounced)
        else:
            ctypes.memmove(buffer, at, size)
            device.copy(ring, buffer, size, self.copies)
            bounced = Bounced(device.record(self.copies), 0, buffer, size)
        self._bounced[number] = bounced


class Descriptors:
    """Entries and block numbers in pinned memory, and their copies on the device."""

    def __init__(self, shared: Shared, size: int) -> None:
        self._shared = shared
        self._host = shared.device.allocate(size, pinned=True)
        self._device = shared.device.allocate(size)

    def write(
        self, at: int, flights: Sequence[Flight], staging: torch.Tensor, pieces: Pieces
    ) -> Move:
        """Write the flights' entries `at` bytes from our start; add the copy to the device."""
        tables = self._shared.tables
        ops, places = [flight.op for flight in flights], [flight.place for flight in flights]
        groups = [tables.groups[index] for index in {op.group_index for op in ops}]
        words = encode(tables, ops, places, staging.data_ptr())
        start, count = words.buffer_info()
        size = count * NUMBER_BYTES
        descriptors = self._device[at : at + size]
        address = descriptors.data_ptr()
        for number, flight in enumerate(flights):
            flight.entry = address + number * ENTRY * NUMBER_BYTES
        ctypes.memmove(self._host.data_ptr() + at, start, size)
        pieces.add(address, self._host.data_ptr() + at, size)
        return Move(
            ops,
            places,
            staging,
            self._shared.table.data_ptr(),
            descriptors,
            rows=max(group.rows for group in groups),
            run_words=max(group.run_words for group in groups),
        )
