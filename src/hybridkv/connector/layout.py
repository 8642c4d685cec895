"""From vLLM's KV cache groups and registered tensors to a Geometry; a layout not understood is refused by name."""

from collections.abc import Mapping
from typing import Any

import torch
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVQuantMode,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    group_kernel_blocks,
    iter_layer_specs,
)

from hybridkv.connector.blocks import block_bytes, block_runs
from hybridkv.connector.metadata import LayerLayout, WorkerLayout
from hybridkv.core.coverage import Keeping, keeping
from hybridkv.core.errors import ConfigError, GeometryError, HybridKVError
from hybridkv.core.geometry import Geometry, Group, Kind, derive_chunk_tokens

_KINDS = {
    FullAttentionSpec: Kind.FULL,
    MLAAttentionSpec: Kind.FULL,
    SlidingWindowSpec: Kind.SLIDING,
    SlidingWindowMLASpec: Kind.SLIDING,
    ChunkedLocalAttentionSpec: Kind.CHUNKED_LOCAL,
    MambaSpec: Kind.RECURRENT,
}
"""By exact class: a subclass of a spec may keep its blocks by another rule."""
RUNS_MAX = 1024
"""Contiguous pieces that one block of one layer may be made of."""


def group_geometry(gid: int, spec: Any, layer_bytes: tuple[int, ...]) -> Group:
    """A Group from a vLLM spec; raises GeometryError or ConfigError."""
    layers = list(iter_layer_specs(spec))
    first = layers[0]
    kinds = {_KINDS.get(type(layer)) for layer in layers}
    kind = kinds.pop()
    if kind is None or kinds:
        names = ", ".join(sorted({type(layer).__name__ for layer in layers}))
        raise GeometryError(
            f"KV cache group {gid} ({names}) is of a kind that hybridkv does not restore yet; "
            "serve this model without the connector"
        )
    modes = {getattr(layer, "kv_quant_mode", KVQuantMode.NONE) for layer in layers}
    if modes - {KVQuantMode.NONE, KVQuantMode.FP8_PER_TENSOR}:
        raise GeometryError(
            f"KV cache group {gid}: the cache dtype ({', '.join(mode.name for mode in modes)}) keeps scales that "
            "hybridkv does not restore yet; --kv-cache-dtype auto works"
        )
    if kind is Kind.RECURRENT and first.mamba_cache_mode != "align":
        raise ConfigError(
            f"mamba_cache_mode={first.mamba_cache_mode!r} keeps no state that can be restored; "
            "--mamba-cache-mode align works (and needs --enable-prefix-caching)"
        )
    window = {
        Kind.SLIDING: lambda: first.sliding_window,
        Kind.CHUNKED_LOCAL: lambda: first.attention_chunk_size,
    }.get(kind, lambda: 0)()
    extra = first.extra_retained_tokens if kind is Kind.SLIDING else 0
    return Group(gid, kind, first.block_size, layer_bytes, window, extra, is_replicated(spec))


def group_keeping(gid: int, spec: Any) -> Keeping:
    """What a group keeps of a request; where that is not understood, everything."""
    try:
        return keeping(group_geometry(gid, spec, (1,)))
    except HybridKVError:
        return Keeping(spec.block_size, None)


def is_replicated(spec: Any) -> bool:
    """Whether vLLM declares that all tensor parallel ranks keep the same bytes of a group (requirements C5)."""
    return all(getattr(layer, "max_tp_shards", None) == 1 for layer in iter_layer_specs(spec))


def build_geometry(config: KVCacheConfig, layouts: Mapping[int, WorkerLayout], chunk_tokens: int | None) -> Geometry:
    """The geometry of an engine from its groups and its workers' layouts by rank."""
    # Such a group is not cacheable, but the engine then takes other hits than it is offered.
    if any(
        layer.prefix_replay_tokens
        for group in config.kv_cache_groups
        for layer in iter_layer_specs(group.kv_cache_spec)
    ):
        raise ConfigError(
            "swa_bounded_replay computes a part of every hit again and is not proven yet; --no-swa-bounded-replay works"
        )
    first = layouts[0]
    for rank, layout in layouts.items():
        if _sizes(layout) != _sizes(first):
            raise GeometryError(f"rank {rank} has other KV cache layers than rank 0, which is not supported yet")
    groups = tuple(
        group_geometry(
            gid,
            config.kv_cache_groups[gid].kv_cache_spec,
            tuple(layer.block_bytes for layer in first.layers[gid]),
        )
        for gid in config.prefix_cacheable_group_ids
    )
    smallest = min(groups, key=lambda group: group.tokens_per_block, default=None)
    for group in groups:
        if group.kind is Kind.RECURRENT and smallest and group.tokens_per_block > smallest.tokens_per_block:
            # Its scheduler cuts prefill at the smallest block, so that the states it caches are not those it names.
            raise GeometryError(
                f"KV cache group {group.gid} keeps a recurrent state every {group.tokens_per_block} tokens and group "
                f"{smallest.gid} has blocks of {smallest.tokens_per_block}: vLLM 0.32 caches wrong states for these; "
                "serving without the connector and with --no-enable-prefix-caching works"
            )
    alignment, hashing = config.cache_hit_alignment_tokens, config.hash_block_size
    if not groups or not alignment or not hashing:
        raise GeometryError("vLLM names no cacheable KV cache group or no hit alignment; is prefix caching on?")
    chunk = chunk_tokens or derive_chunk_tokens(groups, alignment, hashing)
    return Geometry(groups, chunk, alignment, hashing, len(layouts))


def worker_layout(config: KVCacheConfig, views: Mapping[str, torch.Tensor]) -> WorkerLayout:
    """The physical layout of the registered tensors (`views` from `block_views`)."""
    layers = {
        gid: tuple(_layer_layout(name, views[name]) for name in config.kv_cache_groups[gid].layer_names)
        for gid in config.prefix_cacheable_group_ids
    }
    return WorkerLayout(layers, next(iter(views.values())).device.type)


def block_views(config: KVCacheConfig, kv_caches: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Each cacheable layer's tensor with dim 0 = blocks; `view[block_id]` is the block's bytes in any layout."""
    views: dict[str, torch.Tensor] = {}
    for gid in config.prefix_cacheable_group_ids:
        for name in config.kv_cache_groups[gid].layer_names:
            tensor = kv_caches.get(name)
            if not isinstance(tensor, torch.Tensor) or tensor.shape[0] % config.num_blocks:
                raise GeometryError(f"layer {name} has no registered KV cache of {config.num_blocks} blocks")
            view = group_kernel_blocks(tensor, config.num_blocks)
            if sum(1 for _ in block_runs(view)) > RUNS_MAX:
                raise GeometryError(f"a block of layer {name} is scattered over more than {RUNS_MAX} pieces")
            views[name] = view
    return views


def _layer_layout(name: str, view: torch.Tensor) -> LayerLayout:
    return LayerLayout(
        name,
        block_bytes(view),
        str(view.dtype),
        tuple(view.shape[1:]),
        tuple(view.stride()[1:]),
        view.stride(0) * view.element_size(),
    )


def _sizes(layout: WorkerLayout) -> dict[int, tuple[int, ...]]:
    return {gid: tuple(layer.block_bytes for layer in layers) for gid, layers in layout.layers.items()}
