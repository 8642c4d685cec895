"""A circuit breaker: after FAILURES_TO_OPEN failures in a row, requests pause for PAUSE_SECONDS."""

from dataclasses import dataclass, replace

FAILURES_TO_OPEN = 3
PAUSE_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Breaker:
    """A value: closed (all requests pass), or open (one probe passes in each pause).

    `retry_at` is when the next probe may pass, in seconds.
    """

    failures: int = 0
    retry_at: float = 0.0

    @property
    def is_open(self) -> bool:
        """True while requests are declined, except for one probe in each pause."""
        return self.failures >= FAILURES_TO_OPEN

    def allows(self, now: float) -> bool:
        """Returns whether a request may be sent at `now`, in seconds."""
        return not self.is_open or now >= self.retry_at

    def on_request(self, now: float) -> "Breaker":
        """Returns the breaker after a request was sent: an open one lets no second probe pass."""
        return replace(self, retry_at=now + PAUSE_SECONDS) if self.is_open else self

    def on_failure(self, now: float) -> "Breaker":
        """Returns the breaker after a timeout or an error at `now`."""
        return Breaker(self.failures + 1, now + PAUSE_SECONDS)

    def on_success(self) -> "Breaker":
        """Returns the breaker after an answer that came in time: it is closed."""
        return Breaker()
