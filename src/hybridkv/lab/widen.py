"""Wider random weights for `load_format="dummy"`.

vLLM's dummy weights are so small that greedy tokens do not depend on the KV cache: a corrupt
restore would pass. Importing this module (see hybridkv.lab.shims) replaces them before the model
loads, in every worker process and only where HYBRIDKV_WIDEN, "seed:width", is set.
"""

import itertools
import os

import torch
from vllm.model_executor.model_loader import dummy_loader

WIDEN_ENV = "HYBRIDKV_WIDEN"
_VECTOR_LOW, _VECTOR_HIGH = 0.5, 1.5
_numbers = itertools.count()


def _widen(param: torch.Tensor, *args: object, **kwargs: object) -> None:
    """Uniform values, each parameter with its own seed: +-width for matrices, else 0.5 to 1.5."""
    if param.device.type == "meta" or not torch.is_floating_point(param):
        return
    seed, _, width = os.environ[WIDEN_ENV].partition(":")
    generator = torch.Generator(device="cpu").manual_seed(int(seed) + next(_numbers))
    low, high = (_VECTOR_LOW, _VECTOR_HIGH) if param.dim() < 2 else (-float(width), float(width))
    values = torch.rand(param.shape, generator=generator, dtype=torch.float32) * (high - low) + low
    param.data.copy_(values.to(param.dtype))


def _load(
    self: dummy_loader.DummyModelLoader, model: torch.nn.Module, model_config: object
) -> None:
    """Load, then make every Mamba-2 state decay, since one that grows ends in NaN and token 0."""
    _load_weights(self, model, model_config)
    for module in model.modules():
        if type(module).__name__ == "MambaMixer2":
            module.A.data.abs_().neg_()


_load_weights = dummy_loader.DummyModelLoader.load_weights

if WIDEN_ENV in os.environ:
    dummy_loader.initialize_single_dummy_weight = _widen
    dummy_loader.DummyModelLoader.load_weights = _load
