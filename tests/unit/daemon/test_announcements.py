"""What the daemon announces of its token book. That it is true in every order: tests/simulation."""

from pathlib import Path

from hybridkv.core.keys import HASH_BYTES, unpack_hashes
from hybridkv.daemon.handlers import Daemon
from hybridkv.daemon.subscriptions import LOOK_SECONDS
from hybridkv.daemon.token_book import ChunkDescription, ChunkName, DescribedChunk, TokenBook
from hybridkv.wire.messages import (
    Announced,
    Clear,
    Describe,
    Identify,
    ReadAnnouncements,
    Removed,
    Subscribe,
)
from tests.layouts import LAYOUTS
from tests.unit.daemon.harness import commit, engine, grant, hashes, make_daemon, refusal_of
from tests.unit.daemon.tier_node import FULL, Node

QWEN3 = LAYOUTS["qwen3"]
PART = QWEN3.groups[0].block_bytes
IDENTITY = b"n" * HASH_BYTES
BYTES = 64  # Of descriptions that a session asks for.


def node_of(*names: str) -> Daemon:
    """Return a daemon with an engine for each name, as connection 1, 2 ..., all subscribed."""
    daemon = make_daemon()
    for number, name in enumerate(names, 1):
        engine(daemon, number, QWEN3, name)
        daemon.handle(number, Subscribe())
        daemon.handle(number, ReadAnnouncements(1, BYTES))
    return daemon


def store(daemon: Daemon, connection: int, *numbers: int) -> None:
    commit(daemon, connection, grant(daemon, connection, PART, len(numbers)), 0, list(numbers))


def describe(daemon: Daemon, connection: int, *numbers: int, size: int = 10) -> None:
    """Describe chunks of one prompt, whose numbers follow each other. Number 1 is its first."""
    parents = [bytes(HASH_BYTES) if number == 1 else hashes(number - 1) for number in numbers]
    contents = [bytes([number]) * size for number in numbers]
    reply = daemon.handle(connection, Describe(hashes(*numbers), b"".join(parents), contents))
    assert reply is None


def announced(daemon: Daemon, connection: int, now: float = 0.0) -> list[bytes]:
    """Return the first byte of each chunk of the messages that are due to a connection."""
    daemon.tick(now)
    found = []
    for number, message in daemon.outgoing:
        if number == connection and isinstance(message, Announced):
            names = unpack_hashes(message.hashes)
            assert [name[:1] for name in names] == [each[:1] for each in message.descriptions]
            assert all(mask.strip(b"\1") == b"" for mask in message.masks), "all are in RAM"
            found += [name[:1] for name in names]
    daemon.outgoing.clear()
    return found


def test_what_an_engine_stored_is_announced_to_the_others_and_to_those_that_come() -> None:
    daemon = node_of("first", "second")
    store(daemon, 1, 1, 2)
    assert announced(daemon, 2) == [], "nobody has described it"
    describe(daemon, 1, 1, 2)
    assert announced(daemon, 1) == [], "it is its own"
    daemon.handle(2, ReadAnnouncements(1, BYTES))
    describe(daemon, 2, 1, 2)
    store(daemon, 2, 3)
    describe(daemon, 2, 3)
    assert announced(daemon, 1) == [b"\3"]
    engine(daemon, 3, QWEN3, "late")
    daemon.handle(3, Subscribe())
    assert announced(daemon, 3) == [], "it did not ask"
    daemon.handle(3, ReadAnnouncements(1, BYTES))
    assert announced(daemon, 3) == [b"\1", b"\2", b"\3"]
    daemon.handle(3, ReadAnnouncements(1, BYTES))
    assert announced(daemon, 3) == [], "once"


def test_a_message_has_as_much_as_was_asked_for_parents_first() -> None:
    daemon = node_of("first")
    numbers = [*range(1, 8)]
    store(daemon, 1, *numbers)
    for number in reversed(numbers):
        describe(daemon, 1, number)
    engine(daemon, 2, QWEN3, "late")
    daemon.handle(2, Subscribe())
    got: list[list[bytes]] = []
    for _ in numbers:
        daemon.handle(2, ReadAnnouncements(1, 25))
        got.append(announced(daemon, 2))
    assert got[:4] == [[b"\1", b"\2"], [b"\3", b"\4"], [b"\5", b"\6"], [b"\7"]]
    assert not any(got[4:])
    describe(daemon, 1, 1)
    daemon.handle(2, Subscribe())
    daemon.handle(2, ReadAnnouncements(1, 1))
    assert announced(daemon, 2) == [b"\1"], "a single chunk is always sent"


