"""A private daemon, as `hybridkv serve` runs it, for a proof, a measurement or a test."""

import contextlib
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from hybridkv.client.control import ANSWER_SECONDS, ControlClient, DaemonUnreachableError
from hybridkv.client.start_daemon import RETRY_SECONDS, daemon_command, refusal
from hybridkv.core.errors import HybridKVError
from hybridkv.core.geometry import Geometry, Group
from hybridkv.core.keys import HASH_BYTES
from hybridkv.core.packed import SLOT_BYTES
from hybridkv.daemon.filesystem import stale_arenas
from hybridkv.shm.arena import remove_arena
from hybridkv.wire.messages import PROTOCOL_VERSION, Hello, Reserve, Reserved, geometry_to_wire

START_SECONDS = 60.0
STOP_SECONDS = 60.0


def ending_with_parent(command: Sequence[str]) -> list[str]:
    """Return a command that gets SIGINT when the thread that starts it ends, however that ends.

    Where util-linux is not installed, it is `command` itself, which goes on.
    """
    return ["setpriv", "--pdeathsig", "INT", *command] if shutil.which("setpriv") else [*command]


class DaemonProcess:
    """A daemon on a socket, which can be killed and started again. It is a context manager.

    The daemon ends with the process that started it, and its cache is lost then.
    """

    def __init__(
        self,
        socket_path: str,
        ram: str | None,
        metrics_port: int = -1,
        fresh: bool = False,
        options: Sequence[str] = (),
    ) -> None:
        """`ram` is the option --ram, and None leaves it out. `options` are further ones."""
        self.socket_path = socket_path
        self._options = ["--log-file", "auto", *([] if ram is None else ["--ram", ram])]
        self._options += ["--metrics-port", str(metrics_port), *options]
        self._options += ["--fresh"] if fresh else []
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "DaemonProcess":
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.end()

    def end(self) -> None:
        """End the daemon, if it runs, and free its memory."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.send_signal(signal.SIGINT)
            self.process.wait(STOP_SECONDS)
        for arena in stale_arenas(Path(self.socket_path)):
            remove_arena(arena)

    def start(self) -> None:
        """Start the daemon and return when it answers.

        Raises ConfigError in the daemon's own words where it cannot run.
        """
        with tempfile.TemporaryFile() as log:
            self.process = self._begin(log)
            deadline = time.monotonic() + START_SECONDS
            while time.monotonic() < deadline:
                try:
                    with ControlClient(self.socket_path, ANSWER_SECONDS):
                        return
                except DaemonUnreachableError:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        # The daemon is still starting, and is asked again.
                        self.process.wait(RETRY_SECONDS)
                        raise refusal(log) from None
        raise HybridKVError(f"the daemon did not answer within {START_SECONDS:g} s")

    def _begin(self, log: IO[bytes]) -> "subprocess.Popen[bytes]":
        """Start the process, whose errors go to `log`."""
        command = daemon_command(self.socket_path, self._options)
        return subprocess.Popen(ending_with_parent(command), stderr=log)

    def kill(self) -> None:
        """Kill the daemon with -9, and wait for its end."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        """End the daemon as a service manager does, which keeps its cache. Returns its status."""
        assert self.process is not None
        self.process.terminate()
        return self.process.wait(STOP_SECONDS)


def engine_hello(groups: tuple[Group, ...], tokens: int) -> Hello:
    """Return the greeting of an engine that only measures, with chunks of so many tokens."""
    return Hello(
        id=1,
        version=PROTOCOL_VERSION,
        role="engine",
        engine_id="bench",
        namespace=bytes(HASH_BYTES),
        geometry=geometry_to_wire(Geometry(groups, tokens, tokens, tokens)),
    )


def reserve(control: ControlClient, part_bytes: int, count: int) -> Iterator[Reserved]:
    """Yield grants of the daemon that hold `count` slots of one part together."""
    while count > 0:
        granted = control.call(Reserve(7, part_bytes, 1, count))
        assert isinstance(granted, Reserved)
        count -= len(granted.slots) // SLOT_BYTES
        yield granted
