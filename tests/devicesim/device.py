"""A device without hardware: queued work runs in any order that the streams allow, by a seed.

It is stricter than CUDA: what CUDA would only do slowly or wrongly is an AssertionError here.
"""

import ctypes
import random
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from xxhash import xxh3_64_intdigest

from hybridkv.connector.copy.device import (
    CopyList,
    DeviceError,
    DeviceMemoryError,
    Kernels,
    Lane,
    Stream,
    Waitable,
)
from hybridkv.connector.copy.tables import ENTRY, NUMBER_BYTES, ROW, BlockTables, KernelLaunch
from hybridkv.connector.copy.torch_kernels import TorchKernels
from hybridkv.shm.slots import PIECE_BYTES

ENGINE = "engine"
MODEL = "the model"
"""The engine's thread while it launches kernels of its own. Nobody else runs within that call."""
STRANGER = "stranger"
"""A thread that never chose a device: CUDA would give it the first one."""
COMPUTE = Stream(0)
GRID_MAX = (2**31 - 1, 65_535, 65_535)
"""CUDA's limits of a grid."""
TILE_WORDS = 1024
"""See triton_kernels, which not every machine can import."""
Touch = Callable[[int, int, int], None]
"""Called with (address, bytes, alignment) of all memory that a kernel uses, before it does."""


@dataclass
class Habits:
    """The abilities of a device, and the faults that it has on the way."""

    free_bytes: int = 1 << 40
    can_digest: bool = True
    torch_kernels: bool = False
    registers: int = 1 << 30
    """Registrations until one is refused."""
    slow_registration: bool = False
    """A registration ends only when nothing else can happen."""
    breaks_at: int = -1
    """The queued operation, counted from the start, at which the device fails for good."""
    refuses_at: int = -1
    """The call that fails alone."""
    pinned_refused_at: int = -1
    """The allocation of pinned memory that fails."""
    unregister_fails_at: int = -1
    """The unregistration that fails. Its memory stays pinned."""
    interrupts: float = 0.0
    """The share of calls within which something else happens, as each lets go of the interpreter.
    """


@dataclass
class Event:
    """An event of the simulated device."""

    device: "SimulatedDevice"
    has_fired: bool = False

    def is_over(self) -> bool:
        self.device.check()
        return self.has_fired

    def wait(self) -> None:
        """Let the device run until the event has fired. Lanes do not call it: they yield."""
        self.device.wait_for(self)


@dataclass
class Result:
    """The bytes that a hashing thread returns once it has run."""

    work: Callable[[], bytes] | None
    value: bytes = b""

    def is_over(self) -> bool:
        return self.work is None

    def wait(self) -> None:
        raise AssertionError("lanes yield")

    def result(self) -> bytes:
        assert self.work is None
        return self.value


@dataclass
class Operation:
    """One entry of a stream: `run`, or the event that the stream waits for."""

    run: Callable[[], None] | None
    event: Event | None = None


@dataclass
class RunningLane:
    """A lane with its thread's name, and what it waits for."""

    name: str
    lane: Lane
    waitable: Waitable | None = None
    is_in_driver: bool = False
    """It is in a call of the driver that takes long."""
    is_running: bool = False
    """It is in a call within which something else happens."""

    def can_go(self) -> bool:
        """Return True if the lane can be resumed."""
        if self.is_in_driver or self.is_running:
            return False
        try:
            return self.waitable is None or self.waitable.is_over()
        except DeviceError:
            return True


@dataclass
class Range:
    """Memory that the device can reach."""

    start: int
    size: int
    tensor: torch.Tensor | None = field(default=None, repr=False)

    def holds(self, address: int, size: int) -> bool:
        """Return True if all of this memory is inside."""
        return self.start <= address and address + size <= self.start + self.size

    def touches(self, address: int, size: int) -> bool:
        """Return True if any of this memory is inside."""
        return address < self.start + self.size and self.start < address + size


