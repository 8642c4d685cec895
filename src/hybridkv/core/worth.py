"""Load or compute: whether reading a hit from a tier is faster than computing it, and up to which boundary.

Reading up to a boundary costs the time of its bytes at the speed that was last seen, computing costs the rest of the
prompt.  What was measured is believed less the older it is, so that a tier that was slow once is tried again.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

WEIGHT = 0.5
"""Of the latest measurement."""
DOUBLING_SECONDS = 10.0
"""A speed is taken for twice as high when nothing was measured for so long."""
MEASURED_SECONDS_MIN = 1e-4


@dataclass(frozen=True, slots=True)
class Speed:
    """How fast something was, and when that was seen. Seconds of any one clock."""

    per_second: float = 0.0
    """0 = nothing is known."""
    seen_at: float = 0.0

    def measured(self, amount: float, seconds: float, now: float) -> "Speed":
        """After `amount` took `seconds`."""
        latest = amount / max(seconds, MEASURED_SECONDS_MIN)
        known = latest if not self.per_second else WEIGHT * latest + (1 - WEIGHT) * self.per_second
        return Speed(known, now)

    def seconds(self, amount: float, now: float) -> float:
        """How long `amount` will take, as far as is known; 0 where nothing is."""
        if not self.per_second:
            return 0.0
        doubled = min(60.0, max(0.0, now - self.seen_at) / DOUBLING_SECONDS)
        return float(amount / (self.per_second * 2.0**doubled))


class Cut(NamedTuple):
    """Where to stop loading."""

    chunks: int
    read_seconds: float
    """Expected for reading what is missing up to there."""


def best_cut(
    resident: int,
    boundaries: Iterable[int],
    read_seconds: Callable[[int], float],
    chunk_seconds: float,
    patience_seconds: float,
) -> Cut:
    """The boundary, in chunks, at which a prompt is ready first.

    `resident` is the hit that costs no reading, `boundaries` are other hits, `read_seconds` says what reading up to one
    of them takes, `chunk_seconds` what computing a chunk takes (0 = not known: the largest hit is best).  Where
    reading would outlast `patience_seconds` it is not begun.
    """
    best = Cut(resident, 0.0)
    gain = 0.0
    for chunks in sorted(set(boundaries), reverse=True):
        if chunks <= resident:
            continue
        read, compute = read_seconds(chunks), (chunks - resident) * chunk_seconds
        saved = compute - read if chunk_seconds else float(chunks)
        if read <= patience_seconds and saved > gain:
            best, gain = Cut(chunks, read), saved
    return best
