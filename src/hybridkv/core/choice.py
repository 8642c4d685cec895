"""Which of several connectors a request loads from: answers, weights and elapsed time in, a decision out.

A score is matched tokens times the connector's weight; the highest wins, of equal ones the first (requirements B19,
B20).

    nobody has a hit            wait for those that still look, as if they were alone, up to `patience_seconds`
    somebody has a hit          wait for those that could beat it, up to `grace_seconds` (requirements B21)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hybridkv.core.errors import ConfigError
from hybridkv.core.worth import Speed

WEIGHT_AUTO = 0.0
"""`load_weight` "auto": measured."""
WEIGHT_MAX = 1e6
PATIENCE_SECONDS = 2.0
PATIENCE_SECONDS_PER_KI_TOKEN = 0.1
PATIENCE_SECONDS_MAX = 30.0
"""Requirements D18, B39."""


class Answer(NamedTuple):
    """What one connector said about a request."""

    tokens: int | None
    """Beyond the local hit; None = it does not know yet."""
    is_async: bool = False
    awaited: bool = True
    """Whether a request may wait for it: not where it was late too often."""


MISS = Answer(0)


@dataclass(frozen=True, slots=True)
class Limits:
    """How long requests wait."""

    grace_seconds: float
    patience_seconds: float


class Decision(NamedTuple):
    """What to tell the engine."""

    child: int | None
    """Place of the connector that loads; None = none does."""
    tokens: int = 0
    is_async: bool = False
    wait: bool = False
    """Ask again in the next step."""


def decide(
    answers: Sequence[Answer],
    weights: Sequence[float],
    most_tokens: int,
    asked_seconds: float,
    hit_seconds: float,
    limits: Limits,
) -> Decision:
    """The decision `asked_seconds` after the first question and `hit_seconds` after the first hit in hand.

    `most_tokens` is the longest hit that there can be: who could not win with it is not waited for.
    """
    best: int | None = None
    best_score = 0.0
    for place, (answer, weight) in enumerate(zip(answers, weights, strict=True)):
        if answer.tokens and answer.tokens * weight > best_score:
            best, best_score = place, answer.tokens * weight
    late = [place for place, answer in enumerate(answers) if answer.tokens is None and answer.awaited]
    if best is None:
        return Decision(None, wait=bool(late) and asked_seconds < limits.patience_seconds)
    if hit_seconds < limits.grace_seconds and any(most_tokens * weights[place] > best_score for place in late):
        return Decision(None, wait=True)
    chosen = answers[best]
    return Decision(best, chosen.tokens or 0, chosen.is_async)


def patience(tokens: int, cap_seconds: float | None) -> float:
    """How long a prompt of `tokens` waits for connectors while there is no hit (requirements D18)."""
    if cap_seconds is not None:
        return cap_seconds
    return min(PATIENCE_SECONDS_MAX, PATIENCE_SECONDS + PATIENCE_SECONDS_PER_KI_TOKEN * tokens / 1024)


def parse_weight(value: object, where: str) -> float:
    """`load_weight`: a number, or WEIGHT_AUTO for "auto"; raises ConfigError."""
    if value == "auto":
        return WEIGHT_AUTO
    weight = float(value) if isinstance(value, int | float) and not isinstance(value, bool) else 0.0
    if not 0 < weight <= WEIGHT_MAX:
        raise ConfigError(f'{where}={value!r} must be a number above 0, at most {WEIGHT_MAX:g}, or "auto"; 1.0 works')
    return weight


def effective_weights(weights: Sequence[float], speeds: Sequence[Speed], now: float) -> list[float]:
    """Each connector's weight, the measured ones put in for WEIGHT_AUTO.

    The fastest measured one has 1.0 and the others their part of its speed, so that they compare with each other and
    with weights that are given. Who was not measured has 1.0, and a speed counts for more the older it is: else who
    was slow once would never be chosen, and so never be measured again.
    """
    measured = [speed.per_second for weight, speed in zip(weights, speeds, strict=True) if weight == WEIGHT_AUTO]
    fastest = max(measured, default=0.0)
    result = []
    for weight, speed in zip(weights, speeds, strict=True):
        if weight != WEIGHT_AUTO:
            result.append(weight)
        else:
            seconds = speed.seconds(1.0, now)
            result.append(min(1.0, 1.0 / seconds / fastest) if seconds else 1.0)
    return result
