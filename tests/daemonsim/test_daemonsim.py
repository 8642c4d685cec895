"""The simulated daemon on fixed seeds."""

from typing import get_args

import pytest

from hybridkv.wire.messages import Error, Reply
from hybridkv.wire.protocol import ErrorCode
from tests.daemonsim.tiers import ILLS
from tests.seeds import Case, outcomes, passed

SEEDS = (
    *(5, 25, 45, 53, 58, 64, 69, 92, 93, 124, 148, 157, 162, 172, 175, 179, 193, 229, 234, 235),
    *(252, 265, 271, 285, 304, 308, 324),
)
"""Of 330 seeds those that come to each behaviour three times, or as often as all do."""
BEHAVIOURS = (
    "fault_kill",
    "fault_stop",
    "fault_stall",
    "fault_cut",
    "fault_death",
    "fault_clock",
    "fault_jump",
    "fault_flip",
    "fault_header",
    "fault_identity",
    "fault_rebirth",
    "commits",
    "commits_late",
    "abandons_late",
    "identified",
    "clears",
    "lies",
    "liar_hits",
    "loads",
    "parts_loaded",
    "engines",
    "own_writes_read",
    "objects_recovered",
    "objects_audited",
    "objects_left",
    "losses",
    "parts_failed_bytes",
    "parts_failed_generation",
    "seeds_with_tiers",
    "waits",
    "chunks_from_tiers",
    "chunks_sought",
    "slots_proven",
    "lookups_given_up",
    "audits_offered",
    "jobs_open",
    "jobs_tend",
    "jobs_find",
    "jobs_use",
    "jobs_read",
    "jobs_write",
    "asked_again",
    "records_put",
    "records_audited",
    "prefetches_absent",
    "prefetches_needless",
    "prefetches_whole",
    "prefetched_hit",
)
"""Counts that the seeds must reach together."""
RARE = (
    "closed_before_lock",
    *(f"fault_{name}" for name in ILLS),
    "calls_hung",
    "records_damaged",
    "waits_aborted",
    "waits_to_the_end",
    "waits_left",
    "come_meanwhile",
    "jobs_discard",
    "logins_changed",
    "logins_refused",
    "prefetches_pressure",
    "prefetches_bound",
)
"""Counts that few seeds reach."""
NOT_HERE = {
    ErrorCode.INTERNAL,
    ErrorCode.OTHER_USER,
    ErrorCode.CONNECTIONS,
    ErrorCode.SESSIONS,
    ErrorCode.TOO_LARGE,
    ErrorCode.QUOTAS,
}
"""Codes that need another user, thousands of connections or quotas, or megabytes of facts, or that
never occur."""
HEARD = (
    *(f"liar_heard_{code}" for code in ErrorCode if code not in NOT_HERE),
    *(f"liar_heard_{reply.__name__}" for reply in get_args(Reply) if reply is not Error),
)
"""Every refusal and every reply that a liar can be given."""


def test_no_client_is_told_a_lie_or_kept_waiting_and_nothing_is_kept() -> None:
    """Each seed draws some of the faults, and all of them draw every one."""
    counts = passed(Case("tests.daemonsim", seed) for seed in SEEDS)
    never = [name for name in (*BEHAVIOURS, *RARE, *HEARD) if not counts[name]]
    assert not never, f"no seed came to {never}"


def test_a_seed_repeats_to_the_last_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever ran before it in the process, and whatever strings hash to."""

    def digests(seeds: range, hash_seed: int) -> list[int]:
        monkeypatch.setenv("PYTHONHASHSEED", str(hash_seed))
        ended = list(outcomes(Case("tests.daemonsim", seed) for seed in seeds))
        assert not any(outcome.error for outcome in ended), ended
        return [outcome.counts["digest"] for outcome in ended]

    first = digests(range(8), 1)
    assert len(set(first)) == 8
    assert digests(range(8), 2) == first
    assert digests(range(6, 8), 3) == first[6:]
