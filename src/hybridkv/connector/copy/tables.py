"""Where the engine's blocks are, and which of them a kernel copies, as arrays that it reads.

A group has a row for each run of a block in each layer. A launch has an entry for each object, and
after the entries the numbers of all blocks. All numbers are 64-bit, and sizes are in words::

    row    |address of block 0's run|words: block to block|words of the run|words of a block
           |words of the layers before, for one block|words of the runs before|
    entry  |address of the part|stored blocks|first block|blocks|index of its first block number
           |first row of the group|rows of the group|whole pieces of the part (shm.slots)|
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

import torch

from hybridkv.core.copies import CopyOp
from hybridkv.shm.slots import PIECE_BYTES
from hybridkv.vllm.blocks import block_bytes, block_runs

ROW = 6  # Numbers in a row.
ENTRY = 8  # Numbers in an entry.
NUMBER_BYTES = 8


@dataclass(frozen=True, slots=True)
class GroupTable:
    """The rows of one group, and the size of its blocks."""

    first_row: int
    rows: int
    block_bytes: int  # Of one block in all layers.
    blocks: int  # The engine's blocks.
    run_words: int  # Of the longest run.


@dataclass(frozen=True, slots=True)
class BlockTables:
    """The rows of all groups, one group after another."""

    word_bytes: int
    rows: "array[int]"
    groups: tuple[GroupTable, ...]

    def part_bytes(self, op: CopyOp) -> int:
        """Return the bytes of one rank's part of an object."""
        return op.count * self.groups[op.group_index].block_bytes

    def has_blocks(self, op: CopyOp) -> bool:
        """Return True if the engine has all blocks of the op."""
        return min(op.blocks) >= 0 and max(op.blocks) < self.groups[op.group_index].blocks


@dataclass(frozen=True, slots=True)
class KernelLaunch:
    """One launch of a gather or a scatter.

    It copies blocks of `ops[i]` from or to the part that is `part_offsets[i]` bytes into the
    staging.
    """

    ops: Sequence[CopyOp]
    part_offsets: Sequence[int]
    staging: torch.Tensor
    rows_address: int  # Of the tables' rows on the device.
    descriptors: torch.Tensor  # The entries and block numbers.
    rows_max: int  # The most rows of any entry.
    run_words_max: int  # The longest run of any entry.


def make_tables(groups: Sequence[Sequence[torch.Tensor]]) -> BlockTables:
    """Return the tables of the physical views of each group's layers."""
    runs: list[list[list[int]]] = []
    for views in groups:
        runs.append([])
        layers_before = 0
        for view in views:
            stride, runs_before = view.stride(0) * view.element_size(), 0
            for offset, size in block_runs(view):
                address = view.data_ptr() + offset
                row = [address, stride, size, block_bytes(view), layers_before, runs_before]
                runs[-1].append(row)
                runs_before += size
            layers_before += block_bytes(view)
    word = gcd(NUMBER_BYTES, *(number for rows in runs for row in rows for number in row))
    tables: list[GroupTable] = []
    flat = array("q")
    for views, rows in zip(groups, runs, strict=True):
        tables.append(
            GroupTable(
                first_row=len(flat) // ROW,
                rows=len(rows),
                block_bytes=sum(map(block_bytes, views)),
                blocks=min(map(len, views)),
                run_words=max(row[2] for row in rows) // word,
            )
        )
        for address, *sizes in rows:
            flat.extend([address, *(size // word for size in sizes)])
    return BlockTables(word, flat, tuple(tables))


def encode(
    tables: BlockTables, ops: Sequence[CopyOp], part_offsets: Sequence[int], staging_address: int
) -> "array[int]":
    """Return the entries and block numbers of ops.

    The part of `ops[i]` is `part_offsets[i]` bytes after `staging_address`.
    """
    groups = tables.groups
    entries, numbers = array("q"), array("q")
    first_number = len(ops) * ENTRY
    for op, part_offset in zip(ops, part_offsets, strict=True):
        group, blocks = groups[op.group_index], op.blocks
        size = len(blocks)
        entries.extend(
            (
                staging_address + part_offset,
                op.count,
                op.first,
                size,
                first_number,
                group.first_row,
                group.rows,
                op.count * group.block_bytes // PIECE_BYTES,
            )
        )
        numbers.extend(blocks)
        first_number += size
    entries.extend(numbers)
    return entries


def encoded_bytes(ops: Sequence[CopyOp]) -> int:
    """Return the bytes of what `encode` returns for these ops."""
    return NUMBER_BYTES * sum(ENTRY + len(op.blocks) for op in ops)
