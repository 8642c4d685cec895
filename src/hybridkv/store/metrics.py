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
    "tenants": gauge(
        "cache_salts, or users, that have objects, where they have quotas.",
        lambda store: len(store.tenants),
    ),
    **debug(
        duplicates=counter(
            "Stored objects that were there already; their slot was freed.",
            lambda store: store.duplicates,
        )
    ),
}
