"""The statistics of the connector on their way to the API server.

The scheduler role counts, and adds what its workers report. In a payload a counter is
`[family, values of the labels, increment]`, as in `["lookups", ["declined", "late_room"], 1]`. What
cannot be read in a payload is left out and counted.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import islice
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

from hybridkv.connector import metrics
from hybridkv.connector.metrics import FAMILIES, PREFIX
from hybridkv.core.metrics import Metric
from hybridkv.vllm.metrics import Deltas, EngineMetrics, attempt

OBSERVATIONS_MAX = 1024  # Values of one histogram in one payload. The rest is counted as dropped.
NAMES_MAX = 1024  # Counters, gauges or histograms in one payload.
NAME_CHARS_MAX = 256  # Characters of a metric's name, or of a label's value.
NUMBER_MAX = 1 << 62  # A number as large as this counts as malformed, as infinities do.


class StatsCollector:
    """Collects what one engine counts and measures until vLLM takes it, which every step does."""

    def __init__(self, counters: Mapping[Metric, float]) -> None:
        self._deltas = Deltas(counters)
        self._observed: dict[str, list[float]] = {}
        self._gauges: dict[str, float] = {}

    def add_observation(self, family: str, value: float) -> None:
        """Add a value to a histogram."""
        self._observed.setdefault(family, []).append(value)

    def take_payload(self, gauges: Mapping[str, float]) -> "HybridKVStats | None":
        """Return what is new since the last call and the gauges that changed. None = nothing."""
        counters = [[*metric, added] for metric, added in self._deltas.take_increments().items()]
        changed = {name: value for name, value in gauges.items() if self._gauges.get(name) != value}
        if not counters and not changed and not self._observed:
            return None
        self._gauges.update(changed)
        observed, self._observed = self._observed, {}
        return HybridKVStats({"counters": counters, "gauges": changed, "observed": observed})


class HybridKVStats(KVConnectorStats):
    """Increments of counters, values of gauges and new values of histograms, as plain `data`."""

    def __init__(self, data: object = None) -> None:
        super().__init__(data=_readable({} if data is None else data))

    @property
    def counters(self) -> dict[Metric, float]:
        """The increments by counter."""
        return _by_metric(self.data["counters"])

    def reset(self) -> None:
        """Forget all counters, gauges and histograms."""
        self.data: dict[str, Any] = _readable({})

    def is_empty(self) -> bool:
        """Return True if there are no counters, gauges or histograms."""
        return not any(self.data.values())

    def aggregate(self, stats: KVConnectorStats) -> "HybridKVStats":
        """Add later statistics to this object and return it.

        Counters add up, lists of histograms grow, and gauges take the later value.
        """
        added = _readable(stats.data)
        observed = {**self.data["observed"]}
        for name, values in added["observed"].items():
            observed[name] = [*observed.get(name, ()), *values]
        self.data = _readable(
            {
                "counters": [*self.data["counters"], *added["counters"]],
                "gauges": {**self.data["gauges"], **added["gauges"]},
                "observed": observed,
            }
        )
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return the values of one interval for vLLM's log line, by their text."""
        counters = self.counters

        def total(family: str, *labels: str) -> int:
            """Sum the counters of a family whose first labels have these values."""
            values = (
                value
                for metric, value in counters.items()
                if metric.family == family and metric.labels[: len(labels)] == labels
            )
            return round(sum(values))

        line: dict[str, int | float] = {
            "Lookup hits": total("lookups", "hit"),
            "misses": total("lookups", "miss"),
            "declined": total("lookups", "declined"),
            "Tokens loaded": round(counters.get(metrics.TOKENS_LOADED, 0)),
        }
        for metric, value in sorted(counters.items()):
            if metric.family == "loaded_tokens_by_tier":
                line[f"from {metric.labels[0]}"] = round(value)
        line["MB loaded"] = round(counters.get(metrics.BYTES_LOADED, 0) / 1e6, 1)
        line["MB stored"] = round(counters.get(metrics.BYTES_STORED, 0) / 1e6, 1)
        waits = self.data["observed"].get("load_seconds")
        if waits:
            line["Avg load (ms)"] = round(1e3 * sum(waits) / len(waits), 2)
        troubles = {
            "Failed loads": round(counters.get(metrics.LOADS_FAILED, 0)),
            "Objects shed": total("stores_shed"),
            "Daemon losses": total("daemon_losses"),
            "Faults": total("faults"),
        }
        return line | {name: count for name, count in troubles.items() if count}


