"""What `hybridkv explain` knows: the last requests, and what each identity is made of."""

from collections import OrderedDict
from collections.abc import Mapping
from itertools import islice
from typing import NamedTuple

from hybridkv.wire.messages import IdentityDifference, RequestExplanation

REQUESTS_MAX = 10_000
IDENTITIES_MAX = 256


class RequestOutcome(NamedTuple):
    """What became of one request, told at `told_at` seconds of the daemon's clock."""

    request_id: str
    identity: bytes
    explanation: RequestExplanation
    told_at: float


class RequestHistory:
    """The last REQUESTS_MAX requests and IDENTITIES_MAX identities that engines reported."""

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
        longer = (
            told
            for name, told in reversed(self._requests.items())
            if name.startswith(f"{request_id}-")
        )
        return next(longer, None)

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
