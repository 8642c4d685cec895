"""What came of waits: who was waited for in vain is not waited for again for a while."""

from dataclasses import dataclass

DOUBT_SECONDS, DOUBT_SECONDS_MAX = 1.0, 60.0
_COUNT_MAX = 8  # More waits in vain do not make the doubt longer.


@dataclass
class Doubt:
    """How often one connection was a reason to wait in vain, one time after the other."""

    count: int = 0
    until: float = 0.0  # When it is believed again.


class JudgedWaits:
    """Waits of one kind, and the connections that are doubted. Times are seconds of one clock."""

    def __init__(self) -> None:
        self.kept = 0  # Waits that brought something.
        self.broken = 0  # Waits in vain.
        self.doubts: dict[int, Doubt] = {}  # By the numbers of open connections.

    def is_doubted(self, connection_id: int, now: float) -> bool:
        """Return True while no wait is to begin because of this connection."""
        doubt = self.doubts.get(connection_id)
        return doubt is not None and now < doubt.until

    def judge_wait(self, connection_id: int, is_kept: bool, now: float) -> None:
        """Note what came of a wait. In vain, it begins a doubt. Each next one is twice as long."""
        if is_kept:
            self.kept += 1
            self.doubts.pop(connection_id, None)
            return
        self.broken += 1
        doubt = self.doubts.setdefault(connection_id, Doubt())
        seconds = min(DOUBT_SECONDS * 2**doubt.count, DOUBT_SECONDS_MAX)
        doubt.count, doubt.until = min(doubt.count + 1, _COUNT_MAX), now + seconds

    def on_disconnect(self, connection_id: int) -> None:
        """A connection was closed, and its number is used no more."""
        self.doubts.pop(connection_id, None)
