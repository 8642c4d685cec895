"""Reading of a matrix that oneDNN has packed: by multiplying it by a known matrix.

vLLM's build for CPUs packs large matrices into memory of oneDNN's own, and has a handler for each.
oneDNN gives no access to that memory, only a multiplication. Its products with the rows of the
identity matrix are the rows of the packed matrix.
"""

import hashlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from hybridkv.vllm.seams import multiply_int8

SUBSET_ROWS = 128
"""Rows of random subsets. For each of them, two different matrices of integers have the same
product with a probability of at most one half."""
SUBSET_COLUMNS_MAX = 1 << 16
"""The longest row of a subset of which every sum of 8-bit products is exact in float32, also when
scaled."""


class Probe(NamedTuple):
    """Inputs for a packed matrix whose products tell it from every other matrix."""

    questions: int
    """The number of inputs."""
    answers: Callable[[int, int], torch.Tensor]
    """Returns the products from (the first input, the number of inputs), a row for each."""


def linear_probe(handler: Any, linear: Callable[..., torch.Tensor], unused: torch.Tensor) -> Probe:
    """Return the probe of a matrix of floats: its rows, as products with units.

    `linear` is the layer's function of (inputs, a weight that it does not use, no bias).
    """

    def answers(start: int, count: int) -> torch.Tensor:
        units = torch.zeros(count, handler.k, dtype=unused.dtype)
        units.diagonal(start).fill_(1)
        return linear(units, unused, None)

    return Probe(handler.k, answers)


def int8_probe(handler: Any, config: Any, dtype: torch.dtype) -> Probe | None:
    """Return the probe of a matrix of vLLM's INT8 kernel. None = no product tells it apart.

    `config` is the kernel's configuration, and `dtype` that of the layer's outputs. Each column is
    multiplied by its scale. Inputs are integers with a scale of one here, whatever the checkpoint's
    scales are. With dynamic inputs products are float32, which is exact, so a few rows of subsets
    suffice. Else they are rounded to `dtype`, which keeps the 8 bits of a product with a unit.

    Inputs are 0 and -1, and never 1. On a processor without VNNI, oneDNN adds up
    (input + 128) * weight of two neighbours in 16 bits, and a sum that does not fit is cut:
    129 * -128 * 2 is not exact, and 128 * -128 * 2 is.
    """
    if not config.is_static_input_scheme:

        def answers_to_subsets(start: int, count: int) -> torch.Tensor:
            subsets = subset_rows(handler.k)[start : start + count]
            scales = torch.ones(count, 1, dtype=torch.float32)
            products = torch.empty(count, handler.n, dtype=torch.float32)
            return multiply_int8(handler, subsets, products, scales, zero_point=None)

        return Probe(SUBSET_ROWS, answers_to_subsets) if handler.k <= SUBSET_COLUMNS_MAX else None
    zero_point = None if config.input_symmetric else torch.zeros(1, dtype=torch.int32)
    scale = torch.ones(1, dtype=torch.float32)

    def answers(start: int, count: int) -> torch.Tensor:
        units = torch.zeros(count, handler.k, dtype=torch.int8)
        units.diagonal(start).fill_(-1)
        products = torch.empty(count, handler.n, dtype=dtype)
        return multiply_int8(handler, units, products, scale, zero_point)

    return Probe(handler.k, answers)


def subset_rows(columns: int) -> torch.Tensor:
    """Return SUBSET_ROWS rows of 0 and -1, the same in every process."""
    size_bytes = -(-SUBSET_ROWS * columns // 8)
    random = bytearray(hashlib.shake_128(b"hybridkv").digest(size_bytes))
    bits = torch.frombuffer(random, dtype=torch.uint8)[:, None] >> torch.arange(8) & 1
    return -bits.view(-1)[: SUBSET_ROWS * columns].to(torch.int8).view(SUBSET_ROWS, columns)
