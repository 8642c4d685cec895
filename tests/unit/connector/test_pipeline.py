"""What the pipeline of a device does at its limits; tests/devicesim draws everything else."""

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hybridkv.connector.copy import pins
from hybridkv.connector.copy.cuda import CudaCopier
from hybridkv.connector.copy.part import BadSlotError, PartLayout
from hybridkv.connector.copy.pipeline import CopyPipeline, Demand
from hybridkv.connector.copy.ring import Ring
from hybridkv.connector.copy.staging import CopySizes
from hybridkv.connector.copy.tables import KernelLaunch
from hybridkv.connector.metrics import COPIES_UNPINNED, Shed, stores_shed
from hybridkv.core.copies import CopyOp
from hybridkv.core.errors import HybridKVError
from hybridkv.shm.arena import Arena
from hybridkv.shm.slots import HEADER_BYTES, SlotHeader, SlotState
from tests.arenas import ops_of_new_slots, unnamed_arena
from tests.devicesim.device import COMPUTE, Habits, SimulatedDevice
from tests.devicesim.threaded import ThreadedDevice
from tests.waiting import DEADLINE_SECONDS

ARENA = 4 << 20
BLOCKS = 33
BLOCK = 8192
LAYERS = 3
PART = BLOCK * LAYERS
SIZES = CopySizes(copy_bytes=4096, pin_bytes=ARENA, bounce_bytes=8192)


@pytest.fixture
def arena() -> Iterator[Arena]:
    with unnamed_arena(ARENA) as own_arena:
        yield own_arena


class Rig:
    """A pipeline on a simulated device; one block makes an object."""

    def __init__(
        self,
        arena: Arena,
        habits: Habits | None = None,
        checksum: str = "on",
        sizes: CopySizes | None = None,
        step: int = 8,
        device: SimulatedDevice | None = None,
    ) -> None:
        self.device = device or SimulatedDevice(random.Random(1), habits)
        self.views = [
            torch.randint(0, 256, (BLOCKS, BLOCK), dtype=torch.uint8) for _ in range(LAYERS)
        ]
        for view in self.views:
            self.device.adopt(view)
        sizes = sizes or replace(SIZES, pin_bytes=1 << 19, load_ring_bytes=8 * PART)
        self.pipeline = CopyPipeline(self.device, [self.views], Demand(PART, 1, step * PART), sizes)
        self.arena = arena
        self.part = PartLayout(0, 1, checksum)
        self.copier = CudaCopier(self.pipeline, arena, self.part)
        self.stored: list[bool] = []  # The outcome of each op.
        self.loaded: list[HybridKVError | None] = []  # The outcome of each load.

    def ops(self, count: int, first: int = 1) -> list[CopyOp]:
        """One object for each of so many blocks, in slots of its own."""
        return ops_of_new_slots(self.arena, PART, count, first)

    def store(self, ops: Sequence[CopyOp]) -> None:
        """Begin a store, in a hook."""
        with self.device.hook():
            self.copier.store(ops, lambda op, stored: self.stored.append(stored))

    def load(self, ops: Sequence[CopyOp]) -> None:
        """Begin a load, in a hook."""
        with self.device.hook():
            self.copier.load(ops, self.loaded.append)

    def store_all(self, ops: Sequence[CopyOp]) -> list[bool]:
        """Store all ops to their end. Returns their outcomes."""
        self.stored.clear()
        self.store(ops)
        self.device.settle()
        return self.stored

    def load_all(self, ops: Sequence[CopyOp]) -> HybridKVError | None:
        """Load all ops to their end. Returns the error, or None."""
        self.loaded.clear()
        self.load(ops)
        self.device.settle()
        (error,) = self.loaded
        return error


