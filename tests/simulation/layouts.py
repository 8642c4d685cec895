"""KV cache groups of real models as vLLM 0.32 resolves them, at true sizes and scaled down."""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheLayout,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from hybridkv.vllm.drafters import NGRAM, STATE_VERSIONS, V2_VERSIONS, VERSIONS
from hybridkv.vllm.versions import minor_version, planning, resolve_hits

WORD = 8
_FIELDS = {field.name for field in dataclasses.fields(MLAAttentionSpec)}
# vLLM 0.30 has no such field, and each rank keeps bytes of its own.
SAME_ON_ALL_RANKS = {"max_tp_shards": 1} if "max_tp_shards" in _FIELDS else {}
KNOWS_DRAFT_LAYERS = "is_draft" in _FIELDS
"""Whether vLLM marks the groups that have a drafter's layer. Before 0.33 it counted positions."""


@dataclass(frozen=True)
class Placement:
    """The order of blocks, heads and layers in memory."""

    layout: KVCacheLayout
    heads: int  # Heads of the attention layers that are not MLA.
    split: bool  # Whether blocks are registered in halves, as for kernels that take small blocks.


ON_CPU = Placement(KVCacheLayout.LBHNC, 1, False)


@dataclass(frozen=True)
class Member:
    """A KV cache group of a layout."""

    what: str  # The kind of the group, a case of `spec`.
    block: int  # Tokens.
    window: int = 0  # Tokens of a sliding window or of an attention chunk.
    layers: tuple[int, ...] = (1,)  # Words per token of each layer.

    @property
    def is_recurrent(self) -> bool:
        """Whether a block holds one state and not its tokens."""
        return self.what == "recurrent"

    def spec(self, words: int, heads: int) -> KVCacheSpec:
        """Returns vLLM's spec of one layer of the group."""
        attention: dict[str, Any] = {
            "block_size": self.block,
            "num_kv_heads": heads,
            "head_size": words,
            "dtype": torch.float32,
        }
        single = {**attention, "num_kv_heads": 1, "head_size": 2 * words, "head_size_v": 0}
        latent = {**single, **SAME_ON_ALL_RANKS}
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
                return CircularBufferSpec(**single)
            case "recurrent":
                shapes, dtypes = ((words,),), (torch.int64,)
                kind = MambaAttentionBackendEnum.GDN_ATTN
                align: dict[str, Any] = {"mamba_type": kind, "mamba_cache_mode": "align"}
                return MambaSpec(block_size=self.block, shapes=shapes, dtypes=dtypes, **align)
        raise ValueError(self.what)


@dataclass(frozen=True)
class Drafting:
    """vLLM's method of drafting, and the drafter's layers."""

    method: str
    layers: tuple[tuple[int, int], ...] = ()  # (gid, number of the layer in the group).
    marked: tuple[int, ...] = ()  # The groups that vLLM marks as a drafter's (is_eagle_group).

    @property
    def has_layers(self) -> bool:
        """Whether drafts are made by a model, and so many in every step."""
        return self.method != "ngram"

    @property
    def lookahead(self) -> int:
        """Tokens after a position on which the drafter's bytes there depend."""
        return int(self.method == "eagle")


