"""Statistics in vLLM's own pipeline, from the engine's process to the API server's /metrics.

    StatsCollector ── take_payload ─► MetricStats ── msgpack ──► EngineMetrics.observe (/metrics)
                                                          └──► MetricStats.reduce (log lines)

The increments of counters travel with each step's scheduler statistics. The API server adds them
up, so no counter ever goes down. Whatever is wrong in a payload is counted, and nothing raises.
"""

import logging
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeVar

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from hybridkv.core.metrics import Metric, MetricFamily

Result = TypeVar("Result")
Stats = TypeVar("Stats", bound="MetricStats")

logger = logging.getLogger("vllm.hybridkv")

LABELS_MAX = 64  # Values of a family's last label that are told apart; further values are OTHER.
OTHER = "other"


class MetricStats(KVConnectorStats):
    """What one engine counted and measured in an interval. `data` is the payload.

    It has by Metric the increments of `counters`, the values of `gauges` that changed, and the new
    values of histograms (`observed`).
    """

    def __init__(self, data: Mapping[str, Any] | None = None) -> None:
        """`data` is a payload, which is copied. Its keys may have become tuples on their way."""
        given = data or {}
        self.counters: dict[Metric, float] = _by_metric(given.get("counters", {}))
        self.gauges: dict[Metric, float] = _by_metric(given.get("gauges", {}))
        self.observed: dict[Metric, list[float]] = _by_metric(given.get("observed", {}))
        super().__init__(
            {"counters": self.counters, "gauges": self.gauges, "observed": self.observed}
        )

    def reset(self) -> None:
        """Begin a new interval."""
        for part in self.data.values():
            part.clear()

    def is_empty(self) -> bool:
        """Return True if nothing was counted or measured."""
        return not any(self.data.values())

    def aggregate(self: Stats, later: KVConnectorStats) -> Stats:
        """Add a later interval to this one, and return this one. Its gauges are the later ones."""
        assert isinstance(later, MetricStats)
        for metric, added in later.counters.items():
            self.counters[metric] = self.counters.get(metric, 0) + added
        self.gauges.update(later.gauges)
        for metric, values in later.observed.items():
            self.observed[metric] = [*self.observed.get(metric, ()), *values]
        return self


def _by_metric(part: Mapping[tuple[str, tuple[str, ...]], Any]) -> dict[Metric, Any]:
    return {Metric(*metric): value for metric, value in part.items()}


class Increments:
    """The growth of counters since it was taken last."""

    def __init__(self) -> None:
        self._taken_values: dict[Metric, float] = {}

    def take(self, counters: Mapping[Metric, float]) -> dict[Metric, float]:
        """Return the increments by counter, without counters that did not grow, and count anew."""
        before = self._taken_values
        grown = {m: value for m, value in counters.items() if value > before.get(m, 0)}
        added = {metric: value - before.get(metric, 0) for metric, value in grown.items()}
        before.update(grown)
        return added


class StatsCollector:
    """Collects what one engine counts and measures until vLLM takes it, which every step does."""

    def __init__(self) -> None:
        self._increments = Increments()
        self._observed: dict[Metric, list[float]] = {}
        self._gauges: dict[Metric, float] = {}

    def add_observation(self, family: str, value: float) -> None:
        """Add a value to a histogram."""
        self._observed.setdefault(Metric(family), []).append(value)

    def take_payload(
        self, counters: Mapping[Metric, float], gauges: Mapping[Metric, float]
    ) -> dict[str, Any] | None:
        """Return the payload of what is new since the last call. None = nothing is new."""
        changed = {
            metric: value for metric, value in gauges.items() if self._gauges.get(metric) != value
        }
        self._gauges.update(changed)
        observed, self._observed = self._observed, {}
        added = self._increments.take(counters)
        if not added and not changed and not observed:
            return None
        return {"counters": added, "gauges": changed, "observed": observed}


class _CellKey(NamedTuple):
    """The key of one engine's metric."""

    engine: int
    metric: Metric


class EngineMetrics(KVConnectorPromMetrics):
    """Exports families under the labels that vLLM gives, by the metric classes that vLLM gives."""

    def __init__(
        self,
        prefix: str,
        families: Mapping[str, MetricFamily],
        malformed: Metric,
        *vllm_arguments: Any,
    ) -> None:
        """A family's name is `prefix` and its key. The base class takes `vllm_arguments`.

        `malformed` counts payloads that were not taken, or not whole.
        """
        super().__init__(*vllm_arguments)
        self._families = {key: self._make(prefix + key, family) for key, family in families.items()}
        self._malformed = malformed
        self._cells: dict[_CellKey, Any] = {}
        self._known: dict[tuple[str, ...], set[str]] = {}
        """The values of the last label that are told apart, by family and the labels before it."""

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add one engine's payload to the metrics."""
        add = partial(self._add, transfer_stats_data, engine_idx)
        on_fault = partial(self.count_locally, self._malformed, engine_idx)
        attempt("an engine", "observe", add, on_fault)

    def zero(self, metric: Metric) -> None:
        """Export a metric before it has a value, so that rates see its first one."""
        for engine in self.per_engine_labelvalues:
            self.cell(engine, metric)

    def count_locally(self, metric: Metric, engine: int) -> None:
        """Count an event of this process. The first engine gets those of an unknown engine."""
        known = self.per_engine_labelvalues
        self.cell(engine if engine in known else next(iter(known)), metric).inc()

    def cell(self, engine: int, metric: Metric) -> Any:
        """Return one engine's object of this metric, of a class that vLLM gives.

        A new one is 0. With LABELS_MAX values of the last label, further values are OTHER.
        """
        key = _CellKey(engine, metric)
        cell = self._cells.get(key)
        if cell is None:
            family, labels = metric
            *first_labels, last = labels or ("",)
            known = self._known.setdefault((family, *first_labels), set())
            if last not in known and len(known) >= LABELS_MAX and last != OTHER:
                return self.cell(engine, Metric(family, (*first_labels, OTHER)))
            known.add(last)
            cell = self._families[family].labels(*self.per_engine_labelvalues[engine], *labels)
            self._cells[key] = cell
        return cell

    def _add(self, payload: Mapping[str, Any], engine: int) -> None:
        for metric, added in payload["counters"].items():
            self.cell(engine, metric).inc(added)
        for metric, value in payload["gauges"].items():
            self.cell(engine, metric).set(value)
        for metric, values in payload["observed"].items():
            for value in values:
                self.cell(engine, metric).observe(value)

    def _make(self, name: str, family: MetricFamily) -> Any:
        labels = [*self._labelnames, *family.labels]
        about = {"name": name, "documentation": family.help, "labelnames": labels}
        if family.kind == "histogram":
            return self._histogram_cls(**about, buckets=list(family.buckets))
        if family.kind == "gauge":
            return self._gauge_cls(**about, multiprocess_mode="mostrecent")
        return self._counter_cls(**about)


_logged: defaultdict[str, set[str]] = defaultdict(set)
"""The methods whose failure the log has, by owner."""


def attempt(
    owner: str, method: str, work: Callable[[], Result], failed: Callable[[], object]
) -> Result | None:
    """Return `work()`. Where it raises, call `failed` and return None.

    A failure is logged once for each owner and method.
    """
    try:
        return work()
    except Exception:  # neither the engine's loop nor the API server ends over statistics
        failed()
        if method not in _logged[owner]:
            _logged[owner].add(method)
            logger.exception("hybridkv: statistics of %s are incomplete: %s failed", owner, method)
        return None
