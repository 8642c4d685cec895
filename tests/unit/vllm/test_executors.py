"""Which executors serve an engine of several ranks, and that the table is that of the engine.

`scripts/test --vllm VERSION tests/unit/vllm/test_executors.py` asks another version.
"""

import ast
import inspect
import textwrap
from types import SimpleNamespace
from typing import Any, get_args

import pytest
from vllm.config.parallel import DistributedExecutorBackend
from vllm.v1.executor import Executor
from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

from hybridkv.core.findings import Finding, Verdict
from hybridkv.vllm.executors import EXECUTORS, JOINING, executor_finding

pytestmark = pytest.mark.engine


class StartsElsewhere(MultiprocExecutor):
    """Starts workers in a way of its own."""

    def _init_executor(self) -> None:
        raise NotImplementedError


class JoinsAnotherWay(MultiprocExecutor):
    """Does with plans and reports what it likes."""

    def collective_rpc(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError


class Torchrun(ExecutorWithExternalLauncher):
    """A trainer's."""


def judged(backend: object, tensor: int = 2, stages: int = 1) -> Finding:
    return executor_finding(
        SimpleNamespace(
            distributed_executor_backend=backend,
            tensor_parallel_size=tensor,
            pipeline_parallel_size=stages,
        )
    )


@pytest.mark.parametrize(
    ("backend", "why"),
    [
        ("external_launcher", "gives each rank a scheduler of its own"),
        (Torchrun, "gives each rank a scheduler of its own"),
        ("uni", "runs the worker of one rank alone"),
        (f"{__name__}.JoinsAnotherWay", "has a collective_rpc of its own"),
        (Executor, "was never tried"),
        ("nowhere.Executor", "is no class of executors that can be imported"),
        ("pathlib.Path", "was never tried"),
        ("os.path", "is no class of executors that can be imported"),
        (None, "is no class of executors that can be imported"),
    ],
)
def test_what_may_not_join_the_ranks_is_refused_for_several_ranks_alone(
    backend: object, why: str
) -> None:
    finding = judged(backend)
    assert finding.verdict is Verdict.FAIL
    assert f"with tensor_parallel_size=2 {why}" in finding.what
    assert finding.remedy == (
        'distributed_executor_backend="mp" works, and so does an engine of one rank'
    )
    assert "pipeline_parallel_size=2 " in judged(backend, 1, 2).what
    assert judged(backend, 1).verdict is Verdict.OK, "an engine for each rank"


@pytest.mark.parametrize("backend", ["mp", "ray", MultiprocExecutor, f"{__name__}.StartsElsewhere"])
def test_what_joins_the_ranks_is_served(backend: object) -> None:
    assert judged(backend).verdict is Verdict.OK
    assert "one scheduler for 4 ranks" in judged(backend, 2, 2).what


def test_the_table_has_what_the_engine_names() -> None:
    """A value or a class that a version adds must be judged before it is served."""
    assert set(get_args(DistributedExecutorBackend)) == {*EXECUTORS}
    code = ast.parse(textwrap.dedent(inspect.getsource(Executor.get_class)))
    compared = {
        side.value
        for node in ast.walk(code)
        if isinstance(node, ast.Compare)
        for side in node.comparators
        if isinstance(side, ast.Constant)
    }
    assert compared == {*EXECUTORS}
    assigned = {
        node.value.id
        for node in ast.walk(code)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name)
    }
    classes = {path.rpartition(".")[2] for row in EXECUTORS.values() for path in row.classes}
    # vLLM 0.33 has one of the classes for Ray.
    assert classes - {"RayDistributedExecutor"} <= assigned - {"distributed_executor_backend"}
    assert assigned <= classes | {"distributed_executor_backend"}


def test_reports_are_joined_by_the_methods_that_are_named() -> None:
    """A class that has them from a judged one joins the reports as that one does."""
    assert all(callable(getattr(MultiprocExecutor, name)) for name in JOINING)
    for name in ("execute_model", "sample_tokens"):
        assert "kv_output_aggregator" in inspect.getsource(getattr(MultiprocExecutor, name))
    offered = {
        name for name in vars(Executor) if "kv_connector" in name or "kv_output_aggregator" in name
    }
    assert offered == {name for name in JOINING if "kv_" in name}