@dataclass(frozen=True)
class Layout:
    """The KV cache groups of a model."""

    name: str
    members: tuple[Member, ...]
    weight: int = 4
    """The layout is drawn in proportion to its weight."""
    drafting: Drafting | None = None

    @property
    def is_served(self) -> bool:
        """Whether this version of vLLM is served with the layout's drafts."""
        if self.drafting is None or (self.drafting.method == NGRAM and not self.has_recurrent):
            return True
        return minor_version() in (STATE_VERSIONS if self.has_recurrent else VERSIONS)

    @property
    def drafts_on_v2(self) -> bool:
        """Whether a drafter with layers is served on the V2 model runner of this vLLM."""
        has_drafter = self.drafting is not None and self.drafting.has_layers
        return has_drafter and minor_version() in V2_VERSIONS

    @property
    def unit(self) -> int:
        """The engine's scheduler block, in tokens: the least common multiple of all blocks."""
        return math.lcm(*(member.block for member in self.members))

    @property
    def block_size(self) -> int:
        """vLLM's cache_config.block_size, which its scheduler uses for the recurrent groups."""
        return min(member.block for member in self.members if member.what != "scratch")

    @property
    def has_recurrent(self) -> bool:
        """Whether a step must be able to cover a whole recurrent block."""
        return any(member.is_recurrent for member in self.members)

    @property
    def has_tails(self) -> bool:
        """Whether hits may end inside a block."""
        kinds = {member.what for member in self.members}
        blocks = {member.block for member in self.members}
        is_alike = kinds <= {"full", "mla", "recurrent"} and len(blocks) == 1
        return is_alike and self.drafting is None and kinds > {"recurrent"}

    @property
    def state_tokens(self) -> int:
        """Tokens per block of the recurrent groups (one number in vLLM), or 1 without any."""
        return max((member.block for member in self.members if member.is_recurrent), default=1)

    def layer_names(self, gid: int) -> list[str]:
        """Returns the names of a group's layers."""
        return [f"g{gid}.l{layer}" for layer in range(len(self.members[gid].layers))]

    def specs(self, placement: Placement) -> list[dict[str, KVCacheSpec]]:
        """Returns the spec of every layer, by group and name.

        Where blocks of several layers share places, smaller pages are padded.
        """
        groups: list[dict[str, Any]] = []
        for gid, member in enumerate(self.members):
            named = zip(self.layer_names(gid), member.layers, strict=True)
            groups.append({name: member.spec(words, placement.heads) for name, words in named})
        pages = {spec.page_size_bytes for group in groups for spec in group.values()}
        for group in () if placement.layout.is_block_outermost else groups:
            for name, spec in group.items():
                if spec.page_size_bytes < max(pages):
                    group[name] = dataclasses.replace(spec, page_size_padded=max(pages))
        return groups

    def placements(self) -> list[Placement]:
        """Returns the placements that vLLM takes for these groups."""
        found = []
        for layout in KVCacheLayout:
            for heads in (1, 2):
                plain = Placement(layout, heads, split=False)
                specs = [spec for group in self.specs(plain) for spec in group.values()]
                shapes = {
                    (spec.num_heads, spec.num_states, spec.real_page_size_bytes) for spec in specs
                }
                if layout.is_block_compact or len(shapes) == 1:
                    found.append(plain)
                if layout is KVCacheLayout.LBNHC:
                    found.append(dataclasses.replace(plain, split=True))
        return found

    def stage_layers(self, cuts: Sequence[int], stage: int) -> list[list[str]]:
        """Returns the names of each group's layers on one of two stages of a pipeline.

        The first `cuts[gid]` layers of a group are on the first stage. Without cuts there is one.
        """
        names = [self.layer_names(gid) for gid in range(len(self.members))]
        for gid, cut in enumerate(cuts):
            names[gid] = names[gid][cut:] if stage else names[gid][:cut]
        return names

    def config(
        self,
        vllm_config: Any,
        num_blocks: int,
        worker: bool,
        placement: Placement = ON_CPU,
        own: Sequence[Sequence[str]] | None = None,
    ) -> KVCacheConfig:
        """Returns vLLM's config of these groups, with the layers of a stage, or with all.

        As in vLLM, only the `worker`'s config has the spec of each layer.
        """
        specs = self.specs(placement)
        if vllm_config.speculative_config is not None:
            speculative_blocks = {"num_speculative_blocks": vllm_config.num_speculative_tokens}
            for gid, member in enumerate(self.members):
                for name in specs[gid] if member.is_recurrent else ():
                    specs[gid][name] = dataclasses.replace(specs[gid][name], **speculative_blocks)
        drafting, speculative = self.drafting, vllm_config.speculative_config
        marked = drafting.marked if drafting else ()
        if drafting is not None and KNOWS_DRAFT_LAYERS:
            marked = tuple({gid for gid, _ in drafting.layers})
            for gid, layer in drafting.layers:
                name = self.layer_names(gid)[layer]
                specs[gid][name] = dataclasses.replace(specs[gid][name], **{"is_draft": True})
        groups = [KVCacheGroupSpec([*group], next(iter(group.values()))) for group in specs]
        if drafting is not None and speculative.use_eagle_block_drop():
            for gid in marked:
                groups[gid].is_eagle_group = True
        config = KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups)
        config.prefix_cache_retention_interval = (
            vllm_config.cache_config.prefix_cache_retention_interval
        )
        config.kv_cache_layout = placement.layout.name
        resolve_hits(config, vllm_config)
        if worker:
            for group, layers in zip(groups, specs, strict=True):
                if len(set(layers.values())) > 1:
                    block = group.kv_cache_spec.block_size
                    group.kv_cache_spec = UniformTypeKVCacheSpecs(block, layers)
        if own is not None:
            known = {name: spec for layers in specs for name, spec in layers.items()}
            here = {name: known[name] for names in own for name in names}
            groups = planning()._project_kv_cache_groups_to_worker(groups, here)
            config.kv_cache_groups = groups
        if worker:
            cache = vllm_config.cache_config
            cache.kv_cache_layout, cache.num_gpu_blocks_override = placement.layout.name, num_blocks
            placed = planning().get_kv_cache_config_from_groups(vllm_config, groups, 0)
            config.kv_cache_tensors = placed.kv_cache_tensors
        return config

    def kernel_blocks(self, placement: Placement) -> list[int]:
        """Returns the tokens of a registered block, by group. A padded page is never split."""
        kernels = []
        for member, group in zip(self.members, self.specs(placement), strict=True):
            padded = any(getattr(spec, "page_size_padded", None) for spec in group.values())
            halves = placement.split and not (padded or member.is_recurrent or member.block % 2)
            kernels.append(member.block // 2 if halves else member.block)
        return kernels

    def blocks_for(self, tokens: int, budget: int, drafts: int = 0) -> int:
        """Returns how many blocks a request of this length may hold at once, with its drafts."""
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
            needed += min(whole + 1, held) + drafts * member.is_recurrent
        return needed


def _scaled(layout: Layout, factor: int, name: str) -> Layout:
    members = tuple(
        Member(
            member.what, max(2, member.block // factor), -(-member.window // factor), member.layers
        )
        for member in layout.members
    )
    return Layout(name, members, 4)


_TRUE = (
    Layout("full", (Member("full", 16, layers=(1, 1)),)),
    Layout("mistral", (Member("sliding", 16, 70),)),
    Layout(
        "gemma3", (Member("sliding", 128, 512), Member("sliding", 128, 512), Member("full", 128)), 1
    ),
    Layout(
        "gemma4", (Member("sliding", 256, 512), Member("sliding", 256, 512), Member("full", 128)), 1
    ),
    Layout("gptoss", (Member("sliding", 128, 128), Member("full", 128)), 1),
    Layout("llama4", (*(Member("chunked", 128, 512),) * 3, Member("full", 128)), 1),
    Layout(
        "qwen3next",
        (*(Member("recurrent", 256, layers=(3, 3)),) * 3, Member("full", 256, layers=(1, 1))),
        1,
    ),
    Layout("qwen3next_1056", (*(Member("recurrent", 1056),) * 3, Member("full", 1056)), 1),
    Layout("falconh1", (Member("full", 640), Member("recurrent", 640)), 1),
    Layout("granite", (*(Member("recurrent", 640),) * 3, Member("full", 640)), 1),
    Layout("lfm2", (*(Member("recurrent", 128),) * 3, Member("full", 128)), 1),
    Layout(
        "glm53",
        (
            Member("recurrent", 3584),
            Member("scratch", 4),
            Member("scratch", 64),
            Member("mla", 3584),
        ),
        1,
    ),
    Layout(
        "deepseekv4",
        (
            Member("mla_sliding", 64, 128),
            Member("mla_sliding", 64, 128),
            Member("mla", 256, layers=(2, 1)),
            Member("mla_sliding", 4, 128),
            Member("mla_sliding", 8, 128),
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
        Layout(
            "llama4_unaligned",
            (Member("chunked", 16, 72), Member("chunked", 16, 72), Member("full", 16)),
        ),
        Layout("llama4_long", (Member("chunked", 16, 200), Member("full", 16))),
        Layout(
            "odd_window", (Member("sliding", 16, 33), Member("sliding", 16, 17), Member("full", 16))
        ),
        Layout("wide_full", (Member("full", 64), Member("sliding", 16, 40))),
        Layout("all_sliding", (Member("sliding", 16, 40), Member("sliding", 32, 100))),
        Layout(
            "everything",
            (
                Member("recurrent", 16),
                Member("full", 16),
                Member("sliding", 32, 50),
                Member("sliding", 48, 20),
            ),
        ),
        Layout("recurrent_fine", (Member("recurrent", 16), Member("full", 64))),
        *(
            Layout(f"{drafting.method}_{name}", members, 3, drafting)
            for name, members, drafting in (
                ("full", (Member("full", 16, layers=(1, 1)),), Drafting("ngram")),
                (
                    "recurrent",
                    (*(Member("recurrent", 16),) * 2, Member("full", 16, layers=(1, 1))),
                    Drafting("ngram"),
                ),
                (
                    "recurrent_fine",
                    (Member("recurrent", 8), Member("full", 16), Member("sliding", 16, 40)),
                    Drafting("ngram"),
                ),
                ("full", (Member("full", 16, layers=(1,) * 3),), Drafting("eagle", ((0, 2),))),
                (
                    "full",
                    (Member("full", 8, layers=(1,) * 4),),
                    Drafting("draft_model", ((0, 2), (0, 3))),
                ),
                (
                    "unmarked",
                    (Member("sliding", 8, 32, (1, 1)), Member("full", 8, layers=(1, 1))),
                    Drafting("eagle", ((1, 1),)),
                ),
                (
                    "marked",
                    (
                        Member("sliding", 16, 32),
                        Member("sliding", 16, 32),
                        Member("full", 8, layers=(1, 1)),
                    ),
                    Drafting("eagle", ((2, 1),), (2,)),
                ),
                (
                    "apart",
                    (Member("sliding", 8, 33, (1,)), Member("full", 16), Member("full", 8)),
                    Drafting("eagle", ((2, 0),), (2,)),
                ),
                (
                    "mismarked",
                    (Member("full", 16, layers=(1, 1)), Member("sliding", 8, 40, (1, 1))),
                    Drafting("eagle", ((1, 1),), (0,)),
                ),
                (
                    "bare",
                    (Member("sliding", 16, 32), Member("full", 8)),
                    Drafting("eagle", (), (1,)),
                ),
                (
                    "recurrent",
                    (*(Member("recurrent", 16),) * 2, Member("full", 16, layers=(1, 1))),
                    Drafting("eagle", ((2, 1),), (2,)),
                ),
                (
                    "recurrent_unmarked",
                    (Member("recurrent", 16, layers=(1, 1)), Member("full", 16, layers=(1, 1, 1))),
                    Drafting("eagle", ((1, 2),)),
                ),
                (
                    "recurrent_apart",
                    (Member("recurrent", 16), Member("full", 16), Member("full", 16)),
                    Drafting("eagle", ((2, 0),), (2,)),
                ),
                (
                    "recurrent_fine",
                    (
                        Member("recurrent", 8),
                        Member("full", 16, layers=(1, 1)),
                        Member("sliding", 16, 40),
                    ),
                    Drafting("eagle", ((1, 1),), (1,)),
                ),
                (
                    "chunked",
                    (Member("chunked", 8, 32, (1, 1)), Member("full", 8, layers=(1, 1))),
                    Drafting("draft_model", ((0, 1), (1, 1))),
                ),
                (
                    "sliding",
                    (Member("sliding", 16, 40), Member("full", 16, layers=(1, 1))),
                    Drafting("draft_model", ((1, 1),)),
                ),
            )
        ),
    )
}
"""Layouts by name. Those with `_small` are scaled. The seven before those that draft keep the hard
parts of a model, not its numbers. In "marked" and "apart" vLLM knows the drafter's group. In
"mismarked" vLLM 0.32 takes another group for it. In "bare" the drafter reads the target's layers
alone."""
