"""Copy plans: every planned block holds what its object claims, nothing shared or null is touched."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridkv.core.coverage import needed_blocks, needed_chunks, stored_blocks
from hybridkv.core.geometry import Geometry, Kind
from hybridkv.core.plans import NULL_BLOCK, PlanError, SlotRef, plan_load, plan_store
from tests.layouts import LAYOUTS


def table_for_hit(geometry: Geometry, index: int, hit_chunks: int, local_tokens: int) -> list[int]:
    """A block table as the engine makes it for a hit: position + 1 where needed or local, null elsewhere."""
    group = geometry.groups[index]
    needed = needed_blocks(group, hit_chunks * geometry.chunk_tokens)
    length = hit_chunks * geometry.chunk_tokens // group.tokens_per_block
    return [position + 1 if position in needed else NULL_BLOCK for position in range(length)]


@given(st.sampled_from(sorted(LAYOUTS)), st.integers(1, 9), st.data())
def test_a_load_covers_what_the_hit_needs_and_the_local_hit_lacks(name: str, hit: int, data: st.DataObject) -> None:
    geometry = LAYOUTS[name]
    alignment = geometry.alignment_tokens
    local = data.draw(st.integers(0, hit * geometry.chunk_tokens // alignment - 1)) * alignment
    tables = [table_for_hit(geometry, index, hit, local) for index in range(len(geometry.groups))]
    slots = [
        [SlotRef(1000 * index + chunk, 7) for chunk in needed_chunks(geometry, group, hit)]
        for index, group in enumerate(geometry.groups)
    ]
    ops = plan_load(geometry, hit, local, tables, slots)
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
        assert written == {position for position in needed if position >= local // group.tokens_per_block}
        assert not any(position < local // group.tokens_per_block for position in written), (
            "C34: local blocks are shared"
        )


def test_a_null_block_is_never_stored_and_never_loaded_into() -> None:
    geometry = LAYOUTS["qwen3"]
    assert plan_store(geometry, 0, 1, [5, NULL_BLOCK, 7], SlotRef(0, 1)) is None
    assert plan_store(geometry, 0, 3, [5, 6, 7], SlotRef(0, 1)) is None
    op = plan_store(geometry, 0, 2, [NULL_BLOCK, NULL_BLOCK, 7], SlotRef(0, 1))
    assert op is not None
    assert op.blocks == (7,)
    with pytest.raises(PlanError, match="no block for chunk 1"):
        plan_load(geometry, 2, 0, [[5, NULL_BLOCK]], [[SlotRef(0, 1), SlotRef(1, 1)]])
    with pytest.raises(PlanError, match="no block for chunk 1"):
        plan_load(geometry, 2, 0, [[5]], [[SlotRef(0, 1), SlotRef(1, 1)]])


def test_slots_must_match_what_the_hit_needs() -> None:
    with pytest.raises(PlanError, match="1 slots for 2 chunks"):
        plan_load(LAYOUTS["qwen3"], 2, 0, [[5, 6]], [[SlotRef(0, 1)]])


@pytest.mark.parametrize("geometry", LAYOUTS.values(), ids=LAYOUTS)
def test_a_store_takes_the_stored_blocks_in_order(geometry: Geometry) -> None:
    for index, group in enumerate(geometry.groups):
        if group.kind is Kind.RECURRENT:
            continue
        table = list(range(100, 100 + 4 * geometry.blocks_per_chunk(group)))
        for chunk in range(4):
            op = plan_store(geometry, index, chunk, table, SlotRef(0, 1))
            stored = stored_blocks(geometry, group, chunk)
            assert (op is None) == (not stored)
            if op is not None:
                assert list(op.blocks) == [100 + position for position in stored]
                assert (op.first, op.count) == (0, len(stored))
