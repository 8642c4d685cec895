"""`hybridkv serve`: what it refuses, in one sentence each, and how it is detached."""

import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path

import pytest

from hybridkv.cli.main import main
from hybridkv.client.control import ControlClient
from hybridkv.client.link import peer_pid
from hybridkv.client.start_daemon import ensure_daemon
from hybridkv.core.errors import ConfigError
from hybridkv.core.paths import check_node_name
from hybridkv.core.settings import parse_settings
from hybridkv.daemon import filesystem as place
from hybridkv.lab.daemon_process import DaemonProcess
from tests.forked_daemon import run_forked
from tests.waiting import DEADLINE_SECONDS, until


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The sentence with which `serve` refuses these words."""
    assert main(["serve", *words]) == 2
    output = capsys.readouterr().err
    assert output.startswith("hybridkv: ")
    assert output.count("\n") == 1
    assert "works" in output
    return output


@pytest.mark.parametrize(
    "name", ["", ".", "..", "rack1/gpu7", "../../x", "/", "a\0b", "\udcff", "x" * 201]
)
def test_a_node_is_one_component_of_a_path(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ["--socket", str(tmp_path / "run/d.sock"), "--disk", str(tmp_path / "disk")]
    sentence = refused(capsys, *where, "--node", name)
    assert sentence.startswith("hybridkv: node")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("host", ["gpu7", "rack1/gpu7", "..", "", "\udcff\0 ü", "h" * 255])
def test_the_node_that_is_not_named_can_be_used(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: host)
    assert check_node_name(place.node_name(Path("/run/d.sock"))).startswith(
        "gpu7-" if host == "gpu7" else ""
    )
    assert place.node_name(Path("/run/d.sock")) != place.node_name(Path("/run/e.sock"))


@pytest.mark.parametrize(
    ("host", "environment", "is_fleeting"),
    [
        ("gpu7", {}, False),
        ("0a1b2c3d4e5f", {}, True),
        ("0a1b2c3d4e5g", {}, False),
        ("hybridkv-7d9f4-x2x8k", {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, True),
    ],
)
def test_a_containers_host_name_is_known_not_to_last(
    host: str, environment: dict[str, str], is_fleeting: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: host)
    assert place.fleeting_host_name(environment) == (host if is_fleeting else None)


def test_a_detached_daemon_holds_no_stream_of_its_starter(tmp_path: Path) -> None:
    """A shell's $(...), or ssh, would wait until the daemon ends."""
    where = ["--socket", str(tmp_path / "daemon.sock")]
    options = ["--ram", "16MiB", "--metrics-port", "-1", "--detach"]
    result = subprocess.run(
        [sys.executable, "-m", "hybridkv", "serve", *where, *options],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=DEADLINE_SECONDS,
        check=False,
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, b"", b"")
    log = (tmp_path / "daemon.log").resolve()
    pid = peer_pid(where[1])
    streams = [os.readlink(f"/proc/{pid}/fd/{number}") for number in range(3)]
    assert streams == [os.devnull, os.devnull, str(log)], "a traceback is in the log"
    assert main(["stop", "--free", *where]) == 0


def settings_shown(socket_path: str) -> Mapping[str, str]:
    """The daemon's settings as its status shows them."""
    with ControlClient(socket_path) as control:
        report = control.stats(status=True)
    assert report.status is not None
    return report.status.setup.settings


