"""The work of configuration_entry: vLLM's configuration is read, and not served.

The model is built on torch's meta device, where a tensor has a shape and no bytes.
vLLM's own code then makes the groups and the layers' views, so every figure is that of a served
engine.
"""

import contextlib
import copy
import importlib
import json
import logging
import operator
import os
import sys
import tempfile
from argparse import ArgumentError
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar, cast

import msgspec
import torch
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
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

from hybridkv.connector.scheduler.session import describe_facts
from hybridkv.core.errors import ConfigError, HybridKVError
from hybridkv.core.findings import Check, Verdict, fail, failure, ok
from hybridkv.core.geometry import Geometry, length_finding
from hybridkv.core.keys import fingerprint
from hybridkv.core.settings import Settings
from hybridkv.core.state_boundaries import state_findings
from hybridkv.lab.capacity import ConfigPreview, GroupPreview
from hybridkv.lab.configuration import MODEL_WORKS, ConfigReport, OptionValue
from hybridkv.lab.pairs import HASH_SEED, OPTIONS, WEIGHTS_OPTIONS
from hybridkv.multi.children import check_hma, check_keys, child_specs
from hybridkv.vllm import layout as built
from hybridkv.vllm import preflight
from hybridkv.vllm.drafters import Drafter, drafter_of, speculation_findings
from hybridkv.vllm.identity import identity_facts
from hybridkv.vllm.preflight import CONNECTOR
from hybridkv.vllm.shards import rank_shards, shard_findings, shard_views
from hybridkv.vllm.stages import stage_padding
from hybridkv.vllm.versions import argument_parser, planning, resolve_hits
from hybridkv.vllm.weights_digest import PROBE_SECONDS_MAX

logger = logging.getLogger("vllm.hybridkv")
Result = TypeVar("Result")

_PRETENDED_MEMORY_BYTES = 1 << 48  # For the cache; it is never taken: meta tensors have none.
_FACTS_SHOWN = (
    "weights",
    "dtype",
    "quantization",
    "cache_dtype",
    "tensor_parallel_size",
    "share_tp",
    "layout",
    "chunk",
    "abi",
    "hash",
    "environment",
)


class ServedConfig(NamedTuple):
    """A VllmConfig as one HybridKVConnector sees it."""

    vllm_config: Any
    reports_new_finding: Callable[[str], bool]
    """Returns True for a check that says something which no earlier configuration has said."""


class CachePreview(NamedTuple):
    """The KV cache of an engine that is not served."""

    kv_cache_config: KVCacheConfig
    """As the scheduler role gets it."""
    layouts: dict[int, built.WorkerLayout]
    """By rank, and the same for each rank of a stage."""


def inspect(arguments: list[str]) -> ConfigReport:
    """Return everything that can be known of an engine before it is served."""
    if not hasattr(triton, "set_allocator"):
        # vLLM's stand-in where there is no Triton backend; some models ask for it while built.
        triton.set_allocator = lambda allocate: None

    report = ConfigReport()
    parser = argument_parser()(FlexibleArgumentParser(prog="vllm serve"))
    parser.error = _refuse
    try:
        parsed = parser.parse_args(arguments)
    except ConfigError as error:
        return replace(report, unreadable=error.what, readable=error.remedy or report.readable)
    if parsed.model_tag is not None:
        parsed.model = parsed.model_tag
    if getattr(parsed, "kv_offloading_size", None) is not None:
        report.findings.append(preflight.offloading_finding())
        parsed.kv_offloading_size = None
    report.findings += preflight.transfer_findings(parsed.kv_transfer_config)
    is_named = all(finding.verdict is not Verdict.FAIL for finding in report.findings)
    if not is_named:
        # The --kv-transfer-config that works.
        parsed.kv_transfer_config = KVTransferConfig(**CONNECTOR)

    def create_engine_config() -> Any:
        engine_arguments = AsyncEngineArgs.from_cli_args(parsed)
        return engine_arguments.create_engine_config(UsageContext.OPENAI_API_SERVER)

    def remedy() -> str:
        if _is_missing(parsed.model):
            return MODEL_WORKS
        parsed.kv_transfer_config = None
        try:
            create_engine_config()
        except Exception:
            # vLLM refuses the arguments without this connector too, which is said as the remedy.
            logger.exception("hybridkv: vLLM refuses")
            return "vLLM refuses it without hybridkv too; `vllm serve --help=all` lists what works"
        return "vLLM takes these arguments without --kv-transfer-config"

    config = _guarded("vllm arguments", report, create_engine_config, remedy)
    if config is None:
        return report
    served = _served_configs(config, is_named, report)
    for child, reports_new_finding in served:
        findings = preflight.config_findings(child)
        report.findings += [finding for finding in findings if reports_new_finding(finding.check)]
    config = served[0].vllm_config
    with contextlib.suppress(ConfigError):
        # The preview has no settings to show where they are wrong.
        report.settings = preflight.settings_of(config)
    report.role = str(config.kv_transfer_config.kv_role)
    cache = _guarded("KV cache groups", report, lambda: preview_engine(config, report.settings))
    if cache is not None:
        _judge_cache(config, report, cache)
    return report


