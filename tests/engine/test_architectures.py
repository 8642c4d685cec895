"""Every bundled architecture through `hybridkv verify`, and that its answers depend on the cache at all."""

import json
from typing import Any

import pytest

from hybridkv.testing.models import bundled_models
from tests.engine.test_verify import verify

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]

MODELS = tuple(bundled_models())
IN_PART = {"falconh1": 448, "granitehybrid": 448, "qwen3next": 320, "qwen35": 320, "gemma4": 320, "deepseekv4": 320}
"""--max-num-batched-tokens: less than a prompt, no divisor of it, no less than a block that must be whole; else 192."""
TENSOR_PARALLEL = ("--", "--tensor-parallel-size=2", "--distributed-executor-backend=mp")


def right(proof: dict[str, Any]) -> None:
    """Every arm, every expected hit, and tokens that vary."""
    assert proof["ok"], json.dumps(proof, indent=2)
    arms = {arm["name"].partition(" times")[0].rstrip(" 0123456789"): arm for arm in proof["arms"]}
    chunk = proof["chunk_tokens"]
    for name in ("warm", "engine restarted", "daemon restarted"):
        assert arms[name]["external_tokens"] == 5 * chunk, name
        assert arms[name]["same_bytes"] is True
    assert arms["preempted"]["preemptions"] > 0
    assert arms["preempted"]["external_tokens"] >= chunk
    assert proof["distinct_tokens"] > 2, "equal tokens prove something"


@pytest.mark.parametrize(
    "model", [pytest.param(model, marks=[] if model == "deepseekv2" else [pytest.mark.slow]) for model in MODELS]
)
def test_every_arm(model: str) -> None:
    status, proof = verify("--model", model)
    right(proof)
    assert status == 0


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_every_arm_with_prefill_in_parts(model: str) -> None:
    status, proof = verify("--model", model, "--", f"--max-num-batched-tokens={IN_PART.get(model, 192)}")
    right(proof)
    assert status == 0


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_every_arm_on_two_ranks(model: str) -> None:
    status, proof = verify("--model", model, *TENSOR_PARALLEL)
    right(proof)
    assert status == 0


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_one_wrong_byte_changes_the_answer(model: str) -> None:
    status, proof = verify("--model", model, "--flip", "blind")
    arms = {arm["name"]: arm for arm in proof["arms"]}
    assert status == 1
    assert arms["cold"]["ok"]
    assert not arms["warm"]["same_logprobs"]
