"""What a worker is configured with."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """One rank's place in its engine, and the settings of the connector that it needs."""

    socket_path: str  # The daemon's.
    engine_id: str
    rank: int
    ranks: int  # Those of all stages.
    checksum: str  # The value of `Settings.checksum`.
    chunk_tokens: int | None = None  # As configured.
    step_tokens: int = 0  # The most that one step computes.
    shm_dir: str | None = None  # As configured.
    stages: int = 1  # Of a pipeline; the ranks of a stage follow each other.
    group: int | None = None  # The daemon may be another user's that belongs to this group.
    nodes: int = 1  # Over which the ranks are spread, as core.geometry.Geometry says.
    shards: int = 0  # Of the KV heads, as core.geometry.Geometry says.

    @property
    def node_ranks(self) -> int:
        """The number of ranks on this node."""
        return self.ranks // self.nodes

    @property
    def node_shards(self) -> int:
        """The shards of the KV heads on this node."""
        return self.shards or self.node_ranks

    @property
    def own_shards(self) -> range:
        """The numbers of this rank's shards among those of its node."""
        count = self.node_shards // self.node_ranks
        first = self.rank % self.node_ranks * count
        return range(first, first + count)

    @property
    def node(self) -> int:
        """The number of this node. 0 = the scheduler's."""
        return self.rank // self.node_ranks

    @property
    def has_relay(self) -> bool:
        """True if this worker passes messages on between the scheduler role and the daemon."""
        return self.nodes > 1 and self.rank % self.node_ranks == 0
