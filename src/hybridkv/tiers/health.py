"""One tier as the daemon's loop sees it: its running jobs, its health, its speed."""

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from hybridkv.core.breaker import FAILURES_TO_OPEN, Breaker
from hybridkv.core.refusals import REFUSALS, Refusal, describe_refusal
from hybridkv.core.speed import Speed
from hybridkv.core.tier_urls import TierSpec, WritePolicy
from hybridkv.tiers.contract import (
    DamagedError,
    FullError,
    MissingError,
    Tier,
    TierError,
    UndecodableError,
)
from hybridkv.tiers.jobs import LIMITS, JobItem, JobKind, JobOutcome, TierJob, WrongBytesError
from hybridkv.tiers.refusals import RefusedPeriods

logger = logging.getLogger("hybridkv.daemon")

JOB_ITEMS_MAX = 64
JOB_BYTES_MAX = 8 << 20
JOB_BYTES_FIRST = 1 << 20  # Bytes of a job for a tier whose speed is not known.
JOB_SECONDS = 0.1
"""The longest that a job should take, because its objects count only when all are there."""
SUSPECTS_MAX = 1 << 14  # With more suspects, damage is found record by record.
TEND_SECONDS = 1.0
IDLE_SECONDS = 5.0  # Without a request for so long, upkeep alone shows whether a tier is well.
OPEN_AGAIN_SECONDS = 5.0
FAILURES_TO_REOPEN = FAILURES_TO_OPEN + 3
"""After so many failures in a row a tier is closed, and opened with what its settings say then."""
REOPEN_SECONDS_MAX = 60.0
"""The longest pause between two such times. The first is OPEN_AGAIN_SECONDS, each next the double.
"""
FAILURE_LOG_SECONDS = 60.0  # Without a failure for so long, the next one is logged.
HOUR_SECONDS = 3600.0
BURST_SHARE = 4  # A quarter of an hour's bytes may be written at once.
COLD_SHARE = 2  # Objects that nobody has read are written while half of the burst is left.

_LONG = frozenset((JobKind.OPEN, JobKind.TEND, JobKind.CLEAR, JobKind.LIST, JobKind.ERASE))
"""Jobs on all records, or for people, have no time limit. Others show whether the tier hangs."""
ERROR_COUNTERS: dict[type[TierError], str] = {
    MissingError: "objects_missing",
    DamagedError: "objects_damaged",
    UndecodableError: "objects_undecodable",
    WrongBytesError: "objects_wrong_in_ram",
    FullError: "objects_refused",
}
"""The counter of items that failed with an error. Any other error counts as "failures"."""


class MoveCounters(NamedTuple):
    """The counters of what a job has moved."""

    objects: str
    bytes: str


MOVE_COUNTERS: dict[JobKind, MoveCounters] = {
    JobKind.READ: MoveCounters("objects_read", "bytes_read"),
    JobKind.WRITE: MoveCounters("objects_written", "bytes_written"),
}


