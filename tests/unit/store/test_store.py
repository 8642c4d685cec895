"""The RAM tier against a model: a dictionary of what should be there."""

import itertools
import random
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hybridkv.core.policies import EvictionClass
from hybridkv.shm.slots import (
    HEADER_BYTES,
    SlotState,
    committed_slots,
    is_signed,
    part_digests,
    payload_offset,
    read_generation,
    slot_bytes,
    unpack_header,
)
from hybridkv.shm.trailer import Trailer, trailer_bytes
from hybridkv.store import store as module
from hybridkv.store.index import Namespace, NewObject, Slot
from hybridkv.store.store import EVICTION_WASTE_MAX, Store
from tests.chance import examples
from tests.invariants import check_store, free_runs

SIZES = (100, 5000, 9000)
SHAPES = [(size, parts) for size in SIZES for parts in (1, 2)]
ARENA = 96 * 4096


def key(number: int) -> bytes:
    return bytes([number]) * 32


class StoreMachine(RuleBasedStateMachine):
    """Grants, commits, pins, drops and evictions in any order, with any claims about parents."""

    @initialize(
        reserved=st.integers(0, 96), quota=st.sampled_from([None, 4096, 12 * 4096, 40 * 4096])
    )
    def start(self, reserved: int, quota: int | None) -> None:
        self.memory = memoryview(bytearray(ARENA))
        self.quota = quota
        self.store = Store(self.memory, 1000, tenant_bytes=quota)
        self.store.extents.grow(reserved * 4096)
        shapes = (frozenset(SHAPES),) * 2
        self.namespaces = [
            Namespace(bytes([n]) * 32, (0, 4), shapes, (True, n == 1)) for n in range(2)
        ]
        self.writing: list[Slot] = []
        self.pinned: list[list[Slot]] = []
        self.generations: set[int] = set()
        self.now = 0

    @rule(shape=st.sampled_from(SHAPES), count=st.integers(0, 8))
    def grant(self, shape: tuple[int, int], count: int) -> None:
        slots = self.store.grant(shape, count)
        assert len(slots) <= count
        for slot in slots:
            assert slot.generation not in self.generations, "a generation is given once"
            self.generations.add(slot.generation)
        if len(slots) < count and self.store.extents.limit_bytes == ARENA:
            retained = [slot for slot in self.committed() if slot.is_retained]
            read = itertools.chain.from_iterable(self.pinned)
            in_the_way = {*self.writing, *slots, *read, *retained}
            longest = max((size for _, size in free_runs(self.store.extents)), default=0)
            part_bytes, parts = shape
            assert longest < slot_bytes(part_bytes, parts)
            assert in_the_way or not self.committed(), (
                "nothing more is granted only where something is in the way"
            )
        self.writing += slots

    @rule(reserved=st.integers(0, 96))
    def reserve(self, reserved: int) -> None:
        self.store.extents.grow(reserved * 4096)

    @precondition(lambda self: self.writing)
    @rule(
        pick=st.integers(0, 99),
        namespace=st.integers(0, 1),
        new=st.builds(
            NewObject,
            group_index=st.integers(0, 1),
            chunk_hash=st.integers(0, 5).map(key),
            parent=st.none().map(lambda _: b"") | st.integers(0, 5).map(key),
            eviction_class=st.sampled_from(EvictionClass),
            tenant=st.integers(0, 2),
        ),
    )
    def commit(self, pick: int, namespace: int, new: NewObject) -> None:
        slot = self.writing.pop(pick % len(self.writing))
        space = self.namespaces[namespace]
        entry = space.entries.get(new.chunk_hash)
        there = entry is not None and entry.slots[new.group_index] is not None
        kept = self.store.commit(slot, space, new)
        assert not (there and kept)
        assert kept or there or (new.tenant and self.quota is not None), (
            "only a quota keeps an object out"
        )
        header = unpack_header(bytes(self.memory[slot.offset : slot.offset + HEADER_BYTES]))
        assert header is not None
        if not kept:
            assert header.state is SlotState.FREE
        else:
            assert (header.state, header.namespace, header.chunk_hash, header.gid) == (
                SlotState.COMMITTED,
                space.identity,
                new.chunk_hash,
                (0, 4)[new.group_index],
            )

    @precondition(lambda self: self.writing)
    @rule(pick=st.integers(0, 99))
    def free(self, pick: int) -> None:
        self.store.free_slot(self.writing.pop(pick % len(self.writing)))

    def committed(self) -> list[Slot]:
        return [
            slot
            for space in self.namespaces
            for entry in space.entries.values()
            for slot in entry.slots
            if slot
        ]

    @rule(
        picks=st.lists(st.integers(0, 99), max_size=4, unique=True),
        superseded_tails=st.integers(0, 4),
    )
    def pin(self, picks: list[int], superseded_tails: int) -> None:
        there = self.committed()
        slots = (
            list(
                {id(there[pick % len(there)]): there[pick % len(there)] for pick in picks}.values()
            )
            if there
            else []
        )
        self.store.pin(slots, slots[:superseded_tails])
        self.pinned.append(slots)

    @precondition(lambda self: self.pinned)
    @rule(pick=st.integers(0, 99))
    def unpin(self, pick: int) -> None:
        self.store.unpin(self.pinned.pop(pick % len(self.pinned)))

    @rule(pick=st.integers(0, 99))
    def drop(self, pick: int) -> None:
        there = self.committed()
        if there:
            self.store.drop(there[pick % len(there)])

    @rule(
        namespace=st.integers(0, 1),
        names=st.lists(st.integers(0, 5), max_size=6),
        tenant=st.integers(0, 2),
        ticks=st.integers(0, 5),
    )
    def retain(self, namespace: int, names: list[int], tenant: int, ticks: int) -> None:
        retention, space = self.store.retention, self.namespaces[namespace]
        for name in names:
            if ticks:
                retention.retain_chunk(space, key(name), tenant, self.now + ticks)
            else:
                retention.end_chunk(space, key(name))

    @rule(ticks=st.integers(0, 5), most=st.integers(1, 40))
    def expire(self, ticks: int, most: int) -> None:
        self.now += ticks
        if self.store.retention.expire(self.now, most) < most:
            assert self.store.retention.next_end() > self.now

    @precondition(lambda self: self.committed())
    @rule(pick=st.integers(0, 99))
    def let_go_first(self, pick: int) -> None:
        there = self.committed()
        self.store.let_go_first(there[pick % len(there)])

    @rule()
    def clear(self) -> None:
        for slot in self.committed():
            self.store.drop(slot)
        assert not self.committed()

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "store"):
            return
        check_store(self.store)
        for tenant in (1, 2):
            theirs = sum(slot.size_bytes for slot in self.committed() if slot.tenant == tenant)
            assert self.quota is None or theirs <= self.quota
        for slots in self.pinned:
            for slot in slots:
                header = unpack_header(bytes(self.memory[slot.offset : slot.offset + HEADER_BYTES]))
                assert header is not None, "a pinned slot keeps its header"
                assert header.generation == slot.generation, (
                    "a pinned slot is never given to another object"
                )
        indexed = {slot.offset for slot in self.committed()}
        walked = {offset for offset, _ in committed_slots(self.memory)}
        assert indexed <= walked, "every object describes itself in the arena"


