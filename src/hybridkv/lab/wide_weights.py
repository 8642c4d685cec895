"""Wider random weights for bundled models, without which `verify` could not fail.

`HYBRIDKV_WIDEN` ("seed:width") asks for them, and the environment of a bundled model sets it
(`hybridkv.lab.models`). `--worker-extension-cls` names this module, so that every worker imports it
before it loads a model.
"""

import itertools
import os
from typing import Any

import torch
from vllm.model_executor.model_loader import dummy_loader

from hybridkv.lab.models import WIDEN_ENV


class BundledWorker:
    """The worker extension of bundled models. It is empty: a worker that asks imports this."""


def widen_weights(seed: int, width: float) -> None:
    """Make the random weights of `load_format="dummy"` wider, in this process.

    vLLM's dummy weights are so small that greedy tokens do not depend on the KV cache: a corrupt
    restore would pass. These replace them before the model loads, in every worker process.
    """
    loader, numbers = dummy_loader.DummyModelLoader, [itertools.count()]
    load_weights = loader.load_weights

    def widen(param: torch.Tensor, *args: object, **kwargs: object) -> None:
        """Fill with uniform values, by a seed of its own: +-width in matrices, else 0.5 to 1.5."""
        if param.device.type == "meta" or not torch.is_floating_point(param):
            return
        generator = torch.Generator(device="cpu").manual_seed(seed + next(numbers[0]))
        low, high = (0.5, 1.5) if param.dim() < 2 else (-width, width)
        values = torch.rand(param.shape, generator=generator, dtype=torch.float32)
        param.data.copy_((values * (high - low) + low).to(param.dtype))

    def load(self: Any, model: torch.nn.Module, model_config: object) -> None:
        """Load, then let Mamba-2 states decay, since one that grows ends in NaN and token 0.

        Each model begins anew, so that a draft model that is a copy of its target is one.
        """
        numbers[0] = itertools.count()
        load_weights(self, model, model_config)
        for module in model.modules():
            if type(module).__name__ == "MambaMixer2":
                module.A.data.abs_().neg_()

    dummy_loader.initialize_single_dummy_weight = widen
    loader.load_weights = load


if WIDEN_ENV in os.environ:
    first, _, wide = os.environ[WIDEN_ENV].partition(":")
    widen_weights(int(first), float(wide))
