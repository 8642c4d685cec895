"""Lookups and stores over tiers: the daemon's core with real directories, and jobs done by hand."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from hybridkv.core.coverage import part_bytes
from hybridkv.core.geometry import Geometry
from hybridkv.core.packed import unpack_u64
from hybridkv.core.tier_urls import TierSpec, parse_tier
from hybridkv.daemon import sessions
from hybridkv.daemon.handlers import Daemon
from hybridkv.shm.slots import SLOT_ALIGN, is_signed, part_digests, payload_offset, sign, slot_bytes
from hybridkv.store.store import Store
from hybridkv.tiers.contract import ReadRequest, Tier, TierError, WriteRequest
from hybridkv.tiers.demotion import HELD_SHARE, HELD_SHARE_ALL, LOOKS_MAX, TRIES_MAX
from hybridkv.tiers.disk.tier import DiskTier
from hybridkv.tiers.jobs import LIMITS, JobKind, JobOutcome, TierJob, execute
from hybridkv.tiers.record import record_of
from hybridkv.tiers.state import TierState
from hybridkv.wire.messages import (
    PROTOCOL_VERSION,
    Clear,
    Done,
    Found,
    Identify,
    Lookup,
    Pending,
    Release,
    Reply,
    Welcome,
)
from tests.invariants import check_daemon
from tests.layouts import LAYOUTS
from tests.unit.daemon.dict_tier import DictTier
from tests.unit.daemon.harness import commit, engine, grant, hashes

ARENA = 1 << 20
WAIT_MS = 1000
FINDS_MAX, READS_MAX = LIMITS[JobKind.FIND], LIMITS[JobKind.READ]
FULL = LAYOUTS["qwen3next"]


class Node:
    """A daemon over tiers; `work` does what their threads would."""

    def __init__(
        self,
        *urls: str,
        arena: int = ARENA,
        name: str = "here",
        make: Callable[[TierSpec, str], Tier] = DiskTier,
    ) -> None:
        self.memory = memoryview(bytearray(arena))
        self.jobs: list[TierJob] = []
        self.now = 100.0
        self.checks = True
        store = Store(self.memory, first_generation=random.randrange(1, 1 << 30))
        specs = [parse_tier(url, "tier") for url in urls]
        lines = [
            TierState(number, f"disk{number or ''}", make(spec, name), spec, self.jobs.append)
            for number, spec in enumerate(specs)
        ]
        self.daemon = Daemon(
            store, Welcome(0, PROTOCOL_VERSION, "boot", "/nowhere", arena, arena, 1), lines
        )
        store.grow(arena)
        self.tick()
        self.work()

    def tick(self, seconds: float = 0.0) -> None:
        self.now += seconds
        self.daemon.tick(self.now)

    def work(self, kinds: tuple[JobKind, ...] = tuple(JobKind), seconds: float = 0.0) -> None:
        """Do all jobs of these kinds, and what follows from them, each in so many seconds."""
        while chosen := [job for job in self.jobs if job.kind in kinds]:
            for job in chosen:
                self.jobs.remove(job)
                self.now += seconds
                self.finish(job, execute(self.daemon.tiers[job.tier].tier, job, self.memory))

    def finish(self, job: TierJob, outcome: JobOutcome) -> None:
        self.daemon.transferred(job, outcome, self.now)
        self.tick()
        if self.checks:
            check_daemon(self.daemon)

    def store(self, geometry: Geometry, numbers: list[int], connection: int = 1) -> None:
        """Store whole chunks of a prompt, with bytes that their names tell."""
        for index, group in enumerate(geometry.groups):
            for chunk, number in enumerate(numbers):
                size = part_bytes(geometry, group, chunk)
                if size:
                    (slot,) = grant(self.daemon, connection, size, 1, geometry.parts(group))
                    self.fill(slot, size, geometry.parts(group), content(index, number))
                    commit(self.daemon, connection, [slot], index, [number])
        self.tick()

    def store_if_room(self, geometry: Geometry, numbers: list[int]) -> None:
        """As `store`, but what there is no room for is left out."""
        for index, group in enumerate(geometry.groups):
            for chunk, number in enumerate(numbers):
                size = part_bytes(geometry, group, chunk)
                slots = grant(self.daemon, 1, size, 1, geometry.parts(group)) if size else []
                self.tick()
                for slot in slots:
                    self.fill(slot, size, geometry.parts(group), content(index, number))
                    commit(self.daemon, 1, [slot], index, [number])
        self.work()

    def fill(self, slot: tuple[int, int], size: int, parts: int, value: int) -> None:
        offset, generation = slot
        memory = self.memory[offset : offset + slot_bytes(size, parts)]
        memory[payload_offset(parts) :] = bytes([value]) * (len(memory) - payload_offset(parts))
        sign(memory, part_digests(memory, size, parts), generation)

    def ask(
        self, *numbers: int, lease: int = 7, wait_ms: int = WAIT_MS, rate: int = 0
    ) -> Reply | None:
        return self.daemon.handle(1, Lookup(5, lease, hashes(*numbers), wait_ms, rate), self.now)

    def answer(self) -> Found:
        ((_, found),) = self.daemon.later
        self.daemon.later.clear()
        assert isinstance(found, Found)
        return found

    def prove(self, geometry: Geometry, found: Found, numbers: list[int]) -> None:
        """Every slot of an answer has the bytes of its name, signed."""
        slots = list(zip(unpack_u64(found.offsets), unpack_u64(found.generations), strict=True))
        for offset, generation in slots:
            slot = self.daemon.store.get(offset, generation)
            assert slot is not None
            assert slot.entry is not None
            memory = self.memory[offset : offset + slot.size_bytes]
            assert is_signed(memory, part_digests(memory, *slot.shape), generation)
            value = content(slot.group_index, slot.entry.chunk_hash[0])
            start = payload_offset(slot.parts)
            assert set(memory[start : start + slot.part_bytes * slot.parts]) == {value}


def content(group_index: int, number: int) -> int:
    return (number * 7 + group_index * 31) % 255 + 1


def is_found(reply: Reply | None) -> Found:
    assert isinstance(reply, Found), reply
    return reply


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
    assert not second.daemon.later
    second.work()
    found = second.answer()
    assert found.chunks == len(numbers)
    assert found.tiers == {"disk": len(numbers)}
    second.prove(geometry, found, numbers)
    second.daemon.handle(1, Release(7))
    again = is_found(second.ask(*numbers))
    assert again.chunks == len(numbers)
    assert not again.tiers, "it is in RAM now"


def remote(records: dict[bytes, bytes], *urls: str, arena: int = ARENA) -> Node:
    """A node over tiers that all have these records, and must be asked for what they have."""
    node = Node(*urls, arena=arena, make=lambda spec, name: DictTier(records, is_remote=True))
    engine(node.daemon, 1, FULL)
    return node


def crowd(*urls: str) -> tuple[Node, list[list[int]]]:
    """A node with more lookups at once than a tier has threads for them, and their prompts."""
    records: dict[bytes, bytes] = {}
    node = remote(records, "sim://0")
    prompts = [[10 * first + 1, 10 * first + 2] for first in range(FINDS_MAX + 4)]
    for prompt in prompts:
        node.store(FULL, prompt)
        node.work()
    node = remote(records, *urls)
    for lease, prompt in enumerate(prompts):
        assert isinstance(node.ask(*prompt, lease=lease), Pending)
    assert [job.kind for job in node.jobs] == [JobKind.FIND] * FINDS_MAX * len(urls)
    return node, prompts


def test_a_tier_is_asked_about_everybody_in_turn() -> None:
    node, prompts = crowd("sim://0")
    node.work()
    answers = {found.lease: found for _, found in node.daemon.later if isinstance(found, Found)}
    assert [answers[lease].chunks for lease in range(len(prompts))] == [2] * len(prompts)
    for lease, prompt in enumerate(prompts):
        node.prove(FULL, answers[lease], prompt)


def test_whose_turn_does_not_come_in_time_is_told_so() -> None:
    node, prompts = crowd("sim://0")
    node.tick(WAIT_MS / 1e3 + 0.001)
    whys = [found.why for _, found in node.daemon.later if isinstance(found, Found)]
    late = len(prompts) - FINDS_MAX
    assert (
        whys
        == ["it was not read in time"] * FINDS_MAX
        + ["no tier had a thread to look for it in time"] * late
    )
    assert node.daemon.view.values().named()["deadlines_missed"] == len(prompts)
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
        for _, found in node.daemon.later
        if isinstance(found, Found) and found.chunks == 2
    }
    assert leases == set(range(len(prompts))) - {FINDS_MAX}


def test_nobody_waits_for_a_turn_of_a_tier_that_hangs() -> None:
    """What the tier behind it has comes up meanwhile."""
    node, prompts = crowd("sim://0?timeout=0.5", "sim://1")
    hung = [job for job in node.jobs if job.tier == 0]
    node.jobs[:] = [job for job in node.jobs if job.tier]
    node.work()
    assert not node.daemon.later
    node.tick(0.6)
    node.work()
    answers = {found.lease: found for _, found in node.daemon.later if isinstance(found, Found)}
    assert [answers[lease].chunks for lease in sorted(answers)] == [2] * (len(prompts) - FINDS_MAX)
    assert node.daemon.view.values().named()["promotions_tiers_away"] == len(prompts) - FINDS_MAX
    node.tick(WAIT_MS / 1e3)
    assert len(node.daemon.later) == len(prompts)
    for job in hung:
        node.finish(job, execute(node.daemon.tiers[0].tier, job, node.memory))


@pytest.mark.parametrize("is_read", [False, True], ids=["asked", "read"])
@pytest.mark.parametrize("end", ["released", "disconnected", "late", "settled"])
def test_a_lookup_that_waits_ends_once(end: str, is_read: bool) -> None:
    """Whether tiers are still asked about it, or it is read already."""
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
            node.daemon.disconnect(1)
        case "late":
            node.tick(WAIT_MS / 1e3 + 0.001)
        case "settled":
            records.clear()
            node.work()
    answers = len(node.daemon.later)
    assert answers == (end in ("late", "settled"))
    assert len(node.daemon.promotion) == 0
    node.work()
    assert len(node.daemon.later) == answers, "what comes later is not for it"
    assert not node.jobs, "and nothing more is begun for it"
    if end != "disconnected":
        node.daemon.disconnect(1)
    assert all(not slot.pins for slot in node.daemon.store.slots.values())


def test_what_several_tiers_have_is_read_once() -> None:
    """As soon as all of them have answered."""
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


def stored(
    tmp_path: Path, numbers: list[int], geometry: Geometry = FULL, arena: int = ARENA
) -> Node:
    """A node with an empty RAM whose directory has the prompt."""
    url = f"disk://{tmp_path}?bytes=64MiB"
    node = Node(url, arena=arena)
    engine(node.daemon, 1, geometry)
    node.store(geometry, numbers)
    node.work()
    node = Node(url, arena=arena)
    engine(node.daemon, 1, geometry)
    return node


def test_at_the_deadline_the_answer_is_what_ram_has(tmp_path: Path) -> None:
    node = stored(tmp_path, [1, 2, 3])
    assert isinstance(node.ask(1, 2, 3), Pending)
    node.tick(WAIT_MS / 1e3 + 0.001)
    found = node.answer()
    assert found.chunks == 0
    assert found.why == "it was not read in time"
    assert node.daemon.view.values().named()["deadlines_missed"] == 1
    (job,) = [job for job in node.jobs if job.kind is JobKind.READ]
    assert node.daemon.view.values().named()["bytes_writing"] > 0, (
        "its slots are kept while a thread may write into them"
    )
    node.jobs.remove(job)
    node.finish(job, execute(node.daemon.tiers[0].tier, job, node.memory))
    assert node.daemon.view.values().named()["bytes_writing"] == 0
    assert not node.daemon.later, "a late completion is no second answer"
    assert is_found(node.ask(1, 2, 3)).chunks == 3, "but the next one has it"


def test_a_request_that_ends_while_it_waits_leaves_nothing(tmp_path: Path) -> None:
    for aborted in (True, False):
        node = stored(tmp_path, [1, 2, 3])
        assert isinstance(node.ask(1, 2, 3), Pending)
        if aborted:
            node.daemon.handle(1, Release(7))
        else:
            node.daemon.disconnect(1)
        check_daemon(node.daemon)
        node.work()
        assert not node.daemon.later
        check_daemon(node.daemon)
        assert len(node.daemon.promotion) == 0


def test_two_that_want_the_same_read_it_once(tmp_path: Path) -> None:
    node = stored(tmp_path, [1, 2, 3])
    assert isinstance(node.ask(1, 2, 3, lease=7), Pending)
    assert isinstance(node.ask(1, 2, 3, lease=8), Pending)
    node.work()
    assert [found.chunks for _, found in node.daemon.later if isinstance(found, Found)] == [3, 3]
    assert node.daemon.tiers[0].counters["objects_read"] == 3 + 2 + 2, (
        "chunks, and states at the end and halfway"
    )


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
    assert len(node.daemon.later) == len(prompts)
    assert [job.kind for job in node.jobs if job.kind is not JobKind.TEND] == [JobKind.DISCARD]
    damaged = node.daemon.tiers[0].counters["objects_damaged"]
    assert damaged >= len(prompts)
    node.work()
    assert len(list(tmp_path.glob("objects/*/??/*"))) == there - damaged


def test_swapped_files_are_each_other_objects(tmp_path: Path) -> None:
    node = stored(tmp_path, [1, 2, 3])
    by_size: dict[int, list[Path]] = {}
    for path in tmp_path.glob("objects/*/??/*"):
        by_size.setdefault(path.stat().st_size, []).append(path)
    one, other = next(paths for paths in by_size.values() if len(paths) > 1)[:2]
    mine, theirs = one.read_bytes(), other.read_bytes()
    one.write_bytes(theirs)
    other.write_bytes(mine)
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
    assert node.daemon.view.values().named()["promotions_slower"] == 1
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
    assert node.daemon.view.values().named()["promotions_failed"] == 3
    assert node.daemon.view.values().named()["promotions_tiers_away"] == 1
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
    line.submit(hung, node.now)
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


def test_a_warm_start_with_many_objects_stalls_nobody() -> None:
    """They are looked at some at a time, and the loop comes back for the rest at once."""
    arena, count = 1000 * SLOT_ALIGN, 1000
    jobs: list[TierJob] = []
    tier = DictTier({}, is_remote=False)
    line = TierState(0, "sim", tier, parse_tier("sim://0", "tier"), jobs.append)
    store = Store(memoryview(bytearray(arena)))
    store.grow(arena)
    daemon = Daemon(
        store, Welcome(0, PROTOCOL_VERSION, "boot", "/nowhere", arena, arena, 1), [line]
    )
    engine(daemon, 1, LAYOUTS["qwen3"])
    size = part_bytes(LAYOUTS["qwen3"], LAYOUTS["qwen3"].groups[0], 0)
    namespace = next(iter(daemon.sessions.namespaces.values()))
    for number in range(count):
        for slot in store.grant((size, 1), 1):
            assert store.commit(slot, namespace, 0, number.to_bytes(32, "big"))
            tier.records[record_of(slot).name.key] = b""
    assert store.objects == count > 2 * LOOKS_MAX
    daemon.tick(1.0)
    (job,) = jobs
    jobs.clear()
    daemon.transferred(job, JobOutcome(), 1.0)
    turns = 0
    while daemon.wakes_at() <= 1.0:
        before = daemon.demotion.waiting
        daemon.tick(1.0)
        assert before - daemon.demotion.waiting <= LOOKS_MAX
        turns += 1
    assert turns >= 2 * store.objects // LOOKS_MAX
    assert not daemon.demotion.waiting
    assert not [job for job in jobs if job.kind is JobKind.WRITE], "they are there already"


@pytest.mark.parametrize("url", ["sim://0", "sim://0?hourly=4MiB"])
def test_what_an_outage_kept_from_a_tier_is_written_after_it(url: str) -> None:
    records: dict[bytes, bytes] = {}
    node = remote(records, url, arena=8 << 20)
    node.checks = False
    line = node.daemon.tiers[0]
    assert isinstance(line.tier, DictTier)
    line.tier.ill = TierError
    prompts = range(1, 30, 3)
    for number in prompts:
        node.store(FULL, [number])
    seconds = 100
    for _ in range(seconds * 8):
        node.work()
        node.tick(0.125)
    check_daemon(node.daemon)
    objects = len(prompts) * len(FULL.groups)
    assert node.daemon.demotion.waiting == node.daemon.store.objects == objects
    assert line.counters["failures"] < objects + 3 * seconds, (
        "twice a second one object is tried, once it is tended"
    )
    line.tier.ill = None
    node.tick(1.0)
    node.work()
    assert not node.daemon.demotion.waiting
    assert len(records) == objects
    check_daemon(node.daemon)


@pytest.mark.parametrize("raises", [False, True])
@pytest.mark.parametrize("after_outage", [False, True])
def test_what_a_tier_always_fails_with_keeps_nothing_waiting(
    raises: bool, after_outage: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it says which one it is, or fails with all that are given to it at once."""
    records: dict[bytes, bytes] = {}
    node = remote(records, "sim://0", arena=8 << 20)
    node.checks = False
    tier = node.daemon.tiers[0].tier
    assert isinstance(tier, DictTier)
    real, tried, bad = tier.put, [0], [b""]

    def broken(items: list[WriteRequest]) -> list[TierError | None]:
        bad[0] = bad[0] or items[0].key
        tried[0] += any(item.key == bad[0] for item in items)
        if raises and any(item.key == bad[0] for item in items):
            raise OSError("Input/output error")
        return [
            TierError("Input/output error") if item.key == bad[0] else real([item])[0]
            for item in items
        ]

    monkeypatch.setattr(tier, "put", broken)
    tier.ill = TierError if after_outage else None
    for _ in range(4):
        node.tick(1.1)
        node.work()
    for number in range(1, 50, 3):
        node.store(FULL, [number])
    for _ in range(80):
        node.work()
        node.tick(0.125)
    tier.ill = None
    for _ in range(80):
        node.work()
        node.tick(0.125)
    assert len(records) == node.daemon.store.objects - 1
    assert bad[0] not in records
    assert not node.daemon.demotion.waiting, "it is given up"
    assert after_outage or tried[0] == TRIES_MAX
    check_daemon(node.daemon)


