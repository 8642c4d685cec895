"""A trace of prompts against the real store: what a cache of some size would have hit.

The store has its real index, slots and eviction, and no payloads: only the page with the header of
an object is touched. Sizes are divided so that the smallest object takes a few pages. Prompts come
one after the other, and are stored as soon as they were looked up, as by an engine that is never
busy.
"""

import mmap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, NamedTuple, Self

import msgspec
from msgspec import Meta

from hybridkv.core.coverage import Hit, SlotShape, largest_hit, part_bytes, stored_counts, whole_hit
from hybridkv.core.errors import ConfigError
from hybridkv.core.eviction_classes import eviction_classes
from hybridkv.core.geometry import Geometry, GroupKind
from hybridkv.core.junctions import BRANCHES_MAX, Branches
from hybridkv.core.keys import HASH_BYTES
from hybridkv.core.policies import EvictionClass
from hybridkv.core.state_boundaries import StateRule, state_ends
from hybridkv.core.tails import (
    first_tail_chunk,
    longest_tail,
    tail_hit,
    units_per_chunk,
    why_no_tails,
)
from hybridkv.shm.slots import SLOT_ALIGN, payload_offset, slot_bytes
from hybridkv.store.index import Namespace, NewObject, Slot
from hybridkv.store.store import Store

BLOCK_TOKENS = 512  # Tokens in a block of the public Mooncake traces.
BLOCK_TOKENS_MAX = 1 << 20
CHUNKS_PER_STEP = 64  # Chunks that are stored together, group by group, as after an engine's step.
PAGES_MIN = 8  # Pages of the smallest object, which rounding distorts by an eighth at most.
MAP_NORESERVE = 0x4000  # Linux's, which `mmap` lacks. Most of the memory is never touched.


class TracePrompt(msgspec.Struct, rename={"tokens": "input_length", "blocks": "hash_ids"}):
    """One request of a trace: a line of it, as far as it is read."""

    tokens: int
    blocks: Sequence[Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]]
    """A number for each started block of its tokens, which names all blocks before it too."""


@dataclass(frozen=True, slots=True)
class ReplayHits:
    """The hits of a trace, or of one prompt."""

    prompts: int = 0
    prompts_hit: int = 0
    tokens: int = 0
    tokens_hit: int = 0
    evicted: int = 0  # The number of objects that were evicted.

    def __add__(self, hits: "ReplayHits") -> "ReplayHits":
        """Return the hits of two traces together."""
        return ReplayHits(
            prompts=self.prompts + hits.prompts,
            prompts_hit=self.prompts_hit + hits.prompts_hit,
            tokens=self.tokens + hits.tokens,
            tokens_hit=self.tokens_hit + hits.tokens_hit,
            evicted=self.evicted + hits.evicted,
        )

    @property
    def rate(self) -> float:
        """The share of the tokens that were hit."""
        return self.tokens_hit / self.tokens if self.tokens else 0.0


class ReplayObject(NamedTuple):
    """An object that is stored, without its payload."""

    group_index: int
    chunk_hash: bytes
    parent: bytes  # The hash of the chunk before; empty = no chunk is before it.
    size_bytes: int


class PromptTail(NamedTuple):
    """The tail that a prompt leaves in the cache (core.tails)."""

    name: bytes
    """Empty = the prompt leaves no tail."""
    chunk: int
    """The chunk inside which the tail ends."""


class LongestHit(NamedTuple):
    """The longest hit of a prompt."""

    hits: ReplayHits
    hit: Hit
    tail: bytes
    """The name of its tail. Empty = it ends with a chunk."""


