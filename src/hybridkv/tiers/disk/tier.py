"""Records as files of a directory, on a local disk or one that several nodes share (as NFS).

::

    hybridkv-tier                                  the version of this layout
    objects/WRITER/alive                           touched and locked by that writer while it lives
    objects/WRITER/KK/KEY.PARENT[i]                a record; hexadecimal digits, i = interior
    objects/WRITER/tmp/D/N                         a record that is being written
    books/WRITER                                   that writer's token book (daemon.book_file)
    quarantine/...                                 damaged records, the last few

Every daemon writes below its own directory and reads all of them (disk.writers), so no daemon waits
for a lock. Its byte bound is for the files that it wrote itself (disk.index). A file appears by a
rename, whole. Names have all that the order of eviction needs, so a restart lists directories and
reads no file.
"""

import contextlib
import errno
import logging
import mmap
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path

from hybridkv.core.errors import ConfigError
from hybridkv.core.refusals import Refusal, refusal_of
from hybridkv.core.sizes import format_size
from hybridkv.core.tier_urls import TierSpec
from hybridkv.shm.slots import SLOT_ALIGN
from hybridkv.tiers import contract
from hybridkv.tiers.contract import (
    FindRequest,
    ReadRequest,
    RecordStart,
    Tier,
    TierError,
    WriteRequest,
    bytes_after,
    zero_after,
)
from hybridkv.tiers.disk.files import (
    BLOCK_BYTES,
    FAILED_IN_A_ROW_MAX,
    SYSTEM_ERRORS,
    FileName,
    empty_quarantine,
    open_regular,
    parse_name,
    retry_stale,
    set_aside,
    taken_bytes,
)
from hybridkv.tiers.disk.index import FULL_ERRORS, FileIndex
from hybridkv.tiers.disk.writers import TMP, TMP_DIRECTORIES, Writers, home_of, homes

logger = logging.getLogger("hybridkv.daemon")

_SLACK_BYTES = SLOT_ALIGN  # What a file may take beside its bytes.
_ROOM_BYTES = 64 << 10
"""Bytes that are evicted where a full file system has no room for the files of a start."""
_SETTINGS = (errno.ENOENT, errno.ENOTDIR, errno.EEXIST, errno.EACCES, errno.EPERM, errno.ELOOP)
"""Errors that only another directory mends. Any other error may pass."""
UNREADABLE_MAX = 1024  # Unreadable files that are remembered. The oldest are forgotten.


