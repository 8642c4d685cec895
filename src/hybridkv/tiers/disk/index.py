"""The index of a directory tier: the file of each record, and the bytes of this daemon's files.

The byte bound is for the files that this daemon wrote. The index also has the files of other
writers, so that they can be read. They do not count.

A directory may have millions of files, so a file is a row of packed columns, and has no objects of
its own but its two numbers in a dictionary: some 230 bytes together.
"""

import contextlib
import errno
import logging
import os
import threading
import time
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from hybridkv.core.keys import HASH_BYTES, KEY_BYTES
from hybridkv.shm.slots import SHORT_HASH_BYTES, SLOT_ALIGN
from hybridkv.tiers.disk.files import FileErrors, FileName, file_status, records, silly_renamed
from hybridkv.tiers.disk.order import FIRST_ROW, FileOrder

logger = logging.getLogger("hybridkv.daemon")

TOUCH_SECONDS = 600.0
"""How late a file's time of change may be, which orders the files after a restart."""
STUCK_MAX = 3  # Victims in a row that could not be removed. After them no other is tried.
FULL_ERRORS = frozenset((errno.ENOSPC, errno.EDQUOT))
_SHARDS = {f"{number:02x}": number for number in range(256)}
_OURS = 0  # The number of this daemon's directory.
_NOBODY = 0xFFFF_FFFF  # In place of a number: the row is free.
_INTERIOR, _DOUBLED = 1, 2
"""Bits of a row: the record is interior; one more writer has the record."""
_NONE = -1  # In place of a tag.
_TAG_MASK = (1 << 60) - 1  # Larger numbers take more memory.
_HEAD_BYTES = HASH_BYTES + SHORT_HASH_BYTES  # Namespace and short hash, the start of a key.
_NO_PARENT = bytes(SHORT_HASH_BYTES)
_ROW_BYTES, _NUMBER_BYTES = KEY_BYTES + SHORT_HASH_BYTES + 25, 32
"""Memory of a row in the columns, and of a number that is an object."""


class Stamp(NamedTuple):
    """What an index says of a record at a moment. It differs after the record was put again."""

    path: str
    touched_at: float


