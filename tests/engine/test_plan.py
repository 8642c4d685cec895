"""What `hybridkv plan` promises is what a real engine then registers, to the byte."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hybridkv.cli.plan import preview_of
from hybridkv.cli.preview import PREVIEW_ENVIRONMENT, Answer
from hybridkv.client.control import Control
from hybridkv.core.plan import stored_shapes
from hybridkv.testing.daemon import DaemonProcess
from hybridkv.testing.models import bundled_arguments, bundled_environment, bundled_models
from tests.engine.support import engine, prompt, stats, until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

MODELS = {
    "gemma4": ("--max-num-batched-tokens=2048",),
    "qwen3next": ("--max-num-batched-tokens=600", "--prefix-cache-retention-interval=256"),
    "llama4": ("--max-num-batched-tokens=2048",),
    "lfm2": ("--max-num-batched-tokens=2048",),
}
"""vLLM's default of the tokens in a step is another one for a server than for the engine of a test."""

QWEN3_NEXT_80B = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "decoder_sparse_step": 1,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262144,
    "mlp_only_layers": [],
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
    "num_attention_heads": 16,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "num_hidden_layers": 48,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000000,
    "shared_expert_intermediate_size": 512,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 151936,
}
"""The published sizes: 80 billion weights, 160 GB, of which nothing is on this machine."""


LOOK = """
import json, msgspec, os, sys
from hybridkv.cli.previewer import look
answers = []
for environment, words in json.loads(sys.argv[2]):
    os.environ.update(environment)
    answers.append(look(words))
open(sys.argv[1], "wb").write(msgspec.json.encode(answers))
"""


@pytest.fixture(scope="module")
def promises(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Future[dict[str, Answer]]]:
    """What is promised of every model, looked at in one child while the first engine starts."""
    out = tmp_path_factory.mktemp("promises") / "answers.json"

    def ask() -> dict[str, Answer]:
        asked = [
            (bundled_environment(model), [str(bundled_models()[model]), *bundled_arguments(model), *more])
            for model, more in MODELS.items()
        ]
        environment = {**PREVIEW_ENVIRONMENT, **os.environ, **bundled_environment("gemma4")}
        subprocess.run([sys.executable, "-c", LOOK, str(out), json.dumps(asked)], check=True, env=environment)
        return dict(zip(MODELS, msgspec.json.decode(out.read_bytes(), type=list[Answer]), strict=True))

    with ThreadPoolExecutor() as pool:
        yield pool.submit(ask)


@pytest.mark.parametrize("model", [*list(MODELS)[:3], pytest.param("lfm2", marks=pytest.mark.slow)])
def test_a_plan_is_what_the_engine_registers(
    model: str, promises: "Future[dict[str, Answer]]", daemon: DaemonProcess, tmp_path: Path
) -> None:
    """Groups, bytes, layers, KV dtype and the whole identity: every stride of every layer is in it."""
    with engine(model, tmp_path / "e.log", daemon.socket_path, *MODELS[model]) as running:
        with Control(daemon.socket_path) as control:
            (served,) = control.engines()
        promised = promises.result()[model]
        assert promised.preview is not None
        seen = preview_of(served)
        assert seen.groups == promised.preview.groups
        assert (seen.max_model_len, seen.kv_dtype, seen.ranks) == (4096, promised.preview.kv_dtype, 1)
        assert seen.states == promised.preview.states
        assert seen.geometry is not None
        geometry = promised.preview.geometry
        assert geometry is not None
        assert (seen.geometry.chunk_tokens, seen.geometry.alignment_tokens, seen.geometry.hash_tokens) == (
            geometry.chunk_tokens,
            geometry.alignment_tokens,
            geometry.hash_tokens,
        )
        assert served.namespace.hex() == promised.identity
        if model == "qwen3next":
            running.run(prompt(1, 1500), max_tokens=1)
            objects = sum(stored_shapes(geometry, promised.preview.states, 1500).values())
            assert objects == 5 + 3 * 3, "five chunks of full attention; states at 512, 1024 and 1280 in three groups"
            until(lambda: stats(daemon.socket_path)["objects"] == objects, "the planned objects are stored")


def planned(*arguments: str) -> tuple[int, dict[str, Any]]:
    said = subprocess.run(
        [sys.executable, "-m", "hybridkv", "plan", "--json", *arguments], capture_output=True, text=True, check=False
    )
    assert said.stdout, said.stderr
    (plan,) = json.loads(said.stdout)["plans"]
    return said.returncode, plan


def test_a_large_model_needs_its_config_and_no_memory(tmp_path: Path) -> None:
    """Per rank of four: 12 full layers of one KV head, 36 GDN layers of 8 of 32 value heads."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_NEXT_80B))
    status, plan = planned("--model", str(tmp_path), "--ram", "64GiB", "--", "--tensor-parallel-size", "4")
    assert status == 0
    full = plan["groups"][-1]
    assert (full["kind"], full["layers"], full["token_bytes"]) == ("full", 12, 12 * 2 * 256 * 2)
    states = plan["groups"][:-1]
    convolution, recurrent = 3 * (2 * 16 * 128 + 32 * 128) // 4 * 2, 32 // 4 * 128 * 128 * 4
    assert [(group["kind"], group["layers"]) for group in states] == [("recurrent", 12)] * 3
    assert {group["block_bytes"] for group in states} == {12 * (convolution + recurrent)}
    assert plan["ranks"] == 4
    assert plan["max_model_len"] == 262144
    assert plan["totals"]["token_bytes"] == pytest.approx(4 * sum(group["token_bytes"] for group in plan["groups"]))
