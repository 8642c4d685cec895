"""How far an answer is from its oracle, and how many of several prompts are right: for verify."""

import math
from dataclasses import replace
from typing import Any

import pytest

from hybridkv.lab.judging import (
    Measured,
    ReferenceAnswers,
    deviation,
    judge,
    judge_repeated,
    judge_turns,
)

ORACLE = {
    "tokens": [5, 6, 7],
    "logprobs": [[[5, -1.0], [9, -1.5]], [[6, -1.0], [8, -1.2]], [[7, -1.0], [1, -3.0]]],
}
NO_REFERENCE = ReferenceAnswers(
    computed={}, local_hit={}, split_hit={}, alone=[], noise=0.0, repeated=[]
)


def answer(tokens: list[int], *logprobs: list[list[float]]) -> dict[str, Any]:
    return {"tokens": tokens, "logprobs": logprobs}


@pytest.mark.parametrize(
    ("mine", "expected"),
    [
        (ORACLE, 0.0),
        (answer([5, 6, 7], [[5, -1.25], [9, -1.5]], [[6, -1.0]], [[7, -1.0]]), 0.25),
        # Another token of the oracle's own list counts by how much likelier the oracle's is; what
        # follows it answers another text.
        (answer([5, 8, 2], [[5, -1.0]], [[8, -1.0], [6, -1.0]], [[2, -1.0]]), 0.2),
        # A token that the oracle does not even list.
        (answer([5, 3, 7], [[5, -1.0]], [[3, -1.0], [6, -1.0]], [[7, -1.0]]), math.inf),
    ],
)
def test_deviation(mine: dict[str, Any], expected: float) -> None:
    assert deviation([ORACLE, mine], [ORACLE, ORACLE]) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("wrong", "loaded", "failed", "right"),
    [
        ({}, 300, 0, 3),
        ({"tokens": [5, 6, 8]}, 300, 0, 2),
        ({"logprobs": []}, 300, 0, 2),
        ({"cached_tokens": 0}, 200, 0, 2),
        ({}, 300, 1, 3),
        ({}, 200, 0, 3),
    ],
    ids=["all", "token", "log_probability", "hit", "load", "from_elsewhere"],
)
def test_one_that_is_wrong_is_counted_and_fails_the_arm(
    wrong: dict[str, Any], loaded: int, failed: int, right: int
) -> None:
    """Each arm of repeated prompts counts those that are right (requirements B43)."""
    seconds = {"ttft_seconds": 0.1, "slowest_decode_step_seconds": 0.0}
    result = {**ORACLE, **seconds, "cached_tokens": 100}
    delta = {"tokens_loaded": loaded, "loads_failed": failed}
    measured = Measured("arm", 330, [result, {**result, **wrong}, result], delta, 300)
    arm = judge_repeated(measured, replace(NO_REFERENCE, repeated=[ORACLE] * 3))
    assert arm.name == f"arm: {right} of 3"
    assert arm.ok == (right == 3 and loaded == 300 and not failed)


@pytest.mark.parametrize(("own", "ok"), [(100, True), (96, False)])
def test_the_engines_own_hits_on_second_turns_are_as_long(own: int, ok: bool) -> None:
    seconds = {"ttft_seconds": 0.1, "slowest_decode_step_seconds": 0.0}
    result = {**ORACLE, **seconds, "cached_tokens": 100}
    delta = {"tokens_loaded": 300, "loads_failed": 0}
    measured = Measured("second turns", 330, [result] * 3, delta, 300)
    turns = [{**result, "cached_tokens": own}] * 3
    arm = judge_turns(measured, replace(NO_REFERENCE, turns=turns))
    assert arm.ok is ok


@pytest.mark.parametrize(
    ("drafts", "steps", "own_steps", "same"),
    [
        ([], [1, 1, 1], [1, 1, 1], None),
        ([[6, 9]], [], [1, 2], None),
        ([], [1, 2], [1, 2], True),
        ([], [1, 2], [1, 1, 1], False),
        ([], [1, 1, 1], [1, 2], False),
        ([[6, 9]], [1, 1, 1], [1, 1, 1], False),
    ],
    ids=["none", "left_out", "not_seen", "more_accepted", "none_accepted", "other_drafts"],
)
def test_what_a_step_accepted_counts_where_its_drafts_are_not_seen(
    drafts: list[list[int]], steps: list[int], own_steps: list[int], same: bool | None
) -> None:
    """vLLM does not show drafts where it schedules asynchronously."""
    seconds = {"ttft_seconds": 0.1, "slowest_decode_step_seconds": 0.0}
    result = {**ORACLE, **seconds, "cached_tokens": 0, "drafts": drafts, "step_tokens": steps}
    own = {**ORACLE, "drafts": [], "step_tokens": own_steps}
    arm = judge(Measured("arm", 330, [result], {}), replace(NO_REFERENCE, computed=own))
    assert arm.same_drafts is same
    assert arm.ok is (same is not False)
