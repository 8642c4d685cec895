"""`python -m tests.gpu.checks.machine`: what the machine is, for whoever reads its figures."""

import json
import os
import platform
import shutil
import subprocess
import sys

import torch
import triton

PROGRAMS = ("gcc", "nvidia-smi", "compute-sanitizer")


def main() -> int:
    """Print the facts as one JSON document."""
    query = ["nvidia-smi", "-q", "-d", "PCI"]
    wanted = ("Current", "Max", "Generation", "Width")
    link: list[str] = []
    if shutil.which(query[0]):
        answer = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
        lines = [" ".join(line.split()) for line in answer.stdout.splitlines()]
        link = [line for line in lines if line.startswith(wanted)]
    free, total = torch.cuda.mem_get_info()
    facts = {
        "device": torch.cuda.get_device_name(),
        "free_gib": round(free / 2**30, 1),
        "total_gib": round(total / 2**30, 1),
        "priorities": torch.cuda.Stream.priority_range(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "kernel": platform.release(),
        "processors": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "shared_memory_gib": round(shutil.disk_usage("/dev/shm").total / 2**30, 1),
        "link": link,
        "programs": [name for name in PROGRAMS if shutil.which(name)],
    }
    print(json.dumps(facts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
