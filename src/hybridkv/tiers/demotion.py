"""Demotion: objects are written to tiers below, when they are stored or before they are evicted.

Objects for which others may wait (`is_first`) are written before all others that wait, in the order
in which they were stored.

Generated text is rarely reused. With `write=through` a tier receives prompts at once, and generated
text only after its first hit or just before its eviction. Windows inside a prompt, where a hit
seldom ends (core.eviction_classes), go to tiers after their first hit, and not before.

Tiers do not see the hits of RAM. So each object that is hit is reported to them now and then. A
tier evicts what is used last, and records that it lost or refused are written again.
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
from hybridkv.tiers.health import JOB_ITEMS_MAX, TierState
from hybridkv.tiers.jobs import JobItem, JobKind, JobOutcome, TierJob, WrongBytesError
from hybridkv.tiers.record import record_of

QUEUE_MAX = 1 << 16
"""Objects that wait to be written to one tier, first or after those. More are not written."""
TRIES_MAX = 3
"""Failed writes of an object after which it is given up. While all writes fail, none counts."""
LOOKS_MAX = 256  # Objects that are looked at in one turn of the loop.
USE_SECONDS = 600.0
"""The least time between two reports of a use of one object. With S3 a report is a HEAD."""
HELD_SHARE = 8  # At most 1/8 of the arena is held for one tier, unless one object is more.
HELD_SHARE_ALL = 4  # At most 1/4 for all tiers. Beyond that each of them has one job at a time.


class QueuedWrite(NamedTuple):
    """An object that waits to be written to one tier."""

    slot: Slot
    generation: int  # The slot's generation when the object was queued.
    is_read: bool  # Whether a lookup hit it.
    tries: int = 0
    is_admitted: bool = False  # Whether the tier's hourly bound was charged with it.
    is_first: bool = False  # Whether it is written before those that are not.


class Demotion:
    """The queues of writes to all tiers. Only objects that are being written cannot be evicted."""

    def __init__(self, store: Store, tiers: Sequence[TierState]) -> None:
        self._store = store
        self.tiers = tiers
        self.writing: dict[TierJob, Sequence[QueuedWrite]] = {}
        """By job, what is queued again where the tier fails. Empty for objects in eviction."""
        self._first: list[deque[QueuedWrite]] = [deque() for _ in tiers]
        self._queues: list[deque[QueuedWrite]] = [deque() for _ in tiers]
        """Per tier, the objects that wait to be written, after those of `_first`."""
        self.leaving: list[deque[JobItem]] = [deque() for _ in tiers]
        """Per tier, objects in eviction, which are held until they are written."""
        self._uses: list[deque[QueuedWrite]] = [deque(maxlen=QUEUE_MAX) for _ in tiers]
        """Per tier, objects that it should have, whose hit is to be reported to it."""
        self._use_jobs: dict[TierJob, Sequence[QueuedWrite]] = {}
        self._unqueued: deque[Slot] = deque()
        """Objects that were stored before a tier was open, and are in no queue yet."""
        self._demoted: deque[QueuedWrite] = deque()
        """Objects that are evicted first once they are in no queue, in the order of their wish."""
        self._looks_left = LOOKS_MAX  # Objects that may still be looked at in this turn.
        self.held_bytes: Counter[TierState] = Counter()
        self.unwanted: list[deque[bytes]] = [deque() for _ in tiers]
        """Per tier, the keys of records that were written while their objects were forgotten."""
        self._through = [tier for tier in tiers if tier.spec.write is WritePolicy.THROUGH]
        self._back = [tier for tier in tiers if tier.spec.write is WritePolicy.BACK]
        self._now = 0.0
        if self._back or self._through:
            store.before_evict = self._write_back

    @property
    def waiting(self) -> int:
        """The number of objects in all queues, not queued yet, or being written."""
        queued = sum(map(len, (*self._first, *self._queues)))
        return queued + len(self._unqueued) + len(list(self.held_slots()))

    def wakes_at(self) -> float:
        """Returns when `tick` is due again: at once if the last turn left objects to look at."""
        return math.inf if self._looks_left else 0.0

    def queue_all(self, slots: Iterable[Slot]) -> None:
        """Queue all objects of the index, because a tier has been opened."""
        self._unqueued = deque(slots)

    def queue_stored(self, slots: Iterable[Slot], is_first: bool = False) -> None:
        """Queue new objects of the index, also objects that were read from another tier.

        With `is_first` they are written before all that were queued without it.
        """
        prompt_slots = []
        for slot in slots:
            slot.used_at = self._now
            if slot.eviction_class is EvictionClass.UNLIKELY:
                for tier in (*self._through, *self._back):
                    if not slot.in_tiers & tier.bit:
                        tier.counters["bytes_left_out"] += slot.size_bytes
            elif slot.eviction_class is not EvictionClass.GENERATED:
                prompt_slots.append(slot)
        self._queue(self._through, prompt_slots, is_read=False, is_first=is_first)

    def queue_hit(self, slots: Sequence[Slot]) -> None:
        """Queue objects that a lookup hits, where they were not queued when they were stored.

        An hourly bound did not admit them, or they are answers or windows inside a prompt. Once
        each USE_SECONDS, objects that a tier refused are queued too. Call it before `Store.pin`.
        """
        if not self.tiers:
            return
        bounded = [tier for tier in self._through if tier.spec.hourly_bytes is not None]
        self._queue(bounded, slots if bounded else (), is_read=True)
        if self._through:
            prompt = EvictionClass.PROMPT
            late = [slot for slot in slots if slot.eviction_class is not prompt]
            self._queue(self._through, late, is_read=True)
        used_before = self._now - USE_SECONDS
        due = [slot for slot in slots if slot.used_at <= used_before]
        for slot in due:
            slot.used_at = self._now
            for tier in self.tiers:
                if slot.in_tiers & tier.bit:
                    used = QueuedWrite(slot, slot.generation, is_read=True)
                    self._uses[tier.number].append(used)
        self._queue(self._through, due, is_read=True)

    def queue_demotion(self, slot: Slot) -> None:
        """Write an object to the tiers that take it, and make it one that goes first then."""
        if slot.eviction_class is not EvictionClass.UNLIKELY:
            self._queue((*self._through, *self._back), (slot,), is_read=True)
        if slot.queued_in and len(self._demoted) < QUEUE_MAX:
            self._demoted.append(QueuedWrite(slot, slot.generation, is_read=True))
        else:
            self._store.let_go_first(slot)

    def tick(self, now: float) -> None:
        """Submit the jobs for which there are threads and room."""
        self._now = now
        self._looks_left = LOOKS_MAX
        while self._unqueued and self._looks_left:
            self._looks_left -= 1
            self.queue_stored((self._unqueued.popleft(),))
        for tier in self.tiers:
            self._write_leaving(tier, self.leaving[tier.number])
            first = self._first[tier.number]
            self._write_queued(tier, first)
            if not first:  # Else smaller objects would take the room for which it waits.
                self._write_queued(tier, self._queues[tier.number])
            self._report_uses(tier, self._uses[tier.number])
        while self._demoted and self._looks_left:
            queued = self._demoted[0]
            if _is_there(queued) and queued.slot.queued_in:
                break
            self._looks_left -= 1
            self._demoted.popleft()
            if _is_there(queued):
                self._store.let_go_first(queued.slot)

    def on_write_done(self, tier: TierState, job: TierJob, outcome: JobOutcome) -> None:
        """Release the objects of a WRITE job, and queue again those with which the tier failed."""
        queued = self.writing.pop(job)
        for at, item in enumerate(job.items):
            error = outcome.error or outcome.errors[at]
            if isinstance(error, WrongBytesError):
                self._store.drop(_slot(item))
            if _slot(item).is_forgotten:
                # Also after an error: a write that was given up may still come.
                self.unwanted[tier.number].append(item.key)
            self._release(tier, item, is_written=error is None)
            if error is None and item.replaces:
                tier.suspects.discard(item.key)
            if outcome.found and outcome.found[at]:
                tier.refund(item.record.size_bytes)
            is_final = isinstance(error, (WrongBytesError, FullError, MissingError))
            if queued and error is not None and not is_final:
                again = queued[at]
                if again.tries >= TRIES_MAX:
                    tier.counters["objects_given_up"] += 1
                elif _is_there(again):
                    # At the end, so that an object that always fails does not block the others.
                    self._append(tier, again)

    def on_use_done(self, tier: TierState, job: TierJob, outcome: JobOutcome) -> None:
        """Write the objects of a USE job again that the tier says it does not have any more."""
        for queued, is_there in zip(self._use_jobs.pop(job), outcome.found, strict=False):
            if is_there is False and _is_there(queued):
                queued.slot.in_tiers &= ~tier.bit
                if tier in self._through:
                    self._queue((tier,), (queued.slot,), is_read=True)

    def forget_leaving(self) -> None:
        """Write no forgotten object that waits for it before its eviction."""
        for tier in self.tiers:
            leaving = self.leaving[tier.number]
            forgotten = [item for item in leaving if _slot(item).is_forgotten]
            for item in forgotten:
                leaving.remove(item)
                self._release(tier, item)

    def held_slots(self) -> Iterator[Slot]:
        """Yields the slots that are held, each as often as it is held."""
        for items in [*self.leaving, *(job.items for job in self.writing)]:
            yield from map(_slot, items)

    # Queues

    def _queue(
        self,
        tiers: Sequence[TierState],
        slots: Iterable[Slot],
        is_read: bool,
        is_first: bool = False,
    ) -> None:
        for slot in slots:
            for tier in tiers:
                if not (slot.in_tiers | slot.queued_in) & tier.bit and slot.entry is not None:
                    queued = QueuedWrite(slot, slot.generation, is_read, is_first=is_first)
                    self._append(tier, queued)

    def _append(self, tier: TierState, queued: QueuedWrite) -> None:
        queue = (self._first if queued.is_first else self._queues)[tier.number]
        if len(queue) >= QUEUE_MAX:
            tier.counters["objects_shed"] += 1
            return
        queued.slot.queued_in |= tier.bit
        queue.append(queued)

    def _report_uses(self, tier: TierState, uses: deque[QueuedWrite]) -> None:
        while (
            uses and self._looks_left and tier.may_read(self._now) and tier.has_thread(JobKind.USE)
        ):
            batch: list[QueuedWrite] = []
            while uses and self._looks_left and len(batch) < JOB_ITEMS_MAX:
                self._looks_left -= 1
                if _is_there(uses[0]):
                    batch.append(uses[0])
                uses.popleft()
            if batch:
                items = [JobItem(record_of(queued.slot)) for queued in batch]
                job = TierJob(JobKind.USE, tier.number, items)
                self._use_jobs[job] = batch
                tier.submit_job(job, self._now)

    def _write_queued(self, tier: TierState, queue: deque[QueuedWrite]) -> None:
        while queue and self._looks_left and self._can_write(tier):
            batch = self._batch(tier, queue)
            if not batch:
                break
            for item in batch:
                self._hold(tier, item)
            self._write(tier, list(batch), list(batch.values()))

    def _batch(self, tier: TierState, queue: deque[QueuedWrite]) -> dict[JobItem, QueuedWrite]:
        """Takes the next objects to write from the queue. Returns how to queue each again.

        An object that has failed is written alone.
        """
        batch: dict[JobItem, QueuedWrite] = {}
        job_bytes, share = 0, len(self._store) // HELD_SHARE
        most = min(tier.job_bytes(JobKind.WRITE, self._now), share)
        is_alone = False
        while queue and len(batch) < JOB_ITEMS_MAX and self._looks_left:
            self._looks_left -= 1
            queued, slot = queue[0], queue[0].slot
            if _is_there(queued):
                size = job_bytes + slot.size_bytes
                if batch and (size > most or is_alone or queued.tries):
                    break
                if not self._has_room(tier, size):
                    break
                item = self._to_write(tier, slot, queued.is_read, queued.is_admitted)
                if item is not None:
                    is_alone, job_bytes = queued.tries > 0, size
                    tries = queued.tries + (not tier.writing.is_open)
                    batch[item] = queued._replace(tries=tries, is_admitted=True)
            queue.popleft()
        return batch

    def _to_write(
        self, tier: TierState, slot: Slot, is_read: bool, is_admitted: bool = False
    ) -> JobItem | None:
        """Returns the item of a write, or None where the tier has it, or does not admit it."""
        record = record_of(slot)
        is_suspect = record.name.key in tier.suspects
        slot.queued_in &= ~tier.bit
        if tier.peek(record.name.key) is True and not is_suspect:
            slot.in_tiers |= tier.bit
        elif is_admitted or tier.charge_hour(slot.size_bytes, is_read, self._now):
            slot.queued_in |= tier.bit
            return JobItem(record, slot, replaces=is_suspect)
        return None

    # Eviction

    def _write_back(self, victim: Slot) -> bool:
        """Hold the objects of a victim's chunk for each tier that takes them, as `before_evict`.

        Returns whether the victim is held, so that it is not evicted now.
        """
        assert victim.entry is not None, "a victim is in the index"
        free = [slot for slot in victim.entry.slots if slot is not None and not slot.pins]
        late = [(slot, tier) for slot in free for tier in self._tiers_written_on_eviction(slot)]
        # Tiers that do not get the victim: their queue comes too late, or they cannot take it.
        lost = [tier for tier in self.tiers if victim.queued_in & tier.bit]
        for slot, tier in late:
            if (slot.in_tiers | slot.queued_in) & tier.bit:
                continue
            if not (tier.may_write(self._now) and self._has_room(tier, slot.size_bytes)):
                if slot is victim:
                    lost.append(tier)
                continue
            is_read = slot.eviction_class is not EvictionClass.GENERATED
            item = self._to_write(tier, slot, is_read)
            if item is not None:
                self.leaving[tier.number].append(item)
                self._hold(tier, item)
        if not victim.pins:
            for tier in lost:
                tier.counters["objects_shed"] += 1
        return victim.pins > 0

    def _tiers_written_on_eviction(self, slot: Slot) -> list[TierState]:
        """Returns the tiers to which an object is written before it is evicted."""
        if slot.eviction_class is EvictionClass.UNLIKELY:
            return []
        is_answer = slot.eviction_class is EvictionClass.GENERATED
        return [*self._back, *self._through] if is_answer else self._back

    def _write_leaving(self, tier: TierState, leaving: deque[JobItem]) -> None:
        while leaving and self._can_write(tier):
            items = [leaving.popleft()]
            size, most = items[0].record.size_bytes, tier.job_bytes(JobKind.WRITE, self._now)
            while leaving and len(items) < JOB_ITEMS_MAX:
                size += leaving[0].record.size_bytes
                if size > most:
                    break
                items.append(leaving.popleft())
            self._write(tier, items)
        if not tier.may_write(self._now):
            # The tier became ill. It takes none of these objects, so they may be evicted.
            tier.counters["objects_shed"] += len(leaving)
            for item in leaving:
                self._release(tier, item)
            leaving.clear()

    # Held slots

    def _can_write(self, tier: TierState) -> bool:
        return tier.may_write(self._now) and tier.has_thread(JobKind.WRITE)

    def _write(
        self, tier: TierState, items: Sequence[JobItem], again: Sequence[QueuedWrite] = ()
    ) -> None:
        job = TierJob(JobKind.WRITE, tier.number, items)
        self.writing[job] = again
        tier.submit_job(job, self._now)

    def _hold(self, tier: TierState, item: JobItem) -> None:
        self.held_bytes[tier] += item.record.size_bytes
        self._store.hold((_slot(item),))

    def _release(self, tier: TierState, item: JobItem, is_written: bool = False) -> None:
        slot = _slot(item)
        self.held_bytes[tier] -= item.record.size_bytes
        slot.queued_in &= ~tier.bit
        if is_written:
            slot.in_tiers |= tier.bit
        self._store.unpin((slot,))

    def _has_room(self, tier: TierState, size: int) -> bool:
        """Returns whether `size` more bytes may be held for a tier."""
        held, arena = self.held_bytes[tier], len(self._store)
        total = self.held_bytes.total()
        fits = held + size <= arena // HELD_SHARE and total + size <= arena // HELD_SHARE_ALL
        return not held or fits


def _slot(item: JobItem) -> Slot:
    assert item.slot is not None, "what is written has a slot"
    return item.slot


def _is_there(queued: QueuedWrite) -> bool:
    """Returns whether the object has not been evicted since it was queued."""
    return queued.slot.generation == queued.generation and queued.slot.entry is not None
