"""The request state machine as a table."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from hybridkv.connector.scheduler.request_states import (
    TRANSITIONS,
    RequestAction,
    RequestEvent,
    RequestState,
    advance,
)


def test_an_event_that_the_table_does_not_name_changes_nothing() -> None:
    for state, event in itertools.product(RequestState, RequestEvent):
        step = advance(state, event)
        if (state, event) not in TRANSITIONS:
            assert step == (state, ())


def test_done_is_final_and_reached_from_every_state_by_finishing() -> None:
    for state in RequestState:
        assert advance(RequestState.DONE, RequestEvent.FINISHED) == (RequestState.DONE, ())
        after = advance(state, RequestEvent.FINISHED).state
        if state in (RequestState.LOADING, RequestState.WAITING_FOR_LOAD):
            assert after is RequestState.DRAINING
        elif state is not RequestState.DRAINING:
            assert after is RequestState.DONE


@given(st.lists(st.sampled_from(RequestEvent)))
def test_a_lease_is_always_let_go(events: list[RequestEvent]) -> None:
    """After FINISHED, with no load in flight, the lease is released and the request forgotten."""
    state, leased, finished = RequestState.PREFETCHING, True, False
    forgotten = False
    for event in events:
        finished = finished or event is RequestEvent.FINISHED
        state, actions = advance(state, event)
        leased = (
            leased or (event is RequestEvent.RESUMED and state is RequestState.PREFETCHING)
        ) and RequestAction.RELEASE_LEASE not in actions
        forgotten = forgotten or RequestAction.FORGET in actions
        if state in (RequestState.READY, RequestState.BYPASS, RequestState.DONE):
            assert not leased
        assert forgotten == (state is RequestState.DONE)
    if finished:
        assert state in (RequestState.DRAINING, RequestState.DONE)


@given(st.lists(st.sampled_from(RequestEvent)))
def test_a_failed_request_is_never_offered_again(events: list[RequestEvent]) -> None:
    """A connector that offers a hit again after a failure makes vLLM loop for ever."""
    state = advance(RequestState.LOADING, RequestEvent.FAILED).state
    for event in events:
        state = advance(state, event).state
        assert state in (RequestState.BYPASS, RequestState.DONE)
