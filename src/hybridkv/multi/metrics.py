"""The metrics of MultiConnector. Each has the name of a child, or "" for MultiConnector itself.

The counters of events are made here, apart from those of `vllm.hook_guard`.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

from hybridkv.core.metrics import Metric, MetricFamily, counter, gauge
from hybridkv.multi.ranking import ChildAnswer
from hybridkv.vllm.hook_guard import FAULTS, event, fault

PREFIX = "vllm:kv_connector_mc_"
CHOICES: Mapping[str, MetricFamily] = {
    "queries": counter("Requests for which this connector was asked.", labels=("connector",)),
    "hits": counter("Requests that were loaded from this connector.", labels=("connector",)),
    "hit_tokens": counter("Tokens that were loaded from this connector.", labels=("connector",)),
    "misses": counter("Requests of which this connector had nothing.", labels=("connector",)),
    "pending_loads": gauge(
        "Loads from this connector that have not ended yet.", labels=("connector",)
    ),
}
"""The metrics of each child, which are exported before they have a value."""
FAMILIES: Mapping[str, MetricFamily] = {
    **CHOICES,
    "events": counter(
        "What else was counted of this connector, by event. It is switched off where quarantined "
        "is larger than begun_anew.",
        labels=("connector", "event"),
    ),
}
"""The metrics. PREFIX stands before their names."""

SYNC_DECLINED = event("sync_declined")
"""A hit was declined: it loads within the step, in a model with several groups."""
PASSED_OVER = event("passed_over")
"""A request waited for the connector's answer in vain."""
LOADS_GIVEN_UP = event("loads_given_up")
"""A load was failed, because its connector is switched off."""
LOADS_FAILED = event("loads_failed")
"""A load failed."""
LOOKUPS_LATE_ROOM = event("lookups_late_room")
"""Other loads left no room in the engine's block pool."""
SOURCES_WRONG = event("sources_wrong")
"""A connector's tokens by source were not those of its load."""
REPORTS_ABSORBED = event("reports_absorbed")
"""A report of a transfer that nobody waited for was kept from the engine."""
BLOCK_ERRORS = event("block_errors_of_several_groups")
"""Block errors failed all loads, because blocks had several groups."""


def of_child(child: str, counted: Metric) -> Metric:
    """Returns the counter of an event or of a hook's faults, as one of this child.

    A fault is an event here: ("a", faults{take_events}) -> events{a, fault_take_events}.
    """
    (label,) = counted.labels
    return Metric("events", (child, f"fault_{label}" if counted.family == FAULTS else label))


def stats_fault(child: str) -> Metric:
    """Returns the counter of the faults of this child's statistics."""
    return of_child(child, fault("stats"))


def count_admission(
    counters: Counter[Metric],
    names: Sequence[str],
    answers: Mapping[int, ChildAnswer],
    chosen: int | None,
    tokens: int,
) -> None:
    """Count a request that the engine admitted.

    `answers` has the children that were asked, and `chosen` loads `tokens`. Each of them gets a
    query, the chosen one also a hit, and one that had nothing a miss. A child that had less than
    the chosen one, or did not answer in time, gets a query alone.
    """
    for index, answer in answers.items():
        child = (names[index],)
        counters[Metric("queries", child)] += 1
        if index == chosen and tokens:
            counters[Metric("hits", child)] += 1
            counters[Metric("hit_tokens", child)] += tokens
        elif answer.tokens == 0:
            counters[Metric("misses", child)] += 1
