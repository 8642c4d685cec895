"""Copy plans: which block of which group is copied to or from which place in the arena.

An object's payload has one part for each rank, or one that all ranks share (core.geometry), each
``[layer of the group][stored block][bytes of the block, in the order of memory]``::

    slot      |header|checksums| part of rank 0            | part of rank 1 ...
    part                       | layer 0: b0 b1 | layer 1: b0 b1 | ...

The scheduler plans *runs*, objects of consecutive chunks of one group, so that a step's cost hardly
grows with the length of the prompt. The workers divide them into the copies of single objects.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import compress, count, groupby

from hybridkv.core.coverage import needed_blocks, needed_chunks, stored_counts
from hybridkv.core.errors import HybridKVError
from hybridkv.core.geometry import Geometry
from hybridkv.core.packed import SlotRef, on_node, unpack_slots

PAYLOAD_VERSION = 2
"""The version of layout and signatures, a part of the identity, as records outlive an upgrade."""
NULL_BLOCK = 0  # The engine's null block: never stored, never loaded into.
_ZEROS = re.compile(b"\0+")


# Values that a step makes by the hundred are not frozen, which would cost it six times as much.


class PlanError(HybridKVError):
    """A load cannot be planned. The request is computed instead."""


@dataclass(frozen=True, slots=True)
class CopyOp:
    """One object to copy. `blocks[i]` is the engine's block for stored block number `first + i`.

    A store always covers the whole object (first == 0, len(blocks) == count), a load may not.
    """

    slot: SlotRef
    group_index: int  # Index into Geometry.groups (not the gid).
    chunk: int
    count: int  # Stored blocks in the object.
    first: int
    blocks: tuple[int, ...]


@dataclass(slots=True)
class ObjectSpan:
    """Objects of one group, one size and consecutive chunks, and the blocks that hold them."""

    group_index: int
    first_chunk: int
    count: int  # Stored blocks in each object.
    blocks: Sequence[int]

    @property
    def objects(self) -> int:
        """Objects in the span, each with `count` blocks."""
        return len(self.blocks) // self.count

    def part(self, start: int, stop: int) -> "ObjectSpan":
        """Returns the span of the objects `start` to `stop - 1`, counted from 0."""
        if stop - start == self.objects:
            return self
        blocks = self.blocks[start * self.count : stop * self.count]
        return ObjectSpan(self.group_index, self.first_chunk + start, self.count, blocks)


@dataclass(slots=True)
class CopyRun:
    """A span, and the ticket of each of its objects (core.packed)."""

    span: ObjectSpan
    tickets: bytes
    skipped: int = 0
    """Stored blocks at the start of the first object that are not copied, nor in `span.blocks`."""

    @property
    def objects(self) -> int:
        """Objects in the run, each with a ticket."""
        return (len(self.span.blocks) + self.skipped) // self.span.count

    def on_node(self, node: int, nodes: int) -> "CopyRun":
        """Returns the run with the slots of one of so many nodes for its tickets."""
        return CopyRun(self.span, on_node(self.tickets, node, nodes), self.skipped)

    def copies(self) -> Iterator[CopyOp]:
        """Yields the copy of each object on the run's node. Its blocks may be null blocks."""
        span = self.span
        blocks = tuple(span.blocks)
        at, first = 0, self.skipped
        for chunk, slot in enumerate(unpack_slots(self.tickets), span.first_chunk):
            stop = at + span.count - first
            yield CopyOp(
                slot=slot,
                group_index=span.group_index,
                chunk=chunk,
                count=span.count,
                first=first,
                blocks=blocks[at:stop],
            )
            at, first = stop, 0

    def ops(self) -> Iterator[CopyOp]:
        """Yields the copy of each object. Raises PlanError where a block is a null block."""
        if NULL_BLOCK in self.span.blocks:
            where = f"group number {self.span.group_index}"
            raise PlanError(f"{where}: a null block among the engine's blocks")
        yield from self.copies()


