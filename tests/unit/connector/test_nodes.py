"""The link to the daemons of two nodes, over the relays that workers have, and real daemons."""

import select
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from hybridkv.client.control import ControlClient
from hybridkv.core.copies import CopyRun, ObjectSpan
from hybridkv.core.errors import GeometryError
from hybridkv.core.geometry import Geometry, Group, GroupKind
from hybridkv.core.keys import HASH_BYTES
from hybridkv.core.packed import SLOT_BYTES, join_nodes, on_node, pack_u64
from hybridkv.lab.daemon_process import DaemonProcess, engine_hello, reserve
from hybridkv.shm.slots import slot_bytes
from hybridkv.wire import messages as wire
from tests.forked_daemon import ForkedDaemon
from tests.waiting import DEADLINE_SECONDS

pytestmark = pytest.mark.engine

CHUNK = 16
PART_BYTES = 4096
GEOMETRY = Geometry(
    groups=(
        Group(gid=0, kind=GroupKind.FULL, tokens_per_block=CHUNK, layer_bytes=(PART_BYTES,)),
        Group(gid=1, kind=GroupKind.RECURRENT, tokens_per_block=CHUNK, layer_bytes=(PART_BYTES,)),
    ),
    chunk_tokens=CHUNK,
    alignment_tokens=CHUNK,
    hash_tokens=CHUNK // 4,
    ranks=2,
    nodes=2,
)
HELLO = wire.Hello(
    1, wire.PROTOCOL_VERSION, "engine", "e", b"n" * HASH_BYTES, wire.geometry_to_wire(GEOMETRY)
)
CHUNKS = 4
NAMES = [bytes([at + 1]) * HASH_BYTES for at in range(CHUNKS)]
NO_PARENT = bytes(HASH_BYTES)


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[DaemonProcess]]:
    directory = tmp_path_factory.mktemp("nodes")
    arenas = ("8MiB", "6MiB")
    daemons: list[DaemonProcess] = [
        ForkedDaemon(str(directory / f"{node}.sock"), size) for node, size in enumerate(arenas)
    ]
    with daemons[0], daemons[1]:
        yield daemons


@dataclass
class Nodes:
    """A link, the relays of its nodes, and steps that carry their messages."""

    sockets: list[str]
    losses: list[str] = field(default_factory=list)
    number: int = 0

    def __post_init__(self) -> None:
        from hybridkv.connector.scheduler.nodes import NodesLink
        from hybridkv.connector.worker.relay import Relay

        self.link = NodesLink(HELLO, GEOMETRY, self.losses.append)
        self.relays = [Relay(path, f"e{node}", None) for node, path in enumerate(self.sockets)]

    def plan(self) -> Any:
        """Return the plans of a step without work."""
        from hybridkv.connector.messages import StepPlan

        self.number += 1
        return self.link.plan_nodes(StepPlan(self.number))

    def step(self, *, waits: bool = False) -> list[wire.Reply]:
        """Run a step, and return the replies that it brings.

        With `waits` its relays report once the daemons have answered.
        """
        plans = self.plan()
        for relay, share in zip(self.relays, plans.shares, strict=True):
            if share.mail is not None:
                relay.deliver(share.mail, time.monotonic())
        if waits:
            for relay in self.relays:
                if relay.link is not None and relay.link.fd is not None:
                    select.select([relay.link.fd], [], [], 0.05)
        answers = {
            node: news
            for node, relay in enumerate(self.relays)
            if (news := relay.take_answers(time.monotonic())) is not None
        }
        self.link.on_report(self.number, answers)
        return self.link.poll(time.monotonic())

    def until(self, kind: type[Any]) -> Any:
        """Step until there is a reply of a kind, and return it."""
        deadline = time.monotonic() + DEADLINE_SECONDS
        while True:
            assert time.monotonic() < deadline, f"no {kind.__name__}, lost: {self.losses}"
            for reply in self.step(waits=True):
                assert isinstance(reply, kind), reply
                return reply

    def connect(self) -> None:
        """Step until there is a connection."""
        self.link.poll(time.monotonic())
        deadline = time.monotonic() + DEADLINE_SECONDS
        while self.link.welcome is None:
            assert time.monotonic() < deadline, self.losses
            self.step(waits=True)

    def queue(self, message: wire.Request) -> None:
        """Queue a message that the link must take."""
        assert self.link.queue(message, time.monotonic())

    def reserve(self, count: int) -> wire.Reserved:
        """Return slots of one part."""
        self.queue(wire.Reserve(PART_BYTES, PART_BYTES, 1, count))
        reserved: wire.Reserved = self.until(wire.Reserved)
        return reserved

    def store(
        self, *, chunks: int = CHUNKS, states: tuple[int, ...], node: int | None = None
    ) -> None:
        """Commit the first chunks' attention, and the states at these chunks' ends.

        With `node` the objects of the other node are not committed, and its slots go back.
        """
        names = [(0, at) for at in range(chunks)] + [(1, at) for at in states]
        slots = self.reserve(len(names)).slots
        commit = wire.Commit(
            slots=slots,
            groups=pack_u64([group for group, _ in names]),
            hashes=b"".join(NAMES[at] for _, at in names),
            parents=b"".join(NAMES[at - 1] if at else NO_PARENT for _, at in names),
        )
        if node is None:
            self.queue(commit)
        else:
            with_object, without = (on_node(slots, each, 2) for each in (node, 1 - node))
            message = structs.replace(commit, slots=with_object)
            self.link.queue_on(node, message)
            self.link.queue_on(1 - node, wire.Free(without))
        self.step()

    def look_up(self, lease: int = 1, **asked: Any) -> wire.Found:
        """Return the answer to a lookup of all chunks."""
        self.queue(wire.Lookup(lease, lease, b"".join(NAMES), **asked))
        found: wire.Found = self.until(wire.Found)
        assert found.lease == found.id == lease
        return found

    def until_leases(self, daemons: list[DaemonProcess], count: int) -> None:
        """Step until each daemon has so many leases. No lookup is answered meanwhile."""
        deadline = time.monotonic() + DEADLINE_SECONDS
        for daemon in daemons:
            with ControlClient(daemon.socket_path, DEADLINE_SECONDS) as control:
                while (leases := control.stats().values["leases"]) != count:
                    assert time.monotonic() < deadline, f"{leases} leases are kept"
                    replies = self.step(waits=True)
                    assert not [reply for reply in replies if isinstance(reply, wire.Found)]

    def close(self) -> None:
        """End the connections."""
        self.link.close()
        self.step()
        assert all(relay.link is None for relay in self.relays)


