"""What a module computes with: its own tensors, and what its functions keep."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def own_tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers of this module alone, wrappers taken apart."""
    for kind in (module.named_parameters, module.named_buffers):
        for name, tensor in kind(recurse=False):
            yield from _plain_tensors(name, tensor)


def _plain_tensors(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    partitions = getattr(tensor, "partitions", None)
    if isinstance(partitions, Mapping):
        # vLLM's SharedWeightParameter.
        for key, part in partitions.items():
            yield from _plain_tensors(f"{name}.{key}", part)
    elif is_traceable_wrapper_subclass(tensor):
        for inner in tensor.__tensor_flatten__()[0]:
            yield from _plain_tensors(f"{name}.{inner}", getattr(tensor, inner))
    elif not tensor.is_meta:
        yield name, tensor


def closures(module: torch.nn.Module) -> Iterator[tuple[Any, Any]]:
    """What the module's functions keep, each after its function."""
    for value in vars(module).values():
        for cell in getattr(value, "__closure__", None) or ():
            yield value, cell.cell_contents


def is_handler(kept: object) -> bool:
    """Whether oneDNN has a matrix for it."""
    return type(kept).__name__ == "CPUDNNLGEMMHandler"
