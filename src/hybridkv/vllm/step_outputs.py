"""What a step gives beside KV, and what becomes of it where a prefix is loaded, not computed.

A hit skips the steps that would have computed its tokens, and all that these steps would have
given. Blocks do not have that. OUTPUTS has each field of vLLM's `ModelRunnerOutput`, so that
nothing which a step gives is forgotten; tests/unit/vllm/test_reasons.py compares it with vLLM's.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

LAST = "LAST"  # The one type of pooling of a whole prompt that reads its last token alone.
LAST_TOKEN_TASKS = ("embed", "classify")
"""The pooling tasks that give one output for a prompt. Others give one for each of its tokens."""


class Answer(StrEnum):
    """What is done where vLLM does not use its own prefix cache, or where a hit skips an output."""

    SERVED = "hits are served"
    REQUEST = "the request is computed"
    ENGINE = "all requests are computed, and nothing is stored"
    REFUSED = "the engine is refused"


@dataclass(frozen=True)
class Output:
    """Fields of vLLM's ModelRunnerOutput, and what is done about them."""

    fields: str  # Separated by spaces.
    case: str  # Which outputs of these fields the row is about. Empty = all of them.
    answer: Answer
    why: str


OUTPUTS = (
    Output(
        "req_ids req_id_to_index cudagraph_stats",
        "",
        Answer.SERVED,
        "they say how the step ran, and nothing of a token",
    ),
    Output(
        "sampled_token_ids logprobs sampling_masks num_nans_in_logits",
        "",
        Answer.SERVED,
        "they are made at positions that are sampled, and the engine computes a prompt's last "
        "token in any case",
    ),
    Output(
        "prompt_logprobs_dict prompt_token_id_logprobs_dict",
        "`prompt_logprobs`, `prompt_logprob_token_ids`",
        Answer.REQUEST,
        "each token of the prompt has one; also where a client sets `skip_reading_prefix_cache` "
        "to false",
    ),
    Output(
        "pooler_output",
        "LAST pooling, tasks `embed` and `classify`",
        Answer.SERVED,
        "the pooler reads the last token alone",
    ),
    Output(
        "pooler_output",
        "MEAN, CLS and STEP pooling; hybrid models",
        Answer.ENGINE,
        "the pooler reads each token of a prompt, and most raise where one was not computed",
    ),
    Output(
        "pooler_output",
        "tasks `token_embed`, `token_classify`, plugins, unknown ones",
        Answer.REQUEST,
        "each token of the prompt has an output",
    ),
    Output(
        "routed_experts aux_output_connector_output",
        "`--enable-return-routed-experts`, any auxiliary output",
        Answer.ENGINE,
        "the engine keeps what its own blocks were computed with, in its own memory, and raises "
        "where a block has none",
    ),
    Output("kv_connector_output", "", Answer.SERVED, "it is what this connector reports"),
    Output(
        "ec_connector_output",
        "",
        Answer.SERVED,
        "an image whose tokens are all loaded needs no encoder, as with vLLM's own hits",
    ),
)


def why_all_computed(vllm_config: Any) -> str:
    """Return why an engine's outputs need each token of every prompt. Empty = they do not.

    vLLM knows the reason as `is_prefix_caching_supported` of its model configuration; whether its
    prefix cache is on says nothing, because a user may switch it on and off.
    """
    model, pooler = vllm_config.model_config, vllm_config.model_config.pooler_config
    if pooler is not None and not (
        model.is_prefix_caching_supported and pooler.seq_pooling_type in (LAST, None)
    ):
        types = ", ".join(filter(None, (pooler.seq_pooling_type, pooler.tok_pooling_type)))
        return f"the pooler of this model ({types}) reads each token of a prompt"
    # vLLM 0.30 has it in the model's configuration.
    is_routed = getattr(model, "enable_return_routed_experts", False)
    auxiliary = getattr(vllm_config, "aux_output_config", None)
    if is_routed or (auxiliary is not None and auxiliary.enabled):
        return "enable_return_routed_experts needs each token of a prompt to be computed here"
    return ""


def why_computed(request: Any) -> str:
    """Return why a request's outputs need each token of its prompt. Empty = they do not.

    `skip_reading_prefix_cache` is vLLM's own answer, which a client may set to false.
    """
    sampling = getattr(request, "sampling_params", None)
    scored = ("prompt_logprobs", "prompt_logprob_token_ids")
    if any(getattr(sampling, name, None) is not None for name in scored):
        return "its prompt_logprobs need each token of the prompt"
    pooling = getattr(request, "pooling_params", None)
    if pooling is not None and pooling.task not in LAST_TOKEN_TASKS:
        return f"its task {pooling.task} needs each token of the prompt"
    if getattr(request, "skip_reading_prefix_cache", False):
        return "it asks not to use cached prefixes (skip_reading_prefix_cache)"
    return ""
