"""How to find out what a matrix has that oneDNN keeps: by asking it to multiply.

vLLM's build for CPUs packs large matrices into memory of oneDNN's own, and has a handler for each.
"""

import hashlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from vllm import _custom_ops

SIGN_ROWS = 128
"""Rows of random signs: two other matrices of integers have the same answers to each of them with a
probability of at most one half."""
SIGN_COLUMNS_MAX = 1 << 16
"""Signs in a row of which every sum of 8-bit products is exact in float32, also when scaled."""


class Probe(NamedTuple):
    """Questions to a matrix whose answers tell it from every other one."""

    questions: int
    answers: Callable[[int, int], torch.Tensor]
    """Those from the first question on, so many, each a row."""


def is_handler(value: object) -> bool:
    """Whether `value` is vLLM's object for a matrix of oneDNN."""
    return type(value).__name__ == "CPUDNNLGEMMHandler"


def linear_probe(handler: Any, linear: Callable[..., torch.Tensor], unused: torch.Tensor) -> Probe:
    """The rows of a matrix of numbers, as answers to units.

    `linear` is the layer's function of (inputs, an unused weight, no bias).
    """

    def answers(start: int, count: int) -> torch.Tensor:
        units = torch.zeros(count, handler.k, dtype=unused.dtype)
        units.diagonal(start).fill_(1)
        return linear(units, unused, None)

    return Probe(handler.k, answers)


def int8_probe(handler: Any, config: Any, dtype: torch.dtype) -> Probe | None:
    """A matrix of vLLM's kernel for INT8, each column times its scale; None = nothing tells it.

    `config` is the kernel's, and `dtype` that of the layer's outputs. Inputs are integers here with
    a scale of one, whatever the checkpoint's scales are. With dynamic inputs the products are
    float32, which is exact, and a few rows of signs tell all. Else they are rounded to `dtype`,
    which keeps the 8 bits of an answer to a unit apart.
    """
    if not config.is_static_input_scheme:

        def answers_to_signs(start: int, count: int) -> torch.Tensor:
            signs = _signs(handler.k)[start : start + count]
            scales = torch.ones(count, 1, dtype=torch.float32)
            products = torch.empty(count, handler.n, dtype=torch.float32)
            return _custom_ops.onednn_scaled_mm(handler, signs, products, scales, None, None, None)

        return Probe(SIGN_ROWS, answers_to_signs) if handler.k <= SIGN_COLUMNS_MAX else None
    zero_point = None if config.input_symmetric else torch.zeros(1, dtype=torch.int32)
    scale = torch.ones(1, dtype=torch.float32)

    def answers(start: int, count: int) -> torch.Tensor:
        units = torch.zeros(count, handler.k, dtype=torch.int8)
        units.diagonal(start).fill_(1)
        products = torch.empty(count, handler.n, dtype=dtype)
        return _custom_ops.onednn_scaled_mm(handler, units, products, scale, zero_point, None, None)

    return Probe(handler.k, answers)


def _signs(columns: int) -> torch.Tensor:
    """SIGN_ROWS rows of 1 and -1, the same in every process."""
    size_bytes = -(-SIGN_ROWS * columns // 8)
    random = bytearray(hashlib.shake_128(b"hybridkv").digest(size_bytes))
    bits = torch.frombuffer(random, dtype=torch.uint8)[:, None] >> torch.arange(8) & 1
    return (bits.view(-1)[: SIGN_ROWS * columns].to(torch.int8) * 2 - 1).view(SIGN_ROWS, columns)
