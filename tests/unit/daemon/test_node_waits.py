"""Lookups that wait for what another node computes. Time is what a test says."""

import itertools
from pathlib import Path

import pytest

from hybridkv.core.geometry import Geometry
from hybridkv.core.keys import HASH_BYTES
from hybridkv.tiers.contract import TierError
from hybridkv.tiers.doubts import DOUBT_SECONDS
from hybridkv.tiers.jobs import LIMITS, JobKind, execute
from hybridkv.tiers.node_waits import PAUSE_SECONDS, PAUSE_SECONDS_MAX, QUIET_SECONDS, NodeWait
from hybridkv.wire.messages import Found, Lookup, Pending, Release
from tests.layouts import LAYOUTS
from tests.unit.daemon.dict_tier import DictTier
from tests.unit.daemon.harness import engine, engine_hello, hashes
from tests.unit.daemon.tier_node import ARENA, Node, is_found

FULL = LAYOUTS["qwen3"]
SPEED = FULL.chunk_tokens  # Tokens a second: a chunk takes one second.
WAIT = 20.0
ASKED = (JobKind.FIND, JobKind.READ)
WRITES_MAX = LIMITS[JobKind.WRITE]


def node_over(records: dict[bytes, bytes], geometry: Geometry = FULL, arena: int = ARENA) -> Node:
    """A node over a tier that all nodes write to, and that must be asked what it has."""
    node = Node("sim://0", arena=arena, make=lambda spec: DictTier(records, is_remote=True))
    engine(node.daemon, 1, geometry)
    return node


def ask(node: Node, *numbers: int, lease: int = 7, rate: int = 0) -> Found | Pending:
    """A lookup of an engine whose prompts others compute."""
    reply = node.ask(
        *numbers, lease=lease, wait_ms=int(WAIT * 1e3), rate=rate, computed_elsewhere=True
    )
    assert isinstance(reply, (Found, Pending))
    node.work(ASKED)
    return reply


def put(records: dict[bytes, bytes], *numbers: int, geometry: Geometry = FULL) -> None:
    """Another node stores chunks and writes them."""
    other = node_over(records, geometry)
    other.store(geometry, [*numbers])
    other.work()


def passes(node: Node, seconds: float) -> list[float]:
    """Let time pass, as the daemon's loop does. Returns when tiers were asked."""
    until, asked = node.now + seconds, []
    while not node.daemon.outgoing and (due := node.daemon.promotion.wakes_at()) <= until:
        assert due > node.now, "the loop spins"
        node.tick(due - node.now)
        asked += [node.now for job in node.jobs if job.kind is JobKind.FIND][:1]
        node.work(ASKED)
    if not node.daemon.outgoing:
        node.tick(until - node.now)
    return asked


@pytest.mark.parametrize("model", ["qwen3", "gemma3", "qwen3next"])
def test_what_another_node_stores_meanwhile_is_a_hit(model: str) -> None:
    records: dict[bytes, bytes] = {}
    geometry = LAYOUTS[model]
    node = node_over(records, geometry)
    pending = ask(node, 1, 2, 3)
    assert isinstance(pending, Pending)
    assert pending.depth == 3
    passes(node, 1.0)
    put(records, 1, 2, 3, geometry=geometry)
    passes(node, 0.2)
    found = node.answer()
    assert found.chunks == 3
    node.prove(geometry, found, [1, 2, 3])
    waits = node.daemon.promotion.node_waits
    assert (waits.kept, waits.broken) == (1, 0)


def test_a_file_of_another_node_is_seen_before_the_directory_is_looked_at(tmp_path: Path) -> None:
    url = f"disk://{tmp_path}?bytes=64MiB"
    other = Node(url, name="there")
    engine(other.daemon, 1, FULL)
    node = Node(url)
    engine(node.daemon, 1, FULL)
    assert isinstance(ask(node, 1, 2, 3), Pending)
    other.store(FULL, [1, 2, 3], states=[])
    other.work()
    assert len(passes(node, 0.1)) < 8
    found = node.answer()
    assert found.chunks == 3
    assert found.tiers == {"disk": 3}
    node.prove(FULL, found, [1, 2, 3])


def test_a_directory_that_nobody_else_writes_to_is_not_asked_again(tmp_path: Path) -> None:
    node = Node(f"disk://{tmp_path}?bytes=64MiB")
    engine(node.daemon, 1, FULL)
    assert is_found(ask(node, 1, 2, 3)).chunks == 0


def test_who_computes_its_prompts_itself_does_not_wait() -> None:
    node = node_over({})
    assert isinstance(node.ask(1, 2, 3), Pending), "the tier is asked once"
    node.work(ASKED)
    assert node.answer().chunks == 0


def test_nobody_waits_longer_than_computing_takes() -> None:
    records: dict[bytes, bytes] = {}
    node, began = node_over(records), 100.0
    ask(node, 1, 2, 3, 4, rate=SPEED)
    for number in (1, 2, 3):
        passes(node, 1.0)
        put(records, number)
    passes(node, WAIT)
    assert node.now == began + 4.0
    assert node.answer().chunks == 3, "what has come is used"


