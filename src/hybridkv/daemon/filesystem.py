"""The daemon's files: its directory, lock, socket and arena, which are its user's alone."""

import contextlib
import errno
import fcntl
import hashlib
import logging
import os
import re
import socket
import stat
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from hybridkv.core.errors import ConfigError, HybridKVError
from hybridkv.core.paths import check_socket_path, default_socket
from hybridkv.core.sizes import format_size
from hybridkv.daemon.orphan import remove_if_over
from hybridkv.shm import arena as shm
from hybridkv.shm.arena import (
    BOOK_SUFFIX,
    SHM_DIR,
    Arena,
    FileId,
    file_id,
    remove_arena,
    shm_directory,
)
from hybridkv.shm.slots import SLOT_ALIGN
from hybridkv.shm.trailer import ARENA_VERSION, Trailer, read_superblock, trailer_bytes

logger = logging.getLogger("hybridkv.daemon")

ENDING_SECONDS = 1.0
"""The time that the next daemon waits for the arena. A daemon that ends lets go of its socket
first, and of the arena at the latest with its process. Where one of its threads hangs, the next
daemon makes an arena of its own."""
_ARENA = re.compile(r"hybridkv-\d+-[0-9a-f]{12}-[0-9a-f]{32}")
"""The name of an arena: a user, the digest of a socket's path and place, and a daemon's life."""
_PLACE = re.compile(r"[0-9a-f]{32}")
_PLACE_BYTES = 32


class AlreadyServedError(HybridKVError):
    """Another daemon serves the socket, or has locked its lock file."""


class OpenedArena(NamedTuple):
    """An arena that a daemon has opened for itself."""

    arena: Arena
    trailer: Trailer
    is_earlier: bool  # True where an earlier daemon left it, with its objects.


def make_private_directory(directory: Path, setting: str) -> None:
    """Create `directory` for this user alone, or check that it is. Raises ConfigError."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        fault = f"directory {directory} cannot be made ({error.strerror})"
        raise _refusal(setting, fault, directory) from error
    check_private_directory(directory, setting)


def check_private_directory(directory: Path, setting: str) -> None:
    """Raise ConfigError unless `directory` is this user's alone or can be made."""
    if fault := _directory_fault(directory):
        raise _refusal(setting, fault, directory)


def _directory_fault(directory: Path) -> str:
    """Return why a directory can be no daemon's, or "" where it is this user's or can be made."""
    try:
        status = directory.lstat()
    except FileNotFoundError:
        above = next(parent for parent in directory.parents if parent.exists())
        is_allowed = os.access(above, os.W_OK | os.X_OK)
        return "" if is_allowed else f"you may not make directory {directory} in {above}"
    except OSError as error:
        return f"directory {directory} cannot be used ({error.strerror})"
    if not stat.S_ISDIR(status.st_mode):
        return f"{directory} is not a directory of its own (a link?)"
    if status.st_uid != os.geteuid():
        return f"{directory} belongs to user id {status.st_uid}, not to you"
    if status.st_mode & 0o022:
        return f"others may write to {directory}, which chmod 700 ends"
    return "" if os.access(directory, os.W_OK | os.X_OK) else f"you may not write to {directory}"


def _file_fault(path: Path) -> str:
    """Return why a file can be no daemon's socket, or "" where there is none, or a socket."""
    is_free = path.is_socket() or not os.path.lexists(path)
    return "" if is_free else f"{path} is no socket, and stays"


