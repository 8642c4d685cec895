"""The RAM tier against a model: a dictionary of what should be there."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hybridkv.shm.inspect import committed_slots
from hybridkv.shm.slots import HEADER_BYTES, SlotState, read_generation, slot_bytes, unpack_header
from hybridkv.shm.trailer import Trailer, trailer_bytes
from hybridkv.storage.store import Namespace, Slot, Store

SIZES = (100, 5000, 9000)
SHAPES = [(size, parts) for size in SIZES for parts in (1, 2)]
ARENA = 40 * 4096


def key(number: int) -> bytes:
    return bytes([number]) * 32


class StoreMachine(RuleBasedStateMachine):
    """Grants, commits, pins, drops and evictions in any order."""

    @initialize(reserved=st.integers(0, 40))
    def start(self, reserved: int) -> None:
        self.memory = memoryview(bytearray(ARENA))
        self.store = Store(self.memory, first_generation=1000)
        self.store.extents.grow(reserved * 4096)
        self.namespaces = [Namespace(bytes([n]) * 32, (0, 4), (frozenset(SHAPES), frozenset(SHAPES))) for n in range(2)]
        self.writing: list[Slot] = []
        self.pinned: list[list[Slot]] = []
        self.generations: set[int] = set()

    @rule(shape=st.sampled_from(SHAPES), count=st.integers(0, 8))
    def grant(self, shape: tuple[int, int], count: int) -> None:
        slots = self.store.grant(shape, count)
        assert len(slots) <= count
        for slot in slots:
            assert slot.generation not in self.generations, "a generation is given once"
            self.generations.add(slot.generation)
        if len(slots) < count and self.store.extents.limit_bytes == ARENA:
            assert not self.store._lru, "nothing more is granted only where nothing can be evicted"
        self.writing += slots

    @rule(reserved=st.integers(0, 40))
    def reserve(self, reserved: int) -> None:
        self.store.extents.grow(reserved * 4096)

    @precondition(lambda self: self.writing)
    @rule(
        number=st.integers(0, 5),
        namespace=st.integers(0, 1),
        group=st.integers(0, 1),
        pick=st.integers(0, 99),
    )
    def commit(self, number: int, namespace: int, group: int, pick: int) -> None:
        slot = self.writing.pop(pick % len(self.writing))
        space = self.namespaces[namespace]
        entry = space.entries.get(key(number))
        there = entry is not None and entry[group] is not None
        assert self.store.commit(slot, space, group, key(number)) == (not there)
        header = unpack_header(bytes(self.memory[slot.offset : slot.offset + HEADER_BYTES]))
        assert header is not None
        if there:
            assert header.state is SlotState.FREE
        else:
            assert (header.state, header.namespace, header.chunk_hash, header.gid) == (
                SlotState.COMMITTED,
                space.identity,
                key(number),
                (0, 4)[group],
            )

    @precondition(lambda self: self.writing)
    @rule(pick=st.integers(0, 99))
    def free(self, pick: int) -> None:
        self.store.free(self.writing.pop(pick % len(self.writing)))

    def committed(self) -> list[Slot]:
        return [slot for space in self.namespaces for entry in space.entries.values() for slot in entry if slot]

    @rule(picks=st.lists(st.integers(0, 99), max_size=4, unique=True))
    def pin(self, picks: list[int]) -> None:
        there = self.committed()
        slots = (
            list({id(there[pick % len(there)]): there[pick % len(there)] for pick in picks}.values()) if there else []
        )
        self.store.pin(slots)
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

    @rule()
    def clear(self) -> None:
        assert self.store.clear() == len(self.committed()) or not self.committed()

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "store"):
            return
        self.store.check()
        for slots in self.pinned:
            for slot in slots:
                header = unpack_header(bytes(self.memory[slot.offset : slot.offset + HEADER_BYTES]))
                assert header is not None, "a pinned slot keeps its header"
                assert header.generation == slot.generation, "a pinned slot is never given to another object"
        indexed = {slot.offset for slot in self.committed()}
        walked = {offset for offset, _ in committed_slots(self.memory)}
        assert indexed <= walked, "every object describes itself in the arena"


StoreMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestStore = StoreMachine.TestCase


def test_suffixes_go_before_prefixes() -> None:
    """Of one prompt, what only a longer hit needs is evicted first."""
    store = Store(memoryview(bytearray(4 * 8192)))
    store.extents.grow(4 * 8192)
    space = Namespace(bytes(32), (0,), (frozenset({(5000, 1)}),))
    assert slot_bytes(5000, 1) == 8192
    slots = store.grant((5000, 1), 4)
    for number, slot in enumerate(slots):
        store.commit(slot, space, 0, key(number))
    store.pin(slots)
    store.unpin(slots)
    store.grant((5000, 1), 2)
    assert sorted(space.entries) == [key(0), key(1)]


def test_no_generation_is_given_again_after_the_clock_stepped_back() -> None:
    """Not even where nothing is left in the arena: a load may still name what was there."""
    memory, behind = memoryview(bytearray(ARENA)), memoryview(bytearray(trailer_bytes(ARENA)))
    generations: list[int] = []
    for first in (1000, 1000, 10):
        store = Store(memory, first, Trailer(behind, ARENA))
        store.recover()
        store.grow(ARENA)
        (slot,) = store.grant((100, 1), 1)
        generations.append(slot.generation)
        store.free(slot)
    assert generations == sorted(set(generations))


def test_a_slot_that_was_given_away_does_not_keep_its_generation() -> None:
    """A larger slot around it may leave its old header as it was for long, and loads from before a restart go by it."""
    memory = memoryview(bytearray(4 * 4096))
    store = Store(memory)
    store.grow(4 * 4096)
    namespace = Namespace(key(1), (0,), (frozenset(SHAPES),))
    small = store.grant((100, 1), 4)
    for number, slot in enumerate(small):
        store.commit(slot, namespace, 0, key(number))
    read = {slot.offset: slot.generation for slot in small}
    again = Store(memory, 0, store.trailer)
    again.recover()
    assert all(read_generation(memory, offset) == generation for offset, generation in read.items())
    (large,) = again.grant((9000, 1), 1)
    taken = [offset for offset in read if large.offset <= offset < large.offset + large.size_bytes]
    assert len(taken) == 3
    assert all(read_generation(memory, offset) != read[offset] for offset in taken)


def test_a_torn_header_has_no_generation_after_a_restart() -> None:
    memory = memoryview(bytearray(ARENA))
    store = Store(memory)
    store.grow(ARENA)
    (slot,) = store.grant((100, 1), 1)
    memory[slot.offset + 24] ^= 1
    Store(memory, 0, store.trailer).recover()
    assert read_generation(memory, slot.offset) != slot.generation


def test_nothing_is_evicted_while_pages_are_still_being_reserved() -> None:
    store = Store(memoryview(bytearray(4 * 8192)))
    store.extents.grow(8192)
    space = Namespace(bytes(32), (0,), (frozenset({(5000, 1)}),))
    store.commit(store.grant((5000, 1), 1)[0], space, 0, key(0))
    assert store.grant((5000, 1), 1) == []
    assert store.evicted == 0
    store.extents.grow(2 * 8192)
    assert len(store.grant((5000, 1), 1)) == 1
    store.bound_bytes = 2 * 8192
    assert len(store.grant((5000, 1), 1)) == 1, "no more pages will come, so the object goes"
    assert store.evicted == 1
