"""Lookups that wait for what another engine computes. That no wait hangs: tests/simulation."""

import pytest

from hybridkv.core.coverage import slot_shapes
from hybridkv.core.geometry import Geometry
from hybridkv.daemon.handlers import Daemon
from hybridkv.tiers.doubts import DOUBT_SECONDS
from hybridkv.tiers.promises import BEGIN_SECONDS
from hybridkv.wire.messages import Computed, Computing, Found, Lookup, Pending, Release
from tests.invariants import check_daemon
from tests.layouts import LAYOUTS
from tests.unit.daemon.harness import commit, engine, grant, hashes, make_daemon

FULL = LAYOUTS["qwen3"]
SPEED = FULL.chunk_tokens  # Tokens a second: a chunk takes one second.
FIRST, SECOND, THIRD = 1, 2, 3  # Connections.


class Node:
    """A daemon with three engines of one identity. Time is what a test says."""

    def __init__(self, geometry: Geometry = FULL) -> None:
        self.geometry = geometry
        self.daemon: Daemon = make_daemon(1 << 22)
        self.now = 100.0
        for connection in (FIRST, SECOND, THIRD):
            engine(self.daemon, connection, self.geometry, f"e{connection}")

    def ask(
        self,
        connection: int,
        *numbers: int,
        lease: int = 1,
        wait: float = 30.0,
        speed: int = SPEED,
        promises: bool = True,
    ) -> Found | Pending:
        """Look a prompt up, with the number of each chunk."""
        message = Lookup(
            lease,
            lease,
            hashes(*numbers),
            wait_ms=int(wait * 1e3),
            tokens_per_second=speed,
            promises=promises,
        )
        reply = self.daemon.handle(connection, message, self.now)
        assert isinstance(reply, (Found, Pending)), reply
        return reply

    def tell(self, connection: int, message: Computing | Computed | Release) -> None:
        assert self.daemon.handle(connection, message, self.now) is None

    def store(self, connection: int, *numbers: int) -> None:
        """Commit every group's objects of these chunks."""
        for index, group in enumerate(self.geometry.groups):
            (part_bytes, parts), *_ = slot_shapes(self.geometry, group)
            slots = grant(self.daemon, connection, part_bytes, len(numbers), parts)
            commit(self.daemon, connection, slots, index, [*numbers])

    def answers(self, now: float | None = None) -> dict[int, int]:
        """Let time pass. Returns the depth of the hit of each engine that is answered then."""
        self.now = self.now if now is None else now
        self.daemon.tick(self.now)
        sent = [*self.daemon.outgoing]
        self.daemon.outgoing.clear()
        return {
            each.connection_id: each.message.depth
            for each in sent
            if isinstance(each.message, Found)
        }


@pytest.fixture
def node() -> Node:
    return Node()


def promise(node: Node, *numbers: int, lease: int = 1) -> None:
    """The first engine begins to compute a prompt."""
    answer = node.ask(FIRST, *numbers, lease=lease)
    assert isinstance(answer, Found)
    assert answer.promised
    node.tell(FIRST, Computing(lease))


def test_a_prompt_that_several_engines_get_at_once_is_computed_once(node: Node) -> None:
    promise(node, 1, 2, 3)
    for connection in (SECOND, THIRD):
        assert isinstance(node.ask(connection, 1, 2, 3), Pending)
    node.store(FIRST, 1, 2)
    assert node.answers(101.0) == {}, "the engine goes on"
    node.store(FIRST, 3)
    node.tell(FIRST, Computed(1))
    assert node.answers(102.0) == {SECOND: 3, THIRD: 3}
    assert (node.daemon.promises.kept, node.daemon.promises.broken) == (2, 0)
    assert not len(node.daemon.promises), "who has all promises nothing"


def test_nobody_doubts_an_engine_that_has_left(node: Node) -> None:
    promise(node, 1, 2, 3)
    node.ask(SECOND, 1, 2, 3)
    node.daemon.on_disconnect(FIRST)
    assert node.answers(101.0) == {SECOND: 0}
    assert node.daemon.promises.broken == 1
    check_daemon(node.daemon)


def test_an_engine_alone_promises_nothing(node: Node) -> None:
    for connection in (SECOND, THIRD):
        node.daemon.on_disconnect(connection)
    assert node.ask(FIRST, 1, 2) == node.ask(FIRST, 1, 2, lease=1, promises=False)
    assert not len(node.daemon.promises)


def test_who_stores_nothing_promises_nothing(node: Node) -> None:
    answer = node.ask(FIRST, 1, 2, promises=False)
    assert isinstance(answer, Found)
    assert not answer.promised
    assert isinstance(node.ask(SECOND, 1, 2), Found)


def test_the_wait_ends_with_the_engine_and_one_of_the_waiters_computes(node: Node) -> None:
    promise(node, 1, 2, 3)
    for connection in (SECOND, THIRD):
        node.ask(connection, 1, 2, 3)
    node.store(FIRST, 1)
    node.daemon.on_disconnect(FIRST)
    assert node.answers(101.0) == {SECOND: 1}, "and it has promised the rest"
    node.tell(SECOND, Computing(1))
    node.store(SECOND, 2, 3)
    node.tell(SECOND, Computed(1))
    assert node.answers(102.0) == {THIRD: 3}


