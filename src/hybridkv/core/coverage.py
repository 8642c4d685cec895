"""The objects that a hit needs, the blocks that an object holds, the largest hit, and its costs.

A restore at boundary B needs this block range of a group: ``[skipped(B) // bs, B // bs)``::

    full           [################)B        everything
    sliding w      [..........######)B        the blocks that hold (B - w, B)
    chunked local  [........########)B        from the start of B's attention chunk
    recurrent      [...............#)B        the one state at exactly B

``skipped`` never decreases, so no boundary needs more of chunk k than the one at its own end.
Storing ``needed(end of k)`` cut to chunk k therefore stores every block that some hit can read, and
no other.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, cycle, islice
from typing import NamedTuple, TypeVar

from hybridkv.core.geometry import Geometry, Group, GroupKind

SlotShape = tuple[int, int]
"""(part_bytes, parts) of an object and of its slot, a key that is made for each object."""
Amount = TypeVar("Amount", int, float)  # Bytes, or seconds.

COMPARED_HITS = 8  # Boundaries whose hits are compared with each other.


def needed_blocks(group: Group, boundary: int) -> range:
    """Returns the block positions of `group` that a restore at `boundary` reads.

    `boundary` is in tokens, a multiple of the group's block.
    """
    end = boundary // group.tokens_per_block
    return range(min(end, group.skipped_tokens(boundary) // group.tokens_per_block), end)


def stored_blocks(geometry: Geometry, group: Group, chunk: int) -> range:
    """Returns the block positions in the object of (`group`, `chunk`). Empty if no hit needs it."""
    per_chunk = geometry.blocks_per_chunk(group)
    inside = range(chunk * per_chunk, (chunk + 1) * per_chunk)
    needed = needed_blocks(group, inside.stop * group.tokens_per_block)
    return range(max(inside.start, needed.start) if needed else inside.stop, inside.stop)


def needed_chunks(geometry: Geometry, group: Group, chunks: int) -> range:
    """Returns the chunks whose objects of `group` a hit of `chunks` chunks loads.

    Each of these objects has at least one block. They are the chunks of `needed_blocks`, by one
    division because the engine's hooks call this.
    """
    tokens = geometry.chunk_tokens
    return range(group.skipped_tokens(chunks * tokens) // tokens, chunks)


def part_bytes(geometry: Geometry, group: Group, chunk: int) -> int:
    """Returns the bytes of one part of the object of (`group`, `chunk`). 0 if no hit needs it."""
    return len(stored_blocks(geometry, group, chunk)) * group.block_bytes


@lru_cache(maxsize=4096)
def stored_counts(geometry: Geometry, group: Group) -> tuple[int, ...]:
    """Returns the number of stored blocks of each chunk's object, for one period of chunks.

    The object of chunk k has the last ``counts[k % len(counts)]`` blocks of the chunk. The period
    is 1 chunk, except for chunked local attention, where the attention chunk decides.
    """
    period = 1
    if group.kind is GroupKind.CHUNKED_LOCAL:
        period = math.lcm(group.window_tokens, geometry.chunk_tokens) // geometry.chunk_tokens
    return tuple(len(stored_blocks(geometry, group, chunk)) for chunk in range(period))


@lru_cache(maxsize=4096)
def object_shapes(geometry: Geometry, group: Group) -> tuple[SlotShape, ...]:
    """Returns the shape of each chunk's object, for one period of chunks (`stored_counts`).

    A part has 0 bytes where the chunk has no object.
    """
    size, parts = group.block_bytes, geometry.parts(group)
    return tuple((count * size, parts) for count in stored_counts(geometry, group))


def slot_shapes(geometry: Geometry, group: Group) -> tuple[SlotShape, ...]:
    """Returns the shapes that a group's objects may have, ascending.

    Only a chunked local group has several.
    """
    return tuple(sorted({shape for shape in object_shapes(geometry, group) if shape[0]}))


def largest_hit(geometry: Geometry, masks: Sequence[bytes], chunks_max: int) -> int:
    """Returns the most chunks, up to `chunks_max`, at whose end no group lacks an object. 0 = miss.

    `masks` has a presence mask for each of `geometry.groups`, with a byte for each chunk: 1 =
    present. All groups have their objects at one boundary, or it is a miss (requirements B35, A26).

    A chunk that a hit of `chunks` lacks is needed by every shorter hit that contains it, because
    the start of the need never moves up while the boundary moves down. So the search goes on at
    that chunk.
    """
    chunks = min(chunks_max, *(len(mask) for mask in masks))
    while chunks > 0:
        below = chunks
        for group, mask in zip(geometry.groups, masks, strict=True):
            missing = _missing(geometry, group, mask, chunks)
            if missing < chunks and group.kind is GroupKind.RECURRENT:
                missing = mask.rfind(1, 0, chunks) + 1
            below = min(below, missing)
        if below == chunks:
            break
        chunks = below
    return chunks


def lacking(geometry: Geometry, masks: Sequence[bytes], chunks: int) -> list[tuple[Group, int]]:
    """Returns (group, first missing chunk) for each group that lacks an object of the hit."""
    pairs = zip(geometry.groups, masks, strict=True)
    firsts = [(group, _missing(geometry, group, mask, chunks)) for group, mask in pairs]
    return [(group, missing) for group, missing in firsts if missing < chunks]


def _missing(geometry: Geometry, group: Group, mask: bytes, chunks: int) -> int:
    """Returns the first chunk of `group` that a hit needs and `mask` lacks. `chunks` = none."""
    start = needed_chunks(geometry, group, chunks).start
    missing = mask.find(0, start, chunks)
    return missing if missing >= 0 else min(chunks, max(start, len(mask)))


class Hit(NamedTuple):
    """The beginning of a prompt that is hit: whole chunks, and perhaps a tail (core.tails).

    A tail has one object of each group, as a chunk has. So a hit of n chunks and a tail reads what
    a hit of n + 1 chunks reads, but for the last object of each group: that is the tail's.
    """

    depth: int  # Objects in a row: one for each chunk, and one more for a tail. 0 = a miss.
    tail: int  # The tail that the hit ends with, counted from 1. 0 = it ends with a chunk.
    tokens: int
    starts: tuple[int, ...]
    """Per group, the first object in the row that the hit needs. It needs all from there on."""

    @property
    def chunks(self) -> int:
        """The whole chunks. A tail is none of them."""
        return self.depth - bool(self.tail)


def whole_hit(geometry: Geometry, chunks: int) -> Hit:
    """Returns the hit of `chunks` whole chunks."""
    return Hit(chunks, 0, chunks * geometry.chunk_tokens, needed_starts(geometry, chunks))


def needed_starts(geometry: Geometry, depth: int) -> tuple[int, ...]:
    """Returns per group the first object in the row that a hit of `depth` objects needs."""
    return tuple(needed_chunks(geometry, group, depth).start for group in geometry.groups)


def is_tail_hit(geometry: Geometry, masks: Sequence[bytes], chunk: int) -> bool:
    """Returns whether a tail inside `chunk`, all of whose objects are present, is a hit.

    `masks` are the groups' presence masks of whole chunks (`largest_hit`).
    """
    with_tail = [mask[:chunk] + b"\1" for mask in masks]
    return all(len(mask) >= chunk for mask in masks) and (
        largest_hit(geometry, with_tail, chunk + 1) == chunk + 1
    )


def longest_hit(
    geometry: Geometry, masks: Sequence[bytes], chunks_max: int, tail: Hit | None
) -> Hit:
    """Returns the largest hit of whole chunks, or the one that ends with a tail if it is longer.

    `tail` is a hit whose tail has all objects. None = there is none.
    """
    whole = whole_hit(geometry, largest_hit(geometry, masks, chunks_max))
    if tail is None or tail.tokens <= whole.tokens:
        return whole
    return tail if is_tail_hit(geometry, masks, tail.chunks) else whole


class PromptObjects(NamedTuple):
    """The objects of a prompt that can be hit, wherever they are, and what each of them costs."""

    geometry: Geometry
    masks: Sequence[bytes]  # Per group, the presence mask of all of them, as in `largest_hit`.
    resident: Hit  # The hit of those that RAM has.
    longest: Hit  # The hit of all of them.
    sizes: Sequence[Sequence[int]]
    """Per group, the bytes of RAM that each chunk's object takes, for one period of chunks."""
    seconds: Sequence[Sequence[float]]
    """Per group and chunk of `longest`, the time of reading the object. 0 where RAM has it."""
    tail_seconds: float  # The time of reading the objects of the tail of `longest`.


