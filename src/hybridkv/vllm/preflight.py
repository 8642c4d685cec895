"""The rules for what may be served.

The connector raises the first FAIL at start-up, and `hybridkv doctor` shows all findings.
"""

import json
import os
from collections.abc import Iterator, Mapping
from typing import Any

import vllm
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import iter_layer_specs

from hybridkv.core.errors import ConfigError, HybridKVError
from hybridkv.core.findings import Check, Finding, fail, failure, judge, ok, warn
from hybridkv.core.geometry import Geometry, GroupKind
from hybridkv.core.settings import LONG_TRANSFER, TRANSFER, Settings, parse_settings
from hybridkv.core.state_boundaries import StateRule
from hybridkv.core.tails import why_no_tails
from hybridkv.vllm.drafters import (
    ConfigRefusal,
    padding_finding,
    speculation_findings,
    unproven_states,
)
from hybridkv.vllm.executors import executor_finding
from hybridkv.vllm.hashing import ENGINE_HASHES
from hybridkv.vllm.layout import group_geometry, node_count
from hybridkv.vllm.plugin import is_registered
from hybridkv.vllm.prefix_caching import caching_findings, layer_findings
from hybridkv.vllm.proven import OLDEST, PROVEN, STAGED, TAILS_VERSION
from hybridkv.vllm.seams import can_keep_states
from hybridkv.vllm.shards import sharing_findings
from hybridkv.vllm.versions import minor_version

CONNECTOR = LONG_TRANSFER
TRANSFER_WORKS = f"--kv-transfer-config '{json.dumps(TRANSFER, separators=(',', ':'))}' works"
HOPPER = 90  # The compute capability of the GPUs that copies were proven on (docs/gpu.md).
NAMED_LATE = ("0.30", "0.31")  # Versions that cache wrong states: see `_states_named_late`.
SEVERAL = "MultiConnector"  # The connector of this package that has other connectors inside.


def config_findings(vllm_config: Any) -> Iterator[Finding]:
    """Yield the findings of the configuration alone, in the order in which they are refused."""
    cache, transfer = vllm_config.cache_config, vllm_config.kv_transfer_config
    yield _version(vllm.__version__)
    is_proven = not current_platform.is_cuda_alike() or (
        current_platform.is_cuda() and current_platform.is_device_capability(HOPPER)
    )
    what = "copies of a GPU have run on an NVIDIA H200 (Hopper) alone"
    remedy = "hybridkv verify shows whether answers are the same on this machine"
    yield _advise("device", is_proven, current_platform.device_type, what, remedy)
    try:
        settings = settings_of(vllm_config)
    except ConfigError as error:
        yield failure(Check.SETTINGS, error)
    else:
        pairs = [f"{key}={value}" for key, value in transfer.kv_connector_extra_config.items()]
        yield ok(Check.SETTINGS, ", ".join(pairs) or "all defaults")
        yield from sharing_findings(vllm_config, settings)
        yield from weights_findings(vllm_config.parallel_config, settings)
    yield from caching_findings(vllm_config)
    yield executor_finding(vllm_config.parallel_config)
    yield from _parallel(vllm_config.parallel_config, vllm_config.speculative_config is not None)
    yield from _nodes(vllm_config)
    yield from speculation_findings(vllm_config)
    good = f"cache dtype {cache.cache_dtype}, no scales computed while serving"
    what = "calculate_kv_scales gives every engine other scales for the same bytes"
    is_good = not getattr(cache, "calculate_kv_scales", False)
    yield judge("KV scales", is_good, good, what, "serving without --calculate-kv-scales works")
    yield _hashes(cache)
    is_good = not vllm_config.scheduler_config.disable_hybrid_kv_cache_manager
    what = (
        "disable_hybrid_kv_cache_manager is on, so sliding window layers keep and store every token"
    )
    remedy = "--no-disable-hybrid-kv-cache-manager works"
    yield _advise("hybrid KV cache manager", is_good, "on", what, remedy)


