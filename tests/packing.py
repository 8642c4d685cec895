"""Slots as messages and plans name them."""

from collections.abc import Iterable

from hybridkv.core.packed import SlotRef, pack_slots


def packed_slots(numbers: Iterable[int]) -> bytes:
    """Returns a packed slot for each number, which is its offset and its generation."""
    return pack_slots(SlotRef(number, number) for number in numbers)
