"""Which chunks routers were told of: those that some hit needs, as far as one engine knows.

A chunk is *useful* while a hit ends with it or behind it in its chain of prefixes. Where recurrent
states or windows are kept at some boundaries only, the chunks between two of them are useful to the
hit at the later one, and a chunk behind the last one is not useful. With a chunk that is shown, the
chunk before it is shown too, so a router that follows prefixes finds no hole. A chunk is shown only
where its objects are known for sure to be there.
"""

import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from hybridkv.core.coverage import largest_hit, needed_chunks
from hybridkv.core.geometry import Geometry, GroupKind

CHUNKS_MAX = 1 << 17
"""Chunks known at once, each in some 400 bytes. A further one takes the place of one that is not
shown; where all are, it is not shown itself."""


@dataclass(eq=False, slots=True)
class _AnnouncedChunk:
    chunk_hash: bytes
    chunk: int  # Its number in the prompt.
    before: "_AnnouncedChunk | None"
    behind: "set[_AnnouncedChunk]" = field(default_factory=set)
    is_end: bool = False  # Whether a hit may end with it.


class AnnouncedChunks:
    """Chunks by their hashes, each of which covers all tokens up to the chunk's end."""

    def __init__(self, geometry: Geometry, chunks_max: int = CHUNKS_MAX) -> None:
        self._geometry = geometry
        self._chunks_max = chunks_max
        self._present: dict[bytes, int] = {}
        """A bit for each group (by index) whose object is known to be there."""
        self._shown: dict[bytes, _AnnouncedChunk] = {}
        self._hidden: OrderedDict[bytes, None] = OrderedDict()
        """Chunks that are known and not shown, from the call of `show` on that leaves them out."""
        self._full, window = 0, 0
        for index, group in enumerate(geometry.groups):
            if group.kind is GroupKind.FULL:
                self._full |= 1 << index
            elif group.kind is not GroupKind.RECURRENT:
                window = max(window, group.window_tokens + group.extra_retained_tokens)
        self._reach = -(-window // geometry.chunk_tokens)
        """How many chunks behind an object's chunk a hit that needs it for a window may end."""

    def __len__(self) -> int:
        """Chunks that are shown."""
        return len(self._shown)

    def __contains__(self, chunk_hash: bytes) -> bool:
        return chunk_hash in self._shown

    def learn(self, chunk_hash: bytes, group_index: int) -> bool:
        """An object is there. True where that was not known before, and there is room for it."""
        known, bit = self._present.get(chunk_hash, 0), 1 << group_index
        if known & bit:
            return False
        if not known and len(self._present) >= self._chunks_max:
            if not self._hidden:
                return False
            oldest, _ = self._hidden.popitem(last=False)
            del self._present[oldest]
        self._present[chunk_hash] = known | bit
        return True

    def knows(self, chunk_hash: bytes) -> bool:
        """Whether some object of the chunk is known to be there."""
        return chunk_hash in self._present

    def show(self, hashes: Sequence[bytes], first: int = 0) -> list[int]:
        """Show the useful chunks of a prompt: those not shown before, ascending.

        Nothing is new before chunk number `first`.
        """
        groups = self._geometry.groups
        present = [self._present.get(chunk_hash, 0) for chunk_hash in hashes]
        masks = [bytes(known >> index & 1 for known in present) for index in range(len(groups))]
        hit = largest_hit(self._geometry, masks, len(hashes))
        fresh: list[int] = []
        before: _AnnouncedChunk | None = None
        for chunk, chunk_hash in enumerate(hashes[:hit]):
            shown = self._shown.get(chunk_hash)
            if shown is None:
                shown = self._shown[chunk_hash] = _AnnouncedChunk(chunk_hash, chunk, before)
                if before is not None:
                    before.behind.add(shown)
                self._hidden.pop(chunk_hash, None)
                fresh.append(chunk)
                first = min(first, chunk)
            if chunk >= first and not shown.is_end:
                needs = [needed_chunks(self._geometry, group, chunk + 1) for group in groups]
                pairs = zip(masks, needs, strict=True)
                shown.is_end = all(mask.find(0, one.start, one.stop) < 0 for mask, one in pairs)
            before = shown
        for chunk_hash, known in zip(hashes[hit:], present[hit:], strict=True):
            if known and chunk_hash not in self._shown:
                self._hidden.setdefault(chunk_hash)
        return fresh

    def lose(self, chunk_hash: bytes, group_index: int) -> list[bytes]:
        """An object is gone: the hashes of the chunks that are not shown any more."""
        known, bit = self._present.get(chunk_hash, 0), 1 << group_index
        if not known & bit:
            return []
        if known == bit:
            del self._present[chunk_hash]
            self._hidden.pop(chunk_hash, None)
        else:
            self._present[chunk_hash] = known & ~bit
        if (shown := self._shown.get(chunk_hash)) is None:
            return []
        # Every hit behind an object of full attention needs it.
        is_full = bool(bit & self._full)
        near = list(_behind(shown, math.inf if is_full else self._reach))
        for one in near:
            one.is_end = one.is_end and not is_full and self._may_end(one)
        return [chunk_hash for one in reversed(near) for chunk_hash in self._prune(one)]

    def clear(self) -> list[bytes]:
        """Forget everything: the hashes of the chunks that were shown."""
        hashes = list(self._shown)
        self._shown.clear()
        self._hidden.clear()
        self._present.clear()
        return hashes

    def _may_end(self, shown: _AnnouncedChunk) -> bool:
        """Whether the groups with windows and states have what a hit that ends there needs."""
        for index, group in enumerate(self._geometry.groups):
            if group.kind is GroupKind.FULL:
                continue
            one: _AnnouncedChunk | None = shown
            for _ in needed_chunks(self._geometry, group, shown.chunk + 1):
                assert one is not None, "a chunk before a shown one is not shown"
                if not self._present.get(one.chunk_hash, 0) >> index & 1:
                    return False
                one = one.before
        return True

    def _prune(self, shown: _AnnouncedChunk) -> Iterator[bytes]:
        """Hide the chunk if it is not useful, and those before it that are useful no more."""
        one: _AnnouncedChunk | None = shown
        while one is not None and not one.is_end and not one.behind:
            if self._shown.pop(one.chunk_hash, None) is None:
                break
            if one.chunk_hash in self._present:
                self._hidden[one.chunk_hash] = None
            yield one.chunk_hash
            if one.before is not None:
                one.before.behind.remove(one)
            one = one.before


def _behind(shown: _AnnouncedChunk, chunks: float) -> Iterator[_AnnouncedChunk]:
    """A chunk and those at most `chunks` behind it, each after the one before it."""
    level: Iterable[_AnnouncedChunk] = [shown]
    while level:
        yield from level
        level = [other for one in level for other in one.behind] if chunks > 0 else []
        chunks -= 1
