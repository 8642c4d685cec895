"""The metrics of the connector, and all that it counts, as values. docs/METRICS.md: what to watch.

A counter is a Metric: its family here and the values of the family's labels. The keys of all
counters are made here, apart from those of `vllm.hook_guard`. A closed set of labels is an enum.
"""

from collections.abc import Mapping
from enum import StrEnum
from functools import partial

from hybridkv.core.audit import AuditOutcome
from hybridkv.core.metrics import Metric, MetricFamily, counter, gauge, histogram
from hybridkv.vllm.hook_guard import event
from hybridkv.wire.messages import Decline

PREFIX = "vllm:hybridkv_"
SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
"""Buckets of histograms."""
_seconds = partial(histogram, buckets=SECONDS)

FAMILIES: Mapping[str, MetricFamily] = {
    "lookups": counter(
        "Requests looked up, by result (hit, miss, declined) and reason. "
        "A hit that is then not taken counts twice: as a hit, and as declined.",
        labels=("result", "reason"),
    ),
    "lookup_wait_seconds": _seconds(
        "From a lookup's question to its answer, or to its deadline, in seconds."
    ),
    "hits_limited": counter(
        "Lookups that a group made shorter, which lacked what others have, by group.",
        labels=("group",),
    ),
    "loads": counter("Loads that ended, by result (loaded, failed).", labels=("result",)),
    "load_seconds": _seconds(
        "From a request's blocks to the end of its load, in seconds, as the scheduler sees it."
    ),
    "loaded_tokens": counter("Prompt tokens loaded instead of computed."),
    "loaded_tokens_by_tier": counter(
        "The same tokens by the tier that had them when they were looked up.", labels=("tier",)
    ),
    "load_bytes": counter("Bytes of KV cache loaded, of all ranks together."),
    "load_copy_seconds": counter(
        "Seconds from the start of each load in a worker to its end, summed."
    ),
    "store_bytes": counter("Bytes of KV cache stored, of all ranks together."),
    "store_copy_seconds": counter("Seconds that workers spent copying out within steps, summed."),
    "device_copy_bytes": counter(
        "Bytes copied between a device and slots, by way (store, load).", labels=("way",)
    ),
    "device_copy_seconds": counter(
        "Seconds in which a worker had copies of that way on its device, summed.", labels=("way",)
    ),
    "stores_shed": counter(
        "Objects that were not stored, or not yet, by reason.", labels=("reason",)
    ),
    "hints": counter(
        "Requests that asked something of the cache, by hint (no_read, no_write, retain, release, "
        "demote, low_priority, prefetch).",
        labels=("hint",),
    ),
    "faults": counter(
        "Errors inside the connector that were kept from the engine, by hook.", labels=("hook",)
    ),
    "daemon_refusals": counter(
        "Requests that the daemon refused, by its error code.", labels=("code",)
    ),
    "condemned_slots": counter("Slots whose bytes were proven wrong before they could be used."),
    "kv_event_chunks": counter(
        "Chunks that KV events told routers of, by event (stored, removed), or cannot tell of: in "
        "tiers (not_kept), or at all, since as many are known as there is room for (not_shown).",
        labels=("event",),
    ),
    "audits": counter(
        "Live audits, by outcome: the engine computed what is stored (passed), something else "
        "(differed), or nothing could be compared (unmade).",
        labels=("outcome",),
    ),
    "events": counter("Whatever else was counted, by event.", labels=("event",)),
    "quarantined": gauge("How many roles (the scheduler's and each worker's) are switched off."),
    "quarantined_since": gauge(
        "When the scheduler role was switched off, in Unix time; 0 = it is on."
    ),
    "quarantined_until": gauge("When it begins anew, in Unix time; 0 = it is on."),
    "breaker_open": gauge("1 while the daemon is left alone because it did not answer in time."),
    "daemon_connected": gauge("1 while there is a connection to the daemon."),
    "weights_unread": gauge(
        "Modules of all ranks whose weights cannot be read in memory, so that the engine shares "
        "with no other and with no later one."
    ),
    "loads_pending": gauge("Requests that have blocks for a load and did not run since."),
    "loads_overdue": gauge(
        "Loads that had not ended 10 s after their request had blocks. It waits for them."
    ),
}
"""The metrics. PREFIX stands before their names."""


