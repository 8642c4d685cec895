"""Reads an arena from outside, through its self-describing slots."""

from collections.abc import Iterator

from hybridkv.shm.slots import (
    HEADER_BYTES,
    SLOT_ALIGN,
    SlotHeader,
    SlotState,
    slot_bytes,
    unpack_header,
)


def committed_slots(memory: memoryview) -> Iterator[tuple[int, SlotHeader]]:
    """The (offset, header) of every committed slot, by walking the pages of `memory`.

    `memory` must be the reserved part of an arena: reading a page that does not exist allocates it,
    or raises SIGBUS where there is no room for it.
    """
    at = 0
    while at + HEADER_BYTES <= len(memory):
        header = unpack_header(bytes(memory[at : at + HEADER_BYTES]))
        if header is None or header.state is SlotState.FREE:
            at += SLOT_ALIGN
            continue
        if header.state is SlotState.COMMITTED:
            yield at, header
        at += slot_bytes(header.part_bytes, header.parts)
