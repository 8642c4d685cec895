"""When the scheduler role says that it computes a prompt, and that all it stores is committed."""

from types import SimpleNamespace
from typing import Any

import pytest

from hybridkv.connector.scheduler.promises import SETTLE_STEPS, OwnPromises
from hybridkv.connector.scheduler.requests import RequestState, StoreProgress, TrackedRequest
from hybridkv.wire.messages import Computed, Computing
from tests.layouts import LAYOUTS
from tests.unit.connector.requests import registry, request, step_of, store_planner

pytestmark = pytest.mark.engine

GEOMETRY = LAYOUTS["qwen3"]
CHUNKS, LEASE = 3, 7
TOKENS = CHUNKS * GEOMETRY.chunk_tokens


class Rig:
    """The promise of one request, and what the daemon was told."""

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.tracked = TrackedRequest(
            request("r", TOKENS, bytes(32) * CHUNKS), progress=StoreProgress([0])
        )
        requests: Any = registry(GEOMETRY, r=self.tracked)
        requests.daemon = SimpleNamespace(
            queue_message=lambda message, now: self.told.append(message)
        )
        self.stores = store_planner(requests)
        self.promises = OwnPromises(requests, self.stores)
        self.promises.on_promised(self.tracked, LEASE, 0.0)

    def plan(self, **scheduled: int) -> None:
        self.promises.on_step_planned(step_of(SimpleNamespace(num_scheduled_tokens=scheduled)), 0.0)

    def end_step(self) -> list[Any]:
        """Returns what the daemon is told since the last call."""
        self.promises.end_kept_promises(0.0)
        told, self.told = self.told, []
        return told

    def compute(self) -> None:
        """The prompt is computed, and its last chunk is being stored."""
        self.tracked.request.num_computed_tokens = TOKENS
        self.tracked.progress.settle(0, CHUNKS)
        self.stores.storing[1] = SimpleNamespace(tracked=self.tracked)  # type: ignore[assignment]


def test_it_begins_with_the_first_step_and_ends_with_the_last_commit() -> None:
    rig = Rig()
    rig.plan(other=1)
    assert rig.end_step() == []
    rig.plan(r=TOKENS)
    rig.plan(r=1)
    assert rig.end_step() == [Computing(LEASE)]
    rig.compute()
    assert rig.end_step() == []
    rig.stores.storing.clear()
    assert rig.end_step() == [Computed(LEASE)]
    assert rig.end_step() == []


def test_a_request_that_ends_keeps_its_promise_until_its_stores_are_over() -> None:
    """As a prefill with one token of output does."""
    rig = Rig()
    rig.compute()
    rig.tracked.state = RequestState.DONE
    assert rig.end_step() == []
    rig.stores.storing.clear()
    assert rig.end_step() == [Computed(LEASE)]


def test_what_has_no_slot_is_given_up_after_a_few_steps() -> None:
    rig = Rig()
    rig.tracked.request.num_computed_tokens = TOKENS
    for _ in range(SETTLE_STEPS):
        assert rig.end_step() == []
    assert rig.end_step() == [Computed(LEASE)]


@pytest.mark.parametrize("how", ["aborted", "preempted", "reset", "stale", "nobody"])
def test_it_ends_where_nothing_is_computed_any_more(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig()
    match how:
        case "aborted":
            rig.tracked.state = RequestState.DONE
        case "preempted":
            rig.tracked.request.num_preemptions = 1
        case "reset":
            rig.promises.on_reset(True, 0.0)
        case "stale":
            monkeypatch.setattr(type(rig.stores), "may_commit", False)
        case "nobody":
            rig.promises.on_connection_lost(0.0)
            assert rig.end_step() == [], "the daemon has forgotten it"
            rig.promises.on_promised(None, LEASE, 0.0)
    assert rig.end_step() == [Computed(LEASE)]
