"""The child behind `hybridkv plan` and `doctor`: vLLM's configuration is read, and not served.

It answers once, with a ConfigReport. The arguments after the descriptor are those of `vllm serve`.
The model is built on torch's meta device, where a tensor has a shape and no bytes. vLLM's own code
then makes the groups and the layers' views, so every figure is that of a served engine.
"""

import contextlib
import copy
import importlib
import logging
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any, NoReturn, cast

import msgspec
import torch
from pydantic import ValidationError
from vllm.config import KVTransferConfig, get_layers_from_vllm_config, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.platforms import current_platform
from vllm.triton_utils import triton
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts, resolve_kv_cache_layout
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec, iter_layer_specs
from vllm.v1.spec_decode.draft_model import DraftModelProposer
from vllm.v1.spec_decode.eagle import EagleProposer
from vllm.v1.worker.gpu.attn_utils import get_kv_cache_spec
from vllm.v1.worker.utils import AttentionGroup, allocate_kv_cache, prepare_kernel_block_sizes
from vllm.v1.worker.workspace import init_workspace_manager

from hybridkv.core.errors import ConfigError, HybridKVError
from hybridkv.core.findings import Verdict, fail, failure, ok
from hybridkv.core.geometry import Geometry, length_finding
from hybridkv.core.keys import fingerprint
from hybridkv.core.state_boundaries import state_findings
from hybridkv.lab.capacity import ConfigPreview, GroupPreview
from hybridkv.lab.configuration import ConfigReport
from hybridkv.multi.children import check_hma, child_specs, parse_multi
from hybridkv.vllm import layout as built
from hybridkv.vllm import preflight
from hybridkv.vllm.drafters import Drafter, drafter_of, speculation_findings
from hybridkv.vllm.identity import identity_facts
from hybridkv.vllm.preflight import CONNECTOR
from hybridkv.vllm.versions import argument_parser, planning, resolve_hits

logger = logging.getLogger("vllm.hybridkv")

_PRETENDED_MEMORY_BYTES = 1 << 48  # For the cache; it is never taken: meta tensors have none.
_TRANSFER_CHECKS = ("settings", "kv_load_failure_policy")
"""Checks of the `--kv-transfer-config`: they say nothing where another one was put in its place."""
_FACTS_SHOWN = (
    *("weights", "dtype", "quantization", "cache_dtype", "tensor_parallel_size", "layout", "chunk"),
    *("abi", "hash", "environment"),
)


def inspect(arguments: list[str]) -> ConfigReport:
    """Everything that can be known of an engine before it is served."""
    if "HYBRIDKV_SHIMS" in os.environ:
        # Of a bundled model: as the engine's process does, before vLLM asks the platform.
        importlib.import_module("hybridkv.lab.shims")
    if not hasattr(triton, "set_allocator"):
        # vLLM's stand-in where there is no Triton backend; some models ask for it while built.
        triton.set_allocator = lambda allocate: None

    def refuse(message: str) -> NoReturn:
        raise HybridKVError(message)

    report = ConfigReport()
    parser = argument_parser()(FlexibleArgumentParser(prog="vllm serve"))
    parser.error = refuse
    try:
        parsed = parser.parse_args(arguments)
    except HybridKVError as error:
        return ConfigReport(unreadable=str(error))
    if parsed.model_tag is not None:
        parsed.model = parsed.model_tag
    report.findings += preflight.transfer_findings(parsed.kv_transfer_config)
    is_named = all(one.verdict is not Verdict.FAIL for one in report.findings)
    if not is_named:
        # The one that works.
        parsed.kv_transfer_config = KVTransferConfig(**CONNECTOR)
    asked, usage = AsyncEngineArgs.from_cli_args, UsageContext.OPENAI_API_SERVER
    config = _guarded("vllm arguments", report, lambda: asked(parsed).create_engine_config(usage))
    if config is None:
        return report
    seen = _as_children_see_it(config, is_named, report)
    for child, says in seen:
        report.findings += [one for one in preflight.config_findings(child) if says(one.check)]
    config = seen[0][0]
    with contextlib.suppress(ConfigError):
        report.settings = preflight.settings_of(config)
    engine = _guarded("KV cache groups", report, lambda: preview_engine(config))
    if engine is not None:
        _judge_cache(config, report, *engine)
    return report


