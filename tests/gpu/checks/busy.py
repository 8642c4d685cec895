"""`python -m tests.gpu.checks.busy`: loads and stores beside a device and a thread that work.

GB/s of 1 GiB in objects of 16 MiB: on an idle machine, behind queued matrix products, and beside
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
from hybridkv.core.copies import CopyOp, SlotRef
from hybridkv.shm.arena import SHM_DIR, Arena, create_arena
from hybridkv.shm.slots import HEADER_BYTES, SlotHeader, SlotState, slot_bytes

LAYERS, OBJECT_BLOCKS, BLOCK_BYTES, OBJECTS = 32, 8, 64 << 10, 64
PART_BYTES = LAYERS * OBJECT_BLOCKS * BLOCK_BYTES
TOTAL_BYTES = OBJECTS * PART_BYTES
PIECE_BYTES = 4 << 20
WAIT_SECONDS = 60.0
ROUNDS = 5
PRODUCTS = 150  # Some 200 ms of a Hopper GPU.
HELD_SECONDS = 0.005  # Of each 10 ms.
VARIANTS = {
    "as configured": CopySizes(),
    "ring of 512 MiB": CopySizes(load_ring=512 << 20, depth=16),
}


class BusyPython:
    """A thread that holds the interpreter half of the time; a context manager."""

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
    """One copier of the engine's blocks and the arena; a context manager."""

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
        self._copier.pin(OBJECTS * slot_bytes(PART_BYTES, 1))
        self.store()
        while self._pipeline.take_counters().get("copies_unpinned"):
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
        """Load all objects while the device computes what was queued behind the load."""
        self._copier.load(self._ops, self._answers.put)
        for _ in range(PRODUCTS):
            torch.mm(self._factor, self._factor, out=self._product)
        error = self._answers.get(timeout=WAIT_SECONDS)
        assert error is None, error

    def plain(self, is_store: bool) -> None:
        """The same bytes by copies alone, between the arena and memory of the device."""
        device, slots = self._device, self._copier._slots
        for number, op in enumerate(self._ops):
            start = slots.part.payload(op, PART_BYTES)
            ours = self._plain.data_ptr() + number * PART_BYTES - start
            for at, size, _ in slots.pins.cut(start, PART_BYTES, PIECE_BYTES):
                slot, plain = self._arena.address + at, ours + at
                to, source = (slot, plain) if is_store else (plain, slot)
                device.copy(to, source, size, self._stream)
        device.wait(device.record(self._stream))

    def rates(self, work: Callable[[], None]) -> list[float]:
        """GB/s of some rounds."""
        rates: list[float] = []
        for _ in range(ROUNDS):
            torch.cuda.synchronize()
            started = time.perf_counter()
            work()
            rates.append(round(TOTAL_BYTES / (time.perf_counter() - started) / 1e9, 1))
        return rates


def make_ops(arena: Arena) -> list[CopyOp]:
    """All objects, each with a slot that is being written."""
    stride = slot_bytes(PART_BYTES, 1)
    ops: list[CopyOp] = []
    for number in range(OBJECTS):
        at, first = number * stride, 1 + OBJECT_BLOCKS * number
        header = SlotHeader(SlotState.WRITING, 7 + number, 1, PART_BYTES)
        arena.memory[at : at + HEADER_BYTES] = header.pack()
        blocks = tuple(range(first, first + OBJECT_BLOCKS))
        ops.append(CopyOp(SlotRef(at, 7 + number), 0, number, OBJECT_BLOCKS, 0, blocks))
    return ops


def main() -> int:
    """Print the figures; 1 where bytes came back wrong."""
    shape = LAYERS, OBJECT_BLOCKS * OBJECTS + 1, BLOCK_BYTES
    memory = torch.randint(0, 255, shape, dtype=torch.uint8, device="cuda")
    before = memory.clone()
    arena_bytes = OBJECTS * slot_bytes(PART_BYTES, 1)
    arena = create_arena(SHM_DIR / "hybridkv-busy", arena_bytes)
    arena.unlink()
    arena.reserve(0, arena_bytes)
    ops = make_ops(arena)
    table: dict[str, dict[str, list[float]]] = {}
    same = True
    for name, sizes in VARIANTS.items():
        with Bench(memory, arena, ops, sizes) as bench:
            row = {
                "plain load": bench.rates(partial(bench.plain, is_store=False)),
                "load": bench.rates(bench.load),
                "store": bench.rates(bench.store),
            }
            row["load beside products"] = bench.rates(bench.load_beside_products)
            with BusyPython():
                row["load beside Python"] = bench.rates(bench.load)
                row["store beside Python"] = bench.rates(bench.store)
            row["plain store"] = bench.rates(partial(bench.plain, is_store=True))
            bench.store()
            memory[:, 1:].zero_()
            bench.load()
            same = same and torch.equal(memory, before)
        table[name] = row
        print(name, json.dumps(row), file=sys.stderr, flush=True)
    print(json.dumps({"ok": same, **table}))
    return int(not same)


if __name__ == "__main__":
    sys.exit(main())
