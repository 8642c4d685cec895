"""What is being read: objects on their way from a tier into slots of RAM, each of them once.

A slot that is read into belongs to its read until the tier's thread has come back, however late.
Then it is an object of RAM like any other, or free. Damaged records go into quarantine.
"""

from collections import Counter, deque
from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

from hybridkv.store.index import NewObject, Slot
from hybridkv.store.store import Store
from hybridkv.tiers.contract import DamagedError, TierError
from hybridkv.tiers.health import JOB_ITEMS_MAX, TierState
from hybridkv.tiers.jobs import JobItem, JobKind, TierJob
from hybridkv.tiers.object_search import NeededObject

READING_SHARE = 8  # At most 1/8 of the arena is being read into from one tier.
EXPECTED_SHARE = 4
"""At most 1/4 of the arena has, or is to have, objects of prompts that are expected."""
SPARE_READS = 2  # Jobs that a tier can still begin while prefetches read from it.
DAMAGED_MAX = 1024
"""Damaged objects of one tier that wait for quarantine. More stay until they are read again."""


class ObjectRead(NamedTuple):
    """An object that is being read."""

    need: NeededObject  # As the lookup needs it that began the read.
    slot: Slot
    is_prefetch: bool = False  # True where a prefetch began it, and no lookup.


class ObjectReads:
    """All objects that are being read, and the damaged records that were found."""

    def __init__(self, store: Store, tiers: Sequence[TierState]) -> None:
        self._store = store
        self.running: dict[bytes, ObjectRead] = {}  # By the object's key.
        self.running_bytes: Counter[TierState] = Counter()  # Bytes of the slots in `running`.
        self.damaged = {tier: deque[JobItem]() for tier in tiers}
        """By tier, the records that wait for quarantine."""

    @property
    def room_bytes(self) -> int:
        """Bytes of RAM that a hit may take. Slots that are read into become objects for any hit."""
        running_bytes = sum(self.running_bytes.values())
        return len(self._store) - self._store.writing_bytes + running_bytes

    @property
    def expected_room_bytes(self) -> int:
        """Bytes of RAM that prefetches may still read into."""
        reading = sum(read.slot.size_bytes for read in self.running.values() if read.is_prefetch)
        return len(self._store) // EXPECTED_SHARE - self._store.expected_bytes - reading

    def is_busy(self, tier: TierState, size_bytes: int, is_prefetch: bool = False) -> bool:
        """Returns whether no job may begin now that reads `size_bytes` or more from the tier."""
        is_share_used = self.running_bytes[tier] > 0 and size_bytes > self._share_left(tier)
        spare = SPARE_READS if is_prefetch else 0
        return is_share_used or not tier.has_thread(JobKind.READ, spare)

    def begin_job(
        self, needs: Sequence[NeededObject], now: float, is_prefetch: bool = False
    ) -> int:
        """Begin to read the first objects of `needs` at once. Returns how many.

        They are in one tier, as many as it should move at once and as there are slots for. 0 = RAM
        has no slot for the first. A prefetch evicts nothing that is protected, and has a share.
        """
        tier = needs[0].tier
        bytes_max = min(tier.job_bytes(JobKind.READ, now), self._share_left(tier))
        room_bytes = self.expected_room_bytes if is_prefetch else len(self._store)
        items: list[JobItem] = []
        job_bytes = 0
        for need in islice(needs, JOB_ITEMS_MAX):
            record = need.record
            job_bytes += record.size_bytes
            is_enough = job_bytes > room_bytes or (job_bytes > bytes_max and items)
            if is_enough or need.tier is not tier or need.key in self.running:
                break
            granted = self._store.grant(record.shape, 1, spares_protected=is_prefetch)
            slot = next(iter(granted), None)
            if slot is None:
                break
            self.running[need.key] = ObjectRead(need, slot, is_prefetch)
            self.running_bytes[tier] += record.size_bytes
            items.append(JobItem(record._replace(seed=slot.generation), slot))
        if items:
            tier.submit_job(TierJob(JobKind.READ, tier.number, items), now)
        return len(items)

    def join_read(self, key: bytes) -> None:
        """A lookup waits for an object that is being read, whoever began the read."""
        self.running[key] = self.running[key]._replace(is_prefetch=False)

    def end_read(self, item: JobItem, error: TierError | None, tenant: int) -> Slot | None:
        """End the read of an object, which is in the item's slot now unless there is an error.

        Returns the slot that has the object: another one if RAM has the object by now, None if RAM
        does not keep it.
        """
        need, slot, is_prefetch = self.running.pop(item.key)
        tier, namespace = need.tier, need.namespace
        self.running_bytes[tier] -= slot.size_bytes
        if error is None:
            tier.suspects.discard(item.key)
        elif isinstance(error, DamagedError):
            self._queue_damaged(tier, item)
        if error is not None or not namespace.is_current:
            self._store.free_slot(slot)
            return None
        group_index, chunk_hash = need.place.group_index, need.record.name.chunk_hash
        new = NewObject(group_index, chunk_hash, need.parent, tenant=tenant)
        if not self._store.commit(slot, namespace, new, is_expected=is_prefetch):
            return namespace.find_slot(chunk_hash, group_index)
        slot.in_tiers |= tier.bit
        return slot

    def forget_read(self, key: bytes) -> None:
        """Keep nothing of the object if it is being read."""
        if (read := self.running.get(key)) is not None:
            read.slot.is_forgotten = True

    def discard_damaged(self, tier: TierState, now: float) -> None:
        """Put damaged records into quarantine, if there is a thread for it."""
        damaged = self.damaged[tier]
        if damaged and tier.has_thread(JobKind.DISCARD):
            items = [damaged.popleft() for _ in range(min(len(damaged), JOB_ITEMS_MAX))]
            tier.submit_job(TierJob(JobKind.DISCARD, tier.number, items), now)

    def _queue_damaged(self, tier: TierState, item: JobItem) -> None:
        damaged = self.damaged[tier]
        if len(damaged) < DAMAGED_MAX:
            damaged.append(item._replace(slot=None))
        else:
            tier.counters["damage_left"] += 1
        tier.suspect((item.key,))

    def _share_left(self, tier: TierState) -> int:
        """Returns the bytes of RAM that may still be read into from the tier at the same time."""
        return len(self._store) // READING_SHARE - self.running_bytes[tier]
