"""Waiting for events, with a deadline that is generous on any machine."""

import os
import time
from collections.abc import Callable

DEADLINE_SECONDS = float(os.environ.get("HYBRIDKV_TEST_DEADLINE", "60"))
"""tests.mutations sets less: with a fault, many tests wait for an event that never happens."""


def until(happened: Callable[[], bool], what: str, seconds: float = DEADLINE_SECONDS) -> None:
    """Wait until `happened()`. Raises AssertionError with `what` after so many seconds."""
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline, f"waited in vain for: {what}"
        time.sleep(0.01)
