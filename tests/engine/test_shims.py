"""Shims are in place for bundled models on the CPU build alone, and compute what they replace.

Without them, as with a release, a command that needs one says so before it starts anything.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import hybridkv_cpu_shims
from hybridkv.core.errors import ConfigError
from hybridkv.lab.models import (
    BUNDLED_MODEL_ENV,
    CPU_LACKS,
    CPU_SHIMS,
    V2_RUNNER_ENV,
    bundled_models,
    check_readable,
    check_served,
    is_cpu_build,
)

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]

LATENT, ROPE, HEADS = 512, 64, 4
PLUGINS_ENV = "VLLM_PLUGINS"
"""vLLM's variable; plugins that it does not name are not loaded."""

SAYS = """
import sys
from vllm.platforms import current_platform
from vllm.platforms.cpu import CpuPlatform
from vllm.plugins import load_general_plugins
if sys.argv[1] == "other build":
    type(current_platform).is_cpu = lambda self: False
before = CpuPlatform.check_and_update_config
load_general_plugins()
print(CpuPlatform.check_and_update_config == before)
"""


@pytest.mark.soak
@pytest.mark.parametrize(
    ("environment", "build", "untouched"),
    [
        ({BUNDLED_MODEL_ENV: "deepseekv2"}, "this build", "False"),
        ({BUNDLED_MODEL_ENV: "deepseekv2"}, "other build", "True"),
        ({BUNDLED_MODEL_ENV: "qwen3"}, "this build", "True"),
        ({}, "this build", "True"),
    ],
)
def test_only_for_its_model_and_only_on_the_cpu_build(
    environment: dict[str, str], build: str, untouched: str
) -> None:
    child = subprocess.run(
        [sys.executable, "-c", SAYS, build],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
    )
    assert child.stdout.split() == [untouched], child.stderr


