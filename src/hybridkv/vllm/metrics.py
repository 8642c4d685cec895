"""Statistics in vLLM's own pipeline, from the engine's process to the API server's /metrics.

The increments of counters travel with each step's scheduler statistics. The API server adds them
up, so no counter ever goes down.
"""

import logging
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics

from hybridkv.core.metrics import Metric, MetricFamily

Result = TypeVar("Result")

logger = logging.getLogger("vllm.hybridkv")

LABELS_MAX = 64  # Values of a family's last label that are told apart; further values are OTHER.
OTHER = "other"


class Deltas:
    """The increments of counters since they were taken last."""

    def __init__(self, counters: Mapping[Metric, float]) -> None:
        """`counters` may go on to grow and to have new keys."""
        self._counters = counters
        self._taken_values: dict[Metric, float] = {}

    def take_increments(self) -> dict[Metric, float]:
        """Return the increments by counter, without counters that did not grow, and count anew."""
        before = self._taken_values
        grown = {m: value for m, value in self._counters.items() if value > before.get(m, 0)}
        added = {metric: value - before.get(metric, 0) for metric, value in grown.items()}
        before.update(grown)
        return added


class _CellKey(NamedTuple):
    """The key of one engine's metric."""

    engine: int
    metric: Metric


class EngineMetrics(KVConnectorPromMetrics):
    """Families under the labels that vLLM gives, made of the metric classes that vLLM gives."""

    def __init__(
        self, prefix: str, families: Mapping[str, MetricFamily], *vllm_arguments: Any
    ) -> None:
        """A family's name is `prefix` and its key. The base class takes `vllm_arguments`."""
        super().__init__(*vllm_arguments)
        self._families = {key: self._make(prefix + key, family) for key, family in families.items()}
        self._cells: dict[_CellKey, Any] = {}
        self._known: dict[tuple[str, ...], set[str]] = {}
        """The values of the last label that are told apart, by family and the labels before it."""

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
