"""The threads of the tiers: each job runs in one of its tier's own, so that a tier that hangs holds up no other."""

import threading
from collections.abc import Callable
from queue import SimpleQueue

from hybridkv.storage.line import THREADS
from hybridkv.storage.tiers.base import Tier, TierError
from hybridkv.storage.transfer import Job, Outcome, execute


class TierThreads:
    """Threads of one tier, started as they are needed. They never keep the process from ending."""

    def __init__(self, tier: Tier, memory: memoryview, done: Callable[[Job, Outcome], None]) -> None:
        """`done` is called by the threads, and by `submit` where there are none."""
        self._tier = tier
        self._memory = memory
        self._done = done
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._idle = 0
        """Threads without a job; below 0, so many jobs wait for one."""

    def submit(self, job: Job) -> None:
        """Have a job done. Where no thread can be started it waits for another one's end, or fails."""
        with self._lock:
            self._idle -= 1
            missing = -self._idle
        for _ in range(min(missing, THREADS - len(self._threads))):
            thread = threading.Thread(target=self._work, name=f"tier-{self._tier.name}", daemon=True)
            try:
                thread.start()
            except RuntimeError:
                break
            self._threads.append(thread)
            self._more_idle()
        if not self._threads:
            self._more_idle()
            self._done(job, Outcome(error=TierError("no thread can be started")))
            return
        self._jobs.put(job)

    def close(self, seconds: float) -> bool:
        """Let them end, and wait so long for those that are at work; then the tier's things are let go of.

        Whether all of them have ended: otherwise the tier, and the memory, may still be used.
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
            except BaseException as error:  # noqa: BLE001  # a panic in a library: a job must come to an end
                outcome = Outcome(error=TierError(f"{type(error).__name__}: {error}"))
            self._more_idle()
            self._done(job, outcome)

    def _more_idle(self) -> None:
        with self._lock:
            self._idle += 1
