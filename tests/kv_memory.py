"""KV cache memory as vLLM's GPU model runner makes it, small, of every layout that CUDA has.

The groups, their places in the one allocation and the views are made by vLLM's own functions, in
the runner's order. No attention backend is asked: `kernel_tokens` says into what it splits blocks.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheLayout,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)
from vllm.v1.worker.utils import allocate_kv_cache

from hybridkv.vllm.layout import block_views
from hybridkv.vllm.versions import planning

BLOCKS = 9


@dataclass(frozen=True)
class KVMemory:
    """One rank's memory for its KV cache."""

    config: KVCacheConfig
    buffer: torch.Tensor  # All bytes of all layers: int8.
    groups: list[list[torch.Tensor]]  # Blocks of each layer of each group, as vLLM registers them.
    views: dict[str, torch.Tensor]  # The same by the layer's name.

    def within(self, buffer: torch.Tensor, gid: int) -> list[torch.Tensor]:
        """The layers' blocks of a group in another buffer of the same size."""
        return [
            buffer.view(view.dtype).as_strided(view.shape, view.stride(), view.storage_offset())
            for view in self.groups[gid]
        ]


@dataclass(frozen=True)
class Cache:
    """The KV cache of one model: its layers' specs and the layout of its memory."""

    layout: str  # Name of a KVCacheLayout.
    specs: Mapping[str, KVCacheSpec]
    kernel_tokens: int | None = None  # Tokens in a block of the attention kernels.

    def memory(self, device: str = "cpu", blocks: int = BLOCKS) -> KVMemory:
        """Returns the memory of such a cache, with random bytes in all of it, padding too."""
        layout, vllm_config = KVCacheLayout[self.layout], VllmConfig()
        register_all_kvcache_specs(vllm_config)
        vllm_config.cache_config.kv_cache_layout = self.layout
        vllm_config.cache_config.num_gpu_blocks_override = blocks
        groups = planning().get_kv_cache_groups(vllm_config, dict(self.specs))
        config = planning().get_kv_cache_config_from_groups(vllm_config, groups, 0)
        vllm_config.cache_config.block_size = min(
            group.kv_cache_spec.block_size for group in groups
        )
        scheduler_config = kv_cache_utils.generate_scheduler_kv_cache_config([config])
        sizes = kv_cache_utils.resolve_kv_cache_block_sizes(scheduler_config, vllm_config)
        alignment = kv_cache_utils.resolve_cache_hit_alignment_tokens(
            scheduler_config, vllm_config, *sizes
        )
        config.hash_block_size, config.cache_hit_alignment_tokens = sizes[1], alignment
        kernels = [
            self.kernel_tokens
            if self.kernel_tokens and isinstance(group.kv_cache_spec, AttentionSpec)
            else group.kv_cache_spec.block_size
            for group in groups
        ]
        tensors = allocate_kv_cache(config, torch.device(device), layout, kernels)
        buffer = next(iter(tensors.values()))
        buffer = torch.empty(0, dtype=torch.int8, device=device).set_(buffer.untyped_storage())
        buffer.copy_(torch.frombuffer(bytearray(os.urandom(len(buffer))), dtype=torch.int8))
        views = block_views(config, tensors)
        names = [group.layer_names for group in config.kv_cache_groups]
        return KVMemory(
            config, buffer, [[views[name] for name in layer_names] for layer_names in names], views
        )


def layers(name: str, spec: KVCacheSpec, count: int) -> dict[str, KVCacheSpec]:
    return {f"{name}.{number}": spec for number in range(count)}


def full(heads: int, tokens: int, head_size: int, **fields: Any) -> FullAttentionSpec:
    """Keys and values of 16-bit numbers."""
    return FullAttentionSpec(
        block_size=tokens, num_kv_heads=heads, head_size=head_size, dtype=torch.int16, **fields
    )


def sliding(heads: int, tokens: int, head_size: int) -> SlidingWindowSpec:
    """A sliding window of 64 tokens, with keys and values of 16-bit numbers."""
    of = full(heads, tokens, head_size)
    return SlidingWindowSpec(
        block_size=tokens,
        num_kv_heads=heads,
        head_size=of.head_size,
        dtype=of.dtype,
        sliding_window=64,
    )


def latent(tokens: int, size: int, dtype: torch.dtype, **fields: Any) -> MLAAttentionSpec:
    """MLA: one vector of `size` numbers for each token."""
    return MLAAttentionSpec(
        block_size=tokens, num_kv_heads=1, head_size=size, dtype=dtype, max_tp_shards=1, **fields
    )


