"""The RAM tier: objects in the slots of an arena, and their eviction where room is needed.

Headers of slots, the arena's trailer and empty signatures are written here; payload is never
touched.  After each single write the next daemon can take the arena over, wherever this one is
killed: a page table entry is set after the slot's header is whole and cleared before the slot is
free, and a torn header is one whose checksum is wrong.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from hybridkv.core.coverage import SlotShape
from hybridkv.core.keys import HASH_BYTES
from hybridkv.core.policies import EvictionClass, EvictionPolicy
from hybridkv.shm import slots as layout
from hybridkv.shm.slots import HEADER_BYTES, SlotHeader, SlotState, short_hash, slot_bytes
from hybridkv.shm.trailer import Trailer, trailer_bytes
from hybridkv.store.eviction import EvictionQueue
from hybridkv.store.extents import Extents
from hybridkv.store.index import Namespace, Slot

VAIN_MAX = 8
"""For one slot at most 8 times its size is evicted at once; then nothing is granted for now."""


class Store:
    """Slots, index and eviction over one arena. The byte bound is the arena itself."""

    def __init__(
        self,
        memory: memoryview,
        first_generation: int = 0,
        trailer: Trailer | None = None,
        policy: EvictionPolicy = EvictionPolicy.TWO_QUEUES,
        tenant_bytes: int | None = None,
    ) -> None:
        """`memory` is the arena's slots, `trailer` what is behind them (by default its own).

        `first_generation` must be past all generations of earlier daemons whose slots somebody may
        still name. `tenant_bytes` bounds what the objects of any one tenant take.
        """
        if trailer is None:
            trailer = Trailer(memoryview(bytearray(trailer_bytes(len(memory)))), len(memory))
        self._memory = memory
        self.trailer = trailer
        # The clock of `first_generation` may have stepped back since the last daemon.
        self._generation = max(first_generation, trailer.generation)
        self.extents = Extents()
        self.bound_bytes = len(memory)
        """The limit to which `extents` will grow. While it is below, nothing is evicted."""
        self.slots: dict[int, Slot] = {}  # Every slot that is not free, by its offset.
        self._by_end: dict[int, Slot] = {}
        self.queue: EvictionQueue[Slot] = EvictionQueue(policy, len(memory))
        self._tenant_bytes = tenant_bytes
        new_queue = partial(EvictionQueue[Slot], policy, tenant_bytes or 0)
        self._tenant_queues: defaultdict[int, EvictionQueue[Slot]] = defaultdict(new_queue)
        self.tenants: Counter[int] = Counter()
        """By bounded tenant the bytes of its objects, also of those that are dropped and read."""
        self.writing_bytes = 0  # Bytes in slots that are granted and not yet committed.
        self.committed_bytes = 0
        """Bytes in slots of objects, also of those that are dropped and still read."""
        self.objects = 0  # Committed slots.
        self.evicted = 0
        self.duplicates = 0
        self.over_quota = 0  # Objects not stored, or evicted, for their tenant's bound.
        self.before_evict: Callable[[Slot], bool] | None = None
        """Called before an object is evicted for room; True = it has pinned the object instead."""
        self.on_change: Callable[[Slot, bool], None] | None = None
        """Called with each object that has entered the index (True), or is about to leave it."""

    def __len__(self) -> int:
        """Bytes of all slots that the arena has room for."""
        return len(self._memory)

    @property
    def is_growing(self) -> bool:
        """Whether there will be more room without evicting anything."""
        return self.extents.limit_bytes < self.bound_bytes

    def get(self, offset: int, generation: int) -> Slot | None:
        """The slot at `offset`, or None where none has this generation."""
        slot = self.slots.get(offset)
        return slot if slot is not None and slot.generation == generation else None

    def recover(self) -> tuple[dict[bytes, Namespace], list[Slot]]:
        """Take over an earlier daemon's: (namespaces by identity, slots that may be written into).

        To be called once, first. Until `regroup` a namespace has the groups of the objects found.
        Of those that were read, and of those that were not, the oldest is the least recently used.
        """
        found = self._sound_slots()
        objects = [known for known in found if known[1].state is SlotState.COMMITTED]
        gids: defaultdict[bytes, set[int]] = defaultdict(set)
        for _, header in objects:
            gids[header.namespace].add(header.gid)
        namespaces = {of: Namespace(of, tuple(sorted(known)), ()) for of, known in gids.items()}
        for slot, header in sorted(objects, key=lambda known: known[0].generation):
            namespace = namespaces[header.namespace]
            index = namespace.gids.index(header.gid)
            if namespace.get(header.chunk_hash, index) is None:
                slot.is_read = header.use == layout.USE_READ
                if header.use in tuple(EvictionClass):
                    slot.eviction_class = EvictionClass(header.use)
                self._enter(slot, namespace, index, header.chunk_hash)
                for queue in self._queues_of(slot) if slot.is_read else ():
                    queue.use((slot,))
                    queue.offer(slot)
            else:
                self.free(slot)
        return namespaces, [slot for slot, header in found if header.state is SlotState.WRITING]

    def _sound_slots(self) -> list[tuple[Slot, SlotHeader]]:
        """Take over the sound slots of an earlier daemon, none as an object yet, by offset."""
        limit, extents = self.trailer.reserved_bytes, self.extents
        found: list[tuple[Slot, SlotHeader]] = []
        for offset, size in self.trailer.slots():
            header = layout.unpack_header(bytes(self._memory[offset : offset + HEADER_BYTES]))
            is_sound = False
            if header is not None:
                self._generation = max(self._generation, header.generation)
                is_taken = header.state in (SlotState.WRITING, SlotState.COMMITTED)
                is_sound = is_taken and slot_bytes(header.part_bytes, header.parts) == size
            # What is before `extents.limit_bytes` was taken over, as slots or as free runs.
            if header is None or not is_sound or not extents.limit_bytes <= offset <= limit - size:
                if extents.limit_bytes <= offset <= limit - HEADER_BYTES:
                    self._void(offset)
                self.trailer.put(offset, 0)
                continue
            extents.grow(offset)
            extents.limit_bytes += size
            slot = Slot(offset, header.part_bytes, header.parts, header.generation)
            slot.parent_short, slot.tenant = header.parent_short, header.tenant
            self._add(slot)
            if header.state is SlotState.WRITING:
                slot.owner = header.namespace
            found.append((slot, header))
        extents.grow(limit)
        return found

    def regroup(self, recovered: Namespace, like: Namespace) -> Namespace:
        """Move the objects of a recovered namespace to `like`; those that fit no group are dropped.

        Returns `like`.
        """
        hashes = {short_hash(chunk_hash): chunk_hash for chunk_hash in recovered.entries}
        for chunk_hash, entry in list(recovered.entries.items()):
            for slot in filter(None, list(entry.slots)):
                gid = recovered.gids[slot.group_index]
                index = like.gids.index(gid) if gid in like.gids else -1
                if index >= 0 and slot.shape in like.shapes[index]:
                    like.enter(slot, chunk_hash, index, hashes.get(slot.parent_short, b""))
                else:
                    self.drop(slot)
        return like

    def grow(self, limit_bytes: int) -> None:
        """Pages of the arena below `limit_bytes` exist now."""
        self.extents.grow(limit_bytes)
        self.trailer.reserved_bytes = self.extents.limit_bytes

    def grant(self, shape: SlotShape, count: int, owner: bytes = b"") -> list[Slot]:
        """At most `count` slots that `owner` may write into; objects are evicted for them."""
        granted: list[Slot] = []
        size, (_, parts) = slot_bytes(*shape), shape
        while len(granted) < count:
            offset = self.extents.allocate(size)
            if offset is None:
                if self.is_growing or not self._make_room(size):
                    break
                continue
            self._generation += 1
            self.trailer.generation = self._generation
            slot = Slot(offset, *shape, self._generation, owner)
            self._add(slot)
            # Bytes that were here must not be taken for signatures of a writer that makes none.
            start, end = offset + HEADER_BYTES, offset + layout.checksum_offset(parts)
            self._memory[start:end] = bytes(end - start)
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
        eviction_class: EvictionClass = EvictionClass.PROMPT,
        tenant: int = 0,
    ) -> bool:
        """Make a written slot an object. False, and the slot is free, where the object exists.

        One that is doubted, and that nobody reads, goes: the new one's writer has just signed it.
        `parent` is the hash of the chunk before, if any; see store.eviction for `eviction_class`.
        False too where the tenant has no room, and no object of its own that may go.
        """
        assert slot.state is SlotState.WRITING
        there = namespace.get(chunk_hash, group_index)
        is_kept = there is not None and (not there.is_doubted or there.pins > 0)
        if is_kept or not self._make_room_of(tenant, slot.size_bytes):
            self.duplicates += is_kept
            self.over_quota += not is_kept
            self.free(slot)
            return False
        if there is not None:
            self.drop(there)
        is_suffix = namespace.prefixes[group_index] and parent
        if is_suffix and namespace.get(parent, group_index) is None:
            # As long as the chunk before it is missing, no hit can reach it.
            eviction_class = EvictionClass.INTERIOR
        slot.tenant, slot.eviction_class = tenant, eviction_class
        slot.parent_short = short_hash(parent) if parent else 0
        self._enter(slot, namespace, group_index, chunk_hash, parent)
        if self.on_change is not None:
            self.on_change(slot, True)
        self._write_header(slot)
        return True

    def free(self, slot: Slot) -> tuple[int, int]:
        """Give back a slot that the index does not have, and the free run that it is part of."""
        assert slot.entry is None
        if slot.state is SlotState.WRITING:
            self.writing_bytes -= slot.size_bytes
        else:
            self.committed_bytes -= slot.size_bytes
            self.objects -= 1
            if slot.tenant in self.tenants:
                self.tenants[slot.tenant] -= slot.size_bytes
                if not self.tenants[slot.tenant]:
                    del self.tenants[slot.tenant], self._tenant_queues[slot.tenant]
        slot.state = SlotState.FREE
        self._void(slot.offset)
        self.trailer.put(slot.offset, 0)
        del self.slots[slot.offset]
        del self._by_end[slot.offset + slot.size_bytes]
        return self.extents.free(slot.offset, slot.size_bytes)

    def pin(self, slots: Sequence[Slot]) -> None:
        """Keep objects where they are until `unpin`, and count them as used."""
        self.hold(slots)
        self.queue.use(slots)
        for slot in slots:
            slot.eviction_class = EvictionClass.PROMPT
            if not slot.is_read:
                slot.is_read = True
                layout.write_read(self._memory, slot.offset)
        for slot in slots if self.tenants else ():
            if slot.tenant in self.tenants:
                self._tenant_queues[slot.tenant].use((slot,))

    def hold(self, slots: Iterable[Slot]) -> None:
        """Keep objects where they are until `unpin`, for a reader that does not count as use."""
        for slot in slots:
            slot.pins += 1

    def unpin(self, slots: Iterable[Slot]) -> None:
        """End a `pin` or a `hold`."""
        for slot in slots:
            slot.pins -= 1
            if slot.entry is not None:
                self._offer(slot)
            elif not slot.pins:
                self.free(slot)

    def drop(self, slot: Slot) -> tuple[int, int] | None:
        """Take an object out of the index now, and free its bytes as soon as nobody reads them.

        The (offset, size) of the free run that it is part of then; None while it is read.
        """
        entry = slot.entry
        if entry is None:
            return None
        if self.on_change is not None:
            self.on_change(slot, False)
        parent = entry.namespace.leave(slot, entry)
        for queue in self._queues_of(slot):
            queue.remove(slot)
        for freed in filter(None, parent.slots if parent is not None else ()):
            self._offer(freed)
        if not slot.pins:
            return self.free(slot)
        self._write_header(slot)
        return None

    def _evict(self, slot: Slot) -> tuple[int, int]:
        """Drop an object and what is of no use without it; the free run that it is part of then."""
        assert slot.entry is not None
        others = filter(None, slot.entry.slots if slot.is_prefix else ())
        lost = [*(one for one in others if one is not slot and one.may_go()), slot]
        for one in lost:
            self.queue.remember(one, _ghost_key(one))
            run = self.drop(one)
        self.evicted += len(lost)
        assert run is not None, "nobody reads it"
        return run

    def _make_room(self, size: int) -> bool:
        """Evict until there is a free run of `size` bytes; False where too little may go."""
        free_bytes = self.extents.free_bytes
        while not self.extents.fits(size):
            vain = self.extents.free_bytes - free_bytes
            victim = self.queue.victim(Slot.may_go) if vain <= VAIN_MAX * size else None
            if victim is None:
                return False
            if self.before_evict is not None and self.before_evict(victim):
                continue
            offset, length = self._evict(victim)
            # Where objects are smaller than `size`, the oldest ones leave holes that are too short.
            while vain >= size > length:
                touching = filter(None, (self.slots.get(offset + length), self._by_end.get(offset)))
                neighbour = next((slot for slot in touching if slot.may_go()), None)
                if neighbour is None:
                    break
                offset, length = self._evict(neighbour)
        return True

    def _make_room_of(self, tenant: int, size: int) -> bool:
        """Evict a tenant's own objects until it may have `size` bytes more; False if it may not."""
        if not tenant or self._tenant_bytes is None:
            return True
        while self.tenants[tenant] + size > self._tenant_bytes:
            queue = self._tenant_queues.get(tenant)
            victim = queue.victim(Slot.may_go) if queue is not None else None
            if victim is None:
                return False
            self.over_quota += 1
            self._evict(victim)
        return True

    def _queues_of(self, slot: Slot) -> Iterator[EvictionQueue[Slot]]:
        yield self.queue
        if slot.tenant in self.tenants:
            yield self._tenant_queues[slot.tenant]

    def _enter(
        self, slot: Slot, namespace: Namespace, index: int, chunk_hash: bytes, parent: bytes = b""
    ) -> None:
        """Make a written slot an object of the index; its header is to be written next."""
        self.writing_bytes -= slot.size_bytes
        slot.state = SlotState.COMMITTED
        self.committed_bytes += slot.size_bytes
        self.objects += 1
        namespace.enter(slot, chunk_hash, index, parent)
        if slot.tenant and self._tenant_bytes is not None:
            self.tenants[slot.tenant] += slot.size_bytes
        for queue in self._queues_of(slot):
            queue.add(slot, slot.size_bytes, slot.eviction_class, _ghost_key(slot))

    def _offer(self, slot: Slot) -> None:
        """Consider an object for eviction again, if it may go from now on."""
        if slot.may_go():
            for queue in self._queues_of(slot):
                queue.offer(slot)

    def _add(self, slot: Slot) -> None:
        self.slots[slot.offset] = slot
        self._by_end[slot.offset + slot.size_bytes] = slot
        self.writing_bytes += slot.size_bytes

    def _write_header(self, slot: Slot) -> None:
        """Write what the slot is now into shared memory."""
        entry, common = slot.entry, (slot.generation, slot.parts, slot.part_bytes)
        if entry is None:
            is_dropped = slot.state is SlotState.COMMITTED
            state = SlotState.DROPPED if is_dropped else slot.state
            header = SlotHeader(state, *common, namespace=slot.owner or bytes(HASH_BYTES))
        else:
            gid = entry.namespace.gids[slot.group_index]
            name = gid, entry.namespace.identity, entry.chunk_hash
            use = layout.USE_READ if slot.is_read else slot.eviction_class
            header = SlotHeader(slot.state, *common, *name, slot.parent_short, slot.tenant, use)
        self._memory[slot.offset : slot.offset + HEADER_BYTES] = header.pack()

    def _void(self, offset: int) -> None:
        """End a slot's generation: its header may soon be amid a payload that is written later."""
        self._memory[offset : offset + HEADER_BYTES] = SlotHeader(SlotState.FREE, 0, 0, 0).pack()


def _ghost_key(slot: Slot) -> bytes:
    """The bytes by which an object is known after its eviction; identities may share them."""
    assert slot.entry is not None
    return slot.entry.chunk_hash + slot.group_index.to_bytes(2, "little")
