"""The layout of a slot: a self-describing header, one checksum per part, the payload.

The daemon alone writes headers; workers write their parts of the payload and their checksums::

    0        128                 payload_offset(parts)
    |header  |checksum per part  |payload: part 0, part 1 ...         | padding to SLOT_ALIGN

The checksum of a part is its *signature*. The part is cut into pieces of PIECE_BYTES, the last of
which may be shorter. Each piece has a *digest*, its XXH3-64 with seed 0. The signature is the
XXH3-64 of all digests in order, each of them little-endian, seeded with the generation. So a device
can compute digests side by side, and a part is signed with another seed from its digests alone.
"""

import struct
import zlib
from collections.abc import Iterator
from enum import IntEnum
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from hybridkv.core.keys import HASH_BYTES
from hybridkv.core.packed import pack_u64

SLOT_ALIGN = 4096
"""Slots start on pages, so that a slot can be written to a file with direct I/O as it is."""
HEADER_BYTES = 128
CHECKSUM_BYTES = 8
PIECE_BYTES = 128 << 10
"""Bytes of a part that have one digest. `xxhash` lets other threads run only beside a hash of more
than 64 KiB: with smaller pieces, the daemon's loop waits up to 5 ms for a tier's thread."""
UNSIGNED = bytes(CHECKSUM_BYTES)  # The checksum of a part that nobody signed, as with "off".
SHORT_HASH_BYTES = 8
_PAYLOAD_ALIGN = 256
_MAGIC = 0x746F6C53766B6879  # "hykvSlot" read as little-endian
SLOT_VERSION = 3

# magic, version, state, parts, gid, generation, part bytes, namespace, chunk hash, short hash of
# the chunk before, tenant; then the CRC of all that
_HEADER = struct.Struct(f"<QHHHHQQ{HASH_BYTES}s{HASH_BYTES}sQQ")
_CRC = struct.Struct("<I")
_GENERATION_OFFSET = 16
_GENERATION = struct.Struct("<Q")

_USE_OFFSET = HEADER_BYTES - 1
USE_READ = 255
"""The `use` of an object that was read and is not interior. Else it is its EvictionClass."""

assert _HEADER.size + _CRC.size <= _USE_OFFSET


class SlotState(IntEnum):
    """The life of a slot, as its header says it: FREE, WRITING, COMMITTED, and FREE again."""

    FREE = 0
    WRITING = 1
    COMMITTED = 2
    DROPPED = 3  # The slot's object left the index. Its bytes stay while the slot is pinned.


class SlotHeader(NamedTuple):
    """The fields of a slot's header."""

    state: SlotState
    generation: int
    parts: int
    part_bytes: int
    gid: int = 0
    namespace: bytes = bytes(HASH_BYTES)
    chunk_hash: bytes = bytes(HASH_BYTES)
    parent_short: int = 0  # `short_hash` of the chunk before, 0 = none. Only eviction uses it.
    tenant: int = 0  # The tenant whose quota the object counts against, 0 = none.
    use: int = 0  # A byte for the next daemon's order of eviction. Nothing else depends on it.

    def pack(self) -> bytes:
        """Return the header as HEADER_BYTES bytes, with its CRC."""
        body = _HEADER.pack(
            _MAGIC,
            SLOT_VERSION,
            self.state,
            self.parts,
            self.gid,
            self.generation,
            self.part_bytes,
            self.namespace,
            self.chunk_hash,
            self.parent_short,
            self.tenant,
        )
        head = body + _CRC.pack(zlib.crc32(body))
        return head.ljust(_USE_OFFSET, b"\0") + bytes([self.use])


def unpack_header(raw: bytes) -> SlotHeader | None:
    """Return the header in `raw`, or None where the bytes are not a whole and sound header."""
    if len(raw) < HEADER_BYTES:
        return None
    body = raw[: _HEADER.size]
    if _CRC.unpack_from(raw, _HEADER.size)[0] != zlib.crc32(body):
        return None
    magic, version, state, parts, gid, generation, part_bytes, *rest = _HEADER.unpack(body)
    if magic != _MAGIC or version != SLOT_VERSION or state not in tuple(SlotState):
        return None
    namespace, chunk_hash, parent_short, tenant = rest
    return SlotHeader(
        state=SlotState(state),
        generation=generation,
        parts=parts,
        part_bytes=part_bytes,
        gid=gid,
        namespace=namespace,
        chunk_hash=chunk_hash,
        parent_short=parent_short,
        tenant=tenant,
        use=raw[_USE_OFFSET],
    )


