"""A trace of prompts against the real store: what a cache of some size would have hit.

Nothing but the index, the slots and the eviction is there; of every object only the page with its
header is touched, and sizes are divided so that the smallest object takes a few pages. Prompts come
one after the other and are stored as soon as they were looked up, as by one engine that is never
busy.
"""

import heapq
import itertools
import mmap
import operator
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from hybridkv.core.coverage import largest_hit, needed_chunks, part_bytes, stored_counts
from hybridkv.core.errors import ConfigError
from hybridkv.core.geometry import Geometry, GroupKind
from hybridkv.core.keys import HASH_BYTES
from hybridkv.core.policies import EvictionClass, EvictionPolicy
from hybridkv.core.state_boundaries import StateRule, state_ends
from hybridkv.core.tails import (
    first_tail_chunk,
    longest_tail,
    tail_chunk,
    tail_tokens,
    units_per_chunk,
    why_no_tails,
)
from hybridkv.shm.slots import SLOT_ALIGN, payload_offset, slot_bytes
from hybridkv.store.index import Namespace, NewObject
from hybridkv.store.store import Store

BLOCK_TOKENS = 512  # Tokens in a block of the public Mooncake traces.
SESSIONS_AT_ONCE = 32
CHUNKS_PER_STEP = 64  # Chunks that are stored together, group by group, as after an engine's step.
PAGES_MIN = 8  # Pages of the smallest object: rounding to pages distorts it by an eighth at most.
MAP_NORESERVE = 0x4000  # Linux's, which `mmap` lacks. Most of the memory is never touched.


Reads = Mapping[tuple[int, bytes], Sequence[int]]
"""The numbers of the prompts that read an object, in order, by its group and hash."""


class TracePrompt(
    msgspec.Struct,
    rename={"tokens": "input_length", "blocks": "hash_ids", "answer_tokens": "output_length"},
):
    """One request of a trace: a line of it, as far as it is read."""

    tokens: int
    blocks: Sequence[Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]]
    """A number for each started block of its tokens; it covers all blocks before it too."""
    answer_tokens: Annotated[int, Meta(ge=0)] = 0
    """Tokens of the answer, which a cache stores behind the prompt; `blocks` covers them then."""


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


class ReplayObject(NamedTuple):
    """An object that is stored."""

    group_index: int
    chunk_hash: bytes
    parent: bytes  # The hash of the chunk before; empty: there is none.
    size_bytes: int