class ReplayModel:
    """The objects of a prompt, for one model and the blocks of one trace.

    Chunks are as long as the trace's blocks, which tell no more. Where a group is recurrent they
    are the engine's own chunks, because its states stand at their ends.
    """

    def __init__(self, geometry: Geometry, rule: StateRule, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        recurrent = any(group.kind is GroupKind.RECURRENT for group in geometry.groups)
        self.with_tails = recurrent and not why_no_tails(geometry)
        """True where hits may end inside a chunk, at the geometry's match unit (core.tails)."""
        fine = 1 if recurrent else -(-block_tokens // geometry.chunk_tokens)
        self.geometry = replace(geometry, chunk_tokens=geometry.chunk_tokens * fine)
        self._rule = rule
        # A long chunk has what its short ones have: their windows too.
        self.sizes = [
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
        known = (size for sizes in self.sizes for size in sizes if size)
        self.smallest_bytes = min(known, default=0)

    def hashes(self, prompt: TracePrompt) -> list[bytes]:
        """Return the hashes of the prompt's whole chunks.

        The hash of a chunk that ends inside a block differs with that block.
        """
        chunk = self.geometry.chunk_tokens
        return [self._name(prompt, end) for end in range(chunk, prompt.tokens + 1, chunk)]

    def _name(self, prompt: TracePrompt, end: int) -> bytes:
        """Return the hash of the prompt's first `end` tokens."""
        block = self.block_tokens
        number = prompt.blocks[(end - 1) // block] << 32 | end % block
        return number.to_bytes(HASH_BYTES, "little", signed=True)

    def tail(self, prompt: TracePrompt) -> PromptTail:
        """Return the tail that the prompt leaves.

        The engine offers it at the last match unit before the prompt's last token.
        """
        unit, chunk = self.geometry.hash_tokens, self.geometry.chunk_tokens
        end = max(0, prompt.tokens - 1) // unit * unit
        is_inside = self.with_tails and end % chunk
        return PromptTail(self._name(prompt, end) if is_inside else b"", end // chunk)

    def tail_sizes(self) -> list[int]:
        """Return the bytes of a tail's objects, by group."""
        return [period[0] for period in self.sizes]

    @property
    def keeps_junctions(self) -> bool:
        """True where the engine keeps a state where prompts part (core.junctions)."""
        return self._rule.keeps_junctions

    def branches(self) -> Branches:
        """Return what a daemon learns of where prompts part, if anything is kept there."""
        has_windows = any(group.window_tokens for group in self.geometry.groups)
        return Branches(BRANCHES_MAX if self.keeps_junctions or has_windows else 0)

    def stored_objects(
        self, prompt: TracePrompt, chunks: int, junctions: Sequence[int] = ()
    ) -> list[dict[int, int]]:
        """Return all objects that are stored of so many chunks: by group, their bytes by chunk.

        `junctions` are the chunks after which the engine is asked for a state.
        """
        objects: list[dict[int, int]] = []
        for group, period in zip(self.geometry.groups, self.sizes, strict=True):
            stored_chunks: Iterable[int] = range(chunks)
            if group.kind is GroupKind.RECURRENT:
                ends = state_ends(self.geometry, group, self._rule, prompt.tokens)
                at_ends = (end // self.geometry.chunk_tokens for end in ends)
                asked = junctions if self.keeps_junctions else ()
                stored_chunks = [end - 1 for end in sorted({*at_ends, *asked})]
            sizes = {chunk: period[chunk % len(period)] for chunk in stored_chunks}
            objects.append({chunk: size for chunk, size in sizes.items() if size})
        return objects

    def hit(self, prompt: TracePrompt, masks: Sequence[bytes]) -> ReplayHits:
        """Return the longest hit by chunks. At least one token is always computed."""
        return self._hit(prompt, self.chunks_hit(prompt, masks) * self.geometry.chunk_tokens)

    def chunks_hit(self, prompt: TracePrompt, masks: Sequence[bytes]) -> int:
        """Return the chunks of the longest hit by chunks."""
        most = self.geometry.whole_chunks(prompt.tokens - 1)
        return largest_hit(self.geometry, masks, most)

    def _hit(self, prompt: TracePrompt, tokens: int) -> ReplayHits:
        return ReplayHits(1, int(tokens > 0), prompt.tokens, tokens)

    def hit_with_tail(
        self, prompt: TracePrompt, masks: Sequence[bytes], is_whole: Callable[[bytes], bool]
    ) -> LongestHit:
        """Return the longest hit, which may end with a tail.

        `is_whole` returns True for the name of a tail that has all its objects.
        """
        geometry, chunks = self.geometry, self.chunks_hit(prompt, masks)
        hit, name = whole_hit(geometry, chunks), b""
        if self.with_tails and prompt.tokens > geometry.hash_tokens:
            first = first_tail_chunk(geometry, prompt.tokens)
            units = (prompt.tokens - 1) // geometry.hash_tokens - first * units_per_chunk(geometry)
            names = [self._name(prompt, end) for end in self._tail_ends(first, units)]
            found = longest_tail(
                geometry=geometry,
                masks=masks,
                chunks=chunks,
                first_chunk=first,
                count=len(names),
                is_whole=lambda number: is_whole(names[number]),
            )
            if found:
                hit, name = tail_hit(geometry, first, found), names[found - 1]
        return LongestHit(self._hit(prompt, hit.tokens), hit, name)

    def _tail_ends(self, first_chunk: int, units: int) -> Iterator[int]:
        """Yield the ends, in tokens, of the tails in so many match units from `first_chunk` on."""
        unit, chunk = self.geometry.hash_tokens, self.geometry.chunk_tokens
        ends = range(first_chunk * chunk + unit, first_chunk * chunk + units * unit + 1, unit)
        return (end for end in ends if end % chunk)


class UnlimitedCache:
    """A cache that evicts nothing, so that its hits are the most that any cache has."""

    def __init__(self, model: ReplayModel) -> None:
        self._model = model
        self._seen: list[set[bytes]] = [set() for _ in model.geometry.groups]
        self._continued: set[bytes] = set()  # Chunks after which some prompt goes on.
        self._branches = model.branches()
        self.stored_bytes = 0

    def serve(self, prompt: TracePrompt) -> ReplayHits:
        """Look the prompt up, then store it. Returns its hit."""
        model = self._model
        hashes = model.hashes(prompt)
        masks = [bytes(chunk_hash in seen for chunk_hash in hashes) for seen in self._seen]
        longest = model.hit_with_tail(
            prompt, masks, lambda name: all(name in seen for seen in self._seen)
        )
        junctions = self._branches.junctions(
            model.geometry, masks, b"".join(hashes), longest.hit.depth, self._continued.__contains__
        )
        self._continued.update(hashes[:-1])
        tail = model.tail(prompt).name
        if tail and tail not in self._seen[0]:
            self.stored_bytes += sum(model.tail_sizes())
            for seen in self._seen:
                seen.add(tail)
        objects = model.stored_objects(prompt, len(hashes), junctions)
        for seen, sizes in zip(self._seen, objects, strict=True):
            for chunk, size in sizes.items():
                if hashes[chunk] not in seen:
                    seen.add(hashes[chunk])
                    self.stored_bytes += size
        return longest.hits


class TraceReplay:
    """A cache of `ram_bytes` with the real store, as a context manager."""

    def __init__(self, model: ReplayModel, ram_bytes: int) -> None:
        self._model = model
        self._scale = max(1, model.smallest_bytes // (PAGES_MIN * SLOT_ALIGN))
        size = max(SLOT_ALIGN, ram_bytes // self._scale // SLOT_ALIGN * SLOT_ALIGN)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        self._memory = mmap.mmap(-1, size, flags=flags)
        self._view = memoryview(self._memory)
        self.store = Store(self._view)
        self.store.grow_arena(size)
        groups = model.geometry.groups
        self._branches = model.branches()
        self._namespace = Namespace(
            identity=bytes(HASH_BYTES),
            gids=tuple(group.gid for group in groups),
            shapes=tuple(frozenset(map(self._shape, sizes)) for sizes in model.sizes),
            prefixes=tuple(group.kind is GroupKind.FULL for group in groups),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        if exc[0] is None:
            del self.store
            self._view.release()
            self._memory.close()

    def serve(self, prompt: TracePrompt) -> ReplayHits:
        """Look the prompt up, then store it. Returns its hit."""
        model, store, groups = self._model, self.store, self._model.geometry.groups
        geometry, hashes = model.geometry, model.hashes(prompt)
        entries = [self._namespace.entries.get(chunk_hash) for chunk_hash in hashes]
        # The slots of every chunk, by group.
        slots = [
            [None if entry is None else entry.slots[index] for entry in entries]
            for index in range(len(groups))
        ]
        masks = [bytes(slot is not None for slot in group_slots) for group_slots in slots]
        hits, hit, tail = model.hit_with_tail(prompt, masks, self._has_tail)
        superseded_tails: Iterable[Slot] = ()
        if hits.tokens_hit:
            if tail:
                ends = self._namespace.entries[tail].slots
                slots = [
                    [*group_slots[: hit.chunks], end]
                    for group_slots, end in zip(slots, ends, strict=True)
                ]
                if tail != model.tail(prompt).name:
                    superseded_tails = filter(None, ends)
            read = [
                slot
                for start, group_slots in zip(hit.starts, slots, strict=True)
                for slot in group_slots[start : hit.depth]
                if slot is not None
            ]
            store.pin(read, superseded_tails)
            store.unpin(read)
        evicted = store.evicted
        junctions = self._branches.junctions(
            geometry, masks, b"".join(hashes), hit.depth, self._namespace.goes_on
        )
        objects = model.stored_objects(prompt, len(hashes), junctions)
        self._store_prompt(prompt, hashes, masks, objects, junctions)
        return replace(hits, evicted=store.evicted - evicted)

    def _has_tail(self, name: bytes) -> bool:
        """Return True if the store has every object of a tail."""
        entry = self._namespace.entries.get(name)
        return entry is not None and all(entry.slots)

    def _store_prompt(
        self,
        prompt: TracePrompt,
        hashes: Sequence[bytes],
        masks: Sequence[bytes],
        objects: Sequence[Mapping[int, int]],
        junctions: Sequence[int],
    ) -> None:
        model, geometry = self._model, self._model.geometry
        whole = range(len(hashes))
        classes = [
            eviction_classes(geometry, group, whole, len(hashes), junctions)
            for group in geometry.groups
        ]
        for first in range(0, len(hashes), CHUNKS_PER_STEP):
            for index, sizes in enumerate(objects):
                for chunk in range(first, min(len(hashes), first + CHUNKS_PER_STEP)):
                    if chunk in sizes and not masks[index][chunk]:
                        before = hashes[chunk - 1] if chunk else b""
                        stored = ReplayObject(index, hashes[chunk], before, sizes[chunk])
                        self.store_object(stored, EvictionClass(classes[index][chunk]))
        tail, chunk = model.tail(prompt)
        if tail:
            before = hashes[chunk - 1] if chunk else b""
            for index, size in enumerate(model.tail_sizes()):
                if self._namespace.find_slot(tail, index) is None:
                    self.store_object(ReplayObject(index, tail, before, size), EvictionClass.PROMPT)

    def store_object(self, stored: ReplayObject, eviction_class: EvictionClass) -> None:
        new = NewObject(stored.group_index, stored.chunk_hash, stored.parent, eviction_class)
        for slot in self.store.grant(self._shape(stored.size_bytes), 1):
            self.store.commit(slot, self._namespace, new)

    def _shape(self, size_bytes: int) -> SlotShape:
        """Return the shape of an object that takes so many bytes, scaled as the cache is."""
        pages = max(1, round(size_bytes / self._scale / SLOT_ALIGN))
        return pages * SLOT_ALIGN - payload_offset(1), 1


def read_trace(path: Path, block_tokens: int, shown: str = "") -> list[TracePrompt]:
    """Return the prompts of a trace, in its order.

    Raises ConfigError with the first line that is no prompt. Errors name the file as `shown`, which
    is by default its path.
    """
    shown = shown or str(path)
    if not 1 <= block_tokens <= BLOCK_TOKENS_MAX:
        what = f"--block-tokens {block_tokens} is no number of tokens from 1 to {BLOCK_TOKENS_MAX}"
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


def known_tokens(prompts: Iterable[TracePrompt], block_tokens: int) -> list[int]:
    """Return for each prompt the tokens at its beginning that an earlier prompt had.

    A prompt's last token never counts. Where two prompts differ within a block, the trace does not
    say where, so no token of that block counts.
    """
    had: dict[int, int] = {}  # The most tokens of a block that a prompt had, by the block's number.
    known = []
    for prompt in prompts:
        count, is_known = 0, True
        for at, number in enumerate(prompt.blocks[: -(-prompt.tokens // block_tokens)]):
            tokens = min(block_tokens, prompt.tokens - at * block_tokens)
            if is_known:
                seen = min(tokens, had.get(number, 0))
                count, is_known = count + seen, seen == block_tokens
            had[number] = max(tokens, had.get(number, 0))
        known.append(min(count, max(0, prompt.tokens - 1)))
    return known
