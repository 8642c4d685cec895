"""`python -m tests.fuzz --seeds A:B|SEED|fresh:COUNT [--jobs N]` sends lies to daemons.

A seed is so many pieces of bytes for the core of a daemon in this process, and then others for a
daemon process over its socket.
"""

import contextlib
import logging
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from hybridkv.lab.daemon_process import DaemonProcess
from tests.fuzz.core import CoreFuzz
from tests.fuzz.process import ProcessFuzz
from tests.seeds import Options, Program, RunSeed, main

CORE_CASES = 20_000
PROCESS_CASES = 8_000


@contextlib.contextmanager
def liars() -> Iterator[RunSeed]:
    """Every seed begins with empty daemons."""
    logging.getLogger("hybridkv.daemon").setLevel(logging.ERROR)
    yield run_seed


def run_seed(seed: int, options: Options) -> Counter[str]:
    """How often each refusal and each reply came."""
    core = CoreFuzz(seed)
    core.run(CORE_CASES)
    core.finish()
    with (
        tempfile.TemporaryDirectory(prefix="hybridkv-fuzz-") as directory,
        DaemonProcess(str(Path(directory) / "daemon.sock"), "64MiB") as daemon,
    ):
        process = ProcessFuzz(seed, daemon)
        process.run(PROCESS_CASES)
    return core.seen + process.seen


PROGRAM = Program("tests.fuzz", liars)

if __name__ == "__main__":
    sys.exit(main(PROGRAM, __doc__))
