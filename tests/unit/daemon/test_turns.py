"""No message and no pile of messages keeps the daemon from the others for long."""

import signal
import socket
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridkv.client.control import ControlClient
from hybridkv.core.geometry import Geometry, Group, GroupKind
from hybridkv.core.packed import (
    SLOT_BYTES,
    SlotRef,
    batches,
    join_nodes,
    on_node,
    pack_slots,
    pack_u64,
    unpack_slots,
)
from hybridkv.daemon.clients import RECEIVE_BYTES
from hybridkv.lab.daemon_process import DaemonProcess
from hybridkv.shm.slots import slot_bytes
from hybridkv.wire.codec import Frames, WireError, decode_reply, decode_request, encode
from hybridkv.wire.messages import (
    BATCH_MAX,
    CHANGES_MAX,
    PROTOCOL_VERSION,
    Clear,
    Commit,
    Done,
    Free,
    Hello,
    Report,
    ReportCorrupt,
    Request,
    Reserve,
    Reserved,
    Stats,
)
from tests.invariants import check_daemon
from tests.unit.daemon.harness import engine, engine_hello, grant, make_daemon
from tests.waiting import DEADLINE_SECONDS

PART = 256
SMALL = Geometry((Group(0, GroupKind.FULL, 16, (PART,)),), 16, 16, 16)
OBJECTS = 2 * CHANGES_MAX + 10


def test_no_message_changes_more_than_so_many_slots() -> None:
    daemon = make_daemon(8 * OBJECTS * slot_bytes(PART, 1))
    engine(daemon, 1, SMALL)
    slots: list[SlotRef] = []
    while len(slots) < OBJECTS:
        granted = grant(daemon, 1, PART, min(BATCH_MAX, OBJECTS - len(slots)))
        assert 0 < len(granted) <= CHANGES_MAX
        slots += granted
    for at, slot in enumerate(slots):
        packed, name = pack_slots([slot]), at.to_bytes(32, "little")
        daemon.handle(1, Commit(packed, pack_u64([0]), name))
    assert daemon.store.objects == OBJECTS
    for left in (CHANGES_MAX, CHANGES_MAX, 10, 0):
        assert daemon.handle(1, Clear(2)) == Done(2, left)
        check_daemon(daemon)
    assert daemon.store.objects == 0


@pytest.mark.parametrize(
    "message",
    [
        lambda count: Free(bytes(SLOT_BYTES * count)),
        lambda count: ReportCorrupt(bytes(SLOT_BYTES * count)),
        lambda count: Commit(bytes(SLOT_BYTES * count), bytes(8 * count), bytes(32 * count)),
    ],
)
def test_a_message_of_too_many_slots_is_none_of_the_protocol(
    message: Callable[[int], Request],
) -> None:
    assert decode_request(encode(message(CHANGES_MAX))[4:]) == message(CHANGES_MAX)
    with pytest.raises(WireError):
        decode_request(encode(message(CHANGES_MAX + 1))[4:])


def test_slots_are_cut_between_two_of_them() -> None:
    slots = [SlotRef(number, number + 1) for number in range(5)]
    cut = batches(pack_slots(slots), 2 * SLOT_BYTES)
    assert [[*unpack_slots(batch)] for batch in cut] == [slots[:2], slots[2:4], slots[4:]]
    assert batches(b"", 2) == []


@given(st.integers(1, 4), st.integers(0, 5))
def test_a_ticket_has_the_slot_of_each_node(nodes: int, objects: int) -> None:
    slots = [
        pack_slots([SlotRef(node, (1 << 64) - 1 - place) for place in range(objects)])
        for node in range(nodes)
    ]
    tickets = join_nodes(slots)
    assert [on_node(tickets, node, nodes) for node in range(nodes)] == slots
    assert batches(tickets, nodes * SLOT_BYTES) == [
        b"".join(own) for own in zip(*(batches(own, SLOT_BYTES) for own in slots), strict=True)
    ]


def test_everything_is_cleared_in_pieces(daemon: DaemonProcess) -> None:
    hello = engine_hello(SMALL, "e", b"n" * 32)
    with ControlClient(daemon.socket_path, DEADLINE_SECONDS, hello) as control:
        stored = 0
        while stored < OBJECTS:
            granted = control.call(Reserve(2, PART, 1, OBJECTS - stored))
            assert isinstance(granted, Reserved)
            count = len(granted.slots) // SLOT_BYTES
            names = b"".join(at.to_bytes(32, "little") for at in range(stored, stored + count))
            control.tell(Commit(granted.slots, pack_u64([0] * count), names))
            stored += count
        assert control.stats().values["objects"] == OBJECTS
        assert control.clear_objects() == OBJECTS
        assert control.stats().values["objects"] == 0


def test_who_asks_beside_a_pile_of_messages_is_answered_before_its_end(
    daemon: DaemonProcess,
) -> None:
    """All of it is read at once, first."""
    assert daemon.process is not None
    question = encode(Stats(7))
    many = RECEIVE_BYTES // len(question)
    with socket.socket(socket.AF_UNIX) as pile, socket.socket(socket.AF_UNIX) as neighbour:
        for client in (pile, neighbour):
            client.settimeout(DEADLINE_SECONDS)
            client.connect(daemon.socket_path)
            client.sendall(encode(Hello(1, PROTOCOL_VERSION, "control")))
            assert client.recv(1 << 16)
        with ControlClient(daemon.socket_path) as control:
            # The kernel offers the client that was served last first. Now that is neither of them.
            control.stats()
        daemon.process.send_signal(signal.SIGSTOP)
        try:
            pile.sendall(question * many)
            neighbour.sendall(question)
        finally:
            daemon.process.send_signal(signal.SIGCONT)
        (report,) = _replies(neighbour, 1)
        assert report.values["requests_stats"] < many / 2
        assert len(_replies(pile, many)) == many, "and all of it is answered"


def _replies(client: socket.socket, count: int) -> list[Report]:
    frames, replies = Frames(), list[Report]()
    while len(replies) < count:
        for body in frames.feed(client.recv(1 << 18)):
            reply = decode_reply(body)
            assert isinstance(reply, Report)
            replies.append(reply)
    return replies
