"""What a model costs in the cache, and from which prompt on the cache can help: arithmetic on a Geometry.

A group's blocks are *all* stored only where its kind needs them all; `core.coverage` says which.  Its pattern over the
chunks repeats, so every figure per token is exact: bytes of one period of chunks, divided by its tokens.
"""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from hybridkv.core.coverage import SlotShape, part_bytes
from hybridkv.core.findings import Finding, fail, ok, warn
from hybridkv.core.geometry import Geometry, Group, Kind, common_block_tokens, derive_chunk_tokens
from hybridkv.core.sizes import format_size
from hybridkv.core.states import StateRule, recurrent_groups, state_ends

SlotBytes = Callable[[int, int], int]
"""Arena bytes of a slot from its shape (bytes of one part, parts)."""


@dataclass(frozen=True, slots=True)
class GroupPreview:
    """One KV cache group of an engine, served or not."""

    gid: int
    kind: str
    """A core Kind, or the engine's own name of what is refused; scratch is never stored."""
    tokens_per_block: int
    layers: int
    block_bytes: int
    window_tokens: int = 0
    refusal: str = ""


@dataclass(frozen=True, slots=True)
class Preview:
    """An engine as its configuration promises it."""

    model: str
    max_model_len: int
    kv_dtype: str
    ranks: int
    groups: tuple[GroupPreview, ...]
    geometry: Geometry | None
    """None where a group, or the chunk size, is refused."""
    states: StateRule = StateRule()


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """One row of the plan, in bytes of one rank."""

    gid: int
    kind: str
    tokens_per_block: int
    layers: int
    window_tokens: int
    block_bytes: int
    token_bytes: float
    """Of all blocks."""
    stored_token_bytes: float
    """Of the blocks that are stored; recurrent: with a state at every boundary."""
    refusal: str = ""


