"""Slots of several nodes that belong together."""

import random

import pytest

from hybridkv.connector.scheduler.node_slots import NodeSlots
from hybridkv.core.packed import SlotRef, pack_slots, unpack_slots
from hybridkv.shm.slots import SLOT_ALIGN

pytestmark = pytest.mark.engine

PLACES = 64
TOP = (1 << 64) - 1


def packed(places: list[int], generations: list[int]) -> bytes:
    offsets = [place * SLOT_ALIGN for place in places]
    return pack_slots(map(SlotRef, offsets, generations))


def test_each_node_gets_its_own_slots_in_any_order() -> None:
    slots = NodeSlots(PLACES * SLOT_ALIGN, 3)
    of_nodes = [packed([0, 5, 63], [7, TOP, 9]), packed([9, 2, 1 << 40], [1, 2, TOP])]
    of_nodes.append(packed([3, 4, 5], [4, 5, 6]))
    slots.match_slots(of_nodes)
    asked = packed([63, 0], [9, 7])
    assert slots.on_node(0, asked) == asked
    assert slots.on_node(1, asked) == packed([1 << 40, 9], [TOP, 1])
    assert slots.on_node(2, asked) == packed([5, 3], [6, 4])
    assert slots.on_node(1, packed([], [])) == packed([], [])


def test_an_old_name_never_means_a_new_object() -> None:
    """Generation 0 is that of no slot, so a message about it is ignored and a load of it fails."""
    slots = NodeSlots(PLACES * SLOT_ALIGN, 2)
    slots.match_slots([packed([1, 2], [10, 11]), packed([4, 5], [20, 21])])
    slots.match_slots([packed([2], [12]), packed([6], [22])])
    assert slots.on_node(1, packed([1, 2], [10, 12])) == packed([4, 6], [20, 22])
    named_before = slots.on_node(1, packed([1, 2], [10, 11]))
    assert [slot.generation for slot in unpack_slots(named_before)] == [20, 0]


def test_what_the_first_nodes_arena_has_no_place_for_is_a_fault() -> None:
    slots = NodeSlots(PLACES * SLOT_ALIGN, 2)
    with pytest.raises(IndexError):
        slots.on_node(1, packed([PLACES], [1]))


@pytest.mark.parametrize("seed", range(20))
def test_slots_are_those_of_a_plain_table(seed: int) -> None:
    rng = random.Random(seed)
    slots = NodeSlots(PLACES * SLOT_ALIGN, 2)
    known: dict[int, tuple[int, int]] = {}
    for generation in range(1, 200):
        places = rng.sample(range(PLACES), rng.randrange(1, 9))
        own = rng.sample(range(1000), len(places))
        generations = [generation] * len(places)
        slots.match_slots(
            [packed(places, generations), packed(own, [TOP - at for at in generations])]
        )
        known |= {place: (at, generation) for place, at in zip(places, own, strict=True)}
        asked = rng.sample(sorted(known), rng.randrange(1, len(known) + 1))
        own_places, generations = map(list, zip(*(known[place] for place in asked), strict=True))
        answer = slots.on_node(1, packed(asked, generations))
        assert answer == packed(own_places, [TOP - at for at in generations])
