"""Which objects a hit needs, which blocks an object holds, and which hit is the largest.

What a restore at boundary B needs of a group is the block range ``[skipped(B) // bs, B // bs)``::

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

from hybridkv.core.geometry import Geometry, Group, GroupKind

SlotShape = tuple[int, int]  # (bytes of one part, parts) of an object and of its slot.


def needed_blocks(group: Group, boundary: int) -> range:
    """Block positions of `group` that a restore at `boundary` (a multiple of its block) reads."""
    end = boundary // group.tokens_per_block
    return range(min(end, group.skipped_tokens(boundary) // group.tokens_per_block), end)


def stored_blocks(geometry: Geometry, group: Group, chunk: int) -> range:
    """Block positions that make up the object of (`group`, `chunk`); empty if no hit needs it."""
    per_chunk = geometry.blocks_per_chunk(group)
    inside = range(chunk * per_chunk, (chunk + 1) * per_chunk)
    needed = needed_blocks(group, inside.stop * group.tokens_per_block)
    return range(max(inside.start, needed.start) if needed else inside.stop, inside.stop)


def needed_chunks(geometry: Geometry, group: Group, chunks: int) -> range:
    """Chunks whose objects of `group` a hit of `chunks` chunks needs; none of them is empty.

    They are the chunks of `needed_blocks`, in one division because the engine's hooks call this.
    """
    tokens = geometry.chunk_tokens
    return range(group.skipped_tokens(chunks * tokens) // tokens, chunks)


def part_bytes(geometry: Geometry, group: Group, chunk: int) -> int:
    """Bytes of one part of the object of (`group`, `chunk`); 0 where no hit needs it."""
    return len(stored_blocks(geometry, group, chunk)) * group.block_bytes


@lru_cache(maxsize=4096)
def stored_counts(geometry: Geometry, group: Group) -> tuple[int, ...]:
    """Stored blocks of the objects of one period: chunk k has its last ``counts[k % len(counts)]``.

    The period is 1 chunk, but for chunked local attention, where it depends on the attention chunk.
    """
    period = 1
    if group.kind is GroupKind.CHUNKED_LOCAL:
        period = math.lcm(group.window_tokens, geometry.chunk_tokens) // geometry.chunk_tokens
    return tuple(len(stored_blocks(geometry, group, chunk)) for chunk in range(period))


def slot_shapes(geometry: Geometry, group: Group) -> tuple[SlotShape, ...]:
    """The shapes that a group's objects may have, ascending; only chunked local has several."""
    counts = sorted({*stored_counts(geometry, group)} - {0})
    return tuple((count * group.block_bytes, geometry.parts(group)) for count in counts)


def largest_hit(geometry: Geometry, masks: Sequence[bytes], chunks_max: int) -> int:
    """The most chunks, up to `chunks_max`, at whose end no group lacks an object; 0 = miss.

    `masks` has a presence mask for each of `geometry.groups`, with a byte for each chunk: 1 =
    present. All groups have their objects at one boundary, or it is a miss (requirements B35, A26).

    A chunk that a hit of `chunks` lacks is needed by every shorter hit that ends behind it, because
    the start of the need never moves up while the boundary moves down. The search goes on there.
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
    """(group, its first missing chunk) of every group that lacks an object of such a hit."""
    pairs = zip(geometry.groups, masks, strict=True)
    firsts = [(group, _missing(geometry, group, mask, chunks)) for group, mask in pairs]
    return [(group, missing) for group, missing in firsts if missing < chunks]


def _missing(geometry: Geometry, group: Group, mask: bytes, chunks: int) -> int:
    """The first chunk that such a hit needs of `group` and lacks; `chunks` where it lacks none."""
    start = needed_chunks(geometry, group, chunks).start
    missing = mask.find(0, start, chunks)
    return missing if missing >= 0 else min(chunks, max(start, len(mask)))
