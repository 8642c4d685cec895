"""Free space: best fit, joined neighbours, nothing lost."""

from hypothesis import given
from hypothesis import strategies as st

from hybridkv.shm.slots import SLOT_ALIGN
from hybridkv.store.extents import Extents, FreeRun
from tests.invariants import check_extents, free_runs

P = SLOT_ALIGN


@given(
    st.lists(st.tuples(st.booleans(), st.integers(1, 9)), max_size=60),
    st.integers(0, 40),
    st.integers(0, 40),
)
def test_what_is_allocated_and_what_is_free_tile_the_space(
    steps: list[tuple[bool, int]], first: int, added: int
) -> None:
    extents = Extents()
    extents.grow(first * P)
    allocated: dict[int, int] = {}  # Sizes by offset.
    for number, (allocate, size) in enumerate(steps):
        if number == len(steps) // 2:
            extents.grow((first + added) * P)
        if allocate:
            longest = max((run for _, run in free_runs(extents)), default=0)
            offset = extents.take_run(size * P)
            assert (offset is None) == (longest < size * P), (
                "an allocation fails only where no run is long enough"
            )
            if offset is not None:
                allocated[offset] = size * P
        elif allocated:
            offset = sorted(allocated)[size % len(allocated)]
            extents.free(offset, allocated.pop(offset))
        check_extents(extents, allocated.items())
        end = 0
        for offset, length in sorted([*allocated.items(), *free_runs(extents)]):
            assert offset == end
            end = offset + length
        assert end == extents.limit_bytes


def test_best_fit_at_the_lowest_offset() -> None:
    extents = Extents()
    extents.grow(10 * P)
    offsets = [extents.take_run(size * P) for size in (3, 1, 2, 1, 2, 1)]
    assert offsets == [0, 3 * P, 4 * P, 6 * P, 7 * P, 9 * P]
    for offset, size in ((0, 3), (4 * P, 2), (7 * P, 2)):
        extents.free(offset, size * P)
    assert extents.free(3 * P, P) == FreeRun(6 * P, 0), "it joins its neighbours"
    assert extents.take_run(4 * P) == 0
    extents.free(0, 3 * P)
    assert extents.take_run(2 * P) == 4 * P
    assert extents.take_run(2 * P) == 7 * P
    assert extents.take_run(2 * P) == 0
