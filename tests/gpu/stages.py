"""The stages: what is run on a machine with a CUDA device, each step with its time limit."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hybridkv.lab.engine_process import CONNECTOR

STAGE_SECONDS = 450  # A command on a lent machine ends after ten minutes.
GRAPHS = json.dumps({"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"})
"""CUDA graphs without inductor, which this PyTorch is too old for."""


@dataclass(frozen=True)
class Step:
    """One command of Python's interpreter. `under` is a program that runs it."""

    name: str
    command: tuple[str, ...]
    limit_seconds: int
    environment: tuple[tuple[str, str], ...] = ()
    under: tuple[str, ...] = ()
    judge: Callable[[Any], bool] | None = None  # Of what it printed, instead of its exit status.


@dataclass(frozen=True)
class Stage:
    """Steps that belong together, `jobs` of them at a time."""

    title: str
    steps: tuple[Step, ...]
    jobs: int = 1


_TRANSFER = {
    "kv_connector": CONNECTOR,
    "kv_connector_module_path": "hybridkv.connector",
    "kv_role": "kv_both",
}
_ENGINE = "--dtype=bfloat16", "--gpu-memory-utilization=0.2", "--gdn-prefill-backend=triton"
"""Of every engine. The machine has no FlashInfer, which Hopper's GDN layers would ask for."""


def _verify(name: str, model: str, *options: str, flip: str = "", **environment: str) -> Step:
    words = ["-m", "hybridkv", "verify", "--model", model, "--json"]
    words += [f"--flip={flip}"] if flip else []
    words += ["--", *_ENGINE, *options]
    judge = is_detected if flip == "detect" else None
    return Step(name, tuple(words), 330, tuple(environment.items()), judge=judge)


def is_detected(figures: Any) -> bool:
    """Return True if `verify` saw the flipped byte.

    Then one arm computed instead of loading, and all else is right.
    """
    arms = figures["arms"] if isinstance(figures, dict) and "arms" in figures else []
    wrong = [arm for arm in arms if not arm["ok"]]
    names = [arm["name"] for arm in wrong]
    return names == ["warm"] and wrong[0]["same_tokens"] and not wrong[0]["external_tokens"]


def _check(name: str, limit_seconds: int, *options: str) -> Step:
    return Step(name, ("-m", f"tests.gpu.checks.{name}", *options), limit_seconds)


_PYTEST = "-m", "pytest", "-q", "-W", "default", "-p", "no:cacheprovider", "-m", "gpu"
_COPIER = Step("copier", (*_PYTEST, "-x", "tests/unit/connector/test_copier.py"), 200)
_BYTES = Step("bytes", (*_PYTEST, "tests/gpu"), 120)
_PATH = Step("bench path", ("-m", "hybridkv", "bench", "path", "--device=cuda", "--json"), 90)
_GRAPHS = "--no-enforce-eager", f"--compilation-config={GRAPHS}"
_DECODE = "-m", "benchmarks.decode", "--json", "--rounds=5"
_TRITON = "--attention-backend=TRITON_ATTN"
"""FlashAttention 4, which vLLM asks for heads of 512, needs CUTLASS's Python."""
_PADDED = f"--speculative-config={json.dumps({'method': 'mtp', 'num_speculative_tokens': 2})}"
"""MTP as vLLM runs it by default on a GPU, with asynchronous scheduling."""
_THREE_ENGINES = "--gpu-memory-utilization=0.31"  # On one device, at once.
_V1 = {"VLLM_USE_V2_MODEL_RUNNER": "0"}
_V2 = {"VLLM_USE_V2_MODEL_RUNNER": "1"}


def _production(model: str) -> Step:
    words = ["-m", "tests.gpu.checks.production", f"--model={model}", "--", *_ENGINE]
    return Step(f"production, {model}", (*words, f"--compilation-config={GRAPHS}"), 330)


def _drafted_states(model: str, *options: str, **environment: str) -> Step:
    words = ["-m", "tests.gpu.checks.drafted_states", f"--model={model}", "--", *_ENGINE, *options]
    runner = "V2" if environment == _V2 else "V1"
    return Step(f"drafted states, {model}, {runner}", tuple(words), 330, tuple(environment.items()))


def _restart(model: str, tokens_max: int = 160_000) -> Stage:
    words = ["-m", "tests.gpu.checks.restart", f"--model={model}", f"--tokens-max={tokens_max}"]
    words += ["--", *_ENGINE, "--gpu-memory-utilization=0.9"]
    title = f"what a restart costs {model}, of true size, with drawn weights"
    return Stage(title, (Step(f"restart, {model}", tuple(words), STAGE_SECONDS),))


