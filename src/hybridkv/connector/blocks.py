"""The engine's blocks as memory: contiguous runs of bytes, whatever the layout."""

from collections.abc import Iterator
from itertools import product

import torch


def block_runs(view: torch.Tensor) -> Iterator[tuple[int, int]]:
    """(byte offset, bytes) of the contiguous pieces of one block, in the logical order of its elements."""
    size = view.element_size()
    dims = [(length, stride) for length, stride in zip(view.shape[1:], view.stride()[1:], strict=True) if length != 1]
    run = 1
    while dims and dims[-1][1] == run:
        run *= dims.pop()[0]
    for index in product(*(range(length) for length, _ in dims)):
        offset = sum(at * stride for at, (_, stride) in zip(index, dims, strict=True))
        yield offset * size, run * size
