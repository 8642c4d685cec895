"""Drafters: models beside the target whose layers have a KV cache, and how they fill it.

A drafter of the EAGLE family (EAGLE, EAGLE3, MTP) computes its KV at a position from the target's
hidden state there and from the *next* token. A draft model's KV depends on no later token. N-gram
speculation has no layers. Over recurrent groups, states must be those of verified tokens
(`unproven_states`).
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from vllm.platforms import current_platform

from hybridkv.core.findings import Check, Finding, Verdict, fail, judge, ok
from hybridkv.vllm import seams
from hybridkv.vllm.versions import minor_version

NGRAM = "ngram"
METHODS = ("draft_model", "eagle", "eagle3", "mtp")
"""Drafters whose restored bytes were compared on a real engine."""
VERSIONS = {
    "0.32": "real engines and the simulation",
    "0.33": "the simulation and by reading its model runner; there is no CPU build of it yet",
}
"""How drafters were proven, by the minor version of vLLM. They are served on no other version."""
LOOKAHEAD_VERSIONS = ("0.33",)
"""Versions whose own block hashes look ahead, but not beside a connector."""
V2_VERSIONS = ("0.32",)  # Versions on which drafters ran on the V2 model runner of a real engine.
STATE_VERSIONS = ("0.32",)
"""Versions on which recurrent states under speculation were compared on a real engine, with both
model runners."""
STATE_METHODS = (NGRAM, "eagle", "mtp")
STATE_ARCHITECTURES = (
    "Qwen3NextForCausalLM",
    "Qwen3_5ForCausalLM",
    "Qwen3_5ForConditionalGeneration",
)
"""Methods and models whose recurrent states under speculation were compared on a real engine."""
UNPADDED = '"disable_padded_drafter_batch":true'
REMEDY = '{"method":"ngram",...} or serving without --speculative-config works'


@dataclass(frozen=True)
class Drafter:
    """The facts of an engine's drafter that decide what can be stored."""

    lookahead_tokens: int
    """Tokens after a position on which the drafter's KV there depends: 1, or 0 (draft model)."""
    drafts: int  # Tokens that are drafted in one step.
    tokens_max: int
    """vLLM runs no drafter in a step in which a request has more tokens than this, with its drafts.
    The drafter's KV of all requests of the step is never written then."""
    is_stale_at_ends: bool
    """True where vLLM's V1 model runner pads the drafter's batch. At the end of each prefill step
    it then feeds the prompt's last token instead of the next token, so the drafter's KV there is
    wrong."""


NO_DRAFTER = Drafter(lookahead_tokens=0, drafts=0, tokens_max=1 << 62, is_stale_at_ends=False)
"""The facts of an engine without a drafter."""


class ConfigRefusal(NamedTuple):
    """Why a configuration is not served."""

    what: str
    remedy: str
    """The clause that ends the sentence, with what works."""


def drafter_of(vllm_config: Any) -> Drafter | None:
    """Return the drafter of a VllmConfig. None where speculation has no layers, or is off.

    The configuration is one that `speculation_findings` lets pass.
    """
    speculative = vllm_config.speculative_config
    if speculative is None or speculative.method not in METHODS:
        return None
    ahead, drafts = vllm_config.num_prefill_lookahead_tokens, speculative.num_speculative_tokens
    longest = vllm_config.model_config.max_model_len
    if vllm_config.use_v2_model_runner:
        # It runs the drafter in every step, and knows a prompt's next token (next_prefill_tokens).
        return Drafter(ahead, drafts, longest + drafts, is_stale_at_ends=False)
    lengths = longest, speculative.draft_model_config.max_model_len
    is_padded = not speculative.disable_padded_drafter_batch
    tokens_max = min(length for length in lengths if length is not None)
    return Drafter(ahead, drafts, tokens_max, speculative.use_eagle() and is_padded)


def speculation_findings(vllm_config: Any) -> Iterator[Finding]:
    """Yield whether the KV cache of the configuration's drafter can be restored exactly."""
    speculative = vllm_config.speculative_config
    if speculative is None:
        yield ok(Check.SPECULATIVE_DECODING, "off")
    elif speculative.method == NGRAM:
        yield ok(Check.SPECULATIVE_DECODING, f"{NGRAM}: drafts have no KV cache of their own")
    elif unproven := _unproven(vllm_config, speculative):
        yield fail(Check.SPECULATIVE_DECODING, unproven.what, unproven.remedy)
    else:
        reads = "the next token" if speculative.use_eagle() else "no later token"
        what = (
            f"{speculative.method}: its KV cache is restored with the target's, and reads {reads}; "
            f"proven by {VERSIONS[minor_version()]}"
        )
        if minor_version() in LOOKAHEAD_VERSIONS and speculative.use_eagle_block_drop():
            what += (
                "; beside any connector vLLM's block hashes do not look ahead, so its own hits end "
                "one block lower, and hits from hybridkv do not"
            )
        yield ok(Check.SPECULATIVE_DECODING, what)


