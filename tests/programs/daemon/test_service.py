"""The daemon as a service: it says when it serves, and the unit in ops/ starts it."""

import configparser
import os
import shlex
import signal
import socket
import subprocess
from pathlib import Path

import pytest

from hybridkv.client.control import ControlClient
from hybridkv.client.start_daemon import daemon_command
from tests.programs.daemon.test_files import boot_at
from tests.waiting import DEADLINE_SECONDS, until

UNIT = Path(__file__).parents[3] / "ops" / "systemd" / "hybridkv.service"


def exec_start(tmp_path: Path) -> list[str]:
    """The unit's command with this Python, a small arena, and `tmp_path` for its directory."""
    unit = configparser.ConfigParser(interpolation=None)
    unit.read_string(UNIT.read_text())
    service = unit["Service"]
    assert service["Type"] == "notify"
    program, command, option, socket_path, *options = shlex.split(service["ExecStart"])
    assert (Path(program).name, command, option) == ("hybridkv", "serve", "--socket")
    assert Path(socket_path).parent == Path("/run", service["RuntimeDirectory"])
    options[options.index("--ram") + 1] = "16MiB"
    path = str(tmp_path / Path(socket_path).name)
    return daemon_command(path, [*options, "--metrics-port", "-1"])


@pytest.mark.parametrize("is_abstract", [False, True])
def test_the_service_manager_hears_when_clients_can_connect(
    tmp_path: Path, is_abstract: bool
) -> None:
    """It hears it once only: processes that the daemon starts do not know of the manager."""
    name = f"@{tmp_path}" if is_abstract else f"{tmp_path}/notify"
    command, environment = exec_start(tmp_path), {**os.environ, "NOTIFY_SOCKET": name}
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(name.replace("@", "\0"))
        manager.settimeout(DEADLINE_SECONDS)
        with subprocess.Popen(command, env=environment) as daemon:
            try:
                assert manager.recv(100) == b"READY=1"
                with ControlClient(str(tmp_path / "daemon.sock")) as control:
                    assert control.welcome.pid == daemon.pid
            finally:
                daemon.send_signal(signal.SIGINT)
            assert daemon.wait(DEADLINE_SECONDS) == 0
        manager.setblocking(False)
        with pytest.raises(BlockingIOError):
            manager.recv(100)


def test_a_manager_that_is_gone_keeps_nobody_from_serving(tmp_path: Path) -> None:
    environment = {**os.environ, "NOTIFY_SOCKET": f"{tmp_path}/nobody"}
    path = str(tmp_path / "daemon.sock")
    with subprocess.Popen(exec_start(tmp_path), env=environment) as daemon:
        try:
            until(lambda: boot_at(path) != "", "it serves")
        finally:
            daemon.send_signal(signal.SIGINT)
        assert daemon.wait(DEADLINE_SECONDS) == 0
