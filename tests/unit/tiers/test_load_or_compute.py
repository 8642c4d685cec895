"""Load or compute, against a search over all hits, and why it is not more."""

import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridkv.core.coverage import Hit, LoadableHit
from hybridkv.core.speed import DOUBLING_SECONDS, MEASURED_SECONDS_MIN, Speed
from hybridkv.tiers.promotion import Shortfall, ShortfallKind, best_load, choose_load

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
    """No boundary that is worth reading is ready earlier; where none is, nothing is read.

    Hits have as many tokens as chunks.
    """

    def read(chunks: int) -> float:
        return sum(costs[resident:chunks])

    hits = {chunks: read(chunks) for chunks in boundaries}
    cut = best_load(resident, hits, chunk_seconds, patience)
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

    hits = {chunks: read(chunks) for chunks in range(1, 7)}
    assert best_load(0, hits, 1.0, BIG) == slow_from


def test_of_equals_the_longer_hit_is_read() -> None:
    assert best_load(0, {2: 1.0, 4: 3.0}, 1.0, BIG) == 4


def test_nothing_is_begun_that_outlasts_the_patience() -> None:
    hits = {1: 1.0, 2: 2.0, 3: 3.0}
    assert best_load(0, hits, 100.0, 2.5) == 2
    assert best_load(0, hits, 0.0, 2.5) == 2
    assert best_load(0, {3: 3.0}, 100.0, 2.5) == 0
    assert best_load(0, {3: 3.0}, 100.0, -1.0) == 0


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


def hit_of(tokens: int) -> Hit:
    """A hit of a model whose chunks have 10 tokens."""
    return Hit(tokens // 10, 0, tokens, (0,))


def choice(
    longest: int, *loadable: LoadableHit, token_seconds: float = 1.0
) -> tuple[Sequence[Hit], list[Shortfall]]:
    """What is chosen where RAM has 10 tokens and reading may take 100 s."""
    return choose_load(
        loadable,
        resident=hit_of(10),
        longest=hit_of(longest),
        token_seconds=token_seconds,
        patience_seconds=100.0,
    )


def test_of_what_has_room_the_best_is_read_and_before_it_what_comes_earlier() -> None:
    early, whole = hit_of(20), hit_of(40)
    longest = LoadableHit((early, whole), read_seconds=3.0)
    assert choice(40, longest, LoadableHit((early,), 1.0)) == ((early, whole), [])


def test_where_tiers_have_nothing_more_nothing_is_read_and_nothing_falls_short() -> None:
    assert choice(10) == ((), [])


def test_what_has_no_room_is_named() -> None:
    shortfall = Shortfall(ShortfallKind.NO_ROOM, {"fits": 30, "tokens": 40})
    assert choice(40, LoadableHit((hit_of(30),), 1.0)) == ((hit_of(30),), [shortfall])
    nothing_fits = Shortfall(ShortfallKind.NO_ROOM, {"fits": 10, "tokens": 40})
    assert choice(40) == ((), [nothing_fits])
    assert choice(40, LoadableHit((hit_of(10),), 0.0)) == ((), [nothing_fits])


def test_what_is_slower_than_computing_is_named_with_both_times() -> None:
    facts = {"tokens": 40, "read_seconds": 50.0, "compute_seconds": 30.0}
    slower = Shortfall(ShortfallKind.SLOWER, facts)
    whole, half = LoadableHit((hit_of(40),), 50.0), LoadableHit((hit_of(20),), 1.0)
    assert choice(40, whole) == ((), [slower])
    assert choice(40, half, whole) == ((hit_of(20),), [slower])
    assert choice(40, half, whole, token_seconds=0.0) == ((hit_of(40),), [])
    _, shortfalls = choice(60, half, whole)
    assert [shortfall.kind for shortfall in shortfalls] == [
        ShortfallKind.NO_ROOM,
        ShortfallKind.SLOWER,
    ]


@pytest.mark.parametrize("token_seconds", [0.0, 10.0])
def test_what_would_come_too_late_is_not_called_slower_than_computing(token_seconds: float) -> None:
    """Where the time of computing is not known, and where it is longer."""
    hits, shortfalls = choice(40, LoadableHit((hit_of(40),), 150.0), token_seconds=token_seconds)
    facts = {"tokens": 40, "read_seconds": 150.0, "patience_seconds": 100.0}
    assert (hits, shortfalls) == ((), [Shortfall(ShortfallKind.LATE, facts)])
    assert shortfalls[0].sentence == (
        "reading 40 tokens would take 150 s, and the lookup waits 100 s"
    )
