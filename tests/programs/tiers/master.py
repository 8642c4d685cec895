"""A real mooncake_master for tests."""

import contextlib
import functools
import importlib.util
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from hybridkv.core.tier_urls import parse_tier
from hybridkv.tiers.mooncake.tier import MooncakeTier
from tests.waiting import until

DEADLINE_SECONDS = 30.0
TIMEOUT_SECONDS = 10.0


@functools.cache
def why_not() -> str:
    """Returns why no master can run here. Empty = one can."""
    if importlib.util.find_spec("mooncake") is None:
        return "mooncake-transfer-engine-non-cuda is not installed"
    tried = subprocess.run(
        [sys.executable, "-c", "import mooncake.store"], stderr=subprocess.PIPE, check=False
    )
    return tried.stderr.decode().strip().rpartition("\n")[2]


needs_mooncake = pytest.mark.skipif(bool(why_not()), reason=f"no Mooncake here: {why_not()}")


def free_port() -> int:
    """Returns a port of the loopback that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


class Master:
    """A process of mooncake_master on the loopback."""

    def __init__(self, log: Path, lease: str) -> None:
        spec = importlib.util.find_spec("mooncake")
        assert spec
        assert spec.submodule_search_locations
        self.port, self.admin = free_port(), free_port()
        self._log = log
        self._command = [
            f"{spec.submodule_search_locations[0]}/mooncake_master",
            f"--rpc_port={self.port}",
            "--rpc_address=127.0.0.1",
            f"--metrics_port={self.admin}",
            "--metrics_host=127.0.0.1",
            f"--default_kv_lease_ttl={lease}",
        ]
        self.process = self._started()

    def _started(self) -> "subprocess.Popen[bytes]":
        with self._log.open("ab") as output:
            process = subprocess.Popen(self._command, stdout=output, stderr=output)
        ports = self.port, self.admin
        until(lambda: process.poll() is not None or all(map(_listens, ports)), "the master")
        assert process.poll() is None, self._log.read_text()[-2000:]
        return process

    def kill(self) -> None:
        """Kill the master, as if it had crashed."""
        self.process.kill()
        self.process.wait()

    def restart(self) -> None:
        """Start the master again at the same ports, with nothing in it."""
        self.process = self._started()

    def url(self, **options: object) -> str:
        """Returns the URL of a tier over it. `size` is the option `bytes`."""
        size = {"bytes": options.pop("size")} if "size" in options else {}
        query = (
            {"timeout": TIMEOUT_SECONDS, "admin": self.admin, "buffer": "64MiB"} | size | options
        )
        return f"mooncake://127.0.0.1:{self.port}?" + "&".join(
            f"{name}={value}" for name, value in query.items()
        )

    def tier(self, **options: object) -> MooncakeTier:
        """Returns a tier over it, which is not open."""
        return MooncakeTier(parse_tier(self.url(**options), "tier"))


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
        return True
    return False
