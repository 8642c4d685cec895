"""What the daemon shows of an engine besides its geometry."""

from typing import Any

from hybridkv.vllm.layout import WorkerLayout, kv_dtype
from hybridkv.vllm.preflight import state_rule
from hybridkv.wire.messages import TEXT_MAX, WireModel


def wire_model(vllm_config: Any, layout: WorkerLayout) -> WireModel:
    """The model and the settings of an engine that `hybridkv plan` uses."""
    states = state_rule(vllm_config)
    return WireModel(
        str(vllm_config.model_config.model)[-TEXT_MAX:],
        vllm_config.model_config.max_model_len,
        kv_dtype(vllm_config, layout),
        [len(layers) for layers in layout.layers.values()],
        states.retention_tokens,
        states.step_tokens,
    )
