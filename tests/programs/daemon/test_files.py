"""The daemon's files are removed under it, or stand in its way."""

import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from hybridkv.client.control import ControlClient, DaemonUnreachableError
from hybridkv.client.start_daemon import EXIT_ALREADY_SERVED, daemon_command
from hybridkv.daemon.filesystem import stale_arenas
from hybridkv.lab.daemon_process import DaemonProcess
from tests.forked_daemon import ForkedDaemon, run_forked
from tests.waiting import until

SERVE = ["--ram", "16MiB", "--metrics-port", "-1"]


def boot_at(socket_path: str) -> str:
    """Return the life of the daemon that answers there, or "" where none does."""
    try:
        with ControlClient(socket_path, 0.5) as control:
            return control.welcome.boot
    except DaemonUnreachableError:
        return ""


def serve(socket_path: str, *options: str) -> "subprocess.CompletedProcess[str]":
    """Run a daemon that is expected to end by itself."""
    return run_forked(daemon_command(socket_path, [*SERVE, *options])[3:])


@pytest.mark.parametrize("removed", ["socket", "lock", "directory"])
def test_what_is_removed_under_a_daemon_is_made_again(tmp_path: Path, removed: str) -> None:
    """A logout removes files, or a person who cleans up. Connected clients see nothing of it."""
    path = tmp_path / "place" / "daemon.sock"
    lock = path.with_name("daemon.sock.lock")
    with ForkedDaemon(str(path), "16MiB") as daemon, ControlClient(daemon.socket_path) as connected:
        boot = connected.welcome.boot
        if removed == "directory":
            shutil.rmtree(path.parent)
        else:
            (path if removed == "socket" else lock).unlink()
        until(lambda: path.exists() and lock.exists(), "they are there again")
        until(lambda: boot_at(daemon.socket_path) == boot, "new clients are greeted")
        assert connected.stats().values["connections"] >= 1
        assert serve(daemon.socket_path).returncode == EXIT_ALREADY_SERVED
        assert boot_at(daemon.socket_path) == boot


def test_a_second_daemon_without_a_lock_in_its_way_ends(daemon: DaemonProcess) -> None:
    """While the first one hangs it cannot make its lock again, and its arena is in use."""
    with ControlClient(daemon.socket_path) as control:
        arena, boot = Path(control.welcome.arena_path), control.welcome.boot
    assert daemon.process is not None
    daemon.process.send_signal(signal.SIGSTOP)
    try:
        Path(f"{daemon.socket_path}.lock").unlink()
        assert serve(daemon.socket_path, "--fresh").returncode == EXIT_ALREADY_SERVED
        assert arena.exists()
    finally:
        daemon.process.send_signal(signal.SIGCONT)
    until(lambda: boot_at(daemon.socket_path) == boot, "the first one serves")


def test_a_start_that_fails_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "daemon.sock"
    (tmp_path / "file").touch()
    ended = serve(str(path), "--disk", str(tmp_path / "file"))
    assert ended.returncode == 2, ended
    assert not path.exists()
    assert not stale_arenas(path)


def test_a_start_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "daemon.sock"
    (tmp_path / "file").touch()
    with ForkedDaemon(str(path), "16MiB") as daemon:
        daemon.stop()
        (left,) = stale_arenas(path)
        assert serve(str(path), "--disk", str(tmp_path / "file")).returncode == 2
        assert stale_arenas(path) == [left]
