"""What MultiConnector's roles send each other: each child's own message by its index, and ours."""

from dataclasses import dataclass, field
from functools import reduce
from typing import Any

from vllm.distributed.kv_events import KVConnectorKVEvents
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiKVConnectorMetadata


@dataclass
class MultiPlan(MultiKVConnectorMetadata):
    """Scheduler to workers. `metadata` has None for a child that is switched off."""

    loads: dict[str, int] = field(default_factory=dict)
    """Asynchronous loads that begin: index of the child by request."""
    saves: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Requests that ended, with the children that hold their blocks."""
    failed: tuple[str, ...] = ()
    """Loads that workers report as failed, whatever the child says."""
    let_go: tuple[tuple[int, str], ...] = ()
    """(child, request) of saves that are waited for no longer."""
    sync_blocks: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Blocks that a child loads within this step."""
    bad_blocks: tuple[int, ...] = ()
    """Blocks of this step that nobody loads, although the engine takes them for loaded."""


@dataclass
class MultiReport(KVConnectorWorkerMetadata):
    """Workers to scheduler, which merges the messages of each child under its supervision."""

    messages: list[tuple[int, KVConnectorWorkerMetadata]] = field(default_factory=list)
    """(child, message) pairs of all workers."""
    dead: frozenset[int] = frozenset()
    """Children that some worker has switched off."""
    counters: dict[str, int] = field(default_factory=dict)

    def aggregate(self, other: "KVConnectorWorkerMetadata") -> "MultiReport":
        """The report of both."""
        assert isinstance(other, MultiReport)
        names = [*self.counters, *other.counters]
        sums = {n: self.counters.get(n, 0) + other.counters.get(n, 0) for n in names}
        return MultiReport([*self.messages, *other.messages], self.dead | other.dead, sums)

    def of(self, index: int) -> KVConnectorWorkerMetadata | None:
        """One child's message, merged by the child's code, whatever that raises; None = none."""
        mine = [message for child, message in self.messages if child == index]
        return reduce(lambda one, other: one.aggregate(other), mine) if mine else None


@dataclass(frozen=True)
class MultiHandshake(KVConnectorHandshakeMetadata):
    """A worker's handshake: each child's own (vLLM gives the first one to all)."""

    metadata: tuple[KVConnectorHandshakeMetadata | None, ...]


class MultiEvents(KVConnectorKVEvents):
    """The children's KV events of all workers as (child, events) pairs.

    vLLM adds workers' events up where nobody supervises a child, so this calls no child's code.
    """

    def __init__(self, pairs: list[tuple[int, KVConnectorKVEvents]]) -> None:
        self.pairs = pairs

    def add_events(self, events: list[Any]) -> None:
        """Add the pairs of another worker."""
        self.pairs += events

    def aggregate(self) -> "MultiEvents":
        """The same, because `of` merges each child's events."""
        return self

    def increment_workers(self, count: int = 1) -> None:
        """Nothing, because `of` does it child by child."""

    def get_all_events(self) -> list[Any]:
        """The pairs."""
        return self.pairs

    def get_number_of_workers(self) -> int:
        """The most workers that reported events of one child."""
        children = [child for child, _ in self.pairs]
        return max(map(children.count, children), default=0)

    def clear_events(self) -> None:
        """Forget everything."""
        self.pairs = []

    def of(self, index: int) -> KVConnectorKVEvents | None:
        """One child's events, merged by the child's code, whatever that raises; None = none."""
        mine = [events for child, events in self.pairs if child == index]
        for more in mine[1:]:
            mine[0].add_events(more.get_all_events())
            mine[0].increment_workers(1)
        return mine[0] if mine else None
