"""Which chunks routers were told of: those of which some hit is made, as far as one engine knows.

A chunk is *of use* while a hit ends with it or behind it in its chain of prefixes.  Where recurrent states or windows
are kept at some boundaries only, the chunks between two of them are of use to the hit at the later one, and nothing is
said of a chunk behind the last one.  What is shown is closed under "the chunk before", so a router that follows
prefixes finds no hole.  Whatever is not known for sure is not shown.
"""

from collections.abc import Iterable, Iterator, Sequence

from hybridkv.core.coverage import largest_hit, needed_chunks
from hybridkv.core.geometry import Geometry, Group, Kind

CHUNKS_MAX = 1 << 17
"""Known at once; of more nothing is shown. Some 400 bytes each."""


class _Shown:
    __slots__ = ("before", "behind", "chunk", "is_end", "key")

    def __init__(self, key: bytes, chunk: int, before: "_Shown | None") -> None:
        self.key = key
        self.chunk = chunk
        """Its number in the prompt."""
        self.before = before
        self.behind: set[_Shown] = set()
        self.is_end = False
        """Whether a hit may end with it."""


class Announced:
    """Chunks by key, a hash that covers all tokens up to their end."""

    def __init__(self, geometry: Geometry, chunks_max: int = CHUNKS_MAX) -> None:
        self._geometry = geometry
        self._chunks_max = chunks_max
        self._present: dict[bytes, int] = {}
        """A bit for each group (by index) whose object is known to be there."""
        self._shown: dict[bytes, _Shown] = {}
        self._full = sum(1 << index for index, group in enumerate(geometry.groups) if group.kind is Kind.FULL)
        self._reach = max(_reach(geometry, group) for group in geometry.groups)

    def __len__(self) -> int:
        """Chunks that are shown."""
        return len(self._shown)

    def __contains__(self, key: bytes) -> bool:
        return key in self._shown

    def learn(self, key: bytes, group_index: int) -> bool:
        """An object is there; whether that was news."""
        known, bit = self._present.get(key, 0), 1 << group_index
        if known & bit or (not known and len(self._present) >= self._chunks_max):
            return False
        self._present[key] = known | bit
        return True

    def show(self, keys: Sequence[bytes], first: int = 0) -> list[int]:
        """The chunks of a prompt that are of use and were not shown, ascending. Nothing is new before `first`."""
        groups = self._geometry.groups
        present = [self._present.get(key, 0) for key in keys]
        masks = [bytes(known >> index & 1 for known in present) for index in range(len(groups))]
        hit = largest_hit(self._geometry, masks, len(keys))
        fresh: list[int] = []
        before: _Shown | None = None
        for chunk, key in enumerate(keys[:hit]):
            shown = self._shown.get(key)
            if shown is None:
                shown = self._shown[key] = _Shown(key, chunk, before)
                if before is not None:
                    before.behind.add(shown)
                fresh.append(chunk)
                first = min(first, chunk)
            if chunk >= first and not shown.is_end:
                needs = [needed_chunks(self._geometry, group, chunk + 1) for group in groups]
                shown.is_end = all(
                    mask.find(0, need.start, need.stop) < 0 for mask, need in zip(masks, needs, strict=True)
                )
            before = shown
        return fresh

    def lose(self, key: bytes, group_index: int) -> list[bytes]:
        """An object is not there any more: the keys that are not shown any more."""
        known, bit = self._present.get(key, 0), 1 << group_index
        if not known & bit:
            return []
        if known == bit:
            del self._present[key]
        else:
            self._present[key] = known & ~bit
        shown = self._shown.get(key)
        if shown is None:
            return []
        if bit & self._full:
            return list(self._hide(shown))
        near = list(_behind(shown, self._reach))
        for one in near:
            one.is_end = one.is_end and self._may_end(one)
        return [key for one in reversed(near) for key in self._prune(one)]

    def clear(self) -> list[bytes]:
        """Nothing is known any more: the keys that were shown."""
        keys = list(self._shown)
        self._shown.clear()
        self._present.clear()
        return keys

    def check(self) -> None:
        """Re-derive what is shown; raises AssertionError."""
        for key, one in self._shown.items():
            assert one.key == key
            assert one.is_end or one.behind, "of no use"
            assert not one.is_end or self._may_end(one)
            assert self._present.get(key, 0) & self._full == self._full
            if one.before is None:
                assert one.chunk == 0
            else:
                assert self._shown[one.before.key] is one.before
                assert one in one.before.behind
                assert one.before.chunk == one.chunk - 1
            for other in one.behind:
                assert self._shown[other.key] is other

    def _may_end(self, shown: _Shown) -> bool:
        """Whether what a hit there needs of groups with windows and states is known to be there."""
        for index, group in enumerate(self._geometry.groups):
            if group.kind is Kind.FULL:
                continue
            one: _Shown | None = shown
            for _ in needed_chunks(self._geometry, group, shown.chunk + 1):
                assert one is not None, "what is before a shown chunk is shown"
                if not self._present.get(one.key, 0) >> index & 1:
                    return False
                one = one.before
        return True

    def _prune(self, shown: _Shown) -> Iterator[bytes]:
        """Hide a chunk that is of no use, and those before it that it alone was of use to."""
        one: _Shown | None = shown
        while one is not None and not one.is_end and not one.behind and one.key in self._shown:
            del self._shown[one.key]
            yield one.key
            if one.before is not None:
                one.before.behind.remove(one)
            one = one.before

    def _hide(self, shown: _Shown) -> Iterator[bytes]:
        """Hide a chunk without which nothing behind it is of use, and what was of use to those alone."""
        for one in reversed(list(_behind(shown, None))):
            one.is_end = False
            one.behind.clear()
            if one is not shown:
                del self._shown[one.key]
                yield one.key
        yield from self._prune(shown)


def _behind(shown: _Shown, chunks: int | None) -> Iterator[_Shown]:
    """A chunk and those behind it, `chunks` further on at most (None: all), none before the one it follows."""
    level: Iterable[_Shown] = [shown]
    while level:
        yield from level
        level = [other for one in level for other in one.behind] if chunks is None or chunks > 0 else []
        chunks = None if chunks is None else chunks - 1


def _reach(geometry: Geometry, group: Group) -> int:
    """How many chunks behind an object's own there may be a hit that needs it; 0 for full attention, see `lose`."""
    if group.kind in (Kind.FULL, Kind.RECURRENT):
        return 0
    return -(-(group.window_tokens + group.extra_retained_tokens) // geometry.chunk_tokens)