class ReadFailures:
    """Distinguishes a damaged file from a file system that fails.

    A file is damaged where it fails twice, and another file was read in between.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # For the attributes below.
        self._reads = 0  # Files that were read so far.
        self._failures_in_a_row = 0  # Files that could not be read, since the last that was.
        self._reads_at_failure: dict[str, int] = {}
        """By the path of a file whose last read failed, the value of `_reads` at that time."""

    def on_read(self, path: str) -> None:
        """The file was read, so an earlier failure of it was no damage."""
        with self._lock:
            self._reads += 1
            self._failures_in_a_row = 0
            self._reads_at_failure.pop(path, None)

    def on_read_failed(self, path: str) -> bool:
        """A file could not be read. Returns whether it counts as damaged."""
        with self._lock:
            self._failures_in_a_row += 1
            reads = self._reads_at_failure.pop(path, self._reads)
            if reads < self._reads and self._failures_in_a_row <= FAILED_IN_A_ROW_MAX:
                return True
            self._reads_at_failure[path] = reads
            if len(self._reads_at_failure) > UNREADABLE_MAX:
                del self._reads_at_failure[next(iter(self._reads_at_failure))]
            return False


class DiskTier(Tier):
    """Keeps records as files of a directory."""

    name = "disk"

    def __init__(self, spec: TierSpec) -> None:
        """`spec.node` names this daemon, in all its lives, among all that use the directory."""
        spec.known_options()
        writer = spec.node
        assert writer, "its files lie in a directory of this name"
        root = Path(spec.location.removeprefix("disk://"))
        self.index = FileIndex(spec.max_bytes or 0, home_of(root, writer))
        self.writers = Writers(root, writer, self.index)
        self._direct = os.O_DIRECT
        self._numbers = count(1)
        self._failures = ReadFailures()

    def open(self) -> None:
        """Scan the directory. Raises ConfigError where it cannot be used."""
        index, writers = self.index, self.writers
        try:
            try:
                writers.make_directories()
            except FileNotFoundError:
                # Another daemon was taking the directory over, because this writer was lost.
                writers.make_directories()
            writers.index_own()
            try:
                self._settle()
            except OSError as error:
                if error.errno not in FULL_ERRORS:
                    raise
                with index.lock:
                    index.evict_bytes(_ROOM_BYTES)
                self._settle()
            writers.adopt_lost()
            writers.index_others()
        except OSError as error:
            if error.errno not in _SETTINGS:
                raise _translated(error) from error
            what = f"disk: {writers.root} cannot be used ({error.strerror})"
            raise ConfigError(what, "a directory that you may write to works") from error
        logger.info(
            "disk: %s has %d objects of ours, %s of at most %s, and %d of %d other writers%s",
            writers.root,
            index.own_count,
            format_size(index.held_bytes),
            format_size(index.max_bytes),
            index.other_count,
            len(homes(writers.root)) - 1,
            "" if self._direct else "; no direct I/O there",
        )

    def peek(self, key: bytes) -> bool:
        return self.index.row_of(key) is not None

    def find(self, keys: Sequence[bytes]) -> list[bool]:
        return self.index.may_have(keys)

    def has_other_writers(self) -> bool:
        return self.writers.has_others

    def find_again(self, wanted: Sequence[FindRequest]) -> list[bool]:
        try:
            self.writers.index_wanted(wanted)
        except OSError as error:
            raise _translated(error) from error
        return [self.peek(request.key) for request in wanted]

    def use(self, keys: Sequence[bytes]) -> list[bool]:
        for key in keys:
            self.index.touch(key)
        return self.find(keys)

    def get(self, items: Sequence[ReadRequest]) -> list[TierError | None]:
        return [self._get(item) for item in items]

    def read_starts(self, keys: Sequence[bytes]) -> list[RecordStart | TierError]:
        return [self._read_start(key) for key in keys]

    def put(self, items: Sequence[WriteRequest]) -> list[TierError | None]:
        return [self._put(item) for item in items]

    def discard(self, keys: Sequence[bytes], damaged: bool = False) -> None:
        index = self.index
        for key in keys:
            with index.lock:
                path, own_bytes = index.path_of(key), index.own_bytes(key)
                if path is None:
                    continue
                try:
                    if damaged:
                        set_aside(self.writers.root, path)
                    else:
                        os.unlink(path)
                except OSError as error:
                    is_gone = isinstance(error, FileNotFoundError) and not os.path.lexists(path)
                    if own_bytes is not None and not is_gone:
                        # No other record gets its room while the file is there.
                        index.add_stray(path, own_bytes)
                index.drop_record(key)

    def erase(self, keys: Sequence[bytes]) -> list[TierError | None]:
        return [self._erase(key) for key in keys]

    def empty_quarantine(self) -> None:
        try:
            empty_quarantine(self.writers.root)
        except OSError as error:
            raise _translated(error) from error

    def keys(self) -> Iterator[bytes]:
        return self.index.known_keys()

    def tend(self) -> None:
        now = time.monotonic()
        try:
            if not self.writers.show_alive(now):
                text = "disk: %s is gone: somebody removed or took it over; it begins anew"
                logger.info(text, self.writers.home)
                self.open()
            self.index.sweep()
            self.writers.look_when_due(now)
        except OSError as error:
            raise _translated(error) from error

    def gauges(self) -> Mapping[str, float]:
        index = self.index
        return {
            "bytes": float(index.held_bytes),
            "bytes_max": float(index.max_bytes),
            "objects": float(index.own_count),
            "objects_of_others": float(index.other_count),
            "index_bytes": float(index.memory_bytes),
            "files_failed": float(index.files_failed),
        }

    def close(self) -> None:
        """Let go of `alive`, by which others know that this daemon is gone."""
        self.writers.give_up_home()

    def _get(self, item: ReadRequest) -> TierError | None:
        index, key = self.index, item.key
        stamp = index.stamp_of(key)
        if stamp is None:
            return contract.MissingError("it is not there")
        path = stamp.path
        try:
            error = retry_stale(lambda: self._read(path, item.pieces))
        except FileNotFoundError:
            with index.lock:
                # Another thread may have put it again meanwhile.
                if index.stamp_of(key) == stamp:
                    index.drop_record(key)
            return contract.MissingError("it is not there any more")
        except OSError as error:
            if error.errno not in SYSTEM_ERRORS and self._failures.on_read_failed(path):
                return contract.DamagedError(f"{path} cannot be read: {error.strerror}")
            return _translated(error)
        if error is None:
            self._failures.on_read(path)
            index.touch(key)
        return error

    def _read_start(self, key: bytes) -> RecordStart | TierError:
        path = self.index.path_of(key)
        if path is None:
            return contract.MissingError("it is not there")
        try:
            start, status = retry_stale(lambda: _start_of(path))
        except FileNotFoundError:
            return contract.MissingError("it is not there any more")
        except OSError as error:
            return _translated(error)
        # A file is touched when its record is used.
        used_at = status.st_mtime - self.index.clock_ahead_seconds
        return RecordStart(start, taken_bytes(status), used_at=used_at)

    def _erase(self, key: bytes) -> TierError | None:
        """Remove a record's files, of this writer and of all others. Returns the error, or None."""
        index = self.index
        with index.lock:
            path = index.path_of(key)
            name = parse_name(os.path.basename(path)) if path is not None else None
            names = (
                [FileName(key, name.parent, interior) for interior in (False, True)] if name else []
            )
            try:
                for home in homes(self.writers.root) if names else ():
                    for file in names:
                        (home / file.path).unlink(missing_ok=True)
            except OSError as error:
                return _translated(error)
            index.drop_record(key)
        return None

    def _read(self, path: str, pieces: Sequence[memoryview]) -> contract.DamagedError | None:
        wanted = sum(map(len, pieces))
        fd = open_regular(path, self._direct)
        try:
            size, done = os.fstat(fd).st_size, 0
            if not contract.is_length(size, wanted):
                return contract.DamagedError(f"{path} has {size} bytes instead of {wanted}")
            zero_after(pieces, size)
            while done < size:
                got = os.preadv(fd, bytes_after(pieces, done), done)
                if not got:
                    return contract.DamagedError(f"{path} ends after {done} of {size} bytes")
                done += got
        finally:
            os.close(fd)
        return None

    def _put(self, item: WriteRequest) -> TierError | None:
        index, size = self.index, sum(map(len, item.pieces))
        reserved = size + _SLACK_BYTES
        name = FileName(item.key, item.parent, item.interior)
        number, home = next(self._numbers), self.writers.home
        temporary = str(home / TMP / str(number % TMP_DIRECTORIES) / str(number))
        path = str(home / name.path)
        leftovers = [temporary]
        with index.lock:
            if index.path_of(item.key) is not None:
                return None
            try:
                if not index.make_room(reserved):
                    most = format_size(index.max_bytes)
                    what = f"{format_size(size)} do not fit into {most}"
                    is_stuck = index.strays and reserved <= index.max_bytes
                    return contract.FullError(what, Refusal.STUCK if is_stuck else Refusal.BOUND)
            except OSError as error:
                return _translated(error)
            index.writing_bytes += reserved
        try:
            file_bytes = self.write_file(temporary, item.pieces, size)
            # A server may have renamed the file although it answered with an error, or not in time.
            leftovers.append(path)
            try:
                os.rename(temporary, path)
            except FileNotFoundError:
                os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
                os.rename(temporary, path)
        except OSError as error:
            with index.lock, contextlib.suppress(OSError):
                # The write's own error is returned; an error of the cleaning up must not replace
                # it.
                index.writing_bytes -= reserved
                # Only one of the names has the file, so its bytes count once.
                uncounted = reserved
                for leftover in leftovers:
                    if leftover == temporary or index.own_bytes(item.key) is None:
                        index.remove_file(leftover, uncounted)
                        uncounted = 0 if leftover in index.strays else uncounted
                if error.errno in FULL_ERRORS:
                    # The file system has less room than the bound, so some of it is given back.
                    index.evict_bytes(reserved)
            return _translated(error)
        with index.lock:
            known_path = index.path_of(item.key) if index.own_bytes(item.key) is not None else None
            if known_path is not None and known_path != path:
                index.remove_file(path, file_bytes)
            index.writing_bytes -= reserved
            if known_path is None:
                index.insert_file(name, file_bytes, index.files_time())
        return None

    def write_file(self, path: str, pieces: Sequence[memoryview], size: int) -> int:
        """Write a new file. Returns the bytes that it takes. Raises OSError."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | self._direct
        fd = os.open(path, flags, 0o600)
        try:
            done = 0
            while done < size:
                done += os.pwritev(fd, bytes_after(pieces, done), done)
            return max(size, os.fstat(fd).st_blocks * BLOCK_BYTES)
        finally:
            os.close(fd)

    def _settle(self) -> None:
        """Write the files of a start, `probe` and `alive`. Raises OSError."""
        self._probe()
        self.writers.write_token()

    def _probe(self) -> None:
        """Find out whether the file system takes direct I/O."""
        page = memoryview(mmap.mmap(-1, SLOT_ALIGN))
        path = self.writers.home / TMP / "probe"
        for self._direct in (os.O_DIRECT, 0):
            try:
                self.write_file(str(path), [page], len(page))
                return
            except OSError as error:
                if error.errno != errno.EINVAL or not self._direct:
                    raise
            finally:
                path.unlink(missing_ok=True)


def _start_of(path: str) -> tuple[bytes, os.stat_result]:
    """Returns the first bytes of a record's file, and its status. Raises OSError."""
    with open(open_regular(path), "rb", buffering=0) as file:
        return file.read(contract.START_BYTES), os.fstat(file.fileno())


def _translated(error: OSError) -> TierError:
    kind = contract.FullError if error.errno in FULL_ERRORS else TierError
    return kind(f"{error.strerror}: {error.filename or 'a record'}", refusal_of(error))
