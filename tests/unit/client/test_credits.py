"""Write slots ahead of need, asked for in messages that the daemon takes."""

from hybridkv.client.credits import RETRY_SECONDS, SlotCredits
from hybridkv.core.packed import pack_u64
from hybridkv.wire.messages import CHANGES_MAX

SHAPE = (4096, 1)


def granted(pool: SlotCredits, count: int, now: float) -> None:
    pool.on_granted(SHAPE, pack_u64([*range(count)]), pack_u64([1] * count), now)


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
    assert len(pool.take_slots(SHAPE, 1 << 16).offsets) == 8 * sum(asked)


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