class FileIndex:
    """The files of one directory by key.

    The caller holds `lock`, except for `files_time`, `row_of`, `path_of`, `stamp_of`, `touch`,
    `replace`, `add_other`, `take_shards_to_list`, `sweep`, `index_directory`, `known_keys` and
    `count_failed`.

    A row is found by its *tag*, a hash of its namespace, short hash and gid, which a record's
    parent has as well. Of two records with one tag the index has the later one.
    """

    def __init__(self, max_bytes: int, home: Path) -> None:
        """`max_bytes` bounds this daemon's files, which are below `home`. 0 = half of the room."""
        self.lock = threading.Lock()
        self.max_bytes = max_bytes
        self.own_count, self.other_count = 0, 0  # Records of this daemon, and of all others.
        self._homes = [str(home)]  # Paths of the writers' directories, by number.
        self._rows: list[dict[int, int]] = [{} for _ in range(256)]
        """By shard, the row by tag."""
        self._absent_parents: dict[int, int] = {}
        """By the tag of a record that is not there, how many of ours have it as their parent."""
        self._free = array("I")  # Rows that have no record.
        # The columns.
        self._keys, self._parents = bytearray(), bytearray()
        self._bits = bytearray()
        self._home_numbers = array("I")
        self._sizes = array("Q")  # Bytes that a file of ours takes.
        self._touched = array("d")  # Its time of change, seconds since the epoch.
        self._children = array("I")  # How many of ours must be evicted before this record.
        self.order = FileOrder(self._sizes)
        for _ in range(FIRST_ROW):
            self._add_columns()
        self._shards_to_list: set[str] = set()
        """Names of shards, two digits, that may hold another copy of a record that is gone."""
        self.taken_bytes = 0  # Bytes of the files of ours, and of the strays.
        self.writing_bytes = 0  # The most bytes of the files that are being written.
        self.strays: dict[str, int] = {}
        """Bytes by path, of this daemon's files that could not be removed yet."""
        self._stuck = 0  # Victims in a row that could not be removed since the last `sweep`.
        self.clock_ahead_seconds = 0.0
        """How far the files' clock, as of an NFS server, is ahead of this node's."""
        self.files_failed = 0  # Files that `count_failed` has counted.

    @property
    def held_bytes(self) -> int:
        """Bytes that count against the bound."""
        return self.taken_bytes + self.writing_bytes

    @property
    def memory_bytes(self) -> int:
        """The bytes of memory that the index takes, about."""
        dicts = sum(map(dict.__sizeof__, self._rows)) + self._absent_parents.__sizeof__()
        numbers = 2 * (self.own_count + self.other_count) + len(self._absent_parents)
        columns = len(self._bits) * _ROW_BYTES + self.order.column_bytes
        return dicts + numbers * _NUMBER_BYTES + columns

    def files_time(self) -> float:
        """Returns the time by the files' clock, seconds since the epoch."""
        return time.time() + self.clock_ahead_seconds

    def row_of(self, key: bytes) -> int | None:
        """Returns the row of a record, or None where it is not there."""
        # This is `_tag`, for speed.
        row = self._rows[key[HASH_BYTES]].get(hash(key[:_HEAD_BYTES] + key[-2:]) & _TAG_MASK)
        if row is None or not self._keys.startswith(key, row * KEY_BYTES):
            return None
        return row

    def may_have(self, keys: Sequence[bytes]) -> list[bool]:
        """Returns for each key whether a record of its tag is there, which is nearly always it."""
        # This is `_tag`, for speed.
        rows, mask, end = self._rows, _TAG_MASK, _HEAD_BYTES
        return [hash(key[:end] + key[-2:]) & mask in rows[key[HASH_BYTES]] for key in keys]

    def own_row_of(self, key: bytes) -> int | None:
        """Returns the row of a record that this daemon wrote, or None."""
        row = self.row_of(key)
        return row if row is not None and self._home_numbers[row] == _OURS else None

    def path_of(self, key: bytes) -> str | None:
        """Returns the path of a record's file. None = the record is not there."""
        row = self.row_of(key)
        return None if row is None else self._path(row, key)

    def stamp_of(self, key: bytes) -> Stamp | None:
        """Returns path and time of a record. None = the record is not there."""
        row = self.row_of(key)
        return None if row is None else Stamp(self._path(row, key), self._touched[row])

    def own_bytes(self, key: bytes) -> int | None:
        """Returns the bytes that a file of ours takes. None = we do not have the record."""
        row = self.own_row_of(key)
        return None if row is None else self._sizes[row]

    def known_keys(self) -> Iterator[bytes]:
        """Yields the key of every record."""
        for shard in self._rows:
            with self.lock:
                keys = [self._key(row) for row in shard.values()]
            yield from keys

    def paths_of(self, home: Path) -> Iterator[str]:
        """Yields the paths of a writer's records."""
        number = self._home_number(str(home))
        for row in chain.from_iterable(shard.values() for shard in self._rows):
            if self._home_numbers[row] == number:
                yield self._path(row)

    def insert_file(self, name: FileName, size_bytes: int, touched_at: float) -> None:
        """Add a file of this daemon that takes `size_bytes` and is not yet one of ours."""
        self.enqueue(self.enter_file(name, size_bytes, touched_at))

    def enter_file(self, name: FileName, size_bytes: int, touched_at: float) -> int:
        """Add a file of this daemon, which is evicted after `enqueue` only. Returns its row."""
        row = self._enter(name, _OURS)
        self._sizes[row], self._touched[row] = size_bytes, touched_at
        self.own_count += 1
        # The new file may have replaced one that could not be removed.
        self.taken_bytes += size_bytes - self.strays.pop(self._path(row), 0)
        return row

    def enqueue(self, row: int) -> None:
        """Let a file of ours be evicted from now on, unless it is gone or was enqueued before."""
        if self._home_numbers[row] == _OURS and not self.order.is_listed(row):
            self.order.add_item(row, bool(self._bits[row] & _INTERIOR), _tag(self._key(row)))
            self._count_child(row, 1)

    def enqueue_all(self, rows: Iterable[int]) -> None:
        """Enqueue files of ours, of which the oldest is evicted first."""
        for row in sorted(rows, key=self._touched.__getitem__):
            self.enqueue(row)

    def drop_record(self, key: bytes) -> None:
        """Drop a record whose file is gone."""
        row = self.row_of(key)
        if row is not None:
            self._drop(row)

    def touch(self, key: bytes) -> None:
        """Count a record as used, because it was read."""
        now = self.files_time()
        with self.lock:
            row = self.own_row_of(key)
            if row is None or not self.order.is_listed(row):
                return
            self.order.mark_used(row)
            if now - self._touched[row] <= TOUCH_SECONDS:
                return
            self._touched[row] = now
            path = self._path(row)
        with contextlib.suppress(OSError):
            # The file's time of last use cannot be written; memory still has it.
            os.utime(path)

    def make_room(self, size: int) -> bool:
        """Evict until `size` more bytes fit. Returns False where they never do. Raises OSError."""
        while self.held_bytes + size > self.max_bytes:
            if size > self.max_bytes or not self._evict():
                return False
        return True

    def evict_bytes(self, size: int) -> None:
        """Evict `size` bytes, or all records. Raises OSError."""
        goal = self.taken_bytes - size
        while self.taken_bytes > goal and self._evict():
            pass

    def remove_file(self, path: str, size_bytes: int) -> None:
        """Remove a file of this daemon that is not in the index, now or with a later `sweep`."""
        try:
            with contextlib.suppress(FileNotFoundError):
                # The file that is to be removed is gone already, and is counted no longer.
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

    def is_evictable(self, row: int) -> bool:
        return not self._children[row]

    def _evict(self) -> bool:
        """Remove the next victim's file. Returns False where none is left.

        Raises OSError where no file seems to be removable.
        """
        row = self.order.victim(self.is_evictable)
        if row is None:
            return False
        path = self._path(row)
        try:
            os.unlink(path)
            self._stuck = 0
        except FileNotFoundError:
            pass
        except OSError as error:
            # Where all files fail like this, no record is evicted in vain.
            is_all = error.errno == errno.EROFS or error.errno in FULL_ERRORS
            if is_all or self._stuck >= STUCK_MAX:
                raise
            self._stuck += 1
            self.add_stray(path, self._sizes[row])
        self.order.remember(row, _tag(self._key(row)))
        self._drop(row)
        return True

    def index_directory(self, home: Path) -> None:
        """Index the records in this daemon's directory, the oldest first, and keep the bound."""
        found, found_bytes = array("I"), 0
        errors = FileErrors()
        with self.lock:
            # The lock is held while listing: a record that is put meanwhile is entered afterwards.
            for shard in self._rows:
                for row in list(shard.values()):
                    self._drop(row)
            self._shards_to_list = set()
            self.strays = {path: n for path, n in self.strays.items() if os.path.lexists(path)}
            self._stuck, self.taken_bytes = 0, sum(self.strays.values())
            for path, name in records(home):
                with contextlib.suppress(FileNotFoundError), errors:
                    # Another process removed the file between the listing and the look at it.
                    status = file_status(path)
                    found_bytes += status.taken_bytes
                    if self.row_of(name.key) is None:
                        row = self.enter_file(name, status.taken_bytes, status.changed)
                        found.append(row)
                    else:
                        self.remove_file(path, status.taken_bytes)
            for path in silly_renamed(home):
                with contextlib.suppress(FileNotFoundError), errors:
                    # Its process closed it meanwhile. One that is still open counts as a stray.
                    self.remove_file(path, file_status(path).taken_bytes)
            if not self.max_bytes:
                system = os.statvfs(home)
                free = system.f_bavail * system.f_frsize + found_bytes
                self.max_bytes = free // 2 // SLOT_ALIGN * SLOT_ALIGN
            self.order.bound_bytes = self.max_bytes
            self.enqueue_all(found)
            self.make_room(0)
        self.count_failed(errors)

    def count_failed(self, errors: FileErrors) -> None:
        """Count and log the files that failed in a loop over many."""
        self.files_failed += errors.count
        if errors.count:
            text = "disk: files that failed and are left as they are: %d (%s)"
            logger.warning(text, errors.count, errors.first)

    def check_index(self) -> None:
        """Derive every count and list again. Raises AssertionError where one is not right."""
        ours, children = set(), Counter[int]()
        rows = [*chain.from_iterable(shard.values() for shard in self._rows)]
        assert len(rows) + len(self._free) + FIRST_ROW == len(self._bits), "no row is lost"
        for row in rows:
            key = self._key(row)
            assert self.row_of(key) == row
            if self._home_numbers[row] == _OURS:
                ours.add(row)
                children[self._parent_tag(row)] += 1
        assert (len(ours), len(rows) - len(ours)) == (self.own_count, self.other_count)
        assert self.taken_bytes == sum(self._sizes[row] for row in ours) + sum(self.strays.values())
        assert not self.strays.keys() & {self._path(row) for row in ours}
        counts = Counter({_tag(self._key(row)): self._children[row] for row in rows})
        del children[_NONE]
        assert +(counts + Counter(self._absent_parents)) == children
        self.order.check_lists(ours, self.is_evictable)

    def replace(self, shard: str, names: Iterable[FileName]) -> None:
        """Index another writer's directory `shard`, which has the records `names`."""
        home, digits = os.path.split(shard)
        found = {name.key: name for name in names}
        shard_number = _SHARDS.get(digits)
        if shard_number is None:
            return
        with self.lock:
            number, rows = self._home_number(home), self._rows[shard_number]
            for row in [row for row in rows.values() if self._home_numbers[row] == number]:
                if self._key(row) not in found:
                    self._drop(row)
            for key, name in found.items():
                known = rows.get(_tag(key))
                if known is None and key[HASH_BYTES] == shard_number:
                    self._enter(name, number)
                    self.other_count += 1
                # Of two records with one tag the first of another writer stays.
                elif known is not None and self._key(known) == key:
                    if self._home_numbers[known] != number:
                        self._bits[known] |= _DOUBLED
                    if self._home_numbers[known] != _OURS:
                        self._set_name(known, name, number)

    def add_other(self, home: str, name: FileName) -> None:
        """Index a record of another writer, unless one of its tag is there."""
        with self.lock:
            if _tag(name.key) not in self._rows[name.key[HASH_BYTES]]:
                self._enter(name, self._home_number(home))
                self.other_count += 1

    def take_shards_to_list(self) -> set[str]:
        """Returns the names of the shards that are to be listed again, and forgets them."""
        with self.lock:
            shards, self._shards_to_list = self._shards_to_list, set()
        return shards

    def _enter(self, name: FileName, number: int) -> int:
        """Give a record a row, or the row that it has of another writer. Returns the row."""
        tag, rows = _tag(name.key), self._rows[name.key[HASH_BYTES]]
        row = rows.get(tag)
        if row is not None and self._key(row) != name.key:
            if self._home_numbers[row] == _OURS:
                self.remove_file(self._path(row), self._sizes[row])
            self._drop(row)
            row = None
        if row is not None:
            self._bits[row] |= _DOUBLED
            self.other_count -= 1
        else:
            row = self._free.pop() if self._free else self._add_columns()
            rows[tag] = row
            self._bits[row] = 0
            self._children[row] = self._absent_parents.pop(tag, 0)
            self._keys[row * KEY_BYTES : (row + 1) * KEY_BYTES] = name.key
        self._set_name(row, name, number)
        return row

    def _set_name(self, row: int, name: FileName, number: int) -> None:
        start = row * SHORT_HASH_BYTES
        self._parents[start : start + SHORT_HASH_BYTES] = name.parent
        self._bits[row] = self._bits[row] & _DOUBLED | (_INTERIOR if name.interior else 0)
        self._home_numbers[row] = number

    def _drop(self, row: int) -> None:
        key = self._key(row)
        tag, shard = _tag(key), key[HASH_BYTES]
        del self._rows[shard][tag]
        if self._home_numbers[row] == _OURS:
            self.own_count -= 1
            self.taken_bytes -= self._sizes[row]
            if self.order.is_listed(row):
                self.order.remove(row)
                self._count_child(row, -1)
        else:
            self.other_count -= 1
        if self._children[row]:
            self._absent_parents[tag] = self._children[row]
        if self._bits[row] & _DOUBLED:
            self._shards_to_list.add(f"{shard:02x}")
        self._home_numbers[row], self._touched[row] = _NOBODY, 0
        self._free.append(row)

    def _count_child(self, row: int, change: int) -> None:
        """A record of ours came (1) or goes (-1), which must be evicted before its parent."""
        tag = self._parent_tag(row)
        if tag == _NONE:
            return
        parent_row = self._rows[self._parents[row * SHORT_HASH_BYTES]].get(tag)
        if parent_row is None:
            count = self._absent_parents.get(tag, 0) + change
            self._absent_parents[tag] = count
            if not count:
                del self._absent_parents[tag]
            return
        self._children[parent_row] += change
        if not self._children[parent_row] and self._home_numbers[parent_row] == _OURS:
            self.order.offer(parent_row)

    def _parent_tag(self, row: int) -> int:
        """Returns the tag of the record that is evicted after this one. _NONE = there is none."""
        start = row * SHORT_HASH_BYTES
        parent, key = bytes(self._parents[start : start + SHORT_HASH_BYTES]), self._key(row)
        tag = _tag(key, parent)
        return _NONE if parent == _NO_PARENT or tag == _tag(key) else tag

    def _add_columns(self) -> int:
        """Returns a new row, which every column has."""
        row = len(self._bits)
        self._keys += bytes(KEY_BYTES)
        self._parents += _NO_PARENT
        self._bits.append(0)
        self._home_numbers.append(_NOBODY)
        self._sizes.append(0)
        self._touched.append(0)
        self._children.append(0)
        if row >= FIRST_ROW:
            self.order.add_row()
        return row

    def _home_number(self, home: str) -> int:
        if home not in self._homes:
            self._homes.append(home)
        return self._homes.index(home)

    def _key(self, row: int) -> bytes:
        return bytes(self._keys[row * KEY_BYTES : (row + 1) * KEY_BYTES])

    def _path(self, row: int, key: bytes = b"") -> str:
        """Returns the path of a row's file. A reader without the lock says whose the row was."""
        start = row * SHORT_HASH_BYTES
        parent = bytes(self._parents[start : start + SHORT_HASH_BYTES])
        name = FileName(key or self._key(row), parent, bool(self._bits[row] & _INTERIOR))
        number = self._home_numbers[row]
        return os.path.join(self._homes[number if number != _NOBODY else _OURS], name.path)


def _tag(key: bytes, short_hash: bytes = b"") -> int:
    """Returns a hash of namespace, short hash and gid. `short_hash` replaces that of the key."""
    head = key[:HASH_BYTES] + short_hash if short_hash else key[:_HEAD_BYTES]
    return hash(head + key[-2:]) & _TAG_MASK
