"""`python -m tests.devicesim --seeds A:B|SEED|fresh:COUNT [--jobs N]` runs simulated devices.

It prints progress, and how to repeat a failure. A seed repeats exactly.
"""

import argparse
import itertools
import json
import logging
import os
import random
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from hybridkv.shm.arena import SHM_DIR, Arena, create_arena
from tests.devicesim.world import ARENA_BYTES, World

PROGRESS_SECONDS = 10.0
FRESH_SEED_BITS = 40
RESULT = "result "
"""Begins the line in which a process sums up, as JSON."""


def main() -> int:
    """The number of seeds that failed, at most 1."""
    parser = argparse.ArgumentParser(prog="python -m tests.devicesim", description=__doc__)
    parser.add_argument(
        "--seeds", type=_seeds, default="0:1000", help="A:B, one seed, or fresh:COUNT"
    )
    parser.add_argument("--jobs", type=int, default=1, help="processes that share the seeds")
    parser.add_argument("--keep-going", action="store_true", help="go on after a seed that failed")
    options = parser.parse_args()
    first, last = options.seeds
    print(f"devicesim: seeds {first}:{last}", flush=True)
    if options.jobs == 1:
        torch.set_num_threads(1)
        # What the copier logs when a device fails is expected.
        logging.getLogger("vllm.hybridkv").setLevel(logging.CRITICAL)
        return _run(first, last, options.keep_going)
    edges = [first + (last - first) * job // options.jobs for job in range(options.jobs + 1)]
    command = [sys.executable, "-m", "tests.devicesim", *["--keep-going"] * options.keep_going]
    processes = [
        subprocess.Popen([*command, f"--seeds={start}:{stop}"])
        for start, stop in itertools.pairwise(edges)
    ]
    return max(process.wait() for process in processes)


def _seeds(text: str) -> tuple[int, int]:
    first, _, last = text.partition(":")
    if first == "fresh":
        start = random.SystemRandom().getrandbits(FRESH_SEED_BITS)
        return start, start + int(last)
    return int(first), int(last) if last else int(first) + 1


@contextmanager
def two_arenas() -> Iterator[list[Arena]]:
    """Memory for the daemon's lives."""
    made: list[Arena] = []
    for number in range(2):
        arena = create_arena(SHM_DIR / f"hybridkv-devicesim-{os.getpid()}-{number}", ARENA_BYTES)
        arena.unlink()
        arena.reserve(0, ARENA_BYTES)
        made.append(arena)
    yield made
    for arena in made:
        arena.close()


def _run(first: int, last: int, keep_going: bool) -> int:
    failed = ran = 0
    total: Counter[str] = Counter()
    started = said = time.monotonic()
    with two_arenas() as arenas:
        for seed in range(first, last):
            ran += 1
            try:
                total.update(World(seed, arenas).run())
            except Exception:  # noqa: BLE001  # whatever it is, it failed this seed
                failed += 1
                traceback.print_exc()
                print(f"FAILED: python -m tests.devicesim --seeds {seed}", flush=True)
                if not keep_going:
                    break
            if time.monotonic() - said > PROGRESS_SECONDS:
                said = time.monotonic()
                print(f"  seed {seed}: {ran / (said - started):.1f} seeds/s", flush=True)
    seconds = time.monotonic() - started
    print(f"{ran} seeds, {failed} failed, {seconds:.1f} s, {ran / seconds:.1f} seeds/s")
    print(f"{RESULT}{json.dumps({'seeds': ran, 'failed': failed, 'counts': total})}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
