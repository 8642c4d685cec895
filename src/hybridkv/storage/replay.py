"""A trace of prompts against the real store: what a cache of some size would have hit.

Nothing but the index, the slots and the eviction is there; of every object only the page with its header is touched,
and sizes are divided so that the smallest object takes a few pages. Prompts come one after the other and are stored as
soon as they were looked up, as by one engine that is never busy.
"""

import mmap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from hybridkv.core.coverage import largest_hit, needed_chunks, part_bytes, stored_counts
from hybridkv.core.eviction import Policy
from hybridkv.core.geometry import Geometry, Kind
from hybridkv.core.keys import HASH_BYTES
from hybridkv.core.states import StateRule, state_ends
from hybridkv.shm.slots import SLOT_ALIGN, payload_offset, slot_bytes
from hybridkv.storage.store import Entry, Namespace, Store

CHUNKS_PER_STEP = 64
"""Chunks whose objects become objects together, group by group, as after a step of the engine."""
PAGES_MIN = 8
"""Of the smallest object: what rounding its size to pages may distort is an eighth of that."""

MAP_NORESERVE = 0x4000
"""Linux's; the module `mmap` does not have it. Most of the memory is never touched."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request of a trace: its tokens, and a name for each started block of them that covers all before it."""

    tokens: int
    blocks: Sequence[int]


@dataclass(frozen=True, slots=True)
class Hits:
    """What came of a trace."""

    prompts: int = 0
    prompts_hit: int = 0
    tokens: int = 0
    tokens_hit: int = 0
    evicted: int = 0
    """Objects."""

    def __add__(self, other: "Hits") -> "Hits":
        """Both."""
        return Hits(
            self.prompts + other.prompts,
            self.prompts_hit + other.prompts_hit,
            self.tokens + other.tokens,
            self.tokens_hit + other.tokens_hit,
            self.evicted + other.evicted,
        )

    @property
    def rate(self) -> float:
        """Hit tokens as a share of all."""
        return self.tokens_hit / self.tokens if self.tokens else 0.0