class SimulatedDevice:
    """A Device in one thread, whose lanes and streams take turns by a seed."""

    def __init__(self, rng: random.Random, habits: Habits | None = None) -> None:
        self._rng = rng
        self.habits = habits or Habits()
        self.streams: list[deque[Operation]] = [deque()]  # By the stream's number.
        self._pace = [rng.choice((1, 1, 3, 20))]
        self._device: list[Range] = []
        self._pinned: list[Range] = []
        self._registered: dict[int, Range] = {}
        self._uncleared: set[str] = set()
        """Threads that have the error of a refused call."""
        self.lanes: list[RunningLane] = []
        self._results: list[Result] = []
        self._actor = ENGINE
        self._entered = {ENGINE, MODEL}
        """Threads that have chosen this device."""
        self.in_hook = False
        self.broken = ""
        self.refusals = 0  # Registrations that were refused.
        self.registered_twice = 0  # Those that were refused because the memory is pinned.
        self.stuck: set[int] = set()
        """Addresses whose unregistration failed."""
        self.failed = 0  # Calls that failed alone.
        self._pinned_allocations = self._unregistrations = 0
        self.engine_step: Callable[[], None] | None = None
        """A step of the engine's thread, which may run within a call of a lane."""
        self.ran = 0  # Operations that ran, by which `breaks_at` counts.
        self.calls = 0
        self.counts: Counter[tuple[str, str]] = Counter()
        """Calls and bytes by (thread, call): `counts["hybridkv-load", "copy"]`."""
        self.held: list[str] = []
        """All that the engine's thread waited for in a hook."""
        self.wrongs: list[str] = []
        """Calls that CUDA would do wrongly or slowly. The copier may have caught the error."""
        self.urgent: set[int] = set()
        """Streams of the highest priority."""
        self.frozen: set[int] = set()
        """Streams that do not run."""

    # What the tests use

    def adopt(self, tensor: torch.Tensor) -> None:
        """Make the engine's memory the device's: all of what the tensor is a view of."""
        storage = tensor.untyped_storage()
        self._device.append(Range(storage.data_ptr(), storage.nbytes(), tensor))

    @contextmanager
    def unmapped(self) -> Iterator[None]:
        """Unmap the device's memory, as while vLLM sleeps. It has its bytes afterwards."""
        self.finish(COMPUTE)
        before, self._device = self._device, []
        try:
            yield
        finally:
            self._device = before

    @contextmanager
    def hook(self) -> Iterator[None]:
        """Put the engine's thread into a hook, where it must not wait."""
        self.in_hook = True
        try:
            yield
        finally:
            self.in_hook = False

    @contextmanager
    def acting(self, name: str) -> Iterator[None]:
        """Let the caller be another thread than the engine's."""
        before, self._actor = self._actor, name
        try:
            yield
        finally:
            self._actor = before

    def turn(self) -> bool:
        """Do one thing that may happen now. Returns False where nothing can."""
        choices: list[Callable[[], None]] = []
        weights: list[int] = []
        if not self.broken:
            for number, queue in enumerate(self.streams):
                if queue and number not in self.frozen and self._can_run(queue[0]):
                    choices.append(partial(self._run_head, number))
                    weights.append(self._pace[number])
        for running in self.lanes:
            if running.can_go():
                choices.append(partial(self.resume, running))
                weights.append(4)
        for result in self._results:
            choices.append(partial(self._compute, result))
            weights.append(2)
        if not choices:
            return False
        (work,) = self._rng.choices(choices, weights)
        work()
        return True

    def turn_some(self, count: int) -> None:
        """Do at most `count` things that may happen."""
        for _ in range(count):
            if not self.turn():
                return

    def finish(self, stream: Stream) -> None:
        """Let a stream do all that it has by now, and what it waits for."""
        while self.streams[stream]:
            assert self.turn(), "a stream waits for ever"

    def settle(self) -> None:
        """Do everything that can happen, but for registrations that take long."""
        while self.turn():
            pass

    def wake(self) -> bool:
        """End the registrations that take long. Returns False where there are none."""
        sleepers = [running for running in self.lanes if running.is_in_driver]
        for running in sleepers:
            running.is_in_driver = False
        return bool(sleepers)

    def touch(self, address: int, size: int, alignment: int) -> None:
        """Let a kernel use this memory. The device fails for good where CUDA's would."""
        if address % alignment:
            self.fail("a misaligned address was used")
            raise self._wrong(f"a kernel uses {address:#x} as a word of {alignment} bytes")
        if not self._reaches(address, size):
            self.fail("an illegal address was used")
            raise self._wrong("a kernel uses memory that the device cannot reach")

    def fail(self, why: str) -> None:
        """End the device: nothing that is queued runs."""
        self.broken = self.broken or why
        for queue in self.streams:
            queue.clear()

    def check(self) -> None:
        """Raise DeviceError where the device failed for good."""
        if self.broken:
            raise DeviceError(self.broken)

    @property
    def is_idle(self) -> bool:
        """True if no lane runs, nothing is queued and nothing is pinned."""
        is_unpinned = self._registered.keys() <= self.stuck
        is_working = self.lanes or self._results or any(self.streams)
        return not is_working and bool(self.broken or self.failed or is_unpinned)

    # Device

    def free_bytes(self) -> int:
        self._call("free_bytes")
        return self.habits.free_bytes

    def allocate(self, size: int, pinned: bool = False) -> torch.Tensor:
        """Allocate memory that has no zeros in it."""
        self._call("allocate")
        self._hold("an allocation")
        assert size > 0
        if pinned:
            self._pinned_allocations += 1
            if self._pinned_allocations == self.habits.pinned_refused_at:
                self.failed += 1
                raise DeviceError("no pinned memory")
        else:
            if size > self.habits.free_bytes:
                raise DeviceMemoryError(f"no room for {size} bytes")
            self.habits.free_bytes -= size
        tensor = torch.full((size,), 0xC3, dtype=torch.uint8)
        if not pinned:
            # Of memory that the engine has given back, and that its queued work still writes.
            self.streams[COMPUTE].append(Operation(partial(_fill, tensor)))
        ranges = self._pinned if pinned else self._device
        ranges.append(Range(tensor.data_ptr(), size, tensor))
        return tensor

    def current_stream(self) -> Stream:
        assert self._actor == ENGINE, "only the engine's thread has the engine's stream"
        return COMPUTE

    def new_stream(self, *, is_urgent: bool = False) -> Stream:
        self._call("stream")
        self.streams.append(deque())
        if is_urgent:
            self.urgent.add(len(self.streams) - 1)
        self._pace.append(self._rng.choice((1, 1, 3, 20)))
        return Stream(len(self.streams) - 1)

    def record(self, stream: Stream) -> Event:
        self._call("record")
        event = Event(self)

        def fire() -> None:
            event.has_fired = True

        self.streams[stream].append(Operation(fire))
        return event

    def wait_event(self, stream: Stream, event: Waitable) -> None:
        self._call("wait_event")
        assert isinstance(event, Event)
        self.streams[stream].append(Operation(None, event))

    def copy(self, to: int, source: int, size: int, stream: Stream) -> None:
        """Queue a copy. Its bytes are read when it runs."""
        self._call("copy")
        self._count("bytes", size)
        pageable = [address for address in (to, source) if not self._reaches(address, size)]
        if pageable:
            # CUDA returns from such a copy only when all of the stream is done.
            self._hold("a copy of memory that is not pinned")
            raise self._wrong("memory is copied that is not pinned")
        self.streams[stream].append(Operation(lambda: self._memmove(to, source, size)))

    def copy_all(self, copies: CopyList, stream: Stream) -> None:
        """Queue all copies, one by one and in any order."""
        assert stream != COMPUTE, "CUDA refuses it on the default stream"
        self._count("copy_all", 1)
        shuffled = list(copies)
        self._rng.shuffle(shuffled)
        for target, source, size in shuffled:
            self.copy(target, source, size, stream)

    def make_kernels(
        self,
        tables: BlockTables,
        device_rows: torch.Tensor,
        groups: Sequence[Sequence[torch.Tensor]],
        staging: torch.Tensor,
    ) -> Kernels:
        self._call("kernels")
        self._hold("a compiler")
        if self.habits.torch_kernels:
            return TorchKernels(tables.word_bytes, groups)
        return AddressKernels(tables.word_bytes, self.habits.can_digest, self.touch)

    def launch(self, work: Callable[[], None], stream: Stream) -> None:
        self._call("launch")
        if self._actor in self._uncleared:
            self._uncleared.discard(self._actor)
            raise DeviceError("the error of an earlier call")
        self.streams[stream].append(Operation(work))

    def register(self, address: int, size: int) -> bool:
        self._call("register")
        self._hold("a registration")
        if any(pinned.touches(address, size) for pinned in self._registered.values()):
            self._uncleared.add(self._actor)
            self.registered_twice += 1
            return False
        running = next((lane for lane in self.lanes if lane.name == self._actor), None)
        if self.habits.slow_registration and running is not None:
            running.is_in_driver = True
        self.habits.registers -= 1
        if self.habits.registers < 0:
            self._uncleared.add(self._actor)
            self.refusals += 1
            return False
        self._registered[address] = Range(address, size)
        return True

    def unregister(self, address: int) -> None:
        self._call("unregister")
        self._hold("an unregistration")
        if address not in self._registered:
            raise self._wrong("memory is unpinned that is not pinned")
        self._unregistrations += 1
        if self._unregistrations == self.habits.unregister_fails_at:
            self.stuck.add(address)
            raise DeviceError("memory is not unpinned")
        del self._registered[address]

    def clear_error(self) -> None:
        self._uncleared.discard(self._actor)

    def submit(self, work: Callable[[], bytes]) -> Result:
        result = Result(work)
        self._results.append(result)
        return result

    def start_lane(self, name: str, lane: Lane) -> None:
        self.lanes.append(RunningLane(name, lane))

    def enter_thread(self) -> None:
        self._call("enter_thread")
        self._entered.add(self._actor)

    def wait_for(self, waitable: Waitable) -> None:
        self._hold("an event")
        while not waitable.is_over():
            if not self.turn() and not self.wake():
                raise AssertionError("it waits for ever")

    # Within

    def _call(self, what: str) -> None:
        if self._actor not in self._entered and what != "enter_thread":
            raise self._wrong(f"{what}: this thread would use the first device")
        self._count(what, 1)
        self._interrupt()
        self.check()
        self.calls += 1
        if self.calls == self.habits.refuses_at:
            self.failed += 1
            raise DeviceError("a call was refused")

    def _interrupt(self) -> None:
        """Let other threads and the device go on, as if the caller let go of the interpreter."""
        if self._actor != MODEL and self._rng.random() < self.habits.interrupts:
            is_lane = any(running.name == self._actor for running in self.lanes)
            if self.engine_step is not None and is_lane and self._rng.random() < 0.1:
                with self.acting(ENGINE):
                    self.engine_step()
            self.turn_some(self._rng.choice((1, 3, 30)))

    def _wrong(self, what: str) -> AssertionError:
        self.wrongs.append(what)
        return AssertionError(what)

    def _count(self, what: str, amount: int) -> None:
        self.counts[self._actor, what] += amount

    def _hold(self, why: str) -> None:
        if self.in_hook and self._actor == ENGINE:
            self.held.append(why)

    def _reaches(self, address: int, size: int) -> bool:
        """Return True if the memory is the device's or pinned. Raises where only a part is."""
        ranges = [*self._device, *self._pinned, *self._registered.values()]
        if any(memory.holds(address, size) for memory in ranges):
            return True
        if any(memory.touches(address, size) for memory in ranges):
            raise self._wrong("a copy crosses from one pinned piece to the next")
        return False

    def _memmove(self, to: int, source: int, size: int) -> None:
        if not self._reaches(to, size) or not self._reaches(source, size):
            raise self._wrong("the memory is not pinned any more")
        ctypes.memmove(to, source, size)

    def _can_run(self, operation: Operation) -> bool:
        return operation.event is None or operation.event.has_fired

    def _run_head(self, number: int) -> None:
        operation = self.streams[number].popleft()
        self.ran += 1
        if self.ran == self.habits.breaks_at:
            self.fail("an illegal address was used")
        elif operation.run is not None:
            operation.run()

    def resume(self, running: RunningLane) -> None:
        """Run the lane in its thread until it waits again, or ends."""
        before, self._actor = self._actor, running.name
        in_hook, self.in_hook = self.in_hook, False
        running.is_running = True
        try:
            running.waitable = next(running.lane)
        except StopIteration:
            self.lanes.remove(running)
        finally:
            running.is_running = False
            if running.name in self._uncleared:
                self.wrongs.append("the next launch would raise an old error")
            self._actor, self.in_hook = before, in_hook

    def _compute(self, result: Result) -> None:
        self._results.remove(result)
        assert result.work is not None
        result.value, result.work = result.work(), None


