"""Copies beside the engine's own work: every byte is that of its step, and the engine never waits.

On a machine with a CUDA device these run there too (`scripts/gpu a`); elsewhere on the simulated
device, whose engine has no work of its own.
"""

from collections.abc import Iterator, Sequence
from queue import Queue

import pytest
import torch

from hybridkv.connector.copy.cuda import CudaCopier
from hybridkv.connector.copy.cuda_device import CudaDevice
from hybridkv.connector.copy.part import PartLayout
from hybridkv.connector.copy.pipeline import CopyPipeline, Demand
from hybridkv.core.copies import CopyOp
from hybridkv.core.errors import HybridKVError
from hybridkv.shm.arena import Arena
from hybridkv.shm.slots import payload_offset
from tests.arenas import ops_of_new_slots, unnamed_arena, whole_object
from tests.devicesim.threaded import ThreadedDevice
from tests.waiting import DEADLINE_SECONDS

pytestmark = pytest.mark.engine

LAYERS, BLOCKS, BLOCK = 8, 65, 64 << 10
PART = LAYERS * BLOCK
ARENA = 128 << 20
STEPS = 40
SLEEP_CYCLES = 500_000_000  # Some 300 ms of a GPU.
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture
def arena() -> Iterator[Arena]:
    with unnamed_arena(ARENA) as own_arena:
        yield own_arena


class Rig:
    """An engine's blocks, and the copier of its arena; one block of all layers is an object."""

    def __init__(self, arena: Arena, device: str, step_objects: int = BLOCKS) -> None:
        self.memory = torch.zeros(LAYERS, BLOCKS, BLOCK, dtype=torch.uint8, device=device)
        self.arena, self.is_gpu = arena, device == "cuda"
        copies = CudaDevice(self.memory.device) if self.is_gpu else ThreadedDevice()
        demand = Demand(PART, 1, step_objects * PART)
        self.pipeline = CopyPipeline(copies, [list(self.memory)], demand)
        if self.is_gpu:
            # A green run with torch's own copies would prove nothing of Triton's.
            assert type(self.pipeline.context.kernels).__name__ == "TritonKernels"
        self.copier = CudaCopier(self.pipeline, arena, PartLayout(0, 1, "on"))
        self.outcomes: Queue[bool | HybridKVError | None] = Queue()

    def ops(self, count: int, first: int = 1) -> list[CopyOp]:
        """One object for each of so many blocks, in slots of its own."""
        return ops_of_new_slots(self.arena, PART, count, first)

    def store(self, ops: Sequence[CopyOp]) -> None:
        self.copier.store(ops, lambda op, stored: self.outcomes.put(stored))

    def take(self, count: int) -> list[bool | HybridKVError | None]:
        """Return the outcomes of the next `count` copies."""
        return [self.outcomes.get(timeout=DEADLINE_SECONDS) for _ in range(count)]

    def slot(self, op: CopyOp) -> memoryview:
        start = op.slot.offset + payload_offset(1)
        return self.arena.memory[start : start + PART]

    def work(self) -> torch.cuda.Event | None:
        """Queue work of the engine that takes long. Returns the event of its end on CUDA."""
        if not self.is_gpu:
            return None
        torch.cuda._sleep(SLEEP_CYCLES)
        event = torch.cuda.Event()
        event.record()
        return event

    def close(self) -> None:
        self.copier.close()
        self.pipeline.close()


@pytest.mark.parametrize("device", DEVICES)
def test_each_slot_has_the_bytes_of_its_own_step(arena: Arena, device: str) -> None:
    """The engine writes the next step's bytes into the same blocks as soon as `store` returns."""
    rig = Rig(arena, device)
    for step in range(STEPS):
        rig.memory.fill_(step + 1)
        if step % 8 == 0:
            rig.work()
        ops = rig.ops(1, 1 + step)
        rig.store([whole_object(ops[0].slot, step, (1 + step % (BLOCKS - 1),))])
    rig.memory.fill_(255)
    assert rig.take(STEPS) == [True] * STEPS
    for step in range(STEPS):
        slot = rig.slot(rig.ops(1, 1 + step)[0])
        assert bytes(slot) == bytes([step + 1]) * PART, f"step {step}"
        slot.release()
    rig.close()


@pytest.mark.parametrize("device", DEVICES)
def test_a_load_comes_after_the_engines_own_work(arena: Arena, device: str) -> None:
    """Blocks that a queued kernel zeroes are loaded after it, and all others stay as they are."""
    rig = Rig(arena, device)
    draw = torch.Generator().manual_seed(1)
    rig.memory.copy_(torch.randint(0, 256, rig.memory.shape, dtype=torch.uint8, generator=draw))
    before = rig.memory.clone()
    ops = rig.ops(32)
    rig.store(ops)
    assert rig.take(32) == [True] * 32
    rig.work()
    rig.memory[:, 1:33].zero_()
    rig.copier.load(ops, rig.outcomes.put)
    assert rig.take(1) == [None]
    assert torch.equal(rig.memory, before)
    rig.close()


@pytest.mark.parametrize("device", DEVICES)
def test_the_engines_thread_waits_for_nothing(arena: Arena, device: str) -> None:
    """Its hooks return while its own work is still queued, also before anything is pinned."""
    rig = Rig(arena, device)
    ops = rig.ops(BLOCKS - 1)
    end = rig.work()
    rig.copier.pin_below(ARENA)
    rig.store(ops)
    rig.copier.load(ops[:1], rig.outcomes.put)
    if end is not None:
        assert not end.query(), "the hooks waited for the work before them"
    assert len(rig.take(BLOCKS)) == BLOCKS
    rig.close()


@pytest.mark.parametrize("device", DEVICES)
def test_more_than_the_staging_holds_is_told_and_nothing_is_kept(arena: Arena, device: str) -> None:
    rig = Rig(arena, device, step_objects=4)
    rig.work()
    rig.store(rig.ops(BLOCKS - 1))
    outcomes = rig.take(BLOCKS - 1)
    assert True in outcomes
    assert False in outcomes
    for _ in range(8):
        rig.store(rig.ops(4))
        assert rig.take(4) == [True] * 4
    rig.close()
