"""The states of a lookup that waits for tiers, and what is done about the next object it needs."""

from itertools import product

import pytest

from hybridkv.core.coverage import whole_hit
from hybridkv.store.index import Namespace
from hybridkv.store.store import Store
from hybridkv.tiers.load_or_compute import Shortfall, ShortfallKind
from hybridkv.tiers.object_search import LookupRequest, ObjectSearch
from hybridkv.tiers.promotion import Promotion
from hybridkv.tiers.waiting_lookup import (
    TRANSITIONS,
    LookupEvent,
    LookupState,
    ReadAction,
    ReadFacts,
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
    match facts.action():
        case ReadAction.HOLD:
            assert facts.is_in_ram
            return
        case ReadAction.GIVE_UP:
            is_silent = not facts.is_being_read and not facts.may_read_tier
            assert facts.is_tier_hung or is_silent
        case ReadAction.JOIN:
            assert facts.is_being_read
            assert not facts.is_tier_hung
        case ReadAction.START:
            assert facts.may_read_tier
            assert not facts.is_tier_busy
            assert not facts.is_tier_hung
            assert not facts.is_being_read, "an object is read once"
        case ReadAction.WAIT:
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
