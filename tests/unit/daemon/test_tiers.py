"""Lookups over tiers: the daemon's core with real directories, and jobs done by hand."""

from pathlib import Path

import pytest

from hybridkv.core.geometry import Geometry
from hybridkv.daemon import sessions
from hybridkv.shm.slots import payload_offset
from hybridkv.tiers.contract import TierError
from hybridkv.tiers.health import TierState
from hybridkv.tiers.jobs import JobKind, JobOutcome, execute
from hybridkv.wire.codec import Frames, decode_reply, encode
from hybridkv.wire.messages import Clear, Done, Found, Identify, Pending, Release
from tests.layouts import LAYOUTS
from tests.unit.daemon.harness import engine
from tests.unit.daemon.tier_node import (
    FINDS_MAX,
    FULL,
    READS_MAX,
    WAIT_MS,
    Node,
    crowd,
    is_found,
    remote,
    stored,
)

GEOMETRIES = [
    LAYOUTS[name]
    for name in ("qwen3", "gemma3", "qwen3next", "llama4", "deepseekv4")
    if name in LAYOUTS
]


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=lambda geometry: str(len(geometry.groups)))
def test_what_was_stored_comes_back_after_the_arena_is_gone(
    geometry: Geometry, tmp_path: Path
) -> None:
    numbers = [1, 2, 3, 4, 5, 6]
    first = Node(f"disk://{tmp_path}?bytes=64MiB", arena=4 << 20)
    engine(first.daemon, 1, geometry)
    first.store(geometry, numbers)
    first.work()
    second = Node(f"disk://{tmp_path}?bytes=64MiB", arena=4 << 20)
    engine(second.daemon, 1, geometry)
    reply = second.ask(*numbers)
    assert isinstance(reply, Pending)
    assert not second.daemon.outgoing
    second.work()
    found = second.answer()
    assert found.chunks == len(numbers)
    assert found.tiers == {"disk": len(numbers)}
    second.prove(geometry, found, numbers)
    second.daemon.handle(1, Release(7))
    again = is_found(second.ask(*numbers))
    assert again.chunks == len(numbers)
    assert not again.tiers, "it is in RAM now"


def test_a_tier_is_asked_about_everybody_in_turn() -> None:
    node, prompts = crowd("sim://0")
    node.work()
    answers = {found.lease: found for _, found in node.daemon.outgoing if isinstance(found, Found)}
    assert [answers[lease].chunks for lease in range(len(prompts))] == [2] * len(prompts)
    for lease, prompt in enumerate(prompts):
        node.prove(FULL, answers[lease], prompt)


def test_whose_turn_does_not_come_in_time_is_told_so() -> None:
    node, prompts = crowd("sim://0")
    node.tick(WAIT_MS / 1e3 + 0.001)
    whys = [found.why for _, found in node.daemon.outgoing if isinstance(found, Found)]
    late = len(prompts) - FINDS_MAX
    assert (
        whys
        == ["it was not read in time"] * FINDS_MAX
        + ["no tier had a thread to look for it in time"] * late
    )
    assert node.daemon.view.metric_values().named()["deadlines_missed"] == len(prompts)
    for job in list(node.jobs):
        node.jobs.remove(job)
        node.finish(job, execute(node.daemon.tiers[0].tier, job, node.memory))
    assert not [job for job in node.jobs if job.kind is JobKind.FIND], (
        "nobody is asked for what nobody waits for"
    )


def test_without_patience_only_ram_is_looked_at(tmp_path: Path) -> None:
    node = Node(f"disk://{tmp_path}?bytes=64MiB")
    engine(node.daemon, 1, FULL)
    node.store(FULL, [1, 2])
    node.work()
    node = Node(f"disk://{tmp_path}?bytes=64MiB")
    engine(node.daemon, 1, FULL)
    assert is_found(node.ask(1, 2, wait_ms=0)).chunks == 0
    assert is_found(node.ask(8, 9)).chunks == 0, "nobody has it, so nobody waits"


