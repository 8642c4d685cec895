"""Another version of hybridkv on the node: its daemon, its engines, and the arena it left."""

import contextlib
import itertools
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hybridkv.client import start_daemon
from hybridkv.client.control import ControlClient
from hybridkv.client.link import peer_pid
from hybridkv.client.start_daemon import ensure_daemon
from hybridkv.daemon.filesystem import stale_arenas
from hybridkv.shm.trailer import ARENA_VERSION
from tests.unit.daemon.tierclient import Client
from tests.waiting import DEADLINE_SECONDS, has_ended, until

RAM = "16MiB"
OTHER = """
import sys
from hybridkv.shm import trailer
from hybridkv.wire import messages
messages.PROTOCOL_VERSION += int(sys.argv[2])
trailer.ARENA_VERSION += int(sys.argv[3])
from hybridkv.cli.main import main
words = ["serve", "--socket", sys.argv[1], "--ram", sys.argv[4], "--metrics-port", "-1"]
while main(words) == 3:
    pass
"""
"""A daemon whose protocol and arena are of other versions. It serves once nobody else does."""


LATE = """
import sys, time
from hybridkv.shm.arena import Arena
views, close = [], Arena.close
def keep(self):
    views.append(self.memory[:1])
    close(self)
Arena.close = keep
from hybridkv.cli.main import main
main(["serve", "--socket", sys.argv[1], "--ram", sys.argv[2], "--metrics-port", "-1"])
time.sleep(0.3)
"""
"""A daemon that has its arena locked for a while after it has let go of its socket."""


@contextlib.contextmanager
def others(socket_path: Path, count: int, protocol: int, arena: int = 0) -> Iterator[None]:
    """Daemons of another version. Where one ends, the next one serves at once."""
    command = [sys.executable, "-c", OTHER, str(socket_path), str(protocol), str(arena), RAM]
    started = [subprocess.Popen(command, stderr=subprocess.DEVNULL) for _ in range(count)]
    try:
        until(socket_path.is_socket, "the other version serves")
        yield
        assert [process.wait(DEADLINE_SECONDS) for process in started] == [0] * count
    finally:
        for process in started:
            process.kill()
            process.wait()


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """The records of our logger, also where vLLM has set its own up."""
    ours = logging.getLogger("vllm.hybridkv")
    ours.addHandler(caplog.handler)
    yield caplog
    ours.removeHandler(caplog.handler)


@pytest.fixture
def socket_path(tmp_path: Path) -> Iterator[Path]:
    """The path of a socket. The daemon that serves it is ended afterwards."""
    yield tmp_path / "daemon.sock"
    with ControlClient(str(tmp_path / "daemon.sock")) as control:
        pid = control.welcome.pid
    os.kill(pid, signal.SIGINT)
    until(lambda: not (tmp_path / "daemon.sock").exists(), "it ends")


def ours(socket_path: Path) -> None:
    """Have a daemon of our version serve, as an engine with "auto" does."""
    ensure_daemon(str(socket_path), ["--ram", RAM, "--metrics-port", "-1"])


@pytest.mark.parametrize("protocol", [-1, 1], ids=["upgrade", "rollback"])
def test_a_daemon_of_another_version_is_told_to_end_until_ours_serves(
    socket_path: Path,
    protocol: int,
    warnings: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its engines start it again at once, and had it for as long as they ran."""
    start, starts = start_daemon.start_detached, itertools.count()

    def start_after_the_next(path: str, *arguments: Any) -> Any:
        # The one of both that comes first would serve.
        if next(starts) == 0:
            until(lambda: peer_pid(path) not in (-1, first), "another one serves again")
        return start(path, *arguments)

    monkeypatch.setattr(start_daemon, "start_detached", start_after_the_next)
    with others(socket_path, 2, protocol):
        first = peer_pid(str(socket_path))
        ours(socket_path)
    ends = {record.getMessage() for record in warnings.records}
    assert len(ends) == 2
    assert all(re.search(r"\(pid \d+, since .*\) is told to end: ", text) for text in ends)


@pytest.mark.parametrize(
    ("arena", "kept"), [(0, 3), (-1, 0), (1, 0)], ids=["same", "older", "newer"]
)
def test_the_cache_goes_on_where_the_arena_is_of_one_version(
    socket_path: Path, arena: int, kept: int
) -> None:
    """From our version to another and back. An arena of an unknown version is made anew."""
    ours(socket_path)
    with Client(str(socket_path)) as client:
        client.store(1, 3)
        assert client.values()["objects"], "the daemon has seen it"
    with ControlClient(str(socket_path)) as control:
        pid = control.welcome.pid
    os.kill(pid, signal.SIGTERM)
    until(lambda: has_ended(pid), "it ends")
    with others(socket_path, 1, 1, arena):
        ours(socket_path)
    with Client(str(socket_path)) as client:
        assert client.answer(client.ask(1, 3)).chunks == kept
    log = socket_path.with_suffix(".log").read_text()
    why = f"it is of version {ARENA_VERSION + arena} of the arena, and this hybridkv has"
    assert (f"{why} {ARENA_VERSION}\n" in log) == (kept == 0)


def test_the_next_daemon_waits_for_the_arena_of_one_that_is_ending(socket_path: Path) -> None:
    """It has the socket first. An arena that it left alone would be kept for an hour."""
    late = subprocess.Popen([sys.executable, "-c", LATE, str(socket_path), RAM])
    until(socket_path.is_socket, "the first one serves")
    with others(socket_path, 1, 0):
        late.send_signal(signal.SIGTERM)
        assert late.wait(DEADLINE_SECONDS) == 0
        until(socket_path.is_socket, "the second one serves")
        with ControlClient(str(socket_path)) as control:
            (arena,) = stale_arenas(socket_path)
            assert control.welcome.arena_path == str(arena)
            os.kill(control.welcome.pid, signal.SIGTERM)
    ours(socket_path)
