"""True shapes of models that fit one device of 80 GB, with weights that are drawn at the start.

A shape is what a published config.json says, where it differs from the bundled tiny model of the
same architecture. Its weights have the true sizes, so times are those of the real model.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hybridkv.lab.models import (
    BUNDLED_ENVIRONMENT,
    bundled_arguments,
    bundled_environment,
    bundled_models,
)


@dataclass(frozen=True)
class Shape:
    """A model's shape. `layers` repeats a pattern of layer types until it has so many."""

    tiny: str
    """The bundled model of the same architecture."""
    layers: int
    pattern: tuple[str, ...]
    values: Mapping[str, Any] = field(default_factory=dict)
    said: str = ""
    """How the shape differs from the published one."""

    def write(self, directory: Path) -> Path:
        """Write config.json into the directory, and return the directory."""
        values = json.loads((bundled_models()[self.tiny] / "config.json").read_text())
        kinds = [self.pattern[index % len(self.pattern)] for index in range(self.layers)]
        values |= {"num_hidden_layers": self.layers, "layer_types": kinds, **self.values}
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "config.json").write_text(json.dumps(values, indent=1))
        return directory


_SLIDING, _FULL, _LINEAR = "sliding_attention", "full_attention", "linear_attention"
_QWEN_PATTERN = (_LINEAR, _LINEAR, _LINEAR, _FULL)
_QWEN_STATES = {
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "head_dim": 256,
    "num_attention_heads": 16,
    "max_position_embeddings": 262144,
}
SHAPES = {
    "qwen3.5-9b": Shape(
        "qwen35",
        32,
        _QWEN_PATTERN,
        {
            **_QWEN_STATES,
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_key_value_heads": 4,
            "vocab_size": 248320,
            "tie_word_embeddings": False,
        },
        "text only",
    ),
    "gemma3-27b": Shape(
        "gemma3",
        62,
        (*(_SLIDING,) * 5, _FULL),
        {
            "hidden_size": 5376,
            "intermediate_size": 21504,
            "num_attention_heads": 32,
            "num_key_value_heads": 16,
            "head_dim": 128,
            "query_pre_attn_scalar": 168,
            "sliding_window": 1024,
            "sliding_window_pattern": 6,
            "vocab_size": 262208,
            "max_position_embeddings": 131072 + 256,  # The answer too.
        },
        "text only",
    ),
    "gpt-oss-20b": Shape(
        "gptoss",
        24,
        (_SLIDING, _FULL),
        {
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "num_local_experts": 32,
            "num_experts_per_tok": 4,
            "vocab_size": 201088,
            "max_position_embeddings": 131072 + 256,  # The answer too.
        },
        "experts in bfloat16 instead of MXFP4",
    ),
    "qwen3-next": Shape(
        "qwen3next",
        16,
        _QWEN_PATTERN,
        {
            **_QWEN_STATES,
            "hidden_size": 2048,
            "intermediate_size": 5120,
            "num_key_value_heads": 2,
            "num_experts": 512,
            "num_experts_per_tok": 10,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "vocab_size": 151936,
        },
        "16 of its 48 layers, which fit",
    ),
}
"""By the name that `python -m tests.gpu.checks.restart --model` takes."""


@dataclass(frozen=True)
class ShapedEngine:
    """How an engine of a shape, or of a bundled tiny model, is started."""

    arguments: list[str]
    environment: Mapping[str, str]
    vocabulary: int
    said: str


def shaped_engine(model: str, directory: Path) -> ShapedEngine:
    """Return the engine of a shape, whose config.json is written into the directory."""
    if (shape := SHAPES.get(model)) is None:
        path, environment = bundled_models()[model], bundled_environment(model)
        arguments, said = bundled_arguments(model), "a tiny model"
    else:
        path, environment, said = shape.write(directory), BUNDLED_ENVIRONMENT, shape.said
        arguments = ["--skip-tokenizer-init", "--load-format=dummy", "--seed=0", "--enforce-eager"]
    vocabulary = json.loads((path / "config.json").read_text())["vocab_size"]
    return ShapedEngine([f"--model={path}", *arguments], environment, vocabulary, said)
