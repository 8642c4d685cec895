"""Arrays of slots, of tickets and of unsigned 64-bit integers as bytes: no Python object for each.

A *ticket* is what an engine's scheduler has of a slot: the slot of the object on each of its nodes,
side by side. Where all workers are on one node it is the slot. The workers know their node::

    tickets      |slot on node 0|slot on node 1|slot on node 0|slot on node 1|  two objects
    on node 1                   |slot on node 1|              |slot on node 1|
"""

import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import starmap
from struct import Struct
from typing import NamedTuple

U64 = 8  # Bytes of one integer.
SLOT = Struct("<QQ")
SLOT_BYTES = SLOT.size  # Bytes of one slot: its offset and its generation.


class SlotRef(NamedTuple):
    """A slot: the byte offset of its header in the arena, and its generation."""

    offset: int
    generation: int


NO_SLOT = SlotRef(0, 0)
"""Stands for a slot where there is none: no slot has generation 0."""


def pack_slots(slots: Iterable[tuple[int, int]]) -> bytes:
    """Returns the (offset, generation) of slots as bytes, little-endian, SLOT_BYTES each."""
    return b"".join(starmap(SLOT.pack, slots))


def unpack_slots(raw: bytes) -> Iterator[SlotRef]:
    """Yields the slots that `pack_slots` packed. Raises ValueError where bytes are missing."""
    if len(raw) % SLOT_BYTES:
        raise ValueError(f"{len(raw)} bytes are no slots of {SLOT_BYTES} bytes")
    return map(SlotRef._make, SLOT.iter_unpack(raw))


def pack_u64(values: "list[int] | array[int]") -> bytes:
    """Returns the integers as little-endian bytes, U64 each."""
    packed = array("Q", values)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def batches(raw: bytes, size: int) -> list[bytes]:
    """Returns bytes, cut into pieces of at most `size` bytes."""
    return [raw[at : at + size] for at in range(0, len(raw), size)]


def join_nodes(slots: Sequence[bytes]) -> bytes:
    """Returns the tickets for packed slots of each node. All nodes have the same number."""
    nodes = len(slots)
    words = array("Q", bytes(sum(map(len, slots))))
    for node, packed in enumerate(slots):
        own = array("Q", packed)
        words[2 * node :: 2 * nodes], words[2 * node + 1 :: 2 * nodes] = own[::2], own[1::2]
    return words.tobytes()


def on_node(tickets: bytes, node: int, nodes: int) -> bytes:
    """Returns the packed slots that tickets of so many nodes have on one of them."""
    if nodes == 1:
        return tickets
    words, own = array("Q", tickets), array("Q", bytes(len(tickets) // nodes))
    own[::2], own[1::2] = words[2 * node :: 2 * nodes], words[2 * node + 1 :: 2 * nodes]
    return own.tobytes()


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
