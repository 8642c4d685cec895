"""The layout of a record: an object outside the arena, in a file, a value of a server or on its way.

A record is a slot with another header, and has the slot's size, so that both can be read and written with direct I/O::

    0        128                 payload_offset(parts)
    |header  |checksum per part  |payload: part 0, part 1 ...          | zeros to SLOT_ALIGN

It describes itself: whoever finds one knows whose object it is, whole or not.  The parts keep the signatures of the
worker that wrote them, with their seed, so what a reader proves are the bytes that left the engine.
"""

import struct
import zlib
from typing import NamedTuple

from hybridkv.core.keys import HASH_BYTES
from hybridkv.shm.signature import is_signed, sign
from hybridkv.shm.slots import HEADER_BYTES, SLOT_ALIGN, payload_offset, slot_bytes

RECORD_VERSION = 1
KEY_BYTES = 2 * HASH_BYTES + 2
TAG_BYTES = 8
_MAGIC = 0x6365527633766B68  # "hkv3vRec" read as little-endian
# magic, version, parts, gid, flags, part bytes, namespace, chunk hash, parent's tag, tenant, seed of the signatures
_HEADER = struct.Struct(f"<QHHHHQ{HASH_BYTES}s{HASH_BYTES}s{TAG_BYTES}sQQ")
_CRC = struct.Struct("<I")
_CRC_OFFSET = HEADER_BYTES - _CRC.size
_INTERIOR = 1

assert _HEADER.size <= _CRC_OFFSET


class RecordName(NamedTuple):
    """Which object a record is."""

    namespace: bytes
    gid: int
    chunk_hash: bytes

    @property
    def key(self) -> bytes:
        """KEY_BYTES that name it in a tier: namespace, chunk hash, gid."""
        return self.namespace + self.chunk_hash + self.gid.to_bytes(2, "big")


class Record(NamedTuple):
    """What the header of a record says."""

    name: RecordName
    part_bytes: int
    parts: int
    seed: int
    """Of the parts' signatures."""
    parent: bytes = bytes(TAG_BYTES)
    """The first TAG_BYTES of the hash of the chunk before, where a hit needs the same group's object there too."""
    tenant: int = 0
    interior: bool = False
    """See core.eviction."""

    @property
    def size_bytes(self) -> int:
        """Of the whole record."""
        return slot_bytes(self.part_bytes, self.parts)


def head_bytes(parts: int) -> int:
    """Bytes from the start of a record to the first page without header or checksums."""
    return -(-payload_offset(parts) // SLOT_ALIGN) * SLOT_ALIGN


def write_head(record: Record, slot: memoryview, head: memoryview) -> None:
    """Make in `head` (`head_bytes`) the beginning of the record whose other bytes are those of `slot`.

    Signs what is not signed, and zeroes what is behind the slot's payload. Raises ValueError where a part has a wrong
    signature.
    """
    signed = is_signed(slot, record.part_bytes, record.parts, record.seed)
    if signed is False:
        raise ValueError("its bytes are not those that were stored")
    if signed is None:
        sign(slot, record.part_bytes, record.parts, record.seed)
    payload = payload_offset(record.parts)
    end = payload + record.part_bytes * record.parts
    slot[end:] = bytes(len(slot) - end)
    head[:] = slot[: len(head)]
    flags = _INTERIOR if record.interior else 0
    _HEADER.pack_into(
        head,
        0,
        _MAGIC,
        RECORD_VERSION,
        record.parts,
        record.name.gid,
        flags,
        record.part_bytes,
        record.name.namespace,
        record.name.chunk_hash,
        record.parent,
        record.tenant,
        record.seed,
    )
    head[_HEADER.size : _CRC_OFFSET] = bytes(_CRC_OFFSET - _HEADER.size)
    _CRC.pack_into(head, _CRC_OFFSET, _crc(head, payload))


def read_head(head: memoryview) -> Record | None:
    """What a record's beginning says, or None where it is no sound one of this version.

    `head` has at least `head_bytes` of the record's number of parts.
    """
    if len(head) < HEADER_BYTES:
        return None
    magic, version, parts, gid, flags, part_bytes, namespace, chunk_hash, parent, tenant, seed = _HEADER.unpack_from(
        head
    )
    if magic != _MAGIC or version != RECORD_VERSION or not parts or len(head) < payload_offset(parts):
        return None
    if _CRC.unpack_from(head, _CRC_OFFSET)[0] != _crc(head, payload_offset(parts)):
        return None
    name = RecordName(namespace, gid, chunk_hash)
    return Record(name, part_bytes, parts, seed, parent, tenant, bool(flags & _INTERIOR))


def parts_of(start: bytes) -> int:
    """The number of parts that the first HEADER_BYTES of what may be a record name; 0 where they name none.

    Nothing is proven by it: it says how much `read_head` needs.
    """
    if len(start) < HEADER_BYTES:
        return 0
    magic, version, parts = _HEADER.unpack_from(start)[:3]
    return int(parts) if (magic, version) == (_MAGIC, RECORD_VERSION) else 0


def is_whole(record: Record, memory: memoryview) -> bool:
    """Whether `memory` has exactly the record's bytes; its header was read already."""
    if len(memory) != record.size_bytes:
        return False
    end = payload_offset(record.parts) + record.part_bytes * record.parts
    return is_signed(memory, record.part_bytes, record.parts, record.seed) is True and _is_zero(memory[end:])


def _is_zero(memory: memoryview) -> bool:
    return bytes(memory).count(0) == len(memory)


def _crc(head: memoryview, payload: int) -> int:
    return zlib.crc32(head[HEADER_BYTES:payload], zlib.crc32(head[:_CRC_OFFSET]))
