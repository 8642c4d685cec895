"""What a hit needs, against definitions written token by token."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridkv.core.coverage import (
    Hit,
    is_tail_hit,
    lacking,
    largest_hit,
    longest_hit,
    needed_blocks,
    needed_chunks,
    part_bytes,
    slot_shapes,
    stored_blocks,
    whole_hit,
)
from hybridkv.core.geometry import Geometry, Group, GroupKind
from tests.layouts import LAYOUTS

CHUNKS = 12
all_layouts = pytest.mark.parametrize("geometry", LAYOUTS.values(), ids=LAYOUTS)


def tokens_read(group: Group, boundary: int) -> set[int]:
    """Tokens whose content computing token `boundary` reads, from the meaning of each kind."""
    match group.kind:
        case GroupKind.FULL:
            return set(range(boundary))
        case GroupKind.SLIDING:
            return set(range(max(0, boundary - group.window_tokens + 1), boundary))
        case GroupKind.CHUNKED_LOCAL:
            return {
                token
                for token in range(boundary)
                if token // group.window_tokens == boundary // group.window_tokens
            }
        case GroupKind.RECURRENT:
            return {boundary - 1} if boundary else set()


@all_layouts
def test_needed_blocks_are_those_that_hold_a_token_that_is_read(geometry: Geometry) -> None:
    for group in geometry.groups:
        for chunks in range(CHUNKS):
            boundary = chunks * geometry.chunk_tokens
            expected = {token // group.tokens_per_block for token in tokens_read(group, boundary)}
            assert set(needed_blocks(group, boundary)) == expected


@all_layouts
def test_stored_blocks_are_exactly_those_that_some_hit_reads(geometry: Geometry) -> None:
    for group in geometry.groups:
        read = {
            b
            for chunks in range(CHUNKS + 1)
            for b in needed_blocks(group, chunks * geometry.chunk_tokens)
        }
        for chunk in range(CHUNKS // 2):
            per_chunk = geometry.blocks_per_chunk(group)
            inside = range(chunk * per_chunk, (chunk + 1) * per_chunk)
            assert set(stored_blocks(geometry, group, chunk)) == read & set(inside)
            assert part_bytes(geometry, group, chunk) in {
                0,
                *(size for size, _ in slot_shapes(geometry, group)),
            }


@all_layouts
def test_every_needed_chunk_has_an_object(geometry: Geometry) -> None:
    for group in geometry.groups:
        for chunks in range(CHUNKS):
            need = needed_chunks(geometry, group, chunks)
            blocks = needed_blocks(group, chunks * geometry.chunk_tokens)
            stored = {b for chunk in need for b in stored_blocks(geometry, group, chunk)}
            assert set(blocks) <= stored
            assert all(stored_blocks(geometry, group, chunk) for chunk in need)


def brute_force_hit(geometry: Geometry, masks: list[bytes], chunks_max: int) -> int:
    """The definition: the largest boundary at which every group has every object it needs."""
    for chunks in range(chunks_max, 0, -1):
        boundary = chunks * geometry.chunk_tokens
        if all(
            masks[index][block // geometry.blocks_per_chunk(group)]
            for index, group in enumerate(geometry.groups)
            for block in needed_blocks(group, boundary)
        ):
            return chunks
    return 0


@given(st.sampled_from(sorted(LAYOUTS)), st.integers(0, 9), st.data())
def test_largest_hit_is_the_definition(name: str, chunks: int, data: st.DataObject) -> None:
    geometry = LAYOUTS[name]
    bit = st.sampled_from((1, 1, 1, 0))
    masks = [
        bytes(data.draw(st.lists(bit, min_size=chunks, max_size=chunks))) for _ in geometry.groups
    ]
    assert largest_hit(geometry, masks, chunks) == brute_force_hit(geometry, masks, chunks)


def test_one_group_missing_everything_is_a_miss() -> None:
    """Groups that disagree give the minimum, never a half-restored prefix (A26, B35)."""
    geometry = LAYOUTS["gemma3"]
    assert largest_hit(geometry, [bytes([1] * 4), bytes(4), bytes([1] * 4)], 4) == 0
    assert largest_hit(geometry, [bytes([1] * 4)] * 3, 4) == 4


@given(st.sampled_from(sorted(LAYOUTS)), st.integers(1, 9), st.data())
def test_what_a_larger_hit_lacks_is_named(name: str, chunks: int, data: st.DataObject) -> None:
    geometry = LAYOUTS[name]
    bit = st.sampled_from((1, 1, 1, 0))
    masks = [
        bytes(data.draw(st.lists(bit, min_size=chunks, max_size=chunks))) for _ in geometry.groups
    ]
    lacks = lacking(geometry, masks, chunks)
    assert bool(lacks) == (largest_hit(geometry, masks, chunks) < chunks)
    for group, chunk in lacks:
        assert chunk in needed_chunks(geometry, group, chunks)
        assert not masks[geometry.groups.index(group)][chunk]


TAILED = Geometry(
    (Group(0, GroupKind.RECURRENT, 16, (8,)), Group(1, GroupKind.FULL, 16, (8,))), 16, 4, 4
)


def test_a_tail_is_a_hit_behind_whole_attention_and_needs_no_state_before_it() -> None:
    assert is_tail_hit(TAILED, [b"\0\0", b"\1\1"], 2)
    assert is_tail_hit(TAILED, [b"", b""], 0)
    assert not is_tail_hit(TAILED, [b"\1\1", b"\0\1"], 2)
    assert not is_tail_hit(TAILED, [b"\1", b"\1"], 2), "chunks that were not looked up"


def test_a_tail_that_has_its_prefix_makes_the_longest_hit() -> None:
    in_second, in_third = Hit(2, 1, 20, (1, 0)), Hit(3, 4, 36, (2, 0))
    masks = [b"\1\0", b"\1\1"]
    assert longest_hit(TAILED, masks, 2, None) == whole_hit(TAILED, 1)
    assert longest_hit(TAILED, masks, 2, in_second) == in_second
    assert longest_hit(TAILED, masks, 2, in_third) == in_third
    assert longest_hit(TAILED, [b"\1\1", b"\1\1"], 2, in_second) == whole_hit(TAILED, 2)
    assert longest_hit(TAILED, [b"\1\0", b"\0\1"], 2, in_third) == whole_hit(TAILED, 0)
