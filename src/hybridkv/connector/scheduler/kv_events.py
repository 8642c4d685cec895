"""KV events for routers, in vLLM's own format: which prefixes a lookup on this node would find.

A chunk is announced by the engine's own block hashes, in blocks of its full attention group, so a
router that knows the engine's events for its own memory understands these. The medium is "CPU"
where a hit needs the daemon's RAM alone, and "STORAGE" where it needs a tier below too. An event is
sent when all groups have what a hit needs, and names the group of full attention, whose blocks it
lists. A chunk that may be gone is withdrawn by its hashes, never by AllBlocksCleared, which would
clear the engine's own memory as well.
"""

import contextlib
import logging
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

from vllm.distributed.kv_events import (
    MEDIUM_CPU,
    MEDIUM_STORAGE,
    BlockRemoved,
    BlockStored,
    KVCacheEvent,
)
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind

from hybridkv.connector.scheduler.announced import AnnouncedChunks
from hybridkv.connector.scheduler.requests import TrackedRequest
from hybridkv.connector.scheduler.stores import StoredObjects
from hybridkv.core.geometry import Geometry, Group, GroupKind
from hybridkv.core.keys import HASH_BYTES
from hybridkv.vllm.versions import to_event_extra_keys
from hybridkv.wire.messages import Found, Removed

logger = logging.getLogger("vllm.hybridkv")

BlockName = bytes | int  # A block's hash as vLLM publishes it.
HASHES_MAX = 4096  # Block hashes in one event.
TOKENS_MAX = 1 << 24
"""Tokens of announced chunks that are kept, 4 bytes each, because an event of another medium
repeats them; chunks beyond are announced in RAM only."""


class EventGroup(NamedTuple):
    """The group whose blocks events list, as vLLM's own events name it."""

    gid: int | None = None
    kind: str | None = None


NO_GROUP = EventGroup()


def event_group(geometry: Geometry, specs: Sequence[Any]) -> EventGroup:
    """That of full attention with the smallest blocks; `specs` are vLLM's, of all its groups."""
    group = _listed(geometry)
    if group is None:
        return NO_GROUP
    return EventGroup(group.gid, get_kv_cache_spec_kind(specs[group.gid]).value)


class AnnouncedBlocks(NamedTuple):
    """The engine's blocks in an announced chunk, and what an event says of them."""

    names: list[BlockName]
    parent: BlockName | None  # The block before.
    tokens: Sequence[int]  # Empty where TOKENS_MAX are kept.
    extra_keys: list[Any]  # For each block.
    adapter: tuple[int | None, str | None]  # The id and the name of a LoRA adapter.
    session_id: str | None


