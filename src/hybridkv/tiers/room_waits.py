"""Waits for room: hits that RAM cannot hold at once come one after the other.

A lookup whose hit has no room beside the objects that stay would get a shorter hit, and its engine
would compute the rest (decision 13). But most of what stays is leased to loads, which end soon. So
the lookup waits for room, if that may be sooner than computing (decision 27).

1. A hit is *admitted* before its first object is read. RAM has room then for what it reads, beside
   what stays and what the other admitted hits still have to read, which they have claimed.
2. A wait ends when computing what the shorter hit lacks would be over, less the time of reading it.
   Nobody knows how long the others take, so a wait in vain costs at most that time once more.
3. A lookup that waits for room keeps what it holds. That is not room which others may wait for: a
   lookup waits only if its hit has room beside that of all who wait.
4. After a wait in vain that connection does not wait for a while, twice as long each time.
"""

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence

from hybridkv.core.coverage import LoadableHit
from hybridkv.store.index import Slot
from hybridkv.store.store import Store
from hybridkv.tiers.doubts import JudgedWaits
from hybridkv.tiers.object_search import LookupRequest, NeededObject
from hybridkv.tiers.shared_reads import ObjectReads

ROOM_WAITS_MAX = 64  # Lookups that wait for room at the same time.


class DistinctBytes:
    """The bytes of things that several may want, each of which takes room once."""

    def __init__(self) -> None:
        self.total = 0
        self._counts: Counter[Hashable] = Counter()

    def __contains__(self, thing: Hashable) -> bool:
        return thing in self._counts

    def add(self, thing: Hashable, size_bytes: int) -> None:
        """Somebody wants it."""
        self._counts[thing] += 1
        if self._counts[thing] == 1:
            self.total += size_bytes

    def subtract(self, thing: Hashable, size_bytes: int) -> None:
        """Somebody wants it no more."""
        self._counts[thing] -= 1
        if not self._counts[thing]:
            del self._counts[thing]
            self.total -= size_bytes


class RoomWaits(JudgedWaits):
    """What admitted hits have claimed, and what lookups that wait for room hold."""

    def __init__(self, store: Store, reads: ObjectReads) -> None:
        super().__init__()
        self._store = store
        self._reads = reads
        self.claimed = DistinctBytes()
        """By its key, each object of an admitted hit whose read is not begun."""
        self.held = DistinctBytes()  # The slots that lookups hold while they wait for room.
        self.waiting = 0  # These lookups.

    def claim(self, needs: Iterable[NeededObject]) -> None:
        """A hit is admitted that reads these objects."""
        for need in needs:
            self.claimed.add(need.key, need.record.size_bytes)

    def end_claim(self, needs: Iterable[NeededObject]) -> None:
        """The reads of these objects have begun, or are not to begin any more."""
        for need in needs:
            self.claimed.subtract(need.key, need.record.size_bytes)

    def is_free(self, needed_bytes: int) -> bool:
        """Return True if RAM has so much room beside all that stays or is claimed."""
        return not needed_bytes or needed_bytes <= self._free_bytes

    def bytes_alone(self, needs: Iterable[NeededObject]) -> int:
        """Return the bytes of what nobody else holds or reads, nor is admitted to read."""
        return _bytes_of(need for need in needs if not self._is_shared(need))

    def _is_shared(self, need: NeededObject) -> bool:
        if need.key in self._reads.running or need.key in self.claimed:
            return True
        slot = need.namespace.find_slot(need.record.name.chunk_hash, need.place.group_index)
        return slot is not None and (slot.pins > 0 or slot.is_retained)

    def room_beside_others(self, held: Iterable[Slot], needs: Sequence[NeededObject]) -> int:
        """Return the bytes of RAM that a hit may take which holds and needs these objects."""
        shared_bytes = _bytes_of(needs) - self.bytes_alone(needs)
        return self._free_bytes + sum(slot.size_bytes for slot in set(held)) + shared_bytes

    def may_come(
        self,
        request: LookupRequest,
        held: Iterable[Slot],
        needs: Iterable[NeededObject],
        now: float,
    ) -> bool:
        """Return True if there may be room for a lookup once others have ended.

        It needs some objects beside those that it holds.
        """
        if self.is_doubted(request.connection_id, now) or self.waiting >= ROOM_WAITS_MAX:
            return False
        own_bytes = sum(slot.size_bytes for slot in set(held) if slot not in self.held)
        room_bytes = self._reads.room_bytes - self._store.retention.charged_bytes
        return self.held.total + own_bytes + _bytes_of(needs) <= room_bytes

    def begin_waiting(self, held: Iterable[Slot]) -> None:
        """A lookup that holds these objects waits for room."""
        self.waiting += 1
        for slot in set(held):
            self.held.add(slot, slot.size_bytes)

    def end_waiting(self, held: Iterable[Slot]) -> None:
        """It waits no more, whatever came of it."""
        self.waiting -= 1
        for slot in set(held):
            self.held.subtract(slot, slot.size_bytes)

    @property
    def _free_bytes(self) -> int:
        return self._store.available_bytes - self.claimed.total


def _bytes_of(needs: Iterable[NeededObject]) -> int:
    return sum(need.record.size_bytes for need in needs)


def waits_until(
    full: LoadableHit,
    *,
    resident_tokens: int,
    shorter: Sequence[LoadableHit],
    token_seconds: float,
    now: float,
    deadline: float,
) -> float:
    """Return the time until which it pays to wait for the room of `full`. In the past = not at all.

    `shorter` are the hits that have room now, beside that of RAM, of `resident_tokens` tokens. For
    example, computing takes 0.5 ms a token, `full` is 4,000 tokens that are read in 0.5 s, and the
    only shorter hit has 1,000 of them, read in 0.1 s: until 1.1 s from now.
    """
    seconds = full.tokens * token_seconds - full.read_seconds
    others = [hit.tokens * token_seconds - hit.read_seconds for hit in shorter]
    spared = seconds - max([resident_tokens * token_seconds, *others])
    return min(now + spared, deadline - full.read_seconds)
