"""Statistics in vLLM's own pipeline, from the engine's process to the API server's /metrics.

What is new travels with each step's scheduler statistics as deltas. The API server adds them up,
so no counter ever goes down.
"""

import logging
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics

from hybridkv.core.metrics import MetricFamily

Result = TypeVar("Result")

logger = logging.getLogger("vllm.hybridkv")

LABELS_MAX = 64  # Values of a family's last label that are told apart; what comes later is OTHER.
OTHER = "other"


class Deltas:
    """What was added to some counters since the last time."""

    def __init__(self, counters: Mapping[str, float]) -> None:
        self._counters = counters
        self._told: dict[str, float] = {}

    def take(self) -> dict[str, float]:
        """What was added by name, without counters that did not grow."""
        told = self._told
        grown = {n: value for n, value in self._counters.items() if value > told.get(n, 0)}
        added = {name: value - told.get(name, 0) for name, value in grown.items()}
        told.update(grown)
        return added


class EngineMetrics(KVConnectorPromMetrics):
    """Families under the labels that vLLM gives, made of the metric classes that vLLM gives."""

    def __init__(
        self, prefix: str, families: Mapping[str, MetricFamily], *vllm_arguments: Any
    ) -> None:
        """A family's name is `prefix` and its key; `vllm_arguments` are those of the base class."""
        super().__init__(*vllm_arguments)
        self._families = {name: self._make(prefix + name, one) for name, one in families.items()}
        self._cells: dict[tuple[int, str, tuple[str, ...]], Any] = {}
        self._known: dict[tuple[str, ...], set[str]] = {}

    def cell(self, engine: int, family: str, labels: tuple[str, ...] = ()) -> Any:
        """The metric of one engine under these values of the family's own labels; begins at 0."""
        cell = self._cells.get((engine, family, labels))
        if cell is None:
            *others, last = labels or ("",)
            known = self._known.setdefault((family, *others), set())
            if last not in known and len(known) >= LABELS_MAX and last != OTHER:
                return self.cell(engine, family, (*others, OTHER))
            known.add(last)
            cell = self._families[family].labels(*self.per_engine_labelvalues[engine], *labels)
            self._cells[engine, family, labels] = cell
        return cell

    def _make(self, name: str, family: MetricFamily) -> Any:
        labels = [*self._labelnames, *family.labels]
        about = {"name": name, "documentation": family.help, "labelnames": labels}
        if family.kind == "histogram":
            return self._histogram_cls(**about, buckets=list(family.buckets))
        if family.kind == "gauge":
            return self._gauge_cls(**about, multiprocess_mode="mostrecent")
        return self._counter_cls(**about)


_logged: set[tuple[str, str]] = set()


def attempt(
    owner: str, method: str, work: Callable[[], Result], failed: Callable[[], object]
) -> Result | None:
    """`work()`, or None after `failed()` where it raises, which is logged once for each method."""
    try:
        return work()
    except Exception:  # neither the engine's loop nor the API server ends over statistics
        failed()
        if (owner, method) not in _logged:
            _logged.add((owner, method))
            logger.exception("hybridkv: statistics of %s are incomplete: %s failed", owner, method)
        return None
