"""Both roles of the connector as vLLM makes them, hook by hook, over groups of one layer each."""

import copy
import gc
import logging
import operator
import re
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hybridkv.connector.copy.device import DeviceError
from hybridkv.connector.metrics import (
    DAEMON_CONNECTS,
    OBJECTS_STORED,
    RANK_LOADS_FAILED,
    WORKERS_DISABLED,
    declined,
)
from hybridkv.core.metrics import Metric
from hybridkv.lab.daemon_process import DaemonProcess
from hybridkv.vllm.hook_guard import FAULTS, PAUSE_SECONDS, QUARANTINED, fault
from hybridkv.wire.messages import Decline
from tests.unit.connector import requests
from tests.unit.daemon.tierclient import stats
from tests.waiting import until

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]

LAYOUT = "glm53_small"
"""Recurrent, two scratch groups, MLA: the second served group is vLLM's number 3."""
BLOCKS = 40


@dataclass
class Roles:
    """The two connectors of one engine."""

    scheduler: Any
    worker: Any

    def step(self, output: Any) -> Any:
        """vLLM's order of calls in a step without a model."""
        plan = self.scheduler.build_connector_meta(output)
        self.worker.bind_connector_metadata(plan)
        self.worker.handle_preemptions(plan)
        self.worker.start_load_kv(None)
        self.worker.wait_for_save()
        results = self.worker.get_transfer_results(set())
        report = self.worker.build_connector_worker_meta()
        self.worker.clear_connector_metadata()
        done = SimpleNamespace(
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
            kv_connector_worker_meta=report,
        )
        self.scheduler.update_connector_output(done)
        assert not self.scheduler.take_events()
        return done

    def faults(self) -> dict[Metric, int]:
        """Return the counters of hooks that raised, of both connectors."""
        counters = {**self.scheduler.counters, **self.worker.counters}
        return {metric: count for metric, count in counters.items() if metric.family == FAULTS}


def make_roles(socket_path: str) -> Roles:
    """An engine's two sides, that have not made a step."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

    from hybridkv.connector import HybridKVConnector
    from tests.simulation.configs import Shape, config_of
    from tests.simulation.engine import Rank
    from tests.simulation.layouts import LAYOUTS, ON_CPU

    layout = LAYOUTS[LAYOUT]
    settings: dict[str, object] = {
        "weights_identity": "simulated",
        "audit": "off",
        "lookup_timeout_ms": 10_000,
    }
    settings["hybrid_chunk_size"] = 2 * layout.unit
    shape = Shape(layout, BLOCKS, 4 * layout.unit + 1, layout.unit, 4, None, 1, ON_CPU, settings)
    config = config_of(shape, socket_path, "e")
    rank = Rank(shape, config, 0)
    rank.register()
    scheduler = HybridKVConnector(
        config, KVConnectorRole.SCHEDULER, layout.config(config, BLOCKS, worker=False)
    )
    scheduler.set_xfer_handshake_metadata({0: rank.connector.get_handshake_metadata()})
    return Roles(scheduler, rank.connector)


@pytest.fixture
def roles(daemon: DaemonProcess) -> Iterator[Roles]:
    """An engine that is connected and attached, and has write slots."""
    roles = make_roles(daemon.socket_path)
    until(
        lambda: (
            roles.step(IDLE) is not None
            and bool(roles.scheduler.scheduler_role.session.workers_attached())
            and requests.has_write_slots(roles.scheduler.scheduler_role)
        ),
        "attached",
    )
    yield roles
    roles.scheduler.shutdown()
    roles.worker.shutdown()


IDLE = SimpleNamespace(
    num_scheduled_tokens={},
    total_num_scheduled_tokens=0,
    kv_connector_block_state=SimpleNamespace(boundary_state_offloads={}),
)


def request(name: str, tokens: int = 600) -> Any:
    """With a hash for every second token."""
    return requests.request(
        name, tokens, b"".join(bytes([at % 256]) * 32 for at in range(tokens // 2))
    )


def test_a_worker_that_was_shut_down_keeps_none_of_the_engines_memory(roles: Roles) -> None:
    """An engine's process may go on and make another engine."""
    role = roles.worker.worker_role
    views = [weakref.ref(view) for views in role.factory.shards[0].groups for view in views]
    assert views
    assert role.mapped
    roles.worker.shutdown()
    gc.collect()
    assert not [view for view in views if view() is not None]


