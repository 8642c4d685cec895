"""What a model costs in the cache.

All blocks of a group are stored only where its kind needs them all; `core.coverage` says which. The
pattern over the chunks repeats, so every figure per token is exact: the bytes of one period of
chunks, divided by its tokens.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from fractions import Fraction

from hybridkv.core.coverage import SlotShape, stored_counts
from hybridkv.core.findings import Finding, Verdict, judge
from hybridkv.core.geometry import Geometry, Group, GroupKind
from hybridkv.core.sizes import format_size
from hybridkv.core.state_boundaries import StateRule, recurrent_groups, state_ends

SlotBytes = Callable[[int, int], int]  # Arena bytes of a slot from (bytes of one part, parts).


@dataclass(frozen=True, slots=True)
class GroupPreview:
    """One KV cache group of an engine, served or not."""

    gid: int
    kind: str  # A GroupKind, or the engine's own name of what is refused; scratch is never stored.
    tokens_per_block: int
    layers: int
    block_bytes: int
    window_tokens: int = 0
    refusal: str = ""


@dataclass(frozen=True, slots=True)
class ConfigPreview:
    """An engine, as its configuration promises it."""

    model: str
    max_model_len: int
    kv_dtype: str
    ranks: int
    groups: tuple[GroupPreview, ...]
    geometry: Geometry | None  # None where a group, or the chunk size, is refused.
    states: StateRule = StateRule()


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlan(GroupPreview):
    """One row of the plan, in bytes of one rank."""

    token_bytes: float  # Bytes per token of all blocks.
    stored_token_bytes: float  # Those stored; of a recurrent group with a state at every boundary.


@dataclass(frozen=True, slots=True)
class CapacityTotals:
    """What all groups and all ranks cost together."""

    chunk_tokens: int
    alignment_tokens: int
    hash_tokens: int
    first_storable_tokens: int  # The shortest prompt of which something is stored.
    first_hit_tokens: int  # The shortest that can hit: the engine computes at least one token.
    token_bytes: float
    stored_token_bytes: float
    prompt_tokens: int
    prompt_bytes: int  # Arena bytes of one prompt of them, with the states that the engine keeps.
    ram_bytes: int
    ram_tokens: int
    ram_prompts: float


@dataclass(frozen=True, slots=True)
class CapacityPlan:
    """What `hybridkv plan` prints of one engine."""

    model: str
    kv_dtype: str
    max_model_len: int
    ranks: int
    groups: tuple[GroupPlan, ...]
    totals: CapacityTotals | None
    state_period_tokens: int | None
    """Tokens between recurrent states; 0 = only the last boundary; None = no group is recurrent."""


def make_plan(preview: ConfigPreview, ram_bytes: int, slot_bytes: SlotBytes) -> CapacityPlan:
    """The plan of one engine for a cache of `ram_bytes`."""
    geometry = preview.geometry
    served = {group.gid: group for group in geometry.groups} if geometry else {}
    rows = []
    for seen in preview.groups:
        group, every = served.get(seen.gid), seen.block_bytes / seen.tokens_per_block
        stored = float(stored_token_bytes(geometry, group)) if geometry and group else 0.0
        rows.append(GroupPlan(**asdict(seen), token_bytes=every, stored_token_bytes=stored))
    totals = _totals(geometry, preview, ram_bytes, slot_bytes) if geometry else None
    states = recurrent_groups(geometry) if geometry else ()
    period = preview.states.period_tokens(states[0]) if states else None
    named = preview.model, preview.kv_dtype, preview.max_model_len, preview.ranks
    return CapacityPlan(*named, tuple(rows), totals, period)


def stored_token_bytes(geometry: Geometry, group: Group) -> Fraction:
    """Bytes per token that one rank stores of a group, over one period."""
    counts = stored_counts(geometry, group)
    return Fraction(sum(counts) * group.block_bytes, len(counts) * geometry.chunk_tokens)


def stored_shapes(geometry: Geometry, rule: StateRule, prompt_tokens: int) -> Counter[SlotShape]:
    """How many objects of each shape a prompt leaves in the cache."""
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
    tokens = preview.max_model_len
    shapes = stored_shapes(geometry, preview.states, tokens)
    prompt_bytes = sum(slot_bytes(*shape) * count for shape, count in shapes.items())
    chunk, groups = geometry.chunk_tokens, geometry.groups
    storable = chunk + geometry.lookahead_tokens
    every = sum(Fraction(group.block_bytes, group.tokens_per_block) for group in groups)
    stored = sum(stored_token_bytes(geometry, group) * geometry.parts(group) for group in groups)
    return CapacityTotals(
        *(chunk, geometry.alignment_tokens, geometry.hash_tokens, storable, chunk + 1),
        *(float(every * geometry.ranks), float(stored), tokens, prompt_bytes, ram_bytes),
        ram_bytes * tokens // prompt_bytes if prompt_bytes else 0,
        ram_bytes / prompt_bytes if prompt_bytes else 0.0,
    )


def room_finding(totals: CapacityTotals) -> Finding:
    """Whether the cache holds at least one prompt of full length."""
    prompts = f"{totals.ram_prompts:.1f} prompts of {totals.prompt_tokens:,}"
    text = f"{format_size(totals.ram_bytes)} hold {totals.ram_tokens:,} tokens, {prompts}"
    remedy = f'ram "{format_size(totals.prompt_bytes * 2)}" works'
    return judge("room", totals.ram_prompts >= 1, text, text, remedy, Verdict.WARN)
