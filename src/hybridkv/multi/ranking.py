"""The choice of a connector to load from, by the connectors' answers, their weights and the time.

A score is the matched tokens times the connector's weight. The highest score wins, and of equal
ones the first (requirements B19, B20). A request waits (B21):

    none has a hit     for connectors that still look, as long as computing takes (D18)
    one has a hit      for connectors that could beat it, up to GRACE_SECONDS
"""

from collections.abc import Sequence
from typing import NamedTuple

from hybridkv.core.errors import ConfigError
from hybridkv.core.speed import Speed

WEIGHT_AUTO = 0.0  # Stands for `load_weight` "auto"; the weight is then measured.
WEIGHT_MAX = 1e6
GRACE_SECONDS = 0.01
"""How long a request with a hit waits for connectors that could have a better one.

A lookup on the node takes 0.1 to 2 ms and a step 5 to 50: a late connector is asked once more."""
PATIENCE_SECONDS_MAX = 30.0  # Requirements D18, B39.
LATE_SECONDS = 0.1  # A child that had less time than this to answer is not counted as failed.


class WaitTimes(NamedTuple):
    """How long a request may wait for connectors that still look, and how long it has waited."""

    patience_seconds: float  # From the first question on, without a hit.
    asked_seconds: float = 0.0  # Since the first question.
    hit_seconds: float = 0.0  # Since the first hit.


class ChildAnswer(NamedTuple):
    """A connector's answer: how much of a request it has."""

    tokens: int | None  # The tokens of its hit beyond the local one; None = it does not know yet.
    is_async: bool = False
    awaited: bool = True  # Whether a request may wait for it; False after it was late too often.


MISS = ChildAnswer(0)


class LoadDecision(NamedTuple):
    """From which connector a request loads, as it is said to the engine."""

    child: int | None  # The index of the connector that loads; None = none does.
    tokens: int = 0
    is_async: bool = False
    is_waiting: bool = False  # Whether the engine asks again in the next step.


def decide(
    answers: Sequence[ChildAnswer], weights: Sequence[float], most_tokens: int, times: WaitTimes
) -> LoadDecision:
    """Returns the connector with the highest score, or the decision to wait for late answers.

    `answers` and `weights` have an entry for each connector. `most_tokens` is the longest possible
    hit: a connector that could not win with it is not waited for.
    """
    best: int | None = None
    best_score = 0.0
    pairs = list(zip(answers, weights, strict=True))
    for index, (answer, weight) in enumerate(pairs):
        if answer.tokens and answer.tokens * weight > best_score:
            best, best_score = index, answer.tokens * weight
    late = [weight for answer, weight in pairs if answer.tokens is None and answer.awaited]
    if best is None:
        return LoadDecision(
            None, is_waiting=bool(late) and times.asked_seconds < times.patience_seconds
        )
    could_win = any(most_tokens * weight > best_score for weight in late)
    if times.hit_seconds < GRACE_SECONDS and could_win:
        return LoadDecision(None, is_waiting=True)
    chosen = answers[best]
    return LoadDecision(best, chosen.tokens or 0, chosen.is_async)


def parse_weight(value: object, where: str) -> float:
    """The value of `load_weight`, where "auto" is WEIGHT_AUTO. Raises ConfigError."""
    if value == "auto":
        return WEIGHT_AUTO
    weight = float(value) if isinstance(value, int | float) and not isinstance(value, bool) else 0.0
    if not 0 < weight <= WEIGHT_MAX:
        raise ConfigError(
            f'{where}={value!r} must be a number above 0, at most {WEIGHT_MAX:g}, or "auto"',
            "1.0 works",
        )
    return weight


class WeightedSpeed(NamedTuple):
    """A connector's configured weight and the measured speed of its loads."""

    weight: float
    speed: Speed


def effective_weights(children: Sequence[WeightedSpeed], now: float) -> list[float]:
    """Returns each connector's weight, with a measured one in place of WEIGHT_AUTO.

    The fastest measured connector has 1.0, and each other one the ratio of its speed to that. A
    connector that was not measured has 1.0. A measured speed counts for more the older it is:
    otherwise a connector that was slow once would never be chosen, nor measured again.
    """
    measured = [child.speed.per_second for child in children if child.weight == WEIGHT_AUTO]
    fastest = max(measured, default=0.0)
    effective = []
    for weight, speed in children:
        seconds = speed.seconds(1.0, now)
        relative = min(1.0, 1.0 / seconds / fastest) if seconds and fastest else 1.0
        effective.append(relative if weight == WEIGHT_AUTO else weight)
    return effective
