"""Prefetches: the daemon's core with real directories, and jobs done by hand."""

from pathlib import Path

import pytest

from hybridkv.tiers import prefetches
from hybridkv.tiers.jobs import JobKind, execute
from hybridkv.tiers.prefetches import LATE_SECONDS, MARGIN_SECONDS, UNKNOWN_SECONDS
from hybridkv.wire.messages import (
    PREFETCH_MS_MAX,
    Identify,
    Pending,
    Prefetch,
    Prefetching,
    PrefetchState,
    ReadPrefetches,
    Release,
    ReportRequest,
    RequestExplanation,
    StartPrefetch,
)
from tests.unit.daemon.harness import command, engine, grant, hashes
from tests.unit.daemon.tier_node import FULL, Node, is_found, stored

PROMPT = [1, 2, 3, 4]
SMALL = 1 << 17  # Bytes of an arena of 32 objects.
LEAD_SECONDS = MARGIN_SECONDS + UNKNOWN_SECONDS


def value(node: Node, name: str) -> float:
    return node.daemon.view.metric_values().named().get(name, 0.0)


def expect(node: Node, *numbers: int, in_ms: int = 20_000, connection: int = 1) -> None:
    node.daemon.handle(connection, Prefetch(hashes(*numbers), in_ms), node.now)
    node.tick()


def test_a_prompt_is_in_ram_before_its_turn(tmp_path: Path) -> None:
    node = stored(tmp_path, PROMPT)
    expect(node, *PROMPT)
    assert node.daemon.wakes_at() <= node.now + 20 - LEAD_SECONDS
    node.tick(20 - LEAD_SECONDS - 0.001)
    assert not [job for job in node.jobs if job.kind is JobKind.READ], "it is not the time"
    node.tick(0.002)
    node.work()
    assert value(node, "prefetches_ended_whole") == 1
    assert value(node, "prefetched_bytes") > 0
    assert value(node, "lookups") == 0
    found = is_found(node.ask(*PROMPT))
    assert found.chunks == len(PROMPT)
    assert not found.tiers, "it was in RAM"
    node.prove(FULL, found, PROMPT)
    assert value(node, "prefetched_objects_hit") == value(node, "tier_disk_objects_read") > 0
    assert value(node, "prefetched_objects_wasted") == value(node, "prefetched_bytes") == 0


def test_what_ram_has_at_that_time_is_needless_and_becomes_no_victim_before_others(
    tmp_path: Path,
) -> None:
    node = Node(f"disk://{tmp_path}?bytes=64MiB")
    engine(node.daemon, 1, FULL)
    node.store(FULL, [1, 2])
    node.store(FULL, [11, 12])
    node.work()
    expect(node, 1, 2, in_ms=0)
    assert value(node, "prefetches_ended_needless") == 1
    assert value(node, "prefetched_bytes") == 0
    store = node.daemon.store
    assert not store.queue.protected_bytes, "to be expected is not to be read"
    namespace = node.daemon.sessions.connections[1].session.namespace
    while hashes(12) in namespace.entries:
        victim = store.queue.victim(lambda slot: not slot.pins)
        assert victim is not None
        store.drop(victim)
    assert is_found(node.ask(1, 2, wait_ms=0)).chunks == 2, "the older prompt is expected"


def test_what_no_tier_has_is_absent(tmp_path: Path) -> None:
    node = stored(tmp_path, PROMPT)
    expect(node, 8, 9, in_ms=0)
    node.work()
    assert value(node, "prefetches_ended_absent") == 1


def test_a_lookup_shares_the_reads_of_a_prefetch(tmp_path: Path) -> None:
    node = stored(tmp_path, PROMPT)
    expect(node, *PROMPT, in_ms=0)
    assert [job for job in node.jobs if job.kind is JobKind.READ]
    assert isinstance(node.ask(*PROMPT), Pending)
    node.work()
    found = node.answer()
    assert found.chunks == len(PROMPT)
    node.prove(FULL, found, PROMPT)
    halves = 2  # The lookup also reads the states of a hit that comes earlier.
    objects = len(PROMPT) + 2 + halves
    assert value(node, "tier_disk_objects_read") == objects, "each is read once"
    assert value(node, "prefetched_objects_hit") == value(node, "prefetched_bytes") == 0, (
        "a lookup waited for each of them"
    )


