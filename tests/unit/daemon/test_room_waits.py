"""Lookups whose hits RAM cannot hold at once wait for each other. Time is what a test says."""

from pathlib import Path

import pytest

from hybridkv.core.coverage import LoadableHit, object_shapes, whole_hit
from hybridkv.shm.slots import slot_bytes
from hybridkv.tiers.doubts import DOUBT_SECONDS
from hybridkv.tiers.jobs import JobKind
from hybridkv.tiers.promotion import Wait
from hybridkv.tiers.room_waits import ROOM_WAITS_MAX, DistinctBytes, RoomWaits, waits_until
from hybridkv.wire.messages import Found, Lookup, Pending, Release
from tests.layouts import LAYOUTS, wide
from tests.unit.daemon.dict_tier import DictTier
from tests.unit.daemon.harness import engine, hashes
from tests.unit.daemon.tier_node import ARENA, Node, is_found

FULL = LAYOUTS["qwen3"]
(SHAPE,) = object_shapes(FULL, FULL.groups[0])
SIZE = slot_bytes(*SHAPE)
SPEED = FULL.chunk_tokens  # Tokens a second: a chunk takes one second.
WAIT_MS = 60_000
USERS = [[10 * user + chunk for chunk in range(1, 4)] for user in range(4)]
"""Prompts of three chunks."""


def node_with_room(tmp_path: Path, chunks: int) -> Node:
    """A node whose directory has the prompts of all users, and whose RAM has so much room."""
    url = f"disk://{tmp_path}?bytes=64MiB"
    before = Node(url)
    engine(before.daemon, 1, FULL)
    for user in USERS:
        before.store(FULL, user)
    before.work()
    node = Node(url, arena=chunks * SIZE)
    engine(node.daemon, 1, FULL)
    return node


def ask(node: Node, user: int, rate: int = SPEED) -> Found | Pending:
    reply = node.ask(*USERS[user], lease=user, wait_ms=WAIT_MS, rate=rate)
    assert isinstance(reply, (Found, Pending))
    node.tick()
    return reply


def release(node: Node, user: int) -> None:
    node.daemon.handle(1, Release(user), node.now)
    node.tick()


def waits(node: Node) -> tuple[int, int]:
    room_waits = node.daemon.promotion.room_waits
    return room_waits.kept, room_waits.broken


def nothing_is_left(node: Node) -> bool:
    room_waits = node.daemon.promotion.room_waits
    return not (room_waits.claimed.total or room_waits.held.total or room_waits.waiting)


def test_a_hit_without_room_comes_once_another_has_been_loaded(tmp_path: Path) -> None:
    node = node_with_room(tmp_path, 5)
    ask(node, 0)
    node.work()
    assert node.answer().chunks == 3
    assert isinstance(ask(node, 1), Pending)
    assert not node.jobs, "nothing is read before there is room for all of it"
    node.tick(0.5)
    assert not node.daemon.outgoing
    release(node, 0)
    node.work()
    found = node.answer()
    assert (found.chunks, found.why) == (3, "")
    node.prove(FULL, found, USERS[1])
    assert waits(node) == (1, 0)
    assert nothing_is_left(node)


