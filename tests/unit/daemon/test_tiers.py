"""Lookups over tiers: the daemon's core with real directories, and jobs done by hand."""

from pathlib import Path

import pytest

from hybridkv.core.geometry import Geometry
from hybridkv.daemon import sessions
from hybridkv.shm.slots import payload_offset
from hybridkv.tiers.contract import ReadRequest, TierError
from hybridkv.tiers.health import TierState
from hybridkv.tiers.jobs import JobKind, JobOutcome, TierJob, execute
from hybridkv.wire.codec import Frames, decode_reply, encode
from hybridkv.wire.messages import Clear, Done, Found, Identify, Pending, Release
from tests.invariants import check_daemon
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


def test_who_leaves_loses_only_the_own_turn() -> None:
    node, prompts = crowd("sim://0")
    node.daemon.handle(1, Release(FINDS_MAX), node.now)
    node.work()
    leases = {
        found.lease
        for _, found in node.daemon.outgoing
        if isinstance(found, Found) and found.chunks == 2
    }
    assert leases == set(range(len(prompts))) - {FINDS_MAX}


def test_nobody_waits_for_a_turn_of_a_tier_that_hangs() -> None:
    """Objects of the next tier come up meanwhile."""
    node, prompts = crowd("sim://0?timeout=0.5", "sim://1")
    hung = [job for job in node.jobs if job.tier == 0]
    node.jobs[:] = [job for job in node.jobs if job.tier]
    node.work()
    assert not node.daemon.outgoing
    node.tick(0.6)
    node.work()
    answers = {found.lease: found for _, found in node.daemon.outgoing if isinstance(found, Found)}
    assert [answers[lease].chunks for lease in sorted(answers)] == [2] * (len(prompts) - FINDS_MAX)
    assert (
        node.daemon.view.metric_values().named()["promotions_tiers_away"]
        == len(prompts) - FINDS_MAX
    )
    node.tick(WAIT_MS / 1e3)
    assert len(node.daemon.outgoing) == len(prompts)
    for job in hung:
        node.finish(job, execute(node.daemon.tiers[0].tier, job, node.memory))


@pytest.mark.parametrize("is_read", [False, True], ids=["asked", "read"])
@pytest.mark.parametrize("end", ["released", "disconnected", "late", "settled"])
def test_a_lookup_that_waits_ends_once(end: str, is_read: bool) -> None:
    """It holds while tiers are asked which objects they have, and while these are read."""
    records: dict[bytes, bytes] = {}
    node = remote(records, "sim://0")
    node.store(FULL, [1, 2])
    node.work()
    node = remote(records, "sim://0", "sim://1")
    assert isinstance(node.ask(1, 2), Pending)
    if is_read:
        node.work((JobKind.FIND,))
    assert {job.kind for job in node.jobs} == {JobKind.READ if is_read else JobKind.FIND}
    match end:
        case "released":
            node.daemon.handle(1, Release(7), node.now)
        case "disconnected":
            node.daemon.on_disconnect(1)
        case "late":
            node.tick(WAIT_MS / 1e3 + 0.001)
        case "settled":
            records.clear()
            node.work()
    answers = len(node.daemon.outgoing)
    assert answers == (end in ("late", "settled"))
    assert len(node.daemon.promotion) == 0
    node.work()
    assert len(node.daemon.outgoing) == answers, "what comes later is not for it"
    assert not node.jobs, "and nothing more is begun for it"
    if end != "disconnected":
        node.daemon.on_disconnect(1)
    assert all(not slot.pins for slot in node.daemon.store.slots.values())


