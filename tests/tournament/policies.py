"""Policies of eviction for blocks of one size, as published, in their simplest form.

Each is asked to admit or touch the blocks of a prompt from the last to the first, so that of two
blocks of one prompt the later one is evicted first.
"""

import heapq
import math
import random
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Container, Sequence

from hybridkv.core.policies import EvictionPolicy
from hybridkv.store.eviction import EvictionQueue

SAMPLE = 32  # Blocks that a policy looks at which judges by estimates.
BUCKETS = 36  # Of ages; three for each doubling.
HAZARD_WEIGHT = 200.0  # As how many reads the rate of all classes counts for the rate of one.
CLASSES = 10


class Policy(ABC):
    """A cache of `room` blocks."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.now = 0.0

    def serve(self, now: float, blocks: Sequence[int]) -> int:
        """A prompt comes, is looked up and then stored; returns how many blocks are hit."""
        self.now = now
        cached = self.cached
        hit = next((at for at, one in enumerate(blocks) if one not in cached), len(blocks))
        self.begin(blocks, hit)
        for depth in range(len(blocks) - 1, -1, -1):
            self.touch(blocks[depth], depth)
        return hit

    @property
    @abstractmethod
    def cached(self) -> Container[int]:
        """The blocks that are there."""

    def begin(self, blocks: Sequence[int], hit: int) -> None:  # noqa: B027  # few need it
        """A prompt comes, of which the first `hit` blocks are there."""

    @abstractmethod
    def touch(self, block: int, depth: int) -> None:
        """The block is read or stored."""


class LRU(Policy):
    """The one that was read last stays longest."""

    def __init__(self, room: int) -> None:
        super().__init__(room)
        self._order: OrderedDict[int, None] = OrderedDict()

    @property
    def cached(self) -> Container[int]:
        """See Policy."""
        return self._order

    def touch(self, block: int, depth: int) -> None:
        """See Policy."""
        self._order[block] = None
        self._order.move_to_end(block)
        if len(self._order) > self.room:
            self._order.popitem(last=False)


class Ours(Policy):
    """hybridkv's own queue, without the tree of prefixes."""

    def __init__(self, room: int, policy: EvictionPolicy = EvictionPolicy.TWO_QUEUES) -> None:
        super().__init__(room)
        self._queue: EvictionQueue[int] = EvictionQueue(policy, room)
        self._there: set[int] = set()

    @property
    def cached(self) -> Container[int]:
        """See Policy."""
        return self._there

    def touch(self, block: int, depth: int) -> None:
        """See Policy."""
        if block in self._there:
            self._queue.use([block])
            self._queue.offer(block)
            return
        self._there.add(block)
        self._queue.add(block, 1, interior=False, key=block.to_bytes(8, "little", signed=True))
        if len(self._there) > self.room:
            victim = self._queue.victim(lambda one: True)
            assert victim is not None
            self._queue.remember(victim, victim.to_bytes(8, "little", signed=True))
            self._queue.remove(victim)
            self._there.remove(victim)


class ARC(Policy):
    """Megiddo and Modha, 2003: recency and frequency, weighed by what was evicted too early."""

    def __init__(self, room: int) -> None:
        super().__init__(room)
        self._recent: OrderedDict[int, None] = OrderedDict()
        self._frequent: OrderedDict[int, None] = OrderedDict()
        self._was_recent: OrderedDict[int, None] = OrderedDict()
        self._was_frequent: OrderedDict[int, None] = OrderedDict()
        self._target = 0.0
        self._there: set[int] = set()

    @property
    def cached(self) -> Container[int]:
        """See Policy."""
        return self._there

    def touch(self, block: int, depth: int) -> None:
        """See Policy."""
        recent, frequent = self._recent, self._frequent
        if block in self._there:
            recent.pop(block, None)
            frequent.pop(block, None)
            frequent[block] = None
            return
        ghosts = len(self._was_recent), len(self._was_frequent)
        if block in self._was_recent:
            self._target = min(self.room, self._target + max(1.0, ghosts[1] / ghosts[0]))
            del self._was_recent[block]
            frequent[block] = None
        elif block in self._was_frequent:
            self._target = max(0.0, self._target - max(1.0, ghosts[0] / ghosts[1]))
            del self._was_frequent[block]
            frequent[block] = None
        else:
            recent[block] = None
        self._there.add(block)
        if len(self._there) > self.room:
            is_recent = len(recent) > max(1.0, self._target) or not frequent
            old, ghost = (recent, self._was_recent) if is_recent else (frequent, self._was_frequent)
            victim, _ = old.popitem(last=False)
            self._there.remove(victim)
            ghost[victim] = None
        if len(recent) + len(self._was_recent) > self.room and self._was_recent:
            self._was_recent.popitem(last=False)
        if len(self._was_recent) + len(self._was_frequent) > self.room and self._was_frequent:
            self._was_frequent.popitem(last=False)


