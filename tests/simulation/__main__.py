"""`python -m tests.simulation --seeds A:B [--layout NAME] [--jobs N]` runs simulated engines."""

import argparse
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path

from hybridkv.lab.engine_process import ENGINE_ENVIRONMENT
from hybridkv.lab.models import BUNDLED_ENVIRONMENT

PROGRESS_SECONDS = 10.0
FRESH_SEED_BITS = 40
RESULT = "result "
"""Begins the line in which a process sums up, as JSON."""


def main() -> int:
    """The number of seeds that failed, at most 1."""
    options = _options()
    first, last = options.seeds
    print(
        f"simulation: seeds {first}:{last}"
        + (f" of layout {options.layout}" if options.layout else ""),
        flush=True,
    )
    if options.jobs > 1:
        return _spread(options, first, last)
    os.environ.update(
        {**ENGINE_ENVIRONMENT, **BUNDLED_ENVIRONMENT, "VLLM_LOGGING_LEVEL": "CRITICAL"}
    )
    return _run(options, first, last)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument(
        "--seeds", type=_seeds, default="0:100", help="A:B, one seed, or fresh:COUNT"
    )
    parser.add_argument("--layout", help="one layout's name instead of all")
    parser.add_argument("--jobs", type=int, default=1, help="processes that share the seeds")
    parser.add_argument("--keep-going", action="store_true", help="go on after a seed that failed")
    return parser.parse_args()


def _seeds(text: str) -> tuple[int, int]:
    first, _, last = text.partition(":")
    if first == "fresh":
        start = random.SystemRandom().getrandbits(FRESH_SEED_BITS)
        return start, start + int(last)
    return int(first), int(last) if last else int(first) + 1


def _spread(options: argparse.Namespace, first: int, last: int) -> int:
    """Neighbouring ranges of seeds, one process each."""
    edges = [first + (last - first) * job // options.jobs for job in range(options.jobs + 1)]
    more = [
        *(["--layout", options.layout] if options.layout else []),
        *(["--keep-going"] if options.keep_going else []),
    ]
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.simulation", f"--seeds={start}:{stop}", *more]
        )
        for start, stop in itertools.pairwise(edges)
    ]
    return max(process.wait() for process in processes)


def _run(options: argparse.Namespace, first: int, last: int) -> int:
    # vLLM is imported only where it is used, and after its environment is set.
    from tests.simulation.layouts import LAYOUTS
    from tests.simulation.world import World

    if options.layout and options.layout not in LAYOUTS:
        print(
            f"--layout {options.layout}: one of {', '.join(sorted(LAYOUTS))} works", file=sys.stderr
        )
        return 2
    failed = 0
    total: Counter[str] = Counter()
    layouts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="hybridkv-sim-") as directory:
        world = World(Path(directory))
        started = said = time.monotonic()
        seed = first
        try:
            for seed in range(first, last):
                try:
                    result = world.run(seed, LAYOUTS.get(options.layout))
                except Exception:  # noqa: BLE001  # whatever it is, it failed this seed
                    failed += 1
                    traceback.print_exc()
                    layout = f" --layout {options.layout}" if options.layout else ""
                    print(f"FAILED: python -m tests.simulation --seeds {seed}{layout}", flush=True)
                    if not options.keep_going:
                        break
                    continue
                layouts[result["layout"]] += 1
                total.update(
                    {
                        key: value
                        for key, value in result.items()
                        if isinstance(value, int) and key != "seed"
                    }
                )
                if time.monotonic() - said > PROGRESS_SECONDS:
                    said = time.monotonic()
                    print(
                        f"  seed {seed}: {(seed + 1 - first) / (said - started):.1f} seeds/s",
                        flush=True,
                    )
        finally:
            world.close()
    seconds = time.monotonic() - started
    ran = seed + 1 - first
    print(f"{ran} seeds, {failed} failed, {seconds:.1f} s, {ran / seconds:.1f} seeds/s")
    print(
        f"{RESULT}"
        f"{json.dumps({'seeds': ran, 'failed': failed, 'layouts': layouts, 'counts': total})}",
        flush=True,
    )
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
