"""The life of a request: states by a table, and what a transition does to its lease."""

import itertools
from collections import Counter
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from hybridkv.connector.scheduler.requests import (
    TRANSITIONS,
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
            is_connected=True, send=lambda message, now: self.sent.append(message)
        )
        meter: Any = None
        room = BlockRoom((), 1000, 2048)
        self.requests = RequestRegistry(LAYOUTS["qwen3"], session, room, meter, Counter())
        request = SimpleNamespace(request_id="r", num_prompt_tokens=1)
        self.tracked = TrackedRequest(request, state=state)
        self.requests.by_id["r"] = self.tracked
        room.hold("r", 1)

    def then(self, event: RequestEvent) -> RequestState:
        """The state after an event."""
        self.requests.advance(self.tracked, event, 0.0)
        return self.tracked.state


def test_an_event_that_the_table_does_not_name_changes_nothing() -> None:
    for state, event in itertools.product(RequestState, RequestEvent):
        if (state, event) not in TRANSITIONS:
            one = Tracking(state)
            lease = one.requests.open_lease(one.tracked)
            assert one.then(event) is state
            assert one.tracked.lookup.lease == lease
            assert not one.sent
            assert one.requests.by_id == {"r": one.tracked}
            assert len(one.requests.room) == 1


def test_done_is_final_and_reached_from_every_state_by_finishing() -> None:
    for state in RequestState:
        assert Tracking(RequestState.DONE).then(RequestEvent.FINISHED) is RequestState.DONE
        after = Tracking(state).then(RequestEvent.FINISHED)
        if state in (RequestState.LOADING, RequestState.WAITING_FOR_LOAD):
            assert after is RequestState.DRAINING
        elif state is not RequestState.DRAINING:
            assert after is RequestState.DONE


@given(st.lists(st.sampled_from(RequestEvent)))
def test_a_lease_is_always_let_go(events: list[RequestEvent]) -> None:
    """After FINISHED, with no load in flight, the lease is released and the request forgotten."""
    one = Tracking()
    opened = [one.requests.open_lease(one.tracked)]
    for event in events:
        before = one.tracked.state
        state = one.then(event)
        if state is RequestState.PREFETCHING and before is not state:
            opened.append(one.requests.open_lease(one.tracked))
        is_held = state not in (RequestState.READY, RequestState.BYPASS, RequestState.DONE)
        assert one.tracked.lookup.lease == (opened[-1] if is_held else 0)
        assert one.requests.by_lease == ({opened[-1]: one.tracked} if is_held else {})
        released = [sent.lease for sent in one.sent if isinstance(sent, Release)]
        assert released == opened[: len(opened) - is_held], "each once"
        is_done = state is RequestState.DONE
        assert one.requests.by_id == ({} if is_done else {"r": one.tracked})
        assert len(one.requests.room) == (not is_done)
        told = [sent.request_id for sent in one.sent if isinstance(sent, ReportRequest)]
        assert told == ["r"] * is_done
    if RequestEvent.FINISHED in events:
        assert one.tracked.state in (RequestState.DRAINING, RequestState.DONE)


@given(st.lists(st.sampled_from(RequestEvent)))
def test_a_failed_request_is_never_offered_again(events: list[RequestEvent]) -> None:
    """A connector that offers a hit again after a failure makes vLLM loop for ever."""
    one = Tracking(RequestState.LOADING)
    one.then(RequestEvent.FAILED)
    for event in events:
        assert one.then(event) in (RequestState.BYPASS, RequestState.DONE)