def test_at_the_deadline_the_answer_is_what_ram_has(tmp_path: Path) -> None:
    node = stored(tmp_path, [1, 2, 3])
    assert isinstance(node.ask(1, 2, 3), Pending)
    node.tick(WAIT_MS / 1e3 + 0.001)
    found = node.answer()
    assert found.chunks == 0
    assert found.why == "it was not read in time"
    assert node.daemon.view.metric_values().named()["deadlines_missed"] == 1
    (job,) = [job for job in node.jobs if job.kind is JobKind.READ]
    assert node.daemon.view.metric_values().named()["bytes_writing"] > 0, (
        "its slots are kept while a thread may write into them"
    )
    node.jobs.remove(job)
    node.finish(job, execute(node.daemon.tiers[0].tier, job, node.memory))
    assert node.daemon.view.metric_values().named()["bytes_writing"] == 0
    assert not node.daemon.outgoing, "a late completion is no second answer"
    assert is_found(node.ask(1, 2, 3)).chunks == 3, "but the next one has it"


def test_a_chunk_that_a_prompt_has_twice_is_read_once(tmp_path: Path) -> None:
    """No engine asks so, but any client may."""
    node = stored(tmp_path, [1, 2, 3])
    assert isinstance(node.ask(1, 1, 2), Pending)
    node.work()
    found = node.answer()
    assert found.chunks == 3
    node.prove(FULL, found, [1, 1, 2])
    node.daemon.handle(1, Release(7), node.now)
    assert all(not slot.pins for slot in node.daemon.store.slots.values())
    assert node.daemon.view.metric_values().named()["bytes_writing"] == 0


def damage(path: Path, how: str) -> None:
    raw = bytearray(path.read_bytes())
    match how:
        case "flip":
            raw[payload_offset(1)] ^= 1
        case "cut":
            del raw[512:]
        case "empty":
            raw.clear()
        case "foreign":
            raw[:] = b"x" * len(raw)
    path.write_bytes(raw)


@pytest.mark.parametrize("how", ["flip", "cut", "empty", "foreign"])
def test_a_damaged_object_is_a_miss_and_put_aside(tmp_path: Path, how: str) -> None:
    node = stored(tmp_path, [1, 2, 3])
    for path in tmp_path.glob("objects/*/??/*"):
        damage(path, how)
    assert isinstance(node.ask(1, 2, 3), Pending)
    node.work()
    assert node.answer().chunks == 0
    assert node.daemon.tiers[0].counters["objects_damaged"] > 0
    assert list((tmp_path / "quarantine").iterdir())
    assert not node.daemon.tiers[0].is_hung
    assert is_found(node.ask(1, 2, 3)).chunks == 0, "nobody asks for it again"


def test_a_damaged_region_costs_one_visit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Objects that the first lookup did not reach are replaced when they are stored anew."""
    prompt = list(range(1, 40))
    stored(tmp_path, prompt)
    for path in tmp_path.glob("objects/*/??/*"):
        damage(path, "flip")
    monkeypatch.setattr("hybridkv.tiers.shared_reads.JOB_ITEMS_MAX", 1)
    node = stored(tmp_path, [])
    assert isinstance(node.ask(*prompt), Pending)
    node.work()
    assert node.answer().chunks == 0
    found = node.daemon.tiers[0].counters["objects_damaged"]
    assert found <= READS_MAX, "of more it is not known"
    node.daemon.handle(1, Release(7), node.now)
    assert node.daemon.tiers[0].suspects
    node.store(FULL, prompt)
    node.work()
    assert not node.daemon.tiers[0].suspects, "each is replaced once"
    node = stored(tmp_path, [])
    assert isinstance(node.ask(*prompt), Pending)
    node.work()
    answer = node.answer()
    assert answer.chunks == len(prompt)
    node.prove(FULL, answer, prompt)


def test_what_is_slower_than_computing_is_computed(tmp_path: Path) -> None:
    node = stored(tmp_path, [1, 2, 3, 4])
    line = node.daemon.tiers[0]
    line.speed = line.speed.measured(100_000, 1.0, node.now)
    found = is_found(node.ask(1, 2, 3, 4, wait_ms=30_000, rate=1_000_000))
    assert found.chunks == 0, "there is time enough for it, and yet"
    assert "computing" in found.why
    assert node.daemon.view.metric_values().named()["promotions_slower"] == 1
    assert isinstance(node.ask(1, 2, 3, 4, wait_ms=30_000, rate=1), Pending), (
        "a slow engine waits for a slow tier"
    )
    node.work()
    assert node.answer().chunks == 4


@pytest.mark.parametrize("end", ["all", "fails", "is left alone"])
def test_a_tier_is_asked_in_rounds(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Objects that a tier cannot be asked about any more are a miss, and the answer says so."""
    records: dict[bytes, bytes] = {}
    node = remote(records, "sim://0")
    node.store(FULL, [1, 2, 3])
    node.work()
    monkeypatch.setattr("hybridkv.tiers.object_search.FIND_KEYS_MAX", 2)
    node = remote(records, "sim://0")
    assert isinstance(node.ask(1, 2, 3), Pending)
    (first,) = node.jobs
    node.jobs.clear()
    assert len(first.items) == 2
    if end == "is left alone":
        monkeypatch.setattr(TierState, "may_read", lambda *_: False)
    node.finish(first, execute(node.daemon.tiers[0].tier, first, node.memory))
    if end == "fails":
        (second,) = node.jobs
        node.jobs.clear()
        node.finish(second, JobOutcome(error=TierError("no route")))
    node.work()
    found = node.answer()
    assert (found.chunks, found.why) == {
        "all": (3, ""),
        "fails": (2, "disk: no route"),
        "is left alone": (0, "no tier can be asked at the moment"),
    }[end]


