"""Arenas of a test's own."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from hybridkv.shm.arena import SHM_DIR, Arena, create_arena


@contextmanager
def unnamed_arena(size_bytes: int) -> Iterator[Arena]:
    """An arena that has memory for all its slots, and that nobody else can attach."""
    made = create_arena(SHM_DIR / f"hybridkv-test-{threading.get_native_id()}", size_bytes)
    made.unlink()
    made.reserve(0, size_bytes)
    yield made
    made.close()