class TierState:
    """A tier, its running jobs and its health. Times are seconds of the loop's clock."""

    def __init__(
        self, number: int, name: str, tier: Tier, spec: TierSpec, submit: Callable[[TierJob], None]
    ) -> None:
        self.number = number
        self.bit = 1 << number  # The tier's bit of Slot.in_tiers.
        self.name = name
        self._where = f"{name} ({spec.shown})"  # For the log.
        self.tier = tier
        self.peek = tier.peek
        self.spec = spec
        self.speed = Speed()  # Bytes per second that lookups saw, over all threads.
        self.writing_speed = Speed()  # Bytes per second of one job.
        self.is_open = False
        self._refused = RefusedPeriods()
        self.refusals: Mapping[Refusal, float] = {}
        """The reasons for which it refuses objects for longer than a minute, and the seconds."""
        self.counters: Counter[str] = Counter()
        self.suspects: set[bytes] = set()
        """Keys of records that may be damaged, until they are read whole or written anew."""
        self._clears_again = False  # Whether `clear` was called while a CLEAR job ran.
        self._submit = submit
        self._reading = Breaker()
        self.writing = Breaker()  # Of writes. While it is open, the next write is a probe.
        self.running: dict[TierJob, None] = {}
        self._busy: Counter[JobKind] = Counter()
        self._open_at = 0.0
        self._tend_at = 0.0
        self._tended_at = 0.0  # When its upkeep succeeded last.
        self._fails_for_long = False  # It is to be closed and opened again.
        self._reopen_at = -math.inf  # Before that it is not opened again for its failures.
        self._reopen_pause = OPEN_AGAIN_SECONDS
        self._failure_log_at = 0.0  # Before that, failures go on that the log has.
        self._open_error = ""  # The last error of `open` that the log has. Empty = it was open.
        self._budget = (spec.hourly_bytes or 0) / BURST_SHARE
        """Bytes that the hourly bound admits at once, as of `_budget_at`."""
        self._budget_at = 0.0

    @property
    def is_hung(self) -> bool:
        """True while a job of the tier is late, so that the tier is left alone."""
        return any(job.is_late for job in self.running)

    @property
    def is_shut(self) -> bool:
        """True while the tier has failed so often that only probes reach it.

        If nobody asks it any more, its upkeep says whether it is well again.
        """
        return any(
            breaker.is_open and self._tended_at < breaker.retry_at + IDLE_SECONDS
            for breaker in (self._reading, self.writing)
        )

    def may_read(self, now: float) -> bool:
        """Returns whether the tier may be read from now."""
        return self.is_open and not self.is_hung and self._reading.allows(now)

    def may_write(self, now: float) -> bool:
        """Returns whether the tier may be written to now."""
        is_well = self.is_open and not self.is_hung and self.writing.allows(now)
        return is_well and self.spec.write is not WritePolicy.OFF

    def has_thread(self, kind: JobKind, spare: int = 0) -> bool:
        """Returns whether one more job of that kind may run now, and after it `spare` more."""
        return self._busy[kind] + spare < LIMITS.get(kind, 1)

    def job_bytes(self, kind: JobKind, now: float) -> int:
        """Returns the most bytes that a job should move. One object may have more."""
        if kind is JobKind.WRITE and self.writing.is_open:
            return 0
        speed = self.writing_speed if kind is JobKind.WRITE else self.speed
        if not speed.per_second:
            return JOB_BYTES_FIRST
        return min(JOB_BYTES_MAX, round(JOB_SECONDS / speed.seconds(1, now)))

    def charge_hour(self, size: int, is_read: bool, now: float) -> bool:
        """Charge the hourly bound with `size` bytes. Returns False where it is used up."""
        hourly = self.spec.hourly_bytes
        if hourly is None:
            return True
        burst, earned = hourly / BURST_SHARE, (now - self._budget_at) * hourly / HOUR_SECONDS
        self._budget, self._budget_at = min(self._budget + earned, burst), now
        if self._budget - size < (0.0 if is_read else burst / COLD_SHARE):
            self.counters["objects_not_admitted"] += 1
            return False
        self._budget -= size
        return True

    def refund(self, size: int) -> None:
        """Take back a charge of the hourly bound, because the tier had the object already."""
        if self.spec.hourly_bytes is not None:
            self._budget += size

    def remove_records(self, now: float) -> None:
        """Remove all records. While that is being done, remove them once more afterwards."""
        if not self.is_open:
            return
        if self.has_thread(JobKind.CLEAR):
            self.submit_job(TierJob(JobKind.CLEAR, self.number), now)
        else:
            self._clears_again = True

    def suspect(self, keys: Iterable[bytes]) -> None:
        """Remember records that may be damaged, because a record beside them is.

        They are read as before. The next write of their objects replaces them.
        """
        for key in keys:
            if len(self.suspects) < SUSPECTS_MAX:
                self.suspects.add(key)

    def submit_job(self, job: TierJob, now: float) -> None:
        """Give a job to a thread."""
        job.submitted_at = now
        self.running[job] = None
        self._busy[job.kind] += 1
        if job.kind in (JobKind.READ, JobKind.FIND, JobKind.USE):
            self._reading = self._reading.on_request(now)
        elif job.kind is JobKind.WRITE:
            self.writing = self.writing.on_request(now)
        self._submit(job)

    def on_job_done(self, job: TierJob, outcome: JobOutcome, now: float) -> None:
        """A job has ended, maybe very late."""
        del self.running[job]
        self._busy[job.kind] -= 1
        failed = outcome.error is not None or _is_ill(outcome.errors, job.kind)
        first = next(filter(None, (outcome.error, *outcome.errors)), None)
        refusal = first.refusal if first is not None else None
        self._note_refusals(job, outcome, now)
        if job.kind is JobKind.OPEN:
            self._log_open(first)
        elif failed and refusal is None:
            if now >= self._failure_log_at:
                logger.warning("%s: %s", self.name, first)
            self._failure_log_at = now + FAILURE_LOG_SECONDS

        def updated(breaker: Breaker) -> Breaker:
            return breaker.on_failure(now) if failed else breaker.on_success()

        match job.kind:
            case JobKind.OPEN:
                self.is_open, self._open_at = not failed, now + OPEN_AGAIN_SECONDS
                self._reading = updated(self._reading)
                self.writing = self.writing if failed else Breaker()
            case JobKind.READ | JobKind.FIND | JobKind.USE:
                self._reading = updated(self._reading)
            case JobKind.WRITE:
                self.writing = updated(self.writing)
                written = [item.record.size_bytes for item, _ in _moved(job, outcome)]
                if not failed and written:
                    seconds = now - job.submitted_at
                    self.writing_speed = self.writing_speed.measured(sum(written), seconds, now)
            case JobKind.CLEAR if self._clears_again:
                self._clears_again = False
                self.submit_job(TierJob(JobKind.CLEAR, self.number), now)
            case JobKind.TEND if failed:
                self.writing = updated(self.writing)
                self._reading = updated(self._reading) if refusal is None else self._reading
            case JobKind.TEND:
                self._tended_at = now
        failures = max(self._reading.failures, self.writing.failures)
        is_due = failures >= FAILURES_TO_REOPEN and now >= self._reopen_at
        if failed and refusal is None and self.is_open and is_due:
            self._fails_for_long = True
        self._count(job, outcome)

    def tick(self, now: float) -> None:
        """Mark late jobs. Open or tend the tier where that is due."""
        for job in self.running:
            if now > self._late_at(job):
                job.is_late = True
                self.counters["jobs_late"] += 1
                logger.warning("%s hangs: it is left alone until it answers", self.name)
        self.refusals = self._refused.lasting(now)
        for refusal in self._refused.take_unlogged(now):
            logger.warning("%s refuses objects: %s", self._where, describe_refusal(refusal))
        due_at, kind = self._upkeep()
        if now >= due_at:
            if self._fails_for_long:
                self._begin_anew(now)
            self._tend_at = now + TEND_SECONDS if self.is_open else self._tend_at
            self.submit_job(TierJob(kind, self.number), now)

    def wakes_at(self) -> float:
        """Returns when `tick` is due again at the latest."""
        return min([self._upkeep()[0], *map(self._late_at, self.running)])

    def counted(self) -> dict[str, float]:
        """Returns what was counted, and what the tier itself knows, by the names of `TIER`."""
        return {**self.counters, **self.tier.gauges()}

    def _begin_anew(self, now: float) -> None:
        """Ask nothing of the tier until it was closed, and opened with what its settings say."""
        logger.warning("%s fails again and again: it is opened anew", self.name)
        self.counters["times_reopened"] += 1
        self.is_open = self._fails_for_long = False
        is_first = now - self._reopen_at > REOPEN_SECONDS_MAX
        pause = OPEN_AGAIN_SECONDS if is_first else 2 * self._reopen_pause
        self._reopen_pause = min(pause, REOPEN_SECONDS_MAX)
        self._reopen_at = now + self._reopen_pause

    def _log_open(self, error: TierError | None) -> None:
        """Log that the tier cannot be opened, once for each reason, and that it is open again."""
        text = "" if error is None else str(error)
        if text and text != self._open_error:
            logger.warning("%s cannot be opened: %s", self.name, text)
        elif self._open_error and not text:
            logger.warning("%s is open again", self.name)
        self._open_error = text

    def _note_refusals(self, job: TierJob, outcome: JobOutcome, now: float) -> None:
        """Remember what the job says about whether the tier takes objects."""
        errors = outcome.errors if outcome.error is None else (outcome.error,)
        refusals = {error.refusal for error in errors if error and error.refusal}
        is_accepted = outcome.error is None
        if job.kind is JobKind.WRITE:
            is_accepted = any(error is None for _, error in _moved(job, outcome))
        for refusal in self._refused.on_job_done(job.kind, refusals, is_accepted, now):
            text = "%s takes objects again, which it had refused: %s"
            logger.warning(text, self._where, REFUSALS[refusal].cause)

    def _late_at(self, job: TierJob) -> float:
        """Returns when the job becomes late. Infinity = it is late already, or has no limit."""
        is_timed = not job.is_late and job.kind not in _LONG
        return job.submitted_at + self.spec.timeout_seconds if is_timed else math.inf

    def _upkeep(self) -> tuple[float, JobKind]:
        """Returns when the tier is to be opened or tended next, and which of the two."""
        kind = JobKind.TEND if self.is_open else JobKind.OPEN
        if self._busy[kind] or (self.is_open and self.is_hung):
            return math.inf, kind
        if self._fails_for_long:
            return 0.0, JobKind.OPEN
        return self._tend_at if self.is_open else self._open_at, kind

    def _count(self, job: TierJob, outcome: JobOutcome) -> None:
        self.counters["failures"] += outcome.error is not None
        self.counters["finds_cut"] += None in outcome.found
        counters = MOVE_COUNTERS.get(job.kind)
        if counters is None or outcome.error is not None:
            return
        for item, error in _moved(job, outcome):
            if error is None:
                self.counters[counters.objects] += 1
                self.counters[counters.bytes] += item.record.size_bytes
            else:
                self.counters[ERROR_COUNTERS.get(type(error), "failures")] += 1
            if isinstance(error, DamagedError):
                logger.warning("%s: an object is damaged: %s", self.name, error)
            if isinstance(error, UndecodableError) and self.counters["objects_undecodable"] == 1:
                text = "%s: an object cannot be decoded, which is a miss: %s"
                logger.warning(text, self.name, error)


def _moved(job: TierJob, outcome: JobOutcome) -> Iterator[tuple[JobItem, TierError | None]]:
    """Yields each item of a READ or WRITE with its error, except those that were there."""
    kept = outcome.found or [False] * len(job.items)
    errors = outcome.errors or [outcome.error] * len(job.items)
    for item, error, is_kept in zip(job.items, errors, kept, strict=True):
        if not is_kept:
            yield item, error


def _is_ill(errors: Sequence[TierError | None], kind: JobKind) -> bool:
    """Returns whether an error is the tier's fault and no item succeeded."""
    excused: tuple[type[TierError], ...] = (WrongBytesError,)
    if kind is JobKind.READ:
        excused = (MissingError, DamagedError, UndecodableError, WrongBytesError)
    faults = [error for error in errors if not isinstance(error, excused)]
    return bool(faults) and None not in faults
