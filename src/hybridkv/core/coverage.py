"""The objects that a hit needs, the blocks that an object holds, and the largest hit.

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

from hybridkv.core.geometry import Geometry, Group, GroupKind

SlotShape = tuple[int, int]
"""(part_bytes, parts) of an object and of its slot, a key that is made for each object."""


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


def slot_shapes(geometry: Geometry, group: Group) -> tuple[SlotShape, ...]:
    """Returns the shapes that a group's objects may have, ascending.

    Only a chunked local group has several.
    """
    counts = sorted({*stored_counts(geometry, group)} - {0})
    return tuple((count * group.block_bytes, geometry.parts(group)) for count in counts)


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
