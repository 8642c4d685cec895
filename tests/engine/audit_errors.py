"""`python -m tests.engine.audit_errors DIRECTORY [MODEL[:DTYPE]...]`: what audits rest on.

Real engines on bundled models compute the same prompts in several ways, and with other weights.
Every stored object is compared with the one that the first engine stored alone. Lines of JSON for
each model and way have what audits of the chunks come to, and for each data type the errors
(connector.worker.difference) and how many objects pass.

The first run keeps its objects in DIRECTORY. A second one with HYBRIDKV_TEST_CPU=avx2 and the same
DIRECTORY compares another processor's with them.
"""

import importlib
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

WAYS: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "steps of 600": ("--max-num-batched-tokens=600",),
    "steps of 4096": ("--max-num-batched-tokens=4096",),
    "other seed": (),
}
"""The engines of a model, by what is special of each, with vLLM's arguments."""
OTHER_SEED = "other seed"
FACTORS = (1.001, 1.01, 1.05, 1.2, 2.0)
"""Factors by which the weights of norms are multiplied in place."""
PROMPTS, CHUNKS, MORE_TOKENS = 16, 3, 20
Bytes = npt.NDArray[np.uint8]
Objects = dict[str, Bytes]
"""Payloads by "gid:name of the chunk"."""


@dataclass
class Tally:
    """The errors and outcomes of the objects of one way and data type."""

    typical: list[float]
    high: list[float]
    outcomes: list[str]

    def line(self) -> dict[str, object]:
        """Returns the figures of the tally for people."""

        def spread(errors: Sequence[float]) -> list[float]:
            quantiles = np.quantile(errors, (0.5, 0.99, 1.0), method="higher")
            return [float(f"{error:.2g}") for error in quantiles]

        passed = self.outcomes.count("passed")
        shares = {"objects": len(self.typical), "passed": passed}
        equal = sum(not error for error in self.high)
        return {
            **shares,
            "equal": equal,
            "typical": spread(self.typical),
            "high": spread(self.high),
        }


def compared(
    layers: Mapping[int, Any], bounds: Any, before: Objects, after: Objects
) -> dict[str, Tally]:
    """Returns by data type the errors of the objects that both have."""
    from hybridkv.connector.worker.difference import compare, errors_of, numbers_of

    tallies: dict[str, Tally] = {}
    for name in sorted(before.keys() & after.keys()):
        numbers = layers[int(name.split(":")[0])]
        stored, computed = before[name], after[name]
        count = len(stored) // sum(layer.block_bytes for layer in numbers)
        outcome = str(compare(numbers, bounds, count, stored, computed).outcome)
        worst: dict[str, list[Any]] = {}
        at = 0
        for layer in numbers:
            stop, shape = at + count * layer.block_bytes, (count, layer.block_bytes)
            for span in layer.ranges:
                cut = slice(span.start_bytes, span.stop_bytes)
                both = [
                    np.ascontiguousarray(part[at:stop].reshape(shape)[:, cut])
                    for part in (stored, computed)
                ]
                errors = errors_of(*(numbers_of(part, span.dtype) for part in both))
                worst.setdefault(span.dtype, []).append(errors)
            at = stop
        for dtype, of_layers in worst.items():
            tally = tallies.setdefault(dtype, Tally([], [], []))
            tally.typical.append(max(errors.typical for errors in of_layers))
            tally.high.append(max(errors.high for errors in of_layers))
            tally.outcomes.append(outcome)
    return tallies


def audited(
    layers: Mapping[int, Any], bounds: Any, before: Objects, after: Objects
) -> dict[str, object]:
    """Returns how many audits of these chunks pass, and the worst error by its bound.

    An audit is over all groups. A recurrent group has an object of few chunks.
    """
    from hybridkv.connector.worker.difference import compare

    verdicts: dict[str, list[Any]] = {}
    for name in before.keys() & after.keys():
        gid, chunk = name.split(":")
        numbers = layers[int(gid)]
        count = len(before[name]) // sum(layer.block_bytes for layer in numbers)
        verdict = compare(numbers, bounds, count, before[name], after[name])
        verdicts.setdefault(chunk, []).append(verdict)
    passed = [
        all(verdict.outcome == "passed" for verdict in chunk_verdicts)
        for chunk_verdicts in verdicts.values()
    ]
    found = [
        verdict
        for chunk_verdicts in verdicts.values()
        for verdict in chunk_verdicts
        if verdict.error_max
    ]
    worst = max((verdict.error / verdict.error_max for verdict in found), default=0.0)
    return {"audits": len(passed), "passed": sum(passed), "worst": float(f"{worst:.2g}")}


