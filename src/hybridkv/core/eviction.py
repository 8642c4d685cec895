"""What goes first where room is needed. Pure: ticks instead of a clock, and the items are anybody's.

Three queues, each least recently used first, and emptied in this order::

    interior    stored behind the end of a prompt's prefix and never read: a longer hit does not need it
    probation   stored and never read, or not read for long
    protected   read, or stored again soon after it was evicted; only with the policy "2q", in a part of the bytes

With "2q" a scan, prompts that nobody repeats, passes through probation and leaves alone what is read; with "lru" a read
item is just the most recently used of probation.  docs/decisions/0004 has the figures behind the defaults.
"""

import heapq
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from enum import IntEnum, StrEnum
from itertools import count
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)

PROTECTED_SHARE = 2
"""At most 1/2 of the bytes are protected."""
_STALE_MAX = 64


class Policy(StrEnum):
    """What `hybridkv serve --eviction` takes."""

    TWO_QUEUES = "2q"
    LRU = "lru"


class Queue(IntEnum):
    """Where an item waits for its eviction."""

    INTERIOR = 0
    PROBATION = 1
    PROTECTED = 2


class _Place:
    """Where one item stands. `entry` numbers its one valid entry in the queue's heap; 0 = it has none."""

    __slots__ = ("entry", "queue", "size", "tick")

    def __init__(self, queue: Queue, size: int) -> None:
        self.queue = queue
        self.size = size
        self.tick = 0
        self.entry = 0


class Order(Generic[T]):
    """The order in which items go. Which of them may go at all is asked when one is looked for."""

    def __init__(self, policy: Policy, bound_bytes: int) -> None:
        """`bound_bytes` is what all items together may have; it sets how much is protected and remembered."""
        self._two_queues = policy is Policy.TWO_QUEUES
        self._protected_max = bound_bytes // PROTECTED_SHARE
        self._places: dict[T, _Place] = {}
        self._heaps: dict[Queue, list[tuple[int, int, T]]] = {queue: [] for queue in Queue}
        """(tick, entry, item); a tick may have become too low since, and an entry that is not its item's is stale."""
        self._stale = 0
        self._ticks = count(1)
        self._entries = count(1)
        self.protected_bytes = 0
        self._ghosts_max = bound_bytes
        self._ghosts: OrderedDict[bytes, int] = OrderedDict()
        """Names of what was evicted unread, with their bytes, oldest first."""
        self._ghost_bytes = 0

    def add(self, item: T, size: int, interior: bool, name: bytes) -> None:
        """A new item of `size` bytes; by `name` it is known again after its eviction."""
        queue = Queue.INTERIOR if interior else Queue.PROBATION
        ghost = self._ghosts.pop(name, None)
        if ghost is not None:
            self._ghost_bytes -= ghost
            queue = Queue.PROTECTED
        place = self._places[item] = _Place(queue, size)
        if queue is Queue.PROTECTED:
            self.protected_bytes += size
        place.tick = next(self._ticks)
        self.offer(item)

    def use(self, items: Iterable[T]) -> None:
        """The items are read, all at once. They may not go now, and are not looked at before they are `offered`."""
        tick = next(self._ticks)
        wanted = Queue.PROTECTED if self._two_queues else Queue.PROBATION
        places = self._places
        for item in items:
            place = places[item]
            place.tick = tick
            if place.queue is not wanted:
                self._withdraw(place)
                self._move(place, wanted)

    def offer(self, item: T) -> None:
        """The item may go from here on, as far as is known."""
        place = self._places[item]
        if not place.entry:
            place.entry = next(self._entries)
            heapq.heappush(self._heaps[place.queue], (place.tick, place.entry, item))

    def remove(self, item: T) -> None:
        """The item is gone, for whatever reason."""
        place = self._places.pop(item)
        self._withdraw(place)
        if place.queue is Queue.PROTECTED:
            self.protected_bytes -= place.size
        if self._stale > len(self._places) + _STALE_MAX:
            self._tidy()

    def remember(self, item: T, name: bytes) -> None:
        """The item is about to be evicted: should it be stored again soon, it was worth keeping."""
        place = self._places[item]
        if not self._two_queues or place.queue is Queue.PROTECTED:
            return
        self._ghosts[name] = self._ghosts.pop(name, 0) + place.size
        self._ghost_bytes += place.size
        while self._ghost_bytes > self._ghosts_max:
            self._ghost_bytes -= self._ghosts.popitem(last=False)[1]

    def victim(self, may_go: Callable[[T], bool]) -> T | None:
        """What goes next; it stays until `remove`. Those that may not go are to be `offered` when they may."""
        found = self._oldest(Queue.INTERIOR, may_go)
        if found is not None:
            return found
        if self.protected_bytes > self._protected_max:
            # One at a time: when it has gone, what it kept from going (the prefix before it) is the next.
            cold = self._oldest(Queue.PROTECTED, may_go)
            if cold is not None:
                place = self._places[cold]
                self._withdraw(place)
                self._move(place, Queue.PROBATION)
                self.offer(cold)
        found = self._oldest(Queue.PROBATION, may_go)
        return found if found is not None else self._oldest(Queue.PROTECTED, may_go)

    def check(self, may_go: Callable[[T], bool]) -> None:
        """Re-derive every count, and that all that may go is offered; raises AssertionError."""
        offered = {entry for heap in self._heaps.values() for _, entry, _ in heap}
        for item, place in self._places.items():
            assert place.entry in offered or (not place.entry and not may_go(item))
        protected = (place.size for place in self._places.values() if place.queue is Queue.PROTECTED)
        assert sum(protected) == self.protected_bytes
        assert self._stale == len(offered) - sum(1 for place in self._places.values() if place.entry)
        assert sum(self._ghosts.values()) == self._ghost_bytes <= self._ghosts_max

    def __contains__(self, item: T) -> bool:
        return item in self._places

    def __len__(self) -> int:
        return len(self._places)

    def _oldest(self, queue: Queue, may_go: Callable[[T], bool]) -> T | None:
        heap = self._heaps[queue]
        while heap:
            tick, entry, item = heap[0]
            place = self._places.get(item)
            if place is None or place.entry != entry:
                heapq.heappop(heap)
                self._stale -= 1
            elif not may_go(item):
                heapq.heappop(heap)
                place.entry = 0
            elif place.tick != tick:
                heapq.heapreplace(heap, (place.tick, entry, item))
            else:
                return item
        return None

    def _withdraw(self, place: _Place) -> None:
        if place.entry:
            place.entry = 0
            self._stale += 1

    def _move(self, place: _Place, queue: Queue) -> None:
        self.protected_bytes += place.size * ((queue is Queue.PROTECTED) - (place.queue is Queue.PROTECTED))
        place.queue = queue

    def _tidy(self) -> None:
        for queue, heap in self._heaps.items():
            kept = [
                (tick, entry, item)
                for tick, entry, item in heap
                if (place := self._places.get(item)) is not None and place.entry == entry
            ]
            heapq.heapify(kept)
            self._heaps[queue] = kept
        self._stale = 0
