"""The life of a request inside the connector: one table, events in, instructions out (DESIGN section 6).

    PREFETCHING --allocated--> WAITING_FOR_LOAD --planned--> LOADING --loaded--> READY
         |  lookup sent on arrival; "no answer yet" = ask again               |
         +-- settled: miss, deadline passed, nothing to load --> READY        |
         any state --failed--> BYPASS: never offered to the cache again <-----+
         any state but LOADING --finished--> DONE;  LOADING --finished--> DRAINING --loaded/failed--> DONE

An event that the table does not name changes nothing and asks for nothing.
"""

from enum import StrEnum
from typing import NamedTuple


class State(StrEnum):
    """Where a request stands."""

    PREFETCHING = "prefetching"
    WAITING_FOR_LOAD = "waiting_for_load"
    LOADING = "loading"
    READY = "ready"
    BYPASS = "bypass"
    DRAINING = "draining"
    DONE = "done"


class Event(StrEnum):
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
    """Finished or aborted; its blocks are the engine's again, unless a load is in flight."""
    RESUMED = "resumed"
    """Preempted earlier and asked about again."""


class Action(StrEnum):
    """What must be done after a transition."""

    RELEASE_LEASE = "release_lease"
    FORGET = "forget"


class Step(NamedTuple):
    """The next state and what must be done."""

    state: State
    actions: tuple[Action, ...] = ()


_RELEASE = (Action.RELEASE_LEASE,)
_END = (Action.RELEASE_LEASE, Action.FORGET)

TRANSITIONS: dict[tuple[State, Event], Step] = {
    (State.PREFETCHING, Event.SETTLED): Step(State.READY, _RELEASE),
    (State.PREFETCHING, Event.ALLOCATED): Step(State.WAITING_FOR_LOAD),
    (State.PREFETCHING, Event.FAILED): Step(State.BYPASS, _RELEASE),
    (State.PREFETCHING, Event.FINISHED): Step(State.DONE, _END),
    (State.WAITING_FOR_LOAD, Event.PLANNED): Step(State.LOADING),
    (State.WAITING_FOR_LOAD, Event.FAILED): Step(State.BYPASS, _RELEASE),
    # The engine holds the request until the workers report it, whatever happened to the lease meanwhile.
    (State.WAITING_FOR_LOAD, Event.FINISHED): Step(State.DRAINING),
    (State.LOADING, Event.LOADED): Step(State.READY, _RELEASE),
    (State.LOADING, Event.FAILED): Step(State.BYPASS, _RELEASE),
    (State.LOADING, Event.FINISHED): Step(State.DRAINING),
    (State.DRAINING, Event.LOADED): Step(State.DONE, _END),
    (State.DRAINING, Event.FAILED): Step(State.DONE, _END),
    (State.READY, Event.RESUMED): Step(State.PREFETCHING),
    (State.READY, Event.FINISHED): Step(State.DONE, _END),
    (State.BYPASS, Event.FINISHED): Step(State.DONE, _END),
}


def advance(state: State, event: Event) -> Step:
    """The step for `event` in `state`; the same state and no action where the table is silent."""
    return TRANSITIONS.get((state, event), Step(state))
