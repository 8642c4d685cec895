"""What the worker role does when something fails; test_copier.py tests its copies."""

from types import SimpleNamespace
from typing import Any

import pytest

from hybridkv.connector.metrics import COPIES_UNPINNED, LOADS_OTHER_ADAPTER, Shed, stores_shed
from hybridkv.core.packed import SLOT_BYTES
from tests.packing import packed_slots

pytestmark = pytest.mark.engine


class Broken:
    """A copier whose stores raise; its loads are good."""

    def store(self, ops: Any, done: Any) -> None:
        raise RuntimeError("a device's error")

    def load(self, ops: Any, done: Any) -> None:
        done(None)

    def close(self) -> None:
        pass


def worker_role(
    rank: int = 0, ranks: int = 1, stages: int = 1, shards: int = 0, replicated: bool = False
) -> Any:
    """Return the role of a worker that no daemon answers, before its tensors are registered.

    It has no groups, or one that is `replicated`.
    """
    from hybridkv.connector.worker.role import WorkerRole
    from hybridkv.connector.worker.worker_settings import WorkerSettings
    from tests.simulation.layouts import Member

    groups = [SimpleNamespace(kv_cache_spec=Member("mla", 16).spec(1, 1))] if replicated else []
    gids = list(range(len(groups)))
    config: Any = SimpleNamespace(kv_cache_groups=groups, prefix_cacheable_group_ids=gids)
    settings = WorkerSettings(
        socket_path="/nowhere/daemon.sock",
        engine_id="e",
        rank=rank,
        ranks=ranks,
        checksum="on",
        stages=stages,
        shards=shards,
    )
    return WorkerRole(config, settings)


def test_a_worker_that_cannot_read_its_layers_tells_the_other_stages() -> None:
    """They wait for it, and would wait until vLLM ends them."""
    from hybridkv.core.errors import GeometryError

    exchanged: list[Any] = []
    role = worker_role(ranks=2, stages=2)
    role.exchange = exchanged.append
    with pytest.raises(GeometryError, match="no layer whose KV cache can be restored"):
        role.register_tensors({})
    assert exchanged == [None]


def map_arena(role: Any, copier: Any) -> None:
    """Let the worker have the arena of the daemon's life "b", with this copier."""
    from hybridkv.connector.worker.copier_factory import MappedArena

    arena: Any = None
    role.mapped["b"], role.boot = MappedArena(arena, copier), "b"


def test_a_worker_that_is_switched_off_fails_every_load_and_offers_nothing() -> None:
    """The same request may have been loaded in the step that switched the role off."""
    from hybridkv.connector.connector import HybridKVConnector
    from hybridkv.connector.messages import LoadPlan, StepPlan, StepReport
    from hybridkv.core.copies import CopyRun, ObjectSpan
    from hybridkv.vllm.hook_guard import FAULTS_MAX, HookGuard
    from hybridkv.vllm.prometheus import Increments

    worker = worker_role()
    map_arena(worker, Broken())
    connector: Any = HybridKVConnector.__new__(HybridKVConnector)
    connector.guard = HookGuard("worker")
    connector.uncounted = Increments()
    connector.worker_role, connector.scheduler_role = worker, None

    def step(plan: Any) -> tuple[Any, Any]:
        connector._connector_metadata = plan
        connector.start_load_kv(None)
        connector.wait_for_save()
        done = connector.get_transfer_results(set())
        return done.finished_recving, done.failed_recving

    load = LoadPlan("b", ())
    for number in range(1, FAULTS_MAX + 1):
        assert connector.build_connector_worker_meta().boots == {"b": 1}
        run = CopyRun(ObjectSpan(0, 0, 1, (1,)), bytes(SLOT_BYTES))
        assert step(StepPlan(boot="b", session=1, loads={"a": load}, stores={number: run})) == (
            {"a"},
            set(),
        )
    assert not connector.guard.is_on
    report = connector.build_connector_worker_meta()
    assert report.boots == {}
    assert report.aggregate(StepReport()).is_disabled
    assert StepReport().aggregate(report).is_disabled
    assert step(StepPlan(boot="b", session=1, loads={"a": load, "b": load})) == (
        {"a", "b"},
        {"a", "b"},
    )


