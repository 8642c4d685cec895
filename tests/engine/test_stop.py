"""A first day: serve, stop, serve again, hit, and end the daemon, by commands as a user has them.

An ordinary stop of `vllm serve` leaves the daemon that it started, and its cache.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from hybridkv.client.link import peer_pid
from hybridkv.daemon.filesystem import stale_arenas
from hybridkv.lab.models import bundled_environment
from tests.engine.server import Server
from tests.engine.support import arguments_of, prompt
from tests.waiting import DEADLINE_SECONDS, has_ended, until

pytestmark = [pytest.mark.engine, pytest.mark.soak, pytest.mark.timeout(900)]

MODEL, CHUNK = "gemma3", 128


class User:
    """Somebody with a directory for sockets, who names no socket: "auto" and commands find it."""

    def __init__(self, runtime: Path) -> None:
        self.socket_path = runtime / "hybridkv" / "daemon.sock"
        self.environment = {**bundled_environment(MODEL), "XDG_RUNTIME_DIR": str(runtime)}

    def says(self, *words: str, status: int = 0) -> Mapping[str, Any]:
        """Run a command with --json. Returns what it prints, {} for nothing.

        It must end with `status`.
        """
        process = subprocess.run(
            [sys.executable, "-m", "hybridkv", *words, "--json"],
            env={**os.environ, **self.environment},
            capture_output=True,
            text=True,
            timeout=DEADLINE_SECONDS,
            check=False,
        )
        assert process.returncode == status, process.stderr
        report: dict[str, Any] = json.loads(process.stdout or "{}")
        return report


@pytest.fixture
def user(tmp_path: Path) -> Iterator[User]:
    """A user whose daemon ends with the test."""
    user = User(tmp_path)
    yield user
    if (pid := peer_pid(str(user.socket_path))) > 0:
        os.kill(pid, signal.SIGINT)
        until(lambda: has_ended(pid), "the daemon ends")


def test_the_daemon_outlives_servers_that_are_stopped(user: User, tmp_path: Path) -> None:
    """What the first server stored is hit by the second, and nothing is left once it is freed."""
    arguments = arguments_of(MODEL, "auto", extra={"ram": "64MiB"})
    text, lives = prompt(1, 3 * CHUNK + 20), []
    user.says("ping", status=2)
    for number in (signal.SIGTERM, signal.SIGINT):
        with Server(arguments, tmp_path / f"{number}.log", user.environment) as server:
            lives.append(user.says("ping"))
            server.complete(text)
            until(lambda: user.says("stats")["objects_stored"] >= 3, "it is stored")
            hits = "vllm:external_prefix_cache_hits_total"
            assert (server.total(hits) >= 2 * CHUNK) == (number is signal.SIGINT)
            server.close(number)
        lives.append(user.says("ping"))
    assert all(life == lives[0] for life in lives), "one daemon, in one life"
    assert user.says("stats")["tokens_loaded"] >= 2 * CHUNK
    assert user.says("stop", "--free") == {"pid": lives[0]["pid"], "freed": True, "kept_bytes": 0}
    assert has_ended(lives[0]["pid"])
    assert not user.socket_path.exists()
    assert stale_arenas(user.socket_path) == []
    user.says("ping", status=2)