def _refusal(setting: str, fault: str, refused: Path) -> ConfigError:
    """Return the error for a socket or its directory. Its remedy names a socket that works."""
    home, uid = os.path.expanduser("~"), os.geteuid()
    users_own = default_socket(home, uid)
    beside = str((refused if refused.is_dir() else refused.parent) / "daemon.sock")
    for value in (beside, default_socket("", uid), users_own):
        path = Path(value)
        with contextlib.suppress(ConfigError, OSError):
            # A socket that a remedy might name may be refused too.
            check_socket_path(value, setting)
            if path != refused and not (_directory_fault(path.parent) or _file_fault(path)):
                # An engine's setting says the same as a URL.
                given = f"unix://{value}" if setting == "server" else value
                works = f'"{given}" works'
                if value == users_own:
                    works += f", and XDG_RUNTIME_DIR={home} makes it the default"
                return ConfigError(f"{setting}: {fault}", works, given)
    return ConfigError(f"{setting}: {fault}", "a file in a directory of yours works")


def share_directory(directory: Path, group: int) -> None:
    """Let the members of a group reach the files of `directory` whose names they know.

    Raises ConfigError where this user is no member, or where members cannot reach the directory.
    """
    if group not in (os.getegid(), *os.getgroups()):
        what = f"group: you are no member of group id {group}"
        raise ConfigError(what, "a group of yours works")
    _share(directory, group, 0o710)
    for above in directory.parents:
        status = above.stat()
        if not (status.st_mode & 0o001 or (status.st_gid == group and status.st_mode & 0o010)):
            what = f"group: its members cannot reach {directory}, because of {above}"
            works = default_socket("", os.geteuid())
            raise ConfigError(what, f"--socket {works} works", works)


def _share(path: Path, group: int | None, mode: int) -> None:
    """Give a file of this user this mode, and to a group if there is one."""
    if group is not None:
        os.chown(path, -1, group)
    path.chmod(mode)


