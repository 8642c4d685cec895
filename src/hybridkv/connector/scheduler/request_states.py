"""The life of a request inside the connector: one table, events in, actions out.

    PREFETCHING --allocated--> WAITING_FOR_LOAD --planned--> LOADING --loaded--> READY
         |  lookup sent on arrival; "no answer yet" = ask again               |
         +-- settled: miss, deadline passed, nothing to load --> READY        |
         any state --failed--> BYPASS: never offered to the cache again <-----+
         finished --> DONE, but while a load waits or runs:
             --finished--> DRAINING --loaded/failed--> DONE

An event that the table does not list for a state changes nothing and asks for nothing.
"""

from enum import StrEnum
from typing import NamedTuple


class RequestState(StrEnum):
    """Where a request stands."""

    PREFETCHING = "prefetching"
    WAITING_FOR_LOAD = "waiting_for_load"
    LOADING = "loading"
    READY = "ready"
    BYPASS = "bypass"
    DRAINING = "draining"
    DONE = "done"


class RequestEvent(StrEnum):
    """What the engine or the workers report."""

    SETTLED = "settled"
    """The answer is no: a miss, a passed deadline, or nothing beyond the local hit."""
    ALLOCATED = "allocated"
    """The engine has blocks for an external hit."""
    PLANNED = "planned"
    """The load plan left for the workers."""
    LOADED = "loaded"
    FAILED = "failed"
    FINISHED = "finished"
    """The request ended; its blocks are the engine's again, unless a load is in flight."""
    RESUMED = "resumed"
    """The engine asks again about a request that it preempted."""


class RequestAction(StrEnum):
    """What must be done after a transition."""

    RELEASE_LEASE = "release_lease"
    FORGET = "forget"


class Transition(NamedTuple):
    """The next state and what must be done."""

    state: RequestState
    actions: tuple[RequestAction, ...] = ()


_RELEASE = (RequestAction.RELEASE_LEASE,)
_END = (RequestAction.RELEASE_LEASE, RequestAction.FORGET)

TRANSITIONS: dict[tuple[RequestState, RequestEvent], Transition] = {
    (RequestState.PREFETCHING, RequestEvent.SETTLED): Transition(RequestState.READY, _RELEASE),
    (RequestState.PREFETCHING, RequestEvent.ALLOCATED): Transition(RequestState.WAITING_FOR_LOAD),
    (RequestState.PREFETCHING, RequestEvent.FAILED): Transition(RequestState.BYPASS, _RELEASE),
    (RequestState.PREFETCHING, RequestEvent.FINISHED): Transition(RequestState.DONE, _END),
    (RequestState.WAITING_FOR_LOAD, RequestEvent.PLANNED): Transition(RequestState.LOADING),
    (RequestState.WAITING_FOR_LOAD, RequestEvent.FAILED): Transition(RequestState.BYPASS, _RELEASE),
    # The engine holds the request until the workers report it, whatever happens to the lease.
    (RequestState.WAITING_FOR_LOAD, RequestEvent.FINISHED): Transition(RequestState.DRAINING),
    (RequestState.LOADING, RequestEvent.LOADED): Transition(RequestState.READY, _RELEASE),
    (RequestState.LOADING, RequestEvent.FAILED): Transition(RequestState.BYPASS, _RELEASE),
    (RequestState.LOADING, RequestEvent.FINISHED): Transition(RequestState.DRAINING),
    (RequestState.DRAINING, RequestEvent.LOADED): Transition(RequestState.DONE, _END),
    (RequestState.DRAINING, RequestEvent.FAILED): Transition(RequestState.DONE, _END),
    (RequestState.READY, RequestEvent.RESUMED): Transition(RequestState.PREFETCHING),
    (RequestState.READY, RequestEvent.FINISHED): Transition(RequestState.DONE, _END),
    (RequestState.BYPASS, RequestEvent.FINISHED): Transition(RequestState.DONE, _END),
}


def advance(state: RequestState, event: RequestEvent) -> Transition:
    """The transition for `event` in `state`; without one, the same state and no action."""
    return TRANSITIONS.get((state, event), Transition(state))
