"""The file `alive` of a writer of a directory tier, and the proof that a writer is dead.

A writer keeps its file locked while its process lives, and the kernel frees the lock with the
process. All that use a local file system share one kernel, so whoever gets the lock there has the
proof, whatever containers and host names the daemons have. On a network, and of a writer that has
not said that it locks, nothing is proven.
"""

import contextlib
import errno
import fcntl
import os
import uuid
import weakref
from collections.abc import Iterator
from enum import Enum
from pathlib import Path

from hybridkv.shm.arena import file_system
from hybridkv.tiers.disk.files import open_regular

_LOCAL_FILE_SYSTEMS = frozenset(
    {
        0xEF53,  # ext2, ext3, ext4
        0x58465342,  # xfs
        0x9123683E,  # btrfs
        0x2FC12FC1,  # zfs
        0xF2F52010,  # f2fs
        0xCA451A4E,  # bcachefs
        0x794C7630,  # overlayfs
        0x01021994,  # tmpfs
    }
)
"""Kinds of file systems (statfs(2)) that one kernel alone uses at a time."""
_WITHOUT_LOCKS = frozenset((errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP))
_LOCKED = " locked"  # At the end of the token of a writer that keeps its file locked.


class Life(Enum):
    """What is known of a writer's process."""

    ALIVE = "alive"
    DEAD = "dead"
    UNKNOWN = "unknown"


class Claim:
    """This daemon's hold on its `alive`, which ends with `release` or with the process."""

    def __init__(self, path: Path) -> None:
        """Make the file if it is not there, touch it, and lock it.

        Raises OSError; FileNotFoundError where another daemon took the directory over meanwhile.
        """
        self._path = path
        os.close(_open_to_write(path))
        # Open for reading alone, so that the file system can be remounted read-only meanwhile.
        self._fd = open_regular(path)
        self.release = weakref.finalize(self, _close, self._fd)
        self.token = uuid.uuid4().hex  # The file's content while this daemon has the directory.
        is_local = file_system(path.parent) in _LOCAL_FILE_SYSTEMS
        self.is_locked = is_local and _lock(self._fd, fcntl.LOCK_SH)
        if self.is_locked:
            self.token += _LOCKED
        if not os.path.samestat(os.fstat(self._fd), os.stat(path)):
            raise FileNotFoundError(path)
        os.utime(self._fd)

    def put_token(self) -> None:
        """Write the token. Raises OSError."""
        fd = _open_to_write(self._path)
        try:
            os.ftruncate(fd, 0)
            os.pwrite(fd, self.token.encode(), 0)
        finally:
            os.close(fd)


def _lock(fd: int, how: int) -> bool:
    """Lock a file without waiting. Returns False where its file system has no locks.

    Raises OSError; BlockingIOError where another process has the lock.
    """
    try:
        fcntl.flock(fd, how | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _WITHOUT_LOCKS:
            raise
        return False
    return True


def _open_to_write(path: Path) -> int:
    """Return a descriptor of a regular file, which is made if it is not there. Raises OSError."""
    # A FIFO in its place is an error, and no wait for its reader.
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    return os.open(path, flags, 0o600)


def _close(fd: int) -> None:
    """Close a descriptor. The lock ends with it, also where the file system is gone."""
    with contextlib.suppress(OSError):
        # A descriptor of a file system that is gone; the kernel has freed the lock with it.
        os.close(fd)


@contextlib.contextmanager
def proven_life(path: Path) -> Iterator[Life]:
    """Yields what is proven of the writer whose `alive` is at `path`.

    A dead writer's directory is the caller's alone until the context ends: neither the writer's
    next life nor another daemon that takes directories over gets the lock. Raises OSError.
    """
    try:
        fd = open_regular(path)
    except FileNotFoundError:
        yield Life.UNKNOWN
        return
    try:
        yield _life(fd, path)
    finally:
        os.close(fd)


def _life(fd: int, path: Path) -> Life:
    if file_system(path.parent) not in _LOCAL_FILE_SYSTEMS:
        return Life.UNKNOWN
    try:
        if not _lock(fd, fcntl.LOCK_EX):
            return Life.UNKNOWN
    except BlockingIOError:
        return Life.ALIVE
    # The token is read under the lock, because a new life may have written another.
    is_locker = os.pread(fd, 64, 0).endswith(_LOCKED.encode())
    return Life.DEAD if is_locker else Life.UNKNOWN
