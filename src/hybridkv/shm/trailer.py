"""The trailer after the slots of an arena, by which the next daemon takes the arena over.

::

    0            slots_bytes
    |slots ...   |page table: u32 per SLOT_ALIGN bytes |worker processes |superblock (last page)|

The page table has an entry for each page: the number of pages of the slot that starts there, or 0.
An entry is one aligned store. It is set after the slot's header is whole and cleared before the
slot is free. Only the daemon writes the trailer, and it may be killed at any time.
"""

import os
import re
import struct
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from hybridkv.core.keys import HASH_BYTES
from hybridkv.shm.slots import SLOT_ALIGN

PROCESSES_MAX = 4096
ARENA_VERSION = 3
_MAGIC = 0x656C62617453796B
_PAGES = 4
_SUPER = struct.Struct("<QIIQ")
_CRC = struct.Struct("<I")
_NUMBERS_OFFSET, _NUMBERS_END = 64, 88
_PROCESS = struct.Struct(f"<{HASH_BYTES}sQQ")
_USED = re.compile(rb"[^\0]")


class WorkerProcess(NamedTuple):
    """A worker's process, which may write into slots of its engine."""

    engine: bytes  # HASH_BYTES that name the engine.
    pid: int
    started: int  # When it started, which tells it from a later process with the same id.


class Superblock(NamedTuple):
    """The last page of an arena, by which another daemon knows whether it fits."""

    version: int
    slots_bytes: int
    kept_until: float  # As Trailer.kept_until.


