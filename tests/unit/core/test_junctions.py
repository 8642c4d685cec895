"""Where prompts part, against the definition of a hit, and where a state is worth keeping."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridkv.core.geometry import GroupKind
from hybridkv.core.junctions import Branches, junction, tokens_of_cost, worth_keeping
from hybridkv.core.keys import HASH_BYTES
from hybridkv.core.speed import Speed
from tests.layouts import LAYOUTS
from tests.unit.core.test_coverage import brute_force_hit

NAMES = [bytes([number]) * HASH_BYTES for number in range(10)]
PROMPT = b"".join(NAMES)


@given(st.sampled_from(sorted(LAYOUTS)), st.integers(0, 9), st.data())
def test_a_junction_is_the_deepest_hit_for_which_states_or_windows_are_missing(
    name: str, chunks: int, data: st.DataObject
) -> None:
    geometry = LAYOUTS[name]
    bit = st.sampled_from((1, 1, 1, 0))
    masks = [
        bytes(data.draw(st.lists(bit, min_size=chunks, max_size=chunks))) for _ in geometry.groups
    ]
    full = [group.kind is GroupKind.FULL for group in geometry.groups]
    pairs = zip(masks, full, strict=True)
    with_others = [mask if is_full else bytes([1] * chunks) for mask, is_full in pairs]
    deepest = brute_force_hit(geometry, with_others, chunks)
    is_known = any(full) and not all(full)
    is_deeper = is_known and deepest > brute_force_hit(geometry, masks, chunks)
    assert junction(geometry, masks, chunks) == (deepest if is_deeper else 0)


def test_boundaries_are_those_at_which_prompts_parted_most_often() -> None:
    branches = Branches()
    for number in (2, 2, 4, 7, 7, 7):
        branches.note(NAMES[number])
    assert branches.boundaries(PROMPT, beyond=0, most=4) == [3, 5, 8]
    assert branches.boundaries(PROMPT, beyond=0, most=2) == [3, 8]
    assert branches.boundaries(PROMPT, beyond=3, most=4) == [5, 8], "only beyond the hit"
    assert branches.boundaries(PROMPT[: 4 * HASH_BYTES], beyond=0, most=4) == [3], (
        "only those of the prompt"
    )


def test_the_boundary_that_was_not_met_for_the_longest_time_is_forgotten() -> None:
    branches = Branches(most=2)
    for number in (1, 2, 1, 3):
        branches.note(NAMES[number])
    assert len(branches) == 2
    assert branches.boundaries(PROMPT, beyond=0, most=4) == [2, 4]


@pytest.mark.parametrize(
    ("boundaries", "hit", "cost", "kept"),
    [
        ([1100, 3000, 3200], 1000, 256, [3000]),
        ([256, 512], 0, 0, [256, 512]),
        ([256, 512], 0, 256, [512]),
        ([], 0, 0, []),
    ],
)
def test_a_state_is_kept_where_it_saves_more_than_it_costs(
    boundaries: list[int], hit: int, cost: float, kept: list[int]
) -> None:
    assert worth_keeping(boundaries, hit, cost) == kept


def test_a_state_costs_two_copies_and_a_step() -> None:
    assert tokens_of_cost(76 << 20, Speed(10_000.0), Speed(50e9)) == pytest.approx(132, abs=1)
    assert tokens_of_cost(76 << 20, Speed(10_000.0), Speed()) == 100
    assert tokens_of_cost(76 << 20, Speed(), Speed(50e9)) == 0, "nothing is measured yet"
