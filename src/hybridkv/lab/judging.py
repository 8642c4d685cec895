"""The judgement of `hybridkv verify`: a measured arm beside the answers of the engine alone.

The oracle is the engine's own prefix-cache hit of the same length. A full recompute may differ in
the last bits, because a kernel may take another numeric path when part of the prompt is cached.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import starmap
from typing import Any

DISTINCT_TOKENS_MIN = 4  # In an answer of 16 tokens.
NOISE_FACTOR = 4.0
NOISE_MIN = 1e-3
"""The preempted arm may be so many times farther from its oracle than the engine itself is.

A resumed request runs in another batch and from another boundary than a prompt alone, so last bits
differ. In a 16-bit model with experts they decide which expert is taken, and answers differ
altogether, with a connector or without.
"""


@dataclass
class VerifyArm:
    """One row of `hybridkv verify`: an arm's measures, and whether it is as it must be."""

    name: str
    prompt_tokens: int = 0
    cached_tokens: int = 0
    external_tokens: int = 0
    expected_external_tokens: int = 0
    ttft_ms: float = 0.0
    slowest_decode_step_ms: float = 0.0
    bytes_stored: int = 0
    bytes_loaded: int = 0
    oracle: str = "-"
    same_tokens: bool | None = None
    same_logprobs: bool | None = None
    """None where the engine's own answers differ from run to run. In the preempted arm "the same"
    is within a tolerance."""
    same_bytes: bool | None = None  # None where nothing was restored.
    same_drafts: bool | None = None
    """True if each step drafted and accepted the same tokens. None where nothing is drafted."""
    ok: bool = False
    preemptions: int = 0
    ttft_limit_ms: float | None = None  # How late the first token may come. None = not judged.
    waited_ms: float | None = None  # For what another engine computes. None = not measured.
    not_served: str | None = None  # Why it was not served; nothing was measured or compared then.


@dataclass(frozen=True, slots=True)
class Measured:
    """The engine's answers to the prompts of one arm, and what the daemon counted meanwhile."""

    name: str
    prompt_tokens: int
    results: Sequence[Mapping[str, Any]]  # The engine's answers, as hybridkv.lab.runner gives them.
    delta: Mapping[str, int]  # The increments of the daemon's counters.
    expected: int | None = 0  # Tokens that must come from the connector; None where chance decides.
    local: int = 0  # Tokens that the engine's own cache has.
    tolerance: float = 0.0
    """How far log-probabilities may be from the oracle's, whose blocks another step computed."""

    def row(self, **judged: Any) -> VerifyArm:
        """Return the arm with its measures, and with the fields that were `judged`."""
        first = self.results[0]
        return VerifyArm(
            **{"name": self.name, "prompt_tokens": self.prompt_tokens, **judged},
            ttft_ms=max(result["ttft_seconds"] for result in self.results) * 1e3,
            slowest_decode_step_ms=first["slowest_decode_step_seconds"] * 1e3,
            bytes_stored=self.delta.get("bytes_stored", 0),
            bytes_loaded=self.delta.get("bytes_loaded", 0),
        )


@dataclass(frozen=True, slots=True)
class ReferenceAnswers:
    """The engine's answers without a connector: computed, and from its own prefix cache."""

    computed: Mapping[str, Any]
    local_hit: Mapping[str, Any]
    split_hit: Mapping[str, Any]  # A hit on a prompt computed in two parts, as in the mixed arm.
    alone: Sequence[Mapping[str, Any]]  # The prompts of the preempted arm, each computed alone.
    noise: float  # How far the answers of `alone` are from the engine's own where it preempts.
    repeated: Sequence[Mapping[str, Any]]  # Hits on the prompts of the repeated arms.
    turns: Sequence[Mapping[str, Any]] = ()  # Second turns after their first turns.
    branch: Sequence[Mapping[str, Any]] = ()
    """A hit on a prompt that leaves another prompt where a state of it stands."""