class Trailer:
    """Reads and writes the trailer of one arena."""

    def __init__(self, memory: memoryview, slots_bytes: int) -> None:
        """`memory` is the `trailer_bytes(slots_bytes)` bytes after `slots_bytes` of slots."""
        self.slots_bytes = slots_bytes
        table_end = _table_bytes(slots_bytes)
        self._table = memory[:table_end]
        self._entries = self._table.cast("I")
        self._processes = memory[table_end : table_end + PROCESSES_MAX * _PROCESS.size]
        self._super = memory[len(memory) - SLOT_ALIGN :]
        self._numbers = self._super[_NUMBERS_OFFSET:_NUMBERS_END].cast("Q")
        """The limit below which pages of slots exist, the latest generation, and `kept_until`."""

    def write_fresh(self) -> None:
        """Write the superblock of a fresh (zeroed) arena, so that it can be taken over."""
        head = _SUPER.pack(_MAGIC, ARENA_VERSION, SLOT_ALIGN, self.slots_bytes)
        self._super[: len(head) + _CRC.size] = head + _CRC.pack(zlib.crc32(head))

    @property
    def reserved_bytes(self) -> int:
        """The limit in bytes below which the pages of slots exist."""
        return min(self._numbers[0], self.slots_bytes) // SLOT_ALIGN * SLOT_ALIGN

    @reserved_bytes.setter
    def reserved_bytes(self, value: int) -> None:
        self._numbers[0] = value

    @property
    def generation(self) -> int:
        """The latest generation that any slot was given."""
        return self._numbers[1]

    @generation.setter
    def generation(self, value: int) -> None:
        self._numbers[1] = value

    @property
    def kept_until(self) -> float:
        """The monotonic time from which the arena may be removed if no daemon has it, 0 = never."""
        return self._numbers[2] / 1e3

    @kept_until.setter
    def kept_until(self, value: float) -> None:
        self._numbers[2] = round(value * 1e3)

    def add_slot(self, offset: int, size_bytes: int) -> None:
        """Enter a slot at `offset`, whose header is written, into the page table."""
        self._entries[offset // SLOT_ALIGN] = size_bytes // SLOT_ALIGN

    def remove_slot(self, offset: int) -> None:
        """Remove the slot at `offset`, if there is one, from the page table."""
        self._entries[offset // SLOT_ALIGN] = 0

    def slots(self, start: int = 0, end: int | None = None) -> Iterator[tuple[int, int]]:
        """Yield (offset, size in bytes) of every slot that starts in [start, end), by offset.

        Without `end` these are all slots from `start` on. Both are multiples of SLOT_ALIGN.
        """
        at = start // SLOT_ALIGN * _PAGES
        stop = len(self._table) if end is None else end // SLOT_ALIGN * _PAGES
        while found := _USED.search(self._table, at, stop):
            page = found.start() // _PAGES
            yield page * SLOT_ALIGN, self._entries[page] * SLOT_ALIGN
            at = (page + 1) * _PAGES

    def end_before(self, offset: int, slot_bytes_max: int) -> int:
        """Return the end of the last slot that starts before `offset`, or 0.

        It may be 0 too where that slot ends before `offset`. No slot has more than
        `slot_bytes_max`.
        """
        last = offset // SLOT_ALIGN
        first = max(0, last - slot_bytes_max // SLOT_ALIGN)
        used = bytes(self._table[first * _PAGES : last * _PAGES]).rstrip(b"\0")
        if not used:
            return 0
        page = first + (len(used) - 1) // _PAGES
        return (page + self._entries[page]) * SLOT_ALIGN

    def add_process(self, process: WorkerProcess) -> bool:
        """Note a process for the next daemon. Returns False where there is no room."""
        rows = self._process_rows()
        if process in rows:
            return True
        at = next((number for number, row in enumerate(rows) if not row.started), None)
        if at is None:
            return False
        # An entry counts once its last field is set, which is written last.
        self._write_process(at, process._replace(started=0))
        self._write_process(at, process)
        return True

    def remove_process(self, process: WorkerProcess) -> None:
        """Remove a process that `add_process` noted. Nothing is done where it is not there."""
        rows = self._process_rows()
        if process in rows:
            self._write_process(rows.index(process), WorkerProcess(bytes(HASH_BYTES), 0, 0))

    def processes(self) -> list[WorkerProcess]:
        """Return every process that was added and not removed, by this daemon or an earlier one."""
        return [process for process in self._process_rows() if process.started]

    def _process_rows(self) -> list[WorkerProcess]:
        """Return all PROCESSES_MAX entries. An empty one has `started` 0."""
        return [WorkerProcess._make(row) for row in _PROCESS.iter_unpack(self._processes)]

    def _write_process(self, row: int, process: WorkerProcess) -> None:
        offset = row * _PROCESS.size
        _PROCESS.pack_into(self._processes, offset, process.engine, process.pid, process.started)

    def release_views(self) -> None:
        """Release the views of the arena's memory."""
        for view in (self._entries, self._table, self._processes, self._numbers, self._super):
            view.release()


def read_superblock(path: Path) -> Superblock | None:
    """Return the superblock of the arena at `path`, or None where it has no sound one."""
    try:
        with path.open("rb") as file:
            file.seek(-SLOT_ALIGN, os.SEEK_END)
            page = file.read(_NUMBERS_END)
    except OSError:
        return None
    head = page[: _SUPER.size]
    if page[_SUPER.size : _SUPER.size + _CRC.size] != _CRC.pack(zlib.crc32(head)):
        return None
    magic, version, align, slots_bytes = _SUPER.unpack(head)
    kept_ms = int.from_bytes(page[_NUMBERS_END - 8 :], sys.byteorder)
    is_known = (magic, align) == (_MAGIC, SLOT_ALIGN)
    return Superblock(version, slots_bytes, kept_ms / 1e3) if is_known else None


def trailer_bytes(slots_bytes: int) -> int:
    """Return the size of the trailer for `slots_bytes` of slots, a multiple of SLOT_ALIGN."""
    processes = -(-PROCESSES_MAX * _PROCESS.size // SLOT_ALIGN) * SLOT_ALIGN
    return _table_bytes(slots_bytes) + processes + SLOT_ALIGN


def _table_bytes(slots_bytes: int) -> int:
    return -(-slots_bytes // SLOT_ALIGN * _PAGES // SLOT_ALIGN) * SLOT_ALIGN
