"""The threads of a tier: one that hangs delays neither the others nor `close`."""

import threading
from collections.abc import Sequence
from queue import SimpleQueue
from typing import NamedTuple

import pytest

from hybridkv.tiers.contract import Tier
from hybridkv.tiers.jobs import THREADS, JobItem, JobKind, JobOutcome, TierJob, TierThreads
from hybridkv.tiers.record import Record, RecordName
from tests.unit.daemon.dict_tier import DictTier

SECONDS = 10.0
"""Far more than anything here takes."""


class HangingTier(DictTier):
    """A call of `find` returns when it is let go."""

    def __init__(self) -> None:
        super().__init__({}, is_remote=True)
        self.hangs, self.goes_on = threading.Event(), threading.Event()

    def find(self, keys: Sequence[bytes]) -> list[bool]:
        self.hangs.set()
        assert self.goes_on.wait(SECONDS)
        return super().find(keys)


class FinishedJob(NamedTuple):
    job: TierJob
    outcome: JobOutcome


def start_threads(tier: Tier) -> tuple[TierThreads, SimpleQueue[FinishedJob]]:
    """Returns the threads of a tier, and the queue of what they have done."""
    done: SimpleQueue[FinishedJob] = SimpleQueue()
    memory = memoryview(bytearray(4096))
    threads = TierThreads(tier, memory, lambda job, outcome: done.put(FinishedJob(job, outcome)))
    return threads, done


def no_more_threads(thread: threading.Thread) -> None:
    """As where the user may have no more (ulimit -u), or a control group's bound is reached."""
    raise RuntimeError("can't start new thread")


def test_where_no_thread_can_be_started_a_job_fails_or_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tier = HangingTier()
    threads, done = start_threads(tier)
    with monkeypatch.context() as shortage:
        shortage.setattr(threading.Thread, "start", no_more_threads)
        tend = TierJob(JobKind.TEND, 0)
        threads.start_or_queue(tend)
        job, outcome = done.get(timeout=SECONDS)
        assert job is tend
        assert str(outcome.error) == "no thread can be started"
    hung, waits = find(), TierJob(JobKind.TEND, 0)
    threads.start_or_queue(hung)
    assert tier.hangs.wait(SECONDS)
    with monkeypatch.context() as shortage:
        shortage.setattr(threading.Thread, "start", no_more_threads)
        threads.start_or_queue(waits)
    tier.goes_on.set()
    assert [done.get(timeout=SECONDS).job for _ in range(2)] == [hung, waits]
    assert threads.close(SECONDS)


def test_after_a_shortage_of_threads_no_job_waits_for_one_that_hangs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tier = HangingTier()
    threads, done = start_threads(tier)

    hung, waits, tend = find(), TierJob(JobKind.TEND, 0), TierJob(JobKind.TEND, 0)
    threads.start_or_queue(hung)
    assert tier.hangs.wait(SECONDS)
    with monkeypatch.context() as shortage:
        shortage.setattr(threading.Thread, "start", no_more_threads)
        threads.start_or_queue(waits)
    tier.goes_on.set()
    assert [done.get(timeout=SECONDS).job for _ in range(2)] == [hung, waits]
    tier.hangs.clear()
    tier.goes_on.clear()
    threads.start_or_queue(hung)
    assert tier.hangs.wait(SECONDS)
    threads.start_or_queue(tend)
    assert done.get(timeout=SECONDS).job is tend, (
        "the one that waited had a thread that was counted as free"
    )
    tier.goes_on.set()
    assert done.get(timeout=SECONDS).job is hung
    assert threads.close(SECONDS)


def test_the_first_job_after_a_shortage_of_threads_starts_those_that_were_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tier = HangingTier()
    threads, done = start_threads(tier)
    tend = TierJob(JobKind.TEND, 0)
    threads.start_or_queue(find())
    assert tier.hangs.wait(SECONDS)
    with monkeypatch.context() as shortage:
        shortage.setattr(threading.Thread, "start", no_more_threads)
        threads.start_or_queue(find())
    threads.start_or_queue(tend)
    assert done.get(timeout=SECONDS).job is tend, "it was behind one that waited, and hangs"
    tier.goes_on.set()
    assert [done.get(timeout=SECONDS).job.kind for _ in range(2)] == [JobKind.FIND] * 2
    assert threads.close(SECONDS)


class PanicError(BaseException):
    """As the one that a library in another language raises."""


class PanickingTier(DictTier):
    """A tier whose `tend` panics."""

    def tend(self) -> None:
        raise PanicError("index out of bounds")


def test_a_panic_in_a_library_is_a_failure_and_ends_no_thread() -> None:
    threads, done = start_threads(PanickingTier({}, is_remote=True))
    for _ in range(THREADS + 1):
        tend = TierJob(JobKind.TEND, 0)
        threads.start_or_queue(tend)
        job, outcome = done.get(timeout=SECONDS)
        assert job is tend
        assert str(outcome.error) == "PanicError: index out of bounds"
    well = find()
    threads.start_or_queue(well)
    assert done.get(timeout=SECONDS) == (well, JobOutcome(found=[False]))
    assert threads.close(SECONDS)


def find() -> TierJob:
    return TierJob(JobKind.FIND, 0, [JobItem(Record(RecordName(bytes(32), 0, bytes(32)), 0, 0, 0))])


def test_a_call_that_hangs_holds_up_no_other_and_is_told_of_at_the_end() -> None:
    tier = HangingTier()
    threads, done = start_threads(tier)
    hung, tend = find(), TierJob(JobKind.TEND, 0)
    threads.start_or_queue(hung)
    assert tier.hangs.wait(SECONDS)
    threads.start_or_queue(tend)
    assert done.get(timeout=SECONDS) == (tend, JobOutcome())
    assert not threads.close(0.01), "its memory may still be used"
    tier.goes_on.set()
    assert done.get(timeout=SECONDS) == (hung, JobOutcome(found=[False]))
    assert threads.close(SECONDS)
