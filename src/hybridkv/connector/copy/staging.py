"""Device and pinned memory of one direction of the copies, with its streams.

    store   blocks =gather=> ring => slot        or ring => bounce buffer, then memmove => slot
    load    slot => ring =scatter=> blocks       or memmove slot => bounce buffer => ring

Kernels and copies have a stream each, so that they overlap.
"""

import ctypes
import logging
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from threading import Lock

import torch

from hybridkv.connector.copy.device import Device, Kernels, Lane, Stream, Waitable, over
from hybridkv.connector.copy.part import PartLayout
from hybridkv.connector.copy.pins import Pins
from hybridkv.connector.copy.ring import Ring
from hybridkv.connector.copy.tables import NUMBER_BYTES, BlockTables, Move, encode
from hybridkv.core.copies import CopyOp
from hybridkv.shm.arena import Arena
from hybridkv.shm.slots import PIECE_BYTES, piece_digests

logger = logging.getLogger("vllm.hybridkv")


@dataclass(frozen=True, slots=True)
class CopySizes:
    """Bytes of memory and of single copies. Tests make them small."""

    piece: int = 4 << 20
    """The most of one copy: 98 % of the device's rate, and what a copy of the engine waits for."""
    pin: int = 64 << 20  # The most that is pinned in one call.
    bounce: int = 32 << 20  # The bounce buffer of one direction.
    descriptors: int = 4 << 20  # Entries and block numbers of the stores that are on their way.
    load_ring: int = 256 << 20  # The staging of loads, at least two objects.
    depth: int = 16  # Objects of one direction that are on their way at once.


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
    number: int = 0  # Of `CopySizes.depth`.
    events: list[Waitable] = field(default_factory=list)
    bounced: list["Bounced"] = field(default_factory=list)

    @property
    def start(self) -> int:
        """The part's offset in the arena."""
        return self.slots.part.payload(self.op, self.size)

    @property
    def memory(self) -> memoryview:
        """The part's bytes in the arena."""
        return self.slots.arena.memory[self.start : self.start + self.size]


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

    def __init__(self, shared: Shared, ring: Ring, memory: torch.Tensor) -> None:
        device, sizes = shared.device, shared.sizes
        self._shared = shared
        self.ring = ring
        self.memory = memory
        self.copies = device.new_stream()
        # These kernels are short, and would wait for all that the engine has queued.
        self.programs = device.new_stream(is_urgent=True)
        self._bounce = device.allocate(sizes.bounce, pinned=True)
        self._bounced: list[Bounced | None] = [None] * (sizes.bounce // sizes.piece)
        self._next_bounce = self._next_flight = 0
        self._digests_bytes = (ring.largest // PIECE_BYTES + 1) * NUMBER_BYTES
        self._digests = device.allocate(self._digests_bytes * sizes.depth)
        self._digests_read = device.allocate(self._digests_bytes * sizes.depth, pinned=True)
        self._scratch: torch.Tensor | None = None

    def enter(self, flight: Flight) -> None:
        """Give the flight its number."""
        flight.number = self._next_flight
        self._next_flight = (self._next_flight + 1) % self._shared.sizes.depth

    def copy(self, flight: Flight, into_slot: bool) -> Lane:
        """Queue the copies of a part; `flight.events` and `flight.bounced` are over after them."""
        device, arena = self._shared.device, flight.slots.arena
        staging, base = self.memory.data_ptr() + flight.place, flight.start
        pieces = flight.slots.pins.cut(base, flight.size, self._shared.sizes.piece)
        for start, size, is_pinned in pieces:
            at, ring = arena.address + start, staging + start - base
            if is_pinned:
                to, source = (at, ring) if into_slot else (ring, at)
                device.copy(to, source, size, self.copies)
            else:
                self._shared.count("copies_unpinned")
                yield from self._copy_unpinned(flight, at, ring, size, into_slot)
        flight.events.append(device.record(self.copies))

    def digest(self, flight: Flight) -> None:
        """Queue the digests of the part's whole pieces, and their copy to the host."""
        pieces = flight.size // PIECE_BYTES
        if not pieces:
            return
        at = flight.number * self._digests_bytes
        out, read = self._digests.data_ptr() + at, self._digests_read.data_ptr() + at
        staging, kernels = self.memory.data_ptr() + flight.place, self._shared.kernels
        device = self._shared.device
        device.launch(partial(kernels.digest, staging, pieces, out), self.programs)
        device.copy(read, out, pieces * NUMBER_BYTES, self.programs)

    def digests(self, flight: Flight) -> bytes:
        """All digests, once the flight's events are over. The last piece may not be whole."""
        pieces = flight.size // PIECE_BYTES
        at = self._digests_read.data_ptr() + flight.number * self._digests_bytes
        whole = ctypes.string_at(at, pieces * NUMBER_BYTES)
        return whole + piece_digests(flight.memory[pieces * PIECE_BYTES :])

    def settle(self, flight: Flight) -> Lane:
        """Wait until all that was queued for a flight is over."""
        for event in flight.events:
            yield from over(event)
        for bounced in flight.bounced:
            yield from bounced.settle()

    def matches(self, flight: Flight, compared: list[bool]) -> Lane:
        """Copy the part back from the ring; append whether the slot has the same bytes."""
        device = self._shared.device
        if self._scratch is None:
            self._scratch = device.allocate(self.ring.largest, pinned=True)
        address = self._scratch.data_ptr()
        device.copy(address, self.memory.data_ptr() + flight.place, flight.size, self.programs)
        yield from over(device.record(self.programs))
        compared.append(ctypes.string_at(address, flight.size) == flight.memory)

    def drain(self) -> Lane:
        """Wait for everything that is queued, and forget what the bounce buffer has."""
        for stream in (self.copies, self.programs):
            yield from over(self._shared.device.record(stream))
        self._bounced = [None] * len(self._bounced)

    def _copy_unpinned(
        self, flight: Flight, at: int, ring: int, size: int, into_slot: bool
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
            flight.bounced.append(bounced)
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

    def move(
        self,
        at: int,
        ops: Sequence[CopyOp],
        places: Sequence[int],
        staging: torch.Tensor,
        stream: Stream,
        directions: Sequence[bool],
    ) -> None:
        """Queue moves of `ops` (True: a gather). Their descriptors start `at` bytes behind ours."""
        shared, device = self._shared, self._shared.device
        groups = [shared.tables.groups[index] for index in {op.group_index for op in ops}]
        words = encode(shared.tables, ops, places, staging.data_ptr())
        start, count = words.buffer_info()
        size = count * NUMBER_BYTES
        descriptors = self._device[at : at + size]
        ctypes.memmove(self._host.data_ptr() + at, start, size)
        device.copy(descriptors.data_ptr(), self._host.data_ptr() + at, size, stream)
        move = Move(
            ops,
            places,
            staging,
            shared.table.data_ptr(),
            descriptors,
            rows=max(group.rows for group in groups),
            run_words=max(group.run_words for group in groups),
        )
        for is_gather in directions:
            device.launch(partial(shared.kernels.move, move, is_gather), stream)
