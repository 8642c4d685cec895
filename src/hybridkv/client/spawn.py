"""Start a daemon that outlives this process, for `server: "auto"`."""

import contextlib
import logging
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from hybridkv.client.control import ControlClient, DaemonUnreachableError, DaemonVersionError
from hybridkv.client.link import peer_pid
from hybridkv.core.errors import ConfigError
from hybridkv.core.paths import check_socket_path

logger = logging.getLogger("vllm.hybridkv")

START_SECONDS = 10.0
ANSWER_SECONDS = 1.0
"""The limit of one greeting. On a busy machine it is slow, and another attempt costs more."""
RETRY_SECONDS = 0.01
EXIT_ALREADY_SERVED = 3


def daemon_command(socket_path: str, options: Sequence[str]) -> list[str]:
    """The command line of a daemon; raises ConfigError where the path cannot be a socket's."""
    check_socket_path(socket_path, "server")
    command = [sys.executable, "-m", "hybridkv", "serve", "--socket", socket_path]
    return [*command, "--log-file", "auto", *options]


def start_detached(
    socket_path: str, options: Sequence[str], stderr: IO[bytes] | None = None
) -> "subprocess.Popen[bytes]":
    """Start a daemon in a session of its own and return at once.

    A thread waits for its end, so that no zombie stays.
    """
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
    """Return when a daemon answers at `socket_path`; where none does, start one with `options`.

    A daemon of another protocol version is told to end, and keeps its arena for the next one.
    Raises ConfigError with the daemon's own message where it ends, and DaemonUnreachableError where
    none answers within START_SECONDS, with what is known of the process that serves the socket.
    """
    try:
        if Path(socket_path).is_socket() and _answers(socket_path):
            return
    except DaemonVersionError as error:
        _end_other(socket_path, str(error))
    with tempfile.TemporaryFile() as stderr:
        process = start_detached(socket_path, options, stderr)
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if _answers(socket_path):
                return
            if process.returncode not in (None, EXIT_ALREADY_SERVED):
                raise refusal(stderr)
            time.sleep(RETRY_SECONDS)
    raise DaemonUnreachableError(
        f"the daemon at {socket_path} ({_described(socket_path)}) did not answer"
        f" within {START_SECONDS:g} s"
    )


def _end_other(socket_path: str, why: str) -> None:
    """End a daemon that engines of this version cannot use."""
    pid = peer_pid(socket_path)
    logger.warning(
        "hybridkv: the daemon at %s (%s) is told to end: %s",
        *(socket_path, _described(socket_path), why),
    )
    with contextlib.suppress(OSError):
        process = os.pidfd_open(pid)
        try:
            signal.pidfd_send_signal(process, signal.SIGTERM)
            select.select([process], [], [], START_SECONDS)
        finally:
            os.close(process)


def _described(socket_path: str) -> str:
    """The process that serves a socket, for people."""
    pid = peer_pid(socket_path)
    try:
        since = Path(f"/proc/{pid}").stat().st_mtime
    except OSError:
        return "nobody listens there" if pid < 0 else f"pid {pid}"
    return f"pid {pid}, since {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(since))}"


def refusal(stderr: IO[bytes]) -> ConfigError:
    """The error of a daemon that ended, in its own words: the last line of its `stderr`."""
    stderr.seek(0)
    lines = stderr.read().decode(errors="replace").strip().splitlines()
    last = lines[-1] if lines else "the daemon ended without a word"
    return ConfigError(last.removeprefix("hybridkv: "))


def _answers(socket_path: str) -> bool:
    try:
        with ControlClient(socket_path, ANSWER_SECONDS):
            return True
    except DaemonVersionError:
        raise
    except DaemonUnreachableError:
        return False
