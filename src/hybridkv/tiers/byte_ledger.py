"""Byte bounds of tiers that have none of their own, without I/O.

ByteLedger knows each object: it says what must be removed before others are written.  WriteBudget
is for a server that says how much it uses.  Both count too much rather than too little: what is
being written counts from the start, and what failed to be written may be there, and goes on
counting.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class EvictionPlan(NamedTuple):
    """How room is made for some objects."""

    admitted: list[bool]
    """For each object whether there is room for it."""
    victims: list[str]
    """The objects that must be removed first, the oldest of all."""


class ByteLedger:
    """Names and sizes of a tier's objects, the oldest first."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.bytes = 0
        self._sizes: dict[str, int] = {}
        self._writing: Counter[str] = Counter()
        self._since: set[str] | None = None
        """Names that were written since the current listing began, and may not be in it."""

    def __len__(self) -> int:
        return len(self._sizes)

    def begin(self) -> None:
        """A listing begins."""
        self._since = set(self._writing)

    def listed(self, found: Iterable[tuple[str, int]]) -> None:
        """The listing has ended: what is there, the oldest first."""
        since = self._since or set()
        newer = {name: size for name, size in self._sizes.items() if name in since}
        self._sizes = {name: size for name, size in found if name not in newer} | newer
        self.bytes = sum(self._sizes.values())
        self._since = None

    def plan(self, wanted: Sequence[tuple[str, int]]) -> EvictionPlan:
        """How room is made for names and their sizes; for none, how the bound is kept."""
        sizes = {name: self._sizes[name] for name in self._writing}
        held = sum(sizes.values())  # by what cannot go: it is being written, or is wanted here
        excess = self.bytes - self.bytes_max
        plan = EvictionPlan([], [])
        for name, size in wanted:
            # While it is written over, the longer of the two may be there.
            longest = max(size, self._sizes.get(name, 0), sizes.get(name, 0))
            more = longest - sizes.get(name, 0)
            plan.admitted.append(held + more <= self.bytes_max)
            if plan.admitted[-1]:
                held += more
                excess += longest - sizes.get(name, self._sizes.get(name, 0))
                sizes[name] = longest
        for name, size in self._sizes.items():
            if excess <= 0:
                break
            if name not in sizes:
                plan.victims.append(name)
                excess -= size
        return plan

    def admit(self, name: str, size: int) -> None:
        """Count an object that is written next: its plan's victims are gone. `written` follows."""
        before = self._sizes.pop(name, 0)
        self._sizes[name] = max(size, before)
        self.bytes += self._sizes[name] - before
        assert self.bytes <= self.bytes_max
        self._writing[name] += 1
        if self._since is not None:
            self._since.add(name)

    def written(self, name: str) -> None:
        """The write of an object has ended, well or not."""
        self._writing[name] -= 1
        if not self._writing[name]:
            del self._writing[name]

    def gone(self, names: Sequence[str]) -> None:
        """These objects were removed, if they were there."""
        for name in names:
            if name not in self._writing:
                self.bytes -= self._sizes.pop(name, 0)

    def check(self) -> None:
        """Raises AssertionError where the counts do not agree."""
        assert self.bytes == sum(self._sizes.values())
        assert all(count > 0 for count in self._writing.values())
        assert self._writing.keys() <= self._sizes.keys()


@dataclass(slots=True, eq=False)
class UnconfirmedWrite:
    """Bytes that were sent and not confirmed: the server may take them later."""

    size: int
    until: float = math.inf
    """When the server has taken them or never will: some time after it answers again."""


UsageQuestion = tuple[int, Sequence[UnconfirmedWrite]]
"""What a budget knew when the server was asked: bytes of ended writes, and unconfirmed ones."""


@dataclass
class WriteBudget:
    """What may be written to a server that is to use no more than `bytes_max`.

    What the server says it uses has the values whose writes had ended when it was asked.  All
    others that were admitted count next to it, so the bound holds whatever ends between its answer
    and what is decided here.  So do, for `doubt_seconds`, those that were not confirmed.
    """

    bytes_max: int
    doubt_seconds: float
    _admitted_bytes: int = 0
    """Bytes of all values that were ever admitted."""
    _ended_bytes: int = 0
    """Bytes of those among them whose write has ended."""
    _unconfirmed: list[UnconfirmedWrite] = field(default_factory=list)

    def ask(self, now: float) -> UsageQuestion:
        """The server is asked now; `now` is of the monotonic clock."""
        self._ended_bytes += sum(one.size for one in self._unconfirmed if one.until <= now)
        self._unconfirmed = [one for one in self._unconfirmed if one.until > now]
        return self._ended_bytes, self._unconfirmed

    def admit(
        self, question: UsageQuestion, used: int, sizes: Sequence[int], now: float
    ) -> list[bool]:
        """Whether each value may be written, the server's answer being `used`; `ended` follows."""
        ended_bytes, unconfirmed = question
        for one in unconfirmed:
            one.until = min(one.until, now + self.doubt_seconds)
        admitted = []
        for size in sizes:
            held = used + self._admitted_bytes - ended_bytes
            admitted.append(held + size <= self.bytes_max)
            self._admitted_bytes += size * admitted[-1]
        return admitted

    def ended(self, confirmed: int, unconfirmed: int) -> None:
        """The writes of so many bytes have ended, with and without the server's answer."""
        self._ended_bytes += confirmed
        if unconfirmed:
            self._unconfirmed = [*self._unconfirmed, UnconfirmedWrite(unconfirmed)]
