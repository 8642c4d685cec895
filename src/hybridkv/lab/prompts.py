"""The prompts of `hybridkv verify`: how long they are, what they say, and the engine they need."""

import itertools
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pydoc_data.topics import topics

from hybridkv.core.sizes import format_size
from hybridkv.lab.capacity import ConfigPreview

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
        return chosen

    def __str__(self) -> str:
        """Say them: "a context of 1,024 tokens, 256MiB of KV cache"."""
        return (
            f"a context of {self.max_model_len:,} tokens, {format_size(self.kv_bytes)} of KV cache"
        )


def names_option(arguments: Sequence[str], *options: str) -> bool:
    """Return True if vLLM's arguments have one of the options, in any of its spellings."""
    words = {word.partition("=")[0].replace("_", "-") for word in arguments}
    return any(option in words for option in options)


def engine_bounds(preview: ConfigPreview, context: int, prompts: int) -> EngineBounds:
    """Return the bounds for prompts of `context` tokens, of which `prompts` have their KV at once.

    A block has the size of the largest group's, as vLLM's pool gives it to every group.
    """
    length = min(context, preview.max_model_len)
    blocks = sum(math.ceil(length / group.tokens_per_block) + 2 for group in preview.groups)
    block_bytes = max(group.block_bytes for group in preview.groups)
    needed = math.ceil(_MARGIN * prompts * blocks * block_bytes)
    return EngineBounds(length, max(_MEMORY_BYTES_MIN, needed))
