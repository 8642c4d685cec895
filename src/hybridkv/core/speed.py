"""A measured speed, such as that of prefill or of a tier.

The estimate grows with the age of the measurement, so that a tier that was slow is tried again.
"""

from dataclasses import dataclass

WEIGHT = 0.5  # The share of the latest measurement in the estimate.
DOUBLING_SECONDS = 10.0  # The estimate doubles each time that nothing was measured for so long.
MEASURED_SECONDS_MIN = 1e-4


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