StoreMachine.TestCase.settings = settings(max_examples=examples(60), stateful_step_count=40)
TestStore = StoreMachine.TestCase


SIZE = 8192
SHAPE = (5000, 1)
assert slot_bytes(5000, 1) == SIZE


def store_of(slots: int, quota: int | None = None) -> Store:
    store = Store(memoryview(bytearray(slots * SIZE)), tenant_bytes=quota)
    store.extents.grow(slots * SIZE)
    return store


def full_and_window() -> Namespace:
    return Namespace(bytes(32), (0, 1), (frozenset({SHAPE}), frozenset({SHAPE})), (True, False))


def put(
    store: Store, space: Namespace, chain: Sequence[int], group: int = 0, **claims: Any
) -> None:
    """Store the objects of one group of a prompt, a step for each chunk."""
    before = b""
    for number in chain:
        for slot in store.grant(SHAPE, 1):
            store.commit(slot, space, NewObject(group, key(number), before, **claims))
        before = key(number)


def put_answer(store: Store, space: Namespace, chain: Sequence[int]) -> None:
    """Store what was generated after the first chunk of `chain`, which is there."""
    for before, number in pairwise(chain):
        new = NewObject(0, key(number), key(before), EvictionClass.GENERATED)
        for slot in store.grant(SHAPE, 1):
            store.commit(slot, space, new)


