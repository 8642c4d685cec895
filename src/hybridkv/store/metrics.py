"""The metrics of the RAM tier. Their owner is the Store."""

from collections.abc import Mapping

from hybridkv.core.metrics import MetricFamily, counter, debug, gauge, sampled

STORE: Mapping[str, MetricFamily] = {
    **sampled(
        bytes_committed=gauge(
            "Bytes of the arena that objects take.", lambda store: store.committed_bytes
        ),
        evicted=counter("Objects that were evicted for room.", lambda store: store.evicted),
    ),
    "objects": gauge(
        "Objects in RAM, also those that are dropped when their last lease ends.",
        lambda store: store.objects,
    ),
    "bytes_writing": gauge(
        "Bytes of the arena in write slots, which engines hold ahead of need.",
        lambda store: store.writing_bytes,
    ),
    "bytes_reserved": gauge(
        "Bytes of the arena whose pages exist.", lambda store: store.extents.limit_bytes
    ),
    "bytes_arena": gauge("Bytes of the arena: the bound of the RAM tier.", len),
    "over_quota": counter(
        "Objects not kept, or evicted, for a quota of a cache_salt or user.",
        lambda store: store.over_quota,
    ),
    "retained_bytes": gauge(
        "Bytes of the arena that are retained for a time, so that they are no victims.",
        lambda store: store.queue.retained_bytes,
    ),
    "retentions_refused": counter(
        "Chunks that were not retained as an engine or a command wished.",
        lambda store: store.retention.refused,
        labels=("reason",),
    ),
    "retentions_shortened": counter(
        "Chunks that were retained for less time than was wished.",
        lambda store: store.retention.shortened,
    ),
    "retentions_expired": counter(
        "Chunks in RAM whose time of retention ended.", lambda store: store.retention.expired
    ),
    "retained_evicted": counter(
        "Retained objects that went before their time, to make one place for a larger object.",
        lambda store: store.retained_evicted,
    ),
    "tenants": gauge(
        "cache_salts, or users, that have objects, where they have quotas.",
        lambda store: len(store.tenants),
    ),
    **debug(
        retained_chunks=gauge(
            "Chunks that are to be retained, also those that RAM does not have.",
            lambda store: len(store.retention),
        ),
        duplicates=counter(
            "Stored objects that were there already; their slot was freed.",
            lambda store: store.duplicates,
        ),
    ),
}
