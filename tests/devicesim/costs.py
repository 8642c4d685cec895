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

from hybridkv.connector.copy.device import CopyList
from hybridkv.connector.copy.part import PartLayout
from hybridkv.connector.copy.pipeline import CopyPipeline, Demand
from hybridkv.core.packed import SlotRef
from hybridkv.shm.slots import HEADER_BYTES, SlotHeader, SlotState, slot_bytes
from tests.arenas import whole_object
from tests.devicesim.device import ENGINE, Event, SimulatedDevice

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
        """Allocate real memory on the host alone."""
        return torch.zeros(size if pinned else 0, dtype=torch.uint8)

    def record(self, stream: Any) -> Event:
        self._count("record", 1)
        return Event(self, has_fired=True)

    def wait_event(self, stream: Any, event: Any) -> None:
        self._count("wait_event", 1)

    def copy(self, to: int, source: int, size: int, stream: Any) -> None:
        self._count("copy", 1)
        self._count("bytes", size)

    def copy_all(self, copies: CopyList, stream: Any) -> None:
        """Count one copy of all bytes."""
        self.copy(0, 0, sum(copies.sizes), stream)

    def launch(self, work: Callable[[], None], stream: Any) -> None:
        self._count("launch", 1)

    def register(self, address: int, size: int) -> bool:
        return True

    def run(self, name: str) -> float:
        """Run one lane until it waits for jobs. Returns the seconds that it took."""
        running = next(lane for lane in self.lanes if lane.name == name)
        started = time.perf_counter()
        while running.can_go():
            self.resume(running)
        return time.perf_counter() - started


def measure(model: Model, chunk_tokens: int) -> dict[str, Any]:
    """Return what storing one step and loading its objects costs, by the names of the columns."""
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
    attached = pipeline.attach(arena, PartLayout(0, 1, "on"))
    pipeline.pin_arena(attached, len(memory))
    while device.turn():
        pass
    ops = [
        whole_object(SlotRef(0, 1), chunk, tuple(range(chunk * blocks, (chunk + 1) * blocks)))
        for chunk in range(objects)
    ]
    hook = store = load = float("inf")
    for _ in range(ROUNDS):
        device.counts.clear()
        started = time.perf_counter()
        pipeline.queue_store(attached, ops, lambda op, stored: None)
        hook = min(hook, time.perf_counter() - started)
        store = min(store, device.run("hybridkv-store"))
        pipeline.queue_load(attached, ops, lambda error: None)
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
            f"{direction}: {what} an object": round(
                sum(calls[f"hybridkv-{direction}", name] for name in names) / objects, 2
            )
            for direction in ("store", "load")
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
    """Print one line for each model and size of chunks."""
    for model in MODELS:
        for chunk in (128, 256):
            print(", ".join(f"{name} {value}" for name, value in measure(model, chunk).items()))


if __name__ == "__main__":
    main()
