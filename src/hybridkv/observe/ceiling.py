"""Counts what a cache of unlimited size would have hit, to say whether more memory would help.

The unlimited cache has every object that was stored, or found below RAM, since the daemon began. It
evicts nothing, and no quota keeps anything out. A lookup's *ceiling* is the hit that the rule of
core.coverage gives over those objects. For every lookup, and for any sum of lookups::

    hit <= ceiling <= asked

An object that an engine could not store for want of a write slot is in neither cache, because its
hash is not known.

The number of chunks is bounded. The chunk that was not asked for longest is forgotten first, and
from then on the ceiling is that of a cache of so many chunks. Events are queued, and `work` counts
them.
"""

from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from hybridkv.core.coverage import largest_hit
from hybridkv.core.geometry import Geometry, GroupKind
from hybridkv.core.keys import HASH_BYTES, unpack_hashes
from hybridkv.core.metrics import MetricFamily, counter, debug, gauge, sampled

CEILING: Mapping[str, MetricFamily] = {
    **sampled(
        ceiling_asked_tokens=counter(
            "Tokens asked for, over the lookups counted for the ceiling.",
            lambda ceiling: ceiling.asked_tokens,
        ),
        ceiling_hit_tokens=counter(
            "Tokens hit, over the same lookups.", lambda ceiling: ceiling.hit_tokens
        ),
        ceiling_tokens=counter(
            "Tokens that a cache of unlimited size would have hit of them.",
            lambda ceiling: ceiling.ceiling_tokens,
        ),
    ),
    "ceiling_lookups_left_out": counter(
        "Lookups in none of the sums, for want of time to count.",
        lambda ceiling: ceiling.lookups_left_out,
    ),
    "ceiling_chunks_max": gauge(
        "The most chunks that are remembered for the ceiling.",
        lambda ceiling: ceiling.remembered_max,
    ),
    "ceiling_chunks_forgotten": counter(
        "Chunks forgotten, so that the ceiling may be too low.", lambda ceiling: ceiling.forgotten
    ),
    **debug(
        ceiling_lookups=counter("Lookups counted for the ceiling.", lambda ceiling: ceiling.lookups)
    ),
}
"""Their owner is the HitRateCeiling."""
ERA_BYTES = 4
IDENTITY_BYTES, NAME_BYTES = 8, 16
"""Bytes kept of an identity and of a chunk's hash. Chunks that are confused make the statistics
less exact."""


class QueuedEvent(NamedTuple):
    """An event that is not counted yet."""

    chunks: int
    is_lookup: bool
    steps: Iterator[None]  # Counts the event, step by step.


