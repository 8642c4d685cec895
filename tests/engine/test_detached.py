"""A daemon that "auto" started goes on when its engine is ended as vLLM ends its engines."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from vllm.utils.system_utils import kill_process_tree

from hybridkv.client.control import ControlClient
from tests.waiting import has_ended, until

pytestmark = pytest.mark.engine

ENGINE = """
import signal, sys
from hybridkv.client.start_daemon import ensure_daemon
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda *_: None)
ensure_daemon(sys.argv[1], ["--ram", "16MiB", "--metrics-port", "-1"])
print("served", flush=True)
while True:
    signal.pause()
"""
"""An engine starts a daemon so. Signals do not end the engine, only SIGKILL does."""


@pytest.fixture
def socket_path(tmp_path: Path) -> Iterator[str]:
    """The socket of a daemon that an engine starts. The daemon is ended with its arena."""
    path = tmp_path / "daemon.sock"
    yield str(path)
    if path.exists():
        with ControlClient(str(path)) as control:
            pid = control.welcome.pid
        os.kill(pid, signal.SIGINT)
        until(lambda: has_ended(pid), "the daemon ends")


@contextmanager
def engine_at(socket_path: str) -> Iterator["subprocess.Popen[bytes]"]:
    """An engine in a process group of its own, which a daemon serves."""
    command = [sys.executable, "-c", ENGINE, socket_path]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as engine:
        try:
            assert engine.stdout is not None
            assert engine.stdout.readline() == b"served\n"
            yield engine
        finally:
            engine.kill()


def daemon_of(socket_path: str) -> tuple[int, str]:
    """(pid, life) of the daemon that answers."""
    with ControlClient(socket_path) as control:
        return control.welcome.pid, control.welcome.boot


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_vllm_kills_its_engines_process_tree(socket_path: str, number: signal.Signals) -> None:
    """The signal goes to the whole process group, as Ctrl-C does. Then vLLM walks the tree."""
    with ExitStack() as stack:
        engines = [stack.enter_context(engine_at(socket_path)) for _ in range(2)]
        before = daemon_of(socket_path)
        for engine in engines:
            os.killpg(engine.pid, number)
            kill_process_tree(engine.pid)
            assert engine.wait() == -signal.SIGKILL
            assert daemon_of(socket_path) == before
