"""MultiConnector's statistics, on the way through vLLM's own pipeline to its /metrics (requirements B25-B30).

    children, choices ── get_kv_connector_stats ──► to_dict ── msgpack ──► build_kv_connector_stats (log lines)
                                                                      └──► MultiPromMetrics.observe (/metrics)

What travels says itself of which class each child is: the process that shows it has no instance of any child, and
children loaded by module path stand in no registry. Nothing here raises: statistics may be lost, the engine may not.
"""

import importlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiKVConnectorStats as VllmStats

from hybridkv.connector.children import ChildSpec
from hybridkv.core.selection import COUNTERS, Selection

logger = logging.getLogger("vllm.hybridkv")

SELECTION = "__selection__"
EVENTS = "__events__"
CLASSES = "__classes__"
PENDING = "pending_loads"
LABEL = "connector"
HELP = {
    "queries": "Requests for which this connector was asked.",
    "hits": "Requests that were loaded from this connector.",
    "hit_tokens": "Tokens that were loaded from this connector.",
    "misses": "Requests of which this connector had nothing.",
}


class _SelectionStats(KVConnectorStats):
    """The choices of the scheduler role."""

    def __init__(self, selection: Selection | None = None) -> None:
        super().__init__(data={})
        self.selection = selection or Selection()

    def to_dict(self) -> dict[str, Any]:
        return self.selection.as_dict()

    def reset(self) -> None:
        self.selection = Selection()

    def aggregate(self, other: KVConnectorStats) -> "_SelectionStats":
        if isinstance(other, _SelectionStats):
            self.selection = self.selection.merged(other.selection)
        return self

    def reduce(self) -> dict[str, int | float]:
        return {f"{name} {key}": value for name, values in self.to_dict().items() for key, value in values.items()}

    def is_empty(self) -> bool:
        return not self.selection.as_dict()


class EventStats(KVConnectorStats):
    """What else was counted of each child, and under "" of MultiConnector itself: {connector: {event: count}}."""

    @classmethod
    def of(cls, counters: Mapping[str, int]) -> "EventStats":
        """From counts since the last time, by "child: event" or "event"."""
        made = cls()
        for name, count in counters.items():
            child, _, event = name.rpartition(": ")
            made._add(child, event, count)
        return made

    @classmethod
    def from_dict(cls, data: Mapping[str, Mapping[str, int]]) -> "EventStats":
        """From what travelled; what is below 0 is left out (requirements B30)."""
        made = cls()
        for child, events in data.items():
            for event, count in events.items():
                if int(count) > 0:
                    made._add(str(child), str(event), int(count))
        return made

    def reset(self) -> None:
        self.data.clear()

    def aggregate(self, other: KVConnectorStats) -> "EventStats":
        for child, events in other.data.items():
            for event, count in events.items():
                self._add(child, event, count)
        return self

    def reduce(self) -> dict[str, int | float]:
        return {f"{child} {event}".strip(): n for child, events in self.data.items() for event, n in events.items()}

    def is_empty(self) -> bool:
        return not self.data

    def _add(self, child: str, event: str, count: int) -> None:
        events = self.data.setdefault(child, {})
        events[event] = events.get(event, 0) + count


@dataclass
class MultiKVConnectorStats(VllmStats):
    """Each child's own by its name, the choices under SELECTION, and under EVENTS what else was counted."""

    classes: dict[str, str] = field(default_factory=dict)
    """"module:class" of each child that has statistics, by name."""

    def put(self, name: str, connector: type, stats: KVConnectorStats) -> None:
        """One child's."""
        self.data[name] = stats
        self.classes[name] = f"{connector.__module__}:{connector.__qualname__}"

    def to_dict(self) -> dict[str, Any]:
        """As it travels: plain values."""
        travels: dict[str, Any] = {}
        for name, stats in self.data.items():
            if (plain := _try(name, "to_dict", stats.to_dict)) is not None:
                travels[name] = plain
        if classes := {name: known for name, known in self.classes.items() if name in travels}:
            travels[CLASSES] = classes
        return travels

    def aggregate(self, other: KVConnectorStats) -> "MultiKVConnectorStats":
        """This, then `other`; where a child's own statistics cannot be put together, the later ones are lost."""
        for name, stats in other.data.items():
            mine = self.data.get(name)
            if mine is None:
                self.data[name] = stats
            elif (both := _try(name, "aggregate", mine.aggregate, stats)) is not None:
                self.data[name] = both
        self.classes.update(getattr(other, "classes", {}))
        return self

    def reset(self) -> None:
        """All of them."""
        for name, stats in self.data.items():
            _try(name, "reset", stats.reset)

    def reduce(self) -> dict[str, Any]:
        """For vLLM's log line."""
        reduced = {name: _try(name, "reduce", stats.reduce) for name, stats in self.data.items()}
        return {name.strip("_"): values for name, values in reduced.items() if values}

    def is_empty(self) -> bool:
        """Whether there is nothing to tell."""
        return all(_try(name, "is_empty", stats.is_empty) is not False for name, stats in self.data.items())


