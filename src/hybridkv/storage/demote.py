"""What goes down: objects that tiers below are to have as well, from the time they are stored until they are there."""

import math
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from hybridkv.core.tiers import Write
from hybridkv.storage.line import JOB_ITEMS_MAX, Line
from hybridkv.storage.store import Slot, Store
from hybridkv.storage.tiers.base import FullError, MissingError
from hybridkv.storage.transfer import Item, Job, Outcome, Work, WrongBytesError

QUEUE_MAX = 1 << 16
"""Objects that wait to be written to one tier; more are not written."""
TRIES_MAX = 3
"""How often an object is tried that a tier fails with; while the tier fails with all that is not counted."""
LOOKS_MAX = 256
"""Objects that are looked at in one turn of the loop."""
HELD_SHARE = 8
"""At most 1/8 of the arena is held for writing to one tier, unless one object is more."""
HELD_SHARE_ALL = 4
"""At most 1/4 for all tiers; beyond that each of them has one object at a time."""


class Queued(NamedTuple):
    """An object that waits for its turn."""

    slot: Slot
    generation: int
    """Of the slot."""
    is_read: bool
    """Whether somebody read it."""
    tries: int = 0
    is_admitted: bool = False
    """Whether the hourly bound has been charged with it."""


class Demotion:
    """The queues of all tiers. A queued object may be evicted before its turn; one that is being written may not."""

    def __init__(self, store: Store, lines: Sequence[Line]) -> None:
        self._store = store
        self._lines = lines
        self._writing: dict[Job, Sequence[Queued]] = {}
        """With what is queued again if the tier fails; empty for what leaves."""
        self._queues: list[deque[Queued]] = [deque() for _ in lines]
        self._leaving: list[deque[Item]] = [deque() for _ in lines]
        """Per tier what would be evicted, and is held until it is written."""
        self._left: deque[Slot] = deque()
        """What was there before a tier was open, and no queue has yet."""
        self._looks = LOOKS_MAX
        """How many more objects are looked at in this turn."""
        self._held_bytes: Counter[Line] = Counter()
        self._backs = [line for line in lines if line.spec.write is Write.BACK]
        self._now = 0.0
        if self._backs:
            store.keeper = self._keep

    @property
    def waiting(self) -> int:
        """Objects in all queues, those that are to be, and those that are being written."""
        leaving = sum(map(len, self._leaving)) + sum(len(job.items) for job in self._writing)
        return sum(map(len, self._queues)) + len(self._left) + leaving

    def wakes_at(self) -> float:
        """When `pump` is due again, if it did not come to an end."""
        return math.inf if self._looks else 0.0

    def opened(self, slots: Iterable[Slot]) -> None:
        """All objects of the index, when a tier is there from now on: what an earlier daemon had no time to write."""
        self._left = deque(slots)

    def stored(self, slots: Iterable[Slot]) -> None:
        """New objects of the index, or such as came up from another tier."""
        lines = [line for line in self._lines if line.spec.write is Write.THROUGH]
        for slot in slots:
            for line in lines:
                self._queue(line, slot, is_read=False)

    def read(self, slots: Iterable[Slot]) -> None:
        """Objects that were hit: those that were not admitted when they were stored may be now."""
        through = [line for line in self._lines if line.spec.write is Write.THROUGH]
        lines = [line for line in through if line.spec.hourly_bytes is not None]
        for slot in slots if lines else ():
            for line in lines:
                self._queue(line, slot, is_read=True)

    def pump(self, now: float) -> None:
        """Start what can be started."""
        self._now = now
        self._looks = LOOKS_MAX
        while self._left and self._looks:
            self._looks -= 1
            self.stored((self._left.popleft(),))
        for line in self._lines:
            leaving, queue = self._leaving[line.number], self._queues[line.number]
            while leaving and line.writes(now) and line.has_thread(Work.WRITE):
                items = [leaving.popleft()]
                while (
                    leaving
                    and len(items) < JOB_ITEMS_MAX
                    and sum(item.record.size_bytes for item in (*items, leaving[0])) <= line.job_bytes(Work.WRITE, now)
                ):
                    items.append(leaving.popleft())
                self._write(line, items, now)
            if leaving and not line.writes(now):
                # The tier got sick meanwhile: what nobody takes may go.
                for item in leaving:
                    self._let_go(line, item)
                leaving.clear()
            while queue and self._looks and line.writes(now) and line.has_thread(Work.WRITE):
                if not self._has_room(line, queue[0].slot.size_bytes):
                    break
                batch = self._batch(line, queue, now)
                for item, _ in batch:
                    self._hold(line, item)
                if batch:
                    self._write(line, [item for item, _ in batch], now, [queued for _, queued in batch])

    def finished(self, line: Line, job: Job, outcome: Outcome) -> None:
        """A write came back."""
        queued = self._writing.pop(job)
        for at, item in enumerate(job.items):
            error = outcome.error or outcome.errors[at]
            if isinstance(error, WrongBytesError):
                self._store.drop(_slot(item))
            self._let_go(line, item, is_there=error is None)
            if queued and error is not None and not isinstance(error, (WrongBytesError, FullError, MissingError)):
                self._queue_again(line, queued[at])

    def _queue(self, line: Line, slot: Slot, is_read: bool) -> None:
        if slot.kept & line.bit or slot.entry is None:
            return
        queue = self._queues[line.number]
        if len(queue) >= QUEUE_MAX:
            line.counters["objects_shed"] += 1
            return
        slot.kept |= line.bit
        queue.append(Queued(slot, slot.generation, is_read))

    def _queue_again(self, line: Line, queued: Queued) -> None:
        """At the end, so that what always fails keeps nothing else waiting."""
        slot, queue = queued.slot, self._queues[line.number]
        if slot.generation != queued.generation or slot.entry is None or queued.tries >= TRIES_MAX:
            return
        if len(queue) >= QUEUE_MAX:
            line.counters["objects_shed"] += 1
            return
        slot.kept |= line.bit
        queue.append(queued)

    def _batch(self, line: Line, queue: deque[Queued], now: float) -> list[tuple[Item, Queued]]:
        """What is written next, and how it would be queued again. What has failed is tried alone."""
        batch: list[tuple[Item, Queued]] = []
        size, most = 0, line.job_bytes(Work.WRITE, now)
        is_alone = False
        while queue and len(batch) < JOB_ITEMS_MAX and self._looks:
            self._looks -= 1
            queued = queue[0]
            slot = queued.slot
            if slot.generation == queued.generation and slot.entry is not None:
                is_full = size + slot.size_bytes > most or not self._has_room(line, size + slot.size_bytes)
                if batch and (is_full or is_alone or queued.tries):
                    break
                record = self._store.record_of(slot)
                if line.tier.peek(record.name.key) is not True:
                    if queued.is_admitted or line.admits(slot.size_bytes, queued.is_read, now):
                        is_alone = queued.tries > 0
                        tries = queued.tries + (not line.is_probed)
                        batch.append((Item(record, slot), queued._replace(tries=tries, is_admitted=True)))
                        size += slot.size_bytes
                    else:
                        slot.kept &= ~line.bit
            queue.popleft()
        return batch

    def held(self) -> Iterator[Slot]:
        """Slots that are held, once for each time."""
        for items in [*self._leaving, *(job.items for job in self._writing)]:
            yield from (_slot(item) for item in items)

    def _write(self, line: Line, items: list[Item], now: float, queued: Sequence[Queued] = ()) -> None:
        job = Job(Work.WRITE, line.number, items)
        self._writing[job] = queued
        line.submit(job, now)

    def _hold(self, line: Line, item: Item) -> None:
        self._held_bytes[line] += item.record.size_bytes
        self._store.hold((_slot(item),))

    def _let_go(self, line: Line, item: Item, is_there: bool = False) -> None:
        slot = _slot(item)
        self._held_bytes[line] -= item.record.size_bytes
        if not is_there:
            slot.kept &= ~line.bit
        self._store.unpin((slot,))

    def _has_room(self, line: Line, size: int) -> bool:
        held, arena = self._held_bytes[line], len(self._store)
        fits = held + size <= arena // HELD_SHARE and self._held_bytes.total() + size <= arena // HELD_SHARE_ALL
        return not held or fits

    def _keep(self, victim: Slot) -> bool:
        """An object is about to be evicted, and with it those of its chunk: write them first, if a tier takes them."""
        assert victim.entry is not None, "what goes is in the index"
        for slot in victim.entry.slots:
            if slot is not None and not slot.pins:
                for line in self._backs:
                    self._offer(line, slot)
        return victim.pins > 0

    def _offer(self, line: Line, slot: Slot) -> None:
        if slot.kept & line.bit or not line.writes(self._now) or not self._has_room(line, slot.size_bytes):
            return
        record = self._store.record_of(slot)
        if line.tier.peek(record.name.key) is not True and line.admits(slot.size_bytes, True, self._now):
            slot.kept |= line.bit
            item = Item(record, slot)
            self._hold(line, item)
            self._leaving[line.number].append(item)


def _slot(item: Item) -> Slot:
    assert item.slot is not None, "what is written has a slot"
    return item.slot