def _unproven(vllm_config: Any, speculative: Any) -> ConfigRefusal | None:
    """Return what was not proven of a drafter. None = it is served."""
    method = speculative.method
    if method not in METHODS:
        what = f"speculative_config: restoring the cache of a {method!r} drafter is not proven yet"
        return ConfigRefusal(what, REMEDY)
    drafter = f"a {method!r} drafter"
    if unproven := _unproven_engine(vllm_config, VERSIONS, V2_VERSIONS, drafter, REMEDY):
        return unproven
    if speculative.parallel_drafting:
        what = "speculative_config: a drafter with parallel_drafting is not proven yet"
        return ConfigRefusal(what, REMEDY)
    if speculative.use_multi_module_mtp():
        what = "speculative_config: several MTP modules read several later tokens: not proven yet"
        return ConfigRefusal(what, '"num_speculative_tokens":1 works')
    return None


def unproven_states(vllm_config: Any, spec: Any) -> ConfigRefusal | None:
    """Return what was not proven of recurrent states under speculation. None = they are served.

    `spec` is vLLM's MambaSpec of a group. The states after a step's drafts are in blocks of their
    own (`num_speculative_blocks`), and vLLM copies the state at a block's end once it is verified.
    """
    speculative = vllm_config.speculative_config
    remedy = "serving without --speculative-config works"
    if speculative is None:
        return None
    what = "speculative_config: restoring recurrent states under speculation is not proven yet"
    if speculative.method not in STATE_METHODS:
        return ConfigRefusal(f"{what} with a drafter of the method {speculative.method!r}", remedy)
    architecture = vllm_config.model_config.architecture
    if architecture not in STATE_ARCHITECTURES:
        return ConfigRefusal(f"{what} for {architecture}", remedy)
    if spec.num_speculative_blocks != vllm_config.num_speculative_tokens:
        return ConfigRefusal(f"{what} with use_replayssm", "serving without --use-replayssm works")
    states = "a recurrent state under speculation"
    if unproven := _unproven_engine(vllm_config, STATE_VERSIONS, STATE_VERSIONS, states, remedy):
        return unproven
    is_async = vllm_config.scheduler_config.async_scheduling
    if speculative.use_eagle() and is_async and not vllm_config.use_v2_model_runner:
        what = f"{what} with asynchronous scheduling on the V1 model runner, whose padded drafts "
        what += "leave nothing to restore"
        return ConfigRefusal(what, f"VLLM_USE_V2_MODEL_RUNNER=1 or {UNPADDED} works")
    if current_platform.is_cpu() and seams.has_wrong_drafted_states():
        what = (
            "speculative_config: vLLM 0.32's CPU build itself computes wrong recurrent states "
            "where a step has fewer drafts than num_speculative_tokens"
        )
        return ConfigRefusal(what, remedy)
    return None


def padding_finding(vllm_config: Any) -> Finding:
    """Return whether prompts of several steps are stored, where an engine has recurrent states.

    Steps end where a state stands. Where vLLM pads the drafter's batch, a chunk that ends there has
    the drafter's KV of another token (`is_stale_at_ends`), and so have all chunks after it.
    """
    drafter = drafter_of(vllm_config)
    what = "speculative_config: the drafter's KV is wrong where a step ends inside a prompt, "
    what += "which is where recurrent states stand, so nothing of such a prompt is restored"
    is_good = drafter is None or not drafter.is_stale_at_ends
    good = "prompts of several steps are stored"
    if vllm_config.speculative_config.use_eagle_block_drop():
        good += ", and hits end one block lower than without a drafter"
    return judge(
        check=Check.SPECULATIVE_DECODING,
        is_good=is_good,
        good=good,
        what=what,
        remedy=f"{UNPADDED} works",
        bad=Verdict.WARN,
    )


def _unproven_engine(
    vllm_config: Any,
    v1_versions: Collection[str],
    v2_versions: Collection[str],
    restored: str,
    remedy: str,
) -> ConfigRefusal | None:
    """Return what was not proven of the engine itself. None = it was proven.

    The versions are the minor ones of vLLM on which it was, by model runner. `restored` is what the
    engine would restore, and `remedy` what works on every version.
    """
    if (version := minor_version()) not in v1_versions:
        what = f"speculative_config: {restored} was never restored on vllm {version}"
        return ConfigRefusal(what, remedy)
    if vllm_config.use_v2_model_runner and version not in v2_versions:
        what = f"speculative_config: {restored} was never restored with the V2 model runner"
        return ConfigRefusal(f"{what} of vllm {version}", "VLLM_USE_V2_MODEL_RUNNER=0 works")
    if vllm_config.speculative_config.num_speculative_tokens_per_batch_size:
        what = "speculative_config: num_speculative_tokens_per_batch_size is not proven yet"
        return ConfigRefusal(what, "serving without it works")
    return None
