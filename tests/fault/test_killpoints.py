"""The daemon killed with -9 at any line; CI kills it some hundred times more."""

import secrets
from pathlib import Path

from tests.fault.killpoints import run


def test_what_is_found_after_a_kill_is_exact(tmp_path: Path) -> None:
    seed = secrets.randbelow(1 << 32)
    print(f"killpoints: --kills 12 --seed {seed}")
    counts = run(12, seed, tmp_path)
    assert counts["kills"] >= 12
    assert counts["objects"] > 0
