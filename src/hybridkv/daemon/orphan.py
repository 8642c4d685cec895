"""The end of an arena that no daemon takes over.

A daemon writes into its arena the time until which the arena is kept, and moves it ahead while it
lives. When it ends and leaves the arena to the next daemon, it leaves a small process too, `python
-m hybridkv.daemon.orphan ARENA`, which removes the arena at that time. The process ends as soon as
another daemon has the arena. Where there is no such process (kill -9, a crash, systemd), the next
daemon of the user removes the arena.
"""

import fcntl
import logging
import os
import subprocess
import sys
import time
from pathlib import Path

from hybridkv.shm.arena import remove_arena
from hybridkv.shm.trailer import read_superblock

logger = logging.getLogger("hybridkv.daemon")

LOOK_SECONDS = 2.0  # The process looks so often whether a daemon has the arena.


def leave_waiter(arena: Path) -> None:
    """Start the process that removes `arena` when its time is over. The caller ends after this."""
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
    """Return the seconds for which an arena is kept if no daemon takes it. None for no bound."""
    left = read_superblock(arena)
    if left is None or not left.kept_until:
        return None
    return max(0.0, left.kept_until - time.monotonic())


def remove_if_over(arena: Path) -> bool:
    """Remove an arena whose time is over and that no daemon has. Returns True if it was removed."""
    if seconds_left(arena) != 0.0:
        return False
    try:
        fd = os.open(arena, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # A daemon may have taken it over meanwhile, and have left it again.
        if is_over := seconds_left(arena) == 0.0:
            remove_arena(arena)
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
    return is_over


def wait(arena: Path) -> None:
    """Wait until the arena's time is over, and remove it. Return early where a daemon took it over.

    The arena is not locked before its time is over, because a daemon that starts meanwhile would
    find it locked.
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
