"""The trace with pauses, and what the table's ways make of it."""

from dataclasses import replace

import pytest
from benchmarks.pauses import (
    CLASSES,
    MODEL,
    Pauses,
    PausingReplay,
    Turn,
    class_pauses,
    made_turns,
    table,
)

from hybridkv.lab.replay import BLOCK_TOKENS, TracePrompt
from hybridkv.store.retention import TENANT_SHARE, RetentionRefusal

FEW = [replace(users, sessions=3, turns=(1, 3)) for users in CLASSES]


def turn(seconds: float, blocks: range, session: int, is_last: bool = False) -> Turn:
    prompt = TracePrompt(len(blocks) * BLOCK_TOKENS, blocks)
    return Turn(seconds, prompt, f"class {session}", session, is_last)


def test_turns_are_in_order_and_go_on_from_their_session_after_a_pause_of_its_class() -> None:
    turns = made_turns(CLASSES)
    assert turns == made_turns(CLASSES) != made_turns(CLASSES, seed=2)
    bounds = {users.name: users.pause_seconds for users in CLASSES}
    last: dict[int, Turn] = {}
    for at, now in enumerate(turns):
        assert not at or turns[at - 1].seconds <= now.seconds
        before = last.get(now.session)
        if before is not None:
            least, most = bounds[now.user_class]
            assert least <= now.seconds - before.seconds <= most
            assert now.prompt.blocks[: len(before.prompt.blocks)] == before.prompt.blocks
            assert not before.is_last
        last[now.session] = now
    assert all(now.is_last for now in last.values())
    assert set(class_pauses(turns)) == {"tools", "people", "chats"}


def test_a_pause_is_expected_once_a_session_has_returned() -> None:
    pauses = Pauses()
    seconds = []
    for now, length in ((0.0, 4), (10.0, 6), (50.0, 7)):
        hashes = MODEL.hashes(turn(now, range(length), 0).prompt)
        seconds.append(pauses.expected_seconds(hashes, now))
    assert seconds == [None, 10.0, 25.0]
    assert pauses.expected_seconds(MODEL.hashes(turn(60, range(90, 95), 1).prompt), 60) is None


@pytest.mark.parametrize(("ends", "hit"), [(200.0, 8), (40.0, 0)])
def test_a_retained_history_survives_others_until_its_time(ends: float, hit: int) -> None:
    """The pause of the class is 50 seconds, or 10, and the session returns after 90."""
    ram_bytes = 48 * MODEL.smallest_bytes
    with PausingReplay(ram_bytes, {"class 0": ends / 4}, None) as cache:
        cache.serve_turn(turn(0.0, range(8), 0))
        for number in range(1, 9):
            start = 1000 * number
            cache.serve_turn(turn(10.0 * number, range(start, start + 20), number))
        again = cache.serve_turn(turn(90.0, range(9), 0))
    assert again.tokens_hit == hit * BLOCK_TOKENS


def test_no_more_is_retained_than_the_share_of_its_tenant() -> None:
    ram_bytes = 48 * MODEL.smallest_bytes
    with PausingReplay(ram_bytes, {"class 0": 1000.0}, None) as cache:
        cache.serve_turn(turn(0.0, range(40), 0))
        retention = cache.store.retention
        assert retention.charged_bytes == ram_bytes // TENANT_SHARE
        assert retention.refused[RetentionRefusal.TENANT] > 0


def test_the_table_has_a_row_for_each_class_and_size() -> None:
    rows = [row.split(" | ") for row in table(made_turns(FEW), (0.1, 1.0))]
    names = ["chats", "people", "scans", "tools", "all"]
    assert [row[1] for row in rows[2:]] == names * 2
    for row in rows[-5:]:
        assert len({rate.strip(" |") for rate in row[2:]}) == 1, "with all of RAM nothing is lost"
