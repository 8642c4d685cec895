"""Records as files of a directory, on a local disk or one that several nodes share (NFS and the like).

::

    hybridkv-tier                                  the version of this layout
    objects/WRITER/alive                           touched by that writer while it lives
    objects/WRITER/KK/KEY.PARENT[i]                a record; names are in hexadecimal digits, i = interior
    objects/WRITER/tmp/D/N                         a record that is being written
    quarantine/...                                 damaged records, the last few

Every daemon writes below its own directory and reads everybody's, so nobody waits for a lock: its byte bound is for
what it wrote itself.  A file appears by a rename, whole.  What a writer that is gone left behind is taken over by
renames too, as far as the bound allows.  Names tell all that the order of eviction needs, so a restart lists
directories and reads nothing.
"""

import contextlib
import errno
import logging
import mmap
import os
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import NamedTuple

from hybridkv.core.errors import ConfigError
from hybridkv.core.eviction import Order, Policy
from hybridkv.core.keys import HASH_BYTES
from hybridkv.core.sizes import format_size
from hybridkv.core.tiers import TierSpec
from hybridkv.shm.slots import SLOT_ALIGN
from hybridkv.storage.record import TAG_BYTES
from hybridkv.storage.tiers.base import DamagedError, FullError, Getting, MissingError, Putting, Tier, TierError
from hybridkv.storage.tiers.files import (
    ALIVE_SECONDS,
    BLOCK_BYTES,
    LAYOUT,
    LAYOUT_FILE,
    FileName,
    homes,
    records,
    set_aside,
    shard_records,
    silent_seconds,
    taken_bytes,
)

logger = logging.getLogger("hybridkv.daemon")

LOST_SECONDS = 3600.0
"""A writer that has not touched its `alive` for so long is gone for good."""
TOUCH_SECONDS = 600.0
"""A file's time of change, by which it is ordered after a restart, is at most so late."""
LOOK_SHARE = 50
"""At most 1/50 of the time goes into looking for what others wrote."""
TMP_DIRECTORIES = 8
"""Files are begun in turns in so many: threads that make files in one directory wait for each other."""
STUCK_MAX = 3
"""Files that cannot be removed are passed over, so many in a row; then it is more than those files."""
_SLACK_BYTES = SLOT_ALIGN
"""What a file may take beside its bytes."""
_NO_PARENT = bytes(TAG_BYTES)
_LOST = ".lost-"
"""In the name of a writer's directory that somebody is taking over."""
_ROOM_BYTES = 64 << 10
"""Evicted where a full file system has no room for the little that a start writes."""
_FULL = frozenset((errno.ENOSPC, errno.EDQUOT))
_SETTINGS = frozenset((errno.ENOENT, errno.ENOTDIR, errno.EEXIST, errno.EACCES, errno.EPERM, errno.ELOOP))
"""What says that another directory is needed; anything else may pass."""


class _File(NamedTuple):
    """A record of ours."""

    path: str
    taken_bytes: int
    parent: bytes
    """What must not go before it, by `_tag`; empty = nothing."""
    touched: float
    """Its time of change, seconds since the epoch."""


