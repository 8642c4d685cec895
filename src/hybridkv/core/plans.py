"""Copy plans: which block of which group goes to or comes from which place in the arena. Plain values.

An object's payload is one part per rank, each ``[layer of the group][stored block][bytes of the block]``::

    slot      |header|checksums| part of rank 0            | part of rank 1 ...
    part                       | layer 0: b0 b1 | layer 1: b0 b1 | ...
"""

from collections.abc import Sequence
from dataclasses import dataclass

from hybridkv.core.coverage import needed_blocks, needed_chunks, stored_blocks
from hybridkv.core.errors import HybridKVError
from hybridkv.core.geometry import Geometry

NULL_BLOCK = 0
"""The engine's null block: never stored, never loaded into."""


class PlanError(HybridKVError):
    """A load that cannot be planned; the request is computed instead."""


@dataclass(frozen=True, slots=True)
class SlotRef:
    """A slot as the daemon names it: byte offset of its header in the arena, and its generation."""

    offset: int
    generation: int


@dataclass(frozen=True, slots=True)
class CopyOp:
    """One object to copy. `blocks[i]` is the engine block for stored block number `first + i` of `count`.

    Stores always cover the whole object (first == 0, len(blocks) == count); loads may cover a part of it.
    """

    slot: SlotRef
    group_index: int
    """Index into Geometry.groups (not the gid)."""
    chunk: int
    count: int
    """Stored blocks in the object."""
    first: int
    blocks: tuple[int, ...]


def plan_store(geometry: Geometry, group_index: int, chunk: int, table: Sequence[int], slot: SlotRef) -> CopyOp | None:
    """The copy of one attention object out of a block table, or None while the table does not hold all of it.

    `table[i]` is the block id at position i, NULL_BLOCK where the engine keeps nothing: an object with such a hole
    is never stored (a null block's bytes under a valid key are a lie).
    """
    positions = stored_blocks(geometry, geometry.groups[group_index], chunk)
    if not positions or positions.stop > len(table):
        return None
    blocks = tuple(table[positions.start : positions.stop])
    if NULL_BLOCK in blocks:
        return None
    return CopyOp(slot, group_index, chunk, len(blocks), 0, blocks)


def plan_load(
    geometry: Geometry,
    hit_chunks: int,
    local_tokens: int,
    tables: Sequence[Sequence[int]],
    slots: Sequence[Sequence[SlotRef]],
) -> tuple[CopyOp, ...]:
    """The copies that restore a hit of `hit_chunks` chunks behind a local hit of `local_tokens` tokens.

    `tables[i]` is the block table and `slots[i]` the slots of the chunks `needed_chunks` names, for
    `geometry.groups[i]`. Blocks of the local hit are shared with other requests and never written (C34)::

        table    [local hit ....|needed by the hit ....)
                 0              max(L // bs, skipped)   T // bs

    Raises PlanError where the engine's table lacks a block that the hit needs.
    """
    ops: list[CopyOp] = []
    boundary = hit_chunks * geometry.chunk_tokens
    for index, group in enumerate(geometry.groups):
        chunks = needed_chunks(geometry, group, hit_chunks)
        if len(slots[index]) != len(chunks):
            raise PlanError(f"group {group.gid}: {len(slots[index])} slots for {len(chunks)} chunks")
        needed = needed_blocks(group, boundary)
        start = max(needed.start, local_tokens // group.tokens_per_block)
        table = tables[index]
        for chunk, slot in zip(chunks, slots[index], strict=True):
            stored = stored_blocks(geometry, group, chunk)
            first = max(stored.start, start)
            if first >= stored.stop:
                continue
            blocks = tuple(table[first : stored.stop])
            if len(blocks) != stored.stop - first or NULL_BLOCK in blocks:
                raise PlanError(f"group {group.gid}: the engine has no block for chunk {chunk} of the hit")
            ops.append(CopyOp(slot, index, chunk, len(stored), first - stored.start, blocks))
    return tuple(ops)
