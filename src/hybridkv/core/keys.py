"""Identity: what must agree before bytes may be reused (requirements D16).

A *namespace* is the fingerprint of everything but the prompt that decides about the bytes: weights,
config, dtypes, layout, engine ABI. In a namespace an object is identified by (gid, chunk hash). The
chunk hash is the engine's prefix-chained block hash at the end of the chunk. It covers the tokens,
labels of multimodal input, and salt. Chunks that a LoRA adapter computed have `adapter_hashes`.
Chunks whose bytes depend on the next token have `lookahead_hashes`. Chunks from a medium on also
cover its content (`vllm.media`).
"""

import hashlib
import json
from array import array
from collections.abc import Mapping, Sequence
from itertools import chain
from struct import Struct

HASH_BYTES = 32  # Length of a chunk hash and of a namespace fingerprint.
KEY_BYTES = 2 * HASH_BYTES + 2  # Of an object's name: namespace, chunk hash, and gid in 2 bytes.
_HASH = Struct(f"{HASH_BYTES}s")
_HASHES = Struct(_HASH.format * 16)  # A row of hashes, because a tuple for each takes longer.


def fingerprint(facts: Mapping[str, object]) -> bytes:
    """Returns 32 bytes that name a mapping of JSON values, whatever the order of its keys."""
    text = json.dumps(facts, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).digest()


def tenant_of(cache_salt: str | None) -> int:
    """Returns the tenant whose quota a request's chunks use: 1 to 2**64 - 1. 0 = no salt."""
    if not cache_salt:
        return 0
    # Any text that Python can hold: a client's salt may have halves of surrogate pairs.
    digest = hashlib.sha256(cache_salt.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "little") or 1


def tenant_of_user(uid: int) -> int:
    """Returns the tenant of everything that a user's engines store: 1 to 2**64 - 1."""
    return int.from_bytes(hashlib.sha256(b"user\0" + uid.to_bytes(4)).digest()[:8], "little") or 1


def adapter_hashes(hashes: bytes, adapter: bytes) -> bytes:
    """Returns each chunk hash XOR `adapter`, the digest of a LoRA adapter's weights.

    Results differ where the hashes or the adapters do. Thousands of hashes cost next to nothing.
    """
    return exclusive_or(hashes, adapter * (len(hashes) // HASH_BYTES))


def lookahead_hashes(hashes: bytes, tokens: Sequence[int], extras: Sequence[object]) -> bytes:
    """Returns each chunk hash XOR the first token after the chunk.

    `tokens[i]` is the token after chunk i. `extras[i]` is the input besides its number, as an
    image. None = no such input. `extras` may be empty. Results differ where the hashes, the tokens
    or the extras do.
    """
    ahead = array("q", bytes(len(hashes)))
    ahead[:: HASH_BYTES // ahead.itemsize] = array("q", tokens)
    named = exclusive_or(hashes, ahead.tobytes())
    digests = [
        bytes(HASH_BYTES) if extra is None else hashlib.sha256(repr(extra).encode()).digest()
        for extra in extras
    ]
    return exclusive_or(named, b"".join(digests)) if digests else named


def exclusive_or(left: bytes, right: bytes) -> bytes:
    """Returns the bits in which two byte strings of one length differ."""
    whole = int.from_bytes(left, "little") ^ int.from_bytes(right, "little")
    return whole.to_bytes(len(left), "little")


def pack_hashes(block_hashes: Sequence[bytes]) -> bytes:
    """Returns block hashes of any length as chunk hashes of HASH_BYTES each, in one string.

    A hash of another length becomes its SHA-256.
    """
    packed = b"".join(block_hashes)
    if not block_hashes or (
        len(block_hashes[0]) == HASH_BYTES and len(packed) == len(block_hashes) * HASH_BYTES
    ):
        return packed  # All hashes of an engine have the same length.
    return b"".join(
        block_hash if len(block_hash) == HASH_BYTES else hashlib.sha256(block_hash).digest()
        for block_hash in block_hashes
    )


def unpack_hashes(hashes: bytes) -> list[bytes]:
    """Returns the hashes of HASH_BYTES each that a byte string has, in order."""
    whole = len(hashes) - len(hashes) % _HASHES.size
    rows = _HASHES.iter_unpack(hashes[:whole]), _HASH.iter_unpack(hashes[whole:])
    return list(chain.from_iterable(chain(*rows)))