def short_hash(chunk_hash: bytes) -> int:
    """Return the first SHORT_HASH_BYTES of a chunk hash, little-endian: b"\\1\\0..." -> 1.

    It serves where a collision costs nothing.
    """
    return int.from_bytes(chunk_hash[:SHORT_HASH_BYTES], "little")


def read_generation(memory: memoryview, offset: int) -> int:
    """Return the generation of the slot at `offset`, whatever its state."""
    return int(_GENERATION.unpack_from(memory, offset + _GENERATION_OFFSET)[0])


def write_use(memory: memoryview, offset: int, use: int) -> None:
    """Write the `use` of an object into the header of its slot at `offset`."""
    at = offset + _USE_OFFSET
    memory[at : at + 1] = bytes([use])


def payload_offset(parts: int) -> int:
    """Return the distance from the start of a slot to its payload, in bytes."""
    head = HEADER_BYTES + parts * CHECKSUM_BYTES
    return -(-head // _PAYLOAD_ALIGN) * _PAYLOAD_ALIGN


def checksum_offset(part: int) -> int:
    """Return the distance from the start of a slot to the checksum of one part, in bytes."""
    return HEADER_BYTES + part * CHECKSUM_BYTES


def slot_bytes(part_bytes: int, parts: int) -> int:
    """Return the bytes of the arena that a slot of this shape takes, a multiple of SLOT_ALIGN."""
    size = payload_offset(parts) + part_bytes * parts
    return -(-size // SLOT_ALIGN) * SLOT_ALIGN


def hash_pieces(part: memoryview, starts: range) -> list[int]:
    """Return the digests of the pieces that begin at `starts`, for callers that copy them too."""
    return [xxh3_64_intdigest(part[at : at + PIECE_BYTES]) for at in starts]


def piece_digests(part: memoryview) -> bytes:
    """Return the digests of all pieces of a part in order, packed (core.packed)."""
    return pack_u64(hash_pieces(part, range(0, len(part), PIECE_BYTES)))


def part_digests(slot: memoryview, part_bytes: int, parts: int) -> list[bytes]:
    """Return the `piece_digests` of every part of `slot` (a whole slot's memory)."""
    payload = payload_offset(parts)
    starts = range(payload, payload + part_bytes * parts, part_bytes)
    return [piece_digests(slot[start : start + part_bytes]) for start in starts]


def signature(digests: bytes, seed: int) -> bytes:
    """Return the CHECKSUM_BYTES that sign a part with these `piece_digests`.

    A signature is never UNSIGNED, so an unsigned slot proves nothing.
    """
    return (xxh3_64_intdigest(digests, seed) | 1).to_bytes(CHECKSUM_BYTES, "little")


def is_signed(slot: memoryview, digests: list[bytes], seed: int) -> bool | None:
    """Return True where every part of a slot has the signature of its digests (`part_digests`).

    False where a signature is wrong, and None where none is wrong but parts have none.
    """
    unsigned = False
    for part, part_digest in enumerate(digests):
        at = checksum_offset(part)
        known = bytes(slot[at : at + CHECKSUM_BYTES])
        if known == UNSIGNED:
            unsigned = True
        elif known != signature(part_digest, seed):
            return False
    return None if unsigned else True


def sign(slot: memoryview, digests: list[bytes], seed: int) -> None:
    """Sign every part of a slot by its digests (`part_digests`)."""
    for part, part_digest in enumerate(digests):
        at = checksum_offset(part)
        slot[at : at + CHECKSUM_BYTES] = signature(part_digest, seed)


def committed_slots(memory: memoryview) -> Iterator[tuple[int, SlotHeader]]:
    """Yield (offset, header) of every committed slot, by walking the pages of `memory`.

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