def _refuse(message: str) -> NoReturn:
    """Raise a ConfigError for arguments that cannot be parsed. argparse calls this as `error`."""
    refused = cause = sys.exception()
    while cause is not None and not isinstance(cause, (ValidationError, json.JSONDecodeError)):
        cause = cause.__cause__ or cause.__context__
    if cause is None or not isinstance(refused, ArgumentError):
        raise ConfigError(message)
    option = refused.argument_name or "an option"
    what = f"its value is no JSON ({cause})"
    if isinstance(cause, ValidationError):
        error = cause.errors()[0]
        what = ": ".join([*map(str, error["loc"]), error["msg"]])
    is_ours = "--kv-transfer-config" in option
    works = preflight.TRANSFER_WORKS if is_ours else "one JSON object in single quotes works"
    raise ConfigError(f"{option}: {what}", works)


def _is_missing(model: str) -> bool:
    """Return True if a model is neither on this machine's disks nor in its cache of the hub."""
    path = Path(model)
    if path.exists():
        names = ("config.json", "params.json")
        return path.is_dir() and not any((path / name).exists() for name in names)
    try:
        return not isinstance(try_to_load_from_cache(model, "config.json"), str)
    except HFValidationError:
        return True


def _served_configs(config: Any, is_named: bool, report: ConfigReport) -> list[ServedConfig]:
    """Return the configuration as each HybridKVConnector sees it.

    The first is that of all further checks. `is_named`: the user's --kv-transfer-config names a
    connector of this package.
    """
    if not is_named:
        return [ServedConfig(config, lambda check: check != Check.SETTINGS)]
    if config.kv_transfer_config.kv_connector != preflight.SEVERAL:
        return [ServedConfig(config, lambda check: True)]

    def inside() -> list[Any]:
        try:
            check_keys(config.kv_transfer_config.kv_connector_extra_config)
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
        alone = copy.copy(config)
        alone.kv_transfer_config = KVTransferConfig(**CONNECTOR)
        return [ServedConfig(alone, lambda check: check != Check.SETTINGS)]
    first, *further = ours
    return [
        ServedConfig(first, lambda check: True),
        *(ServedConfig(child, lambda check: check == Check.SETTINGS) for child in further),
    ]


def _guarded(
    check: str,
    report: ConfigReport,
    make: Callable[[], Result],
    remedy: Callable[[], str] = lambda: "",
) -> Result | None:
    """Return `make()`. Where that raises, add a FAIL in vLLM's words, and return None.

    `remedy` is asked for the remedy then.
    """
    try:
        return make()
    except Exception as error:  # What vLLM refuses is printed as a finding that failed.
        logger.exception("hybridkv: vLLM refuses")
        what = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
        line = next(filter(None, map(str.strip, what.splitlines())), type(error).__name__)
        report.findings.append(fail(check, f"vLLM says: {line}", remedy()))
        return None


