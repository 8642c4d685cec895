"""The RAM tier: objects in the slots of an arena, and their eviction where room is needed."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

from hybridkv.core.coverage import SlotShape
from hybridkv.core.policies import EvictionPolicy
from hybridkv.shm.slots import SlotState, short_hash, slot_bytes
from hybridkv.shm.trailer import Trailer, trailer_bytes
from hybridkv.store.eviction import EvictionOrder
from hybridkv.store.index import Namespace, Slot
from hybridkv.store.slots import SlotTable

VAIN_MAX = 8
"""For one slot at most 8 times its size is evicted at once; then nothing is granted for now."""


class Store(SlotTable):
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
        super().__init__(memory, trailer, first_generation)
        self.bound_bytes = len(memory)
        """The limit to which `extents` will grow. While it is below, nothing is evicted."""
        self.order = EvictionOrder(policy, len(memory), tenant_bytes)
        self.evicted = 0
        self.duplicates = 0
        self.over_quota = 0
        """Objects that were not stored, or were evicted, for their tenant's bound."""
        self.before_evict: Callable[[Slot], bool] | None = None
        """Called before an object is evicted for room; True = it has pinned the object instead."""
        self.on_change: Callable[[Slot, bool], None] | None = None
        """Called with each object that has entered the index (True), or is about to leave it."""

    def __len__(self) -> int:
        """Bytes of all slots that the arena has room for."""
        return len(self.memory)

    @property
    def is_growing(self) -> bool:
        """Whether there will be more room without evicting anything."""
        return self.extents.limit_bytes < self.bound_bytes

    def recover(self) -> tuple[dict[bytes, Namespace], list[Slot]]:
        """Take over an earlier daemon's: (namespaces by identity, slots that may be written into).

        To be called once, first. Until `regroup` a namespace has the groups of the objects found.
        The oldest object is the least recently used.
        """
        found = self.take_over()
        objects = [known for known in found if known[1].state is SlotState.COMMITTED]
        gids: defaultdict[bytes, set[int]] = defaultdict(set)
        for _, header in objects:
            gids[header.namespace].add(header.gid)
        namespaces = {of: Namespace(of, tuple(sorted(known)), ()) for of, known in gids.items()}
        for slot, header in sorted(objects, key=lambda known: known[0].generation):
            namespace = namespaces[header.namespace]
            index = namespace.gids.index(header.gid)
            if namespace.get(header.chunk_hash, index) is None:
                namespace.enter(slot, header.chunk_hash, index)
                self.order.add(slot)
            else:
                slot.tenant = 0
                self.free(slot)
        return namespaces, [slot for slot, header in found if header.state is SlotState.WRITING]

    def regroup(self, namespace: Namespace, like: Namespace) -> None:
        """Give a recovered namespace the groups of `like`; objects that fit none are dropped."""
        for slot in list(namespace.objects()):
            gid = namespace.gids[slot.group_index]
            if gid not in like.gids or slot.shape not in like.shapes[like.gids.index(gid)]:
                self.drop(slot)
        namespace.regroup(like)

    def grow(self, limit_bytes: int) -> None:
        """Pages of the arena below `limit_bytes` exist now."""
        self.extents.grow(limit_bytes)
        self.trailer.reserved_bytes = self.extents.limit_bytes

    def grant(self, shape: SlotShape, count: int, owner: bytes = b"") -> list[Slot]:
        """At most `count` slots that `owner` may write into; objects are evicted for them."""
        granted: list[Slot] = []
        while len(granted) < count:
            slot = self.allocate(shape, owner)
            if slot is not None:
                granted.append(slot)
            elif self.is_growing or not self._make_room(slot_bytes(*shape)):
                break
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
        """Make a written slot an object. False, and the slot is free, where the object exists.

        `parent` is the hash of the chunk before, if any; see store.eviction for `interior`. False
        too where the tenant has no room, and no object of its own that may go.
        """
        assert slot.state is SlotState.WRITING
        is_there = namespace.get(chunk_hash, group_index) is not None
        if is_there or not self._make_room_of(tenant, slot.size_bytes):
            self.duplicates += is_there
            self.over_quota += not is_there
            self.free(slot)
            return False
        if namespace.prefixes[group_index] and parent:
            # As long as the chunk before it is missing, no hit can reach it.
            interior = interior or namespace.get(parent, group_index) is None
        slot.tenant, slot.interior = tenant, interior
        slot.parent_short = short_hash(parent) if parent else 0
        self.committed(slot)
        namespace.enter(slot, chunk_hash, group_index, parent)
        self.order.add(slot)
        if self.on_change is not None:
            self.on_change(slot, True)
        self.write_header(slot)
        return True

    def free(self, slot: Slot) -> tuple[int, int]:
        """Give back a slot that the index does not have, and the free run that it is part of."""
        assert slot.entry is None
        if slot.state is SlotState.COMMITTED:
            self.order.release(slot)
        return super().free(slot)

    def pin(self, slots: Sequence[Slot]) -> None:
        """Keep objects where they are until `unpin`, and count them as used."""
        self.hold(slots)
        self.order.use(slots)

    def hold(self, slots: Iterable[Slot]) -> None:
        """Keep objects where they are until `unpin`, for a reader that does not count as use."""
        for slot in slots:
            slot.pins += 1

    def unpin(self, slots: Iterable[Slot]) -> None:
        """End a `pin` or a `hold`."""
        for slot in slots:
            slot.pins -= 1
            if slot.entry is not None:
                self.order.offer(slot)
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
        self.order.remove(slot)
        for freed in filter(None, parent.slots if parent is not None else ()):
            self.order.offer(freed)
        if not slot.pins:
            return self.free(slot)
        self.write_header(slot)
        return None

    def check(self) -> None:
        """Re-derive every counter and the tiling of the arena; raises AssertionError."""
        super().check()
        slots = self.slots.values()
        self.order.check(slots)
        entries = {slot: slot.entry for slot in slots if slot.entry is not None}
        namespaces = {entry.namespace for entry in entries.values()}
        for namespace in namespaces:
            namespace.check()
        assert len(entries) == sum(len(list(namespace.objects())) for namespace in namespaces)
        for slot, entry in entries.items():
            assert slot.state is SlotState.COMMITTED
            assert entry.namespace.get(entry.chunk_hash, slot.group_index) is slot
        assert all(slot.pins >= 0 for slot in slots)

    def _evict(self, slot: Slot) -> tuple[int, int]:
        """Drop an object and what is of no use without it; the free run that it is part of then."""
        assert slot.entry is not None
        others = filter(None, slot.entry.slots if slot.is_prefix else ())
        lost = [*(one for one in others if one is not slot and one.may_go()), slot]
        for one in lost:
            self.order.remember(one)
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
            victim = self.order.victim() if vain <= VAIN_MAX * size else None
            if victim is None:
                return False
            if self.before_evict is not None and self.before_evict(victim):
                continue
            run = self._evict(victim)
            if vain >= size:
                self._widen(run, size)
        return True

    def _widen(self, run: tuple[int, int], size: int) -> None:
        """Evict the neighbours of a free run until it has `size` bytes.

        Where objects are smaller than `size`, the oldest ones alone leave holes that are too short.
        """
        offset, length = run
        while length < size:
            touching = filter(None, (self.slots.get(offset + length), self._by_end.get(offset)))
            victim = next((slot for slot in touching if slot.may_go()), None)
            if victim is None:
                return
            offset, length = self._evict(victim)

    def _make_room_of(self, tenant: int, size: int) -> bool:
        """Evict a tenant's own objects until it may have `size` bytes more; False if it may not."""
        while not self.order.has_room(tenant, size):
            victim = self.order.victim(tenant)
            if victim is None:
                return False
            self.over_quota += 1
            self._evict(victim)
        return True