class KVEventPublisher:
    """What was announced, and the events that vLLM has not taken yet: none if it is off."""

    def __init__(
        self,
        geometry: Geometry,
        counters: Counter[str],
        is_on: bool = True,
        group: EventGroup = NO_GROUP,
    ) -> None:
        self._is_on = is_on
        self._geometry = geometry
        self._counters = counters
        self._group = group
        listed = _listed(geometry)
        self.block_tokens = geometry.chunk_tokens if listed is None else listed.tokens_per_block
        """Tokens of one announced block."""
        self._in_ram = AnnouncedChunks(geometry)
        self._anywhere = AnnouncedChunks(geometry)
        """What hits from RAM and tiers need: with `_in_ram` in the medium "CPU", else "STORAGE"."""
        self._told: dict[str, dict[bytes, None]] = {MEDIUM_CPU: {}, MEDIUM_STORAGE: {}}
        """The chunks that are announced, by medium, in the order of their events."""
        self._blocks: dict[bytes, AnnouncedBlocks] = {}  # Of announced chunks, by the chunk's hash.
        self._kept_tokens = 0
        self._uses: dict[str, Counter[BlockName]] = {
            MEDIUM_CPU: Counter(),
            MEDIUM_STORAGE: Counter(),
        }
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
        told = zip_longest(removed.groups, removed.below, fillvalue=0)
        for chunk_hash, (group_index, is_below) in zip(_split(removed.hashes), told, strict=False):
            if group_index >= len(self._geometry.groups):
                continue
            blocks = self._blocks.get(chunk_hash)
            from_ram = self._in_ram.lose(chunk_hash, group_index)
            # A chunk that cannot be described again is as good as gone.
            is_below = is_below and (blocks is None or bool(blocks.tokens))
            gone = [] if is_below else self._anywhere.lose(chunk_hash, group_index)
            self._withdraw(from_ram, gone)

    def lost(self) -> None:
        """Nothing is known any more: the daemon, or the identity of the bytes, is another one."""
        self._in_ram.clear()
        self._anywhere.clear()
        for medium, told in self._told.items():
            self._tell_removed(medium, list(told))
        self._blocks.clear()
        self._kept_tokens = 0

    def take(self) -> list[KVCacheEvent]:
        """The events since the last call, in their order."""
        taken, self._queue = self._queue, []
        return taken

    def _learn(
        self, tracked: TrackedRequest, hashes: list[bytes], objects: list[tuple[int, int]]
    ) -> None:
        news: list[int] = []
        not_shown: set[int] = set()
        for chunk, index in objects:
            if chunk >= len(hashes):
                continue
            if self._in_ram.learn(hashes[chunk], index):
                news.append(chunk)
                self._anywhere.learn(hashes[chunk], index)
            elif not self._in_ram.knows(hashes[chunk]):
                not_shown.add(chunk)
        if not_shown:
            self._counters["chunks_not_shown"] += len(not_shown)
        if not news:
            return
        in_ram = self._in_ram.show(hashes, min(news))
        anywhere = self._anywhere.show(hashes, min(news))
        below = [chunk for chunk in anywhere if hashes[chunk] not in self._in_ram]
        fresh = {hashes[chunk]: chunk for chunk in (*in_ram, *below)}
        fresh = {one: chunk for one, chunk in fresh.items() if one not in self._blocks}
        self._blocks |= {one: self._describe(tracked.request, at) for one, at in fresh.items()}
        self._tell_stored(MEDIUM_CPU, [hashes[chunk] for chunk in in_ram])
        self._tell_removed(MEDIUM_STORAGE, [hashes[chunk] for chunk in reversed(in_ram)])
        self._tell_stored(MEDIUM_STORAGE, [hashes[chunk] for chunk in below])
        for one in fresh:
            self._keep(one)

    def _withdraw(self, from_ram: list[bytes], gone: list[bytes]) -> None:
        """Chunks are in RAM no more, or nowhere: withdraw them, or announce them below RAM."""
        below = [one for one in reversed(from_ram) if one in self._anywhere]
        self._tell_stored(MEDIUM_STORAGE, below)
        self._tell_removed(MEDIUM_CPU, from_ram)
        self._tell_removed(MEDIUM_STORAGE, gone)
        for one in (*from_ram, *gone):
            if one in self._blocks and not any(one in told for told in self._told.values()):
                self._kept_tokens -= len(self._blocks.pop(one).tokens)

    def _keep(self, one: bytes) -> None:
        """Keep the tokens of a chunk that was just announced, if there is room for them.

        They are of no use where `_anywhere` had no room for the chunk.
        """
        blocks, kept = self._blocks[one], array("I")
        has_room = self._kept_tokens + len(blocks.tokens) <= TOKENS_MAX
        if has_room and one in self._anywhere:
            # A request may have tokens that there are not.
            with contextlib.suppress(TypeError, OverflowError):
                kept = array("I", blocks.tokens)
        self._blocks[one] = blocks._replace(tokens=kept)
        if not kept:
            self._counters["chunks_not_kept"] += 1
        self._kept_tokens += len(kept)

    def _tell_stored(self, medium: str, chunks: Iterable[bytes]) -> None:
        """Announce chunks, the prefix first; those that follow each other are one event."""
        uses = self._uses[medium]
        event: BlockStored | None = None
        for one in chunks:
            blocks = self._blocks.get(one)
            has_parent = blocks is not None and (
                blocks.parent is None or any(uses[blocks.parent] for uses in self._uses.values())
            )
            if blocks is None or not blocks.tokens or not has_parent:
                continue
            self._told[medium][one] = None
            self._counters["chunks_announced"] += 1
            names = blocks.names
            known = next((at for at, name in enumerate(names) if not uses[name]), len(names))
            uses.update(names)
            fresh = self._event(medium, blocks, known)
            if not fresh.block_hashes:
                event = None
            elif event is not None and event.block_hashes[-1] == fresh.parent_block_hash:
                event.block_hashes += fresh.block_hashes
                event.token_ids += fresh.token_ids
                event.extra_keys += fresh.extra_keys
            else:
                event = fresh
                self._queue.append(event)

    def _tell_removed(self, medium: str, chunks: Iterable[bytes]) -> None:
        """Withdraw those of some chunks that are announced in the medium."""
        uses, gone = self._uses[medium], []
        for one in chunks:
            if one not in self._told[medium]:
                continue
            del self._told[medium][one]
            self._counters["chunks_withdrawn"] += 1
            for name in self._blocks[one].names:
                uses[name] -= 1
                if not uses[name]:
                    del uses[name]
                    gone.append(name)
        for at in range(0, len(gone), HASHES_MAX):
            some = gone[at : at + HASHES_MAX]
            event = BlockRemoved(block_hashes=some, medium=medium, group_idx=self._group.gid)
            self._queue.append(event)

    def _describe(self, request: Any, chunk: int) -> AnnouncedBlocks:
        """The blocks of a chunk of a request."""
        size, hashed = self.block_tokens, self._geometry.hash_tokens
        start, stop = (at * self._geometry.chunk_tokens for at in (chunk, chunk + 1))
        names = request.block_hashes[(start + size) // hashed - 1 : stop // hashed : size // hashed]
        parents = request.block_hashes[start // hashed - 1 : start // hashed] if chunk else []
        extra = [
            kv_cache_utils.generate_block_hash_extra_keys(request, at, at + size, 0)[0]
            for at in range(start, stop, size)
        ]
        adapter = request.lora_request
        return AnnouncedBlocks(
            [*map(kv_cache_utils.maybe_convert_block_hash, names)],
            next(map(kv_cache_utils.maybe_convert_block_hash, parents), None),
            request.all_token_ids[start:stop],
            to_event_extra_keys(extra) or [],
            (adapter.adapter_id, adapter.name) if adapter is not None else (None, None),
            request.session_id,
        )

    def _event(self, medium: str, blocks: AnnouncedBlocks, first: int) -> BlockStored:
        """The event of a chunk's blocks from number `first` on."""
        return BlockStored(
            block_hashes=blocks.names[first:],
            parent_block_hash=blocks.names[first - 1] if first else blocks.parent,
            token_ids=list(blocks.tokens[first * self.block_tokens :]),
            block_size=self.block_tokens,
            lora_id=blocks.adapter[0],
            medium=medium,
            lora_name=blocks.adapter[1],
            extra_keys=blocks.extra_keys[first:],
            group_idx=self._group.gid,
            kv_cache_spec_kind=self._group.kind,
            session_id=blocks.session_id,
        )


def _listed(geometry: Geometry) -> Group | None:
    """The group whose blocks events list; None where no layer has full attention."""
    full = [group for group in geometry.groups if group.kind is GroupKind.FULL]
    return min(full, key=lambda group: group.tokens_per_block, default=None)


def _split(hashes: bytes) -> list[bytes]:
    return [hashes[at : at + HASH_BYTES] for at in range(0, len(hashes), HASH_BYTES)]
