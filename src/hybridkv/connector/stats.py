"""The statistics of the connector. docs/METRICS.md has their tables.

The scheduler role counts, and adds what its workers report. Its counters have names such as
`lookups_late_room`. At the API server each counter becomes a cell, which is a metric with values
of labels: `cell_of("lookups_late_room") -> ("lookups", ("declined", "late_room"))`. What cannot be
read in a payload is left out and counted.
"""

from collections.abc import Callable, Mapping
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

from hybridkv.core.metrics import MetricFamily, counter, gauge
from hybridkv.vllm.metrics import Deltas, EngineMetrics, attempt

PREFIX = "vllm:hybridkv_"
OBSERVATIONS_MAX = 1024  # Values of one histogram in one payload. The rest is counted as dropped.
NAMES_MAX = 1024  # Counters, gauges or histograms in one payload.
NUMBER_MAX = 1 << 62  # A number as large as this counts as malformed, as infinities do.
MALFORMED = "stats_malformed"
DROPPED = "stats_dropped_observations"


class Cell(NamedTuple):
    """A metric: its family, a key of FAMILIES, and the values of the family's labels."""

    family: str
    labels: tuple[str, ...] = ()


class CounterPrefix(NamedTuple):
    """How to find the cell of counters whose names begin alike.

    The rest of the name is the value of the family's last label.
    """

    prefix: str
    family: str
    labels: tuple[str, ...] = ()  # The values of the labels before the last one.


SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
"""Buckets of histograms."""
_seconds = partial(MetricFamily, "histogram", labels=(), buckets=SECONDS)

FAMILIES: Mapping[str, MetricFamily] = {
    "lookups": counter(
        "Requests looked up, by result (hit, miss, declined) and reason. "
        "A hit that is then not taken counts twice: as a hit, and as declined.",
        "result",
        "reason",
    ),
    "lookups_asked": counter("Lookups sent to the daemon."),
    "lookups_promoted": counter("Lookups for which the daemon read tiers below RAM."),
    "lookup_wait_seconds": _seconds(
        "From a lookup's question to its answer, or to its deadline, in seconds."
    ),
    "hits_limited": counter(
        "Lookups that a group made shorter, which lacked what others have, by group.", "group"
    ),
    "tails": counter(
        "Hits inside a block: those loaded, and ends of prompts stored for them, by event "
        "(loaded, stored).",
        "event",
    ),
    "loads": counter("Loads that ended, by result (loaded, failed).", "result"),
    "load_seconds": _seconds(
        "From a request's blocks to the end of its load, in seconds, as the scheduler sees it."
    ),
    "loaded_tokens": counter("Prompt tokens loaded instead of computed."),
    "loaded_tokens_by_tier": counter(
        "The same tokens by the tier that had them when they were looked up.", "tier"
    ),
    "load_bytes": counter("Bytes of KV cache loaded, of all ranks together."),
    "load_copy_seconds": counter(
        "Seconds from the start of each load in a worker to its end, summed."
    ),
    "stored_objects": counter("Objects (one group's bytes of one chunk) stored."),
    "store_bytes": counter("Bytes of KV cache stored, of all ranks together."),
    "store_copy_seconds": counter("Seconds that workers spent copying out within steps, summed."),
    "device_copy_bytes": counter(
        "Bytes copied between a device and slots, by way (store, load).", "way"
    ),
    "device_copy_seconds": counter(
        "Seconds in which a worker had copies of that way on its device, summed.", "way"
    ),
    "stores_shed": counter("Objects that were not stored, or not yet, by reason.", "reason"),
    "faults": counter(
        "Errors inside the connector that were kept from the engine, by hook.", "hook"
    ),
    "daemon_connects": counter("Lives of the daemon that were connected to."),
    "daemon_losses": counter("Connections to the daemon that were lost, or could not be kept."),
    "daemon_refusals": counter("Requests that the daemon refused, by its error code.", "code"),
    "daemon_unsent": counter("Messages that found no connection, by message.", "message"),
    "condemned_slots": counter("Slots whose bytes were proven wrong before they could be used."),
    "kv_event_chunks": counter(
        "Chunks that KV events told routers of, by event (stored, removed), or cannot tell of: in "
        "tiers (not_kept), or at all, since as many are known as there is room for (not_shown).",
        "event",
    ),
    "audits": counter(
        "Live audits, by outcome: the engine computed what is stored (passed), something else "
        "(differed), or nothing could be compared (unmade).",
        "outcome",
    ),
    "weights_stale": counter(
        "Times that the engine's own prefix cache had blocks of other weights, or may have had: "
        "nothing is loaded or stored until it is reset."
    ),
    "events": counter("Whatever else was counted, by event.", "event"),
    "quarantined": gauge("How many roles (the scheduler's and each worker's) are switched off."),
    "quarantined_since": gauge(
        "When the scheduler role was switched off, in Unix time; 0 = it is on."
    ),
    "quarantined_until": gauge("When it begins anew, in Unix time; 0 = it is on."),
    "breaker_open": gauge("1 while the daemon is left alone because it did not answer in time."),
    "daemon_connected": gauge("1 while there is a connection to the daemon."),
    "loads_pending": gauge("Requests that have blocks for a load and did not run since."),
    "loads_overdue": gauge(
        "Loads that had not ended 10 s after their request had blocks. It waits for them."
    ),
}
"""The metrics; PREFIX stands before their names."""