def latent_window(
    tokens: int, size: int, dtype: torch.dtype, **fields: Any
) -> SlidingWindowMLASpec:
    """DeepSeek-V4's windows and the states of its compressors."""
    return SlidingWindowMLASpec(
        block_size=tokens,
        num_kv_heads=1,
        head_size=size,
        dtype=dtype,
        max_tp_shards=1,
        sliding_window=128,
        alignment=576,
        **fields,
    )


def state(tokens: int, size: int, page: int) -> MambaSpec:
    """Recurrent states of `size` bytes in pages of `page` bytes."""
    return MambaSpec(
        block_size=tokens,
        shapes=((size,),),
        dtypes=(torch.int8,),
        page_size_padded=page,
        mamba_cache_mode="align",
    )


def _deepseek_v4() -> dict[str, KVCacheSpec]:
    """Two layers that compress by 4 and by 128, with windows, indexer and compressor states."""
    packed: dict[str, Any] = {"state_content_bytes": 584, "alignment": 576}
    coarse = latent(256, 512, torch.uint8, tokens_per_state=128, **packed)
    window = latent_window(64, 512, torch.uint8, state_content_bytes=584)
    indexer = latent(256, 132, torch.uint8, tokens_per_state=4, alignment=576)
    return {
        "4.mla": latent(256, 512, torch.uint8, tokens_per_state=4, **packed),
        "4.window": window,
        "4.indexer": indexer,
        "4.compressor": latent_window(4, 2048, torch.float32),
        "4.indexer.compressor": latent_window(4, 512, torch.float32),
        "128.mla": coarse,
        "128.window": window,
        "128.compressor": latent_window(8, 1024, torch.float32),
    }


CACHES = {
    **{
        layout: Cache(layout, layers("full", full(2, 16, 4), 3))
        for layout in ("LBNHC", "LBHNC", "BLNHC", "BLHNC", "LHBNC", "BHLNC")
    },
    "one layer": Cache("LBNHC", layers("full", full(1, 16, 4), 1)),
    "one head": Cache("LBNHC", layers("full", full(1, 16, 4), 3)),
    "eight heads": Cache("LBNHC", layers("full", full(8, 16, 16), 3)),
    "eight heads LHBNC": Cache("LHBNC", layers("full", full(8, 16, 16), 3)),
    "large blocks": Cache("LBHNC", layers("full", full(4, 128, 64), 2)),
    "544 tokens": Cache("LBNHC", layers("full", full(2, 544, 16), 2)),
    "1056 tokens": Cache("LBNHC", layers("full", full(2, 1056, 8), 2)),
    "split LBNHC": Cache("LBNHC", layers("full", full(2, 544, 16), 2), 16),
    "split LBHNC": Cache("LBHNC", layers("full", full(2, 544, 16), 2), 16),
    "windows": Cache(
        "BLNHC", layers("full", full(2, 16, 8), 2) | layers("window", sliding(2, 16, 8), 4)
    ),
    "windows LHBNC": Cache(
        "LHBNC", layers("full", full(2, 16, 8), 2) | layers("window", sliding(2, 16, 8), 4)
    ),
    "mixed heads": Cache(
        "LBNHC", layers("full", full(1, 16, 64), 2) | layers("window", sliding(4, 16, 8), 4)
    ),
    "states": Cache(
        "LBNHC",
        layers("full", full(2, 640, 8), 2)
        | layers("state", state(640, 35_072, full(2, 640, 8).page_size_bytes), 6),
        16,
    ),
    "padded states": Cache("LBNHC", layers("state", state(128, 1000, 1536), 3)),
    "odd bytes": Cache("LBNHC", layers("state", state(128, 333, 401), 2)),
    "mla": Cache("LBNHC", layers("mla", latent(64, 576, torch.int16), 2)),
    "fp8_ds_mla": Cache(
        "LBNHC", layers("mla", latent(64, 576, torch.uint8, state_content_bytes=656), 2)
    ),
    "indexer": Cache(
        "LBNHC",
        layers("mla", latent(64, 576, torch.uint8, state_content_bytes=656), 2)
        | layers("indexer", latent(64, 132, torch.uint8), 2),
    ),
    "indexer BLHNC": Cache(
        "BLHNC",
        layers("mla", latent(64, 576, torch.uint8, state_content_bytes=656), 2)
        | layers("indexer", latent(64, 132, torch.uint8), 2),
    ),
    "deepseekv4": Cache("BLHNC", _deepseek_v4()),
    "band between odd bytes": Cache(
        "LBNHC",
        layers("a", latent(1, 333, torch.uint8, alignment=8), 1)
        | layers("b", latent(1, 512, torch.uint8), 2)
        | layers("c", latent(1, 331, torch.uint8, alignment=8), 1),
    ),
}
"""Caches by what is special in each."""
