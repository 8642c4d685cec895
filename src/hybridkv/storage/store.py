"""The RAM tier: slots of the arena, the index over them, and what to evict.

Writes headers into the arena's memory and nothing else; it never touches payload.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from hybridkv.core.coverage import SlotShape
from hybridkv.shm.slots import HEADER_BYTES, SlotHeader, SlotState, slot_bytes
from hybridkv.storage.extents import Extents


class Slot:
    """One slot. Owned by the store; others hold it between grant and free, or while they pin it."""

    __slots__ = (
        "chunk_hash",
        "generation",
        "group_index",
        "namespace",
        "offset",
        "part_bytes",
        "parts",
        "pins",
        "state",
    )

    def __init__(self, offset: int, shape: SlotShape, generation: int) -> None:
        self.offset = offset
        self.part_bytes, self.parts = shape
        self.generation = generation
        self.state = SlotState.WRITING
        self.pins = 0
        self.namespace: Namespace | None = None
        self.chunk_hash = b""
        self.group_index = 0

    @property
    def shape(self) -> SlotShape:
        """See core.coverage."""
        return self.part_bytes, self.parts

    @property
    def size_bytes(self) -> int:
        """Bytes of the arena that the slot takes."""
        return slot_bytes(self.part_bytes, self.parts)


class Namespace:
    """All objects of one identity. `entries[chunk hash][group index]` is the slot, or None."""

    __slots__ = ("entries", "gids", "identity", "shapes")

    def __init__(self, identity: bytes, gids: tuple[int, ...], shapes: tuple[frozenset[SlotShape], ...]) -> None:
        self.identity = identity
        self.gids = gids
        self.shapes = shapes
        """Per group, those that an object of it may have."""
        self.entries: dict[bytes, list[Slot | None]] = {}


class Store:
    """Slots, index and least-recently-used order over one arena. The byte bound is the arena itself."""

    def __init__(self, memory: memoryview, first_generation: int = 0) -> None:
        """`first_generation` must be past all generations of earlier lives whose slots somebody may still name."""
        self._memory = memory
        self.bound_bytes = len(memory)
        """How far `extents` will grow. Nothing is evicted while pages below the bound are still being reserved."""
        self.extents = Extents()
        self._slots: dict[int, Slot] = {}
        self._lru: OrderedDict[int, Slot] = OrderedDict()
        """Committed and unpinned slots by offset, least recently used first."""
        self._generation = first_generation
        self._writing_bytes = 0
        self._committed_bytes = 0
        self._objects = 0
        self.evicted = 0
        self.duplicates = 0

    @property
    def writing_bytes(self) -> int:
        """Bytes in slots that are granted and not yet committed."""
        return self._writing_bytes

    @property
    def committed_bytes(self) -> int:
        """Bytes in slots that hold objects, also those that are only waiting for their readers to leave."""
        return self._committed_bytes

    @property
    def objects(self) -> int:
        """Committed slots."""
        return self._objects

    def get(self, offset: int, generation: int) -> Slot | None:
        """The slot at `offset`, unless it has another generation by now."""
        slot = self._slots.get(offset)
        return slot if slot is not None and slot.generation == generation else None

    def grant(self, shape: SlotShape, count: int) -> list[Slot]:
        """Up to `count` slots to write into, evicting what was used least recently."""
        size = slot_bytes(*shape)
        granted: list[Slot] = []
        while len(granted) < count:
            offset = self.extents.allocate(size)
            if offset is None:
                if not self._lru or self.extents.limit_bytes < self.bound_bytes:
                    break
                self.evicted += 1
                self.drop(next(iter(self._lru.values())))
                continue
            self._generation += 1
            slot = Slot(offset, shape, self._generation)
            self._slots[offset] = slot
            self._writing_bytes += size
            self._write_header(slot)
            granted.append(slot)
        return granted

    def commit(self, slot: Slot, namespace: Namespace, group_index: int, chunk_hash: bytes) -> bool:
        """Make a written slot an object; False, and the slot is free again, where that object is there already."""
        assert slot.state is SlotState.WRITING
        entry = namespace.entries.setdefault(chunk_hash, [None] * len(namespace.gids))
        if entry[group_index] is not None:
            self.duplicates += 1
            self.free(slot)
            return False
        entry[group_index] = slot
        slot.namespace, slot.chunk_hash, slot.group_index = namespace, chunk_hash, group_index
        slot.state = SlotState.COMMITTED
        self._writing_bytes -= slot.size_bytes
        self._committed_bytes += slot.size_bytes
        self._objects += 1
        self._lru[slot.offset] = slot
        self._write_header(slot)
        return True

    def free(self, slot: Slot) -> None:
        """Give an uncommitted slot back."""
        assert slot.state is SlotState.WRITING
        self._writing_bytes -= slot.size_bytes
        self._return(slot)

    def pin(self, slots: Iterable[Slot]) -> None:
        """Keep objects where they are until `unpin`."""
        for slot in slots:
            if not slot.pins:
                self._lru.pop(slot.offset, None)
            slot.pins += 1

    def unpin(self, slots: Sequence[Slot]) -> None:
        """End a `pin`. The first of `slots` becomes the most recently used, so that suffixes go before prefixes."""
        for slot in reversed(slots):
            slot.pins -= 1
            if slot.pins:
                continue
            if slot.namespace is None:
                self._return_object(slot)
            else:
                self._lru[slot.offset] = slot

    def drop(self, slot: Slot) -> None:
        """Remove an object from the index now, and its bytes as soon as nobody reads them."""
        if slot.state is not SlotState.COMMITTED or slot.namespace is None:
            return
        entry = slot.namespace.entries[slot.chunk_hash]
        entry[slot.group_index] = None
        if not any(entry):
            del slot.namespace.entries[slot.chunk_hash]
        slot.namespace = None
        self._lru.pop(slot.offset, None)
        if not slot.pins:
            self._return_object(slot)

    def clear(self) -> int:
        """Drop every object; returns how many."""
        slots = [slot for slot in self._slots.values() if slot.namespace is not None]
        for slot in slots:
            self.drop(slot)
        return len(slots)

    def check(self) -> None:
        """Re-derive every counter and the tiling of the arena; raises AssertionError."""
        self.extents.check()
        taken = [(slot.offset, slot.size_bytes) for slot in self._slots.values()]
        end = 0
        for offset, size in sorted(taken + self.extents.runs()):
            assert offset == end, "slots and free runs must tile the arena"
            end = offset + size
        assert end == self.extents.limit_bytes
        for offset, slot in self._slots.items():
            assert slot.offset == offset
            assert slot.pins >= 0
            listed = slot.state is SlotState.COMMITTED and slot.namespace is not None and not slot.pins
            assert listed == (offset in self._lru)
            if slot.namespace is not None:
                assert slot.namespace.entries[slot.chunk_hash][slot.group_index] is slot
        states = dict.fromkeys(SlotState, 0)
        for slot in self._slots.values():
            states[slot.state] += slot.size_bytes
        assert states[SlotState.WRITING] == self._writing_bytes
        assert states[SlotState.COMMITTED] == self._committed_bytes
        assert sum(slot.state is SlotState.COMMITTED for slot in self._slots.values()) == self._objects

    def _return_object(self, slot: Slot) -> None:
        self._committed_bytes -= slot.size_bytes
        self._objects -= 1
        self._return(slot)

    def _return(self, slot: Slot) -> None:
        slot.state = SlotState.FREE
        self._write_header(slot)
        del self._slots[slot.offset]
        self.extents.free(slot.offset, slot.size_bytes)

    def _write_header(self, slot: Slot) -> None:
        header = SlotHeader(slot.state, slot.generation, slot.parts, slot.part_bytes)
        if slot.namespace is not None:
            gid = slot.namespace.gids[slot.group_index]
            header = SlotHeader(
                slot.state,
                slot.generation,
                slot.parts,
                slot.part_bytes,
                gid,
                slot.namespace.identity,
                slot.chunk_hash,
            )
        self._memory[slot.offset : slot.offset + HEADER_BYTES] = header.pack()
