"""What vLLM computes wrongly by itself is refused, by version and setting."""

from types import SimpleNamespace

import pytest
import vllm

from hybridkv.core.findings import Verdict
from hybridkv.core.settings import parse_settings
from hybridkv.vllm.preflight import group_findings, weights_findings
from tests.simulation.layouts import Member


@pytest.mark.parametrize(
    ("version", "unit", "is_async", "is_refused"),
    [
        ("0.30.0", 8, True, True),
        ("0.31.2", 8, True, True),
        ("0.30.0", 8, False, False),
        ("0.30.0", 16, True, False),
        ("0.30.0", None, True, False),
        ("0.32.0", 8, True, False),
    ],
)
def test_states_that_vllm_names_twice_are_refused(
    version: str,
    unit: int | None,
    is_async: bool,
    is_refused: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With asynchronous scheduling vLLM 0.30 copies a later state under a match unit's name."""
    monkeypatch.setattr(vllm, "__version__", version)
    specs = Member("full", 16).spec(1, 1), Member("recurrent", 16).spec(1, 1)
    groups = [SimpleNamespace(kv_cache_spec=spec) for spec in specs]
    config = SimpleNamespace(kv_cache_groups=groups, prefix_cacheable_group_ids=[0, 1])
    engine = SimpleNamespace(
        speculative_config=None,
        cache_config=SimpleNamespace(prefix_match_unit=unit),
        scheduler_config=SimpleNamespace(async_scheduling=is_async),
    )
    findings = group_findings(config, engine)
    failures = [finding for finding in findings if finding.verdict is Verdict.FAIL]
    assert len(failures) == is_refused
    for finding in failures:
        assert "itself caches wrong recurrent states" in finding.sentence
        assert finding.sentence.endswith("--no-async-scheduling works")


@pytest.mark.parametrize(
    ("options", "settings", "checks"),
    [
        ({}, {}, []),
        ({"enable_eplb": True}, {}, ["expert load balancing"]),
        ({"data_parallel_size": 2}, {}, ["weights"]),
        ({"data_parallel_size": 2}, {"weights_identity": "m"}, []),
        ({"data_parallel_size": 2, "is_moe_model": False}, {}, []),
    ],
)
def test_weights_that_move_or_that_replicas_share_have_a_warning(
    options: dict[str, object], settings: dict[str, object], checks: list[str]
) -> None:
    parallel = SimpleNamespace(
        **{"enable_eplb": False, "data_parallel_size": 1, "is_moe_model": True, **options},
        eplb_config=SimpleNamespace(step_interval=3000),
    )
    findings = [*weights_findings(parallel, parse_settings(settings))]
    assert [finding.check for finding in findings] == checks
    assert all(
        finding.verdict is Verdict.WARN and "works" in finding.remedy for finding in findings
    )
