"""Wider random weights for `load_format="dummy"`.

vLLM's dummy weights are so small that greedy tokens do not depend on the KV cache: a corrupt restore would pass.
Importing this module in a worker, which vLLM does for `--worker-extension-cls`, replaces them before the model loads,
in every worker process and only where HYBRIDKV_WIDEN_SEED is set.
"""

import itertools
import os

import torch
from vllm.model_executor.model_loader import dummy_loader

WIDEN_SEED_ENV = "HYBRIDKV_WIDEN_SEED"
_MATRIX_WIDTH = 0.08
_VECTOR_LOW, _VECTOR_HIGH = 0.5, 1.5
_numbers = itertools.count()


class WidenedWeights:
    """The (empty) worker extension; the import is what counts."""


def _widen(param: torch.Tensor, *args: object, **kwargs: object) -> None:
    """Seeded uniform values: +-0.08 for matrices, 0.5 to 1.5 for vectors; another seed for each parameter."""
    if param.device.type == "meta" or not torch.is_floating_point(param):
        return
    generator = torch.Generator(device="cpu").manual_seed(int(os.environ[WIDEN_SEED_ENV]) + next(_numbers))
    low, high = (_VECTOR_LOW, _VECTOR_HIGH) if param.dim() < 2 else (-_MATRIX_WIDTH, _MATRIX_WIDTH)
    values = torch.rand(param.shape, generator=generator, dtype=torch.float32) * (high - low) + low
    param.data.copy_(values.to(param.dtype))


if WIDEN_SEED_ENV in os.environ:
    dummy_loader.initialize_single_dummy_weight = _widen
