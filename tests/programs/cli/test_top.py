"""`hybridkv top` draws frames of any size and any client names, and restores the terminal."""

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from typing import Any

import pytest

from hybridkv.cli.main import main
from hybridkv.cli.top import QUIT_KEYS, WRAP_KEYS, frame, keys_in
from hybridkv.core.sizes import format_size
from hybridkv.lab.daemon_process import DaemonProcess
from hybridkv.wire.messages import Decline, Release, ReportRequest, RequestExplanation
from hybridkv.wire.status import Status
from tests.unit.daemon.harness import commit, engine, grant, lookup, make_daemon
from tests.unit.observe.test_metrics import PART, SMALL, hello
from tests.waiting import DEADLINE_SECONDS

HOSTILE = "x\x1b]0;pwned\x07\x1b[31m\r\n\u202e[bold]"
LEAVE = b"\x1b[?1049l"
COMMAND = [
    sys.executable,
    "-c",
    "import sys; from hybridkv.cli.main import main; sys.exit(main())",
    "top",
    "--socket",
]


@pytest.fixture(scope="module")
def status() -> Status:
    """The status of a daemon with a few samples."""
    core = make_daemon()
    core.sessions.on_connect(1)
    core.handle(1, hello(HOSTILE))
    for connection in range(2, 30):
        engine(core, connection, SMALL, name=f"engine {connection}")
    for turn in range(30):
        core.tick(10.0 * turn)
        commit(core, 1, grant(core, 1, PART, 1), 0, [turn])
        lookup(core, 1, turn + 1, turn, turn + 1)
        core.handle(1, Release(turn + 1, 16, 512))
        core.handle(
            1,
            ReportRequest(
                f"{HOSTILE}{turn}",
                RequestExplanation(9, 0, declined=Decline.PLAN_FAILED, detail=HOSTILE),
            ),
        )
        while core.ceiling.work():
            pass
    return core.view.status(300.0)


@pytest.mark.parametrize("size", [(80, 24), (40, 8), (10, 3), (1, 1), (132, 60), (400, 200)])
def test_a_frame_fits_and_obeys_nobody(status: Status, size: tuple[int, int]) -> None:
    width, height = size
    lines = frame(status, HOSTILE, width, height).plain.split("\n")
    assert len(lines) <= height
    assert all(len(line) <= max(width, 40) for line in lines)
    assert all(line.isprintable() for line in lines)


def test_a_plain_terminal_has_a_little_of_everything(status: Status) -> None:
    lines = frame(status, "/run/daemon.sock", 80, 24).plain.split("\n")
    assert len(lines) == 24
    for start in (
        "hybridkv",
        "hit rate",
        "ram",
        "last min",
        "the last",
        "in ram",
        "engines: 29",
        "recent decisions",
    ):
        assert any(line.startswith(start) for line in lines), start
    assert any(re.search(r"[▁▂▃▄▅▆▇█]{5}", line) for line in lines)


def test_without_a_height_there_is_all_of_it(status: Status) -> None:
    text = frame(status, "/run/daemon.sock", 100, 0).plain
    assert text.count("failed: ") == 20
    assert "engine 29" in text


def test_a_line_that_is_cut_can_be_read(status: Status) -> None:
    """The key w wraps, and so does a frame that is printed once."""
    cut = frame(status, "/run/daemon.sock", 60, 30).plain
    text = frame(status, "/run/daemon.sock", 60, 0, is_wrapped=True).plain
    assert "…" in cut
    assert max(map(len, text.split("\n"))) <= 60
    assert " ".join(status.help.split()) in " ".join(text.split())
    assert {*keys_in(b"w")} <= WRAP_KEYS


def test_ram_is_one_number(status: Status) -> None:
    """That of the objects, as the status page's tile and its table of tiers."""
    (line,) = [line for line in frame(status, "x", 100, 0).plain.split("\n") if line[:4] == "ram "]
    assert f" {format_size(status.values['bytes_committed'])} of " in line


def test_an_empty_daemon_has_a_frame_too() -> None:
    fresh = make_daemon().view.status(0.0)
    text = frame(fresh, "/run/daemon.sock", 80, 24).plain
    assert "nothing was looked up" in text
    assert "no engine is connected" in text


def test_one_snapshot(daemon: DaemonProcess, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--socket", daemon.socket_path, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["values"]["bytes_arena"] == 64 << 20
    assert {"health", "verdict", "hour", "decisions"} <= set(document)
    assert main(["top", "--socket", daemon.socket_path, "--once"]) == 0
    output = capsys.readouterr().out
    assert "64MiB" in output
    assert "\x1b[?1049h" not in output


def test_bad_input_is_said(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--socket", str(tmp_path / "none.sock"), "--json"]) != 0
    assert "no daemon answers" in capsys.readouterr().err
    assert main(["top", "--socket", str(tmp_path / "none.sock"), "--interval", "0"]) == 2
    assert "1 works" in capsys.readouterr().err


class Terminal:
    """A process in a pseudo terminal of 80 x 24."""

    def __init__(self, command: list[str]) -> None:
        self.ours, theirs = pty.openpty()
        self.resize(80, 24)
        self.before = termios.tcgetattr(theirs)
        environment = dict(os.environ, TERM="xterm-256color")
        for name in ("COLUMNS", "LINES", "NO_COLOR"):
            environment.pop(name, None)
        self.process = subprocess.Popen(
            command,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=environment,
            start_new_session=True,
        )
        self._theirs = theirs
        self.shown = b""

    def resize(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self.ours, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def press(self, keys: bytes) -> None:
        os.write(self.ours, keys)

    def until(self, word: bytes) -> None:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while word not in self.shown:
            assert time.monotonic() < deadline, self.shown[-2000:]
            if select.select([self.ours], [], [], 0.1)[0]:
                self.shown += os.read(self.ours, 65536)

    def end(self) -> int:
        """Returns its exit status. The terminal must be as it was, on its first screen."""
        self.until(LEAVE)
        status = self.process.wait(DEADLINE_SECONDS)
        assert termios.tcgetattr(self._theirs) == self.before
        assert self.shown.rfind(b"\x1b[?25h") > self.shown.rfind(b"\x1b[?25l"), (
            "the cursor is shown again"
        )
        return status

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self.ours)
        os.close(self._theirs)


@pytest.fixture
def terminal(daemon: DaemonProcess) -> Iterator[Terminal]:
    """A terminal in which `top` shows the daemon."""
    running = Terminal([*COMMAND, daemon.socket_path, "--interval", "0.25"])
    try:
        running.until(b"last min")
        yield running
    finally:
        running.close()


@pytest.mark.parametrize("keys", [b"q", b"Q"])
def test_a_key_ends_it(terminal: Terminal, keys: bytes) -> None:
    terminal.press(keys)
    assert terminal.end() == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_end_it_as_cleanly(terminal: Terminal, number: signal.Signals) -> None:
    terminal.process.send_signal(number)
    assert terminal.end() == 0


@pytest.mark.parametrize(
    "sequence", [b"q", b"Q", b"\x03", b"\x1b", b"\x1b\x1b", b"\x1b[Aq", b"\x1b[A\x1b", b""]
)
def test_keys_that_end_it(sequence: bytes) -> None:
    assert keys_in(sequence) & QUIT_KEYS
