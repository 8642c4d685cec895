"""Measured speeds: of anything, such as a tier, and of an engine's prefill.

The estimate grows with the age of the measurement, so that a tier that was slow is tried again.
"""

from collections import deque
from dataclasses import dataclass, field
from functools import partial

WEIGHT = 0.5  # The share of the latest measurement in the estimate.
DOUBLING_SECONDS = 10.0  # The estimate doubles each time that nothing was measured for so long.
MEASURED_SECONDS_MIN = 1e-4
UNKNOWN_SECONDS = 2.0
UNKNOWN_SECONDS_PER_KI_TOKEN = 0.1
"""What computing a prompt is taken to cost while the speed of prefill is not known."""
PREFILL_TOKENS_MIN = 64  # A step of fewer tokens is not used to measure the speed of prefill.
STEPS_MEASURED_MAX = 16  # Steps that are planned and not reported; the engine plans one ahead.


@dataclass(frozen=True, slots=True)
class Speed:
    """How fast something was, and when that was measured, in seconds of any one clock."""

    per_second: float = 0.0  # 0 = not known.
    seen_at: float = 0.0

    def measured(self, amount: float, seconds: float, now: float) -> "Speed":
        """The estimate after `amount` took `seconds`."""
        latest = amount / max(seconds, MEASURED_SECONDS_MIN)
        known = latest if not self.per_second else WEIGHT * latest + (1 - WEIGHT) * self.per_second
        return Speed(known, now)

    def seconds(self, amount: float, now: float) -> float:
        """The seconds that `amount` is estimated to take; 0 = not known."""
        if not self.per_second:
            return 0.0
        doubled = min(60.0, max(0.0, now - self.seen_at) / DOUBLING_SECONDS)
        return float(amount / (self.per_second * 2.0**doubled))


@dataclass
class PrefillSpeed:
    """The speed of an engine's prefill, measured step by step. Times are seconds of one clock."""

    speed: Speed = Speed()  # In tokens per second.
    planned: deque[tuple[int, int, float]] = field(
        default_factory=partial(deque, maxlen=STEPS_MEASURED_MAX)
    )
    """The number of each step that is not reported, its tokens, and when it was planned."""
    reported: tuple[int, float] = (0, 0.0)  # The last step that was reported, and when.

    def step_planned(self, number: int, tokens: int, now: float) -> None:
        """The step of this number has `tokens` tokens."""
        if tokens >= PREFILL_TOKENS_MIN:
            self.planned.append((number, tokens, now))

    def step_ended(self, number: int, now: float) -> None:
        """The workers reported the step of this number, and with it all before.

        A step that was planned ahead begins when the one before it is reported.
        """
        last, since = self.reported
        if number <= last:
            return
        self.reported = number, now
        while self.planned and self.planned[0][0] <= number:
            step, tokens, planned_at = self.planned.popleft()
            if step == number:
                self.speed = self.speed.measured(tokens, now - max(since, planned_at), now)

    def seconds(self, tokens: int) -> float:
        """What computing `tokens` tokens takes (requirements D18)."""
        rate = self.speed.per_second
        unknown = UNKNOWN_SECONDS + UNKNOWN_SECONDS_PER_KI_TOKEN * tokens / 1024
        return tokens / rate if rate else unknown
