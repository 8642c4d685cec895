"""The command lines of the programs that kill daemons."""

import argparse
import os
import secrets
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol


class Run(Protocol):
    """So many kills in a directory of its own; raises AssertionError at the first wrong answer."""

    def __call__(self, kills: int, seed: int, directory: Path, show: bool) -> Mapping[str, int]: ...


def command(name: str, run: Run, kills: int, seen: str, arguments: Sequence[str] | None) -> int:
    """`python -m tests.fault.NAME --kills N --seed N`; `seen` is said if nothing was wrong."""
    parser = argparse.ArgumentParser(prog=f"python -m tests.fault.{name}")
    parser.add_argument("--kills", type=int, default=kills)
    parser.add_argument("--seed", type=int, default=secrets.randbelow(1 << 32))
    options = parser.parse_args(arguments)
    print(f"{name}: --kills {options.kills} --seed {options.seed}", flush=True)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="hybridkv-kill-") as directory:
        os.chmod(directory, 0o700)
        counts = run(options.kills, options.seed, Path(directory), show=True)
    print(f"{dict(counts)}, {time.monotonic() - started:.0f} s: {seen}")
    return 0
