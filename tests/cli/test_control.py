"""`hybridkv stats` and `hybridkv explain`: what clients named is shown, and obeyed by nobody."""

import json

import pytest

from hybridkv.cli.main import main
from hybridkv.client.control import Control
from hybridkv.testing.daemon import DaemonProcess
from hybridkv.wire.messages import PROTOCOL_VERSION, Hello, Tell, geometry_to_wire
from tests.layouts import LAYOUTS

HOSTILE = "x\x1b]0;pwned\x07\x1b[31m\r\n\u202e[bold]"
SHOWN = "x\ufffd]0;pwned\ufffd\ufffd[31m\ufffd\ufffd\ufffd[bold]"


def test_what_clients_named_is_obeyed_by_no_terminal(daemon: DaemonProcess, capsys: pytest.CaptureFixture[str]) -> None:
    hello = Hello(1, PROTOCOL_VERSION, "engine", HOSTILE, b"n" * 32, geometry_to_wire(LAYOUTS["qwen3"]))
    socket = ["--socket", daemon.socket_path]
    with Control(daemon.socket_path, hello=hello) as engine:
        engine.tell(Tell(HOSTILE, {"prompt": HOSTILE, HOSTILE: "a fact"}))
        assert main(["explain", HOSTILE, *socket]) == 0
        assert capsys.readouterr().out.split("\n")[:2] == [f"{'prompt':<{len(SHOWN)}}  {SHOWN}", f"{SHOWN}  a fact"]
        assert main(["explain", HOSTILE, *socket, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["prompt"] == HOSTILE
        assert main(["explain", "another", *socket]) == 1
        assert capsys.readouterr().err.endswith(f"the latest are: {SHOWN}\n")
        assert main(["stats", *socket]) == 0
        said = capsys.readouterr().out
    assert SHOWN in said
    assert all(line.isprintable() for line in said.split("\n"))
