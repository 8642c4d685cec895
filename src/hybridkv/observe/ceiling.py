"""What a cache of unlimited size would have hit, to tell whether more memory would help.

The unlimited cache has every object that was stored, or found below RAM, since the daemon began. It
evicts nothing, and no quota keeps anything out. A lookup's *ceiling* is the hit that the rule of
core.coverage gives over those objects, so that for every lookup, and for any sum of lookups::

    hit <= ceiling <= asked

What an engine did not store for want of a write slot is in neither cache, as its hash is not known.

Memory is bounded by chunks: the chunk that was longest not asked for is forgotten first, and from
then on the ceiling is that of a cache of so many chunks. Events are queued; `work` counts them.
"""

from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from hybridkv.core.coverage import largest_hit
from hybridkv.core.geometry import Geometry, GroupKind
from hybridkv.core.keys import HASH_BYTES

REMEMBERED_CHUNKS_MAX = 1 << 18
"""Chunks of some 150 bytes each; 33 million tokens at the smallest chunk."""
QUEUED_CHUNKS_MAX = 1 << 16
"""Chunks of queued events; an event that would go beyond is left out and counted."""
STEP_CHUNKS = 64
"""Chunks of one step, which takes some 50 us."""
IDENTITIES_MAX = 4096
NAME_BYTES = 16
"""Bytes kept of a chunk's hash; chunks that are confused only make the statistics less exact."""


class _Stored(NamedTuple):
    identity: bytes
    groups: Sequence[int]
    hashes: bytes


class _Answered(NamedTuple):
    identity: bytes
    geometry: Geometry
    hashes: bytes
    masks: Sequence[bytes]
    chunks: int


class _Lost(NamedTuple):
    identity: bytes
    group: int
    chunk_hash: bytes


