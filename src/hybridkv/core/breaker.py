"""A circuit breaker: after several failures in a row nothing is asked until a pause has ended."""

from dataclasses import dataclass, replace

FAILURES_TO_OPEN = 3
PAUSE_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Breaker:
    """Closed (asks), open (asks nothing until `retry_at`), or half-open (asks once and decides)."""

    failures: int = 0
    retry_at: float = 0.0

    @property
    def is_open(self) -> bool:
        """Whether requests are declined, but for one probe per pause."""
        return self.failures >= FAILURES_TO_OPEN

    def allows(self, now: float) -> bool:
        """Whether a request may be sent at `now` (seconds)."""
        return not self.is_open or now >= self.retry_at

    def asked(self, now: float) -> "Breaker":
        """After sending: an open breaker lets no second probe out within one pause."""
        return replace(self, retry_at=now + PAUSE_SECONDS) if self.is_open else self

    def failed(self, now: float) -> "Breaker":
        """After a timeout or an error."""
        return Breaker(self.failures + 1, now + PAUSE_SECONDS)

    def succeeded(self) -> "Breaker":
        """After an answer in time."""
        return Breaker()
