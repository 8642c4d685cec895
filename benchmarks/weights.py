"""What a worker's look at its weights costs: `python -m benchmarks.weights [--mebibytes N]`.

Random matrices stand for a model. Those that oneDNN keeps are packed by vLLM's own code for CPUs.
For models that no machine here can hold, what a device has to do is counted: the digest is taken
of tensors that have a shape and no memory. The sentinel of each step looks at as many small
tensors, because it reads as many words of a large one.
"""

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.model_executor.kernels.linear.scaled_mm.cpu import CPUInt8ScaledMMLinearKernel
from vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel import (
    Int8ScaledMMLinearLayerConfig,
)
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

from hybridkv.vllm.weights_digest import WeightsDigest, device_content, digest_weights
from hybridkv.vllm.weights_sentinel import WORDS, WeightsSentinel

SIDE = 2048
LOOKS = 200
CONCATENATED = 128
"""Tensors that one kernel of PyTorch's `cat` takes on CUDA."""
BUNDLED_MEBIBYTES = 17
"""The size of the bundled models."""
KINDS = {
    "plain": torch.bfloat16,
    "oneDNN bfloat16": torch.bfloat16,
    "oneDNN float32": torch.float32,
    "oneDNN int8": torch.int8,
}


def matrix(kind: str) -> torch.nn.Module:
    """A square matrix as vLLM's build for CPUs keeps it."""
    dtype = KINDS[kind]
    if dtype == torch.int8:
        return int8_matrix()
    layer = torch.nn.Linear(SIDE, SIDE, bias=False, dtype=dtype)
    layer.weight.requires_grad = False
    if kind != "plain":
        dispatch_cpu_unquantized_gemm(layer, remove_weight=True)
    return layer


def int8_matrix() -> torch.nn.Module:
    """A layer of an INT8 checkpoint, with dynamic inputs."""
    layer: Any = torch.nn.Module()
    layer.input_size = layer.output_size = SIDE
    layer.params_dtype, layer.logical_widths = torch.bfloat16, [SIDE]
    layer.weight = torch.nn.Parameter(
        torch.randint(-128, 128, (SIDE, SIDE), dtype=torch.int8), requires_grad=False
    )
    layer.weight_scale = torch.nn.Parameter(torch.rand(SIDE, 1), requires_grad=False)
    layer.input_scale = layer.input_zero_point = layer.azp_adj = None
    config = Int8ScaledMMLinearLayerConfig(
        is_static_input_scheme=False, is_channelwise=True, input_symmetric=True
    )
    names = ("weight", "weight_scale", "input_scale", "input_zero_point", "azp_adj")
    kernel = CPUInt8ScaledMMLinearKernel(config, names)
    kernel.process_weights_after_loading(layer)
    layer.quant_method, layer.scheme = kernel, SimpleNamespace(kernel=kernel)
    return layer


def measured(kind: str, mebibytes: int) -> WeightsDigest:
    """The digest of so many bytes in square matrices."""
    torch.manual_seed(1)
    matrix_bytes = SIDE * SIDE * KINDS[kind].itemsize
    count = max(1, (mebibytes << 20) // matrix_bytes)
    model = torch.nn.Sequential(*(matrix(kind) for _ in range(count)))
    with torch.inference_mode():
        return digest_weights({"model": model})


def llama_8b() -> Iterator[torch.Tensor]:
    """The tensors of Llama 3.1 8B in bfloat16, as vLLM fuses them."""
    layer: list[tuple[int, ...]] = [
        (6144, 4096),
        (4096, 4096),
        (28672, 4096),
        (4096, 14336),
        (4096,),
        (4096,),
    ]
    for shape in layer * 32 + [(128256, 4096), (128256, 4096), (4096,)]:
        yield torch.empty(shape, dtype=torch.bfloat16, device="meta")


def gpt_oss_120b() -> Iterator[torch.Tensor]:
    """The tensors of gpt-oss-120b: MXFP4 experts, and bfloat16."""
    experts, hidden = 128, 2880
    blocks = [(2 * hidden, hidden // 2), (2 * hidden, hidden // 32)]
    blocks += [(hidden, hidden // 2), (hidden, hidden // 32)]
    plain: list[tuple[int, ...]] = [(experts, 2 * hidden), (experts, hidden), (experts, hidden)]
    plain += [(experts,), (5120, hidden), (5120,), (hidden, 4096), (64,), (hidden,), (hidden,)]
    plain += [(hidden,)]
    for _ in range(36):
        for block in blocks:
            yield torch.empty((experts, *block), dtype=torch.uint8, device="meta")
        for shape in plain:
            yield torch.empty(shape, dtype=torch.bfloat16, device="meta")
    ends: list[tuple[int, ...]] = [(201088, hidden), (201088, hidden), (hidden,)]
    for shape in ends:
        yield torch.empty(shape, dtype=torch.bfloat16, device="meta")


class Operations(TorchDispatchMode):
    """Counts the operations that a device has to do. Views are none."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        self.count += not func.is_view
        return func(*args, **kwargs or {})


def counted(tensors: Iterator[torch.Tensor]) -> dict[str, int]:
    """Returns what a device does for the digest of `tensors`."""
    operations, count, size_bytes = Operations(), 0, 0
    for tensor in tensors:
        run = tensor.view(-1).view(torch.uint8)
        with operations:
            device_content(run)
        count, size_bytes = count + 1, size_bytes + tensor.nbytes
    return {"tensors": count, "bytes": size_bytes, "device operations": operations.count}


def watched(tensors: Iterator[torch.Tensor]) -> dict[str, float]:
    """Returns what a look of the sentinel costs on this processor, and does on a device."""
    model = torch.nn.Module()
    for number, tensor in enumerate(tensors):
        model.register_buffer(f"b{number}", torch.zeros(64, 64, dtype=tensor.dtype))
    sentinel, seconds = WeightsSentinel(), []
    for _ in range(LOOKS):
        started = time.perf_counter()
        look = sentinel.look({"model": model})
        look.words_digest()
        seconds.append(time.perf_counter() - started)
    counts = [len(words) // WORDS for words in look.words]
    return {
        "look microseconds": round(1e6 * statistics.median(seconds)),
        "look kernels": sum(-(-count // CONCATENATED) for count in counts),
        "look copies to the host": len(counts),
        "look bytes": sum(words.nbytes for words in look.words),
    }


def main() -> None:
    """Print a line of JSON for each kind and model."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.weights", description=__doc__)
    parser.add_argument("--mebibytes", type=int, default=1024)
    most = parser.parse_args().mebibytes
    for kind in KINDS:
        for mebibytes in (BUNDLED_MEBIBYTES, most if kind == "plain" else most // 8):
            found = measured(kind, mebibytes)
            line = {
                "kind": kind,
                "bytes": found.size_bytes,
                "seconds": round(found.seconds, 3),
                "unread": len(found.unread),
                "GB/s": round(found.size_bytes / found.seconds / 1e9, 3),
            }
            print(json.dumps(line), flush=True)
    for name, tensors in (("Llama 3.1 8B", llama_8b), ("gpt-oss-120b", gpt_oss_120b)):
        line = {"model": name, **counted(tensors()), **watched(tensors())}
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
