"""What the digest of a worker's weights costs: `python -m benchmarks.weights [--mebibytes N]`.

Random matrices stand for a model. Those that oneDNN keeps are packed by vLLM's own code for CPUs.
"""

import argparse
import json

import torch
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

from hybridkv.vllm.weights import WeightsDigest, digest_weights

SIDE = 2048
KINDS = {
    "plain": torch.bfloat16,
    "oneDNN bfloat16": torch.bfloat16,
    "oneDNN float32": torch.float32,
}


def measured(kind: str, mebibytes: int) -> WeightsDigest:
    """The digest of so many bytes in square matrices."""
    torch.manual_seed(1)
    dtype, model = KINDS[kind], torch.nn.Sequential()
    for _ in range(max(1, (mebibytes << 20) // (SIDE * SIDE * dtype.itemsize))):
        layer = torch.nn.Linear(SIDE, SIDE, bias=False, dtype=dtype)
        layer.weight.requires_grad = False
        if kind != "plain":
            dispatch_cpu_unquantized_gemm(layer, remove_weight=True)
        model.append(layer)
    with torch.inference_mode():
        return digest_weights({"model": model})


def main() -> None:
    """One line of JSON for each kind."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.weights", description=__doc__)
    parser.add_argument("--mebibytes", type=int, default=1024)
    size = parser.parse_args().mebibytes
    for kind in KINDS:
        found = measured(kind, size if kind == "plain" else size // 8)
        rate = found.size_bytes / found.seconds / 1e9
        said = {
            "bytes": found.size_bytes,
            "seconds": round(found.seconds, 3),
            "unread": len(found.unread),
        }
        print(json.dumps({"kind": kind, **said, "GB/s": round(rate, 3)}), flush=True)


if __name__ == "__main__":
    main()
