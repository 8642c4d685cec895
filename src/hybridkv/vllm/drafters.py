"""Drafters: models beside the target whose layers have a KV cache, and how they fill it.

A drafter of the EAGLE family (EAGLE, EAGLE3, MTP) computes its KV at a position from the target's
hidden state there and from the *next* token. A draft model's KV depends on no later token. N-gram
speculation has no layers. Over recurrent groups it needs that a state is that of verified tokens,
which `unproven_states` is about.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import vllm
from vllm.platforms import current_platform

from hybridkv.core.findings import Finding, Verdict, fail, judge, ok

NGRAM = "ngram"
METHODS = ("draft_model", "eagle", "eagle3", "mtp")
"""Drafters whose restored bytes were compared on a real engine."""
VERSIONS = {
    "0.32": "real engines and the simulation",
    "0.33": "the simulation and by reading its model runner; there is no CPU build of it yet",
}
"""What drafters were proven by, by the minor version of vLLM; no other is served with them."""
V2_VERSIONS = ("0.32",)  # Those on which drafters ran on the V2 model runner of a real engine.
STATE_VERSIONS = ("0.32",)
"""Those on which recurrent states under speculation were compared on a real engine."""
STATE_METHODS = (NGRAM, "eagle", "mtp")
STATE_ARCHITECTURES = (
    "Qwen3NextForCausalLM",
    "Qwen3_5ForCausalLM",
    "Qwen3_5ForConditionalGeneration",
)
"""Methods and models whose recurrent states under speculation were compared on a real engine."""
UNPADDED = '"disable_padded_drafter_batch":true'
REMEDY = '{"method":"ngram",...} or serving without --speculative-config works'
CHECK = "speculative decoding"


is_cpu_mended = False
"""Whether hybridkv.lab.shims has mended what vLLM's CPU build does wrong with recurrent states."""


@dataclass(frozen=True)
class Drafter:
    """What the connector must know of an engine's drafter."""

    lookahead_tokens: int
    """Tokens behind a position on which the drafter's KV there depends: 1, or 0 (draft model)."""
    drafts: int  # Tokens that are drafted in one step.
    tokens_max: int
    """vLLM runs no drafter in a step in which a request has more tokens than this, with its drafts.
    The drafter's KV of all requests of the step is never written then."""
    is_stale_at_ends: bool
    """Whether the KV at the last position of a step inside a prompt is made from the prompt's last
    token: vLLM's V1 model runner takes that for the next one, where it pads the drafter's batch."""


def drafter_of(vllm_config: Any) -> Drafter | None:
    """The drafter of a configuration that `speculation_findings` lets pass; None = without layers.

    `vllm_config` is vLLM's VllmConfig.
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
    """Whether the KV cache of the configuration's drafter can be restored exactly."""
    speculative = vllm_config.speculative_config
    if speculative is None:
        yield ok(CHECK, "off")
    elif speculative.method == NGRAM:
        yield ok(CHECK, f"{NGRAM}: drafts have no KV cache of their own")
    elif unproven := _unproven(vllm_config, speculative):
        yield fail(CHECK, *unproven)
    else:
        reads = "the next token" if speculative.use_eagle() else "no later token"
        what = (
            f"{speculative.method}: its KV cache is restored with the target's, and reads {reads}; "
            f"proven by {VERSIONS[_minor_version()]}"
        )
        yield ok(CHECK, what)


def _unproven(vllm_config: Any, speculative: Any) -> tuple[str, str] | None:
    """What was not proven of a drafter, and what works; None = nothing."""
    method = speculative.method
    if method not in METHODS:
        what = f"speculative_config: restoring the cache of a {method!r} drafter is not proven yet"
        return what, REMEDY
    drafter = f"a {method!r} drafter"
    versions = VERSIONS, V2_VERSIONS
    if unproven := _unproven_engine(vllm_config, speculative, versions, drafter, REMEDY):
        return unproven
    if speculative.parallel_drafting:
        return "speculative_config: a drafter with parallel_drafting is not proven yet", REMEDY
    if speculative.use_multi_module_mtp():
        what = "speculative_config: several MTP modules read several later tokens: not proven yet"
        return what, '"num_speculative_tokens":1 works'
    return None


