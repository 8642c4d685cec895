"""Statistics on their way to /metrics: nothing is lost, nothing goes down, nothing raises."""

import functools
import re
from collections import Counter
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import prometheus_client
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridkv.connector.metrics import (
    ATTACH_FAILED,
    BYTES_LOADED,
    LOOKUPS_HIT,
    TOKENS_LOADED,
    declined,
    loaded_from,
)
from hybridkv.core.audit import AuditOutcome
from hybridkv.core.metrics import Metric
from hybridkv.vllm.hook_guard import fault
from hybridkv.wire.messages import Decline
from tests.chance import examples

pytestmark = pytest.mark.engine

SOURCE = Path(__file__).parents[3] / "src" / "hybridkv"
FAMILY_NAMES = st.sampled_from(("lookup_wait_seconds", "load_seconds"))
FROM_DISK, LATE_ROOM = loaded_from("disk"), declined(Decline.LATE_ROOM)
COUNTERS = (LOOKUPS_HIT, LATE_ROOM, FROM_DISK, TOKENS_LOADED, BYTES_LOADED, ATTACH_FAILED)
NOTHING: dict[str, Any] = {"counters": {}, "gauges": {}, "observed": {}}
"""A payload without numbers."""


def counted(metric: Metric, number: float = 1) -> dict[str, Any]:
    """Return a payload with one counter."""
    return NOTHING | {"counters": {metric: number}}


