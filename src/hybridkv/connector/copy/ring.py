"""Staging memory that is allocated once and given out in the order in which it comes back."""

from threading import Lock


class Ring:
    """Offsets of a buffer of `size + largest` bytes. Pieces are given back in their order.

    A piece starts below `size`, wherever the one before it ends, and may end behind `size`; the
    next one then starts at 0. So a piece of at most `largest` bytes fits whenever at most `size`
    bytes are out with it, and nothing is lost between pieces::

        0                    size        size + largest
        |C C C C .......|A A A A B B B B B|.......|
                         oldest           the next one starts at 0
    """

    def __init__(self, size: int, largest: int) -> None:
        assert 0 < largest <= size
        self.size = size
        self.largest = largest
        self._next = 0
        self._out = 0
        self._lock = Lock()

    @property
    def out(self) -> int:
        """Bytes that are given out."""
        return self._out

    def take(self, size: int) -> int | None:
        """The offset of `size` bytes; None if there is no room now."""
        with self._lock:
            if size > self.largest or self._out + size > self.size:
                return None
            start = 0 if self._next >= self.size else self._next
            self._next = start + size
            self._out += size
            return start

    def give_back(self, size: int) -> None:
        """The oldest piece, which has `size` bytes, is free again."""
        with self._lock:
            self._out -= size
            assert self._out >= 0

    def cancel(self, start: int, size: int) -> None:
        """Undo the last `take`, of which nothing was used."""
        with self._lock:
            self._next = start
            self._out -= size
