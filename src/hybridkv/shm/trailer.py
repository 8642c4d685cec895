"""The trailer behind the slots of an arena, by which the next daemon takes the arena over.

::

    0            slots_bytes
    |slots ...   |page table: u32 per SLOT_ALIGN bytes |worker processes |superblock (last page)|

The page table has an entry for each page: the number of pages of the slot that starts there, or 0.
An entry is one aligned store; it is set after the slot's header is whole and cleared before the
slot is free. Only the daemon writes, and may be killed at any time.
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
    """A process that may write into slots of an engine, which HASH_BYTES name."""

    engine: bytes
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
        """`memory` is the `trailer_bytes(slots_bytes)` bytes behind `slots_bytes` of slots."""
        self.slots_bytes = slots_bytes
        table_end = _table_bytes(slots_bytes)
        self._table = memory[:table_end]
        self._entries = self._table.cast("I")
        self._processes = memory[table_end : table_end + PROCESSES_MAX * _PROCESS.size]
        self._super = memory[len(memory) - SLOT_ALIGN :]
        self._numbers = self._super[_NUMBERS_OFFSET:_NUMBERS_END].cast("Q")
        """The limit below which pages of slots exist, the latest generation, and `kept_until`."""

    def format(self) -> None:
        """Write the superblock of a fresh (zeroed) arena, so that it can be taken over."""
        head = _SUPER.pack(_MAGIC, ARENA_VERSION, SLOT_ALIGN, self.slots_bytes)
        self._super[: len(head) + _CRC.size] = head + _CRC.pack(zlib.crc32(head))

    @property
    def reserved_bytes(self) -> int:
        """The limit below which the pages of slots exist."""
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
        """When the arena may be removed unless a daemon has it, in monotonic seconds; 0 = never."""
        return self._numbers[2] / 1e3

    @kept_until.setter
    def kept_until(self, value: float) -> None:
        self._numbers[2] = round(value * 1e3)

    def put(self, offset: int, size: int) -> None:
        """Enter a slot of `size` bytes at `offset`, whose header is written, or remove it (0)."""
        self._entries[offset // SLOT_ALIGN] = size // SLOT_ALIGN

    def slots(self) -> Iterator[tuple[int, int]]:
        """The (offset, size) of every slot, by offset."""
        at = 0
        while found := _USED.search(self._table, at):
            page = found.start() // _PAGES
            yield page * SLOT_ALIGN, self._entries[page] * SLOT_ALIGN
            at = (page + 1) * _PAGES

    def remember(self, process: WorkerProcess) -> bool:
        """Keep a process for the next daemon; False where there is no room."""
        rows = list(_PROCESS.iter_unpack(self._processes))
        if process in rows:
            return True
        at = next((number for number, (_, _, started) in enumerate(rows) if not started), None)
        if at is None:
            return False
        # An entry counts once its last field is set, which is written last.
        _PROCESS.pack_into(self._processes, at * _PROCESS.size, *process[:2], 0)
        _PROCESS.pack_into(self._processes, at * _PROCESS.size, *process)
        return True

    def forget(self, process: WorkerProcess) -> None:
        """End a `remember`."""
        rows = list(_PROCESS.iter_unpack(self._processes))
        if process in rows:
            at = rows.index(process) * _PROCESS.size
            _PROCESS.pack_into(self._processes, at, bytes(HASH_BYTES), 0, 0)

    def processes(self) -> list[WorkerProcess]:
        """Every remembered process."""
        return [WorkerProcess(*row) for row in _PROCESS.iter_unpack(self._processes) if row[2]]

    def release(self) -> None:
        """Release the views of the arena's memory."""
        for view in (self._entries, self._table, self._processes, self._numbers, self._super):
            view.release()


def read_superblock(path: Path) -> Superblock | None:
    """What the arena at `path` says of itself; None where that is not sound."""
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
    known = (magic, align) == (_MAGIC, SLOT_ALIGN)
    return Superblock(version, slots_bytes, kept_ms / 1e3) if known else None


def trailer_bytes(slots_bytes: int) -> int:
    """The bytes of the trailer behind `slots_bytes` of slots, a multiple of SLOT_ALIGN."""
    processes = -(-PROCESSES_MAX * _PROCESS.size // SLOT_ALIGN) * SLOT_ALIGN
    return _table_bytes(slots_bytes) + processes + SLOT_ALIGN


def _table_bytes(slots_bytes: int) -> int:
    return -(-slots_bytes // SLOT_ALIGN * _PAGES // SLOT_ALIGN) * SLOT_ALIGN
