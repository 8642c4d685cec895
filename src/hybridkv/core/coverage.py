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
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

from hybridkv.core.geometry import Geometry, Group, GroupKind

SlotShape = tuple[int, int]
"""(bytes of one part, parts) of an object and of the slot that takes it."""


def needed_blocks(group: Group, boundary: int) -> range:
    """Block positions of `group` that a restore at `boundary` (a multiple of its block) reads."""
    end = boundary // group.tokens_per_block
    return range(min(end, group.skipped_tokens(boundary) // group.tokens_per_block), end)


class Retention(NamedTuple):
    """What the engine keeps of a request in a group."""

    tokens_per_block: int
    window_tokens: int | None
    """None = all tokens are kept."""


def retention_of(group: Group) -> Retention:
    """What the engine keeps of a request in `group`."""
    window = group.window_tokens + group.extra_retained_tokens
    return Retention(group.tokens_per_block, None if group.kind is GroupKind.FULL else window)


def most_blocks(groups: Iterable[Retention], tokens: int, step_tokens: int) -> int:
    """The most blocks, over all groups, that a request of `tokens` holds before it has run once.

    A group with a window frees earlier blocks, but only after the step that leaves them.
    """
    total = 0
    for group in groups:
        read = tokens if group.window_tokens is None else group.window_tokens
        total += -(-min(tokens, read + step_tokens) // group.tokens_per_block) + 1
    return total


def stored_blocks(geometry: Geometry, group: Group, chunk: int) -> range:
    """Block positions that make up the object of (`group`, `chunk`); empty if no hit needs it."""
    inside = geometry.chunk_blocks(group, chunk)
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


def part_sizes(geometry: Geometry, group: Group) -> tuple[int, ...]:
    """Every non-zero `part_bytes` of a group, ascending; only chunked local groups have several."""
    counts = sorted({*stored_counts(geometry, group)} - {0})
    return tuple(count * group.block_bytes for count in counts)


def slot_shapes(geometry: Geometry, group: Group) -> tuple[SlotShape, ...]:
    """The shape of every object that a group may have."""
    return tuple((size, geometry.parts(group)) for size in part_sizes(geometry, group))


def largest_hit(geometry: Geometry, masks: Sequence[bytes], chunks_max: int) -> int:
    """The most chunks, up to `chunks_max`, at whose end no group lacks an object; 0 = miss.

    `masks` has a presence mask for each of `geometry.groups`, with a byte for each chunk: 1 =
    present. All groups have their objects at one boundary, or it is a miss (requirements B35, A26).

    A chunk that a hit of `chunks` lacks is needed by every shorter hit that ends behind it, because
    the start of the need never moves up while the boundary moves down. The search goes on there.
    """
    chunks = min(chunks_max, *(len(mask) for mask in masks))
    while chunks > 0:
        below = min(
            _fallback(geometry, group, mask, chunks)
            for group, mask in zip(geometry.groups, masks, strict=True)
        )
        if below == chunks:
            break
        chunks = below
    return chunks


def lacking(geometry: Geometry, masks: Sequence[bytes], chunks: int) -> list[tuple[Group, int]]:
    """(group, its first missing chunk) of every group that lacks an object of such a hit."""
    lacks: list[tuple[Group, int]] = []
    for group, mask in zip(geometry.groups, masks, strict=True):
        need = needed_chunks(geometry, group, chunks)
        missing = mask.find(0, need.start, need.stop)
        if missing < 0:
            missing = max(need.start, len(mask))
        lacks += [(group, missing)] if missing < need.stop else []
    return lacks


def _fallback(geometry: Geometry, group: Group, mask: bytes, chunks: int) -> int:
    """`chunks` if the group lacks nothing there, else the next lower number that is possible."""
    need = needed_chunks(geometry, group, chunks)
    missing = mask.find(0, need.start, need.stop)
    if missing < 0:
        return chunks
    return mask.rfind(1, 0, chunks) + 1 if group.kind is GroupKind.RECURRENT else missing
