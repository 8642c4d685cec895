"""The RAM tier: slots of the arena, the index over them, and what to evict.

Writes headers and the arena's trailer and nothing else; it never touches payload.  Each single write leaves an arena
that the next daemon can `recover`, wherever this one is killed: a page table entry is set after the slot's header is
whole and cleared before the slot is free, and a torn header is one whose checksum is wrong.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from hybridkv.core.coverage import SlotShape
from hybridkv.core.keys import HASH_BYTES
from hybridkv.shm.slots import HEADER_BYTES, SlotHeader, SlotState, slot_bytes, unpack_header
from hybridkv.shm.trailer import Trailer, trailer_bytes
from hybridkv.storage.extents import Extents


class Slot:
    """One slot. Owned by the store; others hold it between grant and free, or while they pin it."""

    __slots__ = (
        "chunk_hash",
        "generation",
        "group_index",
        "namespace",
        "offset",
        "owner",
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
        self.owner = b""
        """Whoever may write into it, named as `grant` was told; HASH_BYTES."""
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
        """Per group, those that an object of it may have; none where only the arena is known: see `Store.regroup`."""
        self.entries: dict[bytes, list[Slot | None]] = {}


class Store:
    """Slots, index and least-recently-used order over one arena. The byte bound is the arena itself."""

    def __init__(self, memory: memoryview, first_generation: int = 0, trailer: Trailer | None = None) -> None:
        """`memory` is the arena's slots, `trailer` what is behind them (by default one that nobody takes over).

        `first_generation` must be past all generations of earlier lives whose slots somebody may still name.
        """
        self._memory = memory
        self.trailer = trailer or Trailer(memoryview(bytearray(trailer_bytes(len(memory)))), len(memory))
        self.bound_bytes = len(memory)
        """How far `extents` will grow. Nothing is evicted while pages below the bound are still being reserved."""
        self.extents = Extents()
        self._slots: dict[int, Slot] = {}
        self._lru: OrderedDict[int, Slot] = OrderedDict()
        """Committed and unpinned slots by offset, least recently used first."""
        # The clock that the first one is taken from may have stepped back since the last life.
        self._generation = max(first_generation, self.trailer.generation)
        self._writing_bytes = 0
        self._committed_bytes = 0
        self._objects = 0
        self.evicted = 0
        self.duplicates = 0

    def __len__(self) -> int:
        """Bytes of all slots that the arena has room for."""
        return len(self._memory)

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

    def recover(self) -> tuple[dict[bytes, Namespace], list[Slot]]:
        """Take over what an earlier daemon left: (namespaces by identity, slots that may still be written into).

        To be called once, first.  Objects are found again in namespaces whose groups are those that were found; the
        oldest is the least recently used.
        """
        limit = self.trailer.reserved_bytes
        namespaces: dict[bytes, Namespace] = {}
        writing: list[Slot] = []
        objects: list[tuple[Slot, SlotHeader]] = []
        used: list[tuple[int, int]] = []
        end = 0
        for offset, size in self.trailer.slots():
            header = unpack_header(bytes(self._memory[offset : offset + HEADER_BYTES]))
            sound = header is not None and slot_bytes(header.part_bytes, header.parts) == size
            kept = header is not None and header.state in (SlotState.WRITING, SlotState.COMMITTED)
            if header is not None:
                self._generation = max(self._generation, header.generation)
            if header is None or not sound or not kept or offset < end or offset + size > limit:
                if end <= offset <= limit - HEADER_BYTES:
                    self._void(offset)
                self.trailer.clear(offset)
                continue
            slot = Slot(offset, (header.part_bytes, header.parts), header.generation)
            slot.state = header.state
            used.append((offset, size))
            end = offset + size
            self._slots[offset] = slot
            if header.state is SlotState.WRITING:
                slot.owner = header.namespace
                self._writing_bytes += size
                writing.append(slot)
            else:
                self._committed_bytes += size
                self._objects += 1
                objects.append((slot, header))
        self.extents.take_over(limit, used)
        gids: dict[bytes, set[int]] = {}
        for _, header in objects:
            gids.setdefault(header.namespace, set()).add(header.gid)
        for identity, found in gids.items():
            namespaces[identity] = Namespace(identity, tuple(sorted(found)), ())
        for slot, header in sorted(objects, key=lambda found: found[0].generation):
            namespace = namespaces[header.namespace]
            index = namespace.gids.index(header.gid)
            entry = namespace.entries.setdefault(header.chunk_hash, [None] * len(namespace.gids))
            if entry[index] is not None:
                self._return_object(slot)
                continue
            entry[index] = slot
            slot.namespace, slot.chunk_hash, slot.group_index = namespace, header.chunk_hash, index
            self._lru[slot.offset] = slot
        return namespaces, writing

    def regroup(self, namespace: Namespace, gids: tuple[int, ...], shapes: tuple[frozenset[SlotShape], ...]) -> None:
        """Give a recovered namespace the groups of its engine; objects that fit none of them are dropped."""
        places = {gid: index for index, gid in enumerate(gids)}
        for slots in list(namespace.entries.values()):
            for slot in slots:
                index = None if slot is None else places.get(namespace.gids[slot.group_index])
                if slot is not None and (index is None or slot.shape not in shapes[index]):
                    self.drop(slot)
        for chunk_hash, slots in namespace.entries.items():
            entry: list[Slot | None] = [None] * len(gids)
            for slot in slots:
                if slot is not None:
                    index = places[namespace.gids[slot.group_index]]
                    entry[index] = slot
            namespace.entries[chunk_hash] = entry
        for slots in namespace.entries.values():
            for index, slot in enumerate(slots):
                if slot is not None:
                    slot.group_index = index
        namespace.gids, namespace.shapes = gids, shapes

    def grow(self, limit_bytes: int) -> None:
        """Pages of the arena below `limit_bytes` exist now."""
        self.extents.grow(limit_bytes)
        self.trailer.reserved_bytes = self.extents.limit_bytes

    def grant(self, shape: SlotShape, count: int, owner: bytes = b"") -> list[Slot]:
        """Up to `count` slots for `owner` to write into, evicting what was used least recently."""
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
            self.trailer.generation = self._generation
            slot = Slot(offset, shape, self._generation)
            slot.owner = owner
            self._slots[offset] = slot
            self._writing_bytes += size
            self._write_header(slot)
            self.trailer.put(offset, size)
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
        if slot.pins:
            self._write_header(slot)
        else:
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
        assert list(self.trailer.slots()) == sorted(taken)
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
        self._void(slot.offset)
        self.trailer.clear(slot.offset)
        del self._slots[slot.offset]
        self.extents.free(slot.offset, slot.size_bytes)

    def _void(self, offset: int) -> None:
        """End a slot's generation: its header may soon be amid another's payload, where nobody writes for a while."""
        self._memory[offset : offset + HEADER_BYTES] = SlotHeader(SlotState.FREE, 0, 0, 0).pack()

    def _write_header(self, slot: Slot) -> None:
        state = SlotState.DROPPED if slot.state is SlotState.COMMITTED and slot.namespace is None else slot.state
        owner = slot.owner or bytes(HASH_BYTES)
        header = SlotHeader(state, slot.generation, slot.parts, slot.part_bytes, namespace=owner)
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
