"""Statistics of the connector through vLLM's own pipeline, from the engine process to the API server's /metrics.

The scheduler role counts (workers report to it); in each step what is new travels as deltas with vLLM's scheduler
statistics, and the API server adds them up, so no counter ever goes down. A payload that is not understood is ignored
and counted. docs/METRICS.md shows the tables.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

logger = logging.getLogger("vllm.hybridkv")

PREFIX = "vllm:hybridkv_"
OBSERVATIONS_MAX = 1024
"""Of one histogram in one payload; more are counted as dropped."""
NAMES_MAX = 1024
"""Counters in one payload."""
LABELS_MAX = 64
"""Label values of one family that are told apart; what comes later is "other"."""
NUMBER_MAX = 1 << 62
"""Larger ones, infinities and what is no number are not believed."""
MALFORMED = "stats_malformed"
DROPPED = "stats_dropped_observations"
OTHER = "other"


class What(StrEnum):
    """Kinds of metrics."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Family:
    """One metric. Its name is PREFIX and its key in FAMILIES; Prometheus puts `_total` behind those of counters."""

    what: What
    about: str
    labels: tuple[str, ...] = ()
    """Besides those that vLLM gives: model_name and engine."""
    buckets: tuple[float, ...] = ()


Cell = tuple[str, tuple[str, ...]]
"""A family and the values of its labels."""

SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)

FAMILIES: Mapping[str, Family] = {
    "lookups": Family(
        What.COUNTER,
        "Requests looked up, by result (hit, miss, declined) and reason. A hit that is then not taken counts twice: "
        "as a hit, and as declined.",
        ("result", "reason"),
    ),
    "lookups_asked": Family(What.COUNTER, "Lookups sent to the daemon."),
    "lookups_promoted": Family(What.COUNTER, "Lookups for which the daemon read tiers below RAM."),
    "lookup_wait_seconds": Family(
        What.HISTOGRAM, "From a lookup's question to its answer, or to its deadline, in seconds.", (), SECONDS
    ),
    "loads": Family(What.COUNTER, "Loads that ended, by result (loaded, failed).", ("result",)),
    "load_seconds": Family(
        What.HISTOGRAM,
        "From a request's blocks to the end of its load, in seconds, as the scheduler sees it.",
        (),
        SECONDS,
    ),
    "loaded_tokens": Family(What.COUNTER, "Prompt tokens loaded instead of computed."),
    "loaded_tokens_by_tier": Family(
        What.COUNTER, "The same tokens by the tier that had them when they were looked up.", ("tier",)
    ),
    "load_bytes": Family(What.COUNTER, "Bytes of KV cache loaded, of all ranks together."),
    "load_copy_seconds": Family(What.COUNTER, "Seconds from the start of each load in a worker to its end, summed."),
    "stored_objects": Family(What.COUNTER, "Objects (one group's bytes of one chunk) stored."),
    "store_bytes": Family(What.COUNTER, "Bytes of KV cache stored, of all ranks together."),
    "store_copy_seconds": Family(What.COUNTER, "Seconds that workers spent copying out within steps, summed."),
    "stores_shed": Family(What.COUNTER, "Objects that were not stored, or not yet, by reason.", ("reason",)),
    "faults": Family(What.COUNTER, "Errors inside the connector that were kept from the engine, by hook.", ("hook",)),
    "daemon_connects": Family(What.COUNTER, "Lives of the daemon that were connected to."),
    "daemon_losses": Family(What.COUNTER, "Connections to the daemon that were lost, or could not be kept."),
    "daemon_refusals": Family(What.COUNTER, "Requests that the daemon refused, by its error code.", ("code",)),
    "daemon_unsent": Family(What.COUNTER, "Messages that found no connection, by message.", ("message",)),
    "condemned_slots": Family(What.COUNTER, "Slots whose bytes were proven wrong before they could be used."),
    "kv_event_chunks": Family(
        What.COUNTER, "Chunks that KV events told routers of, by event (stored, removed).", ("event",)
    ),
    "events": Family(What.COUNTER, "Whatever else was counted, by event.", ("event",)),
    "breaker_open": Family(What.GAUGE, "1 while the daemon is left alone because it did not answer in time."),
    "daemon_connected": Family(What.GAUGE, "1 while there is a connection to the daemon."),
    "loads_pending": Family(What.GAUGE, "Requests that have blocks for a load and did not run since."),
}

