"""A file system for tests: it shows a directory, and hangs, fails or is slow on command.

It speaks the kernel's own protocol (linux/fuse.h, 7.31) over /dev/fuse, so it needs root and no
installed package. A request that hangs is not answered: its caller is in a sleep that not even
SIGKILL ends, as with a disk or a server that is gone. Ending the file system ends all of them.
"""

import contextlib
import ctypes
import errno
import os
import select
import shutil
import stat
import struct
import subprocess
import threading
from collections.abc import Callable, Iterator
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

import pytest

_MINOR = 31
_MAX_WRITE = 1 << 20
_BUFFER = _MAX_WRITE + 4096
_ROOT = 1
_IN = struct.Struct("<IIQQIIIHH")
_OUT = struct.Struct("<IiQ")
_ATTR = struct.Struct("<QQQQQQIIIIIIIIII")
_ENTRY = struct.Struct("<QQQQII")
_ATTR_OUT = struct.Struct("<QII")
_OPEN_OUT = struct.Struct("<QIi")
_IO = struct.Struct("<QQIIQII")
_SETATTR = struct.Struct("<IIQQQQQQIIIIIIII")
_STATFS = struct.Struct("<QQQQQIIII24x")
_INIT_OUT = struct.Struct("<IIIIHHIIHHI28x")
_DIRENT = struct.Struct("<QQII")
_FLAGS = 1 | 1 << 3 | 1 << 5 | 1 << 18 | 1 << 22
"""Asynchronous reads, truncating opens, big writes, parallel lookups, many pages."""
_SET_MODE, _SET_SIZE, _SET_ATIME, _SET_MTIME, _SET_ATIME_NOW, _SET_MTIME_NOW = (
    1,
    8,
    16,
    32,
    128,
    256,
)
_MS_NOSUID_NODEV = 2 | 4
_MNT_DETACH = 2
_libc = ctypes.CDLL(None, use_errno=True)


class Op(IntEnum):
    """The kernel's requests, by their number in linux/fuse.h."""

    LOOKUP = 1
    FORGET = 2
    GETATTR = 3
    SETATTR = 4
    MKDIR = 9
    UNLINK = 10
    RMDIR = 11
    RENAME = 12
    LINK = 13
    OPEN = 14
    READ = 15
    WRITE = 16
    STATFS = 17
    RELEASE = 18
    FSYNC = 20
    FLUSH = 25
    INIT = 26
    OPENDIR = 27
    READDIR = 28
    RELEASEDIR = 29
    FSYNCDIR = 30
    CREATE = 35
    INTERRUPT = 36
    DESTROY = 38
    BATCH_FORGET = 42
    RENAME2 = 45


EVERYTHING = frozenset(Op) - {
    Op.FORGET,
    Op.INIT,
    Op.INTERRUPT,
    Op.DESTROY,
    Op.BATCH_FORGET,
    Op.RELEASE,
    Op.RELEASEDIR,
}
"""The requests whose answer a process waits for."""


class _FileKey(NamedTuple):
    """What a file is known by under any name."""

    device: int
    inode: int


class _Request(NamedTuple):
    """A request of the kernel."""

    op: int
    unique: int
    node: int
    body: bytes


class _Node:
    """A file or directory that the kernel knows."""

    def __init__(self, fd: int, key: _FileKey) -> None:
        self.fd = fd
        """Opened with O_PATH, so it stays the same file under any name."""
        self.key = key
        self.lookups = 0


