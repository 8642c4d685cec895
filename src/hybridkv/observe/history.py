"""What the daemon remembers for people: the last requests, and a snapshot of everything."""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from hybridkv.observe.catalog import Values
from hybridkv.observe.series import Past, Sample
from hybridkv.wire.messages import IdentityDifference, RequestExplanation
from hybridkv.wire.status import GroupStatus, SessionStatus, TierStatus

REQUESTS_MAX = 10_000
IDENTITIES_MAX = 256


class RequestOutcome(NamedTuple):
    """What became of one request, told at `told_at` seconds of the daemon's clock."""

    request_id: str
    identity: bytes
    explanation: RequestExplanation
    told_at: float


class RequestHistory:
    """The last REQUESTS_MAX requests and IDENTITIES_MAX identities, for `hybridkv explain`."""

    def __init__(self) -> None:
        self._requests: OrderedDict[str, RequestOutcome] = OrderedDict()
        self._identities: OrderedDict[bytes, Mapping[str, str]] = OrderedDict()

    def add_request(self, outcome: RequestOutcome) -> None:
        """Keep a request that ended, in place of an earlier one with the same id."""
        self._requests[outcome.request_id] = outcome
        self._requests.move_to_end(outcome.request_id)
        if len(self._requests) > REQUESTS_MAX:
            self._requests.popitem(last=False)

    def add_identity(self, identity: bytes, facts: Mapping[str, str]) -> None:
        """Keep what an identity is made of."""
        self._identities[identity] = facts
        self._identities.move_to_end(identity)
        if len(self._identities) > IDENTITIES_MAX:
            self._identities.popitem(last=False)

    def request(self, request_id: str) -> RequestOutcome | None:
        """A request by its id, or by the id that clients know, to which vLLM may append."""
        if request_id in self._requests or not request_id:
            return self._requests.get(request_id)
        known = reversed(self._requests.items())
        return next((told for name, told in known if name.startswith(f"{request_id}-")), None)

    def latest(self, count: int) -> list[RequestOutcome]:
        """The last requests, the latest first."""
        return list(islice(reversed(self._requests.values()), count))

    def differences(self, one: bytes, other: bytes) -> list[IdentityDifference]:
        """Facts in which two identities differ; empty where one of them is not known."""
        mine, theirs = self._identities.get(one), self._identities.get(other)
        if mine is None or theirs is None:
            return []
        return [
            IdentityDifference(name, mine.get(name, ""), theirs.get(name, ""))
            for name in sorted({*mine, *theirs})
            if mine.get(name) != theirs.get(name)
        ]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The daemon at one moment, for other threads: nothing in it changes later.

    Times are seconds of the daemon's clock.
    """

    now: float
    started_at: float
    values: Values
    waits: tuple[tuple[float, int], ...]
    """Lookups that waited for tiers, as Histogram.cumulative gives them."""
    groups: tuple[GroupStatus, ...]
    sessions: tuple[SessionStatus, ...]
    tiers: tuple[TierStatus, ...]
    columns: tuple[tuple[str, str], ...]  # The (metric, label) of each of a sample's values.
    hour: tuple[Sample, ...]
    day: tuple[Sample, ...]
    decisions: tuple[RequestOutcome, ...]  # The latest first.

    def since(self, seconds: float) -> Past:
        """The begin and the end of the last `seconds` of the hour, or of all that is known."""
        samples = self.hour
        if not samples or samples[-1].at < self.now:
            values = tuple(self.values.of(*column) for column in self.columns)
            samples = (*samples, Sample(self.now, values))
        return Past(self.columns, samples).since(self.now - seconds)
