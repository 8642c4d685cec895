"""Arrays of unsigned 64-bit integers as bytes, so that a slot costs no Python object of its own.

Runs of consecutive integers are ranges.
"""

import sys
from array import array
from collections.abc import Iterable, Iterator

U64 = 8  # Bytes of one integer.


def pack_u64(values: "list[int] | array[int]") -> bytes:
    """Returns the integers as little-endian bytes, U64 each."""
    packed = array("Q", values)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def batches(items: int, *columns: tuple[bytes, int]) -> list[tuple[bytes, ...]]:
    """Returns columns, each (packed, bytes of an item), cut into pieces of up to `items` items."""
    cut = [
        [packed[at : at + items * size] for at in range(0, len(packed), items * size)]
        for packed, size in columns
    ]
    return list(zip(*cut, strict=True))


def unpack_u64(raw: bytes) -> "array[int]":
    """Returns the integers that `pack_u64` packed. Raises ValueError where bytes are missing."""
    values = array("Q")
    values.frombytes(raw)
    if sys.byteorder == "big":
        values.byteswap()
    return values


def consecutive(numbers: Iterable[int]) -> Iterator[range]:
    """Yields the runs of consecutive numbers: 3, 4, 7 -> range(3, 5), range(7, 8)."""
    start = stop = 0
    for number in numbers:
        if number != stop:
            if start < stop:
                yield range(start, stop)
            start = number
        stop = number + 1
    if start < stop:
        yield range(start, stop)