class FaultyFs:
    """Shows `backing` at `mountpoint`, as a context manager. Skips a test that may not mount."""

    def __init__(self, backing: Path, mountpoint: Path) -> None:
        self.mountpoint = mountpoint
        self.backing = backing
        self.clock_ahead_seconds = 0.0
        """How far the clock of files is ahead of this machine's, as of a server."""
        self._lock = threading.RLock()
        self._hangs: frozenset[Op] = frozenset()
        self._fails: dict[Op, int] = {}
        self._held: list[_Request] = []
        self._deaf = False
        self._counts: dict[int, int] = {}
        self._nodes: dict[int, _Node] = {}
        self._by_key: dict[_FileKey, int] = {}
        self._next = _ROOT
        self._wake = os.pipe()
        self._fd = -1
        self._ended = False
        self._thread = threading.Thread(target=self._serve, name="faulty-fs", daemon=True)

    def __enter__(self) -> "FaultyFs":
        try:
            self._fd = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            pytest.skip(f"needs /dev/fuse, as root: {error.strerror}")
        self._enter(os.open(self.backing, os.O_PATH | os.O_CLOEXEC))
        options = (
            f"fd={self._fd},rootmode=40000,user_id=0,group_id=0,allow_other,max_read={_MAX_WRITE}"
        )
        if _libc.mount(
            b"faulty", bytes(self.mountpoint), b"fuse.faulty", _MS_NOSUID_NODEV, options.encode()
        ):
            number = ctypes.get_errno()
            os.close(self._fd)
            pytest.skip(f"needs the right to mount: {os.strerror(number)}")
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.end()

    # Commands of a test

    def hang(self, *ops: Op) -> None:
        """Answer these requests no more. Without any, answer no request at all."""
        with self._lock:
            self._hangs = frozenset(ops) or EVERYTHING

    def fail(self, number: int, *ops: Op) -> None:
        """Fail these requests with that error number."""
        with self._lock:
            self._fails.update(dict.fromkeys(ops, number))

    def be_deaf(self) -> None:
        """Read no request any more: processes that ask sleep, but SIGKILL ends them."""
        with self._lock:
            self._deaf = True
        os.write(self._wake[1], b"\0")

    def heal(self) -> None:
        """Answer every request again, and first those that hang."""
        with self._lock:
            self._hangs, self._fails, self._deaf = frozenset(), {}, False
            held, self._held = self._held, []
            for request in held:
                self._answer(request)
        os.write(self._wake[1], b"\0")

    @contextlib.contextmanager
    def healing(self) -> Iterator[None]:
        """Heal at the end of the context, so that a process that waits can end."""
        try:
            yield
        finally:
            self.heal()

    def held(self, *ops: Op) -> int:
        """Returns how many requests hang, of these kinds or of all."""
        with self._lock:
            return sum(not ops or request.op in ops for request in self._held)

    def count(self, op: Op) -> int:
        """Returns how many requests of a kind have come."""
        with self._lock:
            return self._counts.get(op, 0)

    def end(self) -> None:
        """Unmount. A process that still waits gets an error."""
        if self._ended:
            return
        self._ended = True
        _libc.umount2(bytes(self.mountpoint), _MNT_DETACH)
        os.write(self._wake[1], b"\0")
        self._thread.join()
        os.close(self._fd)
        for fd in (*self._wake, *(node.fd for node in self._nodes.values())):
            os.close(fd)

    # The protocol

    def _serve(self) -> None:
        while not self._ended:
            with self._lock:
                heard = [self._wake[0]] if self._deaf else [self._wake[0], self._fd]
            ready, _, _ = select.select(heard, [], [])
            if self._wake[0] in ready:
                os.read(self._wake[0], 4096)
            if self._fd in ready:
                try:
                    raw = os.read(self._fd, _BUFFER)
                except OSError as error:
                    if error.errno in (errno.EAGAIN, errno.EINTR, errno.ENOENT):
                        continue
                    return
                _, op, unique, node, _, _, _, _, _ = _IN.unpack_from(raw)
                self._hear(_Request(op, unique, node, raw[_IN.size :]))

    def _hear(self, request: _Request) -> None:
        with self._lock:
            self._counts[request.op] = self._counts.get(request.op, 0) + 1
            if request.op in self._hangs:
                self._held.append(request)
            else:
                self._answer(request)

    def _answer(self, request: _Request) -> None:
        try:
            if request.op in self._fails:
                raise OSError(self._fails[Op(request.op)], "on command")
            do = (
                getattr(self, f"_do_{Op(request.op).name.lower()}", None)
                if request.op in tuple(Op)
                else None
            )
            if do is None:
                raise OSError(errno.ENOSYS, "not known here")
            reply, number = do(request.node, request.body), 0
        except OSError as error:
            reply, number = b"", error.errno or errno.EIO
        if reply is not None:
            with contextlib.suppress(OSError):  # whoever asked may be gone
                head = _OUT.pack(_OUT.size + len(reply), -number, request.unique)
                os.write(self._fd, head + reply)

    # Nodes

    def _enter(self, fd: int) -> int:
        status = os.fstat(fd)
        key = _FileKey(status.st_dev, status.st_ino)
        number = self._by_key.get(key)
        if number is None:
            number, self._next = self._next, self._next + 1
            self._nodes[number] = _Node(fd, key)
            self._by_key[key] = number
        else:
            os.close(fd)
        self._nodes[number].lookups += 1
        return number

    def _forget(self, number: int, lookups: int) -> None:
        node = self._nodes.get(number)
        if node is not None and number != _ROOT:
            node.lookups -= lookups
            if node.lookups <= 0:
                os.close(node.fd)
                del self._nodes[number], self._by_key[node.key]

    def _dir(self, number: int) -> int:
        return self._nodes[number].fd

    def _path(self, number: int) -> str:
        return f"/proc/self/fd/{self._nodes[number].fd}"

    def _entry(self, parent: int, name: str) -> bytes:
        fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._dir(parent))
        number = self._enter(fd)
        return _ENTRY.pack(number, 0, 0, 0, 0, 0) + self._attr(number)

    def _attr(self, number: int) -> bytes:
        return _attr(os.fstat(self._dir(number)), round(self.clock_ahead_seconds * 10**9))

    # Requests, each with its node and its body; the reply is bytes, or None where there is none.

    def _do_init(self, node: int, body: bytes) -> bytes:
        ahead, flags = struct.unpack_from("<8xII", body)
        pages = _MAX_WRITE // 4096
        return _INIT_OUT.pack(7, _MINOR, ahead, flags & _FLAGS, 64, 48, _MAX_WRITE, 1, pages, 0, 0)

    def _do_destroy(self, node: int, body: bytes) -> bytes:
        return b""

    def _do_interrupt(self, node: int, body: bytes) -> None:
        """Ignore the interrupt: the request goes on."""

    def _do_lookup(self, node: int, body: bytes) -> bytes:
        return self._entry(node, _names(body)[0])

    def _do_forget(self, node: int, body: bytes) -> None:
        self._forget(node, struct.unpack_from("<Q", body)[0])

    def _do_batch_forget(self, node: int, body: bytes) -> None:
        (count,) = struct.unpack_from("<I", body)
        for at in range(count):
            number, lookups = struct.unpack_from("<QQ", body, 8 + 16 * at)
            self._forget(number, lookups)

    def _do_getattr(self, node: int, body: bytes) -> bytes:
        return _ATTR_OUT.pack(0, 0, 0) + self._attr(node)

    def _do_setattr(self, node: int, body: bytes) -> bytes:
        valid, _, _, size, _, atime, mtime, _, atime_ns, mtime_ns, _, mode, *_ = (
            _SETATTR.unpack_from(body)
        )
        path = self._path(node)
        if valid & _SET_MODE:
            os.chmod(path, stat.S_IMODE(mode))
        if valid & _SET_SIZE:
            os.truncate(path, size)
        if valid & (_SET_ATIME | _SET_MTIME):
            if valid & (_SET_ATIME_NOW | _SET_MTIME_NOW):
                os.utime(path)
            else:
                times = atime * 10**9 + atime_ns, mtime * 10**9 + mtime_ns
                ahead_ns = round(self.clock_ahead_seconds * 10**9)
                os.utime(path, ns=(times[0] - ahead_ns, times[1] - ahead_ns))
        return self._do_getattr(node, body)

    def _do_mkdir(self, node: int, body: bytes) -> bytes:
        mode, _ = struct.unpack_from("<II", body)
        (name,) = _names(body[8:])
        os.mkdir(name, stat.S_IMODE(mode), dir_fd=self._dir(node))
        return self._entry(node, name)

    def _do_unlink(self, node: int, body: bytes) -> bytes:
        os.unlink(_names(body)[0], dir_fd=self._dir(node))
        return b""

    def _do_rmdir(self, node: int, body: bytes) -> bytes:
        os.rmdir(_names(body)[0], dir_fd=self._dir(node))
        return b""

    def _do_rename(self, node: int, body: bytes) -> bytes:
        (to,) = struct.unpack_from("<Q", body)
        return self._rename(node, to, body[8:])

    def _do_rename2(self, node: int, body: bytes) -> bytes:
        to, flags = struct.unpack_from("<QI", body)
        if flags:
            raise OSError(errno.EINVAL, "no flags")
        return self._rename(node, to, body[16:])

    def _rename(self, node: int, to: int, names: bytes) -> bytes:
        old, new = _names(names)
        os.rename(old, new, src_dir_fd=self._dir(node), dst_dir_fd=self._dir(to))
        return b""

    def _do_link(self, node: int, body: bytes) -> bytes:
        (old,) = struct.unpack_from("<Q", body)
        (name,) = _names(body[8:])
        os.link(self._path(old), name, dst_dir_fd=self._dir(node), follow_symlinks=True)
        return self._entry(node, name)

    def _do_open(self, node: int, body: bytes) -> bytes:
        (flags,) = struct.unpack_from("<I", body)
        keep = os.O_ACCMODE | os.O_TRUNC | os.O_APPEND
        return _OPEN_OUT.pack(os.open(self._path(node), flags & keep | os.O_CLOEXEC), 0, 0)

    def _do_create(self, node: int, body: bytes) -> bytes:
        flags, mode, _, _ = struct.unpack_from("<IIII", body)
        (name,) = _names(body[16:])
        keep = os.O_ACCMODE | os.O_TRUNC | os.O_APPEND | os.O_EXCL
        fd = os.open(
            name,
            flags & keep | os.O_CREAT | os.O_CLOEXEC,
            stat.S_IMODE(mode),
            dir_fd=self._dir(node),
        )
        return self._entry(node, name) + _OPEN_OUT.pack(fd, 0, 0)

    def _do_read(self, node: int, body: bytes) -> bytes:
        fh, offset, size, *_ = _IO.unpack_from(body)
        return os.pread(fh, size, offset)

    def _do_write(self, node: int, body: bytes) -> bytes:
        fh, offset, size, *_ = _IO.unpack_from(body)
        return struct.pack("<II", os.pwrite(fh, body[_IO.size : _IO.size + size], offset), 0)

    def _do_statfs(self, node: int, body: bytes) -> bytes:
        system = os.statvfs(self.backing)
        return _STATFS.pack(
            system.f_blocks,
            system.f_bfree,
            system.f_bavail,
            system.f_files,
            system.f_ffree,
            system.f_bsize,
            system.f_namemax,
            system.f_frsize,
            0,
        )

    def _do_release(self, node: int, body: bytes) -> bytes:
        os.close(struct.unpack_from("<Q", body)[0])
        return b""

    def _do_flush(self, node: int, body: bytes) -> bytes:
        return b""

    def _do_fsync(self, node: int, body: bytes) -> bytes:
        return b""

    _do_fsyncdir = _do_fsync

    def _do_opendir(self, node: int, body: bytes) -> bytes:
        return _OPEN_OUT.pack(0, 0, 0)

    def _do_releasedir(self, node: int, body: bytes) -> bytes:
        return b""

    def _do_readdir(self, node: int, body: bytes) -> bytes:
        _, offset, size, *_ = _IO.unpack_from(body)
        listed = b""
        for at, name in enumerate(sorted(os.listdir(self._path(node)))[offset:], offset + 1):
            raw = name.encode()
            entry = _DIRENT.pack(1, at, len(raw), 0) + raw
            entry += bytes(-len(entry) % 8)
            if len(listed) + len(entry) > size:
                break
            listed += entry
        return listed


