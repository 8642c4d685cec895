"""Taking an arena over."""

import fcntl
import os
from pathlib import Path

import pytest

from hybridkv.shm.arena import (
    SHM_DIR,
    ArenaGoneError,
    attach_arena,
    create_arena,
    new_lock,
    take_over_arena,
)


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
        take_over_arena(path, 1 << 20, 1 << 20)


def test_a_lock_is_held_until_no_mapping_with_it_is_left(tmp_path: Path) -> None:
    path = SHM_DIR / f"hybridkv-test-{os.getpid()}-{tmp_path.name}"
    arena, lock, unused_lock = create_arena(path, 1 << 20), new_lock(), new_lock()
    try:
        first, second = (attach_arena(path, 1 << 20, lock=lock) for _ in range(2))
        assert arena.is_locked(lock)
        assert not arena.is_locked(unused_lock)
        attach_arena(path, 1 << 20).close()
        first.close()
        assert arena.is_locked(lock), "closing another descriptor of the file ends no lock"
        view = second.memory[:1]
        second.close()
        assert arena.is_locked(lock), "somebody may still write"
        del second, view
        assert not arena.is_locked(lock)
    finally:
        arena.unlink()
        arena.close()