class ReplayModel:
    """The objects of a prompt, for one model and the blocks of one trace.

    Chunks are made as long as the trace's blocks, since it tells no more, but not where a group is
    recurrent: its states stand at the ends of the engine's own chunks.
    """

    def __init__(
        self, geometry: Geometry, rule: StateRule, block_tokens: int, with_tails: bool = False
    ) -> None:
        """`with_tails`: hits may end inside a chunk, at the geometry's match unit (core.tails)."""
        assert not (with_tails and why_no_tails(geometry))
        self.block_tokens = block_tokens
        self.with_tails = with_tails
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
        chunk = self.geometry.chunk_tokens
        return [self._name(prompt, end) for end in range(chunk, prompt.tokens + 1, chunk)]

    def _name(self, prompt: TracePrompt, end: int) -> bytes:
        block = self.block_tokens
        number = prompt.blocks[(end - 1) // block] << 32 | end % block
        return number.to_bytes(HASH_BYTES, "little", signed=True)

    def tail(self, prompt: TracePrompt) -> tuple[bytes, int]:
        """(the name, the chunk) of the tail that the prompt leaves; an empty name = it leaves none.

        The engine offers it at the last match unit before the prompt's last token.
        """
        unit, chunk = self.geometry.hash_tokens, self.geometry.chunk_tokens
        end = max(0, prompt.tokens - 1) // unit * unit
        is_inside = self.with_tails and end % chunk
        return self._name(prompt, end) if is_inside else b"", end // chunk

    def tail_sizes(self) -> list[int]:
        """The bytes of a tail's objects, by group."""
        return [period[0] for period in self._bytes]

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

    def answer(self, prompt: TracePrompt, chunks: int) -> Iterator[ReplayObject]:
        """What is stored of the prompt's answer, behind the prompt's `chunks`."""
        if not prompt.answer_tokens:
            return
        whole = TracePrompt(prompt.tokens + prompt.answer_tokens, prompt.blocks)
        hashes = self.hashes(whole)
        for index, sizes in enumerate(self.objects(whole, len(hashes))):
            for chunk, size in sizes.items():
                if chunk >= chunks:
                    before = hashes[chunk - 1] if chunk else b""
                    yield ReplayObject(index, hashes[chunk], before, size)

    def needed(self, hashes: Sequence[bytes], chunks: int) -> Iterator[tuple[int, bytes]]:
        """What a hit of so many chunks reads, as (group, hash)."""
        for at, group in enumerate(self.geometry.groups):
            for chunk in needed_chunks(self.geometry, group, chunks):
                yield at, hashes[chunk]

    def hit(self, prompt: TracePrompt, masks: Sequence[bytes]) -> ReplayHits:
        """The longest hit; at least one token is always computed."""
        return self._hit(prompt, self.chunks_hit(prompt, masks) * self.geometry.chunk_tokens)

    def chunks_hit(self, prompt: TracePrompt, masks: Sequence[bytes]) -> int:
        """The chunks of the longest hit by chunks."""
        most = self.geometry.whole_chunks(prompt.tokens - 1)
        return largest_hit(self.geometry, masks, most)

    def _hit(self, prompt: TracePrompt, tokens: int) -> ReplayHits:
        return ReplayHits(1, int(tokens > 0), prompt.tokens, tokens)

    def hit_with_tail(
        self, prompt: TracePrompt, masks: Sequence[bytes], is_whole: Callable[[bytes], bool]
    ) -> tuple[ReplayHits, int, bytes]:
        """(the longest hit, its chunks, the name of the tail behind them or nothing).

        `is_whole` says of a name whether every object of that tail is there.
        """
        geometry, chunks = self.geometry, self.chunks_hit(prompt, masks)
        tokens, name = chunks * geometry.chunk_tokens, b""
        if self.with_tails and prompt.tokens > geometry.hash_tokens:
            first = first_tail_chunk(geometry, prompt.tokens)
            units = (prompt.tokens - 1) // geometry.hash_tokens - first * units_per_chunk(geometry)
            names = [self._name(prompt, end) for end in self._tail_ends(first, units)]
            asked = geometry, masks, chunks, first, len(names)
            found = longest_tail(*asked, lambda number: is_whole(names[number]))
            if found:
                tokens, name = tail_tokens(geometry, first, found - 1), names[found - 1]
                chunks = tail_chunk(geometry, first, found - 1)
        return self._hit(prompt, tokens), chunks, name

    def _tail_ends(self, first_chunk: int, units: int) -> Iterator[int]:
        """Where the tails inside so many match units from `first_chunk` on end."""
        unit, chunk = self.geometry.hash_tokens, self.geometry.chunk_tokens
        ends = range(first_chunk * chunk + unit, first_chunk * chunk + units * unit + 1, unit)
        return (end for end in ends if end % chunk)


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
        hit, _, _ = model.hit_with_tail(
            prompt, masks, lambda name: all(name in seen for seen in self._seen)
        )
        tail, _ = model.tail(prompt)
        if tail and tail not in self._seen[0]:
            self.stored_bytes += sum(model.tail_sizes())
            for seen in self._seen:
                seen.add(tail)
        for seen, sizes in zip(self._seen, model.objects(prompt, len(hashes)), strict=True):
            for chunk, size in sizes.items():
                if hashes[chunk] not in seen:
                    seen.add(hashes[chunk])
                    self.stored_bytes += size
        for generated in model.answer(prompt, len(hashes)):
            if generated.chunk_hash not in self._seen[generated.group_index]:
                self._seen[generated.group_index].add(generated.chunk_hash)
                self.stored_bytes += generated.size_bytes
        return hit


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
        hit, chunks, tail = model.hit_with_tail(prompt, masks, self._has_tail)
        if hit.tokens_hit:
            if tail:
                # As the daemon reads it: the tail stands for one chunk more.
                ends = self._namespace.entries[tail].slots
                slots = [[*one[:chunks], end] for one, end in zip(slots, ends, strict=True)]
                chunks += 1
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

    def _has_tail(self, name: bytes) -> bool:
        entry = self._namespace.entries.get(name)
        return entry is not None and all(entry.slots)

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
                        before = hashes[chunk - 1] if chunk else b""
                        stored = ReplayObject(index, hashes[chunk], before, sizes[chunk])
                        is_inside = chunk < needs[index]
                        self._store_object(
                            stored, EvictionClass.INTERIOR if is_inside else EvictionClass.PROMPT
                        )
        for generated in model.answer(prompt, len(hashes)):
            if self._namespace.get(generated.chunk_hash, generated.group_index) is None:
                self._store_object(generated, EvictionClass.GENERATED)
        tail, chunk = model.tail(prompt)
        if tail:
            before = hashes[chunk - 1] if chunk else b""
            for index, size in enumerate(model.tail_sizes()):
                if self._namespace.get(tail, index) is None:
                    self._store_object(
                        ReplayObject(index, tail, before, size), EvictionClass.PROMPT
                    )

    def _store_object(self, stored: ReplayObject, eviction_class: EvictionClass) -> None:
        pages = max(1, round(stored.size_bytes / self._scale / SLOT_ALIGN))
        new = NewObject(stored.group_index, stored.chunk_hash, stored.parent, eviction_class)
        for slot in self._store.grant((pages * SLOT_ALIGN - payload_offset(1), 1), 1):
            self._store.commit(slot, self._namespace, new)


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


def unanswered(prompts: Iterable[TracePrompt]) -> Iterator[TracePrompt]:
    """The prompts, without answers that a cache would store."""
    return (TracePrompt(prompt.tokens, prompt.blocks) for prompt in prompts)


def answered(prompts: Iterable[TracePrompt], block_tokens: int) -> Iterator[TracePrompt]:
    """The prompts with numbers for the blocks of their answers, where the trace has none.

    Nobody goes on with an answer that the trace does not name, so its blocks are nobody else's.
    """
    numbers = itertools.count(-1, -1)
    for prompt in prompts:
        blocks = -(-(prompt.tokens + prompt.answer_tokens) // block_tokens)
        unnamed = itertools.islice(numbers, max(0, blocks - len(prompt.blocks)))
        yield TracePrompt(prompt.tokens, (*prompt.blocks, *unnamed), prompt.answer_tokens)


def known_tokens(prompts: Iterable[TracePrompt], block_tokens: int) -> list[int]:
    """Of each prompt, the tokens at its beginning that an earlier one had, but for its last token.

    Of two prompts that differ within a block the trace tells no more, so that block is new.
    """
    had: dict[int, int] = {}  # The most tokens of a block that a prompt had, by its number.
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


def as_sessions(prompts: Sequence[TracePrompt], turns: int, block_tokens: int) -> list[TracePrompt]:
    """The requests as turns of sessions; raises ConfigError for no turns or too few requests.

    A turn adds the tokens that were new in its request, and its answer is a part of the next
    turn's prompt. SESSIONS_AT_ONCE sessions take turns until all of them end; then others begin.
    """
    if not 1 <= turns <= len(prompts):
        what = f"--sessions {turns}: the trace has {len(prompts)} requests"
        raise ConfigError(what, "30 works" if len(prompts) >= 30 else "1 works")
    known = known_tokens(prompts, block_tokens)
    new = [prompt.tokens - had for prompt, had in zip(prompts, known, strict=True)]
    count = len(prompts) // turns
    made: list[TracePrompt] = []
    request = iter(zip(prompts, new, strict=True))
    for first in range(0, count, SESSIONS_AT_ONCE):
        sessions = range(first, min(count, first + SESSIONS_AT_ONCE))
        lengths = dict.fromkeys(sessions, 0)
        for _ in range(turns):
            for session in sessions:
                prompt, added = next(request)
                tokens = lengths[session] + added
                # The next turn's prompt has the answer, in blocks of the same numbers.
                end = -(-(tokens + prompt.answer_tokens) // block_tokens)
                blocks = range(session << 32, (session << 32) + end)
                made.append(TracePrompt(tokens, blocks, prompt.answer_tokens))
                lengths[session] = tokens + prompt.answer_tokens
    return made
