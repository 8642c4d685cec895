"""Statistics of MultiConnector and of its children, as far as Prometheus."""

import random
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client import Counter as PromCounter
from prometheus_client import Gauge as PromGauge
from prometheus_client import Histogram as PromHistogram

pytestmark = pytest.mark.engine

pytest.importorskip("vllm")

from hybridkv.core.metrics import Metric  # noqa: E402
from hybridkv.multi.metrics import LOADS_GIVEN_UP, of_child, stats_fault  # noqa: E402
from hybridkv.multi.stats import OWN, MultiKVConnectorStats, OwnStats  # noqa: E402
from hybridkv.vllm.hook_guard import QUARANTINED  # noqa: E402
from tests.unit.multi.multiengine import HIT, MultiEngine, child, hybrid, prompt, upto  # noqa: E402
from tests.unit.multi.scripted import Script, ScriptedError, ScriptedStats  # noqa: E402


def own(counters: dict[Metric, int]) -> dict[str, Any]:
    """MultiConnector's own part of a payload."""
    return {OWN: OwnStats({"counters": counters}).to_dict()}


def metrics_of(config: Any, registry: CollectorRegistry, engines: int = 1) -> Any:
    """MultiConnector's metrics in a registry of their own."""
    from hybridkv.connector import MultiConnector

    def kind(metric: Any) -> Any:
        return lambda *args, multiprocess_mode=None, **kwargs: metric(
            *args, registry=registry, **kwargs
        )

    types = {
        PromCounter: kind(PromCounter),
        PromGauge: kind(PromGauge),
        PromHistogram: kind(PromHistogram),
    }
    labels: dict[int, list[object]] = {engine: ["model", str(engine)] for engine in range(engines)}
    return MultiConnector.build_prom_metrics(config, types, ["model_name", "engine"], labels)


def test_statistics_reach_prometheus(rng: random.Random) -> None:
    """Through msgpack, as between processes; two children of one class, and one without metrics."""
    from hybridkv.connector import MultiConnector

    scripts = [Script(tokens=upto(HIT), load_steps=2), Script(tokens=upto(48)), Script()]
    entries = [
        child(scripts[0], name="a"),
        child(scripts[1], name="b"),
        child(scripts[2], "Unmeasured"),
    ]
    engine = MultiEngine(entries, hybrid())
    registry = CollectorRegistry()
    metrics = metrics_of(engine.scheduler.vllm_config, registry, engines=2)
    for _ in range(3):
        engine.add(prompt(rng))
    pending = []
    while engine.scheduler.has_requests():
        engine.payloads.clear()
        engine.step()
        for payload in engine.payloads:
            travelled = msgspec.msgpack.decode(msgspec.msgpack.encode(payload))
            metrics.observe(travelled, 1)
            stats = MultiConnector.build_kv_connector_stats(travelled)
            assert not stats.is_empty()
            assert stats.aggregate(MultiConnector.build_kv_connector_stats(travelled)).reduce()
        pending.append(
            registry.get_sample_value("vllm:kv_connector_mc_pending_loads", labels_of("a"))
        )
    assert {3.0, 0.0} <= set(pending)

    def value(name: str, connector: str) -> float | None:
        return registry.get_sample_value(f"vllm:{name}", labels_of(connector))

    assert [value("kv_connector_mc_queries_total", name) for name in ("a", "b", "Unmeasured")] == [
        3,
        3,
        3,
    ]
    assert [value("kv_connector_mc_hits_total", name) for name in ("a", "b", "Unmeasured")] == [
        3,
        0,
        0,
    ]
    assert [value("kv_connector_mc_hit_tokens_total", name) for name in ("a", "b")] == [3 * HIT, 0]
    assert [value("kv_connector_mc_misses_total", name) for name in ("a", "b", "Unmeasured")] == [
        0,
        0,
        3,
    ]
    assert [value("scripted_asked_total", name) for name in ("a", "b", "Unmeasured")] == [
        3,
        3,
        None,
    ]
    assert engine.totals["hits"] == 3 * HIT
    assert 'engine="0"' in generate_latest(registry).decode(), "the other engine has its own, at 0"


def labels_of(connector: str) -> dict[str, str]:
    return {"model_name": "model", "engine": "1", "connector": connector}


def test_what_else_was_counted_reaches_prometheus() -> None:
    from hybridkv.connector import MultiConnector

    engine = MultiEngine([child(Script(), name="a"), child(Script(), name="b")], hybrid())
    registry = CollectorRegistry()
    metrics = metrics_of(engine.scheduler.vllm_config, registry, engines=2)
    payload = own({of_child("a", QUARANTINED): 1, of_child("", LOADS_GIVEN_UP): 2})
    stats = MultiConnector.build_kv_connector_stats(payload)
    both = stats.aggregate(MultiConnector.build_kv_connector_stats(payload))
    assert both.reduce() == {"own": {"a quarantined": 2, "loads_given_up": 4}}
    metrics.observe(both.to_dict(), 1)
    shown = {
        (sample.labels["connector"], sample.labels["event"]): sample.value
        for family in registry.collect()
        for sample in family.samples
        if sample.name == "vllm:kv_connector_mc_events_total"
    }
    assert shown == {("a", "quarantined"): 2, ("", "loads_given_up"): 4}


