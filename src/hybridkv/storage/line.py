"""One tier as the daemon's loop sees it: what its threads are doing, whether it is well, how fast it is."""

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

from hybridkv.core.breaker import Breaker
from hybridkv.core.sizes import format_size
from hybridkv.core.tiers import TierSpec, Write
from hybridkv.core.worth import Speed
from hybridkv.storage.tiers.base import DamagedError, FullError, MissingError, Tier, TierError
from hybridkv.storage.transfer import Job, Outcome, Work, WrongBytesError

logger = logging.getLogger("hybridkv.daemon")

READS_MAX = 4
WRITES_MAX = 4
FINDS_MAX = 2
THREADS = READS_MAX + WRITES_MAX + FINDS_MAX + 3
"""Of each tier: one for every job that may run at once, so that none waits for another that hangs."""
JOB_ITEMS_MAX = 64
JOB_BYTES_MAX = 8 << 20
JOB_BYTES_FIRST = 1 << 20
"""Of a job for a tier whose speed is not known."""
JOB_SECONDS = 0.1
"""How long a job should take at most: what it brings counts only when all of it is there."""
TEND_SECONDS = 1.0
OPEN_AGAIN_SECONDS = 5.0
HOUR_SECONDS = 3600.0
BURST_SHARE = 4
"""A quarter of what may be written in an hour may be written at once."""
COLD_SHARE = 2
"""What nobody has read is only written while more than half of that is left."""

_LONG = frozenset((Work.OPEN, Work.TEND, Work.CLEAR))
"""Work on all that there is takes as long as it takes; whether the tier hangs is seen by what is read and written."""
_LIMITS = {Work.READ: READS_MAX, Work.WRITE: WRITES_MAX, Work.FIND: FINDS_MAX, Work.TEND: 1, Work.DISCARD: 1}