def storable_spans(
    geometry: Geometry, group_index: int, chunks: range, mask: bytes, table: Sequence[int]
) -> tuple[list[ObjectSpan], int]:
    """Returns the objects of `chunks` that a block table has, and how many have a hole.

    `mask` has a 1 for each chunk whose object is known to be stored. `table[i]` is the block id at
    position i, NULL_BLOCK where the engine keeps nothing. An object with such a hole is not stored,
    because a hit would then restore the null block's bytes. Only the ends of a span are looked at
    here: the engine lets go of the beginning. The workers look at every block.
    """
    spans: list[ObjectSpan] = []
    holes = 0
    absences = [chunks]
    if mask.find(1, chunks.start) >= 0:
        known = mask.ljust(chunks.stop, b"\0")
        found = _ZEROS.finditer(known, chunks.start, chunks.stop)
        absences = [range(absent.start(), absent.end()) for absent in found]
    for absent in absences:
        for span in _spans(geometry, group_index, absent, table):
            if NULL_BLOCK not in (span.blocks[0], span.blocks[-1]):
                spans.append(span)
                continue
            size, objects, start = span.count, span.objects, 0
            # A null block after the last block ends every search.
            span.blocks = blocks = [*span.blocks, NULL_BLOCK]
            while start < objects:
                hole = blocks.index(NULL_BLOCK, start * size)
                if start < hole // size:
                    spans.append(span.part(start, hole // size))
                # The next object that may be whole starts at the next real block, or later.
                block = next(compress(count(hole), blocks[hole:]), objects * size)
                start = -(-block // size)
                holes += start - hole // size
    return spans, holes


def plan_load(
    geometry: Geometry,
    hit_chunks: int,
    local_tokens: int,
    tables: Sequence[Sequence[int]],
    tickets: bytes,
) -> tuple[CopyRun, ...]:
    """Returns the copies that restore a hit of `hit_chunks` chunks after `local_tokens` local ones.

    `tables[i]` is the block table of `geometry.groups[i]`. `tickets` are those of
    the chunks that `needed_chunks` gives, group by group (core.packed). Blocks of the local hit are
    shared with other requests and are never written (C34)::

        table    [local hit ....|needed by the hit ....)
                 0              max(L // bs, skipped)   T // bs

    Raises PlanError where a table lacks a block that the hit needs.
    """
    runs: list[CopyRun] = []
    boundary = hit_chunks * geometry.chunk_tokens
    needs = [needed_chunks(geometry, group, hit_chunks) for group in geometry.groups]
    objects, size = sum(map(len, needs)), geometry.ticket_bytes
    if len(tickets) != objects * size:
        given = len(tickets) // size
        raise PlanError(f"{given} slots for the {objects} objects of a hit of {hit_chunks} chunks")
    at, lacks = 0, "the engine has no block for"
    for index, (group, chunks) in enumerate(zip(geometry.groups, needs, strict=True)):
        needed = needed_blocks(group, boundary)
        start = max(needed.start, local_tokens // group.tokens_per_block)
        first = max(chunks.start, start // geometry.blocks_per_chunk(group))
        if first < chunks.stop and len(tables[index]) < needed.stop:
            raise PlanError(f"group {group.gid}: {lacks} the end of the hit")
        for span in _spans(geometry, index, range(first, chunks.stop), tables[index]):
            end = (span.first_chunk + 1) * geometry.blocks_per_chunk(group)
            skipped = max(0, start - (end - span.count))
            ticket = (at + span.first_chunk - chunks.start) * size
            stop = ticket + span.objects * size
            if skipped:
                span = ObjectSpan(index, span.first_chunk, span.count, span.blocks[skipped:])
            if NULL_BLOCK in (span.blocks[0], span.blocks[-1]):
                # Looking at every block would double the hook's cost. `ops` looks at all of them.
                raise PlanError(f"group {group.gid}: {lacks} a chunk of the hit")
            runs.append(CopyRun(span, tickets[ticket:stop], skipped))
        at += len(chunks)
    return tuple(runs)


def _spans(
    geometry: Geometry, group_index: int, chunks: range, table: Sequence[int]
) -> list[ObjectSpan]:
    """Returns the objects of `chunks`, in spans whose objects have the same number of blocks.

    An object holds the last `count` blocks of its chunk.
    """
    group = geometry.groups[group_index]
    per_chunk = geometry.blocks_per_chunk(group)
    counts = stored_counts(geometry, group)
    spans: list[ObjectSpan] = []
    sizes = [(counts[0], chunks.start, chunks.stop)] if chunks else []
    if len(counts) > 1:
        by_size = groupby(chunks, lambda chunk: counts[chunk % len(counts)])
        runs = [(size, list(same)) for size, same in by_size]
        sizes = [(size, run[0], run[-1] + 1) for size, run in runs]
    for size, first, end in sizes:
        start, stop = first * per_chunk, end * per_chunk
        if size == per_chunk:
            spans.append(ObjectSpan(group_index, first, size, table[start:stop]))
        elif size:
            ends = range(start + per_chunk, stop + 1, per_chunk)
            blocks = [block for end in ends for block in table[end - size : end]]
            spans.append(ObjectSpan(group_index, first, size, blocks))
    return spans