def check_alignment(address: int, size: int, alignment: int) -> None:
    """Check the alignment alone. It is the Touch of kernels that may use any memory."""
    assert address % alignment == 0, f"{address:#x} is no address of {alignment} bytes"


class AddressKernels:
    """Kernels that copy byte by byte what the descriptors say when they run."""

    def __init__(self, word_bytes: int, can_digest: bool, touch: Touch = check_alignment) -> None:
        self.can_digest = can_digest
        self._word = word_bytes
        self._touch = touch

    def copy_blocks(self, launch: KernelLaunch, is_gather: bool) -> None:
        grid = MoveGrid(len(launch.ops), launch.rows_max, -(-launch.run_words_max // TILE_WORDS))
        assert is_launchable(grid), grid
        entries_address = launch.descriptors.data_ptr()
        tables = MoveTables(entries_address, launch.rows_address, self._word)
        move_words(self._touch, grid, tables, is_gather)

    def digest_pieces(
        self, entries_address: int, objects: int, pieces_max: int, digests_address: int
    ) -> None:
        grid = DigestGrid(pieces_max, objects)
        digest_pieces(self._touch, grid, entries_address, digests_address)


class MoveGrid(NamedTuple):
    """The grid of triton_kernels.copy_blocks_kernel."""

    entries: int
    rows: int
    tiles: int


class DigestGrid(NamedTuple):
    """The grid of triton_kernels.digest_kernel."""

    pieces: int
    entries: int


class MoveTables(NamedTuple):
    """The addresses that copy_blocks_kernel reads, and the bytes of its words."""

    entries_address: int
    rows_address: int
    word_bytes: int


def move_words(touch: Touch, grid: MoveGrid, tables: MoveTables, is_gather: bool) -> None:
    """Do what a launch of copy_blocks_kernel does: nothing for what is outside the grid."""
    word = tables.word_bytes
    for number in range(grid.entries):
        entry_address = tables.entries_address + number * ENTRY * NUMBER_BYTES
        entry = _read(touch, entry_address, ENTRY)
        part, count, first, size, start, row, rows, _ = entry
        blocks = _read(touch, tables.entries_address + start * NUMBER_BYTES, size)
        rows = min(rows, grid.rows)
        numbers = _read(touch, tables.rows_address + row * ROW * NUMBER_BYTES, rows * ROW)
        for at in range(0, rows * ROW, ROW):
            sizes = (words * word for words in numbers[at + 1 : at + ROW])
            stride, run, block_bytes, layers_before, runs_before = sizes
            run = min(run, grid.tiles * TILE_WORDS * word)
            for block, block_id in enumerate(blocks, first):
                engine = numbers[at] + block_id * stride
                stored = part + layers_before * count + block * block_bytes + runs_before
                touch(engine, run, word)
                touch(stored, run, word)
                to, source = (stored, engine) if is_gather else (engine, stored)
                if is_gather or stride:
                    ctypes.memmove(to, source, run)


def digest_pieces(
    touch: Touch, grid: DigestGrid, entries_address: int, digests_address: int
) -> None:
    """Do what a launch of triton_kernels.digest_kernel does."""
    for number in range(grid.entries):
        entry = _read(touch, entries_address + number * ENTRY * NUMBER_BYTES, ENTRY)
        part, pieces = entry[0], min(entry[7], grid.pieces)
        for piece in range(pieces):
            start = part + piece * PIECE_BYTES
            digest_address = digests_address + (number * grid.pieces + piece) * NUMBER_BYTES
            touch(start, PIECE_BYTES, NUMBER_BYTES)
            touch(digest_address, NUMBER_BYTES, NUMBER_BYTES)
            digest = xxh3_64_intdigest(ctypes.string_at(start, PIECE_BYTES))
            ctypes.memmove(digest_address, digest.to_bytes(NUMBER_BYTES, "little"), NUMBER_BYTES)


def is_launchable(grid: Sequence[int]) -> bool:
    """Return True if CUDA takes a grid of these sizes."""
    return all(1 <= size <= limit for size, limit in zip(grid, GRID_MAX, strict=False))


def _fill(tensor: torch.Tensor) -> None:
    tensor.fill_(0xC3)


def _read(touch: Touch, address: int, count: int) -> "array[int]":
    touch(address, count * NUMBER_BYTES, NUMBER_BYTES)
    numbers = array("q")
    numbers.frombytes(ctypes.string_at(address, count * NUMBER_BYTES))
    return numbers