def _as_children_see_it(
    config: Any, is_named: bool, report: ConfigReport
) -> list[tuple[Any, Callable[[str], bool]]]:
    """The configuration as each HybridKVConnector sees it, the first one's for all that follows.

    With each whether a check says something of it that was not said yet.
    """
    if not is_named:
        return [(config, lambda check: check not in _TRANSFER_CHECKS)]
    if config.kv_transfer_config.kv_connector != preflight.SEVERAL:
        return [(config, lambda check: True)]

    def inside() -> list[Any]:
        try:
            parse_multi(config.kv_transfer_config.kv_connector_extra_config)
            check_hma(config)
            return list(child_specs(config))
        except (ConfigError, TypeError) as error:
            report.findings.append(failure("connectors", error))
            return []

    specs = _guarded("connectors", report, inside) or []
    if specs:
        report.findings.append(ok("connectors", ", ".join(spec.name for spec in specs)))
    ours = [spec.config for spec in specs if spec.connector.__name__ == CONNECTOR["kv_connector"]]
    if not ours:
        one = copy.copy(config)
        one.kv_transfer_config = KVTransferConfig(**CONNECTOR)
        return [(one, lambda check: check not in _TRANSFER_CHECKS)]
    others = ((child, _TRANSFER_CHECKS.__contains__) for child in ours[1:])
    return [(ours[0], lambda check: True), *others]


def _guarded(check: str, report: ConfigReport, make: Any) -> Any:
    """What `make` returns; None and a FAIL in vLLM's words where that refuses in any way."""
    try:
        return make()
    except Exception as error:
        logger.exception("hybridkv: vLLM refuses")
        what = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
        said = next(filter(None, map(str.strip, what.splitlines())), type(error).__name__)
        report.findings.append(fail(check, f"vLLM says: {said}"))
        return None


def _judge_cache(
    config: Any,
    report: ConfigReport,
    kv_cache_config: KVCacheConfig,
    layouts: dict[int, built.WorkerLayout],
) -> None:
    """Add what the groups and layouts tell: preview, geometry, identity."""
    groups = list(preflight.group_findings(kv_cache_config, config))
    report.findings += groups
    geometry: Geometry | None = None
    if all(one.verdict is not Verdict.FAIL for one in groups):
        try:
            asked, drafter = report.settings.hybrid_chunk_size, _served_drafter(config)
            ahead = drafter.lookahead_tokens if drafter else 0
            geometry = built.build_geometry(kv_cache_config, layouts, asked, ahead)
        except HybridKVError as error:
            report.findings.append(failure("chunk", error))
    model, rule = config.model_config, preflight.state_rule(config)
    named = model.model, model.max_model_len, built.kv_dtype(config, layouts[0])
    gids = range(len(kv_cache_config.kv_cache_groups))
    seen = tuple(_group_preview(kv_cache_config, gid, layouts[0]) for gid in gids)
    report.preview = ConfigPreview(*named, len(layouts), seen, geometry, rule)
    if geometry is None:
        return
    chunk, alignment = geometry.chunk_tokens, geometry.alignment_tokens
    report.findings += [
        ok("chunk", f"{chunk} tokens; hits are aligned to {alignment}"),
        length_finding(geometry, model.max_model_len),
        *state_findings(geometry, rule),
    ]
    try:
        facts = identity_facts(config, kv_cache_config, geometry, layouts, report.settings)
    except HybridKVError as error:
        report.findings.append(failure("identity", error))
        return
    if report.settings.weights_identity is None:
        # They are known once they are loaded.
        del facts["weights"]
    report.identity = fingerprint(facts).hex()
    facts.setdefault("weights", "are read once they are loaded")
    for part in ("model_config", "cache_config", "parallel_config"):
        facts |= cast(dict[str, object], facts[part])
    shown = {key: facts[key] for key in _FACTS_SHOWN}
    report.facts = {key: msgspec.json.encode(fact).decode() for key, fact in shown.items()}
    report.findings.append(ok("identity", f"{report.identity[:12]}; weights {facts['weights']}"))


def preview_engine(vllm_config: Any) -> tuple[KVCacheConfig, dict[int, built.WorkerLayout]]:
    """The KV cache as the scheduler role gets it, and the layouts by rank, which are all the same.

    The model is built without memory. A process can do this once: layers register by name.
    """
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    ranks = parallel.tensor_parallel_size
    for name in (parallel.worker_cls, parallel.worker_extension_cls):
        if isinstance(name, str) and "." in name:
            # A worker imports them before it builds the model, which changes what can be built.
            importlib.import_module(name.rpartition(".")[0])
    with _pretended_ranks(vllm_config, ranks):
        current = set_current_vllm_config(vllm_config)
        with current, set_default_torch_dtype(model.dtype), torch.device("meta"):
            init_workspace_manager(torch.device("meta"))
            initialize_model(vllm_config=vllm_config, model_config=model)
            if _served_drafter(vllm_config) is not None:
                _make_drafter(vllm_config)
        current_platform.update_block_size_for_backend(vllm_config)
        with set_current_vllm_config(vllm_config):
            worker_config, config = _kv_cache_configs(vllm_config)
            layout = _worker_layout(vllm_config, worker_config)
    return config, dict.fromkeys(range(ranks), layout)


def _served_drafter(vllm_config: Any) -> Drafter | None:
    findings = speculation_findings(vllm_config)
    is_refused = any(one.verdict is Verdict.FAIL for one in findings)
    return None if is_refused else drafter_of(vllm_config)