EXACT: Mapping[str, Cell] = {
    "lookups": Cell("lookups_asked"),
    "lookups_promoted": Cell("lookups_promoted"),
    "lookups_hit": Cell("lookups", ("hit", "found")),
    "lookups_miss": Cell("lookups", ("miss", "not_found")),
    "loads": Cell("loads", ("loaded",)),
    "loads_failed": Cell("loads", ("failed",)),
    "tails_loaded": Cell("tails", ("loaded",)),
    "tails_stored": Cell("tails", ("stored",)),
    "tokens_loaded": Cell("loaded_tokens"),
    "bytes_loaded": Cell("load_bytes"),
    "load_seconds": Cell("load_copy_seconds"),
    "objects_stored": Cell("stored_objects"),
    "bytes_stored": Cell("store_bytes"),
    "store_seconds": Cell("store_copy_seconds"),
    "device_store_bytes": Cell("device_copy_bytes", ("store",)),
    "device_load_bytes": Cell("device_copy_bytes", ("load",)),
    "device_store_seconds": Cell("device_copy_seconds", ("store",)),
    "device_load_seconds": Cell("device_copy_seconds", ("load",)),
    "states_unaligned": Cell("stores_shed", ("state_unaligned",)),
    "states_freed": Cell("stores_shed", ("state_freed",)),
    "connects": Cell("daemon_connects"),
    "losses": Cell("daemon_losses"),
    "slots_condemned": Cell("condemned_slots"),
    "weights_stale": Cell("weights_stale"),
    "chunks_announced": Cell("kv_event_chunks", ("stored",)),
    "chunks_withdrawn": Cell("kv_event_chunks", ("removed",)),
    "chunks_not_kept": Cell("kv_event_chunks", ("not_kept",)),
    "chunks_not_shown": Cell("kv_event_chunks", ("not_shown",)),
}
"""The cell of each counter that has a cell of its own, by the counter's name."""
PREFIXES: tuple[CounterPrefix, ...] = (
    CounterPrefix("lookups_", "lookups", ("declined",)),
    CounterPrefix("hits_limited_by_", "hits_limited"),
    CounterPrefix("audits_", "audits"),
    CounterPrefix("tokens_loaded_from_", "loaded_tokens_by_tier"),
    CounterPrefix("stores_", "stores_shed"),
    CounterPrefix("fault_", "faults"),
    CounterPrefix("refused_", "daemon_refusals"),
    CounterPrefix("unsent_", "daemon_unsent"),
)
"""All other counters have the first prefix of this table that fits, or belong to `events`."""


def cell_of(name: str) -> Cell:
    """Return the cell that a counter is exported as. Every name has one.

    `"loads" -> ("loads", ("loaded",))`, `"refused_lookup" -> ("daemon_refusals", ("lookup",))`,
    `"switched_off" -> ("events", ("switched_off",))`
    """
    if name in EXACT:
        return EXACT[name]
    for prefix, family, labels in PREFIXES:
        if name.startswith(prefix) and len(name) > len(prefix):
            return Cell(family, (*labels, name.removeprefix(prefix)))
    return Cell("events", (name,))


