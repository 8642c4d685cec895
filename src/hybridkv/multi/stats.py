"""MultiConnector's statistics on their way to vLLM's /metrics (requirements B25-B30).

    children, choices ── get_kv_connector_stats ──► to_dict ── msgpack
        ├──► build_kv_connector_stats (log lines)
        └──► MultiPromMetrics.observe (/metrics)

The payload names the class of each child, because the process that shows it has no instance of any
child, and children loaded by module path stand in no registry. A child's fault here is counted
among its events as FAULT, and nothing raises.
"""

import pkgutil
from collections.abc import Iterable, Mapping, Sequence
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

from hybridkv.core.metrics import Metric, counter, gauge
from hybridkv.multi.children import ChildConnectors, ChildSpec
from hybridkv.multi.counters import CounterKey
from hybridkv.multi.ranking import ChildAnswer
from hybridkv.vllm.hook_guard import fault
from hybridkv.vllm.metrics import EngineMetrics, attempt

PENDING = "pending_loads"  # The one count that is a level.
SELECTION = "__selection__"
EVENTS = "__events__"
CLASSES = "__classes__"
FAULT = CounterKey("", fault("stats")).event
PREFIX = "vllm:kv_connector_mc_"
CHOICES = {
    "queries": counter("Requests for which this connector was asked.", "connector"),
    "hits": counter("Requests that were loaded from this connector.", "connector"),
    "hit_tokens": counter("Tokens that were loaded from this connector.", "connector"),
    "misses": counter("Requests of which this connector had nothing.", "connector"),
    PENDING: gauge("Loads from this connector that have not ended yet.", "connector"),
}
FAMILIES = {
    **CHOICES,
    "events": counter(
        "What else was counted of this connector, by event. It is switched off where quarantined "
        "is larger than begun_anew.",
        "connector",
        "event",
    ),
}
"""The metrics by name, without PREFIX."""


class ConnectorCounts(KVConnectorStats):
    """Counts of an interval as {connector: {name: count}}. "" is MultiConnector itself.

    PENDING is a level: two intervals together have the later value.
    """

    @classmethod
    def from_dict(cls, data: Mapping[str, Mapping[str, Any]]) -> "ConnectorCounts":
        """Returns the counts of a payload, without those below 0: counters never go down (B30)."""
        valid = cls()
        for connector, counts in data.items():
            for name, value in counts.items():
                if (count := max(0, int(value))) or name == PENDING:
                    valid.add_count(str(connector), str(name), count)
        return valid

    def add_count(self, connector: str, name: str, count: int = 1) -> None:
        """Add to one count, or replace a level."""
        counts = self.data.setdefault(connector, {})
        counts[name] = count if name == PENDING else counts.get(name, 0) + count

    def count_admission(
        self,
        names: Sequence[str],
        answers: Mapping[int, ChildAnswer],
        chosen: int | None,
        tokens: int,
    ) -> None:
        """Count a request that the engine admitted.

        `answers` has the connectors that were asked, and `chosen` loads `tokens`. Each of them gets
        a query, the chosen one also a hit, and one that had nothing a miss. A connector that had
        less than the chosen one, or did not answer in time, gets a query alone.
        """
        for index, answer in answers.items():
            self.add_count(names[index], "queries")
            if index == chosen and tokens:
                self.add_count(names[index], "hits")
                self.add_count(names[index], "hit_tokens", tokens)
            elif answer.tokens == 0:
                self.add_count(names[index], "misses")

    def reset(self) -> None:
        """Begin a new interval, without counts."""
        self.data: dict[str, dict[str, int]] = {}

    def aggregate(self, later: KVConnectorStats) -> "ConnectorCounts":
        """Add the counts of a later interval to this one. Returns this one."""
        for connector, counts in later.data.items():
            for name, count in counts.items():
                self.add_count(connector, name, count)
        return self

    def reduce(self) -> dict[str, int | float]:
        """Returns the counts for vLLM's log line: {"a": {"hits": 2}} -> {"a hits": 2}."""
        return {
            f"{connector} {name}".strip(): count
            for connector, counts in self.data.items()
            for name, count in counts.items()
        }

    def is_empty(self) -> bool:
        """True where nothing was counted in this interval."""
        return not self.data


