"""The boundary to vLLM: no fault reaches the engine, each is counted, and a faulty side pauses.

A side is the scheduler role or the worker role of a connector, or a connector inside
MultiConnector. It is on, in a pause, or over. A pause ends with `resume`.
"""

import logging
import math
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import TypeVar

from hybridkv.core.metrics import Metric

Result = TypeVar("Result")

logger = logging.getLogger("vllm.hybridkv")  # Below vLLM's logger, so that its settings apply.

FAULTS_MAX = 20
FAULTS_SECONDS = 600.0
"""After FAULTS_MAX faults in so many seconds a side pauses."""
SLOW_MAX = 2
"""After so many slow hooks in FAULTS_SECONDS a side pauses, since the engine waits for hooks."""
PAUSE_SECONDS = 60.0  # The first pause; each further pause is twice as long.
PAUSE_SECONDS_MAX = 3600.0
"""The longest pause. A side that was on for so long begins with PAUSE_SECONDS again."""
FAULTS = "faults"
"""The family of the counters that `fault` returns."""


def fault(hook: str) -> Metric:
    """Return the counter of the faults of a hook, or of another part of a side."""
    return Metric(FAULTS, (hook,))


def event(name: str) -> Metric:
    """Return the counter of an event that has no metric of its own."""
    return Metric("events", (name,))


SWITCHED_OFF = event("switched_off")  # Hooks that were not called.
SLOW_HOOKS = event("slow_hooks")
QUARANTINED = event("quarantined")  # Pauses that began, and sides that are over.
RESUMED = event("begun_anew")  # Pauses that ended.


class HookGuard:
    """Runs the hooks of one side."""

    def __init__(
        self, role: str, clock: Callable[[], float] = time.monotonic, slow_seconds: float = math.inf
    ) -> None:
        """`role` names the side in the log. A hook that takes `slow_seconds` or longer is slow."""
        self.counters: Counter[Metric] = Counter()
        self.is_over = False  # True once the side is switched off for good.
        self.off_since = 0.0  # When the present pause began, in Unix time; 0 = no pause.
        self.pause_seconds = 0.0  # The length of the last pause.
        self._role = role
        self._faults: deque[float] = deque(maxlen=FAULTS_MAX)  # The times of the last faults.
        self._slow: deque[float] = deque(maxlen=SLOW_MAX)  # The times at which slow hooks ended.
        self._slow_seconds = slow_seconds
        self.clock = clock
        self.began_at = clock()  # When the side was switched on last.
        self._retry_at = 0.0

    @property
    def is_on(self) -> bool:
        """True while the side is on: neither in a pause nor over."""
        return not self.off_since and not self.is_over

    def run_hook(
        self,
        hook: str,
        work: Callable[[], Result],
        otherwise: Callable[[], Result],
        fatal: bool = False,
        *,
        shows_counters: bool = False,
        pauses: bool = True,
    ) -> Result:
        """Return `work()`. Where that raises or the hook does not run, return `otherwise()`.

        `otherwise` never raises. Which hooks run::

                                the side is on   in a pause   over
            default             yes              no           no
            fatal               yes              yes          no    a fault ends the side
            pauses=False        yes              yes          no
            shows_counters      yes              yes          yes   until the hook has failed once

        A hook is `fatal` if a fault leaves something half done. One that `shows_counters` shows
        people what was counted.
        """
        shows_counters = shows_counters and not self.counters[fault(hook)]
        goes_on = (fatal or not pauses) and not self.is_over
        if not (self.is_on or shows_counters or goes_on):
            self.counters[SWITCHED_OFF] += 1
            return otherwise()
        began = self.clock()
        try:
            return work()
        except Exception:  # No fault may reach the engine.
            self._faults.append(self.clock())
            lasted = self._faults[-1] - self._faults[0]
            is_flood = len(self._faults) == FAULTS_MAX and lasted <= FAULTS_SECONDS
            self.counters[fault(hook)] += 1
            text = "hybridkv: %s failed in %s; the engine goes on without the cache"
            logger.exception(text, self._role, hook)
            if fatal:
                self.switch_off_side(f"a fault in {hook}")
            elif is_flood:
                self.pause(f"{FAULTS_MAX} faults")
            return otherwise()
        finally:
            now = self.clock()
            if now - began >= self._slow_seconds:
                self._took(hook, now - began, now)

    def _took(self, hook: str, seconds: float, now: float) -> None:
        """Count a slow hook that ended at `now`, and pause after SLOW_MAX of them."""
        self.counters[SLOW_HOOKS] += 1
        logger.warning("hybridkv: the engine waited %d s for %s: %s", seconds, self._role, hook)
        self._slow.append(now)
        if len(self._slow) == SLOW_MAX and now - self._slow[0] <= FAULTS_SECONDS:
            self._slow.clear()
            self.pause(f"{SLOW_MAX} hooks took {self._slow_seconds:g} s or longer")

    def pause(self, why: str) -> None:
        """Begin a pause, in which hooks do not run, unless the side is off already."""
        if not self.is_on:
            return
        now = self.clock()
        is_rested = not self.pause_seconds or now - self.began_at >= PAUSE_SECONDS_MAX
        longer = min(2 * self.pause_seconds, PAUSE_SECONDS_MAX)
        self.pause_seconds = PAUSE_SECONDS if is_rested else longer
        self._retry_at, self.off_since = now + self.pause_seconds, time.time()
        self.counters[QUARANTINED] += 1
        text = "hybridkv: %s is switched off for %d s: %s"
        logger.error(text, self._role, self.pause_seconds, why)

    def switch_off_side(self, why: str) -> None:
        """Switch the side off until the engine starts again."""
        if not self.is_over:
            self.counters[QUARANTINED] += not self.off_since
            self.is_over = True
            text = "hybridkv: %s is switched off until the engine starts again: %s"
            logger.error(text, self._role, why)

    def resume(self, renew: Callable[[], object]) -> None:
        """Call `renew` after the end of a pause, and be on again.

        Where `renew` raises, the next pause begins. Without a pause that is over nothing happens.
        """
        if not self.off_since or self.is_over or self.clock() < self._retry_at:
            return
        self.off_since, self.began_at = 0.0, self.clock()
        self._faults.clear()
        self.counters[RESUMED] += 1
        text = "hybridkv: %s is on again after %d s"
        logger.warning(text, self._role, self.pause_seconds)
        self.run_hook("resume", renew, lambda: self.pause("it could not resume"))
