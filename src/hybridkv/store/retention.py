"""Retention: chunks whose objects stay in RAM until a time, within a share of RAM.

A chunk is retained by its name, whether RAM has its objects now or gets them later. At the end of
its time an object is in the order of eviction as if it had not been retained.

1.  The share is a bound of what stays, also of what stays for the sake of something else. An object
    of full attention is not evicted before the chunks after it. So a chunk is kept only after the
    chunk before it, and no longer, and all its objects of full attention are charged together.
2.  Whatever is beyond a share is refused and forgotten, so of a prompt the beginning is kept.
3.  Only objects that a hit at the end of a prompt needs are kept. Windows and states inside it that
    nobody read are not.
4.  Every call takes a bounded time, whatever number of names there is.
"""

import heapq
import math
from collections import Counter
from collections.abc import Callable
from enum import StrEnum
from itertools import count

from hybridkv.core.policies import EvictionClass
from hybridkv.store.index import IndexEntry, Namespace, RetainedChunk, Slot

RAM_SHARE = 2  # At most 1/2 of RAM is retained.
TENANT_SHARE = 4  # For one tenant at most 1/4 of RAM, and 1/4 of the names.
QUOTA_SHARE = 2  # And at most 1/2 of the tenant's quota.
NAMES_MAX = 1 << 16
"""The most names that are remembered, of some 400 bytes each."""
_STALE_MAX = 64
_ENDS = (EvictionClass.PROMPT, EvictionClass.GENERATED)


class RetentionRefusal(StrEnum):
    """The reason why a chunk is not retained. Metrics have its name as a label."""

    WAITING = "waiting"  # Too much advice waits to be done.
    NAMES = "names"  # Too many names are remembered, of all tenants or of this one.
    RAM = "ram"  # The share of all tenants is full.
    TENANT = "tenant"  # The share of its tenant is full.
    PREFIX = "prefix"  # The chunk before it is in RAM, and is not retained.


