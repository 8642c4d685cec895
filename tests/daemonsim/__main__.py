"""`python -m tests.daemonsim --seeds A:B|SEED|fresh:COUNT [--jobs N]` runs simulated daemons.

It prints progress, and how to repeat a failure. A seed repeats exactly: the digest that
`--digests` prints is that of every byte sent and of every byte in the arena.
"""

import argparse
import itertools
import json
import random
import subprocess
import sys
import time
import traceback
from collections import Counter

from tests.daemonsim.world import FAULTS, World

PROGRESS_SECONDS = 10.0
FRESH_SEED_BITS = 40
RESULT = "result "
"""Begins the line in which a process sums up, as JSON."""


def main() -> int:
    """The number of seeds that failed, at most 1."""
    options = _options()
    first, last = options.seeds
    print(f"daemonsim: seeds {first}:{last}", flush=True)
    return _spread(options, first, last) if options.jobs > 1 else _run(options, first, last)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.daemonsim", description=__doc__)
    parser.add_argument(
        "--seeds", type=_seeds, default="0:500", help="A:B, one seed, or fresh:COUNT"
    )
    parser.add_argument(
        "--faults", help=f"only these, with commas, instead of drawn ones: {', '.join(FAULTS)}"
    )
    parser.add_argument("--jobs", type=int, default=1, help="processes that share the seeds")
    parser.add_argument("--keep-going", action="store_true", help="go on after a seed that failed")
    parser.add_argument(
        "--digests",
        action="store_true",
        help="print what tells each seed's run from every other one",
    )
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
        *(["--keep-going"] if options.keep_going else []),
        *(["--digests"] if options.digests else []),
        *(["--faults", options.faults] if options.faults else []),
    ]
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.daemonsim", f"--seeds={start}:{stop}", *more]
        )
        for start, stop in itertools.pairwise(edges)
    ]
    return max(process.wait() for process in processes)


def _run(options: argparse.Namespace, first: int, last: int) -> int:
    failed = ran = 0
    total: Counter[str] = Counter()
    started = said = time.monotonic()
    for seed in range(first, last):
        ran += 1
        try:
            result = World(seed, options.faults.split(",") if options.faults else ()).run()
        except Exception:  # noqa: BLE001  # whatever it is, it failed this seed
            failed += 1
            traceback.print_exc()
            faults = f" --faults {options.faults}" if options.faults else ""
            print(f"FAILED: python -m tests.daemonsim --seeds {seed}{faults}", flush=True)
            if not options.keep_going:
                break
            continue
        if options.digests:
            print(f"digest {seed} {result['digest']}", flush=True)
        total.update({name: value for name, value in result.items() if isinstance(value, int)})
        if time.monotonic() - said > PROGRESS_SECONDS:
            said = time.monotonic()
            print(f"  seed {seed}: {ran / (said - started):.1f} seeds/s", flush=True)
    seconds = time.monotonic() - started
    print(f"{ran} seeds, {failed} failed, {seconds:.1f} s, {ran / seconds:.1f} seeds/s")
    print(f"{RESULT}{json.dumps({'seeds': ran, 'failed': failed, 'counts': total})}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
