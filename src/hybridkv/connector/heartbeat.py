"""Steps of an idle engine, so that routers hear within a second what its node has.

vLLM publishes KV events in steps, and an engine without requests takes none. An engine that has
just begun is not asked by a router which does not know what it has.
"""

import threading
import time

from hybridkv.vllm.seams import EngineLoop

HEARTBEAT_SECONDS = 0.5
"""The time without a step after which the engine is asked for one."""


class Heartbeat:
    """A thread that asks an engine for a step now and then. It touches nothing else."""

    def __init__(self, loop: EngineLoop) -> None:
        self._asked_at = 0.0  # When a step was asked for that was not taken; 0.0 = none is.
        self._loop = loop
        self._stepped_at = time.monotonic()
        self._end = threading.Event()
        threading.Thread(target=self._run, name="hybridkv-heartbeat", daemon=True).start()

    @property
    def wants_step(self) -> bool:
        """True from the request for a step to the step: the engine has something to do.

        An engine that takes none for HEARTBEAT_SECONDS is not kept looking for work.
        """
        return time.monotonic() < self._asked_at + HEARTBEAT_SECONDS

    def on_step(self) -> None:
        """The engine has taken a step."""
        self._stepped_at, self._asked_at = time.monotonic(), 0.0

    def close(self) -> None:
        """Ask for no more steps."""
        self._end.set()

    def _run(self) -> None:
        while not self._end.wait(HEARTBEAT_SECONDS):
            now = time.monotonic()
            is_idle = now - self._stepped_at >= HEARTBEAT_SECONDS
            if is_idle and not self.wants_step and not self._loop.is_sleeping():
                self._asked_at = now
                self._loop.ask_for_step()