def test_tickets_that_cannot_be_divided_by_nodes_fail_the_load_and_raise_nothing() -> None:
    from hybridkv.connector.connector import HybridKVConnector
    from hybridkv.connector.messages import LoadPlan, NodePlans, NodeShare, StepPlan
    from hybridkv.core.copies import CopyRun, ObjectSpan
    from hybridkv.vllm.hook_guard import HookGuard, fault

    worker = worker_role()
    map_arena(worker, Broken())
    connector: Any = HybridKVConnector.__new__(HybridKVConnector)
    connector.guard, connector.worker_role = HookGuard("worker"), worker
    run = CopyRun(ObjectSpan(0, 0, 1, (1,)), bytes(SLOT_BYTES))
    plan = StepPlan(loads={"a": LoadPlan("c", (run,))}, stores={1: run})
    shares = (NodeShare("b", 0, None), NodeShare("d", 0, None))
    connector._connector_metadata = NodePlans(plan, "c", shares)
    connector.start_load_kv(None)
    connector.wait_for_save()
    done = connector.get_transfer_results(set())
    assert (done.finished_recving, done.failed_recving) == ({"a"}, {"a"})
    counters = connector.guard.counters
    assert (counters[fault("start_load_kv")], counters[fault("wait_for_save")]) == (1, 1)
    assert worker.take_step_report().unstored == {1: {0}}


def test_of_a_run_with_a_null_block_only_the_objects_without_it_are_stored() -> None:
    """The scheduler looked at the ends of the run alone."""
    from hybridkv.connector.messages import StepPlan
    from hybridkv.core.copies import NULL_BLOCK, CopyRun, ObjectSpan

    copied: list[Any] = []

    class Storing(Broken):
        def store(self, ops: Any, done: Any) -> None:
            for op in ops:
                copied.append(op)
                done(op, True)

    worker = worker_role()
    map_arena(worker, Storing())
    slots = packed_slots([10, 20, 30])
    run = CopyRun(ObjectSpan(0, 4, 2, [5, 6, 7, NULL_BLOCK, 8, 9]), slots)
    worker.start_stores(StepPlan(boot="b", session=1, stores={1: run}))
    assert [(op.chunk, op.blocks) for op in copied] == [(4, (5, 6)), (6, (8, 9))]
    report = worker.take_step_report()
    assert report.done == {1: {0}}
    assert report.unstored == {1: {1}}
    assert report.counters[stores_shed(Shed.HOLE)] == 1


@pytest.mark.parametrize(("rank", "ranks", "chunks"), [(0, 1, [4, 5]), (0, 2, [4]), (1, 2, [5])])
def test_a_rank_stores_what_any_of_its_shards_writes(
    rank: int, ranks: int, chunks: list[int]
) -> None:
    """An object of a replicated group is written by one shard, which may be any of a rank's."""
    from hybridkv.connector.messages import StepPlan
    from hybridkv.core.copies import CopyRun, ObjectSpan

    stored: list[int] = []

    class Storing(Broken):
        def store(self, ops: Any, done: Any) -> None:
            stored.extend(op.chunk for op in ops)

    worker = worker_role(rank=rank, ranks=ranks, shards=2, replicated=True)
    map_arena(worker, Storing())
    slots = packed_slots([10, 20])
    run = CopyRun(ObjectSpan(0, 4, 1, [5, 6]), slots)
    worker.start_stores(StepPlan(boot="b", session=1, stores={1: run}))
    assert stored == chunks


