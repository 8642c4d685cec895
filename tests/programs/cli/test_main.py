"""The command itself: whoever reads it may go at any time, and bad words are one sentence."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from hybridkv import __version__
from hybridkv.cli.main import COMMANDS, command_of, main
from hybridkv.core.copies import PAYLOAD_VERSION
from hybridkv.lab.daemon_process import DaemonProcess
from hybridkv.tiers.record import RECORD_VERSION
from hybridkv.vllm.proven import PROVEN
from hybridkv.wire.messages import PROTOCOL_VERSION


@contextlib.contextmanager
def nobody_reads() -> Iterator[None]:
    """Standard output is a pipe whose reader is gone."""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as file, contextlib.redirect_stdout(file):
        yield
        file.write("what the interpreter writes when it ends")


def test_a_reader_that_is_gone_is_a_quiet_end(
    daemon: DaemonProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in (["stats"], ["stats", "--json"], ["top", "--json"], ["top", "--once"]):
        with nobody_reads():
            assert main([*words, "--socket", daemon.socket_path]) == 141, words
    assert capsys.readouterr().err == ""


def test_a_disk_that_is_full_is_one_sentence(daemon: DaemonProcess) -> None:
    command = [sys.executable, "-m", "hybridkv", "stats", "--socket", daemon.socket_path]
    with open("/dev/full", "w") as full:
        result = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, check=False, timeout=60
        )
    where = "standard output or a file that the command writes"
    what = f"hybridkv: {where} has no room (No space left on device)\n"
    assert (result.returncode, result.stderr) == (2, what)


def test_without_a_command_there_is_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "run the cache daemon of this node" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("typed", "hint"),
    [
        ("serv", "did you mean 'serve'?"),
        ("stat", "did you mean 'stats'?"),
        ("xyzzy", '"hybridkv --help" lists all'),
    ],
)
def test_a_mistyped_command_is_one_sentence(
    typed: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A hint is given for something alike alone."""
    assert main([typed, "--socket", "/none"]) == 2
    assert capsys.readouterr().err == f"hybridkv: {typed!r} is no command; {hint}\n"


def test_versions_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    """Those that must agree: of the package, of the protocol, and of vLLM as `doctor` has them."""
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    served = ", ".join(PROVEN)
    assert ended.value.code == 0
    assert capsys.readouterr().out.split("\n") == [
        f"hybridkv {__version__}, protocol {PROTOCOL_VERSION}, payload {PAYLOAD_VERSION}, "
        f"record {RECORD_VERSION}, vLLM {served}",
        "",
    ]


def test_a_variable_names_the_socket(
    daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HYBRIDKV_SOCKET", daemon.socket_path)
    assert main(["stats", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["arena"].startswith("/dev/shm/")
    assert type(document["objects"]) is int
    assert main(["stats", "--socket", "/nowhere/daemon.sock"]) == 2, "the option wins"
    monkeypatch.setenv("HYBRIDKV_SOCKET", "relative")
    assert main(["stats"]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("hybridkv: HYBRIDKV_SOCKET: ")


def test_a_request_that_is_no_text(
    daemon: DaemonProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", "\udcff", "--socket", daemon.socket_path]) == 2
    assert capsys.readouterr().err == (
        "hybridkv: request '\\udcff' is not UTF-8, and no engine names one so; "
        "a name as the engine's log has it works\n"
    )


@pytest.mark.parametrize("module", ["hybridkv.wire.messages", "hybridkv.cli.top", "rich.live"])
def test_an_interrupt_while_modules_are_imported_is_a_quiet_end(module: str) -> None:
    code = """if True:
        import os, runpy, signal, sys
        module = sys.argv.pop(1)
        class Interrupting:
            def find_spec(self, name, *_):
                if name == module:
                    os.kill(os.getpid(), signal.SIGINT)
        sys.meta_path.insert(0, Interrupting())
        runpy.run_module("hybridkv", run_name="__main__")
    """
    result = subprocess.run(
        [sys.executable, "-c", code, module, "top"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    # The signal itself ends a process whose first modules are not imported yet.
    assert result.returncode in (130, -signal.SIGINT)
    assert (result.stdout, result.stderr) == ("", "")


@pytest.mark.parametrize("layers", ["0", "-1"])
def test_a_group_has_layers(layers: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "path", "--layers", layers]) == 2
    assert (
        capsys.readouterr().err == f"hybridkv: --layers {layers} is no number of layers; 32 works\n"
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_says_what_it_is(command: str) -> None:
    """Also --socket, whose default depends on the machine."""
    silent = set()
    for argument in command_of(command).arguments:
        choices = argument if isinstance(argument, list) else [argument]
        silent |= {choice.name for choice in choices if not choice.keywords.get("help")}
    assert silent <= {"what"}
