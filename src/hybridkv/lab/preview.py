"""An engine's KV cache groups and layouts from its configuration, without weights or a cache.

The model is built on torch's meta device, where a tensor has a shape and no bytes. vLLM's own code
then makes the groups and the layers' views, so every figure is that of a served engine.
"""

import copy
import importlib
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import torch
from vllm.config import get_layers_from_vllm_config, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.platforms import current_platform
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts, resolve_kv_cache_layout
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec, iter_layer_specs
from vllm.v1.worker.gpu.attn_utils import get_kv_cache_spec
from vllm.v1.worker.utils import AttentionGroup, allocate_kv_cache, prepare_kernel_block_sizes

from hybridkv.core.errors import HybridKVError
from hybridkv.core.geometry import Geometry
from hybridkv.lab.capacity import ConfigPreview, GroupPreview
from hybridkv.vllm.layout import WorkerLayout, block_views, group_geometry, kv_dtype, worker_layout
from hybridkv.vllm.preflight import state_rule

_PRETENDED_MEMORY_BYTES = 1 << 48
"""Memory for the cache that is never taken: meta tensors have none."""


EnginePreview = tuple[KVCacheConfig, dict[int, WorkerLayout]]
"""The KV cache as the scheduler role gets it, and the layouts by rank: every rank has the same."""


def preview_engine(vllm_config: Any) -> EnginePreview:
    """What an engine of this configuration would register: the model is built without memory.

    A process can do this once, because layers register by name.
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
            initialize_model(vllm_config=vllm_config, model_config=model)
        current_platform.update_block_size_for_backend(vllm_config)
        with set_current_vllm_config(vllm_config):
            worker_config, config = _kv_cache_configs(vllm_config)
            layout = _worker_layout(vllm_config, worker_config)
    return config, dict.fromkeys(range(ranks), layout)


def describe(vllm_config: Any, engine: EnginePreview, geometry: Geometry | None) -> ConfigPreview:
    """The values for `hybridkv plan`."""
    model, (config, layouts) = vllm_config.model_config, engine
    named = model.model, model.max_model_len, kv_dtype(vllm_config, layouts[0])
    gids = range(len(config.kv_cache_groups))
    groups = tuple(_group_preview(config, gid, layouts[0]) for gid in gids)
    return ConfigPreview(*named, len(layouts), groups, geometry, state_rule(vllm_config))


def _group_preview(config: KVCacheConfig, gid: int, layout: WorkerLayout) -> GroupPreview:
    group, spec = config.kv_cache_groups[gid], config.kv_cache_groups[gid].kv_cache_spec
    names = ", ".join(sorted({type(one).__name__ for one in iter_layer_specs(spec)}))
    tokens, count = spec.block_size, len(group.layer_names)
    if gid not in config.prefix_cacheable_group_ids:
        return GroupPreview(gid, f"scratch ({names})", tokens, count, 0)
    sizes = layout.sizes[gid]
    try:
        known = group_geometry(gid, spec, sizes)
    except HybridKVError as error:
        return GroupPreview(gid, names, tokens, count, sum(sizes), refusal=str(error))
    return GroupPreview(gid, str(known.kind), tokens, count, known.block_bytes, known.window_tokens)


@contextmanager
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
    (config,) = kv_cache_utils.get_kv_cache_configs(vllm_config, [specs], memory)
    config.kv_cache_layout = layout.name
    made = kv_cache_utils.generate_scheduler_kv_cache_config([config])
    groups = [group.kv_cache_spec for group in config.kv_cache_groups]
    cacheable = [spec for spec in groups if spec.prefix_cacheable]
    vllm_config.cache_config.block_size = min(spec.block_size for spec in cacheable or groups)
    blocks = kv_cache_utils.resolve_kv_cache_block_sizes(made, vllm_config)
    alignment = kv_cache_utils.resolve_cache_hit_alignment_tokens(made, vllm_config, *blocks)
    for each in (config, made):
        each.hash_block_size, each.cache_hit_alignment_tokens = blocks[1], alignment
    return config, made


def _worker_layout(vllm_config: Any, config: KVCacheConfig) -> WorkerLayout:
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
    layout = worker_layout(config, block_views(config, views))
    return replace(layout, device=vllm_config.device_config.device_type)
