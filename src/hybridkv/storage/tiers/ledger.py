"""What a tier without a bound of its own holds, and what must go before something else may come.

A value without I/O: it says what must be removed, and is told what was.  It counts too much rather than too little:
what is being written counts from the start, and what failed to be written goes on counting, since it may be there.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Plan(NamedTuple):
    """How room is made for a batch."""

    admitted: list[bool]
    """For each of the batch whether there is room for it."""
    victims: list[str]
    """What must be removed first, the oldest of all."""


class Ledger:
    """Names and sizes, the oldest first."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.bytes = 0
        self._sizes: dict[str, int] = {}
        self._writing: Counter[str] = Counter()
        self._since: set[str] | None = None
        """What came since the listing began that is being made, and may not be in it."""

    def __len__(self) -> int:
        return len(self._sizes)

    def begin(self) -> None:
        """A listing begins."""
        self._since = set(self._writing)

    def listed(self, found: Iterable[tuple[str, int]]) -> None:
        """It has ended: what is there, the oldest first."""
        since = self._since or set()
        newer = {name: size for name, size in self._sizes.items() if name in since}
        self._sizes = {name: size for name, size in found if name not in newer} | newer
        self.bytes = sum(self._sizes.values())
        self._since = None

    def plan(self, wanted: Sequence[tuple[str, int]]) -> Plan:
        """How room is made for names and their sizes; with nothing wanted, how the bound is kept after a listing."""
        sizes = {name: self._sizes[name] for name in self._writing}
        held = sum(sizes.values())
        """Bytes of what cannot go: it is being written, or is wanted here."""
        admitted = []
        for name, size in wanted:
            # While it is written over, the longer of the two may be there.
            longest = max(size, self._sizes.get(name, 0), sizes.get(name, 0))
            fits = held - sizes.get(name, 0) + longest <= self.bytes_max
            admitted.append(fits)
            if fits:
                held += longest - sizes.get(name, 0)
                sizes[name] = longest
        excess = self.bytes - self.bytes_max + sum(size - self._sizes.get(name, 0) for name, size in sizes.items())
        victims = []
        for name, size in self._sizes.items():
            if excess <= 0:
                break
            if name not in sizes:
                victims.append(name)
                excess -= size
        return Plan(admitted, victims)

    def admit(self, name: str, size: int) -> None:
        """Count what is about to be written, its plan's victims being gone; `written` follows."""
        before = self._sizes.pop(name, 0)
        self._sizes[name] = max(size, before)
        self.bytes += self._sizes[name] - before
        assert self.bytes <= self.bytes_max
        self._writing[name] += 1
        if self._since is not None:
            self._since.add(name)

    def written(self, name: str) -> None:
        """The writing has ended, well or not."""
        self._writing[name] -= 1
        if not self._writing[name]:
            del self._writing[name]

    def gone(self, names: Sequence[str]) -> None:
        """These were removed, if they were there."""
        for name in names:
            if name not in self._writing:
                self.bytes -= self._sizes.pop(name, 0)

    def check(self) -> None:
        """Raises AssertionError where the books are wrong."""
        assert self.bytes == sum(self._sizes.values())
        assert all(count > 0 for count in self._writing.values())
        assert self._writing.keys() <= self._sizes.keys()
