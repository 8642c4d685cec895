"""The files of a directory tier: their names, where they are, and whether each is the record that its name says."""

import contextlib
import mmap
import os
import uuid
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import IO, NamedTuple

from hybridkv.core.errors import ConfigError
from hybridkv.core.keys import HASH_BYTES
from hybridkv.shm.slots import HEADER_BYTES, SLOT_ALIGN
from hybridkv.storage.record import KEY_BYTES, TAG_BYTES, Record, head_bytes, is_whole, parts_of, read_head

LAYOUT = "1\n"
LAYOUT_FILE = "hybridkv-tier"
ALIVE_SECONDS = 30.0
"""A writer touches its `alive` so often."""
QUIET_SECONDS = 10 * ALIVE_SECONDS
"""A writer that has not for so long writes nothing at the moment."""
QUARANTINE_MAX = 16
"""Damaged files that are kept."""
BLOCK_BYTES = 512
"""Unit of st_blocks."""


class FileName(NamedTuple):
    """What the name of a record's file says, which is all that the order of eviction needs."""

    key: bytes
    parent: bytes = bytes(TAG_BYTES)
    interior: bool = False

    @property
    def text(self) -> str:
        """KEY.PARENT in hexadecimal digits, an i behind it for an interior one."""
        return f"{self.key.hex()}.{self.parent.hex()}{'i' if self.interior else ''}"

    @property
    def path(self) -> str:
        """Below a writer's directory."""
        return os.path.join(self.key[HASH_BYTES : HASH_BYTES + 1].hex(), self.text)


def parse_name(text: str) -> FileName | None:
    """What a file's name says; None where it is no record's."""
    digits, _, rest = text.partition(".")
    try:
        name = FileName(bytes.fromhex(digits), bytes.fromhex(rest.removesuffix("i")), rest.endswith("i"))
    except ValueError:
        return None
    return name if len(name.key) == KEY_BYTES and len(name.parent) == TAG_BYTES and name.text == text else None


def name_of(record: Record) -> FileName:
    """The name that a record's file should have."""
    return FileName(record.name.key, record.parent, record.interior)


def taken_bytes(status: os.stat_result) -> int:
    """What a file counts as: its bytes, or its blocks where they are more."""
    return max(status.st_size, status.st_blocks * BLOCK_BYTES)


def records(home: str | Path) -> Iterator[tuple[str, FileName]]:
    """(path, name) of every record of a writer."""
    with contextlib.suppress(FileNotFoundError):
        for shard in sorted(entry.path for entry in os.scandir(home) if len(entry.name) == 2):
            yield from shard_records(shard)


def shard_records(shard: str) -> Iterator[tuple[str, FileName]]:
    """(path, name) of every record in one directory of a writer."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        for entry in os.scandir(shard):
            name = parse_name(entry.name)
            if name is not None:
                yield entry.path, name


def homes(root: Path) -> list[Path]:
    """Every writer's directory."""
    with contextlib.suppress(FileNotFoundError):
        return sorted(Path(entry.path) for entry in os.scandir(root / "objects") if entry.is_dir(follow_symlinks=False))
    return []


def check_root(root: Path, setting: str) -> None:
    """Raise ConfigError unless `root` is a tier's directory of this version."""
    works = "the directory of a daemon's --disk works"
    try:
        layout = (root / LAYOUT_FILE).read_text()
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(f"{setting}: {root} is no directory of records (it has no {LAYOUT_FILE}); {works}") from None
    except OSError as error:
        raise ConfigError(f"{setting}: {root} cannot be read ({error.strerror}); {works}") from error
    if layout not in (LAYOUT, ""):
        raise ConfigError(f"{setting}: {root} has another version's layout; its own version of hybridkv works")


def clock(root: Path) -> float:
    """The time by the clock that the files' times are of, seconds since the epoch; makes a file for a moment."""
    path = root / f"clock-{uuid.uuid4().hex}"
    try:
        path.touch(mode=0o600)
        return path.stat().st_mtime
    finally:
        path.unlink(missing_ok=True)


def silent_seconds(home: Path, now: float) -> float | None:
    """How long ago a writer showed that it lives; None where the directory is gone.

    One that never did is as old as its directory: its writer may be about to.
    """
    for path in (home / "alive", home):
        with contextlib.suppress(FileNotFoundError):
            return now - path.stat().st_mtime
    return None


def set_aside(root: Path, path: str) -> None:
    """Keep a damaged file for whoever wants to look, and not many of them."""
    where = root / "quarantine"
    where.mkdir(mode=0o700, exist_ok=True)
    os.utime(path)
    os.rename(path, where / f"{os.path.basename(path)}.{uuid.uuid4().hex[:8]}")
    kept = sorted(where.iterdir(), key=lambda one: one.stat().st_mtime)
    for old in kept[:-QUARANTINE_MAX]:
        old.unlink(missing_ok=True)


class Damage(StrEnum):
    """What may be wrong with a file."""

    EMPTY = "zero length"
    LENGTH = "length"
    HEADER = "header"
    BYTES = "bytes"
    MISNAMED = "misnamed"
    """A whole record, of another name."""
    UNREADABLE = "unreadable"


class Proof(NamedTuple):
    """What a file was found to be."""

    damage: Damage | None
    record: Record | None = None
    """What its header says, if that is sound."""
    memory: memoryview = memoryview(b"")
    """Its bytes, on pages of their own, if they are a whole record."""


def prove(file: IO[bytes], size: int, name: FileName | None) -> Proof:
    """Read the record that `file` should hold, `size` bytes from here on, and prove every byte of it.

    Reads no more than that, and has no more in memory than a sound header says. Raises OSError.
    """
    if not size:
        return Proof(Damage.EMPTY)
    if size % SLOT_ALIGN:
        return Proof(Damage.LENGTH)
    start = file.read(HEADER_BYTES)
    wanted = min(size, head_bytes(parts_of(start)))
    start += file.read(wanted - len(start))
    record = read_head(memoryview(start))
    if record is None:
        return Proof(Damage.HEADER)
    if record.size_bytes != size or len(start) < wanted:
        return Proof(Damage.LENGTH, record)
    memory = memoryview(mmap.mmap(-1, size))
    memory[: len(start)] = start
    done = len(start)
    while done < size and (got := file.readinto(memory[done:])):  # type: ignore[attr-defined]  # raw and buffered ones
        done += got
    if done < size:
        return Proof(Damage.LENGTH, record)
    if not is_whole(record, memory):
        return Proof(Damage.BYTES, record)
    return Proof(Damage.MISNAMED if name_of(record) != name else None, record, memory)


def prove_file(path: str, name: FileName | None) -> Proof | None:
    """As `prove`, of a file; None where it is gone, or is no regular file."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        with open(fd, "rb", buffering=0) as file:
            # What the page cache has is not what the disk has, and daemons do without it.
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            proof = prove(file, os.fstat(fd).st_size, name)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            return proof
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError:
        return Proof(Damage.UNREADABLE)
