"""Whose hashes name a prefix: the engine's, or our own where the engine's are no good outside its process.

vLLM's xxhash algorithms are seeded at random in every process and are no cryptographic hashes: two prompts under one
key would be a lie.  With them the chunks are hashed here, with SHA-256, over the same facts that vLLM hashes (DESIGN
section 5, requirements B18, D15).  That costs a millisecond per some ten thousand tokens when a request arrives, so
the engine's own hashes are taken where they can be.
"""

import hashlib
import os
import platform
from array import array
from typing import Any

from vllm.v1.core.kv_cache_utils import DEFAULT_NONE_HASH_SEED, generate_block_hash_extra_keys

ENGINE_HASHES = ("sha256", "sha256_cbor")
"""vLLM's algorithms whose hashes are the same in every process with one PYTHONHASHSEED."""


def hash_facts(algorithm: str) -> list[str]:
    """What makes two engines name one prefix alike; a part of the identity."""
    if algorithm not in ENGINE_HASHES:
        return ["own sha256"]
    # vLLM's "sha256" is over a pickle, which is stable within one Python version.
    python = platform.python_version() if algorithm == "sha256" else ""
    return [algorithm, python, os.environ.get("PYTHONHASHSEED", DEFAULT_NONE_HASH_SEED)]


class OwnChain:
    """The chained names of one request's chunks, made once each."""

    def __init__(self, request: Any, chunk_tokens: int) -> None:
        self._request = request
        self._chunk_tokens = chunk_tokens
        self._names: list[bytes] = []
        self._feature = 0

    def names(self, first: int, count: int) -> bytes:
        """HASH_BYTES for each of `count` chunks from `first` on; the request must have all their tokens."""
        while len(self._names) < first + count:
            self._names.append(self._next())
        return b"".join(self._names[first : first + count])

    def _next(self) -> bytes:
        start = len(self._names) * self._chunk_tokens
        stop = start + self._chunk_tokens
        extra, self._feature = generate_block_hash_extra_keys(self._request, start, stop, self._feature)
        # Texts, numbers and bytes in tuples: their repr is the same in every process.
        named = hashlib.sha256(self._names[-1] if self._names else b"")
        named.update(array("q", self._request.all_token_ids[start:stop]).tobytes())
        named.update(repr(extra).encode())
        return named.digest()
