"""Fixtures: a real daemon process on a socket of its own."""

import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hybridkv.client.control import Control, DaemonUnreachableError
from hybridkv.client.spawn import daemon_command

DEADLINE_SECONDS = 20.0


class DaemonProcess:
    """`hybridkv serve` as users run it; can be killed and started again on the same socket."""

    def __init__(self, socket_path: Path, ram: str) -> None:
        self.socket_path = str(socket_path)
        self._ram = ram
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [*daemon_command(self.socket_path, None), "--ram", self._ram, "--metrics-port", "0"]
        self.process = subprocess.Popen(command)
        deadline = time.monotonic() + DEADLINE_SECONDS
        while True:
            try:
                with Control(self.socket_path, 0.05):
                    return
            except DaemonUnreachableError:
                assert time.monotonic() < deadline, "the daemon does not answer"
                assert self.process.poll() is None, "the daemon ended"

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        assert self.process is not None
        self.process.terminate()
        return self.process.wait(DEADLINE_SECONDS)


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[DaemonProcess]:
    """A running daemon with 64 MiB."""
    running = DaemonProcess(tmp_path / "daemon.sock", "64MiB")
    running.start()
    yield running
    if running.process is not None and running.process.poll() is None:
        running.stop()


@pytest.fixture
def other_users_socket() -> Iterator[str]:
    """The socket of a daemon that user 65534 runs; needs root to act as another user."""
    if os.geteuid() != 0:
        pytest.skip("needs root to act as another user")
    place = Path("/tmp") / f"hybridkv-test-{os.getpid()}"
    code = (
        "import os, sys; from hybridkv.cli import serve; from hybridkv.cli.main import main; os.setuid(65534);"
        " sys.exit(main(['serve', '--socket', sys.argv[1], '--ram', '16MiB', '--metrics-port', '-1']))"
    )
    process = subprocess.Popen([sys.executable, "-c", code, f"{place}/daemon.sock"])
    try:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not (place / "daemon.sock").is_socket():
            assert time.monotonic() < deadline
            assert process.poll() is None, "the other user's daemon ended"
        yield f"{place}/daemon.sock"
    finally:
        process.terminate()
        process.wait(DEADLINE_SECONDS)
        shutil.rmtree(place, ignore_errors=True)


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> random.Random:
    """A random generator whose seed is printed with a failure."""
    seed = random.SystemRandom().getrandbits(32)
    print(f"{request.node.nodeid}: seed {seed}")
    return random.Random(seed)
