"""What vLLM's own kernels compute wrongly, or may, in some batches and some kinds of requests.

Such KV stays in the engine that computed it. It is stored under no name, and neither is what reads
it (`connector.scheduler.drafted`)::

    a request without an adapter in a    wrong with vLLM's CPU kernel for LoRA, which takes "no
    step with one that has an adapter    adapter" for the last slot; it is asked at the start
    a session of streamed prompts over   right with Mamba-2; never compared with any other kind of
    recurrent layers                     layer
    any step of LFM2, or of MLA with     wrong: the attention hands heads apart to the rotary
    the plain rotary embedding, on a     embedding, whose CPU kernel takes the place of a token in
    CPU                                  the step for its position; the layer is asked at the start
"""

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import KVCacheSpec, MambaSpec, MLAAttentionSpec, iter_layer_specs

from hybridkv.vllm import seams

logger = logging.getLogger("vllm.hybridkv")

PROVEN_IN_SESSIONS = (MambaAttentionBackendEnum.MAMBA2,)
"""Kinds of recurrent layers of which a session's states were compared with those of one prompt."""


@dataclass(frozen=True)
class BatchFaults:
    """Where one engine's KV may be other than what its tokens give alone."""

    beside_adapters: bool = False
    """True for requests without a LoRA adapter in a step with a request that has one."""
    in_sessions: bool = False  # True for sessions of streamed prompts (resumable requests).
    in_all_steps: bool = False  # True for every request: nothing is stored.


def batch_faults(vllm_config: Any, specs: Iterable[KVCacheSpec]) -> BatchFaults:
    """Return the faults of an engine of this configuration, whose groups have these specs."""
    layers = [layer for spec in specs for layer in iter_layer_specs(spec)]
    kinds = {layer.mamba_type for layer in layers if isinstance(layer, MambaSpec)}
    has_adapters, is_cpu = vllm_config.lora_config is not None, current_platform.is_cpu()
    # All models with short convolutions are LFM2's, and hand heads apart. So does all of MLA.
    is_latent = any(isinstance(layer, MLAAttentionSpec) for layer in layers)
    is_apart = is_latent and not seams.rotates_in_torch(vllm_config)
    is_apart |= MambaAttentionBackendEnum.SHORT_CONV in kinds
    in_all_steps = is_cpu and is_apart and seams.mixes_heads(vllm_config)
    if in_all_steps:
        logger.warning(
            "hybridkv: nothing is stored: the rotary embedding of vLLM's CPU build computes KV of "
            "this model that depends on the other requests of a step"
        )
    return BatchFaults(
        beside_adapters=is_cpu and has_adapters and seams.adapts_base_rows(),
        in_sessions=not kinds.issubset(PROVEN_IN_SESSIONS),
        in_all_steps=in_all_steps,
    )
