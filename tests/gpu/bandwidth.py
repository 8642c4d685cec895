"""`python -m tests.gpu.bandwidth`: copies of a CUDA device beside pinned copies; prints JSON.

Ratios are the median of rounds, each beside the plain copy of its own round (hybridkv bench path).
"""

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from hybridkv.core.errors import HybridKVError
from hybridkv.lab.path_bench import PathOptions, measure_path

MIB = 1 << 20
TOTAL_BYTES = 512 * MIB
SHAPES = {
    "8B TP1, 128 tokens": (32, 512 << 10),
    "8B TP1, 256 tokens": (32, 1 << 20),
    "70B TP8, 128 tokens": (80, 64 << 10),
    "70B TP8, 256 tokens": (80, 128 << 10),
    "DeepSeek-V3, 128 tokens": (61, 147_456),
}
"""(layers, bytes of an object's block in a layer)."""
PLAIN_BYTES = (64 << 10, MIB, 4 * MIB, 16 * MIB, 64 * MIB)
ROUNDS = 7


def plain_rates() -> dict[str, dict[str, float]]:
    """Return the GB/s of single copies between the device and pinned memory, by their size."""
    device = torch.empty(PLAIN_BYTES[-1], dtype=torch.uint8, device="cuda")
    host = torch.empty(PLAIN_BYTES[-1], dtype=torch.uint8, pin_memory=True)
    rates: dict[str, dict[str, float]] = {}
    for size in PLAIN_BYTES:
        count = max(1, 256 * MIB // size)
        for name, to, source in (("to device", device, host), ("from device", host, device)):
            seconds = []
            for _ in range(ROUNDS):
                torch.cuda.synchronize()
                started = time.perf_counter()
                for _ in range(count):
                    to[:size].copy_(source[:size], non_blocking=True)
                torch.cuda.synchronize()
                seconds.append(time.perf_counter() - started)
            rate = count * size / statistics.median(seconds) / 1e9
            rates.setdefault(f"{size >> 10} KiB", {})[name] = round(rate, 1)
    return rates


def main() -> int:
    """Measure and print; 1 if a ratio is below 0.9."""
    if not torch.cuda.is_available():
        print("error: this machine has no CUDA device", file=sys.stderr)
        return 2
    table: dict[str, Any] = {"device": torch.cuda.get_device_name(), "plain": plain_rates()}
    print(json.dumps(table["plain"]), file=sys.stderr, flush=True)
    lowest = 1.0
    with tempfile.TemporaryDirectory(prefix="hybridkv-bench-") as directory:
        for number, (name, (layers, block)) in enumerate(SHAPES.items()):
            row: dict[str, Any]
            options = PathOptions(TOTAL_BYTES, layers, block, device="cuda")
            try:
                row = measure_path(str(Path(directory) / f"{number}.sock"), options)
                lowest = min(lowest, row["store_ratio"], row["load_ratio"])
            except HybridKVError as error:
                row, lowest = {"error": str(error)}, 0.0
            table[name] = row
            print(name, json.dumps(row), file=sys.stderr, flush=True)
    print(json.dumps({"ok": lowest >= 0.9, "lowest_ratio": lowest, **table}))
    return int(lowest < 0.9)


if __name__ == "__main__":
    sys.exit(main())
