"""Both roles of the connector as vLLM makes them, hook by hook, over groups of one layer each."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from hybridkv.lab.daemon_process import DaemonProcess
from hybridkv.vllm.supervise import FAULTS_MAX, Supervisor
from tests.unit.connector import requests
from tests.unit.daemon.tierclient import until

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]

LAYOUT = "glm53_small"
"""Recurrent, two scratch groups, MLA: the second served group is vLLM's number 3."""
BLOCKS = 40


@dataclass
class Roles:
    """One engine's two sides, and how often the first said something."""

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

    def faults(self) -> dict[str, int]:
        """Hooks that raised, of both."""
        counters = {**self.scheduler.counters, **self.worker.counters}
        return {name: count for name, count in counters.items() if name.startswith("fault_")}


@pytest.fixture
def roles(daemon: DaemonProcess) -> Iterator[Roles]:
    """Connected, attached, with write slots."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

    from hybridkv.connector import HybridKVConnector
    from tests.simulation.engine import Rank, Shape, _vllm_config
    from tests.simulation.layouts import LAYOUTS

    layout = LAYOUTS[LAYOUT]
    settings: dict[str, object] = {"weights_identity": "simulated", "lookup_timeout_ms": 10_000}
    settings["hybrid_chunk_size"] = 2 * layout.unit
    shape = Shape(layout, BLOCKS, 4 * layout.unit + 1, layout.unit, 4, None, 1, False, settings)
    config = _vllm_config(shape, daemon.socket_path, "e")
    rank = Rank(shape, config, 0)
    scheduler = HybridKVConnector(
        config, KVConnectorRole.SCHEDULER, layout.config(config, BLOCKS, worker=False)
    )
    scheduler.set_xfer_handshake_metadata({0: rank.connector.get_handshake_metadata()})
    made = Roles(scheduler, rank.connector)
    until(
        lambda: (
            made.step(IDLE) is not None
            and bool(made.scheduler._scheduler._session.workers_attached())
        ),
        "attached",
    )
    yield made
    made.scheduler.shutdown()
    made.worker.shutdown()


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
    assert "r" in roles.scheduler._scheduler._requests.by_id
    assert roles.scheduler.request_finished_all_groups(request("r"), tables) == (False, None)
    assert not roles.scheduler._scheduler._requests.by_id
    roles.scheduler.on_new_request(request("s"))
    assert roles.scheduler.request_finished(request("s"), tables[0] if tables else []) == (
        False,
        None,
    )
    assert not roles.scheduler._scheduler._requests.by_id
    assert not roles.faults()


def test_a_plan_that_is_not_ours_is_left_alone(roles: Roles) -> None:
    """Another connector's, or none (B41)."""
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
    assert roles.faults() == {"fault_on_new_request": 1}
    assert roles.scheduler.get_num_new_matched_tokens(broken, 0) == (0, False)


def test_what_the_engine_waits_for_fails_where_planning_does(roles: Roles) -> None:
    """A fault in a hook must not leave a request waiting for a load that nobody was told of."""
    roles.scheduler.update_state_after_alloc(request("r"), SimpleNamespace(), 128)
    assert roles.faults() == {"fault_update_state_after_alloc": 1}
    done = roles.step(IDLE)
    assert (done.finished_recving, done.failed_recving) == ({"r"}, {"r"})


def test_a_step_that_the_workers_cannot_take_fails_its_loads(roles: Roles) -> None:
    from hybridkv.connector.messages import LoadPlan, StepPlan

    broken: Any = SimpleNamespace(span=None)
    unknown = StepPlan(
        loads={
            "a": LoadPlan("another life", ()),
            "b": LoadPlan(roles.worker._worker._boot, (broken,)),
        }
    )
    roles.worker.bind_connector_metadata(unknown)
    roles.worker.start_load_kv(None)
    results = roles.worker.get_transfer_results(set())
    assert results.finished_recving == results.failed_recving == {"a", "b"}
    assert roles.worker.get_transfer_results(set()).finished_recving == set(), (
        "each is told once (C10)"
    )


def test_a_side_with_too_many_faults_is_switched_off() -> None:
    supervisor = Supervisor("scheduler")
    for _ in range(FAULTS_MAX):
        assert supervisor.run("hook", lambda: 1 // 0, lambda: 7) == 7
    assert not supervisor.healthy
    assert supervisor.run("hook", lambda: 1, lambda: 7) == 7
    assert supervisor.counters == {"fault_hook": FAULTS_MAX, "switched_off": 1, "quarantined": 1}


def test_tables_are_those_of_the_moment(roles: Roles) -> None:
    """A request that is resumed has other blocks, in every group (C30, D11)."""
    tables = {"r": [[7], [8], [9], [3, 4]]}

    def get_blocks(name: str) -> Any:
        return SimpleNamespace(
            blocks=[[SimpleNamespace(block_id=block) for block in row] for row in tables[name]]
        )

    roles.scheduler.bind_kv_cache_manager(SimpleNamespace(get_blocks=get_blocks, block_pool=None))
    assert [[*table] for table in roles.scheduler._tables("r")] == tables["r"]
    tables["r"] = [[5, 6], [], [1], [2]]
    assert [[*table] for table in roles.scheduler._tables("r")] == tables["r"]


def test_served_groups_are_those_that_vllm_can_cache(roles: Roles) -> None:
    """Scratch groups keep their number in vLLM's tables and are no group of ours (D7)."""
    geometry = roles.scheduler._scheduler._geometry
    assert [group.gid for group in geometry.groups] == [0, 3]
    assert geometry.chunk_tokens == 2 * geometry.alignment_tokens, (
        "hybrid_chunk_size is what was asked for (B2)"
    )
    assert sorted(roles.worker.get_handshake_metadata().layers) == [0, 3]
    layout = copy.copy(roles.worker.get_handshake_metadata().layers)
    assert [layer.name for layer in layout[3]] == ["g3.l0"]
