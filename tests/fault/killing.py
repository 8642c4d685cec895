"""What the programs that kill daemons share: a seed is some kills in a directory of its own."""

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from tests.seeds import Options, Program, RunSeed

Kill = Callable[[int, Path], Mapping[str, int]]
"""Kills daemons in a directory, as drawn from a seed; returns counts."""


def killing(name: str, kill: Kill) -> Program:
    """`python -m NAME`."""

    def run_seed(seed: int, options: Options) -> Mapping[str, int]:
        with tempfile.TemporaryDirectory(prefix="hybridkv-kill-") as directory:
            return kill(seed, Path(directory))

    @contextlib.contextmanager
    def kills() -> Iterator[RunSeed]:
        yield run_seed

    return Program(name, kills)
