"""KV events for routers, in vLLM's own format: which prefixes are in the daemon's RAM.

A chunk is announced by the engine's own block hashes, in blocks of its full attention group, so a
router that knows the engine's events for its own memory understands these. The medium is "CPU", for
all groups together: no group index. A chunk that may be gone is withdrawn by its hashes, never by
AllBlocksCleared, which would clear the engine's own memory as well.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from vllm.distributed.kv_events import MEDIUM_CPU, BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.core import kv_cache_utils

from hybridkv.connector.scheduler.announced import AnnouncedChunks
from hybridkv.connector.scheduler.requests import TrackedRequest
from hybridkv.connector.scheduler.stores import StoredObjects
from hybridkv.core.geometry import Geometry, GroupKind
from hybridkv.core.keys import HASH_BYTES
from hybridkv.core.packed import consecutive
from hybridkv.vllm.versions import to_event_extra_keys
from hybridkv.wire.messages import Found, Removed

logger = logging.getLogger("vllm.hybridkv")

BlockName = bytes | int  # A block's hash as vLLM publishes it.
HASHES_MAX = 4096  # Block hashes in one event.


class KVEventPublisher:
    """What was announced, and the events that vLLM has not taken yet: none if it is off."""

    def __init__(self, geometry: Geometry, counters: Counter[str], is_on: bool = True) -> None:
        self._is_on = is_on
        self._geometry = geometry
        self._counters = counters
        full = [group.tokens_per_block for group in geometry.groups if group.kind is GroupKind.FULL]
        self.block_tokens = min(full, default=geometry.chunk_tokens)
        """Tokens of one announced block."""
        self._announced = AnnouncedChunks(geometry)
        self._blocks: dict[bytes, list[BlockName]] = {}
        """The engine's hashes of the blocks in each announced chunk, by the chunk's hash."""
        self._uses: Counter[BlockName] = Counter()
        """Announced chunks that share a block: prompts may differ at the end of a chunk only."""
        self._queue: list[KVCacheEvent] = []

    def update(self, work: Callable[["KVEventPublisher"], None]) -> None:
        """Call `work` with the publisher if it is on; a fault costs what was announced, no more."""
        if not self._is_on:
            return
        try:
            work(self)
        except Exception:
            self._counters["fault_kv_events"] += 1
            logger.exception("hybridkv: KV events failed; what was announced is withdrawn")
            self.lost()

    def stored(self, stored: Iterable[StoredObjects]) -> None:
        """These objects are committed."""
        by_request: dict[TrackedRequest, list[tuple[int, int]]] = {}
        for tracked, group_index, chunks in stored:
            by_request.setdefault(tracked, []).extend((chunk, group_index) for chunk in chunks)
        for tracked, objects in by_request.items():
            hashed = len(tracked.request.block_hashes) * self._geometry.hash_tokens
            hashed = min(hashed, tracked.request.num_tokens - self._geometry.lookahead_tokens)
            # What is stored was computed. The next token may yet be taken back, so no hash that
            # covers it is used.
            count = min(1 + max(chunk for chunk, _ in objects), self._geometry.whole_chunks(hashed))
            self._learn(tracked, _split(tracked.chunk_hashes(self._geometry, 0, count)), objects)

    def found(self, tracked: TrackedRequest, found: Found) -> None:
        """A lookup found these objects in RAM."""
        present = [
            (chunk, index)
            for index, mask in enumerate(found.masks)
            for chunk, is_there in enumerate(mask)
            if is_there
        ]
        self._learn(tracked, _split(tracked.lookup.hashes), present)

    def removed(self, removed: Removed) -> None:
        """RAM has these objects no more."""
        if removed.everything:
            self._counters["removals_overflowed"] += 1
            self.lost()
        for chunk_hash, group_index in zip(_split(removed.hashes), removed.groups, strict=False):
            if group_index < len(self._geometry.groups):
                self._withdraw(self._announced.lose(chunk_hash, group_index))

    def lost(self) -> None:
        """Nothing is known any more: the daemon, or the identity of the bytes, is another one."""
        self._withdraw(self._announced.clear())

    def take(self) -> list[KVCacheEvent]:
        """The events since the last call, in their order."""
        taken, self._queue = self._queue, []
        return taken

    def _learn(
        self, tracked: TrackedRequest, hashes: list[bytes], objects: list[tuple[int, int]]
    ) -> None:
        news = [
            chunk
            for chunk, index in objects
            if chunk < len(hashes) and self._announced.learn(hashes[chunk], index)
        ]
        if not news:
            return
        names = tracked.request.block_hashes
        of_chunk = self._geometry.chunk_tokens // self._geometry.hash_tokens
        of_block = self.block_tokens // self._geometry.hash_tokens
        for chunks in consecutive(self._announced.show(hashes, min(news))):
            blocks: list[BlockName] = []
            for chunk in chunks:
                last = names[chunk * of_chunk + of_block - 1 : (chunk + 1) * of_chunk : of_block]
                self._blocks[hashes[chunk]] = [*map(kv_cache_utils.maybe_convert_block_hash, last)]
                blocks += self._blocks[hashes[chunk]]
            known = next((at for at, one in enumerate(blocks) if not self._uses[one]), len(blocks))
            self._uses.update(blocks)
            self._counters["chunks_announced"] += len(chunks)
            if blocks[known:]:
                start = chunks.start * self._geometry.chunk_tokens + known * self.block_tokens
                self._queue.append(self._event(tracked.request, start, blocks[known:]))

    def _withdraw(self, hashes: Iterable[bytes]) -> None:
        blocks: list[BlockName] = []
        for chunk_hash in hashes:
            self._counters["chunks_withdrawn"] += 1
            for block in self._blocks.pop(chunk_hash, ()):
                self._uses[block] -= 1
                if not self._uses[block]:
                    del self._uses[block]
                    blocks.append(block)
        for at in range(0, len(blocks), HASHES_MAX):
            some = blocks[at : at + HASHES_MAX]
            self._queue.append(BlockRemoved(block_hashes=some, medium=MEDIUM_CPU))

    def _event(self, request: Any, start: int, blocks: list[BlockName]) -> BlockStored:
        tokens = self.block_tokens
        stop = start + len(blocks) * tokens
        extra = [
            kv_cache_utils.generate_block_hash_extra_keys(request, at, at + tokens, 0)[0]
            for at in range(start, stop, tokens)
        ]
        adapter = request.lora_request
        at = start // self._geometry.hash_tokens
        parents = request.block_hashes[at - 1 : at] if at else []
        return BlockStored(
            block_hashes=blocks,
            parent_block_hash=next(map(kv_cache_utils.maybe_convert_block_hash, parents), None),
            token_ids=list(request.all_token_ids[start:stop]),
            block_size=tokens,
            lora_id=adapter.adapter_id if adapter is not None else None,
            medium=MEDIUM_CPU,
            lora_name=adapter.name if adapter is not None else None,
            extra_keys=to_event_extra_keys(extra),
            session_id=request.session_id,
        )


def _split(hashes: bytes) -> list[bytes]:
    return [hashes[at : at + HASH_BYTES] for at in range(0, len(hashes), HASH_BYTES)]
