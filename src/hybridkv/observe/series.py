"""The last hours in samples of counters, and the rates and shares between them.

A sample is taken once in a step, or later where the loop had no time. Counters only grow, so what
happened between any two samples is their difference::

    samples   |----a----|----b----|--------- c ---------|        a gap is one long interval
    rates          1         2              3                  one fewer than samples
"""

import math
from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple


class Sample(NamedTuple):
    """Values at one time, in the order of the columns."""

    at: float
    """Seconds of any one clock."""
    values: tuple[float, ...]


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


def rates(samples: Sequence[Sample], column: int) -> list[float]:
    """The growth of a counter per second, for each interval."""
    return [
        max(0.0, after.values[column] - before.values[column]) / (after.at - before.at)
        for before, after in pairwise(samples)
    ]


def shares(
    samples: Sequence[Sample], part: int, whole: int, window_seconds: float
) -> list[float | None]:
    """The growth of `part` / that of `whole`, over the window that ends with each interval.

    It is None where the whole did not grow. A window has at least the interval itself.
    """
    told: list[float | None] = []
    first = 0
    for last in range(1, len(samples)):
        while first < last - 1 and samples[first + 1].at <= samples[last].at - window_seconds:
            first += 1
        told.append(share_of(samples[first], samples[last], part, whole))
    return told


def share_of(before: Sample, after: Sample, part: int, whole: int) -> float | None:
    """As `shares`, between two samples."""
    grown = after.values[whole] - before.values[whole]
    return (after.values[part] - before.values[part]) / grown if grown > 0 else None


def since(samples: Sequence[Sample], at: float) -> Sample:
    """The last sample that is not later than `at`, or else the first; there must be one."""
    return next((sample for sample in reversed(samples) if sample.at <= at), samples[0])
