"""Writes to tiers: the daemon's core with real directories, and jobs done by hand."""

from pathlib import Path

import pytest

from hybridkv.core.packed import SLOT_BYTES, unpack_slots
from hybridkv.core.policies import EvictionClass
from hybridkv.shm.slots import payload_offset
from hybridkv.store.index import Slot
from hybridkv.tiers.contract import FullError, TierError
from hybridkv.tiers.demotion import USE_SECONDS
from hybridkv.tiers.jobs import JobKind
from hybridkv.tiers.record import record_of
from hybridkv.wire.messages import Found, Pending, Release
from tests.invariants import check_daemon
from tests.layouts import LAYOUTS
from tests.unit.daemon.dict_tier import DictTier
from tests.unit.daemon.harness import engine
from tests.unit.daemon.tier_node import FULL, Node, is_found, remote


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


def read_again(node: Node, *numbers: int) -> Found:
    """The answer to a lookup, from RAM or from tiers."""
    reply = node.ask(*numbers)
    if isinstance(reply, Pending):
        node.work()
        reply = node.answer()
    return is_found(reply)


def test_written_back_when_it_goes(tmp_path: Path) -> None:
    node = Node(f"disk://{tmp_path}?bytes=64MiB&write=back", arena=512 << 10)
    engine(node.daemon, 1, FULL)
    node.store(FULL, [1, 2])
    node.work()
    assert not list(tmp_path.glob("objects/*/??/*")), "nothing is written before it has to go"
    for first in range(10, 130, 2):
        node.store_if_room(FULL, [first, first + 1])
    assert list(tmp_path.glob("objects/*/??/*"))
    found = read_again(node, 1, 2)
    assert found.chunks == 2
    node.prove(FULL, found, [1, 2])


@pytest.mark.parametrize("way", ["read", "evicted"])
def test_an_answer_is_written_once_it_is_read_or_goes(tmp_path: Path, way: str) -> None:
    node = Node(f"disk://{tmp_path}?bytes=64MiB", arena=512 << 10)
    engine(node.daemon, 1, FULL)
    node.store(FULL, [1, 2], eviction_class=EvictionClass.GENERATED)
    node.work()
    assert not list(tmp_path.glob("objects/*/??/*")), "often nobody goes on with it"
    if way == "read":
        found = is_found(node.ask(1, 2, wait_ms=0))
        node.tick()
        node.work()
        read = len(found.slots) // SLOT_BYTES
        assert len(list(tmp_path.glob("objects/*/??/*"))) == read < 2 * len(FULL.groups)
    else:
        for first in range(10, 130, 2):
            node.store_if_room(FULL, [first, first + 1])
        found = read_again(node, 1, 2)
        assert found.chunks == 2
        node.prove(FULL, found, [1, 2])


def test_windows_inside_a_prompt_are_written_once_a_hit_reads_them(tmp_path: Path) -> None:
    """Before that a hit of what the tier has is shorter there. What was left out is counted."""
    geometry, numbers = LAYOUTS["gemma3"], [*range(1, 13)]
    parted = [*numbers[:6], 90, 91]
    node = Node(f"disk://{tmp_path}?bytes=64MiB")
    engine(node.daemon, 1, geometry)
    node.store(geometry, numbers, eviction_class=None, states=())
    node.work()
    slots = [*node.daemon.sessions.stored_slots()]
    unlikely = [slot for slot in slots if slot.eviction_class is EvictionClass.UNLIKELY]
    assert len(unlikely) == 2 * 9, "the windows of three chunks are for the prompt's end"
    left_out = sum(slot.size_bytes for slot in unlikely)
    assert node.daemon.tiers[0].counters["bytes_left_out"] == left_out

    def elsewhere(prompt: list[int]) -> Found:
        other = Node(f"disk://{tmp_path}?bytes=64MiB", name="other")
        engine(other.daemon, 1, geometry)
        found = read_again(other, *prompt)
        other.prove(geometry, found, prompt)
        return found

    assert elsewhere([*numbers, 90]).chunks == len(numbers)
    found = elsewhere(parted)
    assert (found.chunks, found.junctions) == (0, [6])
    assert read_again(node, *parted).chunks == 6, "RAM has them"
    node.tick()
    node.work()
    found = elsewhere(parted)
    assert (found.chunks, found.junctions) == (6, [])


def test_windows_inside_a_prompt_are_not_written_before_they_go(tmp_path: Path) -> None:
    geometry, numbers = LAYOUTS["gemma3"], [*range(1, 13)]
    node = Node(f"disk://{tmp_path}?bytes=64MiB&write=back")
    engine(node.daemon, 1, geometry)
    node.store(geometry, numbers, eviction_class=None, states=())
    slots = [*node.daemon.sessions.stored_slots()]
    unlikely = [slot for slot in slots if slot.eviction_class is EvictionClass.UNLIKELY]
    keys = {record_of(slot).name.key for slot in slots} - (
        left_out := {record_of(slot).name.key for slot in unlikely}
    )
    for first in range(100, 200, 2):
        node.store_if_room(geometry, [first, first + 1])
    tier = node.daemon.tiers[0]
    assert not any(slot.entry for slot in unlikely)
    assert not any(tier.peek(key) for key in left_out)
    assert all(tier.peek(key) for key in keys)


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


