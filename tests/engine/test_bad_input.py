"""An engine that cannot be served says so at start-up: the setting, and a value that works."""

import re
from pathlib import Path

import pytest

from hybridkv.lab.engine_process import EngineError
from tests.engine.support import engine, prompt

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]


def refused(caught: pytest.ExceptionInfo[EngineError], sentence: str) -> bool:
    """Whether a line of the engine's log is that error."""
    lines = str(caught.value).splitlines()
    return any(re.search(f"Error: {sentence}", line) for line in lines)


def test_an_unknown_key(tmp_path: Path) -> None:
    with (
        pytest.raises(EngineError) as caught,
        engine("gemma3", tmp_path / "e.log", str(tmp_path / "n.sock"), extra={"sever": "auto"}),
    ):
        pass
    says = r"kv_connector_extra_config: unknown key 'sever'; did you mean 'server'\?"
    assert refused(caught, says), str(caught.value)


def test_speculation_with_recurrent_state_is_refused(tmp_path: Path) -> None:
    """On the CPU, where the kernel of vLLM 0.32 is wrong and no shim mends it."""
    ngram = (
        '--speculative-config={"method":"ngram","num_speculative_tokens":2,"prompt_lookup_max":3}'
    )
    with (
        pytest.raises(EngineError) as caught,
        engine("qwen3next", tmp_path / "e.log", str(tmp_path / "n.sock"), ngram),
    ):
        pass
    wrong, unproven = "CPU build itself computes wrong recurrent states", "never restored on vllm"
    says = (
        rf"speculative_config: .* ({wrong}|{unproven}) .*; "
        r"serving without --speculative-config works"
    )
    assert refused(caught, says), str(caught.value)


def test_another_users_socket(other_users_socket: str, tmp_path: Path) -> None:
    with (
        pytest.raises(EngineError) as caught,
        engine("qwen3", tmp_path / "e.log", other_users_socket),
    ):
        pass
    says = r'kv_connector_extra_config.server: .* is served by another user; "auto" works'
    assert refused(caught, says), str(caught.value)


def test_no_daemon_is_a_warning_that_says_how_to_start_one(tmp_path: Path) -> None:
    """An engine without its daemon serves, and computes every prefix."""
    with engine("qwen3", tmp_path / "e.log", str(tmp_path / "none.sock")) as running:
        (result,) = running.generate(prompt(1, 300), max_tokens=2)
        assert result["finish_reason"] == "length"
    log = (tmp_path / "e.log").read_text()
    assert re.search(
        r"WARNING .*everything is computed until there is a daemon: .*hybridkv serve --socket", log
    )
