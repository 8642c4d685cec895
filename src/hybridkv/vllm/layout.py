"""From vLLM's KV cache groups and tensors to a Geometry. An unknown layout is refused by name."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from math import prod
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata
from vllm.v1 import kv_cache_interface as kv
from vllm.v1.kv_cache_interface import KVCacheConfig, KVQuantMode, iter_layer_specs

from hybridkv.core.errors import ConfigError, GeometryError, HybridKVError
from hybridkv.core.geometry import Geometry, Group, GroupKind, derive_chunk_tokens
from hybridkv.core.settings import Settings
from hybridkv.vllm.block_room import Retention, retention_of
from hybridkv.vllm.blocks import block_bytes, memory_order, physical


@dataclass(frozen=True)
class LayerLayout:
    """One registered tensor: the memory of a layer's blocks."""

    name: str
    block_bytes: int
    dtype: str
    shape: tuple[int, ...]  # The shape of one block, as vLLM registers it.
    order: tuple[int, ...]
    """The dims of `shape` in the order of memory, without those of length 1. A block's bytes stand
    in this order in an object, so it is a part of the identity. Strides are not, since they change
    with the number of blocks."""


@dataclass(frozen=True)
class WorkerLayout(KVConnectorHandshakeMetadata):
    """All layers of one rank by gid, in the order in which their bytes stand in an object.

    With `Settings.share_tp` they are those of one shard of its heads (vllm.shards).
    """

    layers: dict[int, tuple[LayerLayout, ...]]
    device: str
    staging_bytes: int | None = None
    """The most bytes of stores that are copied and not reported yet. None = no bound (CPU)."""
    weights: str = ""  # The digest of the rank's weights; empty where none are loaded.
    padding: Mapping[int, int] = field(default_factory=dict)
    """Bytes of one block after its layers, by gid (vllm.stages)."""

    @property
    def sizes(self) -> dict[int, tuple[int, ...]]:
        """Bytes of one block in each layer, by gid, and those of the padding."""
        sizes = {}
        for gid, layers in self.layers.items():
            padding = (self.padding[gid],) if gid in self.padding else ()
            sizes[gid] = (*(layer.block_bytes for layer in layers), *padding)
        return sizes

    @property
    def padded_block_bytes(self) -> dict[int, int]:
        """Bytes of one block in all layers, by gid, with those of the padding."""
        return {gid: sum(layers) for gid, layers in self.sizes.items()}


_KINDS = {
    kv.FullAttentionSpec: GroupKind.FULL,
    kv.MLAAttentionSpec: GroupKind.FULL,
    kv.SlidingWindowSpec: GroupKind.SLIDING,
    kv.SlidingWindowMLASpec: GroupKind.SLIDING,
    kv.ChunkedLocalAttentionSpec: GroupKind.CHUNKED_LOCAL,
    kv.MambaSpec: GroupKind.RECURRENT,
}
"""By exact class, because a subclass of a spec may keep its blocks by another rule."""
RUNS_MAX = 1024  # Contiguous pieces that one block of one layer may consist of.


def group_geometry(gid: int, spec: Any, layer_bytes: tuple[int, ...]) -> Group:
    """Return the Group of a vLLM spec. Raises GeometryError or ConfigError.

    `layer_bytes` are the bytes of one block in each of the group's layers.
    """
    layers = list(iter_layer_specs(spec))
    first = layers[0]
    kinds = {_KINDS.get(type(layer)) for layer in layers}
    kind = kinds.pop()
    if kind is None or kinds:
        names = ", ".join(sorted({type(layer).__name__ for layer in layers}))
        what = f"KV cache group {gid} ({names}) is of a kind that hybridkv does not restore yet"
        raise GeometryError(what, "serve this model without the connector")
    modes = {getattr(layer, "kv_quant_mode", KVQuantMode.NONE) for layer in layers}
    if modes - {KVQuantMode.NONE, KVQuantMode.FP8_PER_TENSOR}:
        names = ", ".join(mode.name for mode in modes)
        what = f"the cache dtype ({names}) keeps scales that hybridkv does not restore yet"
        raise GeometryError(f"KV cache group {gid}: {what}", "--kv-cache-dtype auto works")
    if kind is GroupKind.RECURRENT and first.mamba_cache_mode != "align":
        what = f"mamba_cache_mode={first.mamba_cache_mode!r} keeps no state that can be restored"
        remedy = "--mamba-cache-mode align works (and needs --enable-prefix-caching)"
        raise ConfigError(what, remedy)
    window, extra = 0, 0
    if kind is GroupKind.SLIDING:
        window, extra = first.sliding_window, first.extra_retained_tokens
    elif kind is GroupKind.CHUNKED_LOCAL:
        window = first.attention_chunk_size
    return Group(
        gid=gid,
        kind=kind,
        tokens_per_block=first.block_size,
        layer_bytes=layer_bytes,
        window_tokens=window,
        extra_retained_tokens=extra,
        replicated=is_replicated(spec),
    )


