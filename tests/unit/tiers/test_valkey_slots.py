"""Which node has a slot, by what nodes of a cluster answer."""

import socket

import pytest

from hybridkv.tiers.remote import Deadline
from hybridkv.tiers.valkey.resp import RefusedCommand, Reply, RespConnection
from hybridkv.tiers.valkey.slots import SLOTS, Address, read_slots, redirect_of, slot_of
from tests.waiting import DEADLINE_SECONDS

ASKED = Address("asked", 1)
FIRST, SECOND = Address("10.0.0.1", 6379), Address("10.0.0.2", 6380)


def node(address: Address) -> list[Reply]:
    return [address.host.encode(), address.port, b"id", []]


@pytest.mark.parametrize(
    ("name", "hashed"),
    [
        (b"123456789", b"123456789"),
        (b"{user1000}.following", b"user1000"),
        (b"foo{}{bar}", b"foo{}{bar}"),
        (b"foo{{bar}}zap", b"{bar"),
        (b"foo{bar}{zap}", b"bar"),
        (b"foo{bar", b"foo{bar"),
        (b"foo}bar{", b"foo}bar{"),
    ],
)
def test_a_hash_tag_alone_decides(name: bytes, hashed: bytes) -> None:
    """As the specification of clusters has it, and its examples."""
    assert slot_of(name) == slot_of(hashed)
    if name != hashed:
        assert slot_of(name) != slot_of(name.replace(b"{", b"").replace(b"}", b""))


def test_the_slot_is_that_of_the_specification() -> None:
    assert slot_of(b"123456789") == 0x31C3
    assert slot_of(b"foo") == 12182


def test_ranges_have_their_primaries() -> None:
    reply: Reply = [[0, 9, node(FIRST), node(SECOND)], [11, SLOTS - 1, node(SECOND)], [10, 10]]
    slots = read_slots(reply, ASKED)
    assert slots is not None
    assert slots.primaries == [FIRST, SECOND]
    assert [slots.owners[slot] for slot in (0, 9, 10, 11, SLOTS - 1)] == [
        *(FIRST, FIRST, None, SECOND, SECOND)
    ]
    assert len(slots.owners) == SLOTS


def test_a_node_without_a_name_is_the_one_that_was_asked() -> None:
    for host in (b"", None):
        slots = read_slots([[0, 1, [host, 7, b"id"]]], ASKED)
        assert slots is not None
        assert slots.primaries == [Address("asked", 7)]


@pytest.mark.parametrize(
    "reply",
    [
        None,
        b"none",
        [],
        [[0, SLOTS, node(FIRST)]],
        [[2, 1, node(FIRST)]],
        [[-1, 1, node(FIRST)]],
        [[0, 1, [b"?", 7, b"id"]]],
        [[0, 1, [b"host", 0, b"id"]]],
        [[0, 1, b"host"]],
    ],
)
def test_what_tells_of_no_slot_is_no_map(reply: Reply) -> None:
    assert read_slots(reply, ASKED) is None


def test_a_slot_that_moved_has_its_new_node_and_others_stay() -> None:
    before = read_slots([[0, 1, node(FIRST)]], ASKED)
    assert before is not None
    after = before.moved({1: SECOND, 2: SECOND})
    assert list(after.owners[:4]) == [FIRST, SECOND, SECOND, None]
    assert list(before.owners[:4]) == [FIRST, FIRST, None, None]
    assert after.primaries == [FIRST, SECOND]
    assert after.moved({0: SECOND}).primaries == [SECOND]


@pytest.mark.parametrize(
    ("line", "code", "address"),
    [
        (b"MOVED 3999 10.0.0.2:6380", "MOVED", SECOND),
        (b"ASK 3999 10.0.0.2:6380", "ASK", SECOND),
        (b"MOVED 3999 :6380", "MOVED", Address("asked", 6380)),
        (b"MOVED 3999 ::1:6380", "MOVED", Address("::1", 6380)),
        (b"MOVED 3999 ?:6380", "MOVED", None),
        (b"MOVED 3999 host:port", "MOVED", None),
        (b"MOVED 3999 host:99999", "MOVED", None),
        (b"MOVED", "MOVED", None),
        (b"ERR 3999 10.0.0.2:6380", "ERR", None),
    ],
)
def test_a_refusal_names_the_node_to_ask(line: bytes, code: str, address: Address | None) -> None:
    here, there = socket.socketpair()
    with here, there:
        there.sendall(b"-%b\r\n" % line)
        connection = RespConnection(here, Deadline(DEADLINE_SECONDS))
        refusal = connection.reply()
        connection.close()
    assert isinstance(refusal, RefusedCommand)
    assert refusal.code == code
    assert redirect_of(refusal, ASKED) == address


def test_an_address_is_written_as_in_a_url() -> None:
    assert str(FIRST) == "10.0.0.1:6379"
    assert str(Address("::1", 1)) == "[::1]:1"
