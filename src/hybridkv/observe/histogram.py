"""Counts of durations by upper bound, as Prometheus' histograms need them."""

from bisect import bisect_left
from collections.abc import Sequence

SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)


class Histogram:
    """A histogram; its bounds are seconds."""

    def __init__(self, bounds: Sequence[float] = SECONDS) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, amount: float) -> None:
        """Count one duration."""
        self._counts[bisect_left(self._bounds, amount)] += 1
        self.total += max(0.0, amount)

    @property
    def cumulative(self) -> list[tuple[float, int]]:
        """(bound, count of durations not above it); the last bound is infinite."""
        told: list[tuple[float, int]] = []
        count = 0
        for bound, more in zip((*self._bounds, float("inf")), self._counts, strict=True):
            count += more
            told.append((bound, count))
        return told
