"""A tier that fails for long is opened anew, and what it refuses for long is reported."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pytest

from hybridkv.core.refusals import REFUSALS, Refusal, describe_refusal
from hybridkv.observe.status import health
from hybridkv.tiers.contract import FullError, TierError, WriteRequest
from hybridkv.tiers.health import IDLE_SECONDS, OPEN_AGAIN_SECONDS, REOPEN_SECONDS_MAX
from hybridkv.tiers.jobs import JobKind
from hybridkv.tiers.refusals import LASTING_SECONDS
from tests.unit.daemon.dict_tier import DictTier
from tests.unit.daemon.harness import engine
from tests.unit.daemon.tier_node import FULL, Node

SECOND = 1.0


@dataclass
class Storage:
    """A server, and the file with its password on this node."""

    password: str = "first"
    file: str = "first"
    records: dict[bytes, bytes] = field(default_factory=dict)
    refusals: tuple[Refusal | None, ...] = (None,)
    """Why each put is refused, in turn. None = it is not."""
    puts: int = 0
    logins: int = 0
    calls: int = 0  # Of any kind, with a login that it does not know.


class LoginTier(DictTier):
    """Reads its password when it is opened, as a tier on a server does."""

    def __init__(self, storage: Storage) -> None:
        super().__init__(storage.records, is_remote=True)
        self._storage, self._login = storage, ""

    def open(self) -> None:
        self._storage.logins += 1
        self._login = self._storage.file
        self._call()

    def put(self, items: Sequence[WriteRequest]) -> list[TierError | None]:
        storage = self._storage
        if self._login != storage.password:
            storage.calls += 1
            return [TierError("the server refuses this user or password") for _ in items]
        refusal = storage.refusals[storage.puts % len(storage.refusals)]
        storage.puts += 1
        return [FullError("no", refusal) if refusal else self._put(item) for item in items]

    def close(self) -> None:
        self._login = ""

    def _call(self) -> None:
        if self._login != self._storage.password:
            self._storage.calls += 1
            raise TierError("the server refuses this user or password")


@pytest.fixture
def storage() -> Storage:
    return Storage()


@pytest.fixture
def node(storage: Storage) -> Node:
    node = Node("sim://0", make=lambda spec: LoginTier(storage))
    engine(node.daemon, 1, FULL)
    node.checks = False  # It is checked elsewhere, and these tests take minutes of its clock.
    return node


def store_for(node: Node, seconds: float, numbers: Iterator[int], step: float = SECOND) -> None:
    """Store a new object in each step, and let the tier's threads work."""
    for _ in range(round(seconds / step)):
        node.store_if_room(FULL, [next(numbers)])
        node.tick(step)
        node.work()


def numbers() -> Iterator[int]:
    yield from (number % 250 + 1 for number in range(100_000))


def test_a_login_that_was_changed_is_used_within_seconds(
    node: Node, storage: Storage, caplog: pytest.LogCaptureFixture
) -> None:
    new = numbers()
    store_for(node, 2, new)
    assert storage.records
    storage.password = storage.file = "second"
    storage.records.clear()
    store_for(node, 12, new)
    (line,) = node.daemon.tiers
    assert storage.records, "it logged in with what the file has now"
    assert line.counters["times_reopened"] == 1
    assert not line.is_shut
    assert len(caplog.messages) == 2, caplog.messages


def test_a_login_that_stays_wrong_is_tried_every_few_seconds_and_told_once(
    node: Node, storage: Storage, caplog: pytest.LogCaptureFixture
) -> None:
    new = numbers()
    storage.password = "second"
    store_for(node, 12, new)
    (line,) = node.daemon.tiers
    assert not line.is_open
    before = storage.calls
    store_for(node, 60, new)
    assert storage.calls - before <= 60 / OPEN_AGAIN_SECONDS + 1, "it is no flood of logins"
    said = list(caplog.messages)
    assert len(said) == 3, said
    assert any("cannot be opened: the server refuses" in message for message in said)
    storage.file = "second"
    store_for(node, 10, new)
    assert storage.records
    assert caplog.messages[len(said) :] == ["disk is open again"]


def test_a_tier_that_opens_and_fails_is_opened_ever_more_rarely(
    node: Node, storage: Storage, caplog: pytest.LogCaptureFixture
) -> None:
    """As a server that takes every login and fails with every value."""
    new, refused = numbers(), TierError("the server is ill")
    (line,) = node.daemon.tiers
    tier = line.tier
    tier.put = lambda items: [refused for _ in items]  # type: ignore[method-assign]
    store_for(node, 600, new, step=5 * SECOND)
    assert 5 <= line.counters["times_reopened"] <= 600 / REOPEN_SECONDS_MAX + 5
    assert sum("the server is ill" in message for message in caplog.messages) == 1


