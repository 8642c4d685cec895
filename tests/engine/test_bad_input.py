"""An engine that cannot be served says so at start-up: the setting, and a value that works."""

import re
from pathlib import Path

import pytest

from hybridkv.lab.engine_process import EngineError
from tests.engine.support import engine, prompt

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]


@pytest.mark.parametrize(
    ("model", "more", "extra", "says"),
    [
        (
            "gemma3",
            (),
            {"sever": "auto"},
            r"kv_connector_extra_config: unknown key 'sever'; did you mean 'server'\?",
        ),
        pytest.param(
            "gemma3",
            (),
            {"server": "auto", "ram": "100TiB"},
            r'kv_connector_extra_config.ram=100TiB is larger than .*" works',
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "qwen3next",
            ("--no-enable-prefix-caching",),
            {},
            r"mamba_cache_mode='none' keeps no state.*needs --enable-prefix-caching",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "gemma3",
            (),
            {"hybrid_chunk_size": 200},
            r"hybrid_chunk_size=200 is not a multiple of .* 256 works",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["unknown key", "ram", "prefix caching", "chunk"],
)
def test_one_clear_line(
    model: str, more: tuple[str, ...], extra: dict[str, object], says: str, tmp_path: Path
) -> None:
    with (
        pytest.raises(EngineError) as caught,
        engine(model, tmp_path / "e.log", str(tmp_path / "none.sock"), *more, extra=extra),
    ):
        pass
    assert any(re.search(f"Error: {says}", line) for line in str(caught.value).splitlines()), str(
        caught.value
    )


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
        rf"Error: speculative_config: .* ({wrong}|{unproven}) .*; "
        r"serving without --speculative-config works"
    )
    assert any(re.search(says, line) for line in str(caught.value).splitlines()), str(caught.value)


def test_another_users_socket(other_users_socket: str, tmp_path: Path) -> None:
    with (
        pytest.raises(EngineError) as caught,
        engine("qwen3", tmp_path / "e.log", other_users_socket),
    ):
        pass
    says = r'kv_connector_extra_config.server: .* is served by another user; "auto" works'
    assert any(re.search(f"Error: {says}", line) for line in str(caught.value).splitlines()), str(
        caught.value
    )


def test_no_daemon_is_a_warning_that_says_how_to_start_one(tmp_path: Path) -> None:
    """An engine without its daemon serves; every prefix is computed."""
    with engine("qwen3", tmp_path / "e.log", str(tmp_path / "none.sock")) as running:
        (result,) = running.run(prompt(1, 300), max_tokens=2)
        assert result["finish_reason"] == "length"
    log = (tmp_path / "e.log").read_text()
    assert re.search(
        r"WARNING .*everything is computed until there is a daemon: .*hybridkv serve --socket", log
    )
