"""The cost of a model in the cache: bytes by token, prompt and group.

Which blocks of a group are stored depends on its kind (`core.coverage`). The pattern over the
chunks repeats. So every figure per token is exact: the bytes of one period of chunks, divided by
its tokens.
"""

from collections import Counter
from dataclasses import asdict, dataclass
from fractions import Fraction

from hybridkv.core.coverage import SlotShape, stored_counts
from hybridkv.core.findings import Finding, ok, warn
from hybridkv.core.geometry import Geometry, Group, GroupKind
from hybridkv.core.sizes import format_size
from hybridkv.core.state_boundaries import StateRule, recurrent_groups, state_ends
from hybridkv.lab.tier_requirements import ReadCost, SlotBytes, read_cost


@dataclass(frozen=True, slots=True)
class GroupPreview:
    """One KV cache group of an engine, served or not."""

    gid: int
    kind: str  # A GroupKind, or the engine's own name where the group is refused or is scratch.
    tokens_per_block: int
    layers: int
    block_bytes: int
    window_tokens: int = 0
    refusal: str = ""


@dataclass(frozen=True, slots=True)
class ConfigPreview:
    """An engine as its configuration, or a daemon that it is connected to, describes it."""

    model: str
    max_model_len: int
    kv_dtype: str
    ranks: int
    groups: tuple[GroupPreview, ...]
    geometry: Geometry | None  # None where a group, or the chunk size, is refused.
    states: StateRule = StateRule()
    stages: int = 1  # Of a pipeline.


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlan(GroupPreview):
    """One row of the plan, in bytes of one rank, or of one shard of its heads."""

    token_bytes: float  # Bytes per token of all blocks.
    stored_token_bytes: float
    """Bytes per token of the stored blocks. Recurrent groups count a state at every boundary."""


@dataclass(frozen=True, slots=True)
class CapacityTotals:
    """The cost of all groups and all ranks of one node together."""

    chunk_tokens: int
    alignment_tokens: int
    hash_tokens: int
    first_storable_tokens: int  # The shortest prompt of which something is stored.
    first_hit_tokens: int  # The shortest prompt that can hit: one token is always computed.
    token_bytes: float
    stored_token_bytes: float
    prompt_tokens: int
    prompt_bytes: int  # Arena bytes of a prompt of `prompt_tokens`, with its recurrent states.
    ram_bytes: int
    ram_tokens: int
    ram_prompts: float
    tier_read: ReadCost  # Of a hit of such a prompt, if a tier has all of it and RAM nothing.


@dataclass(frozen=True, slots=True)
class CapacityPlan:
    """The plan of one engine, which `hybridkv plan` prints."""

    model: str
    kv_dtype: str
    max_model_len: int
    ranks: int
    groups: tuple[GroupPlan, ...]
    totals: CapacityTotals | None
    state_period_tokens: int | None
    """Tokens between recurrent states. 0 = only the last boundary. None = no group is recurrent."""
    stages: int = 1  # Of a pipeline.
    nodes: int = 1  # Over which the ranks are spread, each with a daemon.
    shards: int = 0  # Of the KV heads, with `Settings.share_tp`; the groups' bytes are of one.


def make_plan(preview: ConfigPreview, ram_bytes: int, slot_bytes: SlotBytes) -> CapacityPlan:
    """Return the plan of one engine for a cache of `ram_bytes`."""
    geometry = preview.geometry
    served = {group.gid: group for group in geometry.groups} if geometry else {}
    rows = []
    for row in preview.groups:
        group, token_bytes = served.get(row.gid), row.block_bytes / row.tokens_per_block
        stored = float(stored_token_bytes(geometry, group)) if geometry and group else 0.0
        rows.append(GroupPlan(**asdict(row), token_bytes=token_bytes, stored_token_bytes=stored))
    totals = _totals(geometry, preview, ram_bytes, slot_bytes) if geometry else None
    states = recurrent_groups(geometry) if geometry else ()
    return CapacityPlan(
        model=preview.model,
        kv_dtype=preview.kv_dtype,
        max_model_len=preview.max_model_len,
        ranks=preview.ranks,
        stages=preview.stages,
        nodes=geometry.nodes if geometry else 1,
        shards=geometry.shards if geometry else 0,
        groups=tuple(rows),
        totals=totals,
        state_period_tokens=preview.states.period_tokens(states[0]) if states else None,
    )


def stored_token_bytes(geometry: Geometry, group: Group) -> Fraction:
    """Return the bytes per token that one rank stores of a group, over one period."""
    counts = stored_counts(geometry, group)
    return Fraction(sum(counts) * group.block_bytes, len(counts) * geometry.chunk_tokens)


def stored_shapes(geometry: Geometry, rule: StateRule, prompt_tokens: int) -> Counter[SlotShape]:
    """Return how many objects of each shape a prompt leaves in the cache."""
    shapes: Counter[SlotShape] = Counter()
    chunks = geometry.whole_chunks(prompt_tokens)
    for group in geometry.groups:
        counts, parts = stored_counts(geometry, group), geometry.parts(group)
        if group.kind is GroupKind.RECURRENT:
            ends = state_ends(geometry, group, rule, prompt_tokens)
            shapes[group.block_bytes, parts] += len(ends)
            continue
        for chunk, count in enumerate(counts[:chunks]):
            if count:
                shapes[count * group.block_bytes, parts] += -(-(chunks - chunk) // len(counts))
    return +shapes


def _totals(
    geometry: Geometry, preview: ConfigPreview, ram_bytes: int, slot_bytes: SlotBytes
) -> CapacityTotals:
    """Return the totals of an engine for a cache of `ram_bytes`."""
    tokens = preview.max_model_len
    shapes = stored_shapes(geometry, preview.states, tokens)
    prompt_bytes = sum(
        slot_bytes(part_bytes, parts) * count for (part_bytes, parts), count in shapes.items()
    )
    chunk, groups = geometry.chunk_tokens, geometry.groups
    token_bytes = sum(Fraction(group.block_bytes, group.tokens_per_block) for group in groups)
    stored = sum(stored_token_bytes(geometry, group) * geometry.parts(group) for group in groups)
    return CapacityTotals(
        chunk_tokens=chunk,
        alignment_tokens=geometry.alignment_tokens,
        hash_tokens=geometry.hash_tokens,
        first_storable_tokens=chunk + geometry.lookahead_tokens,
        first_hit_tokens=chunk + 1,
        token_bytes=float(token_bytes * geometry.node_shards),
        stored_token_bytes=float(stored),
        prompt_tokens=tokens,
        prompt_bytes=prompt_bytes,
        ram_bytes=ram_bytes,
        ram_tokens=ram_bytes * tokens // prompt_bytes if prompt_bytes else 0,
        ram_prompts=ram_bytes / prompt_bytes if prompt_bytes else 0.0,
        tier_read=read_cost(geometry, tokens, 0, slot_bytes),
    )


def room_finding(totals: CapacityTotals) -> Finding:
    """Return whether the cache holds at least one prompt of full length."""
    prompts = f"{totals.ram_prompts:.1f} prompts of {totals.prompt_tokens:,}"
    text = f"{format_size(totals.ram_bytes)} hold {totals.ram_tokens:,} tokens, {prompts}"
    remedy = f'ram "{format_size(totals.prompt_bytes * 2)}" works'
    return ok("room", text) if totals.ram_prompts >= 1 else warn("room", text, remedy)
