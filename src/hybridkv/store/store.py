"""The RAM tier: objects in the slots of an arena, and their eviction where room is needed.

The store writes headers of slots, the arena's trailer and empty signatures, and never payload.
Wherever the daemon is killed, the next one can take the arena over. A page table entry is set after
the slot's header is whole and cleared before the slot is free. A torn header has a wrong checksum.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from hybridkv.core.coverage import SlotShape
from hybridkv.core.keys import HASH_BYTES
from hybridkv.core.policies import EvictionClass, EvictionPolicy
from hybridkv.shm import slots as layout
from hybridkv.shm.slots import HEADER_BYTES, SlotHeader, SlotState, short_hash, slot_bytes
from hybridkv.shm.trailer import Trailer, trailer_bytes
from hybridkv.store.eviction import EvictionQueue
from hybridkv.store.extents import Extents, FreeRun
from hybridkv.store.index import Namespace, NewObject, Slot
from hybridkv.store.retention import RetainedChunks

EVICTION_WASTE_MAX = 8
"""To grant one slot, at most 8 times its size is evicted. Then the grant ends without it."""
RETAINED_WASTE = 4  # After 4 times its size, retained objects are evicted with their neighbours.


class RecoveredSlot(NamedTuple):
    """A slot that an earlier daemon left, with its header."""

    slot: Slot
    header: SlotHeader


class Store:
    """The slots, index and eviction of one arena, whose size is the bound of them all."""

    def __init__(
        self,
        memory: memoryview,
        first_generation: int = 0,
        trailer: Trailer | None = None,
        policy: EvictionPolicy = EvictionPolicy.TWO_QUEUES,
        tenant_bytes: int | None = None,
    ) -> None:
        """`memory` is the arena's slots, `trailer` what follows them (by default its own).

        `first_generation` must be past all generations of earlier daemons whose slots a client may
        still name. `tenant_bytes` bounds the bytes of any one tenant's objects.
        """
        if trailer is None:
            trailer = Trailer(memoryview(bytearray(trailer_bytes(len(memory)))), len(memory))
        self._memory = memory
        self.trailer = trailer
        # The clock of `first_generation` may have stepped back since the last daemon.
        self.generation = max(first_generation, trailer.generation)
        """The latest generation that a slot was given."""
        self.extents = Extents()
        self.bound_bytes = len(memory)
        """The limit to which `extents` will grow. Until then nothing is evicted."""
        self.slots: dict[int, Slot] = {}  # Every slot that is not free, by its offset.
        self.by_end: dict[int, Slot] = {}  # The same slots, by the offset of their end.
        self.queue: EvictionQueue[Slot] = EvictionQueue(policy, len(memory))
        self.tenant_bytes = tenant_bytes
        new_queue = partial(EvictionQueue[Slot], policy, tenant_bytes or 0)
        self.tenant_queues: defaultdict[int, EvictionQueue[Slot]] = defaultdict(new_queue)
        self.retention = RetainedChunks(lambda: self.bound_bytes, tenant_bytes, self._set_retained)
        self.tenants: Counter[int] = Counter()
        """By bounded tenant the bytes of its objects, also of those that are dropped and read."""
        self.writing_bytes = 0  # Bytes in slots that are granted and not yet committed.
        self.committed_bytes = 0
        """Bytes in slots of objects, also of those that are dropped and still read."""
        self.objects = 0  # The number of slots that `committed_bytes` counts.
        self.due_when_unpinned: set[Slot] = set()
        """Pinned slots that are freed or offered for eviction at their last `unpin`."""
        self.evicted = 0
        self.duplicates = 0
        self.retained_evicted = 0
        """Retained objects that went before their time: they lay between too short free runs."""
        self.over_quota = 0  # Objects not stored, or evicted, for their tenant's bound.
        self.before_evict: Callable[[Slot], bool] | None = None
        """Called before an object is evicted for room. It may pin the object and return True."""
        self.on_change: Callable[[Slot, bool], None] | None = None
        """Called with each object that has entered the index (True), or is about to leave it."""

    def __len__(self) -> int:
        """The bytes of all slots that the arena has room for."""
        return len(self._memory)

    @property
    def is_growing(self) -> bool:
        """True while pages are still reserved, which makes room without evicting anything."""
        return self.extents.limit_bytes < self.bound_bytes

    def slot_at(self, offset: int, generation: int) -> Slot | None:
        """Return the slot at `offset`, or None where none has this generation."""
        slot = self.slots.get(offset)
        return slot if slot is not None and slot.generation == generation else None

    def recover_slots(self) -> tuple[dict[bytes, Namespace], list[Slot]]:
        """Take over the slots of an earlier daemon. To be called once, before anything else.

        Returns the namespaces by identity, and the slots into which a worker may still write. Until
        `regroup` a namespace has the groups of the objects found. The order of eviction goes by
        generation, first among the objects that were not read, then among those that were.
        """
        recovered = self._recover_slots()
        objects = [known for known in recovered if known.header.state is SlotState.COMMITTED]
        gids: defaultdict[bytes, set[int]] = defaultdict(set)
        for known in objects:
            gids[known.header.namespace].add(known.header.gid)
        namespaces = {
            identity: Namespace(identity, tuple(sorted(its_gids)), ())
            for identity, its_gids in gids.items()
        }
        for slot, header in sorted(objects, key=lambda known: known.slot.generation):
            namespace = namespaces[header.namespace]
            index = namespace.gids.index(header.gid)
            if namespace.find_slot(header.chunk_hash, index) is None:
                slot.is_read = header.use == layout.USE_READ
                if header.use in tuple(EvictionClass):
                    slot.eviction_class = EvictionClass(header.use)
                self._enter(slot, namespace, index, header.chunk_hash)
                for queue in self._queues_of(slot) if slot.is_read else ():
                    queue.mark_used((slot,))
                    queue.offer(slot)
            else:
                self.free_slot(slot)
        writing = [known.slot for known in recovered if known.header.state is SlotState.WRITING]
        return namespaces, writing

    def _recover_slots(self) -> list[RecoveredSlot]:
        """Take over the sound slots of an earlier daemon, by offset. None is an object yet."""
        limit, extents = self.trailer.reserved_bytes, self.extents
        recovered: list[RecoveredSlot] = []
        for offset, size in self.trailer.slots():
            header = layout.unpack_header(bytes(self._memory[offset : offset + HEADER_BYTES]))
            is_sound = False
            if header is not None:
                self.generation = max(self.generation, header.generation)
                is_in_use = header.state in (SlotState.WRITING, SlotState.COMMITTED)
                is_sound = is_in_use and slot_bytes(header.part_bytes, header.parts) == size
            # Everything before `extents.limit_bytes` was taken over, as slots or as free runs.
            if header is None or not is_sound or not extents.limit_bytes <= offset <= limit - size:
                if extents.limit_bytes <= offset <= limit - HEADER_BYTES:
                    self._void(offset)
                self.trailer.remove_slot(offset)
                continue
            extents.grow(offset)
            extents.limit_bytes += size
            slot = Slot(offset, header.part_bytes, header.parts, header.generation)
            slot.parent_short, slot.tenant = header.parent_short, header.tenant
            self._add(slot)
            if header.state is SlotState.WRITING:
                slot.owner = header.namespace
            recovered.append(RecoveredSlot(slot, header))
        extents.grow(limit)
        return recovered

    def regroup(self, recovered: Namespace, like: Namespace) -> Namespace:
        """Move the objects of a recovered namespace to `like`, and return `like`.

        Objects that fit none of its groups are dropped.
        """
        hashes = {short_hash(chunk_hash): chunk_hash for chunk_hash in recovered.entries}
        for chunk_hash, entry in list(recovered.entries.items()):
            for slot in filter(None, list(entry.slots)):
                gid = recovered.gids[slot.group_index]
                index = like.gids.index(gid) if gid in like.gids else -1
                if index >= 0 and slot.shape in like.shapes[index]:
                    like.insert(slot, chunk_hash, index, hashes.get(slot.parent_short, b""))
                else:
                    self.drop(slot)
        return like

    def grow_arena(self, limit_bytes: int) -> None:
        """Give the store the arena up to `limit_bytes`, because its pages exist now."""
        self.extents.grow(limit_bytes)
        self.trailer.reserved_bytes = self.extents.limit_bytes

    def grant(self, shape: SlotShape, count: int, owner: bytes = b"") -> list[Slot]:
        """Return at most `count` slots that `owner` may write into. Objects are evicted for them.

        There are fewer where too little may be evicted.
        """
        granted: list[Slot] = []
        part_bytes, parts = shape
        size = slot_bytes(part_bytes, parts)
        while len(granted) < count:
            offset = self.extents.take_run(size)
            if offset is None:
                if self.is_growing or not self._make_room(size):
                    break
                continue
            self.generation += 1
            self.trailer.generation = self.generation
            slot = Slot(offset, part_bytes, parts, self.generation, owner)
            self._add(slot)
            # Bytes that were here must not be taken for signatures of a writer that makes none.
            start, end = offset + HEADER_BYTES, offset + layout.checksum_offset(parts)
            self._memory[start:end] = bytes(end - start)
            self._write_header(slot)
            self.trailer.add_slot(offset, size)
            granted.append(slot)
        return granted

    def commit(self, slot: Slot, namespace: Namespace, new: NewObject) -> bool:
        """Make a written slot an object of `namespace`. Returns False, and frees it, if it is not.

        The object may exist already. If that one is doubted and nobody reads it, the new one takes
        its place, because its writer has just signed it. Or the tenant has no room for the object,
        and none of its own objects may be evicted.
        """
        assert slot.state is SlotState.WRITING
        group_index, chunk_hash, parent, eviction_class, tenant = new
        there = namespace.find_slot(chunk_hash, group_index)
        is_kept = there is not None and (not there.replace_on_store or there.pins > 0)
        if is_kept or not self._make_room_of(tenant, slot.size_bytes):
            self.duplicates += is_kept
            self.over_quota += not is_kept
            self.free_slot(slot)
            return False
        if there is not None:
            self.drop(there)
        is_suffix = namespace.prefixes[group_index] and parent
        if is_suffix and namespace.find_slot(parent, group_index) is None:
            # While the chunk before it is missing, no hit can reach the object.
            eviction_class = EvictionClass.INTERIOR
        slot.tenant, slot.eviction_class = tenant, eviction_class
        slot.parent_short = short_hash(parent) if parent else 0
        self._enter(slot, namespace, group_index, chunk_hash, parent)
        if namespace.retained:
            self.retention.on_object_stored(slot)
        if self.on_change is not None:
            self.on_change(slot, True)
        self._write_header(slot)
        return True

    def free_slot(self, slot: Slot) -> FreeRun:
        """Free a slot that holds no object of the index. Returns the free run that contains it."""
        assert slot.entry is None
        if slot.state is SlotState.WRITING:
            self.writing_bytes -= slot.size_bytes
        else:
            self.committed_bytes -= slot.size_bytes
            self.objects -= 1
            if slot.tenant in self.tenants:
                self.tenants[slot.tenant] -= slot.size_bytes
                if not self.tenants[slot.tenant]:
                    del self.tenants[slot.tenant], self.tenant_queues[slot.tenant]
        slot.state = SlotState.FREE
        self._void(slot.offset)
        self.trailer.remove_slot(slot.offset)
        del self.slots[slot.offset]
        del self.by_end[slot.offset + slot.size_bytes]
        return self.extents.free(slot.offset, slot.size_bytes)

    def pin(self, slots: Sequence[Slot], superseded_tails: Iterable[Slot] = ()) -> None:
        """Keep objects where they are until `unpin`, and count them as used.

        `superseded_tails` are those of which the reader is about to store longer ones. The first
        reader makes them interior. A second one shows that prompts part there, and protects them.
        """
        interior = [slot for slot in superseded_tails if not slot.is_read]
        self.due_when_unpinned.update(self.queue.mark_used(slots), interior)
        prompt = EvictionClass.PROMPT
        for slot in slots:
            slot.pins += 1
            if not slot.is_read or slot.eviction_class is not prompt:
                slot.is_read, slot.eviction_class = True, prompt
                layout.write_use(self._memory, slot.offset, layout.USE_READ)
        for slot in slots if self.tenants else ():
            if slot.tenant in self.tenants:
                moved = self.tenant_queues[slot.tenant].mark_used((slot,))
                self.due_when_unpinned.update(moved)
        for slot in interior:
            self._make_interior(slot)

    def let_go_first(self, slot: Slot) -> None:
        """Make an object one that goes first, as if only shorter hits needed it."""
        slot.is_read = False
        self._make_interior(slot)
        self._offer(slot)

    def hold(self, slots: Iterable[Slot]) -> None:
        """Keep objects where they are until `unpin`, without counting them as used."""
        for slot in slots:
            slot.pins += 1

    def unpin(self, slots: Sequence[Slot]) -> None:
        """End a `pin` or a `hold`. A slot that was dropped meanwhile is freed at its last one."""
        for slot in slots:
            slot.pins -= 1
        # Of a hit that was read before, nothing is due: it kept its places in the queues.
        due = self.due_when_unpinned
        for slot in filter(due.__contains__, slots) if due else ():
            if not slot.pins:
                due.remove(slot)
                if slot.entry is not None:
                    self._offer(slot)
                else:
                    self.free_slot(slot)

    def drop(self, slot: Slot) -> FreeRun | None:
        """Take an object out of the index now, and free its bytes as soon as nobody reads them.

        Returns the free run that contains the slot, or None while the slot is pinned.
        """
        entry = slot.entry
        if entry is None:
            return None
        if self.on_change is not None:
            self.on_change(slot, False)
        if slot.is_retained:
            self.retention.on_object_dropped(slot)
        parent = entry.namespace.take_out(slot, entry)
        for queue in self._queues_of(slot):
            queue.remove(slot)
        for parent_slot in filter(None, parent.slots if parent is not None else ()):
            self._offer(parent_slot)
        if not slot.pins:
            return self.free_slot(slot)
        self.due_when_unpinned.add(slot)
        self._write_header(slot)
        return None

    def _evict(self, slot: Slot) -> FreeRun:
        """Drop an object and those of its chunk that are of no use without it.

        Returns the free run that contains the slot now.
        """
        assert slot.entry is not None
        siblings = filter(None, slot.entry.slots if slot.is_prefix else ())
        useless = [
            sibling for sibling in siblings if sibling is not slot and sibling.is_evictable()
        ]
        for victim in (*useless, slot):
            self.retained_evicted += victim.is_retained
            self.queue.remember(victim, _ghost_key(victim))
            run = self.drop(victim)
        self.evicted += len(useless) + 1
        assert run is not None, "nobody reads it"
        return run

    def _make_room(self, size: int) -> bool:
        """Evict until there is a free run of `size` bytes. Returns False where too little may go.

        Where objects are smaller than `size`, the oldest ones leave holes that are too short. After
        `size` bytes without such a run, the neighbours of a hole are evicted with it. Retained ones
        go so too, but only after more bytes, or if nothing else may go. Else few of them, between
        large ones, would keep all large objects out of RAM.
        """
        free_bytes = self.extents.free_bytes
        while not self.extents.fits(size):
            wasted_bytes = self.extents.free_bytes - free_bytes
            if wasted_bytes > EVICTION_WASTE_MAX * size:
                return False
            victim = self.queue.victim(self._may_go)
            if victim is None and self.extents.free_bytes >= size:
                victim = self.queue.retained_victim(self._may_go)
            if victim is None:
                return False
            if self.before_evict is not None and self.before_evict(victim):
                continue
            run = self._evict(victim)
            with_retained = wasted_bytes >= RETAINED_WASTE * size
            while wasted_bytes >= size > run.size:
                after = self.slots.get(run.offset + run.size)
                before = self.by_end.get(run.offset)
                touching = filter(None, (after, before))
                neighbour = next(
                    (
                        slot
                        for slot in touching
                        if slot.is_evictable() and slot.is_retained <= with_retained
                    ),
                    None,
                )
                if neighbour is None:
                    break
                run = self._evict(neighbour)
        return True

    def _make_room_of(self, tenant: int, size: int) -> bool:
        """Evict a tenant's own objects until its quota has room for `size` bytes.

        Returns False where it never has.
        """
        if not tenant or self.tenant_bytes is None:
            return True
        while self.tenants[tenant] + size > self.tenant_bytes:
            queue = self.tenant_queues.get(tenant)
            victim = queue.victim(self._may_go) if queue is not None else None
            if victim is None:
                return False
            self.over_quota += 1
            self._evict(victim)
        return True

    def _queues_of(self, slot: Slot) -> Iterator[EvictionQueue[Slot]]:
        yield self.queue
        if slot.tenant in self.tenants:
            yield self.tenant_queues[slot.tenant]

    def _enter(
        self, slot: Slot, namespace: Namespace, index: int, chunk_hash: bytes, parent: bytes = b""
    ) -> None:
        """Make a written slot an object of the index. Its header is to be written next."""
        self.writing_bytes -= slot.size_bytes
        slot.state = SlotState.COMMITTED
        self.committed_bytes += slot.size_bytes
        self.objects += 1
        namespace.insert(slot, chunk_hash, index, parent)
        if slot.tenant and self.tenant_bytes is not None:
            self.tenants[slot.tenant] += slot.size_bytes
        for queue in self._queues_of(slot):
            queue.add_item(slot, slot.size_bytes, slot.eviction_class, _ghost_key(slot))

    def _may_go(self, slot: Slot) -> bool:
        """Return True where the object may be evicted. A pinned one is offered later."""
        if slot.pins:
            self.due_when_unpinned.add(slot)
        return slot.is_evictable()

    def _make_interior(self, slot: Slot) -> None:
        slot.eviction_class = EvictionClass.INTERIOR
        layout.write_use(self._memory, slot.offset, slot.eviction_class)
        for queue in self._queues_of(slot):
            queue.demote(slot)

    def _set_retained(self, slot: Slot, is_retained: bool) -> None:
        slot.is_retained = is_retained
        for queue in self._queues_of(slot):
            if is_retained:
                queue.retain_item(slot)
            else:
                queue.end_retention(slot)
        self._offer(slot)

    def _offer(self, slot: Slot) -> None:
        """Consider an object for eviction from now on, if it may go."""
        if self._may_go(slot):
            for queue in self._queues_of(slot):
                queue.offer(slot)

    def _add(self, slot: Slot) -> None:
        self.slots[slot.offset] = slot
        self.by_end[slot.offset + slot.size_bytes] = slot
        self.writing_bytes += slot.size_bytes

    def _write_header(self, slot: Slot) -> None:
        """Write the slot's header into shared memory, as the slot is now."""
        entry = slot.entry
        if entry is None:
            is_dropped = slot.state is SlotState.COMMITTED
            header = SlotHeader(
                state=SlotState.DROPPED if is_dropped else slot.state,
                generation=slot.generation,
                parts=slot.parts,
                part_bytes=slot.part_bytes,
                namespace=slot.owner or bytes(HASH_BYTES),
            )
        else:
            header = SlotHeader(
                state=slot.state,
                generation=slot.generation,
                parts=slot.parts,
                part_bytes=slot.part_bytes,
                gid=entry.namespace.gids[slot.group_index],
                namespace=entry.namespace.identity,
                chunk_hash=entry.chunk_hash,
                parent_short=slot.parent_short,
                tenant=slot.tenant,
                use=layout.USE_READ if slot.is_read else slot.eviction_class,
            )
        self._memory[slot.offset : slot.offset + HEADER_BYTES] = header.pack()

    def _void(self, offset: int) -> None:
        """Write an empty header, so that bytes amid a later payload are not taken for a slot's."""
        self._memory[offset : offset + HEADER_BYTES] = SlotHeader(SlotState.FREE, 0, 0, 0).pack()


def _ghost_key(slot: Slot) -> bytes:
    """Return the key by which an object is known after its eviction. Identities may share it."""
    assert slot.entry is not None
    return slot.entry.chunk_hash + slot.group_index.to_bytes(2, "little")
