"""`python -m tests.devicesim --seeds A:B|SEED|fresh:COUNT [--jobs N]` runs simulated devices.

A seed repeats exactly.
"""

import contextlib
import logging
import os
import sys
from collections.abc import Iterator

import torch

from hybridkv.shm.arena import SHM_DIR, create_arena
from tests.devicesim.world import ARENA_BYTES, World
from tests.seeds import Options, Program, RunSeed, main


@contextlib.contextmanager
def simulated_devices() -> Iterator[RunSeed]:
    """Two arenas, for the daemon's lives."""
    torch.set_num_threads(1)
    # What the copier logs when a device fails is expected.
    logging.getLogger("vllm.hybridkv").setLevel(logging.CRITICAL)
    with contextlib.ExitStack() as stack:
        arenas = []
        for number in range(2):
            path = SHM_DIR / f"hybridkv-devicesim-{os.getpid()}-{number}"
            arena = stack.enter_context(contextlib.closing(create_arena(path, ARENA_BYTES)))
            arena.unlink()
            arena.allocate_pages(0, ARENA_BYTES)
            arenas.append(arena)

        def run_seed(seed: int, options: Options) -> dict[str, int]:
            return World(seed, arenas).run()

        yield run_seed


PROGRAM = Program("tests.devicesim", simulated_devices)

if __name__ == "__main__":
    sys.exit(main(PROGRAM, __doc__))
