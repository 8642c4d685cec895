"""CudaDevice's own code, on the fake runtime and the fake torch.cuda (tests.fakecuda).

A call that is misspelt, that has an argument less, or whose status nobody reads is seen here.
"""

import ctypes
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from queue import Queue
from typing import Any

import pytest
import torch

from hybridkv.connector.copy import cuda_device, triton_kernels
from hybridkv.connector.copy.cuda import CudaCopier
from hybridkv.connector.copy.cuda_device import CudaDevice
from hybridkv.connector.copy.device import DeviceError, DeviceMemoryError, Lane
from hybridkv.connector.copy.part import BadSlotError, PartLayout
from hybridkv.connector.copy.pipeline import CopyPipeline, Demand
from hybridkv.connector.copy.staging import CopySizes
from hybridkv.connector.copy.tables import make_tables
from hybridkv.connector.copy.torch_kernels import TorchKernels
from hybridkv.connector.copy.triton_kernels import TritonKernels
from hybridkv.connector.metrics import COPIES_UNPINNED
from hybridkv.core.copies import CopyOp
from hybridkv.core.errors import HybridKVError
from hybridkv.shm.arena import Arena
from hybridkv.shm.slots import PIECE_BYTES
from tests.arenas import ops_of_new_slots, unnamed_arena
from tests.devicesim.device import GRID_MAX
from tests.fakecuda.runtime import (
    GREATEST_PRIORITY,
    ILLEGAL_ADDRESS,
    INVALID_VALUE,
    LEAST_PRIORITY,
    NON_BLOCKING,
    OUT_OF_MEMORY,
)
from tests.fakecuda.torch_cuda import WORKER, FakeCuda, fake_cuda
from tests.waiting import DEADLINE_SECONDS, until

ARENA = 2 << 20
LAYERS, BLOCKS, BLOCK = 3, 12, 49_152
PART = LAYERS * BLOCK
PIN = 1 << 19
SIZES = CopySizes(
    copy_bytes=4096,
    pin_bytes=PIN,
    bounce_bytes=8192,
    descriptor_bytes=1 << 16,
    load_ring_bytes=4 * PART,
)
VERSIONS = [12060, 12090, 13000]
"""Without copies in one call, and with both forms of it."""


@pytest.fixture
def arena() -> Iterator[Arena]:
    with unnamed_arena(ARENA) as opened:
        yield opened


@pytest.fixture
def cuda() -> Iterator[FakeCuda]:
    with fake_cuda() as fake:
        yield fake
        assert not fake.runtime.wrongs


