"""The metrics of the daemon, but for those of its store, its tiers and the ceiling.

Those that are not read are counted by name in `DaemonState.counters`. Names and units follow
Prometheus' conventions, except for names that are older than this table.
"""

from collections.abc import Callable, Mapping

from hybridkv.core.metrics import MetricFamily, counter, debug, gauge, histogram, sampled
from hybridkv.daemon.sessions import ClientConnection
from hybridkv.daemon.state import DaemonState


def _clients(is_counted: Callable[[ClientConnection], bool]) -> Callable[[DaemonState], int]:
    return lambda daemon: sum(map(is_counted, daemon.sessions.connections.values()))


_LOOKUPS: Mapping[str, MetricFamily] = {
    **sampled(
        lookups=counter("Lookups that were answered or began to wait."),
        lookups_unused=counter(
            "Lookups whose prompts were computed because the answer was late or could not be "
            "loaded."
        ),
        lookups_waited=counter(
            "Lookups that waited for tiers below RAM or for other engines, and were answered.",
            lambda daemon: daemon.waits.durations,
        ),
        lookup_wait_seconds=histogram(
            "Seconds that answered lookups had waited.", lambda daemon: daemon.waits.total
        ),
        promises_kept=counter(
            "Waits for what another engine computed, after which RAM had more of the prompt.",
            lambda daemon: daemon.promises.kept,
        ),
        promises_broken=counter(
            "Such waits that brought nothing: the engine ended, was too slow, or stored nothing.",
            lambda daemon: daemon.promises.broken,
        ),
        node_waits_kept=counter(
            "Waits for what another node computed, after which RAM had more of the prompt.",
            lambda daemon: daemon.promotion.node_waits.kept,
        ),
        node_waits_broken=counter(
            "Such waits that brought nothing in time.",
            lambda daemon: daemon.promotion.node_waits.broken,
        ),
        room_waits_kept=counter(
            "Waits of lookups for room in RAM that ended with room for the whole hit.",
            lambda daemon: daemon.promotion.room_waits.kept,
        ),
        room_waits_broken=counter(
            "Such waits that ended with a shorter hit.",
            lambda daemon: daemon.promotion.room_waits.broken,
        ),
        tokens_asked=counter("Tokens of the chunks asked for."),
        tokens_hit=counter("Tokens of all hits, also those in the engine's own cache by then."),
        tokens_loaded=counter("Tokens that engines loaded."),
        computing_seconds_spared=counter(
            "Seconds that computing those tokens would have taken, at each engine's measured "
            "speed.",
            lambda daemon: daemon.computing_seconds_spared,
        ),
        loading_seconds=counter(
            "Seconds from the lookups of the same loads to their ends.",
            lambda daemon: daemon.loading_seconds,
        ),
        bytes_loaded=counter("Bytes that engines loaded from RAM, all ranks together."),
        loads_failed=counter("Loads that failed in the engine; it computed instead."),
    ),
    "node_questions": counter(
        "Times that tiers were asked again for what another node may compute.",
        lambda daemon: daemon.promotion.node_waits.questions,
    ),
    "lookups_hit": counter("Lookups whose answer was a hit, and whose engine used it or had it."),
    "chunks_asked": counter("Chunks of the lookups that ended, also of those without an answer."),
    "chunks_hit": counter("Chunks of all hits."),
    "tier_chunks_hit": counter(
        "Chunks of hits that came up from a tier.",
        lambda daemon: daemon.tier_chunks_hit,
        labels=("tier",),
        single_name="chunks_hit",
    ),
    "audits_passed": counter("Live audits in which engines computed what was stored."),
    "audits_differed": counter(
        "Live audits in which an engine computed something else; it uses that identity no more."
    ),
    "audits_unmade": counter("Live audits in which nothing could be compared."),
}
_STORES: Mapping[str, MetricFamily] = {
    **sampled(
        bytes_stored=counter("Bytes of the payload of objects that engines stored."),
        reserves_failed=counter("Times that the arena could not grow for want of shared memory."),
        slots_short=counter("Write slots that engines asked for and did not get."),
    ),
    "objects_recovered": counter("Objects taken over from an earlier daemon's arena."),
    "objects_stored": counter("Objects that engines stored and that were new."),
    "objects_condemned": counter("Objects whose bytes an engine proved wrong; they were dropped."),
    **debug(
        tokens_stored=counter("Tokens that engines stored: those of a model's first group."),
        recoveries_failed=counter("Arenas of an earlier daemon that could not be taken over."),
        commits_unknown=counter("Committed slots that the session did not hold; they are ignored."),
        slots_granted=counter("Write slots given to engines."),
        objects_forgotten=counter(
            "Objects that `hybridkv forget` dropped from RAM.",
            lambda daemon: daemon.forgetting.objects,
        ),
        bytes_held=gauge(
            "Bytes of slots that an engine of an earlier daemon may still write.",
            lambda daemon: sum(
                slot.size_bytes for slots in daemon.sessions.held.values() for slot in slots
            ),
        ),
    ),
}
_CLIENTS: Mapping[str, MetricFamily] = {
    **sampled(
        sessions=gauge(
            "Sessions of engines, also those whose processes may still copy.",
            lambda daemon: len(daemon.sessions.all),
        )
    ),
    "leases": gauge(
        "Read leases.", lambda daemon: sum(len(session.leases) for session in daemon.sessions.all)
    ),
    "refused": counter(
        "Messages and connections that were refused.",
        lambda daemon: daemon.refused,
        labels=("code",),
    ),
    "workers_unmapped": gauge(
        "Workers that cannot map the arena, or cannot copy: nothing is loaded or stored.",
        _clients(lambda client: client.is_unmapped),
    ),
    "engines_stale": gauge(
        "Engines with blocks of other weights in their own prefix cache: nothing is loaded or "
        "stored until it is reset while no request runs.",
        _clients(lambda client: client.is_stale),
    ),
    "engines_unread": gauge(
        "Engines whose weights cannot be read in memory: they share with no other engine and with "
        "no later one.",
        _clients(lambda client: client.unread_modules > 0),
    ),
    "removals_overflowed": counter(
        "Times that an engine was told that any object may be gone.",
        lambda daemon: daemon.subscriptions.overflows,
    ),
    "below_untold": counter(
        "Objects of a tier that an engine's KV events leave out: too many.",
        lambda daemon: daemon.subscriptions.unreported,
    ),
    "token_book_bytes": gauge(
        "Bytes of these token ids, and of what events say beside them.",
        lambda daemon: daemon.subscriptions.book.held_bytes,
    ),
    "descriptions_refused": counter(
        "Chunks that no other engine announces: the token book was full.",
        lambda daemon: daemon.subscriptions.book.refused,
    ),
    "spans_dropped": counter(
        "Spans that were dropped because too many waited for export.",
        lambda daemon: 0 if daemon.spans is None else daemon.spans.dropped,
    ),
    **debug(
        token_book_chunks=gauge(
            "Chunks whose token ids are kept for the KV events of engines.",
            lambda daemon: len(daemon.subscriptions.book),
        ),
        requests=counter(
            "Messages of clients.", lambda daemon: daemon.requests, labels=("message",)
        ),
        connections=gauge(
            "Connections to the socket.", lambda daemon: len(daemon.sessions.connections)
        ),
        mappings_failed=counter("Times that a worker could not map the arena; it tries again."),
        watching=gauge(
            "Engines that are told which objects go, for their KV events.",
            lambda daemon: len(daemon.subscriptions),
        ),
    ),
}
_PREFETCHES: Mapping[str, MetricFamily] = {
    "prefetches_asked": counter(
        "Prompts that were expected, by engines or commands.",
        lambda daemon: daemon.prefetches.asked,
    ),
    "prefetches_begun": counter(
        "Prefetches whose time came.", lambda daemon: daemon.prefetches.begun
    ),
    "prefetches_ended": counter(
        "Prefetches by their end: whole, needless (RAM had it), absent (no tier has more than "
        "RAM), or why they were cut.",
        lambda daemon: daemon.prefetches.ended,
        labels=("end",),
    ),
    "prefetches_refused": counter(
        "Prefetches that were refused, by reason.",
        lambda daemon: daemon.prefetches.refused,
        labels=("reason",),
    ),
    "prefetches_waiting": gauge(
        "Prefetches that wait for their time.", lambda d: len(d.prefetches)
    ),
    "prefetched_bytes": gauge(
        "Bytes of prefetched objects in RAM that no lookup has hit yet.",
        lambda daemon: daemon.store.expected_bytes,
    ),
    "prefetched_objects_hit": counter(
        "Prefetched objects that a lookup hit.", lambda daemon: daemon.store.expected_hit
    ),
    "prefetched_objects_wasted": counter(
        "Prefetched objects that were evicted before any lookup hit them.",
        lambda daemon: daemon.store.expected_evicted,
    ),
}
DAEMON: Mapping[str, MetricFamily] = {**_LOOKUPS, **_STORES, **_PREFETCHES, **_CLIENTS}
"""Their owner is the DaemonState."""
