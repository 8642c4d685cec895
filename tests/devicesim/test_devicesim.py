"""The copier on the simulated device, on fixed seeds and on fresh ones, whose base it prints."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.devicesim.__main__ import RESULT

FIXED = "0:60"
BEHAVIOURS = (
    *("stored", "unstored", "loaded", "loads_failed", "audits", "lives", "closed_in_flight"),
    *("stores_put_off", "stores_staging_full", "stores_device_failed", "copies_unpinned"),
    *("evicted", "taken_over", "flipped", "broken", "dead", "refused_at_start"),
)
"""What the fixed seeds must have come to."""


@pytest.mark.parametrize("seeds", [FIXED, "fresh:20"])
def test_seeds(seeds: str) -> None:
    """Bytes, ends of copies, waits of the engine's thread: see World."""
    said = subprocess.run(
        [sys.executable, "-m", "tests.devicesim", "--seeds", seeds],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    print(said.stdout)
    assert said.returncode == 0, said.stdout[-5000:]
    (line,) = [line for line in said.stdout.splitlines() if line.startswith(RESULT)]
    counts = Counter(json.loads(line.removeprefix(RESULT))["counts"])
    never = [name for name in BEHAVIOURS if not counts[name]]
    assert seeds != FIXED or not never, f"no seed came to {never}"