def offloading_finding() -> Finding:
    """Return the refusal of vLLM's own offloading, which takes this connector's place."""
    what = "--kv-offloading-size has vLLM serve its own connector in place of hybridkv"
    works = "leaving --kv-offloading-size out works (the setting `ram` is the size of hybridkv's)"
    return fail(Check.CONNECTOR, what, works)


def transfer_findings(transfer: Any) -> Iterator[Finding]:
    """Yield whether a `--kv-transfer-config` names this connector.

    The connector itself need not ask that.
    """
    if transfer is None or transfer.kv_connector is None:
        what = "--kv-transfer-config names no connector, so vLLM serves without hybridkv"
        yield fail(Check.CONNECTOR, what, TRANSFER_WORKS)
        return
    name, path = transfer.kv_connector, transfer.kv_connector_module_path
    is_by_plugin = name == TRANSFER["kv_connector"] and path is None
    if name not in (TRANSFER["kv_connector"], SEVERAL):
        what = f"kv_connector of --kv-transfer-config is {name!r}"
        yield fail(Check.CONNECTOR, what, f'"kv_connector":"{TRANSFER["kv_connector"]}" works')
    elif path == LONG_TRANSFER["kv_connector_module_path"]:
        yield ok(Check.CONNECTOR, f"{name} of {path}")
    elif is_by_plugin and is_registered(name):
        yield ok(Check.CONNECTOR, f"{name}, by the plugin of this package")
    else:
        what = f"kv_connector_module_path of --kv-transfer-config is {path!r}"
        if is_by_plugin:
            what = f"vLLM does not load the plugin of this package, which registers {name}"
        works = f'"kv_connector_module_path":"{LONG_TRANSFER["kv_connector_module_path"]}" works'
        yield fail(Check.CONNECTOR, what, works)
    yield ok(Check.KV_ROLE, f"{transfer.kv_role}: {ROLES.get(transfer.kv_role, '')}")


ROLES: Mapping[str, str] = {
    "kv_both": "prompts and answers are stored, and prompts are loaded",
    "kv_producer": "prompts are stored and loaded, answers are not stored",
    "kv_consumer": "as kv_both, but no other engine waits for what this one computes",
}
"""What an engine does in each role of `KVTransferConfig.kv_role`."""


def group_findings(kv_cache_config: Any, vllm_config: Any) -> Iterator[Finding]:
    """Yield whether each cacheable group of a KVCacheConfig and a VllmConfig can be restored."""
    yield from layer_findings(kv_cache_config, vllm_config)
    speculative, is_drafted = vllm_config.speculative_config, False
    for gid in kv_cache_config.prefix_cacheable_group_ids:
        check, spec = f"group {gid}", kv_cache_config.kv_cache_groups[gid].kv_cache_spec
        try:
            group = group_geometry(gid, spec, (1,))
        except HybridKVError as error:
            yield failure(check, error)
            continue
        window = f", window {group.window_tokens}" if group.window_tokens else ""
        good = f"{group.kind}, {group.tokens_per_block} tokens per block{window}"
        unproven: ConfigRefusal | None = None
        if group.kind is GroupKind.RECURRENT:
            unproven = unproven_states(vllm_config, next(iter(iter_layer_specs(spec))))
            unproven = unproven or _states_named_late(vllm_config, group.tokens_per_block)
        elif group.kind is GroupKind.CHUNKED_LOCAL and speculative and speculative.use_eagle():
            what = (
                f"speculative_config: vLLM 0.32 itself cannot look up group {gid} (chunked local "
                f"attention) with a drafter of the method {speculative.method!r}"
            )
            unproven = ConfigRefusal(what, "serving without --speculative-config works")
        yield fail(check, unproven.what, unproven.remedy) if unproven else ok(check, good)
        is_drafted |= group.kind is GroupKind.RECURRENT and not unproven and bool(speculative)
    if is_drafted:
        yield padding_finding(vllm_config)
    cached = {*kv_cache_config.prefix_cacheable_group_ids}
    scratch = {*range(len(kv_cache_config.kv_cache_groups))} - cached
    if scratch and speculative is not None:
        what = (
            f"speculative_config: vLLM does not cache group {min(scratch)}, and drafts may need it"
        )
        yield fail(f"group {min(scratch)}", what, "serving without --speculative-config works")


