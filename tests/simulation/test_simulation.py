"""The simulation on fixed seeds and on fresh ones, whose base it prints."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.simulation.__main__ import RESULT

pytestmark = [pytest.mark.engine, pytest.mark.timeout(3600)]

FIXED = "0:150"
BEHAVIOURS = (
    *("hit_external", "hit_mixed", "hit_mixed_unaligned", "hit_local_equal", "hit_local_longer"),
    *(
        "hit_whole_prompt",
        "hit_resumed",
        "prompt_short",
        "prompt_boundary",
        "preemptions",
        "failed_loads",
    ),
    *(
        "abort_waiting_prefetching",
        "abort_running_ready",
        "repeated_reports",
        "lookups_late_answer",
        "shed",
    ),
    *(
        "reset",
        "flush",
        "forget",
        "identity",
        "clear",
        "stop",
        "cut",
        "kill",
        "flip",
        "harm_between",
        "hook",
        "begun_anew",
    ),
    *(
        "intermission_engine",
        "intermission_daemon",
        "blocks_audited",
        "objects_audited",
        "objects_of_tenants",
    ),
    *("lookups_promoted", "heard_stored", "heard_removed", "announced_chains", "announced_storage"),
    *("drafts_accepted", "drafts_rejected", "steps_undrafted", "drafter_blocks"),
    *("planned_ahead", "stopped_ahead", "stores_no_staging", "stores_too_large"),
)
"""What the seeds of one run must have come to."""
INSIDE_A_BLOCK = (
    *("tails_stored", "tails_loaded", "tails_audited", "local_tails_outdone", "tails_promoted"),
    *("hit_divergent_at", "hit_divergent_below", "hit_divergent_beyond", "blocks_copied"),
)
"""What those of a layout with recurrent and full layers must have come to."""


def simulate(seeds: str, *arguments: str) -> tuple[Counter[str], Counter[str]]:
    """(layouts, counts) of a run on all cores, which must not fail."""
    jobs = len(os.sched_getaffinity(0))
    said = subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.simulation",
            "--seeds",
            seeds,
            "--jobs",
            str(jobs),
            *arguments,
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    print(said.stdout)
    assert said.returncode == 0, said.stdout[-5000:]
    results = [
        json.loads(line.removeprefix(RESULT))
        for line in said.stdout.splitlines()
        if line.startswith(RESULT)
    ]
    assert len(results) == jobs
    layouts: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for result in results:
        layouts.update(result["layouts"])
        counts.update(result["counts"])
    return layouts, counts


@pytest.mark.parametrize("seeds", [pytest.param(FIXED, marks=pytest.mark.slow), "0:50", "fresh:25"])
def test_no_position_is_computed_from_other_bytes_and_nothing_is_kept(seeds: str) -> None:
    """Every layout and every behaviour; each seed draws some, and the fixed ones draw all."""
    layouts, counts = simulate(seeds)
    if seeds == FIXED:
        assert len(layouts) > 25, layouts
        never = [name for name in BEHAVIOURS if not counts[name]]
        assert not never, f"no seed came to {never}"


@pytest.mark.slow
def test_hits_inside_a_block_come_from_everywhere() -> None:
    """From RAM and from below it, and next to hits of the engine that end elsewhere."""
    _, counts = simulate("0:100", "--layout", "lfm2_small")
    never = [name for name in INSIDE_A_BLOCK if not counts[name]]
    assert not never, f"no seed came to {never}"
