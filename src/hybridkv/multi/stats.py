"""MultiConnector's statistics on their way to vLLM's /metrics (requirements B25-B30).

    children, own counts ── get_kv_connector_stats ──► to_dict ── msgpack
        ├──► build_kv_connector_stats (log lines)
        └──► MultiMetrics.observe (/metrics)

The payload has each child's own under the child's name, and MultiConnector's own
(`vllm/prometheus.py`) under OWN. It names the class of each child, because the process that shows
it has no instance of any child, and children loaded by module path stand in no registry. A child's
fault here is counted among its events, and nothing raises.
"""

import pkgutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from operator import methodcaller
from typing import Any, NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1 import multi_connector
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from hybridkv.core.metrics import Metric
from hybridkv.multi.children import ChildConnectors, ChildSpec
from hybridkv.multi.metrics import CHOICES, FAMILIES, PREFIX, stats_fault
from hybridkv.vllm.prometheus import EngineMetrics, MetricStats, attempt

OWN = "__own__"
CLASSES = "__classes__"


class OwnStats(MetricStats):
    """What MultiConnector itself counted in an interval."""

    def reduce(self) -> dict[str, int | float]:
        """Returns the values for vLLM's log line: {"a hits": 2, "a quarantined": 1}."""
        values = {**self.counters, **self.gauges}
        return {
            f"{child} {event[0] if event else family}".strip(): round(value)
            for (family, (child, *event)), value in values.items()
        }


@dataclass
class MultiKVConnectorStats(multi_connector.MultiKVConnectorStats):
    """Each child's own statistics by its name, and MultiConnector's own at OWN."""

    classes: dict[str, str] = field(default_factory=dict)
    """"module:class" of each child that has statistics, by name."""

    @classmethod
    def from_children(cls, children: ChildConnectors) -> "MultiKVConnectorStats":
        """Returns the children's own statistics since the last call."""
        stats = cls()
        for child, child_stats in children.call_hooks("get_kv_connector_stats", None):
            if child_stats is not None:
                connector = type(child.connector)
                stats.data[child.name] = child_stats
                stats.classes[child.name] = f"{connector.__module__}:{connector.__qualname__}"
        return stats

    @classmethod
    def restored(cls, data: Mapping[str, Any] | None) -> "MultiKVConnectorStats":
        """Returns the statistics of a payload, each child's of its class where that can be made."""
        stats, payload = cls(), dict(data or {})
        classes = payload.pop(CLASSES, {})
        for name, value in payload.items():
            restore = partial(_restored, name, value, classes)
            on_fault = partial(stats.count_fault, name)
            restored = attempt(name, "build_kv_connector_stats", restore, on_fault)
            stats.aggregate(restored or cls())
        return stats

    def count_fault(self, name: str) -> None:
        """Count a fault of the statistics under this name: a child's, or our own."""
        fault = stats_fault("" if name == OWN else name)
        self.data.setdefault(OWN, OwnStats()).aggregate(OwnStats({"counters": {fault: 1}}))

    def to_dict(self) -> dict[str, Any]:
        """Returns the payload that travels to the API server, of plain values."""
        plain = self._call_all("to_dict")
        if OWN in self.data:  # Once more, because faults of the other parts are counted here.
            plain[OWN] = self._call(OWN, "to_dict")
        plain = {name: value for name, value in plain.items() if value is not None}
        classes = {name: known for name, known in self.classes.items() if name in plain}
        return {**plain, CLASSES: classes} if classes else plain

    def aggregate(self, later: KVConnectorStats) -> "MultiKVConnectorStats":
        """Add the statistics of a later interval. Returns this object.

        Where a child's own statistics cannot be merged, the later ones are lost.
        """
        for name, stats in later.data.items():
            merged = self._call(name, "aggregate", stats) if name in self.data else stats
            if merged is not None:
                self.data[name] = merged
        self.classes.update(getattr(later, "classes", {}))
        return self

    def reset(self) -> None:
        """Begin a new interval in every part."""
        self._call_all("reset")

    def reduce(self) -> dict[str, Any]:
        """Returns the values of each part for vLLM's log line."""
        reduced = self._call_all("reduce")
        return {name.strip("_"): values for name, values in reduced.items() if values}

    def is_empty(self) -> bool:
        """True where every part is empty. A part that cannot say so counts as empty."""
        return all(is_empty is not False for is_empty in self._call_all("is_empty").values())

    def _call(self, name: str, method: str, *arguments: Any) -> Any:
        work = partial(methodcaller(method, *arguments), self.data[name])
        return attempt(name, method, work, partial(self.count_fault, name))

    def _call_all(self, method: str) -> dict[str, Any]:
        return {name: self._call(name, method) for name in list(self.data)}


