"""The index of the RAM tier: namespaces, their chunks, the objects of each chunk."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from hybridkv.core.coverage import SlotShape
from hybridkv.core.keys import unpack_hashes
from hybridkv.core.packed import SLOT
from hybridkv.core.policies import EvictionClass
from hybridkv.shm.slots import SlotState, slot_bytes


@dataclass(slots=True, eq=False, repr=False)
class Slot:
    """One slot of the arena. A caller may keep it between grant and free, or while it pins it."""

    offset: int
    part_bytes: int
    parts: int
    generation: int
    owner: bytes = b""  # The `owner` of `Store.grant`: HASH_BYTES that name the writing engine.
    state: SlotState = SlotState.WRITING
    pins: int = 0
    entry: "IndexEntry | None" = None  # The object's chunk; None while it is not in the index.
    group_index: int = 0
    parent_short: int = 0  # The `short_hash` of the chunk before, 0 = none.
    tenant: int = 0  # The tenant whose quota the object counts against, 0 = none.
    eviction_class: EvictionClass = EvictionClass.PROMPT  # A read changes it, see `Store.pin`.
    is_retained: bool = False  # True while it is no victim, see `store.retention`.
    is_read: bool = False  # True once a lookup hit the object. Interior ones begin anew as unread.
    replace_on_store: bool = False
    """True after a load failed in which the object took part. The next store of it replaces it."""
    is_counted: bool = False  # True where it counts against its tenant's bound (`Store.tenants`).
    is_forgotten: bool = False
    """True from `Store.forget_object` on. Its bytes are overwritten before the slot is free."""
    in_tiers: int = 0  # A bit for each tier below that has the object, as far as is known.
    queued_in: int = 0  # A bit for each tier to which the object waits to be written.
    used_at: float = 0.0  # The last time that a write or a use of the object went to tiers.
    written_at: float | None = None  # When it became an object of RAM. None = a daemon before knew.
    read_at: float | None = None  # When a lookup hit it last. None = not in this daemon's life.
    packed: bytes = field(init=False)  # Its offset and generation, as in `core.packed.pack_slots`.
    size_bytes: int = field(init=False)  # The bytes of the arena that the slot takes.

    def __post_init__(self) -> None:
        self.packed = SLOT.pack(self.offset, self.generation)
        self.size_bytes = slot_bytes(self.part_bytes, self.parts)

    @property
    def shape(self) -> SlotShape:
        """(bytes of one part, number of parts)."""
        return self.part_bytes, self.parts

    @property
    def is_prefix(self) -> bool:
        """True where every longer hit needs the object as well."""
        return self.entry is not None and self.entry.namespace.prefixes[self.group_index]

    def is_evictable(self) -> bool:
        """Return True where the object may be evicted: nobody reads it, and no child needs it."""
        entry = self.entry
        return entry is not None and not self.pins and not (entry.children and self.is_prefix)


@dataclass(slots=True, eq=False, repr=False)
class IndexEntry:
    """The objects of one chunk, and its place in the tree of prefixes.

    The prefix objects of a chunk with `children` are not evicted: suffixes go before prefixes. A
    child has a greater `number` than its parent, so no client can make a circle in the tree.
    """

    namespace: "Namespace"
    chunk_hash: bytes
    slots: list[Slot | None]  # The objects by group index.
    presence: bytes = b""  # By group index, 1 where `slots` has the object.
    number: int = 0  # Of its first prefix object, with which it joins the tree.
    prefixes: int = 0  # The number of prefix objects among them.
    parent: "IndexEntry | None" = None
    children: int = 0  # The number of entries whose `parent` this is.

    def set_slot(self, group_index: int, slot: Slot | None) -> None:
        """Change the object of a group."""
        self.slots[group_index] = slot
        self.presence = _shared(bytes([slot is not None for slot in self.slots]))


@dataclass(slots=True, eq=False, repr=False)
class RetainedChunk:
    """A chunk that is retained by its name (`store.retention`), whether RAM has it or not."""

    namespace: "Namespace"
    chunk_hash: bytes
    tenant: int  # Its share has the bytes. 0 = those without a cache_salt.
    until: float
    entry: int = 0
    """The number of its one valid entry in the heap by time. 0 = it waits for its followers."""
    is_kept: bool = False  # True while RAM has it, and its bytes are charged.
    charged_bytes: int = 0
    before: "RetainedChunk | None" = None  # The chunk before, which stays as long.
    followers: int = 0  # The number of chunks whose `before` this is.

    def is_remembered(self) -> bool:
        """Return False after its time, or after it was refused."""
        return self.namespace.retained.get(self.chunk_hash) is self


class NewObject(NamedTuple):
    """The object that a written slot becomes when it is committed."""

    group_index: int
    chunk_hash: bytes
    parent: bytes = b""  # The hash of the chunk before; empty where there is none.
    eviction_class: EvictionClass = EvictionClass.PROMPT
    tenant: int = 0  # The tenant whose quota the object counts against, 0 = none.


class PresentChunks(NamedTuple):
    """The objects that a namespace has of a list of chunks."""

    masks: list[bytes]  # By group index, a byte for each chunk: 1 where the object is there.
    entries: list[IndexEntry | None]  # By chunk; None for a chunk without any object.


@dataclass(eq=False, repr=False)
class Namespace:
    """All objects of one identity, by chunk hash."""

    identity: bytes
    gids: tuple[int, ...]
    shapes: tuple[frozenset[SlotShape], ...]
    """Per group, the shapes of its objects. Empty after a recovery, see `Store.regroup`."""
    prefixes: tuple[bool, ...] = ()
    """Per group, True where a hit needs its objects of all chunks before. By default none does."""
    entries: dict[bytes, IndexEntry] = field(default_factory=dict)
    chunks_linked: int = 0  # The `number` of the entry that joined the tree last.
    retained: dict[bytes, RetainedChunk] = field(default_factory=dict)
    """The chunks that are to stay in RAM for a time, by chunk hash."""
    is_current: bool = True
    """False after `Sessions` has forgotten it. Nothing may become an object of it any more."""

    def __post_init__(self) -> None:
        self.prefixes = self.prefixes or (False,) * len(self.gids)
        self.held_objects = [0] * len(self.gids)  # Per group, the number of its objects.
        self.held_bytes = [0] * len(self.gids)  # Per group, the bytes of these objects.
        sizes = (
            max((slot_bytes(*shape) for shape in shapes), default=0)
            for shapes, is_prefix in zip(self.shapes, self.prefixes, strict=False)
            if is_prefix
        )
        self.prefix_bytes = sum(sizes)
        """The most bytes that the prefix objects of one chunk take."""

    def slots_by_chunk(self) -> Iterator[Slot]:
        """Yield the slot of every object, chunk by chunk."""
        for entry in self.entries.values():
            yield from filter(None, entry.slots)

    def find_slot(self, chunk_hash: bytes, group_index: int) -> Slot | None:
        """Return the slot of an object, or None where it is not in the index."""
        entry = self.entries.get(chunk_hash)
        return entry.slots[group_index] if entry is not None else None

    def goes_on(self, chunk_hash: bytes) -> bool:
        """Return False where the index has no chunk after this one, whose prefix objects it has.

        What it lacks, tiers may have, and what comes after that.
        """
        entry = self.entries.get(chunk_hash)
        return entry is None or not entry.prefixes or entry.children > 0

    def present(self, hashes: bytes) -> PresentChunks:
        """Return what the index has of chunks, given their hashes of HASH_BYTES each."""
        entries = list(map(self.entries.get, unpack_hashes(hashes)))
        groups = len(self.gids)
        absent = bytes(groups)
        # Chunk by chunk, a byte for each group.
        rows = b"".join([absent if entry is None else entry.presence for entry in entries])
        return PresentChunks([rows[index::groups] for index in range(groups)], entries)

    def insert(self, slot: Slot, chunk_hash: bytes, group_index: int, parent: bytes = b"") -> None:
        """Put an object into the index. `parent` is the hash of the chunk before."""
        entry = self.entries.get(chunk_hash)
        if entry is None:
            entry = self.entries[chunk_hash] = IndexEntry(self, chunk_hash, [None] * len(self.gids))
        entry.set_slot(group_index, slot)
        slot.entry, slot.group_index = entry, group_index
        self.held_objects[group_index] += 1
        self.held_bytes[group_index] += slot.size_bytes
        if slot.is_prefix:
            if not entry.prefixes and not entry.children:
                # A group of states may come first, and has the last chunk of a prompt alone.
                self.chunks_linked += 1
                entry.number = self.chunks_linked
            entry.prefixes += 1
            before = self.entries.get(parent, entry)
            if entry.parent is None and before.prefixes and before.number < entry.number:
                entry.parent = before
                before.children += 1

    def take_out(self, slot: Slot, entry: IndexEntry) -> IndexEntry | None:
        """Take an object of `entry` out. Returns the entry that lost a child by that, if any."""
        parent = None
        if slot.is_prefix:
            entry.prefixes -= 1
            if not entry.prefixes and entry.parent is not None:
                parent, entry.parent = entry.parent, None
                parent.children -= 1
        entry.set_slot(slot.group_index, None)
        slot.entry = None
        self.held_objects[slot.group_index] -= 1
        self.held_bytes[slot.group_index] -= slot.size_bytes
        if not any(entry.presence):
            del self.entries[entry.chunk_hash]
        return parent


@lru_cache(maxsize=1024)
def _shared(presence: bytes) -> bytes:
    """Return one object for all entries with the same presence. Most entries have one of few."""
    return presence
