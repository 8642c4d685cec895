"""The prompts of `hybridkv verify`: how long they are, what they say, and the engine they need."""

import itertools
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from pydoc_data.topics import topics
from typing import NamedTuple

from hybridkv.core.geometry import GroupKind
from hybridkv.core.sizes import format_size
from hybridkv.lab.capacity import ConfigPreview, stored_token_bytes

CHUNKS_MIN = 5  # Whole chunks of a prompt.
WINDOWS = 2.5  # A prompt is longer than the largest window of the model by this factor.
LETTERS_PER_TOKEN = 6  # More than a token of English text has.
_MEMORY_BYTES_MIN = 256 << 20
_MARGIN = 1.5  # For blocks of groups whose size a preview does not say.
_MEMORY_OPTIONS = (
    "--kv-cache-memory-bytes",
    "--gpu-memory-utilization",
    "--num-gpu-blocks-override",
)
_MEMORY_VARIABLE = "VLLM_CPU_KVCACHE_SPACE"
_RAM_BYTES_MIN = 1 << 30
_SHORT_DTYPES = ("auto (bfloat16)", "auto (float16)")  # As a preview names the KV's.
# How options begin that say whether the engine compiles. -O3 and -cc.mode=0 are such options.
_COMPILING = ("--enforce-eager", "--no-enforce-eager", "--compilation-config", "-cc", "-O")


def wanted_chunks(chunk_tokens: int, windows: Sequence[int]) -> int:
    """Return the chunks of a prompt that is long enough for every window. (128, [512]) -> 10"""
    return max(CHUNKS_MIN, math.ceil(WINDOWS * max(windows, default=0) / chunk_tokens))


def english(tokens: int) -> str:
    """Return an English text of more than so many tokens, or as much as Python has of its own."""
    return "\n".join(text for _, text in sorted(topics.items()))[: tokens * LETTERS_PER_TOKEN]


def cut_prompts(tokens: Sequence[int], count: int, length: int) -> list[list[int]]:
    """Return parts of a text that begin at different places. They overlap in a short text.

    (range(10), 3, 4) -> [[0, 1, 2, 3], [3, 4, 5, 6], [6, 7, 8, 9]]
    """
    stride = len(tokens) // count
    return [
        [*itertools.islice(itertools.cycle(tokens), at * stride, at * stride + length)]
        for at in range(count)
    ]


@dataclass(frozen=True, slots=True)
class EngineBounds:
    """The bounds of an engine that is large enough for a proof, and no larger."""

    max_model_len: int
    kv_bytes: int  # Of each rank.
    ram_bytes: int  # Of the daemon, so that it keeps all prompts of the proof.
    weights_bytes: int = 0  # 0 = unknown.
    on_cpu: bool = False
    """A proof of the cache needs no compiled model. On a CPU compiling takes minutes, and a GPU's
    graphs are as the user serves them."""
    is_single: bool = False
    """The engine computes in float32, since its processor has no arithmetic for 16 bits."""

    def arguments(
        self, given: Sequence[str], variables: Mapping[str, str] = os.environ
    ) -> list[str]:
        """Return those bounds as arguments of vLLM that the `given` ones and variables leave open.

        (["--max-model-len=99"], {}) -> ["--kv-cache-memory-bytes=268435456"]
        """
        chosen = []
        if not names_option(given, "--max-model-len"):
            chosen.append(f"--max-model-len={self.max_model_len}")
        if _MEMORY_VARIABLE not in variables and not names_option(given, *_MEMORY_OPTIONS):
            chosen.append(f"--kv-cache-memory-bytes={self.kv_bytes}")
        if self.is_single:
            chosen.append("--dtype=float32")
        if self.on_cpu and not any(word.startswith(_COMPILING) for word in _dashed(given)):
            chosen.append("--enforce-eager")
        return chosen

    def __str__(self) -> str:
        """Say them: "a context of 1,024 tokens, 256MiB of KV cache"."""
        said = [f"a context of {self.max_model_len:,} tokens"]
        said += [f"{format_size(self.kv_bytes)} of KV cache"]
        said += ["float32"] if self.is_single else []
        if self.weights_bytes:
            said.append(f"{format_size(self.weights_bytes)} of weights")
        return ", ".join(said)


def names_option(arguments: Sequence[str], *options: str) -> bool:
    """Return True if vLLM's arguments have one of the options, in any of its spellings."""
    words = {word.partition("=")[0] for word in _dashed(arguments)}
    return any(option in words for option in options)


def _dashed(arguments: Sequence[str]) -> list[str]:
    """Return arguments in the spelling that vLLM prefers: ["--a_b=c_d"] -> ["--a-b=c-d"]."""
    return [word.replace("_", "-") for word in arguments]


def engine_bounds(
    preview: ConfigPreview,
    context: int,
    prompts: int,
    *,
    on_cpu: bool = False,
    widen: bool = False,
    weights_bytes: int = 0,
) -> EngineBounds:
    """Return the bounds for prompts of `context` tokens, of which `prompts` have their KV at once.

    A block has the size of the largest group's, as vLLM's pool gives it to every group. With
    `widen` an engine of 16 bits gets float32, which is ten times as fast on a processor without
    arithmetic for them. Recurrent layers keep their data type: some kernels take bfloat16 alone.
    """
    length = min(context, preview.max_model_len)
    blocks = sum(math.ceil(length / group.tokens_per_block) + 2 for group in preview.groups)
    block_bytes = max(group.block_bytes for group in preview.groups)
    is_single = (
        widen
        and preview.kv_dtype in _SHORT_DTYPES
        and not any(group.kind == GroupKind.RECURRENT for group in preview.groups)
    )
    widening = 2 if is_single else 1
    needed = math.ceil(_MARGIN * prompts * blocks * block_bytes) * widening
    stored = Fraction(0)
    if (geometry := preview.geometry) is not None:
        for group in geometry.groups:
            stored += stored_token_bytes(geometry, group) * geometry.ranks
    return EngineBounds(
        max_model_len=length,
        kv_bytes=max(_MEMORY_BYTES_MIN, needed),
        ram_bytes=max(_RAM_BYTES_MIN, math.ceil(_MARGIN * prompts * length * stored) * widening),
        weights_bytes=weights_bytes * widening,
        on_cpu=on_cpu,
        is_single=is_single,
    )


class ModelFiles(NamedTuple):
    """What the files of a model's directory say of its weights."""

    weights_bytes: int = 0  # 0 = unknown.
    is_quantized: bool = True
    """Whether kernels of their own take the weights, as far as is known."""


def read_model_files(model: Path) -> ModelFiles:
    """Return what a model's directory says. A hub name says nothing."""
    config = model / "config.json"
    if not config.is_file():
        return ModelFiles()
    files = [*model.glob("*.safetensors"), *model.glob("*.bin")]
    is_quantized = "quantization_config" in json.loads(config.read_text())
    return ModelFiles(sum(file.stat().st_size for file in files), is_quantized)
