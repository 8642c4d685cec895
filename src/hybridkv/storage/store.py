"""The RAM tier: slots of the arena, the index over them, and what goes where room is needed.

Writes headers, the arena's trailer, and the absence of signatures; it never touches payload.  Each single write leaves
an arena that the next daemon can `recover`, wherever this one is killed: a page table entry is set after the slot's
header is whole and cleared before the slot is free, and a torn header is one whose checksum is wrong.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from hybridkv.core.coverage import SlotShape
from hybridkv.core.eviction import Order, Policy
from hybridkv.core.keys import HASH_BYTES
from hybridkv.shm.slots import (
    CHECKSUM_BYTES,
    HEADER_BYTES,
    SlotHeader,
    SlotState,
    checksum_offset,
    slot_bytes,
    tag_of_hash,
    unpack_header,
)
from hybridkv.shm.trailer import Trailer, trailer_bytes
from hybridkv.storage.extents import Extents
from hybridkv.storage.record import TAG_BYTES, Record, RecordName

VAIN_MAX = 8
"""For one slot at most 8 times its size is evicted at once; then nothing is granted for now."""


class Slot:
    """One slot. Owned by the store; others hold it between grant and free, or while they pin it."""

    __slots__ = (
        "entry",
        "generation",
        "group_index",
        "interior",
        "kept",
        "offset",
        "owner",
        "parent_tag",
        "part_bytes",
        "parts",
        "pins",
        "state",
        "tenant",
    )

    def __init__(self, offset: int, shape: SlotShape, generation: int) -> None:
        self.offset = offset
        self.part_bytes, self.parts = shape
        self.generation = generation
        self.state = SlotState.WRITING
        self.pins = 0
        self.owner = b""
        """Whoever may write into it, named as `grant` was told; HASH_BYTES."""
        self.entry: Entry | None = None
        """The chunk of which it is an object."""
        self.group_index = 0
        self.parent_tag = 0
        """Of the chunk before it, see shm.slots."""
        self.tenant = 0
        """Whose quota it counts against; 0 = nobody's."""
        self.interior = False
        """See core.eviction."""
        self.kept = 0
        """A bit for each tier below that has it too, or is about to."""

    @property
    def shape(self) -> SlotShape:
        """See core.coverage."""
        return self.part_bytes, self.parts

    @property
    def size_bytes(self) -> int:
        """Bytes of the arena that the slot takes."""
        return slot_bytes(self.part_bytes, self.parts)

    @property
    def is_prefix(self) -> bool:
        """Whether it is an object that every longer hit needs as well."""
        return self.entry is not None and self.entry.namespace.prefixes[self.group_index]


class Entry:
    """The objects of one chunk, and its place in the tree of prefixes.

    A chunk with `kids` holds up others, so its prefix objects stay: suffixes go before prefixes.  Kids are younger
    than their parent, by `number`, so no chain leads back to its start whatever clients claim.
    """

    __slots__ = ("chunk_hash", "kids", "namespace", "number", "parent", "prefixes", "slots")

    def __init__(self, namespace: "Namespace", chunk_hash: bytes, number: int) -> None:
        self.namespace = namespace
        self.chunk_hash = chunk_hash
        self.number = number
        self.slots: list[Slot | None] = [None] * len(namespace.gids)
        """By group index."""
        self.prefixes = 0
        """Prefix objects among them."""
        self.parent: Entry | None = None
        self.kids = 0


class Namespace:
    """All objects of one identity, by chunk hash."""

    __slots__ = ("entries", "gids", "held_bytes", "held_objects", "identity", "prefixes", "shapes")

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
        """Per group, those that an object of it may have; none where only the arena is known: see `Store.regroup`."""
        self.prefixes = prefixes or (False,) * len(gids)
        """Per group, whether a hit needs its objects of all chunks before."""
        self.entries: dict[bytes, Entry] = {}
        self.held_objects = [0] * len(gids)
        """Per group, objects of the index."""
        self.held_bytes = [0] * len(gids)
        """Per group, what they take."""

    def count(self, slot: "Slot", sign: int) -> None:
        """An object came into the index (1) or left it (-1)."""
        self.held_objects[slot.group_index] += sign
        self.held_bytes[slot.group_index] += sign * slot.size_bytes


class Tenant:
    """What the objects of one tenant take, and their order."""

    __slots__ = ("order", "taken_bytes")

    def __init__(self, order: Order[Slot]) -> None:
        self.order = order
        self.taken_bytes = 0


