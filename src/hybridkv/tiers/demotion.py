"""Demotion: objects are written to tiers below, when they are stored or before they are evicted.

Of an answer, with which often nobody goes on, objects are written once somebody reads them, or
before they are evicted, wherever prompts are written when they are stored.
"""

import math
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from hybridkv.core.policies import EvictionClass
from hybridkv.core.tier_urls import WritePolicy
from hybridkv.store.index import Slot
from hybridkv.store.store import Store
from hybridkv.tiers.contract import FullError, MissingError
from hybridkv.tiers.jobs import JobItem, JobKind, JobOutcome, TierJob, WrongBytesError
from hybridkv.tiers.record import Record, record_of
from hybridkv.tiers.state import JOB_ITEMS_MAX, TierState

QUEUE_MAX = 1 << 16  # Objects that wait to be written to one tier; more are not written.
TRIES_MAX = 3
"""Writes of an object that fail, before it is given up; while all writes fail none is counted."""
LOOKS_MAX = 256  # Objects that are looked at in one turn of the loop.
HELD_SHARE = 8  # At most 1/8 of the arena is held for one tier, unless one object is more.
HELD_SHARE_ALL = 4  # At most 1/4 for all tiers; beyond that each of them has one job at a time.


class QueuedWrite(NamedTuple):
    """An object that waits to be written to one tier."""

    slot: Slot
    generation: int  # The slot's generation when the object was queued.
    is_read: bool  # Whether a lookup hit it.
    tries: int = 0
    is_admitted: bool = False  # Whether the tier's hourly bound has been charged with it.


