"""Adapters as vLLM's LoRA manager has them, without an engine."""

from types import SimpleNamespace
from typing import Any

import torch
from vllm.lora import lora_weights
from vllm.lora.lora_model import LoRAModel
from vllm.lora.lora_weights import LoRALayerWeights, PackedLoRALayerWeights
from vllm.lora.model_manager import AdapterLRUCache, LRUCacheLoRAModelManager

NAMES = ("q_proj", "k_proj", "v_proj")


def layer(name: str, seed: int, alpha: int = 16, dtype: torch.dtype = torch.bfloat16) -> Any:
    generator = torch.Generator().manual_seed(seed)
    lora_a, lora_b = (
        torch.randn(shape, generator=generator).to(dtype) for shape in ((8, 32), (48, 8))
    )
    return LoRALayerWeights(name, 8, alpha, lora_a, lora_b)


def adapter(number: int = 1, alpha: int = 16, dtype: torch.dtype = torch.bfloat16) -> Any:
    """As vLLM has an adapter once it was added: q, k and v are packed, and scales are merged."""
    packed = PackedLoRALayerWeights.pack(
        [layer(f"self_attn.{name}", at, alpha, dtype) for at, name in enumerate(NAMES[:2])] + [None]
    )
    loras = {"self_attn.qkv_proj": packed, "self_attn.o_proj": layer("self_attn.o_proj", 3, alpha)}
    saved: dict[str, Any] = {}
    if hasattr(lora_weights, "LoRAFullModuleWeights"):  # vLLM 0.30 has none.
        head = lora_weights.LoRAFullModuleWeights("score", torch.ones(2, 32), torch.zeros(2))
        saved["modules_to_save"] = {"score": head}
    model = LoRAModel(number, 8, loras, **saved)
    for weights in model.loras.values():
        weights.optimize()
    return model


class Worker:
    """A model runner's LoRA managers, with adapters of our making instead of files."""

    def __init__(self, capacity: int = 2) -> None:
        self.manager = object.__new__(LRUCacheLoRAModelManager)
        self.manager._registered_adapters = AdapterLRUCache(capacity, lambda number: None)
        self.manager._active_adapters = AdapterLRUCache(capacity, lambda number: None)
        self.runner = SimpleNamespace(lora_manager=SimpleNamespace(_adapter_manager=self.manager))

    def add(self, model: Any) -> None:
        self.manager._registered_adapters[model.id] = model