def kept(space: Namespace, group: int = 0) -> list[int]:
    return sorted(
        name[0] for name, entry in space.entries.items() if entry.slots[group] is not None
    )


def read(store: Store, space: Namespace, chain: Sequence[int], group: int = 0) -> None:
    """Read a prompt, of one group."""
    found = [space.entries[key(number)].slots[group] for number in chain]
    slots = [slot for slot in found if slot is not None]
    store.pin(slots)
    store.unpin(slots)


def test_suffixes_go_before_prefixes() -> None:
    """Also where a prompt was stored in many steps, and where it was read."""
    store, space = store_of(4), full_and_window()
    put(store, space, [0, 1, 2, 3])
    store.grant(SHAPE, 1)
    assert kept(space) == [0, 1, 2]
    read(store, space, [0, 1, 2])
    store.grant(SHAPE, 2)
    assert kept(space) == [0]


def test_what_is_passed_over_or_dropped_while_it_is_read_goes_after_that() -> None:
    """Also what was read before, so that its place in the queue does not change."""
    store, space = store_of(3), full_and_window()
    put(store, space, [0, 1, 2])
    read(store, space, [0, 1, 2])
    slots = [*space.slots_by_chunk()]
    store.pin(slots)
    store.hold(slots)
    store.drop(slots[2])
    assert not store.grant(SHAPE, 1)
    store.unpin(slots)
    assert not store.grant(SHAPE, 1)
    store.unpin(slots)
    check_store(store)
    assert store.extents.free_bytes == SIZE, "what was dropped is free"
    assert len(store.grant(SHAPE, 3)) == 3


def test_a_chunk_whose_state_came_first_is_the_child_of_the_one_before() -> None:
    """The groups of a step are stored one after the other, and a state's may be the first."""
    store, space = store_of(5), full_and_window()
    put(store, space, [2], group=1)
    put(store, space, [0, 1, 2])
    assert space.goes_on(key(1))
    assert not space.goes_on(key(2))
    store.grant(SHAPE, 3)
    assert kept(space) == [0, 1], "the suffix goes first"


@pytest.mark.parametrize("quota", [None, 4])
def test_of_a_prompt_without_room_the_prefix_is_kept(quota: int | None) -> None:
    """It keeps all that fits but for one slot, which each later chunk takes from the one before."""
    store = store_of(4 if quota is None else 20, None if quota is None else quota * SIZE)
    space = full_and_window()
    put(store, space, range(30), tenant=7)
    assert kept(space)[:3] == [0, 1, 2]
    assert len(kept(space)) == 4
    check_store(store)


def test_the_oldest_prompt_goes_first_and_its_window_with_it() -> None:
    store, space = store_of(6), full_and_window()
    for chain in ([0, 1], [2, 3]):
        put(store, space, chain)
        put(store, space, chain[-1:], group=1)
    store.grant(SHAPE, 1)
    assert (kept(space), kept(space, 1)) == ([0, 2, 3], [3]), (
        "a window after a prefix that is gone is of no use"
    )


