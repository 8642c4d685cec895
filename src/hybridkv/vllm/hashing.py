"""The hashes that name a prefix: the engine's, or our own where the engine's differ by process.

vLLM's xxhash algorithms are seeded at random in every process and are not cryptographic, so two
prompts could share a key. With them the chunks are hashed here with SHA-256 over the same facts
that vLLM hashes (requirements B18, D15). That costs a millisecond per some ten thousand tokens when
a request arrives, so the engine's own hashes are used where they can be.
"""

import copy
import hashlib
import os
import platform
from array import array
from typing import Any

from vllm.v1.core.kv_cache_utils import DEFAULT_NONE_HASH_SEED, generate_block_hash_extra_keys

ENGINE_HASHES = ("sha256", "sha256_cbor")
"""vLLM's algorithms whose hashes are the same in every process with one PYTHONHASHSEED."""
AdapterKey = tuple[Any, ...]
"""By what the engine's hashes name a LoRA adapter: its name, on some versions also its path."""


def hash_facts(algorithm: str) -> list[str]:
    """Return the facts of the identity that two engines share if they hash prefixes alike."""
    if algorithm not in ENGINE_HASHES:
        return ["own sha256"]
    # vLLM's "sha256" is over a pickle, which is stable within one Python version.
    python = platform.python_version() if algorithm == "sha256" else ""
    return [algorithm, python, os.environ.get("PYTHONHASHSEED", DEFAULT_NONE_HASH_SEED)]


def is_hashable(request: Any, by_us: bool, ahead_tokens: int = 0) -> bool:
    """Return True if a request's chunks have hashes that name them.

    False for prompt embeddings, which have no token ids. Also False for values that vLLM does not
    check: a cache_salt that is not text, or token ids that do not fit 64 bits. `by_us`: the chunks
    are hashed here. `ahead_tokens` are those of a chunk if its hash covers the token after it, else
    0. A session of streamed prompts may take that token back.
    """
    if request.prompt_embeds is not None or not isinstance(request.cache_salt, str | None):
        return False
    if ahead_tokens and request.resumable:
        return False
    try:
        if by_us:
            array("q", request.all_token_ids)
        elif ahead_tokens:
            array("q", request.all_token_ids[ahead_tokens::ahead_tokens])
    except (OverflowError, TypeError):
        return False
    return True


def adapter_key(request: Any) -> AdapterKey:
    """Return by what the engine's hashes name the request's adapter. () = it has none.

    Requests whose adapters have one key share blocks of the engine's own prefix cache.
    """
    plain = copy.copy(request)
    plain.mm_features, plain.cache_salt, plain.prompt_embeds = [], None, None
    keys, _ = generate_block_hash_extra_keys(plain, 0, 1, 0)
    return keys or ()


def extra_keys_at(request: Any, positions: range) -> list[tuple[Any, ...] | None]:
    """Return vLLM's extra keys of each token: what a hash covers beside it (LoRA, images, salt)."""
    keys, feature = [], 0
    for position in positions:
        extra, feature = generate_block_hash_extra_keys(request, position, position + 1, feature)
        keys.append(extra)
    return keys


class ChunkHashChain:
    """The chained hashes of one request's chunks, each of which is made once."""

    def __init__(self, request: Any, chunk_tokens: int) -> None:
        self._request = request
        self._chunk_tokens = chunk_tokens
        self._hashes: list[bytes] = []
        self._feature = 0

    def names(self, first: int, count: int) -> bytes:
        """Return the hashes of `count` chunks from `first` on, joined.

        The request must have all tokens of these chunks.
        """
        while len(self._hashes) < first + count:
            start = len(self._hashes) * self._chunk_tokens
            stop = start + self._chunk_tokens
            extra, self._feature = generate_block_hash_extra_keys(
                self._request, start, stop, self._feature
            )
            # Texts, numbers and bytes in tuples: their repr is the same in every process.
            digest = hashlib.sha256(self._hashes[-1] if self._hashes else b"")
            digest.update(array("q", self._request.all_token_ids[start:stop]).tobytes())
            digest.update(repr(extra).encode())
            self._hashes.append(digest.digest())
        return b"".join(self._hashes[first : first + count])
