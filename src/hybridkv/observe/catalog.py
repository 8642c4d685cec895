"""The meaning of each of the daemon's metrics. These are the HELP lines of /metrics.

A value is a number of one metric, and of one value of the metric's label where it has one. Names
and units follow Prometheus' conventions, except for names that are older than this table.
"""

from collections.abc import Mapping
from dataclasses import replace

from hybridkv.core.metrics import MetricFamily, counter, gauge

PREFIX = "hybridkv_daemon_"


class Values(dict[tuple[str, str], float]):
    """Numbers by (metric, label). The metric is named without PREFIX, and "" is no label."""

    def of(self, metric: str, label: str = "") -> float:
        """Returns the number, 0 where there is none."""
        return self.get((metric, label), 0.0)

    def named(self) -> dict[str, float]:
        """Returns every number by one name: ("tier_bytes", "disk") -> "tier_disk_bytes"."""
        return {_name_of(metric, label): value for (metric, label), value in self.items()}


PLAIN: Mapping[str, MetricFamily] = {
    "lookups": counter("Lookups that were answered or began to wait."),
    "lookups_hit": counter("Lookups whose answer was a hit, and whose engine used it or had it."),
    "lookups_unused": counter(
        "Lookups whose prompts were computed because the answer was late or could not be loaded."
    ),
    "tails_hit": counter("Hits that ended inside a chunk (`sub_block_hits`)."),
    "lookups_waited": counter("Lookups that waited for tiers below RAM and were answered."),
    "chunks_asked": counter("Chunks of the lookups that ended, also of those without an answer."),
    "chunks_hit": counter("Chunks of all hits."),
    "tokens_asked": counter("Tokens of the same chunks."),
    "tokens_hit": counter("Tokens of all hits, also those in the engine's own cache by then."),
    "tokens_loaded": counter("Tokens that engines loaded."),
    "computing_seconds_spared": counter(
        "Seconds that computing those tokens would have taken, at each engine's measured speed."
    ),
    "loading_seconds": counter("Seconds from the lookups of the same loads to their ends."),
    "bytes_loaded": counter("Bytes that engines loaded from RAM, all ranks together."),
    "loads_failed": counter("Loads that failed in the engine; it computed instead."),
    "tokens_stored": counter(
        "Tokens that engines stored: those of a model's first group, full attention if it has any."
    ),
    "objects_stored": counter("Objects that engines stored and that were new."),
    "bytes_stored": counter("Bytes of the payload of those objects."),
    "objects_recovered": counter("Objects taken over from an earlier daemon's arena."),
    "recoveries_failed": counter("Arenas of an earlier daemon that could not be taken over."),
    "reserves_failed": counter("Times that the arena could not grow for want of shared memory."),
    "objects_condemned": counter("Objects whose bytes an engine proved wrong; they were dropped."),
    "commits_unknown": counter("Committed slots that the session did not hold; they are ignored."),
    "duplicates": counter("Stored objects that were there already; their slot was freed."),
    "mappings_failed": counter("Times that a worker could not map the arena; it tries again."),
    "engines_gone_stale": counter("Times that an engine had blocks of other weights in its cache."),
    "audits_passed": counter("Live audits in which engines computed what was stored."),
    "audits_differed": counter(
        "Live audits in which an engine computed something else; it uses that identity no more."
    ),
    "audits_unmade": counter("Live audits in which nothing could be compared."),
    "evicted": counter("Objects that were evicted for room."),
    "over_quota": counter("Objects not kept, or evicted, for a quota of a cache_salt or user."),
    "slots_granted": counter("Write slots given to engines."),
    "slots_short": counter("Write slots that engines asked for and did not get."),
    "removals_overflowed": counter("Times that an engine was told that any object may be gone."),
    "below_untold": counter("Objects of a tier that an engine's KV events leave out: too many."),
    "spans_dropped": counter("Spans that were dropped because too many waited for export."),
    "sessions_ended": counter("Sessions whose engine is gone."),
    "deadlines_missed": counter("Lookups answered at their deadline, before all had come."),
    "ceiling_lookups": counter("Lookups that are counted in the three sums of tokens below."),
    "ceiling_lookups_left_out": counter("Lookups in none of the sums, for want of time to count."),
    "ceiling_asked_tokens": counter("Tokens asked for, over the lookups counted for the ceiling."),
    "ceiling_hit_tokens": counter("Tokens hit, over the same lookups."),
    "ceiling_tokens": counter("Tokens that a cache of unlimited size would have hit of them."),
    "ceiling_chunks": gauge("Chunks whose hashes are remembered for the ceiling."),
    "ceiling_chunks_max": gauge("The most chunks that are remembered; see below."),
    "ceiling_chunks_forgotten": counter("Chunks forgotten, so that the ceiling may be too low."),
    "objects": gauge("Objects in RAM, also those that are dropped when their last lease ends."),
    "bytes_committed": gauge("Bytes of the arena that objects take."),
    "bytes_writing": gauge("Bytes of the arena in write slots, which engines hold ahead of need."),
    "bytes_held": gauge("Bytes of slots that an engine of an earlier daemon may still write."),
    "bytes_protected": gauge("Bytes of objects that a scan does not evict."),
    "bytes_reserved": gauge("Bytes of the arena whose pages exist."),
    "bytes_arena": gauge("Bytes of the arena: the bound of the RAM tier."),
    "tenants": gauge("cache_salts, or users, that have objects, where they have quotas."),
    "sessions": gauge("Sessions of engines, also those whose processes may still copy."),
    "watching": gauge("Engines that are told which objects go, for their KV events."),
    "leases": gauge("Read leases."),
    "connections": gauge("Connections to the socket."),
    "workers_unmapped": gauge(
        "Workers that cannot map the arena, or cannot copy: nothing is loaded or stored."
    ),
    "engines_stale": gauge(
        "Engines with blocks of other weights in their own prefix cache: nothing is loaded or "
        "stored until it is reset while no request runs."
    ),
    "engines_unread": gauge(
        "Engines whose weights cannot be read in memory: they share with no other engine and with "
        "no later one."
    ),
    "lookups_waiting": gauge("Lookups that wait for tiers."),
    "writes_waiting": gauge("Objects that wait to be written to tiers, or are being written."),
}
"""Metrics without a label."""

