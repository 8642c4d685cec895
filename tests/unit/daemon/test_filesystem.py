"""The directory of the socket: whose it must be, and that asking changes nothing."""

import os
from pathlib import Path

import pytest

from hybridkv.core.errors import ConfigError
from hybridkv.daemon.filesystem import check_private_directory, make_private_directory
from hybridkv.shm.arena import SHM_DIR, create_arena


def test_asking_makes_nothing(tmp_path: Path) -> None:
    wanted = tmp_path / "a" / "b"
    check_private_directory(wanted, "socket")
    assert not wanted.parent.exists()
    make_private_directory(wanted, "socket")
    check_private_directory(wanted, "socket")
    assert wanted.stat().st_mode & 0o777 == 0o700


def test_what_is_not_mine_alone_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "link").symlink_to(tmp_path)
    (tmp_path / "file").touch()
    for name, says in (
        ("open", "others may write"),
        ("link", "not a directory of its own"),
        ("file", "not a dir"),
    ):
        with pytest.raises(ConfigError, match=f"socket: .*{says}.* works"):
            check_private_directory(tmp_path / name, "socket")
    with pytest.raises(ConfigError, match=r"socket: .* works"):
        check_private_directory(tmp_path / "file" / "below", "socket")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_place_that_is_not_mine_to_make(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match=r"you may not make directory"):
        check_private_directory(tmp_path / "a", "socket")


def test_an_arena_that_cannot_be_made_leaves_nothing(tmp_path: Path) -> None:
    """The file system refuses the file's size, or has no room for its pages."""
    shared = SHM_DIR / f"hybridkv-test-{os.getpid()}-none"
    for path, slots_bytes, more_bytes in ((tmp_path / "a", 1 << 62, 0), (shared, 4096, 1 << 50)):
        before = os.listdir("/proc/self/fd")
        with pytest.raises(OSError, match=r"File too large|No space left"):
            create_arena(path, slots_bytes, more_bytes)
        assert not path.exists()
        assert len(os.listdir("/proc/self/fd")) == len(before)