def test_settings_of_a_file_of_variables_and_of_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An option wins over a variable, and that over the file; commands find the socket there."""
    path, file = str(tmp_path / "daemon.sock"), tmp_path / "hybridkv.toml"
    file.write_text(
        f'socket = "{path}"\nram = "24MiB"\nsalt_quota = "3MiB"\nnode = "file"\n'
        f'metrics_port = -1\ntiers = ["disk://{tmp_path}/disk?bytes=10MiB"]\n'
    )
    monkeypatch.setenv("HYBRIDKV_CONFIG", str(file))
    monkeypatch.setenv("HYBRIDKV_NODE", "variable")
    monkeypatch.setenv("HYBRIDKV_SALT_QUOTA", "2MiB")
    run_forked(["serve", "--salt-quota", "1MiB", "--detach"]).check_returncode()
    try:
        shown = settings_shown(path)
        assert (shown["ram"], shown["node"], shown["salt-quota"]) == ("24MiB", "variable", "1MiB")
        assert shown["tier 1"].startswith(f"disk://{tmp_path}/disk")
        assert main(["ping"]) == 0
    finally:
        assert main(["stop", "--free"]) == 0


def test_a_daemon_that_auto_starts_has_the_settings_of_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, file = str(tmp_path / "daemon.sock"), tmp_path / "hybridkv.toml"
    file.write_text('ram = "24MiB"\nnode = "file"\nmetrics_port = -1\n')
    monkeypatch.setenv("HYBRIDKV_SALT_QUOTA", "2MiB")
    extra = {"config": str(file), "node": "key", "log_file": str(tmp_path / "own.log")}
    ensure_daemon(path, parse_settings(extra).daemon_options)
    try:
        shown = settings_shown(path)
        assert (shown["ram"], shown["node"], shown["salt-quota"]) == ("24MiB", "key", "2MiB")
        assert "serving" in (tmp_path / "own.log").read_text()
    finally:
        assert main(["stop", "--free", "--socket", path]) == 0


def test_a_settings_file_that_cannot_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "hybridkv.toml"
    sentence = refused(capsys, "--config", str(file))
    assert sentence.startswith(
        f"hybridkv: config: {file} cannot be read (No such file or directory); "
    )
    os.mkfifo(file)
    for path in (file, tmp_path):
        sentence = refused(capsys, "--config", str(path))
        assert sentence.startswith(f"hybridkv: config: {path} is no regular file; ")
    file.unlink()
    file.write_bytes(b"\xef\xbb\xbfram = '9999999TiB'")
    says = f"hybridkv: {file}: ram='9999999TiB' is larger than any memory; "
    assert refused(capsys, "--config", str(file)).startswith(says)
    file.write_text("ram = 8GiB")
    assert refused(capsys, "--config", str(file)).startswith(f"hybridkv: config: {file} is no TOML")
    file.write_text('rum = "8GiB"')
    says = f"hybridkv: {file}: unknown key 'rum'; did you mean 'ram'?\n"
    assert main(["serve", "--config", str(file)]) == 2
    assert capsys.readouterr().err == says
    with pytest.raises(ConfigError, match=r"unknown key 'rum'; did you mean 'ram'\?$"):
        ensure_daemon(str(tmp_path / "d.sock"), ["--config", str(file)])
    monkeypatch.setenv("HYBRIDKV_CONFIG", "hybridkv.toml")
    assert refused(capsys).startswith("hybridkv: HYBRIDKV_CONFIG='hybridkv.toml' must be")


@pytest.mark.parametrize("port", ["65536", "99999", "-2"])
def test_a_port_that_is_none(port: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sentence = refused(capsys, "--socket", str(tmp_path / "run/d.sock"), "--metrics-port", port)
    assert (
        sentence
        == f"hybridkv: metrics-port={port} must be from 0 to 65535, or -1 for none; 9477 works\n"
    )
    assert not list(tmp_path.iterdir())


def test_a_log_that_cannot_be_written(tmp_path: Path) -> None:
    file = tmp_path / "none/log"
    with pytest.raises(
        ConfigError, match=rf"^log-file: {file} cannot be written \(No such file.*\); .* works$"
    ):
        DaemonProcess(
            str(tmp_path / "run/d.sock"), "16MiB", options=["--log-file", str(file)]
        ).start()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "path", ["/", "//", "/tmp/..", "/tmp/.", "/tmp/\udcff", "/tmp/\0", "relative"]
)
def test_a_socket_that_no_path_is(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(capsys, "--socket", path).startswith("hybridkv: socket: ")
    for command in (["stats"], ["explain", "x"], ["top", "--once"], ["plan"]):
        assert main([*command, "--socket", path]) == 2
        assert capsys.readouterr().err.startswith("hybridkv: socket: ")


@pytest.mark.parametrize("ram", ["9" * 400, "9" * 400 + "TiB"])
def test_an_amount_of_memory_that_no_machine_has(
    ram: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sentence = refused(capsys, "--socket", str(tmp_path / "run/d.sock"), "--ram", ram)
    assert sentence.endswith('is larger than any memory; "1GiB" works\n')
    assert not list(tmp_path.iterdir())


def test_a_log_of_json_from_a_level_on(tmp_path: Path) -> None:
    """Every line is one object; below the level there is nothing."""
    path, times = tmp_path / "daemon.sock", []
    options = ["--log-format", "json", "--shm-dir", str(tmp_path)]
    for level in ("info", "warning"):
        path.with_suffix(".log").unlink(missing_ok=True)
        with DaemonProcess(str(path), "1MiB", options=[*options, "--log-level", level]):
            pass
        lines = [json.loads(line) for line in path.with_suffix(".log").read_text().splitlines()]
        levels = {line["level"] for line in lines}
        assert levels == ({"info", "warning"} if level == "info" else {"warning"})
        assert {line["logger"] for line in lines} == {"hybridkv.daemon"}
        assert all(line["message"] and "exception" not in line for line in lines)
        times += [datetime.fromisoformat(line["time"]) for line in lines]
    assert all(time.tzinfo is not None for time in times)


@pytest.mark.parametrize("is_rotated", [True, False])
def test_a_hang_up_opens_the_log_file_anew(tmp_path: Path, is_rotated: bool) -> None:
    with DaemonProcess(str(tmp_path / "run/d.sock"), "16MiB") as daemon:
        log, old = tmp_path / "run/d.log", tmp_path / "run/d.log.1"
        if is_rotated:
            log.rename(old)
        assert daemon.process is not None
        daemon.process.send_signal(signal.SIGHUP)
        line = "SIGHUP: the log file was opened anew"
        until(lambda: log.exists() and line in log.read_text(), "the log goes on")
        assert daemon.stop() == 0
        assert ("serving" in log.read_text()) == (not is_rotated)
        assert not is_rotated or "SIGHUP" not in old.read_text()


@pytest.mark.parametrize("how", ["kill", "closed", "nohup"])
def test_a_closed_terminal_ends_a_daemon_with_a_word(tmp_path: Path, how: str) -> None:
    """A shell's exit and `kill -HUP` send one signal; only the first ends the daemon."""
    socket_path, log = tmp_path / "run/d.sock", tmp_path / "own.log"
    options = ["--log-file", str(log)] if how == "nohup" else []
    code = (
        "import fcntl, os, signal, sys, termios; os.setsid();"
        "fcntl.ioctl(int(sys.argv[1]), termios.TIOCSCTTY, 0);"
        f"signal.signal(signal.SIGHUP, signal.{'SIG_IGN' if how == 'nohup' else 'SIG_DFL'});"
        "os.execv(sys.executable, [sys.executable, '-m', 'hybridkv', *sys.argv[2:]])"
    )
    words = ["serve", "--socket", str(socket_path), "--ram", "16MiB", "--metrics-port", "-1"]
    ours, theirs = pty.openpty()
    output = tmp_path / "stderr"
    with output.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-c", code, str(theirs), *words, *options],
            pass_fds=[theirs],
            stderr=file,
        )
    os.close(theirs)
    try:
        written = log if how == "nohup" else output
        until(lambda: written.exists() and "serving" in written.read_text(), "it serves")
        if how != "kill":
            os.close(ours)
        if how != "closed":
            process.send_signal(signal.SIGHUP)
        line = "the terminal was closed" if how == "closed" else "SIGHUP"
        until(lambda: line in written.read_text(), "the log says so")
        if how != "closed":
            process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_SECONDS) == 0
        assert len(place.stale_arenas(socket_path)) == 1, "the cache stays"
    finally:
        process.kill()
        process.wait()
        if how == "kill":
            os.close(ours)
        for arena in place.stale_arenas(socket_path):
            arena.unlink()
