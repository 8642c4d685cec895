"""A trace of prompts against the real store: what a cache of some size would have hit.

Nothing but the index, the slots and the eviction is there; of every object only the page with its
header is touched, and sizes are divided so that the smallest object takes a few pages. Prompts come
one after the other and are stored as soon as they were looked up, as by one engine that is never
busy.
"""

import heapq
import mmap
import operator
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from hybridkv.core.coverage import largest_hit, needed_chunks, part_bytes, stored_counts
from hybridkv.core.errors import ConfigError
from hybridkv.core.geometry import Geometry, GroupKind
from hybridkv.core.keys import HASH_BYTES
from hybridkv.core.policies import EvictionPolicy
from hybridkv.core.state_boundaries import StateRule, state_ends
from hybridkv.shm.slots import SLOT_ALIGN, payload_offset, slot_bytes
from hybridkv.store.index import Namespace
from hybridkv.store.store import Store

BLOCK_TOKENS = 512  # Tokens in a block of the public Mooncake traces.
CHUNKS_PER_STEP = 64  # Chunks that are stored together, group by group, as after an engine's step.
PAGES_MIN = 8  # Pages of the smallest object: rounding to pages distorts it by an eighth at most.
MAP_NORESERVE = 0x4000  # Linux's, which `mmap` lacks. Most of the memory is never touched.


Reads = Mapping[tuple[int, bytes], Sequence[int]]
"""The numbers of the prompts that read an object, in order, by its group and hash."""


class TracePrompt(msgspec.Struct, rename={"tokens": "input_length", "blocks": "hash_ids"}):
    """One request of a trace: a line of it, as far as it is read."""

    tokens: int
    blocks: Sequence[Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]]
    """A number for each started block of its tokens; it covers all blocks before it too."""


@dataclass(frozen=True, slots=True)
class ReplayHits:
    """What a cache had of a trace, or of one prompt."""

    prompts: int = 0
    prompts_hit: int = 0
    tokens: int = 0
    tokens_hit: int = 0
    evicted: int = 0  # The number of objects that were evicted.

    def __add__(self, other: "ReplayHits") -> "ReplayHits":
        """Both."""
        return ReplayHits(*map(operator.add, astuple(self), astuple(other)))

    @property
    def rate(self) -> float:
        """The share of the tokens that were hit."""
        return self.tokens_hit / self.tokens if self.tokens else 0.0


