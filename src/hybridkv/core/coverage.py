"""Which objects a hit needs, which blocks an object holds, and the largest boundary at which nothing is missing.

What a restore at boundary B needs of a group is the block range ``[skipped(B) // bs, B // bs)``::

    full           [################)B        everything
    sliding w      [..........######)B        the blocks that hold (B - w, B)
    chunked local  [........########)B        from the start of B's attention chunk; nothing if B starts one
    recurrent      [...............#)B        the one state at exactly B

``skipped`` never decreases, so the widest use of chunk k by any boundary is the one at its own end.  Storing
``needed(end of k)`` cut to chunk k therefore stores every block that some hit can read, and no other.
"""

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

from hybridkv.core.geometry import Geometry, Group, Kind

SlotShape = tuple[int, int]
"""(bytes of one part, parts) of an object and of the slot that takes it."""


def needed_blocks(group: Group, boundary: int) -> range:
    """Block positions of `group` that a restore at `boundary` (a multiple of its block) reads."""
    end = boundary // group.tokens_per_block
    return range(min(end, group.skipped_tokens(boundary) // group.tokens_per_block), end)


def held_blocks(geometry: Geometry, tokens: int, step_tokens: int) -> int:
    """The most engine blocks, over all groups, that a request of `tokens` tokens holds before it has run once."""
    return most_blocks(map(keeping, geometry.groups), tokens, step_tokens)


class Keeping(NamedTuple):
    """What a group keeps of a request."""

    tokens_per_block: int
    window_tokens: int | None
    """None = everything."""


def keeping(group: Group) -> Keeping:
    """Of a group."""
    whole = group.kind is Kind.FULL
    return Keeping(group.tokens_per_block, None if whole else group.window_tokens + group.extra_retained_tokens)


def most_blocks(groups: Iterable[Keeping], tokens: int, step_tokens: int) -> int:
    """See `held_blocks`. Groups with a window let go of what is behind it, but a step's tokens may come before that."""
    total = 0
    for group in groups:
        read = tokens if group.window_tokens is None else group.window_tokens
        total += -(-min(tokens, read + step_tokens) // group.tokens_per_block) + 1
    return total


def stored_blocks(geometry: Geometry, group: Group, chunk: int) -> range:
    """Block positions whose bytes make up the object of (`group`, `chunk`); empty where no hit ever reads one."""
    inside = geometry.chunk_blocks(group, chunk)
    needed = needed_blocks(group, inside.stop * group.tokens_per_block)
    return range(max(inside.start, needed.start), inside.stop) if needed else range(inside.stop, inside.stop)


def needed_chunks(geometry: Geometry, group: Group, chunks: int) -> range:
    """Chunks whose objects of `group` a hit of `chunks` chunks needs; all of them are non-empty objects.

    Those of `needed_blocks`, as a chunk is whole blocks; in one division, since the engine's hooks ask for it.
    """
    return range(group.skipped_tokens(chunks * geometry.chunk_tokens) // geometry.chunk_tokens, chunks)


def part_bytes(geometry: Geometry, group: Group, chunk: int) -> int:
    """Bytes of one part of the object of (`group`, `chunk`); 0 where there is none."""
    return len(stored_blocks(geometry, group, chunk)) * group.block_bytes


@lru_cache(maxsize=4096)
def stored_counts(geometry: Geometry, group: Group) -> tuple[int, ...]:
    """Stored blocks per object over one period: chunk k has ``counts[k % len(counts)]``, the last ones of the chunk.

    The period is one chunk but for chunked local attention, where it is that of the attention chunk.
    """
    local = group.kind is Kind.CHUNKED_LOCAL
    period = math.lcm(group.window_tokens, geometry.chunk_tokens) // geometry.chunk_tokens if local else 1
    return tuple(len(stored_blocks(geometry, group, chunk)) for chunk in range(period))


def part_sizes(geometry: Geometry, group: Group) -> tuple[int, ...]:
    """Every non-zero `part_bytes` of a group, ascending: one for most kinds, a few for chunked local ones."""
    return tuple(sorted({count * group.block_bytes for count in stored_counts(geometry, group)} - {0}))


def slot_shapes(geometry: Geometry, group: Group) -> tuple[SlotShape, ...]:
    """The shape of every object that a group may have."""
    return tuple((size, geometry.parts(group)) for size in part_sizes(geometry, group))


def largest_hit(geometry: Geometry, masks: Sequence[bytes], chunks_max: int) -> int:
    """The most chunks (at most `chunks_max`) at whose end every group's need is present; 0 = miss.

    `masks` holds one string per group, in the order of `geometry.groups`, with one byte per chunk: 1 = present.
    All groups at one boundary, or a miss (requirements B35, A26).

    A chunk that is missing at `chunks` is needed by every boundary between it and `chunks` as well, because the
    start of the need never moves up while the boundary moves down; so the search continues at the missing chunk.
    """
    chunks = min(chunks_max, *(len(mask) for mask in masks))
    while chunks > 0:
        below = min(
            _fallback(geometry, group, mask, chunks) for group, mask in zip(geometry.groups, masks, strict=True)
        )
        if below == chunks:
            break
        chunks = below
    return chunks


def lacking(geometry: Geometry, masks: Sequence[bytes], chunks: int) -> list[tuple[Group, int]]:
    """(group, its first missing chunk) of every group that keeps a hit of `chunks` chunks from being."""
    lacks: list[tuple[Group, int]] = []
    for group, mask in zip(geometry.groups, masks, strict=True):
        need = needed_chunks(geometry, group, chunks)
        missing = mask.find(0, need.start, need.stop)
        if missing < 0:
            missing = max(need.start, len(mask))
        lacks += [(group, missing)] if missing < need.stop else []
    return lacks


def _fallback(geometry: Geometry, group: Group, mask: bytes, chunks: int) -> int:
    """`chunks` where the group has all that a hit there needs, else the next lower number at which it may."""
    need = needed_chunks(geometry, group, chunks)
    missing = mask.find(0, need.start, need.stop)
    if missing < 0:
        return chunks
    return mask.rfind(1, 0, chunks) + 1 if group.kind is Kind.RECURRENT else missing
