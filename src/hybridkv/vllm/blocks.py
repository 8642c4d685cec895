"""The engine's blocks as memory: runs of bytes, words, and pieces of an object's part."""

from collections.abc import Iterator, Sequence
from itertools import product

import torch

from hybridkv.core.copies import CopyOp


def block_bytes(view: torch.Tensor) -> int:
    """Bytes of one block of a layer."""
    size: int = view[0].numel() * view.element_size()
    return size


def as_words(views: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The same memory as the widest integers that the strides of all `views` allow."""
    for dtype in (torch.int64, torch.int32, torch.int16):
        try:
            return [view.view(dtype) for view in views]
        except RuntimeError:
            continue
    return [view.view(torch.uint8) for view in views]


def part_pieces(
    views: Sequence[torch.Tensor], op: CopyOp, part: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """By layer: the engine's blocks, and the op's blocks within one rank's part, shaped alike."""
    at = 0
    for view in views:
        size = block_bytes(view)
        start = at + op.first * size
        piece = part[start : start + len(op.blocks) * size]
        yield view, piece.view(view.dtype).view(len(op.blocks), *view.shape[1:])
        at += op.count * size


def block_runs(view: torch.Tensor) -> Iterator[tuple[int, int]]:
    """(byte offset, bytes) of each contiguous piece of one block, in the order of its elements."""
    size = view.element_size()
    pairs = zip(view.shape[1:], view.stride()[1:], strict=True)
    dims = [(length, stride) for length, stride in pairs if length != 1]
    run = 1
    while dims and dims[-1][1] == run:
        run *= dims.pop()[0]
    for index in product(*(range(length) for length, _ in dims)):
        offset = sum(at * stride for at, (_, stride) in zip(index, dims, strict=True))
        yield offset * size, run * size
