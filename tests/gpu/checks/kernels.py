"""`python -m tests.gpu.checks.kernels`: Triton's kernels are accepted, and how long that takes."""

import json
import sys
import time

import torch

from hybridkv.connector.copy.cuda_device import CudaDevice
from hybridkv.connector.copy.pipeline import CopyPipeline, Demand
from hybridkv.connector.copy.triton_kernels import TritonKernels

LAYERS, BLOCKS, BLOCK_BYTES = 32, 1025, 64 << 10
OBJECT_BLOCKS = 8
STEP_BYTES = 1 << 30


def main() -> int:
    """Print the facts; 1 where torch copies instead."""
    memory = torch.zeros(LAYERS, BLOCKS, BLOCK_BYTES, dtype=torch.uint8, device="cuda")
    demand = Demand(OBJECT_BLOCKS * LAYERS * BLOCK_BYTES, OBJECT_BLOCKS, STEP_BYTES)
    started = time.perf_counter()
    pipeline = CopyPipeline(CudaDevice(memory.device), [list(memory)], demand)
    seconds = time.perf_counter() - started
    context = pipeline.context
    accepted = isinstance(context.kernels, TritonKernels) and context.digests_on_device
    facts = {
        "kernels": type(context.kernels).__name__,
        "digests_on_device": context.digests_on_device,
        "staging_mib": pipeline.staging_bytes >> 20,
        "seconds": round(seconds, 2),
    }
    pipeline.close()
    print(json.dumps({"ok": accepted, **facts}))
    return int(not accepted)


if __name__ == "__main__":
    sys.exit(main())
