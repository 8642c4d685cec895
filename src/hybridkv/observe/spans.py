"""Spans of time that are exported as traces: where the daemon puts what it did."""

from collections.abc import Mapping
from typing import Protocol

Facts = Mapping[str, str | int | bool]
Times = tuple[float, float]  # The begin and the end, by the daemon's clock.


class SpanSink(Protocol):
    """Takes spans; it never blocks and never raises."""

    dropped: int  # Spans that were not taken because too many waited.

    def put(
        self, name: str, times: Times, facts: Facts, parent: object = None, error: str = ""
    ) -> object:
        """Add a span; returns what its children name as parent, or None if it was dropped."""
