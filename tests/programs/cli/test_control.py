"""`hybridkv ping`, `stats`, `clear` and `explain`: what clients named is obeyed by nobody."""

import json
import socket
from contextlib import closing
from pathlib import Path

import pytest

from hybridkv.cli.main import main
from hybridkv.client.control import ControlClient
from hybridkv.lab.daemon_process import DaemonProcess
from hybridkv.wire.messages import ReportRequest, RequestExplanation
from tests.forked_daemon import ForkedDaemon, run_forked
from tests.layouts import LAYOUTS
from tests.programs.tiers.servers import free_port
from tests.unit.daemon.harness import engine_hello
from tests.unit.daemon.tierclient import IDENTITY, Client, hashes, stats
from tests.waiting import until

HOSTILE = "x\x1b]0;pwned\x07\x1b[31m\r\n\u202e[bold]"
SHOWN = "x\ufffd]0;pwned\ufffd\ufffd[31m\ufffd\ufffd\ufffd[bold]"


def test_what_clients_named_is_obeyed_by_no_terminal(
    daemon: DaemonProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    hello = engine_hello(LAYOUTS["qwen3"], HOSTILE)
    where = ["--socket", daemon.socket_path]
    explanation = RequestExplanation(9, 0, tiers={HOSTILE: 1}, not_read=HOSTILE)
    with ControlClient(daemon.socket_path, hello=hello) as engine:
        engine.tell(ReportRequest(HOSTILE, explanation))
        assert main(["explain", HOSTILE, *where]) == 0
        width = len("not read from below RAM because")
        assert capsys.readouterr().out.split("\n")[:3] == [
            f"{'prompt':<{width}}  9 tokens",
            f"{'came up':<{width}}  1 chunks from {SHOWN}",
            f"not read from below RAM because  {SHOWN}",
        ]
        assert main(["explain", HOSTILE, *where, "--json"]) == 0
        explained = json.loads(capsys.readouterr().out)
        assert explained["came_up"] == f"1 chunks from {HOSTILE}"
        assert all(key.isidentifier() for key in explained), "a filter of jq can name each"
        assert main(["explain", "another", *where]) == 1
        assert capsys.readouterr().err.endswith(f"the latest are: {SHOWN}\n")
        assert main(["stats", *where]) == 0
        output = capsys.readouterr().out
    assert SHOWN in output
    assert all(line.isprintable() for line in output.split("\n"))


def test_ping_says_which_daemon_answers(
    daemon: DaemonProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ["--socket", daemon.socket_path]
    assert daemon.process is not None
    pid = daemon.process.pid
    assert main(["ping", *where]) == 0
    assert capsys.readouterr().out == f"a daemon answers at {daemon.socket_path} (pid {pid})\n"
    assert main(["ping", *where, "--json"]) == 0
    with ControlClient(daemon.socket_path) as control:
        boot = control.welcome.boot
    document = json.loads(capsys.readouterr().out)
    assert document == {"socket": daemon.socket_path, "pid": pid, "boot": boot}


@pytest.mark.parametrize("asked", ["stats", "ping"])
@pytest.mark.parametrize("left", [False, True], ids=["no_file", "left_by_a_dead_one"])
def test_that_no_daemon_is_there_is_said_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], asked: str, left: bool
) -> None:
    path = tmp_path / "daemon.sock"
    if left:
        with closing(socket.socket(socket.AF_UNIX)) as dead:
            dead.bind(str(path))
    assert main([asked, "--socket", str(path)]) == 2
    assert "nothing listens there" in capsys.readouterr().err


def test_that_a_socket_is_another_users_is_said(other_users_socket: str) -> None:
    """Also to somebody who is not root and may not even look into the directory."""
    # The help makes argparse import what the other user may not read.
    code = (
        "import os, sys; from hybridkv.cli import control; from hybridkv.cli.main import main;"
        " main([]); os.setuid(65533); sys.exit(main(['stats', '--socket', sys.argv[1]]))"
    )
    result = run_forked([other_users_socket], code)
    assert result.returncode == 2
    assert "belongs to user id 65534, and you are user id 65533" in result.stderr, result.stderr


def test_stats_name_the_log(daemon: DaemonProcess, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stats", "--json", "--socket", daemon.socket_path]) == 0
    log = json.loads(capsys.readouterr().out)["log"]
    assert log == str(Path(daemon.socket_path).with_suffix(".log"))


def test_clear_tells_which_tiers_it_did_not_reach(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What was not removed there comes back as hits."""
    tiers = [
        "--tier",
        f"disk://{tmp_path / 'tier'}?bytes=1MiB",
        "--tier",
        f"valkey://127.0.0.1:{free_port()}",
    ]
    with ForkedDaemon(
        str(tmp_path / "d.sock"), "16MiB", options=["--node", "here", *tiers]
    ) as daemon:
        where = ["--socket", daemon.socket_path]
        until(lambda: stats(daemon.socket_path)["tier_disk_is_open"] == 1, "the directory is open")
        assert main(["clear", *where]) == 0
        assert capsys.readouterr().out == "dropped 0 objects\n"
        assert main(["clear", "--tiers", *where]) == 1
        output = capsys.readouterr().out
        assert "disk is removing its own" in output
        assert "valkey is out of reach" in output
        assert main(["clear", "--tiers", "--json", *where]) == 1
        assert json.loads(capsys.readouterr().out)["tiers"] == {
            "disk": "removing",
            "valkey": "out of reach",
        }


def test_clear_of_tiers_where_there_are_none(
    daemon: DaemonProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["clear", "--tiers", "--socket", daemon.socket_path]) == 0
    assert capsys.readouterr().out == "dropped 0 objects; there is no tier below RAM\n"


def test_a_prompt_is_pinned_listed_and_let_go_again(
    daemon: DaemonProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ["--socket", daemon.socket_path]
    identity = IDENTITY.hex()[:12]
    with Client(daemon.socket_path) as client:
        client.store(1, 3)
        client.store(2, 2)
        explanation = RequestExplanation(400, 3, last_chunk=hashes(1, 3)[-1])
        client.tell(ReportRequest("cmpl-1-0", explanation))
        client.values()
        assert main(["pin", "cmpl-1", "--for", "2h", "--json", *where]) == 0
        pinned = json.loads(capsys.readouterr().out)
        left = pinned["pins"][0].pop("seconds_left")
        assert 7000 < left <= 7200
        names = {"request": "cmpl-1", "identity": None, "tenant": None}
        assert pinned["pins"] == [{**names, "chunks": 3, "kept": 3}]
        retained = stats(daemon.socket_path)["retained_bytes"]
        assert retained > 0
        assert main(["pin", "--identity", identity, *where]) == 0
        assert stats(daemon.socket_path)["retained_bytes"] > retained
        assert f"identity {identity}" in capsys.readouterr().out
        assert main(["pin", "--salt", "alice", *where]) == 1, "it has nothing here"
        assert main(["unpin", "--identity", identity, *where]) == 0
        assert stats(daemon.socket_path)["retained_bytes"] == 0
    for wrong, works in (
        (["unpin"], "hybridkv unpin --salt - works"),
        (["pin", "cmpl-1", "--for", "3d"], "2h"),
        (["pin", "cmpl-2"], "no request 'cmpl-2' ended lately"),
        (["pin", "--identity", "0"], "nothing has the identity '0'"),
        (["pin", "--identity", "xyz"], "ab12"),
        (["pin", "cmpl-1", "--salt", "alice"], "the request alone works"),
    ):
        assert main([*wrong, *where]) == 2
        assert works in capsys.readouterr().err.replace('"', "")