class Model:
    """What the objects of a prompt are.

    Chunks are made as long as the trace's blocks, since it tells no more, but not where a group is recurrent: its
    states stand at the ends of the engine's own chunks.
    """

    def __init__(self, geometry: Geometry, rule: StateRule, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        recurrent = any(group.kind is Kind.RECURRENT for group in geometry.groups)
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
        """Arena bytes of an object, by group and chunk of its period."""

    def names(self, prompt: Prompt) -> list[bytes]:
        """Of its whole chunks. One that ends inside a block is taken for another where the block is another."""
        chunk, block = self.geometry.chunk_tokens, self.block_tokens
        ends = range(chunk, prompt.tokens + 1, chunk)
        return [
            (prompt.blocks[(end - 1) // block] << 32 | end % block).to_bytes(HASH_BYTES, "little", signed=True)
            for end in ends
        ]

    def objects(self, prompt: Prompt, chunks: int) -> list[dict[int, int]]:
        """By group: the bytes of its objects by chunk, as they are stored of a prompt of so many whole chunks."""
        objects: list[dict[int, int]] = []
        for index, group in enumerate(self.geometry.groups):
            period = self._bytes[index]
            there: Iterable[int] = range(chunks)
            if group.kind is Kind.RECURRENT:
                ends = state_ends(self.geometry, group, self._rule, prompt.tokens)
                there = [end // self.geometry.chunk_tokens - 1 for end in ends]
            objects.append({chunk: size for chunk in there if (size := period[chunk % len(period)])})
        return objects

    @property
    def smallest_bytes(self) -> int:
        """Of any object."""
        return min(size for sizes in self._bytes for size in sizes if size)


class Unlimited:
    """A cache that forgets nothing."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._seen: list[set[bytes]] = [set() for _ in model.geometry.groups]
        self.stored_bytes = 0

    def serve(self, prompt: Prompt) -> Hits:
        """Look up, then store."""
        model = self._model
        names = model.names(prompt)
        masks = [bytes(name in seen for name in names) for seen in self._seen]
        hit = _hit(model, prompt, masks)
        for index, sizes in enumerate(model.objects(prompt, len(names))):
            for chunk, size in sizes.items():
                if names[chunk] not in self._seen[index]:
                    self._seen[index].add(names[chunk])
                    self.stored_bytes += size
        return hit


class Replay:
    """A cache of `ram_bytes`. A context manager."""

    def __init__(self, model: Model, ram_bytes: int, policy: Policy = Policy.TWO_QUEUES) -> None:
        self._model = model
        self._scale = max(1, model.smallest_bytes // (PAGES_MIN * SLOT_ALIGN))
        size = max(SLOT_ALIGN, ram_bytes // self._scale // SLOT_ALIGN * SLOT_ALIGN)
        self._memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
        self._view = memoryview(self._memory)
        self._store = Store(self._view, policy=policy)
        self._store.grow(size)
        groups = model.geometry.groups
        self._space = Namespace(
            bytes(HASH_BYTES),
            tuple(group.gid for group in groups),
            (frozenset(),) * len(groups),
            tuple(group.kind is Kind.FULL for group in groups),
        )

    def __enter__(self) -> "Replay":
        return self

    def __exit__(self, *exc: object) -> None:
        if exc[0] is None:
            self._store.check()
            del self._store
            self._view.release()
            self._memory.close()

    def serve(self, prompt: Prompt) -> Hits:
        """Look up, then store."""
        names = self._model.names(prompt)
        entries = [self._space.entries.get(name) for name in names]
        masks = [
            bytes(entry is not None and entry.slots[index] is not None for entry in entries)
            for index in range(len(self._model.geometry.groups))
        ]
        hit = _hit(self._model, prompt, masks)
        self._read(entries, hit)
        evicted = self._store.evicted
        self._keep(prompt, names, masks)
        return replace(hit, evicted=self._store.evicted - evicted)

    def _read(self, entries: Sequence[Entry | None], hit: Hits) -> None:
        geometry = self._model.geometry
        chunks = hit.tokens_hit // geometry.chunk_tokens
        slots = [
            slot
            for index, group in enumerate(geometry.groups)
            for chunk in (needed_chunks(geometry, group, chunks) if chunks else ())
            if (entry := entries[chunk]) is not None and (slot := entry.slots[index]) is not None
        ]
        self._store.pin(slots)
        self._store.unpin(slots)

    def _keep(self, prompt: Prompt, names: Sequence[bytes], masks: Sequence[bytes]) -> None:
        model = self._model
        end = max(0, len(names) - 1)
        needs = [needed_chunks(model.geometry, group, end).start for group in model.geometry.groups]
        objects = model.objects(prompt, len(names))
        for first in range(0, len(names), CHUNKS_PER_STEP):
            for index, sizes in enumerate(objects):
                for chunk in range(first, min(len(names), first + CHUNKS_PER_STEP)):
                    if chunk not in sizes or masks[index][chunk]:
                        continue
                    self._put(
                        index, names[chunk], names[chunk - 1] if chunk else b"", sizes[chunk], chunk < needs[index]
                    )

    def _put(self, index: int, name: bytes, parent: bytes, size: int, interior: bool) -> None:
        pages = max(1, round(size / self._scale / SLOT_ALIGN))
        for slot in self._store.grant((pages * SLOT_ALIGN - payload_offset(1), 1), 1):
            self._store.commit(slot, self._space, index, name, parent, interior)


def _hit(model: Model, prompt: Prompt, masks: Sequence[bytes]) -> Hits:
    """At least one token is always computed."""
    geometry = model.geometry
    chunks = largest_hit(geometry, masks, geometry.whole_chunks(prompt.tokens - 1))
    return Hits(1, int(chunks > 0), prompt.tokens, chunks * geometry.chunk_tokens)


def served(cache: Replay | Unlimited, prompts: Iterable[Prompt]) -> Iterator[Hits]:
    """What has come of the trace so far, after every prompt."""
    total = Hits()
    for prompt in prompts:
        total += cache.serve(prompt)
        yield total