def test_what_only_a_shorter_hit_needs_goes_first_unless_it_was_read() -> None:
    store, space = store_of(8), full_and_window()
    put(store, space, [0, 1, 2])
    put(store, space, [0, 1], group=1, eviction_class=EvictionClass.INTERIOR)
    put(store, space, [2], group=1)
    read(store, space, [1], group=1)
    put(store, space, [5, 6, 7])
    assert kept(space) == [0, 1, 2, 5, 6, 7]
    assert kept(space, 1) == [1, 2]
    assert store.evicted == 1


@pytest.mark.parametrize("readers", [1, 2])
@pytest.mark.parametrize("restart", [False, True])
def test_what_its_first_reader_goes_on_after_goes_first(readers: int, restart: bool) -> None:
    """With a second reader it is as good as any other."""
    memory = memoryview(bytearray(4 * SIZE))
    trailer = Trailer(memoryview(bytearray(trailer_bytes(len(memory)))), len(memory))
    store, space = Store(memory, trailer=trailer), full_and_window()
    store.grow_arena(len(memory))
    put(store, space, [9])
    put(store, space, [0, 1])
    put(store, space, [1], group=1)
    for _ in range(readers):
        slots = [*filter(None, space.entries[key(1)].slots)]
        store.pin(slots, slots)
        store.unpin(slots)
    if restart:
        store = Store(memory, trailer=trailer)
        namespaces, _ = store.recover_slots()
        space = store.regroup(namespaces[bytes(32)], full_and_window())
    check_store(store)
    store.grant(SHAPE, 1)
    assert kept(space) == ([0, 9] if readers == 1 else [0, 1])


def test_answers_that_nobody_reads_evict_no_prompt() -> None:
    """Six prompts, each with an answer that is new in every round, in RAM that holds the prompts.

    Two slots are the sixteenth of the bytes that answers may have before they go first.
    """
    store, space = store_of(32), full_and_window()
    prompts = [range(4 * prompt, 4 * prompt + 4) for prompt in range(6)]
    for prompt in prompts:
        put(store, space, prompt)
    fresh = itertools.count(40)
    for _ in range(8):
        for prompt in prompts:
            put_answer(store, space, [prompt[-1], *itertools.islice(fresh, 4)])
    asked = [number for number in kept(space) if number < 40]
    assert asked == list(range(24))
    assert store.queue.protected_bytes == 0


def test_the_last_answers_are_as_old_as_prompts_that_nobody_read() -> None:
    store, space = store_of(32), full_and_window()
    put(store, space, [0])
    put_answer(store, space, [0, 100])
    put(store, space, range(1, 30))
    assert 100 in kept(space), "its part of the bytes is not full"
    read(store, space, [0, 100])
    for scan in range(8):
        put(store, space, range(40 + 6 * scan, 46 + 6 * scan))
    assert {0, 100} <= set(kept(space)), "a conversation went on with it"


def test_an_object_of_a_failed_load_is_replaced_by_the_next_store() -> None:
    store, space = store_of(8), full_and_window()
    put(store, space, [0, 1])
    old = space.entries[key(0)].slots[0]
    put(store, space, [0])
    assert space.entries[key(0)].slots[0] is old
    assert store.duplicates == 1
    assert old is not None
    old.replace_on_store = True
    store.pin([old])
    put(store, space, [0])
    assert space.entries[key(0)].slots[0] is old, "somebody reads it, and may find it good"
    store.unpin([old])
    put(store, space, [0])
    assert space.entries[key(0)].slots[0] is not old, "who stored it has just proven it"
    assert store.slot_at(old.offset, old.generation) is None
    check_store(store)


def test_a_scan_leaves_alone_what_is_read() -> None:
    """Eight prompts that nobody repeats, twice the size of the cache, between two turns."""
    store, space = store_of(16), full_and_window()
    put(store, space, [0, 1, 2, 3])
    read(store, space, [0, 1, 2, 3])
    for prompt in range(8):
        put(store, space, range(10 + 4 * prompt, 14 + 4 * prompt))
    assert [number for number in kept(space) if number < 10] == [0, 1, 2, 3]


