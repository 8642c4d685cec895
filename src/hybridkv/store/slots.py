"""The slots of one arena: which are taken, where there is room, and their headers in shared memory.

Headers, the arena's trailer and empty signatures are written here; payload is never touched.
After each single write the next daemon can `recover` the arena, wherever this one is killed: a page
table entry is set after the slot's header is whole and cleared before the slot is free, and a torn
header is one whose checksum is wrong.
"""

from collections.abc import Iterator

from hybridkv.core.coverage import SlotShape
from hybridkv.core.keys import HASH_BYTES
from hybridkv.shm.slots import (
    CHECKSUM_BYTES,
    HEADER_BYTES,
    SlotHeader,
    SlotState,
    checksum_offset,
    slot_bytes,
    unpack_header,
)
from hybridkv.shm.trailer import Trailer
from hybridkv.store.extents import Extents
from hybridkv.store.index import Slot


class SlotTable:
    """Every slot of an arena that is not free, by its offset."""

    def __init__(self, memory: memoryview, trailer: Trailer, first_generation: int) -> None:
        """`memory` has the slots, `trailer` what is behind them."""
        self.memory = memory
        self.trailer = trailer
        self.extents = Extents()
        self._slots: dict[int, Slot] = {}
        self._by_end: dict[int, Slot] = {}
        # The clock of `first_generation` may have stepped back since the last daemon.
        self._generation = max(first_generation, trailer.generation)
        self.writing_bytes = 0
        self.committed_bytes = 0
        self.objects = 0

    def __iter__(self) -> Iterator[Slot]:
        return iter(self._slots.values())

    def __len__(self) -> int:
        return len(self._slots)

    def get(self, offset: int, generation: int) -> Slot | None:
        """The slot at `offset`, or None where none has this generation."""
        slot = self._slots.get(offset)
        return slot if slot is not None and slot.generation == generation else None

    def allocate(self, shape: SlotShape, owner: bytes) -> Slot | None:
        """A slot that `owner` may write into, or None where no free run is long enough."""
        size = slot_bytes(*shape)
        offset = self.extents.allocate(size)
        if offset is None:
            return None
        self._generation += 1
        self.trailer.generation = self._generation
        slot = Slot(offset, shape, self._generation)
        slot.owner = owner
        self._add(slot)
        # Bytes that were here before must not be taken for signatures of a writer that makes none.
        signatures = slice(offset + checksum_offset(0), offset + checksum_offset(slot.parts))
        self.memory[signatures] = bytes(CHECKSUM_BYTES * slot.parts)
        self.write_header(slot)
        self.trailer.put(offset, size)
        return slot

    def committed(self, slot: Slot) -> None:
        """Count a written slot as an object; its header is to be written next."""
        self.writing_bytes -= slot.size_bytes
        slot.state = SlotState.COMMITTED
        self.committed_bytes += slot.size_bytes
        self.objects += 1

    def free(self, slot: Slot) -> tuple[int, int]:
        """Give a slot back; the (offset, size) of the free run that it is part of now."""
        if slot.state is SlotState.WRITING:
            self.writing_bytes -= slot.size_bytes
        else:
            self.committed_bytes -= slot.size_bytes
            self.objects -= 1
        slot.state = SlotState.FREE
        self._void(slot.offset)
        self.trailer.clear(slot.offset)
        del self._slots[slot.offset]
        del self._by_end[slot.offset + slot.size_bytes]
        return self.extents.free(slot.offset, slot.size_bytes)

    def neighbours(self, offset: int, size: int) -> list[Slot]:
        """The slots that touch the run of `size` bytes at `offset`: the one behind it first."""
        touching = self._slots.get(offset + size), self._by_end.get(offset)
        return [slot for slot in touching if slot is not None]

    def write_header(self, slot: Slot) -> None:
        """Write what the slot is now into shared memory."""
        entry, common = slot.entry, (slot.generation, slot.parts, slot.part_bytes)
        if entry is None:
            is_dropped = slot.state is SlotState.COMMITTED
            state = SlotState.DROPPED if is_dropped else slot.state
            header = SlotHeader(state, *common, namespace=slot.owner or bytes(HASH_BYTES))
        else:
            gid = entry.namespace.gids[slot.group_index]
            name = gid, entry.namespace.identity, entry.chunk_hash
            header = SlotHeader(slot.state, *common, *name, slot.parent_short, slot.tenant)
        self.memory[slot.offset : slot.offset + HEADER_BYTES] = header.pack()

    def recover(self) -> list[tuple[Slot, SlotHeader]]:
        """Take over the sound slots of an earlier daemon: each with its header, by offset."""
        limit, end = self.trailer.reserved_bytes, 0
        found: list[tuple[Slot, SlotHeader]] = []
        for offset, size in self.trailer.slots():
            header = unpack_header(bytes(self.memory[offset : offset + HEADER_BYTES]))
            if header is not None:
                self._generation = max(self._generation, header.generation)
            is_inside = end <= offset <= limit - size
            if header is None or not is_inside or not _is_sound(header, size):
                if end <= offset <= limit - HEADER_BYTES:
                    self._void(offset)
                self.trailer.clear(offset)
                continue
            end = offset + size
            slot = Slot(offset, (header.part_bytes, header.parts), header.generation)
            slot.parent_short, slot.tenant = header.parent_short, header.tenant
            self._add(slot)
            if header.state is SlotState.COMMITTED:
                self.committed(slot)
            else:
                slot.owner = header.namespace
            found.append((slot, header))
        self.extents.take_over(limit, [(slot.offset, slot.size_bytes) for slot, _ in found])
        return found

    def check(self) -> None:
        """Re-derive every counter and the tiling of the arena; raises AssertionError."""
        self.extents.check()
        taken = sorted((slot.offset, slot.size_bytes) for slot in self)
        end = 0
        for offset, size in sorted(taken + self.extents.runs()):
            assert offset == end, "slots and free runs must tile the arena"
            end = offset + size
        assert end == self.extents.limit_bytes
        assert list(self.trailer.slots()) == taken
        assert self._slots == {slot.offset: slot for slot in self}
        assert self._by_end == {slot.offset + slot.size_bytes: slot for slot in self}
        states: dict[SlotState, list[int]] = {state: [] for state in SlotState}
        for slot in self:
            states[slot.state].append(slot.size_bytes)
        assert sum(states[SlotState.WRITING]) == self.writing_bytes
        assert sum(states[SlotState.COMMITTED]) == self.committed_bytes
        assert len(states[SlotState.COMMITTED]) == self.objects

    def _add(self, slot: Slot) -> None:
        self._slots[slot.offset] = slot
        self._by_end[slot.offset + slot.size_bytes] = slot
        self.writing_bytes += slot.size_bytes

    def _void(self, offset: int) -> None:
        """End a slot's generation: its header may soon be amid a payload that is written later."""
        self.memory[offset : offset + HEADER_BYTES] = SlotHeader(SlotState.FREE, 0, 0, 0).pack()


def _is_sound(header: SlotHeader, size: int) -> bool:
    is_taken = header.state in (SlotState.WRITING, SlotState.COMMITTED)
    return is_taken and slot_bytes(header.part_bytes, header.parts) == size