LOOKUPS_ASKED = event("lookups_asked")
LOOKUPS_PROMOTED = event("lookups_promoted")
LOOKUPS_HIT = Metric("lookups", ("hit", "found"))
LOOKUPS_MISSED = Metric("lookups", ("miss", "not_found"))
LOOKUPS_OUTRUN = Metric("lookups", ("declined", "outrun"))
LOADS_DONE = Metric("loads", ("loaded",))
LOADS_FAILED = Metric("loads", ("failed",))
TAILS_LOADED = event("tails_loaded")
TAILS_STORED = event("tails_stored")
JUNCTIONS_FOUND = event("junctions_found")
JUNCTIONS_STORED = event("junctions_stored")
TOKENS_LOADED = Metric("loaded_tokens")
BYTES_LOADED = Metric("load_bytes")
LOAD_SECONDS = Metric("load_copy_seconds")
OBJECTS_STORED = event("objects_stored")
BYTES_STORED = Metric("store_bytes")
STORE_SECONDS = Metric("store_copy_seconds")
DEVICE_STORE_BYTES = Metric("device_copy_bytes", ("store",))
DEVICE_LOAD_BYTES = Metric("device_copy_bytes", ("load",))
DEVICE_STORE_SECONDS = Metric("device_copy_seconds", ("store",))
DEVICE_LOAD_SECONDS = Metric("device_copy_seconds", ("load",))
HINTS_MISTAKEN = event("hints_mistaken")
HINTS_SHORTENED = event("hints_shortened")
DAEMON_CONNECTS = event("daemon_connects")
DAEMON_LOSSES = event("daemon_losses")
SLOTS_CONDEMNED = Metric("condemned_slots")
WEIGHTS_STALE = event("weights_stale")
CHUNKS_ANNOUNCED = Metric("kv_event_chunks", ("stored",))
CHUNKS_WITHDRAWN = Metric("kv_event_chunks", ("removed",))
CHUNKS_NOT_KEPT = Metric("kv_event_chunks", ("not_kept",))
CHUNKS_NOT_SHOWN = Metric("kv_event_chunks", ("not_shown",))

ATTACH_FAILED = event("attach_failed")
COPIES_UNPINNED = event("copies_unpinned")
LOADS_OTHER_ADAPTER = event("loads_other_adapter")
LOADS_OTHER_WEIGHTS = event("loads_other_weights")
PLAN_FAILED = event("plan_failed")
RANK_LOADS_FAILED = event("rank_loads_failed")
REMOVALS_OVERFLOWED = event("removals_overflowed")
STATS_MALFORMED = event("stats_malformed")
WORKERS_DISABLED = event("workers_disabled")


class Shed(StrEnum):
    """The reason why an object is not stored, or not yet."""

    UNATTACHED = "unattached"
    UNMAPPED = "unmapped"
    OTHER_WEIGHTS = "other_weights"
    HOLE = "hole"
    NO_SLOT = "no_slot"
    NO_STAGING = "no_staging"
    STAGING_FULL = "staging_full"
    TOO_LARGE = "too_large"
    UNPROVEN = "unproven"
    UNWANTED = "unwanted"
    BEYOND_LOOKUP = "beyond_lookup"
    STATE_UNALIGNED = "state_unaligned"
    STATE_FREED = "state_freed"
    NOT_EQUAL = "not_equal"
    DEVICE_FAILED = "device_failed"
    FAILED = "failed"


def stores_shed(reason: Shed) -> Metric:
    """Return the counter of the objects that were not stored for this reason."""
    return Metric("stores_shed", (reason.value,))


def hinted(hint: str) -> Metric:
    """Return the counter of the requests with this hint (`core.hints.Hints.asked_names`)."""
    return Metric("hints", (hint,))


def declined(reason: Decline) -> Metric:
    """Return the counter of the requests for which nothing was loaded for this reason.

    Loads that failed, or could not be planned, are no lookups that were declined.
    """
    if reason is Decline.LOAD_FAILED:
        return LOADS_FAILED
    if reason is Decline.PLAN_FAILED:
        return PLAN_FAILED
    return Metric("lookups", ("declined", reason.name.lower()))


def audited(outcome: AuditOutcome) -> Metric:
    """Return the counter of the live audits with this outcome."""
    return Metric("audits", (outcome.value,))


def hits_limited(group: str) -> Metric:
    """Return the counter of the lookups that a group made shorter. `group` is its gid and kind."""
    return Metric("hits_limited", (group,))


def loaded_from(tier: str) -> Metric:
    """Return the counter of the tokens that were loaded from a tier."""
    return Metric("loaded_tokens_by_tier", (tier,))


def daemon_refused(code: str) -> Metric:
    """Return the counter of the requests that the daemon refused with this error code."""
    return Metric("daemon_refusals", (code,))


def daemon_unsent(message: str) -> Metric:
    """Return the counter of the messages of one type that found no connection."""
    return event(f"daemon_unsent_{message}")


def transition_ignored(state: StrEnum, ignored: StrEnum) -> Metric:
    """Return the counter of the events that a request's state does not allow."""
    return event(f"transition_ignored_{state}_{ignored}")


ZERO_INITIALIZED: tuple[Metric, ...] = (
    LOOKUPS_HIT,
    LOOKUPS_MISSED,
    LOADS_DONE,
    LOADS_FAILED,
    DEVICE_STORE_BYTES,
    DEVICE_LOAD_BYTES,
    DEVICE_STORE_SECONDS,
    DEVICE_LOAD_SECONDS,
    stores_shed(Shed.STATE_UNALIGNED),
    stores_shed(Shed.STATE_FREED),
    CHUNKS_ANNOUNCED,
    CHUNKS_WITHDRAWN,
    CHUNKS_NOT_KEPT,
    CHUNKS_NOT_SHOWN,
    DAEMON_LOSSES,
    WEIGHTS_STALE,
    STATS_MALFORMED,
    *(Metric(name) for name, family in FAMILIES.items() if not family.labels),
)
"""The metrics that are exported before they have a value, so that rates see their first one."""
