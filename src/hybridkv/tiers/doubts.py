"""Doubts: who was waited for in vain is not waited for again for a while."""

from dataclasses import dataclass

DOUBT_SECONDS, DOUBT_SECONDS_MAX = 1.0, 60.0
_COUNT_MAX = 8  # More waits in vain do not make the doubt longer.


@dataclass
class Doubt:
    """How often one connection was a reason to wait in vain, one time after the other."""

    count: int = 0
    until: float = 0.0  # When it is believed again.


class Doubts:
    """The doubts about all connections, by their numbers. Times are seconds of one clock."""

    def __init__(self) -> None:
        self._by_connection: dict[int, Doubt] = {}

    def is_doubted(self, connection_id: int, now: float) -> bool:
        """Return True while no wait is to begin because of this connection."""
        doubt = self._by_connection.get(connection_id)
        return doubt is not None and now < doubt.until

    def add_doubt(self, connection_id: int, now: float) -> None:
        """Begin a doubt after a wait in vain. Each next one takes twice as long."""
        doubt = self._by_connection.setdefault(connection_id, Doubt())
        seconds = min(DOUBT_SECONDS * 2**doubt.count, DOUBT_SECONDS_MAX)
        doubt.count, doubt.until = min(doubt.count + 1, _COUNT_MAX), now + seconds

    def forget_doubt(self, connection_id: int) -> None:
        """Begin anew, after a wait that brought something, or the end of the connection."""
        self._by_connection.pop(connection_id, None)
