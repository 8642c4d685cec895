"""The last hours in samples of counters, and the rates and shares between them.

A sample is taken once in a step, or later where the loop had no time. Counters only grow, so what
happened between any two samples is their difference::

    samples   |----a----|----b----|--------- c ---------|        a gap is one long interval
    rates          1         2              3                  one fewer than samples
"""

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

WAIT_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)


class Sample(NamedTuple):
    """Values at one time, in the order of the columns."""

    at: float  # Seconds of any one clock.
    values: tuple[float, ...]


class Past(NamedTuple):
    """Samples, the oldest first; `columns` has the (metric, label) of each of their values."""

    columns: Sequence[tuple[str, str]]
    samples: Sequence[Sample]

    def levels(self, metric: str, label: str = "") -> list[float]:
        """The value in each sample."""
        column = self.columns.index((metric, label))
        return [sample.values[column] for sample in self.samples]

    def rates(self, metric: str, label: str = "") -> list[float]:
        """The growth of a counter per second, for each interval."""
        points = zip((one.at for one in self.samples), self.levels(metric, label), strict=True)
        return [
            max(0.0, new - old) / (end - begin) for (begin, old), (end, new) in pairwise(points)
        ]

    def growth(self, metric: str) -> float:
        """How much a counter grew over all intervals."""
        levels = self.levels(metric)
        return levels[-1] - levels[0]

    def share(self, part: str, whole: str) -> float | None:
        """The growth of `part` / that of `whole`; None where the whole did not grow."""
        return _ratio(self.growth(part), self.growth(whole))

    def shares(self, part: str, whole: str, window_seconds: float) -> list[float | None]:
        """As `share`, over the window that ends with each interval, and has at least it."""
        parts, wholes = self.levels(part), self.levels(whole)
        told: list[float | None] = []
        first = 0
        for last in range(1, len(self.samples)):
            begin = self.samples[last].at - window_seconds
            while first < last - 1 and self.samples[first + 1].at <= begin:
                first += 1
            told.append(_ratio(parts[last] - parts[first], wholes[last] - wholes[first]))
        return told

    def since(self, at: float) -> "Past":
        """The last sample that is not later than `at`, or else the first; and the last of all."""
        begun = (sample for sample in reversed(self.samples) if sample.at <= at)
        return Past(self.columns, (next(begun, self.samples[0]), self.samples[-1]))


class Series:
    """A ring of samples of the same values."""

    def __init__(self, step_seconds: float, samples_max: int) -> None:
        self.step_seconds = step_seconds
        self._samples: deque[Sample] = deque(maxlen=samples_max)

    @property
    def due_at(self) -> float:
        """When the next sample is due; minus infinity where there is none yet."""
        return self._samples[-1].at + self.step_seconds if self._samples else -math.inf

    @property
    def samples(self) -> tuple[Sample, ...]:
        """Every sample, the oldest first."""
        return tuple(self._samples)

    def add(self, sample: Sample) -> None:
        """Add a sample that is later than the last one; the oldest goes where there is no room."""
        if not self._samples or sample.at > self._samples[-1].at:
            self._samples.append(sample)


class Histogram:
    """Counts of durations by upper bound in seconds, as Prometheus' histograms need them."""

    def __init__(self, bounds: Sequence[float] = WAIT_SECONDS) -> None:
        self._bounds = (*bounds, math.inf)
        self._counts = [0] * len(self._bounds)
        self.total = 0.0

    def add(self, seconds: float) -> None:
        """Count one duration."""
        self._counts[bisect_left(self._bounds, seconds)] += 1
        self.total += max(0.0, seconds)

    @property
    def cumulative(self) -> list[tuple[float, int]]:
        """(bound, count of durations not above it); the last bound is infinite."""
        return list(zip(self._bounds, accumulate(self._counts), strict=True))


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None