class StatsCollector:
    """Collects what one engine counts and measures until vLLM takes it, which every step does."""

    def __init__(self, counters: Mapping[str, float]) -> None:
        self._deltas = Deltas(counters)
        self._observed: dict[str, list[float]] = {}
        self._gauges: dict[str, float] = {}

    def add_observation(self, family: str, value: float) -> None:
        """Add a value to a histogram."""
        self._observed.setdefault(family, []).append(value)

    def take_payload(self, gauges: Mapping[str, float]) -> "HybridKVStats | None":
        """Return what is new since the last call and the gauges that changed; None = nothing."""
        counters = self._deltas.take_increments()
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
        counters = self.data["counters"]
        for name, value in added["counters"].items():
            counters[name] = counters.get(name, 0) + value
        self.data["gauges"].update(added["gauges"])
        for name, values in added["observed"].items():
            self.data["observed"][name] = [*self.data["observed"].get(name, ()), *values]
        self.data = _readable(self.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return the values of one interval for vLLM's log line, by their text."""
        counters: dict[str, float] = self.data["counters"]
        cells = [(cell_of(name), value) for name, value in counters.items()]

        def total(family: str, *labels: str) -> int:
            """Sum the cells of a family whose first labels have these values."""
            values = (
                value
                for cell, value in cells
                if cell.family == family and cell.labels[: len(labels)] == labels
            )
            return round(sum(values))

        line: dict[str, int | float] = {
            "Lookup hits": total("lookups", "hit"),
            "misses": total("lookups", "miss"),
            "declined": total("lookups", "declined"),
            "Tokens loaded": total("loaded_tokens"),
        }
        for cell, value in sorted(cells):
            if cell.family == "loaded_tokens_by_tier":
                line[f"from {cell.labels[0]}"] = round(value)
        line["MB loaded"] = round(counters.get("bytes_loaded", 0) / 1e6, 1)
        line["MB stored"] = round(counters.get("bytes_stored", 0) / 1e6, 1)
        waits = self.data["observed"].get("load_seconds")
        if waits:
            line["Avg load (ms)"] = round(1e3 * sum(waits) / len(waits), 2)
        troubles = {
            "Failed loads": total("loads", "failed"),
            "Objects shed": total("stores_shed"),
            "Daemon losses": total("daemon_losses"),
            "Faults": total("faults"),
        }
        return line | {name: count for name, count in troubles.items() if count}


class HybridKVPromMetrics(EngineMetrics):
    """Exports FAMILIES at the API server's /metrics. No payload makes it raise."""

    def __init__(self, *vllm_arguments: Any) -> None:
        super().__init__(PREFIX, FAMILIES, *vllm_arguments)
        # Cells that are known ahead begin at 0, so that rates see their first increase.
        unlabelled = (Cell(name) for name, family in FAMILIES.items() if not family.labels)
        for cell in (*EXACT.values(), *unlabelled, cell_of(MALFORMED)):
            for engine in self.per_engine_labelvalues:
                self.cell(engine, cell.family, cell.labels)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add one engine's payload. Parts that cannot be read are left out and counted."""
        if engine_idx not in self.per_engine_labelvalues:
            engine_idx = next(iter(self.per_engine_labelvalues))
            transfer_stats_data = {"counters": {MALFORMED: 1}}
        work = partial(self._take, transfer_stats_data, engine_idx)
        attempt("HybridKVConnector", "observe", work, partial(self._count, engine_idx, MALFORMED))

    def _count(self, engine: int, name: str, added: float = 1) -> None:
        """Add to the cell of an engine's counter."""
        cell = cell_of(name)
        self.cell(engine, cell.family, cell.labels).inc(added)

    def _take(self, payload: object, engine: int) -> None:
        data = _readable(payload)
        for name, added in data["counters"].items():
            self._count(engine, name, added)
        for part, kind in (("gauges", "gauge"), ("observed", "histogram")):
            for name, values in data[part].items():
                if name not in FAMILIES or FAMILIES[name].kind != kind:
                    self._count(engine, MALFORMED)
                elif kind == "gauge":
                    self.cell(engine, name).set(values)
                else:
                    observe: Callable[[float], None] = self.cell(engine, name).observe
                    for value in values:
                        observe(value)


def _readable(payload: object) -> dict[str, Any]:
    """Return the readable part of a payload. The rest is counted in it: MALFORMED and DROPPED.

    `{"counters": {"loads": 1, "losses": -1}} ->
    {"counters": {"loads": 1, "stats_malformed": 1}, "gauges": {}, "observed": {}}`
    """
    data: Mapping[Any, Any] = payload if isinstance(payload, Mapping) else {}
    # A counter that went down must not take the exported one with it.
    counters, bad_counters = _items(data.get("counters"), lambda n: _is_number(n) and n >= 0)
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
    for name, count in ((MALFORMED, malformed), (DROPPED, dropped)):
        if count:
            counters[name] = counters.get(name, 0) + count
    return {"counters": counters, "gauges": gauges, "observed": observed}


def _items(part: object, is_good: Callable[[Any], bool]) -> tuple[dict[str, Any], int]:
    """Return at most NAMES_MAX good items of a payload's part, and the number of all others."""
    if not isinstance(part, Mapping):
        return {}, int(part is not None)
    good = {
        name: value
        for name, value in part.items()
        if isinstance(name, str) and 0 < len(name) <= 256 and is_good(value)
    }
    good = dict(islice(good.items(), NAMES_MAX))
    return good, len(part) - len(good)


def _is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) < NUMBER_MAX