class ReplayModel:
    """The objects of a prompt, for one model and the blocks of one trace.

    Chunks are made as long as the trace's blocks, since it tells no more, but not where a group is
    recurrent: its states stand at the ends of the engine's own chunks.
    """

    def __init__(self, geometry: Geometry, rule: StateRule, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        recurrent = any(group.kind is GroupKind.RECURRENT for group in geometry.groups)
        fine = 1 if recurrent else -(-block_tokens // geometry.chunk_tokens)
        self.geometry = replace(geometry, chunk_tokens=geometry.chunk_tokens * fine)
        self._rule = rule
        # A long chunk has what its short ones have: their windows too.
        self._bytes = [
            [
                sum(
                    slot_bytes(size, geometry.parts(group))
                    for chunk in range(at * fine, (at + 1) * fine)
                    if (size := part_bytes(geometry, group, chunk))
                )
                for at in range(len(stored_counts(self.geometry, group)))
            ]
            for group in self.geometry.groups
        ]
        """Arena bytes of an object, by group and chunk of the group's period."""
        known = (size for sizes in self._bytes for size in sizes if size)
        self.smallest_bytes = min(known, default=0)

    def hashes(self, prompt: TracePrompt) -> list[bytes]:
        """The hashes of its whole chunks. One that ends inside a block differs with that block."""
        chunk, block = self.geometry.chunk_tokens, self.block_tokens
        ends = range(chunk, prompt.tokens + 1, chunk)
        numbers = (prompt.blocks[(end - 1) // block] << 32 | end % block for end in ends)
        return [number.to_bytes(HASH_BYTES, "little", signed=True) for number in numbers]

    def objects(self, prompt: TracePrompt, chunks: int) -> list[dict[int, int]]:
        """By group, the bytes of each object by chunk: all that is stored of so many chunks."""
        objects: list[dict[int, int]] = []
        for group, period in zip(self.geometry.groups, self._bytes, strict=True):
            there: Iterable[int] = range(chunks)
            if group.kind is GroupKind.RECURRENT:
                ends = state_ends(self.geometry, group, self._rule, prompt.tokens)
                there = [end // self.geometry.chunk_tokens - 1 for end in ends]
            sizes = {chunk: period[chunk % len(period)] for chunk in there}
            objects.append({chunk: size for chunk, size in sizes.items() if size})
        return objects

    def needed(self, hashes: Sequence[bytes], chunks: int) -> Iterator[tuple[int, bytes]]:
        """What a hit of so many chunks reads, as (group, hash)."""
        for at, group in enumerate(self.geometry.groups):
            for chunk in needed_chunks(self.geometry, group, chunks):
                yield at, hashes[chunk]

    def hit(self, prompt: TracePrompt, masks: Sequence[bytes]) -> ReplayHits:
        """The longest hit; at least one token is always computed."""
        most = self.geometry.whole_chunks(prompt.tokens - 1)
        chunks = largest_hit(self.geometry, masks, most)
        return ReplayHits(1, int(chunks > 0), prompt.tokens, chunks * self.geometry.chunk_tokens)


class UnlimitedCache:
    """A cache that evicts nothing."""

    def __init__(self, model: ReplayModel) -> None:
        self._model = model
        self._seen: list[set[bytes]] = [set() for _ in model.geometry.groups]
        self.stored_bytes = 0

    def serve(self, prompt: TracePrompt) -> ReplayHits:
        """Look the prompt up, then store it."""
        model = self._model
        hashes = model.hashes(prompt)
        masks = [bytes(chunk_hash in seen for chunk_hash in hashes) for seen in self._seen]
        for seen, sizes in zip(self._seen, model.objects(prompt, len(hashes)), strict=True):
            for chunk, size in sizes.items():
                if hashes[chunk] not in seen:
                    seen.add(hashes[chunk])
                    self.stored_bytes += size
        return model.hit(prompt, masks)


def all_reads(model: ReplayModel, prompts: Sequence[TracePrompt]) -> Reads:
    """What a cache that evicts nothing reads of a trace."""
    reads: defaultdict[tuple[int, bytes], list[int]] = defaultdict(list)
    cache = UnlimitedCache(model)
    for number, prompt in enumerate(prompts):
        chunks = cache.serve(prompt).tokens_hit // model.geometry.chunk_tokens
        for named in model.needed(model.hashes(prompt), chunks):
            reads[named].append(number)
    return reads


class ForesightCache:
    """A cache of `ram_bytes` that knows the whole trace: about the most that any policy could hit.

    It keeps the objects whose next read comes first, and nothing that is never read again.
    """

    def __init__(self, model: ReplayModel, ram_bytes: int, reads: Reads) -> None:
        self._model, self._ram_bytes, self._reads = model, ram_bytes, reads
        self._number = -1  # Of the last prompt that was served.
        self._kept: dict[tuple[int, bytes], tuple[int, int]] = {}  # (next read, bytes)
        self._heap: list[tuple[int, int, tuple[int, bytes]]] = []
        """(-next read, -chunk, object); an entry is stale unless `_kept` has the same read."""
        self.kept_bytes = 0

    def serve(self, prompt: TracePrompt) -> ReplayHits:
        """Look the next prompt of the trace up, then store it."""
        self._number += 1
        model, kept = self._model, self._kept
        hashes = model.hashes(prompt)
        groups = range(len(model.geometry.groups))
        masks = [bytes((at, one) in kept for one in hashes) for at in groups]
        for at, sizes in enumerate(model.objects(prompt, len(hashes))):
            for chunk, one in enumerate(hashes):
                size = kept[at, one][1] if masks[at][chunk] else sizes.get(chunk, 0)
                if size:
                    self._keep((at, one), chunk, size)
        evicted = 0
        while self.kept_bytes > self._ram_bytes:
            after, _, named = heapq.heappop(self._heap)
            if kept.get(named, (0, 0))[0] == -after:
                self.kept_bytes -= kept.pop(named)[1]
                evicted += 1
        return replace(model.hit(prompt, masks), evicted=evicted)

    def _keep(self, named: tuple[int, bytes], chunk: int, size: int) -> None:
        self.kept_bytes -= self._kept.pop(named, (0, 0))[1]
        reads = self._reads.get(named, ())
        at = bisect_right(reads, self._number)
        if at < len(reads):
            self._kept[named] = reads[at], size
            self.kept_bytes += size
            heapq.heappush(self._heap, (-reads[at], -chunk, named))


class TraceReplay:
    """A cache of `ram_bytes`; a context manager."""

    def __init__(
        self, model: ReplayModel, ram_bytes: int, policy: EvictionPolicy = EvictionPolicy.TWO_QUEUES
    ) -> None:
        self._model = model
        self._scale = max(1, model.smallest_bytes // (PAGES_MIN * SLOT_ALIGN))
        size = max(SLOT_ALIGN, ram_bytes // self._scale // SLOT_ALIGN * SLOT_ALIGN)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        self._memory = mmap.mmap(-1, size, flags=flags)
        self._view = memoryview(self._memory)
        self._store = Store(self._view, policy=policy)
        self._store.grow(size)
        groups = model.geometry.groups
        gids, full = zip(*((one.gid, one.kind is GroupKind.FULL) for one in groups), strict=True)
        self._namespace = Namespace(bytes(HASH_BYTES), gids, (frozenset(),) * len(groups), full)

    def __enter__(self) -> "TraceReplay":
        return self

    def __exit__(self, *exc: object) -> None:
        if exc[0] is None:
            del self._store
            self._view.release()
            self._memory.close()

    def serve(self, prompt: TracePrompt) -> ReplayHits:
        """Look the prompt up, then store it."""
        model, store, groups = self._model, self._store, self._model.geometry.groups
        geometry, hashes = model.geometry, model.hashes(prompt)
        entries = [self._namespace.entries.get(chunk_hash) for chunk_hash in hashes]
        # The slots of every chunk, by group.
        slots = [
            [None if entry is None else entry.slots[at] for entry in entries]
            for at in range(len(groups))
        ]
        masks = [bytes(slot is not None for slot in of_group) for of_group in slots]
        hit = model.hit(prompt, masks)
        if chunks := hit.tokens_hit // geometry.chunk_tokens:
            read = [
                slot
                for group, of_group in zip(groups, slots, strict=True)
                for chunk in needed_chunks(geometry, group, chunks)
                if (slot := of_group[chunk]) is not None
            ]
            store.pin(read)
            store.unpin(read)
        evicted = store.evicted
        self._store_prompt(prompt, hashes, masks)
        return replace(hit, evicted=store.evicted - evicted)

    def _store_prompt(
        self, prompt: TracePrompt, hashes: Sequence[bytes], masks: Sequence[bytes]
    ) -> None:
        model, end = self._model, max(0, len(hashes) - 1)
        needs = [needed_chunks(model.geometry, group, end).start for group in model.geometry.groups]
        objects = model.objects(prompt, len(hashes))
        for first in range(0, len(hashes), CHUNKS_PER_STEP):
            for index, sizes in enumerate(objects):
                for chunk in range(first, min(len(hashes), first + CHUNKS_PER_STEP)):
                    if chunk in sizes and not masks[index][chunk]:
                        named = hashes[chunk], hashes[chunk - 1] if chunk else b""
                        self._store_object(index, *named, sizes[chunk], chunk < needs[index])

    def _store_object(
        self, index: int, chunk_hash: bytes, parent: bytes, size: int, interior: bool
    ) -> None:
        pages = max(1, round(size / self._scale / SLOT_ALIGN))
        for slot in self._store.grant((pages * SLOT_ALIGN - payload_offset(1), 1), 1):
            self._store.commit(slot, self._namespace, index, chunk_hash, parent, interior)


def read_trace(path: Path, block_tokens: int, shown: str = "") -> list[TracePrompt]:
    """The prompts of a trace, in its order; raises ConfigError with the line that is none.

    Errors name the file as `shown`, which is by default its path.
    """
    shown = shown or str(path)
    if block_tokens < 1:
        what = f"--block-tokens {block_tokens} is no number of tokens"
        raise ConfigError(what, f"{BLOCK_TOKENS} works")
    prompts: list[TracePrompt] = []
    decoder = msgspec.json.Decoder(TracePrompt)
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"{shown}: {error.strerror}", "a file of JSON lines works") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            prompt = decoder.decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise ConfigError(f"{shown}, line {number}: {error}") from error
        tokens, ids = prompt.tokens, len(prompt.blocks)
        if tokens < 0 or -(-tokens // block_tokens) > ids:
            raise ConfigError(
                f"{shown}, line {number}: {ids} hash_ids for input_length {tokens}",
                f"one for every started block of --block-tokens {block_tokens} works",
            )
        prompts.append(prompt)
    if not prompts:
        raise ConfigError(f"{shown} has no prompt", "a line for each works")
    return prompts
