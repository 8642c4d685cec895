"""What `hybridkv plan` promises is what a real engine then registers, to the byte."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from hybridkv.cli.main import main
from hybridkv.client.control import ControlClient
from hybridkv.lab.capacity import stored_shapes
from hybridkv.lab.configuration import PREVIEW_ENVIRONMENT, ConfigReport, preview_of
from hybridkv.lab.daemon_process import DaemonProcess
from hybridkv.lab.models import bundled_arguments, bundled_environment, bundled_models
from hybridkv.vllm.preflight import CONNECTOR
from tests.engine.forked import ForkedChild, lines_of
from tests.engine.support import CommandReport, engine, prompt, since_vllm, stats
from tests.forked_daemon import ForkedDaemon
from tests.waiting import until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

MODELS = {
    "gemma4": ("--max-num-batched-tokens=2048",),
    "qwen3next": ("--max-num-batched-tokens=600", "--prefix-cache-retention-interval=256"),
    "llama4": ("--max-num-batched-tokens=2048",),
    "lfm2": ("--max-num-batched-tokens=2048",),
    "llama_eagle": ("--max-num-batched-tokens=2048",),
    "qwen3_draft": ("--max-num-batched-tokens=2048",),
    "gemma4_mtp": ("--max-num-batched-tokens=2048",),
}
"""vLLM's default of the tokens in a step is not the same for a server and a test's engine."""

EXTRA, NAMED = "kv_connector_extra_config", {"weights_identity": "of the test"}

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


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[DaemonProcess]:
    """A daemon with room for what an engine of gemma4 reserves: slots of two sizes."""
    with ForkedDaemon(str(tmp_path / "daemon.sock"), "256MiB") as running:
        yield running


def promise(model: str, log_path: Path) -> ConfigReport:
    """Returns what `hybridkv plan` promises of an engine on a bundled model."""
    words = [
        *(str(bundled_models()[model]), *bundled_arguments(model), *MODELS[model]),
        *("--kv-transfer-config", json.dumps({**CONNECTOR, EXTRA: NAMED})),
    ]
    variables = {**PREVIEW_ENVIRONMENT, **os.environ, **bundled_environment(model)}
    lines = lines_of("tests.engine.promise", words, log_path, variables)
    (report,) = (line for line in lines if line.startswith("{"))
    return msgspec.json.decode(report, type=ConfigReport)


@pytest.mark.parametrize(
    "model",
    [
        *("qwen3next", "gemma4", "llama4", "lfm2"),
        *(
            pytest.param(model, marks=since_vllm(32, "drafters are refused"))
            for model in ("llama_eagle", "qwen3_draft", "gemma4_mtp")
        ),
    ],
)
def test_a_plan_is_what_the_engine_registers(
    model: str, daemon: DaemonProcess, tmp_path: Path
) -> None:
    """Groups, bytes, layers, KV dtype and the identity, in which every stride of a layer is.

    Weights are known once they are loaded, so here they have a name.
    """
    promised = promise(model, tmp_path / "promise.log")
    with engine(
        model, tmp_path / "e.log", daemon.socket_path, *MODELS[model], extra={**NAMED}
    ) as running:
        with ControlClient(daemon.socket_path) as control:
            (served,) = control.engines()
        assert promised.preview is not None
        seen = preview_of(served)
        assert seen.groups == promised.preview.groups
        assert (seen.max_model_len, seen.kv_dtype, seen.ranks) == (
            4096,
            promised.preview.kv_dtype,
            1,
        )
        assert seen.states == promised.preview.states
        assert seen.geometry is not None
        geometry = promised.preview.geometry
        assert geometry is not None
        assert (
            seen.geometry.chunk_tokens,
            seen.geometry.alignment_tokens,
            seen.geometry.hash_tokens,
        ) == (geometry.chunk_tokens, geometry.alignment_tokens, geometry.hash_tokens)
        assert served.namespace.hex() == promised.identity
        if model == "qwen3next":
            running.generate(prompt(1, 1500), max_tokens=1)
            objects = sum(stored_shapes(geometry, promised.preview.states, 1500).values())
            # vLLM chooses the states' dtype by the processor, and with it the length of a chunk.
            full = 1500 // geometry.chunk_tokens
            assert objects == full + 3 * 3, (
                "states at 512, 1024 and the last boundary, three groups"
            )
            until(
                lambda: stats(daemon.socket_path)["objects"] == objects,
                "the planned objects are stored",
            )


def planned(*arguments: str) -> CommandReport:
    process = subprocess.run(
        [sys.executable, "-m", "hybridkv", "plan", "--json", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.stdout, process.stderr
    (plan,) = json.loads(process.stdout)["plans"]
    return CommandReport(process.returncode, plan)


@since_vllm(32, "drafters are refused on earlier versions")
@pytest.mark.soak
def test_a_plan_knows_the_drafter() -> None:
    """Its layers are in the target's group. A chunk is stored once the next token is known."""
    status, plan = planned("--model", "llama_eagle")
    assert status == 0
    plain_status, plain = planned("--model", "llama")
    assert plain_status == 0
    totals, without = plan["totals"], plain["totals"]
    assert totals["first_storable_tokens"] == without["first_storable_tokens"] + 1
    assert totals["first_hit_tokens"] == without["first_hit_tokens"]
    layers = [sum(group["layers"] for group in arm["groups"]) for arm in (plan, plain)]
    assert layers[0] == layers[1] + 1
    (finding,) = [
        finding for finding in plan["findings"] if finding["check"] == "speculative decoding"
    ]
    assert finding["verdict"] == "ok"
    assert "eagle" in finding["what"]


