"""The story of a lookup that waits, over tiers whose jobs and answers are lists."""

import pytest

from hybridkv.core.coverage import object_shapes, whole_hit
from hybridkv.core.keys import HASH_BYTES
from hybridkv.core.speed import Speed
from hybridkv.core.tier_urls import parse_tier
from hybridkv.shm.slots import slot_bytes
from hybridkv.store.index import Namespace, NewObject, Slot
from hybridkv.store.store import Store
from hybridkv.tiers.contract import DamagedError, MissingError, TierError
from hybridkv.tiers.health import JOB_SECONDS, TierState
from hybridkv.tiers.jobs import LIMITS, JobKind, JobOutcome, TierJob
from hybridkv.tiers.object_search import LookupRequest, ObjectSearch
from hybridkv.tiers.promises import Promises
from hybridkv.tiers.promotion import Promotion, Shortfall, ShortfallKind, Wait, WaitingLookup
from hybridkv.tiers.shared_reads import READING_SHARE
from tests.layouts import LAYOUTS
from tests.unit.daemon.dict_tier import DictTier

GEOMETRY = LAYOUTS["qwen3"]  # Its chunks have one object.
(SHAPE,) = object_shapes(GEOMETRY, GEOMETRY.groups[0])
SIZE = slot_bytes(*SHAPE)
DEADLINE = 1e6


class KnowingTier(DictTier):
    """A tier that says of each object alike: it is there, it is not, or None: ask for it."""

    def __init__(self, is_there: bool | None) -> None:
        super().__init__({}, is_remote=True)
        self.is_there = is_there

    def peek(self, key: bytes) -> bool | None:
        return self.is_there


