"""What `share_tp` serves and refuses, and that engines of all sizes have one identity with it."""

import copy
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import vllm

from hybridkv.connector import connector
from hybridkv.core.errors import ConfigError
from hybridkv.core.findings import Finding, Verdict
from hybridkv.core.keys import fingerprint
from hybridkv.core.settings import Settings
from hybridkv.vllm import shards
from hybridkv.vllm.identity import identity_facts
from hybridkv.vllm.layout import Parallelism, build_geometry, worker_layout
from hybridkv.vllm.shards import rank_shards, shard_findings, shard_views, sharing_findings
from tests.engine.support import since_vllm
from tests.kv_memory import Cache, full, layers
from tests.simulation.configs import base_config
from tests.simulation.layouts import Member

pytestmark = [pytest.mark.engine, since_vllm(32, "share_tp is refused")]

HEADS, SHARDS = 4, 4
SHARED = Settings(share_tp=SHARDS, weights_identity="v1")


def identity(ranks: int, settings: Settings, heads: int = HEADS, weights: str = "") -> bytes:
    """Return the identity of an engine of so many ranks, which have all heads among them."""
    vllm_config = copy.deepcopy(base_config())
    vllm_config.parallel_config.tensor_parallel_size = ranks
    memory = Cache("LBNHC", layers("full", full(heads // ranks, 16, 4), 2)).memory()
    of_rank = settings.share_tp // ranks if settings.share_tp else 1
    own = worker_layout(memory.config, shard_views(memory.config, memory.views, of_rank)[0])
    layouts = {rank: replace(own, weights=f"{weights}{rank} of {ranks}") for rank in range(ranks)}
    parallelism = Parallelism(shards=settings.share_tp or 0)
    geometry = build_geometry(memory.config, layouts, None, parallelism)
    return fingerprint(identity_facts(vllm_config, memory.config, geometry, layouts, settings))


def test_engines_of_all_sizes_have_one_identity() -> None:
    """Each rank of them has other weights, for which the name stands."""
    assert identity(1, SHARED) == identity(2, SHARED) == identity(4, SHARED)


def test_what_is_stored_in_another_way_has_another_identity() -> None:
    others = [
        identity(1, replace(SHARED, share_tp=2)),
        identity(4, replace(SHARED, share_tp=None)),
        identity(2, replace(SHARED, share_tp=None)),
        identity(2, replace(SHARED, weights_identity="v2")),
        identity(2, SHARED, heads=8),
    ]
    assert len({identity(2, SHARED), *others}) == 6


def test_ranks_of_different_layouts_share_with_no_other_size() -> None:
    vllm_config, kinds = base_config(), []
    for heads in (1, 2):
        memory = Cache("LBNHC", layers("full", full(heads, 16, 4), 2)).memory()
        kinds.append(worker_layout(memory.config, memory.views))
    alike = {0: kinds[1], 1: kinds[1]}
    geometry = build_geometry(memory.config, alike, None, Parallelism(shards=SHARDS))

    def layers_of(*layouts: Any) -> object:
        by_rank = dict(enumerate(layouts))
        return identity_facts(vllm_config, memory.config, geometry, by_rank, SHARED)["layers"]

    assert layers_of(kinds[1]) == layers_of(kinds[1], kinds[1])
    assert layers_of(kinds[1]) != layers_of(kinds[1], kinds[0])


def engine(
    ranks: int = 1, stages: int = 1, speculation: object = None, heads: int = HEADS
) -> SimpleNamespace:
    """Return the parts of a VllmConfig that the rules read."""
    return SimpleNamespace(
        parallel_config=SimpleNamespace(
            tensor_parallel_size=ranks, pipeline_parallel_size=stages, nnodes_within_dp=1
        ),
        speculative_config=speculation,
        model_config=SimpleNamespace(get_total_num_kv_heads=lambda: heads),
    )


def refused(findings: list[Finding]) -> list[str]:
    return [finding.sentence for finding in findings if finding.verdict is Verdict.FAIL]


def test_what_is_served_has_no_complaint() -> None:
    assert [*sharing_findings(engine(), Settings())] == []
    assert [*shard_findings(None, engine(), Settings())] == []
    for ranks in (1, 2, 4):
        (finding,) = sharing_findings(engine(ranks), SHARED)
        assert finding.verdict is Verdict.OK
        assert finding.what == f"4 shards of KV heads, {SHARDS // ranks} on each of {ranks} ranks"


@pytest.mark.parametrize(
    ("vllm_config", "settings", "sentence"),
    [
        (
            engine(3),
            SHARED,
            'share_tp=4 is no multiple of tensor_parallel_size 3; "share_tp": 3 works',
        ),
        (
            engine(8),
            SHARED,
            'share_tp=4 is no multiple of tensor_parallel_size 8; "share_tp": 8 works',
        ),
        (
            engine(stages=2),
            SHARED,
            "share_tp is not supported yet with 2 pipeline stages on 1 nodes; "
            "leaving share_tp out works",
        ),
        (
            engine(2),
            replace(SHARED, nodes=2),
            "share_tp is not supported yet with 1 pipeline stages on 2 nodes; "
            "leaving share_tp out works",
        ),
        (
            engine(speculation=object()),
            SHARED,
            "share_tp is not proven with speculation; leaving share_tp out works",
        ),
    ],
    ids=["3 ranks", "8 ranks", "stages", "nodes", "speculation"],
)
def test_what_is_refused_names_the_setting_that_works(
    vllm_config: Any, settings: Settings, sentence: str
) -> None:
    assert refused([*sharing_findings(vllm_config, settings)]) == [sentence]


def test_earlier_versions_and_shards_of_a_gpu_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(shards, "current_platform", SimpleNamespace(device_type="cuda"))
        (sentence,) = refused([*sharing_findings(engine(2), SHARED)])
        assert sentence == (
            'share_tp=4 was never tried with 2 shards on each rank of cuda; "share_tp": 2 works'
        )
        assert refused([*sharing_findings(engine(4), SHARED)]) == []
    monkeypatch.setattr(vllm, "__version__", "0.31.1")
    (sentence,) = refused([*sharing_findings(engine(), SHARED)])
    assert sentence.startswith("share_tp is not supported yet on vllm 0.31.1;")


@pytest.mark.parametrize(
    ("member", "heads", "ranks", "sentence"),
    [
        (Member("recurrent", 16), 1, 1, "by rules of its own"),
        (Member("full", 16), 2, 1, "each rank has 2 KV heads for 4 shards"),
        (Member("sliding", 16, 64), 1, 2, "each rank has 1 KV heads for 2 shards"),
        (Member("full", 16), 1, 4, "4 ranks have copies of 2 KV heads"),
    ],
    ids=["states", "few heads", "few heads of a rank", "copies of heads"],
)
def test_groups_that_cannot_be_split_are_refused(
    member: Member, heads: int, ranks: int, sentence: str
) -> None:
    group = SimpleNamespace(kv_cache_spec=member.spec(1, heads))
    kv_config = SimpleNamespace(kv_cache_groups=[group], prefix_cacheable_group_ids=[0])
    vllm_config = engine(ranks, heads=2)
    (found,) = refused([*shard_findings(kv_config, vllm_config, SHARED)])
    assert found.startswith("share_tp=4: group 0 cannot be split by heads, because")
    assert sentence in found
    assert found.endswith("; leaving share_tp out works")
    assert rank_shards(kv_config, vllm_config, SHARED) == 1


@pytest.mark.parametrize("what", ["full", "mla"])
def test_groups_that_can_be_split_or_need_not_be_are_served(what: str) -> None:
    group = SimpleNamespace(kv_cache_spec=Member(what, 16).spec(1, HEADS))
    kv_config = SimpleNamespace(kv_cache_groups=[group], prefix_cacheable_group_ids=[0])
    (finding,) = shard_findings(kv_config, engine(), SHARED)
    assert finding.verdict is Verdict.OK
    assert rank_shards(kv_config, engine(2), SHARED) == 2


def test_the_connector_raises_the_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connector, "config_findings", lambda vllm_config: [])
    monkeypatch.setattr(connector, "group_findings", lambda kv_config, vllm_config: [])
    monkeypatch.setattr(connector, "settings_of", lambda vllm_config: SHARED)
    group = SimpleNamespace(kv_cache_spec=Member("recurrent", 16).spec(1, 1))
    kv_config = SimpleNamespace(kv_cache_groups=[group], prefix_cacheable_group_ids=[0])
    with pytest.raises(ConfigError, match="recurrent state among ranks by rules of its own"):
        connector.check_config(engine(), kv_config)
