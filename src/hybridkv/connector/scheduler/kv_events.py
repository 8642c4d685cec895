"""KV events for routers, in vLLM's own format: which prefixes a lookup on this node would find.

A chunk is announced by the engine's own block hashes, in blocks of its full attention group. A
router that understands the engine's events about its own memory therefore understands these too.
The medium is "CPU" where a hit needs the daemon's RAM alone, and "STORAGE" where it needs a tier
below RAM too. An event is sent once all groups have what a hit needs. It names no group, because
some routers pass over all groups but the first, and there are no events about any other group. A
chunk that may be gone is withdrawn by its hashes, never by AllBlocksCleared, which would clear the
engine's own memory as well.

An engine knows of chunks by its own stores and lookups, and by what the daemon announces to it. It
describes its own chunks to the daemon, for other engines and for itself after a restart.
"""

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice, zip_longest
from types import MappingProxyType
from typing import Any, NamedTuple

from vllm.distributed.kv_events import (
    MEDIUM_CPU,
    MEDIUM_STORAGE,
    BlockRemoved,
    BlockStored,
    KVCacheEvent,
)
from vllm.v1.core import kv_cache_utils

from hybridkv.connector import metrics
from hybridkv.connector.scheduler.announced import AnnouncedChunks
from hybridkv.connector.scheduler.descriptions import (
    AnnouncedBlocks,
    BlockName,
    decode_blocks,
    encode_blocks,
    is_description,
)
from hybridkv.connector.scheduler.listeners import EngineIdentity, Listener
from hybridkv.connector.scheduler.requests import TrackedRequest
from hybridkv.core.geometry import Geometry, Group, GroupKind
from hybridkv.core.keys import unpack_hashes
from hybridkv.core.metrics import Metric
from hybridkv.core.sharded import ShardedDict
from hybridkv.vllm.hook_guard import fault
from hybridkv.vllm.versions import to_event_extra_keys
from hybridkv.wire import messages as wire
from hybridkv.wire.messages import (
    DESCRIPTION_BYTES_MAX,
    IN_RAM,
    NO_PARENT,
    Announced,
    Describe,
    Found,
    Removed,
)

logger = logging.getLogger("vllm.hybridkv")

HASHES_MAX = 4096  # Block hashes in one event.
KEPT_BYTES_MAX = 96 << 20
"""Bytes of what is kept of announced chunks, with 4 for each token, for an event about another
medium. Chunks whose tokens are not kept are announced in RAM only."""
READ_BYTES, IDLE_READ_BYTES = 4 << 10, 64 << 10
"""Bytes of descriptions that one step takes of the daemon, with requests and without any."""
DESCRIBED_MAX = 32  # Chunks that one message describes.
WITHDRAWN_MAX, IDLE_WITHDRAWN_MAX = 1024, 16384
"""Blocks that one step withdraws where all are, with requests and without any. A million of them
in one step would take a second."""
FREED_MAX = 2  # Parts of dictionaries that one step frees.
REPEATABLE_MAX = 64  # Announced chunks of which one is looked for whose event can be sent again.
REPEAT_SECONDS, REPEAT_SECONDS_MAX = 4.0, 600.0
"""Times without an event after which one is sent again; each is twice the one before."""


class PresentObjects(NamedTuple):
    """Objects of one group that are known to be in RAM."""

    group_index: int
    chunks: Sequence[int]  # The numbers of their chunks in the prompt.


class MediumBlocks:
    """The blocks that routers believe a medium to have."""

    def __init__(self) -> None:
        self.uses = ShardedDict[BlockName, int]()
        """How many announced chunks have each block."""
        self.leaving = ShardedDict[BlockName, int]()
        """Blocks that no announced chunk has, and that are not withdrawn yet."""

    def __contains__(self, name: BlockName) -> bool:
        return name in self.uses

    def count_use(self, name: BlockName) -> None:
        """One more chunk has the block."""
        self.uses[name] = self.uses.get(name, 0) + 1
        if self.leaving:
            self.leaving.pop(name, None)

    def end_use(self, name: BlockName) -> bool:
        """One chunk less has the block. Returns True if it was the last one."""
        self.uses[name] -= 1
        if is_last := not self.uses[name]:
            del self.uses[name]
        return is_last

    def end_all_uses(self) -> None:
        """Let all blocks leave."""
        small, large = sorted((self.uses, self.leaving), key=len)
        large.update(small)
        self.uses, self.leaving = ShardedDict(), large


