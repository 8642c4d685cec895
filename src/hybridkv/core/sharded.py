"""A dictionary that never makes anybody wait while it grows."""

from collections.abc import Hashable, Iterator, MutableMapping
from itertools import chain
from typing import TypeVar, overload

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
T = TypeVar("T")
_SHARDS = 256  # A power of two.


class ShardedDict(MutableMapping[K, V]):
    """A dictionary in 256 parts, of which one grows at a time. Keys are in no order.

    A single dictionary of 100,000 keys copies all of them whenever it grows, for some 5 ms, and one
    of a million for a tenth of a second. Keys are hashes, so that the parts are alike, and a part
    of a million keys has four thousand, whose copy is some dozen pages.
    """

    def __init__(self) -> None:
        self._shards: list[dict[K, V]] = [{} for _ in range(_SHARDS)]
        self._count = 0

    def _shard(self, key: K) -> dict[K, V]:
        return self._shards[hash(key) & (_SHARDS - 1)]

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[K]:
        return chain.from_iterable(self._shards)

    def __contains__(self, key: object) -> bool:
        return key in self._shards[hash(key) & (_SHARDS - 1)]

    def __getitem__(self, key: K) -> V:
        return self._shard(key)[key]

    def __setitem__(self, key: K, value: V) -> None:
        shard = self._shard(key)
        before = len(shard)
        shard[key] = value
        self._count += len(shard) - before

    def __delitem__(self, key: K) -> None:
        del self._shard(key)[key]
        self._count -= 1

    @overload
    def get(self, key: K, default: None = None, /) -> V | None: ...
    @overload
    def get(self, key: K, default: V, /) -> V: ...
    @overload
    def get(self, key: K, default: T, /) -> V | T: ...
    def get(self, key: K, default: object = None, /) -> object:
        """Return the value of a key, or `default`. The inherited form raises and catches."""
        return self._shard(key).get(key, default)

    def take_keys(self, count: int) -> list[K]:
        """Remove so many keys, or all that there are. Returns them."""
        taken: list[K] = []
        for shard in self._shards if self._count else ():
            while shard and len(taken) < count:
                taken.append(shard.popitem()[0])
            if len(taken) == count:
                break
        self._count -= len(taken)
        return taken

    def take_parts(self) -> list[dict[K, V]]:
        """Empty the dictionary, and return its parts, so that they are freed one at a time."""
        parts, self._shards = self._shards, [{} for _ in range(_SHARDS)]
        self._count = 0
        return parts
