"""`python -m tests.devicesim.costs` counts what copies cost on a device, for three models.

Calls and bytes are counted on a device that does nothing, and the time of our own code is measured.
The time of CUDA's calls is not in it. docs/gpu.md has the table.
"""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from hybridkv.connector.copy.device import Pieces
from hybridkv.connector.copy.part import PartLayout
from hybridkv.connector.copy.pipeline import CopyPipeline, Demand
from hybridkv.core.copies import CopyOp, SlotRef
from hybridkv.shm.slots import HEADER_BYTES, SlotHeader, SlotState, slot_bytes
from tests.devicesim.device import ENGINE, Event, Running, SimulatedDevice

STEP_TOKENS = 8192
BLOCK_TOKENS = 16
ROUNDS = 20


@dataclass(frozen=True)
class Model:
    """One rank's share of a model with one group of full attention."""

    name: str
    layers: int
    token_bytes: int  # In one layer.


MODELS = (
    Model("Llama-3-8B, TP 1", 32, 8 * 128 * 2 * 2),
    Model("Llama-3-70B, TP 8", 80, 1 * 128 * 2 * 2),
    Model("DeepSeek-V3, MLA", 61, 576 * 2),
)


class NullDevice(SimulatedDevice):
    """Everything is over at once, and nothing is copied."""

    def __init__(self) -> None:
        super().__init__(random.Random(0))

    def allocate(self, size: int, pinned: bool = False) -> torch.Tensor:
        """Real memory on the host alone."""
        return torch.zeros(size if pinned else 0, dtype=torch.uint8)

    def record(self, stream: Any) -> Event:
        """Over."""
        self.counts[self._actor, "record"] += 1
        return Event(self, over=True)

    def wait_event(self, stream: Any, event: Any) -> None:
        """Nothing to wait for."""
        self.counts[self._actor, "wait_event"] += 1

    def copy(self, to: int, source: int, size: int, stream: Any) -> None:
        """Count."""
        self.counts[self._actor, "copy"] += 1
        self.counts[self._actor, "bytes"] += size

    def copy_all(self, pieces: Pieces, stream: Any) -> None:
        """Count one call."""
        self.copy(0, 0, sum(pieces.sizes), stream)

    def launch(self, work: Callable[[], None], stream: Any) -> None:
        """Count."""
        self.counts[self._actor, "launch"] += 1

    def register(self, address: int, size: int) -> bool:
        """All of it."""
        return True

    def run(self, name: str) -> float:
        """Seconds of one lane until it waits for jobs."""
        running: Running = next(one for one in self._lanes if one.name == name)
        started = time.perf_counter()
        while running.can_go():
            self._resume(running)
        return time.perf_counter() - started


def measure(model: Model, chunk_tokens: int) -> dict[str, Any]:
    """What storing one step and loading its objects costs."""
    device = NullDevice()
    blocks = chunk_tokens // BLOCK_TOKENS
    size = BLOCK_TOKENS * model.token_bytes
    part = blocks * size * model.layers
    objects = STEP_TOKENS // chunk_tokens
    # All blocks are one piece of memory, because nothing is copied.
    views = [torch.zeros(size, dtype=torch.uint8).expand(4096, size) for _ in range(model.layers)]
    pipeline = CopyPipeline(device, [views], Demand(part, blocks, objects * part))
    memory = bytearray(slot_bytes(part, 1))
    memory[:HEADER_BYTES] = SlotHeader(SlotState.WRITING, 1, 1, part).pack()
    address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    arena: Any = SimpleNamespace(memory=memoryview(memory), address=address)
    slots = pipeline.attach(arena, PartLayout(0, 1, "on"))
    pipeline.pin(slots, len(memory))
    while device.turn():
        pass
    ops = [
        CopyOp(
            SlotRef(0, 1), 0, chunk, blocks, 0, tuple(range(chunk * blocks, (chunk + 1) * blocks))
        )
        for chunk in range(objects)
    ]
    hook = store = load = float("inf")
    for _ in range(ROUNDS):
        device.counts.clear()
        started = time.perf_counter()
        pipeline.store(slots, ops, lambda op, stored: None)
        hook = min(hook, time.perf_counter() - started)
        store = min(store, device.run("hybridkv-store"))
        pipeline.load(slots, ops, lambda error: None)
        load = min(load, device.run("hybridkv-load"))
    calls = device.counts
    return {
        "model": model.name,
        "chunk": chunk_tokens,
        "object MiB": round(part / 2**20, 1),
        "step MiB": round(objects * part / 2**20),
        "objects": objects,
        "engine: launches": calls[ENGINE, "launch"],
        "engine: copies": calls[ENGINE, "copy"],
        "engine: events": calls[ENGINE, "record"],
        "engine: us a step": round(hook * 1e6),
        **{
            f"{way}: {what} an object": round(
                sum(calls[f"hybridkv-{way}", name] for name in names) / objects, 2
            )
            for way in ("store", "load")
            for what, names in (
                ("calls that copy", ("copy",)),
                ("launches", ("launch",)),
                ("events", ("record", "wait_event")),
            )
        },
        "store: us an object": round(store / objects * 1e6),
        "load: us an object": round(load / objects * 1e6),
    }


def main() -> None:
    """One block of lines for each model and chunk."""
    for model in MODELS:
        for chunk in (128, 256):
            print(", ".join(f"{name} {value}" for name, value in measure(model, chunk).items()))


if __name__ == "__main__":
    main()
