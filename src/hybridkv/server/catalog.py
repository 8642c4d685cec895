"""What each of the daemon's metrics means. docs/METRICS-daemon.md is made from this table.

`Daemon.values` names plain counters and gauges; where a name has a message, a reason or a tier in it, /metrics has one
metric with a label instead.  Names and units follow Prometheus' conventions as far as names that exist allow.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

PREFIX = "hybridkv_daemon_"


class Kind(StrEnum):
    """Of a metric, as Prometheus names them."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Described:
    """One metric."""

    kind: Kind
    help: str
    """With the unit."""
    labels: tuple[str, ...] = ()


def _counter(text: str, *labels: str) -> Described:
    return Described(Kind.COUNTER, text, labels)


def _gauge(text: str, *labels: str) -> Described:
    return Described(Kind.GAUGE, text, labels)


PLAIN: Mapping[str, Described] = {
    "lookups": _counter("Lookups that were answered or began to wait."),
    "lookups_hit": _counter("Lookups whose answer was a hit of at least one chunk."),
    "lookups_waited": _counter("Lookups that waited for tiers below RAM and were answered."),
    "chunks_asked": _counter("Chunks that lookups asked for."),
    "chunks_hit": _counter("Chunks of all hits."),
    "tokens_asked": _counter("Tokens of the chunks that lookups asked for."),
    "tokens_hit": _counter("Tokens of all hits, also those that the engine then had in its own cache."),
    "tokens_loaded": _counter("Tokens that engines loaded."),
    "bytes_loaded": _counter("Bytes that engines loaded from RAM, all ranks together."),
    "loads_failed": _counter("Loads that failed in the engine; it computed instead."),
    "tokens_stored": _counter("Tokens whose objects engines stored."),
    "objects_stored": _counter("Objects that engines stored and that were new."),
    "bytes_stored": _counter("Bytes of the payload of those objects."),
    "objects_recovered": _counter("Objects taken over from the arena of an earlier daemon, at the start."),
    "objects_condemned": _counter("Objects whose bytes an engine proved wrong; they were dropped."),
    "commits_unknown": _counter("Committed slots that the session did not hold; nothing came of them."),
    "duplicates": _counter("Stored objects that were there already; their slot was freed."),
    "evicted": _counter("Objects that went for room."),
    "over_quota": _counter("Objects that were not kept, or made others go, for the quota of their cache_salt."),
    "slots_granted": _counter("Write slots given to engines."),
    "slots_short": _counter(
        "Write slots that engines wanted and that there was no room for; what they then shed has no name here."
    ),
    "removals_overflowed": _counter("Times that an engine was told to forget all, because too much had gone at once."),
    "spans_dropped": _counter("Spans that were not exported because too many waited; see `serve --traces`."),
    "sessions_ended": _counter("Sessions whose engine is gone."),
    "deadlines_missed": _counter(
        "Lookups answered at their deadline, before all that was read or looked for had come."
    ),
    "ceiling_lookups": _counter("Lookups that the three sums of tokens below are made of."),
    "ceiling_lookups_left_out": _counter("Lookups in none of the three sums, because too many waited to be counted."),
    "ceiling_asked_tokens": _counter("Tokens asked for, over the lookups counted for the ceiling."),
    "ceiling_hit_tokens": _counter("Tokens hit, over the same lookups."),
    "ceiling_tokens": _counter("Tokens that a cache of unlimited size would have hit, over the same lookups."),
    "ceiling_chunks": _gauge("Chunks whose names are remembered for the ceiling."),
    "ceiling_chunks_max": _gauge(
        "The most chunks that are remembered; beyond, the ceiling is that of a cache of so many."
    ),
    "ceiling_chunks_forgotten": _counter("Chunks forgotten, so that the ceiling may be too low."),
    "objects": _gauge("Objects in RAM, also those that wait for their last reader."),
    "bytes_committed": _gauge("Bytes of the arena that objects take."),
    "bytes_writing": _gauge("Bytes of the arena in slots that are being written."),
    "bytes_held": _gauge("Bytes of the arena in slots that an engine of an earlier daemon may still write."),
    "bytes_protected": _gauge("Bytes of objects that a scan does not evict."),
    "bytes_reserved": _gauge("Bytes of the arena whose pages exist."),
    "bytes_arena": _gauge("Bytes of the arena: the bound of the RAM tier."),
    "tenants": _gauge("cache_salts that have objects, where they have quotas."),
    "sessions": _gauge("Sessions of engines, also those whose processes may still copy."),
    "watching": _gauge("Engines that are told of what goes, for their KV events."),
    "leases": _gauge("Read leases."),
    "connections": _gauge("Connections to the socket."),
    "lookups_waiting": _gauge("Lookups that wait for tiers."),
    "writes_waiting": _gauge("Objects that wait to be written to tiers, or are being written."),
}
"""By the names of Daemon.values."""

