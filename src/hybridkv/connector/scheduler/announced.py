"""Which chunks are shown to routers: those that some hit needs, as far as one engine knows.

A chunk is *useful* while a hit ends with it or with a later chunk of the same prefix. Recurrent
states and windows may be kept at some boundaries only. The chunks between two of these boundaries
are useful to the hit at the later one, and the chunks after the last boundary are not useful. When
a chunk is shown, the chunk before it is shown too, so a router that follows prefixes finds no hole.
A chunk is shown only while its objects are known for sure to be there.
"""

import math
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, MutableSequence, Sequence
from typing import Generic, TypeVar

from hybridkv.core.coverage import largest_hit, needed_chunks
from hybridkv.core.geometry import Geometry, GroupKind
from hybridkv.core.keys import HASH_BYTES
from hybridkv.core.sharded import ShardedDict

T = TypeVar("T")
CHUNKS_MAX = 1 << 17
"""Chunks that are known at once, in some 400 bytes each. One more chunk takes the place of a chunk
that is not shown. Where all known chunks are shown, the new chunk is not learned."""
_NONE = -1  # In place of a row.
_PAGE = 1024  # Rows of a part of a column. A power of two.


class Column(Generic[T]):
    """Values of rows, in parts, so that nothing is copied where it grows: see ShardedDict."""

    def __init__(self, new_page: Callable[[], MutableSequence[T]]) -> None:
        self._new_page = new_page
        self.pages: list[MutableSequence[T]] = []

    def __getitem__(self, row: int) -> T:
        return self.pages[row // _PAGE][row % _PAGE]

    def __setitem__(self, row: int, value: T) -> None:
        if row == len(self.pages) * _PAGE:
            self.pages.append(self._new_page())
        self.pages[row // _PAGE][row % _PAGE] = value


class HashColumn:
    """The hashes of rows, as bytes in parts.

    The garbage collector looks at each item of a new list: 7 ms for a hundred thousand hashes.
    """

    def __init__(self) -> None:
        self.pages: list[bytearray] = []

    def __getitem__(self, row: int) -> bytes:
        at = row % _PAGE * HASH_BYTES
        return bytes(self.pages[row // _PAGE][at : at + HASH_BYTES])

    def __setitem__(self, row: int, value: bytes) -> None:
        if row == len(self.pages) * _PAGE:
            self.pages.append(bytearray(_PAGE * HASH_BYTES))
        at = row % _PAGE * HASH_BYTES
        self.pages[row // _PAGE][at : at + HASH_BYTES] = value


def _numbers() -> Column[int]:
    return Column(lambda: array("i", bytes(4 * _PAGE)))


class ShownChunks:
    """The chunks that are shown, as rows of columns, and how they follow each other.

    A hundred thousand objects would make the engine wait a quarter of a second for Python's garbage
    collector, which does not look at numbers.
    """

    def __init__(self) -> None:
        self.rows = ShardedDict[bytes, int]()  # By the chunk's hash.
        self._count = 0  # Rows that were ever used.
        self.hashes = HashColumn()
        self.chunks = _numbers()  # The chunk's number in the prompt.
        self.previous = _numbers()  # The row of the chunk before; _NONE where there is none.
        self._child = _numbers()  # The first of the chunks that come next: prompts part after it.
        self._older, self._younger = _numbers(), _numbers()  # The others of them.
        self.is_end: Column[int] = Column(lambda: bytearray(_PAGE))
        """1 where a hit may end with the chunk."""
        self._free = array("i")

    def append_shown(self, chunk_hash: bytes, chunk: int, previous: int) -> int:
        """Add a chunk after the chunk of a row. Returns its row."""
        if self._free:
            row = self._free.pop()
        else:
            row, self._count = self._count, self._count + 1
        self.rows[chunk_hash] = row
        self.hashes[row], self.chunks[row], self.is_end[row] = chunk_hash, chunk, 0
        self.previous[row], self._child[row], self._younger[row] = previous, _NONE, _NONE
        self._older[row] = _NONE
        if previous != _NONE:
            sibling = self._older[row] = self._child[previous]
            if sibling != _NONE:
                self._younger[sibling] = row
            self._child[previous] = row
        return row

    def remove_row(self, row: int) -> None:
        """Remove a chunk that no chunk follows."""
        del self.rows[self.hashes[row]]
        older, younger, previous = self._older[row], self._younger[row], self.previous[row]
        if older != _NONE:
            self._younger[older] = younger
        if younger != _NONE:
            self._older[younger] = older
        elif previous != _NONE:
            self._child[previous] = older
        self._free.append(row)

    def following(self, row: int) -> Iterator[int]:
        """Yield the rows of the chunks that come next."""
        later = self._child[row]
        while later != _NONE:
            yield later
            later = self._older[later]

    def near(self, row: int, distance: float) -> list[int]:
        """Return a row and those of the chunks at most `distance` after it, the nearest first."""
        rows, level = [row], [row]
        while level and distance > 0:
            level = [later for before in level for later in self.following(before)]
            rows += level
            distance -= 1
        return rows


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
        self.present = ShardedDict[bytes, int]()
        """For each known chunk a bit mask: bit i is set if the object of group index i is there."""
        self.shown = ShownChunks()
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
        return len(self.shown.rows)

    def __contains__(self, chunk_hash: bytes) -> bool:
        return chunk_hash in self.shown.rows

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
        groups, shown = self._geometry.groups, self.shown
        previous = shown.rows[before] if before else _NONE
        start = 0 if previous == _NONE else shown.chunks[previous] + 1
        present = [self.present.get(chunk_hash, 0) for chunk_hash in hashes]
        # Full attention has the chunks before, and no hit that may be new needs others of them.
        masks = [
            b"\1" * start + bytes(known >> index & 1 for known in present)
            for index in range(len(groups))
        ]
        hit = max(0, largest_hit(self._geometry, masks, start + len(hashes)) - start)
        fresh: list[int] = []
        for at, chunk_hash in enumerate(hashes[:hit]):
            row, chunk = shown.rows.get(chunk_hash, _NONE), start + at
            if row == _NONE:
                row = shown.append_shown(chunk_hash, chunk, previous)
                self.hidden.pop(chunk_hash, None)
                fresh.append(at)
                first = min(first, at)
            if at >= first and not shown.is_end[row]:
                needs = [needed_chunks(self._geometry, group, chunk + 1) for group in groups]
                pairs = zip(masks, needs, strict=True)
                shown.is_end[row] = all(
                    mask.find(0, need.start, need.stop) < 0 for mask, need in pairs
                )
            previous = row
        self.leave_out(hashes[hit:])
        return fresh

    def leave_out(self, hashes: Iterable[bytes]) -> None:
        """Note that no hit is known which needs these chunks."""
        for chunk_hash in hashes:
            if chunk_hash in self.present and chunk_hash not in self.shown.rows:
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
        shown = self.shown
        if (row := shown.rows.get(chunk_hash)) is None:
            return []
        # Every hit that ends with this chunk or a later one needs an object of full attention.
        is_full = bool(bit & self.full)
        near = shown.near(row, math.inf if is_full else self.reach)
        for later in near:
            shown.is_end[later] = shown.is_end[later] and not is_full and self.may_end(later)
        return [hidden for later in reversed(near) for hidden in self._prune(later)]

    def forget_all(self) -> list[object]:
        """Forget all chunks. Returns what the caller is to free, one at a time."""
        rows, pages = self.shown.rows.take_parts(), self.shown.hashes.pages
        parts: list[object] = [*rows, *self.present.take_parts(), *pages]
        self.shown = ShownChunks()
        self.hidden.clear()
        return parts

    def may_end(self, row: int) -> bool:
        """Return True if windows and states have what a hit that ends with a shown chunk needs."""
        shown = self.shown
        for index, group in enumerate(self._geometry.groups):
            if group.kind is GroupKind.FULL:
                continue
            needed = row
            for _ in needed_chunks(self._geometry, group, shown.chunks[row] + 1):
                assert needed != _NONE, "a chunk before a shown one is not shown"
                if not self.present.get(shown.hashes[needed], 0) >> index & 1:
                    return False
                needed = shown.previous[needed]
        return True

    def _prune(self, row: int) -> Iterator[bytes]:
        """Hide the chunk if it is not useful, then the chunks before it that are not useful now.

        Yields their hashes.
        """
        shown = self.shown
        while (
            row != _NONE and not shown.is_end[row] and not any(True for _ in shown.following(row))
        ):
            chunk_hash, previous = shown.hashes[row], shown.previous[row]
            if shown.rows.get(chunk_hash) != row:
                break  # It is hidden already.
            shown.remove_row(row)
            if chunk_hash in self.present:
                self.hidden[chunk_hash] = None
            yield chunk_hash
            row = previous
