"""Every bundled architecture passes `hybridkv verify`, and its answers depend on the cache."""

import json
from typing import Any

import pytest

from hybridkv.lab.models import SPECULATION, V2_RUNNER_ENV, bundled_models
from tests.engine.support import is_served
from tests.engine.test_verify import verify

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]

MODELS = tuple(sorted(bundled_models().keys() - SPECULATION.keys()))
V2_MODELS = ("qwen3", "gemma3", "lfm2", "gemma4_mtp", "llama_eagle", "llama_eagle3", "qwen3_draft")
"""Interpreted kernels take too long for the others."""
IN_PART = {
    "falconh1": 448,
    "granitehybrid": 448,
    "qwen3next": 320,
    "qwen35": 320,
    "gemma4": 320,
    "deepseekv4": 320,
}
"""--max-num-batched-tokens (else 192): below a prompt, no divisor of it, at least a whole block."""
TENSOR_PARALLEL = ("--", "--tensor-parallel-size=2", "--distributed-executor-backend=mp")


def right(model: str, status: int, proof: dict[str, Any]) -> None:
    """Check every arm, every expected hit, and that tokens vary.

    Where vLLM switches caching off, the proof must say NOT PROVEN.
    """
    if not is_served(model):
        outcomes = [(arm["name"], arm["ok"], arm["not_served"]) for arm in proof["arms"]]
        assert (status, proof["ok"], outcomes) == (
            1,
            False,
            [("cold", False, "prefix_caching_off_in_vllm")],
        )
        return
    assert status == 0, json.dumps(proof, indent=2)
    assert proof["ok"], json.dumps(proof, indent=2)
    arms = {arm["name"].partition(" times")[0].rstrip(" 0123456789"): arm for arm in proof["arms"]}
    chunk = proof["chunk_tokens"]
    for name in ("warm", "engine restarted", "daemon restarted"):
        assert arms[name]["external_tokens"] == 5 * chunk, name
        assert arms[name]["same_bytes"] is True
    assert arms["preempted"]["preemptions"] > 0
    assert arms["preempted"]["external_tokens"] >= chunk
    assert proof["distinct_tokens"] > 2, "equal tokens prove something"


@pytest.mark.soak
@pytest.mark.parametrize("model", [*MODELS, *SPECULATION])
def test_every_arm(model: str) -> None:
    status, proof = verify("--model", model)
    right(model, status, proof)


@pytest.mark.soak
@pytest.mark.parametrize("model", MODELS)
def test_every_arm_with_prefill_in_parts(model: str) -> None:
    status, proof = verify(
        "--model", model, "--", f"--max-num-batched-tokens={IN_PART.get(model, 192)}"
    )
    right(model, status, proof)


@pytest.mark.soak
@pytest.mark.parametrize("model", MODELS)
def test_every_arm_on_two_ranks(model: str) -> None:
    status, proof = verify("--model", model, *TENSOR_PARALLEL)
    right(model, status, proof)


@pytest.mark.soak
@pytest.mark.parametrize("model", V2_MODELS)
def test_every_arm_on_the_v2_model_runner(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's default on GPUs. On a CPU its kernels run in Triton's interpreter."""
    monkeypatch.setenv(V2_RUNNER_ENV, "1")
    status, proof = verify("--model", model)
    right(model, status, proof)


@pytest.mark.soak
def test_a_drafter_of_the_v2_model_runner_with_prefill_in_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It knows the token after each part, so that one visit stores all of a prompt."""
    monkeypatch.setenv(V2_RUNNER_ENV, "1")
    status, proof = verify("--model", "llama_eagle", "--", "--max-num-batched-tokens=192")
    right("llama_eagle", status, proof)


@pytest.mark.soak
@pytest.mark.parametrize("model", MODELS)
def test_one_wrong_byte_changes_the_answer(model: str) -> None:
    if not is_served(model):
        pytest.skip("vLLM switches prefix caching off for this model on this machine")
    status, proof = verify("--model", model, "--flip", "blind")
    arms = {arm["name"]: arm for arm in proof["arms"]}
    assert status == 1
    assert arms["cold"]["ok"]
    assert not arms["warm"]["same_logprobs"]
