"""The index of the RAM tier: namespaces, their chunks, the objects of each chunk."""

from collections import Counter
from collections.abc import Iterator

from hybridkv.core.coverage import SlotShape
from hybridkv.shm.slots import SlotState, short_hash, slot_bytes


class Slot:
    """One slot of the arena. Others hold it between grant and free, or while they pin it."""

    __slots__ = (
        *("entry", "generation", "group_index", "in_tiers", "interior", "offset", "owner"),
        *("parent_short", "part_bytes", "parts", "pins", "state", "tenant"),
    )

    def __init__(self, offset: int, shape: SlotShape, generation: int) -> None:
        self.offset = offset
        self.part_bytes, self.parts = shape
        self.generation = generation
        self.state = SlotState.WRITING
        self.pins = 0
        self.owner = b""
        """The writer, as `Store.grant` was told; HASH_BYTES."""
        self.entry: IndexEntry | None = None
        """The chunk of the object; None while the slot is not in the index."""
        self.group_index = 0
        self.parent_short = 0
        """The `short_hash` of the chunk before; 0 = there is none."""
        self.tenant = 0
        """The tenant whose quota the object counts against; 0 = none."""
        self.interior = False
        """Whether only a shorter hit needs the object, see store.eviction."""
        self.in_tiers = 0
        """A bit for each tier below that has the object, or is about to."""

    @property
    def shape(self) -> SlotShape:
        """The bytes of one part, and the number of parts."""
        return self.part_bytes, self.parts

    @property
    def size_bytes(self) -> int:
        """Bytes of the arena that the slot takes."""
        return slot_bytes(self.part_bytes, self.parts)

    @property
    def is_prefix(self) -> bool:
        """Whether every longer hit needs the object as well."""
        return self.entry is not None and self.entry.namespace.prefixes[self.group_index]

    def may_go(self) -> bool:
        """Whether the object may be evicted: nobody reads it, and no younger chunk needs it."""
        entry = self.entry
        return entry is not None and not self.pins and not (entry.children and self.is_prefix)


class IndexEntry:
    """The objects of one chunk, and its place in the tree of prefixes.

    The prefix objects of a chunk with `children` are not evicted: suffixes go before prefixes. A
    child has a greater `number` than its parent, so the tree has no circle, whatever clients say.
    """

    __slots__ = ("children", "chunk_hash", "namespace", "number", "parent", "prefixes", "slots")

    def __init__(self, namespace: "Namespace", chunk_hash: bytes, number: int) -> None:
        self.namespace = namespace
        self.chunk_hash = chunk_hash
        self.number = number
        self.slots: list[Slot | None] = [None] * len(namespace.gids)
        """The objects by group index."""
        self.prefixes = 0
        """How many of the objects are prefix objects."""
        self.parent: IndexEntry | None = None
        self.children = 0

    def link(self, parent: "IndexEntry | None") -> None:
        """Count a prefix object that is here now, and become a child of `parent` if it fits."""
        self.prefixes += 1
        if parent is None or self.parent is not None:
            return
        if parent.prefixes and parent.number < self.number:
            self.parent = parent
            parent.children += 1

    def unlink(self) -> "IndexEntry | None":
        """Count a prefix object that left; the former parent where it was the last one."""
        self.prefixes -= 1
        if self.prefixes or self.parent is None:
            return None
        parent, self.parent = self.parent, None
        parent.children -= 1
        return parent

    def check(self) -> None:
        """Re-derive what can be derived from the chunk; raises AssertionError."""
        assert any(self.slots)
        assert self.prefixes == sum(slot.is_prefix for slot in filter(None, self.slots))
        if self.parent is not None:
            assert self.prefixes
            assert self.parent.number < self.number


class Namespace:
    """All objects of one identity, by chunk hash."""

    __slots__ = (
        *("chunks_made", "entries", "gids", "held_bytes", "held_objects", "identity"),
        *("is_current", "prefixes", "shapes"),
    )

    def __init__(
        self,
        identity: bytes,
        gids: tuple[int, ...],
        shapes: tuple[frozenset[SlotShape], ...],
        prefixes: tuple[bool, ...] = (),
    ) -> None:
        self.identity = identity
        self.gids = gids
        self.shapes = shapes
        """Per group, the shapes of its objects; empty after a recovery until `Store.regroup`."""
        self.prefixes = prefixes or (False,) * len(gids)
        """Per group, whether a hit needs its objects of all chunks before."""
        self.entries: dict[bytes, IndexEntry] = {}
        self.chunks_made = 0
        self.is_current = True
        """False after its owner has forgotten it: nothing may become an object of it any more."""
        self.held_objects = [0] * len(gids)
        """Per group, objects of the index."""
        self.held_bytes = [0] * len(gids)
        """Per group, the bytes of these objects."""

    def objects(self) -> Iterator[Slot]:
        """Every object, chunk by chunk."""
        for entry in self.entries.values():
            yield from filter(None, entry.slots)

    def get(self, chunk_hash: bytes, group_index: int) -> Slot | None:
        """One object, or None where it is not in the index."""
        entry = self.entries.get(chunk_hash)
        return entry.slots[group_index] if entry is not None else None

    def enter(self, slot: Slot, chunk_hash: bytes, group_index: int, parent: bytes = b"") -> None:
        """Put an object into the index. `parent` is the hash of the chunk before."""
        before = self.entries.get(parent) if parent else None
        entry = self.entries.get(chunk_hash)
        if entry is None:
            self.chunks_made += 1
            entry = self.entries[chunk_hash] = IndexEntry(self, chunk_hash, self.chunks_made)
        entry.slots[group_index] = slot
        slot.entry, slot.group_index = entry, group_index
        self._count(slot, 1)
        if slot.is_prefix:
            entry.link(before)

    def leave(self, slot: Slot, entry: IndexEntry) -> IndexEntry | None:
        """Take an object of `entry` out; the chunk that lost its last child by that, if any."""
        parent = entry.unlink() if slot.is_prefix else None
        entry.slots[slot.group_index] = None
        self._count(slot, -1)
        if not any(entry.slots):
            del self.entries[entry.chunk_hash]
        slot.entry = None
        return parent

    def regroup(self, like: "Namespace") -> None:
        """Take over the groups of `like`; each object must belong to one of them."""
        places = [like.gids.index(gid) if gid in like.gids else -1 for gid in self.gids]
        hashes = {short_hash(chunk_hash): chunk_hash for chunk_hash in self.entries}
        entries, self.entries = self.entries, {}
        self.gids, self.shapes, self.prefixes = like.gids, like.shapes, like.prefixes
        self.held_objects, self.held_bytes = [0] * len(like.gids), [0] * len(like.gids)
        for chunk_hash, entry in entries.items():
            for slot in filter(None, entry.slots):
                parent = hashes.get(slot.parent_short, b"")
                self.enter(slot, chunk_hash, places[slot.group_index], parent)

    def check(self) -> None:
        """Re-derive every count; raises AssertionError."""
        children = Counter(entry.parent for entry in self.entries.values())
        for entry in self.entries.values():
            entry.check()
            assert entry.children == children[entry]
        for index in range(len(self.gids)):
            sizes = [slot.size_bytes for slot in self.objects() if slot.group_index == index]
            held = self.held_objects[index], self.held_bytes[index]
            assert held == (len(sizes), sum(sizes))

    def _count(self, slot: Slot, sign: int) -> None:
        self.held_objects[slot.group_index] += sign
        self.held_bytes[slot.group_index] += sign * slot.size_bytes
