"""Which drafters are served, what is known of them, and what is refused with a sentence."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import vllm

from hybridkv.core.findings import Verdict
from hybridkv.vllm import seams
from hybridkv.vllm.drafters import Drafter, drafter_of, speculation_findings
from hybridkv.vllm.preflight import group_findings
from tests.simulation.layouts import Member

NO_MATCH_UNIT = {"cache_config": SimpleNamespace(prefix_match_unit=None)}


def config(method: str, **changes: Any) -> Any:
    """The parts of a VllmConfig with speculation that are read."""
    values: dict[str, Any] = {
        "num_speculative_tokens": 3,
        "num_speculative_tokens_per_batch_size": None,
        "parallel_drafting": False,
        "disable_padded_drafter_batch": False,
        "draft_max_model_len": 4096,
        "modules": 1,
        "v2": False,
        "architecture": "Qwen3NextForCausalLM",
        "is_async": False,
    } | changes
    is_eagle = method in ("eagle", "eagle3", "mtp")
    speculative = SimpleNamespace(
        method=method,
        draft_model_config=SimpleNamespace(max_model_len=values["draft_max_model_len"]),
        use_eagle=lambda: is_eagle,
        use_eagle_block_drop=lambda: is_eagle,
        use_multi_module_mtp=lambda: values["modules"] > 1,
        **values,
    )
    return SimpleNamespace(
        speculative_config=speculative,
        model_config=SimpleNamespace(max_model_len=8192, architecture=values["architecture"]),
        scheduler_config=SimpleNamespace(async_scheduling=values["is_async"]),
        num_speculative_tokens=3,
        num_prefill_lookahead_tokens=int(is_eagle),
        use_v2_model_runner=values["v2"],
        **NO_MATCH_UNIT,
    )


@pytest.mark.parametrize(
    ("version", "v2"), [("0.32.0", False), ("0.32.0", True), ("0.33.0", False)]
)
@pytest.mark.parametrize("method", ["eagle", "eagle3", "mtp", "draft_model", "ngram"])
def test_proven_methods_are_served(
    method: str, version: str, v2: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm, "__version__", version)
    (found,) = speculation_findings(config(method, v2=v2))
    assert found.verdict is Verdict.OK
    is_simulated = method != "ngram" and version == "0.33.0"
    assert ("no CPU build of it yet" in found.sentence) == is_simulated
    is_lowered = is_simulated and method != "draft_model"
    assert ("its own hits end one block lower" in found.sentence) == is_lowered


@pytest.mark.parametrize(
    ("method", "changes", "version", "what"),
    [
        ("medusa", {}, "0.32.0", "'medusa' drafter is not proven"),
        ("dflash", {}, "0.32.0", "'dflash' drafter is not proven"),
        ("suffix", {}, "0.32.0", "'suffix' drafter is not proven"),
        ("eagle", {}, "0.34.0", "never restored on vllm 0.34"),
        ("draft_model", {}, "0.31.2", "never restored on vllm 0.31"),
        ("mtp", {"modules": 2}, "0.32.0", "several MTP modules"),
        ("mtp", {"v2": True}, "0.33.0", "V2 model runner of vllm 0.33"),
        ("eagle3", {"parallel_drafting": True}, "0.32.0", "parallel_drafting"),
        (
            "eagle",
            {"num_speculative_tokens_per_batch_size": {1: 2}},
            "0.32.0",
            "num_speculative_tokens_per_batch_size",
        ),
    ],
)
def test_what_is_not_proven_is_refused(
    method: str, changes: dict[str, Any], version: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm, "__version__", version)
    (found,) = speculation_findings(config(method, **changes))
    assert found.verdict is Verdict.FAIL
    assert what in found.sentence
    assert found.sentence.endswith("works")


def test_what_is_known_of_a_drafter() -> None:
    assert drafter_of(config("ngram")) is None
    assert drafter_of(SimpleNamespace(speculative_config=None)) is None
    assert drafter_of(config("eagle")) == Drafter(1, 3, 4096, is_stale_at_ends=True)
    unpadded = config("mtp", disable_padded_drafter_batch=True, draft_max_model_len=None)
    assert drafter_of(unpadded) == Drafter(1, 3, 8192, is_stale_at_ends=False)
    assert drafter_of(config("draft_model")) == Drafter(0, 3, 4096, is_stale_at_ends=False)
    assert drafter_of(config("eagle", v2=True)) == Drafter(1, 3, 8195, is_stale_at_ends=False)


def refused(
    method: str | None,
    *specs: Any,
    cached: list[int] | None = None,
    verdict: Verdict = Verdict.FAIL,
    **changes: Any,
) -> list[str]:
    """The sentences of a verdict on groups of these specs; vLLM caches those in `cached`."""
    groups = [SimpleNamespace(kv_cache_spec=spec) for spec in specs]
    gids = [*range(len(groups))] if cached is None else cached
    kv_config = SimpleNamespace(kv_cache_groups=groups, prefix_cacheable_group_ids=gids)
    plain = SimpleNamespace(speculative_config=None, **NO_MATCH_UNIT)
    engine = config(method, **changes) if method else plain
    found = group_findings(kv_config, engine)
    return [finding.sentence for finding in found if finding.verdict is verdict]


def test_groups_that_drafts_cannot_be_restored_for_are_refused() -> None:
    """Recurrent ones, chunked local ones under EAGLE, and those that vLLM does not cache."""

    full = Member("full", 16).spec(1, 1)
    chunked, scratch = Member("chunked", 16, 64).spec(1, 1), Member("scratch", 16).spec(1, 1)
    recurrent = Member("recurrent", 16).spec(1, 1)
    assert refused("eagle", full, cached=[0]) == []
    assert refused(None, recurrent, scratch, full, cached=[0, 2]) == []
    assert refused("draft_model", chunked, full, cached=[0, 1]) == []
    (sentence,) = refused("eagle", chunked, full, cached=[0, 1])
    assert "vLLM 0.32 itself cannot look up group 0" in sentence
    (sentence,) = refused("draft_model", full, scratch, cached=[0])
    assert "vLLM does not cache group 1" in sentence
    (sentence,) = refused("draft_model", full, recurrent)
    assert "recurrent states under speculation is not proven yet with a drafter" in sentence


@dataclass(frozen=True)
class StatesCase:
    """An engine with recurrent states that drafts, and why it is refused; empty = it is served."""

    what: str = ""
    changes: Mapping[str, Any] = field(default_factory=dict)
    version: str = "0.32.0"
    blocks: int = 3
    has_wrong_states: bool = False


BATCH_SIZES = "num_speculative_tokens_per_batch_size"
STATES_CASES = (
    StatesCase(),
    StatesCase(changes={"architecture": "Qwen3_5ForConditionalGeneration"}, version="0.32.1"),
    StatesCase("for FalconH1ForCausalLM", {"architecture": "FalconH1ForCausalLM"}),
    StatesCase("never restored on vllm 0.33", version="0.33.0"),
    StatesCase(changes={"v2": True, "is_async": True}),
    StatesCase("never restored on vllm 0.31", {"v2": True}, version="0.31.0"),
    StatesCase("use_replayssm", blocks=0),
    StatesCase(BATCH_SIZES, {BATCH_SIZES: {1: 2}}),
    StatesCase("CPU build itself computes wrong recurrent states", has_wrong_states=True),
)


@pytest.mark.parametrize("case", STATES_CASES, ids=lambda case: f"{case.what} {[*case.changes]}")
@pytest.mark.parametrize("method", ["ngram", "mtp", "eagle"])
def test_recurrent_states_are_served_where_they_were_proven(
    method: str, case: StatesCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With and without a drafter's layers; vLLM's CPU build fails with drafts by itself."""
    monkeypatch.setattr(vllm, "__version__", case.version)
    monkeypatch.setattr(seams, "has_wrong_drafted_states", lambda: case.has_wrong_states)
    recurrent = replace(Member("recurrent", 16).spec(1, 1), num_speculative_blocks=case.blocks)
    sentences = refused(method, Member("full", 16).spec(1, 1), recurrent, **case.changes)
    assert len(sentences) == bool(case.what)
    for sentence in sentences:
        assert case.what in sentence
        assert sentence.endswith("works")


