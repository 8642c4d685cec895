"""The free space of the arena: best fit, neighbours joined.

Offsets and sizes are in bytes, multiples of SLOT_ALIGN.
"""

from bisect import bisect_left, insort
from typing import NamedTuple


class FreeRun(NamedTuple):
    """A free part of the arena: [offset, offset + size). Runs are ordered by size first."""

    size: int
    offset: int


class Extents:
    """Free runs of [0, limit). The limit grows as pages are reserved, and never shrinks."""

    def __init__(self) -> None:
        self.limit_bytes = 0
        self.free_bytes = 0
        self.by_size: list[FreeRun] = []
        """Every free run, ascending: the first that is long enough fits best."""
        self.size_at: dict[int, int] = {}  # The size of each free run, by its offset.
        self.start_of_end: dict[int, int] = {}  # The offset of each free run, by its end.

    def grow(self, limit_bytes: int) -> None:
        """Add [limit, limit_bytes) as free space."""
        if limit_bytes > self.limit_bytes:
            start, self.limit_bytes = self.limit_bytes, limit_bytes
            self.free(start, limit_bytes - start)

    def take_run(self, size: int) -> int | None:
        """Take `size` bytes. Returns their offset, or None where no run is long enough."""
        at = bisect_left(self.by_size, (size, 0))
        if at == len(self.by_size):
            return None
        run_size, offset = self.by_size[at]
        self._remove(offset, run_size)
        if run_size > size:
            self._add(offset + size, run_size - size)
        return offset

    def fits(self, size: int) -> bool:
        """Return True where a run is long enough for `size` bytes."""
        return bool(self.by_size) and self.by_size[-1].size >= size

    def free(self, offset: int, size: int) -> FreeRun:
        """Give [offset, offset + size) back. Returns the free run that contains it now."""
        after = self.size_at.get(offset + size)
        if after is not None:
            self._remove(offset + size, after)
            size += after
        before = self.start_of_end.get(offset)
        if before is not None:
            self._remove(before, offset - before)
            size += offset - before
            offset = before
        return self._add(offset, size)

    def _add(self, offset: int, size: int) -> FreeRun:
        run = FreeRun(size, offset)
        insort(self.by_size, run)
        self.size_at[offset] = size
        self.start_of_end[offset + size] = offset
        self.free_bytes += size
        return run

    def _remove(self, offset: int, size: int) -> None:
        del self.by_size[bisect_left(self.by_size, (size, offset))]
        del self.size_at[offset]
        del self.start_of_end[offset + size]
        self.free_bytes -= size
