"""Arrays of unsigned 64-bit integers as bytes: thousands of slots travel and are cut without a Python object each."""

import sys
from array import array

U64 = 8
"""Bytes of one integer."""


def pack_u64(values: "list[int] | array[int]") -> bytes:
    """Little-endian unsigned 64-bit integers."""
    packed = array("Q", values)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def batches(items: int, *columns: tuple[bytes, int]) -> list[tuple[bytes, ...]]:
    """Columns, each (packed, bytes of one item), cut together into pieces of at most so many items."""
    cut = [[packed[at : at + items * size] for at in range(0, len(packed), items * size)] for packed, size in columns]
    return list(zip(*cut, strict=True))


def unpack_u64(raw: bytes) -> "array[int]":
    """Inverse of `pack_u64`; raises ValueError on a broken length."""
    values = array("Q")
    values.frombytes(raw)
    if sys.byteorder == "big":
        values.byteswap()
    return values