@dataclass(eq=False)
class HitRateCeiling:
    """The chunks of an unlimited cache, and three sums of tokens over the same lookups."""

    remembered_max: int = 1 << 18
    """The most chunks that are remembered. They take some 150 bytes each, and have 33 million
    tokens or more together."""
    queued_max: int = 1 << 16
    """The most chunks of queued events. An event that would exceed it is left out and counted."""
    step: int = 64  # Chunks of one step, which takes some 50 us.
    asked_tokens: int = 0
    hit_tokens: int = 0
    ceiling_tokens: int = 0  # Tokens that the unlimited cache would have hit.
    lookups: int = 0  # Lookups in the three sums.
    lookups_left_out: int = 0  # Lookups in none of the three, because too much was queued.
    forgotten: int = 0  # Chunks of the unlimited cache that are not remembered any more.
    _remembered: OrderedDict[bytes, int] = field(default_factory=OrderedDict)
    """By chunk: a bit for each group with an object. The chunk unused for longest is first."""
    _era: bytes = bytes(ERA_BYTES)
    """How often the cache was cleared. Keys begin with it. Those of an earlier era are cleared, and
    wait to be the oldest, because to remove all at once would keep the loop for 40 ms."""
    _queue: deque[QueuedEvent] = field(default_factory=deque)
    _queued: int = 0  # Chunks of all events in the queue.

    def __len__(self) -> int:
        """The number of chunks that are remembered."""
        return len(self._remembered)

    @property
    def has_work(self) -> bool:
        """True while `work` has an event to count."""
        return bool(self._queue)

    def on_stored(self, identity: bytes, groups: Sequence[int], hashes: bytes) -> None:
        """Objects were written: the i-th has the group index `groups[i]` and the i-th hash."""
        if not self._put(len(groups), self._change(identity, groups, hashes, True)):
            self.forgotten += len(set(unpack_hashes(hashes)))

    def on_answered(
        self,
        identity: bytes,
        geometry: Geometry,
        hashes: bytes,
        masks: Sequence[bytes],
        chunks: int,
    ) -> None:
        """A lookup was answered by a hit of `chunks`. `masks` has each group's presence mask."""
        steps = self._look_up(identity, geometry, hashes, masks, chunks)
        if not self._put(len(hashes) // HASH_BYTES, steps, is_lookup=True):
            self.lookups_left_out += 1

    def on_lost(self, identity: bytes, group: int, chunk_hash: bytes) -> None:
        """An object's bytes were wrong, and no cache would have hit it."""
        self._put(1, self._change(identity, [group], chunk_hash, False))

    def on_cleared(self) -> None:
        """The cache was cleared on purpose, and the unlimited cache would be empty as well."""
        self.lookups_left_out += sum(event.is_lookup for event in self._queue)
        self._queue.clear()
        self._queued = 0
        era = int.from_bytes(self._era, "little") + 1
        self._era = era.to_bytes(ERA_BYTES, "little")

    def work(self) -> bool:
        """Do one step. Returns whether there is more to do."""
        if self._queue:
            event = self._queue[0]
            if next(event.steps, self) is self:
                self._queue.popleft()
                self._queued -= event.chunks
        return self.has_work

    def _put(self, chunks: int, steps: Iterator[None], is_lookup: bool = False) -> bool:
        """Queue an event. Returns False where there is no room for it."""
        if self._queued + chunks > self.queued_max:
            return False
        self._queued += chunks
        self._queue.append(QueuedEvent(chunks, is_lookup, steps))
        return True

    def _change(
        self, identity: bytes, groups: Sequence[int], hashes: bytes, is_there: bool
    ) -> Iterator[None]:
        """Add objects to the unlimited cache, or remove them, step by step."""
        start = self._era + identity[:IDENTITY_BYTES]
        objects = zip(groups, unpack_hashes(hashes), strict=True)
        for at, (group, chunk_hash) in enumerate(objects, 1):
            key = start + chunk_hash[:NAME_BYTES]
            if is_there:
                self._put_bits(key, self._remembered.get(key, 0) | 1 << group)
            elif key in self._remembered:
                self._remembered[key] &= ~(1 << group)
            if at % self.step == 0:
                yield

    def _put_bits(self, key: bytes, bits: int) -> None:
        """Remember the groups of a chunk as a bit each, as the chunk that was used last."""
        self._remembered[key] = bits
        self._remembered.move_to_end(key)
        if len(self._remembered) > self.remembered_max:
            oldest, _ = self._remembered.popitem(last=False)
            self.forgotten += oldest.startswith(self._era)

    def _look_up(
        self,
        identity: bytes,
        geometry: Geometry,
        hashes: bytes,
        masks: Sequence[bytes],
        chunks: int,
    ) -> Iterator[None]:
        """Add one lookup to the sums, step by step."""
        start = self._era + identity[:IDENTITY_BYTES]
        groups = range(len(masks))
        prefixes = sum(
            1 << index for index in groups if geometry.groups[index].kind is GroupKind.FULL
        )
        there = [bytearray(mask) for mask in masks]
        bits_of: dict[tuple[int, ...], int] = {}
        reach = len(hashes) // HASH_BYTES
        for chunk, present in enumerate(zip(*masks, strict=True)):
            if present not in bits_of:
                bits_of[present] = sum(1 << index for index in groups if present[index])
            found = bits_of[present]
            key = start + hashes[chunk * HASH_BYTES : chunk * HASH_BYTES + NAME_BYTES]
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
            if chunk % self.step == self.step - 1:
                yield
        ceiling = largest_hit(geometry, [bytes(mask) for mask in there], reach)
        self.lookups += 1
        self.asked_tokens += len(hashes) // HASH_BYTES * geometry.chunk_tokens
        self.hit_tokens += chunks * geometry.chunk_tokens
        self.ceiling_tokens += ceiling * geometry.chunk_tokens
