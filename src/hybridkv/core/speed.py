"""Measured speeds, as of a tier, and the speed of an engine's prefill.

An estimated speed grows with the age of its measurement, so that a slow tier is tried again.
"""

from collections import deque
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

WEIGHT = 0.5  # The share of the latest measurement in the estimate.
DOUBLING_SECONDS = 10.0  # The estimated speed doubles after so many seconds without a measurement.
MEASURED_SECONDS_MIN = 1e-4
UNKNOWN_SECONDS = 2.0
UNKNOWN_SECONDS_PER_KI_TOKEN = 0.1
"""While the speed of prefill is not known, computing a prompt is taken to cost both constants."""
PREFILL_TOKENS_MIN = 64  # A step of fewer tokens is not used to measure the speed of prefill.
STEPS_MEASURED_MAX = 16  # Steps that are planned and not reported. The engine plans one ahead.


@dataclass(frozen=True, slots=True)
class Speed:
    """A measured speed. Times are seconds of any one clock."""

    per_second: float = 0.0  # 0 = not known.
    seen_at: float = 0.0

    def measured(self, amount: float, seconds: float, now: float) -> "Speed":
        """Returns the estimate after `amount` took `seconds`, at `now`."""
        latest = amount / max(seconds, MEASURED_SECONDS_MIN)
        known = latest if not self.per_second else WEIGHT * latest + (1 - WEIGHT) * self.per_second
        return Speed(known, now)

    def seconds(self, amount: float, now: float) -> float:
        """Returns the seconds that `amount` is estimated to take. 0 = not known."""
        if not self.per_second:
            return 0.0
        doubled = min(60.0, max(0.0, now - self.seen_at) / DOUBLING_SECONDS)
        return float(amount / (self.per_second * 2.0**doubled))


class PrefillStep(NamedTuple):
    """A step of the engine that the workers have not reported yet."""

    number: int
    tokens: int
    planned_at: float


@dataclass
class PrefillSpeed:
    """The speed of an engine's prefill, measured step by step. Times are seconds of one clock."""

    speed: Speed = Speed()  # In tokens per second.
    planned: deque[PrefillStep] = field(default_factory=partial(deque, maxlen=STEPS_MEASURED_MAX))
    """The large steps that are not reported, in their order."""
    reported_number: int = 0  # The last step that was reported.
    reported_at: float = 0.0

    def on_step_planned(self, number: int, tokens: int, now: float) -> None:
        """The engine has planned a step of `tokens` tokens."""
        if tokens >= PREFILL_TOKENS_MIN:
            self.planned.append(PrefillStep(number, tokens, now))

    def on_step_reported(self, number: int, now: float) -> None:
        """The workers have reported a step, and with it all steps before.

        A step that was planned ahead begins when the one before it is reported.
        """
        if number <= self.reported_number:
            return
        since = self.reported_at
        self.reported_number, self.reported_at = number, now
        while self.planned and self.planned[0].number <= number:
            step = self.planned.popleft()
            if step.number == number:
                seconds = now - max(since, step.planned_at)
                self.speed = self.speed.measured(step.tokens, seconds, now)

    def prefill_seconds(self, tokens: int) -> float:
        """Returns the seconds that computing `tokens` tokens takes (requirements D18)."""
        rate = self.speed.per_second
        unknown = UNKNOWN_SECONDS + UNKNOWN_SECONDS_PER_KI_TOKEN * tokens / 1024
        return tokens / rate if rate else unknown