@pytest.fixture
def without_shims(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loads none of a checkout's plugins, as with a release. Skips on a GPU build."""
    if not is_cpu_build():
        pytest.skip("vLLM's GPU build lacks nothing")
    monkeypatch.setenv(PLUGINS_ENV, "")
    # Whatever this machine has beside it.
    monkeypatch.delenv(V2_RUNNER_ENV, raising=False)


def refusal(model: str, *vllm_arguments: str) -> str:
    """Returns the sentence by which `verify` refuses a model, "" = it serves it."""
    try:
        check_served(model, vllm_arguments)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.usefixtures("without_shims")
@pytest.mark.parametrize("command", ["verify", "plan"])
def test_a_command_says_what_the_cpu_build_lacks_before_it_starts_anything(command: str) -> None:
    """Nothing but the sentence: no progress, no traceback, no daemon and no log."""
    if command == "plan" and not refusal("qwen35"):
        pytest.skip("this machine has torchvision")
    model = {"verify": "falconh1", "plan": "qwen35"}[command]
    process = subprocess.run(
        [sys.executable, "-m", "hybridkv", command, "--model", model],
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 2
    (line,) = process.stderr.splitlines()
    assert line == f"hybridkv: {refusal(model)}"
    assert process.stdout == ""


@pytest.mark.usefixtures("without_shims")
def test_every_model_with_a_shim_has_a_sentence_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The models that have no shim need none."""
    assert set(CPU_LACKS) == set(hybridkv_cpu_shims.SHIMS) <= set(bundled_models())
    works = "--model qwen3next, a GPU build of vLLM or a checkout of hybridkv's repository works"
    for model in bundled_models():
        is_lacking = any(not lack.is_here() for lack in CPU_LACKS.get(model, ()))
        sentence = refusal(model)
        assert bool(sentence) == is_lacking
        if is_lacking:
            assert sentence.startswith(f"--model {model}: vLLM's CPU build lacks ")
            assert sentence.endswith(f"; {works}")
    assert not refusal("qwen3next")
    check_readable("falconh1")  # A plan needs no shim of its kernels.
    monkeypatch.setenv(PLUGINS_ENV, f"another,{CPU_SHIMS}")
    assert not any(map(refusal, bundled_models()))


@pytest.mark.usefixtures("without_shims")
def test_pipelines_and_the_v2_model_runner_have_a_sentence_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In each way in which vLLM takes the option."""
    sentence = "--model qwen3 with --pipeline-parallel-size 2: vLLM's CPU build lacks room for"
    for words in (
        ["--pipeline-parallel-size", "2"],
        ["--seed=1", "--pipeline-parallel-size=2"],
        ["--pipeline_parallel_size=2", "--seed", "1"],
        ["-tp", "2", "-pp", "2"],
    ):
        assert refusal("qwen3", *words).startswith(sentence)
    assert not refusal("qwen3", "--pipeline-parallel-size=1", "-tp", "2")
    assert not refusal("qwen3", "--pipeline-parallel-size"), "vLLM says that it lacks a number"
    monkeypatch.setenv(V2_RUNNER_ENV, "0")
    assert not refusal("qwen3")
    monkeypatch.setenv(V2_RUNNER_ENV, "1")
    assert refusal("qwen3") == (
        "--model qwen3 with VLLM_USE_V2_MODEL_RUNNER=1: vLLM's CPU build lacks Triton; "
        "VLLM_USE_V2_MODEL_RUNNER=0, a GPU build of vLLM or a checkout of hybridkv's repository "
        "works"
    )


@pytest.mark.usefixtures("without_shims")
def test_a_gpu_build_lacks_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build = tmp_path / "vllm-0.32.0.dist-info"
    build.mkdir()
    (build / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setenv(V2_RUNNER_ENV, "1")
    assert not any(refusal(model, "-pp", "2") for model in bundled_models())


@pytest.mark.parametrize(("new", "cached"), [(300, 0), (40, 700), (1, 300)])
def test_the_mla_kernels_are_right_without_tiles(new: int, cached: int) -> None:
    """Attention over a cached prefix and the new tokens, next to plain torch."""
    import torch
    from vllm import _custom_ops as ops
    from vllm.platforms import current_platform

    if not torch.cpu._is_avx512_bf16_supported():
        pytest.skip("these kernels need a processor with AVX-512 BF16")
    current_platform.import_kernels()
    torch.manual_seed(0)
    total = new + cached
    kv = (torch.randn(4096, 1, LATENT + ROPE) * 0.3).bfloat16()
    query = (torch.randn(new, HEADS, LATENT + ROPE) * 0.3).bfloat16()
    slots = torch.randperm(4096)[:total]
    table = torch.zeros(1, 4096, dtype=torch.int64)
    table[0, :total] = slots
    out = torch.zeros(new, HEADS, LATENT, dtype=torch.bfloat16)
    common = {
        "req_to_token": table,
        "req_pool_indices": torch.zeros(1, dtype=torch.int64),
        "seq_lens": torch.tensor([total]),
        "sm_scale": 0.05,
        "logit_cap": 0.0,
        "is_cross_attn": False,
        "sliding_window_size": 0,
        "encoder_lens": None,
        "sinks": None,
        "k_buffer": kv,
        "v_buffer": kv[..., :LATENT],
    }
    if new > 1:
        fresh = kv[slots[cached:]].contiguous()
        ops.cpu_mla_extend(
            **common,
            q_extend=query,
            k_extend=fresh,
            v_extend=fresh[..., :LATENT],
            o_extend=out,
            extend_seq_lens=torch.tensor([new]),
            extend_start_loc=torch.tensor([0]),
            max_len_extend=new,
        )
    else:
        ops.cpu_mla_decode(
            **common | {"req_to_token": table.int()},
            query=query,
            output=out,
            key=None,
            value=None,
            loc=None,
            attn_logits=torch.zeros(1, HEADS, 2, LATENT + 1),
        )

    keys = kv[slots, 0].float()
    scores = torch.einsum("qhd,kd->qhk", query.float(), keys) * 0.05
    future = torch.arange(total)[None, :] > torch.arange(new)[:, None] + cached
    weights = scores.masked_fill(future[:, None], float("-inf")).softmax(-1)
    expected = torch.einsum("qhk,kd->qhd", weights, keys[:, :LATENT])
    torch.testing.assert_close(out.float(), expected, atol=2e-3, rtol=2e-2)
