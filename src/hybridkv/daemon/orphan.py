"""The end of an arena that no daemon takes over.

A daemon writes into its arena until when the arena is kept, and goes on to move that time ahead
while it lives. When it ends and leaves the arena to the next daemon, it leaves a small process too,
`python -m hybridkv.daemon.orphan ARENA`, which removes the arena at that time. The process ends as
soon as another daemon has the arena. Where nobody could leave it (kill -9, a crash, systemd), the
next daemon of the user removes what is over.
"""

import fcntl
import logging
import os
import subprocess
import sys
import time
from pathlib import Path

from hybridkv.shm.trailer import read_superblock

logger = logging.getLogger("hybridkv.daemon")

LOOK_SECONDS = 2.0  # How often the process looks whether a daemon has the arena.


def leave_waiter(arena: Path) -> None:
    """Start the process that removes `arena` in time, as the last act of this one."""
    try:
        subprocess.Popen(
            [sys.executable, "-m", "hybridkv.daemon.orphan", str(arena)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
        )
    except OSError as error:
        text = "%s stays until the next daemon starts: no process can be left to remove it (%s)"
        logger.warning(text, arena, error)


def seconds_left(arena: Path) -> float | None:
    """Seconds for which an arena is kept where no daemon has it; None where that has no bound."""
    left = read_superblock(arena)
    if left is None or not left.kept_until:
        return None
    return max(0.0, left.kept_until - time.monotonic())


def remove_if_over(arena: Path) -> bool:
    """Remove an arena whose time is over and that no daemon has; whether it was removed."""
    if seconds_left(arena) != 0.0:
        return False
    try:
        fd = os.open(arena, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # A daemon may have had it meanwhile, and have left it again.
        if is_over := seconds_left(arena) == 0.0:
            arena.unlink(missing_ok=True)
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
    return is_over


def wait(arena: Path) -> None:
    """Return when the arena is removed, is gone, or is another daemon's.

    The lock of the arena is not asked for before the time is over: a daemon that starts meanwhile
    would find it taken.
    """
    first = read_superblock(arena)
    while first is not None and first.kept_until and read_superblock(arena) == first:
        left = first.kept_until - time.monotonic()
        if left <= 0:
            remove_if_over(arena)
            return
        time.sleep(min(left, LOOK_SECONDS))


if __name__ == "__main__":
    wait(Path(sys.argv[1]))