def test_lookups_go_first(tmp_path: Path) -> None:
    node = stored(tmp_path, [*PROMPT, 11, 12])
    assert isinstance(node.ask(*PROMPT), Pending)
    before = list(node.jobs)
    expect(node, *PROMPT, 11, 12, in_ms=0)
    assert node.jobs == before, "a lookup waits for the tier"
    node.work()
    assert node.answer().chunks == len(PROMPT)
    assert value(node, "prefetches_ended_whole") == 1


def test_no_protected_object_is_evicted_for_a_prefetch(tmp_path: Path) -> None:
    node = stored(tmp_path, PROMPT)
    number = 20
    while value(node, "evicted") == 0:
        node.store(FULL, [number])
        node.work()
        if value(node, "evicted") == 0:
            found = is_found(node.ask(number, lease=number))
            assert found.chunks == 1
            node.daemon.handle(1, Release(number))
        number += 1
    protected = {slot for slot in node.daemon.store.queue.items if slot.is_read}
    while (victim := node.daemon.store.queue.victim(lambda slot: not slot.pins, True)) is not None:
        node.daemon.store.drop(victim)
        node.daemon.store.grant(victim.shape, 1)
    expect(node, *PROMPT, in_ms=0)
    node.work()
    assert value(node, "prefetches_ended_pressure") == 1
    assert protected <= set(node.daemon.store.queue.items)
    assert value(node, "tier_disk_objects_read") == 0


def test_a_store_takes_the_room_that_a_prefetch_holds(tmp_path: Path) -> None:
    stored(tmp_path, PROMPT)
    node = Node(f"disk://{tmp_path}?bytes=64MiB", arena=SMALL)
    engine(node.daemon, 1, FULL)
    for number in range(20, 28):
        node.store(FULL, [number])
        node.work()
        assert is_found(node.ask(number, lease=number)).chunks == 1
    expect(node, *PROMPT, in_ms=0)
    job = next(job for job in node.jobs if job.kind is JobKind.READ)
    node.jobs.remove(job)
    node.finish(job, execute(node.daemon.tiers[0].tier, job, node.memory))
    prefetch = node.daemon.promotion.prefetch
    assert prefetch is not None
    assert len(prefetch.held) == len(job.items) > 0
    free = node.daemon.store.extents.free_bytes // 4096
    slots = grant(node.daemon, 1, FULL.groups[2].block_bytes, free + 1)
    assert len(slots) == free + 1, "all other objects are under leases"
    node.tick()
    node.work()
    assert value(node, "prefetches_ended_pressure") == 1
    assert value(node, "prefetched_objects_wasted") > 0


def test_a_prefetch_that_is_late_is_cut(tmp_path: Path) -> None:
    node = stored(tmp_path, PROMPT)
    expect(node, *PROMPT, in_ms=0)
    node.tick(LATE_SECONDS + 0.001)
    assert value(node, "prefetches_ended_late") == 1
    node.work()
    assert is_found(node.ask(*PROMPT)).chunks >= 1, "what came too late is there"


def test_the_share_of_ram_bounds_what_is_prefetched(tmp_path: Path) -> None:
    numbers = list(range(1, 13))
    stored(tmp_path, numbers)
    node = Node(f"disk://{tmp_path}?bytes=64MiB", arena=SMALL)
    engine(node.daemon, 1, FULL)
    bound = SMALL // 4
    expect(node, *numbers, in_ms=0)
    node.work()
    assert 0 < value(node, "prefetched_bytes") <= bound
    assert value(node, "prefetches_ended_bound") == 1
    expect(node, *numbers, in_ms=0)
    node.work()
    assert value(node, "prefetched_bytes") <= bound