def _states_named_late(vllm_config: Any, block_tokens: int) -> ConfigRefusal | None:
    """Return a refusal where vLLM 0.30 and 0.31 themselves cache wrong recurrent states.

    A prompt that ends at a multiple of the match unit, inside a block, has its state named when it
    is computed. With asynchronous scheduling the next step's plan names it again, and that step's
    copy has the state after the first generated token.
    """
    unit = vllm_config.cache_config.prefix_match_unit
    is_fine = unit is not None and unit < block_tokens
    is_late = is_fine and vllm_config.scheduler_config.async_scheduling
    version = minor_version()
    if version not in NAMED_LATE or not is_late:
        return None
    what = (
        f"vLLM {version} itself caches wrong recurrent states with asynchronous scheduling and "
        f"prefix_match_unit={unit}, which is less than a block"
    )
    return ConfigRefusal(what, "--no-async-scheduling works")


def state_rule(vllm_config: Any) -> StateRule:
    """Return the settings that decide where recurrent states stand."""
    scheduler = vllm_config.scheduler_config
    # vLLM's long_prefill_token_threshold does not bound a prompt that is computed alone.
    step = scheduler.max_num_batched_tokens if scheduler.enable_chunked_prefill else 0
    retention = vllm_config.cache_config.prefix_cache_retention_interval
    return StateRule(retention, step, keeps_junctions=can_keep_states())


def serves_tails() -> bool:
    """Return True on the version of vLLM whose hits inside a block were proven."""
    return minor_version() == TAILS_VERSION


def tails_finding(vllm_config: Any, kv_cache_config: Any, geometry: Geometry) -> Finding:
    """Return whether hits may end inside a block. With a WARN the engine has no such hits."""
    groups = len(kv_cache_config.kv_cache_groups)
    algorithm = str(vllm_config.cache_config.prefix_caching_hash_algo)
    why, remedy = why_no_tails(geometry), "leaving sub_block_hits out works"
    if not serves_tails():
        why = f"vllm {vllm.__version__} is not {TAILS_VERSION}, the only one they were proven on"
    elif vllm_config.speculative_config is not None:
        why = "they are not proven with speculation"
    elif len(geometry.groups) != groups:
        why = f"vLLM caches {len(geometry.groups)} of {groups} groups"
    elif algorithm not in ENGINE_HASHES:
        why = f"{algorithm} gives other hashes in every process"
    elif why and geometry.hash_tokens == geometry.chunk_tokens:
        remedy = f"--prefix-match-unit {max(1, geometry.chunk_tokens // 8)} works"
    good = f"hits end at multiples of {geometry.hash_tokens} tokens"
    what = f"sub_block_hits: hits end at whole blocks, because {why}"
    return _advise("sub-block hits", not why, good, what, remedy)


def settings_of(vllm_config: Any) -> Settings:
    """Return the settings in vLLM's `kv_connector_extra_config`. Raises ConfigError."""
    return parse_settings(vllm_config.kv_transfer_config.kv_connector_extra_config)


def _advise(check: str, is_good: bool, good: str, what: str, remedy: str) -> Finding:
    """Return OK and `good`, or else a WARN: `what` could be better, and the `remedy`."""
    return ok(check, good) if is_good else warn(check, what, remedy)


def _version(version: str) -> Finding:
    """Return whether a version of vLLM is served."""
    release = version.split(".")[:2]
    proof = PROVEN.get(".".join(release))
    is_old = [int(part) for part in release if part.isdigit()] < [*map(int, OLDEST.split("."))]
    why = "cannot report a load that failed" if is_old else "is not one that hybridkv was run on"
    works = f"vllm {OLDEST} to {max(PROVEN)} works"
    return judge("vllm", proof is not None, f"{version}: {proof}", f"vllm {version} {why}", works)


