"""LoRA adapters on the real engine: answers are equal, and adapters never share bytes."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from hybridkv.lab.daemon_process import DaemonProcess
from hybridkv.lab.models import bundled_models
from tests.engine.support import answer, engine, prompt, stats

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

LORA = ("--enable-lora", "--max-lora-rank=8", "--max-loras=2")
CHUNK = 128


def write_adapter(directory: Path, seed: int) -> str:
    """Random weights for every attention projection of the bundled qwen3."""
    config = json.loads((bundled_models()["qwen3"] / "config.json").read_text())
    hidden, heads, kv_heads = (
        config["hidden_size"],
        config["num_attention_heads"],
        config["num_key_value_heads"],
    )
    widths = {"q_proj": heads * config["head_dim"], "k_proj": kv_heads * config["head_dim"]}
    widths["v_proj"] = widths["k_proj"]
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for name, width in widths.items():
            stem = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{stem}.lora_A.weight"] = torch.randn(8, hidden, generator=generator) * 0.1
            tensors[f"{stem}.lora_B.weight"] = torch.randn(width, 8, generator=generator) * 0.1
    directory.mkdir(exist_ok=True)
    save_file(tensors, directory / "adapter_model.safetensors")
    described = {
        "peft_type": "LORA",
        "r": 8,
        "lora_alpha": 16,
        "target_modules": [*widths],
        "bias": "none",
    }
    (directory / "adapter_config.json").write_text(json.dumps(described))
    return str(directory)


def test_an_adapter_hits_what_it_stored_and_nothing_else(
    daemon: DaemonProcess, tmp_path: Path
) -> None:
    adapters = [write_adapter(tmp_path / name, seed) for seed, name in enumerate("ab")]
    text = prompt(1, 2 * CHUNK + 30)
    own = {}
    with engine("qwen3", tmp_path / "1.log", daemon.socket_path, *LORA) as first:
        for adapter in (None, *adapters):
            (cold,) = first.run(text, max_tokens=6, adapter=adapter)
            (again,) = first.run(text, max_tokens=6, adapter=adapter)
            assert (cold["cached_tokens"], again["cached_tokens"]) == (0, 2 * CHUNK), (
                "the engine's own cache"
            )
            own[adapter] = answer(cold), answer(again)
    assert len({str(cold) for cold, _ in own.values()}) == 3, "the adapters change the answer"

    with engine("qwen3", tmp_path / "2.log", daemon.socket_path, *LORA) as second:
        for adapter in (adapters[1], None, adapters[0]):
            (result,) = second.run(text, max_tokens=6, adapter=adapter)
            assert result["cached_tokens"] == 2 * CHUNK
            assert answer(result) == own[adapter][1]
    write_adapter(tmp_path / "a", 7)
    with engine("qwen3", tmp_path / "3.log", daemon.socket_path, *LORA) as third:
        (result,) = third.run(text, max_tokens=6, adapter=adapters[0])
        assert result["cached_tokens"] == 0, "other weights under the same name and path"
        assert answer(result) != own[adapters[0]][0]
        stored = stats(daemon.socket_path)["objects"]
        write_adapter(tmp_path / "c", 8)
        (result,) = third.run(text, max_tokens=6, adapter=str(tmp_path / "c"))
        assert stats(daemon.socket_path)["objects"] == stored, (
            "an adapter younger than the engine is not stored"
        )
