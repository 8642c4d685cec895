"""The engine's wish for a state follows a request from one junction to the next."""

from types import SimpleNamespace
from typing import Any

import pytest

from hybridkv.connector.scheduler.junctions import Junctions
from hybridkv.connector.scheduler.requests import RequestLookup, TrackedRequest
from hybridkv.core.speed import Speed
from hybridkv.wire.messages import Found
from tests.layouts import LAYOUTS
from tests.unit.connector.requests import registry, step_of

pytestmark = pytest.mark.engine

GEOMETRY = LAYOUTS["qwen3next"]
CHUNK = GEOMETRY.chunk_tokens


def tracked_request(*junctions: int, own: int = 0) -> TrackedRequest:
    """A request whose answer names junctions in chunks, and the engine's own one in tokens."""
    request: Any = SimpleNamespace(
        request_id="asked", shared_prefix_boundary=own, num_computed_tokens=0
    )
    tracked = TrackedRequest(request)
    found = Found(1, 1, 0, [], b"", junctions=[*junctions])
    tracked.lookup = RequestLookup(answer=found)
    return tracked


def test_where_windows_are_kept_the_engine_is_asked_for_nothing() -> None:
    """It has the windows at every boundary. Other versions of vLLM lack the field."""
    tracked, junctions = tracked_request(2, own=7), Junctions(registry(LAYOUTS["gemma3"]))
    junctions.on_offer(tracked, 0, Speed(), Speed())
    output = SimpleNamespace(num_scheduled_tokens={"asked": CHUNK})
    junctions.on_step_planned(step_of(output), 0.0)
    assert tracked.request.shared_prefix_boundary == 7


def wishes(tracked: TrackedRequest, step: int, steps: int, start: int = 0) -> list[int]:
    """The engine's field before each of `steps` steps of `step` tokens."""
    junctions, request = Junctions(registry(GEOMETRY, asked=tracked)), tracked.request
    output = SimpleNamespace(num_scheduled_tokens={"asked": step, "another": 1})
    junctions.on_offer(tracked, start, Speed(), Speed())
    request.num_computed_tokens, seen = start, []
    for _ in range(steps):
        seen.append(request.shared_prefix_boundary)
        junctions.on_step_planned(step_of(output), 0.0)
        request.num_computed_tokens += step
    return seen


def test_a_wish_stands_until_its_boundary_is_passed() -> None:
    tracked = tracked_request(2, 4)
    expected = [2 * CHUNK, 2 * CHUNK, 4 * CHUNK, 4 * CHUNK, 4 * CHUNK]
    assert wishes(tracked, CHUNK, steps=5) == expected


def test_the_engines_own_junction_is_one_of_them() -> None:
    tracked = tracked_request(4, own=2 * CHUNK)
    assert wishes(tracked, 2 * CHUNK, steps=2) == [2 * CHUNK, 4 * CHUNK]


def test_what_the_hit_covers_is_no_wish() -> None:
    assert wishes(tracked_request(2, 4), CHUNK, steps=1, start=2 * CHUNK) == [4 * CHUNK]
    assert wishes(tracked_request(2), CHUNK, steps=1, start=2 * CHUNK) == [0]


def test_without_a_junction_nothing_is_changed() -> None:
    assert wishes(tracked_request(own=256), CHUNK, steps=1) == [256]


def test_a_state_that_costs_more_than_it_spares_is_not_asked_for() -> None:
    tracked, junctions = tracked_request(2, 4), Junctions(registry(GEOMETRY))
    # A step's overhead alone is worth three chunks.
    junctions.on_offer(tracked, 0, Speed(per_second=300 * CHUNK), Speed())
    assert tracked.request.shared_prefix_boundary == 4 * CHUNK


def test_a_request_that_has_ended_is_forgotten() -> None:
    tracked, requests = tracked_request(2), registry(GEOMETRY)
    junctions = Junctions(requests)
    junctions.on_offer(tracked, 0, Speed(), Speed())
    junctions.on_step_planned(step_of(SimpleNamespace(num_scheduled_tokens={})), 0.0)
    tracked.request.shared_prefix_boundary = 7
    requests.by_id["asked"] = tracked
    output = SimpleNamespace(num_scheduled_tokens={"asked": CHUNK})
    junctions.on_step_planned(step_of(output), 0.0)
    assert tracked.request.shared_prefix_boundary == 7
