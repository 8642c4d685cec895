"""The metrics of the tiers below RAM, and of the lookups and writes that wait for them."""

from collections.abc import Mapping

from hybridkv.core.metrics import MetricFamily, counter, debug, gauge, labelled, sampled

PROMOTION: Mapping[str, MetricFamily] = {
    "promotions_cut": counter(
        "Lookups that tiers gave less than they had, or nothing.",
        lambda promotion: promotion.shortfalls,
        labels=("reason",),
        single_name="promotions",
    ),
    **sampled(
        deadlines_missed=counter(
            "Lookups answered at their deadline, before all had come.",
            lambda promotion: promotion.deadlines_missed,
        )
    ),
    "lookups_waiting": gauge("Lookups that wait for tiers.", len),
}
"""Their owner is the Promotion."""

DEMOTION: Mapping[str, MetricFamily] = {
    "writes_waiting": gauge(
        "Objects that wait to be written to tiers, or are being written.",
        lambda demotion: demotion.waiting,
    )
}
"""Their owner is the Demotion."""

TIER_PREFIX = "tier_"
TIER: Mapping[str, MetricFamily] = labelled(
    "tier",
    {
        **sampled(
            bytes=gauge("Bytes that the tier holds."),
            bytes_read=counter("Bytes read from the tier."),
            bytes_written=counter("Bytes written to the tier."),
        ),
        "bytes_max": gauge("The tier's bound in bytes."),
        "objects": gauge("Objects that the tier holds."),
        "index_bytes": gauge(
            "Bytes that the index of a directory's files takes of the daemon's memory."
        ),
        "jobs_running": gauge("Jobs of the tier's threads.", lambda tier: len(tier.running)),
        "is_open": gauge("1 while the tier can be used at all.", lambda tier: tier.is_open),
        "breaker_open": gauge(
            "1 while the tier fails or hangs, and is asked only now and then.",
            lambda tier: tier.is_shut or tier.is_hung,
        ),
        "refusing": gauge(
            "1 while the tier has refused objects for longer than a minute.",
            lambda tier: bool(tier.refusals),
        ),
        "bytes_per_second": gauge(
            "Bytes per second that lookups last saw; 0 = not known.",
            lambda tier: tier.speed.per_second,
        ),
        "written_bytes_per_second": gauge(
            "Bytes per second of the last job's write; 0 = not known.",
            lambda tier: tier.writing_speed.per_second,
        ),
        "objects_read": counter("Objects read from the tier."),
        "objects_written": counter("Objects written to the tier."),
        "objects_missing": counter("Objects that were to be read and were not there any more."),
        "objects_damaged": counter("Objects read and proven damaged; they are removed."),
        "objects_undecodable": counter("Objects that need a library or key that the daemon lacks."),
        "objects_wrong_in_ram": counter("Objects not written because RAM had wrong bytes."),
        "objects_refused": counter("Objects that the tier had no room for, and could make none."),
        "objects_shed": counter("Objects not written: too many waited, or they went before."),
        "objects_given_up": counter("Objects not written because that failed again and again."),
        "objects_not_admitted": counter("Objects not written for the hourly bound."),
        "bytes_left_out": counter("Bytes of windows inside prompts, written only after a hit."),
        "failures": counter("Calls and objects that failed."),
        **debug(
            files_failed=counter("Files that could not be looked at, moved or removed."),
            discards_waiting=gauge("Objects that wait to be removed."),
            discards_forgotten=counter("Objects that were to be removed and may come back."),
            client_starts=counter("Processes that were started to speak to the store."),
            logins_renewed=counter("Times that a bucket's login was read anew while it was open."),
            finds_cut=counter("Times that a tier was asked what it has, and answered in part."),
            jobs_late=counter("Jobs that took longer than the tier's timeout."),
            times_reopened=counter("Times that it failed on and on, and was opened anew."),
            bytes_before_encoding=counter("With a codec or key: bytes to write, before encoding."),
            bytes_after_encoding=counter("These bytes after encoding; the quotient is the ratio."),
            damage_left=counter("Damaged objects that stay until they are read: too many waited."),
        ),
    },
)
"""Their owner is a TierState. TIER_PREFIX stands before their names."""