class MultiMetrics(EngineMetrics):
    """FAMILIES and the children's own metrics, all with the label `connector`."""

    def __init__(self, specs: Sequence[ChildSpec], *vllm_arguments: Any) -> None:
        super().__init__(PREFIX, FAMILIES, stats_fault(""), *vllm_arguments)
        _, metric_types, labelnames, values = vllm_arguments
        self._children: dict[str, KVConnectorPromMetrics] = {}
        shared = _shared_types(metric_types)
        for family, spec in product(CHOICES, specs):
            self.zero(Metric(family, (spec.name,)))
        for spec in specs:
            own = {engine: [*labels, spec.name] for engine, labels in values.items()}
            build: Any = spec.connector.build_prom_metrics  # type: ignore[attr-defined]
            build_own = partial(build, spec.config, shared, [*labelnames, "connector"], own)
            on_fault = partial(self._count_fault, spec.name, *values)
            metrics = attempt(spec.name, "build_prom_metrics", build_own, on_fault)
            if metrics is not None:
                self._children[spec.name] = metrics

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add one engine's payload to the metrics."""
        for name, data in transfer_stats_data.items():
            if name == OWN:
                super().observe(data, engine_idx)
            elif name in self._children:
                add = partial(self._children[name].observe, data, engine_idx)
                attempt(name, "observe", add, partial(self._count_fault, name, engine_idx))

    def _count_fault(self, child: str, *engines: int) -> None:
        for engine in engines:
            self.count_locally(stats_fault(child), engine)


class _SharedFamily(NamedTuple):
    """A metric that several children may make."""

    kind: Any
    labels: tuple[str, ...]
    metric: Any


def _shared_types(metric_types: Mapping[Any, Any]) -> dict[Any, Any]:
    """Returns metric types that make each name once, and return the same metric afterwards."""
    families: dict[str, _SharedFamily] = {}

    def make(
        kind: Any, name: str, documentation: str = "", labelnames: Any = (), **options: Any
    ) -> Any:
        labels = tuple(labelnames or ())
        if name not in families:
            about = {"name": name, "documentation": documentation, "labelnames": labels}
            families[name] = _SharedFamily(kind, labels, metric_types[kind](**about, **options))
        family = families[name]
        if (family.kind, family.labels) != (kind, labels):
            raise ValueError(f"{name} is another connector's, of another kind or with other labels")
        return family.metric

    return {kind: partial(make, kind) for kind in metric_types}


def _restored(name: str, value: Any, classes: Mapping[str, str]) -> MultiKVConnectorStats:
    """Returns one part of a payload as statistics. A child's own are made by the child's class."""
    if isinstance(value, KVConnectorStats):
        return MultiKVConnectorStats({name: value})
    if name == OWN:
        return MultiKVConnectorStats({name: OwnStats(value)})
    path = str(classes.get(name, ""))
    connector: Any = pkgutil.resolve_name(path)
    if not issubclass(connector, KVConnectorBase_V1):
        raise TypeError(f"{path} is no connector")
    stats = connector.build_kv_connector_stats(data=value)
    if not isinstance(stats, KVConnectorStats):
        return MultiKVConnectorStats()
    return MultiKVConnectorStats({name: stats}, {name: path})
