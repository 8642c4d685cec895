"""Identity: what must agree before bytes may be reused (requirements D16).

A *namespace* is the fingerprint of everything but the prompt that decides about the bytes: weights,
config, dtypes, layout, engine ABI. In a namespace an object is identified by (gid, chunk hash). The
chunk hash is the engine's prefix-chained block hash at the end of the chunk; it covers the tokens,
multimodal input and salt. Chunks that a LoRA adapter computed have `adapter_hashes`, and chunks
whose bytes depend on the token behind them have `lookahead_hashes`.
"""

import hashlib
import json
from array import array
from collections.abc import Mapping, Sequence

HASH_BYTES = 32  # Length of a chunk hash and of a namespace fingerprint.


def fingerprint(facts: Mapping[str, object]) -> bytes:
    """32 bytes over a JSON-able mapping, whatever the order of its keys and PYTHONHASHSEED are."""
    text = json.dumps(facts, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).digest()


def tenant_of(cache_salt: str | None) -> int:
    """The tenant whose quota a request's chunks use: 1 to 2**64 - 1, or 0 without a salt."""
    if not cache_salt:
        return 0
    # Any text that Python can hold: a client's salt may have halves of surrogate pairs.
    digest = hashlib.sha256(cache_salt.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "little") or 1


def adapter_hashes(hashes: bytes, adapter: bytes) -> bytes:
    """The exclusive or of each chunk hash with `adapter`, which names a LoRA adapter's weights.

    Results differ where the hashes or the adapters do. Thousands of hashes cost next to nothing.
    """
    return _exclusive_or(hashes, adapter * (len(hashes) // HASH_BYTES))


def lookahead_hashes(hashes: bytes, tokens: Sequence[int], extras: Sequence[object]) -> bytes:
    """The exclusive or of each chunk hash with the token behind the chunk.

    `extras[i]` is what token i depends on besides, as an image; None = on nothing. `extras` may be
    empty. Results differ where the hashes, the tokens or the extras do.
    """
    ahead = array("q", bytes(len(hashes)))
    ahead[:: HASH_BYTES // ahead.itemsize] = array("q", tokens)
    named = _exclusive_or(hashes, ahead.tobytes())
    digests = [
        bytes(HASH_BYTES) if extra is None else hashlib.sha256(repr(extra).encode()).digest()
        for extra in extras
    ]
    return _exclusive_or(named, b"".join(digests)) if digests else named


def _exclusive_or(some: bytes, others: bytes) -> bytes:
    whole = int.from_bytes(some, "little") ^ int.from_bytes(others, "little")
    return whole.to_bytes(len(some), "little")


def pack_hashes(block_hashes: Sequence[bytes]) -> bytes:
    """An engine's block hashes of any length as chunk hashes of HASH_BYTES each, in one string."""
    packed = b"".join(block_hashes)
    if not block_hashes or (
        len(block_hashes[0]) == HASH_BYTES and len(packed) == len(block_hashes) * HASH_BYTES
    ):
        return packed  # All hashes of an engine have the same length.
    return b"".join(
        one if len(one) == HASH_BYTES else hashlib.sha256(one).digest() for one in block_hashes
    )
