"""What the scheduler role knows of one request."""

from dataclasses import dataclass, field
from typing import Any

from hybridkv.connector.metadata import LoadPlan
from hybridkv.core.geometry import Geometry
from hybridkv.core.keys import normalise_hash
from hybridkv.core.requests import State
from hybridkv.wire.messages import Found


@dataclass(eq=False)
class Tracked:
    """One request of the engine."""

    request: Any
    state: State = State.PREFETCHING
    lease: int = 0
    deadline: float = 0.0
    sent: bool = False
    found: Found | None = None
    storable: bool = True
    """False once the identity changed under the request: its blocks are of the old weights, or of both."""
    preemptions: int = 0
    local_tokens: int = 0
    load: LoadPlan = LoadPlan("", ())
    load_tokens: int = 0
    handed_over: bool = False
    """Whether the workers were told about the load and will report it."""
    next_chunk: list[int] = field(default_factory=list)
    """Per attention group: the first chunk whose store is not settled."""
    offered: set[tuple[int, int]] = field(default_factory=set)
    """(group index, chunk) of recurrent states that are stored already."""

    def chunk_hash(self, geometry: Geometry, chunk: int) -> bytes:
        """The name of the prefix that ends with `chunk`."""
        return normalise_hash(self.request.block_hashes[geometry.hash_index(chunk)])