@pytest.mark.parametrize("hung", [1, 2, 3])
def test_tiers_that_hang_do_not_keep_others_from_being_written(hung: int) -> None:
    """However many: they hold a quarter of the arena, and an object each."""
    records: dict[bytes, bytes] = {}
    node = remote(records, *(f"sim://{number}" for number in range(hung + 1)), arena=ARENA // 4)
    well = node.daemon.tiers[hung]
    done: list[bytes] = []
    prompts = 18
    for number in range(prompts):
        node.store(FULL, [number])
        for job in [job for job in node.jobs if job.tier == hung]:
            node.jobs.remove(job)
            node.finish(job, JobOutcome(errors=[None] * len(job.items)))
            done += (item.key for item in job.items)
    objects = prompts * len(FULL.groups)
    assert (
        len(set(done)) == well.counters["objects_written"] == objects == node.daemon.store.objects
    )
    held = [slot.size_bytes for slot in node.daemon.demotion.held()]
    share = len(node.memory) // HELD_SHARE
    assert share - max(held) < sum(held), "it was a limit"
    assert sum(held) <= min(hung * share, len(node.memory) // HELD_SHARE_ALL + hung * max(held))


def test_the_first_write_holds_no_more_of_a_small_arena_than_later_ones() -> None:
    node = remote({}, "sim://0", arena=ARENA // 4)
    node.store(FULL, [1, 2, 3])
    held = [slot.size_bytes for slot in node.daemon.demotion.held()]
    share = len(node.memory) // HELD_SHARE
    assert share - max(held) < sum(held) <= share


def test_what_is_gone_from_ram_is_not_tried_again() -> None:
    records: dict[bytes, bytes] = {}
    node = remote(records, "sim://0")
    tier = node.daemon.tiers[0].tier
    assert isinstance(tier, DictTier)
    tier.ill = TierError
    node.store(FULL, [1])
    node.daemon.handle(1, Clear(9), node.now)
    for job in list(node.jobs):
        node.daemon.transferred(job, execute(tier, job, node.memory), node.now)
    assert not node.daemon.demotion.waiting
    assert not node.daemon.store.objects


def test_written_back_when_it_goes(tmp_path: Path) -> None:
    node = Node(f"disk://{tmp_path}?bytes=64MiB&write=back", arena=512 << 10)
    engine(node.daemon, 1, FULL)
    node.store(FULL, [1, 2])
    node.work()
    assert not list(tmp_path.glob("objects/*/??/*")), "nothing is written before it has to go"
    for first in range(10, 130, 2):
        node.store_if_room(FULL, [first, first + 1])
    assert list(tmp_path.glob("objects/*/??/*"))
    found = node.ask(1, 2)
    if isinstance(found, Pending):
        node.work()
        found = node.answer()
    assert is_found(found).chunks == 2
    node.prove(FULL, is_found(found), [1, 2])


def test_an_hourly_bound_spares_what_nobody_reads_twice(tmp_path: Path) -> None:
    node = Node(f"disk://{tmp_path}?bytes=64MiB&hourly=1MiB", arena=4 << 20)
    engine(node.daemon, 1, FULL)
    for first in range(0, 60, 2):
        node.store(FULL, [first, first + 1])
        node.work()
    line = node.daemon.tiers[0]
    written = line.counters["bytes_written"]
    assert 0 < written <= 128 << 10, "half of the burst is for what is read"
    assert isinstance(node.ask(58, 59, wait_ms=0), Found)
    node.tick()
    node.work()
    assert line.counters["bytes_written"] > written
    node.tick(3600)
    node.store(FULL, [100, 101])
    node.work()
    assert line.counters["bytes_written"] <= 512 << 10


def test_an_object_whose_bytes_went_bad_in_ram_is_not_written(tmp_path: Path) -> None:
    node = Node(f"disk://{tmp_path}?bytes=64MiB")
    engine(node.daemon, 1, FULL)
    node.store(FULL, [1])
    for job in node.jobs:
        for item in job.items:
            assert item.slot is not None
            node.memory[item.slot.offset + payload_offset(item.record.parts)] ^= 1
    node.work()
    assert not list(tmp_path.glob("objects/*/??/*"))
    assert is_found(node.ask(1, wait_ms=0)).chunks == 0
    assert node.daemon.tiers[0].counters["objects_wrong_in_ram"] > 0


def test_no_more_is_read_than_ram_has_room_for(tmp_path: Path) -> None:
    node = stored(tmp_path, [1, 2, 3])
    node.checks = False
    full = [slot for _ in range(100) for slot in node.daemon.store.grant((100_000, 1), 1)]
    assert full
    reply = node.ask(1, 2, 3)
    node.work()
    found = node.answer() if isinstance(reply, Pending) else is_found(reply)
    assert found.chunks < 3
    assert found.why == "RAM has no room for it"
    assert node.daemon.view.values().named()["promotions_no_room"] == 1


def test_room_for_more_does_not_cost_what_is_hit_already(tmp_path: Path) -> None:
    """A longer hit needs room for its states; those of the shorter hit would be evicted."""
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
    assert found.why == "RAM has no room for it"
    assert node.daemon.view.values().named()["promotions_no_room"] == 1
    node.prove(FULL, found, [1, 2, 3])


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
    assert (found.chunks, found.offsets) == (0, b"")
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


def test_what_was_to_be_written_to_a_tier_that_hangs_may_go(tmp_path: Path) -> None:
    stored(tmp_path, [1])
    node = Node(f"disk://{tmp_path}?bytes=64MiB&write=back&timeout=0.5", arena=512 << 10)
    engine(node.daemon, 1, FULL)
    assert isinstance(node.ask(1), Pending)
    assert [job.kind for job in node.jobs] == [JobKind.READ], "which nobody does"
    for first in range(2, 100):
        for index, group in enumerate(FULL.groups):
            slots = grant(node.daemon, 1, part_bytes(FULL, group, 0), 1, FULL.parts(group))
            commit(node.daemon, 1, slots, index, [first] * len(slots))
    (leaving,) = node.daemon.demotion._leaving
    slots_held = [item.slot for item in leaving]
    assert slots_held
    node.tick(0.6)
    assert node.daemon.tiers[0].is_hung
    assert not leaving
    assert all(slot is not None and not slot.pins for slot in slots_held)
    check_daemon(node.daemon)


def test_another_identity_never_gets_it(tmp_path: Path) -> None:
    node = stored(tmp_path, [1, 2, 3])
    node.daemon.disconnect(1)
    engine(node.daemon, 1, FULL, identity=b"m" * 32)
    assert is_found(node.ask(1, 2, 3)).chunks == 0


def test_what_an_earlier_life_had_no_time_to_write_is_written(tmp_path: Path) -> None:
    node = Node(f"disk://{tmp_path}?bytes=64MiB")
    engine(node.daemon, 1, FULL)
    node.daemon.tiers[0].is_open = False
    node.store(FULL, [1, 2])
    assert not [job for job in node.jobs if job.kind is JobKind.WRITE]
    node.tick(10)
    node.work()
    assert len(list(tmp_path.glob("objects/*/??/*"))) == 2 * len(FULL.groups)


def test_every_tier_gets_what_an_earlier_life_left(tmp_path: Path) -> None:
    node = Node(f"disk://{tmp_path}/one?bytes=64MiB", f"disk://{tmp_path}/two?bytes=64MiB")
    engine(node.daemon, 1, FULL)
    node.store(FULL, [1, 2])
    trailer = node.daemon.store.trailer
    store = Store(node.memory, 1 << 40, trailer)
    specs = [parse_tier(f"disk://{tmp_path}/{name}?bytes=64MiB", "tier") for name in ("one", "two")]
    node.jobs.clear()
    lines = [
        TierState(number, f"disk{number or ''}", DiskTier(spec, "here"), spec, node.jobs.append)
        for number, spec in enumerate(specs)
    ]
    node.daemon = Daemon(
        store, Welcome(0, PROTOCOL_VERSION, "boot", "/nowhere", ARENA, ARENA, 1), lines
    )
    node.daemon.sessions.recover(())
    node.tick()
    node.work()
    for name in ("one", "two"):
        assert len(list((tmp_path / name).glob("objects/*/??/*"))) == 2 * len(FULL.groups), name


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