STAGES = {
    "0": Stage(
        "the first ten checks",
        (
            _check("machine", 40),
            _check("kernels", 90),
            _BYTES,
            _PATH,
            _check("registration", 60),
            _check("busy", 120),
            _COPIER,
            Step(
                "memcheck",
                (*_PYTEST, "tests/gpu", "-k", "more_than"),
                90,
                under=("compute-sanitizer", "--tool=memcheck", "--error-exitcode=9"),
            ),
            _verify("qwen3next", "qwen3next"),
            _production("qwen3"),
        ),
    ),
    "a": Stage("bytes, under load", (_BYTES, _COPIER)),
    "b": Stage(
        "bandwidth next to pinned copies",
        (_PATH, Step("table", ("-m", "tests.gpu.bandwidth"), 200)),
    ),
    "c:1": Stage(
        "vLLM 0.32 on the device: each way of keeping state; eager but where graphs are named",
        (
            _verify("qwen3", "qwen3"),
            _verify("qwen3next", "qwen3next"),
            _verify("gemma3", "gemma3"),
            _verify("falconh1", "falconh1"),
            _verify("gptoss", "gptoss"),
            _verify("qwen3, detected", "qwen3", flip="detect"),
            _verify("qwen3, graphs", "qwen3", *_GRAPHS),
            *(_production(model) for model in ("qwen3", "qwen3next", "gptoss")),
        ),
        jobs=8,
    ),
    "c:2": Stage(
        "vLLM 0.32 on the device: more models, and layouts; eager but where graphs are named",
        (
            *(_verify(model, model) for model in ("granitehybrid", "deepseekv2", "llama4")),
            _verify("gemma4", "gemma4", _TRITON),
            *(_verify(model, model) for model in ("lfm2", "qwen35", "mistral_swa")),
            _verify("qwen3, Triton", "qwen3", _TRITON),
            _verify("qwen3, fp8", "qwen3", "--kv-cache-dtype=fp8"),
            _verify("qwen3, LBHNC", "qwen3", VLLM_KV_CACHE_LAYOUT="LBHNC"),
            _verify("qwen3, BLNHC", "qwen3", VLLM_KV_CACHE_LAYOUT="BLNHC"),
            _verify("qwen3next, V1 runner", "qwen3next", **_V1),
            _verify("qwen3next, graphs", "qwen3next", *_GRAPHS),
            Step(
                "doctor",
                (
                    *("-m", "hybridkv", "doctor", "--", "vllm", "serve"),
                    *("src/hybridkv/models/qwen3", "--skip-tokenizer-init"),
                    f"--kv-transfer-config={json.dumps(_TRANSFER)}",
                ),
                90,
            ),
        ),
        jobs=8,
    ),
    "c:3": Stage(
        "vLLM 0.32 on the device: engines that draft, eager but where graphs are named",
        (
            *(_verify(model, model) for model in ("llama_eagle", "llama_eagle3", "gemma3_eagle")),
            *(_verify(model, model) for model in ("qwen3_draft", "qwen3_ngram", "qwen3next_ngram")),
            _verify("gemma4_mtp", "gemma4_mtp", _TRITON),
            *(_verify(model, model, _PADDED) for model in ("qwen3next_mtp", "qwen35_mtp")),
            _verify("llama_eagle, graphs", "llama_eagle", *_GRAPHS),
            _verify("qwen3next_mtp, graphs", "qwen3next_mtp", _PADDED, *_GRAPHS),
            _drafted_states("qwen3next_mtp", _PADDED, **_V2),
            _drafted_states("qwen35_mtp", _PADDED, **_V2),
            _drafted_states("qwen3next_mtp", **_V1),
            _drafted_states("qwen3next_ngram", **_V1),
            *(
                _verify(f"{model}, V1 runner", model, **_V1)
                for model in ("llama_eagle", "llama_eagle3", "qwen3_draft", "qwen3next_mtp")
            ),
            *(
                _verify(f"{model}, V1 runner", model, **_V1)
                for model in ("qwen35_mtp", "qwen3next_ngram", "qwen35_ngram", "qwen3next_eagle")
            ),
            _verify("gemma4_mtp, V1 runner", "gemma4_mtp", _TRITON, **_V1),
        ),
        jobs=12,
    ),
    "d": Stage(
        "decode steps with a connector beside those without one",
        (
            Step("decode", (*_DECODE, "--models=llama_eagle", "--", *_ENGINE), 200),
            Step(
                "decode, qwen3.5-9b",
                ("-m", "tests.gpu.checks.decode", "--", *_ENGINE, _THREE_ENGINES, *_GRAPHS),
                330,
            ),
        ),
        jobs=1,
    ),
    "e:1": _restart("qwen3.5-9b", tokens_max=530_000),
    "e:2": _restart("gemma3-27b"),
    "e:3": _restart("gpt-oss-20b", tokens_max=530_000),
    "e:4": _restart("qwen3-next"),
}
"""deepseekv4 needs DeepGEMM, which needs PyTorch 2.13."""