def test_the_wait_goes_on_while_chunks_come_and_ends_once_none_do() -> None:
    records: dict[bytes, bytes] = {}
    node = node_over(records)
    ask(node, *range(1, 9))
    for number in (1, 2, 3):
        passes(node, 3.0)
        put(records, number)
    quiet_from = node.now
    passes(node, WAIT)
    assert node.answer().chunks == 3
    assert WAIT / 2 <= node.now - quiet_from < WAIT / 2 + PAUSE_SECONDS_MAX


def test_a_wait_in_vain_is_not_repeated_soon() -> None:
    node = node_over({})
    for count in range(4):
        assert isinstance(ask(node, 1, 2, rate=SPEED), Pending)
        passes(node, WAIT)
        assert node.answer().chunks == 0
        assert node.daemon.promotion.node_waits.broken == count + 1
        node.tick(DOUBT_SECONDS * 2**count - 0.001)
        ask(node, 1, 2, rate=SPEED)
        assert node.answer().chunks == 0, "it is not believed"
        node.tick(0.001)


def test_a_wait_that_brought_something_ends_the_doubt() -> None:
    records: dict[bytes, bytes] = {}
    node = node_over(records)
    ask(node, 1, 2, rate=SPEED)
    passes(node, WAIT)
    assert node.answer().chunks == 0
    node.tick(DOUBT_SECONDS)
    ask(node, 3, 4, rate=SPEED)
    put(records, 3, 4)
    passes(node, WAIT)
    assert node.answer().chunks == 2
    assert isinstance(ask(node, 5, 6, lease=8, rate=SPEED), Pending)
    assert not node.daemon.outgoing


def test_pauses_between_two_questions_grow() -> None:
    node = node_over({})
    ask(node, *range(1, 30))
    asked = [100.0, *passes(node, WAIT)]
    pauses = [later - earlier for earlier, later in itertools.pairwise(asked)]
    assert pauses[0] == pytest.approx(PAUSE_SECONDS)
    assert max(pauses) == pytest.approx(PAUSE_SECONDS_MAX)
    assert pauses == pytest.approx(sorted(pauses))
    assert len(pauses) < 60
    assert node.now == pytest.approx(100.0 + WAIT / 2)


def test_the_questions_of_a_wait_are_few_though_something_comes_each_time() -> None:
    wait = NodeWait(missing=10_000, now=0.0, latest=30.0)
    now, count = 0.0, 0
    while not wait.is_spent(now := wait.asks_at):
        count += 1
        wait.note_answer(10_000 - count, has_come=True, now=now)
    assert now >= 30.0
    assert count < 320


def test_a_question_that_is_not_answered_does_not_make_the_wait_longer() -> None:
    node = node_over({})
    ask(node, 1, 2, rate=SPEED)
    node.tick(PAUSE_SECONDS)
    (question,) = [job for job in node.jobs if job.kind is JobKind.FIND]
    node.tick(QUIET_SECONDS - PAUSE_SECONDS)
    assert node.answer().chunks == 0
    node.jobs.remove(question)
    node.finish(question, execute(node.daemon.tiers[0].tier, question, node.memory))
    assert not node.daemon.outgoing, "a late answer is of no use"


def test_a_tier_that_fails_ends_the_wait_in_time() -> None:
    node = node_over({})
    ask(node, 1, 2, 3, rate=SPEED)
    tier = node.daemon.tiers[0].tier
    assert isinstance(tier, DictTier)
    tier.ill = TierError
    passes(node, WAIT)
    assert node.answer().chunks == 0
    assert node.now <= 103.0


def test_who_gives_up_leaves_nothing_behind() -> None:
    node = node_over({})
    ask(node, 1, 2)
    node.daemon.handle(1, Release(7, unused=True), node.now)
    assert not len(node.daemon.promotion)
    ask(node, 1, 2, lease=8)
    node.daemon.on_disconnect(1)
    assert not len(node.daemon.promotion)


@pytest.mark.parametrize("who", ["producer", "promise"])
def test_what_others_may_wait_for_is_written_first(who: str) -> None:
    records: dict[bytes, bytes] = {}
    node = node_over(records, arena=8 << 20)
    node.daemon.sessions.on_connect(2)
    is_producer = who == "producer"
    node.daemon.handle(2, engine_hello(FULL, "second", is_producer=is_producer), node.now)
    if not is_producer:
        lookup = Lookup(5, 9, hashes(8, 9), int(WAIT * 1e3), promises=True)
        assert isinstance(node.daemon.handle(2, lookup, node.now), Pending)
        node.work(ASKED)
        assert node.answer().promised
    for number in range(WRITES_MAX):
        node.store(FULL, [20 + number])
    node.store(FULL, [1, 2])
    node.store(FULL, [8, 9], connection=2)
    node.work()
    written = [key[HASH_BYTES] for key in records]
    assert written == [*range(20, 20 + WRITES_MAX), 8, 9, 1, 2]
    assert not node.daemon.demotion.waiting
