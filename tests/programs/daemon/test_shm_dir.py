"""The arena in another directory than /dev/shm, and engines that have it at another path."""

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from hybridkv.client.control import ControlClient
from hybridkv.core.errors import ConfigError
from hybridkv.daemon.filesystem import stale_arenas
from hybridkv.lab.daemon_process import DaemonProcess
from hybridkv.shm.arena import SHM_DIR, arena_seen, shm_directory
from tests.forked_daemon import ForkedDaemon

RAM = "16MiB"


@pytest.fixture
def shm_path() -> Iterator[Path]:
    """An empty directory on a tmpfs."""
    with tempfile.TemporaryDirectory(prefix="hybridkv-test-", dir=SHM_DIR) as path:
        yield Path(path)


def daemon_in(shm_path: Path, tmp_path: Path, options: Sequence[str] = ()) -> DaemonProcess:
    """A daemon that has its arena there."""
    return ForkedDaemon(
        str(tmp_path / "d.sock"), RAM, options=["--shm-dir", str(shm_path), *options]
    )


def test_the_arena_is_there_and_nowhere_else(shm_path: Path, tmp_path: Path) -> None:
    with daemon_in(shm_path, tmp_path) as daemon:
        (arena,) = shm_path.iterdir()
        with ControlClient(daemon.socket_path) as control:
            assert control.welcome.arena_path == str(arena)
        daemon.kill()
        assert stale_arenas(Path(daemon.socket_path), SHM_DIR) == []
        daemon.start()
        assert list(shm_path.iterdir()) == [arena], "it was taken over"
    assert list(shm_path.iterdir()) == []


def test_the_variable_is_the_daemons_default(
    shm_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HYBRIDKV_SHM_DIR", str(shm_path))
    with ForkedDaemon(str(tmp_path / "d.sock"), RAM):
        assert len(list(shm_path.iterdir())) == 1


def test_an_engine_may_have_the_directory_at_another_path(
    shm_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The setting comes first, then the variable. Without either the daemon's path is used."""
    (tmp_path / "here").symlink_to(shm_path)
    here = tmp_path / "here"
    (shm_path / "arena").touch()
    there = "/nowhere/arena"
    assert arena_seen(there) == Path(there)
    assert arena_seen(there, str(here)) == here / "arena"
    monkeypatch.setenv("HYBRIDKV_SHM_DIR", str(here))
    assert arena_seen(there) == here / "arena"
    assert arena_seen(there, str(tmp_path)) == Path(there)
    monkeypatch.setenv("HYBRIDKV_SHM_DIR", "")
    assert shm_directory() == SHM_DIR


@pytest.mark.parametrize("wrong", ["relative", "/nowhere"])
def test_what_is_no_directory_is_refused(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"^shm-dir='?.*works$"):
        shm_directory(wrong)
    monkeypatch.setenv("HYBRIDKV_SHM_DIR", wrong)
    with pytest.raises(ConfigError, match=r"^HYBRIDKV_SHM_DIR='?.*works$"):
        shm_directory()


def test_a_directory_on_a_disk_is_told_once(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    with daemon_in(tmp_path / "disk", tmp_path, ["--fresh"]) as daemon:
        assert len(list((tmp_path / "disk").iterdir())) == 1
    log = Path(daemon.socket_path).with_suffix(".log").read_text().splitlines()
    (line,) = [line for line in log if "tmpfs" in line]
    assert " WARNING shm-dir: " in line
    assert line.endswith("so the cache is written to a disk; /dev/shm works")
