"""Mooncake's client library, as the child process of the Mooncake tier calls it (isolated)."""

import ctypes
import mmap

from mooncake.store import MooncakeDistributedStore

INVALID_PARAMS = -600
EXISTS = -705


class MooncakeLibrary:
    """The store's client. Each call returns a code for each item. A code below 0 is an error."""

    def __init__(self, memory: mmap.mmap) -> None:
        """Records are read into `memory`, and written from it."""
        self._size = len(memory)
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._memory = memory
        self._store = MooncakeDistributedStore()

    def setup(self, config: dict[str, str]) -> list[int]:
        """Connect to the master, and register the memory. Returns one code, 0 = well."""
        code = self._store.setup(config)
        return [code or self._store.register_buffer(self._base, self._size)]

    def find_objects(self, names: list[str]) -> list[int]:
        """Returns 1 for each object that is there, otherwise 0."""
        return list(self._store.batch_is_exist(names))

    def put_objects(self, names: list[str], offsets: list[int], sizes: list[int]) -> list[int]:
        """Publish objects from the memory. Returns the size of each object that is there now."""
        codes = self._store.batch_put_from(names, self._at(offsets), sizes)
        there = (0, EXISTS)
        return [size if code in there else code for size, code in zip(sizes, codes, strict=True)]

    def get_objects(self, names: list[str], offsets: list[int], sizes: list[int]) -> list[int]:
        """Read objects into the memory. Returns their sizes, whatever sizes were asked for."""
        codes = self._store.batch_get_into(names, self._at(offsets), sizes)
        # The library also returns "invalid" for an object that is larger than its memory.
        return [
            self._size_of(name, size) if code == INVALID_PARAMS else code
            for name, size, code in zip(names, sizes, codes, strict=True)
        ]

    def remove_objects(self, names: list[str], force: bool) -> list[int]:
        """Remove objects, with `force` in spite of leases. Returns 0 for each removed object."""
        return list(self._store.batch_remove(names, force))

    def close(self) -> list[int]:
        """Leave the store in order. Returns one code."""
        return [self._store.close()]

    def _at(self, offsets: list[int]) -> list[int]:
        return [self._base + offset for offset in offsets]

    def _size_of(self, name: str, asked: int) -> int:
        size = int(self._store.get_size(name))
        return INVALID_PARAMS if size == asked else size
