"""The order in which files are evicted: that of store.eviction, in a few bytes a file.

A file is a row, a small number. Rows are in lists, the least recently used first::

    interior    interior records that nobody read
    cold        read, and not for so long that others needed the place among the protected ones
    probation   never read
    protected   read, or stored again soon after the eviction; at most half of the bytes
    blocked     their suffixes must go first; each was the oldest of its list when that was found

Interior ones go first, then the older one of the first cold and the first of probation, then
protected ones.
"""

from array import array
from collections.abc import Callable, Set

PROTECTED_SHARE = 2  # At most 1/2 of the bytes are protected.
_INTERIOR, _COLD, _PROBATION, _PROTECTED, _BLOCKED = range(5)
FIRST_ROW = 5
"""The rows before it are the heads of the lists."""


class FileOrder:
    """The order of eviction of rows. The caller has a lock."""

    def __init__(self, sizes: "array[int]") -> None:
        """`sizes` has the bytes of each row."""
        self.bound_bytes = 0  # The bytes of all rows together, at most.
        self.protected_bytes = 0
        self._sizes = sizes
        self._next, self._before = array("I"), array("I")  # Neighbours; itself, if in no list.
        self._ticks = array("Q")  # When the row was used last.
        self._stages = bytearray()  # The list to which the row belongs, also while it is blocked.
        self._blocked = bytearray()
        self._tick = 0
        self._evicted: set[int] = set()
        """Tags of the rows that were evicted unread last, of up to half of the bound."""
        self._evicted_before: set[int] = set()  # Those of the half before.
        self._evicted_bytes = 0  # Bytes of the rows in `_evicted`.
        for _ in range(FIRST_ROW):
            self.add_row()

    @property
    def column_bytes(self) -> int:
        """The bytes of memory that the order takes, about."""
        columns = self._next, self._before, self._ticks, self._stages, self._blocked
        tags = len(self._evicted) + len(self._evicted_before)
        return sum(map(len, columns)) * 18 // len(columns) + tags * 68

    def add_row(self) -> None:
        """Make room for one more row, which is in no list."""
        row = len(self._next)
        self._next.append(row)
        self._before.append(row)
        self._ticks.append(0)
        self._stages.append(0)
        self._blocked.append(0)

    def add_item(self, row: int, interior: bool, tag: int) -> None:
        """Add a row that is in no list. By `tag` it is recognized after its eviction."""
        stage = _INTERIOR if interior else _PROBATION
        if tag in self._evicted or tag in self._evicted_before:
            self._evicted.discard(tag)
            self._evicted_before.discard(tag)
            stage = _PROTECTED
            self.protected_bytes += self._sizes[row]
        self._stages[row] = stage
        self._tick += 1
        self._ticks[row] = self._tick
        self._link(row, stage)

    def is_listed(self, row: int) -> bool:
        """Returns whether the row was added, and not removed since."""
        return self._next[row] != row

    def mark_used(self, row: int) -> None:
        """Note that the row is read."""
        if self._stages[row] != _PROTECTED:
            self._stages[row] = _PROTECTED
            self.protected_bytes += self._sizes[row]
        self._tick += 1
        self._ticks[row] = self._tick
        self._unlink(row)
        self._link(row, _PROTECTED)

    def offer(self, row: int) -> None:
        """Consider a row again whose suffixes have gone."""
        if self._blocked[row]:
            self._unlink(row)
            # It was the oldest of its list when it was found to be blocked.
            self._link(row, self._next[self._stages[row]])

    def remove(self, row: int) -> None:
        """Forget a listed row, which was evicted or dropped."""
        if self._stages[row] == _PROTECTED:
            self.protected_bytes -= self._sizes[row]
        self._unlink(row)

    def remember(self, row: int, tag: int) -> None:
        """Keep the tag of a row that is about to be evicted. Stored again soon, it is protected."""
        if self._stages[row] == _PROTECTED:
            return
        self._evicted.add(tag)
        self._evicted_bytes += self._sizes[row]
        if self._evicted_bytes > self.bound_bytes // 2:
            self._evicted, self._evicted_before, self._evicted_bytes = set(), self._evicted, 0

    def victim(self, is_evictable: Callable[[int], bool]) -> int | None:
        """Returns the row to evict next. None where there is no row.

        Where every row waits for another one, any of them goes.
        """
        found = self._oldest(_INTERIOR, is_evictable)
        if found is not None:
            return found
        if self.protected_bytes > self.bound_bytes // PROTECTED_SHARE:
            # One at a time: after its eviction the prefix before it may go, and is the next.
            cold = self._oldest(_PROTECTED, is_evictable)
            if cold is not None:
                self.protected_bytes -= self._sizes[cold]
                self._stages[cold] = _COLD
                self._unlink(cold)
                self._link(cold, _COLD)
        unread = [self._oldest(stage, is_evictable) for stage in (_COLD, _PROBATION)]
        rows = [row for row in unread if row is not None]
        if rows:
            return min(rows, key=self._ticks.__getitem__)
        found = self._oldest(_PROTECTED, is_evictable)
        if found is None and self.is_listed(_BLOCKED):
            found = self._next[_BLOCKED]
        return found

    def check_lists(self, rows: Set[int], is_evictable: Callable[[int], bool]) -> None:
        """Check the lists against the rows that they should have. Raises AssertionError."""
        listed: list[int] = []
        for head in range(FIRST_ROW):
            before, row = head, self._next[head]
            while row != head:
                assert self._before[row] == before
                assert self._blocked[row] == (head == _BLOCKED)
                assert self._stages[row] == head or (head == _BLOCKED and not is_evictable(row))
                listed.append(row)
                before, row = row, self._next[row]
        assert sorted(listed) == sorted(rows)
        protected = [self._sizes[row] for row in rows if self._stages[row] == _PROTECTED]
        assert sum(protected) == self.protected_bytes

    def _oldest(self, stage: int, is_evictable: Callable[[int], bool]) -> int | None:
        """Returns the least recently used row of a list that may go, and blocks those before."""
        while (row := self._next[stage]) != stage:
            if is_evictable(row):
                return row
            self._unlink(row)
            self._link(row, _BLOCKED)
            self._blocked[row] = 1
        return None

    def _link(self, row: int, after: int) -> None:
        """Put a row before the row or head `after`: before a head is the end of its list."""
        before = self._before[after]
        self._next[before] = self._before[after] = row
        self._before[row], self._next[row] = before, after

    def _unlink(self, row: int) -> None:
        before, after = self._before[row], self._next[row]
        self._next[before], self._before[after] = after, before
        self._next[row] = self._before[row] = row
        self._blocked[row] = 0