def unproven_states(vllm_config: Any, spec: Any) -> tuple[str, str] | None:
    """What was not proven of recurrent states under speculation, and what works; None = nothing.

    `spec` is vLLM's MambaSpec of a group. The states behind a step's drafts are in blocks of their
    own (`num_speculative_blocks`), and vLLM copies the one at a block's end when it is verified.
    """
    speculative, remedy = (
        vllm_config.speculative_config,
        "serving without --speculative-config works",
    )
    if speculative is None:
        return None
    what = "speculative_config: restoring recurrent states under speculation is not proven yet"
    if speculative.method not in STATE_METHODS:
        return f"{what} with a drafter of the method {speculative.method!r}", remedy
    architecture = vllm_config.model_config.architecture
    if architecture not in STATE_ARCHITECTURES:
        return f"{what} for {architecture}", remedy
    if spec.num_speculative_blocks != vllm_config.num_speculative_tokens:
        return f"{what} with use_replayssm", "serving without --use-replayssm works"
    states = "a recurrent state under speculation"
    versions = STATE_VERSIONS, ()
    if unproven := _unproven_engine(vllm_config, speculative, versions, states, remedy):
        return unproven
    if speculative.use_eagle() and vllm_config.scheduler_config.async_scheduling:
        what = f"{what} with asynchronous scheduling, which plans a step before drafts are verified"
        return what, f"{UNPADDED} works"
    if current_platform.is_cpu() and not is_cpu_mended:
        what = (
            "speculative_config: vLLM 0.32's CPU build itself computes wrong recurrent states "
            "where a step has fewer drafts than num_speculative_tokens"
        )
        return what, remedy
    return None


def padding_finding(vllm_config: Any) -> Finding:
    """Whether prompts of several steps are stored, where an engine has recurrent states.

    Steps end where a state stands. A chunk that ends there has the drafter's KV of another token,
    where vLLM pads the drafter's batch, and so has all that is behind it (`is_stale_at_ends`).
    """
    drafter = drafter_of(vllm_config)
    what = "speculative_config: the drafter's KV is wrong where a step ends inside a prompt, "
    what += "which is where recurrent states stand, so nothing of such a prompt is restored"
    is_good = drafter is None or not drafter.is_stale_at_ends
    good = "prompts of several steps are stored"
    if vllm_config.speculative_config.use_eagle_block_drop():
        good += ", and hits end one block lower than without a drafter"
    return judge(CHECK, is_good, good, what, f"{UNPADDED} works", Verdict.WARN)


def _minor_version() -> str:
    """The minor version of vLLM."""
    return ".".join(vllm.__version__.split(".")[:2])


def _unproven_engine(
    vllm_config: Any,
    speculative: Any,
    versions: tuple[Collection[str], Collection[str]],
    restored: str,
    remedy: str,
) -> tuple[str, str] | None:
    """What was not proven of the engine itself; `restored` is what it would restore.

    `versions` are the minor versions of vLLM on which it was, and those with the V2 model runner.
    """
    if (version := _minor_version()) not in versions[0]:
        return f"speculative_config: {restored} was never restored on vllm {version}", remedy
    if vllm_config.use_v2_model_runner and version not in versions[1]:
        what = f"speculative_config: {restored} was never restored with the V2 model runner"
        return f"{what} of vllm {version}", "VLLM_USE_V2_MODEL_RUNNER=0 works"
    if speculative.num_speculative_tokens_per_batch_size:
        what = "speculative_config: num_speculative_tokens_per_batch_size is not proven yet"
        return what, "serving without it works"
    return None