def _names(raw: bytes) -> list[str]:
    return [os.fsdecode(name) for name in raw.rstrip(b"\0").split(b"\0")]


def _attr(status: os.stat_result, ahead_ns: int) -> bytes:
    times = [ns + ahead_ns for ns in (status.st_atime_ns, status.st_mtime_ns, status.st_ctime_ns)]
    seconds, rest = [time // 10**9 for time in times], [time % 10**9 for time in times]
    return _ATTR.pack(
        status.st_ino,
        status.st_size,
        status.st_blocks,
        *seconds,
        *rest,
        status.st_mode,
        status.st_nlink,
        status.st_uid,
        status.st_gid,
        0,
        4096,
        0,
    )


@contextlib.contextmanager
def mounted(
    kind: str, where: Path, size: str, image: Path | None = None
) -> Iterator[Callable[[str], None]]:
    """Mounts a "tmpfs" or "ext4" of `size`; gives a function that remounts it "ro" or "rw".

    Skips the test where mounting is not permitted.
    """

    def remount(how: str) -> None:
        done = subprocess.run(
            ["mount", "-o", f"remount,{how}", str(where)], capture_output=True, check=False
        )
        if done.returncode:
            raise OSError(errno.EBUSY, done.stderr.decode().strip())

    where.mkdir(exist_ok=True)
    if kind == "tmpfs":
        command = ["mount", "-t", "tmpfs", "-o", f"size={size},mode=700", "tmpfs", str(where)]
    else:
        assert image is not None, "ext4 is made in a file"
        with image.open("wb") as file:
            file.truncate(int(size))
        tool = shutil.which("mkfs.ext4", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
        if tool is None:
            pytest.skip("needs mkfs.ext4")
        mkfs = subprocess.run([tool, "-q", "-m", "0", str(image)], capture_output=True, check=False)
        if mkfs.returncode:
            pytest.skip(f"needs mkfs.ext4: {mkfs.stderr.decode()[-100:]}")
        command = ["mount", "-o", "loop", str(image), str(where)]
    done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode:
        pytest.skip(f"needs the right to mount: {done.stderr.decode().strip()[-100:]}")
    try:
        yield remount
    finally:
        subprocess.run(["umount", "-l", str(where)], check=False)
