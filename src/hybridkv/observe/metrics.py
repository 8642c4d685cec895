"""The daemon's values in Prometheus' form."""

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator

from prometheus_client import metrics_core as families
from prometheus_client.registry import Collector

from hybridkv import __version__
from hybridkv.observe.catalog import MADE, NOT_ALONE, PREFIX, VALUES, MetricDescription, MetricType
from hybridkv.observe.snapshot import Snapshot

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

    def collect(self) -> Iterator[families.Metric]:
        """Every metric of the catalog, named hybridkv_daemon_*."""
        snapshot = self._snapshot()
        yield _made("answering", [((), float(snapshot is not None))])
        if snapshot is None:
            return
        yield from _values(snapshot)
        yield _made("info", [((__version__,), 1.0)])
        yield _made("uptime_seconds", [((), snapshot.now - snapshot.started_at)])
        yield _made("pages_failed", [((), self._pages_failed)])
        name = "lookup_wait_seconds"
        waits = families.HistogramMetricFamily(f"{PREFIX}{name}", MADE[name].help)
        buckets = [(str(bound).replace("inf", "+Inf"), count) for bound, count in snapshot.waits]
        waits.add_metric((), buckets, snapshot.values.of(name))
        yield waits
        groups = [((g.identity, g.model, str(g.gid), g.kind), g) for g in snapshot.groups]
        yield _made("group_objects", ((key, one.objects) for key, one in groups))
        yield _made("group_bytes", ((key, one.held_bytes) for key, one in groups))
        # An engine that greeted anew has two sessions while its workers copy for the first one.
        sessions = [((s.engine_id, s.model, s.identity), s) for s in snapshot.sessions]
        yield _made("session_leases", ((key, one.leases) for key, one in sessions))
        yield _made("session_writing_bytes", ((key, one.writing_bytes) for key, one in sessions))
        yield _made("session_connected", ((key, one.is_connected) for key, one in sessions))


def _values(snapshot: Snapshot) -> Iterator[families.Metric]:
    values: dict[str, dict[str, float]] = defaultdict(dict)
    for (name, label), number in snapshot.values.items():
        values[name][label] = number
    for name, described in VALUES.items():
        numbers = values.pop(name, {})
        # A counter that appears with its first event would hide that event from rates.
        points = [((label,), numbers[label]) for label in sorted(numbers)]
        yield _family(name, described, points if described.labels else [((), numbers.get("", 0.0))])
    for name in sorted(values.keys() - NOT_ALONE):
        # Only tiers have labelled values that the catalog may not know.
        labels = ("tier",) if any(values[name]) else ()
        unknown = families.UnknownMetricFamily(f"{PREFIX}{name}", "Not described.", labels=labels)
        for label, number in values[name].items():
            unknown.add_metric([label] if labels else [], number)
        yield unknown


def _made(name: str, points: _Points) -> families.Metric:
    """One of MADE, with the sum of the points that have the same labels."""
    sums: dict[tuple[str, ...], float] = defaultdict(float)
    for labels, number in points:
        sums[labels] += number
    return _family(name, MADE[name], sums.items())


def _family(name: str, described: MetricDescription, points: _Points) -> families.Metric:
    is_counter = described.kind is MetricType.COUNTER
    kind = families.CounterMetricFamily if is_counter else families.GaugeMetricFamily
    family = kind(f"{PREFIX}{name}", described.help, labels=described.labels)
    for labels, number in points:
        family.add_metric(labels, number)
    return family