def test_ticks_of_the_loop_count_nothing_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long prompt has thousands of objects, and the loop ticks after each message."""
    node = node_with_room(tmp_path, 5)
    ask(node, 0)
    node.work()
    node.answer()
    ask(node, 1)
    counted = []
    monkeypatch.setattr(RoomWaits, "bytes_alone", lambda self, needs: counted.append(needs))
    for _ in range(9):
        node.tick(0.01)
    assert not counted


def test_what_came_for_another_meanwhile_counts_at_the_end_of_the_wait(tmp_path: Path) -> None:
    node = node_with_room(tmp_path, 6)
    node.ask(*USERS[2][:1], lease=8, wait_ms=WAIT_MS, rate=SPEED)
    node.work()
    ask(node, 0)
    node.work()
    node.daemon.outgoing.clear()
    assert isinstance(ask(node, 1), Pending), "it lacks three chunks, and two have room"
    node.ask(*USERS[1][:2], lease=9, wait_ms=WAIT_MS, rate=SPEED)
    node.work()
    assert node.answer().chunks == 2
    release(node, 8)
    node.tick(1.0)
    node.work()
    found = node.answer()
    assert (found.chunks, found.why) == (3, "")
    assert waits(node) == (1, 0)
    assert nothing_is_left(node)


def test_nobody_waits_longer_than_computing_would_take_more(tmp_path: Path) -> None:
    """RAM has room for two of three chunks, and computing the third one takes a second."""
    node = node_with_room(tmp_path, 5)
    ask(node, 0)
    node.work()
    node.answer()
    assert isinstance(ask(node, 1), Pending)
    assert node.daemon.promotion.wakes_at() == pytest.approx(node.now + 1.0, abs=0.01)
    node.tick(1.0)
    node.work()
    found = node.answer()
    assert (found.chunks, found.why) == (2, "RAM has room for 256 of 384 tokens")
    assert waits(node) == (0, 1)
    assert nothing_is_left(node)


def test_after_a_wait_in_vain_a_shorter_hit_is_taken_at_once(tmp_path: Path) -> None:
    node = node_with_room(tmp_path, 5)
    ask(node, 0)
    node.work()
    ask(node, 1)
    node.tick(1.0)
    node.work()
    release(node, 1)
    node.daemon.outgoing.clear()
    ask(node, 2)
    node.work()
    assert node.answer().chunks == 2
    release(node, 2)
    node.tick(DOUBT_SECONDS)
    ask(node, 3)
    release(node, 0)
    node.work()
    assert node.answer().chunks == 3
    assert waits(node) == (1, 1)


def test_who_does_not_know_how_fast_it_computes_does_not_wait(tmp_path: Path) -> None:
    node = node_with_room(tmp_path, 5)
    ask(node, 0)
    node.work()
    node.answer()
    ask(node, 1, rate=0)
    node.work()
    assert node.answer().chunks == 2
    assert waits(node) == (0, 0)


def test_nobody_waits_for_what_those_who_wait_hold(tmp_path: Path) -> None:
    """Of three prompts two chunks are held. Room for the third one of each comes from the last."""
    node = node_with_room(tmp_path, 6)
    for user in (0, 1, 2):
        node.store(FULL, USERS[user][:2])
        is_found(node.ask(*USERS[user][:2], lease=10 + user, wait_ms=WAIT_MS, rate=SPEED))
    node.work()
    assert isinstance(ask(node, 0), Pending)
    assert isinstance(ask(node, 1), Pending)
    found = is_found(ask(node, 2))
    assert (found.chunks, found.why) == (2, "RAM has room for 256 of 384 tokens")
    release(node, 12)
    release(node, 2)
    node.work()
    answers = [found for _, found in node.daemon.outgoing if isinstance(found, Found)]
    assert [found.chunks for found in answers] == [3, 3]
    assert waits(node) == (2, 0)


def test_one_prompt_of_several_takes_its_room_once(tmp_path: Path) -> None:
    node = node_with_room(tmp_path, 4)
    for lease in range(4):
        node.ask(*USERS[0], lease=lease, wait_ms=WAIT_MS, rate=SPEED)
        node.tick()
    assert {lookup.story[-1] for lookup in node.daemon.promotion.lookups.values()} == {Wait.TIER}
    node.work()
    assert [found.chunks for _, found in node.daemon.outgoing if isinstance(found, Found)] == [
        3
    ] * 4
    assert nothing_is_left(node)


@pytest.mark.parametrize("after", ["the first read", "the wait"])
def test_an_end_leaves_nothing_behind(tmp_path: Path, after: str) -> None:
    node = node_with_room(tmp_path, 5)
    ask(node, 0)
    if after == "the wait":
        node.work()
        ask(node, 1)
    node.daemon.on_disconnect(1)
    node.tick()
    node.work()
    assert nothing_is_left(node)
    assert waits(node) == (0, 0)


def test_only_so_many_wait_for_room(tmp_path: Path) -> None:
    node = node_with_room(tmp_path, 5)
    ask(node, 0)
    node.work()
    node.answer()
    for lease in range(ROOM_WAITS_MAX):
        node.ask(*USERS[1], lease=100 + lease, wait_ms=WAIT_MS, rate=SPEED)
    node.tick()
    assert node.daemon.promotion.room_waits.waiting == ROOM_WAITS_MAX
    ask(node, 2)
    node.work((JobKind.READ,))
    assert node.answer().chunks == 2


def test_the_wait_is_within_the_patience_of_the_engine(tmp_path: Path) -> None:
    node = node_with_room(tmp_path, 5)
    ask(node, 0)
    node.work()
    node.answer()
    node.ask(*USERS[1], lease=1, wait_ms=300, rate=SPEED)
    node.tick()
    assert node.daemon.promotion.wakes_at() <= node.now + 0.3
    node.tick(0.3)
    node.work()
    assert node.answer().lease == 1


def hit(chunks: int, read_seconds: float) -> LoadableHit:
    return LoadableHit((whole_hit(FULL, chunks),), read_seconds)


@pytest.mark.parametrize(
    ("read_seconds", "resident", "shorter", "deadline", "until"),
    [
        (1.0, 0, (), 100.0, 13.0),  # Computing takes 4 s, reading 1 s.
        (1.0, 1, (), 100.0, 12.0),
        (1.0, 0, (hit(2, 0.5),), 100.0, 11.5),  # That spares 1.5 s, and the full hit 3 s.
        (1.0, 0, (hit(1, 0.1), hit(2, 1.9)), 100.0, 12.1),  # The best of them counts.
        (1.0, 0, (hit(2, 3.0),), 100.0, 13.0),  # Computing is sooner than that one.
        (5.0, 0, (), 100.0, 9.0),
        (1.0, 0, (), 12.0, 11.0),  # What is read later comes too late.
    ],
)
def test_waits_until(
    read_seconds: float,
    resident: int,
    shorter: tuple[LoadableHit, ...],
    deadline: float,
    until: float,
) -> None:
    assert waits_until(
        hit(4, read_seconds),
        resident_tokens=resident * FULL.chunk_tokens,
        shorter=shorter,
        token_seconds=1 / SPEED,
        now=10.0,
        deadline=deadline,
    ) == pytest.approx(until)


def test_what_several_want_takes_its_bytes_once() -> None:
    wanted = DistinctBytes()
    wanted.add("a", 3)
    wanted.add("a", 3)
    wanted.add("b", 4)
    assert (wanted.total, "a" in wanted) == (7, True)
    wanted.subtract("a", 3)
    assert wanted.total == 7
    wanted.subtract("a", 3)
    assert (wanted.total, "a" in wanted) == (4, False)


def test_pieces_that_are_too_short_are_waited_for_too() -> None:
    """Half of RAM is free, but no two pages of it lie next to each other."""
    records: dict[bytes, bytes] = {}
    large = wide(FULL, 10)
    for arena in (ARENA, 8 * SIZE):
        node = Node("sim://0", arena=arena, make=lambda spec: DictTier(records, is_remote=False))
        engine(node.daemon, 1, large)
        if not records:
            node.store(large, [1])
            node.work()
    engine(node.daemon, 2, FULL, name="other", identity=b"o" * 32)
    small = range(101, 109)
    node.store(FULL, [*small], connection=2)
    node.work()
    for number in small[::2]:
        is_found(node.daemon.handle(2, Lookup(5, number, hashes(number), WAIT_MS), node.now))
    assert isinstance(node.ask(1, wait_ms=WAIT_MS, rate=SPEED), Pending)
    node.tick()
    assert not node.jobs
    for number in small[:3:2]:
        node.daemon.handle(2, Release(number), node.now)
    node.tick()
    node.work()
    found = node.answer()
    assert (found.chunks, found.why) == (1, "")
    node.prove(large, found, [1])
    assert waits(node) == (1, 0)
    assert nothing_is_left(node)
