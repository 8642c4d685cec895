"""Rates and shares of samples, whatever the times between them."""

import math

from hypothesis import given
from hypothesis import strategies as st

from hybridkv.core.metrics import Metric
from hybridkv.observe.history import Histogram, Past, Sample

COLUMNS = (Metric("part"), Metric("whole"))


STEPS = st.lists(
    st.tuples(st.floats(0.1, 500), st.integers(0, 1000), st.integers(0, 1000)),
    min_size=1,
    max_size=30,
)


@given(STEPS)
def test_rates_times_their_intervals_are_what_was_counted(
    steps: list[tuple[float, int, int]],
) -> None:
    at, count = 0.0, 0
    samples = [Sample(0.0, (0.0,))]
    for seconds, growth, _ in steps:
        at, count = at + seconds, count + growth
        samples.append(Sample(at, (float(count),)))
    per_second = Past([Metric("count")], samples).rates("count")
    assert len(per_second) == len(steps)
    total = sum(
        rate * (after.at - before.at)
        for rate, before, after in zip(per_second, samples, samples[1:], strict=False)
    )
    assert math.isclose(total, count, rel_tol=1e-9, abs_tol=1e-9)


@given(STEPS, st.floats(0, 2000))
def test_a_share_is_that_of_all_that_its_window_has(
    steps: list[tuple[float, int, int]], window: float
) -> None:
    at, part, whole = 0.0, 0, 0
    samples = [Sample(0.0, (0.0, 0.0))]
    for seconds, hit, missed in steps:
        at, part, whole = at + seconds, part + hit, whole + hit + missed
        samples.append(Sample(at, (float(part), float(whole))))
    for last, share in enumerate(Past(COLUMNS, samples).shares("part", "whole", window), 1):
        # By hand: the latest sample that is not within the window, except for the last interval.
        begin = samples[last].at - window
        first = max([0, *(i for i in range(last) if samples[i].at <= begin)])
        first = min(first, last - 1)
        grown = [
            after - before
            for before, after in zip(samples[first].values, samples[last].values, strict=True)
        ]
        assert share == (grown[0] / grown[1] if grown[1] else None)
        assert share is None or 0 <= share <= 1


def test_a_gap_is_one_long_interval() -> None:
    past = Past(COLUMNS, [Sample(0, (0, 0)), Sample(10, (5, 10)), Sample(110, (15, 30))])
    assert past.rates("part") == [0.5, 0.1]
    assert past.shares("part", "whole", 60) == [0.5, 0.5]
    assert Past(COLUMNS, past.samples[:1]).share("part", "whole") is None


def test_the_past_begins_with_the_last_sample_that_is_old_enough() -> None:
    past = Past([Metric("at")], [Sample(at, (at,)) for at in (10, 20, 35)])
    assert [sample.at for sample in past.since(34).samples] == [20, 35]
    assert past.since(0).samples[0].at == 10, "the first of all, where none is that old"


@given(st.lists(st.floats(0, 100), max_size=50))
def test_buckets_count_what_is_not_above_their_bound(amounts: list[float]) -> None:
    buckets = Histogram((0.5, 2.0))
    for amount in amounts:
        buckets.add_duration(amount)
    assert buckets.cumulative == [
        (bound, sum(amount <= bound for amount in amounts)) for bound in (0.5, 2.0, math.inf)
    ]
    assert buckets.durations == len(amounts)
    assert math.isclose(buckets.total, sum(amounts))
