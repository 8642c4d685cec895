"""The boundary to vLLM: no fault reaches the engine, each is counted, and a faulty side ends."""

import logging
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")

logger = logging.getLogger("vllm.hybridkv")  # Below vLLM's logger, so that its settings apply.

FAULTS_MAX = 20
FAULTS_SECONDS = 600.0
"""After FAULTS_MAX faults in so many seconds a side only does what keeps the engine going."""


class Supervisor:
    """Runs the hooks of one role, or of one connector of several."""

    def __init__(self, role: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.counters: Counter[str] = Counter()  # Declines and faults by reason.
        self._role = role
        self._faults: deque[float] = deque(maxlen=FAULTS_MAX)  # When the last ones were.
        self._is_off = False
        self._clock = clock

    @property
    def healthy(self) -> bool:
        """False once there were too many faults in a short time, or a fatal one."""
        return not self._is_off

    def run(
        self,
        hook: str,
        work: Callable[[], Result],
        otherwise: Callable[[], Result],
        fatal: bool = False,
        *,
        tells: bool = False,
    ) -> Result:
        """`work()`, or `otherwise()`, which never raises, where work raises or the side is off.

        With `fatal` the first fault switches the side off, because the hook left something half
        done. A hook that `tells` people what was counted goes on afterwards, until it fails itself.
        """
        if not self.healthy and not (tells and not self.counters[f"fault_{hook}"]):
            self.counters["switched_off"] += 1
            return otherwise()
        try:
            return work()
        except Exception:  # the supervised boundary
            self._faults.append(self._clock())
            lasted = self._faults[-1] - self._faults[0]
            is_flood = len(self._faults) == FAULTS_MAX and lasted <= FAULTS_SECONDS
            self.counters[f"fault_{hook}"] += 1
            text = "hybridkv: %s failed in %s; the engine goes on without the cache"
            logger.exception(text, self._role, hook)
            if fatal or is_flood:
                self.switch_off(f"a fault in {hook}" if fatal else f"{FAULTS_MAX} faults")
            return otherwise()

    def switch_off(self, why: str) -> None:
        """Run nothing of this side from now on."""
        self._is_off = True
        self.counters["quarantined"] = 1
        logger.error("hybridkv: %s is switched off: %s", self._role, why)