PARTS: Mapping[str, tuple[str, Described]] = {
    "requests_": ("requests", _counter("Messages of clients.", "message")),
    "refused_": ("refused", _counter("Messages and connections that were refused.", "code")),
    "promotions_": (
        "promotions_cut",
        _counter("Lookups that tiers gave less than they had, or nothing.", "reason"),
    ),
    "chunks_hit_": ("tier_chunks_hit", _counter("Chunks of hits that came up from a tier.", "tier")),
}
"""By what the names begin with whose rest is a label: the metric."""

TIER: Mapping[str, Described] = {
    "bytes": _gauge("Bytes that the tier holds.", "tier"),
    "bytes_max": _gauge("The tier's bound in bytes.", "tier"),
    "objects": _gauge("Objects that the tier holds.", "tier"),
    "objects_of_others": _gauge("Objects of other daemons in the same directory.", "tier"),
    "discards_waiting": _gauge("Objects that wait to be removed.", "tier"),
    "client_starts": _counter("Processes started to speak to the store.", "tier"),
    "jobs_running": _gauge("Jobs of the tier's threads.", "tier"),
    "jobs_late": _counter("Jobs that took longer than the tier's timeout.", "tier"),
    "is_open": _gauge("1 while the tier can be used at all.", "tier"),
    "breaker_open": _gauge("1 while the tier fails or hangs and is asked only now and then.", "tier"),
    "bytes_per_second": _gauge("Bytes per second that lookups last saw from the tier; 0 = not known.", "tier"),
    "written_bytes_per_second": _gauge("Bytes per second of the last writes, of one job; 0 = not known.", "tier"),
    "bytes_read": _counter("Bytes read from the tier.", "tier"),
    "bytes_written": _counter("Bytes written to the tier.", "tier"),
    "objects_read": _counter("Objects read from the tier.", "tier"),
    "objects_written": _counter("Objects written to the tier.", "tier"),
    "objects_missing": _counter("Objects that were to be read and were not there any more.", "tier"),
    "objects_damaged": _counter("Objects that were read and proven damaged; they are removed.", "tier"),
    "objects_wrong_in_ram": _counter("Objects not written because their bytes in RAM were proven wrong.", "tier"),
    "objects_refused": _counter("Objects that the tier had no room for.", "tier"),
    "objects_shed": _counter("Objects not written because too many waited.", "tier"),
    "objects_not_admitted": _counter("Objects not written for the hourly bound.", "tier"),
    "failures": _counter("Calls and objects that failed.", "tier"),
}
"""By the names of Line.values; the metric is `tier_` and the name."""

MADE: Mapping[str, Described] = {
    "answering": _gauge(
        "1 if the daemon's loop answered this scrape; 0: it did not in time, and nothing else is told."
    ),
    "info": _gauge("Always 1; which release runs.", "version"),
    "uptime_seconds": _gauge("Seconds since the daemon serves."),
    "lookup_wait_seconds": Described(Kind.HISTOGRAM, "Seconds that lookups waited for tiers until they were answered."),
    "group_objects": _gauge(
        "Objects in RAM of one group of one identity; beyond 64 of them all others are one, without names.",
        "identity",
        "model",
        "gid",
        "kind",
    ),
    "group_bytes": _gauge("Bytes in RAM of the same.", "identity", "model", "gid", "kind"),
    "session_leases": _gauge("Read leases of an engine, over the first 256 sessions.", "engine", "model", "identity"),
    "session_writing_bytes": _gauge("Bytes in slots that an engine is writing.", "engine", "model", "identity"),
    "session_connected": _gauge(
        "Connected schedulers of an engine; 0: only its workers are left.", "engine", "model", "identity"
    ),
}
"""That /metrics adds."""

NOT_ALONE = frozenset(("lookup_wait_seconds",))
"""Values that a metric of another form has."""


def known() -> dict[str, Described]:
    """Every metric by its whole name without the `_total` of counters."""
    return {
        **{f"{PREFIX}{name}": described for name, described in PLAIN.items()},
        **{f"{PREFIX}{name}": described for name, described in PARTS.values()},
        **{f"{PREFIX}tier_{name}": described for name, described in TIER.items()},
        **{f"{PREFIX}{name}": described for name, described in MADE.items()},
    }


def exposed() -> dict[str, Described]:
    """Every name that a query may have."""
    names: dict[str, Described] = {}
    for name, described in known().items():
        match described.kind:
            case Kind.COUNTER:
                names[f"{name}_total"] = described
            case Kind.GAUGE:
                names[name] = described
            case Kind.HISTOGRAM:
                names.update((f"{name}_{part}", described) for part in ("bucket", "sum", "count"))
    return names
