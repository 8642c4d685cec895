"""The directory tier where the file system is a server's. tests/fault/nfs has a real one."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from hybridkv.tiers.conformance.samples import make_sample, read
from hybridkv.tiers.contract import MissingError, RecordStart, TierError
from hybridkv.tiers.disk.fsck import fsck, list_files
from hybridkv.tiers.disk.index import TOUCH_SECONDS
from hybridkv.tiers.disk.writers import LOST_SECONDS, QUIET_SECONDS
from tests.fault.fuse import FaultyFs, Op
from tests.invariants import check_disk
from tests.unit.tiers.test_disk import look, opened, path_of

NFS = 0x6969  # The kind of the file system (statfs(2)).
MINUTES_OFF = 600.0
A, B = make_sample(1), make_sample(2)


def fails_once(name: str, number: int, before: Callable[[], object]) -> Any:
    """Patches a function of `os`: its first call calls `before`, and fails with this error."""
    real, turns = getattr(os, name), iter([True])

    def fails(*args: Any, **options: Any) -> Any:
        if next(turns, False):
            before()
            raise OSError(number, os.strerror(number))
        return real(*args, **options)

    return mock.patch(f"os.{name}", fails)


@pytest.fixture
def _on_nfs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hybridkv.tiers.disk.alive.file_system", lambda _: NFS)


def test_a_file_that_another_node_removed_while_it_is_open_is_missing(tmp_path: Path) -> None:
    tier = opened(tmp_path)
    tier.put([A.write_request(), B.write_request()])
    path = Path(path_of(tier, A.key))
    with fails_once("preadv", errno.ESTALE, path.unlink):
        assert isinstance(read(tier, A), MissingError)
    assert not tier.peek(A.key)
    assert read(tier, B) is None
    check_disk(tier)


def test_a_file_that_another_node_replaced_while_it_is_open_is_read(tmp_path: Path) -> None:
    tier = opened(tmp_path)
    tier.put([A.write_request()])
    with fails_once("preadv", errno.ESTALE, lambda: None):
        assert read(tier, A) is None
    with fails_once("fstat", errno.ESTALE, lambda: None):
        assert isinstance(tier.read_starts([A.key])[0], RecordStart)
    with fails_once("fstat", errno.ESTALE, Path(path_of(tier, A.key)).unlink):
        assert isinstance(tier.read_starts([A.key])[0], MissingError)


@pytest.mark.parametrize("number", [errno.ENOENT, errno.EIO, errno.ETIMEDOUT])
@pytest.mark.parametrize("is_stuck", [False, True])
def test_a_file_that_a_server_renamed_with_an_error_is_removed(
    tmp_path: Path, number: int, is_stuck: bool
) -> None:
    """The answer was lost, and the server finds no file when it is asked again. Or it is late."""
    tier = opened(tmp_path)
    assert tier.put([B.write_request()]) == [None]
    os.mkdir(tier.writers.home / A.key[32:33].hex())
    rename, unlink = os.rename, os.unlink

    def renames_and_fails(old: str, new: str) -> None:
        rename(old, new)
        raise OSError(number, os.strerror(number), old)

    def is_away(path: str) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), path)

    with (
        mock.patch("os.rename", renames_and_fails),
        mock.patch("os.unlink", is_away if is_stuck else unlink),
    ):
        assert isinstance(tier.put([A.write_request()])[0], TierError)
    check_disk(tier)
    tier.tend()
    check_disk(tier)
    assert [path.name for path in tier.writers.home.glob("??/*")] == [
        os.path.basename(path_of(tier, B.key))
    ]
    assert tier.put([A.write_request()]) == [None]
    assert read(tier, A) is None
    check_disk(tier)


def test_what_a_client_that_died_has_renamed_is_removed_and_is_no_record(tmp_path: Path) -> None:
    tier, neighbour = opened(tmp_path), opened(tmp_path, "other")
    tier.put([A.write_request()])
    left = Path(path_of(tier, A.key)).with_name(".nfs0000000000001a2b00000003")
    left.write_bytes(bytes(50_000))
    look(neighbour)
    assert list(neighbour.keys()) == [A.key]
    report = fsck(tmp_path, list_files(tmp_path), repair=False, step=lambda: None)
    found = {writer.name: (writer.foreign, writer.leftovers) for writer in report.writers}
    assert found == {"here": (0, 1), "other": (0, 0)}
    real, held = os.unlink, []

    def keeps(path: str) -> None:
        """As an NFS client: a process has the file open."""
        if str(path) == str(left):
            held.append(path)
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), path)
        real(path)

    with mock.patch("os.unlink", keeps):
        again = opened(tmp_path)
    assert held
    assert again.gauges()["bytes"] >= 50_000, "it counts while it is there"
    check_disk(again)
    left.unlink()
    again.tend()
    assert not again.index.strays
    left.write_bytes(bytes(50_000))
    again = opened(tmp_path)
    assert not left.exists()
    check_disk(again)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_proves_nothing(tmp_path: Path, number: int) -> None:
    with mock.patch("fcntl.flock", side_effect=OSError(number, os.strerror(number))):
        tier, other = opened(tmp_path), opened(tmp_path, "other")
        assert other.put([A.write_request()]) == [None]
        touched_at = mtime(other.writers.alive) - 2 * QUIET_SECONDS
        os.utime(other.writers.alive, (touched_at, touched_at))
        look(tier)
    look(tier)
    assert (tmp_path / "objects/other").exists(), "it has not said that it locks"
    assert read(tier, A) is None


@pytest.mark.usefixtures("_on_nfs")
def test_after_an_outage_no_writer_is_taken_over_that_has_not_come_back_yet(tmp_path: Path) -> None:
    """For two hours no writer could touch its file. The first that can again is this one."""
    tier, other = opened(tmp_path), opened(tmp_path, "other")
    other.put([A.write_request()])
    for writer in (tier, other):
        touched_at = os.stat(writer.writers.alive).st_mtime - 2 * LOST_SECONDS
        os.utime(writer.writers.alive, (touched_at, touched_at))
    tier.writers.alive_due_at = 0
    look(tier)
    assert (tmp_path / "objects/other").exists()
    came_at = os.stat(tier.writers.alive).st_mtime
    for seconds, is_there in ((QUIET_SECONDS - 1, True), (QUIET_SECONDS + 1, False)):
        os.utime(tier.writers.alive, (came_at + seconds, came_at + seconds))
        look(tier)
        assert (tmp_path / "objects/other").exists() == is_there
    assert read(tier, A) is None


@pytest.mark.usefixtures("_on_nfs")
def test_a_daemon_that_starts_gives_silent_writers_time_to_come_back(tmp_path: Path) -> None:
    """The server may be back so lately that they could say nothing yet."""
    opened(tmp_path, "silent")
    os.utime(tmp_path / "objects/silent/alive", (0, 0))
    tier = opened(tmp_path)
    look(tier)
    assert sorted(os.listdir(tmp_path / "objects")) == ["here", "silent"]
    later = os.stat(tier.writers.alive).st_mtime + QUIET_SECONDS + 1
    os.utime(tier.writers.alive, (later, later))
    look(tier)
    assert os.listdir(tmp_path / "objects") == ["here"]


def mtime(path: str | Path) -> float:
    return os.stat(path).st_mtime


@pytest.mark.parametrize("ahead_seconds", [-MINUTES_OFF, MINUTES_OFF])
def test_the_files_clock_may_be_minutes_off(tmp_path: Path, ahead_seconds: float) -> None:
    for name in ("backing", "shown"):
        (tmp_path / name).mkdir()
    with FaultyFs(tmp_path / "backing", tmp_path / "shown") as files:
        files.clock_ahead_seconds = ahead_seconds
        root = files.mountpoint
        tier, other = opened(root), opened(root, "other")
        assert tier.put([A.write_request()]) == [None]
        assert other.put([B.write_request()]) == [None]
        look(tier)
        look(other)
        assert sorted(os.listdir(root / "objects")) == ["here", "other"]
        report = fsck(root, list_files(root), repair=False, step=lambda: None)
        assert [writer.is_alive for writer in report.writers] == [True, True]
        (start,) = tier.read_starts([A.key])
        assert isinstance(start, RecordStart)
        assert start.used_at is not None
        assert abs(start.used_at - mtime(tmp_path / "backing/objects/here/alive")) < 60
        # A record that was last used more than TOUCH_SECONDS ago by the files' clock.
        path = path_of(tier, A.key)
        now = mtime(path)
        for age_seconds, is_touched in ((TOUCH_SECONDS - 60, False), (TOUCH_SECONDS + 60, True)):
            os.utime(path, (now - age_seconds, now - age_seconds))
            tier = opened(root)
            assert read(tier, A) is None
            assert (abs(mtime(path) - now) < 60) == is_touched
        # A writer that is silent for 55 minutes or for 65, by the files' clock.
        for minutes, is_there in ((55, True), (65, False)):
            touched_at = now - 60 * minutes
            os.utime(other.writers.alive, (touched_at, touched_at))
            os.utime(tier.writers.alive, (now + QUIET_SECONDS + 1,) * 2)
            look(tier)
            assert (root / "objects/other").exists() == is_there
        assert files.count(Op.SETATTR)