class Line:
    """A tier, its jobs, its health. Times are seconds of the loop's clock."""

    def __init__(self, number: int, name: str, tier: Tier, spec: TierSpec, submit: Callable[[Job], None]) -> None:
        self.number = number
        self.name = name
        self.tier = tier
        self.spec = spec
        self.speed = Speed()
        """Bytes per second that lookups saw."""
        self.writing_speed = Speed()
        """Bytes per second of one job."""
        self.is_open = False
        self.counters: Counter[str] = Counter()
        self._submit = submit
        self._reading = Breaker()
        self._writing = Breaker()
        self._running: dict[Job, None] = {}
        self._busy: Counter[Work] = Counter()
        self._open_at = 0.0
        self._tend_at = 0.0
        self._burst = None if spec.hourly_bytes is None else spec.hourly_bytes / BURST_SHARE
        self._budget = self._burst or 0.0
        self._budget_at: float | None = None

    @property
    def bit(self) -> int:
        """Of Slot.kept."""
        return 1 << self.number

    @property
    def is_opening(self) -> bool:
        """Whether it may yet be open, or say why it never will be."""
        return self._busy[Work.OPEN] > 0

    @property
    def is_hung(self) -> bool:
        """Whether a thread of it has not come back in time."""
        return any(job.is_late for job in self._running)

    @property
    def is_shut(self) -> bool:
        """Whether it failed so often that it is only asked now and then."""
        return self._reading.is_open or self._writing.is_open

    @property
    def is_probed(self) -> bool:
        """Whether writes fail, and the next one, of one object, tells whether they still do."""
        return self._writing.is_open

    def reads(self, now: float) -> bool:
        """Whether it may be asked for something that it may have."""
        return self.is_open and not self.is_hung and self._reading.allows(now)

    def writes(self, now: float) -> bool:
        """Whether it may be given something."""
        well = self.is_open and not self.is_hung and self._writing.allows(now)
        return well and self.spec.write is not Write.OFF

    def has_thread(self, work: Work) -> bool:
        """Whether one more such job may run now."""
        return self._busy[work] < _LIMITS.get(work, 1)

    def job_bytes(self, work: Work, now: float) -> int:
        """The most that a job should move, unless one object is more."""
        if work is Work.WRITE and self.is_probed:
            return 0
        speed = self.writing_speed if work is Work.WRITE else self.speed
        if not speed.per_second:
            return JOB_BYTES_FIRST
        return min(JOB_BYTES_MAX, round(JOB_SECONDS / speed.seconds(1, now)))

    def admits(self, size: int, is_read: bool, now: float) -> bool:
        """Whether `size` bytes more may be written by the hourly bound; takes them from it if so."""
        if self._burst is None or self.spec.hourly_bytes is None:
            return True
        if self._budget_at is not None:
            self._budget += (now - self._budget_at) * self.spec.hourly_bytes / HOUR_SECONDS
        self._budget_at = now
        self._budget = min(self._budget, self._burst)
        if self._budget - size < (0.0 if is_read else self._burst / COLD_SHARE):
            self.counters["objects_not_admitted"] += 1
            return False
        self._budget -= size
        return True

    def submit(self, job: Job, now: float) -> None:
        """Give a job to a thread."""
        job.submitted_at = now
        self._running[job] = None
        self._busy[job.work] += 1
        if job.work in (Work.READ, Work.FIND):
            self._reading = self._reading.asked(now)
        elif job.work is Work.WRITE:
            self._writing = self._writing.asked(now)
        self._submit(job)

    def finished(self, job: Job, outcome: Outcome, now: float) -> None:
        """A job came back, maybe very late."""
        del self._running[job]
        self._busy[job.work] -= 1
        failed = outcome.error is not None or _is_sick(outcome.errors, job.work)
        if failed:
            self._tell(outcome)
        match job.work:
            case Work.OPEN:
                self.is_open = not failed
                self._open_at = now + OPEN_AGAIN_SECONDS
                self._reading = self._reading.failed(now) if failed else Breaker()
                self._writing = self._writing if failed else Breaker()
            case Work.READ | Work.FIND:
                self._reading = self._reading.failed(now) if failed else self._reading.succeeded()
            case Work.WRITE:
                self._writing = self._writing.failed(now) if failed else self._writing.succeeded()
                if not failed:
                    self.writing_speed = self.writing_speed.measured(job.size_bytes, now - job.submitted_at, now)
            case Work.TEND if failed:
                self._reading, self._writing = self._reading.failed(now), self._writing.failed(now)
        self._count(job, outcome)

    def tick(self, now: float) -> None:
        """What is due: a thread that does not come back is late, a tier is opened and tended."""
        for job in self._running:
            if not job.is_late and job.work not in _LONG and now - job.submitted_at > self.spec.timeout_seconds:
                job.is_late = True
                self.counters["jobs_late"] += 1
                logger.warning("%s hangs: it is left alone until it answers", self.name)
        if not self.is_open and not self._busy[Work.OPEN] and now >= self._open_at:
            self.submit(Job(Work.OPEN, self.number), now)
        elif self.is_open and not self.is_hung and not self._busy[Work.TEND] and now >= self._tend_at:
            self._tend_at = now + TEND_SECONDS
            self.submit(Job(Work.TEND, self.number), now)

    def wakes_at(self) -> float:
        """When `tick` is due again at the latest."""
        due = [
            job.submitted_at + self.spec.timeout_seconds
            for job in self._running
            if not job.is_late and job.work not in _LONG
        ]
        if not self.is_open and not self._busy[Work.OPEN]:
            due.append(self._open_at)
        elif self.is_open and not self.is_hung and not self._busy[Work.TEND]:
            due.append(self._tend_at)
        return min(due, default=math.inf)

    def values(self) -> Iterator[tuple[str, float]]:
        """Counters and gauges by name."""
        for counter, value in self.counters.items():
            yield counter, float(value)
        gauges: Mapping[str, float] = self.tier.gauges()
        yield from gauges.items()
        yield "jobs_running", float(len(self._running))
        yield "is_open", float(self.is_open)
        yield "breaker_open", float(self.is_shut or self.is_hung)
        yield "bytes_per_second", self.speed.per_second
        yield "written_bytes_per_second", self.writing_speed.per_second

    def _tell(self, outcome: Outcome) -> None:
        """The first failure in a row is worth a line."""
        error = outcome.error or next((one for one in outcome.errors if one is not None), None)
        if not (self._reading.failures or self._writing.failures):
            logger.warning("%s: %s", self.name, error)

    def _count(self, job: Job, outcome: Outcome) -> None:
        self.counters["failures"] += outcome.error is not None
        verb = {Work.READ: "read", Work.WRITE: "written"}.get(job.work)
        if verb is None or outcome.error is not None:
            return
        for item, error in zip(job.items, outcome.errors, strict=True):
            match error:
                case None:
                    self.counters[f"objects_{verb}"] += 1
                    self.counters[f"bytes_{verb}"] += item.record.size_bytes
                case MissingError():
                    self.counters["objects_missing"] += 1
                case DamagedError():
                    self.counters["objects_damaged"] += 1
                    logger.warning("%s: an object is damaged: %s", self.name, error)
                case WrongBytesError():
                    self.counters["objects_wrong_in_ram"] += 1
                case FullError():
                    self.counters["objects_refused"] += 1
                case _:
                    self.counters["failures"] += 1

    def describe(self) -> str:
        """One line for people."""
        bound = "" if self.spec.max_bytes is None else f", at most {format_size(self.spec.max_bytes)}"
        return f"{self.name}: written {self.spec.write}{bound}"


def _is_sick(errors: Sequence[TierError | None], work: Work) -> bool:
    """Whether what went wrong says something about the tier, and nothing went right."""
    excused = (MissingError, DamagedError, WrongBytesError) if work is Work.READ else (WrongBytesError,)
    told = [error for error in errors if not isinstance(error, excused)]
    return bool(told) and None not in told