def test_a_ring_has_room_for_what_its_credits_allow() -> None:
    """Whatever the sizes are, and wherever a piece ends (issue 14: no fragmentation)."""
    rng = random.Random(3)
    for _ in range(200):
        largest = rng.randrange(1, 50)
        ring = Ring(largest + rng.randrange(200), largest)
        pieces: list[range] = []
        for _ in range(200):
            size = rng.randrange(1, largest + 1)
            if sum(map(len, pieces)) + size <= ring.size:
                start = ring.reserve(size)
                assert start is not None
                assert start + size <= ring.size + largest
                assert all(start + size <= piece.start or piece.stop <= start for piece in pieces)
                pieces.append(range(start, start + size))
            else:
                assert ring.reserve(size) is None
                ring.free_oldest(len(pieces.pop(0)))


def test_a_ring_gives_nothing_away_that_is_cancelled() -> None:
    ring = Ring(100, 60)
    assert ring.reserve(60) == 0
    assert ring.reserve(40) == 60
    ring.undo_reserve(60, 40)
    assert ring.used_bytes == 60
    assert ring.reserve(30) == 60


def test_what_does_not_fit_the_staging_is_told_and_counted(arena: Arena) -> None:
    rig = Rig(arena, step=2)
    assert sorted(rig.store_all(rig.ops(5))) == [False] * 3 + [True] * 2
    assert rig.pipeline.take_counters()[stores_shed(Shed.STAGING_FULL)] == 3
    assert rig.store_all(rig.ops(2)) == [True] * 2


def test_a_device_with_little_memory_gets_a_smaller_ring(
    arena: Arena, caplog: pytest.LogCaptureFixture
) -> None:
    sizes = CopySizes(
        copy_bytes=4096, bounce_bytes=8192, descriptor_bytes=1 << 16, load_ring_bytes=2 * PART
    )
    rig = Rig(arena, Habits(free_bytes=40 * PART), sizes=sizes, step=100)
    assert PART <= rig.pipeline.staging_bytes <= 10 * PART
    assert "long prompts are stored later" in caplog.text
    assert all(rig.store_all(rig.ops(1)))


@pytest.mark.parametrize("checksum", ["on", "off"])
def test_objects_of_a_load_are_on_their_way_together(arena: Arena, checksum: str) -> None:
    """Copies of later objects are queued before the first one is over (F6)."""
    rig = Rig(arena, checksum=checksum)
    rig.copier.pin_below(ARENA)
    ops = rig.ops(4)
    assert rig.store_all(ops) == [True] * 4
    rig.device.frozen = set(range(1, 9))
    before = rig.device.counts["hybridkv-load", "copy"]
    rig.load(ops)
    rig.device.settle()
    pieces = rig.device.counts["hybridkv-load", "copy"] - before
    assert pieces >= 4 * PART // 4096, "the second object waits for the first one"
    rig.device.frozen.clear()
    rig.device.settle()
    assert rig.loaded == [None]


def test_kernels_do_not_wait_for_the_engines_and_copies_have_no_priority(arena: Arena) -> None:
    """Streams are made in this order: the stores' copies and kernels, the loads'."""
    rig = Rig(arena)
    assert rig.device.urgent == {2, 4}


def test_stores_and_loads_do_not_wait_for_each_other(arena: Arena) -> None:
    rig = Rig(arena)
    ops = rig.ops(4)
    assert rig.store_all(ops) == [True] * 4
    # Streams are made in this order: the stores', the loads'.
    rig.device.frozen = {3, 4}
    rig.load(ops)
    assert rig.store_all(rig.ops(4, 9)) == [True] * 4
    rig.device.frozen = {1, 2}
    rig.store(rig.ops(4, 17))
    rig.device.settle()
    assert rig.loaded == [None]
    assert len(rig.stored) == 4
    rig.device.frozen.clear()
    rig.device.settle()
    assert rig.stored == [True] * 8


