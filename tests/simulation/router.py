"""A router that believes an engine's KV events, and a dashboard that adds up its statistics."""

from collections import ChainMap, Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.core.kv_cache_utils import ExternalBlockHash
from vllm.v1.metrics.stats import SchedulerStats

from hybridkv.connector import HybridKVConnector
from hybridkv.connector.metrics import TOKENS_LOADED
from hybridkv.connector.stats import HybridKVStats
from hybridkv.core.metrics import Metric


class AnnouncedBlock(NamedTuple):
    """A block that the engine said its external cache has."""

    parent: ExternalBlockHash | None
    tokens: tuple[int, ...]
    is_cleared: bool = False  # Whether vLLM cleared it since, which the connector is not told.


class AnnouncedPrefix(NamedTuple):
    """A prefix whose blocks a medium has, as the engine's events say."""

    block_hashes: list[ExternalBlockHash]
    tokens: list[int]


class Router:
    """The announced blocks, by medium and block hash."""

    def __init__(self) -> None:
        self.media: dict[str, dict[ExternalBlockHash, AnnouncedBlock]] = {"CPU": {}, "STORAGE": {}}
        self.counts: Counter[str] = Counter()

    def hear(self, events: Iterable[KVCacheEvent]) -> None:
        """Take a batch of events. Raises AssertionError where it contradicts earlier ones."""
        for event in events:
            if isinstance(event, AllBlocksCleared):
                for blocks in self.media.values():
                    blocks |= {
                        name: block._replace(is_cleared=True) for name, block in blocks.items()
                    }
            elif isinstance(event, BlockStored) and event.medium in self.media:
                self._on_stored(event, self.media[event.medium])
            elif isinstance(event, BlockRemoved) and event.medium in self.media:
                blocks = self.media[event.medium]
                for name in event.block_hashes:
                    assert name in blocks, "a block that was never stored is removed"
                    del blocks[name]
                self.counts["heard_removed"] += len(event.block_hashes)

    def _on_stored(
        self, event: BlockStored, blocks: dict[ExternalBlockHash, AnnouncedBlock]
    ) -> None:
        size, parent = event.block_size, event.parent_block_hash
        assert parent is None or parent in self.reach(event.medium), "a hole in a chain of prefixes"
        assert len(event.token_ids) == size * len(event.block_hashes)
        assert event.extra_keys is not None
        assert len(event.extra_keys) == len(event.block_hashes)
        for at, name in enumerate(event.block_hashes):
            tokens = tuple(event.token_ids[at * size : (at + 1) * size])
            known = blocks.get(name)
            is_repeated = known is not None
            assert known is None or (known.parent, known.tokens) == (parent, tokens), (
                "a block is stored anew as another one"
            )
            blocks[name] = AnnouncedBlock(parent, tokens)
            parent = name
            self.counts["heard_repeated" if is_repeated else "heard_stored"] += 1
            self.counts["heard_storage"] += not is_repeated and event.medium == "STORAGE"

    def reach(self, medium: str | None) -> Mapping[ExternalBlockHash, AnnouncedBlock]:
        """The blocks of a medium, with those of the media above it."""
        below = self.media["STORAGE"] if medium == "STORAGE" else {}
        return ChainMap(self.media["CPU"], below)

    def chains(self, medium: str) -> Iterator[AnnouncedPrefix]:
        """Yields every prefix of which a medium has the last block.

        Left out are prefixes of which vLLM cleared a block, or the block after them.
        """
        announced = self.reach(medium)
        inner = {block.parent for block in announced.values()}
        for name in self.media[medium]:
            names = [name]
            while (parent := announced[names[-1]].parent) is not None:
                names.append(parent)
            is_cleared = any(announced[name].is_cleared for name in names)
            if not is_cleared and name not in inner:
                names.reverse()
                tokens = [token for name in names for token in announced[name].tokens]
                yield AnnouncedPrefix(names, tokens)


class Dashboard:
    """Statistics as the API server gets them."""

    def __init__(self) -> None:
        self.stats = HybridKVStats()
        self.hits = 0
        self.by_source: Counter[str] = Counter()

    def take(self, stats: SchedulerStats) -> None:
        """Add the statistics of one step."""
        if stats.kv_connector_stats is not None:
            self.add(stats.kv_connector_stats)
        connector = stats.connector_prefix_cache_stats
        if connector is not None:
            self.hits += connector.hits
            # vLLM 0.31 and older do not ask where hits come from.
            sources = getattr(connector, "hits_by_source", {"all": connector.hits})
            assert all(tokens > 0 for tokens in sources.values() if connector.hits)
            self.by_source.update(
                {getattr(source, "value", source): tokens for source, tokens in sources.items()}
            )

    def add(self, payload: Mapping[str, Any]) -> None:
        """Add a payload of the connector, as it comes out of another process."""
        travelled = HybridKVConnector.build_kv_connector_stats(dict(payload))
        assert isinstance(travelled, HybridKVStats)
        self.stats.aggregate(travelled)

    def check(self, counters: Mapping[Metric, float], faulted: bool) -> None:
        """Check that each count of `counters` has arrived exactly once.

        After a fault of a hook (`faulted`) a load that failed may have no known source.
        """
        arrived = self.stats.counters
        assert {metric for metric, value in counters.items() if value} == set(arrived)
        for metric, value in arrived.items():
            assert abs(value - counters[metric]) <= 1e-6 * max(1.0, abs(value)), metric
        by_tier = sum(
            value for metric, value in arrived.items() if metric.family == "loaded_tokens_by_tier"
        )
        assert by_tier == arrived.get(TOKENS_LOADED, 0)
        assert sum(self.by_source.values()) == self.hits
        assert faulted or not self.by_source["external_unspecified"]
        assert not self.by_source["device"]
