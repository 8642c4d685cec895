"""The index of a directory tier: the file of each record, and the bytes of this daemon's files.

The byte bound is for the files that this daemon wrote. The index also has the files of other
writers, so that they can be read. They do not count.
"""

import contextlib
import errno
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from hybridkv.core.keys import HASH_BYTES
from hybridkv.core.policies import EvictionClass, EvictionPolicy
from hybridkv.shm.slots import SHORT_HASH_BYTES, SLOT_ALIGN
from hybridkv.store.eviction import EvictionQueue
from hybridkv.tiers.disk.files import FileErrors, FileName, FoundFile, found_file, records

logger = logging.getLogger("hybridkv.daemon")

TOUCH_SECONDS = 600.0
"""How late a file's time of change may be, which orders the files after a restart."""
STUCK_MAX = 3  # Victims in a row that could not be removed. After them no other is tried.
FULL_ERRORS = frozenset((errno.ENOSPC, errno.EDQUOT))


class OwnFile(NamedTuple):
    """A record that this daemon wrote."""

    path: str
    taken_bytes: int
    parent: bytes
    """The short key of the record that must not be evicted before this record. Empty = none."""
    touched_at: float  # Its time of change, seconds since the epoch.


class FileIndex:
    """The files of one directory by key.

    The caller holds `lock`, except for `path_of`, `touch`, `replace`, `take_shards_to_list`,
    `sweep`, `index_directory` and `count_failed`.
    """

    def __init__(self, max_bytes: int) -> None:
        """`max_bytes` bounds this daemon's files. 0 = half of the room that is free."""
        self.lock = threading.Lock()
        self.max_bytes = max_bytes
        self.ours: dict[bytes, OwnFile] = {}
        self.others: dict[bytes, str] = {}
        """Path by key, of all other writers. No key is in `ours` as well."""
        self.doubled: set[bytes] = set()
        """Keys of `ours` and `others` that one more writer has."""
        self._shards_to_list: set[str] = set()
        """Names of shards, two digits, that may hold another copy of a record that is gone."""
        self.order: EvictionQueue[bytes] = EvictionQueue(EvictionPolicy.TWO_QUEUES, 0)
        self.children: Counter[bytes] = Counter()
        """By short key, how many records must be evicted before that record."""
        self._keys: dict[bytes, bytes] = {}  # Key by short key.
        self.taken_bytes = 0  # Bytes of the files in `ours`, and of the strays.
        self.writing_bytes = 0  # The most bytes of the files that are being written.
        self.strays: dict[str, int] = {}
        """Bytes by path, of this daemon's files that could not be removed yet."""
        self._stuck = 0  # Victims in a row that could not be removed since the last `sweep`.
        self.files_failed = 0  # Files that `count_failed` has counted.

    @property
    def held_bytes(self) -> int:
        """Bytes that count against the bound."""
        return self.taken_bytes + self.writing_bytes

    def path_of(self, key: bytes) -> str | None:
        """Returns the path of a record's file. None = the record is not there."""
        file = self.ours.get(key)
        return file.path if file is not None else self.others.get(key)

    def insert_file(self, name: FileName, path: str, size_bytes: int, touched_at: float) -> None:
        """Add a file of this daemon that takes `size_bytes` and is not in `ours`."""
        key, parent, interior = name
        short = _short_key(key)
        before = _short_key(key, parent) if any(parent) else b""
        if before == short:
            before = b""
        self.ours[key] = OwnFile(path, size_bytes, before, touched_at)
        if self.others.pop(key, None) is not None:
            self.doubled.add(key)
        # The new file may have replaced one that could not be removed.
        self.taken_bytes += size_bytes - self.strays.pop(path, 0)
        self._keys[short] = key
        self.children[before] += 1
        eviction_class = EvictionClass.INTERIOR if interior else EvictionClass.PROMPT
        self.order.add_item(key, size_bytes, eviction_class, key)

    def drop_record(self, key: bytes) -> None:
        """Drop a record whose file is gone."""
        self.others.pop(key, None)
        self._list_shard_again(key)
        file = self.ours.pop(key, None)
        if file is None:
            return
        self.taken_bytes -= file.taken_bytes
        self.order.remove(key)
        short = _short_key(key)
        if self._keys.get(short) == key:
            del self._keys[short]
        self.children[file.parent] -= 1
        if not self.children[file.parent]:
            del self.children[file.parent]
            parent = self._keys.get(file.parent)
            if parent is not None:
                self.order.offer(parent)

    def touch(self, key: bytes) -> None:
        """Count a record as used, because it was read."""
        now = time.time()
        with self.lock:
            file = self.ours.get(key)
            if file is None:
                return
            self.order.mark_used((key,))
            if self.may_go(key):
                self.order.offer(key)
            if now - file.touched_at <= TOUCH_SECONDS:
                return
            self.ours[key] = file._replace(touched_at=now)
        with contextlib.suppress(OSError):
            os.utime(file.path)

    def make_room(self, size: int) -> bool:
        """Evict until `size` more bytes fit. Returns False where they never do. Raises OSError."""
        while self.held_bytes + size > self.max_bytes:
            if not self.ours or size > self.max_bytes:
                return False
            self._evict()
        return True

    def evict_bytes(self, size: int) -> None:
        """Evict `size` bytes, or all records. Raises OSError."""
        goal = self.taken_bytes - size
        while self.ours and self.taken_bytes > goal:
            self._evict()

    def remove_file(self, path: str, size_bytes: int) -> None:
        """Remove a file of this daemon that is not in the index, now or with a later `sweep`."""
        try:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
        except OSError:
            self.add_stray(path, size_bytes)
        else:
            self.taken_bytes -= self.strays.pop(path, 0)

    def add_stray(self, path: str, size_bytes: int) -> None:
        """Count a file that could not be removed, until `sweep` removes it."""
        self.taken_bytes += size_bytes - self.strays.pop(path, 0)
        self.strays[path] = size_bytes

    def sweep(self) -> None:
        """Try again to remove the strays."""
        self._stuck = 0
        for path in list(self.strays):
            with self.lock:
                if path in self.strays:
                    self.remove_file(path, self.strays[path])

    def may_go(self, key: bytes) -> bool:
        return _short_key(key) not in self.children

    def _evict(self) -> None:
        """Remove the next victim's file. Raises OSError where no file seems to be removable."""
        victim = self.order.victim(self.may_go)
        # Two records may name each other as parents, and then neither may go first.
        key = victim if victim is not None else next(iter(self.ours))
        file = self.ours[key]
        try:
            os.unlink(file.path)
            self._stuck = 0
        except FileNotFoundError:
            pass
        except OSError as error:
            # Where all files fail like this, no record is evicted in vain.
            is_all = error.errno == errno.EROFS or error.errno in FULL_ERRORS
            if is_all or self._stuck >= STUCK_MAX:
                raise
            self._stuck += 1
            self.add_stray(file.path, file.taken_bytes)
        self.order.remember(key, key)
        self.drop_record(key)

    def index_directory(self, home: Path) -> None:
        """Index the records in this daemon's directory, the oldest first, and keep the bound."""
        found: list[FoundFile] = []
        errors = FileErrors()
        with self.lock:
            # The lock is held while listing: a record that is put meanwhile is entered afterwards.
            for path, name in records(home):
                with contextlib.suppress(FileNotFoundError), errors:
                    found.append(found_file(path, name))
            self.ours, self.others, self._keys = {}, {}, {}
            self.doubled, self._shards_to_list, self.children = set(), set(), Counter()
            self.strays = {path: n for path, n in self.strays.items() if os.path.lexists(path)}
            self._stuck, self.taken_bytes = 0, sum(self.strays.values())
            if not self.max_bytes:
                system = os.statvfs(home)
                free = system.f_bavail * system.f_frsize + sum(file.taken_bytes for file in found)
                self.max_bytes = free // 2 // SLOT_ALIGN * SLOT_ALIGN
            self.order = EvictionQueue(EvictionPolicy.TWO_QUEUES, self.max_bytes)
            for file in sorted(found):
                if file.name.key not in self.ours:
                    self.insert_file(file.name, file.path, file.taken_bytes, file.changed)
                else:
                    self.remove_file(file.path, file.taken_bytes)
            self.make_room(0)
        self.count_failed(errors)

    def count_failed(self, errors: FileErrors) -> None:
        """Count and log the files that failed in a loop over many."""
        self.files_failed += errors.count
        if errors.count:
            text = "disk: files that failed and are left as they are: %d (%s)"
            logger.warning(text, errors.count, errors.first)

    def replace(self, shard: str, found: Mapping[bytes, str]) -> None:
        """Index another writer's directory `shard`, which has the paths `found` by key."""
        here = shard + os.sep
        with self.lock:
            known = [key for key, path in self.others.items() if path.startswith(here)]
            for key in known:
                if key not in found:
                    del self.others[key]
                    self._list_shard_again(key)
            for key, path in found.items():
                if key in self.ours or not self.others.get(key, here).startswith(here):
                    self.doubled.add(key)
                if key not in self.ours:
                    self.others[key] = path

    def take_shards_to_list(self) -> set[str]:
        """Returns the names of the shards that are to be listed again, and forgets them."""
        with self.lock:
            shards, self._shards_to_list = self._shards_to_list, set()
        return shards

    def _list_shard_again(self, key: bytes) -> None:
        if key in self.doubled:
            self.doubled.remove(key)
            self._shards_to_list.add(os.path.dirname(FileName(key).path))


def _short_key(key: bytes, of_hash: bytes = b"") -> bytes:
    """Returns namespace, short hash and gid of a key. `of_hash` replaces the short hash."""
    short_hash = of_hash or key[HASH_BYTES : HASH_BYTES + SHORT_HASH_BYTES]
    return key[:HASH_BYTES] + short_hash + key[-2:]
