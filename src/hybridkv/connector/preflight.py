"""The rules for what may be served, each once: the connector raises the first FAIL, `hybridkv doctor` shows all."""

import json
import os
from collections.abc import Iterator
from typing import Any

import vllm

from hybridkv.connector.hashing import ENGINE_HASHES
from hybridkv.connector.layout import group_geometry
from hybridkv.core.errors import ConfigError, HybridKVError
from hybridkv.core.findings import Finding, fail, failure, ok, warn
from hybridkv.core.geometry import Kind
from hybridkv.core.settings import Settings, parse_settings
from hybridkv.core.states import StateRule

VLLM_SUPPORTED = ("0.32",)
"""Minor versions this connector was run on; others have other hooks and other layouts."""

SPECULATIVE_METHODS = ("ngram",)
"""Those that were proven: a stored block holds verified tokens only, and no drafter has layers of its own."""

CONNECTOR = {
    "kv_connector": "HybridKVConnector",
    "kv_connector_module_path": "hybridkv.connector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}
"""The `--kv-transfer-config` that works for every model."""
SEVERAL = "MultiConnector"
"""The connector of this package that has others inside."""


def config_findings(vllm_config: Any) -> Iterator[Finding]:
    """What the configuration alone can tell, in the order in which the connector refuses."""
    yield _version()
    yield _settings(vllm_config.kv_transfer_config)
    yield _prefix_caching(vllm_config.cache_config)
    yield from _parallel(vllm_config.parallel_config)
    yield _speculative(vllm_config.speculative_config)
    yield _scales(vllm_config.cache_config)
    yield _hashes(vllm_config.cache_config)
    yield _hybrid_manager(vllm_config.scheduler_config)
    yield _policy(vllm_config.kv_transfer_config)


def transfer_findings(transfer: Any) -> Iterator[Finding]:
    """Whether `--kv-transfer-config` names this connector; the connector itself need not ask."""
    works = f"--kv-transfer-config '{json.dumps(CONNECTOR, separators=(',', ':'))}' works"
    check = "connector"
    if transfer is None or transfer.kv_connector is None:
        yield fail(check, "--kv-transfer-config names no connector, so vLLM serves without hybridkv", works)
        return
    expected = {**CONNECTOR, "kv_connector": SEVERAL} if transfer.kv_connector == SEVERAL else CONNECTOR
    wrong = [
        (key, getattr(transfer, key))
        for key in ("kv_connector", "kv_connector_module_path")
        if getattr(transfer, key) != expected[key]
    ]
    for key, value in wrong:
        yield fail(check, f"{key} of --kv-transfer-config is {value!r}", f'"{key}":"{CONNECTOR[key]}" works')
    if not wrong:
        yield ok(check, f"{transfer.kv_connector} of {transfer.kv_connector_module_path}")
    if transfer.kv_role != "kv_both":
        yield warn(
            "kv_role",
            f"kv_role={transfer.kv_role!r}: vLLM may treat the engine as one half of a pair, hybridkv loads and stores",
            '"kv_role":"kv_both" works',
        )
    else:
        yield ok("kv_role", transfer.kv_role)


def group_findings(kv_cache_config: Any, speculative: Any = None) -> Iterator[Finding]:
    """Whether every cacheable group can be restored; `speculative` is vLLM's speculative config."""
    for gid in kv_cache_config.prefix_cacheable_group_ids:
        check = f"group {gid}"
        try:
            group = group_geometry(gid, kv_cache_config.kv_cache_groups[gid].kv_cache_spec, (1,))
        except HybridKVError as error:
            yield failure(check, error)
            continue
        if group.kind is Kind.RECURRENT and speculative is not None:
            yield fail(
                check,
                f"speculative_config: restoring the recurrent state of group {gid} under speculation is not proven yet",
                "serving without --speculative-config works",
            )
        else:
            window = f", window {group.window_tokens}" if group.window_tokens else ""
            yield ok(check, f"{group.kind}, {group.tokens_per_block} tokens per block{window}")


def state_rule(vllm_config: Any) -> StateRule:
    """The settings that decide where recurrent states stand."""
    scheduler = vllm_config.scheduler_config
    # vLLM's long_prefill_token_threshold does not bound a prompt that is computed alone.
    step = scheduler.max_num_batched_tokens if scheduler.enable_chunked_prefill else 0
    return StateRule(vllm_config.cache_config.prefix_cache_retention_interval, step)


def settings_of(vllm_config: Any) -> Settings:
    """The connector's settings; raises ConfigError."""
    return parse_settings(vllm_config.kv_transfer_config.kv_connector_extra_config)


def _version() -> Finding:
    if ".".join(vllm.__version__.split(".")[:2]) in VLLM_SUPPORTED:
        return ok("vllm", vllm.__version__)
    return fail(
        "vllm",
        f"vllm {vllm.__version__} is not one that hybridkv was run on",
        f"vllm {VLLM_SUPPORTED[-1]} works",
    )


def _settings(transfer: Any) -> Finding:
    try:
        parse_settings(transfer.kv_connector_extra_config)
    except ConfigError as error:
        return failure("settings", error)
    named = ", ".join(f"{key}={value}" for key, value in transfer.kv_connector_extra_config.items())
    return ok("settings", named or "all defaults")


def _prefix_caching(cache: Any) -> Finding:
    if cache.enable_prefix_caching:
        return ok("prefix caching", "on")
    return fail(
        "prefix caching",
        "enable_prefix_caching is off, so the engine hashes no blocks",
        "--enable-prefix-caching works",
    )


def _parallel(parallel: Any) -> Iterator[Finding]:
    refused = False
    for what, option in (
        ("pipeline_parallel_size", "--pipeline-parallel-size 1"),
        ("decode_context_parallel_size", "--decode-context-parallel-size 1"),
        ("prefill_context_parallel_size", "--prefill-context-parallel-size 1"),
    ):
        if getattr(parallel, what, 1) > 1:
            refused = True
            yield fail("parallelism", f"{what}={getattr(parallel, what)} is not supported yet", f"{option} works")
    if getattr(parallel, "nnodes", 1) > 1:
        refused = True
        yield fail(
            "parallelism",
            f"nnodes={parallel.nnodes}: workers on other nodes cannot map this node's memory",
            "--nnodes 1 works",
        )
    if not refused:
        yield ok("parallelism", f"tensor_parallel_size {parallel.tensor_parallel_size}, one node")


def _speculative(speculative: Any) -> Finding:
    check = "speculative decoding"
    if speculative is None:
        return ok(check, "off")
    if speculative.method in SPECULATIVE_METHODS:
        return ok(check, f"{speculative.method}: drafts have no KV cache of their own")
    return fail(
        check,
        f"speculative_config: restoring the cache of a {speculative.method!r} drafter is not proven yet",
        '{"method":"ngram",...} or serving without --speculative-config works',
    )


def _scales(cache: Any) -> Finding:
    if not getattr(cache, "calculate_kv_scales", False):
        return ok("KV scales", f"cache dtype {cache.cache_dtype}, no scales computed while serving")
    return fail(
        "KV scales",
        "calculate_kv_scales gives every engine other scales for the same bytes",
        "serving without --calculate-kv-scales works",
    )


def _hashes(cache: Any) -> Finding:
    algorithm = str(cache.prefix_caching_hash_algo)
    if algorithm not in ENGINE_HASHES:
        return ok("block hashes", f"{algorithm} gives other hashes in every process, so hybridkv makes its own")
    if (seed := os.environ.get("PYTHONHASHSEED")) is not None:
        return warn(
            "block hashes",
            f"PYTHONHASHSEED={seed} seeds vLLM's block hashes: engines with another value share nothing",
            "unset PYTHONHASHSEED works",
        )
    versions = ", shared by engines of one Python version" if algorithm == "sha256" else ""
    return ok("block hashes", f"{algorithm}, vLLM's fixed seed{versions}")


def _hybrid_manager(scheduler: Any) -> Finding:
    if not scheduler.disable_hybrid_kv_cache_manager:
        return ok("hybrid KV cache manager", "on")
    return warn(
        "hybrid KV cache manager",
        "disable_hybrid_kv_cache_manager is on, so sliding window layers keep and store every token",
        "--no-disable-hybrid-kv-cache-manager works",
    )


def _policy(transfer: Any) -> Finding:
    policy = transfer.kv_load_failure_policy
    if policy == "recompute":
        return ok("kv_load_failure_policy", policy)
    return warn(
        "kv_load_failure_policy",
        f"kv_load_failure_policy={policy!r} ends a request whose load fails",
        'add "kv_load_failure_policy":"recompute" to --kv-transfer-config to have it computed instead',
    )
