"""Models of vLLM's registry are planned on the layouts of a GPU, from published configurations."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hybridkv.lab.configuration import PREVIEW_ENVIRONMENT
from tests.engine.model_configs import ATTENTION_FREE, HYBRIDS, OTHERS, SPEAKERS

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

SOME = (
    "DeepseekV32ForCausalLM --kv-cache-dtype=fp8",
    "DeepseekV4ForCausalLM",
    "FalconH1ForCausalLM --tensor-parallel-size=2",
    "Gemma3ForCausalLM",
    "Qwen3NextForCausalLM",
)
ALL = (
    *(HYBRIDS | OTHERS | ATTENTION_FREE),
    "DeepseekV3ForCausalLM --kv-cache-dtype=fp8 --tensor-parallel-size=8",
    "DeepseekV32ForCausalLM --kv-cache-dtype=fp8",
    "DeepseekV4ForCausalLM --kv-cache-dtype=fp8",
    "GraniteMoeHybridForCausalLM --tensor-parallel-size=8",
    "LlamaForCausalLM --kv-cache-dtype=fp8 --block-size=128",
    "Qwen3NextForCausalLM --tensor-parallel-size=4",
)
PACKED = ("DeepseekV4ForCausalLM", "Glm5NextForCausalLM")  # All layers of a block stand together.


def said_of(*asked: str) -> list[dict[str, Any]]:
    """A line of each, out of one child."""
    child = subprocess.run(
        [sys.executable, "-m", "tests.engine.gpu_plans", *asked],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[2],
        env={**PREVIEW_ENVIRONMENT, **os.environ, "VLLM_LOGGING_LEVEL": "ERROR"},
    )
    assert child.returncode == 0, child.stderr[-3000:]
    return [json.loads(line) for line in child.stdout.splitlines() if line.startswith("{")]


@pytest.mark.soak
@pytest.mark.parametrize("models", [SOME, ALL], ids=["some", "all"])
def test_no_model_is_refused_for_its_layout(models: tuple[str, ...]) -> None:
    """And a block is one piece of memory in each layer."""
    plans = {plan["name"]: plan for plan in said_of(*models)}
    assert list(plans) == list(models)
    assert not {name: plan["refused"] for name, plan in plans.items() if plan["refused"]}
    for name, plan in plans.items():
        assert plan["layout"] == ("BLHNC" if name.startswith(PACKED) else "LBNHC")
        assert plan["runs"] == [1]
        kinds = {group[0] for group in plan["groups"]}
        if name.split()[0] in HYBRIDS:
            assert {"recurrent", "full"} <= kinds
        if name in ATTENTION_FREE:
            assert kinds == {"recurrent"}


@pytest.mark.soak
def test_every_model_with_recurrent_state_is_planned() -> None:
    """One that is new in vLLM's registry is added to the tables, and planned with them."""
    (registry,) = (line["registry"] for line in said_of("registry"))
    assert set(registry["hybrid"]) == {*HYBRIDS, *SPEAKERS}
    assert set(SPEAKERS.values()) <= set(HYBRIDS)
    assert set(registry["attention_free"]) == set(ATTENTION_FREE)
