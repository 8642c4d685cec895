"""`python -m tests.simulation --seeds A:B [--layout NAME] [--jobs N]` runs simulated engines."""

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from hybridkv.lab.engine_process import ENGINE_ENVIRONMENT
from hybridkv.lab.models import BUNDLED_ENVIRONMENT
from tests.seeds import Options, Program, RunSeed, main


@contextlib.contextmanager
def simulated_engines() -> Iterator[RunSeed]:
    """Daemons that the seeds of a process share."""
    os.environ.update(
        {**ENGINE_ENVIRONMENT, **BUNDLED_ENVIRONMENT, "VLLM_LOGGING_LEVEL": "CRITICAL"}
    )
    # vLLM is imported only where it is used, and after its environment is set.
    from tests.simulation.layouts import LAYOUTS
    from tests.simulation.world import World

    def run_seed(seed: int, options: Options) -> dict[str, int]:
        name = options.get("layout")
        if name and name not in LAYOUTS:
            raise ValueError(f"--layout {name}: one of {', '.join(sorted(LAYOUTS))} works")
        result = world.run(seed, LAYOUTS[name] if name else None)
        counts = {key: value for key, value in result.items() if isinstance(value, int)}
        return {**counts, f"layout_{result['layout']}": 1, f"arena_{result['arena']}": 1}

    with (
        tempfile.TemporaryDirectory(prefix="hybridkv-sim-") as directory,
        contextlib.closing(World(Path(directory))) as world,
    ):
        yield run_seed


PROGRAM = Program(
    "tests.simulation", simulated_engines, {"layout": "one layout's name instead of all"}
)

if __name__ == "__main__":
    sys.exit(main(PROGRAM, __doc__))