def group_keeping(gid: int, spec: Any) -> Retention:
    """Return what a group keeps of a request. A group that is not understood keeps all tokens."""
    draft_blocks = getattr(next(iter(iter_layer_specs(spec))), "num_speculative_blocks", 0)
    try:
        return retention_of(group_geometry(gid, spec, (1,)), draft_blocks)
    except HybridKVError:
        return Retention(spec.block_size, None)


def is_replicated(spec: Any) -> bool:
    """Return True if vLLM declares that all tensor parallel ranks keep the same bytes (C5)."""
    return all(getattr(layer, "max_tp_shards", None) == 1 for layer in iter_layer_specs(spec))


@dataclass(frozen=True, slots=True)
class Parallelism:
    """How an engine's ranks divide layers and heads, in the words of core.geometry.Geometry."""

    stages: int = 1
    nodes: int = 1
    shards: int = 0
    ranks: int | None = None  # Of one engine. None = as many as have a layout.


def parallelism_of(parallel: Any, settings: Settings) -> Parallelism:
    """Return the parallelism of an engine from its ParallelConfig and its settings."""
    return Parallelism(
        stages=parallel.pipeline_parallel_size,
        nodes=node_count(parallel, settings),
        shards=settings.share_tp or 0,
        ranks=parallel.tensor_parallel_size * parallel.pipeline_parallel_size,
    )