@pytest.mark.parametrize("method", ["mtp", "eagle"])
def test_a_drafter_over_recurrent_states_is_served_unpadded_or_on_the_v2_runner(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM pads for asynchronous scheduling; the V1 runner then stores no prompt of several steps.

    The V2 runner knows the prompt's next token, padded or not.
    """
    monkeypatch.setattr(vllm, "__version__", "0.32.0")
    monkeypatch.setattr(seams, "has_wrong_drafted_states", lambda: False)
    full = Member("full", 16).spec(1, 1)
    recurrent = replace(Member("recurrent", 16).spec(1, 1), num_speculative_blocks=3)
    (sentence,) = refused(method, full, recurrent, is_async=True)
    assert "asynchronous scheduling" in sentence
    assert sentence.endswith('"disable_padded_drafter_batch":true works')
    (sentence,) = refused(method, full, recurrent, verdict=Verdict.WARN)
    assert "nothing of such a prompt is restored" in sentence
    assert sentence.endswith('"disable_padded_drafter_batch":true works')
    on_v2: dict[str, Any] = {"v2": True, "is_async": True}
    assert not refused(method, full, recurrent, **on_v2)
    assert not refused(method, full, recurrent, verdict=Verdict.WARN, **on_v2)
    unpadded: dict[str, Any] = {"disable_padded_drafter_batch": True}
    assert not refused(method, full, recurrent, verdict=Verdict.WARN, **unpadded)
    sentences = refused(method, full, recurrent, verdict=Verdict.OK, **unpadded)
    assert "hits end one block lower" in sentences[-1]
    assert not refused("ngram", full, recurrent, verdict=Verdict.WARN)
    assert not refused(method, full, verdict=Verdict.WARN)