def test_a_worker_locks_the_arena_while_it_maps_it(roles: Roles) -> None:
    """A daemon of another pid namespace knows from it that the worker may copy."""
    role = roles.worker.worker_role
    (inode,) = [arena.inode[1] for arena, _ in role.mapped.values()]
    # The kernel's list: kind, mode, access, process, device:inode, first byte, last byte.
    lock = ["OFDLCK", "ADVISORY", "READ"]
    place = [str(role.link.lock)] * 2

    def locks() -> list[list[str]]:
        rows = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
        return [row[1:4] + row[-2:] for row in rows if row[5].endswith(f":{inode}")]

    assert lock + place in locks()
    roles.worker.shutdown()
    gc.collect()
    assert lock + place not in locks()


@pytest.mark.parametrize(
    ("name", "is_async"),
    [
        *product(
            ["gemma3_small", "llama4_small", "deepseekv4_small", "ngram_recurrent"], [False, True]
        ),
        ("eagle_recurrent", False),
    ],
)
def test_loads_leave_the_room_that_vllm_wants_before_it_runs_a_request(
    daemon: DaemonProcess, name: str, is_async: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a loading request is counted for is at least vLLM's own bound, group by group."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.v1.kv_cache_interface import MambaSpec

    import hybridkv.vllm.seams
    from hybridkv.connector import HybridKVConnector
    from tests.simulation.configs import Shape, config_of
    from tests.simulation.engine import Rank
    from tests.simulation.layouts import LAYOUTS, ON_CPU

    layout = LAYOUTS[name]
    length, budget = 40 * layout.unit, 3 * layout.unit
    settings: dict[str, object] = {"weights_identity": "simulated", "audit": "off"}
    settings["hybrid_chunk_size"] = layout.unit
    shape = Shape(layout, BLOCKS, length, budget, 4, None, 1, ON_CPU, settings, is_async, drafts=3)
    monkeypatch.setattr(hybridkv.vllm.seams, "has_wrong_drafted_states", lambda: False)
    config = config_of(shape, daemon.socket_path, "e")
    kv_config = layout.config(config, BLOCKS, worker=False)
    rank = Rank(shape, config, 0)
    rank.register()
    scheduler = HybridKVConnector(config, KVConnectorRole.SCHEDULER, kv_config)
    scheduler.set_xfer_handshake_metadata({0: rank.layout()})
    role: Any = scheduler.scheduler_role
    wanted = 0
    for group in kv_config.kv_cache_groups:
        spec: Any = group.kv_cache_spec
        whole = -(-length // spec.block_size)
        if hasattr(spec, "max_admission_blocks_per_request"):
            whole = spec.max_admission_blocks_per_request(config.max_in_flight_tokens, length)
        elif isinstance(spec, MambaSpec):
            whole = spec.max_memory_usage_bytes(config) // spec.page_size_bytes
        wanted += whole
    assert config.max_in_flight_tokens == budget * (1 + is_async)
    assert role.room.most_blocks(length) >= wanted
    scheduler.shutdown()
    rank.connector.shutdown()


def test_an_engine_whose_prompts_have_no_whole_chunk_serves_without_the_cache(
    daemon: DaemonProcess, caplog: pytest.LogCaptureFixture
) -> None:
    """The cache is of no use there, and that is no reason to refuse to serve (B8)."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

    from hybridkv.connector import HybridKVConnector
    from tests.simulation.configs import Shape, config_of
    from tests.simulation.engine import Rank
    from tests.simulation.layouts import LAYOUTS, ON_CPU

    layout = LAYOUTS["gemma3_small"]
    unit = layout.unit
    settings: dict[str, object] = {
        "weights_identity": "simulated",
        "audit": "off",
        "hybrid_chunk_size": 4 * unit,
    }
    shape = Shape(layout, BLOCKS, 3 * unit, unit, 4, None, 1, ON_CPU, settings)
    config = config_of(shape, daemon.socket_path, "e")
    kv_config = layout.config(config, BLOCKS, worker=False)
    rank = Rank(shape, config, 0)
    rank.register()
    scheduler = HybridKVConnector(config, KVConnectorRole.SCHEDULER, kv_config)
    ours = logging.getLogger("vllm.hybridkv")
    ours.addHandler(caplog.handler)
    try:
        scheduler.set_xfer_handshake_metadata({0: rank.layout()})
    finally:
        ours.removeHandler(caplog.handler)
    records = [record for record in caplog.records if record.levelname == "ERROR"]
    lines = {record.created: record.getMessage() for record in records}
    (error,) = lines.values()
    assert f"and max_model_len is {3 * unit}, so nothing can ever be stored" in error
    works = re.search(r"--max-model-len (\d+) works", error)
    assert works
    assert int(works[1]) > 4 * unit + 1
    roles = Roles(scheduler, rank.connector)
    scheduler.on_new_request(request("r", 3 * unit - 1))
    assert scheduler.get_num_new_matched_tokens(request("r", 3 * unit - 1), 0) == (0, False)
    roles.step(IDLE)
    assert scheduler.counters[declined(Decline.TOO_SHORT)] == 1
    assert not roles.faults()
    scheduler.shutdown()
    rank.connector.shutdown()


def test_it_serves_engines_with_several_groups() -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import supports_hma

    from hybridkv.connector import HybridKVConnector

    assert supports_hma(HybridKVConnector)
    assert HybridKVConnector.get_required_kvcache_layout(SimpleNamespace()) is None


@pytest.mark.parametrize("tables", [(), ([7],), ([7], [8], [9], [3, 4])], ids=len)
def test_a_finished_request_is_forgotten_and_holds_no_block(
    roles: Roles, tables: tuple[list[int], ...]
) -> None:
    """By its name alone, whatever its tables are (A5, A6, C37, D10)."""
    roles.scheduler.on_new_request(request("r"))
    assert "r" in roles.scheduler.scheduler_role.requests.by_id
    assert roles.scheduler.request_finished_all_groups(request("r"), tables) == (False, None)
    assert not roles.scheduler.scheduler_role.requests.by_id
    roles.scheduler.on_new_request(request("s"))
    assert roles.scheduler.request_finished(request("s"), tables[0] if tables else []) == (
        False,
        None,
    )
    assert not roles.scheduler.scheduler_role.requests.by_id
    assert not roles.faults()


def test_a_plan_that_is_not_ours_is_left_alone(roles: Roles) -> None:
    """The plan of another connector, or no plan (B41)."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

    for plan in (KVConnectorMetadata(), None):
        roles.worker._connector_metadata = plan
        roles.worker.start_load_kv(None)
        roles.worker.wait_for_save()
        assert roles.worker.get_transfer_results(set()).finished_recving == set()
    assert not roles.faults()


def test_hooks_of_single_layers_do_nothing(roles: Roles) -> None:
    """Layers that never call them are served too (C9); a preemption asks for nothing (D14)."""
    roles.worker.wait_for_layer_load("g0.l0")
    roles.worker.save_kv_layer("g0.l0", None, None)
    roles.worker.handle_preemptions({"r"})
    assert not roles.faults()


def test_a_role_ends_alone_and_twice(roles: Roles) -> None:
    for role in (roles.worker, roles.scheduler):
        role.shutdown()
        role.shutdown()
    assert roles.scheduler.get_num_new_matched_tokens(request("r"), 0) == (0, False)
    assert roles.scheduler.request_finished(request("r"), []) == (False, None)
    assert roles.scheduler.build_connector_meta(IDLE).loads == {}


def test_no_hit_is_never_asynchronous_and_no_hook_raises(roles: Roles) -> None:
    """(0, True) ends vLLM in an assertion, and so does an exception out of any hook (C15)."""
    roles.scheduler.on_new_request(request("r"))
    answers = []

    def answered() -> bool:
        answers.append(roles.scheduler.get_num_new_matched_tokens(request("r"), 0))
        return answers[-1][0] is not None

    until(answered, "the lookup is answered")
    assert set(answers) <= {(None, False), (0, False)}
    broken = SimpleNamespace(request_id="broken")
    roles.scheduler.on_new_request(broken)
    assert roles.faults() == {fault("on_new_request"): 1}
    assert roles.scheduler.get_num_new_matched_tokens(broken, 0) == (0, False)


def test_what_the_engine_waits_for_fails_where_planning_does(roles: Roles) -> None:
    """A fault in a hook must not leave a request waiting for a load that nobody was told of."""
    roles.scheduler.update_state_after_alloc(request("r"), SimpleNamespace(), 128)
    assert roles.faults() == {fault("update_state_after_alloc"): 1}
    done = roles.step(IDLE)
    assert (done.finished_recving, done.failed_recving) == ({"r"}, {"r"})


def test_a_step_that_the_workers_cannot_take_fails_its_loads(roles: Roles) -> None:
    from hybridkv.connector.messages import LoadPlan, StepPlan

    broken: Any = SimpleNamespace(span=None)
    worker = roles.worker.worker_role
    unknown = StepPlan(
        loads={"a": LoadPlan("another life", ()), "b": LoadPlan(worker.boot, (broken,))},
        question=worker.weights.question,
        eras=(worker.weights.era,),
    )
    roles.worker.bind_connector_metadata(unknown)
    roles.worker.start_load_kv(None)
    results = roles.worker.get_transfer_results(set())
    assert results.finished_recving == results.failed_recving == {"a", "b"}
    assert roles.worker.get_transfer_results(set()).finished_recving == set(), (
        "each is told once (C10)"
    )
    counters = worker.take_step_report().counters
    assert counters[RANK_LOADS_FAILED] == 2, "neither was refused before it began"


@pytest.mark.parametrize("method", ["session.queue_message", "on_reply"])
def test_slots_are_asked_for_again_after_a_fault_of_the_asking_or_of_the_answer(
    roles: Roles, method: str
) -> None:
    """An answer that never comes must not be awaited for as long as the daemon lives."""
    engine = Paused(roles)
    engine.attached()
    role = engine.side
    where, _, name = method.rpartition(".")
    part = operator.attrgetter(where)(role) if where else role

    def broken(*args: Any) -> None:
        delattr(part, name)
        raise ValueError("the test says so")

    role.stores.credits.forget_slots()
    setattr(part, name, broken)
    until(lambda: roles.step(IDLE) is not None and bool(roles.faults()), "a hook faults")
    assert sum(roles.faults().values()) == 1
    until(
        lambda: roles.step(IDLE) is not None and requests.has_write_slots(role),
        "there are slots of every shape again",
    )
    assert engine.side is role


def test_tables_are_those_of_the_moment(roles: Roles) -> None:
    """A request that is resumed has other blocks, in every group (C30, D11)."""
    tables = {"r": [[7], [8], [9], [3, 4]]}

    def get_blocks(name: str) -> Any:
        return SimpleNamespace(
            blocks=[[SimpleNamespace(block_id=block) for block in row] for row in tables[name]]
        )

    roles.scheduler.bind_kv_cache_manager(manager_of(get_blocks))
    assert [[*table] for table in roles.scheduler.tables_of("r")] == tables["r"]
    tables["r"] = [[5, 6], [], [1], [2]]
    assert [[*table] for table in roles.scheduler.tables_of("r")] == tables["r"]


# A role that is switched off begins anew


class Paused:
    """A clock for the guards of both roles, and steps with or without requests."""

    def __init__(self, roles: Roles) -> None:
        self.now = 0.0
        self.roles = roles
        for connector in (roles.scheduler, roles.worker):
            connector.guard.clock = lambda: self.now
            connector.guard.began_at = 0.0

    @property
    def side(self) -> Any:
        """The scheduler role, which is another one after a pause."""
        return self.roles.scheduler.scheduler_role

    def begins_anew(self) -> None:
        """The pause passes, and the fresh role is connected with its workers attached."""
        before = self.side
        self.now += PAUSE_SECONDS - 1
        self.roles.step(IDLE)
        assert self.side is before, "not before its time"
        self.now += 1
        self.roles.step(IDLE)
        assert self.side is not before
        self.attached()

    def attached(self) -> None:
        """Step until the workers map the arena and there are write slots."""
        session = self.side.session
        until(
            lambda: (
                self.roles.step(IDLE) is not None
                and session.is_connected
                and session.workers_attached()
                and requests.has_write_slots(self.side)
            ),
            "attached",
        )

    def stores(self, name: str) -> tuple[Any, Any]:
        """The plan of a step that completes a chunk of a new request, and what it is reported."""
        chunk = self.side.geometry.chunk_tokens
        asking = request(name, chunk + 1)
        self.roles.scheduler.on_new_request(asking)
        until(
            lambda: self.roles.scheduler.get_num_new_matched_tokens(asking, 0)[0] is not None,
            "it is answered",
        )
        self.roles.scheduler.update_state_after_alloc(asking, blocks_of(chunk), 0)
        self.roles.scheduler.bind_kv_cache_manager(manager_of(lambda name: blocks_of(chunk)))
        output = SimpleNamespace(
            num_scheduled_tokens={name: chunk},
            total_num_scheduled_tokens=chunk,
            kv_connector_block_state=SimpleNamespace(boundary_state_offloads={}),
        )
        plan = self.roles.scheduler.build_connector_meta(output)
        assert plan.stores
        self.roles.worker.bind_connector_metadata(plan)
        self.roles.worker.start_load_kv(None)
        self.roles.worker.wait_for_save()
        report = self.roles.worker.build_connector_worker_meta()
        return plan, SimpleNamespace(
            finished_recving=set(), failed_recving=set(), kv_connector_worker_meta=report
        )


def manager_of(get_blocks: Any) -> Any:
    """Return vLLM's cache manager, as far as the connector uses it."""
    return SimpleNamespace(get_blocks=get_blocks, block_pool=None, reset_prefix_cache=lambda: True)


def reset_prefix_cache(roles: Roles) -> None:
    """Reset the engine's prefix cache, of which nothing is left then."""
    manager = manager_of(None)
    roles.scheduler.bind_kv_cache_manager(manager)
    manager.reset_prefix_cache()


def blocks_of(tokens: int) -> Any:
    """A table of blocks for each of the engine's four groups."""
    row = [SimpleNamespace(block_id=1 + at % (BLOCKS - 1)) for at in range(tokens)]
    return SimpleNamespace(blocks=[row] * 4)


def test_a_scheduler_role_that_is_switched_off_begins_anew(roles: Roles) -> None:
    """Connected again, under a number that no worker is done with, and it says so."""
    paused = Paused(roles)
    stats_before = roles.scheduler.get_kv_connector_stats()
    assert stats_before.gauges[Metric("quarantined")] == 0
    connects = roles.scheduler.counters[DAEMON_CONNECTS]
    roles.scheduler.guard.pause("the test says so")
    gauges = roles.scheduler.get_kv_connector_stats().gauges
    assert gauges[Metric("quarantined")] == 1
    since, until = Metric("quarantined_since"), Metric("quarantined_until")
    assert gauges[until] == gauges[since] + PAUSE_SECONDS
    assert roles.scheduler.get_num_new_matched_tokens(request("r"), 0) == (0, False)
    quit_number = roles.scheduler.build_connector_meta(IDLE).session
    paused.begins_anew()
    assert roles.scheduler.build_connector_meta(IDLE).session > quit_number
    stats = roles.scheduler.get_kv_connector_stats()
    assert {metric: stats.gauges[metric] for metric in gauges} == dict.fromkeys(gauges, 0)
    new_connects = roles.scheduler.counters[DAEMON_CONNECTS] - connects
    assert stats.counters[DAEMON_CONNECTS] == new_connects == 1, "what was told is not told again"
    roles.scheduler.on_new_request(request("r"))
    assert "r" in paused.side.requests.by_id


def test_a_late_report_of_an_earlier_role_commits_nothing_of_the_next(roles: Roles) -> None:
    """A number that both gave would make an object of a slot that nobody wrote yet."""
    paused = Paused(roles)
    paused.attached()
    old, late = paused.stores("old")
    roles.scheduler.guard.pause("the test says so")
    paused.begins_anew()
    new, report = paused.stores("new")
    assert not old.stores.keys() & new.stores.keys()
    roles.scheduler.update_connector_output(late)
    assert OBJECTS_STORED not in roles.scheduler.counters
    roles.scheduler.update_connector_output(report)
    assert roles.scheduler.counters[OBJECTS_STORED] > 0


@pytest.mark.parametrize("is_off", [True, False], ids=["off", "a fault of the reset"])
def test_weights_that_change_while_a_role_is_off_are_those_of_the_next(
    roles: Roles, is_off: bool
) -> None:
    paused = Paused(roles)
    old = paused.side.session.hello.namespace
    if is_off:
        roles.scheduler.guard.pause("the test says so")
    else:
        paused.side.on_reset = None
    watch = roles.scheduler.life.weights
    watch.block_digests = watch.identity_digests
    roles.worker.worker_role.weights.runner.model.salt.fill_(3)
    reset_prefix_cache(roles)
    paused.begins_anew()

    def is_new() -> bool:
        roles.step(IDLE)
        return bool(roles.scheduler.scheduler_role.session.hello.namespace != old)

    until(is_new, "the new role has the new weights")
    assert roles.scheduler.life.weights.is_current


def test_a_worker_that_is_switched_off_maps_the_arena_again(roles: Roles) -> None:
    """It offers itself only when it has; what it counted meanwhile arrives, also at no role."""
    paused = Paused(roles)
    paused.attached()
    worker = roles.worker.worker_role
    arena, _ = worker.mapped[worker.boot]
    roles.worker.guard.pause("the test says so")
    roles.scheduler.guard.pause("the test says so, too")
    assert roles.step(IDLE).kv_connector_worker_meta.boots == {}
    assert roles.scheduler.counters[QUARANTINED] == 2
    attach, worker.attach_arena = worker.attach_arena, lambda plan: None
    paused.now += PAUSE_SECONDS
    assert roles.step(IDLE).kv_connector_worker_meta.boots == {}, "it maps nothing yet"
    worker.attach_arena = attach
    paused.attached()
    assert worker.mapped[worker.boot][0] is not arena
    gauges = roles.scheduler.get_kv_connector_stats().gauges
    assert gauges[Metric("quarantined")] == 0


def declined_at_once(roles: Roles, name: str) -> dict[str, float]:
    """The daemon's values after a request whose hit nobody could load was declined unasked."""
    asking = request(name)
    roles.scheduler.on_new_request(asking)
    roles.step(IDLE)
    assert roles.scheduler.get_num_new_matched_tokens(asking, 0) == (0, False)
    values = stats(roles.scheduler.socket_path)
    assert "lookups" not in values or not values["lookups"], "the daemon was not asked"
    return values


def test_a_worker_that_has_no_room_to_copy_says_so(
    daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, to the daemon and to the scheduler, and no hit waits for it."""

    def no_room(*_: object) -> None:
        raise DeviceError("no room for 1 bytes")

    monkeypatch.setattr("hybridkv.connector.worker.role.open_pipeline", no_room)
    roles = make_roles(daemon.socket_path)
    try:
        until(
            lambda: (
                roles.step(IDLE) is not None
                and bool(stats(daemon.socket_path).get("workers_unmapped"))
                and roles.scheduler.scheduler_role.session.is_connected
            ),
            "the daemon knows",
        )
        roles.step(IDLE)
        assert declined_at_once(roles, "r")["mappings_failed"] == 1, "it is said once"
        assert roles.scheduler.counters[declined(Decline.LATE_WORKERS)] == 1
        assert roles.scheduler.counters[WORKERS_DISABLED] == 1
    finally:
        roles.scheduler.shutdown()
        roles.worker.shutdown()


def test_a_worker_whose_device_fails_says_so_to_every_daemon(roles: Roles) -> None:
    """Also to one that it is connected to later."""
    worker, path = roles.worker.worker_role, roles.scheduler.socket_path
    worker.factory.pipeline = SimpleNamespace(
        can_copy=False, take_counters=dict, drain=lambda: None, close=lambda: None
    )

    def is_told() -> bool:
        roles.step(IDLE)
        return bool(stats(path)["workers_unmapped"])

    until(is_told, "the daemon knows")
    assert declined_at_once(roles, "r")["mappings_failed"] == 1
    assert roles.scheduler.counters[declined(Decline.LATE_WORKERS)] == 1
    worker.link.drop_connection("the test says so", 0.0)
    until(lambda: not stats(path)["workers_unmapped"], "the worker is gone")
    until(is_told, "it is said again")
    assert roles.scheduler.counters[WORKERS_DISABLED] == 2


def test_served_groups_are_those_that_vllm_can_cache(roles: Roles) -> None:
    """Scratch groups keep their number in vLLM's tables and are no group of ours (D7)."""
    geometry = roles.scheduler.scheduler_role.geometry
    assert [group.gid for group in geometry.groups] == [0, 3]
    assert geometry.chunk_tokens == 2 * geometry.alignment_tokens, (
        "hybrid_chunk_size is what was asked for (B2)"
    )
    assert sorted(roles.worker.get_handshake_metadata().layers) == [0, 3]
    layout = copy.copy(roles.worker.get_handshake_metadata().layers)
    assert [layer.name for layer in layout[3]] == ["g3.l0"]


@pytest.mark.parametrize("changes", [False, True], ids=["the same", "another"])
def test_adapters_are_followed_while_a_role_is_off(roles: Roles, changes: bool) -> None:
    """Its requests and others' go on, and the next role knows which weights computed for them."""
    from hybridkv.vllm.loaded_adapters import LoadedAdapters
    from tests.unit.vllm.small_adapters import Worker, adapter

    engine = Worker()
    roles.worker.worker_role.adapters = LoadedAdapters(engine.runner)
    engine.add(adapter(1))

    def arrive(name: str) -> Any:
        asking = request(name)
        asking.lora_request = SimpleNamespace(lora_int_id=1, lora_name="a", lora_path="/a")
        roles.scheduler.on_new_request(asking)
        return asking

    def run(name: str) -> None:
        state = SimpleNamespace(boundary_state_offloads={})
        output = SimpleNamespace(num_scheduled_tokens={name: 1}, total_num_scheduled_tokens=1)
        roles.step(SimpleNamespace(**vars(output), kv_connector_block_state=state))

    paused = Paused(roles)
    arrive("before")
    run("before")
    roles.scheduler.guard.pause("the test says so")
    arrive("meanwhile")
    if changes:
        engine.manager.remove_adapter(1)
        engine.add(adapter(1, alpha=8))
    run("meanwhile")
    paused.begins_anew()
    arrive("later")
    known = paused.side.requests.by_id["later"].adapter
    assert (known.weights is None) == changes
    roles.scheduler.guard.pause("the test says so, again")
    reset_prefix_cache(roles)
    assert known.weights is not None, "the engine has no block of the old weights"
    assert not roles.faults()


def test_a_renewal_that_fails_loses_no_load_that_must_fail(
    roles: Roles, monkeypatch: pytest.MonkeyPatch
) -> None:
    paused = Paused(roles)
    scheduler, chunk = roles.scheduler, paused.side.geometry.chunk_tokens
    scheduler.guard.pause("the test says so")
    waiting = request("waiting", chunk + 1)
    scheduler.on_new_request(waiting)
    scheduler.update_state_after_alloc(waiting, blocks_of(chunk), chunk)
    monkeypatch.setattr(scheduler, "make_scheduler_role", lambda: 1 // 0)
    paused.now += PAUSE_SECONDS
    scheduler.take_events()
    assert scheduler.counters[fault("resume")] == 1
    assert scheduler.build_connector_meta(IDLE).failed == ["waiting"]


def test_a_load_that_no_worker_was_told_of_fails_with_the_next_role(roles: Roles) -> None:
    """The engine waits for it, and the pause may end before the next plan."""
    paused = Paused(roles)
    roles.scheduler.guard.pause("the test says so")
    roles.scheduler.update_state_after_alloc(request("r"), blocks_of(1), 128)
    paused.now += PAUSE_SECONDS
    roles.scheduler.take_events()
    assert roles.step(IDLE).failed_recving == {"r"}
