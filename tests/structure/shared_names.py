"""The public method names that several classes have without a common base, by what they mean.

A public method name means one thing. A test compares this list with the code in both directions.
"""

from typing import NamedTuple


class SharedNames(NamedTuple):
    """Method names that mean the same in every class that has them."""

    meaning: str
    names: str
    """Separated by spaces."""
    classes: str = ""
    """The classes that may share them, separated by spaces. Empty = any."""


SHARED_NAMES = (
    SharedNames("A mapping gives the value of a key, or another one.", "get"),
    SharedNames(
        "The order of eviction of RAM and that of a directory have the same rules.",
        "add_item mark_used offer remember remove victim",
        "EvictionQueue FileOrder",
    ),
    SharedNames(
        "vLLM calls a connector's hooks, and MultiConnector's parts have those of their role.",
        "bind_connector_metadata build_connector_meta build_connector_worker_meta"
        " build_kv_connector_stats build_prom_metrics clear_connector_metadata"
        " get_external_cache_hit_sources get_handshake_metadata get_kv_connector_stats"
        " get_num_new_matched_tokens get_transfer_results handle_preemptions request_finished"
        " request_finished_all_groups reset_cache restore_kv_caches shutdown take_events"
        " unregister_kv_caches update_connector_output update_state_after_alloc",
        "HybridKVConnector MultiConnector MultiScheduler MultiWorker",
    ),
    SharedNames(
        "vLLM merges and empties statistics and the reports of workers.",
        "aggregate is_empty reduce reset",
        "HybridKVStats MetricStats MultiKVConnectorStats MultiReport OwnStats StepReport",
    ),
    SharedNames(
        "A scheduler role, its fallback and what is left after the shutdown answer the same hooks.",
        "has_pending_work load_sources offer_hit on_finished on_step_end plan_step take_stats",
        "NoRole RoleFallback SchedulerRole",
    ),
    SharedNames(
        "A session's link is that to one daemon, or that to the daemons of several nodes.",
        "drop_connection flush greet_with has_unsent is_greeting poll queue send",
        "Link NodesLink",
    ),
    SharedNames(
        "The engine's process carries out what its owner calls.",
        "encode_text generate reset_caches",
        "EngineProcess EngineRunner",
    ),
    SharedNames(
        "A bench of a copier has plain copies to compare with.",
        "plain_copies",
        "DeviceBench HostBench",
    ),
    SharedNames(
        "The whole chunks of a lookup or prompt, or of a hit.",
        "chunks",
        "Found Hit LookupRequest PromptNames",
    ),
    SharedNames("The same with the slots of one node for tickets.", "on_node", "CopyRun NodePlans"),
    SharedNames("A cache serves the prompts of a trace.", "serve", "TraceReplay UnlimitedCache"),
    SharedNames(
        "The daemon's loop calls its parts, and sleeps until the first of them has work.",
        "tick wakes_at",
        "AdviceQueue Daemon DaemonView Demotion Forgetting Prefetches Promotion Quotas TierState",
    ),
    SharedNames("An EvictionQueue evicts only what may go.", "is_evictable", "FileIndex Slot"),
    SharedNames("An object gives back what it holds, and is used no more.", "close"),
    SharedNames(
        "An event is told to each part that it concerns.",
        "on_allocated on_disconnect on_job_done on_new_request on_process_ended on_report on_reset"
        " on_step_planned",
    ),
    SharedNames(
        "An owner does or says it with its part of the same method.",
        "can_copy enter_thread is_answer_due node",
    ),
    SharedNames(
        "A noun is the same measure, name or text of several things.",
        "counters key node_ranks node_shards objects sentence shape size_bytes state",
    ),
)
