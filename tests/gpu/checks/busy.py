"""`python -m tests.gpu.checks.busy`: loads and stores beside a device and a thread that work.

GB/s of 1 GiB in objects of 16 MiB: on an idle machine, after queued matrix products, and beside
Python that holds the interpreter half of the time.
"""

import json
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from queue import Queue
from typing import Any

import torch

from hybridkv.connector.copy.cuda import CudaCopier
from hybridkv.connector.copy.cuda_device import CudaDevice
from hybridkv.connector.copy.part import PartLayout
from hybridkv.connector.copy.pipeline import CopyPipeline, Demand
from hybridkv.connector.copy.staging import CopySizes
from hybridkv.connector.metrics import COPIES_UNPINNED
from hybridkv.core.copies import CopyOp
from hybridkv.shm.arena import Arena
from hybridkv.shm.slots import slot_bytes
from tests.arenas import ops_of_new_slots, unnamed_arena

LAYERS, OBJECT_BLOCKS, BLOCK_BYTES, OBJECTS = 32, 8, 64 << 10, 64
PART_BYTES = LAYERS * OBJECT_BLOCKS * BLOCK_BYTES
TOTAL_BYTES = OBJECTS * PART_BYTES
ARENA_BYTES = (OBJECTS + 1) * slot_bytes(PART_BYTES, 1)
COPY_BYTES = 4 << 20
WAIT_SECONDS = 60.0
ROUNDS = 5
PRODUCTS = 150  # Some 200 ms of a Hopper GPU.
HELD_SECONDS = 0.005  # Of each 10 ms.
VARIANTS = {
    "as configured": CopySizes(),
    "batches of 32 MiB, a ring of 256 MiB": CopySizes(
        batch_bytes=32 << 20, load_ring_bytes=256 << 20, depth=8
    ),
}


class BusyPython:
    """A context manager with a thread that holds the interpreter half of the time."""

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._stop.is_set():
            end = time.perf_counter() + HELD_SECONDS
            while time.perf_counter() < end:
                pass
            time.sleep(HELD_SECONDS)

    def __enter__(self) -> "BusyPython":
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()


class Bench:
    """A context manager with one copier of the engine's blocks and the arena."""

    def __init__(
        self, memory: torch.Tensor, arena: Arena, ops: Sequence[CopyOp], sizes: CopySizes
    ) -> None:
        demand = Demand(PART_BYTES, OBJECT_BLOCKS, TOTAL_BYTES)
        self._device = CudaDevice(memory.device)
        self._pipeline = CopyPipeline(self._device, [list(memory)], demand, sizes)
        self._copier = CudaCopier(self._pipeline, arena, PartLayout(0, 1, "on"))
        self._ops = ops
        self._arena = arena
        self._plain = self._device.allocate(TOTAL_BYTES)
        self._stream = self._device.new_stream()
        self._answers: Queue[Any] = Queue()
        self._factor = torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda")
        self._product = self._factor.clone()

    def __enter__(self) -> "Bench":
        self._copier.pin_below(ARENA_BYTES)
        self.store()
        while self._pipeline.take_counters().get(COPIES_UNPINNED):
            self.store()  # Until the pinning lane has pinned all.
        self.load()
        return self

    def __exit__(self, *exc: object) -> None:
        self._copier.close()
        self._pipeline.close()

    def store(self) -> None:
        """Store all objects, to their end."""
        self._copier.store(self._ops, lambda op, stored: self._answers.put(stored))
        assert all(self._answers.get(timeout=WAIT_SECONDS) for _ in self._ops)

    def load(self) -> None:
        """Load all objects, to their end."""
        self._copier.load(self._ops, self._answers.put)
        error = self._answers.get(timeout=WAIT_SECONDS)
        assert error is None, error

    def load_beside_products(self) -> None:
        """Load all objects while the device computes what was queued after the load."""
        self._copier.load(self._ops, self._answers.put)
        for _ in range(PRODUCTS):
            torch.mm(self._factor, self._factor, out=self._product)
        error = self._answers.get(timeout=WAIT_SECONDS)
        assert error is None, error

    def plain(self, is_store: bool) -> None:
        """Copy the same bytes by copies alone, between the arena and memory of the device."""
        device, attached = self._device, self._copier.attached
        for number, op in enumerate(self._ops):
            start = attached.part.part_offset(op, PART_BYTES)
            plain_start = self._plain.data_ptr() + number * PART_BYTES - start
            for offset, size, _ in attached.pins.cut(start, PART_BYTES, COPY_BYTES):
                slot, plain = self._arena.address + offset, plain_start + offset
                to, source = (slot, plain) if is_store else (plain, slot)
                device.copy(to, source, size, self._stream)
        device.wait_for(device.record(self._stream))

    def table(self) -> dict[str, list[float]]:
        """Measure GB/s by what was done, and beside what. All is stored in the end."""
        table = {
            "plain load": self.rates(partial(self.plain, is_store=False)),
            "load": self.rates(self.load),
            "load beside products": self.rates(self.load_beside_products),
        }
        with BusyPython():
            table["load beside Python"] = self.rates(self.load)
            table["store beside Python"] = self.rates(self.store)
        table["plain store"] = self.rates(partial(self.plain, is_store=True))
        table["store"] = self.rates(self.store)
        return table

    def rates(self, work: Callable[[], None]) -> list[float]:
        """Return the GB/s of ROUNDS rounds of the work."""
        rates: list[float] = []
        for _ in range(ROUNDS):
            torch.cuda.synchronize()
            started = time.perf_counter()
            work()
            rates.append(round(TOTAL_BYTES / (time.perf_counter() - started) / 1e9, 1))
        return rates


def main() -> int:
    """Print the figures; 1 where bytes came back wrong."""
    shape = LAYERS, OBJECT_BLOCKS * OBJECTS + 1, BLOCK_BYTES
    memory = torch.randint(0, 255, shape, dtype=torch.uint8, device="cuda")
    before = memory.clone()
    table: dict[str, dict[str, list[float]]] = {}
    same = True
    with unnamed_arena(ARENA_BYTES) as arena:
        ops = ops_of_new_slots(arena, PART_BYTES, OBJECTS, blocks=OBJECT_BLOCKS)
        for name, sizes in VARIANTS.items():
            with Bench(memory, arena, ops, sizes) as bench:
                table[name] = bench.table()
                memory[:, 1:].zero_()
                bench.load()
                same = same and torch.equal(memory, before)
            print(name, json.dumps(table[name]), file=sys.stderr, flush=True)
    print(json.dumps({"ok": same, **table}))
    return int(not same)


if __name__ == "__main__":
    sys.exit(main())
