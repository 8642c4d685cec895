"""What the scheduler role knows of one request, and the engine's block tables."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, overload

from hybridkv.connector.messages import LoadPlan
from hybridkv.connector.scheduler.request_states import RequestState
from hybridkv.core.geometry import Geometry
from hybridkv.core.keys import adapter_hashes, pack_hashes
from hybridkv.vllm.adapters import Adapter
from hybridkv.vllm.hashing import ChunkHashChain
from hybridkv.wire.messages import Found, Pending


@dataclass(eq=False, slots=True)
class RequestLookup:
    """A request's last lookup. Times are monotonic seconds."""

    hashes: bytes = b""
    """The chunk hashes that were looked up; empty until a lookup was sent."""
    sent: bool = False
    sent_at: float = 0.0
    deadline: float = 0.0
    lease: int = 0
    """The lease that the answer opens; 0 = none."""
    pending: Pending | None = None
    """The daemon's first reply where its answer takes longer."""
    found: Found | None = None
    """The answer, until it is found out to be wrong."""
    answer: Found | None = None
    """The last answer of all, for `hybridkv explain`."""


@dataclass(eq=False, slots=True)
class RequestLoad:
    """A request's last load."""

    plan: LoadPlan = LoadPlan("", ())
    local_tokens: int = 0
    """Tokens of the engine's own hit, behind which the load begins."""
    tokens: int = 0
    allocated_at: float = 0.0
    """When the engine had blocks for the load, in monotonic seconds."""
    handed_over: bool = False
    """Whether the workers know of the load and will report its end."""
    total: tuple[int, int] = (0, 0)
    """(tokens, bytes) of all loads of the request that succeeded."""


@dataclass(eq=False, slots=True)
class TrackedRequest:
    """One request of the engine."""

    request: Any
    chain: ChunkHashChain | None = None
    """Makes the chunk hashes where the engine's own cannot be used."""
    adapter: Adapter | None = None
    """The LoRA adapter; the request's chunks have no hashes while its identity is unknown."""
    adapter_hash: bytes = b""
    """The adapter's identity, once it is known."""
    tenant: int = 0
    """The number of `core.keys.tenant_of`."""
    state: RequestState = RequestState.PREFETCHING
    lookup: RequestLookup = field(default_factory=RequestLookup)
    load: RequestLoad = field(default_factory=RequestLoad)
    preemptions: int = 0
    """The engine's count when the request was last looked up."""
    local_seen: int | None = None
    """Tokens of the engine's own hit when it last asked; None = it has not asked."""
    why: tuple[str, str] = ("", "")
    """The counter of the last decline or failure, and what is known besides."""
    storable: bool = True
    """False once the identity changed: blocks may be of the old weights."""
    next_chunk: list[int] = field(default_factory=list)
    """For each group, the first chunk whose store is not settled; unused for recurrent groups."""
    stored_states: set[tuple[int, int]] = field(default_factory=set)
    """(group index, chunk) of recurrent states whose store has begun."""
    stored: int = 0
    """Objects whose store has begun."""

    @property
    def is_prefetching(self) -> bool:
        """Whether the request waits for its lookup, or for what the answer offers."""
        return self.state is RequestState.PREFETCHING

    def has_hashes(self) -> bool:
        """Whether the chunks have hashes: not while the adapter is being read or is refused."""
        if self.adapter is None:
            return True
        identity = self.adapter.identity
        self.adapter_hash = self.adapter_hash or identity or b""
        return identity is not None

    def chunk_hashes(self, geometry: Geometry, first: int, count: int) -> bytes:
        """HASH_BYTES for each of `count` chunks from `first` on; only where `has_hashes`."""
        if self.chain is not None:
            hashes = self.chain.names(first, count)
        else:
            start, stop = geometry.hash_index(first), geometry.hash_index(first + count)
            step = geometry.chunk_tokens // geometry.hash_tokens
            hashes = pack_hashes(self.request.block_hashes[start:stop:step])
        return adapter_hashes(hashes, self.adapter_hash) if self.adapter_hash else hashes


class BlockTable(Sequence[int]):
    """One group's block ids, read from the engine's blocks when they are needed.

    A slice keeps the blocks that the table has now. With blocks of 16 tokens a hit of 128k tokens
    has 8,192 of them in one group, which are too many to be read in a hook.
    """

    def __init__(self, blocks: Sequence[Any]) -> None:
        self._blocks = blocks

    def __len__(self) -> int:
        return len(self._blocks)

    @overload
    def __getitem__(self, at: int) -> int: ...

    @overload
    def __getitem__(self, at: slice) -> "BlockTable": ...

    def __getitem__(self, at: int | slice) -> "int | BlockTable":
        if isinstance(at, slice):
            return BlockTable(self._blocks[at])
        block_id: int = self._blocks[at].block_id
        return block_id

    def __iter__(self) -> Iterator[int]:
        return iter([block.block_id for block in self._blocks])

    def __reduce__(self) -> tuple[type[list[int]], tuple[Sequence[int]]]:
        """A pickled table is a list, because another process uses the ids alone."""
        return list, ([*self],)


def block_tables(blocks: Any) -> list[BlockTable]:
    """The table of each of the engine's groups, from its KVCacheBlocks."""
    return [*map(BlockTable, blocks.blocks)]
