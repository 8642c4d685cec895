"""The cases of the matrix: each is an engine of its own."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """An engine with a bundled model."""

    model: str
    arguments: tuple[str, ...] = ()  # vLLM's, beside the bundled model's own.
    has_turn: bool = False  # Whether hits end inside a block, so that a second turn proves it.
    only_since_032: str = ""  # Why earlier versions of vLLM do not serve it; "" = they do.


KERNELS = "its CPU build has no convolution of this width and type"
DRAFTERS = "drafters are refused"
CASES: Mapping[str, Case] = {
    **{
        model: Case(model)
        for model in (
            *("qwen3", "mistral_swa", "gemma3", "gptoss", "gemma4", "llama4"),
            *("qwen3next", "qwen35", "deepseekv2"),
        )
    },
    **{
        model: Case(model, only_since_032=KERNELS)
        for model in ("lfm2", "falconh1", "granitehybrid")
    },
    **{model: Case(model, only_since_032=DRAFTERS) for model in ("llama_eagle", "qwen3next_mtp")},
    "qwen3next_tails": Case(
        "qwen3next", ("--prefix-match-unit=32",), True, "hits inside a block are not served"
    ),
}
"""Cases by name: each kind of attention and recurrent layer, drafters, and hits inside a block."""
