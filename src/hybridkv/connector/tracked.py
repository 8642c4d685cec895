"""What the scheduler role knows of one request."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, overload

from hybridkv.connector.adapters import Adapter
from hybridkv.connector.hashing import OwnChain
from hybridkv.connector.metadata import LoadPlan
from hybridkv.core.geometry import Geometry
from hybridkv.core.keys import masked, pack_hashes
from hybridkv.core.requests import State
from hybridkv.wire.messages import Found, Pending


@dataclass(eq=False, slots=True)
class Tracked:
    """One request of the engine."""

    request: Any
    chain: OwnChain | None = None
    """Names its chunks where the engine's hashes cannot."""
    adapter: Adapter | None = None
    """Its LoRA adapter; without an identity its chunks have no names (yet)."""
    mask: bytes = b""
    """What the adapter adds to their names, once it is known."""
    state: State = State.PREFETCHING
    lease: int = 0
    deadline: float = 0.0
    asked_at: float = 0.0
    """When the last lookup was sent."""
    sent: bool = False
    found: Found | None = None
    pending: Pending | None = None
    """What the daemon said first, where the answer takes longer."""
    tenant: int = 0
    """See core.keys."""
    storable: bool = True
    """False once the identity changed under the request: its blocks are of the old weights, or of both."""
    preemptions: int = 0
    local_tokens: int = 0
    load: LoadPlan = LoadPlan("", ())
    load_tokens: int = 0
    allocated_at: float = 0.0
    """When the engine had blocks for the load."""
    handed_over: bool = False
    """Whether the workers were told about the load and will report it."""
    asked: bytes = b""
    """Hashes of the last lookup that was sent."""
    answer: Found | None = None
    """The last answer, for the story; `found` is what may be acted on."""
    local_seen: int | None = None
    """Tokens of the engine's own cache when it was last asked about."""
    loaded: tuple[int, int] = (0, 0)
    """(tokens, bytes) that came from outside."""
    stored: int = 0
    why: str = ""
    """The last decline or failure in words."""
    next_chunk: list[int] = field(default_factory=list)
    """Per attention group: the first chunk whose store is not settled."""
    offered: set[tuple[int, int]] = field(default_factory=set)
    """(group index, chunk) of recurrent states that are stored already."""

    def is_named(self) -> bool:
        """Whether its chunks have names now: always, but for adapters that are not read yet, or changed."""
        if self.adapter is None:
            return True
        identity = self.adapter.identity
        self.mask = self.mask or identity or b""
        return identity is not None

    def chunk_hashes(self, geometry: Geometry, first: int, count: int) -> bytes:
        """Names of the prefixes that end with `count` chunks from `first` on, HASH_BYTES each; see `is_named`."""
        if self.chain is not None:
            names = self.chain.names(first, count)
        else:
            step = geometry.chunk_tokens // geometry.hash_tokens
            hashes = self.request.block_hashes[geometry.hash_index(first) : geometry.hash_index(first + count) : step]
            names = pack_hashes(hashes)
        return masked(names, self.mask) if self.mask else names


class BlockTable(Sequence[int]):
    """One group's block ids out of the engine's blocks. Parts of it keep the blocks as they are now.

    Their ids are read by whoever copies: with blocks of 16 tokens a hit of 128k tokens has 8,192 of them in one group,
    too many to be looked at in a hook.
    """

    def __init__(self, blocks: Sequence[Any]) -> None:
        self._blocks = blocks

    def __len__(self) -> int:
        return len(self._blocks)

    @overload
    def __getitem__(self, at: int) -> int: ...

    @overload
    def __getitem__(self, at: slice) -> "BlockTable": ...

    def __getitem__(self, at: "int | slice") -> "int | BlockTable":
        if isinstance(at, slice):
            return BlockTable(self._blocks[at])
        block_id: int = self._blocks[at].block_id
        return block_id

    def __iter__(self) -> Iterator[int]:
        return iter([block.block_id for block in self._blocks])

    def __reduce__(self) -> tuple[type[list[int]], tuple[Sequence[int]]]:
        """As a list: another process has use for the ids alone."""
        return list, ([*self],)


def block_tables(blocks: Any) -> list[BlockTable]:
    """The table of each of the engine's groups, of its KVCacheBlocks."""
    return [*map(BlockTable, blocks.blocks)]