def _judge_cache(config: Any, report: ConfigReport, cache: CachePreview) -> None:
    """Add the preview, the findings and the identity that follow from the groups and layouts."""
    kv_cache_config, layouts = cache
    groups = list(preflight.group_findings(kv_cache_config, config))
    groups += shard_findings(kv_cache_config, config, report.settings)
    report.findings += groups
    geometry: Geometry | None = None
    stages = config.parallel_config.pipeline_parallel_size
    if all(finding.verdict is not Verdict.FAIL for finding in groups):
        try:
            chunk_tokens, drafter = report.settings.hybrid_chunk_size, _served_drafter(config)
            ahead = drafter.lookahead_tokens if drafter else 0
            geometry = built.build_geometry(
                kv_cache_config,
                layouts,
                chunk_tokens,
                built.parallelism_of(config.parallel_config, report.settings),
                lookahead_tokens=ahead,
            )
        except HybridKVError as error:
            report.findings.append(failure("chunk", error))
    model, rule = config.model_config, preflight.state_rule(config)
    gids = range(len(kv_cache_config.kv_cache_groups))
    report.preview = ConfigPreview(
        model=model.model,
        max_model_len=model.max_model_len,
        kv_dtype=built.kv_dtype(config, layouts[0]),
        ranks=len(layouts),
        stages=stages,
        groups=tuple(_group_preview(kv_cache_config, gid, layouts, stages) for gid in gids),
        geometry=geometry,
        states=rule,
    )
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
        # The weights are known once they are loaded.
        del facts["weights"]
    report.identity = fingerprint(facts).hex()
    report.all_facts = describe_facts(facts)
    report.options = _shared_options(config)
    when = "are read once they are loaded"
    if config.device_config.device_type == "cpu":
        when += f", in up to {PROBE_SECONDS_MAX:g} s, and for the rest in idle steps"
    facts.setdefault("weights", when)
    for part in ("model_config", "cache_config", "parallel_config"):
        facts |= cast(dict[str, object], facts[part])
    shown = {key: facts[key] for key in _FACTS_SHOWN if key in facts}
    report.facts = {key: msgspec.json.encode(fact).decode() for key, fact in shown.items()}
    report.findings.append(ok("identity", f"{report.identity[:12]}; weights {facts['weights']}"))


def _shared_options(config: Any) -> dict[str, OptionValue]:
    """Return what came of the options and variables that two engines must share."""
    options: dict[str, OptionValue] = {HASH_SEED: os.environ.get(HASH_SEED)}
    for option, path in {**OPTIONS, **WEIGHTS_OPTIONS}.items():
        value = operator.attrgetter(path)(config)
        if isinstance(value, torch.dtype):
            value = str(value).removeprefix("torch.")
        options[option] = value if isinstance(value, int | None) else str(value)
    return options