def test_chunks_that_name_each_other_as_parents_are_announced_once() -> None:
    daemon = node_of("first", "second")
    store(daemon, 1, 1, 2)
    daemon.handle(1, Describe(hashes(1, 2), hashes(2, 1), [b"\1", b"\2"]))
    assert sorted(announced(daemon, 2)) == [b"\1", b"\2"]


def test_what_is_gone_is_not_announced_and_is_forgotten() -> None:
    daemon = node_of("first", "second")
    store(daemon, 1, 1, 2)
    describe(daemon, 1, 1, 2)
    daemon.handle(1, Clear(7))
    assert announced(daemon, 2) == []
    assert not len(daemon.subscriptions.book), "nothing below has it"
    daemon.handle(2, ReadAnnouncements(1, BYTES))
    store(daemon, 1, 1)
    assert announced(daemon, 2) == [], "its engine has to describe it again"
    describe(daemon, 1, 1)
    assert announced(daemon, 2) == [b"\1"]


def test_an_engine_without_events_sends_none_and_gets_none() -> None:
    daemon = node_of("first")
    engine(daemon, 2, QWEN3, "without")
    store(daemon, 2, 1)
    describe(daemon, 2, 1)
    assert not len(daemon.subscriptions.book)
    store(daemon, 1, 2)
    describe(daemon, 1, 2)
    daemon.handle(2, ReadAnnouncements(1, BYTES))
    assert announced(daemon, 2) == []


def test_another_identity_has_other_chunks() -> None:
    daemon = node_of("first", "second")
    store(daemon, 1, 1)
    describe(daemon, 1, 1)
    daemon.handle(2, Identify(8, b"o" * HASH_BYTES))
    assert announced(daemon, 2) == []
    daemon.handle(2, Identify(9, IDENTITY))
    assert announced(daemon, 2) == [], "it was asked for under another identity"
    daemon.handle(2, ReadAnnouncements(2, BYTES))
    daemon.tick(0.0)
    assert [message.id for _, message in daemon.outgoing] == [2]


def test_a_description_that_does_not_fit_its_chunks_is_refused() -> None:
    daemon = node_of("first")
    reply = daemon.handle(1, Describe(hashes(1, 2), hashes(1, 1), [b"a"]))
    assert refusal_of(reply) == "describe"


def test_what_a_directory_has_is_announced_as_being_below(tmp_path: Path) -> None:
    """Also after a reboot, from the file of an earlier daemon, and until the directory lost it."""
    url = f"disk://{tmp_path}?bytes=64MiB"
    node = Node(url)
    engine(node.daemon, 1, FULL)
    node.daemon.handle(1, Subscribe())
    node.store(FULL, [1])
    describe(node.daemon, 1, 1)
    node.work()
    kept = [*node.daemon.subscriptions.book.described()]
    later = Node(url)
    later.daemon.subscriptions.on_book_read(kept)
    later.tick(LOOK_SECONDS)
    engine(later.daemon, 1, FULL)
    later.daemon.handle(1, Subscribe())
    later.daemon.handle(1, ReadAnnouncements(1, BYTES))
    later.tick(LOOK_SECONDS)
    (message,) = [reply for _, reply in later.daemon.outgoing if isinstance(reply, Announced)]
    assert message.masks == [b"\2"] * len(FULL.groups)
    later.daemon.outgoing.clear()
    tier = later.daemon.tiers[0].tier
    tier.discard([*tier.keys()])
    later.tick(LOOK_SECONDS)
    removed = [reply for _, reply in later.daemon.outgoing if isinstance(reply, Removed)]
    assert b"".join(reply.groups for reply in removed) == bytes(range(len(FULL.groups)))
    assert not len(later.daemon.subscriptions.book)


def test_a_full_book_forgets_what_may_be_gone_and_takes_no_more_otherwise() -> None:
    book = TokenBook(max_bytes=2 * (HASH_BYTES + 10))

    def add(number: int) -> bool:
        name = ChunkName(IDENTITY, hashes(number))
        return book.add_chunk(name, ChunkDescription(b"", bytes(10)))

    assert [add(1), add(2), add(2), add(3)] == [True, True, False, False]
    assert book.refused == 1
    book.unseen[ChunkName(IDENTITY, hashes(1))] = None
    assert add(3)
    assert [chunk.name.chunk_hash for chunk in book.described()] == [hashes(2), hashes(3)]
    for chunk in list(book.described()):
        book.forget_chunk(chunk.name)
    assert (len(book), book.held_bytes) == (0, 0)
    assert list(book.described()) == list[DescribedChunk]()
