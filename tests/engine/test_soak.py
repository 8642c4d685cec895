"""The soak, for a quarter of a minute: what it looks at is in tests/engine/soak.py."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.soak, pytest.mark.timeout(600)]


def test_nothing_grows_and_no_answer_is_wrong_under_eviction_pressure() -> None:
    soak = subprocess.run(
        [sys.executable, "-m", "tests.engine.soak", "--minutes", "0.25"],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    print(soak.stdout)
    assert soak.returncode == 0, soak.stderr[-3000:]
