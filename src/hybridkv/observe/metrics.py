"""The daemon's values in Prometheus' form."""

import math
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator

from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    UnknownMetricFamily,
)
from prometheus_client.registry import Collector

from hybridkv import __version__
from hybridkv.core.metrics import MetricFamily
from hybridkv.observe.catalog import MADE, NOT_ALONE, PREFIX, VALUES
from hybridkv.observe.snapshot import Snapshot
from hybridkv.wire.status import GroupStatus, SessionStatus

_Points = Iterable[tuple[tuple[str, ...], float]]
"""(values of the labels, number)."""


class DaemonCollector(Collector):
    """Asks for a snapshot at scrape time, and counts pages that failed."""

    def __init__(self, snapshot: Callable[[], Snapshot | None]) -> None:
        """`snapshot` gives None where the daemon does not answer; it must not raise."""
        self._snapshot = snapshot
        self._lock = threading.Lock()
        self._pages_failed = 0

    def count_failed_page(self) -> None:
        """A page was answered with status 500; threads may call this."""
        with self._lock:
            self._pages_failed += 1

    def collect(self) -> Iterator[Metric]:
        """Every metric of the catalog, named hybridkv_daemon_*."""
        snapshot = self._snapshot()
        yield _made("answering", [((), float(snapshot is not None))])
        if snapshot is None:
            return
        yield from _values(snapshot)
        yield _made("info", [((__version__,), 1.0)])
        yield _made("uptime_seconds", [((), snapshot.now - snapshot.started_at)])
        yield _made("pages_failed", [((), self._pages_failed)])
        yield _waits(snapshot)
        yield from _groups(snapshot.groups)
        yield from _sessions(snapshot.sessions)


def _values(snapshot: Snapshot) -> Iterator[Metric]:
    values: dict[str, dict[str, float]] = defaultdict(dict)
    for (name, label), number in snapshot.values.items():
        values[name][label] = number
    for name, described in VALUES.items():
        numbers = values.pop(name, {})
        if described.labels:
            yield _family(
                name, described, [((label,), numbers[label]) for label in sorted(numbers)]
            )
        else:
            # A counter that appears with its first event would hide that event from rates.
            yield _family(name, described, [((), numbers.get("", 0.0))])
    for name, numbers in values.items():
        if name not in NOT_ALONE:
            # Only tiers have labelled values that the catalog may not know.
            labels = ("tier",) if any(numbers) else ()
            unknown = UnknownMetricFamily(f"{PREFIX}{name}", "Not described.", labels=labels)
            for label, number in numbers.items():
                unknown.add_metric([label] if labels else [], number)
            yield unknown


def _waits(snapshot: Snapshot) -> Metric:
    name = "lookup_wait_seconds"
    family = HistogramMetricFamily(f"{PREFIX}{name}", MADE[name].help)
    buckets = [("+Inf" if math.isinf(bound) else str(bound), n) for bound, n in snapshot.waits]
    family.add_metric((), buckets, snapshot.values.of(name))
    return family


def _groups(groups: Iterable[GroupStatus]) -> Iterator[Metric]:
    keyed = [((one.identity, one.model, str(one.gid), one.kind), one) for one in groups]
    yield _made("group_objects", _summed((key, one.objects) for key, one in keyed))
    yield _made("group_bytes", _summed((key, one.held_bytes) for key, one in keyed))


def _sessions(sessions: Iterable[SessionStatus]) -> Iterator[Metric]:
    # An engine that greeted anew has two sessions while its workers copy for the first one.
    keyed = [((one.engine_id, one.model, one.identity), one) for one in sessions]
    yield _made("session_leases", _summed((key, one.leases) for key, one in keyed))
    yield _made("session_writing_bytes", _summed((key, one.writing_bytes) for key, one in keyed))
    yield _made("session_connected", _summed((key, one.is_connected) for key, one in keyed))


def _summed(points: _Points) -> _Points:
    """One point for each tuple of labels."""
    sums: dict[tuple[str, ...], float] = defaultdict(float)
    for labels, number in points:
        sums[labels] += number
    return sums.items()


def _made(name: str, points: _Points) -> Metric:
    return _family(name, MADE[name], points)


def _family(name: str, described: MetricFamily, points: _Points) -> Metric:
    is_counter = described.kind == "counter"
    kind = CounterMetricFamily if is_counter else GaugeMetricFamily
    family = kind(f"{PREFIX}{name}", described.help, labels=described.labels)
    for labels, number in points:
        family.add_metric(labels, number)
    return family
