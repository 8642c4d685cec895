"""The bundled tiny configs of real hybrid architectures, for `load_format="dummy"`."""

from importlib.resources import files
from pathlib import Path

BFLOAT16_MODELS = frozenset(("qwen3next", "qwen35", "deepseekv2", "deepseekv4"))
"""GDN and MLA kernels want bfloat16 on the CPU; the others run in float32, where a wrong byte shows best."""

WIDEN_SEED = 20260901

BUNDLED_ENVIRONMENT = {
    "HYBRIDKV_WIDEN_SEED": str(WIDEN_SEED),
    "HF_HUB_OFFLINE": "1",
    # torch would compile a small kernel even for an eager model, and fail where there is no C++ compiler.
    "TORCHDYNAMO_DISABLE": "1",
}
"""What the processes of a bundled model's engine need."""


def bundled_models() -> dict[str, Path]:
    """Directory of each bundled model by name."""
    root = Path(str(files("hybridkv") / "models"))
    return {path.name: path for path in sorted(root.iterdir()) if (path / "config.json").is_file()}


def bundled_arguments(name: str) -> list[str]:
    """vLLM arguments under which a bundled model proves something on a small machine."""
    return [
        "--skip-tokenizer-init",
        "--load-format=dummy",
        "--enforce-eager",
        "--max-model-len=4096",
        "--seed=0",
        f"--dtype={'bfloat16' if name in BFLOAT16_MODELS else 'float32'}",
        f"--kv-cache-memory-bytes={256 << 20}",
        "--worker-extension-cls=hybridkv.testing.widen.WidenedWeights",
    ]
