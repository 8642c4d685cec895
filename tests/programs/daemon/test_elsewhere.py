"""A worker in another pid namespace, whose process the daemon can neither name nor watch."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, NamedTuple

import pytest

from hybridkv.client.control import ControlClient, DaemonUnreachableError
from hybridkv.client.start_daemon import daemon_command
from hybridkv.daemon.filesystem import stale_arenas
from hybridkv.shm.slots import slot_bytes
from tests.programs.daemon.holder import PART, SLOTS
from tests.waiting import until

APART = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
HELD_BYTES = SLOTS * slot_bytes(PART, 1)


def answers(socket_path: str) -> bool:
    """Return True where a daemon serves the socket."""
    try:
        with ControlClient(socket_path):
            return True
    except DaemonUnreachableError:
        return False


@contextmanager
def daemon_apart(socket_path: str) -> Iterator[None]:
    """A daemon in a pid namespace of its own, which ends with -9."""
    command = daemon_command(socket_path, ["--ram", "64MiB", "--metrics-port", "-1"])
    with subprocess.Popen([*APART, *command]) as daemon:
        try:
            until(lambda: answers(socket_path), "the daemon serves")
            yield
        finally:
            daemon.kill()
            # It ends a moment after the command that made its namespace.
            until(lambda: bool(stale_arenas(Path(socket_path))), "its arena is nobody's")


@pytest.fixture
def socket_path(tmp_path: Path) -> Iterator[str]:
    """The path at which daemons apart serve."""
    if subprocess.run([*APART, "true"], check=False, capture_output=True).returncode:
        pytest.skip("needs the right to make a pid namespace")
    path = tmp_path / "d.sock"
    yield str(path)
    for arena in stale_arenas(path):
        arena.unlink()


def held_bytes(socket_path: str) -> int:
    """Bytes of write slots that are granted and not committed, by this daemon or one before."""
    with ControlClient(socket_path) as control:
        values = control.stats().values
    return int(max(values["bytes_writing"], values["bytes_held"]))


class Pipes(NamedTuple):
    """The standard input and output of a process."""

    stdin: IO[str]
    stdout: IO[str]

    def close(self) -> None:
        """Have a process of `elsewhere` close its connections."""
        print("close", file=self.stdin, flush=True)
        assert self.stdout.readline() == "closed\n"


@contextmanager
def elsewhere(socket_path: str, mapped: str) -> Iterator[Pipes]:
    """A process of `elsewhere`, which holds slots."""
    module = [sys.executable, "-m", "tests.programs.daemon.elsewhere"]
    with subprocess.Popen(
        [*module, socket_path, mapped], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "held\n"
            assert held_bytes(socket_path) == HELD_BYTES
            yield Pipes(process.stdin, process.stdout)
        finally:
            process.kill()


def test_its_slots_are_kept_until_it_ends(socket_path: str) -> None:
    """Its connections end as they do at a reset. Its copies do not."""
    with daemon_apart(socket_path):
        with elsewhere(socket_path, "mapped") as process:
            process.close()
            assert held_bytes(socket_path) == HELD_BYTES
        until(lambda: held_bytes(socket_path) == 0, "its end is noticed by its lock")


def test_its_slots_are_kept_by_the_next_daemon(socket_path: str) -> None:
    with ExitStack() as first:
        first.enter_context(daemon_apart(socket_path))
        with elsewhere(socket_path, "mapped"):
            first.close()
            with daemon_apart(socket_path):
                assert held_bytes(socket_path) == HELD_BYTES
    with daemon_apart(socket_path):
        assert held_bytes(socket_path) == 0, "it has ended"


def test_without_a_mapping_its_slots_end_with_its_connections(socket_path: str) -> None:
    """Nothing can be written without one."""
    with daemon_apart(socket_path), elsewhere(socket_path, "unmapped") as process:
        process.close()
        until(lambda: held_bytes(socket_path) == 0, "its slots are free")
