"""Blocking calls with a deadline, for commands and start-up; never for an engine's hooks.

And the start of a daemon that outlives this process, for `server: "auto"`.
"""

import contextlib
import itertools
import logging
import os
import select
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, TypeVar

from hybridkv.client.link import Link, peer_pid
from hybridkv.core.errors import ConfigError, HybridKVError, RemediedError
from hybridkv.core.paths import check_socket_path
from hybridkv.wire import messages as wire

logger = logging.getLogger("vllm.hybridkv")

START_SECONDS = 10.0
END_SECONDS = 10.0  # A daemon that is told to end has so long.
ANSWER_SECONDS = 1.0
"""The limit of one greeting. On a busy machine it is slow, and another attempt costs more."""
RETRY_SECONDS = 0.01
EXIT_SERVING = 0  # The status of `serve --detach` once its daemon serves.
EXIT_ALREADY_SERVED = 3

_Answer = TypeVar("_Answer", bound=wire.Reply)


class DaemonUnreachableError(RemediedError):
    """No daemon answers at the socket."""


class DaemonRefusedError(DaemonUnreachableError):
    """Whoever serves the socket is of another user, or of another protocol version."""


class DaemonVersionError(DaemonRefusedError):
    """The daemon speaks another version of the protocol."""


class ControlClient:
    """A control connection; a context manager, which does not wait where nobody listens."""

    def __init__(
        self,
        socket_path: str,
        timeout_seconds: float = 5.0,
        hello: wire.Hello | None = None,
        group: int | None = None,
    ) -> None:
        """The daemon may be of another user that is a member of `group`."""
        self._socket_path = socket_path
        self._timeout_seconds = timeout_seconds
        self._why = "nothing listens there"
        hello = hello or wire.Hello(1, wire.PROTOCOL_VERSION, "control")
        self._link = Link(socket_path, hello, self._lost, group)
        self._ids = itertools.count(2)

    def __enter__(self) -> "ControlClient":
        deadline = time.monotonic() + self._timeout_seconds
        try:
            while self._link.welcome is None:
                self._link.poll(time.monotonic())
                if self._link.refusal is not None:
                    other = self._link.is_other_version
                    raise (DaemonVersionError if other else DaemonRefusedError)(self._link.refusal)
                if self._link.welcome is None:
                    self._wait(deadline, connecting=self._link.is_served)
        except BaseException:
            self._link.close()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self._link.close()

    @property
    def welcome(self) -> wire.Welcome:
        """The daemon's greeting."""
        assert self._link.welcome is not None
        return self._link.welcome

    def call(self, request: wire.Request) -> wire.Reply:
        """The reply to a request. Raises DaemonUnreachableError, or HybridKVError on a refusal."""
        deadline = time.monotonic() + self._timeout_seconds
        self.tell(request)
        while True:
            for reply in self._link.poll(time.monotonic()):
                if isinstance(reply, wire.Error):
                    raise HybridKVError(reply.message)
                if reply.id == getattr(request, "id", 0):
                    return reply
            self._wait(deadline)

    def tell(self, request: wire.Request) -> None:
        """Send a one-way message. Raises DaemonUnreachableError."""
        if not self._link.send(request, time.monotonic()):
            raise DaemonUnreachableError(f"{self._socket_path}: {self._why}")

    def stats(self, status: bool = False) -> wire.Report:
        """The daemon's values and tiers; with `status` also what its status page shows."""
        return self._ask(wire.Stats(next(self._ids), status), wire.Report)

    def explain(self, request_id: str) -> wire.Explained:
        """What became of a request."""
        return self._ask(wire.Explain(next(self._ids), request_id[: wire.TEXT_MAX]), wire.Explained)

    def engines(self) -> list[wire.WireEngine]:
        """Every session of an engine."""
        return self._ask(wire.ListEngines(next(self._ids)), wire.Engines).engines

    def clear(self, tiers: bool = False) -> int:
        """Drop every object, and with `tiers` begin to empty those below RAM; how many in RAM."""
        dropped = 0
        while True:
            count = self._ask(wire.Clear(next(self._ids)), wire.Done).count
            dropped += count
            if count < wire.CHANGES_MAX:
                break
        if tiers:
            self.call(wire.Clear(next(self._ids), tiers=True))
        return dropped

    def _ask(self, request: wire.Request, kind: type[_Answer]) -> _Answer:
        reply = self.call(request)
        assert isinstance(reply, kind)
        return reply

    def _lost(self, why: str) -> None:
        self._why = why

    def _wait(self, deadline: float, connecting: bool = False) -> None:
        left = deadline - time.monotonic()
        if left <= 0 or (self._link.fd is None and not connecting):
            raise DaemonUnreachableError(
                f"no daemon answers at {self._socket_path} ({self._why})",
                f'start one: "hybridkv serve --socket {self._socket_path}"',
            )
        descriptors = [self._link.fd] if self._link.fd is not None else []
        select.select(descriptors, [], [], min(left, 0.02))


