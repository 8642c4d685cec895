"""The command itself: whoever reads it may go at any time, and bad words are one sentence."""

import contextlib
import os
from collections.abc import Iterator

import pytest

from hybridkv.cli.main import main
from hybridkv.testing.daemon import DaemonProcess


@contextlib.contextmanager
def nobody_reads() -> Iterator[None]:
    """Standard output is a pipe whose reader is gone."""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as file, contextlib.redirect_stdout(file):
        yield
        file.write("what the interpreter writes when it ends")


def test_a_reader_that_is_gone_is_a_quiet_end(daemon: DaemonProcess, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["stats"], ["stats", "--json"], ["top", "--json"], ["top", "--once"]):
        with nobody_reads():
            assert main([*words, "--socket", daemon.socket_path]) == 141, words
    assert capsys.readouterr().err == ""


def test_so_it_is_for_help(capsys: pytest.CaptureFixture[str]) -> None:
    with nobody_reads():
        assert main(["--help"]) == 141
    assert capsys.readouterr().err == ""


def test_without_a_standard_output_it_works(daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout", None)
    assert main(["stats", "--socket", daemon.socket_path]) == 0
