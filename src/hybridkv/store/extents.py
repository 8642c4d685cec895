"""The free space of the arena: best fit, neighbours joined.

Offsets and sizes are in bytes, multiples of SLOT_ALIGN.
"""

from bisect import bisect_left, insort


class Extents:
    """Free runs of [0, limit). The limit grows as pages are reserved; it never shrinks."""

    def __init__(self) -> None:
        self.limit_bytes = 0
        self.free_bytes = 0
        self._by_size: list[tuple[int, int]] = []
        """(size, offset) of every free run, ascending: the first that is long enough fits best."""
        self._size_at: dict[int, int] = {}
        self._start_of_end: dict[int, int] = {}

    def grow(self, limit_bytes: int) -> None:
        """Add [limit, limit_bytes) as free space."""
        if limit_bytes > self.limit_bytes:
            start, self.limit_bytes = self.limit_bytes, limit_bytes
            self.free(start, limit_bytes - start)

    def allocate(self, size: int) -> int | None:
        """The offset of `size` bytes, or None where no run is long enough."""
        at = bisect_left(self._by_size, (size, 0))
        if at == len(self._by_size):
            return None
        run, offset = self._by_size[at]
        self._remove(offset, run)
        if run > size:
            self._add(offset + size, run - size)
        return offset

    def fits(self, size: int) -> bool:
        """Whether a run is long enough for `size` bytes."""
        return bool(self._by_size) and self._by_size[-1][0] >= size

    def free(self, offset: int, size: int) -> tuple[int, int]:
        """Give [offset, offset + size) back; the (offset, size) of the free run around it now."""
        after = self._size_at.get(offset + size)
        if after is not None:
            self._remove(offset + size, after)
            size += after
        before = self._start_of_end.get(offset)
        if before is not None:
            self._remove(before, offset - before)
            size += offset - before
            offset = before
        self._add(offset, size)
        return offset, size

    def _add(self, offset: int, size: int) -> None:
        insort(self._by_size, (size, offset))
        self._size_at[offset] = size
        self._start_of_end[offset + size] = offset
        self.free_bytes += size

    def _remove(self, offset: int, size: int) -> None:
        del self._by_size[bisect_left(self._by_size, (size, offset))]
        del self._size_at[offset]
        del self._start_of_end[offset + size]
        self.free_bytes -= size
