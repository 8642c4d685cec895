"""Objects that are retained for a time: their shares, their order, and their end."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hybridkv.core.policies import EvictionClass
from hybridkv.store import retention
from hybridkv.store.eviction import EvictionQueue
from hybridkv.store.index import Namespace, NewObject, Slot
from hybridkv.store.store import Store
from tests.chance import examples
from tests.invariants import check_store
from tests.unit.store.test_store import SHAPE, SIZE, full_and_window, key, put, read, store_of


def retain(
    store: Store, space: Namespace, chain: range | list[int], until: float, tenant: int = 0
) -> None:
    for number in chain:
        store.retention.retain_chunk(space, key(number), tenant, until)
    check_store(store)


@pytest.mark.parametrize("change", ["none", "used", "demoted"])
def test_a_retained_item_goes_on_in_its_own_stage(change: str) -> None:
    """At the end of its time it goes when it would have gone without."""
    order: list[list[str]] = []
    for is_retained in (False, True):
        queue: EvictionQueue[str] = EvictionQueue(8)
        for item in "abcd":
            queue.add_item(item, 1, EvictionClass.PROMPT, item.encode())
        if is_retained:
            queue.retain_item("b")
            queue.offer("b")
        if change == "used":
            queue.mark_used("b")
        elif change == "demoted":
            queue.demote("b")
        if is_retained:
            assert queue.retained_bytes == 1
            assert queue.retained_victim(lambda _: True) == "b"
            queue.end_retention("b")
            assert queue.retained_bytes == 0
        queue.offer("b")
        gone: list[str] = []
        while (victim := queue.victim(lambda _: True)) is not None:
            queue.remove(victim)
            gone.append(victim)
        order.append(gone)
    assert order[0] == order[1]
    assert order[0].index("b") == {"none": 1, "used": 3, "demoted": 0}[change]


def test_what_is_protected_has_its_part_of_what_is_not_retained() -> None:
    queue: EvictionQueue[int] = EvictionQueue(8)
    for item in range(7):
        queue.add_item(item, 1, EvictionClass.PROMPT, bytes([item]))
    for item in (0, 1, 2, 3):
        queue.retain_item(item)
    queue.mark_used([4, 5, 6])
    for item in (4, 5, 6):
        queue.offer(item)
    assert queue.victim(lambda _: True) == 4, "3 are more than a half of the other 4"


def test_the_shares_are_of_ram_of_the_tenant_and_of_its_quota() -> None:
    store, space = store_of(64, quota=20 * SIZE), full_and_window()
    chains = {tenant: [*range(30 * tenant, 30 * tenant + 30)] for tenant in range(4)}
    for tenant, chain in chains.items():
        put(store, space, chain[:20], tenant=tenant)
        retain(store, space, chain[:20], 9.0, tenant)
    charged = {tenant: size // SIZE for tenant, size in store.retention.charged.items()}
    assert charged == {0: 16, 1: 10, 2: 6}, "a quarter of RAM, half of the quota, what is left"
    assert store.retention.refused == {"tenant": 1 + 1, "ram": 1 + 1, "prefix": 80 - 32 - 4}


def test_a_chunk_stays_no_longer_than_the_one_before() -> None:
    store, space = store_of(16), full_and_window()
    put(store, space, [0, 1, 2])
    retain(store, space, [1], 9.0)
    assert store.retention.refused == {"prefix": 1}
    retain(store, space, [0], 5.0)
    retain(store, space, [1], 9.0)
    assert store.retention.shortened == 1
    assert store.retention.expire(5.0, 10) == 2
    assert store.queue.retained_bytes == 0
    retain(store, space, [0, 1], 20.0)
    store.retention.end_chunk(space, key(0))
    check_store(store)
    assert store.queue.retained_bytes == 2 * SIZE, "the one after it needs it"
    store.retention.end_chunk(space, key(1))
    store.retention.expire(6.0, 10)
    assert store.queue.retained_bytes == 0
    assert not space.retained


def test_a_chunk_stays_as_long_as_the_one_after_it() -> None:
    store, space = store_of(16), full_and_window()
    put(store, space, [0, 1])
    for until in (2.0, 5.0):
        retain(store, space, [0, 1], until)
    store.retention.expire(3.0, 10)
    retained = []
    for _ in range(4):
        store.retention.expire(5.0, 1)
        retained.append([slot.is_retained for slot in space.slots_by_chunk()])
    assert [False, True] not in retained
    assert retained[-1] == [False, False]


def test_readers_and_writers_cost_no_retained_object() -> None:
    """They hold all the rest of RAM, for a moment, and nothing more is stored meanwhile."""
    store, space = store_of(8), full_and_window()
    put(store, space, [0, 1, 2, 3, 4])
    retain(store, space, [0, 1], 9.0)
    store.pin([slot for slot in space.slots_by_chunk() if not slot.is_retained])
    assert len(store.grant(SHAPE, 8)) == 3
    assert store.queue.retained_bytes == 2 * SIZE
    assert store.retained_evicted == 0


def test_a_window_inside_a_prompt_is_not_retained_before_it_is_read() -> None:
    store, space = store_of(64), full_and_window()
    put(store, space, [0, 1])
    put(store, space, [0], group=1, eviction_class=EvictionClass.INTERIOR)
    put(store, space, [1], group=1)
    retain(store, space, [0, 1], 9.0)
    assert store.queue.retained_bytes == 3 * SIZE
    read(store, space, [0], group=1)
    retain(store, space, [0, 1], 9.0)
    assert store.queue.retained_bytes == 3 * SIZE, "only a wish or a store changes what is kept"


def test_names_are_bounded_in_all_and_by_tenant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "NAMES_MAX", 8)
    store, space = store_of(16), full_and_window()
    for tenant in range(5):
        retain(store, space, range(10 * tenant, 10 * tenant + 3), 9.0, tenant)
    assert len(store.retention) == 8
    assert store.retention.refused == {"names": 4 * 1 + 3}
    for _ in range(1000):
        store.retention.end_chunk(space, key(0))
        store.retention.retain_chunk(space, key(0), 0, 9.0)
    check_store(store)
    assert len(store.retention.due) < 1000
    store.retention.expire(9.0, 2000)
    assert len(store.retention) == 0


def test_another_tenant_pays_for_a_longer_time() -> None:
    store, space = store_of(16), full_and_window()
    put(store, space, [0, 1])
    retain(store, space, [0, 1], 5.0, tenant=1)
    retain(store, space, [0, 1], 4.0, tenant=2)
    assert dict(store.retention.charged) == {1: 2 * SIZE}
    retain(store, space, [0, 1], 9.0, tenant=2)
    assert dict(store.retention.charged) == {2: 2 * SIZE}


def test_few_retained_objects_do_not_keep_large_ones_out() -> None:
    """They lie everywhere, and are less than the share. The order of free runs is their last."""
    small, large = (100, 1), (16 * 4096 - 4096, 1)
    store = Store(memoryview(bytearray(512 * 4096)))
    store.extents.grow(512 * 4096)
    space = Namespace(bytes(32), (0,), (frozenset({small, large}),), (False,))
    for number, slot in enumerate(store.grant(small, 512)):
        name = number.to_bytes(32, "little")
        if number % 8 == 0:
            store.retention.retain_chunk(space, name, number % 3, 9.0)
        store.commit(slot, space, NewObject(0, name))
    check_store(store)
    before = store.queue.retained_bytes
    assert before == 64 * 4096
    assert len(store.grant(large, 4)) == 4
    assert 0 < store.retained_evicted <= 4 * 4
    check_store(store)


class RetentionMachine(RuleBasedStateMachine):
    """Prompts that share a beginning, with windows, are stored, retained, read and dropped."""

    @initialize(quota=st.sampled_from([None, 8 * SIZE]))
    def start(self, quota: int | None) -> None:
        self.store, self.space, self.now = store_of(20, quota=quota), full_and_window(), 0

    def chain(self, prompt: int, chunks: int) -> list[int]:
        return [*range(2), *range(10 + 10 * prompt, 20 + 10 * prompt)][:chunks]

    @rule(
        prompt=st.integers(0, 2),
        chunks=st.integers(1, 5),
        tenant=st.integers(0, 2),
        eviction_class=st.sampled_from(EvictionClass),
        window_first=st.booleans(),
    )
    def put(
        self,
        prompt: int,
        chunks: int,
        tenant: int,
        eviction_class: EvictionClass,
        window_first: bool,
    ) -> None:
        """Store a prompt. Nothing that is retained makes room for it."""
        before = self.retained()
        chain = self.chain(prompt, chunks)
        for is_window in (window_first, not window_first):
            if is_window:
                put(self.store, self.space, chain[-1:], group=1, tenant=tenant)
            else:
                claims = {"tenant": tenant, "eviction_class": eviction_class}
                put(self.store, self.space, chain, **claims)
        assert before <= self.retained()
        assert not self.store.retained_evicted

    @rule(
        prompt=st.integers(0, 2),
        chunks=st.integers(1, 5),
        tenant=st.integers(0, 2),
        ticks=st.integers(1, 5),
    )
    def retain(self, prompt: int, chunks: int, tenant: int, ticks: int) -> None:
        before = self.retained()
        for number in self.chain(prompt, chunks):
            self.store.retention.retain_chunk(self.space, key(number), tenant, self.now + ticks)
        assert before <= self.retained()

    @rule(prompt=st.integers(0, 2), chunks=st.integers(1, 5))
    def end(self, prompt: int, chunks: int) -> None:
        for number in self.chain(prompt, chunks):
            self.store.retention.end_chunk(self.space, key(number))

    @rule(ticks=st.integers(0, 3))
    def expire(self, ticks: int) -> None:
        """What is due ends with few steps a chunk, unless another needs it. Nothing else does."""
        self.now += ticks
        chunks = [*self.space.retained.values()]
        due = [chunk for chunk in chunks if chunk.until <= self.now]
        steps = self.store.retention.expire(self.now, 1000)
        assert steps <= 4 * len(chunks) + 64
        assert all(chunk.followers for chunk in due if chunk.is_remembered())
        assert all(chunk.is_remembered() for chunk in chunks if chunk not in due)

    @rule(prompt=st.integers(0, 2), chunks=st.integers(1, 5))
    def read(self, prompt: int, chunks: int) -> None:
        entries = map(self.space.entries.get, map(key, self.chain(prompt, chunks)))
        slots = [slot for entry in entries if entry for slot in entry.slots if slot is not None]
        self.store.pin(slots)
        self.store.unpin(slots)

    @precondition(lambda self: self.space.entries)
    @rule(pick=st.integers(0, 99))
    def drop(self, pick: int) -> None:
        slots = [*self.space.slots_by_chunk()]
        self.store.drop(slots[pick % len(slots)])

    def retained(self) -> set[Slot]:
        return {slot for slot in self.space.slots_by_chunk() if slot.is_retained}

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "store"):
            check_store(self.store)
            for slot in self.retained():
                assert slot.entry is not None
                parent = slot.entry.parent
                if slot.is_prefix and parent is not None and parent.prefixes:
                    assert parent.slots[0] in self.retained(), "it stays, and is not counted"


RetentionMachine.TestCase.settings = settings(max_examples=examples(60), stateful_step_count=40)
TestRetention = RetentionMachine.TestCase