class LoadableHit(NamedTuple):
    """A hit that RAM has room for."""

    hits: Sequence[Hit]
    """The hit itself, after a shorter one that comes earlier, if RAM has room for both."""
    read_seconds: float  # The time of reading what the hit needs and RAM does not have.

    @property
    def tokens(self) -> int:
        """The number of tokens of the longest hit."""
        return self.hits[-1].tokens


def compared_boundaries(chunks: int) -> list[int]:
    """Returns the boundaries up to `chunks` that are compared, the largest first."""
    return [-(-chunks * part // COMPARED_HITS) for part in range(COMPARED_HITS, 0, -1)]


def loadable_hits(objects: PromptObjects, room_bytes: int) -> list[LoadableHit]:
    """Returns hits of what is present that RAM has room for, to compare them. Shortest first.

    They are the longest hit, and some up to the longest for which there is room. The objects of
    each, with those that RAM alone hits, take at most `room_bytes`. Empty where no hit is longer
    than that of RAM.
    """
    geometry, masks = objects.geometry, objects.masks
    resident, longest = objects.resident, objects.longest
    if longest.tokens <= resident.tokens:
        return []
    sizes = HitSizes(geometry, objects.sizes, longest.depth)
    seconds = [list(accumulate(seconds, initial=0.0)) for seconds in objects.seconds]
    whole = largest_hit(geometry, masks, longest.chunks)
    reach = sizes.largest_fit(masks, whole, resident, room_bytes)
    ends = {largest_hit(geometry, masks, chunks) for chunks in compared_boundaries(reach)}
    loadable = []
    for hit in sorted({longest, *(whole_hit(geometry, end) for end in ends)}):
        if sizes.bytes_of((resident, hit)) <= room_bytes:
            half = whole_hit(geometry, largest_hit(geometry, masks, hit.depth // 2))
            has_room = sizes.bytes_of((resident, half, hit)) <= room_bytes
            hits = (half, hit) if half.tokens > resident.tokens and has_room else (hit,)
            tail_seconds = objects.tail_seconds if hit.tail else 0.0
            read_seconds = needed_sum(seconds, (hit,), tail_seconds)
            loadable.append(LoadableHit(hits, read_seconds))
    return loadable


class HitSizes:
    """The bytes of RAM that the objects of hits take."""

    def __init__(self, geometry: Geometry, sizes: Sequence[Sequence[int]], chunks: int) -> None:
        """`sizes` are as in PromptObjects. The hits have at most `chunks` chunks."""
        self._geometry = geometry
        self._sums = [[*accumulate(islice(cycle(period), chunks), initial=0)] for period in sizes]
        self._tail_bytes = sum(period[0] for period in sizes)
        """A tail is as large as the objects of a chunk, which have one size where there are any."""
        self._chunk_bytes_max = max(1, sum(map(max, sizes)))

    def bytes_of(self, hits: Sequence[Hit]) -> int:
        """Returns the bytes of the objects that any of the hits needs. The hits ascend."""
        tail_bytes = sum(self._tail_bytes for hit in hits if hit.tail)
        return needed_sum(self._sums, hits, tail_bytes)

    def largest_fit(
        self, masks: Sequence[bytes], chunks: int, resident: Hit, room_bytes: int
    ) -> int:
        """Returns the largest hit of at most `chunks` chunks that RAM can hold as a whole.

        `masks` are the presence masks of all that there is. The objects of the hit `resident` take
        room as well. The result is not longer than `resident` where no longer hit has room.
        """
        chunk_tokens = self._geometry.chunk_tokens
        while chunks * chunk_tokens > resident.tokens:
            hit = whole_hit(self._geometry, chunks)
            excess = self.bytes_of((resident, hit)) - room_bytes
            if excess <= 0:
                break
            # A chunk less takes at most `_chunk_bytes_max` less: no hit in between has room.
            fewer = -(-excess // self._chunk_bytes_max)
            least = resident.tokens // chunk_tokens
            chunks = largest_hit(self._geometry, masks, max(least, chunks - fewer))
        return chunks


def needed_sum(sums: Sequence[Sequence[Amount]], hits: Sequence[Hit], tails: Amount) -> Amount:
    """Returns the sum over the objects that any of the hits needs. The hits ascend.

    `sums` has per group and number n of chunks the sum over the objects of the first n chunks.
    `tails` is the sum over the objects of the hits' tails.
    """
    total = tails
    for index, group_sums in enumerate(sums):
        end = 0
        for hit in hits:
            start = min(hit.chunks, max(end, hit.starts[index]))
            total += group_sums[hit.chunks] - group_sums[start]
            end = max(end, hit.chunks)
    return total
