"""The layout of a record: an object outside the arena, in a file or as a value of a server.

A record is a slot with another header, and has the slot's size, so that both can be read and
written with direct I/O::

    0        128                 payload_offset(parts)
    |header  |checksum per part  |payload: part 0, part 1 ...          | zeros to SLOT_ALIGN

An *encoded* record (tiers.coding) has the same header with another version, then a body that is
compressed, encrypted or both. It ends with zeros to SLOT_ALIGN too::

    0        128
    |header  |body: nonce?, checksum per part, payload     | zeros to SLOT_ALIGN

A record names its object, and shows whether it is whole. The parts keep the signatures of the
worker that wrote them, with their seed, so a reader proves the bytes that left the engine.
"""

import struct
import zlib
from typing import NamedTuple

from hybridkv.core.coverage import SlotShape
from hybridkv.core.keys import HASH_BYTES
from hybridkv.core.policies import EvictionClass
from hybridkv.shm import slots as layout
from hybridkv.shm.slots import (
    HEADER_BYTES,
    SHORT_HASH_BYTES,
    is_signed,
    part_digests,
    payload_offset,
    sign,
)
from hybridkv.store.index import Slot

RECORD_VERSION = 2  # The same under the name that the disk tier uses.
ENCODED_VERSION = 3  # Of records with a body.
_MAGIC = 0x6365527633766B68  # "hkv3vRec" read as little-endian
# The fields of the header are those that `_pack` packs, in its order.
_HEADER = struct.Struct(f"<QHHHHQ{HASH_BYTES}s{HASH_BYTES}s{SHORT_HASH_BYTES}sQQ")
_CRC = struct.Struct("<I")
_CRC_OFFSET = HEADER_BYTES - _CRC.size
_INTERIOR = 1
# The fields are those of Encoding, in their order.
_ENCODING = struct.Struct("<IBBxxI")

assert _HEADER.size + _ENCODING.size <= _CRC_OFFSET


def record_key(namespace: bytes, gid: int, chunk_hash: bytes) -> bytes:
    """Returns the KEY_BYTES that name an object in a tier: namespace, chunk hash, gid."""
    return namespace + chunk_hash + gid.to_bytes(2, "big")


class RecordName(NamedTuple):
    """The name of an object outside the arena."""

    namespace: bytes
    gid: int
    chunk_hash: bytes

    @property
    def key(self) -> bytes:
        """The object's key in tiers."""
        return record_key(self.namespace, self.gid, self.chunk_hash)


