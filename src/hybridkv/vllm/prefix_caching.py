"""Where vLLM switches its own prefix cache off, or narrows it, and what is done there.

vLLM has a reason at each of these places. The reason holds for hits from outside too, unless it is
known and does not. So a reason is asked for by its cause, and not by whether the cache is off: one
place may be reached where another one, or the user, has switched the cache off before. A cache
that is off for no reason of REASONS is the user's wish on the versions whose source was searched
(COMPARED), and unknown on all others, which is not served.

tests/unit/vllm/test_reasons.py searches vLLM's source and compares it with REASONS.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import vllm
from vllm import envs
from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.platforms import CpuArchEnum, current_platform
from vllm.v1.kv_cache_interface import iter_layer_specs

from hybridkv.core.findings import Finding, fail, judge, ok, warn
from hybridkv.vllm.proven import OLDEST
from hybridkv.vllm.step_outputs import Answer, why_all_computed

COMPARED = ("0.30.0", "0.31.0", "0.32.0", "0.33.0")
"""The releases of vLLM whose source was compared with REASONS."""
VARIANT_BACKENDS = ("FLASHINFER", "TRITON_MLA")
"""Attention backends with which vLLM's own hits are not batch invariant."""
WITHOUT = "serving this model without the connector works"


@dataclass(frozen=True)
class CachingReason:
    """A reason of vLLM not to use its own prefix cache, and the function that has it."""

    module: str  # The path below vLLM's package.
    function: str  # Its qualified name in the module.
    reason: str
    answer: Answer
    why: str
    since: str = OLDEST  # The first minor version of vLLM that has it.


_DEFAULTS = "engine/arg_utils.py"
_DEFAULT = "EngineArgs._set_default_chunked_prefill_and_prefix_caching_args"
REASONS = (
    CachingReason(
        _DEFAULTS,
        _DEFAULT,
        "the user wants none (`--no-enable-prefix-caching`)",
        Answer.SERVED,
        "prefixes are as good as with it; every hit comes from outside",
    ),
    CachingReason(
        _DEFAULTS,
        _DEFAULT,
        "the processor is RISC-V",
        Answer.REFUSED,
        "no attention kernel was tried there that continues a prompt",
    ),
    CachingReason(
        "config/model.py",
        "ModelConfig.is_prefix_caching_supported",
        "a pooler that reads each token of a prompt: MEAN, CLS and STEP pooling; hybrid models",
        Answer.ENGINE,
        "the pooler raises, or pools a part of the prompt, where a prefix was not computed",
    ),
    CachingReason(
        "config/model.py",
        "ModelConfig.is_prefix_caching_supported",
        "a bidirectional pooling model (BERT)",
        Answer.REFUSED,
        "it has no KV cache",
    ),
    CachingReason(
        "config/model.py",
        "ModelConfig.is_prefix_caching_supported",
        "a generative model without attention: it is experimental in vLLM",
        Answer.SERVED,
        "with `--enable-prefix-caching`, which makes it keep states at boundaries; refused "
        "without, like all recurrent layers",
    ),
    CachingReason(
        "config/model.py",
        "ModelConfig.is_prefix_caching_supported",
        "an encoder beside the decoder",
        Answer.REFUSED,
        "cross attention depends on the encoder's input; vLLM takes no connector there",
    ),
    CachingReason(
        "v1/engine/core.py",
        "EngineCore._initialize_kv_caches",
        "a layer attends to later tokens (`non_causal` of its spec): prefix LM",
        Answer.REFUSED,
        "the KV of a prefix depends on what follows it",
    ),
    CachingReason(
        "model_executor/models/config.py",
        "UnlimitedOCRForCausalLMConfig.verify_and_update_config",
        "R-SWA: generated tokens have a window, and the prompt has none",
        Answer.REFUSED,
        "KV of generated tokens is that of no prompt; its spec is of an unknown kind",
    ),
    CachingReason(
        "model_executor/layers/attention/attention.py",
        "Attention.__init__",
        "batch invariance (`VLLM_BATCH_INVARIANT`) with FlashInfer",
        Answer.REFUSED,
        "an answer after a hit differs in its last bits, which the user has ruled out",
    ),
    CachingReason(
        "model_executor/layers/attention/mla_attention.py",
        "MLAAttention.__init__",
        "batch invariance with FlashInfer or Triton MLA",
        Answer.REFUSED,
        "the same",
    ),
    CachingReason(
        "platforms/cpu.py",
        "CpuPlatform.check_and_update_config",
        "MLA on a CPU without AMX",
        Answer.ENGINE,
        "its kernel does not continue a prompt",
    ),
    CachingReason(
        "config/vllm.py",
        "VllmConfig.__post_init__",
        "the engine runs the encoder of a multimodal model alone",
        Answer.REFUSED,
        "it has no KV cache",
    ),
    CachingReason(
        "renderers/base.py",
        "BaseRenderer._process_mm_uuids",
        "media have no hash, because no cache of the engine needs one",
        Answer.REQUEST,
        "their names are counters of one process (`vllm/hashing.py`)",
    ),
    CachingReason(
        "sampling_params.py",
        "SamplingParams.__post_init__",
        "`prompt_logprobs`, `prompt_logprob_token_ids`",
        Answer.REQUEST,
        "each token of the prompt has an output",
    ),
    CachingReason(
        "pooling_params.py",
        "PoolingParams.verify",
        "plugins, late chunking",
        Answer.REQUEST,
        "each token of the prompt has an output",
    ),
    CachingReason(
        "pooling_params.py",
        "PoolingParams._merge_default_parameters",
        "the tasks `token_embed` and `token_classify`",
        Answer.REQUEST,
        "each token of the prompt has an output",
    ),
    CachingReason(
        "v1/request.py",
        "Request.__init__",
        "a client's `skip_reading_prefix_cache`",
        Answer.REQUEST,
        "the client wants it computed",
    ),
    CachingReason(
        "v1/core/kv_cache_manager.py",
        "KVCacheManager.get_computed_blocks",
        "the last token of a prompt is always computed",
        Answer.SERVED,
        "hits from outside leave it, too",
    ),
    CachingReason(
        "v1/kv_cache_interface.py",
        "KVCacheSpec.prefix_cacheable",
        "a group that holds no prefix (scratch memory)",
        Answer.SERVED,
        "nothing of it is stored, and a hit needs nothing of it",
    ),
    CachingReason(
        "v1/kv_cache_interface.py",
        "SlidingWindowMLASpec.prefix_cacheable",
        "`--swa-bounded-replay`: a part of each hit is computed again",
        Answer.REFUSED,
        "not proven",
        since="0.31",
    ),
    CachingReason(
        "v1/kv_cache_interface.py",
        "KVCacheConfig.transfer_group_ids",
        "HiSparse: a group is not for connectors, or is in the host's memory",
        Answer.REFUSED,
        "not proven",
    ),
    CachingReason(
        "config/model.py",
        "ModelConfig.is_mm_prefix_lm",
        "none: tokens of an image attend to later tokens of the same image (Gemma 3, PaliGemma)",
        Answer.SERVED,
        "the hash of each block with a part of an image names the whole image and where it begins, "
        "and vLLM computes an image in one step; its own cache serves it too",
    ),
    CachingReason(
        "config/model.py",
        "ModelConfig.is_diffusion",
        "none: a canvas of tokens attends to itself and is computed again and again",
        Answer.REFUSED,
        "which of these computations is in a block when it is stored is not proven",
    ),
)
"""Each place on vLLM 0.30 to 0.33, with what is done there and why."""


