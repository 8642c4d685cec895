"""Taking an arena over."""

import fcntl
import os
from pathlib import Path

import pytest

from hybridkv.shm.arena import SHM_DIR, ArenaGoneError, attach_arena, create_arena


def test_an_arena_removed_meanwhile_is_not_taken_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`hybridkv arenas --prune` has the lock between the next daemon's open and its lock."""
    path = SHM_DIR / f"hybridkv-test-{os.getpid()}-{tmp_path.name}"
    create_arena(path, 1 << 20).close()
    lock = fcntl.flock

    def late(fd: int, operation: int) -> None:
        path.unlink()
        lock(fd, operation)

    monkeypatch.setattr("hybridkv.shm.arena.fcntl.flock", late)
    with pytest.raises(ArenaGoneError, match="was removed meanwhile"):
        attach_arena(path, 1 << 20, owner=True)
