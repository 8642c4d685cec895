"""`python -m tests.daemonsim --seeds A:B|SEED|fresh:COUNT [--jobs N]` runs simulated daemons.

A seed repeats exactly: its count `digest` is a number of every byte sent and of every byte in the
arena.
"""

import contextlib
import sys
from collections.abc import Iterator

from tests.daemonsim.world import FAULTS, World
from tests.seeds import Options, Program, RunSeed, main


@contextlib.contextmanager
def simulated_daemons() -> Iterator[RunSeed]:
    """Seeds share nothing."""
    yield run_seed


def run_seed(seed: int, options: Options) -> dict[str, int]:
    """Every count of one seed."""
    faults = options["faults"].split(",") if "faults" in options else ()
    result = World(seed, faults).run()
    return {**result, "digest": int(result["digest"], 16)}


PROGRAM = Program(
    "tests.daemonsim",
    simulated_daemons,
    {"faults": f"only these, with commas, instead of drawn ones: {', '.join(FAULTS)}"},
)

if __name__ == "__main__":
    sys.exit(main(PROGRAM, __doc__))
