"""The RAM tier: objects in the slots of an arena, and their eviction where room is needed.

The store writes headers of slots, the arena's trailer and empty signatures. It writes no payload,
and overwrites with zeros what is gone for ever (`Store.forget_object`). Wherever the daemon is
killed, the next one can take the arena over. A page table entry is set after the slot's header is
whole, and cleared before the slot is free. A torn header has a wrong checksum.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from hybridkv.core.coverage import SlotShape
from hybridkv.core.keys import HASH_BYTES
from hybridkv.core.policies import EvictionClass
from hybridkv.shm import slots as layout
from hybridkv.shm.slots import (
    HEADER_BYTES,
    SLOT_ALIGN,
    SlotHeader,
    SlotState,
    short_hash,
    slot_bytes,
)
from hybridkv.shm.trailer import Trailer, trailer_bytes
from hybridkv.store.eviction import EvictionQueue
from hybridkv.store.extents import Extents, FreeRun
from hybridkv.store.index import Namespace, NewObject, Slot
from hybridkv.store.retention import RetainedChunks

EVICTION_WASTE_MAX = 8
"""To grant one slot, at most 8 times its size is evicted. Then the grant ends without it."""
RETAINED_WASTE = 4  # After 4 times its size, retained objects are evicted with their neighbours.
QUOTA_EVICTIONS_MAX = 256
"""Objects that one commit, or one turn of the loop, counts or evicts for a tenant's bound."""
SCAN_BYTES = 1 << 30  # Of the arena's slots, looked through for that in one turn.


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
        self.queue: EvictionQueue[Slot] = EvictionQueue(len(memory))
        self.tenant_bytes = tenant_bytes
        """The bound of every tenant that has none of its own. None = no bound."""
        self.own_quotas: dict[int, int | None] = {}
        """By tenant, a bound of its own. None = none, whatever `tenant_bytes` is."""
        self.tenant_queues: dict[int, EvictionQueue[Slot]] = {}
        self.retention = RetainedChunks(lambda: self.bound_bytes, self.quota_of, self._set_retained)
        self.tenants: Counter[int] = Counter()
        """By tenant the bytes of its counted objects, also of those that are dropped and read."""
        self._count_from: int | None = None
        """From this offset on, objects may not be counted whose tenant was bounded meanwhile."""
        self._maybe_over: deque[int] = deque()  # Tenants that may have more than their bound.
        self.writing_bytes = 0  # Bytes in slots that are granted and not yet committed.
        self.committed_bytes = 0
        """Bytes in slots of objects, also of those that are dropped and still read."""
        self.objects = 0  # The number of slots that `committed_bytes` counts.
        self.kept_bytes = 0  # Bytes of the objects that stay: they are pinned, or retained.
        self.due_when_unpinned: set[Slot] = set()
        """Pinned slots that are freed or offered for eviction at their last `unpin`."""
        self.expected: set[Slot] = set()
        """Objects that were read for prompts that are expected, until a lookup hits them."""
        self.expected_bytes = 0  # Bytes of these slots.
        self.expected_hit = 0  # Objects that left `expected` because a lookup hit them.
        self.expected_evicted = 0  # Objects that left it because they were evicted.
        self.to_wipe: deque[Slot] = deque()
        """Slots of forgotten objects that nobody reads. They are free once they are overwritten."""
        self.to_wipe_bytes = 0  # The bytes of `to_wipe`.
        self._largest_bytes = 0  # Of any slot so far.
        self._wiped_bytes = 0  # Of the first of `to_wipe`, the bytes that are overwritten.
        self._wipe_at: int | None = None
        """Before this offset, what is free is overwritten. None = nobody asked, or all is."""
        self.now = 0.0  # The time of the last event, by the daemon's clock.
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
    def available_bytes(self) -> int:
        """Bytes that are free or will be, or have objects that need not stay."""
        return self.bound_bytes - self.writing_bytes - self.kept_bytes - self.to_wipe_bytes

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

    def grant(
        self, shape: SlotShape, count: int, owner: bytes = b"", spares_protected: bool = False
    ) -> list[Slot]:
        """Return at most `count` slots that `owner` may write into. Objects are evicted for them.

        There are fewer where too little may be evicted. With `spares_protected` no object may that
        is protected, as lookups have read it.
        """
        granted: list[Slot] = []
        part_bytes, parts = shape
        size = slot_bytes(part_bytes, parts)
        while len(granted) < count:
            offset = self.extents.take_run(size)
            if offset is None:
                if self.is_growing or not self._make_room(size, spares_protected):
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

    def commit(
        self, slot: Slot, namespace: Namespace, new: NewObject, is_expected: bool = False
    ) -> bool:
        """Make a written slot an object of `namespace`. Returns False, and frees it, if it is not.

        The object may exist already. If that one is doubted and nobody reads it, the new one takes
        its place, because its writer has just signed it. Or the tenant has no room for the object,
        and none of its own objects may be evicted.

        With `is_expected` no lookup has asked for the object, which was read because a prompt is
        expected. So it is not protected, even if it was evicted a short time ago.
        """
        assert slot.state is SlotState.WRITING
        group_index, chunk_hash, parent, eviction_class, tenant = new
        there = namespace.find_slot(chunk_hash, group_index)
        is_kept = there is not None and (not there.replace_on_store or there.pins > 0)
        if is_kept or not self._make_room_of(tenant, slot.size_bytes, is_expected):
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
        if is_expected:
            self.expected.add(slot)
            self.expected_bytes += slot.size_bytes
        slot.written_at = self.now
        self._enter(slot, namespace, group_index, chunk_hash, parent)
        if namespace.retained:
            self.retention.on_object_stored(slot)
        if self.on_change is not None:
            self.on_change(slot, True)
        self._write_header(slot)
        return True

    def free_slot(self, slot: Slot) -> FreeRun | None:
        """Free a slot that holds no object of the index. Returns the free run that contains it.

        A forgotten one is overwritten before, in later calls of `wipe`. Then None is returned.
        """
        assert slot.entry is None
        if slot.is_forgotten:
            self.to_wipe.append(slot)
            self.to_wipe_bytes += slot.size_bytes
            return None
        if slot.state is SlotState.WRITING:
            self.writing_bytes -= slot.size_bytes
        else:
            self.committed_bytes -= slot.size_bytes
            self.objects -= 1
            if slot.is_counted:
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
        if self.expected:
            for slot in self.expected.intersection(slots):
                self._forget_expected(slot)
                self.expected_hit += 1
        interior = [slot for slot in superseded_tails if not slot.is_read]
        self.due_when_unpinned.update(self.queue.mark_used(slots), interior)
        prompt, now = EvictionClass.PROMPT, self.now
        self.hold(slots)
        for slot in slots:
            slot.read_at = now
            if not slot.is_read or slot.eviction_class is not prompt:
                slot.is_read, slot.eviction_class = True, prompt
                layout.write_use(self._memory, slot.offset, layout.USE_READ)
        for slot in slots if self.tenants else ():
            if slot.is_counted:
                moved = self.tenant_queues[slot.tenant].mark_used((slot,))
                self.due_when_unpinned.update(moved)
        for slot in interior:
            self._make_interior(slot)

    def let_go_first(self, slot: Slot) -> None:
        """Make an object one that goes first, as if only shorter hits needed it."""
        slot.is_read = False
        self._make_interior(slot)
        self._offer(slot)

    def renew_objects(self, slots: Iterable[Slot]) -> None:
        """Evict these objects later than others of their kind, because a prompt is expected."""
        for slot in slots:
            for queue in self._queues_of(slot):
                queue.renew_items((slot,))

    def hold(self, slots: Iterable[Slot]) -> None:
        """Keep objects where they are until `unpin`, without counting them as used."""
        kept_bytes = 0
        for slot in slots:
            if not slot.pins and not slot.is_retained:
                kept_bytes += slot.size_bytes
            slot.pins += 1
        self.kept_bytes += kept_bytes

    def unpin(self, slots: Sequence[Slot]) -> None:
        """End a `pin` or a `hold`. A slot that was dropped meanwhile is freed at its last one."""
        kept_bytes = 0
        for slot in slots:
            slot.pins -= 1
            if not slot.pins and not slot.is_retained:
                kept_bytes += slot.size_bytes
        self.kept_bytes -= kept_bytes
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
        if slot in self.expected:
            self._forget_expected(slot)
        if self.on_change is not None:
            self.on_change(slot, False)
        if slot.is_retained:
            self.retention.on_object_dropped(slot)
            if not slot.pins:
                self.kept_bytes -= slot.size_bytes
        parent = entry.namespace.take_out(slot, entry)
        for queue in self._queues_of(slot):
            queue.remove(slot)
        for parent_slot in filter(None, parent.slots if parent is not None else ()):
            self._offer(parent_slot)
        if slot.pins or slot.is_forgotten:
            self._write_header(slot)
        if not slot.pins:
            return self.free_slot(slot)
        self.due_when_unpinned.add(slot)
        return None

    def forget_object(self, slot: Slot) -> None:
        """Drop an object as somebody asked for its deletion: its bytes are overwritten."""
        slot.is_forgotten = True
        self.drop(slot)

    def begin_wipe(self) -> None:
        """Overwrite everything that is free, as it may have bytes of objects that are gone.

        Calls of `wipe` do it. Objects that were dropped before and are still read go the same way.
        """
        self._wipe_at = 0
        for slot in self.due_when_unpinned:
            slot.is_forgotten |= slot.entry is None

    @property
    def wiping_bytes(self) -> int:
        """Bytes of the arena that are still to be looked through and overwritten."""
        limit = self.extents.limit_bytes
        return self.to_wipe_bytes + (0 if self._wipe_at is None else limit - self._wipe_at)

    def wipe(self, bytes_max: int) -> None:
        """Overwrite slots of forgotten objects, and then what is free, within so many bytes."""
        while self.to_wipe and bytes_max > 0:
            slot = self.to_wipe[0]
            start = slot.offset + max(HEADER_BYTES, self._wiped_bytes)
            end = min(slot.offset + slot.size_bytes, start + bytes_max)
            self._zero(start, end)
            bytes_max -= end - start
            self._wiped_bytes = end - slot.offset
            if self._wiped_bytes == slot.size_bytes:
                self.to_wipe.popleft()
                self.to_wipe_bytes -= slot.size_bytes
                self._wiped_bytes = 0
                slot.is_forgotten = False
                self.free_slot(slot)
        if not self.to_wipe and bytes_max > 0 and self._wipe_at is not None:
            end = (
                min(self._wipe_at + bytes_max, self.extents.limit_bytes) // SLOT_ALIGN * SLOT_ALIGN
            )
            self._wipe_free(self._wipe_at, end)
            self._wipe_at = end if end < self.extents.limit_bytes else None

    def _wipe_free(self, start: int, end: int) -> None:
        """Zero what is free of [start, end), and what is around the payload of slots there.

        ::

            ----slot----]      free      [header|checksums| |payload| ]    free    [----slot----
                  start |zeroed         |                  |zeroed   |zeroed      | end
        """
        at = max(start, self.trailer.end_before(start, self._largest_bytes))
        for offset, size in self.trailer.slots(start, end):
            self._zero(at, offset)
            slot = self.slots[offset]
            if slot.state is SlotState.COMMITTED or slot.owner:
                # Else it is read from a tier, and gets all bytes of a record.
                payload = offset + layout.payload_offset(slot.parts)
                self._zero(offset + layout.checksum_offset(slot.parts), payload)
                self._zero(payload + slot.part_bytes * slot.parts, offset + size)
            at = offset + size
        self._zero(at, end)

    def _zero(self, start: int, end: int) -> None:
        if start < end:
            self._memory[start:end] = bytes(end - start)

    def _evict(self, slot: Slot) -> FreeRun:
        """Drop an object and those of its chunk that are of no use without it.

        Returns the free run that contains the slot now.
        """
        useless = self._useless_without(slot)
        for victim in (*useless, slot):
            self.retained_evicted += victim.is_retained
            self.expected_evicted += victim in self.expected
            self.queue.remember(victim, _ghost_key(victim))
            run = self.drop(victim)
        self.evicted += len(useless) + 1
        assert run is not None, "nobody reads it"
        return run

    def _useless_without(self, slot: Slot) -> list[Slot]:
        """Return the objects of the slot's chunk that are of no use without it and may go."""
        assert slot.entry is not None
        siblings = filter(None, slot.entry.slots if slot.is_prefix else ())
        return [sibling for sibling in siblings if sibling is not slot and sibling.is_evictable()]

    def _is_spared(self, slot: Slot) -> bool:
        """Return True where an eviction of the object would evict a protected or retained one."""
        victims = (slot, *self._useless_without(slot))
        return any(each.is_retained or self.queue.is_protected(each) for each in victims)

    def _find_victim(self, queue: EvictionQueue[Slot], spares_protected: bool) -> Slot | None:
        """Return the object of a queue to evict next. None where none may go."""
        victim = queue.victim(self._may_go, spares_protected)
        is_spared = victim is not None and spares_protected and self._is_spared(victim)
        return None if is_spared else victim

    def _forget_expected(self, slot: Slot) -> None:
        self.expected.remove(slot)
        self.expected_bytes -= slot.size_bytes

    def _make_room(self, size: int, spares_protected: bool = False) -> bool:
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
            victim = self._find_victim(self.queue, spares_protected)
            has_bytes = self.extents.free_bytes >= size
            if victim is None and has_bytes and not spares_protected:
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
                        if slot.is_evictable()
                        and slot.is_retained <= with_retained
                        and not (spares_protected and self._is_spared(slot))
                    ),
                    None,
                )
                if neighbour is None:
                    break
                run = self._evict(neighbour)
        return True

    def _make_room_of(self, tenant: int, size: int, spares_protected: bool) -> bool:
        """Evict a tenant's own objects until its quota has room for `size` bytes.

        Returns False where it never has.
        """
        bound = self.quota_of(tenant)
        if bound is None:
            return True
        for _ in range(QUOTA_EVICTIONS_MAX):
            if self.tenants[tenant] + size <= bound:
                return True
            if not self._evict_of(tenant, spares_protected):
                return False
        return False

    def _evict_of(self, tenant: int, spares_protected: bool = False) -> bool:
        """Evict an object of a tenant for its bound. Returns False where none may go.

        Retained ones go last. They take less than the bound, unless that was lowered.
        """
        queue = self.tenant_queues.get(tenant)
        if queue is None:
            return False
        victim = self._find_victim(queue, spares_protected)
        if victim is None and not spares_protected:
            victim = queue.retained_victim(self._may_go)
        if victim is None:
            return False
        self.over_quota += 1
        self._evict(victim)
        return True

    def quota_of(self, tenant: int) -> int | None:
        """Return the most bytes that a tenant's objects may take. None = no bound of its own."""
        return self.own_quotas.get(tenant, self.tenant_bytes) if tenant else None

    def set_default_quota(self, bound_bytes: int | None) -> None:
        """Change the bound of all tenants without one of their own. None = no bound."""
        self.tenant_bytes = bound_bytes
        self._begin_quotas()

    def set_own_quota(self, tenant: int, bound_bytes: int | None) -> None:
        """Give a tenant a bound of its own. None = no bound."""
        self.own_quotas[tenant] = bound_bytes
        self._begin_quotas()

    def forget_own_quota(self, tenant: int) -> None:
        """Take a tenant's own bound away, so that the default counts."""
        self.own_quotas.pop(tenant, None)
        self._begin_quotas()

    @property
    def has_quota_work(self) -> bool:
        """True while objects are to be counted or evicted for bounds that were changed."""
        return self._count_from is not None or bool(self._maybe_over)

    def keep_quotas(self) -> None:
        """Count or evict the next QUOTA_EVICTIONS_MAX objects for bounds that were changed."""
        if self._count_from is not None:
            self._count_slots(self._count_from)
            return
        for _ in range(QUOTA_EVICTIONS_MAX):
            if not self._maybe_over:
                return
            tenant = self._maybe_over[0]
            bound = self.quota_of(tenant)
            is_over = bound is not None and self.tenants[tenant] > bound
            if not (is_over and self._evict_of(tenant)):
                self._maybe_over.popleft()

    def _begin_quotas(self) -> None:
        for tenant, queue in self.tenant_queues.items():
            queue.bound_bytes = self.quota_of(tenant) or 0
        self._count_from = 0

    def _count_slots(self, start: int) -> None:
        """Count the next objects of bounded tenants, by offset."""
        limit = self.extents.limit_bytes
        end = min(start + SCAN_BYTES, limit)
        for looked, (offset, size) in enumerate(self.trailer.slots(start, end)):
            if looked == QUOTA_EVICTIONS_MAX:
                end = offset
                break
            slot = self.slots[offset]
            if slot.entry is not None and not slot.is_counted:
                self._count(slot, size)
        self._count_from = end if end < limit else None
        if self._count_from is None:
            self._maybe_over.extend(self.tenants)

    def _count(self, slot: Slot, size: int) -> None:
        """Count an object against the bound of its tenant, if there is one."""
        bound = self.quota_of(slot.tenant)
        if bound is None:
            return
        slot.is_counted = True
        self.tenants[slot.tenant] += size
        queue = self.tenant_queues.get(slot.tenant)
        if queue is None:
            queue = self.tenant_queues[slot.tenant] = EvictionQueue(bound)
        self._add_to(queue, slot)
        if slot.is_retained:
            queue.retain_item(slot)
            queue.offer(slot)

    def _add_to(self, queue: EvictionQueue[Slot], slot: Slot) -> None:
        key = b"" if slot in self.expected else _ghost_key(slot)
        queue.add_item(slot, slot.size_bytes, slot.eviction_class, key)

    def _queues_of(self, slot: Slot) -> Iterator[EvictionQueue[Slot]]:
        yield self.queue
        if slot.is_counted:
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
        self._add_to(self.queue, slot)
        self._count(slot, slot.size_bytes)

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
        if not slot.pins:
            self.kept_bytes += slot.size_bytes * (is_retained - slot.is_retained)
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
        self._largest_bytes = max(self._largest_bytes, slot.size_bytes)

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