def stats_from(data: Mapping[str, Any] | None) -> MultiKVConnectorStats:
    """From `MultiKVConnectorStats.to_dict`, made into each child's own class where that is possible."""
    stats = MultiKVConnectorStats()
    for name, value in (data or {}).items():
        if name == CLASSES:
            continue
        if isinstance(value, KVConnectorStats):
            stats.data[name] = value
        elif name == SELECTION:
            selection = _try(name, "from_dict", Selection.from_dict, value)
            stats.data[name] = _SelectionStats(selection)
        elif name == EVENTS:
            if (events := _try(name, "from_dict", EventStats.from_dict, value)) is not None:
                stats.data[name] = events
        else:
            path = str((data or {}).get(CLASSES, {}).get(name, ""))
            made = _try(name, "build_kv_connector_stats", _made, path, value)
            if isinstance(made, KVConnectorStats):
                stats.data[name] = made
                stats.classes[name] = path
    return stats


class MultiPromMetrics(KVConnectorPromMetrics):
    """The choices and the children's own metrics, every one with the label `connector`."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Mapping[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: Mapping[int, list[object]],
        specs: Sequence[ChildSpec],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        names, labels = [spec.name for spec in specs], [*labelnames, LABEL]
        counters = {
            key: self._counter_cls(name=f"vllm:kv_connector_mc_{key}", documentation=HELP[key], labelnames=labels)
            for key in COUNTERS
        }
        pending = self._gauge_cls(
            name=f"vllm:kv_connector_mc_{PENDING}",
            documentation="Loads from this connector that have not ended yet.",
            multiprocess_mode="mostrecent",
            labelnames=labels,
        )
        self._selection = {
            (engine, name, key): metric.labels(*values, name)
            for engine, values in per_engine_labelvalues.items()
            for name in names
            for key, metric in [*counters.items(), (PENDING, pending)]
        }
        self._events = self._counter_cls(
            name="vllm:kv_connector_mc_events",
            documentation="What else was counted of this connector (quarantined: it is switched off), by event.",
            labelnames=[*labels, "event"],
        )
        self._engines, self._names = dict(per_engine_labelvalues), frozenset(("", *names))
        self._children: dict[str, KVConnectorPromMetrics] = {}
        families = _Families(metric_types)
        for spec in specs:
            values = {engine: [*values, spec.name] for engine, values in per_engine_labelvalues.items()}
            made = _try(
                spec.name,
                "build_prom_metrics",
                spec.connector.build_prom_metrics,  # type: ignore[attr-defined]  # every connector has it
                spec.config,
                families.types(),
                labels,
                values,
            )
            if made is not None:
                self._children[spec.name] = made

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """One engine's numbers since the last call."""
        for name, data in transfer_stats_data.items():
            if name == SELECTION:
                _try(name, "observe", self._observe_selection, data, engine_idx)
            elif name == EVENTS:
                _try(name, "observe", self._observe_events, data, engine_idx)
            elif (metrics := self._children.get(name)) is not None:
                _try(name, "observe", metrics.observe, data, engine_idx)

    def _observe_selection(self, data: Mapping[str, Mapping[str, int]], engine_idx: int) -> None:
        for name, values in Selection.from_dict(data).as_dict().items():
            for key, value in values.items():
                metric = self._selection.get((engine_idx, name, key))
                if metric is not None and key == PENDING:
                    metric.set(value)
                elif metric is not None:
                    metric.inc(value)

    def _observe_events(self, data: Mapping[str, Mapping[str, int]], engine_idx: int) -> None:
        for name, events in EventStats.from_dict(data).data.items():
            if name in self._names and engine_idx in self._engines:
                for event, count in events.items():
                    self._events.labels(*self._engines[engine_idx], name, event).inc(count)


class _Families:
    """Metric types that give the family of a name once more instead of registering it twice."""

    def __init__(self, metric_types: Mapping[Any, Any]) -> None:
        self._metric_types = metric_types
        self._made: dict[str, tuple[Any, tuple[str, ...], Any]] = {}

    def types(self) -> dict[Any, Any]:
        """For one child's build_prom_metrics."""
        return {kind: self._type(kind, made) for kind, made in self._metric_types.items()}

    def _type(self, kind: Any, metric_cls: Any) -> Callable[..., Any]:
        def make(name: str, *args: Any, **kwargs: Any) -> Any:
            labels = tuple(kwargs["labelnames"] if "labelnames" in kwargs else args[1] if len(args) > 1 else ())
            known = self._made.get(name)
            if known is None:
                known = self._made[name] = kind, labels, metric_cls(name, *args, **kwargs)
            elif known[:2] != (kind, labels):
                raise ValueError(f"{name} is another connector's, of another kind or with other labels")
            return known[2]

        return make


def _made(path: str, value: Any) -> KVConnectorStats | None:
    """A child's statistics by its class, which says of itself how."""
    module, _, name = path.partition(":")
    connector: Any = importlib.import_module(module)
    for part in name.split("."):
        connector = getattr(connector, part)
    if not issubclass(connector, KVConnectorBase_V1):
        raise TypeError(f"{path} is no connector")
    made: KVConnectorStats | None = connector.build_kv_connector_stats(data=value)
    return made


_told: set[tuple[str, str]] = set()


def _try(name: str, what: str, work: Callable[..., Any], *args: Any) -> Any:
    """`work(*args)`, or None where it raises, which is said once for each child and method."""
    try:
        return work(*args)
    except Exception:  # a child's code, in the engine's loop or the server's
        if (name, what) not in _told:
            _told.add((name, what))
            logger.exception("hybridkv: statistics of %s are incomplete: %s failed", name, what)
        return None
