"""What MultiConnector's roles tell each other: each child's own message in its place, and what is ours."""

import contextlib
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_events import KVConnectorKVEvents
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata, KVConnectorWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiKVConnectorMetadata

logger = logging.getLogger("vllm.hybridkv")


@dataclass
class MultiPlan(MultiKVConnectorMetadata):
    """Scheduler to workers. `metadata` has None for a child that is switched off."""

    loads: dict[str, int] = field(default_factory=dict)
    """Asynchronous loads that begin: request, place of the child."""
    saves: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Requests that ended and whose blocks these children hold."""
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
    """Workers to scheduler."""

    metadata: tuple[KVConnectorWorkerMetadata | None, ...]
    dead: frozenset[int] = frozenset()
    """Children that some worker has switched off."""
    counters: dict[str, int] = field(default_factory=dict)

    def aggregate(self, other: "KVConnectorWorkerMetadata") -> "MultiReport":
        """Of both; a child whose messages cannot be put together has none."""
        assert isinstance(other, MultiReport)
        counters = {name: self.counters.get(name, 0) + other.counters.get(name, 0) for name in self.counters}
        return MultiReport(
            tuple(map(_aggregate, self.metadata, other.metadata)),
            self.dead | other.dead,
            {**other.counters, **counters},
        )


@dataclass(frozen=True)
class MultiHandshake(KVConnectorHandshakeMetadata):
    """A worker's handshake: each child's own (vLLM's hands the first one to all)."""

    metadata: tuple[KVConnectorHandshakeMetadata | None, ...]


class MultiEvents(KVConnectorKVEvents):
    """A worker's KV events: each child's own, and put together child by child."""

    def __init__(self, children: Mapping[int, KVConnectorKVEvents]) -> None:
        self.children = dict(children)

    def add_events(self, events: list[Any]) -> None:
        """(place, events) pairs of another worker."""
        for place, more in events:
            mine = self.children.setdefault(place, more)
            if mine is not more:
                with self._of(place):
                    mine.add_events(more.get_all_events())
                    mine.increment_workers(1)

    def aggregate(self) -> "MultiEvents":
        """Each child's, as the child does."""
        together: dict[int, KVConnectorKVEvents] = {}
        for place, events in list(self.children.items()):
            with self._of(place):
                together[place] = events.aggregate()
        return MultiEvents(together)

    def increment_workers(self, count: int = 1) -> None:
        """Done child by child in add_events."""

    def get_all_events(self) -> list[Any]:
        """(place, events) pairs."""
        return list(self.children.items())

    def get_number_of_workers(self) -> int:
        """Of the child that has the most."""
        numbers = [0]
        for place, events in list(self.children.items()):
            with self._of(place):
                numbers.append(events.get_number_of_workers())
        return max(numbers)

    def clear_events(self) -> None:
        """All of them."""
        for place, events in list(self.children.items()):
            with self._of(place):
                events.clear_events()

    @contextlib.contextmanager
    def _of(self, place: int) -> Iterator[None]:
        """Around a child's code, in the engine's loop: one that raises has no events."""
        try:
            yield
        except Exception:
            events = self.children.pop(place, None)
            logger.exception("hybridkv: %s of several workers cannot be put together", type(events).__name__)


def _aggregate(
    one: KVConnectorWorkerMetadata | None, other: KVConnectorWorkerMetadata | None
) -> KVConnectorWorkerMetadata | None:
    if one is None or other is None:
        return one or other
    try:
        return one.aggregate(other)
    except Exception:  # a child's code, in the engine's loop
        logger.exception("hybridkv: %s of several workers cannot be put together", type(one).__name__)
        return None
