"""Prompts that RAM cannot hold together, from a directory: `python -m benchmarks.large_hits`.

A real engine computes and stores some prompts one after the other, and gets all of them again. RAM
holds a share of what their hits need, and a directory holds all of it. The engine's own cache is
emptied in between. A share below that of one prompt leaves RAM too small for any of them: the
longest prefix that fits is hit then.
"""

import argparse
import json
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.engines import connected_engine
from hybridkv.client.control import ControlClient
from hybridkv.core.coverage import needed_chunks, part_bytes
from hybridkv.core.geometry import Geometry
from hybridkv.lab.daemon_process import DaemonProcess
from hybridkv.lab.engine_process import EngineProcess
from hybridkv.lab.models import bundled_models
from hybridkv.shm.slots import slot_bytes
from hybridkv.wire.messages import geometry_from_wire

MIB = 1 << 20
VOCABULARY = range(2, 2048)
STEP_TOKENS = 1024
FIRST_RAM = 64 * MIB  # For the daemon that only learns the engine's layers.
ENGINE_BYTES_PER_TOKEN = 12 << 10
"""More than the layers of any bundled model keep of a token."""
ANSWER_TOKENS = 16  # Tokens of each answer: a store waits for slots until the request ends.
TURN_TOKENS = 16  # Tokens of a prompt that keeps the engine stepping.
WAIT_SECONDS, POLL_SECONDS = 120.0, 0.1


@dataclass(frozen=True)
class Workload:
    """A model, and the prompts that it is asked."""

    model: str
    tokens: int
    """Tokens of each prompt."""
    prompts: int
    ram_share: float
    """The share of RAM that the hits of all prompts need together."""
    load_policy: str
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """Overrides of the model's configuration."""


def measured(workload: Workload, directory: Path) -> Iterator[dict[str, Any]]:
    """Yields a row for each prompt, and at last one for all.

    Times are seconds to the first token.
    """
    socket_path = str(directory / "daemon.sock")
    tier = ["--node", "bench", "--tier", f"disk://{directory}/disk"]
    with ExitStack() as stack:
        first = stack.enter_context(DaemonProcess(socket_path, f"{FIRST_RAM // MIB}MiB"))
        engine = stack.enter_context(_engine(workload, socket_path, directory))
        _until(lambda: _is_attached(engine, socket_path))
        geometry = _geometry(socket_path)
        prompt_bytes = hit_bytes(geometry, geometry.whole_chunks(workload.tokens - 1))
        ram_mib = max(1, round(workload.prompts * prompt_bytes * workload.ram_share / MIB))
        first.__exit__()
        daemon = DaemonProcess(socket_path, f"{ram_mib}MiB", options=tier)
        stack.enter_context(daemon)
        _until(lambda: _is_attached(engine, socket_path))
        texts = [
            random.Random(seed).choices(VOCABULARY, k=workload.tokens)
            for seed in range(workload.prompts)
        ]
        computed = [_asked(engine, text) for text in texts]
        _until(lambda: not _stats(socket_path)["writes_waiting"])
        engine.reset_caches()
        _until(lambda: _is_attached(engine, socket_path))
        again = [_asked(engine, text) for text in texts]
        values = _stats(socket_path)
    for number, (computed_answer, cached_answer) in enumerate(zip(computed, again, strict=True)):
        yield {
            "prompt": number,
            "computed": round(computed_answer["ttft_seconds"], 2),
            "from the cache": round(cached_answer["ttft_seconds"], 2),
            "hit tokens": cached_answer["cached_tokens"],
        }
    sums = [sum(result["ttft_seconds"] for result in round) for round in (computed, again)]
    yield {
        "model": workload.model,
        "tokens": workload.tokens,
        "prompt MiB": round(prompt_bytes / MIB),
        "RAM MiB": ram_mib,
        "computed": round(sums[0], 2),
        "from the cache": round(sums[1], 2),
        "times faster": round(sums[0] / sums[1], 1),
        "read MiB": round(values.get("tier_disk_bytes_read", 0) / MIB),
        "cut for room": int(values.get("promotions_no_room", 0)),
    }


def hit_bytes(geometry: Geometry, chunks: int) -> int:
    """The bytes of RAM that a hit of so many chunks needs."""
    return sum(
        slot_bytes(part_bytes(geometry, group, chunk), geometry.parts(group))
        for group in geometry.groups
        for chunk in needed_chunks(geometry, group, chunks)
    )


def _engine(workload: Workload, socket_path: str, directory: Path) -> EngineProcess:
    length = workload.tokens + 64
    return connected_engine(
        workload.model,
        socket_path,
        directory,
        f"--kv-cache-memory-bytes={length * ENGINE_BYTES_PER_TOKEN + 32 * MIB}",
        f"--max-num-batched-tokens={STEP_TOKENS}",
        settings={"load_policy": workload.load_policy, "lookup_timeout_ms": 2000},
        max_position_embeddings=length,
        **workload.overrides,
    )


def _asked(engine: EngineProcess, text: list[int]) -> dict[str, Any]:
    (result,) = engine.generate(text, max_tokens=ANSWER_TOKENS)
    return result


def _stats(socket_path: str) -> dict[str, float]:
    with ControlClient(socket_path) as control:
        return control.stats().values


def _geometry(socket_path: str) -> Geometry:
    with ControlClient(socket_path) as control:
        (engine,) = control.engines()
    return geometry_from_wire(engine.geometry)


def _is_attached(engine: EngineProcess, socket_path: str) -> bool:
    """Whether the daemon knows the engine, which looks for it in its steps."""
    engine.generate([*VOCABULARY[:TURN_TOKENS]], max_tokens=1)
    return _stats(socket_path)["sessions"] == 1


def _until(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not happened():
        if time.monotonic() > deadline:
            raise TimeoutError(f"the daemon and the engine are not ready after {WAIT_SECONDS:g} s")
        time.sleep(POLL_SECONDS)


def main() -> None:
    """Print a line of JSON for each prompt, and one for all."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.large_hits", description=__doc__)
    parser.add_argument("--model", default="gemma3", choices=bundled_models())
    parser.add_argument("--tokens", type=int, default=1 << 18, help="of each prompt")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--ram-share", type=float, default=0.5, help="of what all hits need")
    parser.add_argument("--load-policy", default="faster", choices=("faster", "always"))
    what = "of the model's configuration, in JSON, as for vLLM: a model with fewer heads takes less"
    parser.add_argument("--hf-overrides", type=json.loads, default={}, help=what)
    options = parser.parse_args()
    workload = Workload(
        model=options.model,
        tokens=options.tokens,
        prompts=options.prompts,
        ram_share=options.ram_share,
        load_policy=options.load_policy,
        overrides=options.hf_overrides,
    )
    with tempfile.TemporaryDirectory() as directory:
        for row in measured(workload, Path(directory)):
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