def runtime_directory() -> str:
    """XDG_RUNTIME_DIR where that is this user's directory, else nothing.

    sudo, cron and services inherit the name of another user's directory, or of one that is gone.
    """
    path = os.environ.get("XDG_RUNTIME_DIR", "")
    with contextlib.suppress(OSError):
        status = os.stat(path)
        if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid():
            return path
    return ""


def daemon_command(socket_path: str, options: Sequence[str]) -> list[str]:
    """The command line of a daemon; raises ConfigError where the path cannot be a socket's."""
    check_socket_path(socket_path, "server")
    return [sys.executable, "-m", "hybridkv", "serve", "--socket", socket_path, *options]


def start_detached(
    socket_path: str, options: Sequence[str], stderr: IO[bytes] | None = None
) -> "subprocess.Popen[bytes]":
    """Start a daemon that is no descendant of this process, and return at once.

    vLLM kills all descendants of an engine that it stops. The process that is returned ends with
    status 0 when the daemon serves, or with the daemon's own status; a thread waits for it, so that
    no zombie stays.
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
    """Return when a daemon answers at `socket_path`; where none does, start one with `options`.

    A daemon of another protocol version is told to end, and keeps its arena for the next one. Where
    engines of that version start it again, it is told again: they do so every few seconds at most.
    Raises ConfigError with the daemon's own message where it ends, and DaemonUnreachableError where
    none answers within START_SECONDS, with what is known of the process that serves the socket.
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
                pass  # One is started, or says why it cannot be.
            ended = None if process is None else process.returncode
            is_gone = ended in (EXIT_SERVING, EXIT_ALREADY_SERVED) and peer_pid(socket_path) < 0
            if process is None or is_gone:
                process = start_detached(socket_path, options, stderr)
            elif ended not in (None, EXIT_SERVING, EXIT_ALREADY_SERVED):
                raise refusal(stderr)
            time.sleep(RETRY_SECONDS)
    raise DaemonUnreachableError(
        f"the daemon at {socket_path} ({_described(socket_path)}) did not answer"
        f" within {START_SECONDS:g} s"
    )


def _end_other(socket_path: str, why: str) -> bool:
    """End a daemon that engines of this version cannot use; False where it cannot be ended."""
    pid = peer_pid(socket_path)
    text = "hybridkv: the daemon at %s (%s) is told to end: %s"
    logger.warning(text, socket_path, _described(socket_path), why)
    try:
        return end_process(pid, signal.SIGTERM)
    except OSError:
        return pid < 0  # Nobody listens any more, or it is in another pid namespace.


def end_process(pid: int, number: signal.Signals) -> bool:
    """Send a signal to a daemon; whether it has ended within END_SECONDS.

    Raises OSError where this process may not do so, or sees no process of that number.
    """
    process = os.pidfd_open(pid)
    try:
        signal.pidfd_send_signal(process, number)
        return bool(select.select([process], [], [], END_SECONDS)[0])
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
