"""The copier on the simulated device, on fixed seeds."""

from tests.seeds import Case, passed

SEEDS = (0, 1, 2, 4, 5, 6, 14, 17, 20, 22, 23, 25, 28, 30, 37, 43, 44, 46, 48, 55)
"""Of sixty seeds those that come to each behaviour five times, or as often as all do."""
BEHAVIOURS = (
    "stored",
    "unstored",
    "loaded",
    "loads_failed",
    "audits",
    "lives",
    "closed_in_flight",
    "stores_put_off",
    "stores_staging_full",
    "stores_device_failed",
    "copies_unpinned",
    "evicted",
    "taken_over",
    "flipped",
    "broken",
    "dead",
    "refused_at_start",
    "steps_within_calls",
    "unpinning_failed",
    "sleeps",
)
"""Counts that are not 0 after all seeds."""


def test_seeds() -> None:
    """Bytes, ends of copies, waits of the engine's thread: see World."""
    counts = passed(Case("tests.devicesim", seed) for seed in SEEDS)
    never = [name for name in BEHAVIOURS if not counts[name]]
    assert not never, f"no seed came to {never}"