def test_what_comes_back_soon_after_its_eviction_is_protected() -> None:
    store, space = store_of(8), full_and_window()
    put(store, space, [0, 1])
    for prompt in range(4):
        put(store, space, [10 + 2 * prompt, 11 + 2 * prompt])
    assert 0 not in kept(space)
    put(store, space, [0, 1])
    assert store.queue.protected_bytes == 2 * SIZE
    for prompt in range(8):
        put(store, space, [30 + 2 * prompt, 31 + 2 * prompt])
    assert {0, 1} <= set(kept(space))


def test_a_window_that_comes_back_is_protected_with_its_chunk() -> None:
    store, space = store_of(8), full_and_window()
    for again in range(2):
        put(store, space, [0, 1])
        put(store, space, [0, 1], group=1)
        assert store.queue.protected_bytes == (0, 4 * SIZE)[again]
        for prompt in range(4):
            put(store, space, [10 + 10 * again + 2 * prompt, 11 + 10 * again + 2 * prompt])
        assert (kept(space, 1) == [0, 1]) == bool(again)


def test_what_is_protected_makes_room_when_it_becomes_too_much() -> None:
    store, space = store_of(8), full_and_window()
    for prompt in range(4):
        put(store, space, [2 * prompt, 2 * prompt + 1])
        read(store, space, [2 * prompt, 2 * prompt + 1])
    assert store.queue.protected_bytes == 8 * SIZE
    put(store, space, [20, 21])
    assert store.queue.protected_bytes == 6 * SIZE
    assert kept(space) == [2, 3, 4, 5, 6, 7, 20, 21]


def test_a_tenant_has_room_up_to_its_quota_at_the_cost_of_its_own() -> None:
    store, space = store_of(16, quota=4 * SIZE), full_and_window()
    put(store, space, [0, 1, 2, 3], tenant=1)
    put(store, space, [10, 11, 12, 13, 14], tenant=0)
    put(store, space, [20, 21], tenant=2)
    put(store, space, [30, 31], tenant=1)
    assert kept(space) == [0, 1, 10, 11, 12, 13, 14, 20, 21, 30, 31]
    assert len(store.tenants) == 2
    for entry in list(space.entries.values()):
        for slot in entry.slots:
            if slot is not None:
                store.drop(slot)
    assert len(store.tenants) == 0


def test_an_object_that_never_fits_its_quota_is_not_kept() -> None:
    store, space = store_of(4, quota=SIZE - 4096), full_and_window()
    put(store, space, [0], tenant=1)
    assert kept(space) == []
    assert store.writing_bytes == 0
    assert store.over_quota == 1
    put(store, space, [0], tenant=0)
    assert kept(space) == [0]


def test_a_large_slot_costs_few_small_objects() -> None:
    """Where small objects have any order of age, neighbours are evicted, not the oldest ones."""
    small, large = (100, 1), (16 * 4096 - 4096, 1)
    rng = random.Random(5)
    store = Store(memoryview(bytearray(512 * 4096)))
    store.extents.grow(512 * 4096)
    space = Namespace(bytes(32), (0,), (frozenset({small, large}),), (False,))
    slots = store.grant(small, 512)
    rng.shuffle(slots)
    for number, slot in enumerate(slots):
        store.commit(slot, space, NewObject(0, number.to_bytes(32, "little")))
    assert len(store.grant(large, 4)) == 4
    assert store.evicted <= 4 * 2 * 16
    check_store(store)


def test_a_large_slot_that_has_no_place_does_not_cost_everything() -> None:
    """Slots that are being written stand in the way everywhere."""
    small, large = (100, 1), (8 * 4096 - 4096, 1)
    store = Store(memoryview(bytearray(400 * 4096)))
    store.extents.grow(400 * 4096)
    space = Namespace(bytes(32), (0,), (frozenset({small, large}),), (False,))
    for number, slot in enumerate(store.grant(small, 400)):
        if number % 4:
            store.commit(slot, space, NewObject(0, number.to_bytes(32, "little")))
    assert store.grant(large, 1) == []
    assert store.evicted <= (EVICTION_WASTE_MAX + 2) * 8


