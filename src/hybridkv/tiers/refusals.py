"""For how long a tier has refused objects, by the reason, so that people hear of what lasts."""

from collections.abc import Collection
from dataclasses import dataclass

from hybridkv.core.refusals import Refusal
from hybridkv.tiers.jobs import JobKind

LASTING_SECONDS = 60.0
"""What a tier refuses for so long is reported: in its log, its status and a metric."""


@dataclass(slots=True)
class RefusedPeriod:
    """The time for which a tier refuses objects for one reason. Times are of the loop's clock."""

    began_at: float
    last_at: float  # The last refusal.
    kind: JobKind  # The kind of job that was refused last. A success of that kind may end it.
    is_partial: bool = False  # Whether jobs of that kind also succeeded since it began.
    is_logged: bool = False

    def is_lasting(self, now: float) -> bool:
        """Returns whether it is reported.

        Where everything is refused, it lasts until something is not. Where only some objects are,
        it lasts until the last refusal.
        """
        return (self.last_at if self.is_partial else now) - self.began_at >= LASTING_SECONDS

    def ends(self, now: float) -> bool:
        """Returns whether a success at `now` ends it."""
        is_quiet = now - self.last_at >= LASTING_SECONDS
        return is_quiet or (self.is_lasting(now) and not self.is_partial)


class RefusedPeriods:
    """The periods of one tier that have not ended."""

    def __init__(self) -> None:
        self._periods: dict[Refusal, RefusedPeriod] = {}

    def on_job_done(
        self, kind: JobKind, refusals: Collection[Refusal], is_accepted: bool, now: float
    ) -> list[Refusal]:
        """A job was refused for these reasons, and maybe accepted in part.

        Returns the reasons that ended and were logged before.
        """
        ended: list[Refusal] = []
        for refusal, period in list(self._periods.items()):
            if period.kind is not kind or not is_accepted:
                continue
            if refusal not in refusals and period.ends(now):
                del self._periods[refusal]
                ended += [refusal] if period.is_logged else []
            else:
                period.is_partial = True
        for refusal in refusals:
            period = self._periods.setdefault(refusal, RefusedPeriod(now, now, kind))
            period.last_at, period.kind = now, kind
        return ended

    def lasting(self, now: float) -> dict[Refusal, float]:
        """Returns the reasons that are reported, and for how many seconds each has lasted."""
        return {
            refusal: now - period.began_at
            for refusal, period in self._periods.items()
            if period.is_lasting(now)
        }

    def take_unlogged(self, now: float) -> list[Refusal]:
        """Returns the lasting reasons that are to be logged now, each once in its period."""
        new = [name for name in self.lasting(now) if not self._periods[name].is_logged]
        for refusal in new:
            self._periods[refusal].is_logged = True
        return new
