"""The stages: what is run on a machine with a CUDA device, each step with its time limit."""

from dataclasses import dataclass

VERIFIED = (
    *("qwen3", "gemma3", "qwen3next", "falconh1", "mistral_swa", "gptoss", "granitehybrid"),
    *("deepseekv2", "gemma4", "llama4", "lfm2", "qwen35"),
)
"""Models in the order of what they prove; deepseekv4 needs DeepGEMM, which needs PyTorch 2.13."""


@dataclass(frozen=True)
class Step:
    """One command of a stage."""

    name: str
    command: tuple[str, ...]  # Of Python's interpreter.
    limit_seconds: int
    environment: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Stage:
    """Steps that belong together, `jobs` of them at a time."""

    title: str
    steps: tuple[Step, ...]
    jobs: int = 1


def _verify(name: str, model: str, *options: str, flip: str = "", **environment: str) -> Step:
    words = ["-m", "hybridkv", "verify", "--model", model, "--json"]
    words += [f"--flip={flip}"] if flip else []
    words += ["--", "--dtype=bfloat16", "--gpu-memory-utilization=0.2", *options]
    return Step(name, tuple(words), 330, tuple(environment.items()))


_PYTEST = "-m", "pytest", "-q", "-W", "default", "-p", "no:cacheprovider", "-m", "gpu"

STAGES = {
    "a": Stage(
        "bytes, under load",
        (
            Step("copier", (*_PYTEST, "tests/unit/connector/test_copier.py"), 200),
            Step("kernels and faults", (*_PYTEST, "tests/gpu"), 300),
        ),
    ),
    "b": Stage(
        "bandwidth next to pinned copies",
        (
            Step("table", ("-m", "tests.gpu.bandwidth"), 300),
            Step("bench path", ("-m", "hybridkv", "bench", "path", "--device=cuda", "--json"), 120),
        ),
    ),
    "c": Stage(
        "vLLM 0.32 on the device",
        (
            Step("doctor", ("-m", "hybridkv", "doctor", "--model", "qwen3"), 120),
            *(_verify(model, model) for model in VERIFIED),
            _verify("qwen3, detected", "qwen3", flip="detect"),
            _verify("qwen3, Triton", "qwen3", "--attention-backend=TRITON_ATTN"),
            _verify("qwen3, fp8", "qwen3", "--kv-cache-dtype=fp8"),
            _verify("qwen3, LBHNC", "qwen3", VLLM_KV_CACHE_LAYOUT="LBHNC"),
            _verify("qwen3, BLNHC", "qwen3", VLLM_KV_CACHE_LAYOUT="BLNHC"),
            _verify("qwen3next, V1 runner", "qwen3next", VLLM_USE_V2_MODEL_RUNNER="0"),
        ),
        jobs=4,
    ),
}
