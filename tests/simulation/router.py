"""A router that believes an engine's KV events, and a dashboard that adds its statistics up."""

from collections import ChainMap, Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.core.kv_cache_utils import ExternalBlockHash
from vllm.v1.metrics.stats import SchedulerStats

from hybridkv.connector import HybridKVConnector
from hybridkv.connector.stats import HybridKVStats


class Believed(NamedTuple):
    """A block that the engine said its external cache has."""

    parent: ExternalBlockHash | None
    tokens: tuple[int, ...]


class Router:
    """What is believed, by medium and block hash."""

    def __init__(self) -> None:
        self.media: dict[str, dict[ExternalBlockHash, Believed]] = {"CPU": {}, "STORAGE": {}}
        self.was_cleared = False
        """vLLM clears all media at once; a later event may then follow an unknown block."""
        self.counts: Counter[str] = Counter()

    def hear(self, events: Iterable[KVCacheEvent]) -> None:
        """Take a batch; raises AssertionError where it contradicts what was said before."""
        for event in events:
            if isinstance(event, AllBlocksCleared):
                self.was_cleared = True
                for blocks in self.media.values():
                    blocks.clear()
            elif isinstance(event, BlockStored) and event.medium in self.media:
                self._stored(event, self.media[event.medium])
            elif isinstance(event, BlockRemoved) and event.medium in self.media:
                blocks = self.media[event.medium]
                for name in event.block_hashes:
                    assert self.was_cleared or name in blocks, (
                        "a block that was never stored is removed"
                    )
                    blocks.pop(name, None)
                self.counts["heard_removed"] += len(event.block_hashes)

    def _stored(self, event: BlockStored, blocks: dict[ExternalBlockHash, Believed]) -> None:
        size, parent = event.block_size, event.parent_block_hash
        assert parent is None or self.was_cleared or self.reach(event.medium).get(parent), (
            "a hole in a chain of prefixes"
        )
        assert len(event.token_ids) == size * len(event.block_hashes)
        assert event.extra_keys is not None
        assert len(event.extra_keys) == len(event.block_hashes)
        for at, name in enumerate(event.block_hashes):
            assert name not in blocks, "a block is stored twice"
            blocks[name] = Believed(parent, tuple(event.token_ids[at * size : (at + 1) * size]))
            parent = name
        self.counts["heard_stored"] += len(event.block_hashes)
        self.counts["heard_storage"] += len(event.block_hashes) * (event.medium == "STORAGE")

    def reach(self, medium: str | None) -> Mapping[ExternalBlockHash, Believed]:
        """The blocks of a medium, with those of the media above it."""
        below = self.media["STORAGE"] if medium == "STORAGE" else {}
        return ChainMap(self.media["CPU"], below)

    def chains(self, medium: str) -> Iterator[tuple[list[ExternalBlockHash], list[int]]]:
        """(blocks, tokens) of every prefix of which a medium has the last block.

        Those of which vLLM cleared a block are left out.
        """
        believed = self.reach(medium)
        inner = {block.parent for block in believed.values()}
        for name in self.media[medium]:
            names = [name]
            while (parent := believed[names[-1]].parent) in believed:
                assert parent is not None
                names.append(parent)
            assert parent is None or self.was_cleared
            if parent is None and name not in inner:
                names.reverse()
                yield (
                    names,
                    [token for block_hash in names for token in believed[block_hash].tokens],
                )


class Dashboard:
    """Statistics as the API server gets them."""

    def __init__(self) -> None:
        self.stats = HybridKVStats()
        self.hits = 0
        self.by_source: Counter[str] = Counter()

    def take(self, stats: SchedulerStats) -> None:
        """One step's."""
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
        """A payload of the connector's."""
        travelled = HybridKVConnector.build_kv_connector_stats(dict(payload))
        assert isinstance(travelled, HybridKVStats)
        self.stats.aggregate(travelled)

    def check(self, counters: Mapping[str, float], faulted: bool) -> None:
        """Everything that was counted has arrived, once; raises AssertionError.

        Where a hook `faulted`, a load may be of an unknown source: it failed.
        """
        arrived = self.stats.data["counters"]
        assert {name for name, value in counters.items() if value} == set(arrived)
        for name, value in arrived.items():
            assert abs(value - counters[name]) <= 1e-6 * max(1.0, abs(value)), name
        by_tier = sum(
            value for name, value in arrived.items() if name.startswith("tokens_loaded_from_")
        )
        assert by_tier == arrived.get("tokens_loaded", 0)
        assert sum(self.by_source.values()) == self.hits
        assert faulted or not self.by_source["external_unspecified"]
        assert not self.by_source["device"]
