"""What is forgotten is nowhere any more: not in memory, not in tiers, whoever uses it meanwhile."""

import random

import pytest

from hybridkv.core.packed import unpack_slots
from hybridkv.daemon import forgetting
from hybridkv.daemon.token_book import ChunkDescription, ChunkName
from hybridkv.observe.history import RequestOutcome
from hybridkv.shm.slots import committed_slots, payload_offset
from hybridkv.store.index import Namespace, NewObject, Slot
from hybridkv.store.store import Store
from hybridkv.tiers.contract import TierError
from hybridkv.tiers.jobs import JobKind, execute
from hybridkv.wire.messages import Error, Forget, Forgotten, Pending, Release, RequestExplanation
from tests.invariants import check_daemon, check_store
from tests.unit.daemon.dict_tier import DictTier
from tests.unit.daemon.harness import engine, hashes
from tests.unit.daemon.test_inventory import COMMAND, control, list_all, page_of
from tests.unit.daemon.tier_node import FULL, Node, content, is_found

SIM = "sim://0"
IDENTITY = b"n" * 32


@pytest.fixture
def node() -> Node:
    node = Node(SIM, make=lambda spec: DictTier({}, is_remote=True))
    engine(node.daemon, 1, FULL)
    control(node)
    return node


def forget(node: Node, place: int, *keys: bytes, rest: bool = False) -> Forgotten:
    answer = node.daemon.handle(COMMAND, Forget(3, place, b"".join(keys), rest), node.now)
    assert isinstance(answer, Forgotten), answer
    check_daemon(node.daemon)
    return answer


def keys_of(node: Node, number: int, place: int = 0) -> list[bytes]:
    return [held.key for held in list_all(node, place) if held.key[32:64] == hashes(number)]


def marks(number: int) -> set[int]:
    """The bytes of which the objects of a chunk consist."""
    return {content(index, number) for index in range(len(FULL.groups))}


def is_in_memory(node: Node, number: int) -> bool:
    """Whether memory has a run of the chunk's bytes. Headers and checksums have shorter ones."""
    memory = bytes(node.memory)
    return any(bytes([mark]) * 24 in memory for mark in marks(number))


def test_bytes_are_overwritten_before_their_room_is_used_again(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forgetting, "WIPE_STEP_BYTES", 4096)
    node.store(FULL, [1, 2])
    node.work()
    held = node.daemon.store.committed_bytes
    keys = keys_of(node, 1)
    answer = forget(node, 0, *keys)
    assert answer.count == len(keys)
    assert answer.wiping_bytes == node.daemon.store.to_wipe_bytes > 4096
    assert keys_of(node, 1) == [] != keys_of(node, 2), "it is found no more at once"
    assert not is_found(node.ask(1, lease=9, wait_ms=0)).depth
    assert node.daemon.store.committed_bytes == held, "its room is not free yet"
    named = {header.chunk_hash for _, header in committed_slots(node.memory)}
    assert named == {hashes(2)}, "a daemon that takes over does not find it either"
    turns = 0
    while node.daemon.wakes_at() <= node.now:
        node.tick()
        check_daemon(node.daemon)
        turns += 1
    assert turns > 1
    assert forget(node, 0).wiping_bytes == 0
    assert not is_in_memory(node, 1)
    assert is_in_memory(node, 2)
    node.prove(FULL, is_found(node.ask(2, lease=8, wait_ms=0)), [2])


def test_an_object_that_is_read_goes_when_its_reader_is_done(node: Node) -> None:
    node.store(FULL, [1])
    node.work()
    found = is_found(node.ask(1, lease=7, wait_ms=0))
    keys = keys_of(node, 1)
    assert forget(node, 0, *keys, rest=True).in_use == len([*unpack_slots(found.slots)])
    for _ in range(10):
        node.tick()
    assert is_in_memory(node, 1), "nobody changes what is being read"
    node.daemon.handle(1, Release(7), node.now)
    for _ in range(10):
        node.tick()
    assert forget(node, 0) == Forgotten(3, 0)
    assert not is_in_memory(node, 1)


def test_what_a_tier_is_reading_does_not_come_back(node: Node) -> None:
    node.store(FULL, [1])
    node.work()
    below = keys_of(node, 1, place=1)
    assert below
    forget(node, 0, *keys_of(node, 1))
    node.tick()
    assert isinstance(node.ask(1), Pending)
    node.work((JobKind.FIND,))
    jobs = [job for job in node.jobs if job.kind is JobKind.READ]
    outcomes = [execute(node.daemon.tiers[0].tier, job, node.memory) for job in jobs]
    assert jobs
    assert is_in_memory(node, 1)
    forget(node, 1, *below)
    node.tick()
    node.work((JobKind.ERASE,))
    assert forget(node, 1).count == len(below)
    assert forget(node, 0, *below).in_use
    for job, outcome in zip(jobs, outcomes, strict=True):
        node.jobs.remove(job)
        node.finish(job, outcome)
    assert not node.answer().depth
    for _ in range(10):
        node.tick()
    assert keys_of(node, 1) == keys_of(node, 1, place=1) == []
    assert not is_in_memory(node, 1)
    assert forget(node, 0) == Forgotten(3, 0)


def test_what_is_being_written_to_a_tier_is_erased_there(node: Node) -> None:
    node.store(FULL, [1])
    keys = [held.key for held in page_of(node, 0, 0).objects]
    jobs = [job for job in node.jobs if job.kind is JobKind.WRITE]
    assert jobs
    answer = forget(node, 0, *keys)
    assert answer.in_use
    node.work((JobKind.WRITE,))
    tier = node.daemon.tiers[0].tier
    assert isinstance(tier, DictTier)
    assert forget(node, 0).pending == len(tier.records) > 0
    node.work()
    assert forget(node, 0) == Forgotten(3, 0)
    assert tier.records == {}
    assert not is_in_memory(node, 1)


