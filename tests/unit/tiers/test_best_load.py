"""Load or compute, against a search over all hits, here of as many tokens as chunks."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridkv.core.speed import DOUBLING_SECONDS, MEASURED_SECONDS_MIN, Speed
from hybridkv.tiers.load_or_compute import best_load

BIG = 1e9
TIMES = st.sampled_from((0.0, 0.001, 0.5, 1.0, 3.0)) | st.floats(0, 10)


@given(
    resident=st.integers(0, 8),
    boundaries=st.lists(st.integers(0, 16), max_size=10),
    costs=st.lists(TIMES, min_size=16, max_size=16),
    chunk_seconds=TIMES,
    patience=TIMES | st.just(BIG),
)
def test_the_best_cut_is_when_the_prompt_is_ready_first(
    resident: int, boundaries: list[int], costs: list[float], chunk_seconds: float, patience: float
) -> None:
    """No boundary that is worth reading is ready earlier; where none is, nothing is read."""

    def read(chunks: int) -> float:
        return sum(costs[resident:chunks])

    cut = best_load(resident, boundaries, read, chunk_seconds, patience)
    able = [chunks for chunks in boundaries if chunks > resident and read(chunks) <= patience]
    if not chunk_seconds:
        assert cut == max(able, default=resident), (
            "without a measure, the largest hit that comes in time"
        )
    else:
        ready = {
            chunks: read(chunks) + (16 - chunks) * chunk_seconds for chunks in (resident, *able)
        }
        assert cut in ready
        assert ready[cut] <= min(ready.values()) + 1e-9
        gained = (cut - resident) * chunk_seconds - read(cut) if cut > resident else 0.0
        assert cut == resident or gained > 0, "what takes as long as computing is computed"


@pytest.mark.parametrize("slow_from", range(7))
def test_of_a_prompt_whose_end_is_slow_only_the_start_is_read(slow_from: int) -> None:
    """Chunks cost 0.1 s to read up to there and 10 s after it, 1 s to compute."""

    def read(chunks: int) -> float:
        return min(chunks, slow_from) * 0.1 + max(0, chunks - slow_from) * 10.0

    assert best_load(0, range(1, 7), read, 1.0, BIG) == slow_from


def test_of_equals_the_longer_hit_is_read() -> None:
    assert best_load(0, (2, 4), lambda chunks: chunks - 1.0, 1.0, BIG) == 4


def test_nothing_is_begun_that_outlasts_the_patience() -> None:
    assert best_load(0, (1, 2, 3), float, 100.0, 2.5) == 2
    assert best_load(0, (1, 2, 3), float, 0.0, 2.5) == 2
    assert best_load(0, (3,), float, 100.0, 2.5) == 0
    assert best_load(0, (3,), float, 100.0, -1.0) == 0


def test_an_unknown_speed_costs_nothing() -> None:
    assert Speed().seconds(1 << 40, 5.0) == 0.0


def test_the_latest_measurement_counts_half() -> None:
    once = Speed().measured(100, 1.0, 7.0)
    assert once == Speed(100.0, 7.0)
    assert once.measured(300, 1.0, 9.0) == Speed(200.0, 9.0)


@given(
    amount=st.floats(1, 1e15),
    seconds=st.floats(0, 1e6),
    age=st.floats(0, 1e9),
    later_by=st.floats(0, 1e9),
)
def test_what_was_slow_is_believed_less_and_less(
    amount: float, seconds: float, age: float, later_by: float
) -> None:
    speed = Speed().measured(amount, seconds, 100.0)
    at_once = speed.seconds(amount, 100.0)
    assert at_once == pytest.approx(max(seconds, MEASURED_SECONDS_MIN))
    assert speed.seconds(amount, 50.0) == at_once, "a clock that steps back makes nothing older"
    later, latest = (
        speed.seconds(amount, 100.0 + age),
        speed.seconds(amount, 100.0 + age + later_by),
    )
    assert 0 < latest <= later <= at_once
    assert math.isfinite(later)
    assert speed.seconds(amount, 100.0 + DOUBLING_SECONDS) == pytest.approx(at_once / 2)


@given(measures=st.lists(st.tuples(st.floats(1, 1e12), st.floats(0, 100)), min_size=1, max_size=8))
def test_a_speed_is_between_what_was_seen(measures: list[tuple[float, float]]) -> None:
    speed = Speed()
    for amount, seconds in measures:
        speed = speed.measured(amount, seconds, 1.0)
    seen = [amount / max(seconds, MEASURED_SECONDS_MIN) for amount, seconds in measures]
    assert min(seen) * (1 - 1e-9) <= speed.per_second <= max(seen) * (1 + 1e-9)
