"""Copy plans: every planned block is its object's, and no shared or null block is touched."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridkv.core.copies import NULL_BLOCK, CopyOp, CopyRun, PlanError, plan_load, storable_spans
from hybridkv.core.coverage import needed_blocks, needed_chunks, stored_blocks
from hybridkv.core.geometry import Geometry, GroupKind
from hybridkv.core.packed import SlotRef, pack_slots
from tests.layouts import LAYOUTS
from tests.packing import packed_slots


def table_for_hit(geometry: Geometry, index: int, hit_chunks: int, local_tokens: int) -> list[int]:
    """The engine's block table for a hit: position + 1 where needed or local, null elsewhere."""
    group = geometry.groups[index]
    needed = needed_blocks(group, hit_chunks * geometry.chunk_tokens)
    length = hit_chunks * geometry.chunk_tokens // group.tokens_per_block
    return [position + 1 if position in needed else NULL_BLOCK for position in range(length)]


@given(st.sampled_from(sorted(LAYOUTS)), st.integers(1, 9), st.data())
def test_a_load_covers_what_the_hit_needs_and_the_local_hit_lacks(
    name: str, hit: int, data: st.DataObject
) -> None:
    geometry = LAYOUTS[name]
    alignment = geometry.alignment_tokens
    local = data.draw(st.integers(0, hit * geometry.chunk_tokens // alignment - 1)) * alignment
    tables = [table_for_hit(geometry, index, hit, local) for index in range(len(geometry.groups))]
    slots = [
        SlotRef(1000 * index + chunk, 7)
        for index, group in enumerate(geometry.groups)
        for chunk in needed_chunks(geometry, group, hit)
    ]
    runs = plan_load(
        geometry=geometry,
        hit_chunks=hit,
        local_tokens=local,
        tables=tables,
        tickets=pack_slots(slots),
    )
    ops = [op for run in runs for op in run.ops()]
    assert [run.objects for run in runs] == [len(list(run.ops())) for run in runs]
    for index, group in enumerate(geometry.groups):
        written: set[int] = set()
        for op in (op for op in ops if op.group_index == index):
            stored = stored_blocks(geometry, group, op.chunk)
            positions = range(stored.start + op.first, stored.start + op.first + len(op.blocks))
            assert op.slot == SlotRef(1000 * index + op.chunk, 7)
            assert op.count == len(stored)
            assert positions.stop == stored.stop
            assert list(op.blocks) == [tables[index][position] for position in positions]
            written |= set(positions)
        needed = set(needed_blocks(group, hit * geometry.chunk_tokens))
        assert written == {
            position for position in needed if position >= local // group.tokens_per_block
        }
        assert not any(position < local // group.tokens_per_block for position in written), (
            "C34: local blocks are shared"
        )


def storable(
    geometry: Geometry, index: int, chunks: range, mask: bytes, table: list[int]
) -> list[CopyOp]:
    """Returns the copies of the objects that workers would store."""
    spans, _ = storable_spans(geometry, index, chunks, mask, table)
    runs = [CopyRun(span, packed_slots(range(span.objects))) for span in spans]
    return [op for run in runs for op in run.copies() if NULL_BLOCK not in op.blocks]


def plan_full_load(hit: int, table: list[int], slots: bytes) -> tuple[CopyRun, ...]:
    """Plan a load into one full group, without a local hit."""
    return plan_load(
        geometry=LAYOUTS["qwen3"], hit_chunks=hit, local_tokens=0, tables=[table], tickets=slots
    )


def test_a_null_block_is_never_stored_and_never_loaded_into() -> None:
    geometry = LAYOUTS["qwen3"]
    slots = packed_slots([0, 1])
    assert not storable(geometry, 0, range(1, 2), b"", [5, NULL_BLOCK, 7])
    (op,) = storable(geometry, 0, range(0, 3), b"", [NULL_BLOCK, NULL_BLOCK, 7])
    assert (op.chunk, op.blocks) == (2, (7,))
    assert storable_spans(geometry, 0, range(0, 3), b"", [NULL_BLOCK, NULL_BLOCK, 7])[1] == 2, (
        "holes are counted"
    )
    with pytest.raises(PlanError, match="no block for a chunk"):
        plan_full_load(2, [5, NULL_BLOCK], slots)
    with pytest.raises(PlanError, match="no block for the end"):
        plan_full_load(2, [5], slots)


def test_a_null_block_among_others_is_found_before_anything_is_copied() -> None:
    slots = packed_slots([0, 1, 2])
    (run,) = plan_full_load(3, [5, NULL_BLOCK, 7], slots)
    with pytest.raises(PlanError, match="null block"):
        next(run.ops())


def test_slots_must_match_what_the_hit_needs() -> None:
    with pytest.raises(PlanError, match="1 slots for the 2 objects"):
        plan_full_load(2, [5, 6], packed_slots([0]))


def drawn(data: st.DataObject, name: str) -> tuple[Geometry, int, int]:
    """A layout, the index of one of its groups that have block tables, and a number of chunks."""
    geometry = LAYOUTS[name]
    tables = [
        index
        for index, group in enumerate(geometry.groups)
        if group.kind is not GroupKind.RECURRENT
    ]
    return geometry, data.draw(st.sampled_from(tables)), data.draw(st.integers(1, 12))


@given(st.sampled_from(sorted(LAYOUTS)), st.data())
def test_a_store_takes_all_that_is_whole_and_absent(name: str, data: st.DataObject) -> None:
    """Against the rule of one object: it is not stored yet, and none of its blocks is null."""
    geometry, index, length = drawn(data, name)
    group = geometry.groups[index]
    mask = bytes(data.draw(st.lists(st.sampled_from((0, 0, 1)), max_size=length + 2)))
    first = data.draw(st.integers(0, length))
    table = [100 + position for position in range(length * geometry.blocks_per_chunk(group))]
    for start in data.draw(st.lists(st.integers(0, len(table) - 1), max_size=3)):
        for position in range(start, min(len(table), start + data.draw(st.integers(1, 40)))):
            table[position] = NULL_BLOCK
    expected = {}
    for chunk in range(first, length):
        blocks = tuple(table[position] for position in stored_blocks(geometry, group, chunk))
        if blocks and NULL_BLOCK not in blocks and not (chunk < len(mask) and mask[chunk]):
            expected[chunk] = blocks
    ops = storable(geometry, index, range(first, length), mask, table)
    assert [op.chunk for op in ops] == sorted(expected)
    assert {op.chunk: op.blocks for op in ops} == expected
    assert all((op.first, op.count) == (0, len(op.blocks)) for op in ops)


@given(st.sampled_from(sorted(LAYOUTS)), st.data())
def test_what_the_engine_let_go_of_is_not_even_planned(name: str, data: st.DataObject) -> None:
    """It lets go of the beginning: no slot is taken for that, and no worker has to find it."""
    geometry, index, length = drawn(data, name)
    group = geometry.groups[index]
    blocks = length * geometry.blocks_per_chunk(group)
    nulls = data.draw(st.integers(0, blocks))
    table = [NULL_BLOCK] * nulls + [100 + position for position in range(nulls, blocks)]
    first = data.draw(st.integers(0, length))
    spans, holes = storable_spans(geometry, index, range(first, length), b"", table)
    stored = [stored_blocks(geometry, group, chunk) for chunk in range(first, length)]
    assert all(NULL_BLOCK not in span.blocks for span in spans)
    assert sum(span.objects for span in spans) == sum(
        bool(at) and at.start >= nulls for at in stored
    )
    assert holes == sum(bool(at) and at.start < nulls for at in stored)


def test_a_run_without_slots_for_all_of_it_is_cut_at_the_prefix() -> None:
    (span,), _ = storable_spans(LAYOUTS["qwen3"], 0, range(0, 4), b"", [5, 6, 7, 8])
    assert span.objects == 4
    assert span.part(0, 3).blocks == [5, 6, 7]
