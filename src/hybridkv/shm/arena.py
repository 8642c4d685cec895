"""The arena: one file in shared memory, mapped by the daemon and by every worker."""

import contextlib
import ctypes
import fcntl
import mmap
import os
import secrets
import stat
import struct
from pathlib import Path

from hybridkv.core import option_parsers
from hybridkv.core.errors import ConfigError, HybridKVError
from hybridkv.core.sizes import format_size
from hybridkv.shm.numa import interleave, memory_nodes
from hybridkv.shm.trailer import trailer_bytes

SHM_DIR = Path("/dev/shm")  # Where arenas are unless another directory is asked for.
SHM_DIR_VARIABLE = "HYBRIDKV_SHM_DIR"
RAM_BYTES_MIN = 512 << 10  # The least size of an arena; a smaller one holds next to nothing.
LOCKS_FROM = 1 << 61  # Bytes from here on, behind any arena, are locked by workers.
_FLOCK = struct.Struct("@hhqqi4x")  # type, whence, start, length, process: struct flock of Linux.
_MADV_POPULATE_WRITE = 23
_TMPFS_MAGIC = 0x01021994  # The kind of a file system, which begins Linux's struct statfs.
_STATFS_BYTES_MAX = 256
_DAEMON_BYTES, _DAEMON_SHARE = 128 << 20, 64
"""What a daemon takes beside its arena: so many bytes, and this part of the arena (its index)."""
_POPULATE_STEP_BYTES = 8 << 20


class ArenaGoneError(HybridKVError):
    """The arena's file does not exist, is another user's, or has not the expected size."""


class Arena:
    """A mapped arena. `memory` is valid until `close`, which keeps it while views of it exist."""

    def __init__(self, path: Path, fd: int, size_bytes: int, slots_bytes: int, owner: bool) -> None:
        self.path = path
        self.size_bytes = size_bytes
        self.slots_bytes = slots_bytes
        """Bytes of slots; the rest of the file is the trailer (shm.trailer)."""
        status = os.fstat(fd)
        self.inode = status.st_dev, status.st_ino
        """(device, inode), which tell the file from a later one of the same name."""
        self._fd: int | None = fd if owner else None
        self._map = mmap.mmap(fd, size_bytes)
        self.memory = memoryview(self._map)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        """The address of the first byte in this process."""

    def reserve(self, start: int, stop: int) -> None:
        """Allocate the pages of [start, stop), so that no write fails; raises OSError (ENOSPC)."""
        assert self._fd is not None, "only the arena's owner reserves"
        os.posix_fallocate(self._fd, start, stop - start)

    def populate(self, start: int, stop: int) -> None:
        """Map the existing pages of [start, stop) into this process, to spare copies the faults."""
        madvise = ctypes.CDLL(None, use_errno=True).madvise
        for at in range(start, stop, _POPULATE_STEP_BYTES):
            size = ctypes.c_size_t(min(_POPULATE_STEP_BYTES, stop - at))
            if madvise(ctypes.c_void_p(self.address + at), size, _MADV_POPULATE_WRITE):
                return

    def is_locked(self, number: int) -> bool:
        """Whether a mapping was made with that lock and still is."""
        assert self._fd is not None, "only the arena's owner asks"
        asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, number, 1, 0)
        found = _FLOCK.unpack(fcntl.fcntl(self._fd, fcntl.F_OFD_GETLK, asked))
        return bool(found[0] != fcntl.F_UNLCK)

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
        self.path.unlink(missing_ok=True)


def shm_directory(given: str | None = None) -> Path:
    """The directory of arenas: `given`, else that of the variable, else SHM_DIR.

    Raises ConfigError where there is no such directory.
    """
    named = os.environ.get(SHM_DIR_VARIABLE) if given is None else given
    where = SHM_DIR_VARIABLE if given is None else "shm-dir"
    path = Path(option_parsers.directory(named, where)) if named else SHM_DIR
    if not path.is_dir():
        raise ConfigError(f"{where}={path} is no directory", "a directory on a tmpfs works")
    return path


def arena_seen(path: str, given: str | None = None) -> Path:
    """Where this process has the arena that is at `path` for its daemon.

    That is in this process's own directory of arenas (shm_directory) if the arena is there: a
    container may have it at another path. Raises ConfigError as shm_directory does.
    """
    here = shm_directory(given) / Path(path).name
    return here if here.exists() else Path(path)


def is_in_memory(directory: Path) -> bool:
    """Whether the files of a directory are on a tmpfs."""
    told = ctypes.create_string_buffer(_STATFS_BYTES_MAX)
    failed = ctypes.CDLL(None).statfs(os.fsencode(directory), told)
    return not failed and ctypes.c_long.from_buffer(told).value == _TMPFS_MAGIC


def new_lock() -> int:
    """A number for `attach_arena` that nobody else has."""
    return LOCKS_FROM + secrets.randbelow(LOCKS_FROM)


