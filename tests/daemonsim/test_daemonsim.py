"""The simulated daemon on fixed seeds and on fresh ones, whose base it prints."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.daemonsim.__main__ import RESULT
from tests.daemonsim.tiers import ILLS

FIXED = "300:400"
BEHAVIOURS = (
    *(
        "fault_kill",
        "fault_stop",
        "fault_stall",
        "fault_cut",
        "fault_death",
        "fault_clock",
        "fault_jump",
    ),
    *("fault_flip", "fault_header", "fault_identity", "fault_rebirth"),
    *(
        "commits",
        "commits_late",
        "abandons_late",
        "identified",
        "clears",
        "lies",
        "loads",
        "parts_loaded",
        "engines",
    ),
    *("own_writes_read", "objects_recovered", "objects_audited", "objects_left", "losses"),
    *("parts_failed_bytes", "parts_failed_generation"),
    *(
        "seeds_with_tiers",
        "waits",
        "chunks_from_tiers",
        "chunks_sought",
        "slots_proven",
        "lookups_given_up",
    ),
    *(
        "jobs_open",
        "jobs_tend",
        "jobs_find",
        "jobs_read",
        "jobs_write",
        "records_put",
        "records_audited",
    ),
)
"""What the seeds of one run must have come to."""
RARE = (
    "closed_before_lock",
    *(f"fault_{name}" for name in ILLS),
    *(
        "calls_hung",
        "records_damaged",
        "waits_aborted",
        "waits_to_the_end",
        "waits_left",
        "jobs_discard",
    ),
)
"""What the fixed ones must have come to as well."""


def simulate(*arguments: str, hash_seed: int | None = None) -> list[str]:
    """The lines of a run, which must not fail."""
    environment = dict(os.environ)
    if hash_seed is not None:
        environment["PYTHONHASHSEED"] = str(hash_seed)
    said = subprocess.run(
        [sys.executable, "-m", "tests.daemonsim", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        env=environment,
        cwd=Path(__file__).parents[2],
    )
    print(said.stdout)
    assert said.returncode == 0, said.stdout[-5000:]
    return said.stdout.splitlines()


@pytest.mark.parametrize("seeds", [FIXED, "fresh:40"])
def test_no_client_is_told_a_lie_or_kept_waiting_and_nothing_is_kept(seeds: str) -> None:
    """Every fault; each seed draws some, and the fixed ones draw all."""
    lines = simulate("--seeds", seeds, "--jobs", str(len(os.sched_getaffinity(0))))
    counts: Counter[str] = Counter()
    for line in lines:
        if line.startswith(RESULT):
            counts.update(json.loads(line.removeprefix(RESULT))["counts"])
    never = [name for name in (*BEHAVIOURS, *RARE) if not counts[name]]
    assert seeds != FIXED or not never, f"no seed came to {never}"


def test_a_seed_repeats_to_the_last_byte() -> None:
    """Whatever ran before it in the process, and whatever strings hash to."""

    def digests(first: int, hash_seed: int) -> list[str]:
        lines = simulate("--seeds", f"{first}:24", "--digests", hash_seed=hash_seed)
        return [line for line in lines if line.startswith("digest")]

    once = digests(0, 1)
    assert len(set(once)) == 24
    assert digests(0, 2) == once
    assert digests(18, 3) == once[18:]
