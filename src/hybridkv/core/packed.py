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


def unpack_u64(raw: bytes) -> "array[int]":
    """Inverse of `pack_u64`; raises ValueError on a broken length."""
    values = array("Q")
    values.frombytes(raw)
    if sys.byteorder == "big":
        values.byteswap()
    return values
