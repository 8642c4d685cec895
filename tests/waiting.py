"""Waiting for events, with a deadline that is generous on any machine."""

import os
import time
from collections.abc import Callable
from pathlib import Path

DEADLINE_SECONDS = float(os.environ.get("HYBRIDKV_TEST_DEADLINE", "60"))
"""tests.mutations sets less: with a fault, many tests wait for an event that never happens."""


def until(happened: Callable[[], bool], what: str, seconds: float = DEADLINE_SECONDS) -> None:
    """Wait until `happened()`. Raises AssertionError with `what` after so many seconds."""
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline, f"waited in vain for: {what}"
        time.sleep(0.01)


def is_stopped(pid: int) -> bool:
    """Whether every thread of a process is stopped by a signal."""
    return all(state_of(path) == "T" for path in Path(f"/proc/{pid}/task").glob("*/stat"))


def state_of(path: Path) -> str:
    """The state of a process or thread, one letter, from its `stat` file."""
    return path.read_text().rpartition(")")[2].split()[0]


def has_ended(pid: int) -> bool:
    """Whether a process has ended, though its parent may not have asked for its status."""
    path = Path(f"/proc/{pid}/stat")
    return not path.exists() or state_of(path) in "XZ"