def test_what_several_tiers_have_is_read_once() -> None:
    """It is read as soon as all tiers have answered."""
    records: dict[bytes, bytes] = {}
    node = remote(records, "sim://0")
    node.store(FULL, [1, 2])
    node.work()
    node = remote(records, "sim://0", "sim://1")
    assert isinstance(node.ask(1, 2), Pending)
    keys: list[bytes] = []
    is_read = []
    while node.jobs:
        job = node.jobs.pop(0)
        keys += [item.key for item in job.items] if job.kind is JobKind.READ else []
        node.finish(job, execute(node.daemon.tiers[job.tier].tier, job, node.memory))
        is_read.append(any(job.kind is JobKind.READ for job in node.jobs))
    assert is_read[:2] == [False, True]
    assert node.answer().chunks == 2
    assert len(keys) == len(set(keys)) > 2


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


def test_a_request_that_ends_while_it_waits_leaves_nothing(tmp_path: Path) -> None:
    for aborted in (True, False):
        node = stored(tmp_path, [1, 2, 3])
        assert isinstance(node.ask(1, 2, 3), Pending)
        if aborted:
            node.daemon.handle(1, Release(7))
        else:
            node.daemon.on_disconnect(1)
        check_daemon(node.daemon)
        node.work()
        assert not node.daemon.outgoing
        check_daemon(node.daemon)
        assert len(node.daemon.promotion) == 0


def test_two_that_want_the_same_read_it_once(tmp_path: Path) -> None:
    node = stored(tmp_path, [1, 2, 3])
    assert isinstance(node.ask(1, 2, 3, lease=7), Pending)
    assert isinstance(node.ask(1, 2, 3, lease=8), Pending)
    node.work()
    assert [found.chunks for _, found in node.daemon.outgoing if isinstance(found, Found)] == [3, 3]
    assert node.daemon.tiers[0].counters["objects_read"] == 3 + 2 + 2, (
        "chunks, and states at the end and halfway"
    )


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


def test_damaged_objects_are_put_aside_by_one_thread(tmp_path: Path) -> None:
    """The others are for reading, also where putting aside takes long."""
    prompts = [[10 * first + 1, 10 * first + 2] for first in range(READS_MAX)]
    for prompt in prompts:
        stored(tmp_path, prompt)
    for path in tmp_path.glob("objects/*/??/*"):
        damage(path, "flip")
    there = len(list(tmp_path.glob("objects/*/??/*")))
    node = stored(tmp_path, [])
    for lease, prompt in enumerate(prompts):
        assert isinstance(node.ask(*prompt, lease=lease), Pending)
    node.work((JobKind.READ,))
    assert len(node.daemon.outgoing) == len(prompts)
    assert [job.kind for job in node.jobs if job.kind is not JobKind.TEND] == [JobKind.DISCARD]
    damaged = node.daemon.tiers[0].counters["objects_damaged"]
    assert damaged >= len(prompts)
    node.work()
    assert len(list(tmp_path.glob("objects/*/??/*"))) == there - damaged


