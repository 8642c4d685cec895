"""Races of real processes over one tiny arena, as `tests.fault.races` runs them."""

import os
import subprocess
import sys

import pytest


def race(seconds: float, processes: int) -> str:
    """What the command printed; it must have found no fault."""
    command = [
        sys.executable,
        "-m",
        "tests.fault.races",
        f"--seconds={seconds}",
        f"--processes={processes}",
    ]
    # One thread at the start, so that forks are safe.
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
    }
    ran = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        timeout=seconds + 120,
        check=False,
    )
    print(ran.stdout)
    assert ran.returncode == 0
    return ran.stdout


def counted(said: str) -> dict[str, int]:
    """The numbers of the command's last line."""
    pairs = (
        pair.rsplit(" ", 1)
        for pair in said.strip().splitlines()[-1].split(", slowest")[0].split(", ")
    )
    return {name: int(number) for name, number in pairs}


def test_no_wrong_byte_is_loaded() -> None:
    counts = counted(race(8, 4))
    assert min(counts[name] for name in ("loads", "late_loads", "stored", "evicted", "killed")) > 0


@pytest.mark.slow
def test_no_wrong_byte_is_loaded_for_minutes() -> None:
    counts = counted(race(240, 6))
    assert (
        min(counts[name] for name in ("loads", "lost", "stored", "evicted", "killed", "stopped"))
        > 0
    )
