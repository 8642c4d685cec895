"""KV cache groups of real models as vLLM 0.32 resolves them, at true sizes and scaled down."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from vllm.v1.core.kv_cache_utils import (
    resolve_cache_hit_alignment_tokens,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

WORD = 8


@dataclass(frozen=True)
class Member:
    """One group: `what` it is, tokens per block, its window, and words per token of each layer."""

    what: str
    block: int
    window: int = 0
    layers: tuple[int, ...] = (1,)

    @property
    def is_recurrent(self) -> bool:
        """Whether a block holds one state and not its tokens."""
        return self.what == "recurrent"

    @property
    def block_words(self) -> int:
        """Words of a block in the widest layer."""
        return (1 if self.is_recurrent else self.block) * max(self.layers)

    def spec(self, words: int) -> KVCacheSpec:
        """vLLM's spec of one layer."""
        attention: dict[str, Any] = {
            "block_size": self.block,
            "num_kv_heads": 1,
            "head_size": words,
            "dtype": torch.float32,
        }
        latent = {**attention, "head_size": 2 * words, "head_size_v": 0, "max_tp_shards": 1}
        match self.what:
            case "full":
                return FullAttentionSpec(**attention)
            case "mla":
                return MLAAttentionSpec(**latent)
            case "sliding":
                return SlidingWindowSpec(**attention, sliding_window=self.window)
            case "mla_sliding":
                return SlidingWindowMLASpec(**latent, sliding_window=self.window)
            case "chunked":
                return ChunkedLocalAttentionSpec(**attention, attention_chunk_size=self.window)
            case "scratch":
                return CircularBufferSpec(**{**attention, "head_size": 2 * words, "head_size_v": 0})
            case "recurrent":
                shapes, dtypes = ((words,),), (torch.int64,)
                return MambaSpec(
                    block_size=self.block, shapes=shapes, dtypes=dtypes, mamba_cache_mode="align"
                )
        raise ValueError(self.what)