@pytest.fixture
def nodes(both: list[DaemonProcess]) -> Iterator[Nodes]:
    """A connection to two daemons without objects."""
    for daemon in both:
        with ControlClient(daemon.socket_path, DEADLINE_SECONDS) as control:
            control.clear_objects()
    connected = Nodes([daemon.socket_path for daemon in both])
    connected.connect()
    yield connected
    connected.close()
    for daemon in both:
        until_value(daemon, "sessions", 0)


def until_value(daemon: DaemonProcess, name: str, value: float) -> None:
    """Wait until a value of the daemon is `value`."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    with ControlClient(daemon.socket_path, DEADLINE_SECONDS) as control:
        while (present := control.stats().values[name]) != value:
            assert time.monotonic() < deadline, f"{name} stays at {present}"


def test_every_node_has_the_session_with_its_own_ranks_and_identity(
    nodes: Nodes, both: list[DaemonProcess]
) -> None:
    identities = {HELLO.namespace}
    for node, daemon in enumerate(both):
        with ControlClient(daemon.socket_path, DEADLINE_SECONDS) as control:
            (engine,) = control.engines()
            assert control.welcome.boot == nodes.link.boots[node]
        assert engine.engine_id == f"e{node}"
        assert (engine.geometry.ranks, engine.geometry.stages) == (1, 1)
        identities.add(engine.namespace)
    assert len(identities) == 3, "no node takes another one's parts"


def test_a_hit_and_its_plans_name_each_nodes_own_slots(
    nodes: Nodes, both: list[DaemonProcess]
) -> None:
    from hybridkv.connector.messages import LoadPlan, StepPlan

    # Another engine's slots at one node: from here on the nodes' slots stand at other places.
    hello = engine_hello(GEOMETRY.groups, CHUNK)
    with ControlClient(both[1].socket_path, DEADLINE_SECONDS, hello=hello) as control:
        assert [*reserve(control, PART_BYTES, 5)]
        nodes.store(states=(CHUNKS - 1,))
    found = nodes.look_up()
    assert found.chunks == CHUNKS
    assert found.masks == [bytes([1]) * CHUNKS, bytes([0, 0, 0, 1])]
    run = CopyRun(ObjectSpan(0, 0, 1, [7, 8, 9, 10]), found.slots[: 4 * GEOMETRY.ticket_bytes])
    assert nodes.link.welcome is not None
    load = LoadPlan(nodes.link.welcome.boot, (run,))
    of_nodes = nodes.link.plan_nodes(StepPlan(99, loads={"r": load}, stores={5: run}))
    plans = [of_nodes.on_node(node) for node in range(2)]
    for node, plan in enumerate(plans):
        (moved,) = plan.loads["r"].runs
        assert plan.stores == {5: moved}
        assert plan.boot == plan.loads["r"].boot == nodes.link.boots[node]
        assert plan.session == 0, "the scheduler role's, which is that of every node"
    slots = [plan.stores[5].tickets for plan in plans]
    assert slots[0] != slots[1]
    assert join_nodes(slots) == run.tickets


def test_the_smallest_arena_bounds_what_an_engine_writes_into(nodes: Nodes) -> None:
    assert nodes.link.welcome is not None
    assert nodes.link.welcome.slots_bytes == 6 << 20


def test_a_hit_is_what_every_node_has(nodes: Nodes, both: list[DaemonProcess]) -> None:
    nodes.store(chunks=3, states=(1, 2))
    nodes.store(states=(CHUNKS - 1,), node=0)
    found = nodes.look_up(lease=5)
    assert found.chunks == 3
    assert len(found.slots) // GEOMETRY.ticket_bytes == 3 + 1, "the state of the common hit alone"
    assert [mask.count(1) for mask in found.masks] == [3, 2]
    nodes.until_leases(both, 1)  # That of the longer hit ends.
    nodes.queue(wire.Release(5, tokens=48, loaded_bytes=100))
    nodes.until_leases(both, 0)


def test_nodes_whose_states_never_meet_are_a_miss(nodes: Nodes, both: list[DaemonProcess]) -> None:
    nodes.store(states=())
    nodes.store(chunks=0, states=(1, 3), node=0)
    nodes.store(chunks=0, states=(0, 2), node=1)
    found = nodes.look_up()
    assert (found.chunks, found.slots) == (0, b"")
    assert [mask.count(1) for mask in found.masks] == [CHUNKS, 0]
    nodes.until_leases(both, 0)


def test_a_lookup_that_is_given_up_keeps_no_lease(nodes: Nodes, both: list[DaemonProcess]) -> None:
    nodes.store(chunks=3, states=(2,))
    nodes.store(states=(CHUNKS - 1,), node=1)
    nodes.queue(wire.Lookup(7, 7, b"".join(NAMES), audit_lease=8))
    answers = answers_of(nodes)
    nodes.queue(wire.Release(7))
    nodes.link.on_report(nodes.number, answers)
    assert not nodes.link.poll(time.monotonic())
    nodes.until_leases(both, 0)
    assert not nodes.link.leases
    assert not nodes.link.questions
    assert not nodes.link.lookups


def answers_of(nodes: Nodes) -> dict[int, Any]:
    """Return what the relays answer to the messages that are queued."""
    shares, answers = nodes.plan().shares, dict[int, Any]()
    for node, relay in enumerate(nodes.relays):
        relay.deliver(shares[node].mail, time.monotonic())
        deadline = time.monotonic() + DEADLINE_SECONDS
        while node not in answers:
            assert time.monotonic() < deadline
            if (news := relay.take_answers(time.monotonic())) is not None:
                answers[node] = news
    return answers


def test_slots_that_only_one_node_grants_go_back(nodes: Nodes, both: list[DaemonProcess]) -> None:
    nodes.queue(wire.Reserve(PART_BYTES, PART_BYTES, 1, 8))
    answers = answers_of(nodes)
    (granted,) = answers[1].replies
    fewer = structs.replace(granted, slots=granted.slots[: 3 * SLOT_BYTES])
    answers[1] = replace(answers[1], replies=(fewer,))
    nodes.link.on_report(nodes.number, answers)
    (joined,) = nodes.link.poll(time.monotonic())
    assert isinstance(joined, wire.Reserved)
    assert len(joined.slots) // GEOMETRY.ticket_bytes == 3
    nodes.step()
    until_value(both[0], "bytes_writing", 3 * slot_bytes(PART_BYTES, 1))


def test_what_a_node_loses_after_its_answer_is_told_after_the_joined_answer(nodes: Nodes) -> None:
    """The masks of that answer name it. Whoever reads them would announce it to routers."""
    nodes.queue(wire.Lookup(3, 3, b"".join(NAMES)))
    answers = answers_of(nodes)
    removed = wire.Removed(0, NAMES[1], b"\0", below=b"\1")
    early = replace(answers[0], replies=(*answers[0].replies, removed))
    nodes.link.on_report(nodes.number, {0: early})
    lost = structs.replace(removed, below=b"")
    assert nodes.link.poll(time.monotonic()) == [lost]
    nodes.link.on_report(nodes.number, {1: answers[1]})
    found, again = nodes.link.poll(time.monotonic())
    assert isinstance(found, wire.Found)
    assert again == lost


def test_lost_mail_ends_the_connection_and_another_is_made(nodes: Nodes) -> None:
    from hybridkv.connector.messages import StepPlan

    nodes.queue(wire.Lookup(3, 3, b"".join(NAMES)))
    nodes.plan()  # It reaches no worker.
    nodes.step()  # There is nothing more to send.
    assert nodes.losses == ["node 0: messages of a step did not reach the worker"]
    assert nodes.link.welcome is None
    plans = nodes.link.plan_nodes(StepPlan(9, boot="b", reserved_bytes=1))
    for plan in map(plans.on_node, range(2)):
        assert (plan.boot, plan.reserved_bytes) == ("", 0), "no arena is prepared"
    nodes.connect()
    nodes.store(states=(CHUNKS - 1,))
    assert nodes.look_up().chunks == CHUNKS


def test_lost_answers_end_the_connection(nodes: Nodes) -> None:
    nodes.queue(wire.Lookup(3, 3, b"".join(NAMES)))
    answers = answers_of(nodes)
    answers[1] = replace(answers[1], number=answers[1].number + 1)
    nodes.link.on_report(nodes.number, answers)
    assert not nodes.link.poll(time.monotonic())
    assert nodes.losses == ["answers of node 1 were lost"]


def test_a_report_that_comes_twice_changes_nothing(nodes: Nodes) -> None:
    nodes.queue(wire.Lookup(3, 3, b"".join(NAMES)))
    answers = answers_of(nodes)
    for _ in range(2):
        nodes.link.on_report(nodes.number, answers)
    assert len(nodes.link.poll(time.monotonic())) == 1
    assert not nodes.losses


def test_an_answer_is_late_only_after_the_reports_that_could_bring_it(nodes: Nodes) -> None:
    nodes.queue(wire.Lookup(3, 3, b"".join(NAMES)))
    assert not nodes.link.is_answer_due(3), "it has not left"
    nodes.plan()
    nodes.link.on_report(nodes.number, {})
    assert not nodes.link.is_answer_due(3), "the daemon may have answered after the step's end"
    nodes.plan()
    nodes.link.on_report(nodes.number, {})
    assert nodes.link.is_answer_due(3)
    nodes.step()  # The mail that was lost ends the connection.
    assert nodes.link.is_answer_due(3)


def test_one_daemon_cannot_be_that_of_two_nodes(both: list[DaemonProcess]) -> None:
    nodes = Nodes([both[0].socket_path] * 2)
    nodes.link.poll(time.monotonic())
    deadline = time.monotonic() + DEADLINE_SECONDS
    while nodes.link.refusal is None:
        assert time.monotonic() < deadline
        nodes.step(waits=True)
    assert nodes.link.refusal == "several nodes have one daemon, and each needs its own"
    nodes.close()


def test_a_node_without_a_daemon_is_a_loss_that_says_which(
    both: list[DaemonProcess], tmp_path: Path
) -> None:
    nodes = Nodes([both[0].socket_path, str(tmp_path / "nobody.sock")])
    nodes.link.poll(time.monotonic())
    for _ in range(3):
        nodes.step()
    assert nodes.link.refusal == "node 1: no daemon listens at its socket"
    assert not nodes.losses, "there was nothing to lose"
    assert not nodes.link.queue(wire.Release(1), time.monotonic())
    nodes.close()


def test_a_daemon_that_is_killed_is_noticed_and_found_again(tmp_path: Path) -> None:
    daemons = [ForkedDaemon(str(tmp_path / f"{node}.sock"), "1MiB") for node in range(2)]
    with daemons[0], daemons[1]:
        nodes = Nodes([daemon.socket_path for daemon in daemons])
        nodes.connect()
        before = nodes.link.boots
        daemons[1].kill()
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not nodes.losses:
            assert time.monotonic() < deadline
            nodes.step()
        assert nodes.losses[0].startswith("node 1: connection ")
        daemons[1].start()
        nodes.connect()
        assert nodes.link.boots[0] == before[0]
        assert nodes.link.boots[1] != before[1]
        nodes.close()


@pytest.mark.parametrize(
    ("ranks", "stages", "nodes", "node_ranks", "node_stages"),
    [(2, 1, 2, 1, 1), (4, 1, 2, 2, 1), (4, 2, 2, 2, 1), (4, 4, 2, 2, 2), (8, 2, 4, 2, 1)],
)
def test_parts_of_a_node(
    ranks: int, stages: int, nodes: int, node_ranks: int, node_stages: int
) -> None:
    geometry = Geometry(GEOMETRY.groups, CHUNK, CHUNK, CHUNK, ranks, stages=stages, nodes=nodes)
    assert (geometry.node_ranks, geometry.node_stages) == (node_ranks, node_stages)


@pytest.mark.parametrize(("ranks", "stages", "nodes"), [(2, 1, 3), (6, 3, 2), (2, 1, 0)])
def test_ranks_that_are_not_spread_evenly_are_refused(ranks: int, stages: int, nodes: int) -> None:
    with pytest.raises(GeometryError, match="not spread evenly"):
        Geometry(GEOMETRY.groups, CHUNK, CHUNK, CHUNK, ranks, stages=stages, nodes=nodes)