class ServedSocket:
    """The daemon's socket and its lock file. Either name may be removed while the daemon lives.

    The lock file stays after the daemon. It has the *place*, a random number that was written when
    the file was made. Sockets of one path in two containers are two places, and an arena belongs to
    one place.
    """

    def __init__(self, path: Path, group: int | None = None) -> None:
        """Become the only daemon of `path`, for this user and the members of a group.

        Raises ConfigError, AlreadyServedError.
        """
        self._path = path
        self._lock_path = _lock_path(path)
        self._place: str | None = None  # The place in the lock file; None until it is locked.
        self._group = group
        self._loss_logged = False  # True once the log has that the socket cannot be made again.
        self._socket_id: FileId | None = None  # The socket's file; None before `listen`.
        self._make_directory()
        if fault := _file_fault(path):
            raise _refusal("socket", fault, path)
        self._lock_fd = self._lock()
        self._check_nobody_serves()

    def _make_directory(self) -> None:
        make_private_directory(self._path.parent, "socket")
        if self._group is not None:
            share_directory(self._path.parent, self._group)

    def listen(self) -> socket.socket:
        """Remove a stale socket, and return a new one that listens. Raises ConfigError."""
        kind = socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
        listener = socket.socket(socket.AF_UNIX, kind)
        try:
            if self._path.is_socket():
                self._path.unlink()
            listener.bind(str(self._path))
            # Permission to write to a socket is permission to connect.
            _share(self._path, self._group, 0o600 if self._group is None else 0o660)
            listener.listen(128)
            self._socket_id = _file_id(self._path)
        except OSError as error:
            listener.close()
            fault = f"no socket can be made at {self._path} ({error.strerror})"
            raise _refusal("socket", fault, self._path) from error
        return listener

    def restore_names(self) -> socket.socket | None:
        """Make the lock file and the socket again where their names were removed.

        Returns the new listening socket, or None where the old one can still be reached. Raises
        AlreadyServedError where another daemon has taken the place meanwhile.
        """
        is_listening = _file_id(self._path) == self._socket_id
        is_locked = _file_id(self._lock_path) == file_id(os.fstat(self._lock_fd))
        if is_listening and is_locked:
            return None
        try:
            self._make_directory()
            if not is_locked:
                fd, self._lock_fd = self._lock_fd, self._lock()
                os.close(fd)
            if is_listening:
                return None
            self._check_nobody_serves()
            listener = self.listen()
        except AlreadyServedError:
            if is_listening:
                # A daemon that starts keeps the lock until it finds that this one answers.
                return None
            raise
        except ConfigError as error:
            # Clients that are connected are served all the same.
            if not self._loss_logged:
                logger.warning("the socket was removed and cannot be made again: %s", error.what)
            self._loss_logged = True
            return None
        self._loss_logged = False
        logger.warning("%s was removed while it was served; it was made again", self._path)
        return listener

    def close(self) -> None:
        """Remove the socket, unless it is another daemon's, and let go of the lock."""
        if self._socket_id is not None and _file_id(self._path) == self._socket_id:
            self._path.unlink(missing_ok=True)
        os.close(self._lock_fd)

    def _lock(self) -> int:
        """Lock the lock file, and write the place into it. Returns its descriptor.

        Raises ConfigError, AlreadyServedError.
        """
        flags, is_new = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, True
        try:
            try:
                fd = os.open(self._lock_path, flags | os.O_EXCL, 0o600)
            except FileExistsError:
                fd, is_new = os.open(self._lock_path, flags, 0o600), False
        except OSError as error:
            fault = f"{self._lock_path} cannot be opened ({error.strerror})"
            raise _refusal("socket", fault, self._path) from error
        if not _takes_lock(fd):
            os.close(fd)
            raise AlreadyServedError(f"a daemon is already serving {self._path}")
        if self._place is None:
            # A file without a place was made by an earlier version, whose arena is taken over.
            self._place = uuid.uuid4().hex if is_new else _place_of(self._path)
        os.pwrite(fd, self._place.encode(), 0)
        os.ftruncate(fd, len(self._place))
        return fd

    def _check_nobody_serves(self) -> None:
        """Raise AlreadyServedError where a daemon listens whose lock file was removed."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as client:
            # EAGAIN means that a daemon listens and that its queue is full.
            if client.connect_ex(str(self._path)) in (0, errno.EAGAIN):
                raise AlreadyServedError(f"a daemon is already serving {self._path}")


def _lock_path(socket_path: Path) -> Path:
    return socket_path.with_name(socket_path.name + ".lock")


def _place_of(socket_path: Path) -> str:
    """Return the place that the lock file of a socket has, or "" where it has none."""
    try:
        fd = os.open(_lock_path(socket_path), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        place = os.pread(fd, _PLACE_BYTES, 0).decode(errors="replace")
    finally:
        os.close(fd)
    return place if _PLACE.fullmatch(place) else ""


def _takes_lock(fd: int) -> bool:
    """Lock a file for this descriptor. Returns False where another process has the lock."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _file_id(path: Path) -> FileId | None:
    """Return the id of the file of that name, or None where no file can be seen."""
    try:
        return file_id(path.lstat())
    except OSError:
        return None


def stale_arenas(socket_path: Path, directory: Path | None = None) -> list[Path]:
    """Return the arenas of this socket's daemons, also those that are in use.

    They are looked for in SHM_DIR, and in `directory`, which is by default that of new arenas.
    """
    return _files_of_user(_arena_prefix(socket_path), directory)


