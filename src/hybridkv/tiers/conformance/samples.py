"""Whole records of chosen bytes, which the conformance suite puts and proves as the daemon does."""

import mmap
import random
from typing import NamedTuple

from hybridkv.core.keys import HASH_BYTES
from hybridkv.shm.slots import SHORT_HASH_BYTES, SLOT_ALIGN, payload_offset
from hybridkv.tiers.contract import DamagedError, ReadRequest, Tier, TierError, WriteRequest
from hybridkv.tiers.record import (
    Record,
    RecordName,
    head_bytes,
    proven_digests,
    read_head,
    write_head,
)

SEED = 5
PARENT = bytes(range(SHORT_HASH_BYTES))
FEW_VALUES = bytes(range(16)) * 16  # Turns random bytes into such as a codec makes smaller.


class SampleObject(NamedTuple):
    """A whole record in memory, and its header."""

    record: Record
    memory: memoryview

    @property
    def key(self) -> bytes:
        """The key of the record in tiers."""
        return self.record.name.key

    def write_request(self, cut: int = 0) -> WriteRequest:
        """The record in one piece, or in two that meet at page `cut`."""
        at = cut * SLOT_ALIGN
        return WriteRequest(self.key, [self.memory[:at], self.memory[at:]] if at else [self.memory])


def pages(size: int) -> memoryview:
    """`size` zeroed bytes of memory that start on a page."""
    return memoryview(mmap.mmap(-1, size))


def make_sample(
    number: int,
    part_bytes: int = 9000,
    parts: int = 2,
    namespace: bytes | None = None,
    payload: bytes = b"",
) -> SampleObject:
    """A record of random half bytes, the same ones for each number, or of `payload`."""
    rng = random.Random(number)
    namespace = namespace or rng.randbytes(HASH_BYTES)
    name = RecordName(namespace, number % 5, rng.randbytes(HASH_BYTES))
    part_bytes = len(payload) // parts if payload else part_bytes
    record = Record(name, part_bytes, parts, SEED)
    memory = pages(record.size_bytes)
    start = payload_offset(parts)
    payload = payload or rng.randbytes(part_bytes * parts).translate(FEW_VALUES)
    memory[start : start + part_bytes * parts] = payload
    head = pages(head_bytes(parts))
    write_head(record, memory, head)
    memory[: len(head)] = head
    return SampleObject(record, memory)


def read(tier: Tier, wanted: SampleObject, cut: int = 0) -> TierError | None:
    """Get one record back and prove it, as the daemon does.

    Raises AssertionError where wrong bytes are taken for right ones.
    """
    into = pages(len(wanted.memory))
    at = cut * SLOT_ALIGN
    (error,) = tier.get([ReadRequest(wanted.key, [into[:at], into[at:]] if at else [into])])
    if error is None:
        record = read_head(into[: head_bytes(wanted.record.parts)])
        if record is None or proven_digests(record, into) is None:
            return DamagedError("its bytes are not those that were put")
        assert record == wanted.record
        assert into == wanted.memory
    return error
