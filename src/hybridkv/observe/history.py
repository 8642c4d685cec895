"""The daemon's memory for people: the last hours and requests, and a snapshot of everything.

The last hours are samples of counters. A sample is taken once in a step, or later where the loop
had no time. Counters only grow, so what happened between any two samples is their difference::

    samples   |----a----|----b----|--------- c ---------|        a gap is one long interval
    rates          1         2              3                  one fewer than samples
"""

import math
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice, pairwise
from typing import NamedTuple

from hybridkv.core.metrics import Metric, Values
from hybridkv.wire.messages import IdentityDifference, RequestExplanation
from hybridkv.wire.status import DaemonSetup, GroupStatus, SessionStatus, TierStatus

REQUESTS_MAX = 10_000
IDENTITIES_MAX = 256
WAIT_BOUNDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)  # Seconds.


class Sample(NamedTuple):
    """Values at one time, in the order of the columns."""

    at: float  # Seconds of any one clock.
    values: tuple[float, ...]


class Past(NamedTuple):
    """Samples of a span of time."""

    columns: Sequence[Metric]  # The metric of each of a sample's values.
    samples: Sequence[Sample]  # The oldest first.

    def levels(self, metric: str, *labels: str) -> list[float]:
        """Returns the metric's value in each sample."""
        column = self.columns.index(Metric(metric, labels))
        return [sample.values[column] for sample in self.samples]

    def rates(self, metric: str, *labels: str) -> list[float]:
        """Returns the growth of a counter per second, for each interval."""
        times = [sample.at for sample in self.samples]
        points = zip(times, self.levels(metric, *labels), strict=True)
        return [
            max(0.0, new - old) / (end - begin) for (begin, old), (end, new) in pairwise(points)
        ]

    def growth(self, metric: str) -> float:
        """Returns how much a counter grew over all intervals."""
        levels = self.levels(metric)
        return levels[-1] - levels[0]

    def share(self, part: str, whole: str) -> float | None:
        """Returns the growth of `part` / that of `whole`. None where the whole did not grow."""
        return _ratio(self.growth(part), self.growth(whole))

    def shares(self, part: str, whole: str, window_seconds: float) -> list[float | None]:
        """Returns the `share` over a window that ends with each interval.

        Each window has the whole interval with which it ends, also one longer than the window.
        """
        parts, wholes = self.levels(part), self.levels(whole)
        shares: list[float | None] = []
        first = 0
        for last in range(1, len(self.samples)):
            begin = self.samples[last].at - window_seconds
            while first < last - 1 and self.samples[first + 1].at <= begin:
                first += 1
            shares.append(_ratio(parts[last] - parts[first], wholes[last] - wholes[first]))
        return shares

    def since(self, at: float) -> "Past":
        """Returns the past from `at` on as two samples: that of `at`, and the last.

        The first is the last sample that is not later than `at`, or the oldest of all.
        """
        earlier = (sample for sample in reversed(self.samples) if sample.at <= at)
        return Past(self.columns, (next(earlier, self.samples[0]), self.samples[-1]))


class HistogramBucket(NamedTuple):
    """A bucket of a histogram, as Prometheus has it."""

    bound: float  # In seconds; the last bucket's is infinite.
    durations: int  # The number of durations that are not above the bound.


class Histogram:
    """Counts of durations by upper bound in seconds."""

    def __init__(self, bounds: Sequence[float] = WAIT_BOUNDS) -> None:
        self._bounds = (*bounds, math.inf)
        self._counts = [0] * len(self._bounds)
        self.total = 0.0  # The sum of all durations.

    def add_duration(self, seconds: float) -> None:
        """Add a duration to its bucket and to the total."""
        self._counts[bisect_left(self._bounds, seconds)] += 1
        self.total += max(0.0, seconds)

    @property
    def durations(self) -> int:
        """The number of all durations."""
        return sum(self._counts)

    @property
    def cumulative(self) -> list[HistogramBucket]:
        """All buckets, each with the counts of those before it."""
        return [*map(HistogramBucket, self._bounds, accumulate(self._counts))]


