"""How many bytes of weights a module must have, as its shape and its quantization say.

vLLM's kernels remove, empty and replace parameters as they like, and keep what they made of them
elsewhere. A parameter that is gone or empty says nothing by itself; missing bytes do.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

BITS_MIN = 2
"""Bits of a weight where nothing says how many it has: scales and zero points have fewer."""
_BITS_IN_NAME = re.compile(r"(?:fp|int)(\d+)")


@dataclass(frozen=True)
class WeightSize:
    """The size of those weights of a module that are all of one kind."""

    name: str
    """A part of their tensors' names; empty where they have any name."""
    elements: int
    vector_elements: int
    """Elements of the longest bias, which is also the longest scale by channel."""
    bits: int

    @property
    def size_bytes(self) -> int:
        """The fewest bytes that hold the weights."""
        return math.ceil(self.elements * self.bits / 8)

    def admits(self, elements: int) -> bool:
        """Whether a tensor of so many elements can be weights, and is no bias or scale."""
        return elements > self.vector_elements or elements >= self.elements


def weight_sizes(module: torch.nn.Module, own_elements: Sequence[int]) -> tuple[WeightSize, ...]:
    """The weights that `module` itself must have; empty where nothing says so.

    `own_elements`: of each of its parameters and buffers. An unquantized module has to have more
    only if it has fewer tensors of weights than kinds: those that are there are used as they are.
    """
    if "base_layer" in module._modules:
        return ()  # A LoRA wrapper repeats the shape of the layer in it.
    sizes = _expert_sizes(module) or _linear_sizes(module)
    if is_quantized(module):
        return sizes
    if not sizes and any(not own.is_meta for own in module.parameters(recurse=False)):
        sizes = (WeightSize("", elements=1, vector_elements=0, bits=8),)
    weights = [own for own in own_elements if any(size.admits(own) for size in sizes)]
    return sizes if len(weights) < len(sizes) else ()


def is_quantized(module: torch.nn.Module) -> bool:
    """Whether vLLM quantized the module's weights. Its methods for KV caches have none."""
    method = quant_method(module)
    names = [base.__name__ for base in type(method).__mro__]
    is_plain = any(name.startswith("Unquantized") for name in names)
    return method is not None and not is_plain and "BaseKVCacheMethod" not in names


def quant_method(module: torch.nn.Module) -> Any:
    """What vLLM computes the module's weights with, without the wrapper that LoRA puts around."""
    method = getattr(module, "quant_method", None)
    return getattr(method, "old_quant_method", method)


def kind_of(module: torch.nn.Module) -> str:
    """The class of what computes with the module's weights, for people."""
    return type(quant_method(module) or module).__name__


def emptied_parameter(module: torch.nn.Module) -> torch.Tensor | None:
    """A parameter of which only the dtype is left, as vLLM's CPU kernels leave it."""
    own = module.parameters(recurse=False)
    return next((tensor for tensor in own if tensor.numel() == 0 and not tensor.is_meta), None)


def _expert_sizes(module: torch.nn.Module) -> tuple[WeightSize, ...]:
    """Those of vLLM's routed experts, whose gate and up matrices are one tensor."""
    names = ("local_num_experts", "hidden_size", "intermediate_size_per_partition")
    sides = _numbers(module, *names)
    if not sides or quant_method(module) is None:
        return ()
    experts, hidden, intermediate = sides
    config = getattr(module, "moe_config", None)
    up = intermediate * (2 if getattr(config, "is_act_and_mul", False) else 1)
    vector = experts * max(hidden, up)
    bits = _bits(module)
    return (
        WeightSize("w13", experts * hidden * up, vector, bits),
        WeightSize("w2", experts * hidden * intermediate, vector, bits),
    )


def _linear_sizes(module: torch.nn.Module) -> tuple[WeightSize, ...]:
    """Those of a linear layer or an embedding."""
    if isinstance(module, torch.nn.Linear):
        sides = _numbers(module, "in_features", "out_features")
    elif isinstance(module, torch.nn.Embedding):
        sides = _numbers(module, "num_embeddings", "embedding_dim")
    elif quant_method(module) is None:
        sides = ()
    else:
        sides = (
            _numbers(module, "num_embeddings_per_partition", "embedding_dim")
            or _numbers(module, "input_size_per_partition", "output_size_per_partition")
            or _numbers(module, "input_size", "output_size")
        )
    return (WeightSize("", math.prod(sides), max(sides), _bits(module)),) if sides else ()


def _numbers(module: torch.nn.Module, *names: str) -> tuple[int, ...]:
    """The attributes of these names; empty unless each is a positive number."""
    values = [getattr(module, name, None) for name in names]
    numbers = tuple(value for value in values if isinstance(value, int) and value > 0)
    return numbers if len(numbers) == len(names) else ()


def _bits(module: torch.nn.Module) -> int:
    """Bits of each weight."""
    if not is_quantized(module):
        emptied = emptied_parameter(module)
        dtype = getattr(module, "params_dtype", None) if emptied is None else emptied.dtype
        return 8 * dtype.itemsize if isinstance(dtype, torch.dtype) else BITS_MIN
    method = quant_method(module)
    scheme = getattr(module, "scheme", None) or getattr(method, "scheme", None)
    config = getattr(method, "quant_config", None)
    # What knows this very layer comes before what knows the whole model.
    for owner in (getattr(scheme, "layer_config", None), scheme, method, config):
        for name in ("weight_bits", "num_bits", "bits"):
            bits = getattr(owner, name, None)
            if isinstance(bits, int):
                return bits
        bits = getattr(getattr(owner, "quant_type", None), "size_bits", None)
        if isinstance(bits, int):
            return bits
    get_name = getattr(config, "get_name", str)
    for data_type in (getattr(method, "weight_dtype", None), get_name()):
        found = _BITS_IN_NAME.search(str(data_type))
        if found is not None:
            return int(found[1])
    return BITS_MIN
