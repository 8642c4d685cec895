"""The daemon's files: its directory, lock, socket and arena, which are its user's alone."""

import fcntl
import hashlib
import logging
import os
import re
import socket
import stat
from pathlib import Path

from hybridkv.core.errors import ConfigError, HybridKVError
from hybridkv.shm import arena as shm
from hybridkv.shm.arena import SHM_DIR, Arena
from hybridkv.shm.slots import SLOT_ALIGN
from hybridkv.shm.trailer import Trailer, left_slots_bytes, trailer_bytes

logger = logging.getLogger("hybridkv.daemon")


class AlreadyServedError(HybridKVError):
    """Another daemon holds this socket."""


def make_private_directory(directory: Path, setting: str) -> None:
    """Create `directory` for this user alone, or check that it is. Raises ConfigError."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        fault = f"directory {directory} cannot be made ({error.strerror})"
        raise _refusal(setting, fault) from error
    check_private_directory(directory, setting)


def check_private_directory(directory: Path, setting: str) -> None:
    """Raise ConfigError unless `directory` is this user's alone or can be made."""
    try:
        status = directory.lstat()
    except FileNotFoundError:
        above = next(parent for parent in directory.parents if parent.exists())
        if os.access(above, os.W_OK | os.X_OK):
            return
        raise _refusal(setting, f"you may not make directory {directory} in {above}") from None
    except OSError as error:
        fault = f"directory {directory} cannot be used ({error.strerror})"
        raise _refusal(setting, fault) from error
    if not stat.S_ISDIR(status.st_mode):
        raise _refusal(setting, f"{directory} is not a directory of its own (a link?)")
    if status.st_uid != os.geteuid():
        raise _refusal(setting, f"{directory} belongs to user id {status.st_uid}, not to you")
    if status.st_mode & 0o022:
        raise _refusal(setting, f"others may write to {directory}", ", or chmod 700 it")


def _refusal(setting: str, fault: str, more: str = "") -> ConfigError:
    works = f'"/tmp/hybridkv-{os.geteuid()}/daemon.sock" works'
    return ConfigError(f"{setting}: {fault}", works + more)


def take_lock(socket_path: Path) -> int:
    """A descriptor whose lock makes this process the only daemon of `socket_path`.

    Raises AlreadyServedError, ConfigError.
    """
    lock_path = socket_path.with_name(socket_path.name + ".lock")
    try:
        fd = os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        fault = f"{lock_path} cannot be opened ({error.strerror})"
        raise _refusal("socket", fault) from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        raise AlreadyServedError(f"a daemon is already serving {socket_path}") from error
    return fd


def listen(socket_path: Path) -> socket.socket:
    """A non-blocking listening socket in place of a stale one. Raises ConfigError."""
    kind = socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
    listener = socket.socket(socket.AF_UNIX, kind)
    try:
        if socket_path.is_socket():
            socket_path.unlink()
        listener.bind(str(socket_path))
        socket_path.chmod(0o600)
        listener.listen(128)
    except OSError as error:
        listener.close()
        fault = f"no socket can be made at {socket_path} ({error.strerror})"
        raise _refusal("socket", fault) from error
    return listener


def stale_arenas(socket_path: Path) -> list[Path]:
    """Arenas that dead daemons of this socket left behind; the caller holds the lock."""
    found = SHM_DIR.glob(f"{_arena_prefix(socket_path)}*")
    return [path for path in found if path.lstat().st_uid == os.geteuid()]


def open_arena(
    socket_path: Path, ram_bytes: int | None, fresh: bool, boot: str
) -> tuple[Arena, Trailer, bool]:
    """An earlier daemon's arena where one fits, else a new one; and whether it is an earlier one.

    Without `ram_bytes` an arena of any size fits. Those that do not fit, or all of them where
    `fresh`, are removed. Raises ConfigError.
    """
    taken: tuple[Arena, Trailer] | None = None
    for path in stale_arenas(socket_path):
        found = None if fresh or taken is not None else _take_over(path, ram_bytes)
        if found is None:
            path.unlink(missing_ok=True)
        taken = taken or found
    if taken is not None:
        return *taken, True
    wanted_bytes = shm.default_ram_bytes() if ram_bytes is None else ram_bytes
    shm.check_ram(wanted_bytes, "ram")
    slots_bytes = wanted_bytes // SLOT_ALIGN * SLOT_ALIGN
    path = SHM_DIR / f"{_arena_prefix(socket_path)}{boot}"
    arena = shm.create_arena(path, slots_bytes, trailer_bytes(slots_bytes))
    trailer = Trailer(arena.memory[slots_bytes:], slots_bytes)
    trailer.format()
    return arena, trailer, False


def _take_over(path: Path, ram_bytes: int | None) -> tuple[Arena, Trailer] | None:
    slots_bytes = left_slots_bytes(path)
    wanted_bytes = slots_bytes if ram_bytes is None else ram_bytes // SLOT_ALIGN * SLOT_ALIGN
    if slots_bytes is None or slots_bytes != wanted_bytes:
        logger.warning("%s is not taken over: it is of another size or version", path.name)
        return None
    try:
        size_bytes = slots_bytes + trailer_bytes(slots_bytes)
        arena = shm.attach_arena(path, size_bytes, slots_bytes, owner=True)
    except (shm.ArenaGoneError, BlockingIOError) as error:
        logger.warning("%s is not taken over: %s", path.name, error)
        return None
    return arena, Trailer(arena.memory[slots_bytes:], slots_bytes)


def node_name(socket_path: Path) -> str:
    """A name for the daemon of this socket among all that use the same storage."""
    # Linux has no host names of more than 64 characters.
    host = re.sub(r"[^A-Za-z0-9._-]", "_", socket.gethostname())[:64]
    return f"{host}-{hashlib.sha256(str(socket_path).encode()).hexdigest()[:8]}"


def _arena_prefix(socket_path: Path) -> str:
    """The start of the names of arenas: it has a digest of the socket's path."""
    digest = hashlib.sha256(str(socket_path).encode()).hexdigest()[:12]
    return f"hybridkv-{os.geteuid()}-{digest}-"