def test_a_store_that_the_copier_has_is_reported_when_the_copier_is_done_with_it() -> None:
    """Its slot would be given to another object, into which the copier would write."""
    from hybridkv.connector.messages import StepPlan
    from hybridkv.core.copies import CopyRun, ObjectSpan

    begun: list[Any] = []

    class Later(Broken):
        def store(self, ops: Any, done: Any) -> None:
            begun.extend((op, done) for op in ops)

    worker = worker_role()
    map_arena(worker, Later())
    run = CopyRun(ObjectSpan(0, 4, 1, [5]), packed_slots([10]))
    plan = StepPlan(boot="b", session=1, stores={1: run})
    worker.start_stores(plan)
    worker.fail_stores(plan)
    assert not worker.take_step_report().done
    for op, done in begun:
        done(op, True)
    report = worker.take_step_report()
    assert (report.done, report.unstored) == ({1: {0}}, {})


def test_a_worker_whose_device_failed_offers_nothing() -> None:
    """What it copied before is counted, and the scheduler plans nothing for it any more."""

    worker = worker_role()
    pipeline = SimpleNamespace(take_counters=lambda: {COPIES_UNPINNED: 3.0})
    worker.factory = SimpleNamespace(pipeline=pipeline, can_copy=True)
    worker.boot = "b"
    report = worker.take_step_report()
    assert report.boots == {"b": 1}
    assert report.counters[COPIES_UNPINNED] == 3
    worker.factory.can_copy = False
    report = worker.take_step_report()
    assert report.boots == {}
    assert report.is_disabled


def test_before_the_engine_sleeps_no_copy_runs_of_copiers_that_were_retired_either() -> None:

    worker = worker_role()
    events: list[str] = []
    worker.factory = SimpleNamespace(
        retire_copier=lambda copier: events.append("retired"),
        drain_copiers=lambda: events.append("drained"),
    )
    map_arena(worker, Broken())
    worker.remap_arena()
    worker.detach_arena()
    assert events == ["retired", "drained"]


def test_a_load_of_an_adapter_begins_only_while_the_engine_has_it() -> None:
    """Its request would go on with other weights; plans are made from the report before."""
    from hybridkv.connector.messages import LoadPlan, StepPlan, StepReport
    from hybridkv.vllm.adapters import AdapterWeights
    from hybridkv.vllm.loaded_adapters import LoadedAdapters, digest_adapter
    from tests.unit.vllm.small_adapters import Worker, adapter

    role = worker_role(rank=1, ranks=2)
    map_arena(role, Broken())
    engine = Worker()
    role.adapters = LoadedAdapters(engine.runner)
    engine.add(adapter(1))
    digest = digest_adapter(adapter(1))

    def failed(number: int) -> set[str]:
        """Return the failed loads of a step: one of no adapter, and two of the ranks' adapters."""
        ours, others = AdapterWeights(1, (b"", digest)), AdapterWeights(1, (digest, b""))
        loads = {
            "none": LoadPlan("b", ()),
            "ours": LoadPlan("b", (), ours),
            "others": LoadPlan("b", (), others),
        }
        role.start_loads(StepPlan(number, "b", 1, loads=loads))
        finished, failures = role.take_finished()
        assert finished == loads.keys()
        return {*failures}

    assert failed(1) == {"others"}
    report = role.take_step_report()
    assert report.adapters == {1: {1: digest}}
    assert report.counters[LOADS_OTHER_ADAPTER] == 1
    other_rank = StepReport(adapters={0: {1: b"", 2: b""}})
    assert report.aggregate(other_rank).adapters == {0: {1: b"", 2: b""}, 1: {1: digest}}
    engine.manager.remove_adapter(1)
    assert failed(2) == {"others", "ours"}
    assert role.take_step_report().adapters == {}
    engine.add(adapter(1, alpha=8))
    assert failed(3) == {"others", "ours"}
    assert role.take_step_report().adapters[1].keys() == {1}
    assert role.take_step_report().adapters == {}, "a step that this worker did not begin"
