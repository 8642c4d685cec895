"""Daemons and commands in forks of a process that has imported them, a tenth of the work.

Each has the arguments, variables and directory that a command would have. Tests of the process
itself start a DaemonProcess. `python -m tests.forked_daemon FD` is the process that forks.
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
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import IO, Any, NoReturn

from hybridkv.client.start_daemon import daemon_command
from hybridkv.lab.daemon_process import DaemonProcess
from tests.waiting import DEADLINE_SECONDS

ORDER_BYTES_MAX = 1 << 20
"""Arguments and variables of a process are fewer."""
PR_SET_PDEATHSIG = 1
ROOT = Path(__file__).parents[1]
IMPORTED = (
    *("hybridkv.__main__", "hybridkv.cli.main", "hybridkv.cli.serve", "hybridkv.cli.arenas"),
    *("hybridkv.cli.control", "hybridkv.lab.daemon_process", "tests.programs.daemon.holder"),
)
COMMAND = "import sys; from hybridkv.__main__ import main; sys.exit(main())"


class ForkedDaemon(DaemonProcess):
    """A DaemonProcess in a fork."""

    process: Any

    def _begin(self, log: IO[bytes]) -> Any:
        words = daemon_command(self.socket_path, self._options)[3:]
        return Fork(words, [sys.__stderr__.fileno() if sys.__stderr__ else 2, log.fileno()])


def run_forked(
    words: Sequence[object],
    code: str = COMMAND,
    variables: Mapping[str, str] | None = None,
    namespaces: Sequence[str] = (),
) -> "subprocess.CompletedProcess[str]":
    """Run `hybridkv WORDS`, or `code` with them, to its end: see Fork."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        outputs = [out.fileno(), errors.fileno()]
        fork = Fork([*map(str, words)], outputs, code, variables, namespaces)
        status = fork.wait(DEADLINE_SECONDS)
        for file in (out, errors):
            file.seek(0)
        return subprocess.CompletedProcess([*map(str, words)], status, out.read(), errors.read())


class Fork:
    """A child of the process that forks, with what tests use of `subprocess.Popen`."""

    def __init__(
        self,
        words: Sequence[str],
        outputs: Sequence[int],
        code: str = COMMAND,
        variables: Mapping[str, str] | None = None,
        namespaces: Sequence[str] = (),
    ) -> None:
        """Run `python -c CODE WORDS` with descriptors of its output and its errors.

        `namespaces` are files of other namespaces to be in.
        """
        self.returncode: int | None = None
        self._status, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        all_variables = {**os.environ, **(variables or {})}
        program = [code, [*words], str(Path.cwd()), all_variables]
        order = json.dumps([[*namespaces], program]).encode()
        with theirs:
            socket.send_fds(_server(), [order], [theirs.fileno(), *outputs])
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
        order, descriptors, _, _ = socket.recv_fds(orders, ORDER_BYTES_MAX, 3)
        if not order:
            return
        status, *outputs = descriptors
        if os.fork() == 0:
            orders.close()
            _watch(order, socket.socket(fileno=status), outputs)
        for descriptor in descriptors:
            os.close(descriptor)


def _watch(order: bytes, status: socket.socket, outputs: Sequence[int]) -> None:
    """Run the order in a child, send its pid, and its exit status once it has ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _end_with_parent(signal.SIGKILL)
    namespaces, (code, words, directory, variables) = json.loads(order)
    for namespace in namespaces:
        with open(namespace) as file:
            if ctypes.CDLL(None).setns(file.fileno(), 0):
                raise OSError(f"{namespace} cannot be entered")
    pid = os.fork()
    if pid == 0:
        status.close()
        _run(code, words, directory, variables, outputs)
    for descriptor in outputs:
        os.close(descriptor)
    status.send(str(pid).encode())
    ended = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    status.send(str(ended).encode())
    os._exit(0)


def _run(
    code: str,
    words: Sequence[str],
    directory: str,
    variables: Mapping[str, str],
    outputs: Sequence[int],
) -> NoReturn:
    """Be the program."""
    _end_with_parent(signal.SIGINT)
    for descriptor, output in enumerate(outputs, 1):
        os.dup2(output, descriptor)
        os.close(output)
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(variables)
    sys.argv = ["-c", *words]
    ended = 1
    try:
        exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
        ended = 0
    except SystemExit as exit_:
        ended = exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        sys.stdout.flush()
        os._exit(ended)


def _end_with_parent(number: int) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


if __name__ == "__main__":
    main()