def test_what_ram_loses_while_a_tier_is_asked_is_asked_for_too() -> None:
    records: dict[bytes, bytes] = {}
    node = remote(records, "sim://0")
    node.store(FULL, [1, 2, 3])
    node.work()
    node = remote(records, "sim://0")
    node.store(FULL, [2])  # It is part of no hit of RAM, and so nothing holds it.
    node.work()
    assert isinstance(node.ask(1, 2, 3), Pending)
    node.daemon.handle(1, Clear(1), node.now)
    node.work()
    found = node.answer()
    assert (found.chunks, found.why) == (3, "")
    node.prove(FULL, found, [1, 2, 3])


def test_clear_empties_ram_and_if_asked_to_the_tiers(tmp_path: Path) -> None:
    node = stored(tmp_path, [1, 2, 3])
    node.daemon.handle(1, Clear(1), node.now)
    node.work()
    assert isinstance(node.ask(1, 2, 3, lease=1), Pending), "what is below RAM stays"
    node.work()
    assert node.answer().chunks == 3
    node.daemon.handle(1, Release(1), node.now)
    node.daemon.handle(1, Clear(1, tiers=True), node.now)
    node.work()
    assert is_found(node.ask(1, 2, 3)).chunks == 0
    assert not list(tmp_path.glob("objects/*/??/*"))


def test_objects_for_which_nobody_answers_are_a_miss_with_a_reason() -> None:
    """As those of a cluster's dead node are."""
    node = remote({}, "sim://0")
    assert isinstance(node.ask(1, 2), Pending)
    (job,) = node.jobs
    node.jobs.clear()
    silent = [None, *[False] * (len(job.items) - 1)]
    node.finish(job, JobOutcome(found=silent))
    found = node.answer()
    assert (found.chunks, found.why) == (0, f"disk does not answer for 1 of {len(silent)} objects")
    assert node.daemon.promotion.shortfalls == {"tiers_away": 1}
    assert node.daemon.tiers[0].counters["finds_cut"] == 1


def test_a_reason_is_no_longer_than_a_message_may_have() -> None:
    """The engine would take it for nonsense and end the connection."""
    node = remote({}, "sim://0")
    assert isinstance(node.ask(1, 2), Pending)
    (job,) = node.jobs
    node.jobs.clear()
    node.finish(job, JobOutcome(error=TierError("no route " * 1000)))
    found = node.answer()
    assert found.why.startswith("disk: no route no route")
    assert [decode_reply(body) for body in Frames().feed(encode(found))] == [found]


def test_what_is_hit_already_stays_until_the_answer(tmp_path: Path) -> None:
    """A lookup that gets no further leaves its room to others only once it is answered."""
    stored(tmp_path, [1, 2])
    stored(tmp_path, [11, 12])
    node = Node(f"disk://{tmp_path}?bytes=64MiB", arena=7 << 12)
    engine(node.daemon, 1, FULL)
    node.store(FULL, [1])
    node.store(FULL, [11])
    node.work()
    assert isinstance(node.ask(1, 2, lease=1), Pending), "one object more has room"
    second = is_found(node.ask(11, 12, lease=2))
    assert second.chunks == 1, "and now nothing may be evicted"
    node.prove(FULL, second, [11, 12])
    node.work()
    first = node.answer()
    assert (first.lease, first.chunks) == (1, 1)
    assert first.why.startswith("RAM has room for ")
    node.prove(FULL, first, [1, 2])


