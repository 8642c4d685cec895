"""What `hybridkv explain` knows: how the last requests fared, and what each identity is made of. Bounded, in memory."""

from collections import OrderedDict
from collections.abc import Mapping
from itertools import islice
from typing import NamedTuple

REQUESTS_MAX = 10_000
IDENTITIES_MAX = 256


class Decision(NamedTuple):
    """How one request fared."""

    request_id: str
    identity: bytes
    facts: Mapping[str, str]
    told_at: float
    """Seconds of the daemon's clock."""


class History:
    """The last REQUESTS_MAX requests and IDENTITIES_MAX identities that engines told of."""

    def __init__(self) -> None:
        self._requests: OrderedDict[str, Decision] = OrderedDict()
        self._identities: OrderedDict[bytes, Mapping[str, str]] = OrderedDict()

    def told(self, request_id: str, identity: bytes, facts: Mapping[str, str], now: float = 0.0) -> None:
        """A request ended; a later one of the same id takes its place."""
        self._requests[request_id] = Decision(request_id, identity, facts, now)
        self._requests.move_to_end(request_id)
        if len(self._requests) > REQUESTS_MAX:
            self._requests.popitem(last=False)

    def described(self, identity: bytes, facts: Mapping[str, str]) -> None:
        """What went into an identity."""
        self._identities[identity] = facts
        self._identities.move_to_end(identity)
        if len(self._identities) > IDENTITIES_MAX:
            self._identities.popitem(last=False)

    def request(self, request_id: str) -> Decision | None:
        """What became of a request; vLLM may have appended to the id that it shows to clients."""
        if request_id in self._requests or not request_id:
            return self._requests.get(request_id)
        longer = (told for name, told in reversed(self._requests.items()) if name.startswith(f"{request_id}-"))
        return next(longer, None)

    def latest(self, count: int) -> list[Decision]:
        """The last ones, the very last one first."""
        return list(islice(reversed(self._requests.values()), count))

    def differences(self, one: bytes, other: bytes) -> dict[str, tuple[str, str]]:
        """Facts in which two identities differ, (one's, other's); empty where one of them is not known."""
        mine, theirs = self._identities.get(one), self._identities.get(other)
        if mine is None or theirs is None:
            return {}
        names = sorted({*mine, *theirs})
        return {
            name: (mine.get(name, ""), theirs.get(name, "")) for name in names if mine.get(name) != theirs.get(name)
        }