class Store:
    """Slots, index and eviction over one arena. The byte bound is the arena itself."""

    def __init__(
        self,
        memory: memoryview,
        first_generation: int = 0,
        trailer: Trailer | None = None,
        policy: Policy = Policy.TWO_QUEUES,
        tenant_bytes: int | None = None,
    ) -> None:
        """`memory` is the arena's slots, `trailer` what is behind them (by default one that nobody takes over).

        `first_generation` must be past all generations of earlier lives whose slots somebody may still name.
        `tenant_bytes` bounds what the objects of any one tenant take.
        """
        self._memory = memory
        self.trailer = trailer or Trailer(memoryview(bytearray(trailer_bytes(len(memory)))), len(memory))
        self.bound_bytes = len(memory)
        """How far `extents` will grow. Nothing is evicted while pages below the bound are still being reserved."""
        self.extents = Extents()
        self._slots: dict[int, Slot] = {}
        self._ending: dict[int, Slot] = {}
        """By the offset of their end."""
        self._policy = policy
        self._order: Order[Slot] = Order(policy, len(memory))
        """Of all objects in the index."""
        self._tenant_bytes = tenant_bytes
        self._tenants: dict[int, Tenant] = {}
        # The clock that the first one is taken from may have stepped back since the last life.
        self._generation = max(first_generation, self.trailer.generation)
        self._entries = 0
        """How many were made."""
        self._writing_bytes = 0
        self._committed_bytes = 0
        self._objects = 0
        self.evicted = 0
        self.duplicates = 0
        self.keeper: Callable[[Slot], bool] | None = None
        """Asked before an object is evicted for room; True: it holds it for now, and what goes next is looked for."""
        self.witness: Callable[[Slot, bool], None] | None = None
        """Told of each object that is in the index now (True), or is about to leave it."""
        self.over_quota = 0
        """Objects that were not kept, or made others go, for their tenant's bound."""

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

    @property
    def protected_bytes(self) -> int:
        """Bytes of objects that a scan does not evict."""
        return self._order.protected_bytes

    @property
    def tenants(self) -> int:
        """Tenants that have something in a store that bounds them."""
        return len(self._tenants)

    def get(self, offset: int, generation: int) -> Slot | None:
        """The slot at `offset`, unless it has another generation by now."""
        slot = self._slots.get(offset)
        return slot if slot is not None and slot.generation == generation else None

    @property
    def is_growing(self) -> bool:
        """Whether there will be more room without evicting anything."""
        return self.extents.limit_bytes < self.bound_bytes

    @property
    def memory(self) -> memoryview:
        """The arena's slots."""
        return self._memory

    def record_of(self, slot: Slot) -> Record:
        """What an object is called outside the arena."""
        entry = slot.entry
        assert entry is not None, "only objects of the index have names"
        namespace = entry.namespace
        parent = bytes(TAG_BYTES)
        if slot.is_prefix and slot.parent_tag:
            parent = slot.parent_tag.to_bytes(TAG_BYTES, "little")
        name = RecordName(namespace.identity, namespace.gids[slot.group_index], entry.chunk_hash)
        return Record(name, slot.part_bytes, slot.parts, slot.generation, parent, slot.tenant, slot.interior)

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
            slot.parent_tag, slot.tenant = header.parent_tag, header.tenant
            self._slots[offset] = slot
            self._ending[end] = slot
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
            entry = self._entry(namespace, header.chunk_hash)
            if entry.slots[index] is None:
                self._enter(slot, entry, index, None, interior=False)
            else:
                slot.tenant = 0
                self._return_object(slot)
        return namespaces, writing

    def regroup(
        self,
        namespace: Namespace,
        gids: tuple[int, ...],
        shapes: tuple[frozenset[SlotShape], ...],
        prefixes: tuple[bool, ...],
    ) -> None:
        """Give a recovered namespace the groups of its engine; objects that fit none of them are dropped."""
        places = {gid: index for index, gid in enumerate(gids)}
        for entry in list(namespace.entries.values()):
            for slot in entry.slots:
                index = None if slot is None else places.get(namespace.gids[slot.group_index])
                if slot is not None and (index is None or slot.shape not in shapes[index]):
                    self.drop(slot)
        chunks = {tag_of_hash(chunk_hash): entry for chunk_hash, entry in namespace.entries.items()}
        for entry in namespace.entries.values():
            slots = [slot for slot in entry.slots if slot is not None]
            entry.slots = [None] * len(gids)
            for slot in slots:
                slot.group_index = places[namespace.gids[slot.group_index]]
                entry.slots[slot.group_index] = slot
                if prefixes[slot.group_index]:
                    entry.prefixes += 1
                    self._link(entry, chunks.get(slot.parent_tag))
        namespace.gids, namespace.shapes, namespace.prefixes = gids, shapes, prefixes
        namespace.held_objects, namespace.held_bytes = [0] * len(gids), [0] * len(gids)
        for entry in namespace.entries.values():
            for slot in entry.slots:
                if slot is not None:
                    namespace.count(slot, 1)

    def grow(self, limit_bytes: int) -> None:
        """Pages of the arena below `limit_bytes` exist now."""
        self.extents.grow(limit_bytes)
        self.trailer.reserved_bytes = self.extents.limit_bytes

    def grant(self, shape: SlotShape, count: int, owner: bytes = b"") -> list[Slot]:
        """Up to `count` slots for `owner` to write into, evicting what goes first."""
        size = slot_bytes(*shape)
        granted: list[Slot] = []
        while len(granted) < count:
            offset = self.extents.allocate(size)
            if offset is None:
                if self.is_growing or not self._make_room(size):
                    break
                continue
            self._generation += 1
            self.trailer.generation = self._generation
            slot = Slot(offset, shape, self._generation)
            slot.owner = owner
            self._slots[offset] = slot
            self._ending[offset + size] = slot
            self._writing_bytes += size
            self._unsign(slot)
            self._write_header(slot)
            self.trailer.put(offset, size)
            granted.append(slot)
        return granted

    def commit(
        self,
        slot: Slot,
        namespace: Namespace,
        group_index: int,
        chunk_hash: bytes,
        parent: bytes = b"",
        interior: bool = False,
        tenant: int = 0,
    ) -> bool:
        """Make a written slot an object; False, and the slot is free again, where that object is there already.

        `parent` names the chunk before it, if there is one; see core.eviction for `interior`.  False too where the
        tenant has no room, and nothing of its own that may go.
        """
        assert slot.state is SlotState.WRITING
        known = namespace.entries.get(chunk_hash)
        if known is not None and known.slots[group_index] is not None:
            self.duplicates += 1
            self.free(slot)
            return False
        if tenant and not self._admit(tenant, slot.size_bytes):
            self.over_quota += 1
            self.free(slot)
            return False
        before = namespace.entries.get(parent) if parent else None
        if namespace.prefixes[group_index] and parent and (before is None or before.slots[group_index] is None):
            # What no hit can reach as long as the chunk before it is missing.
            interior = True
        slot.tenant, slot.interior = tenant, interior
        slot.parent_tag = tag_of_hash(parent) if parent else 0
        slot.state = SlotState.COMMITTED
        self._writing_bytes -= slot.size_bytes
        self._committed_bytes += slot.size_bytes
        self._objects += 1
        self._enter(slot, self._entry(namespace, chunk_hash), group_index, before, interior)
        if self.witness is not None:
            self.witness(slot, True)
        self._write_header(slot)
        return True

    def free(self, slot: Slot) -> None:
        """Give an uncommitted slot back."""
        assert slot.state is SlotState.WRITING
        self._writing_bytes -= slot.size_bytes
        self._return(slot)

    def pin(self, slots: Sequence[Slot]) -> None:
        """Keep objects where they are until `unpin`, for somebody reads them."""
        for slot in slots:
            slot.pins += 1
        self._order.use(slots)
        if self._tenants:
            for slot in slots:
                if slot.tenant in self._tenants:
                    self._tenants[slot.tenant].order.use((slot,))

    def hold(self, slots: Iterable[Slot]) -> None:
        """As `pin`, for somebody whose reading says nothing of what is wanted."""
        for slot in slots:
            slot.pins += 1

    def unpin(self, slots: Iterable[Slot]) -> None:
        """End a `pin` or a `hold`."""
        for slot in slots:
            slot.pins -= 1
            if slot.pins:
                continue
            entry = slot.entry
            if entry is None:
                self._return_object(slot)
            elif not entry.kids or not slot.is_prefix:
                self._offer(slot)

    def drop(self, slot: Slot) -> tuple[int, int] | None:
        """Remove an object from the index now, and its bytes as soon as nobody reads them.

        The (offset, size) of the free run that it is in then, if so.
        """
        entry = slot.entry
        if slot.state is not SlotState.COMMITTED or entry is None:
            return None
        if self.witness is not None:
            self.witness(slot, False)
        if slot.is_prefix:
            entry.prefixes -= 1
            if not entry.prefixes:
                self._unlink(entry)
        entry.slots[slot.group_index] = None
        entry.namespace.count(slot, -1)
        if not any(entry.slots):
            del entry.namespace.entries[entry.chunk_hash]
        slot.entry = None
        self._order.remove(slot)
        if slot.tenant in self._tenants:
            self._tenants[slot.tenant].order.remove(slot)
        if not slot.pins:
            return self._return_object(slot)
        self._write_header(slot)
        return None

    def check(self) -> None:
        """Re-derive every counter and the tiling of the arena; raises AssertionError."""
        self.extents.check()
        taken = [(slot.offset, slot.size_bytes) for slot in self._slots.values()]
        end = 0
        for offset, size in sorted(taken + self.extents.runs()):
            assert offset == end, "slots and free runs must tile the arena"
            end = offset + size
        assert end == self.extents.limit_bytes
        kids: Counter[Entry] = Counter()
        for offset, slot in self._slots.items():
            assert slot.offset == offset
            assert slot.pins >= 0
            assert self._ending[offset + slot.size_bytes] is slot
            assert (slot in self._order) == (slot.entry is not None)
            if slot.entry is not None:
                assert slot.state is SlotState.COMMITTED
                assert slot.entry.slots[slot.group_index] is slot
                assert slot.entry.namespace.entries[slot.entry.chunk_hash] is slot.entry
                assert slot.entry.prefixes == sum(one is not None and one.is_prefix for one in slot.entry.slots)
        entries = {slot.entry for slot in self._slots.values() if slot.entry is not None}
        for entry in entries:
            if entry.parent is not None:
                assert entry.prefixes
                assert entry.parent.number < entry.number
                kids[entry.parent] += 1
        assert all(entry.kids == kids[entry] for entry in entries)
        held: dict[Namespace, list[Slot]] = {entry.namespace: [] for entry in entries}
        for slot in self._slots.values():
            if slot.entry is not None:
                held[slot.entry.namespace].append(slot)
        for namespace, slots in held.items():
            for index in range(len(namespace.gids)):
                sizes = [slot.size_bytes for slot in slots if slot.group_index == index]
                assert (namespace.held_objects[index], namespace.held_bytes[index]) == (len(sizes), sum(sizes))
        assert len(self._ending) == len(self._slots)
        assert len(self._order) == sum(slot.entry is not None for slot in self._slots.values())
        self._order.check(self._may_go)
        for number, tenant in self._tenants.items():
            tenant.order.check(self._may_go)
            theirs = [slot for slot in self._slots.values() if slot.tenant == number]
            assert theirs
            assert tenant.taken_bytes == sum(slot.size_bytes for slot in theirs)
            assert len(tenant.order) == sum(slot.entry is not None for slot in theirs)
        assert list(self.trailer.slots()) == sorted(taken)
        states = dict.fromkeys(SlotState, 0)
        for slot in self._slots.values():
            states[slot.state] += slot.size_bytes
        assert states[SlotState.WRITING] == self._writing_bytes
        assert states[SlotState.COMMITTED] == self._committed_bytes
        assert sum(slot.state is SlotState.COMMITTED for slot in self._slots.values()) == self._objects

    # The tree of prefixes, and what may go

    def _entry(self, namespace: Namespace, chunk_hash: bytes) -> Entry:
        entry = namespace.entries.get(chunk_hash)
        if entry is None:
            self._entries += 1
            entry = namespace.entries[chunk_hash] = Entry(namespace, chunk_hash, self._entries)
        return entry

    def _enter(self, slot: Slot, entry: Entry, group_index: int, before: Entry | None, interior: bool) -> None:
        """Put an object into the index, the order and its tenant's."""
        entry.slots[group_index] = slot
        slot.entry, slot.group_index = entry, group_index
        entry.namespace.count(slot, 1)
        if slot.is_prefix:
            entry.prefixes += 1
            self._link(entry, before)
        self._order.add(slot, slot.size_bytes, interior, _name(slot))
        if slot.tenant and self._tenant_bytes is not None:
            tenant = self._tenants.get(slot.tenant)
            if tenant is None:
                tenant = self._tenants[slot.tenant] = Tenant(Order(self._policy, self._tenant_bytes))
            tenant.taken_bytes += slot.size_bytes
            tenant.order.add(slot, slot.size_bytes, interior, _name(slot))

    def _link(self, entry: Entry, parent: Entry | None) -> None:
        if entry.parent is None and parent is not None and parent.prefixes and parent.number < entry.number:
            entry.parent = parent
            parent.kids += 1

    def _unlink(self, entry: Entry) -> None:
        parent, entry.parent = entry.parent, None
        if parent is None:
            return
        parent.kids -= 1
        for slot in parent.slots:
            if slot is not None:
                self._offer(slot)

    def _may_go(self, slot: Slot) -> bool:
        return not slot.pins and slot.entry is not None and not (slot.entry.kids and slot.is_prefix)

    def _offer(self, slot: Slot) -> None:
        if self._may_go(slot):
            self._order.offer(slot)
            if slot.tenant in self._tenants:
                self._tenants[slot.tenant].order.offer(slot)

    def _evict(self, slot: Slot) -> tuple[int, int]:
        """Drop what may go, and what is of no use without it; the (offset, size) of the free run that it is in now."""
        assert slot.entry is not None
        useless = [
            other for other in slot.entry.slots if other is not None and other is not slot and self._may_go(other)
        ]
        lost = [*useless, slot] if slot.is_prefix else [slot]
        for one in lost:
            self._order.remember(one, _name(one))
        for one in lost:
            run = self.drop(one)
        self.evicted += len(lost)
        assert run is not None, "nobody reads it"
        return run

    def _make_room(self, size: int) -> bool:
        """Evict until there is a free run of `size` bytes; False where too little may go."""
        free_bytes = self.extents.free_bytes
        while not self.extents.fits(size):
            vain = self.extents.free_bytes - free_bytes
            victim = self._order.victim(self._may_go) if vain <= VAIN_MAX * size else None
            if victim is None:
                return False
            if self.keeper is not None and self.keeper(victim):
                continue
            run = self._evict(victim)
            if vain >= size:
                self._widen(run, size)
        return True

    def _widen(self, run: tuple[int, int], size: int) -> None:
        """Evict the neighbours of a free run until it has `size` bytes.

        Where objects are smaller than what is wanted, the oldest ones alone leave holes that are all too short.
        """
        offset, length = run
        while length < size:
            sides = (self._slots.get(offset + length), self._ending.get(offset))
            neighbour = next((slot for slot in sides if slot is not None and self._may_go(slot)), None)
            if neighbour is None:
                return
            offset, length = self._evict(neighbour)

    def _admit(self, number: int, size: int) -> bool:
        """Make a tenant's own objects go until it may have `size` bytes more; False where it may not."""
        if self._tenant_bytes is None:
            return True
        while True:
            tenant = self._tenants.get(number)
            if (tenant.taken_bytes if tenant is not None else 0) + size <= self._tenant_bytes:
                return True
            victim = tenant.order.victim(self._may_go) if tenant is not None else None
            if victim is None:
                return False
            self.over_quota += 1
            self._evict(victim)

    def _return_object(self, slot: Slot) -> tuple[int, int]:
        self._committed_bytes -= slot.size_bytes
        self._objects -= 1
        if slot.tenant in self._tenants:
            tenant = self._tenants[slot.tenant]
            tenant.taken_bytes -= slot.size_bytes
            if not tenant.taken_bytes:
                del self._tenants[slot.tenant]
        return self._return(slot)

    def _return(self, slot: Slot) -> tuple[int, int]:
        slot.state = SlotState.FREE
        self._void(slot.offset)
        self.trailer.clear(slot.offset)
        del self._slots[slot.offset]
        del self._ending[slot.offset + slot.size_bytes]
        return self.extents.free(slot.offset, slot.size_bytes)

    def _void(self, offset: int) -> None:
        """End a slot's generation: its header may soon be amid another's payload, where nobody writes for a while."""
        self._memory[offset : offset + HEADER_BYTES] = SlotHeader(SlotState.FREE, 0, 0, 0).pack()

    def _unsign(self, slot: Slot) -> None:
        """What was in its place before must not be taken for the signatures of a writer that makes none."""
        start = slot.offset + checksum_offset(0)
        self._memory[start : slot.offset + checksum_offset(slot.parts)] = bytes(CHECKSUM_BYTES * slot.parts)

    def _write_header(self, slot: Slot) -> None:
        entry = slot.entry
        if entry is None:
            state = SlotState.DROPPED if slot.state is SlotState.COMMITTED else slot.state
            owner = slot.owner or bytes(HASH_BYTES)
            header = SlotHeader(state, slot.generation, slot.parts, slot.part_bytes, namespace=owner)
        else:
            header = SlotHeader(
                slot.state,
                slot.generation,
                slot.parts,
                slot.part_bytes,
                entry.namespace.gids[slot.group_index],
                entry.namespace.identity,
                entry.chunk_hash,
                slot.parent_tag,
                slot.tenant,
            )
        self._memory[slot.offset : slot.offset + HEADER_BYTES] = header.pack()


def _name(slot: Slot) -> bytes:
    """What an object is known by after its eviction; that identities share names does no harm."""
    assert slot.entry is not None
    return slot.entry.chunk_hash + slot.group_index.to_bytes(2, "little")
