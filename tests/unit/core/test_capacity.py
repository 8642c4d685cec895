"""What a model costs, against definitions written object by object and token by token."""

import math
import re
from collections import Counter
from dataclasses import replace
from fractions import Fraction

from hypothesis import example, given
from hypothesis import strategies as st

from hybridkv.core.coverage import SlotShape, part_bytes, stored_blocks
from hybridkv.core.findings import Verdict
from hybridkv.core.geometry import Geometry, GroupKind, length_finding
from hybridkv.core.sizes import parse_size
from hybridkv.core.state_boundaries import StateRule, state_ends, state_findings
from hybridkv.lab.capacity import (
    CapacityPlan,
    ConfigPreview,
    GroupPreview,
    make_plan,
    room_finding,
    stored_shapes,
    stored_token_bytes,
)
from hybridkv.shm.slots import slot_bytes
from tests.layouts import LAYOUTS, K, make

names = st.sampled_from(sorted(LAYOUTS))
rules = st.builds(
    StateRule, st.none() | st.integers(0, 8).map(lambda n: n * 256), st.integers(0, 5000)
)


def preview(
    geometry: Geometry, max_model_len: int, rule: StateRule | None = None, refused: str = ""
) -> ConfigPreview:
    groups = tuple(
        GroupPreview(
            gid=group.gid,
            kind=str(group.kind),
            tokens_per_block=group.tokens_per_block,
            layers=2,
            block_bytes=group.block_bytes,
            window_tokens=group.window_tokens,
        )
        for group in geometry.groups
    )
    if refused:
        groups += (GroupPreview(len(groups), "SinkFullAttentionSpec", 16, 1, 96, refusal=refused),)
    return ConfigPreview(
        model="model",
        max_model_len=max_model_len,
        kv_dtype="auto",
        ranks=geometry.ranks,
        groups=groups,
        geometry=None if refused else geometry,
        states=rule or StateRule(),
    )


def plan_of(
    geometry: Geometry, max_model_len: int = 4096, ram_bytes: int = 1 << 30
) -> CapacityPlan:
    return make_plan(preview(geometry, max_model_len), ram_bytes, slot_bytes)


@given(names)
def test_stored_bytes_per_token_are_those_of_a_long_prompt(name: str) -> None:
    """Twelve periods of every group, block by block, divided by their tokens."""
    geometry = LAYOUTS[name]
    for group in geometry.groups:
        chunks = 12 * math.lcm(
            *(g.window_tokens or 1 for g in geometry.groups), geometry.chunk_tokens
        )
        chunks //= geometry.chunk_tokens
        blocks = sum(len(stored_blocks(geometry, group, chunk)) for chunk in range(chunks))
        expected = Fraction(blocks * group.block_bytes, chunks * geometry.chunk_tokens)
        assert stored_token_bytes(geometry, group) == expected
        assert expected <= Fraction(group.block_bytes, group.tokens_per_block)


