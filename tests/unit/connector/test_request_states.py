"""The life of a request: states by a table, and what a transition does to its lease."""

import itertools
import logging
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridkv.connector.metrics import transition_ignored
from hybridkv.connector.scheduler.requests import (
    STORY_MAX,
    TRANSITIONS,
    Change,
    RequestEvent,
    RequestRegistry,
    RequestState,
    TrackedRequest,
)
from hybridkv.vllm.block_room import BlockRoom
from hybridkv.wire.messages import Release, ReportRequest
from tests.layouts import LAYOUTS


class Tracking:
    """One request that is tracked, and what the daemon was sent about it."""

    def __init__(self, state: RequestState = RequestState.PREFETCHING) -> None:
        self.sent: list[Any] = []
        session: Any = SimpleNamespace(
            is_connected=True, queue_message=lambda message, now: self.sent.append(message)
        )
        meter: Any = None
        room = BlockRoom((), 1000, 2048)
        self.requests = RequestRegistry(LAYOUTS["qwen3"], session, room, meter, Counter())
        request = SimpleNamespace(request_id="r", num_prompt_tokens=1)
        self.tracked = TrackedRequest(request, state=state)
        self.requests.by_id["r"] = self.tracked
        room.count_load("r", 1)

    def after(self, event: RequestEvent) -> RequestState:
        """Return the state after an event."""
        self.requests.advance(self.tracked, Change(event), 0.0)
        return self.tracked.state

    def open_lease(self) -> int:
        """Give the request another lease, and return its number."""
        lease = self.requests.next_lease()
        lookup = self.tracked.lookup._replace(lease=lease)
        self.requests.advance(self.tracked, Change(lookup=lookup), 0.0)
        return lease


def test_an_event_that_the_table_does_not_name_changes_nothing() -> None:
    for state, event in itertools.product(RequestState, RequestEvent):
        if (state, event) not in TRANSITIONS:
            tracking = Tracking(state)
            lease = tracking.open_lease()
            assert tracking.after(event) is state
            assert tracking.tracked.lookup.lease == lease
            assert not tracking.sent
            assert tracking.requests.by_id == {"r": tracking.tracked}
            assert len(tracking.requests.room) == 1
            assert tracking.requests.counters == {transition_ignored(state, event): 1}


def test_events_of_an_ordinary_life_are_in_the_table() -> None:
    """Otherwise the counter of ignored events would grow with every request."""
    loaded = [RequestEvent.ALLOCATED, RequestEvent.PLANNED, RequestEvent.LOADED]
    # The engine reports blocks without a load when a request runs, also after its load.
    runs = RequestEvent.SETTLED
    for events in (
        [RequestEvent.SETTLED, runs, RequestEvent.FINISHED],
        [*loaded, runs, RequestEvent.RESUMED, RequestEvent.SETTLED, runs, RequestEvent.FINISHED],
        [*loaded[:2], RequestEvent.FAILED, runs, RequestEvent.FINISHED],
        [*loaded[:1], RequestEvent.FINISHED, *loaded[1:]],
        [*loaded[:2], RequestEvent.FINISHED, RequestEvent.FAILED],
    ):
        tracking = Tracking()
        for event in events:
            tracking.after(event)
        assert tracking.tracked.state is RequestState.DONE
        assert not tracking.requests.counters


def test_done_is_final_and_reached_from_every_state_by_finishing() -> None:
    for state in RequestState:
        assert Tracking(RequestState.DONE).after(RequestEvent.FINISHED) is RequestState.DONE
        after = Tracking(state).after(RequestEvent.FINISHED)
        if state in (RequestState.LOADING, RequestState.WAITING_FOR_LOAD):
            assert after is RequestState.DRAINING
        elif state is not RequestState.DRAINING:
            assert after is RequestState.DONE


@given(st.lists(st.sampled_from(RequestEvent)))
def test_a_lease_is_always_let_go(events: list[RequestEvent]) -> None:
    """After FINISHED, with no load in flight, the lease is released and the request forgotten."""
    tracking = Tracking()
    opened = [tracking.open_lease()]
    for event in events:
        before = tracking.tracked.state
        state = tracking.after(event)
        is_renewed = event is RequestEvent.RENEWED
        if state is RequestState.PREFETCHING and (before is not state or is_renewed):
            opened.append(tracking.open_lease())
        is_held = state not in (RequestState.READY, RequestState.BYPASS, RequestState.DONE)
        assert tracking.tracked.lookup.lease == (opened[-1] if is_held else 0)
        assert tracking.requests.by_lease == ({opened[-1]: tracking.tracked} if is_held else {})
        released = [sent.lease for sent in tracking.sent if isinstance(sent, Release)]
        assert released == opened[: len(opened) - is_held], "each once"
        is_done = state is RequestState.DONE
        assert tracking.requests.by_id == ({} if is_done else {"r": tracking.tracked})
        assert len(tracking.requests.room) == (not is_done)
        reports = [sent.request_id for sent in tracking.sent if isinstance(sent, ReportRequest)]
        assert reports == ["r"] * is_done
    if RequestEvent.FINISHED in events:
        assert tracking.tracked.state in (RequestState.DRAINING, RequestState.DONE)


@given(st.lists(st.sampled_from(RequestEvent)))
def test_a_failed_request_is_never_offered_again(events: list[RequestEvent]) -> None:
    """A connector that offers a hit again after a failure makes vLLM loop for ever."""
    tracking = Tracking(RequestState.LOADING)
    tracking.after(RequestEvent.FAILED)
    for event in events:
        assert tracking.after(event) in (RequestState.BYPASS, RequestState.DONE)


def test_a_request_has_a_story(caplog: pytest.LogCaptureFixture) -> None:
    """The first event of a kind that its state does not have is logged with it."""
    tracking = Tracking()
    for event in (RequestEvent.ALLOCATED, RequestEvent.PLANNED):
        tracking.after(event)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            tracking.after(RequestEvent.ALLOCATED)
    assert tracking.requests.story("r") == [RequestEvent.ALLOCATED, RequestEvent.PLANNED]
    assert caplog.messages == [
        "hybridkv: r: event allocated is ignored in state loading, after: allocated, planned"
    ]
    for _ in range(STORY_MAX):
        tracking.after(RequestEvent.LOADED)
        tracking.after(RequestEvent.RESUMED)
        tracking.after(RequestEvent.SETTLED)
    assert len(tracking.requests.story("r")) == STORY_MAX, "the last events are kept"
    assert tracking.requests.story("another") == []
