"""The Removed messages of a subscriber. The simulation checks that none is missing."""

from collections import ChainMap
from pathlib import Path

import pytest

from hybridkv.core.keys import HASH_BYTES
from hybridkv.core.packed import SlotRef, pack_slots, pack_u64
from hybridkv.daemon.handlers import Daemon
from hybridkv.daemon.subscriptions import (
    LOOK_SECONDS,
    UNANSWERED_MAX,
    OutgoingMessage,
    RemovedObject,
)
from hybridkv.wire.messages import Clear, Commit, Identify, Lookup, Removed, Stats, Subscribe
from tests.layouts import LAYOUTS
from tests.unit.daemon.harness import commit, engine, grant, hashes, make_daemon
from tests.unit.daemon.tier_node import FULL, Node

QWEN3 = LAYOUTS["qwen3"]
PART = QWEN3.groups[0].block_bytes


def turn(daemon: Daemon) -> list[OutgoingMessage]:
    """End a turn of the loop, and return the messages that are to be sent."""
    daemon.tick(0.0)
    outgoing = list(daemon.outgoing)
    daemon.outgoing.clear()
    return outgoing


def store(daemon: Daemon, connection: int, *numbers: int) -> None:
    commit(daemon, connection, grant(daemon, connection, PART, len(numbers)), 0, list(numbers))


def test_a_commit_that_came_to_nothing_is_told() -> None:
    """Its engine cannot know of a slot that it lost, or of a quota that leaves no room."""
    daemon = make_daemon()
    engine(daemon, 1, QWEN3)
    daemon.handle(1, Subscribe())
    commit(daemon, 1, [SlotRef(0, 5)], 0, [1])
    assert turn(daemon) == [(1, Removed(0, hashes(1), b"\0"))]
    store(daemon, 1, 1)
    store(daemon, 1, 1)
    assert turn(daemon) == [], "a duplicate is there"
    daemon.store.tenant_bytes = 1
    packed = pack_slots(grant(daemon, 1, PART, 1))
    over_quota = Commit(packed, pack_u64([0]), hashes(2), tenants=pack_u64([9]))
    daemon.handle(1, over_quota)
    assert turn(daemon) == [(1, Removed(0, hashes(2), b"\0"))]


def test_another_identity_begins_with_nothing_to_tell() -> None:
    daemon = make_daemon()
    engine(daemon, 1, QWEN3)
    engine(daemon, 2, QWEN3, "other")
    daemon.handle(1, Subscribe())
    store(daemon, 1, 1)
    daemon.handle(1, Clear(7))
    daemon.handle(1, Identify(8, b"o" * HASH_BYTES))
    assert turn(daemon) == []
    store(daemon, 2, 2)
    daemon.handle(2, Clear(7))
    assert turn(daemon) == [], "of the old one"
    store(daemon, 1, 3)
    daemon.handle(2, Clear(7))
    assert turn(daemon) == [(1, Removed(0, hashes(3), b"\0"))]


def test_an_engine_that_says_nothing_is_sent_no_more_than_it_may_keep_unread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("hybridkv.wire.messages.REMOVED_MAX", 2)
    monkeypatch.setattr("hybridkv.daemon.subscriptions.QUEUE_MAX", 20)
    daemon = make_daemon()
    engine(daemon, 1, QWEN3, "silent")
    engine(daemon, 2, QWEN3, "busy")
    daemon.handle(1, Subscribe())
    sent: list[Removed] = []

    def collect() -> None:
        sent.extend(reply for _, reply in turn(daemon) if isinstance(reply, Removed))

    def come_and_go(*numbers: int) -> None:
        store(daemon, 2, *numbers)
        daemon.handle(2, Clear(7))
        collect()

    come_and_go(*range(5))
    assert [len(removed.groups) for removed in sent] == [2, 2, 1]
    come_and_go(*range(5, 20))
    assert len(sent) == UNANSWERED_MAX
    come_and_go(*range(20, 30))
    assert len(sent) == UNANSWERED_MAX
    daemon.handle(1, Stats(9))
    collect()
    chunks = b"".join(removed.hashes for removed in sent)
    assert chunks == hashes(*range(30)), "all of it, in order"
    assert not any(removed.everything for removed in sent)
    sent.clear()
    come_and_go(*range(1, 1 + 2 * UNANSWERED_MAX))
    come_and_go(*range(30, 51))
    come_and_go(51)
    assert daemon.view.metric_values().named()["removals_overflowed"] == 1
    sent.clear()
    daemon.handle(1, Lookup(9, 1, hashes(1)))
    assert turn(daemon) == [(1, Removed(0, b"", b"", everything=True))]
    come_and_go(52)
    assert sent == [Removed(0, hashes(52), b"\0")]


def test_what_a_directory_has_is_told_and_told_again_when_it_has_it_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hybridkv.daemon.subscriptions.LOOKS_MAX", 3)
    node = Node(f"disk://{tmp_path}?bytes=64MiB")
    engine(node.daemon, 1, FULL)
    node.daemon.handle(1, Subscribe())

    def reported() -> dict[RemovedObject, int]:
        """The objects of the next messages, each with 1 where a tier has it."""
        node.tick(LOOK_SECONDS)
        replies = [reply for _, reply in node.daemon.outgoing]
        node.daemon.outgoing.clear()
        node.daemon.handle(1, Stats(5))
        return {
            RemovedObject(reply.hashes[at * HASH_BYTES :][:HASH_BYTES], group): reply.below[at]
            for reply in replies
            if isinstance(reply, Removed)
            for at, group in enumerate(reply.groups)
        }

    node.store(FULL, [1, 2])
    node.work()
    node.daemon.handle(1, Clear(7))
    node.jobs.clear()
    groups = range(len(FULL.groups))
    every = {RemovedObject(hashes(name), group) for name in (1, 2) for group in groups}
    first = reported()
    assert {removed for removed, is_below in first.items() if is_below} == every
    assert reported() == {}, "once"
    node.store(FULL, [1])
    tier = node.daemon.tiers[0].tier
    tier.discard([*tier.keys()])
    later = [reported() for _ in range(len(every))]
    lost = {removed for removed in every if removed.chunk_hash == hashes(2)}
    assert dict(ChainMap(*later)) == dict.fromkeys(lost, 0), "what came back is in RAM"
    assert max(map(len, later)) <= 3, "some at a time"


def test_of_more_than_a_session_is_told_the_rest_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hybridkv.daemon.subscriptions.BELOW_MAX", 1)
    node = Node(f"disk://{tmp_path}?bytes=64MiB")
    engine(node.daemon, 1, FULL)
    node.daemon.handle(1, Subscribe())
    node.store(FULL, [1])
    node.work()
    node.daemon.handle(1, Clear(7))
    node.tick()
    (removed,) = [reply for _, reply in node.daemon.outgoing if isinstance(reply, Removed)]
    untold = len(removed.below) - 1
    assert sorted(removed.below) == [*bytes(untold), 1]
    assert node.daemon.view.metric_values().named()["below_untold"] == untold > 0