class Rig:
    """An engine's blocks, and the copier of its arena; one block of all layers is an object."""

    def __init__(
        self, cuda: FakeCuda, arena: Arena, checksum: str = "on", device: str = f"cuda:{WORKER}"
    ) -> None:
        self.cuda = cuda
        self.arena = arena
        self.memory = torch.zeros(LAYERS, BLOCKS, BLOCK, dtype=torch.uint8, device=device)
        self._draw = torch.Generator().manual_seed(1)
        self.fill()
        self.device = CudaDevice(torch.device(device))
        threads_before = set(threading.enumerate())
        self.pipeline = CopyPipeline(
            self.device, [list(self.memory)], Demand(PART, 1, 8 * PART), SIZES
        )
        self.part = PartLayout(0, 1, checksum)
        self.copier = CudaCopier(self.pipeline, arena, self.part)
        self.ended: Queue[bool | HybridKVError | None] = Queue()
        self.lanes = set(threading.enumerate()) - threads_before

    def fill(self) -> torch.Tensor:
        """Give the engine's blocks other bytes. Returns their memory."""
        return self.memory.random_(0, 256, generator=self._draw)

    def ops(self, count: int, first: int = 1) -> list[CopyOp]:
        """One object for each of so many blocks, in slots of its own."""
        return ops_of_new_slots(self.arena, PART, count, first)

    def store(self, ops: Sequence[CopyOp]) -> list[bool | HybridKVError | None]:
        """Store all ops to their end. Returns their outcomes."""
        self.copier.store(ops, lambda op, stored: self.ended.put(stored))
        return self.take(len(ops))

    def load(self, ops: Sequence[CopyOp]) -> bool | HybridKVError | None:
        """Load all ops to their end. Returns the error, or None."""
        self.copier.load(ops, self.ended.put)
        return self.take(1)[0]

    def take(self, count: int) -> list[bool | HybridKVError | None]:
        """Return the outcomes of the next `count` copies."""
        return [self.ended.get(timeout=DEADLINE_SECONDS) for _ in range(count)]

    def slot(self, op: CopyOp) -> bytes:
        """Return the bytes of the part that the op's slot holds."""
        start = self.part.part_offset(op, PART)
        return bytes(self.arena.memory[start : start + PART])

    def pin(self) -> None:
        """Pin all of the arena, and wait for it."""
        self.copier.pin_below(ARENA)
        until(lambda: len(self.cuda.runtime.registered) == ARENA // PIN, "the registrations")

    def close(self) -> None:
        """Unpin everything, and wait for all threads that use the test's memory."""
        self.copier.close()
        self.pipeline.close()
        for thread in self.lanes:
            thread.join(DEADLINE_SECONDS)
            assert not thread.is_alive()


@pytest.fixture
def busy_interpreter() -> Iterator[None]:
    """A thread computes, and threads take the interpreter from each other at any bytecode."""
    before, is_over = sys.getswitchinterval(), threading.Event()
    thread = threading.Thread(target=deque, args=(iter(is_over.is_set, True), 0))
    sys.setswitchinterval(1e-6)
    thread.start()
    yield
    is_over.set()
    thread.join()
    sys.setswitchinterval(before)


@pytest.mark.parametrize(
    ("version", "has_triton", "checksum"),
    [
        *((version, True, "on") for version in VERSIONS),
        (13000, True, "off"),
        (13000, True, "paranoid"),
        (13000, False, "on"),
        (12090, False, "paranoid"),
    ],
)
def test_bytes_come_back(arena: Arena, version: int, has_triton: bool, checksum: str) -> None:
    """Before anything is pinned and after; every other byte stays as it is."""
    with fake_cuda(version, has_triton=has_triton) as cuda:
        rig = Rig(cuda, arena, checksum)
        assert isinstance(rig.pipeline.context.kernels, TritonKernels) == has_triton
        for is_pinned in (False, True):
            if is_pinned:
                rig.pin()
            before = rig.fill().cpu()
            rig.pipeline.take_counters()
            ops = rig.ops(8)
            assert rig.store(ops) == [True] * 8
            for op in ops:
                assert rig.slot(op) == before[:, op.blocks[0]].numpy().tobytes()
            rig.memory[:, 1:9].zero_()
            assert rig.load(ops) is None
            assert torch.equal(rig.memory.cpu(), before)
            assert (COPIES_UNPINNED in rig.pipeline.take_counters()) != is_pinned
        rig.close()
        assert bool(cuda.runtime.calls["cudaMemcpyBatchAsync"]) == (version >= 12080)
        assert not cuda.runtime.registered
        assert cuda.runtime.pageable_copies == 0, "such a copy holds up its caller"
        assert cuda.spinning_events == 0
        assert not cuda.runtime.wrongs


@pytest.mark.usefixtures("busy_interpreter")
def test_copies_go_on_beside_a_thread_that_holds_the_interpreter(
    cuda: FakeCuda, arena: Arena
) -> None:
    rig = Rig(cuda, arena)
    before = rig.memory.cpu()
    ops = rig.ops(8)
    rig.copier.pin_below(ARENA)
    for _ in range(3):
        assert rig.store(ops) == [True] * 8
        rig.memory[:, 1:9].zero_()
        assert rig.load(ops) is None
        assert torch.equal(rig.memory.cpu(), before)
    rig.close()


def test_a_block_may_be_overwritten_as_soon_as_store_returns(cuda: FakeCuda, arena: Arena) -> None:
    rig = Rig(cuda, arena)
    before = rig.memory.cpu()
    ops = rig.ops(4)
    rig.copier.store(ops, lambda op, stored: rig.ended.put(stored))
    rig.memory.fill_(0x5A)
    assert rig.take(4) == [True] * 4
    for op in ops:
        assert rig.slot(op) == before[:, op.blocks[0]].numpy().tobytes()
    rig.close()


@pytest.mark.parametrize("has_own_stream", [False, True])
def test_a_load_comes_after_what_the_engine_has_queued(
    cuda: FakeCuda, arena: Arena, has_own_stream: bool
) -> None:
    """On whatever stream the engine's thread works."""
    with ExitStack() as stack:
        rig = Rig(cuda, arena)
        if has_own_stream:
            handle = rig.device.new_stream()
            stack.enter_context(torch.cuda.stream(torch.cuda.ExternalStream(handle, WORKER)))
        before = rig.memory.cpu()
        ops = rig.ops(4)
        assert rig.store(ops) == [True] * 4
        host = torch.empty(0, dtype=torch.uint8).set_(rig.memory.untyped_storage())
        overwritten = 0

        def overwrite() -> None:
            nonlocal overwritten
            host.view(LAYERS, BLOCKS, BLOCK)[:, 1:5].fill_(0x5A)
            overwritten += 1

        cuda.queue(overwrite)
        assert rig.load(ops) is None
        assert overwritten == 1
        torch.cuda.synchronize()
        assert torch.equal(rig.memory.cpu(), before)
        rig.close()


def test_a_slot_that_was_damaged_is_found(cuda: FakeCuda, arena: Arena) -> None:
    rig = Rig(cuda, arena)
    ops = rig.ops(2)
    assert rig.store(ops) == [True] * 2
    arena.memory[rig.part.part_offset(ops[1], PART) + PIECE_BYTES // 2] ^= 1
    error = rig.load(ops)
    assert isinstance(error, BadSlotError)
    assert error.slots == [ops[1].slot]
    rig.close()


def test_streams_are_ours_alone_and_of_a_priority_that_the_device_has(
    cuda: FakeCuda, arena: Arena
) -> None:
    """A stream without NON_BLOCKING waits for the default stream, on which others work."""
    rig = Rig(cuda, arena)
    streams = [stream for handle, stream in cuda.runtime.streams.items() if handle]
    assert len(streams) >= 4
    for stream in streams:
        assert stream.flags == NON_BLOCKING
        assert stream.device == WORKER
        assert GREATEST_PRIORITY <= stream.priority <= LEAST_PRIORITY
    rig.close()


def copies(device: CudaDevice) -> None:
    memory = device.allocate(64)
    pinned = device.allocate(64, pinned=True)
    stream = device.new_stream()
    device.copy(memory.data_ptr(), pinned.data_ptr(), 64, stream)
    device.wait_for(device.record(stream))


def unregisters(device: CudaDevice) -> None:
    memory = torch.zeros(3 * 4096, dtype=torch.uint8)
    assert device.register(memory.data_ptr(), len(memory))
    device.unregister(memory.data_ptr())


CALLS: dict[str, Callable[[CudaDevice], Any]] = {
    "cudaDeviceGetStreamPriorityRange": lambda device: CudaDevice(torch.device("cuda", WORKER)),
    "cudaStreamCreateWithPriority": lambda device: device.new_stream(),
    "cudaMemcpyAsync": copies,
    "cudaHostUnregister": unregisters,
}
"""Each call of the runtime whose status is an error, by its name, and what makes it."""


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("version", VERSIONS)
def test_a_call_that_fails_is_an_error_and_the_next_launch_is_none(version: int, name: str) -> None:
    """A thread's error stays until it is taken, and torch's next launch would raise it."""
    with fake_cuda(version) as cuda:
        device = CudaDevice(torch.device("cuda", WORKER))
        CALLS[name](device)
        before = cuda.runtime.calls[name]
        cuda.runtime.refuse(name, INVALID_VALUE)
        with pytest.raises(DeviceError, match=f"{name} .* {INVALID_VALUE}"):
            CALLS[name](device)
        assert cuda.runtime.calls[name] == before + 1
        torch.zeros(8, dtype=torch.uint8, device="cuda").add_(1)


@pytest.mark.parametrize("version", [12090, 13000])
def test_where_copies_in_one_call_are_refused_they_are_queued_one_by_one(
    arena: Arena, version: int, caplog: pytest.LogCaptureFixture
) -> None:
    """It is said once, and the refusal is not the error of the thread's next launch."""
    with fake_cuda(version) as cuda:
        rig = Rig(cuda, arena)
        rig.pin()
        before = rig.memory.cpu()
        cuda.runtime.refuse("cudaMemcpyBatchAsync", INVALID_VALUE, count=1 << 30)
        ops = rig.ops(8)
        for _ in range(2):
            assert rig.store(ops) == [True] * 8
            rig.memory[:, 1:9].zero_()
            assert rig.load(ops) is None
            assert torch.equal(rig.memory.cpu(), before)
        rig.close()
        assert 1 <= caplog.text.count("refused copies in one call") <= 2, "each lane may"
        assert cuda.runtime.calls["cudaMemcpyAsync"] > 16
        assert not cuda.runtime.wrongs


def test_memory_is_pinned_once_in_a_process(cuda: FakeCuda, arena: Arena) -> None:
    """The second copier of the same memory is refused (712): it copies through its buffer."""
    rig = Rig(cuda, arena)
    rig.pin()
    second = CudaCopier(rig.pipeline, arena, PartLayout(0, 1, "on"))
    second.pin_below(ARENA)
    before = rig.memory.cpu()
    ops = rig.ops(4)
    rig.pipeline.take_counters()
    second.store(ops, lambda op, stored: rig.ended.put(stored))
    assert rig.take(4) == [True] * 4
    assert rig.pipeline.take_counters()[COPIES_UNPINNED]
    rig.memory.zero_()
    second.load(ops, rig.ended.put)
    assert rig.take(1) == [None]
    assert torch.equal(rig.memory.cpu()[:, 1:5], before[:, 1:5])
    second.close()
    assert len(cuda.runtime.registered) == ARENA // PIN, "the first one's pins"
    assert rig.load(ops) is None
    rig.close()


def test_an_unregistration_that_fails_is_the_only_one(
    cuda: FakeCuda, arena: Arena, caplog: pytest.LogCaptureFixture
) -> None:
    rig = Rig(cuda, arena)
    rig.pin()
    cuda.runtime.refuse("cudaHostUnregister", INVALID_VALUE, skipped=1)
    rig.close()
    assert "cudaHostUnregister failed" in caplog.text
    assert len(cuda.runtime.registered) == 1


def test_an_error_that_ends_the_context_fails_what_is_queued(cuda: FakeCuda, arena: Arena) -> None:
    """All later calls have it too; nobody waits for ever."""
    rig = Rig(cuda, arena)
    ops = rig.ops(4)
    assert rig.store(ops) == [True] * 4
    rig.copier.load(ops, rig.ended.put)
    cuda.runtime.fail(ILLEGAL_ADDRESS)
    (outcome,) = rig.take(1)
    assert outcome is None or isinstance(outcome, DeviceError)
    with pytest.raises(DeviceError):
        rig.device.free_bytes()
    with pytest.raises(DeviceError):
        rig.device.record(rig.device.current_stream())
    rig.close()


def test_memory_that_is_not_there(cuda: FakeCuda) -> None:
    cuda.free_bytes = 4096
    device = CudaDevice(torch.device("cuda", WORKER))
    with pytest.raises(DeviceMemoryError):
        device.allocate(device.free_bytes() + 1)
    cuda.refuses_pinned = True
    with pytest.raises(DeviceError):
        device.allocate(64, pinned=True)


def test_a_device_without_an_index_is_that_of_the_engines_thread(cuda: FakeCuda) -> None:
    device = CudaDevice(torch.device("cuda"))
    chosen: list[int] = []

    def lane() -> Lane:
        device.enter_thread()
        chosen.append(torch.cuda.current_device())
        yield from ()

    threads_before = set(threading.enumerate())
    device.start_lane("hybridkv-store", lane())
    for thread in set(threading.enumerate()) - threads_before:
        thread.join(DEADLINE_SECONDS)
    assert chosen == [WORKER]
    assert device.allocate(8).device == torch.device("cuda", WORKER)


def test_kernels_of_triton_that_copy_other_bytes_are_not_used(
    cuda: FakeCuda, arena: Arena, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Wrong:
        can_digest = True

        def __init__(self, word_bytes: int, device: torch.device) -> None:
            self._kernels = triton(word_bytes, device)

        def copy_blocks(self, launch: Any, is_gather: bool) -> None:
            self._kernels.copy_blocks(launch, is_gather)
            cuda.queue(lambda: spoil(launch.staging))

        def digest_pieces(self, *addresses_and_counts: int) -> None:
            self._kernels.digest_pieces(*addresses_and_counts)

    def spoil(staging: torch.Tensor) -> None:
        torch.empty(0, dtype=torch.uint8).set_(staging.untyped_storage())[0] ^= 1

    triton = triton_kernels.TritonKernels
    monkeypatch.setattr(cuda_device, "TritonKernels", Wrong)
    rig = Rig(cuda, arena)
    assert "Triton copies other bytes" in caplog.text
    assert rig.store(rig.ops(4)) == [True] * 4
    rig.close()


def test_a_block_in_more_pieces_than_a_grid_has_is_copied_by_torch(
    cuda: FakeCuda, arena: Arena, caplog: pytest.LogCaptureFixture
) -> None:
    """A row is a piece of a block, and CUDA takes 65,535 of them."""
    rig = Rig(cuda, arena)
    views = [list(rig.memory)]
    tables = make_tables(views)
    device_rows = torch.tensor(tables.rows, dtype=torch.int64).to(rig.memory.device)
    staging = rig.device.allocate(2 * PART)
    long = replace(tables, groups=(replace(tables.groups[0], rows=GRID_MAX[1] + 1),))
    kernels = rig.device.make_kernels(long, device_rows, views, staging)
    assert isinstance(kernels, TorchKernels)
    assert f"more than {GRID_MAX[1]}" in caplog.text
    rig.close()


def test_the_runtime_is_the_one_that_torch_has_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    maps = [
        "7f00-7f01 r-xp 00000000 00:1f 11 /usr/lib/libc.so.6",
        "7f01-7f02 r--p 00000000 00:1f 12 /site packages/nvidia/cu13/lib/libcudart.so.13",
        "7f02-7f03 rw-p 00000000 00:00 0",
    ]
    loaded: list[str] = []
    monkeypatch.setattr(Path, "read_text", lambda path: "\n".join(maps))
    monkeypatch.setattr(ctypes, "CDLL", loaded.append)
    cuda_device.load_runtime()
    assert loaded == ["/site packages/nvidia/cu13/lib/libcudart.so.13"]
    del maps[1:]
    with pytest.raises(DeviceError):
        cuda_device.load_runtime()


def test_memory_below_what_torch_gives_is_half_as_large(arena: Arena) -> None:
    """DeviceMemoryError alone makes a ring smaller."""
    free = LAYERS * BLOCKS * BLOCK + 24 * PART
    with fake_cuda(free_bytes=free) as cuda:
        rig = Rig(cuda, arena)
        assert PART <= rig.pipeline.staging_bytes < 8 * PART
        cuda.runtime.refuse("cudaHostRegister", OUT_OF_MEMORY)
        rig.copier.pin_below(ARENA)
        assert rig.store(rig.ops(1)) == [True]
        rig.close()
        assert not cuda.runtime.wrongs


def test_the_runtime_is_torchs_and_no_copy_of_another_package() -> None:
    line = "7f00-7f01 r-xp 00000000 fe:00 12 {}\n"
    copy = line.format("/site/torchvision.libs/libcudart.faf08d9a.so.13")
    own = line.format("/site/nvidia/cu13/lib/libcudart.so.13")
    assert cuda_device.runtime_path(copy + own) == "/site/nvidia/cu13/lib/libcudart.so.13"
    assert cuda_device.runtime_path(copy) == "/site/torchvision.libs/libcudart.faf08d9a.so.13"
    assert cuda_device.runtime_path(line.format("/site/libcuda.so.1")) is None