class Record(NamedTuple):
    """The facts of an object that the header of its record has."""

    name: RecordName
    part_bytes: int
    parts: int
    seed: int  # The seed of the parts' signatures.
    parent: bytes = bytes(SHORT_HASH_BYTES)
    """The start of the hash of the chunk before, where a hit needs the group's object there too."""
    tenant: int = 0
    interior: bool = False  # Only a shorter hit needs the object, see store.eviction.

    @property
    def shape(self) -> SlotShape:
        """(part_bytes, parts), as of a slot."""
        return self.part_bytes, self.parts

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole record, a multiple of SLOT_ALIGN."""
        return layout.slot_bytes(self.part_bytes, self.parts)


class Encoding(NamedTuple):
    """The encoding of the body of an encoded record."""

    body_bytes: int
    codec: int  # See tiers.coding.
    cipher: int
    key_id: int = 0  # The `id` of the TierKey. 0 = no cipher.

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole encoded record, a multiple of SLOT_ALIGN."""
        return -(-(HEADER_BYTES + self.body_bytes) // layout.SLOT_ALIGN) * layout.SLOT_ALIGN


class EncodedHeader(NamedTuple):
    """The header of an encoded record."""

    record: Record  # Of the plain record.
    encoding: Encoding


def head_bytes(parts: int) -> int:
    """Returns the bytes before the first page of a record that has payload alone."""
    return -(-payload_offset(parts) // layout.SLOT_ALIGN) * layout.SLOT_ALIGN


def write_head(record: Record, slot: memoryview, head: memoryview) -> None:
    """Write the first `head_bytes` of a record into `head`. Its other bytes are those of `slot`.

    Signs parts that are not signed, and zeroes the slot after its payload. Raises ValueError where
    a part has a wrong signature.
    """
    digests = part_digests(slot, record.part_bytes, record.parts)
    signed = is_signed(slot, digests, record.seed)
    if signed is False:
        raise ValueError("its bytes are not those that were stored")
    if signed is None:
        sign(slot, digests, record.seed)
    end = payload_offset(record.parts) + record.part_bytes * record.parts
    slot[end:] = bytes(len(slot) - end)
    head[:] = slot[: len(head)]
    write_header(record, head)


def write_header(record: Record, head: memoryview) -> None:
    """Write the header of a record to the start of `head`, which has the checksums already."""
    _pack(record, RECORD_VERSION, head)
    stamp_head(head, record.parts)


def stamp_head(head: memoryview, parts: int) -> None:
    """Write the checksum of a record's header and of the checksums of its `parts` after it."""
    _CRC.pack_into(head, _CRC_OFFSET, _crc(head, payload_offset(parts)))


def encoded_header(record: Record, encoding: Encoding) -> bytes:
    """Returns the header of an encoded record, HEADER_BYTES."""
    header = bytearray(HEADER_BYTES)
    _pack(record, ENCODED_VERSION, header)
    _ENCODING.pack_into(
        header, _HEADER.size, encoding.body_bytes, encoding.codec, encoding.cipher, encoding.key_id
    )
    _CRC.pack_into(header, _CRC_OFFSET, zlib.crc32(header[:_CRC_OFFSET]))
    return bytes(header)


def read_head(head: memoryview) -> Record | None:
    """Returns the header of a record, or None where it is not a sound header of this version.

    `head` has at least the `head_bytes` of the record's number of parts.
    """
    parts = parts_of(head)
    end = payload_offset(parts)
    if not parts or len(head) < end or _CRC.unpack_from(head, _CRC_OFFSET)[0] != _crc(head, end):
        return None
    return _unpack(head)


def read_encoded(start: bytes | memoryview) -> EncodedHeader | None:
    """Returns the header of an encoded record, or None where it is not a sound one.

    `start` has at least HEADER_BYTES.
    """
    if not is_encoded(start) or _CRC.unpack_from(start, _CRC_OFFSET)[0] != zlib.crc32(
        start[:_CRC_OFFSET]
    ):
        return None
    encoding = Encoding._make(_ENCODING.unpack_from(start, _HEADER.size))
    return EncodedHeader(_unpack(start), encoding)


def read_start(start: bytes, key: bytes) -> Record | None:
    """Returns the header at the start of the record of `key`, plain or encoded.

    None where it is not a sound header of that record. The checksum of a plain one is proven as far
    as `start` has all that it covers.
    """
    if is_encoded(start):
        header = read_encoded(start)
        record = header.record if header is not None else None
    else:
        parts = parts_of(start)
        is_cut = parts > 0 and payload_offset(parts) > len(start)
        record = _unpack(start) if is_cut else read_head(memoryview(start))
    return record if record is not None and record.name.key == key else None


def stored_bytes(start: memoryview) -> int:
    """Returns the bytes of a record in its tier, as its header claims. 0 = no header."""
    if header := read_encoded(start[:HEADER_BYTES]):
        return header.encoding.size_bytes
    return _unpack(start).size_bytes if parts_of(start) else 0


def is_encoded(start: bytes | memoryview) -> bool:
    """Returns whether a header claims to be that of an encoded record."""
    return len(start) >= HEADER_BYTES and _HEADER.unpack_from(start)[:2] == (
        _MAGIC,
        ENCODED_VERSION,
    )


def parts_of(start: bytes | memoryview) -> int:
    """Returns the number of parts, as the header of a plain record claims. 0 = no header."""
    if len(start) < HEADER_BYTES:
        return 0
    magic, version, parts = _HEADER.unpack_from(start)[:3]
    return int(parts) if (magic, version) == (_MAGIC, RECORD_VERSION) else 0


def proven_digests(record: Record, memory: memoryview) -> list[bytes] | None:
    """Returns the digests of the parts if `memory` has exactly the record's bytes, else None.

    `record` is the header of these bytes.
    """
    rest = bytes(memory[payload_offset(record.parts) + record.part_bytes * record.parts :])
    if len(memory) != record.size_bytes or rest.strip(b"\0"):
        return None
    digests = part_digests(memory, record.part_bytes, record.parts)
    return digests if is_signed(memory, digests, record.seed) else None


def _pack(record: Record, version: int, head: memoryview | bytearray) -> None:
    _HEADER.pack_into(
        head,
        0,
        _MAGIC,
        version,
        record.parts,
        record.name.gid,
        _INTERIOR * record.interior,
        record.part_bytes,
        record.name.namespace,
        record.name.chunk_hash,
        record.parent,
        record.tenant,
        record.seed,
    )
    head[_HEADER.size : _CRC_OFFSET] = bytes(_CRC_OFFSET - _HEADER.size)


def _unpack(head: bytes | memoryview) -> Record:
    _, _, parts, gid, flags, part_bytes, *names, tenant, seed = _HEADER.unpack_from(head)
    namespace, chunk_hash, parent = names
    return Record(
        name=RecordName(namespace, gid, chunk_hash),
        part_bytes=part_bytes,
        parts=parts,
        seed=seed,
        parent=parent,
        tenant=tenant,
        interior=bool(flags & _INTERIOR),
    )


def _crc(head: memoryview, payload: int) -> int:
    return zlib.crc32(head[HEADER_BYTES:payload], zlib.crc32(head[:_CRC_OFFSET]))


def record_of(slot: Slot) -> Record:
    """Returns the record of an object of the index."""
    entry = slot.entry
    assert entry is not None, "only objects of the index have names"
    namespace = entry.namespace
    parent = (slot.parent_short if slot.is_prefix else 0).to_bytes(SHORT_HASH_BYTES, "little")
    name = RecordName(namespace.identity, namespace.gids[slot.group_index], entry.chunk_hash)
    return Record(
        name=name,
        part_bytes=slot.part_bytes,
        parts=slot.parts,
        seed=slot.generation,
        parent=parent,
        tenant=slot.tenant,
        interior=slot.eviction_class is EvictionClass.INTERIOR,
    )