def test_statistics_never_raise(rng: random.Random) -> None:
    from hybridkv.connector import MultiConnector

    engine = MultiEngine([child(Script(), name="a"), child(Script(), name="b")], hybrid())
    metrics = metrics_of(engine.scheduler.vllm_config, CollectorRegistry())
    for payload in (
        own({Metric("hits", ("a",)): -5}),
        {OWN: 3, "a": {"asked": -1}, "b": {}, "c": 7},
        {"a": {"asked": 1}, "__classes__": {"a": "os:path"}},
        {"a": {"asked": 1}, "__classes__": {"a": "no.such:Thing"}},
    ):
        metrics.observe(payload, 0)
        MultiConnector.build_kv_connector_stats(payload).aggregate(
            MultiConnector.build_kv_connector_stats({})
        ).reduce()
    assert MultiConnector.build_kv_connector_stats(None).is_empty()
    registry = CollectorRegistry()
    PromCounter("vllm:scripted_asked", "Another's.", registry=registry)
    metrics_of(engine.scheduler.vllm_config, registry).observe({"a": {"asked": 1}}, 0)


class FaultyStats(ScriptedStats):
    """A child's statistics of which one method raises."""

    def __init__(self, method: str) -> None:
        super().__init__({"asked": 1})
        setattr(self, method, self._raise)

    def aggregate(self, later: Any) -> "FaultyStats":
        return self

    def _raise(self, *arguments: Any) -> Any:
        raise ScriptedError("statistics")


@pytest.mark.parametrize("method", ["to_dict", "aggregate"])
def test_a_fault_of_a_childs_statistics_travels_with_the_others(method: str) -> None:
    """In the engine's process: it is counted among the child's events."""
    stats = MultiKVConnectorStats({"bad": FaultyStats(method), "good": ScriptedStats({"asked": 2})})
    later = MultiKVConnectorStats({name: ScriptedStats({"asked": 3}) for name in ("bad", "good")})
    payload = stats.aggregate(later).to_dict()
    assert payload[OWN]["counters"] == {stats_fault("bad"): 1}
    assert payload["good"] == {"asked": 5}
    assert payload.get("bad") == ({"asked": 1} if method == "aggregate" else None)
    assert stats.reduce()["own"] == {"bad fault_stats": 1}


def test_a_fault_of_a_childs_statistics_in_the_server_is_counted_at_once() -> None:
    """While the metrics are made it counts for every engine, later for the one observed."""
    engine = MultiEngine([child(Script(), name="a"), child(Script(), name="b")], hybrid())
    registry = CollectorRegistry()
    metrics = metrics_of(engine.scheduler.vllm_config, registry, engines=2)

    def faults(connector: str, engine: int) -> float | None:
        labels = {"model_name": "model", "engine": str(engine), "connector": connector}
        name = "vllm:kv_connector_mc_events_total"
        return registry.get_sample_value(name, {**labels, "event": "fault_stats"})

    payloads: list[Any] = [{"a": {}}, {OWN: 3}, {OWN: {"a": 7}}]
    for payload in (*payloads, {"b": {"asked": 1}}):
        metrics.observe(payload, 1)
    metrics.observe({"a": {}}, 7)
    assert [faults("a", 1), faults("", 1), faults("b", 1)] == [1, 2, None]
    assert faults("a", 0) == 1, "that of an engine that nobody knows"
    registry = CollectorRegistry()
    PromCounter("vllm:scripted_asked", "Another's.", registry=registry)
    metrics_of(engine.scheduler.vllm_config, registry, engines=2)
    assert [faults(name, number) for name in ("a", "b") for number in (0, 1)] == [1] * 4
    stats = MultiKVConnectorStats.restored({"a": {"asked": 1}, **own({stats_fault("a"): 2})})
    assert stats.reduce()["own"] == {"a fault_stats": 3}, "its class is not named"


@pytest.mark.parametrize(
    "sources", [{"host": 90, "disk": 7}, {"host": 100, "disk": -4}, {"moon": HIT}, {1: 2}]
)
def test_sources_that_do_not_add_up_are_unknown(
    sources: dict[Any, int], rng: random.Random
) -> None:
    engine = MultiEngine([child(Script(tokens=upto(HIT), sources=sources))], hybrid())
    engine.serve(prompt(rng))
    assert engine.totals["CacheHitSource.EXTERNAL_UNSPECIFIED"] == HIT