class Node:
    """RAM and its tiers. What their threads would do is in `jobs`, and said by `answer`."""

    def __init__(self, *tiers: bool | None, arena_bytes: int = 64 * SIZE) -> None:
        self.jobs: list[TierJob] = []
        self.store = Store(memoryview(bytearray(arena_bytes)))
        self.store.grow_arena(arena_bytes)
        self.tiers = [
            TierState(
                number,
                f"tier{number}",
                KnowingTier(is_there),
                parse_tier("sim://0", "tier"),
                self.jobs.append,
            )
            for number, is_there in enumerate(tiers)
        ]
        for tier in self.tiers:
            tier.is_open = True
        self.promotion = Promotion(self.store, self.tiers, Promises())
        gids = tuple(group.gid for group in GEOMETRY.groups)
        self.namespace = Namespace(bytes(HASH_BYTES), gids, ())

    def lookup(self, *numbers: int, lease: int = 7) -> WaitingLookup:
        """A lookup of chunks, of which RAM has none."""
        request = LookupRequest(
            connection_id=1,
            id=1,
            lease=lease,
            namespace=self.namespace,
            geometry=GEOMETRY,
            hashes=b"".join(bytes([number]) * HASH_BYTES for number in numbers),
            asked_at=0.0,
            deadline=DEADLINE,
            tokens_per_second=0,
            resident=whole_hit(GEOMETRY, 0),
        )
        masks = [bytes(request.chunks) for _ in GEOMETRY.groups]
        return WaitingLookup(request, ObjectSearch(request, masks))

    def waiting(self, *numbers: int, lease: int = 7) -> WaitingLookup:
        """A lookup of chunks that waits."""
        lookup = self.lookup(*numbers, lease=lease)
        assert self.promotion.begin(lookup, 0.0)
        return lookup

    def answer(self, *results: bool | TierError | None, now: float = 0.1) -> list[WaitingLookup]:
        """End the oldest job, with a result for each item. Returns the lookups that end by it."""
        job = self.jobs.pop(0)
        assert len(job.items) == len(results)
        if job.kind is JobKind.FIND:
            outcome = JobOutcome(found=[result is True for result in results])
        else:
            errors = [result if isinstance(result, TierError) else None for result in results]
            outcome = JobOutcome(errors=errors, tenants=[0] * len(errors))
        self.tiers[job.tier].on_job_done(job, outcome, now)
        if job.kind is JobKind.FIND:
            self.promotion.on_find_done(job, outcome)
        else:
            self.promotion.on_read_done(job, outcome, now)
        return [*self.promotion.tick(now)]

    def add_object(self, number: int) -> Slot:
        """Store a chunk in RAM."""
        (slot,) = self.store.grant(SHAPE, 1)
        assert self.store.commit(slot, self.namespace, NewObject(0, bytes([number]) * HASH_BYTES))
        return slot

    def fill(self) -> list[Slot]:
        """Fill RAM with objects that nobody looks up, and pin them."""
        others = range(100, 100 + len(self.store) // SIZE)
        slots = [self.add_object(number) for number in others]
        self.store.hold(slots)
        return slots

    def sizes(self) -> list[int]:
        """The number of objects of each job that runs."""
        return [len(job.items) for job in self.jobs]


def kinds(lookup: WaitingLookup) -> list[ShortfallKind]:
    return [shortfall.kind for shortfall in lookup.shortfalls]


def test_a_tier_is_asked_and_then_what_it_has_is_read() -> None:
    node = Node(None)
    lookup = node.waiting(1, 2)
    assert [*lookup.story] == [Wait.ANSWERS]
    assert node.answer(True, True) == []
    assert [*lookup.story] == [Wait.ANSWERS, Wait.OBJECTS]
    assert node.answer(None, None) == [lookup]
    assert len(lookup.held) == 2
    assert lookup.origins == {0: "tier0", 1: "tier0"}
    assert len(node.promotion) == 0
    assert not lookup.shortfalls


def test_what_a_tier_knows_at_once_is_read_without_a_question() -> None:
    node = Node(True)
    lookup = node.waiting(1, 2)
    assert [*lookup.story] == [Wait.OBJECTS]
    assert node.sizes() == [2]


def test_where_no_tier_has_anything_the_story_ends_after_the_answers() -> None:
    node = Node(None)
    lookup = node.waiting(1, 2)
    assert node.answer(False, False) == [lookup]
    assert [*lookup.story] == [Wait.ANSWERS]
    assert not lookup.held


def test_one_job_reads_no_more_than_its_tier_should_move() -> None:
    for size_bytes, objects in ((1, 1), (2 * SIZE, 2)):
        node = Node(True)
        node.tiers[0].speed = Speed(size_bytes / JOB_SECONDS)
        node.waiting(1, 2, 3, 4)
        assert node.sizes()[0] == objects, "one object may be larger"


def test_no_tier_is_read_into_more_than_its_share_of_ram() -> None:
    node = Node(True, arena_bytes=READING_SHARE * 2 * SIZE)
    lookup = node.waiting(1, 2, 3)
    assert node.sizes() == [2]
    assert [*lookup.story] == [Wait.TIER]
    assert node.answer(None, None) == []
    assert [*lookup.story] == [Wait.TIER, Wait.OBJECTS]
    assert node.sizes() == [1]


def test_a_tier_without_a_thread_is_waited_for() -> None:
    node = Node(True)
    node.tiers[0].speed = Speed(1.0)  # Each object is a job of its own.
    lookup = node.waiting(*range(1, LIMITS[JobKind.READ] + 2))
    assert node.sizes() == [1] * LIMITS[JobKind.READ]
    assert [*lookup.story] == [Wait.TIER]
    assert node.answer(None, now=0.0) == []
    assert [*lookup.story] == [Wait.TIER, Wait.OBJECTS]


def test_while_the_arena_grows_a_slot_is_waited_for() -> None:
    node = Node(True)
    node.store.bound_bytes *= 2
    pinned = node.fill()
    lookup = node.waiting(1)
    assert [*lookup.story] == [Wait.SLOT]
    node.store.unpin(pinned)
    node.store.bound_bytes //= 2
    assert [*node.promotion.tick(0.1)] == []
    assert [*lookup.story] == [Wait.SLOT, Wait.OBJECTS]
    assert node.answer(None) == [lookup]


def test_where_the_next_object_has_no_slot_a_hit_in_the_room_of_what_is_held_is_chosen() -> None:
    node = Node(True)
    node.fill()
    lookup = node.lookup(1, 2)
    assert not node.promotion.begin(lookup, 0.0)
    assert lookup.hits == (), "nothing is held, so nothing has room"
    assert kinds(lookup) == [ShortfallKind.NO_ROOM]
    assert not node.jobs


@pytest.mark.parametrize("who_leaves", [None, 7, 8], ids=["nobody", "the first", "the second"])
def test_what_two_lookups_need_is_read_once_and_both_have_it(who_leaves: int | None) -> None:
    node = Node(True)
    lookups = [node.waiting(1, 2, lease=7), node.waiting(1, 2, lease=8)]
    assert node.sizes() == [2]
    if who_leaves is not None:
        (left,) = node.promotion.cancel(1, who_leaves)
        lookups.remove(left)
    assert node.answer(None, None) == lookups
    assert all(len(lookup.held) == 2 for lookup in lookups)
    assert sum(slot.pins for slot in node.store.slots.values()) == 2 * len(lookups)


def test_what_is_in_ram_by_now_is_not_read_whatever_its_tier_does() -> None:
    node = Node(True)
    node.tiers[0].speed = Speed(1.0)
    last = LIMITS[JobKind.READ] + 1
    lookup = node.waiting(*range(1, last + 1))
    slot = node.add_object(last)
    node.jobs[0].is_late = True
    assert node.tiers[0].is_hung
    assert [*node.promotion.tick(0.1)] == []
    assert lookup.held == [slot]
    assert not lookup.needs
    assert not lookup.shortfalls


@pytest.mark.parametrize("is_hung", [False, True], ids=["shut", "hung"])
def test_nothing_more_is_read_from_a_tier_that_does_not_answer(is_hung: bool) -> None:
    node = Node(True)
    node.tiers[0].speed = Speed(1.0)
    lookup = node.waiting(*range(1, LIMITS[JobKind.READ] + 2))
    node.tiers[0].is_open, node.jobs[0].is_late = is_hung, is_hung
    assert [*node.promotion.tick(0.1)] == []
    assert kinds(lookup) == [ShortfallKind.SILENT]
    assert lookup.reads == LIMITS[JobKind.READ]
    assert not lookup.needs


@pytest.mark.parametrize("is_hung", [False, True], ids=["shut", "hung"])
def test_what_is_being_read_is_waited_for_unless_its_tier_hangs(is_hung: bool) -> None:
    """Whether the tier may be asked for more does not matter, nor that another tier has it too."""
    node = Node(True, True)
    node.waiting(1, lease=7)
    node.tiers[0].is_open, node.jobs[0].is_late = is_hung, is_hung
    second = node.lookup(1, lease=8)
    assert node.promotion.begin(second, 0.1) == (not is_hung)
    assert kinds(second) == [ShortfallKind.SILENT] * is_hung
    assert node.sizes() == [1], "it is read once"


def test_what_a_faster_tier_lost_is_read_from_the_next_one() -> None:
    node = Node(True, True)
    lookup = node.waiting(1)
    assert node.answer(MissingError("it is not there")) == []
    assert [job.tier for job in node.jobs] == [1]
    assert node.answer(None) == [lookup]
    assert lookup.origins == {0: "tier1"}
    assert not lookup.shortfalls


def test_what_was_to_be_read_after_a_damaged_record_is_suspected_too() -> None:
    node = Node(True)
    node.tiers[0].speed = Speed(1.0)
    lookup = node.waiting(*range(1, LIMITS[JobKind.READ] + 3))
    keys = {need.key for need in lookup.needs} | {node.jobs[0].items[0].key}
    assert node.answer(DamagedError("its header is not sound")) == []
    assert node.tiers[0].suspects == keys
    assert kinds(lookup) == [ShortfallKind.FAILED]
    assert [job.kind for job in node.jobs].count(JobKind.DISCARD) == 1
    assert not lookup.needs


@pytest.mark.parametrize("is_complete", [False, True])
def test_at_its_deadline_a_lookup_ends_and_falls_short_only_if_more_could_come(
    is_complete: bool,
) -> None:
    node = Node(True)
    lookup = node.waiting(1)
    if is_complete:
        assert node.answer(None, now=DEADLINE) == [lookup]
    else:
        assert [*node.promotion.tick(DEADLINE)] == [lookup]
    late = [] if is_complete else [ShortfallKind.NOT_READ_IN_TIME]
    assert kinds(lookup) == late
    assert [*node.promotion.tick(2 * DEADLINE)] == [], "it ends once"


def test_a_tier_that_was_read_too_late_is_measured_all_the_same() -> None:
    node = Node(True)
    node.waiting(1)
    node.promotion.cancel(1)
    assert not node.tiers[0].speed.per_second
    assert node.answer(None, now=0.5) == []
    assert node.tiers[0].speed == Speed(SIZE / 0.5, 0.5)


def test_a_lookup_waits_only_where_a_tier_can_be_asked_and_not_too_many_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    node = Node(True)
    monkeypatch.setattr("hybridkv.tiers.promotion.WAITING_MAX", 1)
    node.waiting(1)
    crowded = node.lookup(2, lease=8)
    assert not node.promotion.begin(crowded, 0.0)
    assert crowded.why == "too many lookups wait"
    node.tiers[0].is_open = False
    away = node.lookup(3, lease=9)
    assert not node.promotion.begin(away, 0.0)
    assert away.why == "no tier can be asked at the moment"
    assert node.promotion.shortfalls == {
        ShortfallKind.CROWDED.reason: 1,
        ShortfallKind.TIERS_AWAY.reason: 1,
    }


def test_a_kind_of_reason_counts_once_and_the_last_reason_is_the_answer() -> None:
    node = Node(True)
    lookup = node.waiting(1)
    assert lookup.why == ""
    lookup.add_shortfall(ShortfallKind.CROWDED)
    lookup.add_shortfall(ShortfallKind.SILENT, tier="disk")
    lookup.add_shortfall(ShortfallKind.SILENT, tier="s3")
    assert lookup.shortfalls[-1] == Shortfall(ShortfallKind.SILENT, {"tier": "s3"})
    assert lookup.why == "s3 does not answer"
    node.promotion.cancel(1)
    assert node.promotion.shortfalls == {
        ShortfallKind.CROWDED.reason: 1,
        ShortfallKind.SILENT.reason: 1,
    }
