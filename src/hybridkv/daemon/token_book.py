"""The token book: descriptions of stored chunks, from which engines announce them to routers.

A description has the token ids of a chunk, and only engines read it. Engines that publish KV events
send the descriptions, and a daemon of other engines keeps none. See docs/decisions/0022.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from hybridkv.core.keys import HASH_BYTES

BOOK_BYTES_MAX = 256 << 20
"""The most bytes of descriptions and of the hashes beside them."""


class ChunkName(NamedTuple):
    """The identity and the hash of a chunk."""

    identity: bytes
    chunk_hash: bytes


class ChunkDescription(NamedTuple):
    """What an engine said of a chunk."""

    parent: bytes  # The hash of the chunk before; empty where there is none.
    content: bytes


class DescribedChunk(NamedTuple):
    """A chunk with its description."""

    name: ChunkName
    description: ChunkDescription


class TokenBook:
    """Descriptions by identity and chunk hash."""

    def __init__(self, max_bytes: int = BOOK_BYTES_MAX) -> None:
        self._max_bytes = max_bytes
        self._identities: dict[bytes, dict[bytes, ChunkDescription]] = {}
        self.held_bytes = 0
        self.refused = 0  # Descriptions for which there was no room.
        self.unseen: OrderedDict[ChunkName, None] = OrderedDict()
        """Chunks that RAM does not have. They are forgotten once no tier has them either."""

    def __len__(self) -> int:
        """The number of descriptions."""
        return sum(map(len, self._identities.values()))

    def chunks_of(self, identity: bytes) -> Mapping[bytes, ChunkDescription]:
        """Return the descriptions of an identity by chunk hash, the oldest first."""
        return self._identities.get(identity, {})

    def add_chunk(self, name: ChunkName, description: ChunkDescription) -> bool:
        """Keep a description. Returns False where the chunk has one, or there is no room.

        Chunks that may be gone make room.
        """
        if name.chunk_hash in self.chunks_of(name.identity):
            return False
        size = _size(description)
        while self.held_bytes + size > self._max_bytes and self.unseen:
            self.forget_chunk(next(iter(self.unseen)))
        if self.held_bytes + size > self._max_bytes:
            self.refused += 1
            return False
        self._identities.setdefault(name.identity, {})[name.chunk_hash] = description
        self.held_bytes += size
        return True

    def forget_chunk(self, name: ChunkName) -> None:
        """Forget a chunk."""
        self.unseen.pop(name, None)
        of_identity = self._identities.get(name.identity, {})
        description = of_identity.pop(name.chunk_hash, None)
        if description is not None:
            self.held_bytes -= _size(description)
            if not of_identity:
                del self._identities[name.identity]

    def described(self) -> Iterable[DescribedChunk]:
        """Yield every chunk that is described."""
        for identity, of_identity in self._identities.items():
            for chunk_hash, description in of_identity.items():
                yield DescribedChunk(ChunkName(identity, chunk_hash), description)


def _size(description: ChunkDescription) -> int:
    return HASH_BYTES + len(description.parent) + len(description.content)