@dataclass
class MultiKVConnectorStats(multi_connector.MultiKVConnectorStats):
    """Each child's own statistics by its name, the choices at SELECTION, other counts at EVENTS."""

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
        child = "" if name in (SELECTION, EVENTS) else name
        self.data.setdefault(EVENTS, ConnectorCounts()).add_count(child, FAULT)

    def to_dict(self) -> dict[str, Any]:
        """Returns the payload that travels to the API server, of plain values."""
        plain = self._call_all("to_dict")
        if EVENTS in self.data:  # Once more, because faults of the other parts are counted here.
            plain[EVENTS] = self._call(EVENTS, "to_dict")
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


class MultiPromMetrics(EngineMetrics):
    """FAMILIES and the children's own metrics, all with the label `connector`."""

    def __init__(self, specs: Sequence[ChildSpec], *vllm_arguments: Any) -> None:
        super().__init__(PREFIX, FAMILIES, *vllm_arguments)
        _, metric_types, labelnames, values = vllm_arguments
        self._names = {spec.name for spec in specs}
        self._children: dict[str, KVConnectorPromMetrics] = {}
        shared = _shared_types(metric_types)
        for spec in specs:
            for engine, family in product(values, CHOICES):
                self.cell(engine, Metric(family, (spec.name,)))
            own = {engine: [*labels, spec.name] for engine, labels in values.items()}
            build: Any = spec.connector.build_prom_metrics  # type: ignore[attr-defined]
            build_own = partial(build, spec.config, shared, [*labelnames, "connector"], own)
            on_fault = partial(self._count_fault, spec.name, list(values))
            metrics = attempt(spec.name, "build_prom_metrics", build_own, on_fault)
            if metrics is not None:
                self._children[spec.name] = metrics

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add one engine's payload to the metrics."""
        for name, data in transfer_stats_data.items():
            if name in (SELECTION, EVENTS):
                add = partial(self._add, data, engine_idx, is_event=name == EVENTS)
            elif name in self._children:
                add = partial(self._children[name].observe, data, engine_idx)
            else:
                continue
            attempt(name, "observe", add, partial(self._count_fault, name, [engine_idx]))

    def _add(self, data: Mapping[str, Any], engine: int, is_event: bool) -> None:
        known = {*self._names, ""} if is_event else self._names
        for connector, counts in ConnectorCounts.from_dict(data).data.items():
            if engine not in self.per_engine_labelvalues or connector not in known:
                continue
            for name, count in counts.items():
                if is_event:
                    self.cell(engine, Metric("events", (connector, name))).inc(count)
                elif name == PENDING:
                    self.cell(engine, Metric(name, (connector,))).set(count)
                elif name in CHOICES:
                    self.cell(engine, Metric(name, (connector,))).inc(count)

    def _count_fault(self, name: str, engines: Iterable[int]) -> None:
        child = name if name in self._names else ""
        for engine in self.per_engine_labelvalues.keys() & set(engines):
            self.cell(engine, Metric("events", (child, FAULT))).inc()


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
    if name in (SELECTION, EVENTS):
        return MultiKVConnectorStats({name: ConnectorCounts.from_dict(value)})
    path = str(classes.get(name, ""))
    connector: Any = pkgutil.resolve_name(path)
    if not issubclass(connector, KVConnectorBase_V1):
        raise TypeError(f"{path} is no connector")
    stats = connector.build_kv_connector_stats(data=value)
    if not isinstance(stats, KVConnectorStats):
        return MultiKVConnectorStats()
    return MultiKVConnectorStats({name: stats}, {name: path})