def test_nobody_waits_longer_than_computing_takes(node: Node) -> None:
    promise(node, 1, 2, 3)
    assert isinstance(node.ask(SECOND, 1, 2, 3), Pending)
    assert node.daemon.promotion.wakes_at() == 103.0
    assert node.answers(102.9) == {}
    assert node.answers(103.0) == {SECOND: 0}
    assert node.daemon.promises.broken == 1


@pytest.mark.parametrize("ends", ["computed", "late"])
def test_a_broken_promise_is_not_believed_again_soon(node: Node, ends: str) -> None:
    promise(node, 1, 2)
    node.ask(SECOND, 1, 2)
    if ends == "computed":
        node.tell(FIRST, Computed(1))
    else:
        node.now = 102.0
    assert node.answers() == {SECOND: 0}
    node.tell(SECOND, Computed(1))
    node.tell(FIRST, Computed(1))
    promise(node, 5, 6, lease=2)
    assert isinstance(node.ask(THIRD, 5, 6), Found)
    node.tell(THIRD, Computed(1))
    node.now += DOUBT_SECONDS
    promise(node, 7, 8, lease=3)
    assert isinstance(node.ask(THIRD, 7, 8, lease=2), Pending)


def test_who_is_believed_takes_the_place_of_who_is_not(node: Node) -> None:
    promise(node, 1, 2)
    node.ask(SECOND, 1, 2)
    node.tell(FIRST, Computed(1))
    assert node.answers() == {SECOND: 0}
    promise(node, 5, 6, lease=2)
    assert isinstance(node.ask(SECOND, 5, 6, lease=2), Found), "it computes too"
    node.tell(SECOND, Computing(2))
    assert isinstance(node.ask(THIRD, 5, 6), Pending), "and is waited for"


def test_a_prompt_that_waits_in_the_other_engine_is_waited_for_briefly(node: Node) -> None:
    assert isinstance(node.ask(FIRST, 1, 2, 3), Found)
    assert isinstance(node.ask(SECOND, 1, 2, 3), Pending), "it may begin at once"
    assert node.answers(100.0 + BEGIN_SECONDS) == {SECOND: 0}
    assert isinstance(node.ask(THIRD, 1, 2, 3), Pending), "the second engine computes it now"
    for connection in (SECOND, FIRST):
        node.tell(connection, Computed(1))
    assert not len(node.daemon.promises)


@pytest.mark.parametrize(
    ("asked", "begun", "waits"),
    [
        ((1, 2, 3), 0.0, True),
        ((1, 2, 3, 4, 5), 0.0, True),
        ((1, 2), 0.0, True),
        ((5, 6), 0.0, False),
        ((5, 2, 3), 0.0, False),
        ((1,), 1.9, True),  # It should be there, and comes any moment.
        ((1, 2, 3), 60.0, False),  # It should have been kept long ago.
    ],
)
def test_who_waits(node: Node, asked: tuple[int, ...], begun: float, waits: bool) -> None:
    promise(node, 1, 2, 3)
    node.now += begun
    assert isinstance(node.ask(SECOND, *asked), Pending) is waits


def test_a_slow_engine_is_not_waited_for(node: Node) -> None:
    promise(node, 1, 2, 3)
    assert isinstance(node.ask(SECOND, 1, 2, 3, speed=5 * SPEED), Found)
    assert isinstance(node.ask(THIRD, 1, 2, 3, wait=0.0), Found), "it may not wait"


def test_states_are_kept_where_the_promised_prompt_ends() -> None:
    node = Node(LAYOUTS["qwen3next"])
    promise(node, 1, 2, 3)
    assert isinstance(node.ask(SECOND, 1, 2, 7), Found), "no state where the prompts part"
    assert isinstance(node.ask(THIRD, 1, 2, 3, 4), Pending)


def test_an_engine_waits_for_none_of_its_own(node: Node) -> None:
    promise(node, 1, 2, 3)
    assert isinstance(node.ask(FIRST, 1, 2, 3, lease=2), Found)


def test_who_gives_up_leaves_nothing_behind(node: Node) -> None:
    promise(node, 1, 2)
    node.ask(SECOND, 1, 2)
    node.tell(SECOND, Release(1, unused=True))
    node.tell(FIRST, Computed(1))
    assert node.answers() == {}
    assert not len(node.daemon.promises)
    assert not node.daemon.promises.has_promises(node.daemon.sessions.all[0].namespace)


def test_a_lease_used_again_ends_what_it_promised_before(node: Node) -> None:
    promise(node, 1, 2)
    promise(node, 3)
    assert isinstance(node.ask(SECOND, 1, 2), Found)
    node.tell(FIRST, Computed(1))
    node.daemon.on_disconnect(SECOND)
    assert not len(node.daemon.promises)
    assert not node.daemon.promises.has_promises(node.daemon.sessions.all[0].namespace)