def test_a_registration_is_followed_by_a_pause_as_long(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA's calls of all threads wait for a registration."""
    clock = iter([10.0, 10.25, 20.0, 20.5])
    slept: list[float] = []
    time = SimpleNamespace(
        perf_counter=lambda: next(clock), monotonic=lambda: 0.0, sleep=slept.append
    )
    monkeypatch.setattr(pins, "time", time)
    lane = pins.Pins(arena, ARENA // 2).pin_pages(SimulatedDevice(random.Random(1)), ARENA)
    for pause in lane:
        assert pause.is_over()
        pause.wait()
    assert slept == [0.25, 0.5]


def test_a_refused_registration_is_said_once_and_tried_again_after_a_minute(
    arena: Arena, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    time = SimpleNamespace(perf_counter=lambda: 0.0, monotonic=lambda: now[0])
    monkeypatch.setattr(pins, "time", time)
    rig = Rig(arena, Habits(registers=1))
    for reserved in range(1 << 19, ARENA + 1, 1 << 19):
        rig.copier.pin_below(reserved)
    ops = rig.ops(20)
    assert rig.store_all(ops[:8]) == rig.store_all(ops[8:16]) == [True] * 8
    assert rig.load_all(ops[:16]) is None
    now[0] += pins.RETRY_SECONDS - 1
    rig.copier.pin_below(ARENA)
    rig.device.settle()
    assert rig.device.refusals == 1
    now[0] += 1
    for _ in range(3):
        rig.copier.pin_below(ARENA)
        rig.device.settle()
    assert rig.device.refusals == 2
    assert caplog.text.count("does not pin the cache's memory") == 1
    now[0] += pins.RETRY_SECONDS
    rig.device.habits.registers = 1 << 30
    for _ in range(3):
        rig.copier.pin_below(ARENA)
        rig.device.settle()
    assert rig.device.counts["hybridkv-pin", "register"] == ARENA // (1 << 19) + 2
    rig.pipeline.take_counters()
    assert rig.load_all(ops[:8]) is None
    assert COPIES_UNPINNED not in rig.pipeline.take_counters()


class Skipping:
    """Kernels whose scatter leaves out the last layer."""

    def __init__(self, kernels: Any) -> None:
        self._kernels = kernels
        self.can_digest = kernels.can_digest
        self.digest_pieces: Callable[..., None] = kernels.digest_pieces

    def copy_blocks(self, launch: KernelLaunch, is_gather: bool) -> None:
        if is_gather:
            self._kernels.copy_blocks(launch, True)


@pytest.mark.parametrize("checksum", ["on", "paranoid"])
def test_paranoid_compares_the_engines_blocks(arena: Arena, checksum: str) -> None:
    """The checksum is that of the staging; only "paranoid" reads the blocks again (F12)."""

    class Device(SimulatedDevice):
        def make_kernels(self, *arguments: Any) -> Any:
            return Skipping(super().make_kernels(*arguments))

    rig = Rig(arena, checksum=checksum, device=Device(random.Random(1)))
    ops = rig.ops(2)
    assert rig.store_all(ops) == [True] * 2
    for view in rig.views:
        view.zero_()
    error = rig.load_all(ops)
    assert isinstance(error, BadSlotError) == (checksum == "paranoid")


def test_a_slot_that_changes_hands_while_it_is_copied_is_refused(arena: Arena) -> None:
    """Also without checksums."""
    rig = Rig(arena, checksum="off")
    ops = rig.ops(1)
    assert rig.store_all(ops) == [True]
    rig.device.frozen |= set(range(1, len(rig.device.streams)))
    rig.load(ops)
    rig.device.settle()
    start = ops[0].slot.offset
    header = SlotHeader(SlotState.WRITING, 1 + ops[0].slot.generation, 1, PART)
    arena.memory[start : start + HEADER_BYTES] = header.pack()
    rig.device.frozen.clear()
    rig.device.settle()
    (error,) = rig.loaded
    assert isinstance(error, BadSlotError)


def test_a_device_that_fails_ends_the_copier_and_hangs_nobody(arena: Arena) -> None:
    rig = Rig(arena)
    ops = rig.ops(4)
    assert rig.store_all(ops) == [True] * 4
    rig.device.habits.breaks_at = rig.device.ran + 5
    rig.load(ops)
    rig.store(rig.ops(4, 9))
    rig.device.settle()
    assert not rig.pipeline.can_copy
    assert len(rig.loaded) == 1
    assert isinstance(rig.loaded[0], HybridKVError)
    assert len(rig.stored) == 8
    rig.stored.clear()
    rig.store(rig.ops(2, 20))
    assert rig.stored == [False] * 2
    rig.copier.close()
    rig.pipeline.close()


def test_a_batch_is_queued_by_a_few_calls(arena: Arena) -> None:
    """However many objects it has: a thread may wait for the interpreter after each call."""
    rig = Rig(arena, sizes=replace(SIZES, load_ring_bytes=256 * PART))
    rig.copier.pin_below(ARENA)
    rig.device.settle()
    ops = rig.ops(24)
    for number in range(3):
        assert rig.store_all(ops[8 * number : 8 * number + 8]) == [True] * 8
    rig.device.counts.clear()
    assert rig.load_all(ops) is None
    calls = rig.device.counts
    assert calls["hybridkv-load", "copy_all"] == 1
    assert calls["hybridkv-load", "launch"] == 1, "the parts are smaller than a digest's piece"
    assert calls["hybridkv-load", "record"] == 2
    assert calls["hybridkv-load", "wait_event"] == 2
    rig.device.counts.clear()
    assert rig.store_all(ops[:8]) == [True] * 8
    assert calls["hybridkv-store", "copy_all"] == 1
    assert calls["hybridkv-store", "record"] == 2
    assert calls["hybridkv-store", "wait_event"] == 2


@pytest.mark.parametrize("limit", ["bytes", "objects"])
def test_a_batch_has_a_limit(arena: Arena, limit: str) -> None:
    sizes = {"bytes": CopySizes(batch_bytes=3 * PART), "objects": CopySizes(batch_objects=3)}[limit]
    sizes = replace(
        sizes, copy_bytes=4096, pin_bytes=ARENA, bounce_bytes=8192, load_ring_bytes=256 * PART
    )
    rig = Rig(arena, sizes=sizes)
    rig.copier.pin_below(ARENA)
    rig.device.settle()
    ops = rig.ops(8)
    assert rig.store_all(ops) == [True] * 8
    assert rig.device.counts["hybridkv-store", "copy_all"] == 3
    assert rig.load_all(ops) is None
    assert rig.device.counts["hybridkv-load", "copy_all"] == 3


def test_an_error_of_whoever_is_told_hangs_nobody_else(arena: Arena) -> None:
    sizes = replace(SIZES, pin_bytes=1 << 19, load_ring_bytes=8 * PART, depth=2)
    rig = Rig(arena, sizes=sizes)
    rig.copier.pin_below(ARENA)
    ops = rig.ops(4)
    assert rig.store_all(ops) == [True] * 4
    rig.device.frozen = {1, 3}

    def fails(*_: Any) -> None:
        raise ZeroDivisionError

    rig.copier.load(ops[:1], fails)
    rig.load(ops[1:2])
    rig.load(ops[2:])
    store_ops = rig.ops(4, 9)
    rig.copier.store(store_ops[:1], fails)
    rig.store(store_ops[1:])
    rig.device.settle()
    rig.device.fail("an illegal address was used")
    rig.device.settle()
    assert len(rig.loaded) == 2
    assert all(isinstance(error, HybridKVError) for error in rig.loaded)
    assert rig.stored[-3:] == [False] * 3
    rig.copier.close()
    rig.pipeline.close()
    rig.device.settle()
    assert rig.device.is_idle


def test_nothing_is_told_failed_while_the_device_still_copies(arena: Arena) -> None:
    """The daemon gives such a slot to another object at once, which the copy would overwrite."""
    rig = Rig(arena)
    rig.copier.pin_below(ARENA)
    rig.device.settle()
    rig.device.frozen = {1}
    ops = rig.ops(4)
    # Three calls of the engine's thread, then some copies of the first object.
    rig.device.habits.refuses_at = rig.device.calls + 3 + 5
    rig.store(ops)
    rig.device.settle()
    assert not rig.pipeline.can_copy
    assert not rig.stored, "the first copies are still queued"
    rig.device.frozen.clear()
    rig.device.settle()
    assert rig.stored == [False] * 4


@pytest.mark.parametrize("can_digest", [True, False])
def test_the_lanes_run_in_threads(arena: Arena, can_digest: bool) -> None:
    device = ThreadedDevice()
    device.habits.can_digest = can_digest
    rig = Rig(arena, device=device)
    rig.copier.pin_below(ARENA)
    before = [view.clone() for view in rig.views]
    for _ in range(20):
        ops = rig.ops(8)
        stored, loaded = threading.Semaphore(0), threading.Event()
        errors: list[HybridKVError | None] = []

        def done(op: CopyOp, is_stored: bool, stored: threading.Semaphore = stored) -> None:
            assert is_stored
            stored.release()

        def end(
            error: HybridKVError | None,
            errors: list[HybridKVError | None] = errors,
            loaded: threading.Event = loaded,
        ) -> None:
            errors.append(error)
            loaded.set()

        rig.copier.store(ops, done)
        assert all(stored.acquire(timeout=DEADLINE_SECONDS) for _ in ops)
        for view in rig.views:
            view[1:9].zero_()
        rig.copier.load(ops, end)
        assert loaded.wait(DEADLINE_SECONDS)
        assert errors == [None]
        for view, old in zip(rig.views, before, strict=True):
            assert torch.equal(view, old)
    rig.copier.close()
    rig.pipeline.close()
    for thread in device.threads:
        thread.join(DEADLINE_SECONDS)
        assert not thread.is_alive()
    assert device.current_stream() == COMPUTE


def test_memory_is_used_once_the_engines_work_with_it_is_over(arena: Arena) -> None:
    """PyTorch gives away memory that queued kernels still write."""
    assert not any(Rig(arena).device.streams)


@pytest.mark.parametrize("broken", ["hybridkv-store", "hybridkv-load", "hybridkv-pin"])
def test_a_thread_that_cannot_choose_the_device_hangs_nobody(arena: Arena, broken: str) -> None:
    class Device(SimulatedDevice):
        def enter_thread(self) -> None:
            super().enter_thread()
            if self._actor == broken:
                self._entered.remove(broken)
                raise ZeroDivisionError("no device")

    rig = Rig(arena, device=Device(random.Random(1)))
    rig.copier.pin_below(ARENA)
    ops = rig.ops(4)
    rig.store(ops)
    rig.load(ops)
    rig.device.settle()
    assert not rig.pipeline.can_copy
    assert len(rig.stored) == 4
    (error,) = rig.loaded
    assert isinstance(error, HybridKVError)
    assert rig.store_all(ops) == [False] * 4
    assert isinstance(rig.load_all(ops), HybridKVError)
    rig.copier.close()
    rig.pipeline.close()
    rig.device.settle()
    assert rig.device.is_idle
    assert not rig.device.wrongs


def test_an_error_of_an_object_that_cannot_begin_hangs_nobody(arena: Arena) -> None:
    """It would be met again in each turn of the lane."""
    rig = Rig(arena)
    ops = rig.ops(4)
    assert rig.store_all(ops) == [True] * 4

    def has_blocks(op: CopyOp) -> bool:
        raise ZeroDivisionError

    tables: Any = SimpleNamespace(part_bytes=lambda op: PART, has_blocks=has_blocks)
    rig.pipeline.context.tables = tables
    rig.load(ops)
    rig.load(ops[:1])
    rig.device.settle()
    assert len(rig.loaded) == 2
    assert not rig.pipeline.can_copy