class DiskTier(Tier):
    """A directory of records."""

    name = "disk"

    def __init__(self, spec: TierSpec, writer: str, adopts: bool = True) -> None:
        """`writer` names this daemon among all that use the directory, the same one in all its lives.

        `adopts`: whether it takes over what writers left that are gone.
        """
        spec.known_options()
        self.root = Path(spec.location.removeprefix("disk://"))
        self.max_bytes = spec.max_bytes or 0
        """Of what this daemon wrote; 0 = half of what is free, decided by `open`."""
        self._home = self.root / "objects" / writer
        self._direct = os.O_DIRECT
        self._lock = threading.Lock()
        self._mine: dict[bytes, _File] = {}
        self._theirs: dict[bytes, str] = {}
        """Path by key, of all other writers."""
        self._doubled: set[bytes] = set()
        """Of those and of ours: what was seen in another place as well."""
        self._again: set[str] = set()
        """Directories' names, two digits: another place of what is gone here is found by listing them again."""
        self._order: Order[bytes] = Order(Policy.TWO_QUEUES, 0)
        self._kids: Counter[bytes] = Counter()
        """By `_tag`: how many records need it to stay."""
        self._tags: dict[bytes, bytes] = {}
        """Key by `_tag`."""
        self._adopts = adopts
        self._taken_bytes = 0
        """Of our files."""
        self._writing_bytes = 0
        """Of those that are being written, at most."""
        self._strays: dict[str, int] = {}
        """Files of ours that could not be removed yet, and the bytes that they take."""
        self._stray_bytes = 0
        self._stuck = 0
        """Victims in a row, since `tend` came by, that could not be removed."""
        self._numbers = count(1)
        self._token = uuid.uuid4().hex
        self._alive_at = 0.0
        self._look_at = 0.0
        self._seen: dict[str, tuple[int, int]] = {}
        """Other writers' directories: the time of change when they were listed, how often since without a change."""

    # The contract

    def open(self) -> None:
        """Scan the directory; raises ConfigError where it cannot be used."""
        try:
            try:
                self._enter_directory()
            except FileNotFoundError:
                # Another daemon was taking it over, after a long time in which nobody was here.
                self._enter_directory()
            self._scan()
            try:
                self._settle()
            except OSError as error:
                if error.errno not in _FULL:
                    raise
                with self._lock:
                    self._evict_bytes(_ROOM_BYTES)
                self._settle()
        except OSError as error:
            if error.errno not in _SETTINGS:
                raise _translated(error) from error
            raise ConfigError(
                f"disk: {self.root} cannot be used ({error.strerror}); a directory that you may write to works"
            ) from error
        self._look()

    def peek(self, key: bytes) -> bool | None:
        return key in self._mine or key in self._theirs

    def find(self, keys: Sequence[bytes]) -> list[bool]:
        return [key in self._mine or key in self._theirs for key in keys]

    def get(self, items: Sequence[Getting]) -> list[TierError | None]:
        return [self._get(item) for item in items]

    def put(self, items: Sequence[Putting]) -> list[TierError | None]:
        return [self._put(item) for item in items]

    def discard(self, keys: Sequence[bytes], damaged: bool = False) -> None:
        for key in keys:
            with self._lock:
                path = self._path(key)
                if path is None:
                    continue
                try:
                    if damaged:
                        set_aside(self.root, path)
                    else:
                        os.unlink(path)
                except OSError as error:
                    if key in self._mine and (not isinstance(error, FileNotFoundError) or os.path.lexists(path)):
                        self._stray(path, self._mine[key].taken_bytes)
                # Not before: nobody may be given its room while it is there.
                self._forget(key)

    def keys(self) -> Iterator[bytes]:
        with self._lock:
            known = [*self._mine, *(key for key in self._theirs if key not in self._mine)]
        yield from known

    def tend(self) -> None:
        now = time.monotonic()
        try:
            if now >= self._alive_at:
                self._show_alive()
                self._alive_at = now + ALIVE_SECONDS
            self._sweep()
            if now >= self._look_at:
                self._look()
                if self._adopts:
                    self._adopt()
                self._look_at = time.monotonic() + LOOK_SHARE * (time.monotonic() - now)
        except OSError as error:
            raise _translated(error) from error

    def gauges(self) -> Mapping[str, float]:
        return {
            "bytes": float(self._held_bytes),
            "bytes_max": float(self.max_bytes),
            "objects": float(len(self._mine)),
            "objects_of_others": float(len(self._theirs)),
        }

    def close(self) -> None:
        """Nothing is held open."""

    def leave(self) -> None:
        """There will be no next life of this writer: others may take over what it wrote, now."""
        os.utime(self._home / "alive", (0, 0))

    def check(self) -> None:
        """Re-derive what can be derived, of a tier that nobody uses at the moment; raises AssertionError."""
        with self._lock:
            self._order.check(self._may_go)
            assert len(self._order) == len(self._mine)
            assert sum(file.taken_bytes for file in self._mine.values()) == self._taken_bytes
            assert not self._writing_bytes
            assert self._stray_bytes == sum(self._strays.values())
            assert not self._mine.keys() & self._theirs.keys()
            assert self._doubled <= self._mine.keys() | self._theirs.keys()
            assert not self._strays.keys() & {file.path for file in self._mine.values()}
            assert self._held_bytes <= self.max_bytes
            real = [
                path.stat().st_blocks * BLOCK_BYTES for kind in ("??/*", "tmp/*/*") for path in self._home.glob(kind)
            ]
            assert sum(real) <= self._held_bytes
            assert +self._kids == Counter(file.parent for file in self._mine.values() if file.parent)

    # Files

    def _get(self, item: Getting) -> TierError | None:
        file = self._mine.get(item.key)
        path = file.path if file is not None else self._theirs.get(item.key)
        if path is None:
            return MissingError("it is not there")
        size = sum(len(piece) for piece in item.pieces)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | self._direct)
            try:
                if os.fstat(fd).st_size != size:
                    return DamagedError(f"{path} has {os.fstat(fd).st_size} bytes instead of {size}")
                done = 0
                while done < size:
                    got = os.preadv(fd, _after(item.pieces, done), done)
                    if not got:
                        return DamagedError(f"{path} ends after {done} of {size} bytes")
                    done += got
            finally:
                os.close(fd)
        except FileNotFoundError:
            with self._lock:
                # It may have been put again meanwhile.
                if self._mine.get(item.key) is file and (file is not None or self._theirs.get(item.key) == path):
                    self._forget(item.key)
            return MissingError("it is not there any more")
        except OSError as error:
            return _translated(error)
        self._used(item.key)
        return None

    def _put(self, item: Putting) -> TierError | None:
        size = sum(len(piece) for piece in item.pieces)
        reserved = size + _SLACK_BYTES
        name = FileName(item.key, item.parent, item.interior)
        number = next(self._numbers)
        temporary, path = (
            str(self._home / "tmp" / str(number % TMP_DIRECTORIES) / str(number)),
            str(self._home / name.path),
        )
        with self._lock:
            if item.key in self._mine or item.key in self._theirs:
                return None
            try:
                if not self._make_room(reserved):
                    return FullError(f"{format_size(size)} do not fit into {format_size(self.max_bytes)}")
            except OSError as error:
                return _translated(error)
            self._writing_bytes += reserved
        try:
            taken = self._write(temporary, item.pieces, size)
            try:
                os.rename(temporary, path)
            except FileNotFoundError:
                os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
                os.rename(temporary, path)
        except OSError as error:
            with self._lock, contextlib.suppress(OSError):
                self._remove(temporary, reserved)
                self._writing_bytes -= reserved
                if error.errno in _FULL:
                    # The file system has less room than we may use: others need it more than the oldest of ours.
                    self._evict_bytes(reserved)
            return _translated(error)
        with self._lock:
            known = self._mine.get(item.key)
            if known is not None and known.path != path:
                self._remove(path, taken)
            self._writing_bytes -= reserved
            if known is None:
                self._enter(name, path, taken, time.time())
        return None

    def _write(self, path: str, pieces: Sequence[memoryview], size: int) -> int:
        """Write a new file; the bytes that it takes."""
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | self._direct, 0o600)
        try:
            done = 0
            while done < size:
                done += os.pwritev(fd, _after(pieces, done), done)
            return max(size, os.fstat(fd).st_blocks * BLOCK_BYTES)
        finally:
            os.close(fd)

    def _enter_directory(self) -> None:
        """Make what is missing, show that we live, so that nobody takes it over, and remove what nobody will finish."""
        self._home.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            os.utime(self._home / "alive")
        for number in range(TMP_DIRECTORIES):
            (self._home / "tmp" / str(number)).mkdir(mode=0o700, parents=True, exist_ok=True)
        (self.root / "quarantine").mkdir(mode=0o700, exist_ok=True)
        layout = self.root / LAYOUT_FILE
        with contextlib.suppress(FileExistsError), layout.open("x") as file:
            file.write(LAYOUT)
        if layout.read_text() not in (LAYOUT, ""):
            raise ConfigError(f"disk: {self.root} has another version's layout; a new directory works")
        for directory, _, files in os.walk(self._home / "tmp"):
            for name in files:
                os.unlink(os.path.join(directory, name))

    def _settle(self) -> None:
        """What needs a little room: say who we are."""
        self._probe()
        (self._home / "alive").write_text(self._token)

    def _probe(self) -> None:
        """Find out whether the file system takes direct I/O."""
        page = memoryview(mmap.mmap(-1, SLOT_ALIGN))
        path = str(self._home / "tmp" / "probe")
        self._direct = os.O_DIRECT
        while True:
            try:
                self._write(path, [page], len(page))
                return
            except OSError as error:
                if error.errno != errno.EINVAL or not self._direct:
                    raise
                self._direct = 0
            finally:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)

    # The index

    def _path(self, key: bytes) -> str | None:
        file = self._mine.get(key)
        return file.path if file is not None else self._theirs.get(key)

    def _enter(self, name: FileName, path: str, taken: int, touched: float) -> None:
        key, parent, interior = name
        own = _tag(key)
        before = b"" if parent == _NO_PARENT else _tag(key, parent)
        if before == own:
            before = b""
        self._mine[key] = _File(path, taken, before, touched)
        if self._theirs.pop(key, None) is not None:
            self._doubled.add(key)
        # It is in the place of what could not be removed.
        self._stray_bytes -= self._strays.pop(path, 0)
        self._tags[own] = key
        self._taken_bytes += taken
        if before:
            self._kids[before] += 1
        self._order.add(key, taken, interior, key)

    def _forget(self, key: bytes) -> None:
        self._theirs.pop(key, None)
        self._look_again(key)
        file = self._mine.pop(key, None)
        if file is None:
            return
        self._taken_bytes -= file.taken_bytes
        self._order.remove(key)
        own = _tag(key)
        if self._tags.get(own) == key:
            del self._tags[own]
        if file.parent:
            self._kids[file.parent] -= 1
            if not self._kids[file.parent]:
                del self._kids[file.parent]
                parent = self._tags.get(file.parent)
                if parent is not None:
                    self._order.offer(parent)

    def _look_again(self, key: bytes) -> None:
        """One place of the key is gone: see whether it is in another one."""
        if key in self._doubled:
            self._doubled.remove(key)
            self._again.add(os.path.dirname(FileName(key).path))

    def _may_go(self, key: bytes) -> bool:
        return _tag(key) not in self._kids

    @property
    def _held_bytes(self) -> int:
        """All that counts against the bound."""
        return self._taken_bytes + self._writing_bytes + self._stray_bytes

    def _make_room(self, size: int) -> bool:
        """Evict until `size` bytes more may be taken; False where that is impossible. Raises OSError."""
        while self._held_bytes + size > self.max_bytes:
            if not self._mine or size > self.max_bytes:
                return False
            self._evict()
        return True

    def _evict_bytes(self, size: int) -> None:
        goal = self._taken_bytes + self._stray_bytes - size
        while self._mine and self._taken_bytes + self._stray_bytes > goal:
            self._evict()

    def _evict(self) -> None:
        """Remove the next victim; one that cannot be removed goes on counting. Raises OSError where nothing can be."""
        victim = self._order.victim(self._may_go)
        # Names may come from anywhere; that each waits for the other to go must not keep both for ever.
        key = victim if victim is not None else next(iter(self._mine))
        file = self._mine[key]
        try:
            os.unlink(file.path)
            self._stuck = 0
        except FileNotFoundError:
            pass
        except OSError as error:
            # Where it is more than this file, nothing is to be evicted in vain.
            if error.errno == errno.EROFS or error.errno in _FULL or self._stuck >= STUCK_MAX:
                raise
            self._stuck += 1
            self._stray(file.path, file.taken_bytes)
        self._order.remember(key, key)
        self._forget(key)

    def _remove(self, path: str, taken: int) -> None:
        """Remove a file of ours that is not in the index; the caller has the lock."""
        try:
            os.unlink(path)
        except FileNotFoundError:
            return
        except OSError:
            self._stray(path, taken)

    def _stray(self, path: str, taken: int) -> None:
        """A file that could not be removed: it counts until it can. The caller has the lock."""
        self._stray_bytes += taken - self._strays.pop(path, 0)
        self._strays[path] = taken

    def _sweep(self) -> None:
        """Try again to remove what could not be removed."""
        self._stuck = 0
        for path in list(self._strays):
            with self._lock:
                if path not in self._strays:
                    continue
                try:
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(path)
                except OSError:
                    continue
                self._stray_bytes -= self._strays.pop(path)

    def _used(self, key: bytes) -> None:
        now = time.time()
        with self._lock:
            file = self._mine.get(key)
            if file is None:
                return
            self._order.use((key,))
            if self._may_go(key):
                self._order.offer(key)
            late = now - file.touched > TOUCH_SECONDS
            if late:
                self._mine[key] = file._replace(touched=now)
        if late:
            with contextlib.suppress(OSError):
                os.utime(file.path)

    # What is there

    def _scan(self) -> None:
        """Index our files, the oldest first, and evict what is too much."""
        found = []
        with self._lock:
            # Under the lock: what is put meanwhile is entered when this has ended.
            for path, name in records(self._home):
                with contextlib.suppress(FileNotFoundError):
                    status = os.stat(path, follow_symlinks=False)
                    found.append((status.st_mtime, name, path, taken_bytes(status)))
            self._mine.clear()
            self._theirs.clear()
            self._doubled.clear()
            self._again.clear()
            self._kids.clear()
            self._tags.clear()
            self._seen.clear()
            self._stuck = 0
            self._taken_bytes = 0
            if not self.max_bytes:
                system = os.statvfs(self.root)
                free = system.f_bavail * system.f_frsize + sum(one[-1] for one in found)
                self.max_bytes = free // 2 // SLOT_ALIGN * SLOT_ALIGN
            self._order = Order(Policy.TWO_QUEUES, self.max_bytes)
            for touched, name, path, taken in sorted(found):
                if name.key not in self._mine:
                    self._enter(name, path, taken, touched)
                else:
                    self._remove(path, taken)
            for path in [path for path in self._strays if not os.path.lexists(path)]:
                self._stray_bytes -= self._strays.pop(path)
            self._make_room(0)
        logger.info(
            "disk: %s has %d objects of ours, %s of at most %s%s",
            self.root,
            len(self._mine),
            format_size(self._taken_bytes),
            format_size(self.max_bytes),
            "" if self._direct else "; no direct I/O there",
        )

    def _others(self) -> list[Path]:
        return [home for home in homes(self.root) if home != self._home]

    def _look(self) -> None:
        """See what other writers have put and removed since."""
        with self._lock:
            again, self._again = self._again, set()
        for path in self._seen:
            if os.path.basename(path) in again:
                self._seen[path] = 0, 0
        gone = dict.fromkeys(self._seen)
        for home in self._others():
            try:
                shards = [entry for entry in os.scandir(home) if len(entry.name) == 2]
            except FileNotFoundError:
                continue
            for shard in shards:
                gone.pop(shard.path, None)
                with contextlib.suppress(FileNotFoundError):
                    changed = os.stat(shard.path).st_mtime_ns
                    known, quiet = self._seen.get(shard.path, (0, 0))
                    # The clock of a directory may be coarse: what came within one tick is seen by listing again.
                    if known == changed and quiet > 1:
                        continue
                    self._seen[shard.path] = changed, quiet + 1 if known == changed else 0
                    self._list(shard.path)
        for path in gone:
            del self._seen[path]
            self._replace(path, {})

    def _list(self, shard: str) -> None:
        self._replace(shard, {name.key: path for path, name in shard_records(shard)})

    def _replace(self, shard: str, found: dict[bytes, str]) -> None:
        with self._lock:
            here = shard + os.sep
            for key in [key for key, path in self._theirs.items() if path.startswith(here) and key not in found]:
                del self._theirs[key]
                self._look_again(key)
            self._doubled.update(
                key for key in found if key in self._mine or not self._theirs.get(key, here).startswith(here)
            )
            self._theirs.update((key, path) for key, path in found.items() if key not in self._mine)

    def _show_alive(self) -> None:
        alive = self._home / "alive"
        try:
            if alive.read_text() != self._token:
                raise TierError(
                    f"another daemon writes to {self._home}; give each node its own name (--node), or directory"
                )
            # Not written anew: on a full file system nothing would be left of it.
            os.utime(alive)
        except FileNotFoundError:
            logger.info("disk: others took over what was in %s, for it was silent for too long", self._home)
            self.open()

    def _adopt(self) -> None:
        """Take over what writers left that are gone for good."""
        now = (self._home / "alive").stat().st_mtime
        for home in self._others():
            silent = silent_seconds(home, now)
            if silent is None or silent < LOST_SECONDS:
                continue
            # By a rename: only one of us has it, and whoever comes back under that name finds nothing half gone.
            lost = home.with_name(f"{home.name.partition(_LOST)[0]}{_LOST}{uuid.uuid4().hex[:8]}")
            with contextlib.suppress(FileNotFoundError):
                os.rename(home, lost)
                for shard in [shard for shard in self._seen if os.path.dirname(shard) == str(home)]:
                    del self._seen[shard]
                    self._replace(shard, {})
                logger.info("disk: taking over what %s left", home.name)
                self._adopt_all(lost)

    def _adopt_all(self, home: Path) -> None:
        for path, name in list(records(home)):
            self._adopt_one(path, name)
        for directory, _, files in os.walk(home, topdown=False):
            for file in files:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(os.path.join(directory, file))
            with contextlib.suppress(OSError):
                os.rmdir(directory)

    def _adopt_one(self, path: str, name: FileName) -> None:
        to = str(self._home / name.path)
        with contextlib.suppress(FileNotFoundError):
            status = os.stat(path, follow_symlinks=False)
            taken = taken_bytes(status)
            try:
                os.makedirs(os.path.dirname(to), mode=0o700, exist_ok=True)
                with self._lock:
                    fits = name.key not in self._mine and self._held_bytes + taken <= self.max_bytes
                    if fits:
                        os.rename(path, to)
                        self._enter(name, to, taken, status.st_mtime)
            except OSError as error:
                if error.errno not in _FULL:
                    raise
                fits = False
            if not fits:
                os.unlink(path)


def _tag(key: bytes, of_hash: bytes = b"") -> bytes:
    """A record by its namespace, the first TAG_BYTES of its chunk hash, or of another one, and its gid."""
    return key[:HASH_BYTES] + (of_hash or key[HASH_BYTES : HASH_BYTES + TAG_BYTES]) + key[-2:]


def _after(pieces: Sequence[memoryview], done: int) -> list[memoryview]:
    """What is left of the pieces after `done` bytes."""
    left = []
    for piece in pieces:
        if done < len(piece):
            left.append(piece[done:] if done else piece)
        done = max(0, done - len(piece))
    return left


def _translated(error: OSError) -> TierError:
    kind = FullError if error.errno in _FULL else TierError
    return kind(f"{error.strerror}: {error.filename or 'a record'}")
