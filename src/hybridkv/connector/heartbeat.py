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
        self.is_due = False
        """True from the request for a step to the step: the engine has something to do."""
        self._loop = loop
        self._stepped_at = time.monotonic()
        self._end = threading.Event()
        threading.Thread(target=self._run, name="hybridkv-heartbeat", daemon=True).start()

    def on_step(self) -> None:
        """The engine has taken a step."""
        self._stepped_at, self.is_due = time.monotonic(), False

    def close(self) -> None:
        """Ask for no more steps."""
        self._end.set()

    def _run(self) -> None:
        while not self._end.wait(HEARTBEAT_SECONDS):
            is_idle = time.monotonic() - self._stepped_at >= HEARTBEAT_SECONDS
            if is_idle and not self.is_due and not self._loop.is_sleeping():
                self.is_due = True
                self._loop.ask_for_step()