class S3FIFO(Policy):
    """Yang and others, 2023: a small queue for what is new, a large one for what was read."""

    def __init__(self, room: int) -> None:
        super().__init__(room)
        self._small: OrderedDict[int, int] = OrderedDict()
        self._main: OrderedDict[int, int] = OrderedDict()
        self._ghosts: OrderedDict[int, None] = OrderedDict()
        self._there: set[int] = set()

    @property
    def cached(self) -> Container[int]:
        """See Policy."""
        return self._there

    def touch(self, block: int, depth: int) -> None:
        """See Policy."""
        for queue in (self._small, self._main):
            if block in queue:
                queue[block] = min(3, queue[block] + 1)
                return
        (self._main if block in self._ghosts else self._small)[block] = 0
        self._ghosts.pop(block, None)
        self._there.add(block)
        while len(self._there) > self.room:
            self._evict()

    def _evict(self) -> None:
        if len(self._small) > self.room // 10 or not self._main:
            block, reads = self._small.popitem(last=False)
            if reads:
                self._main[block] = 0
                return
            self._ghosts[block] = None
            if len(self._ghosts) > self.room:
                self._ghosts.popitem(last=False)
        else:
            block, reads = self._main.popitem(last=False)
            if reads:
                self._main[block] = reads - 1
                return
        self._there.remove(block)


class SIEVE(Policy):
    """Zhang and others, 2024: one queue, and a hand that passes over what was read."""

    def __init__(self, room: int) -> None:
        super().__init__(room)
        self._visited: dict[int, bool] = {}
        self._newer: dict[int, int] = {}
        self._older: dict[int, int] = {}
        self._newest = self._oldest = self._hand = -1

    @property
    def cached(self) -> Container[int]:
        """See Policy."""
        return self._visited

    def touch(self, block: int, depth: int) -> None:
        """See Policy."""
        if block in self._visited:
            self._visited[block] = True
            return
        if len(self._visited) >= self.room:
            self._evict()
        self._visited[block] = False
        self._older[block] = self._newest
        if self._newest != -1:
            self._newer[self._newest] = block
        self._newest = block
        if self._oldest == -1:
            self._oldest = block

    def _evict(self) -> None:
        hand = self._hand if self._hand != -1 else self._oldest
        while self._visited[hand]:
            self._visited[hand] = False
            hand = self._newer.get(hand, self._oldest)
        newer, older = self._newer.pop(hand, -1), self._older.pop(hand, -1)
        if newer != -1:
            self._older[newer] = older
        else:
            self._newest = older
        if older != -1:
            self._newer[older] = newer
            if newer == -1:
                del self._newer[older]
        else:
            self._oldest = newer
        self._hand = newer
        del self._visited[hand]