def states_by_steps(
    group_block: int, alignment: int, rule: StateRule, prompt: int, is_dropped: bool
) -> set[int]:
    """Where states stand, by computing a prompt step by step as vLLM's scheduler cuts it.

    `is_dropped`: its own hits drop a block, because of a drafter.
    """
    last = (prompt - 1) // alignment * alignment
    if is_dropped:
        last = prompt // alignment * alignment - alignment
    stood, at = set(), 0
    while at < prompt:
        end = min(prompt, at + (rule.step_tokens or prompt))
        if end < prompt:
            aligned = end // group_block * group_block
            # A block too wide for one step is walked in parts, up to its own end.
            end = aligned if aligned > at else min(end, (at // group_block + 1) * group_block)
        if at < last < end:
            end = last
        at = end
        retained = rule.retention_tokens is None or (
            rule.retention_tokens > 0 and at % max(rule.retention_tokens, group_block) == 0
        )
        if at % group_block == 0 and (retained or at == last):
            stood.add(at)
    return stood - {0}


lengths = (
    st.integers(1, 20000)
    | st.integers(1, 70).map(lambda n: n * 256)
    | st.integers(1, 30).map(lambda n: n * 640)
)


@given(st.sampled_from(["qwen3next", "falconh1"]), rules, lengths, st.booleans())
@example("qwen3next", StateRule(None, 512), 256, False)
@example("qwen3next", StateRule(0, 512), 1024, False)
@example("qwen3next", StateRule(0, 512), 1500, True)
@example("qwen3next", StateRule(None, 256), 1500, True)
def test_states_stand_where_steps_end(
    name: str, rule: StateRule, prompt: int, is_dropped: bool
) -> None:
    geometry = replace(LAYOUTS[name], lookahead_tokens=int(is_dropped))
    (group, *_) = [group for group in geometry.groups if group.kind is GroupKind.RECURRENT]
    block = group.tokens_per_block
    if rule.retention_tokens:
        # vLLM takes multiples of the scheduler block only.
        rule = StateRule(max(1, rule.retention_tokens // block) * block, rule.step_tokens)
    stood = states_by_steps(block, geometry.alignment_tokens, rule, prompt, is_dropped)
    expected = {boundary for boundary in stood if boundary % geometry.chunk_tokens == 0}
    assert state_ends(geometry, group, rule, prompt) == sorted(expected)


@given(names, rules, st.integers(0, 9000))
def test_objects_of_a_prompt_are_counted_one_by_one(
    name: str, rule: StateRule, tokens: int
) -> None:
    geometry = LAYOUTS[name]
    expected: Counter[SlotShape] = Counter()
    for group in geometry.groups:
        parts = 1 if group.replicated else geometry.ranks
        if group.kind is GroupKind.RECURRENT:
            expected[group.block_bytes, parts] += len(state_ends(geometry, group, rule, tokens))
        else:
            sizes = [
                part_bytes(geometry, group, chunk) for chunk in range(geometry.whole_chunks(tokens))
            ]
            expected.update((size, parts) for size in sizes if size)
    assert stored_shapes(geometry, rule, tokens) == +expected


def test_a_prompt_of_qwen3next_in_steps_of_600() -> None:
    """vLLM 0.32 keeps states at 512, 1024 and 1280 of 1,500 tokens; by default only at 1280."""
    geometry = LAYOUTS["qwen3next"]
    group = geometry.groups[0]
    assert len(state_ends(geometry, group, StateRule(None, 600), 1500)) == 3
    assert len(state_ends(geometry, group, StateRule(256, 600), 1500)) == 3
    assert len(state_ends(geometry, group, StateRule(0, 600), 1500)) == 1
    assert StateRule(256, 600).period_tokens(group) == 512
    assert StateRule(1024, 600).period_tokens(group) == 1024


def test_totals_count_every_rank_and_the_slots_themselves() -> None:
    geometry = LAYOUTS["two_ranks"]
    totals = plan_of(geometry).totals
    assert totals is not None
    assert totals.token_bytes == 2 * sum(group.block_bytes / 128 for group in geometry.groups)
    assert totals.prompt_bytes == 32 * sum(
        slot_bytes(group.block_bytes, 2) for group in geometry.groups
    )
    assert totals.ram_prompts == (1 << 30) / totals.prompt_bytes
    assert totals.ram_tokens == (1 << 30) * 4096 // totals.prompt_bytes


def test_what_all_ranks_share_is_stored_once() -> None:
    geometry = LAYOUTS["two_ranks_mla"]
    shared, own = geometry.groups
    totals = plan_of(geometry).totals
    assert totals is not None
    assert totals.token_bytes == 2 * (shared.block_bytes + own.block_bytes) / 128, (
        "the engine keeps it on both"
    )
    assert totals.stored_token_bytes == (shared.block_bytes + 2 * own.block_bytes) / 128
    assert totals.prompt_bytes == 32 * (
        slot_bytes(shared.block_bytes, 1) + slot_bytes(own.block_bytes, 2)
    )


def test_windows_smaller_than_a_chunk_save_what_no_hit_reads() -> None:
    geometry = make(128, 128, (K.SLIDING, 16, 32), (K.FULL, 128, 0))
    plan = plan_of(geometry)
    sliding = plan.groups[0]
    assert sliding.stored_token_bytes == sliding.token_bytes / 4, (
        "2 of 8 blocks: the tokens 97 to 128 of a chunk"
    )


def test_a_refused_group_is_a_row_and_leaves_no_totals() -> None:
    plan = make_plan(
        preview(LAYOUTS["qwen3"], 4096, refused="not restored yet"), 1 << 30, slot_bytes
    )
    assert plan.totals is None
    assert [row.refusal for row in plan.groups] == ["", "not restored yet"]


@given(names, st.integers(2, 5000), st.integers(1, 4))
def test_the_length_that_is_said_to_work_works(name: str, max_model_len: int, times: int) -> None:
    base = LAYOUTS[name]
    geometry = Geometry(
        base.groups, times * base.chunk_tokens, base.alignment_tokens, base.hash_tokens, base.ranks
    )
    found = length_finding(geometry, max_model_len)
    longest_hit = (max_model_len - 2) // geometry.chunk_tokens
    assert (found.verdict is Verdict.FAIL) == (longest_hit < 1), (
        "a prompt, its hit and one generated token"
    )
    if found.verdict is Verdict.OK:
        return
    if works := re.search(r"--max-model-len (\d+) works", found.remedy):
        assert length_finding(geometry, int(works[1])).verdict is not Verdict.FAIL
    else:
        works = re.fullmatch(r"hybrid_chunk_size (\d+) works", found.remedy)
        assert works is not None
        smaller = Geometry(
            base.groups, int(works[1]), base.alignment_tokens, base.hash_tokens, base.ranks
        )
        assert length_finding(smaller, max_model_len).verdict is not Verdict.FAIL


def test_the_group_that_makes_the_chunk_is_named() -> None:
    assert (
        "group 0 (sliding) has blocks of 256 tokens" in length_finding(LAYOUTS["gemma4"], 4096).what
    )
    assert (
        "the groups' blocks of 96, 256 tokens"
        in length_finding(make(768, 32, (K.SLIDING, 96, 100), (K.FULL, 256, 0)), 65536).what
    )


def test_states_only_at_the_last_boundary_are_a_warning_that_says_what_is_denser() -> None:
    geometry = LAYOUTS["qwen3next"]
    (found,) = state_findings(geometry, StateRule(0, 2048))
    assert found.verdict is Verdict.WARN
    assert found.remedy.startswith(
        "--prefix-cache-retention-interval 256 works (a state every 2048 tokens"
    )
    (found,) = state_findings(geometry, StateRule(256, 2048))
    assert found.verdict is Verdict.WARN
    assert "a state every 2048 tokens" in found.what
    (found,) = state_findings(geometry, StateRule(256, 256))
    assert found.verdict is Verdict.OK
    assert state_findings(LAYOUTS["gemma4"], StateRule()) == []


def test_a_chunk_of_several_states_stores_few_of_them() -> None:
    base = LAYOUTS["qwen3next"]
    geometry = Geometry(base.groups, 1024, 256, 256)
    found = state_findings(geometry, StateRule(0, 2048))[-1]
    assert found.remedy == "hybrid_chunk_size 256 works"
    assert len(state_ends(geometry, geometry.groups[0], StateRule(0, 2048), 1500)) == 0


def test_room_for_less_than_a_prompt() -> None:
    plan = plan_of(LAYOUTS["qwen3"], 4096, 1 << 16)
    assert plan.totals is not None
    found = room_finding(plan.totals)
    assert found.verdict is Verdict.WARN
    works = re.fullmatch(r'ram "(.*)" works', found.remedy)
    assert works is not None
    larger = plan_of(LAYOUTS["qwen3"], 4096, parse_size(works[1], "ram")).totals
    assert larger is not None
    assert room_finding(larger).verdict is Verdict.OK