def open_arena(
    socket_path: Path,
    ram_bytes: int | None,
    fresh: bool,
    boot: str,
    directory: Path,
    group: int | None = None,
) -> OpenedArena:
    """Open an earlier daemon's arena where one fits, or else a new one. Raises ConfigError.

    Without `ram_bytes` an arena of any size in `directory` fits. With `fresh` none fits. Arenas
    that do not fit are removed, unless another process uses them. This user may map the arena, and
    the members of `group`.
    """
    if not shm.is_in_memory(directory):
        text = "shm-dir: %s is on no tmpfs, so the cache is written to a disk; /dev/shm works"
        logger.warning(text, directory)
    for path in [] if fresh else stale_arenas(socket_path, directory):
        arena = _take_over(path, ram_bytes) if path.parent == directory else None
        if arena is not None:
            remove_unused_arenas(socket_path, directory)
            remove_orphans(directory)
            _share(path, group, 0o600 if group is None else 0o660)
            return OpenedArena(arena, _trailer_of(arena), is_earlier=True)
    remove_unused_arenas(socket_path, directory)
    remove_orphans(directory)
    wanted_bytes = shm.default_ram_bytes(directory) if ram_bytes is None else ram_bytes
    shm.check_ram(wanted_bytes, "ram", directory)
    if warning := shm.limit_finding(wanted_bytes):
        logger.warning(warning.sentence)
    slots_bytes = wanted_bytes // SLOT_ALIGN * SLOT_ALIGN
    path = directory / f"{_arena_prefix(socket_path)}{boot}"
    try:
        arena = shm.create_arena(path, slots_bytes, trailer_bytes(slots_bytes))
    except PermissionError as error:
        what = f"shm-dir: you may not make files in {directory}"
        raise ConfigError(what, "a directory on a tmpfs that is yours works") from error
    trailer = _trailer_of(arena)
    trailer.write_fresh()
    _share(path, group, 0o600 if group is None else 0o660)
    return OpenedArena(arena, trailer, is_earlier=False)


def remove_unused_arenas(socket_path: Path, directory: Path | None = None) -> None:
    """Remove the arenas of this socket's daemons (stale_arenas) that no daemon has open."""
    for path in stale_arenas(socket_path, directory):
        remove_unused(path)


def remove_unused(arena: Path) -> bool:
    """Remove an arena, unless a daemon has it open. Returns True where it was removed."""
    with _claimed(arena) as is_ours:
        if is_ours:
            remove_arena(arena)
    return is_ours


def remove_orphans(directory: Path | None = None) -> None:
    """Remove the arenas of all of this user's daemons whose time is over."""
    for path in arenas_of_user(shm_directory() if directory is None else directory):
        if remove_if_over(path):
            logger.info("%s is removed: no daemon took it over in time", path)


def is_in_use(arena: Path) -> bool:
    """Return True where a daemon has an arena open. None can take it over during the call."""
    with _claimed(arena) as is_ours:
        return not is_ours


