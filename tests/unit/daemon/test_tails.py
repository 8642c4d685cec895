"""The daemon's answer where a hit may end inside a chunk."""

import dataclasses
import random
from pathlib import Path

import pytest

from hybridkv.core.keys import HASH_BYTES
from hybridkv.core.packed import SlotRef, pack_slots, pack_u64, unpack_slots
from hybridkv.core.tails import first_tail_chunk, tail_names, tail_tokens
from hybridkv.daemon.handlers import Daemon
from hybridkv.shm.slots import SLOT_ALIGN
from hybridkv.wire.messages import NO_PARENT, Commit, Found, Lookup, Pending, Release, Reply
from tests.invariants import check_daemon
from tests.layouts import LAYOUTS
from tests.unit.daemon.harness import commit, engine, grant, hashes, make_daemon, refusal_of
from tests.unit.daemon.tier_node import WAIT_MS, Node, is_found

FINE = dataclasses.replace(LAYOUTS["qwen3next"], hash_tokens=64, alignment_tokens=64)
RECURRENT, FULL = (0, 1), 2
TAILS = hashes(*range(100, 109))  # Three in each of the chunks 0, 1 and 2.


@pytest.fixture
def daemon() -> Daemon:
    daemon = make_daemon()
    engine(daemon, 1, FINE)
    return daemon


def store(daemon: Daemon, number: int, *groups: int) -> list[SlotRef]:
    """Store an object of this name for each of the groups. Returns their slots."""
    slots: list[SlotRef] = []
    for group in groups:
        granted = grant(daemon, 1, FINE.groups[group].block_bytes, 1)
        commit(daemon, 1, granted, group, [number])
        slots += granted
    return slots


def asked(daemon: Daemon, lease: int, tails: bytes = TAILS, start: int = 0) -> Found:
    """The answer to a lookup of three chunks."""
    found = daemon.handle(1, Lookup(5, lease, hashes(0, 1, 2), tails=tails, tails_from=start))
    assert isinstance(found, Found), found
    return found


def test_the_longest_tail_that_is_whole_is_hit(daemon: Daemon) -> None:
    """Chunks of attention before it must be whole. States before it are not needed."""
    first = store(daemon, 0, FULL)
    store(daemon, 103, *RECURRENT, FULL)
    tail = store(daemon, 104, *RECURRENT, FULL)
    store(daemon, 105, *RECURRENT)
    found = asked(daemon, 1)
    assert (found.depth, found.tail) == (2, 5)
    slots = [*unpack_slots(found.slots)]
    assert slots == [tail[0], tail[1], first[0], tail[2]]
    assert asked(daemon, 2, TAILS[3 * 32 :], 1).tail == 2, "numbers begin with the first name"
    store(daemon, 106, *RECURRENT, FULL)
    assert asked(daemon, 3).tail == 5, "attention of chunk 1 is not there"


class Chat:
    """A conversation whose prompts an engine looks up and stores, each with its tail."""

    def __init__(self, daemon: Daemon, number: int) -> None:
        self._daemon, self._number = daemon, number
        self.tokens = 0

    def name(self, end: int) -> bytes:
        """The engine's hash of the first `end` tokens."""
        return (self._number << 32 | end).to_bytes(HASH_BYTES, "little")

    def tails(self) -> list[int]:
        """The tokens of each tail that RAM has of the conversation."""
        names = self._daemon.sessions.all[0].namespace.entries
        ends = range(FINE.hash_tokens, self.tokens, FINE.hash_tokens)
        return [end for end in ends if end % FINE.chunk_tokens and self.name(end) in names]

    def turn(self, added: int) -> int:
        """Serve a prompt with so many more tokens. Returns the tokens hit."""
        self.tokens += added
        chunk, unit, last = FINE.chunk_tokens, FINE.hash_tokens, self.tokens - 1
        chunks = [self.name(end) for end in range(chunk, last + 1, chunk)]
        fine = [self.name(end) for end in range(unit, last + 1, unit)]
        first = first_tail_chunk(FINE, self.tokens)
        names = b"".join(tail_names(FINE, fine, first, self.tokens))
        found = self._daemon.handle(
            1, Lookup(5, 1, b"".join(chunks), tails=names, tails_from=first)
        )
        assert isinstance(found, Found), found
        for at, name in enumerate(chunks):
            if not found.masks[FULL][at]:
                self._store(FULL, name, chunks[at - 1] if at else NO_PARENT)
        end = last // unit * unit
        stored: dict[bytes, tuple[int, ...]] = {chunks[-1]: RECURRENT} if chunks else {}
        if end % chunk:
            stored[self.name(end)] = (*RECURRENT, FULL)
        for name, groups in stored.items():
            for group in groups:
                self._store(group, name, chunks[-1] if chunks else NO_PARENT)
        self._daemon.handle(1, Release(1))
        if found.tail:
            return tail_tokens(FINE, first, found.tail - 1)
        return found.depth * chunk

    def _store(self, group: int, name: bytes, parent: bytes) -> None:
        """Store an object, if there is a slot for it."""
        for slot in grant(self._daemon, 1, FINE.groups[group].block_bytes, 1):
            packed = pack_slots([slot])
            request = Commit(slots=packed, groups=pack_u64([group]), hashes=name, parents=parent)
            self._daemon.handle(1, request)


