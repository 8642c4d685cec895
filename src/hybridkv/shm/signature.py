"""The signature of one part of a slot: a 64-bit hash of its bytes, seeded with its generation."""

import xxhash

from hybridkv.shm.slots import CHECKSUM_BYTES, checksum_offset, payload_offset

UNSIGNED = bytes(CHECKSUM_BYTES)
"""The checksum of a part that nobody signed, as with `checksum: "off"`."""


def hasher(seed: int) -> "xxhash.xxh3_64":
    """A hasher for callers that hash a part piece by piece while the CPU cache has it."""
    return xxhash.xxh3_64(seed=seed)


def signature(digest: int) -> bytes:
    """The CHECKSUM_BYTES of a digest. It is never UNSIGNED, so an unsigned slot proves nothing."""
    return (digest | 1).to_bytes(CHECKSUM_BYTES, "little")


def part_signature(slot: memoryview, part_bytes: int, parts: int, part: int, seed: int) -> bytes:
    """The signature of one part of `slot` (a whole slot's memory), made from its bytes."""
    start = payload_offset(parts) + part * part_bytes
    return signature(xxhash.xxh3_64(slot[start : start + part_bytes], seed=seed).intdigest())


def is_signed(slot: memoryview, part_bytes: int, parts: int, seed: int) -> bool | None:
    """Whether every part of a slot has its signature; None if some have none, and none is wrong."""
    unsigned = False
    for part in range(parts):
        at = checksum_offset(part)
        known = bytes(slot[at : at + CHECKSUM_BYTES])
        if known == UNSIGNED:
            unsigned = True
        elif known != part_signature(slot, part_bytes, parts, part, seed):
            return False
    return None if unsigned else True


def sign(slot: memoryview, part_bytes: int, parts: int, seed: int) -> None:
    """Sign every part of a slot."""
    for part in range(parts):
        at = checksum_offset(part)
        slot[at : at + CHECKSUM_BYTES] = part_signature(slot, part_bytes, parts, part, seed)
