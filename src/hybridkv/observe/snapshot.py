"""What the daemon's loop hands to other threads that show it. Nothing in it changes later."""

from dataclasses import dataclass

from hybridkv.observe.catalog import Values
from hybridkv.observe.history import RequestOutcome
from hybridkv.observe.series import Past, Sample
from hybridkv.wire.status import GroupStatus, SessionStatus, TierStatus

GROUPS_SHOWN_MAX = 64
"""Groups of all identities; the smaller ones are summed up."""
SESSIONS_SHOWN_MAX = 256
DECISIONS_SHOWN_MAX = 50


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The daemon at one moment. Times are seconds of its clock."""

    now: float
    started_at: float
    values: Values
    waits: tuple[tuple[float, int], ...]
    """Lookups that waited for tiers, as Histogram.cumulative gives them."""
    groups: tuple[GroupStatus, ...]
    sessions: tuple[SessionStatus, ...]
    tiers: tuple[TierStatus, ...]
    columns: tuple[tuple[str, str], ...]
    """The (metric, label) of each of a sample's values."""
    hour: tuple[Sample, ...]
    day: tuple[Sample, ...]
    decisions: tuple[RequestOutcome, ...]
    """The latest first."""

    def since(self, seconds: float) -> Past:
        """The begin and the end of the last `seconds` of the hour, or of all that is known."""
        samples = self.hour
        if not samples or samples[-1].at < self.now:
            values = tuple(self.values.of(*column) for column in self.columns)
            samples = (*samples, Sample(self.now, values))
        return Past(self.columns, samples).since(self.now - seconds)
