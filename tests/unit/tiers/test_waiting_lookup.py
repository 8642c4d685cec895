"""The states of a lookup that waits for tiers, and what is done about the next object it needs."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from hybridkv.core.coverage import whole_hit
from hybridkv.core.speed import Speed
from hybridkv.store.index import Namespace
from hybridkv.store.store import Store
from hybridkv.tiers.load_or_compute import Shortfall, ShortfallKind
from hybridkv.tiers.object_search import LookupRequest, ObjectSearch
from hybridkv.tiers.promotion import Promotion
from hybridkv.tiers.waiting_lookup import (
    TRANSITIONS,
    Ask,
    Hold,
    LookupEvent,
    LookupFacts,
    LookupState,
    Read,
    ReadFacts,
    ReadStep,
    TierFacts,
    WaitingLookup,
)
from tests.layouts import LAYOUTS

ALL_FACTS = [ReadFacts._make(values) for values in product((False, True), repeat=5)]
ENDS = (LookupEvent.COMPLETED, LookupEvent.OVERDUE, LookupEvent.CANCELLED)


def lookup_in(state: LookupState) -> WaitingLookup:
    geometry = LAYOUTS["qwen3"]
    namespace = Namespace(bytes(32), tuple(group.gid for group in geometry.groups), ())
    request = LookupRequest(
        connection_id=1,
        id=1,
        lease=7,
        namespace=namespace,
        geometry=geometry,
        hashes=bytes(64),
        asked_at=0.0,
        deadline=1.0,
        tokens_per_second=0,
        resident=whole_hit(geometry, 0),
    )
    return WaitingLookup(request, ObjectSearch(request, []), state=state)


@pytest.mark.parametrize(("state", "event"), list(product(LookupState, LookupEvent)))
def test_an_event_leads_to_the_state_of_the_table_or_changes_nothing(
    state: LookupState, event: LookupEvent
) -> None:
    lookup = lookup_in(state)
    assert lookup.transition(event) == ((state, event) in TRANSITIONS)
    assert lookup.state is TRANSITIONS.get((state, event), state)


def test_a_lookup_that_has_ended_never_waits_again() -> None:
    """Only threads of tiers may still come back for it."""
    ended = {event for state, event in TRANSITIONS if state is LookupState.ENDED}
    assert ended == {LookupEvent.FIND_DONE, LookupEvent.READ_DONE}
    assert all(TRANSITIONS[LookupState.ENDED, event] is LookupState.ENDED for event in ended)
    for state, event in product((LookupState.FINDING, LookupState.READING), ENDS):
        is_planned = event is not LookupEvent.COMPLETED or state is LookupState.READING
        assert TRANSITIONS.get((state, event)) is (LookupState.ENDED if is_planned else None)


def test_an_event_that_the_state_does_not_have_is_counted() -> None:
    promotion = Promotion(Store(memoryview(bytearray(4096))), [])
    lookup = lookup_in(LookupState.ENDED)
    promotion.lookups[lookup.request.key] = lookup
    promotion.cancel(1)
    assert promotion.counters == {("lookup_events_ignored", "ended_cancelled"): 1}
    assert lookup.state is LookupState.ENDED
    assert len(promotion) == 0


@pytest.mark.parametrize("facts", ALL_FACTS, ids=str)
def test_what_is_done_about_the_next_object(facts: ReadFacts) -> None:
    match facts.step():
        case ReadStep.HOLD:
            assert facts.is_in_ram
            return
        case ReadStep.GIVE_UP:
            is_silent = not facts.is_being_read and not facts.may_read_tier
            assert facts.is_tier_hung or is_silent
        case ReadStep.JOIN:
            assert facts.is_being_read
            assert not facts.is_tier_hung
        case ReadStep.START:
            assert facts.may_read_tier
            assert not facts.is_tier_busy
            assert not facts.is_tier_hung
            assert not facts.is_being_read, "an object is read once"
        case ReadStep.WAIT:
            assert facts.may_read_tier
            assert facts.is_tier_busy
            assert not facts.is_being_read
    assert not facts.is_in_ram, "what is in RAM is not read, whatever its tier does"


def test_a_kind_of_reason_counts_once_and_the_last_reason_is_the_answer() -> None:
    promotion = Promotion(Store(memoryview(bytearray(4096))), [])
    lookup = lookup_in(LookupState.FINDING)
    assert lookup.why == ""
    lookup.shortfalls += [
        Shortfall(ShortfallKind.CROWDED, {}),
        Shortfall(ShortfallKind.SILENT, {"tier": "disk"}),
        Shortfall(ShortfallKind.SILENT, {"tier": "s3"}),
    ]
    assert lookup.why == "s3 does not answer"
    promotion.lookups[lookup.request.key] = lookup
    promotion.cancel(1)
    assert promotion.counters == {ShortfallKind.CROWDED.counter: 1, ShortfallKind.SILENT.counter: 1}


def test_a_lookup_does_not_wait_where_no_tier_can_be_asked() -> None:
    promotion = Promotion(Store(memoryview(bytearray(4096))), [])
    lookup = lookup_in(LookupState.FINDING)
    assert not promotion.begin(lookup, now=0.0)
    assert promotion.counters == {ShortfallKind.TIERS_AWAY.counter: 1}
    assert lookup.why == "no tier can be asked at the moment"
    assert len(promotion) == 0


class FakeTier:
    """A tier that knows at once that it has everything, or has to be asked."""

    name = "disk"
    number = 0
    speed = Speed(1e9)

    def __init__(self, is_there: bool | None = True) -> None:
        self._is_there = is_there

    def peek(self, key: bytes) -> bool | None:
        return self._is_there


READY = TierFacts(
    is_readable=True, is_hung=False, has_thread=True, job_bytes=1 << 40, reading_bytes=0
)
ROOM = 1 << 40


def facts_of(tier: Any, known: TierFacts = READY, room_bytes: int = ROOM) -> LookupFacts:
    return LookupFacts(0.0, {tier: known}, {}, room_bytes=room_bytes, share_bytes=ROOM)


def finding() -> WaitingLookup:
    lookup = lookup_in(LookupState.FINDING)
    masks = [bytes(lookup.request.chunks) for _ in lookup.request.geometry.groups]
    return replace(lookup, search=ObjectSearch(lookup.request, masks))


def test_what_a_tier_knows_at_once_is_planned_and_read_without_a_question() -> None:
    lookup, tier = finding(), FakeTier()
    assert lookup.next_actions(facts_of(tier)) == [Hold([], [])]
    assert lookup.state is LookupState.READING
    (read,) = lookup.next_actions(facts_of(tier))
    assert isinstance(read, Read)
    assert list(read.needs) == list(lookup.needs)
    assert len(read.needs) == 2


def test_a_tier_that_has_to_be_asked_is_asked_before_anything_is_planned() -> None:
    lookup, tier = finding(), FakeTier(None)
    hold, ask = lookup.next_actions(facts_of(tier))
    assert hold == Hold([])
    assert isinstance(ask, Ask)
    assert len(lookup.search.asked) == 2
    lookup.finds = 1
    assert lookup.next_actions(facts_of(tier)) == [], "it waits for the answer"
    lookup.finds = 0
    lookup.next_actions(facts_of(tier))
    assert lookup.is_complete, "no tier has anything"


def test_one_job_reads_no_more_than_its_tier_should_move_and_its_share_has_room_for() -> None:
    lookup, tier = finding(), FakeTier()
    lookup.next_actions(facts_of(tier))
    size = lookup.needs[0].record.size_bytes
    for known, count in (
        (READY._replace(job_bytes=1), 1),  # One object may have more.
        (READY._replace(job_bytes=2 * size), 2),
        (READY._replace(reading_bytes=ROOM - size), 1),
        (READY._replace(reading_bytes=ROOM - 2 * size), 2),
    ):
        (read,) = lookup.next_actions(facts_of(tier, known))
        assert isinstance(read, Read)
        assert len(read.needs) == count, known


@pytest.mark.parametrize(
    "known",
    [READY._replace(has_thread=False), READY._replace(reading_bytes=ROOM)],
    ids=["no thread", "the share is used"],
)
def test_nothing_is_read_from_a_busy_tier(known: TierFacts) -> None:
    lookup, tier = finding(), FakeTier()
    lookup.next_actions(facts_of(tier))
    assert lookup.next_actions(facts_of(tier, known)) == []
    assert not lookup.is_complete, "it waits"


def test_where_the_next_object_has_no_slot_a_hit_in_the_room_of_what_is_held_is_planned() -> None:
    lookup, tier = finding(), FakeTier()
    lookup.next_actions(facts_of(tier))
    assert lookup.hits
    lookup.is_cramped = True
    assert lookup.next_actions(facts_of(tier)) == [Hold([], [])]
    assert lookup.hits == (), "nothing is held, so nothing has room"
    assert lookup.is_complete
    assert [shortfall.kind for shortfall in lookup.shortfalls] == [ShortfallKind.NO_ROOM]
