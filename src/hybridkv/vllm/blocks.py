"""The engine's blocks as memory: runs of bytes, words, and pieces of an object's part.

vLLM registers a layer as [block, head, token, content] whatever stands next to what in memory. A
block is taken apart in the order of its memory, so that it is one run where it is one piece::

    LBNHC, LBHNC, BLNHC, BLHNC     [block, bytes]          one run
    LHBNC, BHLNC                   [block, head, bytes]    a run for each head
"""

from collections.abc import Iterator, Sequence
from itertools import product
from operator import mul

import torch

from hybridkv.core.copies import CopyOp


def block_bytes(view: torch.Tensor) -> int:
    """Bytes of one block of a layer."""
    size: int = view[0].numel() * view.element_size()
    return size


def memory_order(view: torch.Tensor) -> tuple[int, ...]:
    """The dims of one block from the largest stride to the smallest, without those of length 1."""
    dims = (dim for dim, length in enumerate(view.shape[1:]) if length != 1)
    return tuple(sorted(dims, key=view.stride()[1:].__getitem__, reverse=True))


def physical(view: torch.Tensor) -> torch.Tensor:
    """The same blocks with the dims of each in the order of memory, joined as far as possible.

    `[block, ..., run]`: the last dim is contiguous, and there are no others where a block is one
    piece of memory.
    """
    shape, strides = [1], [1]
    for dim in reversed(memory_order(view)):
        length, stride = view.shape[dim + 1], view.stride(dim + 1)
        if stride == strides[0] * shape[0]:
            shape[0] *= length
        else:
            shape.insert(0, length)
            strides.insert(0, stride)
    return view.as_strided((len(view), *shape), (view.stride(0), *strides))


def part_pieces(
    views: Sequence[torch.Tensor], op: CopyOp, part: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """By layer: the engine's blocks, and the op's blocks within one rank's part, shaped alike.

    The views are physical ones.
    """
    at = 0
    for view in views:
        size = block_bytes(view)
        start = at + op.first * size
        piece = part[start : start + len(op.blocks) * size]
        yield view, piece.view(view.dtype).view(len(op.blocks), *view.shape[1:])
        at += op.count * size


def block_runs(view: torch.Tensor) -> Iterator[tuple[int, int]]:
    """(byte offset, bytes) of each run of one block of a physical view, in the order of memory."""
    size, strides = view.element_size(), view.stride()[1:-1]
    for index in product(*map(range, view.shape[1:-1])):
        yield sum(map(mul, index, strides)) * size, view.shape[-1] * size