def test_a_tier_that_never_erases_is_asked_so_often_and_not_for_ever(node: Node) -> None:
    node.store(FULL, [1])
    forget(node, 0, *[held.key for held in page_of(node, 0, 0).objects])
    node.work((JobKind.WRITE,))
    tier = node.daemon.tiers[0]
    assert isinstance(tier.tier, DictTier)
    tier.tier.ill = TierError
    for _ in range(forgetting.ATTEMPTS_MAX):
        tier.is_open = True  # The breaker closes it meanwhile.
        node.tick()
        node.work((JobKind.ERASE,))
    assert forget(node, 0).pending == 0
    assert tier.tier.records, "the last pass of the command finds them"


def test_random_use_of_memory_beside_overwriting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that lives changes, and in the end nothing of what is gone is anywhere."""
    monkeypatch.setattr(forgetting, "WIPE_STEP_BYTES", 3 * 4096)
    rng = random.Random(56)
    for _ in range(30):
        memory = memoryview(bytearray(64 * 4096))
        store = Store(memory, first_generation=1 << 20)
        store.grow_arena(len(memory))
        namespace = Namespace(IDENTITY, (0,), (frozenset({(3000, 1), (9000, 2)}),), (True,))
        live: dict[Slot, int] = {}
        granted: list[Slot] = []
        store.on_change = lambda slot, is_new, live=live: None if is_new else live.pop(slot, None)
        number = 0
        for _ in range(80):
            match rng.randrange(8):
                case 0 | 1:
                    granted += store.grant(rng.choice([(3000, 1), (9000, 2)]), 1, b"e" * 32)
                case 2 if granted:
                    slot = granted.pop(rng.randrange(len(granted)))
                    number += 1
                    payload = slot.offset + payload_offset(slot.parts)
                    size = slot.part_bytes * slot.parts
                    memory[payload : payload + size] = bytes([number % 255 + 1]) * size
                    if store.commit(slot, namespace, NewObject(0, number.to_bytes(32, "big"))):
                        live[slot] = number % 255 + 1
                case 3 if live:
                    store.forget_object(rng.choice(list(live)))
                case 4:
                    store.begin_wipe()
                case 5 if live:
                    store.drop(rng.choice(list(live)))
                case 6 if granted:
                    store.free_slot(granted.pop())
                case _:
                    store.wipe(forgetting.WIPE_STEP_BYTES)
            check_store(store)
            for slot, mark in live.items():
                payload = slot.offset + payload_offset(slot.parts)
                size = slot.part_bytes * slot.parts
                assert set(memory[payload : payload + size]) == {mark}
        store.begin_wipe()
        while store.wiping_bytes:
            store.wipe(forgetting.WIPE_STEP_BYTES)
        check_store(store)
        for offset, size in store.extents.size_at.items():
            assert not any(memory[offset + 128 : offset + size])
        for slot in live:
            end = slot.offset + payload_offset(slot.parts) + slot.part_bytes * slot.parts
            assert not any(memory[end : slot.offset + slot.size_bytes]), "the end of its last page"


def test_what_describes_a_chunk_goes_with_it(node: Node) -> None:
    daemon = node.daemon
    node.store(FULL, [1, 2])
    rewritten: list[list[ChunkName]] = []
    book = daemon.subscriptions.book
    daemon.subscriptions.on_forgotten = lambda: rewritten.append(
        [chunk.name for chunk in book.described()]
    )
    for number in (1, 2):
        chunk = ChunkName(IDENTITY, hashes(number))
        book.add_chunk(chunk, ChunkDescription(b"", b"tokens"))
        explanation = RequestExplanation(9, 1, first_chunk=hashes(number))
        daemon.history.add_request(RequestOutcome(f"r{number}", IDENTITY, explanation, 0.0))
    forget(node, 0, *keys_of(node, 1), rest=True)
    assert rewritten == [[ChunkName(IDENTITY, hashes(2))]]
    assert [outcome.request_id for outcome in daemon.history.latest(9)] == ["r2"]
    forget(node, 0, rest=True)
    assert len(rewritten) == 1, "the file is written where something was forgotten"
    daemon.forgetting.book_is_settled = lambda: False
    assert forget(node, 0).pending == 1, "the command waits for the file"


def test_a_tier_that_fails_or_is_away_is_told(node: Node) -> None:
    node.store(FULL, [1])
    node.work()
    keys = keys_of(node, 1, place=1)
    tier = node.daemon.tiers[0]
    assert isinstance(tier.tier, DictTier)
    tier.tier.ill = TierError
    assert forget(node, 1, *keys).pending == len(keys)
    node.tick()
    node.work((JobKind.ERASE,))
    answer = forget(node, 1)
    assert (answer.count, answer.failed, answer.pending) == (0, len(keys), 0)
    assert answer.error == "Input/output error"
    assert set(tier.tier.records) == set(keys)
    tier.is_open = False
    answer = forget(node, 1, *keys)
    assert (answer.failed, answer.error) == (len(keys), "it is out of reach")


@pytest.mark.parametrize("request_", [Forget(3, 5), Forget(3, 0, b"x" * 67)])
def test_what_names_no_object_is_refused(node: Node, request_: Forget) -> None:
    assert isinstance(node.daemon.handle(COMMAND, request_, node.now), Error)
