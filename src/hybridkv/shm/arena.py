"""The arena: one file in shared memory, mapped by the daemon and by every worker."""

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import secrets
import stat
import struct
from pathlib import Path
from typing import NamedTuple

from hybridkv.core import option_parsers
from hybridkv.core.errors import ConfigError, HybridKVError
from hybridkv.core.findings import Finding, warn
from hybridkv.core.sizes import format_size, parse_size
from hybridkv.shm.control_groups import memory_groups
from hybridkv.shm.numa import interleave, memory_nodes
from hybridkv.shm.trailer import trailer_bytes

SHM_DIR = Path("/dev/shm")  # Where arenas are unless another directory is asked for.
SHM_DIR_VARIABLE = "HYBRIDKV_SHM_DIR"
RAM_BYTES_MIN = 512 << 10  # The least size of an arena; a smaller one holds next to nothing.
BOOK_SUFFIX = ".book"  # The end of the name of a token book beside its arena.
LOCKS_FROM = 1 << 61  # Bytes from here on, past the end of any arena, are locked by workers.
_FLOCK = struct.Struct("@hhqqi4x")  # type, whence, start, length, process: struct flock of Linux.
_MADV_POPULATE_WRITE = 23
_TMPFS_MAGIC = 0x01021994  # The kind of a file system, which begins Linux's struct statfs.
_STATFS_BYTES_MAX = 256
_POPULATE_STEP_BYTES = 8 << 20


class ArenaGoneError(HybridKVError):
    """The arena's file does not exist, is another user's, or has not the expected size."""


class FileId(NamedTuple):
    """The numbers that tell a file from a later one of the same name."""

    device: int
    inode: int


def file_id(status: os.stat_result) -> FileId:
    """Return the id of the file that `os.stat` or `os.fstat` described."""
    return FileId(status.st_dev, status.st_ino)


class Arena:
    """A mapped arena. `memory` is valid until `close`, which keeps it while views of it exist."""

    def __init__(self, path: Path, fd: int, size_bytes: int, slots_bytes: int, owner: bool) -> None:
        self.path = path
        self.size_bytes = size_bytes
        self.slots_bytes = slots_bytes
        """The bytes of slots at the start of the file. The rest is the trailer (shm.trailer)."""
        self.inode = file_id(os.fstat(fd))
        self._fd: int | None = fd if owner else None
        self._map = mmap.mmap(fd, size_bytes)
        self.memory = memoryview(self._map)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        """The address of the first byte in this process."""

    def allocate_pages(self, start: int, stop: int) -> None:
        """Allocate the pages of [start, stop), so that no write fails. Those before exist.

        Raises OSError: ENOSPC where the file system is full, and ENOMEM where a control group has
        no room left. The kernel reports no error for these: it ends a process of the group.
        """
        assert self._fd is not None, "only the arena's owner reserves"
        _check_growth(start, stop, self.slots_bytes)
        os.posix_fallocate(self._fd, start, stop - start)

    def populate(self, start: int, stop: int) -> None:
        """Map the existing pages of [start, stop) into this process, to spare copies the faults."""
        madvise = ctypes.CDLL(None, use_errno=True).madvise
        for at in range(start, stop, _POPULATE_STEP_BYTES):
            size = ctypes.c_size_t(min(_POPULATE_STEP_BYTES, stop - at))
            if madvise(ctypes.c_void_p(self.address + at), size, _MADV_POPULATE_WRITE):
                return

    def is_locked(self, number: int) -> bool:
        """Return True while a mapping exists that was made with the lock of that number."""
        assert self._fd is not None, "only the arena's owner asks"
        request = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, number, 1, 0)
        lock_type, *_ = _FLOCK.unpack(fcntl.fcntl(self._fd, fcntl.F_OFD_GETLK, request))
        return bool(lock_type != fcntl.F_UNLCK)

    def close(self) -> None:
        """Unmap the arena. Its file stays, and a daemon lets go of the file's lock."""
        with contextlib.suppress(BufferError):
            # A view of the arena is still in use; the mapping ends with the last view.
            self.memory.release()
            self._map.close()
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def unlink(self) -> None:
        """Remove the file's name. Mappings stay valid until they are closed."""
        remove_arena(self.path)


def book_beside(arena: Path) -> Path:
    """Return the file of the token book beside an arena."""
    return arena.with_name(f"{arena.name}{BOOK_SUFFIX}")


def remove_arena(arena: Path) -> None:
    """Remove an arena's name, and the token book beside it."""
    book_beside(arena).unlink(missing_ok=True)
    arena.unlink(missing_ok=True)


