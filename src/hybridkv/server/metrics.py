"""The daemon's values in Prometheus form."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    UnknownMetricFamily,
)
from prometheus_client.registry import Collector

from hybridkv import __version__
from hybridkv.server.catalog import MADE, NOT_ALONE, PARTS, PLAIN, PREFIX, TIER, Described, Kind
from hybridkv.server.snapshot import Snapshot


class _Point(NamedTuple):
    labels: tuple[str, ...]
    value: float


class DaemonCollector(Collector):
    """Asks for a snapshot at scrape time."""

    def __init__(self, snapshot: Callable[[], Snapshot | None]) -> None:
        """`snapshot` gives None where the daemon does not answer; it must not raise."""
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        """Every metric of the catalog, named hybridkv_daemon_*."""
        snapshot = self._snapshot()
        yield _family("answering", MADE["answering"], [_Point((), float(snapshot is not None))])
        if snapshot is not None:
            yield from _metrics(snapshot)


def _metrics(snapshot: Snapshot) -> Iterator[Metric]:
    values = {name: value for name, value in snapshot.values.items() if not name.startswith("tier_")}
    for name, described in PLAIN.items():
        # Counters are there from the start: one that appears with its first event hides that event from rates.
        yield _family(name, described, [_Point((), values.pop(name, 0.0))])
    for start, (name, described) in PARTS.items():
        parts = [part for part in values if part.startswith(start)]
        points = [_Point((part.removeprefix(start),), values.pop(part)) for part in parts]
        yield _family(name, described, sorted(points))
    for name, described in TIER.items():
        told = [_Point((tier.name,), tier.values[name]) for tier in snapshot.tiers if name in tier.values]
        yield _family(f"tier_{name}", described, told)
    yield from _made(snapshot)
    yield from _unknown(values, snapshot)


def _made(snapshot: Snapshot) -> Iterator[Metric]:
    yield _family("info", MADE["info"], [_Point((__version__,), 1.0)])
    yield _family("uptime_seconds", MADE["uptime_seconds"], [_Point((), snapshot.now - snapshot.started_at)])
    waits = HistogramMetricFamily(f"{PREFIX}lookup_wait_seconds", MADE["lookup_wait_seconds"].help)
    waits.add_metric(
        (),
        [("+Inf" if bound == float("inf") else str(bound), count) for bound, count in snapshot.waits],
        snapshot.wait_seconds,
    )
    yield waits
    groups = [((group.identity, group.model, str(group.gid), group.kind), group) for group in snapshot.groups]
    yield _family("group_objects", MADE["group_objects"], _summed((key, group.objects) for key, group in groups))
    yield _family("group_bytes", MADE["group_bytes"], _summed((key, group.held_bytes) for key, group in groups))
    # An engine that greeted anew has two sessions as long as its workers copy for the first.
    sessions = [((session.engine_id, session.model, session.identity), session) for session in snapshot.sessions]
    for name, told in (
        ("session_leases", [(key, session.leases) for key, session in sessions]),
        ("session_writing_bytes", [(key, session.writing_bytes) for key, session in sessions]),
        ("session_connected", [(key, int(session.is_connected)) for key, session in sessions]),
    ):
        yield _family(name, MADE[name], _summed(told))


def _unknown(values: Mapping[str, float], snapshot: Snapshot) -> Iterator[Metric]:
    """What nobody described is told all the same."""
    for name, value in values.items():
        if name not in NOT_ALONE:
            yield UnknownMetricFamily(f"{PREFIX}{name}", "Not described.", value=value)
    for name in sorted({name for tier in snapshot.tiers for name in tier.values} - set(TIER)):
        family = UnknownMetricFamily(f"{PREFIX}tier_{name}", "Not described.", labels=("tier",))
        for tier in snapshot.tiers:
            if name in tier.values:
                family.add_metric((tier.name,), tier.values[name])
        yield family


def _summed(told: Iterable[tuple[tuple[str, ...], int]]) -> list[_Point]:
    """One point for each labels."""
    sums: Counter[tuple[str, ...]] = Counter()
    for labels, value in told:
        sums[labels] += value
    return [_Point(labels, float(value)) for labels, value in sums.items()]


def _family(name: str, described: Described, points: Iterable[_Point]) -> Metric:
    family = (CounterMetricFamily if described.kind is Kind.COUNTER else GaugeMetricFamily)(
        f"{PREFIX}{name}", described.help, labels=described.labels
    )
    for labels, value in points:
        family.add_metric(labels, value)
    return family