class Scraped:
    """Our metrics in a registry of their own."""

    def __init__(
        self,
        engines: dict[int, list[object]],
        names: tuple[str, ...] = ("model_name", "engine"),
        histogram: type[prometheus_client.Histogram] = prometheus_client.Histogram,
    ) -> None:
        from hybridkv.connector import HybridKVConnector

        self.registry = prometheus_client.CollectorRegistry()
        kinds = (prometheus_client.Counter, prometheus_client.Gauge, prometheus_client.Histogram)
        types: Any = {kind: functools.partial(kind, registry=self.registry) for kind in kinds}
        types[prometheus_client.Histogram] = functools.partial(histogram, registry=self.registry)
        config = SimpleNamespace(kv_transfer_config=None)
        self.metrics = HybridKVConnector.build_prom_metrics(config, types, list(names), engines)

    def values(self) -> dict[tuple[str, ...], float]:
        """By name and the values of the labels, sorted by the labels' names."""
        return {
            (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
            for family in self.registry.collect()
            for sample in family.samples
            if not sample.name.endswith("_created")
        }

    def total(self, name: str, **labels: str) -> float:
        """The sum over all other labels."""
        return sum(
            sample.value
            for family in self.registry.collect()
            for sample in family.samples
            if sample.name == f"vllm:hybridkv_{name}" and labels.items() <= sample.labels.items()
        )


def one_engine() -> Scraped:
    return Scraped({0: ["m", "0"]})


Step = tuple[list[tuple[Metric, int]], list[tuple[str, float]], int, bool]
STEPS = st.lists(
    st.tuples(
        st.lists(st.tuples(st.sampled_from(COUNTERS), st.integers(0, 1000)), max_size=4),
        st.lists(st.tuples(FAMILY_NAMES, st.floats(0, 100)), max_size=3),
        st.integers(0, 3),
        st.booleans(),
    ),
    max_size=25,
)


@settings(max_examples=examples(25))
@given(STEPS)
def test_any_sequence_of_steps_and_aggregations_gives_the_same_totals(steps: list[Step]) -> None:
    """As vLLM does: it may add some up before they are encoded, decoded and exported."""
    from vllm.v1.metrics.stats import SchedulerStats
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    from hybridkv.connector import HybridKVConnector
    from hybridkv.connector.stats import HybridKVStats
    from hybridkv.vllm.prometheus import StatsCollector

    counters: Counter[Metric] = Counter()
    meter, scraped = StatsCollector(), one_engine()
    observed: Counter[str] = Counter()
    kept: HybridKVStats | None = None
    interval = HybridKVStats()
    before = scraped.values()
    last: Step = ([], [], steps[-1][2] if steps else 0, True)
    for counts, seen, gauge, is_sent in [*steps, last]:
        for metric, added in counts:
            counters[metric] += added
        for name, value in seen:
            meter.add_observation(name, value)
            observed[name] += 1
        fresh = meter.take_payload(counters, {Metric("loads_pending"): gauge})
        if fresh is not None:
            kept = (kept or HybridKVStats()).aggregate(HybridKVStats(fresh))
            assert not kept.is_empty()
        if kept is None or not is_sent:
            continue
        frames = MsgpackEncoder().encode(SchedulerStats(kv_connector_stats=kept.to_dict()))
        payload = MsgpackDecoder(SchedulerStats).decode(frames).kv_connector_stats
        kept = None
        scraped.metrics.observe(payload, 0)
        travelled = HybridKVConnector.build_kv_connector_stats(payload)
        assert isinstance(travelled, HybridKVStats)
        interval = interval.aggregate(travelled)
        after = scraped.values()
        assert all(
            after[name] >= value for name, value in before.items() if "pending" not in name[0]
        )
        before = after
    again = meter.take_payload(counters, {Metric("loads_pending"): last[2]})
    assert again is None, "nothing is told twice"
    assert interval.counters == {metric: value for metric, value in counters.items() if value}
    assert {name: len(values) for (name, _), values in interval.observed.items()} == observed
    assert scraped.total("loaded_tokens_total") == counters[TOKENS_LOADED]
    assert scraped.total("loaded_tokens_by_tier_total", tier="disk") == counters[FROM_DISK]
    assert scraped.total("lookups_total", result="hit") == counters[LOOKUPS_HIT]
    assert scraped.total("lookups_total", reason="late_room") == counters[LATE_ROOM]
    assert scraped.total("load_bytes_total") == counters[BYTES_LOADED]
    assert scraped.total("events_total", event="attach_failed") == counters[ATTACH_FAILED]
    for name, count in observed.items():
        assert scraped.total(f"{name}_count") == count
    assert scraped.total("loads_pending") == last[2]
    line = interval.reduce()
    assert line["Lookup hits"] == counters[LOOKUPS_HIT]
    assert line.get("from disk", 0) == counters[FROM_DISK]
    interval.reset()
    assert interval.is_empty()


@pytest.mark.parametrize(
    "payload",
    [
        None,
        {},
        {"counters": [["loads", ["failed"], 1]], "gauges": {}, "observed": {}},
        counted(Metric("loads", ("loaded",)), -1),
        counted(Metric("loads")),
        counted(Metric("no_such")),
        counted(Metric("breaker_open"), -1) | {"gauges": {Metric("loads"): 1}},
        NOTHING | {"observed": {Metric("load_seconds"): ["long"]}},
    ],
    ids=repr,
)
def test_a_payload_that_cannot_be_read_is_counted_and_raises_nothing(payload: Any) -> None:
    from hybridkv.connector import HybridKVConnector

    scraped = one_engine()
    scraped.metrics.observe(counted(LOOKUPS_HIT, 2), 0)
    HybridKVConnector.build_kv_connector_stats(payload)
    scraped.metrics.observe(payload, 0)
    scraped.metrics.observe(counted(LOOKUPS_HIT), 7)
    assert scraped.total("events_total", event="stats_malformed") == 2, "one is of no known engine"
    assert scraped.total("lookups_total", result="hit") == 2
    assert scraped.total("loads_total") == 0


def test_a_metric_that_raises_is_counted_and_ends_nothing() -> None:
    """vLLM gives the classes; the API server goes on."""

    class FullDisk(prometheus_client.Histogram):
        def observe(self, amount: float, exemplar: dict[str, str] | None = None) -> None:
            raise OSError("no space left on device")

    scraped = Scraped({0: ["m", "0"], 1: ["m", "1"]}, histogram=FullDisk)
    for engine in (0, 1, 1):
        scraped.metrics.observe(NOTHING | {"observed": {Metric("load_seconds"): [1.0]}}, engine)
    assert scraped.total("events_total", event="stats_malformed", engine="0") == 1
    assert scraped.total("events_total", event="stats_malformed", engine="1") == 2


def test_engines_are_told_apart_under_the_labels_that_are_given() -> None:
    """As a MultiConnector gives them: one label more."""
    engines: dict[int, list[object]] = {0: ["m", "0", "ours"], 3: ["m", "3", "ours"]}
    scraped = Scraped(engines, ("model_name", "engine", "connector"))
    resets = fault("reset_cache")
    scraped.metrics.observe(counted(resets, 2) | {"gauges": {Metric("breaker_open"): 1}}, 3)
    scraped.metrics.observe(counted(resets, 5), 0)
    assert scraped.total("faults_total", engine="3", connector="ours", hook="reset_cache") == 2
    assert scraped.total("faults_total", engine="0", connector="ours", hook="reset_cache") == 5
    assert scraped.total("breaker_open", engine="3") == 1
    assert scraped.total("breaker_open", engine="0") == 0


def test_labels_from_outside_are_bounded() -> None:
    from hybridkv.vllm.prometheus import LABELS_MAX

    scraped = one_engine()
    for number in range(3 * LABELS_MAX):
        scraped.metrics.observe(counted(loaded_from(f"t{number}")), 0)
    tiers = {
        name[-1]
        for name in scraped.values()
        if name[0] == "vllm:hybridkv_loaded_tokens_by_tier_total"
    }
    assert len(tiers) == LABELS_MAX + 1
    assert scraped.total("loaded_tokens_by_tier_total", tier="other") == 2 * LABELS_MAX
    assert scraped.total("loaded_tokens_by_tier_total") == 3 * LABELS_MAX


def constants(module: ModuleType) -> list[Metric]:
    """Return the counters that are constants of a module."""
    return [value for value in vars(module).values() if isinstance(value, Metric)]


def counters() -> set[Metric]:
    """Return all counters of the connector. A label of any value is `*`."""
    from hybridkv.connector import metrics
    from hybridkv.vllm import hook_guard

    open_sets = (
        *(fault, metrics.hits_limited, loaded_from),
        *(metrics.daemon_refused, metrics.daemon_unsent, metrics.hinted),
    )
    return {
        *(metric for module in (metrics, hook_guard) for metric in constants(module)),
        *map(metrics.stores_shed, metrics.Shed),
        *map(metrics.audited, AuditOutcome),
        *map(declined, Decline),
        *(counter("*") for counter in open_sets),
    }


def test_every_counter_has_a_family_and_its_labels() -> None:
    from hybridkv.connector.metrics import FAMILIES

    known = counters()
    for family, labels in known:
        assert FAMILIES[family].kind == "counter"
        assert len(labels) == len(FAMILIES[family].labels)
        assert all(labels)
    families = {name for name, family in FAMILIES.items() if family.kind == "counter"}
    assert {metric.family for metric in known} == families


def test_every_counter_is_counted_somewhere() -> None:
    from hybridkv.connector import metrics

    paths = [path for path in (SOURCE / "connector").rglob("*.py") if path.name != "metrics.py"]
    source = "".join(path.read_text() for path in paths)
    used = set(re.findall(r"\w+", source))
    names = {name for name, value in vars(metrics).items() if isinstance(value, Metric)}
    assert len(names) == len({*constants(metrics)}), "two names for one counter"
    assert names - used <= {"PLAN_FAILED"}, "`declined` counts it"
    assert set(re.findall(r"Shed\.(\w+)", source)) == {reason.name for reason in metrics.Shed}


@given(
    by_tier=st.dictionaries(
        st.sampled_from(("ram", "disk", "disk2", "s3", "s32", "valkey", "mooncake")),
        st.integers(-3, 500),
    ),
    excess=st.sampled_from((0, 0, 0, 1, -1)),
)
def test_sources_make_up_what_is_loaded(by_tier: dict[str, int], excess: int) -> None:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

    from hybridkv.connector.connector import hit_sources

    tokens = max(0, sum(by_tier.values()) + excess)
    sources = hit_sources(by_tier, tokens)
    assert sum(sources.values()) == tokens
    assert all(part > 0 for part in sources.values())
    if sum(by_tier.values()) == tokens and min(by_tier.values(), default=0) >= 0:
        disk = sum(by_tier.get(tier, 0) for tier in ("disk", "disk2", "s3", "s32"))
        assert sources.get(CacheHitSource.DISK, 0) == disk
        assert sources.get(CacheHitSource.HOST, 0) == by_tier.get("ram", 0)
        assert sources.get(CacheHitSource.P2P, 0) == by_tier.get("mooncake", 0)


def test_a_worker_tells_its_own_faults_once(tmp_path: Path) -> None:
    """The scheduler role exports them; a plan that is nonsense makes one."""
    from hybridkv.connector.messages import LoadPlan, StepPlan
    from tests.simulation.configs import Shape, config_of
    from tests.simulation.engine import Rank
    from tests.simulation.layouts import LAYOUTS, ON_CPU

    settings: dict[str, object] = {"weights_identity": "simulated"}
    loads = {"r": LoadPlan("", ())}
    shape = Shape(LAYOUTS["full"], 8, 256, 64, 2, None, 1, ON_CPU, settings)
    rank = Rank(shape, config_of(shape, f"{tmp_path}/none.sock", "e"), 0)
    rank.register()
    connector = rank.connector
    for faults in (1, 2):
        plan = StepPlan(reserved_bytes=None, loads=loads)  # type: ignore[arg-type]
        connector.bind_connector_metadata(plan)
        connector.start_load_kv(None)
        report = connector.build_connector_worker_meta()
        assert report is not None
        assert report.counters.get(fault("start_load_kv")) == 1
        assert connector.counters[fault("start_load_kv")] == faults
        assert connector.get_transfer_results(set()).failed_recving == {"r"}
        assert connector.get_kv_connector_stats() is None
    report = connector.build_connector_worker_meta()
    assert report is not None
    assert fault("start_load_kv") not in report.counters
    connector.shutdown()
