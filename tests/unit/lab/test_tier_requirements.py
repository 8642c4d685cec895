"""What a hit reads from a tier, and the speed from which on a tier pays."""

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridkv.core.coverage import needed_chunks, part_bytes
from hybridkv.core.tier_urls import parse_tier
from hybridkv.lab.tier_bench import measure_tier
from hybridkv.lab.tier_requirements import (
    ReadCost,
    break_even_prefill,
    hit_shapes,
    needed_speed,
    read_cost,
)
from hybridkv.shm.slots import slot_bytes
from tests.layouts import LAYOUTS

NAMES = sorted(LAYOUTS)


@given(st.sampled_from(NAMES), st.integers(1, 40), st.integers(0, 40))
@settings(derandomize=True, max_examples=200)
def test_what_is_read_is_what_the_hit_needs_and_that_of_ram_has_not(
    name: str, chunks: int, in_ram: int
) -> None:
    geometry = LAYOUTS[name]
    wanted, there = (
        {
            (index, chunk): (size, geometry.parts(group))
            for index, group in enumerate(geometry.groups)
            for chunk in needed_chunks(geometry, group, count)
            if (size := part_bytes(geometry, group, chunk))
        }
        for count in (chunks, in_ram)
    )
    missing = (
        [shape for key, shape in wanted.items() if key not in there] if chunks > in_ram else []
    )
    assert sorted(hit_shapes(geometry, chunks, in_ram).elements()) == sorted(missing)
    tokens, chunk = 5, geometry.chunk_tokens
    cost = read_cost(geometry, chunks * chunk + tokens % chunk, in_ram * chunk, slot_bytes)
    assert cost.objects == len(missing)
    assert cost.bytes == sum(slot_bytes(*shape) for shape in missing)
    assert cost.tokens == max(0, chunks - in_ram) * chunk


def test_a_tier_pays_above_the_speed_that_prefill_needs() -> None:
    cost = ReadCost(tokens=32_768, objects=256, bytes=1 << 30)
    speed = needed_speed(cost, 8192)
    assert (speed.seconds, speed.bytes_per_second, speed.objects_per_second) == (4, 1 << 28, 64)
    assert break_even_prefill(cost, 1 << 28, 0.0) == 8192
    assert break_even_prefill(cost, 1 << 28, 4.0) == 4096
    assert needed_speed(ReadCost(), 8192).bytes_per_second == 0


@pytest.mark.parametrize("name", NAMES)
def test_the_cost_of_a_trace_is_the_sum(name: str) -> None:
    geometry = LAYOUTS[name]
    whole = read_cost(geometry, 40 * geometry.chunk_tokens, 0, slot_bytes)
    assert whole + ReadCost() == whole
    assert sum([whole, whole], ReadCost()).bytes == 2 * whole.bytes


def test_objects_of_any_size_are_measured(tmp_path: Path) -> None:
    """One is larger than its share of the memory that all are written from."""
    shapes = Counter({(70 << 20, 1): 1, (5000, 2): 3})
    speed = measure_tier(parse_tier(f"disk://{tmp_path}/kv?bytes=1GiB", "tier"), shapes)
    assert speed.read_bytes_per_second > 0
    assert list((tmp_path / "kv").iterdir()) == []
