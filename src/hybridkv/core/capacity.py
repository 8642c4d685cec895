"""What a model costs in the cache, and from which prompt on the cache can help.

All blocks of a group are stored only where its kind needs them all; `core.coverage` says which. The
pattern over the chunks repeats, so every figure per token is exact: the bytes of one period of
chunks, divided by its tokens.
"""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from fractions import Fraction

from hybridkv.core.coverage import SlotShape, stored_counts
from hybridkv.core.findings import Finding, Verdict, fail, judge, warn
from hybridkv.core.geometry import (
    Geometry,
    Group,
    GroupKind,
    common_block_tokens,
    derive_chunk_tokens,
)
from hybridkv.core.sizes import format_size
from hybridkv.core.state_boundaries import StateRule, recurrent_groups, state_ends

SlotBytes = Callable[[int, int], int]
"""Arena bytes of a slot from its shape (bytes of one part, parts)."""


@dataclass(frozen=True, slots=True)
class GroupPreview:
    """One KV cache group of an engine, served or not."""

    gid: int
    kind: str
    """A GroupKind, or the engine's own name of what is refused; scratch is never stored."""
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
    geometry: Geometry | None
    """None where a group, or the chunk size, is refused."""
    states: StateRule = StateRule()


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlan(GroupPreview):
    """One row of the plan, in bytes of one rank."""

    token_bytes: float
    """Bytes per token of all blocks."""
    stored_token_bytes: float
    """Bytes per token that are stored; of a recurrent group with a state at every boundary."""


@dataclass(frozen=True, slots=True)
class CapacityTotals:
    """What all groups and all ranks cost together."""

    chunk_tokens: int
    alignment_tokens: int
    hash_tokens: int
    first_storable_tokens: int
    """The shortest prompt of which something is stored."""
    first_hit_tokens: int
    """The shortest prompt that can hit: the engine computes at least one token itself."""
    token_bytes: float
    stored_token_bytes: float
    prompt_tokens: int
    prompt_bytes: int
    """Arena bytes of one prompt of `prompt_tokens`, with the states that the engine keeps."""
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
        group = served.get(seen.gid)
        stored = stored_token_bytes(geometry, group) if geometry and group else 0
        token_bytes = seen.block_bytes / seen.tokens_per_block
        rows.append(
            GroupPlan(**asdict(seen), token_bytes=token_bytes, stored_token_bytes=float(stored))
        )
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
    every = sum(Fraction(group.block_bytes, group.tokens_per_block) for group in groups)
    stored = sum(stored_token_bytes(geometry, group) * geometry.parts(group) for group in groups)
    return CapacityTotals(
        chunk,
        geometry.alignment_tokens,
        geometry.hash_tokens,
        chunk,
        chunk + 1,
        float(every * geometry.ranks),
        float(stored),
        tokens,
        prompt_bytes,
        ram_bytes,
        ram_bytes * tokens // prompt_bytes if prompt_bytes else 0,
        ram_bytes / prompt_bytes if prompt_bytes else 0.0,
    )


def length_finding(geometry: Geometry, max_model_len: int) -> Finding:
    """Whether prompts can be long enough for a hit, and which group decides (B8, B9)."""
    chunk, groups, check = geometry.chunk_tokens, geometry.groups, "first hit"
    largest = max(groups, key=lambda group: group.tokens_per_block)
    why = f"group {largest.gid} ({largest.kind}) has blocks of {largest.tokens_per_block} tokens"
    units = groups, geometry.alignment_tokens, geometry.hash_tokens
    derived = derive_chunk_tokens(*units)
    if chunk > derived:
        why = f"hybrid_chunk_size asks for more than the groups' {derived}"
    elif common_block_tokens(*units) > largest.tokens_per_block:
        blocks = ", ".join(map(str, sorted({group.tokens_per_block for group in groups})))
        engine = f"the engine's {geometry.alignment_tokens}"
        why = f"the groups' blocks of {blocks} tokens and {engine} share no smaller one"
    fits = derived < chunk and derived + 1 < max_model_len
    times = 2 if chunk + 1 >= max_model_len else 4
    remedy = f"hybrid_chunk_size {derived}" if fits else f"--max-model-len {times * chunk}"
    if chunk + 1 >= max_model_len:
        what = (
            f"a chunk has {chunk} tokens ({why}) and max_model_len is {max_model_len}, so nothing "
            "can ever be stored and hit"
        )
        return fail(check, what, f"{remedy} works")
    text = f"prompts of {chunk + 1} tokens or more can hit; a chunk has {chunk} tokens: {why}"
    few = f"only {(max_model_len - 1) // chunk} of them fit into max_model_len {max_model_len}"
    is_good = 4 * chunk <= max_model_len
    return judge(check, is_good, text, f"{text}; {few}", f"{remedy} works", Verdict.WARN)


def state_findings(geometry: Geometry, rule: StateRule) -> list[Finding]:
    """At which boundaries recurrent states stand, and what makes them denser.

    It is empty where no group is recurrent.
    """
    groups = recurrent_groups(geometry)
    if not groups:
        return []
    check, block, chunk = "recurrent states", groups[0].tokens_per_block, geometry.chunk_tokens
    gids = ", ".join(str(group.gid) for group in groups)
    period = rule.period_tokens(groups[0])
    dense = StateRule(chunk, chunk).period_tokens(groups[0])
    if period == 0:
        what = (
            f"groups {gids}: the engine keeps a state only at the last boundary of a prompt, so "
            "the first prompt that shares a shorter prefix has no hit"
        )
        found = [warn(check, what, _denser(rule, chunk, groups[0]))]
    else:
        text = f"groups {gids}: a state every {period} tokens of a prompt and at its last boundary"
        settings = f"steps of {rule.step_tokens} tokens, retention interval {rule.retention_tokens}"
        remedy = (
            f"--prefix-cache-retention-interval {chunk} with --max-num-batched-tokens {chunk} "
            f"gives one every {dense}, at the price of shorter steps"
        )
        is_good = math.lcm(period, chunk) <= dense
        found = [judge(check, is_good, text, f"{text} ({settings})", remedy, Verdict.WARN)]
    if chunk > (common := math.lcm(block, geometry.alignment_tokens)):
        what = (
            f"a prompt's last boundary is a multiple of {block} tokens, and its state is stored "
            f"only where it is also one of the chunk of {chunk}"
        )
        found.append(warn(check, what, f"hybrid_chunk_size {common} works"))
    return found


def _denser(rule: StateRule, chunk: int, group: Group) -> str:
    """What makes the engine keep states within a prompt, where it keeps only the last."""
    remedy = f"--prefix-cache-retention-interval {chunk} works"
    dense = StateRule(chunk, rule.step_tokens).period_tokens(group)
    if rule.step_tokens == 0:
        return f"--enable-chunked-prefill with {remedy}"
    with_steps = f"with --max-num-batched-tokens {chunk}, slower, one every {chunk}"
    return f"{remedy} (a state every {dense} tokens; {with_steps})" if dense > chunk else remedy


def room_finding(totals: CapacityTotals) -> Finding:
    """Whether the cache holds at least one prompt of full length."""
    prompts = f"{totals.ram_prompts:.1f} prompts of {totals.prompt_tokens:,}"
    text = f"{format_size(totals.ram_bytes)} hold {totals.ram_tokens:,} tokens, {prompts}"
    remedy = f'ram "{format_size(totals.prompt_bytes * 2)}" works'
    return judge("room", totals.ram_prompts >= 1, text, text, remedy, Verdict.WARN)