LABELLED: Mapping[str, MetricFamily] = {
    "requests": counter("Messages of clients.", "message"),
    "refused": counter("Messages and connections that were refused.", "code"),
    "promotions_cut": counter("Lookups that tiers gave less than they had, or nothing.", "reason"),
    "tier_chunks_hit": counter("Chunks of hits that came up from a tier.", "tier"),
}
_NAME_STARTS = {"promotions_cut": "promotions", "tier_chunks_hit": "chunks_hit"}
"""How the names of single values begin, for metrics with which they do not begin."""

TIER_PREFIX = "tier_"
_TIER = {
    "bytes": gauge("Bytes that the tier holds."),
    "bytes_max": gauge("The tier's bound in bytes."),
    "objects": gauge("Objects that the tier holds."),
    "objects_of_others": gauge("Objects of other daemons in the same directory."),
    "index_bytes": gauge(
        "Bytes that the index of a directory's files takes of the daemon's memory."
    ),
    "files_failed": counter("Files that could not be looked at, moved or removed, and were left."),
    "discards_waiting": gauge("Objects that wait to be removed."),
    "discards_forgotten": counter("Objects that were to be removed and may come back."),
    "client_starts": counter("Processes that were started to speak to the store."),
    "finds_cut": counter("Times that a tier was asked what it has, and answered in part."),
    "jobs_running": gauge("Jobs of the tier's threads."),
    "jobs_late": counter("Jobs that took longer than the tier's timeout."),
    "is_open": gauge("1 while the tier can be used at all."),
    "breaker_open": gauge("1 while the tier fails or hangs, and is asked only now and then."),
    "refusing": gauge("1 while the tier has refused objects for longer than a minute."),
    "times_reopened": counter("Times that it failed on and on, and was closed and opened anew."),
    "bytes_per_second": gauge("Bytes per second that lookups last saw; 0 = not known."),
    "written_bytes_per_second": gauge("Bytes per second of the last job's write; 0 = not known."),
    "bytes_read": counter("Bytes read from the tier."),
    "bytes_written": counter("Bytes written to the tier."),
    "bytes_before_encoding": counter("With a codec or a key: bytes to write, before encoding."),
    "bytes_after_encoding": counter("These bytes after encoding; the quotient is the ratio."),
    "objects_read": counter("Objects read from the tier."),
    "objects_written": counter("Objects written to the tier."),
    "objects_missing": counter("Objects that were to be read and were not there any more."),
    "objects_damaged": counter("Objects that were read and proven damaged; they are removed."),
    "objects_undecodable": counter("Objects that need a library or a key that the daemon lacks."),
    "objects_wrong_in_ram": counter("Objects not written because RAM had wrong bytes."),
    "objects_refused": counter("Objects that the tier had no room for, and could make none."),
    "objects_shed": counter("Objects not written because too many waited, or that went before."),
    "objects_given_up": counter("Objects not written because that failed again and again."),
    "bytes_left_out": counter("Bytes of windows inside prompts, written only after a hit."),
    "damage_left": counter("Damaged objects that stay until they are read again: too many waited."),
    "objects_not_admitted": counter("Objects not written for the hourly bound."),
    "failures": counter("Calls and objects that failed."),
}
TIER: Mapping[str, MetricFamily] = {
    name: replace(family, labels=("tier",)) for name, family in _TIER.items()
}
"""By the names of TierState.values. The metric's name begins with TIER_PREFIX."""

