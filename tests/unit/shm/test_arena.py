"""Taking an arena over."""

import fcntl
import os
from pathlib import Path

import pytest

from hybridkv.core.errors import ConfigError
from hybridkv.core.sizes import parse_size
from hybridkv.shm.arena import (
    RAM_BYTES_MIN,
    SHM_DIR,
    ArenaGoneError,
    attach_arena,
    check_ram,
    create_arena,
    new_lock,
    take_over_arena,
)
from hybridkv.shm.trailer import trailer_bytes


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


@pytest.mark.parametrize("free_bytes", [0, 600 << 10, 1 << 20, 1100 << 10, 3 << 20, 1 << 30])
@pytest.mark.parametrize("ram_bytes", [0, 100, RAM_BYTES_MIN, 1 << 20, 3 << 20, 1 << 30, 1 << 50])
def test_the_size_that_a_refusal_names_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free_bytes: int, ram_bytes: int
) -> None:
    """Also where hardly anything is free. Where no size fits, none is named."""
    monkeypatch.setattr("hybridkv.shm.arena.shm_free_bytes", lambda _: free_bytes)
    if ram_bytes >= RAM_BYTES_MIN and ram_bytes + trailer_bytes(ram_bytes) <= free_bytes:
        check_ram(ram_bytes, "ram", tmp_path)
        return
    with pytest.raises(ConfigError) as refused:
        check_ram(ram_bytes, "ram", tmp_path)
    value = refused.value.value
    assert (value is None) == (free_bytes <= 600 << 10)
    if value is None:
        assert "; another shm-dir works" in str(refused.value)
    else:
        check_ram(parse_size(value, "ram"), "ram", tmp_path)
        assert f'; "{value}" works' in str(refused.value)