class Running:
    """An engine in this process, which is a fork."""

    def __init__(self, model: str, socket_path: str, arguments: Sequence[str]) -> None:
        from hybridkv.lab.runner import EngineRunner, make_engine
        from tests.engine.ready import await_write_slots
        from tests.engine.support import LOOKUP_TIMEOUT_MS, arguments_of

        extra = {"load_policy": "never", "lookup_timeout_ms": LOOKUP_TIMEOUT_MS, "audit": "off"}
        self.engine = make_engine(arguments_of(model, socket_path, *arguments, extra=dict(extra)))
        await_write_slots(self.engine)
        self.runner = EngineRunner(self.engine)
        self.core: Any = self.engine.engine_core.engine_core
        self.connector: Any = self.core.scheduler.connector
        self._socket_path = socket_path
        geometry = self.connector.scheduler_role.geometry
        self.chunk = geometry.chunk_tokens
        worker: Any = self.core.model_executor.driver_worker.worker
        auditor = _connector_of(worker).worker_role.auditor
        self.bounds = auditor.bounds
        self.layers = {
            group.gid: layers for group, layers in zip(geometry.groups, auditor.layers, strict=True)
        }

    def objects(self, prompts: Sequence[list[int]], together: int) -> Objects:
        """Returns the objects that the engine stores of the prompts, `together` at a time."""
        from hybridkv.client.control import ControlClient
        from hybridkv.shm.arena import arena_seen, attach_arena
        from hybridkv.shm.slots import committed_slots, payload_offset
        from tests.waiting import DEADLINE_SECONDS, until

        with ControlClient(self._socket_path, DEADLINE_SECONDS) as control:
            while control.clear_objects():
                pass
            assert self.runner.reset_caches(connector=False)
            scheduler = self.connector.scheduler_role

            def is_read() -> bool:
                self.runner.generate([[5] * 10], 1)
                return bool(self.connector.scheduler_role.weights.is_current)

            until(is_read, "the weights are read")
            for at in range(0, len(prompts), together):
                self.runner.generate(list(prompts[at : at + together]), 1)
            for _ in range(20):
                self.runner.generate([[5] * 10], 1)
            welcome = control.welcome
            reserved = int(control.stats().values["bytes_reserved"])
            namespace = scheduler.session.hello.namespace
            arena = attach_arena(arena_seen(welcome.arena_path), welcome.arena_bytes)
            try:
                memory = arena.memory[:reserved]
                found: Objects = {}
                for offset, header in committed_slots(memory):
                    if header.namespace == namespace:
                        start = offset + payload_offset(header.parts)
                        part = memory[start : start + header.part_bytes]
                        name = f"{header.gid}:{header.chunk_hash.hex()}"
                        found[name] = np.frombuffer(bytes(part), np.uint8)
                        part.release()
                memory.release()
                return found
            finally:
                arena.close()

    def scale(self, factor: float) -> None:
        """Multiply the weights of norms, in place."""
        import torch

        def multiply(worker: Any) -> None:
            with torch.no_grad():
                for name, parameter in worker.model_runner.model.named_parameters():
                    if "norm" in name:
                        parameter.mul_(factor)

        self.engine.collective_rpc(multiply)


def _connector_of(worker: Any) -> Any:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group()


class Arm(NamedTuple):
    """Objects that an engine stored, and the way in which it computed them."""

    name: str
    objects: Objects


def arms(running: Running, way: str) -> Iterator[Arm]:
    """Yields the arms of a model's engine: the objects that are compared."""
    from tests.engine.support import prompt

    prompts = [prompt(seed, CHUNKS * running.chunk + MORE_TOKENS) for seed in range(PROMPTS)]
    yield Arm(f"{way}, alone", running.objects(prompts, 1))
    if way == OTHER_SEED:
        return
    for together in (5, PROMPTS):
        yield Arm(f"{way}, {together} at once", running.objects(prompts, together))
    if way == "default":
        for factor in FACTORS:
            running.scale(factor)
            yield Arm(f"norms x {factor}", running.objects(prompts, 1))
            running.scale(1 / factor)


def measure(model: str, way: str, directory: Path, socket_path: str) -> None:
    """Run one engine, and print a line for each arm and data type."""
    from hybridkv.lab.models import WIDEN_ENV, WIDEN_SEED, bundled_environment

    named, (model, _, dtype_asked) = model, model.partition(":")
    os.environ.update(bundled_environment(model))
    if way == OTHER_SEED:
        _, _, width = os.environ[WIDEN_ENV].partition(":")
        os.environ[WIDEN_ENV] = f"{WIDEN_SEED + 1}:{width}"
    asked = (f"--dtype={dtype_asked}",) if dtype_asked else ()
    running = Running(model, socket_path, (*WAYS[way], *asked))
    kept = directory / f"{named}.npz"
    processor = os.environ.get("HYBRIDKV_TEST_CPU", "default")
    for arm in arms(running, way):
        if not kept.exists():
            arrays: dict[str, Any] = dict(arm.objects)
            np.savez(kept, **arrays)
            continue
        with np.load(kept) as loaded:
            before = {name: loaded[name] for name in loaded.files}
        about = {"model": named, "processor": processor, "way": arm.name}
        audits = audited(running.layers, running.bounds, before, arm.objects)
        print(json.dumps({**about, **audits}), flush=True)
        tallies = compared(running.layers, running.bounds, before, arm.objects)
        for dtype, tally in sorted(tallies.items()):
            print(json.dumps({**about, "dtype": dtype, **tally.line()}), flush=True)


def _fork(model: str, way: str, directory: Path, socket_path: str) -> None:
    try:
        measure(model, way, directory, socket_path)
    except BaseException:  # noqa: BLE001  # the next engine is measured nevertheless
        print(json.dumps({"model": model, "way": way, "error": traceback.format_exc()}), flush=True)
    os._exit(0)


def main() -> None:
    """Measure all models, or those that are named."""
    from hybridkv.lab.daemon_process import DaemonProcess
    from tests.engine.matrix.cases import CASES

    directory, *models = sys.argv[1:]
    Path(directory).mkdir(exist_ok=True)
    context = get_context("fork")
    for model in models or dict.fromkeys(case.model for case in CASES.values()):
        for way in WAYS:
            with (
                tempfile.TemporaryDirectory(prefix="audit-") as place,
                DaemonProcess(f"{place}/d.sock", "512MiB") as daemon,
            ):
                process = context.Process(
                    target=_fork, args=(model, way, Path(directory), daemon.socket_path)
                )
                process.start()
                process.join()


if __name__ == "__main__":
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    importlib.import_module("tests.engine.imported")
    main()
