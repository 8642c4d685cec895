"""The order in which items are evicted. Pure: ticks instead of a clock, and items of any type.

Four stages, each least recently used first, and emptied in this order. A fifth one is not emptied::

    interior    stored after the end of a prompt's prefix and never read: longer hits do without it;
                or a tail that one prompt read and went on after
    generated   stored with tokens of an answer and never read, as far as it is more than its part
                of the bytes; the rest of it is as old as probation's and goes with that
    probation   stored and never read, or not read for long
    protected   read, or stored again soon after its eviction; only in a part of the bytes
    retained    kept for a time (store.retention); the item's own stage goes on meanwhile, and it is
                there again at the end of that time. The parts of the others are parts of the rest

A scan, prompts that nobody repeats, passes through probation and does not evict what is read.
Answers that nobody goes on with pass through their part and evict no prompt, and a conversation
finds its last answer there.
docs/decisions/0004 and 0014 have the figures behind the defaults.
"""

import heapq
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from itertools import count
from typing import Generic, TypeVar

from hybridkv.core.policies import EvictionClass

T = TypeVar("T", bound=Hashable)

PROTECTED_SHARE = 2  # At most 1/2 of the bytes are protected.
GENERATED_SHARE = 16  # Of more than 1/16 of the bytes, unread answers go before unread prompts.
_STALE_MAX = 64
_INTERIOR, _GENERATED, _PROBATION, PROTECTED, _RETAINED = range(5)
"""The stages, where items wait for their eviction."""
_STAGES = {
    EvictionClass.INTERIOR: _INTERIOR,
    EvictionClass.UNLIKELY: _INTERIOR,
    EvictionClass.GENERATED: _GENERATED,
    EvictionClass.PROMPT: _PROBATION,
}


@dataclass(slots=True, eq=False)
class _QueuedItem:
    """The state of one item. `entry` is the number of its one valid heap entry, 0 = none."""

    stage: int
    size: int
    tick: int
    entry: int = 0
    own_stage: int = 0
    """While the item is retained, the stage in which it would be otherwise."""