EXACT: Mapping[str, Cell] = {
    "lookups": ("lookups_asked", ()),
    "lookups_promoted": ("lookups_promoted", ()),
    "lookups_hit": ("lookups", ("hit", "found")),
    "lookups_miss": ("lookups", ("miss", "not_found")),
    "loads": ("loads", ("loaded",)),
    "loads_failed": ("loads", ("failed",)),
    "tokens_loaded": ("loaded_tokens", ()),
    "bytes_loaded": ("load_bytes", ()),
    "load_seconds": ("load_copy_seconds", ()),
    "objects_stored": ("stored_objects", ()),
    "bytes_stored": ("store_bytes", ()),
    "store_seconds": ("store_copy_seconds", ()),
    "states_unaligned": ("stores_shed", ("state_unaligned",)),
    "connects": ("daemon_connects", ()),
    "losses": ("daemon_losses", ()),
    "slots_condemned": ("condemned_slots", ()),
    "chunks_announced": ("kv_event_chunks", ("stored",)),
    "chunks_withdrawn": ("kv_event_chunks", ("removed",)),
}
"""The cell of each counter that has one of its own."""
PREFIXES: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("lookups_", "lookups", ("declined",)),
    ("tokens_loaded_from_", "loaded_tokens_by_tier", ()),
    ("stores_", "stores_shed", ()),
    ("fault_", "faults", ()),
    ("refused_", "daemon_refusals", ()),
    ("unsent_", "daemon_unsent", ()),
)
"""Other counters that begin so: their family and its labels, of which the last one is the rest of the name."""


def cell_of(counter: str) -> Cell:
    """Where a counter is exported: exactly one place, also for one that nobody thought of."""
    if counter in EXACT:
        return EXACT[counter]
    for prefix, family, labels in PREFIXES:
        if counter.startswith(prefix) and len(counter) > len(prefix):
            return family, (*labels, counter.removeprefix(prefix))
    return "events", (counter,)


class Deltas:
    """What was added to some counters since the last time."""

    def __init__(self, counters: Mapping[str, float]) -> None:
        self._counters = counters
        self._told: dict[str, float] = {}

    def take(self) -> dict[str, float]:
        """Names and what was added, each more than nothing."""
        told = self._told
        added = {name: value - told.get(name, 0) for name, value in self._counters.items() if value > told.get(name, 0)}
        for name in added:
            told[name] = self._counters[name]
        return added


class Meter:
    """What one engine counted, measured and is like, until vLLM takes it. Called in every step, so it is cheap."""

    def __init__(self, counters: Mapping[str, float]) -> None:
        self._deltas = Deltas(counters)
        self._observed: dict[str, list[float]] = {}
        self._gauges: dict[str, float] = {}

    def observe(self, family: str, value: float) -> None:
        """One more value of a histogram."""
        self._observed.setdefault(family, []).append(value)

    def take(self, gauges: Mapping[str, float]) -> "HybridKVStats | None":
        """What is new; None = nothing."""
        counters = self._deltas.take()
        changed = {name: value for name, value in gauges.items() if self._gauges.get(name) != value}
        if not counters and not changed and not self._observed:
            return None
        self._gauges.update(changed)
        observed, self._observed = self._observed, {}
        return HybridKVStats({"counters": counters, "gauges": changed, "observed": observed})