@pytest.mark.parametrize("refusal", [Refusal.NO_SPACE, Refusal.BOUND])
def test_what_is_refused_for_a_minute_is_reported_until_it_ends(
    node: Node, storage: Storage, refusal: Refusal, caplog: pytest.LogCaptureFixture
) -> None:
    new = numbers()
    (line,) = node.daemon.tiers
    storage.refusals = (refusal,)
    store_for(node, LASTING_SECONDS - 5, new, step=5 * SECOND)
    assert not line.refusals
    assert not caplog.messages
    store_for(node, 10, new)
    assert line.refusals.keys() == {refusal}
    assert node.daemon.view.metric_values().of("tier_refusing", "disk")
    (problem,) = health(node.daemon.view.snapshot(node.now))[:1]
    assert problem.level == "bad"
    assert "refused objects for 1 min" in problem.text
    assert (
        sum("has refused" in text.text for text in health(node.daemon.view.snapshot(node.now))) == 1
    )
    (message,) = caplog.messages
    assert message == f"disk (sim://0) refuses objects: {describe_refusal(refusal)}"
    store_for(node, 300, new, step=5 * SECOND)
    assert line.counters["times_reopened"] == 0, "to open it changes nothing"
    assert caplog.messages == [message]
    storage.refusals = (None,)
    store_for(node, 3, new)
    assert not line.refusals
    assert len(caplog.messages) == 2
    assert "takes objects again" in caplog.messages[1]


def test_what_is_refused_now_and_then_is_reported_too(node: Node, storage: Storage) -> None:
    """As on a file system that others fill, where the oldest objects make some room."""
    new = numbers()
    (line,) = node.daemon.tiers
    storage.refusals = (Refusal.NO_SPACE, None, None)
    store_for(node, LASTING_SECONDS + 12, new, step=4 * SECOND)
    assert line.refusals.keys() == {Refusal.NO_SPACE}
    assert not line.is_shut
    storage.refusals = (None,)
    store_for(node, LASTING_SECONDS + 8, new, step=4 * SECOND)
    assert not line.refusals


def test_a_tier_that_nobody_asks_any_more_is_well_again_by_its_upkeep(
    node: Node, storage: Storage
) -> None:
    """Else its alert would stay until the next lookup, and nobody looks anything up at night."""
    (line,) = node.daemon.tiers
    ill, line.tier.find = line.tier.find, _fail  # type: ignore[method-assign]
    while not line.is_shut:
        node.ask(1, 2, lease=1, wait_ms=1000)
        node.work()
        node.tick(SECOND / 4)
    line.tier.find = ill  # type: ignore[method-assign]
    node.tick(SECOND)
    node.work()
    assert line.is_shut, "a tier that is asked closes its breaker by a probe"
    for _ in range(round(IDLE_SECONDS)):
        node.tick(SECOND)
        node.work()
    assert not line.is_shut


def _fail(keys: Sequence[bytes]) -> list[bool]:
    raise TierError("the server is ill")


def test_every_reason_has_a_cause_and_a_cure() -> None:
    assert set(REFUSALS) == set(Refusal)
    cures = [REFUSALS[refusal].cure for refusal in (Refusal.NO_SPACE, Refusal.BOUND)]
    assert cures == ["free the file system, or set bytes= below its room", "set a larger bytes="]


def test_one_refusal_is_no_state(node: Node, storage: Storage) -> None:
    new = numbers()
    (line,) = node.daemon.tiers
    storage.refusals = (Refusal.NO_SPACE,)
    store_for(node, 1, new)
    storage.refusals = (None,)
    store_for(node, 3 * LASTING_SECONDS, new, step=5 * SECOND)
    assert not line.refusals


def test_what_was_refused_last_holds_while_nothing_is_written(node: Node, storage: Storage) -> None:
    """Nothing says that it is over."""
    storage.refusals = (Refusal.QUOTA,)
    store_for(node, 2, numbers())
    (line,) = node.daemon.tiers
    for _ in range(100):
        node.tick(SECOND)
        node.work()
    assert line.refusals.keys() == {Refusal.QUOTA}


def test_reads_go_on_while_the_upkeep_is_refused(node: Node, storage: Storage) -> None:
    """As on a file system that was mounted read-only, where no daemon shows that it lives."""
    (line,) = node.daemon.tiers
    tier = line.tier

    def tend() -> None:
        raise TierError("Read-only file system", Refusal.READ_ONLY)

    tier.tend = tend  # type: ignore[method-assign]
    for _ in range(100):
        node.tick(SECOND)
        node.work((JobKind.TEND,))
    assert line.may_read(node.now)
    assert line.refusals.keys() == {Refusal.READ_ONLY}
    assert line.counters["times_reopened"] == 0
    del tier.tend
    node.tick(SECOND)
    node.work()
    assert not line.refusals
