"""The start of a daemon that outlives this process, for `server: "auto"`, and its end."""

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

from hybridkv.client.control import (
    ANSWER_SECONDS,
    ControlClient,
    DaemonUnreachableError,
    DaemonVersionError,
)
from hybridkv.client.link import peer_pid
from hybridkv.core.errors import ConfigError
from hybridkv.core.paths import check_socket_path

logger = logging.getLogger("vllm.hybridkv")

START_SECONDS = 10.0
END_SECONDS = 10.0  # The time that a daemon has to end after the signal.
RETRY_SECONDS = 0.01
EXIT_SERVING = 0  # The status of `serve --detach` once its daemon serves.
EXIT_ALREADY_SERVED = 3


def daemon_command(socket_path: str, options: Sequence[str]) -> list[str]:
    """Return the command line of a daemon. Raises ConfigError where the path can be no socket's."""
    check_socket_path(socket_path, "server")
    return [sys.executable, "-m", "hybridkv", "serve", "--socket", socket_path, *options]


def start_detached(
    socket_path: str, options: Sequence[str], stderr: IO[bytes] | None = None
) -> "subprocess.Popen[bytes]":
    """Start a daemon that is no descendant of this process, and return at once.

    vLLM kills all descendants of an engine that it stops. The returned process ends with status 0
    when the daemon serves, or else with the daemon's own status. A thread waits for it, so that no
    zombie stays.
    """
    process = subprocess.Popen(
        [*daemon_command(socket_path, options), "--detach"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL if stderr is None else stderr,
        start_new_session=True,
        cwd="/",
    )
    threading.Thread(target=process.wait, name="hybridkv-daemon-start", daemon=True).start()
    return process


def ensure_daemon(socket_path: str, options: Sequence[str]) -> None:
    """Return when a daemon answers at `socket_path`. Where none does, start one with `options`.

    A daemon of another protocol version is told to end, and keeps its arena for the next one. Where
    engines of that version start it again, it is told again: they do so every few seconds at most.
    Raises ConfigError with the daemon's own message where the daemon ends. Raises
    DaemonUnreachableError, with the process that serves the socket, after START_SECONDS.
    """
    deadline = time.monotonic() + START_SECONDS
    process: subprocess.Popen[bytes] | None = None
    with tempfile.TemporaryFile() as stderr:
        while time.monotonic() < deadline:
            try:
                with ControlClient(socket_path, ANSWER_SECONDS):
                    # Until its starter has ended the daemon is a descendant of this process.
                    if process is not None:
                        process.wait(max(0.0, deadline - time.monotonic()))
                    return
            except DaemonVersionError as error:
                if not _end_other(socket_path, str(error)):
                    raise
            except (DaemonUnreachableError, subprocess.TimeoutExpired):
                pass  # A daemon is started below, or it is known why none can be.
            status = None if process is None else process.returncode
            is_gone = status in (EXIT_SERVING, EXIT_ALREADY_SERVED) and peer_pid(socket_path) < 0
            if process is None or is_gone:
                process = start_detached(socket_path, options, stderr)
            elif status not in (None, EXIT_SERVING, EXIT_ALREADY_SERVED):
                raise refusal(stderr)
            time.sleep(RETRY_SECONDS)
    raise DaemonUnreachableError(
        f"the daemon at {socket_path} ({_described(socket_path)}) did not answer"
        f" within {START_SECONDS:g} s"
    )


def _end_other(socket_path: str, why: str) -> bool:
    """End a daemon that engines of this version cannot use. Returns False where that fails."""
    pid = peer_pid(socket_path)
    text = "hybridkv: the daemon at %s (%s) is told to end: %s"
    logger.warning(text, socket_path, _described(socket_path), why)
    try:
        return end_process(pid, signal.SIGTERM)
    except OSError:
        return pid < 0  # Nobody listens any more, or it is in another pid namespace.


def end_process(pid: int, number: signal.Signals) -> bool:
    """Send a signal to a daemon. Returns True where it has ended within END_SECONDS.

    Raises OSError where this process may not send it, or sees no process of that id.
    """
    process = os.pidfd_open(pid)
    try:
        signal.pidfd_send_signal(process, number)
        return bool(select.select([process], [], [], END_SECONDS)[0])
    finally:
        os.close(process)


def _described(socket_path: str) -> str:
    """Return the process that serves a socket, for people: "pid 7, since 2026-01-02 03:04:05"."""
    pid = peer_pid(socket_path)
    try:
        since = Path(f"/proc/{pid}").stat().st_mtime
    except OSError:
        return "nobody listens there" if pid < 0 else f"pid {pid}"
    return f"pid {pid}, since {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(since))}"


def refusal(stderr: IO[bytes]) -> ConfigError:
    """Return the error of a daemon that ended, in its own words: the last line of `stderr`."""
    stderr.seek(0)
    lines = stderr.read().decode(errors="replace").strip().splitlines()
    last = lines[-1] if lines else "the daemon ended without a word"
    return ConfigError(last.removeprefix("hybridkv: "))
