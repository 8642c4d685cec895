"""The rules for what may be served.

The connector raises the first FAIL at start-up, and `hybridkv doctor` shows all findings.
"""

import json
import os
from collections.abc import Iterator
from typing import Any

import vllm

from hybridkv.core.errors import ConfigError, HybridKVError
from hybridkv.core.findings import Finding, fail, failure, ok, warn
from hybridkv.core.geometry import GroupKind
from hybridkv.core.settings import Settings, parse_settings
from hybridkv.core.state_boundaries import StateRule
from hybridkv.vllm.hashing import ENGINE_HASHES
from hybridkv.vllm.layout import group_geometry

VLLM_SUPPORTED = ("0.32",)
"""Minor versions that this connector was run on; others have other hooks and layouts."""

SPECULATIVE_METHODS = ("ngram",)
"""Proven methods: stored blocks hold verified tokens only, and no drafter has own layers."""

CONNECTOR = {
    "kv_connector": "HybridKVConnector",
    "kv_connector_module_path": "hybridkv.connector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}
"""The `--kv-transfer-config` that works for every model."""
SEVERAL = "MultiConnector"
"""The connector of this package that has other connectors inside."""


def config_findings(vllm_config: Any) -> Iterator[Finding]:
    """The findings of the configuration alone, in the order in which the connector refuses."""
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
    """Whether `--kv-transfer-config` names this connector, which need not ask that itself."""
    works = f"--kv-transfer-config '{json.dumps(CONNECTOR, separators=(',', ':'))}' works"
    check = "connector"
    if transfer is None or transfer.kv_connector is None:
        what = "--kv-transfer-config names no connector, so vLLM serves without hybridkv"
        yield fail(check, what, works)
        return
    known = {key: [CONNECTOR[key]] for key in ("kv_connector", "kv_connector_module_path")}
    known["kv_connector"].append(SEVERAL)
    wrong = [key for key in known if getattr(transfer, key) not in known[key]]
    for key in wrong:
        what = f"{key} of --kv-transfer-config is {getattr(transfer, key)!r}"
        yield fail(check, what, f'"{key}":"{CONNECTOR[key]}" works')
    if not wrong:
        yield ok(check, f"{transfer.kv_connector} of {transfer.kv_connector_module_path}")
    if transfer.kv_role != "kv_both":
        what = "vLLM may treat the engine as one half of a pair, hybridkv loads and stores"
        remedy = '"kv_role":"kv_both" works'
        yield warn("kv_role", f"kv_role={transfer.kv_role!r}: {what}", remedy)
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
        if group.kind is GroupKind.RECURRENT and speculative is not None:
            what = (
                f"speculative_config: restoring the recurrent state of group {gid} "
                "under speculation is not proven yet"
            )
            yield fail(check, what, "serving without --speculative-config works")
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
    what = f"vllm {vllm.__version__} is not one that hybridkv was run on"
    return fail("vllm", what, f"vllm {VLLM_SUPPORTED[-1]} works")


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
    what = "enable_prefix_caching is off, so the engine hashes no blocks"
    return fail("prefix caching", what, "--enable-prefix-caching works")


def _parallel(parallel: Any) -> Iterator[Finding]:
    refused = False
    sizes = ("pipeline_parallel_size", "decode_context_parallel_size")
    for size in (*sizes, "prefill_context_parallel_size"):
        if getattr(parallel, size, 1) > 1:
            refused = True
            what = f"{size}={getattr(parallel, size)} is not supported yet"
            yield fail("parallelism", what, f"--{size.replace('_', '-')} 1 works")
    if getattr(parallel, "nnodes", 1) > 1:
        refused = True
        what = f"nnodes={parallel.nnodes}: workers on other nodes cannot map this node's memory"
        yield fail("parallelism", what, "--nnodes 1 works")
    if not refused:
        yield ok("parallelism", f"tensor_parallel_size {parallel.tensor_parallel_size}, one node")


def _speculative(speculative: Any) -> Finding:
    check = "speculative decoding"
    if speculative is None:
        return ok(check, "off")
    if speculative.method in SPECULATIVE_METHODS:
        return ok(check, f"{speculative.method}: drafts have no KV cache of their own")
    what = (
        f"speculative_config: restoring the cache of a {speculative.method!r} drafter "
        "is not proven yet"
    )
    remedy = '{"method":"ngram",...} or serving without --speculative-config works'
    return fail(check, what, remedy)


def _scales(cache: Any) -> Finding:
    if not getattr(cache, "calculate_kv_scales", False):
        return ok("KV scales", f"cache dtype {cache.cache_dtype}, no scales computed while serving")
    what = "calculate_kv_scales gives every engine other scales for the same bytes"
    return fail("KV scales", what, "serving without --calculate-kv-scales works")


def _hashes(cache: Any) -> Finding:
    algorithm = str(cache.prefix_caching_hash_algo)
    if algorithm not in ENGINE_HASHES:
        what = f"{algorithm} gives other hashes in every process, so hybridkv makes its own"
        return ok("block hashes", what)
    if (seed := os.environ.get("PYTHONHASHSEED")) is not None:
        what = "seeds vLLM's block hashes: engines with another value share nothing"
        return warn("block hashes", f"PYTHONHASHSEED={seed} {what}", "unset PYTHONHASHSEED works")
    versions = ", shared by engines of one Python version" if algorithm == "sha256" else ""
    return ok("block hashes", f"{algorithm}, vLLM's fixed seed{versions}")


def _hybrid_manager(scheduler: Any) -> Finding:
    if not scheduler.disable_hybrid_kv_cache_manager:
        return ok("hybrid KV cache manager", "on")
    what = (
        "disable_hybrid_kv_cache_manager is on, so sliding window layers keep and store every token"
    )
    remedy = "--no-disable-hybrid-kv-cache-manager works"
    return warn("hybrid KV cache manager", what, remedy)


def _policy(transfer: Any) -> Finding:
    policy = transfer.kv_load_failure_policy
    if policy == "recompute":
        return ok("kv_load_failure_policy", policy)
    what = f"kv_load_failure_policy={policy!r} ends a request whose load fails"
    add = 'add "kv_load_failure_policy":"recompute" to --kv-transfer-config'
    return warn("kv_load_failure_policy", what, f"{add} to have it computed instead")