def test_what_an_earlier_life_had_no_time_to_write_is_written(tmp_path: Path) -> None:
    node = Node(f"disk://{tmp_path}?bytes=64MiB")
    engine(node.daemon, 1, FULL)
    node.daemon.tiers[0].is_open = False
    node.store(FULL, [1, 2])
    assert not [job for job in node.jobs if job.kind is JobKind.WRITE]
    node.tick(10)
    node.work()
    assert len(list(tmp_path.glob("objects/*/??/*"))) == 2 * len(FULL.groups)


def hit(node: Node, *numbers: int) -> list[Slot]:
    """Hit a prompt that RAM has, and do the jobs that follow. Returns the slots of the hit."""
    found = is_found(node.ask(*numbers, wait_ms=0))
    assert found.chunks == len(numbers)
    node.tick()
    node.work()
    node.daemon.handle(1, Release(7), node.now)
    slots = [
        node.daemon.store.slot_at(offset, generation)
        for offset, generation in [*unpack_slots(found.slots)]
    ]
    return [slot for slot in slots if slot is not None]


@pytest.mark.parametrize("policy", ["through", "back"])
def test_what_a_tier_lost_is_written_again_once_it_is_hit(policy: str) -> None:
    """A server loses objects where it starts empty, or evicts those that are not read."""
    records: dict[bytes, bytes] = {}
    node = remote(records, f"sim://0?write={policy}")
    node.store(FULL, [1, 2])
    node.work()
    (tier,) = node.daemon.tiers
    for slot in node.daemon.sessions.stored_slots():
        slot.in_tiers |= tier.bit
    records.clear()
    hit(node, 1, 2)
    assert not records, "tiers heard of it when it was stored"
    node.tick(USE_SECONDS)
    slots = hit(node, 1, 2)
    if policy == "back":
        assert not any(slot.in_tiers for slot in slots), "they are written when they go"
    else:
        assert all(slot.in_tiers for slot in slots)
        found = read_again(remote(records, "sim://0"), 1, 2)
        assert found.chunks == 2


def test_what_nobody_answers_for_is_not_written_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As while a node of a cluster is dead: its records may all be there."""
    records: dict[bytes, bytes] = {}
    node = remote(records, "sim://0")
    node.store(FULL, [1, 2])
    node.work()
    monkeypatch.setattr(node.daemon.tiers[0].tier, "use", lambda keys: [None] * len(keys))
    records.clear()
    node.tick(USE_SECONDS)
    assert all(slot.in_tiers for slot in hit(node, 1, 2))
    assert not records


def test_what_a_tier_refused_is_written_once_it_is_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    records: dict[bytes, bytes] = {}
    node = remote(records, "sim://0")
    with monkeypatch.context() as full:
        tier = node.daemon.tiers[0].tier
        full.setattr(tier, "put", lambda items: [FullError("no room") for _ in items])
        node.store(FULL, [1, 2])
        node.work()
    assert not records
    assert node.daemon.tiers[0].counters["objects_refused"]
    node.tick(USE_SECONDS)
    hit(node, 1, 2)
    assert records


def test_a_directory_keeps_what_ram_hits(tmp_path: Path) -> None:
    """Prompts that are used once push out each other, and not what is read from RAM each day."""
    node = Node(f"disk://{tmp_path}?bytes=512KiB", arena=4 << 20)
    engine(node.daemon, 1, FULL)
    node.store(FULL, [1, 2])
    node.work()
    node.tick(USE_SECONDS)
    used = [record_of(slot).name.key for slot in hit(node, 1, 2)]
    for first in range(10, 130, 2):
        node.store(FULL, [first, first + 1])
        node.work()
    line, files = node.daemon.tiers[0], list(tmp_path.glob("objects/*/??/*"))
    assert line.counters["objects_written"] > 2 * len(files), "many had to go"
    assert all(map(line.peek, used))


def test_an_hourly_bound_is_not_charged_for_what_is_there() -> None:
    records: dict[bytes, bytes] = {}
    node = remote(records, "sim://0", arena=4 << 20)
    for first in range(0, 20, 2):
        node.store(FULL, [first, first + 1])
        node.work()
    node = remote(records, "sim://0?hourly=1MiB", arena=4 << 20)
    for first in range(0, 20, 2):
        node.store(FULL, [first, first + 1])
        node.work()
    line, there = node.daemon.tiers[0], len(records)
    assert not line.counters["objects_written"]
    assert not line.counters["objects_not_admitted"]
    assert not line.writing_speed.per_second
    node.store(FULL, [100, 101])
    node.work()
    assert len(records) == there + 2 * len(FULL.groups)


@pytest.mark.parametrize("policy", ["through", "back"])
def test_what_goes_unwritten_is_counted(policy: str) -> None:
    records: dict[bytes, bytes] = {}
    node = remote(records, f"sim://0?write={policy}", arena=512 << 10)
    for first in range(10, 250, 2):
        node.store_if_room(FULL, [first, first + 1], works=False)
    line, store = node.daemon.tiers[0], node.daemon.store
    assert store.evicted
    assert line.counters["objects_shed"] == store.evicted


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
