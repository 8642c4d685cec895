"""Start a daemon that outlives this process, for `server: "auto"`."""

import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from hybridkv.client.control import Control, DaemonUnreachableError
from hybridkv.core.errors import ConfigError
from hybridkv.core.paths import check_socket_path

START_SECONDS = 10.0
ANSWER_SECONDS = 1.0
"""For one greeting where a socket is there: on a busy machine it is slow, and another attempt only costs more."""
RETRY_SECONDS = 0.01
EXIT_ALREADY_SERVED = 3


def daemon_command(socket_path: str, options: Sequence[str]) -> list[str]:
    """The command line of a daemon."""
    check_socket_path(socket_path, "server")
    return [sys.executable, "-m", "hybridkv", "serve", "--socket", socket_path, "--log-file", "auto", *options]


def start_detached(
    socket_path: str, options: Sequence[str], stderr: IO[bytes] | None = None
) -> "subprocess.Popen[bytes]":
    """Start a daemon in a session of its own; returns at once. Its end is noticed by a thread, so no zombie stays."""
    process = subprocess.Popen(
        daemon_command(socket_path, options),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL if stderr is None else stderr,
        start_new_session=True,
        cwd="/",
    )
    threading.Thread(target=process.wait, name="hybridkv-daemon-end", daemon=True).start()
    return process


def ensure_daemon(socket_path: str, options: Sequence[str]) -> None:
    """Return when a daemon answers at `socket_path`, starting one with `options` of `serve` where none does.

    Raises ConfigError with the daemon's own sentence where it cannot run, DaemonUnreachableError where it hangs.
    """
    if Path(socket_path).is_socket() and _answers(socket_path):
        return
    with tempfile.TemporaryFile() as said:
        process = start_detached(socket_path, options, said)
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if _answers(socket_path):
                return
            if process.returncode not in (None, EXIT_ALREADY_SERVED):
                said.seek(0)
                lines = said.read().decode(errors="replace").strip().splitlines()
                raise ConfigError(lines[-1].removeprefix("hybridkv: ") if lines else "the daemon ended without a word")
            time.sleep(RETRY_SECONDS)
    raise DaemonUnreachableError(f"the daemon at {socket_path} did not answer within {START_SECONDS:g} s")


def _answers(socket_path: str) -> bool:
    try:
        with Control(socket_path, ANSWER_SECONDS):
            return True
    except DaemonUnreachableError:
        return False