def test_the_next_daemon_knows_the_order_and_the_tenants() -> None:
    memory = memoryview(bytearray(6 * SIZE))
    trailer = Trailer(memoryview(bytearray(trailer_bytes(len(memory)))), len(memory))
    store = Store(memory, trailer=trailer)
    store.grow_arena(6 * SIZE)
    put(store, full_and_window(), [0, 1, 2, 3], tenant=1)
    later = Store(memory, trailer=trailer, tenant_bytes=4 * SIZE)
    namespaces, _ = later.recover_slots()
    space = later.regroup(namespaces[bytes(32)], full_and_window())
    check_store(later)
    put(later, space, [4], tenant=1)
    assert kept(space) == [0, 1, 2, 4]
    read(later, space, [0, 1])
    later.grant(SHAPE, 3)
    assert kept(space) == [0, 1, 4]


def test_the_next_daemon_knows_what_was_read_and_what_are_answers() -> None:
    memory = memoryview(bytearray(16 * SIZE))
    trailer = Trailer(memoryview(bytearray(trailer_bytes(len(memory)))), len(memory))
    store, space = Store(memory, trailer=trailer), full_and_window()
    store.grow_arena(16 * SIZE)
    put(store, space, range(3))
    read(store, space, range(3))
    put_answer(store, space, [2, *range(100, 106)])
    put(store, space, range(10, 14))
    later = Store(memory, trailer=trailer)
    namespaces, _ = later.recover_slots()
    space = later.regroup(namespaces[bytes(32)], full_and_window())
    check_store(later)
    put(later, space, range(20, 24))
    answers = [number for number in kept(space) if number >= 100]
    assert len(answers) < 6, "they go first"
    assert set(range(10, 14)) <= set(kept(space))
    for scan in range(8):
        put(later, space, range(40 + 4 * scan, 44 + 4 * scan))
    assert {0, 1, 2} <= set(kept(space)), "what was read is protected still"
    assert not set(range(10, 14)) & set(kept(space))


def test_no_generation_is_given_again_after_the_clock_stepped_back() -> None:
    """Not even where nothing is left in the arena: a load may still name what was there."""
    memory, tail = memoryview(bytearray(ARENA)), memoryview(bytearray(trailer_bytes(ARENA)))
    generations: list[int] = []
    for first in (1000, 1000, 10):
        store = Store(memory, first, Trailer(tail, ARENA))
        store.recover_slots()
        store.grow_arena(ARENA)
        (slot,) = store.grant((100, 1), 1)
        generations.append(slot.generation)
        store.free_slot(slot)
    assert generations == sorted(set(generations))


def test_a_slot_that_was_given_away_does_not_keep_its_generation() -> None:
    """Its old header may stay amid a larger slot for long, and earlier loads read it."""
    memory = memoryview(bytearray(4 * 4096))
    store = Store(memory)
    store.grow_arena(4 * 4096)
    namespace = Namespace(key(1), (0,), (frozenset(SHAPES),))
    small = store.grant((100, 1), 4)
    for number, slot in enumerate(small):
        store.commit(slot, namespace, NewObject(0, key(number)))
    read = {slot.offset: slot.generation for slot in small}
    again = Store(memory, 0, store.trailer)
    again.recover_slots()
    assert all(read_generation(memory, offset) == generation for offset, generation in read.items())
    (large,) = again.grant((9000, 1), 1)
    end = large.offset + large.size_bytes
    covered = [offset for offset in read if large.offset <= offset < end]
    assert len(covered) == 3
    assert all(read_generation(memory, offset) != read[offset] for offset in covered)