class EvictionQueue(Generic[T]):
    """The order of eviction. `victim` asks of each candidate whether it may go at all."""

    def __init__(self, bound_bytes: int) -> None:
        """`bound_bytes` bounds all items together, and so the protected items and the ghosts."""
        self.bound_bytes = bound_bytes
        self.items: dict[T, _QueuedItem] = {}
        self.heaps: tuple[list[tuple[int, int, T]], ...] = ([], [], [], [], [])
        """By stage, a heap of (tick, entry number, item). An item's tick may have grown since.

        An entry whose number is not the item's own is stale, and is skipped when it is met.
        """
        self.stale = 0  # Stale entries of all heaps.
        self._numbers = count(1)
        self._stage_bytes = [0] * len(self.heaps)
        self.ghosts: OrderedDict[bytes, int] = OrderedDict()
        """The bytes of items that were evicted unread, by their key, oldest first."""
        self.ghost_bytes = 0

    @property
    def protected_bytes(self) -> int:
        """The bytes of the protected items."""
        return self._stage_bytes[PROTECTED]

    @property
    def retained_bytes(self) -> int:
        """The bytes of the retained items."""
        return self._stage_bytes[_RETAINED]

    @property
    def _has_many_answers(self) -> bool:
        return self._stage_bytes[_GENERATED] > self._other_bytes // GENERATED_SHARE

    @property
    def _other_bytes(self) -> int:
        """The bytes that are left to items that are not retained."""
        return self.bound_bytes - self._stage_bytes[_RETAINED]

    def add_item(self, item: T, size: int, eviction_class: EvictionClass, key: bytes) -> None:
        """Add a new item of `size` bytes. By `key` it is recognized after its eviction."""
        stage = _STAGES[eviction_class]
        queued = self.items[item] = _QueuedItem(stage, size, next(self._numbers))
        self._stage_bytes[stage] += size
        ghost = self.ghosts.pop(key, None)
        if ghost is not None:
            self.ghost_bytes -= ghost
            self._move(queued, PROTECTED)
        self.offer(item)

    def mark_used(self, items: Iterable[T]) -> list[T]:
        """Note that the items are read, all at once.

        Returns those that changed their stage, which are no victims before `offer`.
        """
        tick = next(self._numbers)
        known = self.items
        moved: list[T] = []
        for item in items:
            queued = known[item]
            queued.tick = tick
            if queued.stage == _RETAINED:
                queued.own_stage = PROTECTED
            elif queued.stage != PROTECTED:
                self._move(queued, PROTECTED)
                moved.append(item)
        return moved

    def renew_items(self, items: Iterable[T]) -> None:
        """Note that the items are expected: the most recently used ones of their stages."""
        tick = next(self._numbers)
        for item in items:
            self.items[item].tick = tick

    def is_protected(self, item: T) -> bool:
        """Return True where the item is in the last stage."""
        return self.items[item].stage == PROTECTED

    def demote(self, item: T) -> None:
        """Make the item an interior one. It is a victim again after `offer` only."""
        queued = self.items[item]
        if queued.stage == _RETAINED:
            queued.own_stage = _INTERIOR
        else:
            self._move(queued, _INTERIOR)

    def retain_item(self, item: T) -> None:
        """Make the item no victim until `end_retention`. Offer it after both."""
        queued = self.items[item]
        assert queued.stage != _RETAINED
        queued.own_stage = queued.stage
        self._move(queued, _RETAINED)

    def end_retention(self, item: T) -> None:
        """Put a retained item into its own stage, as old there as its last use."""
        queued = self.items[item]
        assert queued.stage == _RETAINED
        self._move(queued, queued.own_stage)

    def offer(self, item: T) -> None:
        """Consider the item for eviction from now on, because it may go again."""
        queued = self.items[item]
        if not queued.entry:
            queued.entry = next(self._numbers)
            heapq.heappush(self.heaps[queued.stage], (queued.tick, queued.entry, item))

    def remove(self, item: T) -> None:
        """Forget the item, which was evicted or dropped."""
        queued = self.items.pop(item)
        self._move(queued, queued.stage)
        self._stage_bytes[queued.stage] -= queued.size
        if self.stale > len(self.items) + _STALE_MAX:
            valid = {queued.entry for queued in self.items.values()}
            for heap in self.heaps:
                heap[:] = [item for item in heap if item[1] in valid]
                heapq.heapify(heap)
            self.stale = 0

    def remember(self, item: T, key: bytes) -> None:
        """Keep the key of an item that is about to be evicted. Stored again soon, it is protected.

        Items that were protected, and answers that nobody read, are not remembered.
        """
        queued = self.items[item]
        is_scan = queued.stage == _GENERATED and self._has_many_answers
        if queued.stage == PROTECTED or is_scan:
            return
        self.ghosts[key] = self.ghosts.pop(key, 0) + queued.size
        self.ghost_bytes += queued.size
        while self.ghost_bytes > self.bound_bytes:
            self.ghost_bytes -= self.ghosts.popitem(last=False)[1]

    def victim(self, is_evictable: Callable[[T], bool], spares_protected: bool = False) -> T | None:
        """Return the item to evict next, which stays until `remove`. None where no item may go.

        Items for which `is_evictable` is false are not considered again before they are offered.
        With `spares_protected` the protected stage stays as it is.
        """
        found = self._oldest(_INTERIOR, is_evictable)
        if found is not None:
            return found
        if self._has_many_answers:
            found = self._oldest(_GENERATED, is_evictable)
            if found is not None:
                return found
        is_over = self._stage_bytes[PROTECTED] > self._other_bytes // PROTECTED_SHARE
        if is_over and not spares_protected:
            # One at a time: after its eviction the prefix before it may go, and is the next.
            cold = self._oldest(PROTECTED, is_evictable)
            if cold is not None:
                self._move(self.items[cold], _PROBATION)
                self.offer(cold)
        unread = [self._oldest(stage, is_evictable) for stage in (_GENERATED, _PROBATION)]
        oldest = min(
            (item for item in unread if item is not None),
            key=lambda item: self.items[item].tick,
            default=None,
        )
        if oldest is not None or spares_protected:
            return oldest
        return self._oldest(PROTECTED, is_evictable)

    def retained_victim(self, is_evictable: Callable[[T], bool]) -> T | None:
        """Return the retained item to evict next, as `victim` does of the others."""
        return self._oldest(_RETAINED, is_evictable)

    def _oldest(self, stage: int, is_evictable: Callable[[T], bool]) -> T | None:
        """Return the least recently used item of a stage that may go."""
        heap = self.heaps[stage]
        while heap:
            tick, entry, item = heap[0]
            queued = self.items.get(item)
            if queued is None or queued.entry != entry:
                heapq.heappop(heap)
                self.stale -= 1
            elif not is_evictable(item):
                heapq.heappop(heap)
                queued.entry = 0
            elif queued.tick != tick:
                heapq.heapreplace(heap, (queued.tick, entry, item))
            else:
                return item
        return None

    def _move(self, queued: _QueuedItem, stage: int) -> None:
        """Put an item into a stage. It is no candidate before it is offered there."""
        self.stale += bool(queued.entry)
        queued.entry = 0
        self._stage_bytes[queued.stage] -= queued.size
        self._stage_bytes[stage] += queued.size
        queued.stage = stage
