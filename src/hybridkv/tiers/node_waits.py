"""Waits for what another node computes: tiers that both nodes use are asked again and again.

A daemon knows the promises of its own engines alone (tiers.promises). But an engine whose role is
`kv_consumer` says that other engines compute its prompts (`Lookup.computed_elsewhere`). Where RAM
and tiers have less than it asks for, they may still be written, by another node.

1. Tiers are asked in pauses that grow with the time since anything came, and more slowly with that
   of the whole wait. So no wait asks more than some 300 times, and it learns of the last object
   after a small share of the time that it took::

       nothing came since   0.1 s    1 s       4 s or more
       next pause           13 ms    125 ms    500 ms
       waits since          1 s      10 s      30 s, the longest wait
       next pause           16 ms    156 ms    469 ms, though chunks keep coming

2. The wait ends once the whole prompt is there, when computing what was missing would be over, or
   earlier: where nothing came for half of that time, though for no less than QUIET_SECONDS.
3. After a wait that brought nothing that connection does not wait for a while, twice as long each
   time.
"""

from hybridkv.tiers.doubts import JudgedWaits
from hybridkv.tiers.object_search import LookupRequest

PAUSE_SECONDS, PAUSE_SECONDS_MAX = 0.01, 0.5
PAUSE_SHARE, PAUSE_SHARE_ALL = 8, 64
"""A pause is 1/8 of the time since anything came or 1/64 of the wait so far, within these bounds.
"""
QUIET_SECONDS = 1.0
"""Nothing is taken for the end of what comes in less time. A step of an engine may be that long."""


class NodeWait:
    """The wait of one lookup. Times are seconds of the loop's clock."""

    def __init__(self, missing: int, now: float, latest: float) -> None:
        """`missing` objects of the prompt are nowhere. Computing it would be over at `latest`."""
        self.latest = latest
        self.asks_at = now + PAUSE_SECONDS  # When tiers are asked next.
        self._began_at = now
        self._quiet_seconds = max(QUIET_SECONDS, (latest - now) / 2)
        self._grown_at = now  # When anything came last.
        self._missing = missing

    def is_spent(self, now: float) -> bool:
        """Return True once all that was asked for is there, or waiting does not pay any more."""
        return not self._missing or now >= self.over_at()

    def over_at(self) -> float:
        """Return when it is over at the latest, as far as is known now."""
        return min(self.latest, self._grown_at + self._quiet_seconds)

    def note_answer(self, missing: int, has_come: bool, now: float) -> None:
        """Tiers have answered: some objects have come, or not, and `missing` are nowhere yet."""
        if has_come:
            self._grown_at = now
        self._missing = missing
        pause = max(
            PAUSE_SECONDS,
            (now - self._grown_at) / PAUSE_SHARE,
            (now - self._began_at) / PAUSE_SHARE_ALL,
        )
        self.asks_at = now + min(pause, PAUSE_SECONDS_MAX)


class NodeWaits(JudgedWaits):
    """What is known of all waits for other nodes. Those after which RAM had more were kept."""

    def __init__(self) -> None:
        super().__init__()
        self.questions = 0  # Times that tiers were asked again.

    def may_wait(self, request: LookupRequest, now: float) -> bool:
        """Return True if the prompt of a lookup may be computed by another node just now."""
        return request.computed_elsewhere and not self.is_doubted(request.connection_id, now)

    def begin_wait(
        self, request: LookupRequest, tokens: int, missing: int, now: float, latest: float
    ) -> NodeWait | None:
        """Return a wait for what RAM's hit of `tokens` tokens lacks, until `latest` or earlier.

        `missing` objects of the prompt are nowhere. None = computing is as soon.
        """
        tokens_missing = request.chunks * request.geometry.chunk_tokens - tokens
        latest = min(latest, request.deadline)
        if request.token_seconds:
            latest = min(latest, now + tokens_missing * request.token_seconds)
        if not missing or now >= latest or not self.may_wait(request, now):
            return None
        return NodeWait(missing, now, latest)
