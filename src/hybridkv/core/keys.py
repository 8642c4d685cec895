"""Identity: what must agree before bytes may be reused (requirements D16).

A *namespace* is the fingerprint of everything that shapes the bytes but not the prompt: weights, config, dtypes,
layout, engine ABI.  Inside a namespace an object is named by (gid, chunk hash), where the chunk hash is the
engine's prefix-chained block hash at the end of the chunk; it covers the tokens, multimodal input and salt.
The names of chunks that a LoRA adapter computed are `masked` with a hash of its files.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence

HASH_BYTES = 32
"""Length of a chunk hash and of a namespace fingerprint."""


def fingerprint(facts: Mapping[str, object]) -> bytes:
    """32 bytes over a JSON-able mapping; independent of the order of keys and of PYTHONHASHSEED."""
    text = json.dumps(facts, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).digest()


def tenant_of(cache_salt: str | None) -> int:
    """Whose quota a request's chunks count against: a number from 1 to 2**64 - 1, or 0 without a salt."""
    if not cache_salt:
        return 0
    return int.from_bytes(hashlib.sha256(cache_salt.encode()).digest()[:8], "little") or 1


def masked(names: bytes, mask: bytes) -> bytes:
    """Chunk hashes (HASH_BYTES each) that also depend on `mask`, a hash of HASH_BYTES: the exclusive or with it.

    As different as the hashes were, and different for every mask; it costs next to nothing for thousands of hashes.
    """
    size = len(names)
    whole = int.from_bytes(names, "little") ^ int.from_bytes(mask * (size // HASH_BYTES), "little")
    return whole.to_bytes(size, "little")


def pack_hashes(block_hashes: Sequence[bytes]) -> bytes:
    """Chunk hashes of exactly HASH_BYTES each, one after the other, from an engine's block hashes of any length."""
    packed = b"".join(block_hashes)
    if not block_hashes or (len(block_hashes[0]) == HASH_BYTES and len(packed) == len(block_hashes) * HASH_BYTES):
        return packed  # One engine's hashes all have one length.
    return b"".join(one if len(one) == HASH_BYTES else hashlib.sha256(one).digest() for one in block_hashes)
