"""The files of a directory tier: their names, and the proof that each is its name's record."""

import contextlib
import errno
import fcntl
import mmap
import os
import stat
import uuid
from collections.abc import Callable, Iterator
from enum import StrEnum
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import IO, NamedTuple, TypeVar

from hybridkv.core.keys import HASH_BYTES, KEY_BYTES
from hybridkv.shm.slots import HEADER_BYTES, SHORT_HASH_BYTES, SLOT_ALIGN
from hybridkv.tiers.coding import BODY_BYTES_MAX, PLAIN, Coding
from hybridkv.tiers.contract import DamagedError, UndecodableError
from hybridkv.tiers.record import (
    Record,
    head_bytes,
    is_encoded,
    parts_of,
    proven_digests,
    read_encoded,
    read_head,
)

T = TypeVar("T")

QUARANTINE_MAX = 16  # Damaged files that are kept.
BLOCK_BYTES = 512  # The unit of st_blocks.
_SILLY = ".nfs"
"""How a name begins that an NFS client gives to a file that is removed while a process has it open.
It removes the file when the process closes it, unless the client's machine ends before.
"""
FAILED_IN_A_ROW_MAX = 16  # Files that fail in a row. With more, the file system is to blame.
SYSTEM_ERRORS = (
    frozenset((errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EINTR, errno.EAGAIN))
    | frozenset((errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ENODEV, errno.ENOTCONN))
    | frozenset((errno.ESTALE, errno.ETIMEDOUT, errno.EHOSTDOWN, errno.EHOSTUNREACH))
)
"""Errors of the process or of the whole file system, which are not the fault of one file."""


class FileName(NamedTuple):
    """The name of a record's file. It has all that the order of eviction needs."""

    key: bytes
    parent: bytes = bytes(SHORT_HASH_BYTES)
    interior: bool = False

    @property
    def text(self) -> str:
        """KEY.PARENT in hexadecimal digits, with an i after an interior record's: "a0b1.c2d3i"."""
        return f"{self.key.hex()}.{self.parent.hex()}{'i' if self.interior else ''}"

    @property
    def path(self) -> str:
        """The path below a writer's directory: KK/KEY.PARENT, KK is the chunk hash's first byte."""
        return os.path.join(self.key[HASH_BYTES : HASH_BYTES + 1].hex(), self.text)


def parse_name(text: str) -> FileName | None:
    """Returns the parsed name of a file, or None where it is not the name of a record."""
    key, _, parent = text.removesuffix("i").partition(".")
    try:
        name = FileName(bytes.fromhex(key), bytes.fromhex(parent), text.endswith("i"))
    except ValueError:
        return None
    is_sound = len(name.key) == KEY_BYTES and len(name.parent) == SHORT_HASH_BYTES
    return name if is_sound and name.text == text else None


def name_of(record: Record) -> FileName:
    """Returns the name that a record's file should have."""
    return FileName(record.name.key, record.parent, record.interior)


def taken_bytes(status: os.stat_result) -> int:
    """Returns the bytes that a file counts as: its size, or its blocks where they are more."""
    return max(status.st_size, status.st_blocks * BLOCK_BYTES)


def shards(home: Path) -> list[str]:
    """Returns the paths of a writer's directories of records, sorted."""
    with contextlib.suppress(FileNotFoundError):
        # The writer's directory does not exist yet, or no longer, and so has no records.
        return sorted(entry.path for entry in os.scandir(home) if len(entry.name) == 2)
    return []


def is_silly_renamed(name: str) -> bool:
    """Returns whether a file's name is one of an NFS client: ".nfs0000000000001a2b00000003"."""
    return name.startswith(_SILLY)


def silly_renamed(home: Path) -> Iterator[str]:
    """Yields the paths of a writer's files that were removed while a process had them open."""
    for shard in shards(home):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            # The path is gone, or is no directory of records, and so has none.
            yield from (entry.path for entry in os.scandir(shard) if is_silly_renamed(entry.name))


def records(home: Path) -> Iterator[tuple[str, FileName]]:
    """Yields (path, name) of every record of a writer."""
    return chain.from_iterable(map(shard_records, shards(home)))


def shard_records(shard: str) -> Iterator[tuple[str, FileName]]:
    """Yields (path, name) of every record in one directory of a writer."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(shard) as entries:
        # The path is gone, or is no directory of records, and so has none.
        for entry in entries:
            name = parse_name(entry.name)
            if name is not None:
                yield entry.path, name


class FileStatus(NamedTuple):
    """What the order of eviction needs of a record's file beside its name."""

    changed: float  # Seconds since the epoch.
    taken_bytes: int


def file_status(path: str) -> FileStatus:
    """Returns the status of a record's file. Raises OSError."""
    status = os.stat(path, follow_symlinks=False)
    return FileStatus(status.st_mtime, taken_bytes(status))


