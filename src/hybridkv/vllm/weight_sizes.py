"""The bytes of weights that a module must have, by its shape and its quantization.

vLLM's kernels remove, empty and replace parameters, and keep what they compute with elsewhere. So a
parameter that is gone or empty is no sign of unread weights, but missing bytes are.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hybridkv.vllm.seams import is_lora_wrapper, is_quantizing, quantization_method

BITS_MIN = 2
"""Bits that a weight has at least, where nothing says how many. Scales and zero points have fewer
for each weight."""
_BITS_IN_NAME = re.compile(r"(?:fp|int)(\d+)")


@dataclass(frozen=True)
class WeightSize:
    """The size of the weights of one kind that a module has."""

    name: str
    """A part of the names of their tensors. Empty where these may have any name."""
    elements: int
    vector_elements: int
    """Elements of the longest bias, which is also the longest scale by channel."""
    bits: int

    @property
    def size_bytes(self) -> int:
        """The fewest bytes that hold the weights."""
        return math.ceil(self.elements * self.bits / 8)

    def admits(self, elements: int) -> bool:
        """Return True if a tensor of so many elements can be weights, and no bias or scale."""
        return elements > self.vector_elements or elements >= self.elements


def weight_sizes(module: torch.nn.Module, own_elements: Sequence[int]) -> tuple[WeightSize, ...]:
    """Return the sizes of the weights that must be found for `module`. Empty where none are known.

    `own_elements` are the elements of each of its parameters and buffers. An unquantized module
    computes with its parameters as they are, so nothing must be found where each kind of weights
    has one.
    """
    if is_lora_wrapper(module):
        return ()  # A LoRA wrapper repeats the shape of the layer in it.
    sizes = _expert_sizes(module) or _linear_sizes(module)
    if is_quantized(module):
        return sizes
    if not sizes and any(True for _ in module.parameters(recurse=False)):
        sizes = (WeightSize("", elements=1, vector_elements=0, bits=8),)
    weights = [own for own in own_elements if any(size.admits(own) for size in sizes)]
    return sizes if len(weights) < len(sizes) else ()


def is_quantized(module: torch.nn.Module) -> bool:
    """Return True if vLLM quantized the module's weights."""
    return is_quantizing(quantization_method(module))


def kind_of(module: torch.nn.Module) -> str:
    """Return the class of the module's quantization method, else of the module, for people."""
    return type(quantization_method(module) or module).__name__


def emptied_parameter(module: torch.nn.Module) -> torch.Tensor | None:
    """Return a parameter of which vLLM's CPU kernels left only the dtype. None = there is none."""
    own = module.parameters(recurse=False)
    return next((tensor for tensor in own if tensor.numel() == 0 and not tensor.is_meta), None)


def _expert_sizes(module: torch.nn.Module) -> tuple[WeightSize, ...]:
    """Return the sizes of vLLM's routed experts, whose gate and up matrices are one tensor."""
    sides = _numbers(module, "local_num_experts", "hidden_size", "intermediate_size_per_partition")
    if not sides or quantization_method(module) is None:
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
    """Return the size of a linear layer's or an embedding's weight. Empty for other modules."""
    if isinstance(module, torch.nn.Linear):
        sides = _numbers(module, "in_features", "out_features")
    elif isinstance(module, torch.nn.Embedding):
        sides = _numbers(module, "num_embeddings", "embedding_dim")
    elif quantization_method(module) is None:
        sides = ()
    else:
        sides = (
            _numbers(module, "num_embeddings_per_partition", "embedding_dim")
            or _numbers(module, "input_size_per_partition", "output_size_per_partition")
            or _numbers(module, "input_size", "output_size")
        )
    return (WeightSize("", math.prod(sides), max(sides), _bits(module)),) if sides else ()


def _numbers(module: torch.nn.Module, *names: str) -> tuple[int, ...]:
    """Return the attributes of these names. Empty unless each is a positive number."""
    values = [getattr(module, name, None) for name in names]
    numbers = tuple(value for value in values if isinstance(value, int) and value > 0)
    return numbers if len(numbers) == len(names) else ()


def _bits(module: torch.nn.Module) -> int:
    """Return the bits of a weight of the module, BITS_MIN where nothing says them."""
    if not is_quantized(module):
        emptied = emptied_parameter(module)
        dtype = getattr(module, "params_dtype", None) if emptied is None else emptied.dtype
        return 8 * dtype.itemsize if isinstance(dtype, torch.dtype) else BITS_MIN
    method = quantization_method(module)
    scheme = getattr(module, "scheme", None) or getattr(method, "scheme", None)
    config = getattr(method, "quant_config", None)
    # The configuration of this layer comes before that of the whole model.
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
