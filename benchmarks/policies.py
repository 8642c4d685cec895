"""`python -m benchmarks.policies TRACE`: hit rates of eviction policies on real requests.

As `hybridkv replay`, for chunks of 512 tokens with two objects of one size: one of a full attention
group and one of a group with recurrent state. Sizes are shares of all objects. `--scan N` adds a
prompt of 200 chunks that nobody repeats after every N-th request; it does not count itself, and
foresight, which knows all later prompts, is measured without it. `lru` is not told where prompts
end, and `2q` is the daemon's own order.
"""

import argparse
import heapq
import sys
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from hybridkv.core.coverage import needed_chunks
from hybridkv.core.geometry import Geometry, Group, GroupKind
from hybridkv.core.policies import EvictionClass
from hybridkv.core.state_boundaries import StateRule
from hybridkv.lab.replay import (
    BLOCK_TOKENS,
    ReplayHits,
    ReplayModel,
    ReplayObject,
    TracePrompt,
    TraceReplay,
    UnlimitedCache,
    read_trace,
)
from hybridkv.store.eviction import EvictionQueue
from hybridkv.store.index import Slot

GROUPS = (
    Group(0, GroupKind.FULL, BLOCK_TOKENS, (100,)),
    Group(1, GroupKind.RECURRENT, BLOCK_TOKENS, (100,)),
)
MODEL = ReplayModel(
    Geometry(GROUPS, BLOCK_TOKENS, BLOCK_TOKENS, BLOCK_TOKENS),
    StateRule(None, BLOCK_TOKENS),
    BLOCK_TOKENS,
)
SCAN_CHUNKS = 200

Reads = Sequence[Mapping[bytes, Sequence[int]]]
"""By group: the numbers of the prompts that read an object, in order, by its hash."""


def all_reads(model: ReplayModel, prompts: Sequence[TracePrompt]) -> Reads:
    """Return what a cache that evicts nothing reads of a trace."""
    reads: list[defaultdict[bytes, list[int]]] = [defaultdict(list) for _ in model.geometry.groups]
    cache = UnlimitedCache(model)
    for number, prompt in enumerate(prompts):
        chunks = cache.serve(prompt).tokens_hit // model.geometry.chunk_tokens
        for group_index, chunk_hash in _read_objects(model, model.hashes(prompt), chunks):
            reads[group_index][chunk_hash].append(number)
    return reads


def _read_objects(
    model: ReplayModel, hashes: Sequence[bytes], chunks: int
) -> Iterator[tuple[int, bytes]]:
    """Yield (group index, hash) of the objects that a hit of so many chunks reads."""
    for index, group in enumerate(model.geometry.groups):
        for chunk in needed_chunks(model.geometry, group, chunks):
            yield index, hashes[chunk]


class KeptObject(NamedTuple):
    """An object that a ForesightCache keeps."""

    next_read: int  # The number of the next prompt that reads it.
    size_bytes: int


class EvictionCandidate(NamedTuple):
    """An object of a ForesightCache in its heap. The smallest candidate is evicted first.

    It is stale unless the object is kept with the same next read.
    """

    negative_next_read: int
    negative_chunk: int
    group_index: int
    chunk_hash: bytes


