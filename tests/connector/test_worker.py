"""The worker role's part in what goes wrong; its copies are in tests/connector/test_copier.py."""

from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.engine


class Broken:
    """A copier whose stores raise; its loads are good."""

    def store(self, ops: Any, done: Any) -> None:
        """Never."""
        raise RuntimeError("a device's error")

    def load(self, ops: Any, done: Any) -> None:
        """At once."""
        done(None)

    def close(self) -> None:
        """Nothing to free."""


def test_a_worker_that_is_switched_off_fails_every_load_and_offers_nothing() -> None:
    """Also the load of a request that was loaded in the very step that switched it off, and came again."""
    from hybridkv.connector.hybrid import HybridKVConnector
    from hybridkv.connector.metadata import LoadPlan, StepPlan
    from hybridkv.connector.stats import Deltas
    from hybridkv.connector.supervise import FAULTS_MAX, Supervisor
    from hybridkv.connector.worker import WorkerSide
    from hybridkv.core.plans import CopyRun, Span

    config: Any = SimpleNamespace(kv_cache_groups=[], prefix_cacheable_group_ids=[])
    worker: Any = WorkerSide(config, "/nowhere/daemon.sock", "e", 0, 1, "on")
    worker._copiers["b"], worker._boot = (None, Broken()), "b"
    connector: Any = HybridKVConnector.__new__(HybridKVConnector)
    connector._supervisor = Supervisor("worker")
    connector._uncounted = Deltas(connector._supervisor.counters)
    connector._worker, connector._scheduler = worker, None

    def step(plan: Any) -> tuple[Any, Any]:
        connector._connector_metadata = plan
        connector.start_load_kv(None)
        connector.wait_for_save()
        done = connector.get_transfer_results(set())
        return done.finished_recving, done.failed_recving

    load = LoadPlan("b", ())
    for number in range(1, FAULTS_MAX + 1):
        assert connector.build_connector_worker_meta().boots == {"b": 1}
        run = CopyRun(Span(0, 0, 1, (1,)), bytes(8), bytes(8))
        assert step(StepPlan(boot="b", session=1, loads={"a": load}, stores={number: run})) == ({"a"}, set())
    assert not connector._supervisor.healthy
    assert connector.build_connector_worker_meta().boots == {}
    assert step(StepPlan(boot="b", session=1, loads={"a": load, "b": load})) == ({"a", "b"}, {"a", "b"})
