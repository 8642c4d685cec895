"""Staging memory that is allocated once and given out in the order in which it comes back."""

from threading import Lock


class Ring:
    """Offsets of a buffer of `size + largest` bytes. Pieces are released in their order.

    A piece starts below `size`, wherever the one before it ends, and may end after `size`. The
    next one then starts at 0. So a piece of at most `largest` bytes fits whenever at most `size`
    bytes are reserved with it, and nothing is lost between pieces::

        0                    size        size + largest
        |C C C C .......|A A A A B B B B B|.......|
                         oldest           the next one starts at 0
    """

    def __init__(self, size: int, largest: int) -> None:
        assert 0 < largest <= size
        self.size = size
        self.largest = largest
        self._next = 0  # Where the next piece starts, unless that is at `size` or after it.
        self._used_bytes = 0
        self._lock = Lock()

    @property
    def used_bytes(self) -> int:
        """Bytes that are reserved and not released."""
        return self._used_bytes

    def reserve(self, size: int) -> int | None:
        """Return the offset of `size` bytes that are the caller's. None if there is no room now."""
        with self._lock:
            if size > self.largest or self._used_bytes + size > self.size:
                return None
            start = 0 if self._next >= self.size else self._next
            self._next = start + size
            self._used_bytes += size
            return start

    def free_oldest(self, size: int) -> None:
        """Free the oldest piece, which has `size` bytes."""
        with self._lock:
            self._used_bytes -= size
            assert self._used_bytes >= 0

    def undo_reserve(self, start: int, size: int) -> None:
        """Undo the last `reserve`, which returned `start` for `size` bytes that nobody used."""
        with self._lock:
            self._next = start
            self._used_bytes -= size
