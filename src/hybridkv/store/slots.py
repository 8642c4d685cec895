"""The slots of one arena, the free runs between them, and their headers in shared memory.

Headers, the arena's trailer and empty signatures are written here; payload is never touched.
After each single write the next daemon can take the arena over, wherever this one is killed: a page
table entry is set after the slot's header is whole and cleared before the slot is free, and a torn
header is one whose checksum is wrong. Offsets and sizes are in bytes, multiples of SLOT_ALIGN.
"""

from bisect import bisect_left, insort
from collections import Counter

from hybridkv.core.coverage import SlotShape
from hybridkv.core.keys import HASH_BYTES
from hybridkv.shm import slots as layout
from hybridkv.shm.slots import HEADER_BYTES, SLOT_ALIGN, SlotHeader, SlotState
from hybridkv.shm.trailer import Trailer
from hybridkv.store.index import Slot


class Extents:
    """Free runs of [0, limit): best fit, neighbours joined.

    The limit grows as pages are reserved; it never shrinks.
    """

    def __init__(self) -> None:
        self.limit_bytes = 0
        self.free_bytes = 0
        self._by_size: list[tuple[int, int]] = []
        """(size, offset) of every free run, ascending: the first that is long enough fits best."""
        self._size_at: dict[int, int] = {}
        self._start_of_end: dict[int, int] = {}

    def grow(self, limit_bytes: int) -> None:
        """Add [limit, limit_bytes) as free space."""
        if limit_bytes > self.limit_bytes:
            start, self.limit_bytes = self.limit_bytes, limit_bytes
            self.free(start, limit_bytes - start)

    def allocate(self, size: int) -> int | None:
        """The offset of `size` bytes, or None where no run is long enough."""
        at = bisect_left(self._by_size, (size, 0))
        if at == len(self._by_size):
            return None
        run, offset = self._by_size[at]
        self._remove(offset, run)
        if run > size:
            self._add(offset + size, run - size)
        return offset

    def fits(self, size: int) -> bool:
        """Whether a run is long enough for `size` bytes."""
        return bool(self._by_size) and self._by_size[-1][0] >= size

    def free(self, offset: int, size: int) -> tuple[int, int]:
        """Give [offset, offset + size) back; the (offset, size) of the free run around it now."""
        after = self._size_at.get(offset + size)
        if after is not None:
            self._remove(offset + size, after)
            size += after
        before = self._start_of_end.get(offset)
        if before is not None:
            self._remove(before, offset - before)
            size += offset - before
            offset = before
        self._add(offset, size)
        return offset, size

    def check(self) -> None:
        """Re-derive every count; raises AssertionError."""
        end = -1
        for offset, size in self.runs():
            assert offset > end, "free runs touch or overlap"
            assert size > 0
            assert offset % SLOT_ALIGN == 0 == size % SLOT_ALIGN
            end = offset + size
        assert end <= self.limit_bytes
        assert sum(self._size_at.values()) == self.free_bytes
        assert self._by_size == sorted((size, offset) for offset, size in self.runs())
        assert self._start_of_end == {offset + size: offset for offset, size in self.runs()}

    def runs(self) -> list[tuple[int, int]]:
        """The (offset, size) of every free run, by offset."""
        return sorted(self._size_at.items())

    def _add(self, offset: int, size: int) -> None:
        insort(self._by_size, (size, offset))
        self._size_at[offset] = size
        self._start_of_end[offset + size] = offset
        self.free_bytes += size

    def _remove(self, offset: int, size: int) -> None:
        del self._by_size[bisect_left(self._by_size, (size, offset))]
        del self._size_at[offset]
        del self._start_of_end[offset + size]
        self.free_bytes -= size