class HitRateCeiling:
    """The chunks of an unlimited cache, and three sums of tokens over the same lookups."""

    def __init__(
        self,
        remembered_max: int = REMEMBERED_CHUNKS_MAX,
        queued_max: int = QUEUED_CHUNKS_MAX,
        step: int = STEP_CHUNKS,
    ) -> None:
        """All three arguments are in chunks."""
        self._remembered_max = remembered_max
        self._queued_max = queued_max
        self._step = step
        self._remembered: OrderedDict[bytes, int] = OrderedDict()
        """By chunk: a bit for each group with an object. The chunk unused for longest is first."""
        self._numbers: OrderedDict[bytes, bytes] = OrderedDict()
        """By identity: the number that begins its chunks' keys."""
        self._last_number = 0
        self._first_number = 1
        """Keys with an earlier number were cleared, and wait to be the oldest."""
        self._queue: deque[_Stored | _Answered | _Lost] = deque()
        self._queued = 0
        self._running: Iterator[None] | None = None
        self.asked_tokens = 0
        self.hit_tokens = 0
        self.ceiling_tokens = 0
        """Tokens that the unlimited cache would have hit."""
        self.lookups = 0
        """Lookups in the three sums."""
        self.lookups_left_out = 0
        """Lookups in none of the three, because too much was queued."""
        self.forgotten = 0
        """Chunks of the unlimited cache that are not remembered any more."""

    def __len__(self) -> int:
        """The number of chunks that are remembered."""
        return len(self._remembered)

    @property
    def remembered_max(self) -> int:
        """The most chunks that are remembered."""
        return self._remembered_max

    @property
    def has_work(self) -> bool:
        """Whether there is something for `work`."""
        return self._running is not None or bool(self._queue)

    # Events

    def stored(self, identity: bytes, groups: Sequence[int], hashes: bytes) -> None:
        """Objects were written; the i-th has the group index `groups[i]` and the i-th hash."""
        if not self._put(_Stored(identity, groups, hashes), len(groups)):
            self.forgotten += len(set(_cut(hashes)))

    def answered(
        self,
        identity: bytes,
        geometry: Geometry,
        hashes: bytes,
        masks: Sequence[bytes],
        chunks: int,
    ) -> None:
        """A lookup was answered by a hit of `chunks`; `masks` has each group's presence mask."""
        event = _Answered(identity, geometry, hashes, masks, chunks)
        if not self._put(event, len(hashes) // HASH_BYTES):
            self.lookups_left_out += 1

    def lost(self, identity: bytes, group: int, chunk_hash: bytes) -> None:
        """An object's bytes were wrong, and no cache would have hit it."""
        self._put(_Lost(identity, group, chunk_hash), 1)

    def cleared(self) -> None:
        """The cache was cleared on purpose, and the unlimited cache would be empty as well."""
        queued = sum(isinstance(event, _Answered) for event in self._queue)
        self.lookups_left_out += queued + bool(self._running)
        self._queue.clear()
        self._queued = 0
        self._running = None
        self._numbers.clear()
        self._first_number = self._last_number + 1

    def work(self) -> bool:
        """Do one step; whether there is more to do."""
        if self._running is None and self._queue:
            event = self._queue.popleft()
            match event:
                case _Stored():
                    self._queued -= len(event.groups)
                    self._remember(event)
                case _Lost():
                    self._queued -= 1
                    key = self._number(event.identity) + event.chunk_hash[:NAME_BYTES]
                    if key in self._remembered:
                        self._remembered[key] &= ~(1 << event.group)
                case _Answered():
                    self._running = self._look_up(event)
        if self._running is not None and next(self._running, self) is self:
            self._running = None
        return self.has_work

    # Inside

    def _put(self, event: _Stored | _Answered | _Lost, chunks: int) -> bool:
        if self._queued + chunks > self._queued_max:
            return False
        self._queued += chunks
        self._queue.append(event)
        return True

    def _number(self, identity: bytes) -> bytes:
        number = self._numbers.get(identity)
        if number is None:
            self._last_number += 1
            number = self._numbers[identity] = self._last_number.to_bytes(8, "little")
            if len(self._numbers) > IDENTITIES_MAX:
                self._numbers.popitem(last=False)
        self._numbers.move_to_end(identity)
        return number

    def _remember(self, event: _Stored) -> None:
        number = self._number(event.identity)
        for group, chunk_hash in zip(event.groups, _cut(event.hashes), strict=True):
            key = number + chunk_hash[:NAME_BYTES]
            self._put_bits(key, self._remembered.get(key, 0) | 1 << group)

    def _put_bits(self, key: bytes, bits: int) -> None:
        self._remembered[key] = bits
        self._remembered.move_to_end(key)
        if len(self._remembered) > self._remembered_max:
            oldest, _ = self._remembered.popitem(last=False)
            self.forgotten += int.from_bytes(oldest[:8], "little") >= self._first_number

    def _look_up(self, event: _Answered) -> Iterator[None]:
        """Add one lookup to the sums, a step at a time."""
        geometry, hashes = event.geometry, event.hashes
        number = self._number(event.identity)
        groups = range(len(event.masks))
        prefixes = sum(
            1 << index for index in groups if geometry.groups[index].kind is GroupKind.FULL
        )
        there = [bytearray(mask) for mask in event.masks]
        bits_of: dict[tuple[int, ...], int] = {}
        reach = len(hashes) // HASH_BYTES
        for chunk, present in enumerate(zip(*event.masks, strict=True)):
            found = bits_of.get(present)
            if found is None:
                found = bits_of[present] = sum(1 << index for index in groups if present[index])
            key = number + hashes[chunk * HASH_BYTES : chunk * HASH_BYTES + NAME_BYTES]
            bits = found | self._remembered.get(key, 0)
            if prefixes & ~bits:
                # Neither the hit nor the ceiling reaches beyond.
                reach = chunk
                break
            if bits:
                self._put_bits(key, bits)
            if bits != found:
                for index in groups:
                    there[index][chunk] = bits >> index & 1
            if chunk % self._step == self._step - 1:
                yield
        ceiling = largest_hit(geometry, [bytes(mask) for mask in there], reach)
        self._queued -= len(hashes) // HASH_BYTES
        self.lookups += 1
        self.asked_tokens += len(hashes) // HASH_BYTES * geometry.chunk_tokens
        self.hit_tokens += event.chunks * geometry.chunk_tokens
        self.ceiling_tokens += ceiling * geometry.chunk_tokens


def _cut(hashes: bytes) -> Iterator[bytes]:
    return (hashes[at : at + HASH_BYTES] for at in range(0, len(hashes), HASH_BYTES))
