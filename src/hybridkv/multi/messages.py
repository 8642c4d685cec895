"""The messages between MultiConnector's roles. Each has the children's own by their index."""

from collections import Counter
from dataclasses import dataclass, field
from functools import reduce
from typing import NamedTuple

from vllm.distributed.kv_events import KVConnectorKVEvents
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiKVConnectorMetadata

from hybridkv.core.metrics import Metric

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


class ChildMessage(NamedTuple):
    """A child's own message from one worker."""

    child: int
    message: KVConnectorWorkerMetadata


class ChildEvents(NamedTuple):
    """A child's KV events from one worker."""

    child: int
    events: KVConnectorKVEvents


@dataclass
class MultiReport(KVConnectorWorkerMetadata):
    """Workers to scheduler, which merges the messages of each child under that child's guard.

    vLLM aggregates the reports of all workers where nobody supervises a child's code.
    """

    messages: list[ChildMessage] = field(default_factory=list)  # Of all workers.
    events: list[ChildEvents] = field(default_factory=list)  # Of all workers.
    dead: frozenset[int] = frozenset()  # Children that at least one worker has switched off.
    counters: Counter[Metric] = field(default_factory=Counter)
    number: int = 0  # The plan that every rank has carried out.

    def aggregate(self, report: "KVConnectorWorkerMetadata") -> "MultiReport":
        """Returns this worker's report and another's in one, with the messages unmerged."""
        assert isinstance(report, MultiReport)
        return MultiReport(
            messages=[*self.messages, *report.messages],
            events=[*self.events, *report.events],
            dead=self.dead | report.dead,
            counters=self.counters + report.counters,
            number=min(self.number, report.number),
        )

    def message_of(self, child: int) -> KVConnectorWorkerMetadata | None:
        """Returns a child's message, merged by the child's code, which may raise. None = none."""
        messages = [entry.message for entry in self.messages if entry.child == child]
        if not messages:
            return None
        return reduce(lambda merged, message: merged.aggregate(message), messages)

    def events_of(self, child: int) -> KVConnectorKVEvents | None:
        """Returns a child's events, merged by the child's code, which may raise. None = none."""
        events_of_workers = [entry.events for entry in self.events if entry.child == child]
        if not events_of_workers:
            return None
        merged, *rest = events_of_workers
        for events in rest:
            merged.add_events(events.get_all_events())
            merged.increment_workers(1)
        return merged
