"""The threads of a tier, in which its jobs run, so that a tier that hangs blocks no other tier."""

import threading
from collections.abc import Callable
from queue import SimpleQueue

from hybridkv.tiers.contract import Tier, TierError
from hybridkv.tiers.jobs import JobOutcome, TierJob, execute
from hybridkv.tiers.state import THREADS


class TierThreads:
    """The threads of one tier, started as needed. They do not keep the process from ending."""

    def __init__(
        self, tier: Tier, memory: memoryview, done: Callable[[TierJob, JobOutcome], None]
    ) -> None:
        """`done` is called by a thread after each job, or by `submit` if no thread starts."""
        self._tier = tier
        self._memory = memory
        self._done = done
        self._jobs: SimpleQueue[TierJob | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._idle = 0
        """Threads without a job; if negative, the number of jobs that wait for a thread."""

    def submit(self, job: TierJob) -> None:
        """Give a job to a thread. If none can be started, it waits for a running one, or fails."""
        with self._lock:
            self._idle -= 1
            missing = -self._idle
        for _ in range(min(missing, THREADS - len(self._threads))):
            name = f"tier-{self._tier.name}"
            thread = threading.Thread(target=self._work, name=name, daemon=True)
            try:
                thread.start()
            except RuntimeError:
                break
            self._threads.append(thread)
            self._more_idle()
        if not self._threads:
            self._more_idle()
            self._done(job, JobOutcome(error=TierError("no thread can be started")))
            return
        self._jobs.put(job)

    def close(self, seconds: float) -> bool:
        """End the threads, wait at most `seconds` for running jobs, and close the tier.

        Returns whether all threads have ended: otherwise the tier and the memory may still be used.
        """
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join(seconds / max(1, len(self._threads)))
        closing = threading.Thread(target=self._tier.close, daemon=True)
        closing.start()
        closing.join(seconds)
        return not any(thread.is_alive() for thread in self._threads)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                outcome = execute(self._tier, job, self._memory)
            except BaseException as error:  # noqa: BLE001  # a library's panic must not lose a job
                outcome = JobOutcome(error=TierError(f"{type(error).__name__}: {error}"))
            self._more_idle()
            self._done(job, outcome)

    def _more_idle(self) -> None:
        with self._lock:
            self._idle += 1