class LIRS(Policy):
    """Jiang and Zhang, 2002: by the distance between the last two reads."""

    def __init__(self, room: int) -> None:
        super().__init__(room)
        self._stack: OrderedDict[int, bool] = OrderedDict()  # Whether the distance is short.
        self._long: OrderedDict[int, None] = OrderedDict()  # Those of the stack with a long one.
        self._queue: OrderedDict[int, None] = OrderedDict()  # Those there with a long one.
        self._short = 0
        self._there: set[int] = set()

    @property
    def cached(self) -> Container[int]:
        """See Policy."""
        return self._there

    def touch(self, block: int, depth: int) -> None:
        """See Policy."""
        short_max = max(1, self.room - max(1, self.room // 100))
        is_known, is_there = block in self._stack, block in self._there
        is_short = self._stack.pop(block, False)
        self._long.pop(block, None)
        if is_there and is_short:
            self._stack[block] = True
        else:
            self._queue.pop(block, None)
            if not is_there and len(self._there) >= self.room:
                self._evict()
            becomes = is_known or self._short < short_max
            self._stack[block] = becomes
            self._short += becomes
            if not becomes:
                self._queue[block] = self._long[block] = None
            self._there.add(block)
            while self._short > short_max:
                self._demote()
        self._prune()

    def _evict(self) -> None:
        if not self._queue:
            self._demote()
        victim, _ = self._queue.popitem(last=False)
        self._there.remove(victim)

    def _demote(self) -> None:
        self._prune()
        block, _ = self._stack.popitem(last=False)
        self._short -= 1
        self._queue[block] = None
        self._prune()

    def _prune(self) -> None:
        """The oldest of the stack has a short distance; names that are gone are bounded."""
        while self._stack and not next(iter(self._stack.values())):
            block, _ = self._stack.popitem(last=False)
            del self._long[block]
        while len(self._long) > 2 * self.room:
            block, _ = self._long.popitem(last=False)
            del self._stack[block]


class GDSF(Policy):
    """Cherkasova, 1998: reads times cost, and a clock; the cost is the prefill that a read saves.

    A later block costs more to compute, because attention looks at all before it.
    """

    def __init__(self, room: int) -> None:
        super().__init__(room)
        self._worth: dict[int, tuple[float, int]] = {}
        self._heap: list[tuple[float, int, int]] = []
        self._clock = 0.0

    @property
    def cached(self) -> Container[int]:
        """See Policy."""
        return self._worth

    def touch(self, block: int, depth: int) -> None:
        """See Policy."""
        reads = self._worth.get(block, (0.0, 0))[1] + 1
        # A later block is read only with those before it, which must therefore outlive it.
        worth = self._clock + reads * (1 + 1 / (64 + depth))
        self._worth[block] = worth, reads
        heapq.heappush(self._heap, (worth, -depth, block))
        while len(self._worth) > self.room:
            worth, _, victim = heapq.heappop(self._heap)
            if self._worth.get(victim, (0.0, 0))[0] == worth:
                self._clock = worth
                del self._worth[victim]


class LHD(Policy):
    """Beckmann and others, 2018: the least hits per time, by age and number of reads, sampled."""

    def __init__(self, room: int) -> None:
        super().__init__(room)
        self._rng = random.Random(room)
        self._blocks: list[int] = []
        self._place: dict[int, int] = {}
        self._last: dict[int, tuple[float, int]] = {}
        self._rates = Rates(4)

    @property
    def cached(self) -> Container[int]:
        """See Policy."""
        return self._place

    def begin(self, blocks: Sequence[int], hit: int) -> None:
        """See Policy."""
        self._rates.tick(self.now)

    def touch(self, block: int, depth: int) -> None:
        """See Policy."""
        reads = 0
        if block in self._place:
            since, reads = self._last[block]
            self._rates.read(self.now - since, reads)
            reads = min(3, reads + 1)
        else:
            self._place[block] = len(self._blocks)
            self._blocks.append(block)
        self._last[block] = self.now, reads
        if len(self._blocks) > self.room:
            some = {self._rng.randrange(len(self._blocks)) for _ in range(SAMPLE)}
            victim = min((self._blocks[at] for at in sorted(some)), key=self._density)
            since, reads = self._last.pop(victim)
            self._rates.evict(self.now - since, reads)
            at, moved = self._place.pop(victim), self._blocks.pop()
            if moved != victim:
                self._blocks[at], self._place[moved] = moved, at

    def _density(self, block: int) -> float:
        since, reads = self._last[block]
        return self._rates.worth(self.now - since, reads)


class Reuse(Policy):
    """A model of reuse: the best rate of reads per time that is still to come, by age and turn.

    The turn of a block is that of the block before it and one more, so prompts that go on for long
    are told from new ones. Of each class the oldest block is the candidate. What was evicted is
    followed for a while, so that too early an eviction is learned from too.
    """

    def __init__(self, room: int) -> None:
        super().__init__(room)
        self._queues: list[OrderedDict[int, float]] = [OrderedDict() for _ in range(CLASSES)]
        self._class: dict[int, int] = {}
        self._turn: dict[int, int] = {}
        self._turn_now = 0
        self._followed: OrderedDict[int, tuple[float, int]] = OrderedDict()
        self._rates = Rates(CLASSES)

    @property
    def cached(self) -> Container[int]:
        """See Policy."""
        return self._class

    def begin(self, blocks: Sequence[int], hit: int) -> None:
        """See Policy."""
        self._turn_now = min(CLASSES - 1, self._turn[blocks[hit - 1]] + 1) if hit else 0
        for block in blocks[hit:]:
            self._turn[block] = self._turn_now
        self._rates.tick(self.now)

    def touch(self, block: int, depth: int) -> None:
        """See Policy."""
        since = self._followed.pop(block, None)
        if since is not None:
            self._rates.read(self.now - since[0], since[1])
        before = self._class.pop(block, None)
        if before is not None:
            del self._queues[before][block]
        self._class[block] = self._turn_now
        self._queues[self._turn_now][block] = self.now
        self._followed[block] = self.now, self._turn_now
        if len(self._followed) > 4 * self.room:
            _, (at, turn) = self._followed.popitem(last=False)
            self._rates.evict(self.now - at, turn)
        if len(self._class) > self.room:
            oldest = [(next(iter(one.items())), at) for at, one in enumerate(self._queues) if one]
            (victim, _), at = min(
                oldest, key=lambda one: self._rates.worth(self.now - one[0][1], one[1])
            )
            del self._queues[at][victim]
            del self._class[victim]


class Told(Policy):
    """LRU that is told with each prompt whether each of its blocks is read again, not always truly.

    A prompt's answer is as wrong for all of its blocks. Blocks of which it is said that they are
    not read again are evicted first.
    """

    def __init__(
        self, room: int, prompts: Sequence[Sequence[int]], accuracy: float, seed: int
    ) -> None:
        super().__init__(room)
        self._rng, self._accuracy = random.Random(seed), accuracy
        self._last = {block: at for at, blocks in enumerate(prompts) for block in blocks}
        self._number, self._is_true = -1, True
        self._queues: tuple[OrderedDict[int, None], ...] = (OrderedDict(), OrderedDict())
        """Blocks that are said to go, and to come again."""
        self._there: set[int] = set()

    @property
    def cached(self) -> Container[int]:
        """See Policy."""
        return self._there

    def begin(self, blocks: Sequence[int], hit: int) -> None:
        """See Policy."""
        self._number += 1
        self._is_true = self._rng.random() < self._accuracy

    def touch(self, block: int, depth: int) -> None:
        """See Policy."""
        for queue in self._queues:
            queue.pop(block, None)
        comes = self._last[block] > self._number
        self._queues[comes == self._is_true][block] = None
        self._there.add(block)
        if len(self._there) > self.room:
            going, coming = self._queues
            victim, _ = (going or coming).popitem(last=False)
            self._there.remove(victim)


class Rates:
    """Reads by class and age, learned as they come, and the best rate that is still to come."""

    EVERY = 500

    def __init__(self, classes: int) -> None:
        self._read = [[0.0] * BUCKETS for _ in range(classes)]
        self._gone = [[0.0] * BUCKETS for _ in range(classes)]
        self._worth = [[1.0 / (1 + age) for age in range(BUCKETS)] for _ in range(classes)]
        self._prompts = 0

    def read(self, age: float, of: int) -> None:
        """A block of class `of` was read `age` seconds after the last time."""
        self._read[of][_bucket(age)] += 1

    def evict(self, age: float, of: int) -> None:
        """A block was not read for `age` seconds, and is not followed any more."""
        self._gone[of][_bucket(age)] += 1

    def worth(self, age: float, of: int) -> float:
        """The best rate of reads per second that a block of this age may still have."""
        return self._worth[of][_bucket(age)]

    def tick(self, now: float) -> None:
        """A prompt comes."""
        self._prompts += 1
        if self._prompts % self.EVERY:
            return
        reads = [sum(column) for column in zip(*self._read, strict=True)]
        gone = [sum(column) for column in zip(*self._gone, strict=True)]
        shared = [rate for rate, _ in _hazards(reads, gone)]
        for at, (own, lost) in enumerate(zip(self._read, self._gone, strict=True)):
            hazards = [
                (rate * weight + HAZARD_WEIGHT * common) / (weight + HAZARD_WEIGHT)
                for (rate, weight), common in zip(_hazards(own, lost), shared, strict=True)
            ]
            self._worth[at] = [_best_rate(hazards, age) for age in range(BUCKETS)]
            self._read[at] = [0.9 * one for one in own]
            self._gone[at] = [0.9 * one for one in lost]


def _bucket(age: float) -> int:
    return 0 if age < 1 else min(BUCKETS - 1, int(3 * math.log2(age)) + 1)


def _edge(bucket: int) -> float:
    return 2.0 ** ((bucket - 1) / 3) if bucket else 0.0


def _hazards(reads: Sequence[float], gone: Sequence[float]) -> list[tuple[float, float]]:
    """By age, the share that is read of those that reach this age, and how many those are."""
    left = sum(reads) + sum(gone)
    found = []
    for read, lost in zip(reads, gone, strict=True):
        there = max(left - lost / 2, 1e-9)
        found.append((min(1.0, read / there), there))
        left -= read + lost
    return found


def _best_rate(hazards: Sequence[float], age: int) -> float:
    """The index of Gittins: the best of expected reads over expected time, of all times to stop."""
    left, seconds, reads, best = 1.0, 0.0, 0.0, 0.0
    for at in range(age, len(hazards)):
        seconds += left * (1 - hazards[at] / 2) * (_edge(at + 1) - _edge(at))
        reads += left * hazards[at]
        left *= 1 - hazards[at]
        best = max(best, reads / seconds)
    return best


POLICIES: dict[str, type[Policy]] = {
    "LRU": LRU,
    "2q (ours)": Ours,
    "ARC": ARC,
    "S3-FIFO": S3FIFO,
    "SIEVE": SIEVE,
    "LIRS": LIRS,
    "LHD": LHD,
    "GDSF": GDSF,
    "reuse": Reuse,
}
