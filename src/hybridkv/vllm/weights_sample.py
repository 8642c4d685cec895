"""A sample of the weights: a few words of every tensor, which tell in one step that they changed.

A digest of all bytes takes seconds, and steps run meanwhile. What they computed with is told by a
sample before each of them. It does not see a change that leaves every sampled word alone.
"""

import hashlib
from collections.abc import Iterable
from functools import lru_cache

import torch

from hybridkv.vllm.module_tensors import closures, is_handler, own_tensors

WORDS = 16  # Elements of each tensor, spread evenly.
SAMPLE_BYTES = 16
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By bytes of an element: tensors of every type are read as these."""


def sample_weights(models: Iterable[torch.nn.Module]) -> bytes:
    """SAMPLE_BYTES that differ where a sampled element, or the number of tensors, differs."""
    parts: dict[torch.device, list[torch.Tensor]] = {}
    digest = hashlib.blake2b(digest_size=SAMPLE_BYTES)
    for model in models:
        for module in model.modules():
            kept = [value for _, value in closures(module)]
            tensors = [tensor for _, tensor in own_tensors(module)]
            tensors += [value for value in kept if isinstance(value, torch.Tensor)]
            for tensor in tensors:
                parts.setdefault(tensor.device, []).append(_elements(tensor.detach()))
            for handler in filter(is_handler, kept):
                digest.update(id(handler).to_bytes(8, "little"))
    for elements in parts.values():
        # One copy from a device for all of its tensors.
        digest.update(torch.cat(elements).cpu().numpy())
        digest.update(len(elements).to_bytes(8, "little"))
    return digest.digest()


def _elements(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of at most WORDS elements, those of all tensors at the same shares of the whole."""
    dims, words = tensor.dim(), tensor.view(_INTEGERS[tensor.element_size()])
    # Indices without a copy of the tensor, whatever its strides are.
    places = _places(tensor.numel(), tensor.device)
    index = torch.unravel_index(places, tensor.shape) if dims else ()
    chosen = words[index] if dims else words.view(1)
    return chosen.contiguous().view(-1).view(torch.uint8)


@lru_cache(maxsize=1024)
def _places(elements: int, device: torch.device) -> torch.Tensor:
    step = max(1, elements // WORDS)
    return torch.arange(step // 2, elements, step, device=device)[:WORDS]