@dataclass(frozen=True, slots=True)
class Variety:
    """How much the answers of the engine alone differ, by which a wrong one would be noticed."""

    answers: int
    distinct_answers: int
    distinct_tokens: int  # Of the first answer.

    @property
    def warning(self) -> str:
        """What equal tokens do not prove. Empty where the answers differ enough."""
        if self.distinct_answers < self.answers:
            what = (
                f"only {self.distinct_answers} of {self.answers} prompts have answers of their own"
            )
        elif self.distinct_tokens < DISTINCT_TOKENS_MIN:
            what = f"the first answer repeats {self.distinct_tokens} tokens"
        else:
            return ""
        return f"{what}, so equal tokens prove little; equal log-probabilities still prove much"


def variety_of(reference: ReferenceAnswers) -> Variety:
    """Return how much the answers to different prompts differ."""
    results = [reference.computed, reference.split_hit, *reference.alone]
    results += [*reference.repeated, *reference.turns]
    answers = [tuple(result["tokens"]) for result in results]
    return Variety(len(answers), len(set(answers)), len(set(answers[0])))


def answer_of(output: Any) -> dict[str, Any]:
    """Return the tokens of a request's answer, their log-probabilities, and the cached tokens."""
    completion = output.outputs[0]
    return {
        "tokens": list(completion.token_ids),
        "cached_tokens": output.num_cached_tokens,
        "logprobs": [
            sorted((token, entry.logprob) for token, entry in position.items())
            for position in completion.logprobs or []
        ],
    }


def judge(measured: Measured, reference: ReferenceAnswers) -> VerifyArm:
    """Return whether an arm had the expected hit, and the answer and the bytes of its oracle."""
    (result,) = measured.results
    external, expected = measured.delta.get("tokens_loaded", 0), measured.expected
    hit = result["cached_tokens"]
    # A failed load is computed after all, but the engine still reports its tokens as cached.
    right_hit = expected is None or (external == expected and hit == expected + measured.local)
    mixed = reference.split_hit if measured.local else reference.local_hit
    oracle = mixed if external else reference.computed
    failed = measured.delta.get("loads_failed", 0)
    same_bytes = failed == 0 if external or failed else None
    same = {f"same_{key}": result[key] == oracle[key] for key in ("tokens", "logprobs")}
    if measured.tolerance:
        same["same_logprobs"] = answer_deviation(result, oracle) <= measured.tolerance
    same_drafts = _has_same_drafts(result, oracle)
    return measured.row(
        **same,
        same_drafts=same_drafts,
        cached_tokens=hit,
        external_tokens=external,
        expected_external_tokens=external if expected is None else expected,
        oracle="own prefix cache" if external else "computed",
        same_bytes=same_bytes,
        ok=right_hit and all(same.values()) and False not in (same_bytes, same_drafts),
    )


def _has_same_drafts(result: Mapping[str, Any], oracle: Mapping[str, Any]) -> bool | None:
    """Return True if each step drafted and accepted the same.

    None where neither engine drafted, or the result's steps are left out. With asynchronous
    scheduling drafts are not seen, but how many of them each step accepted is.
    """
    if not result.get("step_tokens"):
        return None
    if not any(each["drafts"] or max(each["step_tokens"]) > 1 for each in (result, oracle)):
        return None
    return all(result[key] == oracle[key] for key in ("drafts", "step_tokens"))


def judge_preempted(measured: Measured, reference: ReferenceAnswers) -> VerifyArm:
    """Return whether preempted requests had a hit of a chunk, and answers within a tolerance."""
    tolerance = max(NOISE_MIN, NOISE_FACTOR * reference.noise)
    preemptions = measured.results[0]["preemptions"]
    external, expected = measured.delta.get("tokens_loaded", 0), measured.expected or 0
    same_bytes = measured.delta.get("loads_failed", 0) == 0
    distance = deviation(measured.results, reference.alone)
    close = distance <= tolerance if math.isfinite(tolerance) else None
    oracle = f"computed alone, {distance:.1g} of {tolerance:.1g}"
    return measured.row(
        name=f"{measured.name} {preemptions} times",
        external_tokens=external,
        expected_external_tokens=max(external, expected),
        oracle="bytes: itself differs" if close is None else oracle,
        same_tokens=close,
        same_logprobs=close,
        same_bytes=same_bytes,
        ok=preemptions > 0 and external >= expected and close is not False and same_bytes,
        preemptions=preemptions,
    )