class RetainedChunks:
    """The retained chunks of all namespaces, by their times, with what they are charged."""

    def __init__(
        self,
        bound_bytes: Callable[[], int],
        quota_of: Callable[[int], int | None],
        set_retained: Callable[[Slot, bool], None],
    ) -> None:
        """`bound_bytes` returns the size of RAM, which is less while shared memory is short.

        `quota_of` returns the quota of a tenant, None = it has none.

        `set_retained` is called with each object that is to be no victim (True), or one again.
        """
        self._bound_bytes = bound_bytes
        self._quota_of = quota_of
        self._set_retained = set_retained
        self.due: list[tuple[float, int, RetainedChunk]] = []
        """A heap of (time, entry number, chunk). The chunk's time may be later by now.

        An entry whose number is not the chunk's own is stale, and is skipped when it is met.
        """
        self.stale = 0  # Stale entries of the heap.
        self._numbers = count(-1, -1)  # Of equal times the last comes first: suffixes.
        self._names: Counter[int] = Counter()  # By tenant.
        self._names_total = 0
        self.charged: Counter[int] = Counter()
        """By tenant, the bytes that count against its share."""
        self.charged_bytes = 0  # The sum of `charged`.
        self.refused: Counter[str] = Counter()  # Chunks, by RetentionRefusal.
        self.expired = 0  # Chunks that RAM had at the end of their time.
        self.shortened = 0
        """Chunks that are retained for less than was asked: for the longest time, or as long as
        the chunk before."""

    def __len__(self) -> int:
        """The number of names that are remembered."""
        return self._names_total

    def share_bytes(self, tenant: int) -> int:
        """Return the most bytes that a tenant may retain."""
        share, quota = self._bound_bytes() // TENANT_SHARE, self._quota_of(tenant)
        return share if quota is None else min(share, quota // QUOTA_SHARE)

    def retain_chunk(
        self, namespace: Namespace, chunk_hash: bytes, tenant: int, until: float
    ) -> None:
        """Keep the objects of a chunk until a time. To be called with the chunk before first.

        A time that is earlier than an earlier call's changes nothing. The tenant with the latest
        time is charged.
        """
        chunk = namespace.retained.get(chunk_hash)
        if chunk is None:
            if not self._has_room_for_name(tenant):
                self.refused[RetentionRefusal.NAMES] += 1
                return
            chunk = RetainedChunk(namespace, chunk_hash, tenant, until)
            namespace.retained[chunk_hash] = chunk
            self._names[tenant] += 1
            self._names_total += 1
            self._wait_until(chunk, until)
        elif until > chunk.until:
            if tenant != chunk.tenant and not self._change_tenant(chunk, tenant):
                return
            chunk.until = until
            if chunk.before is not None:
                self._shorten(chunk, chunk.before.until)
            if not chunk.entry:
                self._wait_until(chunk, chunk.until)
        if not chunk.is_kept:
            self._keep_chunk(chunk)

    def end_chunk(self, namespace: Namespace, chunk_hash: bytes) -> None:
        """End the retention of a chunk now, or with the last chunk that is kept after it."""
        chunk = namespace.retained.get(chunk_hash)
        if chunk is None:
            return
        if chunk.followers:
            chunk.until = -math.inf
            self._wait_no_more(chunk)
        else:
            self._forget(chunk)

    def expire(self, now: float, most: int) -> int:
        """End the retention of chunks whose time is over, in at most `most` steps.

        Returns the number of steps that it took.
        """
        steps = 0
        while steps < most and self.next_end() <= now:
            steps += 1
            _, number, chunk = heapq.heappop(self.due)
            if number != chunk.entry:
                self.stale -= 1
            elif chunk.until > now:
                chunk.entry = 0
                self._wait_until(chunk, chunk.until)
            else:
                chunk.entry = 0
                if not chunk.followers:  # Else it is due with the last of them.
                    self.expired += chunk.is_kept
                    self._forget(chunk)
        return steps

    def next_end(self) -> float:
        """Return when `expire` has something to do."""
        return self.due[0][0] if self.due else math.inf

    def on_object_stored(self, slot: Slot) -> None:
        """An object has entered the index of a namespace that has retained chunks."""
        entry = slot.entry
        assert entry is not None
        chunk = entry.namespace.retained.get(entry.chunk_hash)
        if chunk is None:
            return
        if not chunk.is_kept:
            self._keep_chunk(chunk)
        elif self._follow(chunk, entry):
            self._keep_object(chunk, slot)

    def on_object_dropped(self, slot: Slot) -> None:
        """A retained object is about to leave the index."""
        entry = slot.entry
        assert entry is not None
        chunk = entry.namespace.retained[entry.chunk_hash]
        slot.is_retained = False
        if not any(other is not None and other.is_retained for other in entry.slots):
            self._let_go(chunk)
        elif not slot.is_prefix:
            self._charge(chunk, -slot.size_bytes)

    def _has_room_for_name(self, tenant: int) -> bool:
        is_its_own = self._names[tenant] < NAMES_MAX // TENANT_SHARE
        return self._names_total < NAMES_MAX and is_its_own

    def _change_tenant(self, chunk: RetainedChunk, tenant: int) -> bool:
        """Charge another tenant with a chunk. Returns False, and refuses that, without room."""
        size = chunk.charged_bytes
        if not self._has_room_for_name(tenant):
            self.refused[RetentionRefusal.NAMES] += 1
            return False
        if size and self.charged[tenant] + size > self.share_bytes(tenant):
            self.refused[RetentionRefusal.TENANT] += 1
            return False
        self._charge(chunk, -size)
        _subtract(self._names, chunk.tenant, 1)
        chunk.tenant = tenant
        self._names[tenant] += 1
        self._charge(chunk, size)
        return True

    def _keep_chunk(self, chunk: RetainedChunk) -> None:
        """Keep the objects that RAM has of a chunk, if it has any."""
        entry = chunk.namespace.entries.get(chunk.chunk_hash)
        if entry is None or not self._follow(chunk, entry):
            return
        if not self._may_charge(chunk, chunk.namespace.prefix_bytes):
            self._forget(chunk)
            return
        self._charge(chunk, chunk.namespace.prefix_bytes)
        chunk.is_kept = True
        for slot in entry.slots:
            if slot is not None:
                self._keep_object(chunk, slot)

    def _follow(self, chunk: RetainedChunk, entry: IndexEntry) -> bool:
        """Have the chunk before stay as long as this one. Returns False, and refuses that, if not.

        A chunk without one that RAM has follows none.
        """
        parent = entry.parent
        if chunk.before is not None or parent is None or not parent.prefixes:
            return True
        before = chunk.namespace.retained.get(parent.chunk_hash)
        if before is None:
            self.refused[RetentionRefusal.PREFIX] += 1
            self._forget(chunk)
            return False
        chunk.before = before
        before.followers += 1
        self._shorten(chunk, before.until)
        return True

    def _keep_object(self, chunk: RetainedChunk, slot: Slot) -> None:
        if slot.is_prefix:
            self._set_retained(slot, True)
        elif slot.eviction_class in _ENDS and self._may_charge(chunk, slot.size_bytes):
            self._charge(chunk, slot.size_bytes)
            self._set_retained(slot, True)

    def _may_charge(self, chunk: RetainedChunk, size: int) -> bool:
        """Return True if the shares have room for `size` bytes. A refusal is counted."""
        tenant = chunk.tenant
        if self.charged_bytes + size > self._bound_bytes() // RAM_SHARE:
            self.refused[RetentionRefusal.RAM] += 1
        elif self.charged[tenant] + size > self.share_bytes(tenant):
            self.refused[RetentionRefusal.TENANT] += 1
        else:
            return True
        return False

    def _charge(self, chunk: RetainedChunk, size: int) -> None:
        chunk.charged_bytes += size
        self.charged_bytes += size
        _subtract(self.charged, chunk.tenant, -size)

    def _shorten(self, chunk: RetainedChunk, until: float) -> None:
        if until < chunk.until:
            chunk.until = until
            self.shortened += 1
            # Its entry in the heap may be for a later time.
            self._wait_no_more(chunk)
            self._wait_until(chunk, until)

    def _let_go(self, chunk: RetainedChunk) -> None:
        """Charge nothing more for a chunk. Its name is still remembered."""
        self._charge(chunk, -chunk.charged_bytes)
        chunk.is_kept = False
        before, chunk.before = chunk.before, None
        if before is not None:
            before.followers -= 1
            if not before.followers and not before.entry and before.is_remembered():
                self._wait_until(before, before.until)

    def _forget(self, chunk: RetainedChunk) -> None:
        """Forget a name, and make the objects that were kept for it ordinary ones."""
        entry = chunk.namespace.entries.get(chunk.chunk_hash)
        for slot in entry.slots if entry is not None else ():
            if slot is not None and slot.is_retained:
                self._set_retained(slot, False)
        self._let_go(chunk)
        self._wait_no_more(chunk)
        del chunk.namespace.retained[chunk.chunk_hash]
        _subtract(self._names, chunk.tenant, 1)
        self._names_total -= 1
        if self.stale > self._names_total + _STALE_MAX:
            self.due = [item for item in self.due if item[1] == item[2].entry]
            heapq.heapify(self.due)
            self.stale = 0

    def _wait_until(self, chunk: RetainedChunk, time: float) -> None:
        chunk.entry = next(self._numbers)
        heapq.heappush(self.due, (time, chunk.entry, chunk))

    def _wait_no_more(self, chunk: RetainedChunk) -> None:
        self.stale += bool(chunk.entry)
        chunk.entry = 0


def _subtract(numbers: Counter[int], key: int, number: int) -> None:
    """Subtract from a number, and drop it where nothing is left."""
    numbers[key] -= number
    if not numbers[key]:
        del numbers[key]
