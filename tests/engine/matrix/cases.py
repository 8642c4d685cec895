"""The cases of the matrix: each is an engine of its own."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """An engine with a bundled model."""

    model: str
    arguments: tuple[str, ...] = ()  # vLLM's, beside the bundled model's own.
    has_turn: bool = False  # Whether hits end inside a block, so that a second turn proves it.


CASES: Mapping[str, Case] = {
    **{
        model: Case(model)
        for model in (
            *("qwen3", "mistral_swa", "gemma3", "gptoss", "gemma4", "llama4", "qwen3next"),
            *("lfm2", "falconh1", "granitehybrid"),
        )
    },
    "llama_eagle": Case("llama_eagle"),
    "qwen3next_tails": Case("qwen3next", ("--prefix-match-unit=32",), has_turn=True),
    "qwen35": Case("qwen35"),
    "deepseekv2": Case("deepseekv2"),
}
"""By name."""
