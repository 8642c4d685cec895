"""Progress is reported while vLLM is silent, and a silent child has a limit."""

import io
import signal
import tempfile

import pytest

from hybridkv.cli.terminal import waiting
from hybridkv.lab import engine_process
from hybridkv.lab.engine_process import AnsweringChild, ChildEnvironment

pytestmark = pytest.mark.engine


def test_a_silent_child_is_told_of_until_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_process, "PROGRESS_SECONDS", 0.01)
    waited: list[float] = []
    with (
        tempfile.TemporaryFile() as log,
        AnsweringChild("tests.unit.lab.silent", [], log, ChildEnvironment({}, {})) as child,
    ):
        with pytest.raises(TimeoutError, match=r"^silent since "):
            child.receive_answer(0.1, waited.append)
        assert child.process.poll() is None
    assert child.process.returncode == 0, "it ends by itself when nobody listens"
    assert waited
    assert waited == sorted(waited)


def test_an_error_does_not_wait_for_a_child_that_still_computes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ctrl-C in `verify` left its engine for a minute."""
    monkeypatch.setattr(engine_process, "BROKEN_SECONDS", 0.01)
    with (
        tempfile.TemporaryFile() as log,
        pytest.raises(KeyboardInterrupt),
        AnsweringChild("tests.unit.lab.silent", ["deaf"], log, ChildEnvironment({}, {})) as child,
    ):
        raise KeyboardInterrupt
    assert child.process.returncode == -signal.SIGKILL


def test_what_is_told_says_for_how_long(monkeypatch: pytest.MonkeyPatch) -> None:
    output = io.StringIO()
    monkeypatch.setattr("sys.stderr", output)
    waiting(12.3)
    assert output.getvalue() == "vLLM reads the configuration, since 12 s\n"
