"""The order of eviction of a directory's files, against that of RAM."""

import random
from array import array

import pytest

from hybridkv.core.policies import EvictionClass
from hybridkv.store.eviction import EvictionQueue
from hybridkv.tiers.disk.order import FIRST_ROW, FileOrder

BOUND_BYTES, ROWS = 400, 60


@pytest.mark.parametrize("seed", range(20))
def test_rows_go_in_the_order_of_ram(seed: int) -> None:
    """Prompts of chains: a row may go when the row after it is gone. Nothing comes back."""
    rng = random.Random(seed)
    sizes = array("Q", [0] * FIRST_ROW + [rng.randrange(1, 10) for _ in range(ROWS)])
    order, queue = FileOrder(sizes), EvictionQueue[int](BOUND_BYTES)
    order.bound_bytes = BOUND_BYTES
    there: set[int] = set()
    ends = {row for row in range(FIRST_ROW, ROWS + FIRST_ROW) if rng.random() < 0.3}

    def is_evictable(row: int) -> bool:
        return row in ends or row + 1 not in there

    for row in range(FIRST_ROW, ROWS + FIRST_ROW):
        order.add_row()
        interior = rng.random() < 0.2
        order.add_item(row, interior, row)
        eviction_class = EvictionClass.INTERIOR if interior else EvictionClass.PROMPT
        queue.add_item(row, sizes[row], eviction_class, bytes([row]))
        there.add(row)
        for used in rng.sample(sorted(there), min(len(there), rng.randrange(3))):
            order.mark_used(used)
            queue.mark_used([used])
            if is_evictable(used):
                queue.offer(used)
        order.check_lists(there, is_evictable)
    while there:
        victim = order.victim(is_evictable)
        assert victim == queue.victim(is_evictable)
        assert victim is not None
        order.remove(victim)
        queue.remove(victim)
        there.remove(victim)
        if victim - 1 in there:
            order.offer(victim - 1)
            queue.offer(victim - 1)
        order.check_lists(there, is_evictable)


def test_what_is_stored_again_soon_after_its_eviction_is_protected() -> None:
    order = FileOrder(array("Q", [0] * FIRST_ROW + [10] * 3))
    order.bound_bytes = 30
    for row in range(FIRST_ROW, FIRST_ROW + 3):
        order.add_row()
        order.add_item(row, interior=False, tag=row)
    order.remember(FIRST_ROW, FIRST_ROW)
    order.remove(FIRST_ROW)
    order.add_item(FIRST_ROW, interior=False, tag=FIRST_ROW)
    assert order.protected_bytes == 10
    assert order.victim(lambda row: True) == FIRST_ROW + 1
