"""What MultiConnector's roles send each other: each child's own message by its index, and ours."""

from collections import Counter
from dataclasses import dataclass, field
from functools import reduce

from vllm.distributed.kv_events import KVConnectorKVEvents
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiKVConnectorMetadata

NOBODY = -1  # The index of a load that no connector does, and which therefore fails.


@dataclass
class MultiPlan(MultiKVConnectorMetadata):
    """Scheduler to workers. `metadata` has None for a child that is switched off."""

    loads: dict[str, int] = field(default_factory=dict)
    """Asynchronous loads that begin: index of the child, or NOBODY, by request."""
    saves: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Requests that ended, with the children that hold their blocks."""
    settled: frozenset[int] = frozenset()
    """Children that are switched off, and whose transfers are waited for no longer."""
    sync_blocks: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Blocks that a child loads within this step."""
    bad_blocks: tuple[int, ...] = ()
    """Blocks of this step that nobody loads, although the engine takes them for loaded."""
    number: int = 0  # Counts the plans from 1 on.


@dataclass
class MultiReport(KVConnectorWorkerMetadata):
    """Workers to scheduler, which merges what each child said under its supervision.

    vLLM aggregates the reports of all workers where nobody supervises a child's code.
    """

    messages: list[tuple[int, KVConnectorWorkerMetadata]] = field(default_factory=list)
    """(child, message) pairs of all workers."""
    events: list[tuple[int, KVConnectorKVEvents]] = field(default_factory=list)
    """(child, KV events) pairs of all workers."""
    dead: frozenset[int] = frozenset()  # Children that some worker has switched off.
    counters: Counter[str] = field(default_factory=Counter)
    number: int = 0  # The plan that every rank has carried out.

    def aggregate(self, other: "KVConnectorWorkerMetadata") -> "MultiReport":
        """The report of both."""
        assert isinstance(other, MultiReport)
        return MultiReport(
            [*self.messages, *other.messages],
            [*self.events, *other.events],
            self.dead | other.dead,
            self.counters + other.counters,
            min(self.number, other.number),
        )

    def message_of(self, index: int) -> KVConnectorWorkerMetadata | None:
        """One child's message, merged by the child's code, whatever that raises; None = none."""
        mine = [message for child, message in self.messages if child == index]
        return reduce(lambda one, other: one.aggregate(other), mine) if mine else None

    def events_of(self, index: int) -> KVConnectorKVEvents | None:
        """One child's events, merged by the child's code, whatever that raises; None = none."""
        mine = [events for child, events in self.events if child == index]
        for more in mine[1:]:
            mine[0].add_events(more.get_all_events())
            mine[0].increment_workers(1)
        return mine[0] if mine else None
