"""The executors of vLLM that were judged: which of them serve an engine of several ranks.

The cache decides in the scheduler, and every rank must do what was decided. So one scheduler plans
for all ranks, every rank gets every plan, and a step's result has the reports of all ranks: a load
that one rank reports is no load of the others. An engine of one rank has that with any executor.
"""

import pkgutil
from dataclasses import dataclass
from typing import Any

from hybridkv.core.findings import Finding, judge, ok

CHECK = "executor"


@dataclass(frozen=True, slots=True)
class JudgedExecutor:
    """A value of vLLM's `distributed_executor_backend`."""

    classes: tuple[str, ...]  # The classes that vLLM runs for it, by their paths.
    refused: str = ""  # Why it serves no engine of several ranks. Empty where it does.


EXECUTORS = {
    "uni": JudgedExecutor(
        ("vllm.v1.executor.uniproc_executor.UniProcExecutor",), "runs the worker of one rank alone"
    ),
    "mp": JudgedExecutor(("vllm.v1.executor.multiproc_executor.MultiprocExecutor",)),
    "ray": JudgedExecutor(
        (
            "vllm.v1.executor.ray_executor.RayDistributedExecutor",  # vLLM 0.32 and older.
            "vllm.v1.executor.ray_executor_v2.RayExecutorV2",
        )
    ),
    "external_launcher": JudgedExecutor(
        ("vllm.v1.executor.uniproc_executor.ExecutorWithExternalLauncher",),
        "gives each rank a scheduler of its own, and answers of the cache reach these at other "
        "times, so the ranks would compute other tokens in one step and wait for each other",
    ),
}
"""Every value that vLLM 0.30 to 0.33 names; tests/unit/vllm/test_executors.py asks the engine."""
JOINING = (
    "init_kv_output_aggregator",
    "get_kv_connector_handshake_metadata",
    "collective_rpc",
    "execute_model",
    "sample_tokens",
)
"""The methods of an executor by which plans reach all ranks, and their reports are joined."""


def executor_finding(parallel: Any) -> Finding:
    """Return whether the executor of a ParallelConfig serves the engine.

    A class that is not in the table serves several ranks where it derives from an executor that
    does, and takes all methods of JOINING from it. Such a class starts workers in another way.
    """
    backend = parallel.distributed_executor_backend
    tensor, stages = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    name = backend.__qualname__ if isinstance(backend, type) else str(backend)
    if tensor * stages == 1:
        return ok(CHECK, f"{name}, an engine of one rank")
    judged = EXECUTORS.get(name) if backend == name else None
    why = _refusal_of_class(backend) if judged is None else judged.refused
    ranks = f"tensor_parallel_size={tensor}"
    ranks += f" and pipeline_parallel_size={stages}" if stages > 1 else ""
    what = f"distributed_executor_backend={name!r} with {ranks} {why}"
    works = 'distributed_executor_backend="mp" works, and so does an engine of one rank'
    return judge(CHECK, not why, f"{name}, one scheduler for {tensor * stages} ranks", what, works)


def _refusal_of_class(backend: Any) -> str:
    """Return why a class of executors, or the path of one, may not join several ranks. "" = it may.

    `"vllm.v1.executor.multiproc_executor.MultiprocExecutor"` -> "".
    """
    try:
        executor = pkgutil.resolve_name(backend) if isinstance(backend, str) else backend
        bases = executor.__mro__
    except (ImportError, AttributeError, ValueError) as error:
        return f"is no class of executors that can be imported ({error})"
    judged = {path: row for row in EXECUTORS.values() for path in row.classes}
    for base in bases:
        row = judged.get(f"{base.__module__}.{base.__qualname__}")
        if row is not None:
            others = [
                name for name in JOINING if getattr(executor, name) is not getattr(base, name)
            ]
            own = f"has a {others[0]} of its own, which was never tried" if others else ""
            return row.refused or own
    return "was never tried: it may join the ranks' reports in another way"