def test_what_is_evicted_before_a_lookup_hits_it_is_wasted(tmp_path: Path) -> None:
    node = stored(tmp_path, PROMPT, arena=SMALL)
    expect(node, *PROMPT, in_ms=0)
    node.work()
    objects = len(node.daemon.store.expected)
    number = 20
    while node.daemon.store.expected:
        node.store_if_room(FULL, [number])
        number += 1
    assert value(node, "prefetched_objects_wasted") == objects
    assert value(node, "prefetched_objects_hit") == value(node, "prefetched_bytes") == 0
    expect(node, *PROMPT, in_ms=0)
    node.work()
    assert len(node.daemon.store.expected) == objects
    assert not node.daemon.store.queue.protected_bytes, "nobody asked a second time"


def test_bounds_and_repeated_messages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetches, "PREFETCHES_OF_ASKER_MAX", 2)
    monkeypatch.setattr(prefetches, "PREFETCHES_MAX", 3)
    node = stored(tmp_path, PROMPT)
    engine(node.daemon, 2, FULL, "other")
    expect(node, *PROMPT, in_ms=PREFETCH_MS_MAX + 1)
    assert value(node, "prefetches_refused_too_far") == 1
    for _ in range(5):
        expect(node, 1, in_ms=PREFETCH_MS_MAX)
    assert value(node, "prefetches_waiting") == 1, "a later message replaces the earlier one"
    expect(node, 2)
    expect(node, 3)
    assert value(node, "prefetches_refused_too_many") == 1
    expect(node, 3, connection=2)
    expect(node, 4, connection=2)
    assert value(node, "prefetches_refused_too_many") == 2
    assert not any(slot.pins for slot in node.daemon.store.slots.values())
    node.daemon.on_disconnect(1)
    assert value(node, "prefetches_waiting") == 3, "the turn may come to another engine"
    monkeypatch.setattr(prefetches, "NAMES_BYTES_MAX", 100)
    expect(node, 5, connection=2)
    assert value(node, "prefetches_refused_too_many") == 3


def test_another_identity_has_none_of_it(tmp_path: Path) -> None:
    node = stored(tmp_path, PROMPT)
    expect(node, *PROMPT, in_ms=0)
    node.daemon.handle(1, Identify(2, b"o" * 32), node.now)
    node.work()
    assert is_found(node.ask(*PROMPT)).chunks == 0


def test_without_tiers_nothing_is_kept() -> None:
    node = Node()
    engine(node.daemon, 1, FULL)
    expect(node, *PROMPT)
    is_found(node.ask(*PROMPT))
    assert value(node, "prefetches_refused_no_tiers") == 1
    assert len(node.daemon.recent_prompts) == 0


def test_a_command_names_a_request_or_a_family(tmp_path: Path) -> None:
    node = stored(tmp_path, PROMPT)
    command(node.daemon, 3)
    is_found(node.ask(*PROMPT[:2], wait_ms=0))
    is_found(node.ask(*PROMPT, wait_ms=0))
    explanation = RequestExplanation(1, 0, first_chunk=hashes(1), asked_chunks=len(PROMPT))
    node.daemon.handle(1, ReportRequest("cmpl-7-0-ab12", explanation), node.now)
    unknown = node.daemon.handle(3, StartPrefetch(2, "cmp"), node.now)
    assert unknown == Prefetching(2, [], is_known=False)
    for request in (StartPrefetch(3, "cmpl-7", in_ms=500), StartPrefetch(4, family=hashes(1)[:2])):
        node.daemon.store.evicted = 0
        reply = node.daemon.handle(3, request, node.now)
        assert isinstance(reply, Prefetching)
        states = [status.state for status in reply.prefetches]
        assert states == [PrefetchState.WAITING]
        node.tick()
        node.work()
        numbers = [status.number for status in reply.prefetches]
        ended = node.daemon.handle(3, ReadPrefetches(5, [*numbers, 999]), node.now)
        assert isinstance(ended, Prefetching)
        (status,) = ended.prefetches
        assert status.hit_tokens == status.tokens == len(PROMPT) * FULL.chunk_tokens
        is_first = request.id == 3
        assert status.state is (PrefetchState.WHOLE if is_first else PrefetchState.NEEDLESS)
        assert bool(status.objects) is bool(status.read_bytes) is is_first