@contextlib.contextmanager
def _claimed(arena: Path) -> Iterator[bool]:
    """Lock an arena for the block, so that no daemon takes it over. False where one has it open."""
    try:
        fd = os.open(arena, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        yield False
        return
    try:
        yield _takes_lock(fd)
    finally:
        os.close(fd)


def free_left(socket_path: Path, directory: Path | None = None) -> None:
    """Remove the arenas and the socket that daemons have left.

    Raises AlreadyServedError where there is a daemon, and ConfigError as ServedSocket does.
    """
    served = ServedSocket(socket_path)
    try:
        remove_unused_arenas(socket_path, directory)
        if socket_path.is_socket():
            socket_path.unlink()
    finally:
        served.close()


def arenas_of_user(directory: Path) -> list[Path]:
    """Return every arena of this user in `directory` and in SHM_DIR, also those in use.

    An empty file is left out: it is being made, and its maker has not locked it yet.
    """
    found = _files_of_user(f"hybridkv-{os.geteuid()}-", directory)
    return [path for path in found if _ARENA.fullmatch(path.name) and arena_bytes(path)[0]]


def arena_bytes(arena: Path) -> tuple[int, int]:
    """Return the size of an arena and the memory that it takes, in bytes. Zeros if it is gone."""
    try:
        status = arena.lstat()
    except FileNotFoundError:
        return 0, 0
    return status.st_size, status.st_blocks * 512


def is_arena_of(arena: Path, socket_path: str) -> bool:
    """Return True where an arena belongs to the daemons of this socket."""
    return arena.name.startswith(_arena_prefix(socket_path))


def bound_sockets() -> list[str]:
    """Return the path of every Unix socket that a process of this network namespace has bound."""
    lines = Path("/proc/net/unix").read_text(errors="replace").splitlines()[1:]
    columns = (line.split(" ", maxsplit=7) for line in lines)
    return [row[7] for row in columns if len(row) == 8]


def _take_over(path: Path, ram_bytes: int | None) -> Arena | None:
    """Open the arena of an earlier daemon if it fits. If not, log the reason and return None."""
    left, name = read_superblock(path), path.name
    if left is None:
        logger.warning("%s is not taken over: it is damaged, or was never finished", name)
    elif left.version != ARENA_VERSION:
        text = "%s is not taken over: it is of version %d of the arena, and this hybridkv has %d"
        logger.warning(text, name, left.version, ARENA_VERSION)
    elif ram_bytes is not None and ram_bytes // SLOT_ALIGN * SLOT_ALIGN != left.slots_bytes:
        text = "%s is not taken over: it has %s, and --ram asks for %s; what tiers have stays"
        logger.warning(text, name, format_size(left.slots_bytes), format_size(ram_bytes))
    else:
        return _take_over_in_time(path, left.slots_bytes)
    return None


def _take_over_in_time(path: Path, slots_bytes: int) -> Arena | None:
    """Open the arena of an earlier daemon, which has ENDING_SECONDS to let go of it."""
    size_bytes = slots_bytes + trailer_bytes(slots_bytes)
    deadline = time.monotonic() + ENDING_SECONDS
    while True:
        try:
            return shm.take_over_arena(path, size_bytes, slots_bytes)
        except (shm.ArenaGoneError, BlockingIOError) as error:
            if isinstance(error, BlockingIOError) and time.monotonic() < deadline:
                time.sleep(ENDING_SECONDS / 100)
                continue
            logger.warning("%s is not taken over: %s", path.name, error)
            return None


def _trailer_of(arena: Arena) -> Trailer:
    return Trailer(arena.memory[arena.slots_bytes :], arena.slots_bytes)


def node_name(socket_path: Path) -> str:
    """Return a name for the daemon of this socket among all that use the same storage.

    It is the host's name and a digest of the path: "gpu7-0a1b2c3d".
    """
    # Linux has no host names of more than 64 characters.
    host = re.sub(r"[^A-Za-z0-9._-]", "_", socket.gethostname())[:64]
    return f"{host}-{hashlib.sha256(str(socket_path).encode()).hexdigest()[:8]}"


def state_directory() -> Path:
    """Return the directory of what this user's daemons keep over a reboot. It may not exist."""
    base = os.environ.get("XDG_STATE_HOME", "")
    return Path(base if base.startswith("/") else os.path.expanduser("~/.local/state")) / "hybridkv"


def fleeting_host_name(environment: Mapping[str, str]) -> str | None:
    """Returns this host's name where it is a container's, which the next container may not have.

    Docker and podman name a host by 12 digits of the container's id, Kubernetes by the pod.
    """
    host = socket.gethostname()
    is_container = re.fullmatch("[0-9a-f]{12}", host) or "KUBERNETES_SERVICE_HOST" in environment
    return host if is_container else None


def _arena_prefix(socket_path: Path | str) -> str:
    """Return the start of the names of a socket's arenas, with a digest of its path and place."""
    name = f"{socket_path}{_place_of(Path(socket_path))}"
    digest = hashlib.sha256(name.encode()).hexdigest()[:12]
    return f"hybridkv-{os.geteuid()}-{digest}-"


def _files_of_user(prefix: str, directory: Path | None) -> list[Path]:
    """Return the files of this user whose names begin with `prefix`, but for books, sorted.

    The directories are those of `stale_arenas`.
    """
    found = []
    directories = {SHM_DIR, shm_directory() if directory is None else directory}
    for path in sorted(path for place in directories for path in place.glob(f"{prefix}*")):
        try:
            status = path.lstat()
        except FileNotFoundError:
            continue
        is_ours = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
        if is_ours and path.suffix != BOOK_SUFFIX:
            found.append(path)
    return found