def shm_directory(given: str | None = None) -> Path:
    """Return the directory of arenas: `given`, else that of the variable, else SHM_DIR.

    Raises ConfigError where there is no such directory.
    """
    named = os.environ.get(SHM_DIR_VARIABLE) if given is None else given
    where = SHM_DIR_VARIABLE if given is None else "shm-dir"
    path = Path(option_parsers.directory(named, where)) if named else SHM_DIR
    if not path.is_dir():
        raise ConfigError(f"{where}={path} is no directory", "a directory on a tmpfs works")
    return path


def arena_seen(path: str, given: str | None = None) -> Path:
    """Return the path by which this process reaches the arena that is at `path` for its daemon.

    A container may have the arena at another path, so this process's own directory of arenas
    (shm_directory) is tried first. Raises ConfigError as shm_directory does.
    """
    here = shm_directory(given) / Path(path).name
    return here if here.exists() else Path(path)


def is_in_memory(directory: Path) -> bool:
    """Return True where the files of a directory are on a tmpfs."""
    return file_system(directory) == _TMPFS_MAGIC


def file_system(directory: Path) -> int | None:
    """Return the kind of a directory's file system, a number of statfs(2). None = unknown."""
    statfs = ctypes.create_string_buffer(_STATFS_BYTES_MAX)
    failed = ctypes.CDLL(None).statfs(os.fsencode(directory), statfs)
    return None if failed else ctypes.c_long.from_buffer(statfs).value


def new_lock() -> int:
    """Return a random number for the lock of `attach_arena`, which no other process has."""
    return LOCKS_FROM + secrets.randbelow(LOCKS_FROM)


def create_arena(path: Path, slots_bytes: int, tail_bytes: int = 0) -> Arena:
    """Create an arena that only this user can open. Raises FileExistsError where the name is taken.

    The file is sparse where the slots will be. The `tail_bytes` after them are allocated at once.
    Raises OSError (ENOSPC) where there is no room for these.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        size_bytes = slots_bytes + tail_bytes
        os.ftruncate(fd, size_bytes)
        if tail_bytes:
            os.posix_fallocate(fd, slots_bytes, tail_bytes)
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
    pid: int = 0,
    lock: int = 0,
    group: int | None = None,
) -> Arena:
    """Map the arena of a living daemon. By default all of its bytes are slots.

    `pid` is the daemon (0: not known), whose open file is taken where the name was removed. The
    byte `lock` of the file (0: none) is locked for reading until nothing maps it. By the end of the
    lock a daemon knows that a process has ended, also one of another pid namespace. The arena must
    be this user's, or belong to `group`. Raises ArenaGoneError.
    """
    fd = _open_arena(path, size_bytes, pid, group)
    try:
        if lock:
            # The mapping keeps the file open, and so locked, when `fd` is closed.
            request = _FLOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, lock, 1, 0)
            try:
                fcntl.fcntl(fd, fcntl.F_OFD_SETLK, request)
            except OSError as error:
                raise ArenaGoneError(f"arena {path} cannot be locked: {error.strerror}") from error
        slots_bytes = size_bytes if slots_bytes is None else slots_bytes
        return Arena(path, fd, size_bytes, slots_bytes, owner=False)
    finally:
        os.close(fd)


def take_over_arena(path: Path, size_bytes: int, slots_bytes: int) -> Arena:
    """Map the arena that an earlier daemon left, as its next owner, and lock its file.

    Raises ArenaGoneError, and BlockingIOError where another daemon has the lock.
    """
    fd = _open_arena(path, size_bytes)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.fstat(fd).st_nlink:
            # The daemon that had the lock before has removed it.
            raise ArenaGoneError(f"arena {path} was removed meanwhile")
        return Arena(path, fd, size_bytes, slots_bytes, owner=True)
    except BaseException:
        os.close(fd)
        raise


def _open_arena(path: Path, size_bytes: int, pid: int = 0, group: int | None = None) -> int:
    """Return a descriptor of an arena. Raises ArenaGoneError.

    The file must be a regular one of this size, and belong to this user or to `group`.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        removed = _open_removed(path, pid)
        if removed is None:
            raise ArenaGoneError(f"arena {path} cannot be opened: {error.strerror}") from error
        fd = removed
    status = os.fstat(fd)
    is_ours = status.st_uid == os.geteuid() or status.st_gid == group
    if not (is_ours and stat.S_ISREG(status.st_mode)) or status.st_size != size_bytes:
        os.close(fd)
        raise ArenaGoneError(f"arena {path} is not this user's arena of {size_bytes} bytes")
    return fd