def build_geometry(
    config: KVCacheConfig,
    layouts: Mapping[int, WorkerLayout],
    chunk_tokens: int | None,
    parallelism: Parallelism = Parallelism(),
    lookahead_tokens: int = 0,
) -> Geometry:
    """Return the geometry of an engine from its groups and its workers' layouts by rank.

    Ranks of one stage have the same layers. Where the KV heads are stored in shards (vllm.shards)
    the layouts are those of a shard. `chunk_tokens` are those that the user wants, or None. Raises
    GeometryError or ConfigError where the engine cannot be served.
    """
    specs = [group.kv_cache_spec for group in config.kv_cache_groups]
    # Such a group is not cacheable, but because of it the engine takes other hits than are offered.
    if any(
        getattr(layer, "prefix_replay_tokens", 0)
        for spec in specs
        for layer in iter_layer_specs(spec)
    ):
        what = "swa_bounded_replay computes a part of every hit again and is not proven yet"
        raise ConfigError(what, "--no-swa-bounded-replay works")
    ranks = len(layouts) if parallelism.ranks is None else parallelism.ranks
    if not ranks or sorted(layouts) != [*range(ranks)]:
        came = ", ".join(map(str, sorted(layouts))) or "none"
        what = f"vLLM handed over the KV cache layers of the ranks {came} of {ranks}"
        raise GeometryError(what, 'distributed_executor_backend="mp" works')
    sizes, gids = layouts[0].sizes, config.prefix_cacheable_group_ids
    sharers = len(layouts) // parallelism.stages
    for rank, layout in layouts.items():
        first = layouts[rank // sharers * sharers]
        if (
            layout.sizes != first.sizes
            or layout.padded_block_bytes != layouts[0].padded_block_bytes
        ):
            what = f"rank {rank} has other KV cache layers than rank 0, which is not supported yet"
            raise GeometryError(what)
    groups = tuple(group_geometry(gid, specs[gid], sizes[gid]) for gid in gids)
    _check_states(groups)
    alignment, hashing = config.cache_hit_alignment_tokens, config.hash_block_size
    if not groups or not alignment or not hashing:
        what = "vLLM names no cacheable KV cache group or no hit alignment"
        raise GeometryError(what, "serving this model without the connector works")
    chunk = chunk_tokens or derive_chunk_tokens(groups, alignment, hashing)
    return Geometry(
        groups=groups,
        chunk_tokens=chunk,
        alignment_tokens=alignment,
        hash_tokens=hashing,
        ranks=len(layouts),
        lookahead_tokens=lookahead_tokens,
        stages=parallelism.stages,
        nodes=parallelism.nodes,
        shards=parallelism.shards,
    )


def node_count(parallel: Any, settings: Settings) -> int:
    """Return over how many nodes the ranks of an engine are, by its ParallelConfig.

    vLLM says it where it starts the workers itself. With Ray the setting `nodes` does.
    """
    return settings.nodes or int(getattr(parallel, "nnodes_within_dp", 1))


def layer_count(layouts: Mapping[int, WorkerLayout], gid: int, stages: int) -> int:
    """Return the number of layers of a group, those of all stages together."""
    first_ranks = range(0, len(layouts), len(layouts) // stages)
    return sum(len(layouts[rank].layers[gid]) for rank in first_ranks)


def _check_states(groups: Sequence[Group]) -> None:
    """Raise GeometryError for a recurrent group with larger blocks than another group.

    vLLM 0.32 cuts prefill at the smallest block, so it caches other states than it names.
    """
    smallest = min(groups, key=lambda group: group.tokens_per_block, default=None)
    for group in groups:
        recurrent, tokens = group.kind is GroupKind.RECURRENT, group.tokens_per_block
        if recurrent and smallest and tokens > smallest.tokens_per_block:
            raise GeometryError(
                f"KV cache group {group.gid} keeps a recurrent state every {tokens} tokens and "
                f"group {smallest.gid} has blocks of {smallest.tokens_per_block}: "
                "vLLM 0.32 caches wrong states for these",
                "serving without the connector and with --no-enable-prefix-caching works",
            )


def block_views(
    config: KVCacheConfig, kv_caches: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return each cacheable layer's tensor, of which `view[block_id]` is a block in any layout.

    Raises GeometryError where a layer has no such tensor, or no layer is cacheable.
    """
    views: dict[str, torch.Tensor] = {}
    groups = (config.kv_cache_groups[gid] for gid in config.prefix_cacheable_group_ids)
    for name in chain.from_iterable(group.layer_names for group in groups):
        tensor = kv_caches.get(name)
        if not isinstance(tensor, torch.Tensor) or tensor.shape[0] % config.num_blocks:
            what = f"layer {name} has no registered KV cache of {config.num_blocks} blocks"
            raise GeometryError(what)
        views[name] = kv.group_kernel_blocks(tensor, config.num_blocks)
        refuse_scattered(name, views[name])
    if not views:
        raise GeometryError("this worker has no layer whose KV cache can be restored")
    return views


def refuse_scattered(name: str, view: torch.Tensor) -> None:
    """Raise GeometryError where a block of this view has too many contiguous pieces."""
    if prod(physical(view).shape[1:-1]) > RUNS_MAX:
        what = f"a block of layer {name} is scattered over more than {RUNS_MAX} pieces"
        raise GeometryError(what)


def worker_layout(config: KVCacheConfig, views: Mapping[str, torch.Tensor]) -> WorkerLayout:
    """Return the physical layout of the registered tensors (`views` from `block_views`)."""
    layers = {}
    for gid in config.prefix_cacheable_group_ids:
        named = [(name, views[name]) for name in config.kv_cache_groups[gid].layer_names]
        layers[gid] = tuple(
            LayerLayout(
                name, block_bytes(view), str(view.dtype), tuple(view.shape[1:]), memory_order(view)
            )
            for name, view in named
        )
    return WorkerLayout(layers, next(iter(views.values())).device.type)


def kv_dtype(vllm_config: Any, layout: WorkerLayout) -> str:
    """Return the cache's dtype as configured, "auto" with the layers' dtypes: "auto (bfloat16)"."""
    configured = str(vllm_config.cache_config.cache_dtype)
    layers = chain.from_iterable(layout.layers.values())
    # Recurrent states are registered as plain bytes.
    dtypes = {layer.dtype.removeprefix("torch.") for layer in layers} - {"int8"}
    return f"auto ({', '.join(sorted(dtypes))})" if configured == "auto" and dtypes else configured