class Demotion:
    """The queues of all tiers. Only objects that are being written are safe from eviction."""

    def __init__(self, store: Store, tiers: Sequence[TierState]) -> None:
        self._store = store
        self._tiers = tiers
        self._writing: dict[TierJob, Sequence[QueuedWrite]] = {}
        """What is queued again if the tier fails; empty for what would be evicted."""
        self._queues: list[deque[QueuedWrite]] = [deque() for _ in tiers]
        self._leaving: list[deque[JobItem]] = [deque() for _ in tiers]
        """Per tier the objects that would be evicted, and are held until they are written."""
        self._unqueued: deque[Slot] = deque()
        """Objects that were stored before a tier was open, and are in no queue yet."""
        self._looks = LOOKS_MAX  # How many more objects are looked at in this turn.
        self._held_bytes: Counter[TierState] = Counter()
        self._through = [tier for tier in tiers if tier.spec.write is WritePolicy.THROUGH]
        self._back = [tier for tier in tiers if tier.spec.write is WritePolicy.BACK]
        self._now = 0.0
        if self._back or self._through:
            store.before_evict = self._write_back

    @property
    def waiting(self) -> int:
        """Objects in all queues, those that are to be, and those that are being written."""
        return sum(map(len, self._queues)) + len(self._unqueued) + len(list(self.held()))

    def wakes_at(self) -> float:
        """When `pump` is due again: at once if the last turn left something to look at."""
        return math.inf if self._looks else 0.0

    def opened(self, slots: Iterable[Slot]) -> None:
        """A tier is open from now on; `slots` are all objects of the index."""
        self._unqueued = deque(slots)

    def stored(self, slots: Iterable[Slot]) -> None:
        """Queue new objects of the index, also those that were read from another tier."""
        asked = [slot for slot in slots if slot.eviction_class is not EvictionClass.GENERATED]
        self._queue(self._through, asked, is_read=False)

    def read(self, slots: Iterable[Slot]) -> None:
        """Queue objects that are hit, where they were not queued when they were stored.

        Those are what an hourly bound did not admit, and answers. To be called before `Store.pin`.
        """
        bounded = [tier for tier in self._through if tier.spec.hourly_bytes is not None]
        self._queue(bounded, slots if bounded else (), is_read=True)
        if self._through:
            answers = (slot for slot in slots if slot.eviction_class is EvictionClass.GENERATED)
            self._queue(self._through, answers, is_read=True)

    def pump(self, now: float) -> None:
        """Start what can be started."""
        self._now = now
        self._looks = LOOKS_MAX
        while self._unqueued and self._looks:
            self._looks -= 1
            self.stored((self._unqueued.popleft(),))
        for tier in self._tiers:
            self._write_leaving(tier, self._leaving[tier.number])
            self._write_queued(tier, self._queues[tier.number])

    def finished(self, tier: TierState, job: TierJob, outcome: JobOutcome) -> None:
        """Release the objects of a write job, and queue those again with which the tier failed."""
        queued = self._writing.pop(job)
        for at, item in enumerate(job.items):
            error = outcome.error or outcome.errors[at]
            if isinstance(error, WrongBytesError):
                self._store.drop(_slot(item))
            self._release(tier, item, is_written=error is None)
            is_final = isinstance(error, (WrongBytesError, FullError, MissingError))
            if queued and error is not None and not is_final:
                again = queued[at]
                if _is_there(again) and again.tries < TRIES_MAX:
                    # At the end, so that an object that always fails keeps nothing else waiting.
                    self._append(tier, again)

    def held(self) -> Iterator[Slot]:
        """Slots that are held, once for each time."""
        for items in [*self._leaving, *(job.items for job in self._writing)]:
            yield from map(_slot, items)

    # Queues

    def _queue(self, tiers: Sequence[TierState], slots: Iterable[Slot], is_read: bool) -> None:
        for slot in slots:
            for tier in tiers:
                if not slot.in_tiers & tier.bit and slot.entry is not None:
                    self._append(tier, QueuedWrite(slot, slot.generation, is_read))

    def _append(self, tier: TierState, queued: QueuedWrite) -> None:
        queue = self._queues[tier.number]
        if len(queue) >= QUEUE_MAX:
            tier.counters["objects_shed"] += 1
            return
        queued.slot.in_tiers |= tier.bit
        queue.append(queued)

    def _write_queued(self, tier: TierState, queue: deque[QueuedWrite]) -> None:
        while queue and self._looks and self._takes(tier):
            batch = self._batch(tier, queue)
            if not batch:
                break
            for item in batch:
                self._hold(tier, item)
            self._write(tier, list(batch), list(batch.values()))

    def _batch(self, tier: TierState, queue: deque[QueuedWrite]) -> dict[JobItem, QueuedWrite]:
        """What to write next, and how to queue it again. What has failed is tried alone."""
        batch: dict[JobItem, QueuedWrite] = {}
        job_bytes, share = 0, len(self._store) // HELD_SHARE
        most = min(tier.job_bytes(JobKind.WRITE, self._now), share)
        is_alone = False
        while queue and len(batch) < JOB_ITEMS_MAX and self._looks:
            self._looks -= 1
            queued, slot = queue[0], queue[0].slot
            if _is_there(queued):
                size = job_bytes + slot.size_bytes
                if batch and (size > most or is_alone or queued.tries):
                    break
                if not self._has_room(tier, size):
                    break
                record = self._to_write(tier, slot, queued.is_read, queued.is_admitted)
                if record is not None:
                    is_alone, job_bytes = queued.tries > 0, size
                    tries = queued.tries + (not tier.writing.is_open)
                    batch[JobItem(record, slot)] = queued._replace(tries=tries, is_admitted=True)
            queue.popleft()
        return batch

    def _to_write(
        self, tier: TierState, slot: Slot, is_read: bool, is_admitted: bool = False
    ) -> Record | None:
        """The record of an object, unless the tier has it or its hourly bound does not admit it."""
        record = record_of(slot)
        if tier.peek(record.name.key) is True:
            return None
        if is_admitted or tier.admits(slot.size_bytes, is_read, self._now):
            return record
        slot.in_tiers &= ~tier.bit
        return None

    # Eviction

    def _write_back(self, victim: Slot) -> bool:
        """Hold the objects of a chunk that is to be evicted, for each tier that takes them."""
        assert victim.entry is not None, "a victim is in the index"
        free = [slot for slot in victim.entry.slots if slot is not None and not slot.pins]
        late = [(slot, tier) for slot in free for tier in self._late_tiers(slot)]
        for slot, tier in late:
            is_wanted = not slot.in_tiers & tier.bit and tier.writes(self._now)
            if is_wanted and self._has_room(tier, slot.size_bytes):
                is_read = slot.eviction_class is not EvictionClass.GENERATED
                record = self._to_write(tier, slot, is_read)
                if record is not None:
                    slot.in_tiers |= tier.bit
                    self._leaving[tier.number].append(JobItem(record, slot))
                    self._hold(tier, self._leaving[tier.number][-1])
        return victim.pins > 0

    def _late_tiers(self, slot: Slot) -> list[TierState]:
        """The tiers to which an object is written before it is evicted."""
        is_answer = slot.eviction_class is EvictionClass.GENERATED
        return [*self._back, *self._through] if is_answer else self._back

    def _write_leaving(self, tier: TierState, leaving: deque[JobItem]) -> None:
        while leaving and self._takes(tier):
            items = [leaving.popleft()]
            size, most = items[0].record.size_bytes, tier.job_bytes(JobKind.WRITE, self._now)
            while leaving and len(items) < JOB_ITEMS_MAX:
                size += leaving[0].record.size_bytes
                if size > most:
                    break
                items.append(leaving.popleft())
            self._write(tier, items)
        if not tier.writes(self._now):
            # The tier became ill: nobody takes these objects, so they may be evicted.
            for item in leaving:
                self._release(tier, item)
            leaving.clear()

    # Held slots

    def _takes(self, tier: TierState) -> bool:
        return tier.writes(self._now) and tier.has_thread(JobKind.WRITE)

    def _write(
        self, tier: TierState, items: Sequence[JobItem], again: Sequence[QueuedWrite] = ()
    ) -> None:
        job = TierJob(JobKind.WRITE, tier.number, items)
        self._writing[job] = again
        tier.submit(job, self._now)

    def _hold(self, tier: TierState, item: JobItem) -> None:
        self._held_bytes[tier] += item.record.size_bytes
        self._store.hold((_slot(item),))

    def _release(self, tier: TierState, item: JobItem, is_written: bool = False) -> None:
        slot = _slot(item)
        self._held_bytes[tier] -= item.record.size_bytes
        if not is_written:
            slot.in_tiers &= ~tier.bit
        self._store.unpin((slot,))

    def _has_room(self, tier: TierState, size: int) -> bool:
        """Whether `size` bytes more may be held for a tier."""
        held, arena = self._held_bytes[tier], len(self._store)
        total = self._held_bytes.total()
        fits = held + size <= arena // HELD_SHARE and total + size <= arena // HELD_SHARE_ALL
        return not held or fits


def _slot(item: JobItem) -> Slot:
    assert item.slot is not None, "what is written has a slot"
    return item.slot


def _is_there(queued: QueuedWrite) -> bool:
    """Whether the object has not been evicted since it was queued."""
    return queued.slot.generation == queued.generation and queued.slot.entry is not None
