"""What the daemon did for whom, as spans of time, for those who export them: bounded, and never waited for."""

from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

SPANS_MAX = 1 << 12
"""That wait to be exported; more are dropped and counted."""


class Span(NamedTuple):
    """Something that took time."""

    name: str
    started_at: float
    """Seconds of the daemon's clock."""
    ended_at: float
    facts: Mapping[str, str | int | bool]
    number: int
    parent: int = 0
    """The number of the span that it belongs to; 0 = none."""
    error: str = ""


class Spans:
    """A queue between the loop, which puts in, and a thread, which takes out."""

    def __init__(self, spans_max: int = SPANS_MAX) -> None:
        self._waiting: deque[Span] = deque()
        self._spans_max = spans_max
        self._numbers = 0
        self.dropped = 0

    def put(
        self,
        name: str,
        started_at: float,
        ended_at: float,
        facts: Mapping[str, str | int | bool],
        parent: int = 0,
        error: str = "",
    ) -> int:
        """One more; its number."""
        self._numbers += 1
        if len(self._waiting) >= self._spans_max:
            self.dropped += 1
        else:
            self._waiting.append(Span(name, started_at, ended_at, facts, self._numbers, parent, error))
        return self._numbers

    def take(self) -> list[Span]:
        """All that wait, the oldest first."""
        taken: list[Span] = []
        while self._waiting:
            taken.append(self._waiting.popleft())
        return taken