@dataclass(frozen=True)
class Layout:
    """The groups of one model."""

    name: str
    members: tuple[Member, ...]
    weight: int = 4
    """How often it is drawn, among all layouts."""

    @property
    def unit(self) -> int:
        """The engine's scheduler block."""
        return math.lcm(*(member.block for member in self.members))

    @property
    def block_size(self) -> int:
        """vLLM's cache_config.block_size, which its scheduler uses for the recurrent groups."""
        return min(member.block for member in self.members if member.what != "scratch")

    @property
    def has_recurrent(self) -> bool:
        """Whether a step must be able to cover a whole recurrent block."""
        return any(member.is_recurrent for member in self.members)

    def layer_names(self, gid: int) -> list[str]:
        """The layers of a group."""
        return [f"g{gid}.l{layer}" for layer in range(len(self.members[gid].layers))]

    def config(self, vllm_config: Any, num_blocks: int, worker: bool) -> KVCacheConfig:
        """vLLM's config of these groups; as in vLLM, only the worker's has each layer's spec."""
        groups = [
            KVCacheGroupSpec(self.layer_names(gid), member.spec(member.layers[0]))
            for gid, member in enumerate(self.members)
        ]
        config = KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups)
        config.prefix_cache_retention_interval = (
            vllm_config.cache_config.prefix_cache_retention_interval
        )
        config.kv_cache_layout = "simulated"
        scheduler_block, hash_block = resolve_kv_cache_block_sizes(config, vllm_config)
        config.hash_block_size = hash_block
        config.cache_hit_alignment_tokens = resolve_cache_hit_alignment_tokens(
            config, vllm_config, scheduler_block, hash_block
        )
        for member, group in zip(self.members, groups, strict=True):
            if worker and len(set(member.layers)) > 1:
                layers = zip(group.layer_names, member.layers, strict=True)
                specs = {name: member.spec(words) for name, words in layers}
                group.kv_cache_spec = UniformTypeKVCacheSpecs(
                    block_size=member.block, kv_cache_specs=specs
                )
        return config

    def blocks_for(self, tokens: int, budget: int) -> int:
        """Blocks that one request of this length may hold at once."""
        needed = 0
        for member in self.members:
            whole = -(-tokens // member.block)
            held = {
                "sliding": -(-(member.window + budget) // member.block) + 2,
                "mla_sliding": -(-(member.window + budget) // member.block) + 2,
                "chunked": -(-(member.window + budget) // member.block) + 1,
                "scratch": 1,
                "recurrent": 4,
            }.get(member.what, whole)
            needed += min(whole + 1, held)
        return needed


def _m(what: str, block: int, window: int = 0, layers: tuple[int, ...] = (1,)) -> Member:
    return Member(what, block, window, layers)


def _scaled(layout: Layout, factor: int, name: str) -> Layout:
    members = tuple(
        Member(
            member.what, max(2, member.block // factor), -(-member.window // factor), member.layers
        )
        for member in layout.members
    )
    return Layout(name, members, 4)


_TRUE = (
    Layout("full", (_m("full", 16, layers=(1, 1)),)),
    Layout("mistral", (_m("sliding", 16, 70),)),
    Layout("gemma3", (_m("sliding", 128, 512), _m("sliding", 128, 512), _m("full", 128)), 1),
    Layout("gemma4", (_m("sliding", 256, 512), _m("sliding", 256, 512), _m("full", 128)), 1),
    Layout("gptoss", (_m("sliding", 128, 128), _m("full", 128)), 1),
    Layout("llama4", (*(_m("chunked", 128, 512),) * 3, _m("full", 128)), 1),
    Layout(
        "qwen3next",
        (*(_m("recurrent", 256, layers=(3, 3)),) * 3, _m("full", 256, layers=(1, 1))),
        1,
    ),
    Layout("qwen3next_1056", (*(_m("recurrent", 1056),) * 3, _m("full", 1056)), 1),
    Layout("falconh1", (_m("full", 640), _m("recurrent", 640)), 1),
    Layout("granite", (*(_m("recurrent", 640),) * 3, _m("full", 640)), 1),
    Layout("lfm2", (*(_m("recurrent", 128),) * 3, _m("full", 128)), 1),
    Layout(
        "glm53", (_m("recurrent", 3584), _m("scratch", 4), _m("scratch", 64), _m("mla", 3584)), 1
    ),
    Layout(
        "deepseekv4",
        (
            _m("mla_sliding", 64, 128),
            _m("mla_sliding", 64, 128),
            _m("mla", 256, layers=(2, 1)),
            _m("mla_sliding", 4, 128),
            _m("mla_sliding", 8, 128),
        ),
        1,
    ),
)
_BY_NAME = {layout.name: layout for layout in _TRUE}
LAYOUTS = {
    layout.name: layout
    for layout in (
        *_TRUE,
        *(
            _scaled(_BY_NAME[name], factor, f"{name}_small")
            for name, factor in {
                "gemma3": 16,
                "gemma4": 16,
                "gptoss": 8,
                "llama4": 16,
                "qwen3next": 16,
                "qwen3next_1056": 32,
                "falconh1": 32,
                "lfm2": 8,
                "glm53": 16,
                "deepseekv4": 2,
            }.items()
        ),
        Layout("llama4_unaligned", (_m("chunked", 16, 72), _m("chunked", 16, 72), _m("full", 16))),
        Layout("llama4_long", (_m("chunked", 16, 200), _m("full", 16))),
        Layout("odd_window", (_m("sliding", 16, 33), _m("sliding", 16, 17), _m("full", 16))),
        Layout("wide_full", (_m("full", 64), _m("sliding", 16, 40))),
        Layout("all_sliding", (_m("sliding", 16, 40), _m("sliding", 32, 100))),
        Layout(
            "everything",
            (_m("recurrent", 16), _m("full", 16), _m("sliding", 32, 50), _m("sliding", 48, 20)),
        ),
        Layout("recurrent_fine", (_m("recurrent", 16), _m("full", 64))),
    )
}
"""By name. `_small` ones are scaled; the last seven keep a model's hard parts, not its numbers."""
