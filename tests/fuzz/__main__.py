"""`python -m tests.fuzz --seeds A:B|SEED|fresh:COUNT [--jobs N]` sends lies to daemon processes."""

import contextlib
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from hybridkv.lab.daemon_process import DaemonProcess
from tests.fuzz.process import ProcessFuzz
from tests.seeds import Options, Program, RunSeed, main

CASES = 8_000


@contextlib.contextmanager
def liars() -> Iterator[RunSeed]:
    """Returns a function that runs a seed, each with an empty daemon."""
    yield run_seed


def run_seed(seed: int, options: Options) -> Counter[str]:
    """Returns how often each refusal and each reply came."""
    with (
        tempfile.TemporaryDirectory(prefix="hybridkv-fuzz-") as directory,
        DaemonProcess(str(Path(directory) / "daemon.sock"), "64MiB") as daemon,
    ):
        process = ProcessFuzz(seed, daemon)
        process.run(CASES)
    return process.seen


PROGRAM = Program("tests.fuzz", liars)

if __name__ == "__main__":
    sys.exit(main(PROGRAM, __doc__))