@dataclass(frozen=True, slots=True)
class Totals:
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
    """Arena bytes that one prompt of `prompt_tokens` takes, with the states that the engine's settings give."""
    ram_bytes: int
    ram_tokens: int
    ram_prompts: float


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that `hybridkv plan` prints of one engine."""

    model: str
    kv_dtype: str
    max_model_len: int
    ranks: int
    groups: tuple[GroupPlan, ...]
    totals: Totals | None
    state_period_tokens: int | None
    """Tokens between recurrent states; 0 = only the last boundary; None where no group is recurrent."""


def make_plan(preview: Preview, ram_bytes: int, slot_bytes: SlotBytes) -> Plan:
    """The plan of one engine for a cache of `ram_bytes`."""
    geometry = preview.geometry
    served = {group.gid: group for group in geometry.groups} if geometry else {}
    rows = []
    for seen in preview.groups:
        stored = stored_token_bytes(geometry, served[seen.gid]) if geometry and seen.gid in served else Fraction(0)
        rows.append(
            GroupPlan(
                seen.gid,
                seen.kind,
                seen.tokens_per_block,
                seen.layers,
                seen.window_tokens,
                seen.block_bytes,
                seen.block_bytes / seen.tokens_per_block,
                float(stored),
                seen.refusal,
            )
        )
    totals = _totals(geometry, preview, ram_bytes, slot_bytes) if geometry else None
    states = recurrent_groups(geometry) if geometry else ()
    period = preview.states.period_tokens(states[0]) if states else None
    return Plan(preview.model, preview.kv_dtype, preview.max_model_len, preview.ranks, tuple(rows), totals, period)


def period_chunks(geometry: Geometry, group: Group) -> int:
    """Chunks after which the pattern of what is stored of a group repeats."""
    if group.kind is not Kind.CHUNKED_LOCAL:
        return 1
    return math.lcm(group.window_tokens, geometry.chunk_tokens) // geometry.chunk_tokens


def stored_token_bytes(geometry: Geometry, group: Group) -> Fraction:
    """Bytes per token that one rank stores of a group, over one period."""
    chunks = period_chunks(geometry, group)
    stored = sum(part_bytes(geometry, group, chunk) for chunk in range(chunks))
    return Fraction(stored, chunks * geometry.chunk_tokens)


def stored_shapes(geometry: Geometry, rule: StateRule, prompt_tokens: int) -> Counter[SlotShape]:
    """How many objects of each shape a prompt leaves in the cache."""
    shapes: Counter[SlotShape] = Counter()
    chunks = geometry.whole_chunks(prompt_tokens)
    for group in geometry.groups:
        if group.kind is Kind.RECURRENT:
            shapes[group.block_bytes, geometry.parts(group)] += len(state_ends(geometry, group, rule, prompt_tokens))
            continue
        period = period_chunks(geometry, group)
        for chunk in range(min(period, chunks)):
            if size := part_bytes(geometry, group, chunk):
                shapes[size, geometry.parts(group)] += -(-(chunks - chunk) // period)
    return +shapes


def _totals(geometry: Geometry, preview: Preview, ram_bytes: int, slot_bytes: SlotBytes) -> Totals:
    tokens = preview.max_model_len
    shapes = stored_shapes(geometry, preview.states, tokens)
    prompt_bytes = sum(slot_bytes(*shape) * count for shape, count in shapes.items())
    chunk = geometry.chunk_tokens
    return Totals(
        chunk,
        geometry.alignment_tokens,
        geometry.hash_tokens,
        chunk,
        chunk + 1,
        float(sum(Fraction(group.block_bytes, group.tokens_per_block) for group in geometry.groups)) * geometry.ranks,
        float(sum(stored_token_bytes(geometry, group) * geometry.parts(group) for group in geometry.groups)),
        tokens,
        prompt_bytes,
        ram_bytes,
        ram_bytes * tokens // prompt_bytes if prompt_bytes else 0,
        ram_bytes / prompt_bytes if prompt_bytes else 0.0,
    )


def length_finding(geometry: Geometry, max_model_len: int) -> Finding:
    """Whether prompts can be long enough for a hit, and which group decides (requirements B8, B9)."""
    chunk = geometry.chunk_tokens
    largest = max(geometry.groups, key=lambda group: group.tokens_per_block)
    why = f"group {largest.gid} ({largest.kind}) has blocks of {largest.tokens_per_block} tokens"
    derived = derive_chunk_tokens(geometry.groups, geometry.alignment_tokens, geometry.hash_tokens)
    common = common_block_tokens(geometry.groups, geometry.alignment_tokens, geometry.hash_tokens)
    if chunk > derived:
        why = f"hybrid_chunk_size asks for more than the groups' {derived}"
    elif common > largest.tokens_per_block:
        blocks = ", ".join(str(size) for size in sorted({group.tokens_per_block for group in geometry.groups}))
        why = f"the groups' blocks of {blocks} tokens and the engine's {geometry.alignment_tokens} share no smaller one"
    remedy = f"hybrid_chunk_size {derived} works" if derived < chunk and derived + 1 < max_model_len else ""
    if chunk + 1 >= max_model_len:
        return fail(
            "first hit",
            f"a chunk has {chunk} tokens ({why}) and max_model_len is {max_model_len}, so nothing can ever be stored "
            "and hit",
            remedy or f"--max-model-len {2 * chunk} works",
        )
    text = f"prompts of {chunk + 1} tokens or more can hit; a chunk has {chunk} tokens: {why}"
    if 4 * chunk > max_model_len:
        fitting = (max_model_len - 1) // chunk
        return warn(
            "first hit",
            f"{text}; only {fitting} of them fit into max_model_len {max_model_len}",
            remedy or f"--max-model-len {4 * chunk} works",
        )
    return ok("first hit", text)


def state_findings(geometry: Geometry, rule: StateRule) -> list[Finding]:
    """At which boundaries recurrent states stand, and what makes them denser; nothing where no group is recurrent."""
    groups = recurrent_groups(geometry)
    if not groups:
        return []
    check, block, chunk = "recurrent states", groups[0].tokens_per_block, geometry.chunk_tokens
    gids = ", ".join(str(group.gid) for group in groups)
    period = rule.period_tokens(groups[0])
    found = []
    if period == 0:
        dense = StateRule(chunk, rule.step_tokens).period_tokens(groups[0])
        remedy = f"--prefix-cache-retention-interval {chunk} works"
        if rule.step_tokens == 0:
            remedy = f"--enable-chunked-prefill with {remedy}"
        elif dense > chunk:
            remedy += (
                f" (a state every {dense} tokens; with --max-num-batched-tokens {chunk}, slower, one every {chunk})"
            )
        found.append(
            warn(
                check,
                f"groups {gids}: the engine keeps a state only at the last boundary of a prompt, so the first prompt "
                "that shares a shorter prefix has no hit",
                remedy,
            )
        )
    else:
        text = f"groups {gids}: a state every {period} tokens of a prompt and at its last boundary"
        every = math.lcm(period, chunk)
        dense = StateRule(chunk, chunk).period_tokens(groups[0])
        if every > dense:
            found.append(
                warn(
                    check,
                    f"{text} (steps of {rule.step_tokens} tokens, retention interval {rule.retention_tokens})",
                    f"--prefix-cache-retention-interval {chunk} with --max-num-batched-tokens {chunk} gives one "
                    f"every {dense}, at the price of shorter steps",
                )
            )
        else:
            found.append(ok(check, text))
    if chunk > math.lcm(block, geometry.alignment_tokens):
        found.append(
            warn(
                check,
                f"a prompt's last boundary is a multiple of {block} tokens, and its state is stored only where it is "
                f"also one of the chunk of {chunk}",
                f"hybrid_chunk_size {math.lcm(block, geometry.alignment_tokens)} works",
            )
        )
    return found


def room_finding(totals: Totals) -> Finding:
    """Whether the cache holds at least one prompt of full length."""
    text = (
        f"{format_size(totals.ram_bytes)} hold {totals.ram_tokens:,} tokens, "
        f"{totals.ram_prompts:.1f} prompts of {totals.prompt_tokens:,}"
    )
    if totals.ram_prompts < 1:
        return warn("room", text, f'ram "{format_size(totals.prompt_bytes * 2)}" works')
    return ok("room", text)
