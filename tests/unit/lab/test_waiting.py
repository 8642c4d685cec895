"""Whoever waits for vLLM hears of it: a child that is silent is told of, and has a limit."""

import io
import tempfile

import pytest

from hybridkv.cli.terminal import waiting
from hybridkv.lab import engine_process
from hybridkv.lab.engine_process import AnsweringChild

pytestmark = pytest.mark.engine


def test_a_silent_child_is_told_of_until_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_process, "PROGRESS_SECONDS", 0.01)
    told: list[float] = []
    with (
        tempfile.TemporaryFile() as log,
        AnsweringChild("tests.unit.lab.silent", [], log, {}, {}) as child,
    ):
        with pytest.raises(TimeoutError, match=r"^silent since "):
            child.receive(0.1, told.append)
        assert child.process.poll() is None
    assert child.process.returncode == 0, "it ends by itself when nobody listens"
    assert told
    assert told == sorted(told)


def test_what_is_told_says_for_how_long(monkeypatch: pytest.MonkeyPatch) -> None:
    said = io.StringIO()
    monkeypatch.setattr("sys.stderr", said)
    waiting(12.3)
    assert said.getvalue() == "vLLM reads the configuration, since 12 s\n"