def test_a_conversation_of_30_turns_leaves_one_tail_where_room_is_short() -> None:
    """Between two turns comes a prompt that nobody repeats."""
    daemon, turns = make_daemon(96 * SLOT_ALIGN), random.Random(1)
    engine(daemon, 1, FINE)
    chat = Chat(daemon, 0)
    for turn in range(30):
        before = chat.tokens
        hit = chat.turn(turns.randint(100, 500))
        assert before - FINE.hash_tokens <= hit <= before
        Chat(daemon, 1 + turn).turn(turns.randint(1000, 2000))
    assert len(chat.tails()) <= 1
    check_daemon(daemon)


def test_names_of_tails_that_cannot_be_are_refused(daemon: Daemon) -> None:
    engine(daemon, 2, LAYOUTS["qwen3next"], "other")
    for connection, tails in ((1, b"short"), (2, TAILS)):
        assert (
            refusal_of(daemon.handle(connection, Lookup(5, 1, hashes(0), tails=tails))) == "hashes"
        )


def looked_up(node: Node, lease: int = 7, rate: int = 0) -> Reply | None:
    """The first reply to a lookup of three chunks and their tails."""
    lookup = Lookup(5, lease, hashes(0, 1, 2), WAIT_MS, rate, tails=TAILS)
    return node.daemon.handle(1, lookup, node.now)


def over_directory(tmp_path: Path) -> Node:
    """A node with an empty RAM, over the same directory each time."""
    node = Node(f"disk://{tmp_path}?bytes=64MiB")
    engine(node.daemon, 1, FINE)
    return node


def below_ram(tmp_path: Path, *names: int) -> Node:
    """A node whose directory alone has all objects of these names."""
    node = over_directory(tmp_path)
    node.store(FINE, [*names])
    node.work()
    return over_directory(tmp_path)


@pytest.mark.parametrize("resident", [(), (0,), (104,), (0, 104)])
def test_a_tail_that_only_a_directory_has_is_read_with_its_chunks(
    tmp_path: Path, resident: tuple[int, ...]
) -> None:
    node = below_ram(tmp_path, 0, 104)
    if resident:
        node.store(FINE, [*resident])
    if len(resident) == 2:
        assert is_found(looked_up(node)).tail == 5
        return
    pending = looked_up(node)
    assert isinstance(pending, Pending)
    assert pending.depth == 2, "so that the engine waits for it"
    node.work()
    found = node.answer()
    assert (found.depth, found.tail) == (2, 5)
    node.prove(FINE, found, [])
    node.daemon.handle(1, Release(7))
    again = is_found(looked_up(node))
    assert (again.depth, again.tail, again.tiers) == (2, 5, {}), "it is in RAM now"


def test_who_waits_for_a_tail_that_is_read_for_another_knows_its_own_place(tmp_path: Path) -> None:
    """The second lookup has fewer chunks and fewer names of tails than that which reads it."""
    node = below_ram(tmp_path, 0, 104)
    assert isinstance(looked_up(node, lease=7), Pending)
    shorter = Lookup(6, 8, hashes(0, 1), WAIT_MS, tails=hashes(103, 104, 105), tails_from=1)
    assert isinstance(node.daemon.handle(1, shorter, node.now), Pending)
    node.work()
    answers = [found for _, found in node.daemon.outgoing if isinstance(found, Found)]
    assert [(found.depth, found.tail) for found in answers] == [(2, 5), (2, 2)]
    assert [found.tiers for found in answers] == [{"disk": 2}] * 2


def test_a_damaged_tail_costs_only_itself(tmp_path: Path) -> None:
    node = below_ram(tmp_path, 0, 104)
    for path in tmp_path.glob("objects/*/??/*"):
        image = bytearray(path.read_bytes())
        if bytes([104]) * 32 in image:
            image[-1] ^= 1
            path.write_bytes(image)
    assert isinstance(looked_up(node), Pending)
    node.work()
    found = node.answer()
    assert (found.chunks, found.tail) == (1, 0)