def _parallel(parallel: Any, is_drafted: bool) -> Iterator[Finding]:
    """Yield which kinds of parallelism are refused, or one OK."""
    stages = parallel.pipeline_parallel_size
    refused = dict.fromkeys(("decode_context_parallel_size", "prefill_context_parallel_size"), "")
    if is_drafted:
        refused["pipeline_parallel_size"] = " with speculation"  # The last stage has the drafter.
    elif minor_version() not in STAGED:
        refused["pipeline_parallel_size"] = f" on vllm {vllm.__version__}"
    several = {size: getattr(parallel, size, 1) for size in refused}
    several = {size: ranks for size, ranks in several.items() if ranks > 1}
    for size, ranks in several.items():
        what = f"{size}={ranks} is not supported yet{refused[size]}"
        yield fail("parallelism", what, f"--{size.replace('_', '-')} 1 works")
    if not several:
        sizes = f"tensor_parallel_size {parallel.tensor_parallel_size}"
        sizes += f", pipeline_parallel_size {stages}" if stages > 1 else ""
        yield ok("parallelism", sizes)


def weights_findings(parallel: Any, settings: Settings) -> Iterator[Finding]:
    """Yield whether each engine has all weights, and keeps them where they are."""
    if parallel.enable_eplb:
        what = (
            f"enable_eplb moves experts every {parallel.eplb_config.step_interval} steps, so hits "
            "end the first time: the engine's own blocks are of other weights then"
        )
        yield warn("expert load balancing", what, "--no-enable-eplb works")
    replicas = parallel.data_parallel_size
    if replicas > 1 and parallel.is_moe_model is not False and not settings.weights_identity:
        what = (
            f"each of {replicas} data parallel replicas has a part of the experts, so no engine "
            "has all weights, and each shares with no other and with no later one"
        )
        yield warn("weights", what, '"weights_identity":"my-model-1" works: it names all of them')


def _nodes(vllm_config: Any) -> Iterator[Finding]:
    """Yield whether the ranks' nodes can be served. Settings that cannot be read have a finding."""
    parallel = vllm_config.parallel_config
    try:
        settings = settings_of(vllm_config)
    except ConfigError:
        return
    nodes = node_count(parallel, settings)
    if nodes == 1:
        yield ok("nodes", "all workers on one node")
        return
    ranks = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
    what, remedy = "", ""
    if minor_version() not in STAGED:
        what = f"nodes={nodes} is not supported yet on vllm {vllm.__version__}"
        remedy = "one node works"
    elif settings.server == "auto":
        what = f'server="auto" starts a daemon on one of {nodes} nodes'
        socket = '"server":"unix:///run/hybridkv/daemon.sock"'
        remedy = f"`hybridkv serve` on each node and {socket} works"
    elif ranks % nodes:
        what = f"nodes={nodes} do not divide {ranks} ranks"
        remedy = "nodes with as many ranks each work"
    good = f"{nodes} nodes with {ranks // nodes} of {ranks} ranks each, and a daemon each"
    yield judge("nodes", not what, good, what, remedy)


def _hashes(cache: Any) -> Finding:
    """Return which hashes name prefixes, and who shares them."""
    algorithm = str(cache.prefix_caching_hash_algo)
    if algorithm not in ENGINE_HASHES:
        what = f"{algorithm} gives other hashes in every process, so hybridkv makes its own"
        return ok("block hashes", what)
    seed = os.environ.get("PYTHONHASHSEED")
    versions = ", shared by engines of one Python version" if algorithm == "sha256" else ""
    good = f"{algorithm}, vLLM's fixed seed{versions}"
    apart = "seeds vLLM's block hashes: engines with another value share nothing"
    what, remedy = f"PYTHONHASHSEED={seed} {apart}", "unset PYTHONHASHSEED works"
    return _advise("block hashes", seed is None, good, what, remedy)
