"""The order of eviction over all objects, and over those of each tenant, which a quota bounds."""

from collections import Counter
from collections.abc import Iterator, Sequence

from hybridkv.core.policies import EvictionPolicy
from hybridkv.store.eviction import EvictionQueue
from hybridkv.store.index import Slot


class EvictionOrder:
    """The objects of the index in the order in which they are evicted."""

    def __init__(self, policy: EvictionPolicy, arena_bytes: int, tenant_bytes: int | None) -> None:
        """`tenant_bytes` bounds the objects of any one tenant; None = no tenant is bounded."""
        self._policy = policy
        self._all: EvictionQueue[Slot] = EvictionQueue(policy, arena_bytes)
        self._tenant_bytes = tenant_bytes
        self._tenants: dict[int, EvictionQueue[Slot]] = {}
        self._taken_bytes: Counter[int] = Counter()
        """By tenant the bytes of its objects, also of those that are dropped and still read."""

    @property
    def protected_bytes(self) -> int:
        """Bytes of objects that a scan does not evict."""
        return self._all.protected_bytes

    @property
    def tenants(self) -> int:
        """Tenants that are bounded and have objects."""
        return len(self._tenants)

    def add(self, slot: Slot) -> None:
        """Append a new object of the index."""
        if slot.tenant and self._tenant_bytes is not None:
            if slot.tenant not in self._tenants:
                self._tenants[slot.tenant] = EvictionQueue(self._policy, self._tenant_bytes)
            self._taken_bytes[slot.tenant] += slot.size_bytes
        for queue in self._queues(slot):
            queue.add(slot, slot.size_bytes, slot.interior, _ghost_key(slot))

    def use(self, slots: Sequence[Slot]) -> None:
        """The objects are read, all at once. Each is to be offered again when it may go."""
        self._all.use(slots)
        if self._tenants:
            for slot in slots:
                if slot.tenant in self._tenants:
                    self._tenants[slot.tenant].use((slot,))

    def offer(self, slot: Slot) -> None:
        """Consider an object again, if it may go from now on."""
        if slot.may_go():
            for queue in self._queues(slot):
                queue.offer(slot)

    def remember(self, slot: Slot) -> None:
        """An object is about to be evicted; it is protected where it is stored again soon."""
        self._all.remember(slot, _ghost_key(slot))

    def remove(self, slot: Slot) -> None:
        """An object left the index; its bytes may still be read."""
        for queue in self._queues(slot):
            queue.remove(slot)

    def release(self, slot: Slot) -> None:
        """The bytes of a removed object are free."""
        if slot.tenant in self._tenants:
            self._taken_bytes[slot.tenant] -= slot.size_bytes
            if not self._taken_bytes[slot.tenant]:
                del self._tenants[slot.tenant], self._taken_bytes[slot.tenant]

    def next(self) -> Slot | None:
        """The object that is evicted next; None where none may go."""
        return self._all.victim(Slot.may_go)

    def next_of(self, tenant: int) -> Slot | None:
        """The object of one tenant that is evicted next; None where none may go."""
        queue = self._tenants.get(tenant)
        return queue.victim(Slot.may_go) if queue is not None else None

    def has_room(self, tenant: int, size: int) -> bool:
        """Whether a tenant may have `size` bytes more."""
        bound = self._tenant_bytes
        return bound is None or not tenant or self._taken_bytes[tenant] + size <= bound

    def check(self, slots: Sequence[Slot]) -> None:
        """Re-derive every count from all slots of the arena; raises AssertionError."""
        assert len(self._all) == sum(slot.entry is not None for slot in slots)
        assert all((slot in self._all) == (slot.entry is not None) for slot in slots)
        self._all.check(Slot.may_go)
        for tenant, queue in self._tenants.items():
            queue.check(Slot.may_go)
            theirs = [slot for slot in slots if slot.tenant == tenant]
            assert theirs
            assert self._taken_bytes[tenant] == sum(slot.size_bytes for slot in theirs)
            assert len(queue) == sum(slot.entry is not None for slot in theirs)

    def _queues(self, slot: Slot) -> Iterator[EvictionQueue[Slot]]:
        yield self._all
        if slot.tenant in self._tenants:
            yield self._tenants[slot.tenant]


def _ghost_key(slot: Slot) -> bytes:
    """The bytes by which an object is known after its eviction; identities may share them."""
    assert slot.entry is not None
    return slot.entry.chunk_hash + slot.group_index.to_bytes(2, "little")