class ForesightCache:
    """A cache of `ram_bytes` that knows the whole trace: about the most that any policy could hit.

    It keeps the objects whose next read comes first, and nothing that is never read again.
    """

    def __init__(self, model: ReplayModel, ram_bytes: int, reads: Reads) -> None:
        self._model, self._ram_bytes, self._reads = model, ram_bytes, reads
        pairs = zip(model.geometry.groups, reads, strict=True)
        self._states = [read for group, read in pairs if group.kind is GroupKind.RECURRENT]
        self._number = -1  # The number of the last prompt that was served.
        self._kept: list[dict[bytes, KeptObject]] = [{} for _ in model.geometry.groups]
        """By group and hash."""
        self._heap: list[EvictionCandidate] = []
        self.kept_bytes = 0

    def serve(self, prompt: TracePrompt) -> ReplayHits:
        """Look the next prompt of the trace up, then store it. Returns its hit."""
        self._number += 1
        model = self._model
        hashes = model.hashes(prompt)
        masks = [bytes(chunk_hash in kept for chunk_hash in hashes) for kept in self._kept]
        # It knows which states later prompts read.
        junctions = [
            chunk + 1
            for chunk, chunk_hash in enumerate(hashes)
            if model.keeps_junctions and any(chunk_hash in reads for reads in self._states)
        ]
        for group_index, sizes in enumerate(model.stored_objects(prompt, len(hashes), junctions)):
            kept = self._kept[group_index]
            for chunk, chunk_hash in enumerate(hashes):
                is_kept = masks[group_index][chunk]
                size = kept[chunk_hash].size_bytes if is_kept else sizes.get(chunk, 0)
                if size:
                    self._keep(group_index, chunk_hash, chunk, size)
        return replace(model.hit(prompt, masks), evicted=self._evict())

    def _evict(self) -> int:
        """Evict objects until the others fit. Returns how many were evicted."""
        evicted = 0
        while self.kept_bytes > self._ram_bytes:
            candidate = heapq.heappop(self._heap)
            kept = self._kept[candidate.group_index]
            found = kept.get(candidate.chunk_hash)
            if found is not None and found.next_read == -candidate.negative_next_read:
                self.kept_bytes -= found.size_bytes
                del kept[candidate.chunk_hash]
                evicted += 1
        return evicted

    def _keep(self, group_index: int, chunk_hash: bytes, chunk: int, size: int) -> None:
        """Keep an object until its next read, or drop it if it is never read again."""
        kept = self._kept[group_index]
        before = kept.pop(chunk_hash, None)
        self.kept_bytes -= 0 if before is None else before.size_bytes
        reads = self._reads[group_index].get(chunk_hash, ())
        at = bisect_right(reads, self._number)
        if at < len(reads):
            kept[chunk_hash] = KeptObject(reads[at], size)
            self.kept_bytes += size
            candidate = EvictionCandidate(-reads[at], -chunk, group_index, chunk_hash)
            heapq.heappush(self._heap, candidate)


class LeastRecentlyUsed(EvictionQueue[Slot]):
    """An order in which a read makes an object the latest one, and nothing else matters."""

    def mark_used(self, items: Iterable[Slot]) -> list[Slot]:
        self.renew_items(items)
        return []

    def remember(self, item: Slot, key: bytes) -> None:
        """Remember nothing."""


class LruCache(TraceReplay):
    """A plain LRU cache, which is not told where prompts end."""

    def __init__(self, model: ReplayModel, ram_bytes: int) -> None:
        super().__init__(model, ram_bytes)
        self.store.queue = LeastRecentlyUsed(self.store.bound_bytes)

    def store_object(self, stored: ReplayObject, eviction_class: EvictionClass) -> None:
        super().store_object(stored, EvictionClass.PROMPT)


def with_scans(prompts: Sequence[TracePrompt], every: int) -> Iterator[tuple[TracePrompt, bool]]:
    """Yield (prompt, whether it counts) of the prompts and of the scans between them."""
    fresh = 1 << 40
    for number, prompt in enumerate(prompts):
        yield prompt, True
        if every and number % every == 0:
            yield TracePrompt(SCAN_CHUNKS * BLOCK_TOKENS, range(fresh, fresh + SCAN_CHUNKS)), False
            fresh += SCAN_CHUNKS


def hits(cache: TraceReplay, prompts: Iterator[tuple[TracePrompt, bool]]) -> ReplayHits:
    """Return the hits of the prompts that count."""
    total = ReplayHits()
    with cache:
        for prompt, counts in prompts:
            came = cache.serve(prompt)
            total += came if counts else ReplayHits()
    return total


def main() -> int:
    """Print a table of hit rates, a row for each size of the cache."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.policies", description=__doc__)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--scan", type=int, default=0, metavar="N")
    options = parser.parse_args()
    prompts = read_trace(options.trace, BLOCK_TOKENS)
    unlimited = UnlimitedCache(MODEL)
    ceiling = sum((unlimited.serve(prompt) for prompt in prompts), ReplayHits())
    print(
        f"{len(prompts)} requests, a scan every {options.scan} requests (0: none), "
        f"at most {ceiling.rate:.1%}"
    )
    reads = all_reads(MODEL, prompts)
    print("cache      lru       2q  foresight")
    for share in (0.02, 0.05, 0.1, 0.2, 0.4):
        ram_bytes = int(unlimited.stored_bytes * share)
        caches = (LruCache(MODEL, ram_bytes), TraceReplay(MODEL, ram_bytes))
        rates = [hits(cache, with_scans(prompts, options.scan)).rate for cache in caches]
        foresight = ForesightCache(MODEL, ram_bytes, reads)
        rates.append(sum(map(foresight.serve, prompts), ReplayHits()).rate)
        print(f"{share:5.0%}  " + "  ".join(f"{rate:7.1%}" for rate in rates), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