@pytest.mark.soak
def test_a_large_model_needs_its_config_and_no_memory(tmp_path: Path) -> None:
    """Per rank of four: 12 full layers of one KV head, 36 GDN layers of 8 of 32 value heads.

    The dtype of the states is named, since vLLM chooses it by the processor otherwise.
    """
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_NEXT_80B))
    arguments = ("--tensor-parallel-size=4", "--mamba-ssm-cache-dtype=float32")
    status, plan = planned("--model", str(tmp_path), "--ram", "64GiB", "--", *arguments)
    assert status == 0
    full = plan["groups"][-1]
    assert (full["kind"], full["layers"], full["token_bytes"]) == ("full", 12, 12 * 2 * 256 * 2)
    states = plan["groups"][:-1]
    convolution, recurrent = 3 * (2 * 16 * 128 + 32 * 128) // 4 * 2, 32 // 4 * 128 * 128 * 4
    assert [(group["kind"], group["layers"]) for group in states] == [("recurrent", 12)] * 3
    assert {group["block_bytes"] for group in states} == {12 * (convolution + recurrent)}
    assert plan["ranks"] == 4
    assert plan["max_model_len"] == 262144
    assert plan["totals"]["token_bytes"] == pytest.approx(
        4 * sum(group["token_bytes"] for group in plan["groups"])
    )


def test_a_pipeline_has_parts_of_the_size_of_its_largest_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Five of the twelve full layers on the first stage, seven on the second."""
    monkeypatch.setattr("hybridkv.lab.configuration.AnsweringChild", ForkedChild)
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "20,28")
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_NEXT_80B))
    arguments = ("--pipeline-parallel-size=2", "--tensor-parallel-size=2")
    words = ["plan", "--json", "--model", str(tmp_path), "--ram", "64GiB", "--", *arguments]
    assert main(words) == 0
    (plan,) = json.loads(capsys.readouterr().out)["plans"]
    full = plan["groups"][-1]
    assert (full["kind"], full["layers"], full["token_bytes"]) == ("full", 12, 7 * 2 * 256 * 2)
    assert (plan["ranks"], plan["stages"]) == (4, 2)