class HybridKVStats(KVConnectorStats):
    """Deltas of counters, present values of gauges, and new values of histograms; `data` is plain and serialisable."""

    def __init__(self, data: object = None) -> None:
        super().__init__(data=_sound({} if data is None else data))

    def reset(self) -> None:
        """Forget everything."""
        self.data: dict[str, Any] = _sound({})

    def is_empty(self) -> bool:
        """Whether there is nothing to tell."""
        return not any(self.data.values())

    def aggregate(self, other: KVConnectorStats) -> "HybridKVStats":
        """Both together, in this object: counters add up, of gauges the later value stands."""
        added = _sound(other.data)
        counters = self.data["counters"]
        for name, value in added["counters"].items():
            counters[name] = counters.get(name, 0) + value
        self.data["gauges"].update(added["gauges"])
        for name, values in added["observed"].items():
            self.data["observed"][name] = [*self.data["observed"].get(name, ()), *values]
        self.data = _sound(self.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        """One interval in a line of vLLM's log."""
        counters: dict[str, float] = self.data["counters"]
        cells = [(cell_of(name), value) for name, value in counters.items()]

        def total(family: str, *labels: str) -> int:
            return round(sum(value for (name, of), value in cells if name == family and of[: len(labels)] == labels))

        line: dict[str, int | float] = {
            "Lookup hits": total("lookups", "hit"),
            "misses": total("lookups", "miss"),
            "declined": total("lookups", "declined"),
            "Tokens loaded": total("loaded_tokens"),
        }
        for (family, labels), value in sorted(cells):
            if family == "loaded_tokens_by_tier":
                line[f"from {labels[0]}"] = round(value)
        line["MB loaded"] = round(counters.get("bytes_loaded", 0) / 1e6, 1)
        line["MB stored"] = round(counters.get("bytes_stored", 0) / 1e6, 1)
        waits = self.data["observed"].get("load_seconds")
        if waits:
            line["Avg load (ms)"] = round(1e3 * sum(waits) / len(waits), 2)
        for name, trouble in (
            ("Failed loads", total("loads", "failed")),
            ("Objects shed", total("stores_shed")),
            ("Daemon losses", total("daemon_losses")),
            ("Faults", total("faults")),
        ):
            if trouble:
                line[name] = trouble
        return line


def _sound(given: object) -> dict[str, Any]:
    """The data without what cannot be read, which is counted."""
    counters: dict[str, float] = {}
    gauges: dict[str, float] = {}
    observed: dict[str, list[float]] = {}
    data: Mapping[Any, Any] = given if isinstance(given, Mapping) else {}
    malformed = 0 if data is given else 1
    malformed += len(data.keys() - {"counters", "gauges", "observed"})
    for part, kept in (("counters", counters), ("gauges", gauges)):
        for name, value in _items(data.get(part, {})):
            # A counter that went down, say in a payload that was not ours, must not take the exported one with it.
            if _is_name(name) and _is_number(value) and len(kept) < NAMES_MAX and (part == "gauges" or value >= 0):
                kept[name] = value
            else:
                malformed += 1
    dropped = 0
    for name, values in _items(data.get("observed", {})):
        if not _is_name(name) or not isinstance(values, list | tuple) or len(observed) >= NAMES_MAX:
            malformed += 1
            continue
        # The sum of a histogram is a counter as well.
        good = [value for value in values if _is_number(value) and value >= 0]
        malformed += len(values) - len(good)
        dropped += max(0, len(good) - OBSERVATIONS_MAX)
        if good:
            observed[name] = good[:OBSERVATIONS_MAX]
    for name, more in ((MALFORMED, malformed), (DROPPED, dropped)):
        if more:
            counters[name] = counters.get(name, 0) + more
    return {"counters": counters, "gauges": gauges, "observed": observed}


def _items(part: object) -> Iterator[tuple[Any, Any]]:
    if isinstance(part, Mapping):
        yield from part.items()
    elif part is not None:
        yield None, None


def _is_name(name: object) -> bool:
    return isinstance(name, str) and 0 < len(name) <= 256


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and -NUMBER_MAX < value < NUMBER_MAX


class HybridKVPromMetrics(KVConnectorPromMetrics):
    """Every family under the labels that vLLM gives, with the metric classes that vLLM gives. Never raises later."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Mapping[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._families = {name: self._make(name, family) for name, family in FAMILIES.items()}
        self._children: dict[tuple[int, Cell], Any] = {}
        self._has_failed = False
        self._told_apart: dict[str, set[tuple[str, ...]]] = {name: set() for name in FAMILIES}
        # What can be named ahead begins at 0, so that rates know its first increase.
        for engine in per_engine_labelvalues:
            for cell in (*EXACT.values(), *((name, ()) for name, family in FAMILIES.items() if not family.labels)):
                self._child(engine, cell)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """One engine's payload; what cannot be read is counted."""
        try:
            if engine_idx not in self.per_engine_labelvalues:
                engine_idx = next(iter(self.per_engine_labelvalues))
                transfer_stats_data = {"counters": {MALFORMED: 1}}
            self._take(_sound(transfer_stats_data), engine_idx)
        except Exception as error:  # the supervised boundary: the API server goes on without our numbers
            logger.log(
                logging.DEBUG if self._has_failed else logging.ERROR,
                "hybridkv: statistics could not be exported",
                exc_info=error,
            )
            self._has_failed = True

    def _take(self, data: Mapping[str, Any], engine: int) -> None:
        for counter, added in data["counters"].items():
            self._child(engine, cell_of(counter)).inc(added)
        unknown = 0
        for name, value in data["gauges"].items():
            if self._is(name, What.GAUGE):
                self._child(engine, (name, ())).set(value)
            else:
                unknown += 1
        for name, values in data["observed"].items():
            if not self._is(name, What.HISTOGRAM):
                unknown += 1
                continue
            observe: Callable[[float], None] = self._child(engine, (name, ())).observe
            for value in values:
                observe(value)
        if unknown:
            self._child(engine, cell_of(MALFORMED)).inc(unknown)

    def _is(self, name: str, what: What) -> bool:
        return name in FAMILIES and FAMILIES[name].what is what

    def _make(self, name: str, family: Family) -> Any:
        labels = [*self._labelnames, *family.labels]
        about = {"name": PREFIX + name, "documentation": family.about, "labelnames": labels}
        if family.what is What.HISTOGRAM:
            return self._histogram_cls(**about, buckets=list(family.buckets))
        if family.what is What.GAUGE:
            return self._gauge_cls(**about, multiprocess_mode="mostrecent")
        return self._counter_cls(**about)

    def _child(self, engine: int, cell: Cell) -> Any:
        child = self._children.get((engine, cell))
        if child is None:
            family, labels = cell
            told_apart = self._told_apart[family]
            if labels not in told_apart and len(told_apart) >= LABELS_MAX and labels[-1] != OTHER:
                return self._child(engine, (family, (*labels[:-1], OTHER)))
            told_apart.add(labels)
            child = self._families[family].labels(*self.per_engine_labelvalues[engine], *labels)
            self._children[engine, cell] = child
        return child
