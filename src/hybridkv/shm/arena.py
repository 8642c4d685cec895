"""The arena: one file in shared memory, mapped by the daemon and by every worker."""

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import stat
from pathlib import Path

from hybridkv.core.errors import ConfigError, HybridKVError
from hybridkv.core.sizes import format_size

SHM_DIR = Path("/dev/shm")
RAM_BYTES_MIN = 512 << 10
"""With less a cache holds next to nothing."""
_MADV_POPULATE_WRITE = 23
_POPULATE_STEP_BYTES = 8 << 20


class ArenaGoneError(HybridKVError):
    """The arena's file is not there, not ours, or not the size that was promised."""


class Arena:
    """A mapped arena. `memory` is valid until `close`, which fails quietly while views of it are alive."""

    def __init__(self, path: Path, fd: int, size_bytes: int, slots_bytes: int, owner: bool) -> None:
        self.path = path
        self.size_bytes = size_bytes
        self.slots_bytes = slots_bytes
        """The rest is the daemon's (shm.trailer)."""
        status = os.fstat(fd)
        self.inode = status.st_dev, status.st_ino
        """What tells the file from another one under its name."""
        self._fd: int | None = fd if owner else None
        self._map = mmap.mmap(fd, size_bytes)
        self.memory = memoryview(self._map)
        anchor = ctypes.c_char.from_buffer(self._map)
        self.address = ctypes.addressof(anchor)
        """Address of the first byte in this process."""
        del anchor

    def reserve(self, start: int, stop: int) -> None:
        """Make the pages of [start, stop) exist, so that no write to them can fail later; raises OSError (ENOSPC)."""
        assert self._fd is not None, "only the arena's creator reserves"
        os.posix_fallocate(self._fd, start, stop - start)

    def populate(self, start: int, stop: int) -> None:
        """Map the existing pages of [start, stop) into this process; a fault per page is slower than the copy."""
        madvise = ctypes.CDLL(None, use_errno=True).madvise
        for at in range(start, stop, _POPULATE_STEP_BYTES):
            size = min(_POPULATE_STEP_BYTES, stop - at)
            if madvise(ctypes.c_void_p(self.address + at), ctypes.c_size_t(size), _MADV_POPULATE_WRITE):
                return

    def close(self) -> None:
        """Unmap; the file stays."""
        with contextlib.suppress(BufferError):
            self.memory.release()
            self._map.close()
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def unlink(self) -> None:
        """Remove the file's name; mappings stay valid until they are closed."""
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()


def create_arena(path: Path, slots_bytes: int, more_bytes: int = 0) -> Arena:
    """A new arena that only this user can open; raises FileExistsError where the name is taken.

    It is sparse where the slots will be; `more_bytes` behind them exist at once, or OSError (ENOSPC) is raised.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    size_bytes = slots_bytes + more_bytes
    os.ftruncate(fd, size_bytes)
    if more_bytes:
        os.posix_fallocate(fd, slots_bytes, more_bytes)
    return Arena(path, fd, size_bytes, slots_bytes, owner=True)


def attach_arena(path: Path, size_bytes: int, slots_bytes: int | None = None, owner: bool = False) -> Arena:
    """Map a daemon's arena; raises ArenaGoneError unless it is a regular file of this user and of this size.

    An `owner` is the next daemon: the file is locked, or BlockingIOError raised.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise ArenaGoneError(f"arena {path} cannot be opened: {error.strerror}") from error
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_size != size_bytes:
            raise ArenaGoneError(f"arena {path} is not this user's arena of {size_bytes} bytes")
        if owner:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        arena = Arena(path, fd, size_bytes, size_bytes if slots_bytes is None else slots_bytes, owner)
    except BaseException:
        os.close(fd)
        raise
    if not owner:
        os.close(fd)
    return arena


def machine_memory_bytes() -> int:
    """Memory this process may use: the machine's, or its control group's limit where that is lower."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):
            total = min(total, int(Path(limit).read_text()))
    return total


def shm_free_bytes() -> int:
    """Bytes that can still be stored below SHM_DIR."""
    status = os.statvfs(SHM_DIR)
    return status.f_bavail * status.f_frsize


def default_ram_bytes() -> int:
    """A quarter of the machine's memory, or 0.9 of what shared memory has room for where that is less."""
    quarter = min(machine_memory_bytes() // 4, shm_free_bytes() * 9 // 10)
    return max(quarter >> 20, 1) << 20


def check_ram(ram_bytes: int, setting: str) -> None:
    """Raise ConfigError where an arena of `ram_bytes` cannot be had on this machine, with a size that can."""
    machine, shm = machine_memory_bytes(), shm_free_bytes()
    works = format_size(default_ram_bytes())
    if ram_bytes < RAM_BYTES_MIN:
        raise ConfigError(
            f"{setting}={format_size(ram_bytes)} is less than {format_size(RAM_BYTES_MIN)}, the least that a cache can "
            f'be (was a unit forgotten?); "{works}" works'
        )
    if ram_bytes > machine:
        raise ConfigError(
            f"{setting}={format_size(ram_bytes)} is larger than this machine's memory of {format_size(machine)}; "
            f'"{works}" works'
        )
    if ram_bytes > shm:
        raise ConfigError(
            f"{setting}={format_size(ram_bytes)} is larger than the {format_size(shm)} free in {SHM_DIR}; "
            f'"{works}" works, or give the container more (docker run --shm-size)'
        )


def is_no_space(error: OSError) -> bool:
    """Whether a failed reservation means that the memory is used up."""
    return error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT)
