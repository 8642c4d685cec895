"""`hybridkv verify` on the real engine: it passes where the cache is right, and it can fail."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hybridkv.cli.main import main
from hybridkv.lab.tiny_model import write_tiny_model
from hybridkv.vllm.preflight import serves_tails
from tests.engine.forked import ForkedEngine
from tests.engine.support import KV_BYTES, MEMORY, CommandReport
from tests.seeds import ONE_THREAD

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

MODELS = ("lfm2", *(pytest.param(name, marks=pytest.mark.soak) for name in ("gemma3", "qwen3next")))


def verify(*arguments: str) -> CommandReport:
    process = subprocess.run(
        [sys.executable, "-m", "hybridkv", "verify", "--json", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**ONE_THREAD, **os.environ},
    )
    assert process.stdout, process.stderr
    return CommandReport(process.returncode, json.loads(process.stdout))


EIGHT_LAYERS = json.dumps(
    {"num_hidden_layers": 8, "layer_types": [*["linear_attention"] * 3, "full_attention"] * 2}
)
"""vLLM's CPU build takes no stage without attention."""


@pytest.mark.soak
@pytest.mark.parametrize(
    ("model", "partition", "arguments"),
    [
        ("qwen3", "1,3", ()),
        ("gemma3", "3,3", ()),
        ("deepseekv2", "1,2", ()),
        ("qwen3next", "4,4", ("--hf-overrides", EIGHT_LAYERS, "--prefix-match-unit=32")),
    ],
)
def test_every_arm_is_right_in_a_pipeline(
    model: str, partition: str, arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two stages, each with layers of its own; vLLM's CPU build runs them with a shim."""
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", partition)
    memory = f"{MEMORY}={KV_BYTES}"
    stages = ("--pipeline-parallel-size=2", *arguments)
    status, proof = verify("--model", model, "--ram", "256MiB", "--", memory, *stages)
    assert status == 0, json.dumps(proof, indent=2)
    arms = {arm["name"]: arm for arm in proof["arms"]}
    for name in ("warm", "engine restarted", "daemon restarted"):
        assert arms[name]["external_tokens"] == 5 * proof["chunk_tokens"], name
        assert arms[name]["same_bytes"] is True


@pytest.mark.parametrize("model", MODELS)
def test_every_arm_is_right(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With hits inside a block where they are served. Its five engines are forks."""
    monkeypatch.setattr("hybridkv.cli.proof.EngineProcess", ForkedEngine)
    with_tails = model != "gemma3" and serves_tails()
    unit = ["--prefix-match-unit=32"] if with_tails else []
    memory = f"{MEMORY}={KV_BYTES}"
    words = ["verify", "--json", "--model", model, "--ram", "256MiB", "--", memory, *unit]
    status = main(words)
    proof = json.loads(capsys.readouterr().out)
    assert status == 0, json.dumps(proof, indent=2)
    arms = {arm["name"]: arm for arm in proof["arms"]}
    chunk = proof["chunk_tokens"]
    assert arms["cold"]["external_tokens"] == 0
    assert arms["cold"]["bytes_stored"] > 0
    for name in ("warm", "engine restarted", "daemon restarted"):
        assert arms[name]["external_tokens"] == 5 * chunk, name
        assert arms[name]["same_bytes"] is True
        assert arms[name]["bytes_loaded"] > 0
    assert arms["mixed local and external"]["external_tokens"] == 3 * chunk
    if "recurrent" in proof["groups"]:
        branch = arms["divergent: 1 of 1"]
        assert branch["external_tokens"] == branch["cached_tokens"] == 2 * chunk
        assert (branch["same_bytes"], branch["same_logprobs"]) == (True, True)
    else:
        assert arms["divergent"]["not_served"]
    if with_tails:
        turns = arms["second turns: 3 of 3"]
        assert turns["external_tokens"] == 3 * (3 * chunk - 64)
        assert (turns["same_bytes"], turns["same_logprobs"]) == (True, True)
        assert turns["not_served"] is None
    else:
        assert arms["second turns"]["not_served"], "it says why it is skipped"


@pytest.mark.soak
def test_every_arm_is_right_of_a_prefiller_and_a_decoder(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the decoder waits for is a promise that is kept, or ends with whoever made it."""
    monkeypatch.setattr("hybridkv.cli.proof.EngineProcess", ForkedEngine)
    words = ["verify", "--json", "--disaggregated", "--model", "qwen3", "--ram", "256MiB"]
    status = main([*words, "--", f"{MEMORY}={KV_BYTES}"])
    proof = json.loads(capsys.readouterr().out)
    assert status == 0, json.dumps(proof, indent=2)
    arms = {arm["name"]: arm for arm in proof["arms"]}
    whole = 8 * proof["chunk_tokens"]
    for name in ("prefiller first", "prefiller after the decoder", "daemon is back"):
        assert arms[name]["external_tokens"] == whole, name
    assert arms["another decoder"]["external_tokens"] == whole
    assert arms["decoder first: decoder"]["external_tokens"] == 0
    assert sum(arm["waited_ms"] or 0.0 for arm in arms.values()) > 0, "somebody waits"
    assert 0 < arms["prefiller killed: decoder"]["external_tokens"] < whole
    assert arms["decoder first: prefiller"]["waited_ms"] == 0, "nobody waits for a decoder"


@pytest.mark.soak
def test_a_model_of_ones_own_gets_the_memory_that_it_needs(tmp_path: Path) -> None:
    """Without an argument of vLLM on memory, and with prompts of its own tokenizer."""
    write_tiny_model(tmp_path)
    status, proof = verify(
        *("--model", str(tmp_path), "--ram", "256MiB", "--"),
        *("--dtype", "float32", "--enforce-eager"),
    )
    assert status == 0, json.dumps(proof, indent=2)
    assert proof["prompts"] == "English text"
    assert proof["warnings"] == []
    assert proof["distinct_answers"] == proof["answers"] >= 5


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_ten_of_ten_over_restarts_and_on_another_node() -> None:
    """Requirements B43: ten prompts over each, all of them from outside and right."""
    status, proof = verify("--model", "gemma3", "--repeat", "10")
    assert status == 0, json.dumps(proof, indent=2)
    arms = {arm["name"]: arm for arm in proof["arms"]}
    chunk = proof["chunk_tokens"]
    for event in ("after the engine's restart", "after the daemon's restart", "on another node"):
        arm = arms[f"{event}: 10 of 10"]
        assert arm["external_tokens"] == 10 * 5 * chunk
        assert arm["same_bytes"] is True


@pytest.mark.soak
def test_a_flipped_byte_that_nobody_checks_changes_the_answer() -> None:
    """The oracle can see a single wrong byte: without it every test above would prove nothing."""
    status, proof = verify("--model", "gemma3", "--flip", "blind")
    arms = {arm["name"]: arm for arm in proof["arms"]}
    assert status == 1
    assert proof["ok"] is False
    assert arms["cold"]["ok"]
    assert not arms["warm"]["ok"]
    assert not arms["warm"]["same_logprobs"]


@pytest.mark.soak
def test_a_flipped_byte_is_detected_and_costs_only_the_hit() -> None:
    status, proof = verify("--model", "llama4", "--flip", "detect")
    arms = {arm["name"]: arm for arm in proof["arms"]}
    assert status == 1
    assert arms["warm"]["same_bytes"] is False
    assert arms["warm"]["external_tokens"] == 0
    assert arms["warm"]["same_tokens"]
    assert arms["warm"]["same_logprobs"], "computed instead, and right"
    assert arms["engine restarted"]["ok"], "the bad object was dropped and stored again"


@pytest.mark.soak
def test_a_prompt_longer_than_the_model_takes_is_one_clear_line() -> None:
    process = subprocess.run(
        [
            sys.executable,
            "-m",
            "hybridkv",
            "verify",
            "--model",
            "qwen3",
            "--",
            "--max-model-len",
            "512",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 2
    assert "max_model_len=512 is too short" in process.stderr.splitlines()[-1]
    assert process.stderr.splitlines()[-1].endswith("works")


def test_an_unknown_model_is_one_clear_line() -> None:
    process = subprocess.run(
        [sys.executable, "-m", "hybridkv", "verify", "--model", "qwen33"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 2
    assert process.stderr.startswith("hybridkv: --model: 'qwen33' is not bundled; ")