def create_arena(path: Path, slots_bytes: int, more_bytes: int = 0) -> Arena:
    """Create an arena that only this user can open. Raises FileExistsError where the name is taken.

    The file is sparse where the slots will be; `more_bytes` behind them are allocated at once, or
    OSError (ENOSPC) is raised.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        size_bytes = slots_bytes + more_bytes
        os.ftruncate(fd, size_bytes)
        if more_bytes:
            os.posix_fallocate(fd, slots_bytes, more_bytes)
        arena = Arena(path, fd, size_bytes, slots_bytes, owner=True)
        nodes = memory_nodes()
        if len(nodes) > 1:
            # Else all of it is on the daemon's node, and half of the GPUs copy from the other.
            interleave(arena.address, size_bytes, nodes)
        return arena
    except BaseException:
        path.unlink(missing_ok=True)
        os.close(fd)
        raise


def attach_arena(
    path: Path,
    size_bytes: int,
    slots_bytes: int | None = None,
    owner: bool = False,
    pid: int = 0,
    lock: int = 0,
    group: int | None = None,
) -> Arena:
    """Map a daemon's arena. Raises ArenaGoneError unless it is this user's, a file, of this size.

    With `group` it may be another user's that belongs to this group.

    An `owner` is the next daemon, which locks the file; raises BlockingIOError if it is locked.
    `pid` is the daemon, of which the file is taken where its name was removed; 0 = not known. The
    byte `lock` of the file is locked, for reading, until nothing maps it: by the end of the lock a
    daemon knows that a process has ended, also one of another pid namespace; 0 = none.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        removed = _open_removed(path, pid)
        if removed is None:
            raise ArenaGoneError(f"arena {path} cannot be opened: {error.strerror}") from error
        fd = removed
    try:
        status = os.fstat(fd)
        is_ours = status.st_uid == os.geteuid() or status.st_gid == group
        if not (is_ours and stat.S_ISREG(status.st_mode)) or status.st_size != size_bytes:
            raise ArenaGoneError(f"arena {path} is not this user's arena of {size_bytes} bytes")
        if owner:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.fstat(fd).st_nlink:
                # Whoever had the lock before has removed it.
                raise ArenaGoneError(f"arena {path} was removed meanwhile")
        if lock:
            # The mapping keeps the file open, and so locked, when `fd` is closed.
            asked = _FLOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, lock, 1, 0)
            try:
                fcntl.fcntl(fd, fcntl.F_OFD_SETLK, asked)
            except OSError as error:
                raise ArenaGoneError(f"arena {path} cannot be locked: {error.strerror}") from error
        slots_bytes = size_bytes if slots_bytes is None else slots_bytes
        arena = Arena(path, fd, size_bytes, slots_bytes, owner)
    except BaseException:
        os.close(fd)
        raise
    if not owner:
        os.close(fd)
    return arena


def _open_removed(path: Path, pid: int) -> int | None:
    """A descriptor of a file that process `pid` has open and whose name `path` was removed.

    systemd removes a user's shared memory at the last logout (RemoveIPC), and keeps processes.
    """
    with contextlib.suppress(OSError):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            if os.readlink(link) == f"{path} (deleted)":
                return os.open(link, os.O_RDWR | os.O_CLOEXEC)
    return None


def machine_memory_bytes() -> int:
    """Memory this process may use: the machine's, or its control group's limit if lower."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(total, _group_limit_bytes() or total)


def _group_limit_bytes() -> int | None:
    """The limit of this process's control group, as that of a container; None without one."""
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):
            return int(Path(limit).read_text())
    return None


def shm_free_bytes(directory: Path) -> int:
    """Free bytes of the file system of a directory."""
    status = os.statvfs(directory)
    return status.f_bavail * status.f_frsize


def default_ram_bytes(directory: Path) -> int:
    """A quarter of the machine's memory, or 0.9 of what is free in `directory` if that is less."""
    quarter = min(machine_memory_bytes() // 4, shm_free_bytes(directory) * 9 // 10)
    return max(quarter >> 20, 1) << 20


def limit_warning(ram_bytes: int) -> str:
    """What is wrong where a container's limit has room for the cache alone; empty where nothing is.

    The kernel ends the daemon once both are more than the limit.
    """
    limit = _group_limit_bytes()
    needed = ram_bytes + ram_bytes // _DAEMON_SHARE + _DAEMON_BYTES
    if limit is None or needed <= limit:
        return ""
    return (
        f"ram={format_size(ram_bytes)} leaves no room for the daemon in the container's memory "
        f"limit of {format_size(limit)}; a limit of {format_size(needed)} works"
    )


def check_ram(ram_bytes: int, setting: str, directory: Path = SHM_DIR) -> None:
    """Raise ConfigError, with a size that works, if `directory` has no room for `ram_bytes`."""
    machine, shm = machine_memory_bytes(), shm_free_bytes(directory)
    works = f'"{format_size(default_ram_bytes(directory))}" works'
    if ram_bytes < RAM_BYTES_MIN:
        least = format_size(RAM_BYTES_MIN)
        what = f"is less than {least}, the least that a cache can be (was a unit forgotten?)"
    elif ram_bytes > machine and machine == _group_limit_bytes():
        what = f"is larger than the container's memory limit of {format_size(machine)}"
        what += ", which the cache counts against"
    elif ram_bytes > machine:
        what = f"is larger than this machine's memory of {format_size(machine)}"
    elif ram_bytes + trailer_bytes(ram_bytes) > shm:
        what = f"with its tables is larger than the {format_size(shm)} free in {directory}"
        works += ", or give the container more"
        works += " (docker run --shm-size)" if directory == SHM_DIR else ""
    else:
        return
    raise ConfigError(f"{setting}={format_size(ram_bytes)} {what}", works)
