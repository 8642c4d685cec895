"""KV events for routers, in vLLM's own format: which prefixes this engine would find in the daemon's RAM.

A chunk is announced in the engine's own block hashes, cut as its full attention group's blocks are, so a router that
knows the engine's events for its own memory knows these.  The medium is "CPU", for all groups together: no group index.
What is not known for sure is withdrawn; never by AllBlocksCleared, which would clear the engine's own memory as well.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from vllm.distributed.kv_events import MEDIUM_CPU, BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    ExternalBlockHash,
    generate_block_hash_extra_keys,
    maybe_convert_block_hash,
    to_event_extra_keys,
)

from hybridkv.connector.stores import Stored
from hybridkv.connector.tracked import Tracked
from hybridkv.core.announced import Announced
from hybridkv.core.geometry import Geometry, Kind
from hybridkv.core.keys import HASH_BYTES
from hybridkv.wire.messages import Found, Removed

HASHES_MAX = 4096
"""In one event."""


class Events:
    """What was announced, and the events that vLLM has not taken yet."""

    def __init__(self, geometry: Geometry, counters: Counter[str]) -> None:
        self._geometry = geometry
        self._counters = counters
        full = [group.tokens_per_block for group in geometry.groups if group.kind is Kind.FULL]
        self.block_tokens = min(full, default=geometry.chunk_tokens)
        """Tokens of one announced block."""
        self._announced = Announced(geometry)
        self._names: dict[bytes, list[ExternalBlockHash]] = {}
        """The engine's hashes of the blocks in each announced chunk, by the daemon's name of it."""
        self._uses: Counter[ExternalBlockHash] = Counter()
        """Announced chunks that a block is in: prompts that differ inside a chunk share the blocks before."""
        self._queue: list[KVCacheEvent] = []

    def stored(self, stored: Iterable[Stored]) -> None:
        """Objects are committed."""
        by_request: dict[Tracked, list[tuple[int, int]]] = {}
        for tracked, group_index, chunks in stored:
            by_request.setdefault(tracked, []).extend((chunk, group_index) for chunk in chunks)
        for tracked, objects in by_request.items():
            named = len(tracked.request.block_hashes) * self._geometry.hash_tokens
            # What is stored was computed. The token behind it may yet be taken back, so nothing is named by it.
            count = min(1 + max(chunk for chunk, _ in objects), self._geometry.whole_chunks(named))
            self._learn(tracked, _cut(tracked.chunk_hashes(self._geometry, 0, count)), objects)

    def found(self, tracked: Tracked, found: Found) -> None:
        """RAM has these objects."""
        keys = _cut(tracked.asked)
        chunks = range(len(keys))
        present = [
            (chunk, index) for index, mask in enumerate(found.masks) for chunk in chunks[: len(mask)] if mask[chunk]
        ]
        self._learn(tracked, keys, present)

    def removed(self, removed: Removed) -> None:
        """RAM has objects no more."""
        if removed.everything:
            self._counters["removals_overflowed"] += 1
            self.lost()
        for key, group_index in zip(_cut(removed.hashes), removed.groups, strict=False):
            if group_index < len(self._geometry.groups):
                self._withdraw(self._announced.lose(key, group_index))

    def lost(self) -> None:
        """Nothing is known any more: the daemon, or what the bytes belong to, is another one."""
        self._withdraw(self._announced.clear())

    def take(self) -> list[KVCacheEvent]:
        """Events since the last time, in their order."""
        taken, self._queue = self._queue, []
        return taken

    def _learn(self, tracked: Tracked, keys: list[bytes], objects: list[tuple[int, int]]) -> None:
        news = [chunk for chunk, index in objects if chunk < len(keys) and self._announced.learn(keys[chunk], index)]
        if not news:
            return
        for chunks in _runs(self._announced.show(keys, min(news))):
            names: list[ExternalBlockHash] = []
            for chunk in chunks:
                self._names[keys[chunk]] = self._blocks(tracked.request, chunk)
                names += self._names[keys[chunk]]
            known = next((at for at, name in enumerate(names) if not self._uses[name]), len(names))
            self._uses.update(names)
            self._counters["chunks_announced"] += len(chunks)
            if names[known:]:
                start = chunks.start * self._geometry.chunk_tokens + known * self.block_tokens
                self._queue.append(self._event(tracked.request, start, names[known:]))

    def _withdraw(self, keys: Iterable[bytes]) -> None:
        names: list[ExternalBlockHash] = []
        for key in keys:
            self._counters["chunks_withdrawn"] += 1
            for name in self._names.pop(key, ()):
                self._uses[name] -= 1
                if not self._uses[name]:
                    del self._uses[name]
                    names.append(name)
        for at in range(0, len(names), HASHES_MAX):
            self._queue.append(BlockRemoved(block_hashes=names[at : at + HASHES_MAX], medium=MEDIUM_CPU))

    def _event(self, request: Any, start: int, names: list[ExternalBlockHash]) -> BlockStored:
        stop = start + len(names) * self.block_tokens
        blocks = range(start, stop, self.block_tokens)
        extra = [generate_block_hash_extra_keys(request, at, at + self.block_tokens, 0)[0] for at in blocks]
        adapter = request.lora_request
        return BlockStored(
            block_hashes=names,
            parent_block_hash=self._hash_before(request, start),
            token_ids=list(request.all_token_ids[start:stop]),
            block_size=self.block_tokens,
            lora_id=adapter.adapter_id if adapter is not None else None,
            medium=MEDIUM_CPU,
            lora_name=adapter.name if adapter is not None else None,
            extra_keys=to_event_extra_keys(extra),
            session_id=request.session_id,
        )

    def _blocks(self, request: Any, chunk: int) -> list[ExternalBlockHash]:
        hashes = self._geometry.chunk_tokens // self._geometry.hash_tokens
        step = self.block_tokens // self._geometry.hash_tokens
        first = chunk * hashes + step - 1
        return [maybe_convert_block_hash(name) for name in request.block_hashes[first : (chunk + 1) * hashes : step]]

    def _hash_before(self, request: Any, tokens: int) -> ExternalBlockHash | None:
        if not tokens:
            return None
        name: BlockHash = request.block_hashes[tokens // self._geometry.hash_tokens - 1]
        return maybe_convert_block_hash(name)


def _cut(hashes: bytes) -> list[bytes]:
    return [hashes[at : at + HASH_BYTES] for at in range(0, len(hashes), HASH_BYTES)]


def _runs(numbers: list[int]) -> Iterator[range]:
    """Ranges of consecutive numbers."""
    start = 0
    for at in range(1, len(numbers) + 1):
        if at == len(numbers) or numbers[at] != numbers[at - 1] + 1:
            yield range(numbers[start], numbers[at - 1] + 1)
            start = at
