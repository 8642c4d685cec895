"""What people want to know of an engine besides its geometry."""

from typing import Any

from hybridkv.connector.metadata import WorkerLayout
from hybridkv.connector.preflight import state_rule
from hybridkv.wire.messages import TEXT_MAX, WireModel


def kv_dtype(vllm_config: Any, layout: WorkerLayout) -> str:
    """The cache's dtype as it was asked for, and what vLLM made of "auto"."""
    asked = str(vllm_config.cache_config.cache_dtype)
    # Recurrent states are registered as plain bytes.
    made = {layer.dtype.removeprefix("torch.") for layers in layout.layers.values() for layer in layers} - {"int8"}
    return f"auto ({', '.join(sorted(made))})" if asked == "auto" and made else asked


def wire_model(vllm_config: Any, layout: WorkerLayout) -> WireModel:
    """What the daemon is told, for `hybridkv plan`."""
    states = state_rule(vllm_config)
    return WireModel(
        str(vllm_config.model_config.model)[-TEXT_MAX:],
        vllm_config.model_config.max_model_len,
        kv_dtype(vllm_config, layout),
        [len(layers) for layers in layout.layers.values()],
        states.retention_tokens,
        states.step_tokens,
    )