class HybridKVPromMetrics(EngineMetrics):
    """Exports FAMILIES at the API server's /metrics. No payload makes it raise."""

    def __init__(self, *vllm_arguments: Any) -> None:
        super().__init__(PREFIX, FAMILIES, *vllm_arguments)
        for metric in metrics.ZERO_INITIALIZED:
            for engine in self.per_engine_labelvalues:
                self.cell(engine, metric)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add one engine's payload. Parts that cannot be read are left out and counted."""
        if engine_idx not in self.per_engine_labelvalues:
            engine_idx = next(iter(self.per_engine_labelvalues))
            transfer_stats_data = {"counters": [[*metrics.STATS_MALFORMED, 1]]}
        work = partial(self._take, transfer_stats_data, engine_idx)
        attempt("HybridKVConnector", "observe", work, partial(self._count_malformed, engine_idx))

    def _count_malformed(self, engine: int) -> None:
        self.cell(engine, metrics.STATS_MALFORMED).inc()

    def _take(self, payload: object, engine: int) -> None:
        data = _readable(payload)
        for metric, added in _by_metric(data["counters"]).items():
            self.cell(engine, metric).inc(added)
        for part, kind in (("gauges", "gauge"), ("observed", "histogram")):
            for name, values in data[part].items():
                if name not in FAMILIES or FAMILIES[name].kind != kind:
                    self._count_malformed(engine)
                elif kind == "gauge":
                    self.cell(engine, Metric(name)).set(values)
                else:
                    observe: Callable[[float], None] = self.cell(engine, Metric(name)).observe
                    for value in values:
                        observe(value)


def _readable(payload: object) -> dict[str, Any]:
    """Return the readable part of a payload. The rest is counted in it.

    `{"counters": [["loads", ["failed"], 1], ["weights_stale", [], -1]]} ->
    {"counters": [["loads", ["failed"], 1], ["events", ["stats_malformed"], 1]], "gauges": {},
    "observed": {}}`
    """
    data: Mapping[Any, Any] = payload if isinstance(payload, Mapping) else {}
    counters, bad_counters = _counters(data.get("counters"))
    gauges, bad_gauges = _items(data.get("gauges"), _is_number)
    lists, bad_lists = _items(data.get("observed"), lambda value: isinstance(value, list | tuple))
    malformed = (data is not payload) + len(data.keys() - {"counters", "gauges", "observed"})
    malformed += bad_counters + bad_gauges + bad_lists
    dropped, observed = 0, {}
    for name, values in lists.items():
        # The sum of a histogram is a counter as well.
        good = [value for value in values if _is_number(value) and value >= 0]
        malformed += len(values) - len(good)
        dropped += max(0, len(good) - OBSERVATIONS_MAX)
        if good:
            observed[name] = good[:OBSERVATIONS_MAX]
    bad = {metrics.STATS_MALFORMED: malformed, metrics.STATS_DROPPED_OBSERVATIONS: dropped}
    for metric, count in bad.items():
        if count:
            counters[metric] = counters.get(metric, 0) + count
    increments = [[family, [*labels], added] for (family, labels), added in counters.items()]
    return {"counters": increments, "gauges": gauges, "observed": observed}


def _by_metric(increments: Iterable[Any]) -> dict[Metric, float]:
    """Return the increments of a payload by counter. Those of one counter add up."""
    counters: dict[Metric, float] = {}
    for family, labels, added in increments:
        metric = Metric(family, tuple(labels))
        counters[metric] = counters.get(metric, 0) + added
    return counters


def _counters(part: object) -> tuple[dict[Metric, float], int]:
    """Return at most NAMES_MAX counters of a payload's part, and the number of bad entries."""
    if not isinstance(part, list | tuple):
        return {}, int(part is not None)
    increments = [entry for entry in part if _is_increment(entry)]
    counters = _by_metric(increments)
    good = {metric: value for metric, value in counters.items() if _is_number(value)}
    good = dict(islice(good.items(), NAMES_MAX))
    return good, len(part) - len(increments) + len(counters) - len(good)


def _is_increment(entry: object) -> bool:
    """Return True for a counter of FAMILIES, with its number of labels, that did not go down.

    A counter that went down must not take the exported one with it.
    """
    if not isinstance(entry, list | tuple) or len(entry) != 3:
        return False
    name, labels, added = entry
    family = FAMILIES.get(name) if isinstance(name, str) else None
    if family is None or family.kind != "counter" or not isinstance(labels, list | tuple):
        return False
    is_labelled = len(labels) == len(family.labels) and all(map(_is_name, labels))
    return is_labelled and _is_number(added) and added >= 0


def _items(part: object, is_good: Callable[[Any], bool]) -> tuple[dict[str, Any], int]:
    """Return at most NAMES_MAX good items of a payload's part, and the number of all others."""
    if not isinstance(part, Mapping):
        return {}, int(part is not None)
    good = {name: value for name, value in part.items() if _is_name(name) and is_good(value)}
    good = dict(islice(good.items(), NAMES_MAX))
    return good, len(part) - len(good)


def _is_name(value: object) -> bool:
    return isinstance(value, str) and 0 < len(value) <= NAME_CHARS_MAX


def _is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) < NUMBER_MAX
