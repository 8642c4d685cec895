"""Arenas of a test's own."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from hybridkv.core.copies import CopyOp
from hybridkv.core.packed import SlotRef
from hybridkv.shm.arena import SHM_DIR, Arena, create_arena
from hybridkv.shm.slots import HEADER_BYTES, SlotHeader, SlotState, slot_bytes


@contextmanager
def unnamed_arena(size_bytes: int) -> Iterator[Arena]:
    """Make an arena that has memory for all its slots, and that nobody else can attach."""
    arena = create_arena(SHM_DIR / f"hybridkv-test-{threading.get_native_id()}", size_bytes)
    arena.unlink()
    arena.allocate_pages(0, size_bytes)
    yield arena
    arena.close()


def whole_object(slot: SlotRef, chunk: int, blocks: tuple[int, ...]) -> CopyOp:
    """Return the copy of all blocks of an object of the first group."""
    return CopyOp(slot, group_index=0, chunk=chunk, count=len(blocks), first=0, blocks=blocks)


def ops_of_new_slots(
    arena: Arena, part_bytes: int, count: int, first: int = 1, blocks: int = 1
) -> list[CopyOp]:
    """Return copies of `count` objects, each of one part and with a slot that is being written.

    Object number n, from `first` on, has the n-th slot (slot 0 stays free) and the n-th `blocks` of
    the engine after the null block::

        number 2, blocks 4    slot at 2 * slot_bytes    blocks 5 to 8
    """
    ops: list[CopyOp] = []
    for number in range(first, first + count):
        at = number * slot_bytes(part_bytes, 1)
        slot = SlotRef(at, 7 + at)
        header = SlotHeader(SlotState.WRITING, slot.generation, 1, part_bytes)
        arena.memory[at : at + HEADER_BYTES] = header.pack()
        end = number * blocks
        ops.append(whole_object(slot, number, tuple(range(end - blocks + 1, end + 1))))
    return ops