def preview_engine(vllm_config: Any, settings: Settings) -> CachePreview:
    """Build the model without memory, and return its KV cache as the connector would see it.

    A process can do this once, because layers register by name.
    """
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    ranks, stages = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    for name in (parallel.worker_cls, parallel.worker_extension_cls):
        if isinstance(name, str) and "." in name:
            # A worker imports them before it builds the model, which changes what can be built.
            importlib.import_module(name.rpartition(".")[0])
    with _pretended_ranks(vllm_config, ranks):
        stage_layers: list[list[str]] = []
        known: set[str] = set()
        for stage in range(stages):
            current = set_current_vllm_config(vllm_config)
            with current, set_default_torch_dtype(model.dtype), torch.device("meta"):
                init_workspace_manager(torch.device("meta"))
                with _pretended_stage(stage, stages):
                    initialize_model(vllm_config=vllm_config, model_config=model)
                if stage == stages - 1 and _served_drafter(vllm_config) is not None:
                    _make_drafter(vllm_config)
            stage_layers.append([name for name in _layers(vllm_config) if name not in known])
            known.update(stage_layers[-1])
        current_platform.update_block_size_for_backend(vllm_config)
        with set_current_vllm_config(vllm_config):
            workers, scheduler_config = _kv_cache_configs(vllm_config, stage_layers)
            layouts = [_worker_layout(vllm_config, config, settings) for config in workers]
    everyones = [layout.padded_block_bytes for layout in layouts]
    padded = [
        replace(layout, padding=stage_padding(layout.padded_block_bytes, everyones))
        for layout in layouts
    ]
    by_rank = {rank: padded[rank // ranks] for rank in range(ranks * stages)}
    return CachePreview(scheduler_config, by_rank)


def _served_drafter(vllm_config: Any) -> Drafter | None:
    """Return the drafter of the configuration. None where it has none or speculation is refused."""
    findings = speculation_findings(vllm_config)
    is_refused = any(finding.verdict is Verdict.FAIL for finding in findings)
    return None if is_refused else drafter_of(vllm_config)


def _make_drafter(vllm_config: Any) -> None:
    """Make the drafter's layers, which register beside the target's, as vLLM's proposers do."""
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


def _group_preview(
    config: KVCacheConfig, gid: int, layouts: Mapping[int, built.WorkerLayout], stages: int
) -> GroupPreview:
    """Return the preview of a group, which may be scratch or refused."""
    group, spec = config.kv_cache_groups[gid], config.kv_cache_groups[gid].kv_cache_spec
    names = ", ".join(sorted({type(layer).__name__ for layer in iter_layer_specs(spec)}))
    tokens = spec.block_size
    if gid not in config.prefix_cacheable_group_ids:
        count = len(group.layer_names)
        return GroupPreview(gid, f"scratch ({names})", tokens, count, block_bytes=0)
    sizes = layouts[0].sizes[gid]
    count = built.layer_count(layouts, gid, stages)
    preview = GroupPreview(gid, names, tokens, count, block_bytes=sum(sizes))
    try:
        known = built.group_geometry(gid, spec, sizes)
    except HybridKVError as error:
        return replace(preview, refusal=str(error))
    return replace(
        preview,
        kind=str(known.kind),
        block_bytes=known.block_bytes,
        window_tokens=known.window_tokens,
    )


@contextlib.contextmanager
def _pretended_ranks(vllm_config: Any, ranks: int) -> Iterator[None]:
    """Make this process rank 0 of `ranks`, by which layers divide, without communication."""
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


@contextlib.contextmanager
def _pretended_stage(stage: int, stages: int) -> Iterator[None]:
    """Make this process a stage of a pipeline, by which a model chooses its layers."""
    if stages == 1:
        yield
        return
    pipeline = parallel_state.get_pp_group()
    pipeline.rank = pipeline.rank_in_group = stage
    pipeline.world_size, pipeline.ranks = stages, [*range(stages)]
    try:
        yield
    finally:
        pipeline.rank = pipeline.rank_in_group = 0
        pipeline.world_size, pipeline.ranks = 1, [0]


def _layers(vllm_config: Any) -> dict[str, Any]:
    """Return all layers that have registered until now, by name."""
    layers = get_layers_from_vllm_config(vllm_config, cast(type[Any], AttentionLayerBase))
    return dict(layers)


def _kv_cache_configs(
    vllm_config: Any, stage_layers: Sequence[Sequence[str]]
) -> tuple[list[KVCacheConfig], KVCacheConfig]:
    """Return the configurations of workers, by stage, and that of the scheduler.

    They are made by the steps of EngineCore. `stage_layers` are the names of each stage's layers.
    """
    register_all_kvcache_specs(vllm_config)
    specs: dict[str, KVCacheSpec] = get_kv_cache_spec(vllm_config)
    layouts = get_supported_kv_cache_layouts(get_current_attn_backends(vllm_config))
    supported = [[layout.name for layout in layouts]]
    layout = resolve_kv_cache_layout(vllm_config, supported, list(specs.values()))
    stage_specs = [{name: specs[name] for name in names if name in specs} for names in stage_layers]
    memory = [_PRETENDED_MEMORY_BYTES] * len(stage_specs)
    workers = planning().get_kv_cache_configs(vllm_config, stage_specs, memory)
    for config in workers:
        config.kv_cache_layout = layout.name
    scheduler_config = kv_cache_utils.generate_scheduler_kv_cache_config(workers)
    groups = [group.kv_cache_spec for group in workers[0].kv_cache_groups]
    cacheable = [spec for spec in groups if spec.prefix_cacheable]
    vllm_config.cache_config.block_size = min(spec.block_size for spec in cacheable or groups)
    resolve_hits(scheduler_config, vllm_config)
    for config in workers:
        config.hash_block_size = scheduler_config.hash_block_size
        config.cache_hit_alignment_tokens = scheduler_config.cache_hit_alignment_tokens
    return workers, scheduler_config


def _worker_layout(
    vllm_config: Any, config: KVCacheConfig, settings: Settings
) -> built.WorkerLayout:
    """Return the layout of the views that a worker would register, from vLLM's allocator."""
    layers = _layers(vllm_config)
    groups = []
    for gid, group in enumerate(config.kv_cache_groups):
        spec = group.kv_cache_spec
        specs = getattr(spec, "kv_cache_specs", {})
        groups.append(
            [
                AttentionGroup(layers[name].get_attn_backend(), [name], specs.get(name, spec), gid)
                for name in group.layer_names
            ]
        )
    kernel_blocks = prepare_kernel_block_sizes(config, groups)
    resolved = vllm_config.cache_config.get_resolved_kv_cache_layout()
    views = allocate_kv_cache(config, torch.device("meta"), resolved, kernel_blocks)
    shards = rank_shards(config, vllm_config, settings)
    layout = built.worker_layout(
        config, shard_views(config, built.block_views(config, views), shards)[0]
    )
    return replace(layout, device=vllm_config.device_config.device_type)