class RequestOutcome(NamedTuple):
    """A request that ended, and why it was loaded or not."""

    request_id: str
    identity: bytes
    explanation: RequestExplanation
    reported_at: float  # When the engine reported it, in seconds of the daemon's clock.


class RequestHistory:
    """The last REQUESTS_MAX requests and IDENTITIES_MAX identities, for `hybridkv explain`.

    Identities of living engines are kept beyond that.
    """

    def __init__(self) -> None:
        self._requests: OrderedDict[str, RequestOutcome] = OrderedDict()
        self._identities: OrderedDict[bytes, Mapping[str, str]] = OrderedDict()

    def add_request(self, outcome: RequestOutcome) -> None:
        """Keep a request that ended, in place of an earlier one with the same id."""
        self._requests[outcome.request_id] = outcome
        self._requests.move_to_end(outcome.request_id)
        if len(self._requests) > REQUESTS_MAX:
            self._requests.popitem(last=False)

    def add_identity(
        self, identity: bytes, facts: Mapping[str, str], in_use: Container[bytes] = ()
    ) -> None:
        """Keep what an identity is made of. The oldest identity that is not `in_use` may go."""
        self._identities[identity] = facts
        self._identities.move_to_end(identity)
        if len(self._identities) > IDENTITIES_MAX:
            unused = (known for known in self._identities if known not in in_use)
            self._identities.pop(next(unused, b""), None)

    def forget_chunks(self, chunks: Container[tuple[bytes, bytes]]) -> None:
        """Forget the requests whose first chunk, (identity, hash), is one of `chunks`."""
        for request_id, outcome in list(self._requests.items()):
            if (outcome.identity, outcome.explanation.first_chunk) in chunks:
                del self._requests[request_id]

    def known(self, request_id: str) -> RequestOutcome | None:
        """Returns the request with exactly this id."""
        return self._requests.get(request_id)

    def find_request(self, request_id: str) -> RequestOutcome | None:
        """Returns a request by its id, or by a client's id, to which vLLM appends "-" and more."""
        if request_id in self._requests or not request_id:
            return self._requests.get(request_id)
        latest = reversed(self._requests.items())
        prefix = f"{request_id}-"
        return next((outcome for name, outcome in latest if name.startswith(prefix)), None)

    def latest(self, count: int) -> list[RequestOutcome]:
        """Returns the last requests, the latest first."""
        return list(islice(reversed(self._requests.values()), count))

    def differences(self, here: bytes, there: bytes) -> list[IdentityDifference]:
        """Returns the facts in which two identities differ. None where one of them is unknown."""
        facts_here, facts_there = self._identities.get(here), self._identities.get(there)
        if facts_here is None or facts_there is None:
            return []
        return [
            IdentityDifference(name, facts_here.get(name, ""), facts_there.get(name, ""))
            for name in sorted({*facts_here, *facts_there})
            if facts_here.get(name) != facts_there.get(name)
        ]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The daemon at one moment, for other threads: nothing in it changes later.

    Times are seconds of the daemon's clock.
    """

    now: float
    started_at: float
    setup: DaemonSetup
    values: Values
    waits: tuple[HistogramBucket, ...]  # Durations that lookups waited for tiers.
    groups: tuple[GroupStatus, ...]
    sessions: tuple[SessionStatus, ...]
    tiers: tuple[TierStatus, ...]
    columns: tuple[Metric, ...]  # The metric of each of a sample's values.
    hour: tuple[Sample, ...]
    decisions: tuple[RequestOutcome, ...]  # The latest first.

    def last_seconds(self, seconds: float) -> Past:
        """Returns the begin and the end of the last `seconds`, or of all that is known."""
        samples = self.hour
        if not samples or samples[-1].at < self.now:
            values = tuple(self.values.get(metric, 0.0) for metric in self.columns)
            samples = (*samples, Sample(self.now, values))
        return Past(self.columns, samples).since(self.now - seconds)


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None
