"""Write slots ahead of need, asked for in messages that the daemon takes."""

from hybridkv.client.credits import RETRY_SECONDS, SlotCredits
from hybridkv.core.packed import SLOT_BYTES
from hybridkv.shm.slots import slot_bytes
from hybridkv.wire.messages import CHANGES_MAX, SESSION_SHARE
from tests.packing import packed_slots

SHAPE = (4096, 1)


def granted(pool: SlotCredits, count: int, now: float) -> None:
    pool.on_granted(SHAPE, packed_slots(range(count)), now)


def test_a_large_pool_is_asked_for_in_several_questions() -> None:
    pool = SlotCredits({SHAPE: 2 * CHANGES_MAX + 10})
    asked = [request.slots for request in pool.credit_requests(0.0)]
    assert asked == [CHANGES_MAX, CHANGES_MAX, 10]
    assert pool.credit_requests(0.0) == [], "what was asked for is on its way"
    for count in asked:
        assert pool.is_awaiting
        granted(pool, count, 0.0)
    assert not pool.is_awaiting
    assert pool.credit_requests(0.0) == []
    assert len(pool.take_slots(SHAPE, 1 << 16)) == SLOT_BYTES * sum(asked)


def test_after_a_short_answer_the_next_question_waits() -> None:
    pool = SlotCredits({SHAPE: 2 * CHANGES_MAX})
    assert len(pool.credit_requests(0.0)) == 2
    granted(pool, 1, 1.0)
    granted(pool, 5, 1.0)
    assert not pool.is_awaiting
    assert pool.credit_requests(1.0) == []
    assert pool.credit_requests(1.0 + RETRY_SECONDS) == [
        (SHAPE, CHANGES_MAX),
        (SHAPE, CHANGES_MAX - 6),
    ]
    pool.forget_slots()
    assert not pool.is_awaiting
    assert [request.slots for request in pool.credit_requests(0.0)] == [CHANGES_MAX] * 2


def test_pools_that_do_not_fit_into_the_share_of_an_arena_are_lowered_alike() -> None:
    """Otherwise the first shape would take the share, and objects of the other had no slot."""
    large, small = (524288, 1), (393216, 1)
    pool = SlotCredits({large: 34, small: 34})
    arena = 64 << 20
    pool.fit_arena(arena)
    asked = {request.shape: request.slots for request in pool.credit_requests(0.0)}
    assert asked[large] == asked[small] == 18
    asked_bytes = sum(slot_bytes(*shape) * count for shape, count in asked.items())
    assert (
        asked_bytes
        <= arena // SESSION_SHARE
        < asked_bytes + slot_bytes(*large) + slot_bytes(*small)
    )
    pool.forget_slots()
    pool.fit_arena(arena << 10)
    assert {request.slots for request in pool.credit_requests(0.0)} == {34}, "there is room for all"
    pool.forget_slots()
    pool.fit_arena(1 << 20)
    assert {request.slots for request in pool.credit_requests(0.0)} == {1}, "each has one at least"
    SlotCredits({}).fit_arena(0)