def _open_removed(path: Path, pid: int) -> int | None:
    """Return a descriptor of the file that process `pid` has open and whose name was removed.

    systemd removes a user's shared memory at the last logout (RemoveIPC), and keeps processes.
    """
    with contextlib.suppress(OSError):
        # The process is gone, is another user's, or closed the file meanwhile.
        for link in Path(f"/proc/{pid}/fd").iterdir():
            if os.readlink(link) == f"{path} (deleted)":
                return os.open(link, os.O_RDWR | os.O_CLOEXEC)
    return None


def machine_memory_bytes() -> int:
    """Return the memory this process may use: the machine's, or its control groups' least limit."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([total, *(group.limit_bytes for group in memory_groups())])


def _check_growth(start: int, stop: int, size_bytes: int) -> None:
    """Raise OSError (ENOMEM) where a control group has no room for more pages of an arena.

    Its pages below `start` exist, and those up to `stop` are asked for.
    """
    for group in memory_groups():
        if not group.allows_growth(start, stop):
            works = format_size(group.needed_bytes(size_bytes, start))
            what = f"{group.limit} has no room for more; a limit of {works} works"
            raise OSError(errno.ENOMEM, what)


def shm_free_bytes(directory: Path) -> int:
    """Return the free bytes of the file system of a directory."""
    status = os.statvfs(directory)
    return status.f_bavail * status.f_frsize


def default_ram_bytes(directory: Path) -> int:
    """Return the default size of an arena, in whole MiB.

    It is a quarter of the machine's memory, or of what the least limit of a control group leaves
    beside what is in use there, such as the engine. It is less where that does not fit, or where
    less is free in `directory`: then it is 0.9 of that.
    """
    sizes = [machine_memory_bytes() // 4, shm_free_bytes(directory) * 9 // 10]
    sizes += [group.default_bytes for group in memory_groups()]
    return max(min(sizes) >> 20, 1) << 20


def limit_finding(ram_bytes: int, arena_bytes: int = 0, process: str = "self") -> Finding | None:
    """Return a warning where a control group has no room for an arena beside what is in use.

    `process` is the daemon by its name in /proc, and pages of `arena_bytes` exist already. The
    arena grows as far as there is room. The kernel would end the daemon, or the engine, else.
    """
    for group in memory_groups(process):
        needed = group.needed_bytes(ram_bytes, arena_bytes)
        if needed > group.limit_bytes:
            others = format_size(group.others_bytes(arena_bytes))
            what = (
                f"ram={format_size(ram_bytes)} leaves no room in {group.limit} for the daemon and "
                f"the {others} that others use, so the cache stays smaller"
            )
            return warn("memory", what, f"a limit of {format_size(needed)} works")
    return None


def check_ram(ram_bytes: int, setting: str, directory: Path = SHM_DIR) -> None:
    """Raise ConfigError, with a size that works, if `directory` has no room for `ram_bytes`."""
    fault = _ram_fault(ram_bytes, directory)
    if not fault:
        return
    what = f"{setting}={format_size(ram_bytes)} {fault}"
    default_bytes = default_ram_bytes(directory)
    # A size is shown with one decimal, so it may be a bit more than was meant.
    shown = (format_size(default_bytes), f"{default_bytes >> 20}MiB", format_size(RAM_BYTES_MIN))
    fitting = (size for size in shown if not _ram_fault(parse_size(size, setting), directory))
    value = next(fitting, None)
    works = "another shm-dir works" if value is None else f'"{value}" works'
    if RAM_BYTES_MIN <= ram_bytes <= machine_memory_bytes():
        # Then it is the directory that has no room.
        works += ", or give the container more"
        works += " (docker run --shm-size)" if directory == SHM_DIR else ""
    raise ConfigError(what, works, value)


def _ram_fault(ram_bytes: int, directory: Path) -> str:
    """Return why a cache cannot have `ram_bytes` in `directory`, or "" where it can."""
    machine, shm_free = machine_memory_bytes(), shm_free_bytes(directory)
    limits = {group.limit_bytes: group for group in memory_groups()}
    if ram_bytes < RAM_BYTES_MIN:
        least = format_size(RAM_BYTES_MIN)
        return f"is less than {least}, the least that a cache can be (was a unit forgotten?)"
    if ram_bytes > machine and machine in limits:
        return f"is larger than {limits[machine].limit}, which the cache counts against"
    if ram_bytes > machine:
        return f"is larger than this machine's memory of {format_size(machine)}"
    if ram_bytes + trailer_bytes(ram_bytes) > shm_free:
        return f"with its tables is larger than the {format_size(shm_free)} free in {directory}"
    return ""