class FileErrors:
    """Suppresses the errors of single files in a loop over many, and counts them.

    It is the context of the work on one file. FileNotFoundError passes to the caller. So do
    SYSTEM_ERRORS, and any error after FAILED_IN_A_ROW_MAX in a row.
    """

    def __init__(self) -> None:
        self.count = 0
        self.first = ""  # The first error and its file, for the log.
        self._in_a_row = 0

    def __enter__(self) -> None:
        """Begin the work on one file. Nothing is needed for that."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        if error is None:
            self._in_a_row = 0
        if not isinstance(error, OSError) or isinstance(error, FileNotFoundError):
            return False
        if error.errno in SYSTEM_ERRORS or self._in_a_row >= FAILED_IN_A_ROW_MAX:
            return False
        self._in_a_row += 1
        self.count += 1
        self.first = self.first or f"{error.strerror}: {error.filename}"
        return True


def retry_stale(do: Callable[[], T]) -> T:
    """Returns what `do` returns, which opens a file by its name and reads it. Raises OSError.

    On NFS a file that another node removed while it was open is an ESTALE. The name is looked up
    anew then, and the file that has it by now is read, or it is a FileNotFoundError.
    """
    try:
        return do()
    except OSError as error:
        if error.errno != errno.ESTALE:
            raise
    return do()


def open_regular(path: str | Path, flags: int = 0) -> int:
    """Open a file to read, which others may have replaced. Returns the descriptor.

    Opening a FIFO would wait for its writer, so anything but a regular file counts as not there.
    Raises OSError.
    """
    base = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    fd = os.open(path, base)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise FileNotFoundError(errno.ENOENT, "no regular file", str(path))
        if flags:
            # A FIFO would refuse direct I/O with an error of its own.
            fcntl.fcntl(fd, fcntl.F_SETFL, base | flags)
    except BaseException:
        os.close(fd)
        raise
    return fd


def read_regular(path: Path) -> str:
    """Returns the text of a small file. Raises OSError, as `open_regular`."""
    with open(open_regular(path)) as file:
        return file.read()


def set_aside(root: Path, path: str) -> None:
    """Move a damaged file to the quarantine, which keeps QUARANTINE_MAX. Raises OSError."""
    where = root / "quarantine"
    where.mkdir(mode=0o700, exist_ok=True)
    os.utime(path)
    os.rename(path, where / f"{os.path.basename(path)}.{uuid.uuid4().hex[:8]}")
    kept = sorted(where.iterdir(), key=lambda file: file.stat().st_mtime)
    for old in kept[:-QUARANTINE_MAX]:
        old.unlink(missing_ok=True)


def empty_quarantine(root: Path) -> None:
    """Remove all files of the quarantine. Raises OSError."""
    for path in (root / "quarantine").glob("*"):
        path.unlink(missing_ok=True)


class FileDamage(StrEnum):
    """The kinds of damage of a file, as people read them."""

    EMPTY = "zero length"
    LENGTH = "length"
    HEADER = "header"
    BYTES = "bytes"
    MISNAMED = "misnamed"  # It is a whole record of another name.
    UNREADABLE = "unreadable"


class FileProof(NamedTuple):
    """The result of reading and proving a file."""

    damage: FileDamage | None
    record: Record | None = None  # The file's header, where it is sound.
    is_undecodable: bool = False  # Whether the bytes after a sound header cannot be proven.


def _prove(file: IO[bytes], size: int, name: FileName | None, coding: Coding) -> FileProof:
    """Read the `size` bytes of `file` and prove that they are the record `name`.

    `coding` decodes an encoded record. No more memory is used than a sound header says. Raises
    OSError.
    """
    if not size or size % SLOT_ALIGN:
        return FileProof(FileDamage.LENGTH if size else FileDamage.EMPTY)
    start = file.read(HEADER_BYTES)
    if is_encoded(start):
        return _prove_encoded(file, start, size, name, coding)
    wanted = min(size, head_bytes(parts_of(start)))
    start += file.read(wanted - len(start))
    record = read_head(memoryview(start))
    if record is None:
        return FileProof(FileDamage.HEADER)
    if record.size_bytes != size or len(start) < wanted:
        return FileProof(FileDamage.LENGTH, record)
    memory = _whole(file, start, size)
    if memory is None:
        return FileProof(FileDamage.LENGTH, record)
    if proven_digests(record, memory) is None:
        return FileProof(FileDamage.BYTES, record)
    return FileProof(FileDamage.MISNAMED if name_of(record) != name else None, record)


def _prove_encoded(
    file: IO[bytes], start: bytes, size: int, name: FileName | None, coding: Coding
) -> FileProof:
    header = read_encoded(start)
    if header is None:
        return FileProof(FileDamage.HEADER)
    record, encoding = header
    memory = _whole(file, start, size) if encoding.size_bytes == size else None
    if memory is None or record.size_bytes > BODY_BYTES_MAX:
        return FileProof(FileDamage.LENGTH, record)
    plain = memoryview(mmap.mmap(-1, record.size_bytes))
    damage = FileDamage.MISNAMED if name_of(record) != name else None
    try:
        coding.decode([memory], [plain])
    except DamagedError:
        return FileProof(FileDamage.BYTES, record)
    except UndecodableError:
        return FileProof(damage, record, is_undecodable=True)
    if proven_digests(record, plain) is None:
        return FileProof(FileDamage.BYTES, record)
    return FileProof(damage, record)


def _whole(file: IO[bytes], start: bytes, size: int) -> memoryview | None:
    """Returns `start` and the next bytes of `file`, `size` together, or None where it ends."""
    memory = memoryview(mmap.mmap(-1, size))
    memory[: len(start)] = start
    done = len(start)
    while done < size and (got := file.readinto(memory[done:])):  # type: ignore[attr-defined]
        done += got
    return memory if done == size else None


def prove_file(path: str, name: FileName | None, coding: Coding = PLAIN) -> FileProof | None:
    """Prove the file at `path`. Returns None where it is gone, or is no regular file."""
    try:
        fd = open_regular(path)
        with open(fd, "rb", buffering=0) as file:
            # The bytes on the disk are proven, not those of the page cache, which daemons bypass.
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            proof = _prove(file, os.fstat(fd).st_size, name, coding)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            return proof
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError:
        return FileProof(FileDamage.UNREADABLE)
