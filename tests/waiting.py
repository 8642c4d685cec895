"""Waiting for events and for other processes."""

import contextlib
from pathlib import Path

from hybridkv.tiers.conformance.waiting import DEADLINE_SECONDS, until

__all__ = ["DEADLINE_SECONDS", "has_ended", "is_stopped", "state_of", "until"]


def is_stopped(pid: int) -> bool:
    """Whether every thread of a process is stopped by a signal."""
    return all(state_of(path) == "T" for path in Path(f"/proc/{pid}/task").glob("*/stat"))


def state_of(path: Path) -> str:
    """The state of a process or thread, one letter, from its `stat` file."""
    return path.read_text().rpartition(")")[2].split()[0]


def has_ended(pid: int) -> bool:
    """Whether a process has ended, though its parent may not have asked for its status.

    Its sockets are closed with the last of its threads, which may be later than the first.
    """
    states = []
    with contextlib.suppress(FileNotFoundError):  # It ended meanwhile.
        for path in Path(f"/proc/{pid}/task").glob("*/stat"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # The thread did.
                states.append(state_of(path))
    return all(state in "XZ" for state in states)