def judge_repeated(measured: Measured, reference: ReferenceAnswers) -> VerifyArm:
    """Return how many prompts had the expected hit and the answer of their oracle. All must."""
    return _judge_several(measured, reference.repeated)


def judge_turns(measured: Measured, reference: ReferenceAnswers) -> VerifyArm:
    """Judge second turns like `judge_repeated`. The engine's own hits must be as long."""
    arm = _judge_several(measured, reference.turns)
    own = sum(result["cached_tokens"] for result in reference.turns)
    return replace(arm, ok=arm.ok and own == measured.expected)


def judge_branch(measured: Measured, reference: ReferenceAnswers) -> VerifyArm:
    """Judge like `judge_repeated` a prompt of which the engine has attention and no state."""
    return _judge_several(measured, reference.branch)


def _judge_several(measured: Measured, oracles: Sequence[Mapping[str, Any]]) -> VerifyArm:
    """Return how many prompts had the expected hit and the answer of their oracle."""
    external, count = measured.delta.get("tokens_loaded", 0), len(measured.results)
    expected = measured.expected or 0
    pairs = [*zip(measured.results, oracles, strict=True)]
    same = {key: [mine[key] == own[key] for mine, own in pairs] for key in ("tokens", "logprobs")}
    hits = [result["cached_tokens"] * count == expected for result in measured.results]
    right = [all(each) for each in zip(hits, *same.values(), strict=True)].count(True)
    same_bytes = measured.delta.get("loads_failed", 0) == 0
    return measured.row(
        name=f"{measured.name}: {right} of {count}",
        cached_tokens=sum(result["cached_tokens"] for result in measured.results),
        external_tokens=external,
        expected_external_tokens=expected,
        oracle="own prefix cache",
        **{f"same_{key}": all(equal) for key, equal in same.items()},
        same_bytes=same_bytes,
        ok=right == count and external == expected and same_bytes,
    )


def judge_reference(prompt_tokens: int, expected: int, reference: ReferenceAnswers) -> VerifyArm:
    """Return whether a hit of the engine's own cache has `expected` tokens and the right answer."""
    computed, local_hit = reference.computed, reference.local_hit
    hit = local_hit["cached_tokens"]
    return Measured("no connector", prompt_tokens, [computed], {}).row(
        cached_tokens=hit,
        oracle="itself",
        same_tokens=local_hit["tokens"] == computed["tokens"],
        same_logprobs=local_hit["logprobs"] == computed["logprobs"],
        ok=hit == expected and computed["finish_reason"] == "length",
    )


def deviation(results: Sequence[Mapping[str, Any]], oracles: Sequence[Mapping[str, Any]]) -> float:
    """Return the largest deviation of any result from its oracle."""
    return max(starmap(answer_deviation, zip(results, oracles, strict=True)))


def answer_deviation(result: Mapping[str, Any], oracle: Mapping[str, Any]) -> float:
    """Return the largest difference of a log-probability up to the first token that differs.

    At that token the difference is how much likelier the oracle's token is than the result's. What
    follows it answers another text, and does not count.
    """
    worst: float = 0.0
    for token, logprobs, oracle_token, oracle_logprobs in zip(
        result["tokens"], result["logprobs"], oracle["tokens"], oracle["logprobs"], strict=True
    ):
        known: dict[int, float] = dict(oracle_logprobs)
        if token not in known or oracle_token not in dict(logprobs):
            return math.inf
        worst = max(worst, *(abs(value - known[name]) for name, value in logprobs if name in known))
        if token != oracle_token:
            worst = max(worst, known[oracle_token] - known[token])
            break
    return worst