def test_a_damaged_region_costs_one_visit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Objects that the first lookup did not reach are replaced when they are stored anew."""
    prompt = list(range(1, 40))
    stored(tmp_path, prompt)
    for path in tmp_path.glob("objects/*/??/*"):
        damage(path, "flip")
    monkeypatch.setattr("hybridkv.tiers.object_reads.JOB_ITEMS_MAX", 1)
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


def test_swapped_files_are_each_other_objects(tmp_path: Path) -> None:
    node = stored(tmp_path, [1, 2, 3])
    by_size: dict[int, list[Path]] = {}
    for path in tmp_path.glob("objects/*/??/*"):
        by_size.setdefault(path.stat().st_size, []).append(path)
    first, second = next(paths for paths in by_size.values() if len(paths) > 1)[:2]
    first_bytes, second_bytes = first.read_bytes(), second.read_bytes()
    first.write_bytes(second_bytes)
    second.write_bytes(first_bytes)
    assert isinstance(node.ask(1, 2, 3), Pending)
    node.work()
    found = node.answer()
    node.prove(FULL, found, [1, 2, 3])
    assert found.chunks < 3
    assert node.daemon.tiers[0].counters["objects_damaged"] > 0


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


def test_a_slow_tier_is_tried_again_after_a_while(tmp_path: Path) -> None:
    node = stored(tmp_path, [1, 2])
    line = node.daemon.tiers[0]
    line.speed = line.speed.measured(1000, 1.0, node.now)
    assert is_found(node.ask(1, 2, rate=10_000)).chunks == 0
    node.tick(600)
    assert isinstance(node.ask(1, 2, rate=10_000), Pending)


def test_a_tier_that_fails_is_left_alone_and_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = stored(tmp_path, [1, 2, 3])
    tier = node.daemon.tiers[0].tier
    real = tier.get

    def broken(items: list[ReadRequest]) -> list[TierError]:
        return [TierError("Input/output error")] * len(items)

    monkeypatch.setattr(tier, "get", broken)
    for _ in range(3):
        assert isinstance(node.ask(1, 2, 3), Pending)
        node.work()
        assert node.answer().chunks == 0
    left_alone = is_found(node.ask(1, 2, 3))
    assert left_alone.chunks == 0, "the breaker is open"
    assert left_alone.why == "no tier can be asked at the moment"
    assert node.daemon.view.metric_values().named()["promotions_failed"] == 3
    assert node.daemon.view.metric_values().named()["promotions_tiers_away"] == 1
    monkeypatch.setattr(tier, "get", real)
    node.tick(1.0)
    assert isinstance(node.ask(1, 2, 3), Pending)
    node.work()
    assert node.answer().chunks == 3
    node.daemon.handle(1, Release(7))
    node.daemon.handle(1, Clear(9), node.now)
    assert isinstance(node.ask(1, 2, 3), Pending), "it is well again, not asked once per pause"


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


def test_a_tier_that_is_tended_for_long_is_read_and_written_meanwhile(tmp_path: Path) -> None:
    """Taking over the files of a lost writer takes minutes, and says nothing of how the tier is."""
    node = stored(tmp_path, [1, 2, 3])
    node.tick(1.1)
    (tend,) = node.jobs
    assert tend.kind is JobKind.TEND
    others = tuple(work for work in JobKind if work is not JobKind.TEND)
    for _ in range(100):
        node.tick(6.0)
    assert isinstance(node.ask(1, 2, 3), Pending)
    node.work(others)
    assert node.answer().chunks == 3
    node.store(FULL, [4])
    node.work(others)
    assert len(list(tmp_path.glob("objects/*/??/*"))) == 4 * len(FULL.groups)
    line = node.daemon.tiers[0]
    assert (line.is_hung, line.counters["jobs_late"]) == (False, 0)
    assert node.jobs == [tend], "one at a time"
    assert node.daemon.wakes_at() > node.now
    hung = TierJob(JobKind.READ, 0)
    line.submit_job(hung, node.now)
    node.tick(line.spec.timeout_seconds + 1)
    assert line.is_hung, "a read that does not come back"


def test_what_a_hung_tier_was_asked_for_is_not_waited_for_again(tmp_path: Path) -> None:
    """Not by lookups that a second tier could serve, nor by ever more of them while it hangs."""
    for name in ("slow", "well"):
        stored(tmp_path / name, [1, 2, 3])
    node = Node(
        f"disk://{tmp_path}/slow?bytes=64MiB&timeout=0.5", f"disk://{tmp_path}/well?bytes=64MiB"
    )
    engine(node.daemon, 1, FULL)
    assert isinstance(node.ask(1, 2, 3, lease=1, wait_ms=200), Pending)
    hung = [job for job in node.jobs if job.tier == 0 and job.kind is JobKind.READ]
    node.jobs[:] = [job for job in node.jobs if job not in hung]
    node.tick(0.2)
    assert node.answer().chunks == 0
    node.tick(0.5)
    found = is_found(node.ask(1, 2, 3, lease=2))
    assert (found.chunks, found.why) == (0, "disk does not answer")
    for job in hung:
        node.finish(job, execute(node.daemon.tiers[0].tier, job, node.memory))
    assert is_found(node.ask(1, 2, 3, lease=3)).chunks == 3


def test_no_more_is_read_than_ram_has_room_for(tmp_path: Path) -> None:
    numbers = [*range(1, 10)]
    node = stored(tmp_path, numbers)
    node.checks = False
    full = [slot for _ in range(100) for slot in node.daemon.store.grant((100_000, 1), 1)]
    assert full
    reply = node.ask(*numbers)
    node.work()
    found = node.answer() if isinstance(reply, Pending) else is_found(reply)
    assert 0 < found.chunks < len(numbers)
    node.prove(FULL, found, numbers)
    assert found.why.startswith("RAM has room for ")
    assert node.daemon.view.metric_values().named()["promotions_no_room"] == 1


def test_room_for_more_does_not_cost_what_is_hit_already(tmp_path: Path) -> None:
    """A longer hit needs room for its states. Those of the shorter hit would be evicted for it."""
    stored(tmp_path, [1, 2, 3])
    node = Node(f"disk://{tmp_path}?bytes=64MiB", arena=6 << 12)
    engine(node.daemon, 1, FULL)
    node.store(FULL, [1, 2])
    node.work()
    assert is_found(node.ask(1, lease=1)).chunks == 1, "and nothing of the first chunk may go"
    reply = node.ask(1, 2, 3, lease=2)
    node.work()
    found = node.answer() if isinstance(reply, Pending) else is_found(reply)
    assert found.chunks == 2
    assert found.why.startswith("RAM has room for ")
    assert node.daemon.view.metric_values().named()["promotions_no_room"] == 1
    node.prove(FULL, found, [1, 2, 3])


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
    assert isinstance(node.ask(11, 12, lease=2), Pending), "and now nothing may be evicted"
    node.work()
    first, second = (found for _, found in node.daemon.outgoing if isinstance(found, Found))
    assert (first.lease, first.chunks) == (1, 1)
    assert first.why.startswith("RAM has room for ")
    node.prove(FULL, first, [1, 2])
    assert (second.lease, second.chunks) == (2, 1)
    node.prove(FULL, second, [11, 12])


def test_what_is_hit_already_stays_while_tiers_are_asked_for_more() -> None:
    """The second lookup gains nothing from tiers. Its hit is in the room that the first needs."""
    records: dict[bytes, bytes] = {}
    node = remote(records, "sim://0")
    node.store(FULL, [11, 12])
    node.work()
    node = remote(records, "sim://0", arena=6 << 12)
    node.store(FULL, [1, 2])
    assert isinstance(node.ask(11, 12, lease=1), Pending)
    assert isinstance(node.ask(1, 2, 3, lease=2), Pending)
    finds = [job for job in node.jobs if job.kind is JobKind.FIND]
    assert len(finds) == 2
    for job in finds:
        node.jobs.remove(job)
        outcome = execute(node.daemon.tiers[0].tier, job, node.memory)
        node.daemon.on_job_done(job, outcome, node.now)
    node.tick()
    found = node.answer()
    assert (found.lease, found.chunks) == (2, 2)
    node.prove(FULL, found, [1, 2])
    node.work((JobKind.READ,))
    assert node.answer().lease == 1


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


def test_what_one_tier_has_lost_comes_from_the_next(tmp_path: Path) -> None:
    for name in ("first", "second"):
        stored(tmp_path / name, [1, 2, 3])
    node = Node(f"disk://{tmp_path}/first?bytes=64MiB", f"disk://{tmp_path}/second?bytes=64MiB")
    engine(node.daemon, 1, FULL)
    for number, path in enumerate((tmp_path / "first").glob("objects/*/??/*")):
        damage(path, ("flip", "cut", "empty")[number % 3])
    assert isinstance(node.ask(1, 2, 3), Pending)
    node.work()
    found = node.answer()
    assert found.chunks == 3
    assert found.tiers == {"disk1": 3}
    node.prove(FULL, found, [1, 2, 3])