_GROUP_LABELS = ("identity", "model_name", "gid", "kind")
_ENGINE_LABELS = ("engine", "model_name", "identity")
SNAPSHOT_METRICS: Mapping[str, MetricFamily] = {
    "answering": gauge("1 if the daemon's loop answered this scrape, else 0."),
    "info": gauge("Always 1; which release runs.", "version"),
    "uptime_seconds": gauge("Seconds since the daemon serves."),
    "pages_failed": counter("Pages that failed and were answered with status 500."),
    "lookup_wait_seconds": MetricFamily(
        "histogram", "Seconds that answered lookups had waited for tiers."
    ),
    "group_objects": gauge(
        "Objects in RAM of a group; the 65th row has all others.", *_GROUP_LABELS
    ),
    "group_bytes": gauge("Bytes in RAM of the same.", *_GROUP_LABELS),
    "session_leases": gauge(
        "Read leases of an engine, of the first 256 sessions.", *_ENGINE_LABELS
    ),
    "session_writing_bytes": gauge(
        "Bytes of the write slots that an engine holds, ahead of need or written.", *_ENGINE_LABELS
    ),
    "session_connected": gauge(
        "Connected schedulers of an engine; 0: only workers.", *_ENGINE_LABELS
    ),
}
"""Metrics that /metrics makes of other parts of a snapshot than its values."""

VALUES = {**PLAIN, **LABELLED} | {TIER_PREFIX + name: family for name, family in TIER.items()}
"""Metrics whose numbers are in Values."""

HISTOGRAM_SUMS = frozenset(("lookup_wait_seconds",))  # Values that are the sum of a histogram.


def _name_of(metric: str, label: str) -> str:
    """The name of a single value, as `hybridkv stats` prints it."""
    if not label:
        return metric
    if metric in LABELLED:
        return f"{_NAME_STARTS.get(metric, metric)}_{label}"
    return f"{TIER_PREFIX}{label}_{metric.removeprefix(TIER_PREFIX)}"
