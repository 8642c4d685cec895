"""The choice between connectors, its statistics, and the ledger of what they owe."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

from hybridkv.core.metrics import Metric
from hybridkv.core.speed import DOUBLING_SECONDS, Speed
from hybridkv.multi.metrics import count_admission
from hybridkv.multi.ranking import (
    WEIGHT_AUTO,
    ChildAnswer,
    LoadDecision,
    WaitTimes,
    WeightedSpeed,
    decide,
    effective_weights,
)
from hybridkv.multi.stats import OwnStats
from hybridkv.multi.worker import TransferLedger

AT_ONCE = WaitTimes(patience_seconds=2.0)
"""Nothing was waited for yet."""


def test_a_faster_child_wins_unless_the_other_has_much_more() -> None:
    """Requirements B20."""
    disk, memory = ChildAnswer(1000, True), ChildAnswer(600, True)
    assert decide([disk, memory], [0.5, 1.0], 2000, AT_ONCE) == LoadDecision(1, 600, True)
    assert decide([ChildAnswer(1300, True), memory], [0.5, 1.0], 2000, AT_ONCE) == LoadDecision(
        0, 1300, True
    )


def test_ties_go_by_order() -> None:
    answers = [ChildAnswer(100), ChildAnswer(200), ChildAnswer(100)]
    assert decide(answers, [2.0, 1.0, 2.0], 500, AT_ONCE).child == 0


def test_measured_weights() -> None:
    auto = [WEIGHT_AUTO] * 3
    speeds = [Speed(1000.0, 5.0), Speed(250.0, 5.0), Speed()]

    def weighed(weights: list[float], now: float) -> list[float]:
        children = [*map(WeightedSpeed, weights, speeds)]
        return effective_weights(children, now)

    assert weighed(auto, 5.0) == [1.0, 0.25, 1.0], "who was not measured is tried"
    assert weighed([3.0, WEIGHT_AUTO, 0.5], 5.0) == [3.0, 1.0, 0.5], (
        "the fastest measured one has 1"
    )
    later = 5.0 + 2 * DOUBLING_SECONDS
    assert weighed(auto, later) == [1.0, 1.0, 1.0], "who was slow once is tried again"


COUNTS = st.lists(
    st.tuples(
        st.dictionaries(st.integers(0, 2), st.sampled_from([None, 0, 64, 128]), min_size=1),
        st.integers(0, 2),
        st.integers(0, 500),
    )
)


@given(COUNTS, COUNTS)
def test_counts_add_up(first: list, second: list) -> None:
    """What travels in two parts is what travels in one, and a query is a hit, a miss or neither."""
    names = ["a", "b", "c"]

    def counted(admissions: list) -> OwnStats:
        counters: Counter[Metric] = Counter()
        for answers, chosen, tokens in admissions:
            given = {index: ChildAnswer(matched) for index, matched in answers.items()}
            count_admission(counters, names, given, chosen, tokens)
        return OwnStats({"counters": counters})

    together = counted([*first, *second])
    merged = OwnStats(counted(first).to_dict()).aggregate(OwnStats(counted(second).to_dict()))
    assert merged.to_dict() == together.to_dict()
    counters = Counter(together.counters)

    def total(family: str, *children: str) -> float:
        return sum(counters[Metric(family, (name,))] for name in children or names)

    for name in names:
        assert total("queries", name) >= total("hits", name) + total("misses", name)
    loaded = [tokens for answers, chosen, tokens in [*first, *second] if chosen in answers]
    assert total("hit_tokens") == sum(loaded)


def test_the_last_level_is_the_one_that_counts() -> None:
    of_a, of_b = (Metric("pending_loads", (name,)) for name in "ab")
    first, then = OwnStats({"gauges": {of_a: 3, of_b: 1}}), OwnStats({"gauges": {of_a: 0}})
    assert first.aggregate(then).gauges == {of_a: 0, of_b: 1}
    assert then.gauges == {of_a: 0}, "what is added does not change"


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["load", "fail", "give up", "taint"]),
            st.integers(0, 2),
            st.sampled_from("xyz"),
        ),
        max_size=40,
    )
)
def test_every_announced_load_ends_once(events: list[tuple[str, int, str]]) -> None:
    ledger = TransferLedger()
    ledger.announce({"x": 0, "y": 1}, {})
    ended: list[str] = []
    for what, child, name in events:
        match what:
            case "load":
                ledger.on_loads_reported(child, [name], [])
            case "fail":
                ledger.on_loads_reported(child, [name], [name])
            case "give up":
                ledger.end_children([child])
            case "taint":
                ledger.on_loads_reported(child, [], ledger.loads)
        results = ledger.take_ended()
        assert results.failed_recving <= results.finished_recving
        ended += results.finished_recving
    assert len(ended) == len(set(ended))
    assert set(ended).isdisjoint(ledger.loads)
    assert {*ended, *ledger.loads} == {"x", "y"}


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_blocks_are_held_until_all_have_sent(order: tuple[int, int]) -> None:
    ledger = TransferLedger()
    ledger.announce({}, {"x": (0, 1)})
    for _ in range(3):
        ledger.on_saves_reported(order[0], ["x"])
    assert not ledger.take_ended().finished_sending
    ledger.end_children([order[1]])
    ledger.on_saves_reported(order[1], ["x"])
    assert ledger.take_ended().finished_sending == {"x"}
    assert ledger.absorbed == 3


def test_a_part_that_failed_before_the_end_counts() -> None:
    ledger = TransferLedger()
    ledger.announce({"x": 0}, {})
    ledger.on_loads_reported(0, [], ["x"])
    assert ledger.take_ended() == KVConnectorTransferResults()
    ledger.on_loads_reported(1, ["x"], ["x"])
    assert ledger.take_ended() == KVConnectorTransferResults(), "another child does not load it"
    ledger.on_loads_reported(0, ["x"], [])
    assert ledger.take_ended() == KVConnectorTransferResults(set(), {"x"}, {"x"})
    ledger.announce({"x": 1}, {})
    ledger.on_loads_reported(1, ["x"], [])
    assert ledger.take_ended() == KVConnectorTransferResults(set(), {"x"}, set()), (
        "the next load is another one"
    )
