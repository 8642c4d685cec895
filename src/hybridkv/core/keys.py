"""Identity: what must agree before bytes may be reused (requirements D16).

A *namespace* is the fingerprint of everything that shapes the bytes but not the prompt: weights, config, dtypes,
layout, engine ABI.  Inside a namespace an object is named by (gid, chunk hash), where the chunk hash is the
engine's prefix-chained block hash at the end of the chunk; it covers the tokens, LoRA, multimodal input and salt.
"""

import hashlib
import json
from collections.abc import Mapping

HASH_BYTES = 32
"""Length of a chunk hash and of a namespace fingerprint."""


def fingerprint(facts: Mapping[str, object]) -> bytes:
    """32 bytes over a JSON-able mapping; independent of the order of keys and of PYTHONHASHSEED."""
    text = json.dumps(facts, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).digest()


def normalise_hash(block_hash: bytes) -> bytes:
    """A chunk hash of exactly HASH_BYTES from an engine's block hash of another length."""
    return block_hash if len(block_hash) == HASH_BYTES else hashlib.sha256(block_hash).digest()
