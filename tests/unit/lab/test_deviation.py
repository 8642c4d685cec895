"""How far an answer is from its oracle: the measure of verify's preempted arm."""

import math
from typing import Any

import pytest

from hybridkv.lab.judging import deviation

ORACLE = {
    "tokens": [5, 6, 7],
    "logprobs": [[[5, -1.0], [9, -1.5]], [[6, -1.0], [8, -1.2]], [[7, -1.0], [1, -3.0]]],
}


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
