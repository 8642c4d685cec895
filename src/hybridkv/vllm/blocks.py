"""The engine's blocks as memory: runs of bytes, and pieces of an object's part.

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
    """Return the bytes of one block of a layer, `view[block]`."""
    size: int = view[0].numel() * view.element_size()
    return size


def memory_order(view: torch.Tensor) -> tuple[int, ...]:
    """Return the dims of a block from the largest stride to the smallest, but those of length 1.

    A block of [heads, tokens, numbers] that has tokens before heads in memory -> (1, 0, 2).
    """
    dims = (dim for dim, length in enumerate(view.shape[1:]) if length != 1)
    return tuple(sorted(dims, key=view.stride()[1:].__getitem__, reverse=True))


def physical(view: torch.Tensor) -> torch.Tensor:
    """Return the same blocks with the dims of each in the order of memory, joined where possible.

    The shape is `[block, ..., run]`. The last dim is contiguous, and `[block, run]` is a block in
    one piece of memory.
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
    """Yield for each layer its blocks in the engine, and the op's blocks within `part`.

    `views` are the layers' physical views, and `part` is one rank's part of an object, as bytes.
    The blocks in it are `[block, ..., run]` too.
    """
    at = 0
    for view in views:
        size = block_bytes(view)
        start = at + op.first * size
        piece = part[start : start + len(op.blocks) * size]
        yield view, piece.view(view.dtype).view(len(op.blocks), *view.shape[1:])
        at += op.count * size


def block_runs(view: torch.Tensor) -> Iterator[tuple[int, int]]:
    """Yield (byte offset, bytes) of each run of a block of a physical view, in memory's order."""
    size, strides = view.element_size(), view.stride()[1:-1]
    for index in product(*map(range, view.shape[1:-1])):
        yield sum(map(mul, index, strides)) * size, view.shape[-1] * size