def test_a_torn_header_has_no_generation_after_a_restart() -> None:
    memory = memoryview(bytearray(ARENA))
    store = Store(memory)
    store.grow_arena(ARENA)
    (slot,) = store.grant((100, 1), 1)
    memory[slot.offset + 24] ^= 1
    Store(memory, 0, store.trailer).recover_slots()
    assert read_generation(memory, slot.offset) != slot.generation


def test_nothing_is_evicted_while_pages_are_still_being_reserved() -> None:
    store = Store(memoryview(bytearray(4 * 8192)))
    store.extents.grow(8192)
    space = Namespace(bytes(32), (0,), (frozenset({(5000, 1)}),))
    store.commit(store.grant((5000, 1), 1)[0], space, NewObject(0, key(0)))
    assert store.grant((5000, 1), 1) == []
    assert store.evicted == 0
    store.extents.grow(2 * 8192)
    assert len(store.grant((5000, 1), 1)) == 1
    store.bound_bytes = 2 * 8192
    assert len(store.grant((5000, 1), 1)) == 1, "no more pages will come, so the object goes"
    assert store.evicted == 1


def test_a_new_slot_has_no_signature_whatever_was_in_its_place() -> None:
    """A writer with `checksum: "off"` signs nothing. No tier takes its objects for damaged."""
    memory = memoryview(bytearray(b"\xff") * ARENA)
    store = Store(memory, 1000)
    store.extents.grow(ARENA)
    for shape in SHAPES:
        (slot,) = store.grant(shape, 1)
        whole = memory[slot.offset : slot.offset + slot.size_bytes]
        digests = part_digests(whole, slot.part_bytes, slot.parts)
        assert is_signed(whole, digests, slot.generation) is None
        assert set(whole[payload_offset(slot.parts) :]) == {0xFF}, "payload is the writer's alone"


def test_bounds_change_at_run_time_in_bounded_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was stored before a bound is counted too, and a lower one evicts the tenant's own."""
    monkeypatch.setattr(module, "QUOTA_EVICTIONS_MAX", 3)
    store, space = store_of(32), full_and_window()
    put(store, space, range(8), tenant=1)
    put(store, space, range(10, 16), tenant=2)
    put(store, space, range(20, 24), tenant=0)
    assert not store.tenants, "without a bound nothing is counted"

    def settle() -> int:
        steps = 0
        while store.has_quota_work:
            before = store.objects
            store.keep_quotas()
            check_store(store)
            assert before - store.objects <= 3
            steps += 1
        return steps

    store.set_own_quota(1, 5 * SIZE)
    assert settle() > 3
    assert store.tenants == {1: 5 * SIZE}
    assert kept(space) == [0, 1, 2, 3, 4, *range(10, 16), *range(20, 24)], "suffixes go first"
    store.set_default_quota(4 * SIZE)
    settle()
    assert store.tenants == {1: 5 * SIZE, 2: 4 * SIZE}
    store.forget_own_quota(1)
    settle()
    assert store.tenants == {1: 4 * SIZE, 2: 4 * SIZE}
    store.set_own_quota(1, None)
    settle()
    put(store, space, range(30, 36), tenant=1)
    assert sum(slot.tenant == 1 for slot in space.slots_by_chunk()) == 10, "none is no bound"
    store.set_own_quota(1, 6 * SIZE)
    settle()
    assert store.tenants[1] == 6 * SIZE
    assert [number for number in kept(space) if number in range(20, 24)] == [20, 21, 22, 23]


def test_one_commit_evicts_few_for_a_bound_that_was_lowered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "QUOTA_EVICTIONS_MAX", 2)
    store, space = store_of(32, quota=16 * SIZE), full_and_window()
    put(store, space, range(12), tenant=1)
    store.set_own_quota(1, 2 * SIZE)
    put(store, space, [20], tenant=1)
    assert len(kept(space)) == 10, "the loop does the rest, and this one is not kept"
    assert 20 not in kept(space)
