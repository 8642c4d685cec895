"""Which chunks are shown to routers: those that some hit needs, as far as one engine knows.

A chunk is *useful* while a hit ends with it or with a later chunk of the same prefix. Recurrent
states and windows may be kept at some boundaries only. The chunks between two of these boundaries
are useful to the hit at the later one, and the chunks after the last boundary are not useful. When
a chunk is shown, the chunk before it is shown too, so a router that follows prefixes finds no hole.
A chunk is shown only while its objects are known for sure to be there.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from hybridkv.core.coverage import largest_hit, needed_chunks
from hybridkv.core.geometry import Geometry, GroupKind

CHUNKS_MAX = 1 << 17
"""Chunks that are known at once, in some 400 bytes each. One more chunk takes the place of a chunk
that is not shown. Where all known chunks are shown, the new chunk is not learned."""


@dataclass(eq=False, slots=True)
class _ShownChunk:
    chunk_hash: bytes
    chunk: int  # The chunk's number in the prompt.
    previous: "_ShownChunk | None"
    following: "set[_ShownChunk]" = field(default_factory=set)
    """The shown chunks that come next: prompts part after this chunk."""
    is_end: bool = False  # Whether a hit may end with this chunk.


class AnnouncedChunks:
    """Chunks by their hashes, each of which covers all tokens up to the chunk's end."""

    def __init__(
        self,
        geometry: Geometry,
        chunks_max: int = CHUNKS_MAX,
        on_forgotten: Callable[[bytes], None] = lambda chunk_hash: None,
    ) -> None:
        """`on_forgotten` is called with each chunk that is not known any more."""
        self._geometry = geometry
        self._chunks_max = chunks_max
        self._on_forgotten = on_forgotten
        self.present: dict[bytes, int] = {}
        """For each known chunk a bit mask: bit i is set if the object of group index i is there."""
        self.shown: dict[bytes, _ShownChunk] = {}
        self.hidden: OrderedDict[bytes, None] = OrderedDict()
        """Chunks that are known and not shown. A chunk is added by the first `show` that leaves it
        out."""
        self.full, window = 0, 0
        for index, group in enumerate(geometry.groups):
            if group.kind is GroupKind.FULL:
                self.full |= 1 << index
            elif group.kind is not GroupKind.RECURRENT:
                window = max(window, group.window_tokens + group.extra_retained_tokens)
        self.reach = -(-window // geometry.chunk_tokens)
        """A hit that needs an object for a window ends at most so many chunks after it."""

    def __len__(self) -> int:
        """The number of chunks that are shown."""
        return len(self.shown)

    def __contains__(self, chunk_hash: bytes) -> bool:
        return chunk_hash in self.shown

    def learn(self, chunk_hash: bytes, group_index: int) -> bool:
        """Note that an object is there. Returns True if that is new and there is room for it."""
        known, bit = self.present.get(chunk_hash, 0), 1 << group_index
        if known & bit:
            return False
        if not known and len(self.present) >= self._chunks_max:
            if not self.hidden:
                return False
            oldest, _ = self.hidden.popitem(last=False)
            del self.present[oldest]
            self._on_forgotten(oldest)
        self.present[chunk_hash] = known | bit
        return True

    def knows(self, chunk_hash: bytes) -> bool:
        """Return True if some object of the chunk is known to be there."""
        return chunk_hash in self.present

    def may_precede(self, chunk_hash: bytes) -> bool:
        """Return True unless every hit that ends after the chunk lacks an object of it."""
        return self.present.get(chunk_hash, 0) & self.full == self.full

    def show(self, hashes: Sequence[bytes], first: int = 0, before: bytes = b"") -> list[int]:
        """Show the useful chunks of a prompt. Returns the places of the new ones, ascending.

        The caller has learned nothing new about the chunks before `hashes[first]`. Without `before`
        the first hash is that of the prompt's first chunk. Else it follows `before`, which is
        shown, and `first` is at least `reach`.
        """
        groups = self._geometry.groups
        previous = self.shown[before] if before else None
        start = 0 if previous is None else previous.chunk + 1
        present = [self.present.get(chunk_hash, 0) for chunk_hash in hashes]
        # Full attention has the chunks before, and no hit that may be new needs others of them.
        masks = [
            b"\1" * start + bytes(known >> index & 1 for known in present)
            for index in range(len(groups))
        ]
        hit = max(0, largest_hit(self._geometry, masks, start + len(hashes)) - start)
        fresh: list[int] = []
        for at, chunk_hash in enumerate(hashes[:hit]):
            shown = self.shown.get(chunk_hash)
            chunk = start + at
            if shown is None:
                shown = self.shown[chunk_hash] = _ShownChunk(chunk_hash, chunk, previous)
                if previous is not None:
                    previous.following.add(shown)
                self.hidden.pop(chunk_hash, None)
                fresh.append(at)
                first = min(first, at)
            if at >= first and not shown.is_end:
                needs = [needed_chunks(self._geometry, group, chunk + 1) for group in groups]
                pairs = zip(masks, needs, strict=True)
                shown.is_end = all(mask.find(0, need.start, need.stop) < 0 for mask, need in pairs)
            previous = shown
        self.leave_out(hashes[hit:])
        return fresh

    def leave_out(self, hashes: Iterable[bytes]) -> None:
        """Note that no hit is known which needs these chunks."""
        for chunk_hash in hashes:
            if chunk_hash in self.present and chunk_hash not in self.shown:
                self.hidden.setdefault(chunk_hash)

    def lose(self, chunk_hash: bytes, group_index: int) -> list[bytes]:
        """Note that an object is gone. Returns the hashes of the chunks that this hides."""
        known, bit = self.present.get(chunk_hash, 0), 1 << group_index
        if not known & bit:
            return []
        if known == bit:
            del self.present[chunk_hash]
            self.hidden.pop(chunk_hash, None)
        else:
            self.present[chunk_hash] = known & ~bit
        if (shown := self.shown.get(chunk_hash)) is None:
            return []
        # Every hit that ends with this chunk or a later one needs an object of full attention.
        is_full = bool(bit & self.full)
        near = list(_with_following(shown, math.inf if is_full else self.reach))
        for later in near:
            later.is_end = later.is_end and not is_full and self.may_end(later)
        return [hidden for later in reversed(near) for hidden in self._prune(later)]

    def forget_all(self) -> list[bytes]:
        """Forget all chunks. Returns the hashes of those that were shown."""
        hashes = list(self.shown)
        self.shown.clear()
        self.hidden.clear()
        self.present.clear()
        return hashes

    def may_end(self, shown: _ShownChunk) -> bool:
        """Return True if groups with windows and states have what a hit that ends there needs."""
        for index, group in enumerate(self._geometry.groups):
            if group.kind is GroupKind.FULL:
                continue
            needed: _ShownChunk | None = shown
            for _ in needed_chunks(self._geometry, group, shown.chunk + 1):
                assert needed is not None, "a chunk before a shown one is not shown"
                if not self.present.get(needed.chunk_hash, 0) >> index & 1:
                    return False
                needed = needed.previous
        return True

    def _prune(self, shown: _ShownChunk) -> Iterator[bytes]:
        """Hide the chunk if it is not useful, then the chunks before it that are not useful now.

        Yields their hashes.
        """
        last: _ShownChunk | None = shown
        while last is not None and not last.is_end and not last.following:
            if self.shown.pop(last.chunk_hash, None) is None:
                break
            if last.chunk_hash in self.present:
                self.hidden[last.chunk_hash] = None
            yield last.chunk_hash
            if last.previous is not None:
                last.previous.following.remove(last)
            last = last.previous


def _with_following(shown: _ShownChunk, distance: float) -> Iterator[_ShownChunk]:
    """Yield a chunk and the shown chunks at most `distance` after it, nearest first."""
    level: Iterable[_ShownChunk] = [shown]
    while level:
        yield from level
        level = [later for chunk in level for later in chunk.following] if distance > 0 else []
        distance -= 1
