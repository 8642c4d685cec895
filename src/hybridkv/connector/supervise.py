"""The boundary to vLLM: nothing raises into the engine, every fault is counted, a faulty side switches itself off."""

import logging
from collections import Counter
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")

logger = logging.getLogger("vllm.hybridkv")
"""Below vLLM's logger, so that its settings apply."""

FAULTS_MAX = 20
"""After this many faults a side does nothing more but what keeps the engine going."""


class Supervisor:
    """Runs the hooks of one role, or of one connector of several. `counters` holds declines and faults by reason."""

    def __init__(self, role: str) -> None:
        self.counters: Counter[str] = Counter()
        self._role = role
        self._faults = 0

    @property
    def healthy(self) -> bool:
        """False once there were too many faults, or a fatal one."""
        return self._faults < FAULTS_MAX

    def run(
        self,
        hook: str,
        work: Callable[[], Result],
        otherwise: Callable[[], Result],
        fatal: bool = False,
        *,
        tells: bool = False,
    ) -> Result:
        """`work()`, or `otherwise()` where work raises or the side is switched off; `otherwise` must not raise.

        With `fatal` the first fault is one too many: whatever the hook left half done is not to be trusted. A hook that
        only `tells` people what was counted goes on when the side is switched off, until it fails itself.
        """
        if not self.healthy and not (tells and not self.counters[f"fault_{hook}"]):
            self.counters["switched_off"] += 1
            return otherwise()
        try:
            return work()
        except Exception:  # the supervised boundary (DESIGN section 6)
            self._faults += 1
            self.counters[f"fault_{hook}"] += 1
            logger.exception("hybridkv: %s failed in %s; the engine goes on without the cache", self._role, hook)
            if fatal or not self.healthy:
                self.switch_off(f"a fault in {hook}" if fatal else f"{FAULTS_MAX} faults")
            return otherwise()

    def switch_off(self, why: str) -> None:
        """From now on nothing of this side is run."""
        self._faults = FAULTS_MAX
        self.counters["quarantined"] = 1
        logger.error("hybridkv: %s is switched off: %s", self._role, why)
