"""`python -m tests.fuzz --cases N [--seed S] [--process-cases N]` sends lies to daemons."""

import argparse
import logging
import random
import sys
import tempfile
import time
import traceback
from pathlib import Path

from hybridkv.lab.daemon_process import DaemonProcess
from tests.fuzz.core import CoreFuzz
from tests.fuzz.process import ProcessFuzz

ROUND_CASES = 20_000
"""Cases with one daemon; the next ones start from an empty one, with the next seed."""
PROGRESS_SECONDS = 10.0
SEED_BITS = 40


def main() -> int:
    """1 where the daemon is at fault."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument(
        "--cases", type=int, default=100_000, help="for the daemon's core in this process"
    )
    parser.add_argument(
        "--process-cases", type=int, default=0, help="then for a daemon process over its socket"
    )
    parser.add_argument("--seed", type=int, default=random.SystemRandom().getrandbits(SEED_BITS))
    options = parser.parse_args()
    logging.getLogger("hybridkv.daemon").setLevel(logging.ERROR)
    print(f"fuzz: {options.cases} cases, seed {options.seed}", flush=True)
    seed, left = options.seed, options.cases
    started = said = time.monotonic()
    try:
        while left > 0:
            cases = min(left, ROUND_CASES)
            fuzz = CoreFuzz(seed)
            fuzz.run(cases)
            fuzz.finish()
            left -= cases
            seed += 1
            if time.monotonic() - said > PROGRESS_SECONDS:
                said = time.monotonic()
                done = options.cases - left
                print(f"  {done} cases, {done / (said - started):.0f} cases/s", flush=True)
        print(f"{options.cases} cases in the core, {time.monotonic() - started:.1f} s")
        if options.process_cases:
            seed, started = options.seed, time.monotonic()
            with (
                tempfile.TemporaryDirectory(prefix="hybridkv-fuzz-") as directory,
                DaemonProcess(str(Path(directory) / "daemon.sock"), "64MiB") as daemon,
            ):
                ProcessFuzz(seed, daemon).run(options.process_cases)
            print(
                f"{options.process_cases} cases over the socket, {time.monotonic() - started:.1f} s"
            )
    except Exception:  # noqa: BLE001  # whatever it is, it failed this seed
        traceback.print_exc()
        socket = f"0 --process-cases {options.process_cases}"
        where = f"--cases {socket if left <= 0 else min(left, ROUND_CASES)}"
        print(f"FAILED: python -m tests.fuzz {where} --seed {seed}", flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
