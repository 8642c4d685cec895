"""The life of a lookup that waits for tiers, and the reasons why it gets less than they have."""

import pytest

from hybridkv.tiers.lookup_states import OVER, TRANSITIONS, LookupEvent, LookupState
from hybridkv.tiers.lookups import Shortfall, ShortfallKind

WAITING = [state for state in LookupState if state not in OVER]


@pytest.mark.parametrize("state", WAITING)
@pytest.mark.parametrize("event", [LookupEvent.SETTLED, LookupEvent.DEADLINE])
def test_a_lookup_that_waits_is_answered_in_the_end(state: LookupState, event: LookupEvent) -> None:
    assert TRANSITIONS[state, event] is LookupState.ANSWERED


@pytest.mark.parametrize("state", WAITING)
def test_a_lookup_that_waits_can_be_cancelled(state: LookupState) -> None:
    assert TRANSITIONS[state, LookupEvent.CANCELLED] is LookupState.CANCELLED


def test_nothing_happens_to_a_lookup_that_is_over() -> None:
    assert not OVER & {state for state, _ in TRANSITIONS}


def test_a_lookup_is_planned_once() -> None:
    planned = {key: after for key, after in TRANSITIONS.items() if key[1] is LookupEvent.PLANNED}
    assert planned == {(LookupState.FINDING, LookupEvent.PLANNED): LookupState.READING}


@pytest.mark.parametrize(
    ("shortfall", "sentence"),
    [
        (Shortfall(ShortfallKind.SILENT, "disk"), "disk does not answer"),
        (Shortfall(ShortfallKind.FAILED, "disk", "{no} answer"), "disk: {no} answer"),
        (Shortfall(ShortfallKind.NO_ROOM), "RAM has no room for it"),
        (
            Shortfall(
                ShortfallKind.SLOWER, tokens=4096, read_seconds=1.234, compute_seconds=0.0567
            ),
            "reading 4096 tokens would take 1.2 s, computing them 0.057 s",
        ),
    ],
)
def test_a_reason_is_told_with_its_facts(shortfall: Shortfall, sentence: str) -> None:
    assert shortfall.sentence() == sentence
