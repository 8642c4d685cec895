"""Daemons in forks of a process that has imported them: one starts in a tenth of the work.

Each runs `hybridkv serve` with the arguments, variables and directory that a command would have.
Tests of the command itself start a DaemonProcess. `python -m tests.forked_daemon FD` is the process
that forks.
"""

import atexit
import ctypes
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import IO, Any

from hybridkv.client.start_daemon import daemon_command
from hybridkv.lab.daemon_process import DaemonProcess

ORDER_BYTES_MAX = 1 << 20
"""Arguments and variables of a process are fewer."""
PR_SET_PDEATHSIG = 1
ROOT = Path(__file__).parents[1]
IMPORTED = ("hybridkv.__main__", "hybridkv.cli.main", "hybridkv.cli.serve")


class ForkedDaemon(DaemonProcess):
    """A DaemonProcess in a fork."""

    process: Any

    def _begin(self, log: IO[bytes]) -> Any:
        return _Fork(daemon_command(self.socket_path, self._options)[2:], log)


class _Fork:
    """A child of the process that forks, with what tests use of `subprocess.Popen`."""

    def __init__(self, words: Sequence[str], log: IO[bytes]) -> None:
        """Run `python -m WORDS`, whose errors go to `log`."""
        self.returncode: int | None = None
        self._status, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        order = json.dumps([[*words], str(Path.cwd()), dict(os.environ)]).encode()
        with theirs:
            socket.send_fds(_server(), [order], [theirs.fileno(), log.fileno()])
        self.pid = int(self._status.recv(64))

    def wait(self, timeout: float | None = None) -> int:
        """Returns the exit status, below 0 for a signal. Raises TimeoutExpired."""
        if self.returncode is None:
            self._status.settimeout(timeout)
            try:
                self.returncode = int(self._status.recv(64))
            except (TimeoutError, BlockingIOError):
                raise subprocess.TimeoutExpired("a forked daemon", timeout or 0.0) from None
            self._status.close()
        return self.returncode

    def poll(self) -> int | None:
        """Returns the exit status, or None where it has not ended."""
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End the process with -9."""
        self.send_signal(signal.SIGKILL)


@cache
def _server() -> socket.socket:
    """The connection to the process that forks, which ends with this one."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        words = [sys.executable, "-m", __name__, str(theirs.fileno())]
        process = subprocess.Popen(
            words, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, cwd=ROOT
        )

    def end() -> None:
        ours.close()
        process.wait()

    atexit.register(end)
    return ours


def main() -> None:
    """Fork for each order, until nobody can send one."""
    orders = socket.socket(fileno=int(sys.argv[1]))
    for name in IMPORTED:
        importlib.import_module(name)
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        order, descriptors, _, _ = socket.recv_fds(orders, ORDER_BYTES_MAX, 2)
        if not order:
            return
        status, log = descriptors
        if os.fork() == 0:
            orders.close()
            _watch(order, socket.socket(fileno=status), log)
        os.close(status)
        os.close(log)


def _watch(order: bytes, status: socket.socket, log: int) -> None:
    """Run the daemon in a child, send its pid, and its exit status once it has ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _end_with_parent(signal.SIGKILL)
    pid = os.fork()
    if pid == 0:
        status.close()
        _run(order, log)
    status.send(str(pid).encode())
    ended = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    status.send(str(ended).encode())
    os._exit(0)


def _run(order: bytes, log: int) -> None:
    """Be the daemon."""
    _end_with_parent(signal.SIGINT)
    words, directory, variables = json.loads(order)
    os.dup2(log, 2)
    os.close(log)
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(variables)
    sys.argv = words
    ended = 1
    try:
        ended = importlib.import_module("hybridkv.__main__").main()
    finally:
        os._exit(ended)


def _end_with_parent(number: int) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


if __name__ == "__main__":
    main()