def _make_drafter(vllm_config: Any) -> None:
    """The drafter's layers, which register beside the target's, as vLLM's proposers make them."""
    speculative = vllm_config.speculative_config
    if speculative.use_gemma4_mtp():
        return  # Its layers read the target's KV, and have none.
    is_model = speculative.uses_draft_model()
    proposer_class = DraftModelProposer if is_model else EagleProposer
    proposer = object.__new__(proposer_class)
    proposer.vllm_config, proposer.speculative_config = vllm_config, speculative
    initialize_model(
        vllm_config=proposer._create_draft_vllm_config(),
        model_config=speculative.draft_model_config,
        prefix="draft_model" if is_model else "",
    )


def _group_preview(config: KVCacheConfig, gid: int, layout: built.WorkerLayout) -> GroupPreview:
    group, spec = config.kv_cache_groups[gid], config.kv_cache_groups[gid].kv_cache_spec
    names = ", ".join(sorted({type(one).__name__ for one in iter_layer_specs(spec)}))
    tokens, count = spec.block_size, len(group.layer_names)
    if gid not in config.prefix_cacheable_group_ids:
        return GroupPreview(gid, f"scratch ({names})", tokens, count, 0)
    sizes = layout.sizes[gid]
    try:
        known = built.group_geometry(gid, spec, sizes)
    except HybridKVError as error:
        return GroupPreview(gid, names, tokens, count, sum(sizes), refusal=str(error))
    return GroupPreview(gid, str(known.kind), tokens, count, known.block_bytes, known.window_tokens)


@contextlib.contextmanager
def _pretended_ranks(vllm_config: Any, ranks: int) -> Iterator[None]:
    """One process as rank 0 of `ranks`: layers divide by their number, and no rank communicates."""
    alone = copy.copy(vllm_config)
    alone.parallel_config = copy.copy(vllm_config.parallel_config)
    for kind in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"):
        setattr(alone.parallel_config, kind, 1)
    alone.parallel_config.nnodes = alone.parallel_config.world_size = 1
    alone.parallel_config.enable_elastic_ep = False
    with tempfile.TemporaryDirectory(prefix="hybridkv-preview-") as directory:
        store = f"file://{directory}/store"
        with set_current_vllm_config(alone):
            parallel_state.init_distributed_environment(1, 0, store, 0, "gloo")
            parallel_state.initialize_model_parallel(1, 1)
        parallel_state.get_tp_group().world_size = ranks
        try:
            yield
        finally:
            parallel_state.get_tp_group().world_size = 1
            parallel_state.destroy_model_parallel()
            parallel_state.destroy_distributed_environment()


def _kv_cache_configs(vllm_config: Any) -> tuple[KVCacheConfig, KVCacheConfig]:
    """(a worker's, the scheduler's), by the steps of vLLM's EngineCore."""
    register_all_kvcache_specs(vllm_config)
    specs: dict[str, KVCacheSpec] = get_kv_cache_spec(vllm_config)
    layouts = get_supported_kv_cache_layouts(get_current_attn_backends(vllm_config))
    supported = [[layout.name for layout in layouts]]
    layout = resolve_kv_cache_layout(vllm_config, supported, list(specs.values()))
    memory = [_PRETENDED_MEMORY_BYTES]
    (config,) = planning().get_kv_cache_configs(vllm_config, [specs], memory)
    config.kv_cache_layout = layout.name
    made = kv_cache_utils.generate_scheduler_kv_cache_config([config])
    groups = [group.kv_cache_spec for group in config.kv_cache_groups]
    cacheable = [spec for spec in groups if spec.prefix_cacheable]
    vllm_config.cache_config.block_size = min(spec.block_size for spec in cacheable or groups)
    resolve_hits(made, vllm_config)
    config.hash_block_size = made.hash_block_size
    config.cache_hit_alignment_tokens = made.cache_hit_alignment_tokens
    return config, made


def _worker_layout(vllm_config: Any, config: KVCacheConfig) -> built.WorkerLayout:
    """The layout of the views that a worker would register, from vLLM's allocator."""
    layers = get_layers_from_vllm_config(vllm_config, cast(type[Any], AttentionLayerBase))
    groups = []
    for gid, group in enumerate(config.kv_cache_groups):
        spec = group.kv_cache_spec
        own = getattr(spec, "kv_cache_specs", {})
        named = [(name, layers[name].get_attn_backend()) for name in group.layer_names]
        groups.append([AttentionGroup(at, [name], own.get(name, spec), gid) for name, at in named])
    kernel_blocks = prepare_kernel_block_sizes(config, groups)
    resolved = vllm_config.cache_config.get_resolved_kv_cache_layout()
    views = allocate_kv_cache(config, torch.device("meta"), resolved, kernel_blocks)
    layout = built.worker_layout(config, built.block_views(config, views))
    return replace(layout, device=vllm_config.device_config.device_type)


if __name__ == "__main__":
    with Connection(int(sys.argv[1])) as pipe:
        pipe.send_bytes(msgspec.json.encode(inspect(sys.argv[2:])))