class SlotTable:
    """Every slot of an arena that is not free."""

    def __init__(self, memory: memoryview, trailer: Trailer, first_generation: int) -> None:
        """`memory` has the slots, `trailer` what is behind them."""
        self.memory = memory
        self.trailer = trailer
        self.extents = Extents()
        self.slots: dict[int, Slot] = {}
        """By offset."""
        self._by_end: dict[int, Slot] = {}
        # The clock of `first_generation` may have stepped back since the last daemon.
        self._generation = max(first_generation, trailer.generation)
        self.writing_bytes = 0
        """Bytes in slots that are granted and not yet committed."""
        self.committed_bytes = 0
        """Bytes in slots of objects, also of those that are dropped and still read."""
        self.objects = 0
        """Committed slots."""

    def get(self, offset: int, generation: int) -> Slot | None:
        """The slot at `offset`, or None where none has this generation."""
        slot = self.slots.get(offset)
        return slot if slot is not None and slot.generation == generation else None

    def allocate(self, shape: SlotShape, owner: bytes) -> Slot | None:
        """A slot that `owner` may write into, or None where no free run is long enough."""
        offset = self.extents.allocate(layout.slot_bytes(*shape))
        if offset is None:
            return None
        self._generation += 1
        self.trailer.generation = self._generation
        slot = self._add(Slot(offset, *shape, self._generation, owner))
        # Bytes that were here before must not be taken for signatures of a writer that makes none.
        end = offset + layout.checksum_offset(slot.parts)
        self.memory[offset + HEADER_BYTES : end] = bytes(layout.CHECKSUM_BYTES * slot.parts)
        self.write_header(slot)
        self.trailer.put(offset, slot.size_bytes)
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
        del self.slots[slot.offset]
        del self._by_end[slot.offset + slot.size_bytes]
        return self.extents.free(slot.offset, slot.size_bytes)

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

    def take_over(self) -> list[tuple[Slot, SlotHeader]]:
        """Take over the sound slots of an earlier daemon: each with its header, by offset."""
        limit, extents = self.trailer.reserved_bytes, self.extents
        found: list[tuple[Slot, SlotHeader]] = []
        for offset, size in self.trailer.slots():
            header = layout.unpack_header(bytes(self.memory[offset : offset + HEADER_BYTES]))
            is_sound = False
            if header is not None:
                self._generation = max(self._generation, header.generation)
                is_taken = header.state in (SlotState.WRITING, SlotState.COMMITTED)
                is_sound = is_taken and layout.slot_bytes(header.part_bytes, header.parts) == size
            # What is before `extents.limit_bytes` was taken over, as slots or as free runs.
            if header is None or not is_sound or not extents.limit_bytes <= offset <= limit - size:
                if extents.limit_bytes <= offset <= limit - HEADER_BYTES:
                    self._void(offset)
                self.trailer.clear(offset)
                continue
            extents.grow(offset)
            extents.limit_bytes += size
            slot = self._add(Slot(offset, header.part_bytes, header.parts, header.generation))
            slot.parent_short, slot.tenant = header.parent_short, header.tenant
            if header.state is SlotState.COMMITTED:
                self.committed(slot)
            else:
                slot.owner = header.namespace
            found.append((slot, header))
        extents.grow(limit)
        return found

    def check(self) -> None:
        """Re-derive every counter and the tiling of the arena; raises AssertionError."""
        self.extents.check()
        slots = self.slots.values()
        taken = sorted((slot.offset, slot.size_bytes) for slot in slots)
        end = 0
        for offset, size in sorted(taken + self.extents.runs()):
            assert offset == end, "slots and free runs must tile the arena"
            end = offset + size
        assert end == self.extents.limit_bytes
        assert list(self.trailer.slots()) == taken
        assert self.slots == {slot.offset: slot for slot in slots}
        assert self._by_end == {slot.offset + slot.size_bytes: slot for slot in slots}
        held: Counter[SlotState] = Counter()
        for slot in slots:
            held[slot.state] += slot.size_bytes
        assert held[SlotState.WRITING] == self.writing_bytes
        assert held[SlotState.COMMITTED] == self.committed_bytes
        assert sum(slot.state is SlotState.COMMITTED for slot in slots) == self.objects

    def _add(self, slot: Slot) -> Slot:
        self.slots[slot.offset] = slot
        self._by_end[slot.offset + slot.size_bytes] = slot
        self.writing_bytes += slot.size_bytes
        return slot

    def _void(self, offset: int) -> None:
        """End a slot's generation: its header may soon be amid a payload that is written later."""
        self.memory[offset : offset + HEADER_BYTES] = SlotHeader(SlotState.FREE, 0, 0, 0).pack()