def test_a_tier_that_hangs_holds_up_no_other(tmp_path: Path) -> None:
    stored(tmp_path / "slow", [1, 2, 3])
    stored(tmp_path / "well", [4, 5, 6])
    node = Node(
        f"disk://{tmp_path}/slow?bytes=64MiB&timeout=0.5", f"disk://{tmp_path}/well?bytes=64MiB"
    )
    engine(node.daemon, 1, FULL)
    assert isinstance(node.ask(1, 2, 3, lease=1, wait_ms=200), Pending)
    hung = [job for job in node.jobs if job.tier == 0 and job.kind is JobKind.READ]
    node.jobs[:] = [job for job in node.jobs if job not in hung]
    assert isinstance(node.ask(4, 5, 6, lease=2), Pending)
    node.work()
    assert node.answer().chunks == 3
    node.tick(0.2)
    assert node.answer().chunks == 0
    node.tick(0.5)
    assert node.daemon.tiers[0].is_hung
    assert is_found(node.ask(1, 2, 3, lease=3)).chunks == 0, (
        "it is not asked while a thread of it hangs"
    )
    for job in hung:
        node.finish(job, execute(node.daemon.tiers[0].tier, job, node.memory))
    assert not node.daemon.tiers[0].is_hung
    assert is_found(node.ask(1, 2, 3, lease=4)).chunks == 3


def test_an_engine_with_other_weights_by_now_gets_nothing(tmp_path: Path) -> None:
    """Neither what was read for it, nor what RAM had when it asked."""
    stored(tmp_path, [1, 2, 3])
    node = Node(f"disk://{tmp_path}?bytes=64MiB")
    engine(node.daemon, 1, FULL)
    node.store(FULL, [1, 2])
    node.work()
    assert isinstance(node.ask(1, 2, 3), Pending)
    assert node.daemon.handle(1, Identify(6, b"m" * 32), node.now) == Done(6, 0)
    node.work()
    found = node.answer()
    assert (found.chunks, found.slots) == (0, b"")
    assert not any(map(any, found.masks))


def test_what_is_read_for_a_forgotten_identity_becomes_no_object(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon forgets an identity without objects and sessions while its objects are read."""
    monkeypatch.setattr(sessions, "NAMESPACES_MAX", 1)
    node = stored(tmp_path, [1, 2, 3])
    assert isinstance(node.ask(1, 2, 3), Pending)
    for identity in (b"m" * 32, b"o" * 32):
        assert node.daemon.handle(1, Identify(6, identity), node.now) == Done(6, 0)
    assert list(node.daemon.sessions.namespaces) == [b"m" * 32, b"o" * 32]
    node.work()
    assert node.answer().chunks == 0
    assert (node.daemon.store.objects, node.daemon.store.writing_bytes) == (0, 0)


def test_another_identity_never_gets_it(tmp_path: Path) -> None:
    node = stored(tmp_path, [1, 2, 3])
    node.daemon.on_disconnect(1)
    engine(node.daemon, 1, FULL, identity=b"m" * 32)
    assert is_found(node.ask(1, 2, 3)).chunks == 0


def test_clear_removes_what_came_while_tiers_were_cleared(tmp_path: Path) -> None:
    node = stored(tmp_path, [1, 2, 3])
    node.daemon.handle(1, Clear(1, tiers=True), node.now)
    (first,) = [job for job in node.jobs if job.kind is JobKind.CLEAR]
    node.jobs.clear()
    outcome = execute(node.daemon.tiers[0].tier, first, node.memory)
    node.store(FULL, [4])
    node.work()
    node.daemon.handle(1, Clear(2, tiers=True), node.now)
    node.finish(first, outcome)
    node.work()
    assert is_found(node.ask(4)).chunks == 0
    assert not list(tmp_path.glob("objects/*/??/*"))
