"""A daemon of one's own, as `hybridkv serve` runs it, for a proof, a measurement or a test."""

import contextlib
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from hybridkv.client.control import Control, DaemonUnreachableError
from hybridkv.client.spawn import ANSWER_SECONDS, RETRY_SECONDS, daemon_command
from hybridkv.core.errors import ConfigError, HybridKVError
from hybridkv.server.place import stale_arenas

START_SECONDS = 20.0
STOP_SECONDS = 20.0


class DaemonProcess:
    """One daemon process at a time on one socket; it can be killed and started again. A context manager."""

    def __init__(
        self,
        socket_path: str,
        ram: str | None,
        metrics_port: int = -1,
        fresh: bool = False,
        options: Sequence[str] = (),
    ) -> None:
        self.socket_path = socket_path
        self._options = [
            *(["--ram", ram] if ram is not None else []),
            "--metrics-port",
            str(metrics_port),
            *(["--fresh"] if fresh else []),
            *options,
        ]
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "DaemonProcess":
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.send_signal(signal.SIGINT)
            self.process.wait(STOP_SECONDS)
        for arena in stale_arenas(Path(self.socket_path)):
            arena.unlink(missing_ok=True)

    def start(self) -> None:
        """Return when it answers; raises ConfigError with its own sentence where it cannot run."""
        with tempfile.TemporaryFile() as said:
            command = daemon_command(self.socket_path, self._options)
            self.process = subprocess.Popen(command, stderr=said)
            deadline = time.monotonic() + START_SECONDS
            while time.monotonic() < deadline:
                try:
                    with Control(self.socket_path, ANSWER_SECONDS):
                        return
                except DaemonUnreachableError:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        self.process.wait(RETRY_SECONDS)
                        said.seek(0)
                        raise ConfigError(said.read().decode().strip().removeprefix("hybridkv: ")) from None
        raise HybridKVError(f"the daemon did not answer within {START_SECONDS:g} s")

    def kill(self) -> None:
        """End it with -9."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        """End it as a service manager does; returns its exit status. The next one goes on with its cache."""
        assert self.process is not None
        self.process.terminate()
        return self.process.wait(STOP_SECONDS)
