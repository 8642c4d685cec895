"""Any bytes get an error reply or a closed connection, books agree, and the daemon lives."""

from hybridkv.lab.daemon_process import DaemonProcess
from hybridkv.wire.protocol import ErrorCode
from tests.fuzz.core import CoreFuzz
from tests.fuzz.process import ProcessFuzz

SEED = 20260
CASES = 15_000
PROCESS_CASES = 8_000
NOT_HERE = {
    ErrorCode.INTERNAL,
    ErrorCode.OTHER_USER,
    ErrorCode.CONNECTIONS,
    ErrorCode.SESSIONS,
    ErrorCode.TOO_LARGE,
}
"""Needs another user, thousands of connections or megabytes of facts; or must never be."""


def test_the_core_meets_every_refusal_and_every_reply() -> None:
    fuzz = CoreFuzz(SEED)
    fuzz.run(CASES)
    values = fuzz.daemon.view.values().named()
    fuzz.finish()
    assert set(ErrorCode) - NOT_HERE <= set(fuzz.seen), "the liars have become tame"
    for name in (
        "lookups_hit",
        "objects_stored",
        "duplicates",
        "evicted",
        "objects_condemned",
        "commits_unknown",
    ):
        assert values[name] > 0, f"no {name}: the liars have become tame"
    for name in ("Pending", "found_later", "found_in_tiers", "job_read", "job_write", "job_find"):
        assert fuzz.seen[name] > 0, f"no {name}: the tiers have become tame"


def test_a_daemon_process_and_a_good_client_beside_the_liars(daemon: DaemonProcess) -> None:
    fuzz = ProcessFuzz(SEED, daemon)
    fuzz.run(PROCESS_CASES)
    assert fuzz.seen["wire"] > 0
    assert fuzz.seen["Found"] > 0
