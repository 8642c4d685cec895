"""The request state machine as a table."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from hybridkv.core.requests import TRANSITIONS, Action, Event, State, advance


def test_an_event_that_the_table_does_not_name_changes_nothing() -> None:
    for state, event in itertools.product(State, Event):
        step = advance(state, event)
        if (state, event) not in TRANSITIONS:
            assert step == (state, ())


def test_done_is_final_and_reached_from_every_state_by_finishing() -> None:
    for state in State:
        assert advance(State.DONE, Event.FINISHED) == (State.DONE, ())
        after = advance(state, Event.FINISHED).state
        if state in (State.LOADING, State.WAITING_FOR_LOAD):
            assert after is State.DRAINING
        elif state is not State.DRAINING:
            assert after is State.DONE


@given(st.lists(st.sampled_from(Event)))
def test_a_lease_is_always_let_go(events: list[Event]) -> None:
    """Once FINISHED came and no load is in flight, the lease was released and the request forgotten."""
    state, leased, finished = State.PREFETCHING, True, False
    forgotten = False
    for event in events:
        finished = finished or event is Event.FINISHED
        state, actions = advance(state, event)
        leased = (
            leased or (event is Event.RESUMED and state is State.PREFETCHING)
        ) and Action.RELEASE_LEASE not in actions
        forgotten = forgotten or Action.FORGET in actions
        if state in (State.READY, State.BYPASS, State.DONE):
            assert not leased
        assert forgotten == (state is State.DONE)
    if finished:
        assert state in (State.DRAINING, State.DONE)


@given(st.lists(st.sampled_from(Event)))
def test_a_failed_request_is_never_offered_again(events: list[Event]) -> None:
    """A connector that offers a hit again after a failure makes vLLM loop for ever."""
    state = advance(State.LOADING, Event.FAILED).state
    for event in events:
        state = advance(state, event).state
        assert state in (State.BYPASS, State.DONE)
