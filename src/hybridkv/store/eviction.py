"""The order in which items are evicted. Pure: ticks instead of a clock, and items of any type.

Three stages, each least recently used first, and emptied in this order::

    interior    stored behind the end of a prompt's prefix and never read: longer hits do without it
    probation   stored and never read, or not read for long
    protected   read, or stored again soon after its eviction; only with the policy "2q", and only
                in a part of the bytes

With "2q" a scan, prompts that nobody repeats, passes through probation and does not evict what is
read; with "lru" a read item is the most recently used one of probation. docs/decisions/0004 has the
figures behind the defaults.
"""

import heapq
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from enum import IntEnum
from itertools import count
from typing import Generic, TypeVar

from hybridkv.core.policies import EvictionPolicy

T = TypeVar("T", bound=Hashable)

PROTECTED_SHARE = 2
"""At most 1/2 of the bytes are protected."""
_STALE_MAX = 64


class EvictionStage(IntEnum):
    """Where an item waits for its eviction."""

    INTERIOR = 0
    PROBATION = 1
    PROTECTED = 2


class _QueuedItem:
    """The state of one item. `entry` numbers its one valid entry in a heap; 0 = it has none."""

    __slots__ = ("entry", "size", "stage", "tick")

    def __init__(self, stage: EvictionStage, size: int, tick: int) -> None:
        self.stage = stage
        self.size = size
        self.tick = tick
        self.entry = 0


class EvictionQueue(Generic[T]):
    """The order of eviction. Whether an item may go at all is asked when one is looked for."""

    def __init__(self, policy: EvictionPolicy, bound_bytes: int) -> None:
        """`bound_bytes` bounds all items together, and so the protected and the remembered ones."""
        self._two_queues = policy is EvictionPolicy.TWO_QUEUES
        self._protected_max = bound_bytes // PROTECTED_SHARE
        self._items: dict[T, _QueuedItem] = {}
        self._heaps: dict[EvictionStage, list[tuple[int, int, T]]] = {
            stage: [] for stage in EvictionStage
        }
        """(tick, entry, item). The item's tick may have grown; other entries of it are stale."""
        self._stale = 0
        self._ticks = count(1)
        self._entries = count(1)
        self.protected_bytes = 0
        self._ghosts_max = bound_bytes
        self._ghosts: OrderedDict[bytes, int] = OrderedDict()
        """The bytes of items that were evicted unread, by their key, oldest first."""
        self._ghost_bytes = 0

    def add(self, item: T, size: int, interior: bool, key: bytes) -> None:
        """Add a new item of `size` bytes; by `key` it is recognized after its eviction."""
        stage = EvictionStage.INTERIOR if interior else EvictionStage.PROBATION
        ghost = self._ghosts.pop(key, None)
        if ghost is not None:
            self._ghost_bytes -= ghost
            stage = EvictionStage.PROTECTED
            self.protected_bytes += size
        self._items[item] = _QueuedItem(stage, size, next(self._ticks))
        self.offer(item)

    def use(self, items: Iterable[T]) -> None:
        """The items are read, all at once. They may not go until each of them is offered again."""
        tick = next(self._ticks)
        wanted = EvictionStage.PROTECTED if self._two_queues else EvictionStage.PROBATION
        known = self._items
        for item in items:
            queued = known[item]
            queued.tick = tick
            if queued.stage is not wanted:
                self._withdraw(queued)
                self._move(queued, wanted)

    def offer(self, item: T) -> None:
        """Consider the item from now on, because it may go again."""
        queued = self._items[item]
        if not queued.entry:
            queued.entry = next(self._entries)
            heapq.heappush(self._heaps[queued.stage], (queued.tick, queued.entry, item))

    def remove(self, item: T) -> None:
        """Forget the item, which is gone for whatever reason."""
        queued = self._items.pop(item)
        self._withdraw(queued)
        if queued.stage is EvictionStage.PROTECTED:
            self.protected_bytes -= queued.size
        if self._stale > len(self._items) + _STALE_MAX:
            self._tidy()

    def remember(self, item: T, key: bytes) -> None:
        """Note that the item is about to be evicted: stored again soon, it is protected."""
        queued = self._items[item]
        if not self._two_queues or queued.stage is EvictionStage.PROTECTED:
            return
        self._ghosts[key] = self._ghosts.pop(key, 0) + queued.size
        self._ghost_bytes += queued.size
        while self._ghost_bytes > self._ghosts_max:
            self._ghost_bytes -= self._ghosts.popitem(last=False)[1]

    def victim(self, may_go: Callable[[T], bool]) -> T | None:
        """The item to evict next, which stays until `remove`; None where no item may go.

        Items for which `may_go` is false are not considered again before they are offered.
        """
        found = self._oldest(EvictionStage.INTERIOR, may_go)
        if found is not None:
            return found
        if self.protected_bytes > self._protected_max:
            # One at a time: after its eviction the prefix before it may go, and is the next.
            cold = self._oldest(EvictionStage.PROTECTED, may_go)
            if cold is not None:
                queued = self._items[cold]
                self._withdraw(queued)
                self._move(queued, EvictionStage.PROBATION)
                self.offer(cold)
        found = self._oldest(EvictionStage.PROBATION, may_go)
        return found if found is not None else self._oldest(EvictionStage.PROTECTED, may_go)

    def check(self, may_go: Callable[[T], bool]) -> None:
        """Re-derive every count, and that all that may go is offered; raises AssertionError."""
        offered = {entry for heap in self._heaps.values() for _, entry, _ in heap}
        for item, queued in self._items.items():
            assert queued.entry in offered or (not queued.entry and not may_go(item))
        items = self._items.values()
        protected = [queued.size for queued in items if queued.stage is EvictionStage.PROTECTED]
        assert sum(protected) == self.protected_bytes
        assert self._stale == len(offered) - sum(1 for queued in items if queued.entry)
        assert sum(self._ghosts.values()) == self._ghost_bytes <= self._ghosts_max

    def __contains__(self, item: T) -> bool:
        return item in self._items

    def __len__(self) -> int:
        return len(self._items)

    def _oldest(self, stage: EvictionStage, may_go: Callable[[T], bool]) -> T | None:
        heap = self._heaps[stage]
        while heap:
            tick, entry, item = heap[0]
            queued = self._items.get(item)
            if queued is None or queued.entry != entry:
                heapq.heappop(heap)
                self._stale -= 1
            elif not may_go(item):
                heapq.heappop(heap)
                queued.entry = 0
            elif queued.tick != tick:
                heapq.heapreplace(heap, (queued.tick, entry, item))
            else:
                return item
        return None

    def _withdraw(self, queued: _QueuedItem) -> None:
        if queued.entry:
            queued.entry = 0
            self._stale += 1

    def _move(self, queued: _QueuedItem, stage: EvictionStage) -> None:
        protected = EvictionStage.PROTECTED
        self.protected_bytes += queued.size * ((stage is protected) - (queued.stage is protected))
        queued.stage = stage

    def _tidy(self) -> None:
        for heap in self._heaps.values():
            heap[:] = [
                one for one in heap if one[2] in self._items and self._items[one[2]].entry == one[1]
            ]
            heapq.heapify(heap)
        self._stale = 0