def caching_findings(vllm_config: Any) -> Iterator[Finding]:
    """Yield whether the reasons for which vLLM does not use its prefix cache allow hits.

    Reasons that a layer has are in `layer_findings`.
    """
    model, cache, check = vllm_config.model_config, vllm_config.cache_config, "prefix caching"
    if why := why_computed_here(vllm_config):
        what = f"{why}, so nothing is loaded or stored"
        yield warn("what a hit skips", what, "serving without the connector works as well")
    if model.is_diffusion:
        yield fail(check, "restoring the KV of a diffusion model is not proven yet", WITHOUT)
    if cache.enable_prefix_caching:
        yield ok(check, "on")
        return
    if current_platform.is_cpu() and current_platform.get_cpu_architecture() is CpuArchEnum.RISCV:
        yield fail(check, "vLLM has no prefix caching on RISC-V", WITHOUT)
        return
    version = vllm.__version__.partition("+")[0]
    is_known = version in COMPARED and not current_platform.is_out_of_tree()
    good = "off: the engine keeps no blocks for later requests"
    good += "" if why else ", and every hit comes from outside"
    what = (
        f"prefix caching is off, and why vllm {version} switches it off on "
        f"{current_platform.device_name or current_platform.device_type} was not searched"
    )
    yield judge(check, why or is_known, good, what, "--enable-prefix-caching works")


def why_computed_here(vllm_config: Any) -> str:
    """Return why an engine can take no hit, although its KV is that of others. Empty = it can."""
    if why := why_all_computed(vllm_config):
        return why
    # Without AMX vLLM switches both off for MLA.
    is_off = not vllm_config.cache_config.enable_prefix_caching
    is_whole = not vllm_config.scheduler_config.enable_chunked_prefill
    if is_off and is_whole and current_platform.is_cpu() and vllm_config.model_config.use_mla:
        return "vLLM's kernel for MLA on this processor does not continue a prompt"
    return ""


def layer_findings(kv_cache_config: Any, vllm_config: Any) -> Iterator[Finding]:
    """Yield a FAIL for each kind of layer that lets no prefix be restored, cacheable or not."""
    if not kv_cache_config.kv_cache_groups:
        yield fail("KV cache groups", "this model has no KV cache", WITHOUT)
    for gid, group in enumerate(kv_cache_config.kv_cache_groups):
        if any(map(_reads_later_tokens, iter_layer_specs(group.kv_cache_spec))):
            what = (
                f"KV cache group {gid} attends to later tokens, so the KV of a prefix depends on "
                f"what follows it"
            )
            yield fail("layers", what, WITHOUT)
        is_transferred = getattr(group, "enable_kv_transfer", True)
        if not is_transferred or getattr(group, "host_resident", False):
            what = f"KV cache group {gid} is not in the device's memory alone: not proven yet"
            yield fail("layers", what, WITHOUT)
    if envs.VLLM_BATCH_INVARIANT and (variant := _variant_backends(vllm_config)):
        what = f"VLLM_BATCH_INVARIANT: with {variant} a hit changes the last bits of an answer"
        yield fail("batch invariance", what, "--attention-backend FLASH_ATTN works")


def _reads_later_tokens(spec: Any) -> bool:
    """Return True for the spec of a layer that is not causal, on its prompt or on its drafts."""
    names = ("non_causal", "non_causal_multi_token_decode")
    return any(getattr(spec, name, False) for name in names)


def _variant_backends(vllm_config: Any) -> str:
    """Return the names of VARIANT_BACKENDS that layers of this process compute with.

    The process of vLLM's scheduler has no layers where workers have processes of their own. Each
    worker asks then.
    """
    layers = get_layers_from_vllm_config(vllm_config, cast(type[Any], AttentionLayerBase))
    names = {layer.get_attn_backend().get_name() for layer in layers.values()}
    return ", ".join(sorted(names.intersection(VARIANT_BACKENDS)))
