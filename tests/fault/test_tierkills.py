"""The daemon killed with -9 while it writes to a directory; CI kills it some hundred times more."""

import secrets
from pathlib import Path

from tests.fault.tierkills import run

KILLS = 2


def test_what_is_in_the_directory_after_a_kill_is_exact_and_within_its_bound(
    tmp_path: Path,
) -> None:
    seed = secrets.randbelow(1 << 32)
    print(f"tierkills: --kills {KILLS} --seed {seed}")
    counts = run(KILLS, seed, tmp_path)
    assert counts["kills"] >= KILLS