class KVEventPublisher(Listener):
    """The announced chunks, and events that vLLM has not taken yet. There are none if it is off."""

    def __init__(self, geometry: Geometry, counters: Counter[Metric], is_on: bool = True) -> None:
        self.is_on = is_on
        """True if vLLM publishes KV events."""
        self._geometry = geometry
        self._counters = counters
        listed = _listed(geometry)
        self.block_tokens = geometry.chunk_tokens if listed is None else listed.tokens_per_block
        """Tokens of one announced block."""
        self._repeats_parents = (
            min(geometry.groups, key=lambda group: group.gid).kind is not GroupKind.FULL
        )
        """True if the event of the chunk before is repeated before an event, so that routers know
        where it is. vLLM's own events of states have more tokens than blocks, and vllm-router,
        which reads those of the first group, takes the first tokens for the first block's."""
        self.in_ram = AnnouncedChunks(geometry)
        self.anywhere = AnnouncedChunks(geometry, on_forgotten=self._drop_blocks)
        """Chunks that hits from RAM and tiers need. Their medium is "CPU" if `in_ram` has them."""
        self._announced = {
            MEDIUM_CPU: ShardedDict[bytes, None](),
            MEDIUM_STORAGE: ShardedDict[bytes, None](),
        }
        """The hashes of announced chunks, by medium."""
        self.blocks = ShardedDict[bytes, bytes]()
        """Descriptions of announced chunks, and of others that the daemon announced, by hash."""
        self._before = ShardedDict[bytes, bytes]()
        """The hash of the chunk before each of these; empty where the prompt begins."""
        self.kept_bytes = 0  # Of all descriptions.
        self._media = {MEDIUM_CPU: MediumBlocks(), MEDIUM_STORAGE: MediumBlocks()}
        """The blocks of the announced chunks. Chunks share blocks where prompts differ at the end
        of a chunk only."""
        self._without_tokens: set[bytes] = set()  # Announced chunks whose tokens are not kept.
        self._queue: list[KVCacheEvent] = []
        self._to_free: list[object] = []  # Dictionaries of what is known no more.
        self._repeat_at, self._repeat_seconds = math.inf, REPEAT_SECONDS
        self._undescribed: dict[bytes, bytes] = {}
        """Descriptions of own chunks that the daemon does not have, by hash."""
        # A daemon describes what its node has. Other nodes may lack it.
        self._shares = is_on and geometry.nodes == 1
        self.has_more = False  # True while the daemon has more to announce.
        self._begins_anew = False  # True where all was withdrawn that the daemon still has.
        self._has_asked = False  # True while the daemon is to announce what comes next.
        self._number = 1  # Of what is asked for. Answers of other numbers are of what ended.

    def update(self, work: Callable[["KVEventPublisher"], None]) -> None:
        """Call `work` with the publisher if it is on. A fault in it withdraws all chunks."""
        if not self.is_on:
            return
        try:
            work(self)
        except Exception:
            # A fault of the KV events withdraws what was announced, and costs no lookup or store.
            self._counters[fault("kv_events")] += 1
            logger.exception("hybridkv: KV events failed; what was announced is withdrawn")
            self.withdraw_all()

    def take_requests(self, is_idle: bool) -> list[wire.Request]:
        """Return what the daemon is to be told and asked for, after a step.

        Only for a connection of which Subscribe was sent. `is_idle` is true if no request runs.
        """
        messages: list[wire.Request] = []
        if not self._shares:
            return messages
        if self._begins_anew:
            messages.append(wire.Subscribe())
        undescribed, self._undescribed = self._undescribed, {}
        messages += self._describe_to_daemon(undescribed)
        if not self._has_asked:
            size = IDLE_READ_BYTES if is_idle else READ_BYTES
            messages.append(wire.ReadAnnouncements(self._number, size))
        self._begins_anew, self._has_asked = False, True
        return messages

    def on_committed(self, stored: Mapping[TrackedRequest, Sequence[PresentObjects]]) -> None:
        """Announce what is new in RAM with objects of requests that were committed."""
        for tracked, present in stored.items():
            hashed = len(tracked.request.block_hashes) * self._geometry.hash_tokens
            hashed = min(hashed, tracked.request.num_tokens - self._geometry.lookahead_tokens)
            # Stored objects were computed. The next token may yet be taken back, so no hash that
            # covers it is used.
            last = max(max(objects.chunks) for objects in present)
            count = min(1 + last, self._geometry.whole_chunks(hashed))
            hashes = tracked.chunk_hashes(self._geometry, 0, count)
            self._learn(tracked, unpack_hashes(hashes), present)

    def on_announced(self, announced: Announced) -> None:
        """Announce chunks that the daemon has, whichever engine stored them."""
        if announced.id != self._number:
            return
        self.has_more, self._has_asked = announced.more, False
        hashes = unpack_hashes(announced.hashes)
        parents = unpack_hashes(announced.parents)
        first = 0  # The first chunk of those that follow each other.
        for at, (chunk_hash, parent) in enumerate(zip(hashes, parents, strict=True)):
            before = b"" if parent == NO_PARENT else parent
            if at and before != hashes[at - 1]:
                self._show_chain(hashes[first:at])
                first = at
            if not self._keep_description(chunk_hash, before, announced.descriptions[at]):
                self._counters[metrics.CHUNKS_NOT_KEPT] += 1
                continue
            for index, mask in enumerate(announced.masks):
                if mask[at] == IN_RAM:
                    self._learn_in_ram(chunk_hash, index)
                elif mask[at]:
                    self.anywhere.learn(chunk_hash, index)
            if not self.anywhere.knows(chunk_hash):
                self._drop_blocks(chunk_hash)
        self._show_chain(hashes[first:])

    def on_found(self, tracked: TrackedRequest, found: Found) -> None:
        """Announce what is new of the objects that a lookup found in RAM."""
        present = [
            PresentObjects(index, [chunk for chunk, is_there in enumerate(mask) if is_there])
            for index, mask in enumerate(found.masks)
        ]
        self._learn(tracked, unpack_hashes(tracked.lookup.hashes), present)

    def on_removed(self, removed: Removed) -> None:
        """Withdraw chunks, or announce them below RAM, because RAM has lost objects of them."""
        self._has_asked = False  # A session that says nothing is not sent much more.
        if removed.everything:
            self._counters[metrics.REMOVALS_OVERFLOWED] += 1
            self._withdraw_anew()
        groups = zip_longest(removed.groups, removed.below, fillvalue=0)
        pairs = zip(unpack_hashes(removed.hashes), groups, strict=False)
        for chunk_hash, (group_index, is_below) in pairs:
            if group_index >= len(self._geometry.groups):
                continue
            from_ram = self.in_ram.lose(chunk_hash, group_index)
            # A chunk that cannot be described again is as good as gone.
            is_below = is_below and chunk_hash not in self._without_tokens
            gone = [] if is_below else self.anywhere.lose(chunk_hash, group_index)
            self._withdraw(from_ram, gone)
            if not self.anywhere.knows(chunk_hash):
                self._drop_blocks(chunk_hash)

    def on_reset(self, is_empty: bool, now: float) -> None:
        """Announce all anew: AllBlocksCleared has made routers forget what the daemon has too."""
        if is_empty:
            self.update(KVEventPublisher._withdraw_anew)

    def on_new_identity(self, identity: EngineIdentity, now: float) -> None:
        self._end_subscription()

    def on_connection_lost(self, now: float) -> None:
        self._end_subscription()

    def _end_subscription(self) -> None:
        """Withdraw all chunks. The daemon announces those of the next subscription."""
        self.has_more = self._has_asked = False
        self._number += 1
        self.update(KVEventPublisher.withdraw_all)

    def _withdraw_anew(self) -> None:
        """Withdraw all chunks, and ask for those that are there."""
        self._end_subscription()
        self._begins_anew = True

    def withdraw_all(self) -> None:
        """Withdraw all chunks in this step and the next ones, because nothing is known of them."""
        self._to_free += [*self.in_ram.forget_all(), *self.anywhere.forget_all()]
        for medium, announced in self._announced.items():
            self._counters[metrics.CHUNKS_WITHDRAWN] += len(announced)
            self._to_free += announced.take_parts()
            self._media[medium].end_all_uses()
        self._to_free += [*self.blocks.take_parts(), *self._before.take_parts()]
        self._undescribed.clear()
        self._without_tokens.clear()
        self.kept_bytes = 0

    def take_new(self, now: float, blocks_max: int = WITHDRAWN_MAX) -> list[KVCacheEvent]:
        """Return the events since the last call, in their order.

        `blocks_max` bounds the blocks that leave because of `withdraw_all`.
        """
        events, self._queue = [*self._queue, *self._leave(blocks_max)], []
        del self._to_free[-FREED_MAX:]
        if events:
            self._repeat_seconds = REPEAT_SECONDS
        elif now < self._repeat_at:
            return events
        else:
            events = self._reminder()
            self._repeat_seconds = min(2 * self._repeat_seconds, REPEAT_SECONDS_MAX)
        self._repeat_at = now + self._repeat_seconds
        return events

    def _leave(self, blocks_max: int) -> Iterator[BlockRemoved]:
        """Yield the events that withdraw so many of the leaving blocks."""
        for medium, blocks in self._media.items():
            gone = blocks.leaving.take_keys(blocks_max)
            blocks_max -= len(gone)
            yield from _removals(medium, gone)

    def _reminder(self) -> list[KVCacheEvent]:
        """Return the event of some announced chunk once more.

        A router that came late, or was cut off while the engine began, finds by the number of the
        next event that it missed some, and asks for them. An idle engine has no next one.
        """
        some = (name for each in self._announced.values() for name in islice(each, REPEATABLE_MAX))
        return next(filter(None, map(self._repeated, some)), [])

    def _repeated(self, chunk_hash: bytes) -> list[KVCacheEvent]:
        """Return the event of a chunk once more, if it is announced and its tokens are kept."""
        medium = next((key for key, each in self._announced.items() if chunk_hash in each), "")
        if not medium or chunk_hash in self._without_tokens:
            return []
        return [self._event(medium, decode_blocks(self.blocks[chunk_hash]), 0)]

    def _learn(
        self, tracked: TrackedRequest, hashes: list[bytes], present: Iterable[PresentObjects]
    ) -> None:
        """Note objects in RAM, and announce the chunks that are shown by that.

        `hashes` has the hashes of the request's first chunks.
        """
        learned: list[int] = []
        not_shown: set[int] = set()
        for group_index, chunks in present:
            for chunk in chunks:
                if chunk >= len(hashes):
                    continue
                if self._learn_in_ram(hashes[chunk], group_index):
                    learned.append(chunk)
                elif not self.in_ram.knows(hashes[chunk]):
                    not_shown.add(chunk)
        if not_shown:
            self._counters[metrics.CHUNKS_NOT_SHOWN] += len(not_shown)
        if not learned:
            return
        in_ram = self.in_ram.show(hashes, min(learned))
        anywhere = self.anywhere.show(hashes, min(learned))
        new = [chunk for chunk in sorted({*in_ram, *anywhere}) if hashes[chunk] not in self.blocks]
        fresh = {hashes[chunk]: self._describe(tracked.request, chunk) for chunk in new}
        for chunk in new:
            self._before[hashes[chunk]] = hashes[chunk - 1] if chunk else b""
        self._announce(
            [hashes[chunk] for chunk in in_ram], [hashes[chunk] for chunk in anywhere], fresh
        )
        for chunk in new:
            if hashes[chunk] not in self.blocks:
                del self._before[hashes[chunk]]

    def _learn_in_ram(self, chunk_hash: bytes, group_index: int) -> bool:
        """Note an object in RAM. Returns True if that is new and there is room for it."""
        is_new = self.in_ram.learn(chunk_hash, group_index)
        if is_new:
            self.anywhere.learn(chunk_hash, group_index)
        return is_new

    def _show_chain(self, hashes: Sequence[bytes]) -> None:
        """Announce described chunks that follow each other, if all chunks before them are known."""
        if hashes and hashes[0] in self.blocks:
            self._announce(
                self._show_after(self.in_ram, hashes), self._show_after(self.anywhere, hashes)
            )

    def _show_after(self, chunks: AnnouncedChunks, hashes: Sequence[bytes]) -> list[bytes]:
        """Show chunks that follow each other. Returns the hashes of those that are shown now."""
        before = self._before[hashes[0]]
        between: list[bytes] = []  # Chunks whose windows a hit may need, and that are not shown.
        while before and (len(between) < chunks.reach or before not in chunks):
            is_known = before in self._before and chunks.may_precede(before)
            if not is_known or len(between) > len(self._before):
                chunks.leave_out(hashes)
                return []
            between.append(before)
            before = self._before[before]
        chain = [*reversed(between), *hashes]
        return [chain[at] for at in chunks.show(chain, len(between), before)]

    def _announce(
        self,
        in_ram: Sequence[bytes],
        anywhere: Sequence[bytes],
        fresh: Mapping[bytes, AnnouncedBlocks] = MappingProxyType({}),
    ) -> None:
        """Announce chunks that are shown from now on. `fresh` has blocks of those that had none."""
        below = [chunk_hash for chunk_hash in anywhere if chunk_hash not in self.in_ram]
        self._queue_stored(MEDIUM_CPU, in_ram, fresh)
        self._queue_removed(MEDIUM_STORAGE, reversed(in_ram))
        self._queue_stored(MEDIUM_STORAGE, below, fresh)

    def _keep_description(self, chunk_hash: bytes, before: bytes, content: bytes) -> bool:
        """Keep what the daemon has of a chunk. Returns False where it is none, or without room."""
        if chunk_hash in self.blocks:
            return True
        has_room = self.kept_bytes + len(content) <= KEPT_BYTES_MAX
        is_sound = has_room and is_description(
            content, not before, self._geometry.chunk_tokens, self.block_tokens
        )
        if is_sound:
            self.blocks[chunk_hash], self._before[chunk_hash] = content, before
            self.kept_bytes += len(content)
        return is_sound

    def _withdraw(self, from_ram: list[bytes], gone: list[bytes]) -> None:
        """Withdraw chunks that left RAM or are gone. Announce below RAM those that are still there.

        Both lists have hashes of chunks, the suffix first.
        """
        below = [chunk_hash for chunk_hash in reversed(from_ram) if chunk_hash in self.anywhere]
        self._queue_stored(MEDIUM_STORAGE, below)
        self._queue_removed(MEDIUM_CPU, from_ram)
        self._queue_removed(MEDIUM_STORAGE, gone)
        for chunk_hash in (*from_ram, *gone):
            if chunk_hash in self._without_tokens or not self.anywhere.knows(chunk_hash):
                self._drop_blocks(chunk_hash)

    def _drop_blocks(self, chunk_hash: bytes) -> None:
        """Forget the blocks of a chunk that is not announced."""
        is_announced = any(chunk_hash in announced for announced in self._announced.values())
        if chunk_hash in self.blocks and not is_announced:
            self.kept_bytes -= len(self.blocks.pop(chunk_hash))
            self._before.pop(chunk_hash, None)
            self._without_tokens.discard(chunk_hash)

    def _keep_blocks(self, chunk_hash: bytes, blocks: AnnouncedBlocks) -> None:
        """Keep an own chunk that is announced, with its tokens if there is room for them.

        They are of no use where `anywhere` had no room for the chunk.
        """
        content = encode_blocks(blocks)
        if content is not None and self._shares:
            shared = blocks._replace(session_id=None)
            self._undescribed[chunk_hash] = (
                content if blocks == shared else encode_blocks(shared) or content
            )
        has_room = content is not None and self.kept_bytes + len(content) <= KEPT_BYTES_MAX
        if content is None or not has_room or chunk_hash not in self.anywhere:
            self._counters[metrics.CHUNKS_NOT_KEPT] += 1
            self._without_tokens.add(chunk_hash)
            content = encode_blocks(AnnouncedBlocks(blocks.names, blocks.parent, (), [])) or b""
        self.blocks[chunk_hash] = content
        self.kept_bytes += len(content)

    def _queue_stored(
        self,
        medium: str,
        chunk_hashes: Iterable[bytes],
        fresh: Mapping[bytes, AnnouncedBlocks] = MappingProxyType({}),
    ) -> None:
        """Announce chunks, the prefix first. Chunks that follow each other share one event.

        `fresh` has blocks of those that had none.
        """
        uses = self._media[medium]
        event: BlockStored | None = None
        for chunk_hash in chunk_hashes:
            blocks = fresh.get(chunk_hash)
            if blocks is not None and chunk_hash not in self.blocks:
                self._keep_blocks(chunk_hash, blocks)
            elif blocks is None and chunk_hash in self.blocks:
                blocks = decode_blocks(self.blocks[chunk_hash])
            has_parent = blocks is not None and (
                blocks.parent is None
                or any(blocks.parent in media for media in self._media.values())
            )
            if blocks is None or not blocks.tokens or not has_parent:
                continue
            self._announced[medium][chunk_hash] = None
            self._counters[metrics.CHUNKS_ANNOUNCED] += 1
            names = blocks.names
            known = next((at for at, name in enumerate(names) if name not in uses), len(names))
            for name in names:
                uses.count_use(name)
            new = self._event(medium, blocks, known)
            if not new.block_hashes:
                event = None
            elif event is not None and event.block_hashes[-1] == new.parent_block_hash:
                event.block_hashes += new.block_hashes
                event.token_ids += new.token_ids
                event.extra_keys += new.extra_keys
            else:
                if self._repeats_parents:
                    self._queue += self._repeated(self._before.get(chunk_hash, b""))
                event = new
                self._queue.append(event)

    def _queue_removed(self, medium: str, chunk_hashes: Iterable[bytes]) -> None:
        """Withdraw the chunks that are announced in the medium."""
        uses, gone = self._media[medium], []
        for chunk_hash in chunk_hashes:
            if chunk_hash not in self._announced[medium]:
                continue
            del self._announced[medium][chunk_hash]
            self._counters[metrics.CHUNKS_WITHDRAWN] += 1
            for name in decode_blocks(self.blocks[chunk_hash]).names:
                if uses.end_use(name):
                    gone.append(name)
        self._queue += _removals(medium, gone)

    def _describe(self, request: Any, chunk: int) -> AnnouncedBlocks:
        """Return the engine's blocks in a chunk of a request."""
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
            names=[*map(kv_cache_utils.maybe_convert_block_hash, names)],
            parent=next(map(kv_cache_utils.maybe_convert_block_hash, parents), None),
            tokens=request.all_token_ids[start:stop],
            extra_keys=to_event_extra_keys(extra) or [],
            lora_id=adapter.adapter_id if adapter is not None else None,
            lora_name=adapter.name if adapter is not None else None,
            session_id=request.session_id,
        )

    def _describe_to_daemon(self, contents: Mapping[bytes, bytes]) -> Iterator[Describe]:
        """Yield messages with descriptions for the daemon.

        Those that are too long are left out, and those of chunks that are gone already.
        """
        names = [
            name
            for name, content in contents.items()
            if len(content) <= DESCRIPTION_BYTES_MAX and name in self._before
        ]
        for at in range(0, len(names), DESCRIBED_MAX):
            part = names[at : at + DESCRIBED_MAX]
            yield Describe(
                hashes=b"".join(part),
                parents=b"".join(self._before[name] or NO_PARENT for name in part),
                descriptions=[contents[name] for name in part],
            )

    def _event(self, medium: str, blocks: AnnouncedBlocks, first: int) -> BlockStored:
        """Return the event that announces a chunk's blocks from number `first` on."""
        return BlockStored(
            block_hashes=blocks.names[first:],
            parent_block_hash=blocks.names[first - 1] if first else blocks.parent,
            token_ids=list(blocks.tokens[first * self.block_tokens :]),
            block_size=self.block_tokens,
            lora_id=blocks.lora_id,
            medium=medium,
            lora_name=blocks.lora_name,
            extra_keys=blocks.extra_keys[first:],
            group_idx=None,
            kv_cache_spec_kind=None,
            session_id=blocks.session_id,
        )


def _removals(medium: str, names: Sequence[BlockName]) -> list[BlockRemoved]:
    return [
        BlockRemoved(block_hashes=[*names[at : at + HASHES_MAX]], medium=medium, group_idx=None)
        for at in range(0, len(names), HASHES_MAX)
    ]


def _listed(geometry: Geometry) -> Group | None:
    """Return the group whose blocks events list. None where no layer has full attention."""
    full = [group for group in geometry.groups if group.kind is GroupKind.FULL]
    return min(full, key=lambda group: group.tokens_per_block, default=None)
