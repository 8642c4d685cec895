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
from typing import Any

import torch
from xxhash import xxh3_64_intdigest

from hybridkv.connector.copy.device import (
    DeviceError,
    DeviceMemoryError,
    Kernels,
    Lane,
    Pieces,
    Stream,
    Waitable,
)
from hybridkv.connector.copy.tables import ENTRY, NUMBER_BYTES, ROW, BlockTables, Move
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
    """What this device does beside copying."""

    free_bytes: int = 1 << 40
    digests: bool = True
    torch_kernels: bool = False
    registers: int = 1 << 30
    """Registrations until one is refused."""
    slow_registration: bool = False
    """Whether a registration ends only when nothing else can happen."""
    breaks_at: int = -1
    """The queued operation, counted from the start, at which the device fails for good."""
    refuses_at: int = -1
    """The call that fails alone."""
    pinned_refused_at: int = -1
    """The allocation of pinned memory that fails."""
    unregister_fails_at: int = -1
    """The unregistration that fails; that memory stays pinned."""
    interrupts: float = 0.0
    """How often something else happens within a call, which lets go of the interpreter."""


@dataclass
class Event:
    """See Waitable."""

    device: "SimulatedDevice"
    over: bool = False

    def ready(self) -> bool:
        """See Waitable."""
        self.device.check()
        return self.over

    def wait(self) -> None:
        """Only for the engine's thread and the like; lanes yield."""
        self.device.wait(self)


@dataclass
class Result:
    """What a hashing thread will have computed."""

    work: Callable[[], bytes] | None
    value: bytes = b""

    def ready(self) -> bool:
        """See Waitable."""
        return self.work is None

    def wait(self) -> None:
        """See Waitable."""
        raise AssertionError("lanes yield")

    def result(self) -> bytes:
        """The value."""
        assert self.work is None
        return self.value


@dataclass
class Operation:
    """One entry of a stream: `run`, or the event that the stream waits for."""

    run: Callable[[], None] | None
    event: Event | None = None


@dataclass
class Running:
    """A lane."""

    name: str
    lane: Lane
    waits: Waitable | None = None
    asleep: bool = False
    """Whether it is in a call of the driver that takes long."""
    is_running: bool = False
    """Whether it is in a call within which something else happens."""

    def can_go(self) -> bool:
        """Whether it can be resumed."""
        if self.asleep or self.is_running:
            return False
        try:
            return self.waits is None or self.waits.ready()
        except DeviceError:
            return True


@dataclass
class Range:
    """Memory that the device can reach."""

    start: int
    size: int
    tensor: torch.Tensor | None = field(default=None, repr=False)

    def holds(self, address: int, size: int) -> bool:
        """Whether all of it is inside."""
        return self.start <= address and address + size <= self.start + self.size

    def touches(self, address: int, size: int) -> bool:
        """Whether any of it is inside."""
        return address < self.start + self.size and self.start < address + size


class SimulatedDevice:
    """See Device."""

    def __init__(self, rng: random.Random, habits: Habits | None = None) -> None:
        self._rng = rng
        self.habits = habits or Habits()
        self._streams: list[deque[Operation]] = [deque()]
        self._pace = [rng.choice((1, 1, 3, 20))]
        self._device: list[Range] = []
        self._pinned: list[Range] = []
        self._registered: dict[int, Range] = {}
        self._uncleared: set[str] = set()
        """Threads that have the error of a refused call."""
        self._lanes: list[Running] = []
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
        """What the engine's thread may do within a call of another one."""
        self.ran = 0  # Operations that ran, by which `breaks_at` counts.
        self.calls = 0
        self.counts: Counter[tuple[str, str]] = Counter()
        """Calls and bytes by the thread: (thread, what)."""
        self.held: list[str] = []
        """Whatever the engine's thread waited for in a hook."""
        self.wrongs: list[str] = []
        """What CUDA would do wrongly, or slowly; the copier may have caught the error."""
        self.urgent: set[int] = set()
        """Streams of the highest priority."""
        self.frozen: set[int] = set()
        """Streams that do not run."""

    # What the tests use

    def adopt(self, tensor: torch.Tensor) -> None:
        """The engine's memory, which is the device's: all of what the tensor is a view of."""
        storage = tensor.untyped_storage()
        self._device.append(Range(storage.data_ptr(), storage.nbytes(), tensor))

    @contextmanager
    def unmapped(self) -> Iterator[None]:
        """The device's memory is not mapped, as while vLLM sleeps; it has its bytes afterwards."""
        self.finish(COMPUTE)
        before, self._device = self._device, []
        try:
            yield
        finally:
            self._device = before

    @contextmanager
    def hook(self) -> Iterator[None]:
        """The engine's thread is in a hook, where it must not wait."""
        self.in_hook = True
        try:
            yield
        finally:
            self.in_hook = False

    @contextmanager
    def acting(self, name: str) -> Iterator[None]:
        """The caller is another thread than the engine's."""
        before, self._actor = self._actor, name
        try:
            yield
        finally:
            self._actor = before

    def turn(self) -> bool:
        """Do one thing that may happen now; False where nothing can."""
        choices: list[tuple[Callable[[Any], None], Any]] = []
        weights: list[int] = []
        if not self.broken:
            for number, queue in enumerate(self._streams):
                if queue and number not in self.frozen and self._can_run(queue[0]):
                    choices.append((self._run_head, number))
                    weights.append(self._pace[number])
        for running in self._lanes:
            if running.can_go():
                choices.append((self._resume, running))
                weights.append(4)
        for result in self._results:
            choices.append((self._compute, result))
            weights.append(2)
        if not choices:
            return False
        ((work, argument),) = self._rng.choices(choices, weights)
        work(argument)
        return True

    def turn_some(self, count: int) -> None:
        """At most `count` things."""
        for _ in range(count):
            if not self.turn():
                return

    def finish(self, stream: Stream) -> None:
        """All that a stream has by now, and what it waits for."""
        while self._streams[stream]:
            assert self.turn(), "a stream waits for ever"

    def settle(self) -> None:
        """Do everything that can happen, but for registrations that take long."""
        while self.turn():
            pass

    def wake(self) -> bool:
        """The registrations that take long end; False where there are none."""
        asleep = [running for running in self._lanes if running.asleep]
        for running in asleep:
            running.asleep = False
        return bool(asleep)

    def touch(self, address: int, size: int, alignment: int) -> None:
        """A kernel uses this memory; the device fails for good where CUDA's would."""
        if address % alignment:
            self.fail("a misaligned address was used")
            raise self._wrong(f"a kernel uses {address:#x} as a word of {alignment} bytes")
        if not self._reaches(address, size):
            self.fail("an illegal address was used")
            raise self._wrong("a kernel uses memory that the device cannot reach")

    def fail(self, why: str) -> None:
        """For good: nothing that is queued runs."""
        self.broken = self.broken or why
        for queue in self._streams:
            queue.clear()

    def check(self) -> None:
        """Raise DeviceError where the device failed for good."""
        if self.broken:
            raise DeviceError(self.broken)

    @property
    def is_idle(self) -> bool:
        """Whether no lane is left, nothing is queued and nothing is pinned."""
        left = self._lanes, self._results, *self._streams
        is_unpinned = self._registered.keys() <= self.stuck
        return not any(left) and bool(self.broken or self.failed or is_unpinned)

    # Device

    def free_bytes(self) -> int:
        """See Device."""
        self._call("free_bytes")
        return self.habits.free_bytes

    def allocate(self, size: int, pinned: bool = False) -> torch.Tensor:
        """See Device. The memory has no zeros in it."""
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
            self._streams[COMPUTE].append(Operation(partial(_fill, tensor)))
        ranges = self._pinned if pinned else self._device
        ranges.append(Range(tensor.data_ptr(), size, tensor))
        return tensor

    def current_stream(self) -> Stream:
        """See Device."""
        assert self._actor == ENGINE, "only the engine's thread has the engine's stream"
        return COMPUTE

    def new_stream(self, *, is_urgent: bool = False) -> Stream:
        """See Device."""
        self._call("stream")
        self._streams.append(deque())
        if is_urgent:
            self.urgent.add(len(self._streams) - 1)
        self._pace.append(self._rng.choice((1, 1, 3, 20)))
        return Stream(len(self._streams) - 1)

    def record(self, stream: Stream) -> Event:
        """See Device."""
        self._call("record")
        event = Event(self)

        def fire() -> None:
            event.over = True

        self._streams[stream].append(Operation(fire))
        return event

    def wait_event(self, stream: Stream, event: Waitable) -> None:
        """See Device."""
        self._call("wait_event")
        assert isinstance(event, Event)
        self._streams[stream].append(Operation(None, event))

    def copy(self, to: int, source: int, size: int, stream: Stream) -> None:
        """See Device. The bytes are read when the copy runs."""
        self._call("copy")
        self._count("bytes", size)
        pageable = [address for address in (to, source) if not self._reaches(address, size)]
        if pageable:
            # CUDA returns from such a copy only when all of the stream is done.
            self._hold("a copy of memory that is not pinned")
            raise self._wrong("memory is copied that is not pinned")
        self._streams[stream].append(Operation(lambda: self._memmove(to, source, size)))

    def copy_all(self, pieces: Pieces, stream: Stream) -> None:
        """See Device. They run one by one, in any order."""
        assert stream != COMPUTE, "CUDA refuses it on the default stream"
        self._count("copy_all", 1)
        copies = list(pieces)
        self._rng.shuffle(copies)
        for target, source, size in copies:
            self.copy(target, source, size, stream)

    def kernels(
        self,
        tables: BlockTables,
        table: torch.Tensor,
        groups: Sequence[Sequence[torch.Tensor]],
        staging: torch.Tensor,
    ) -> Kernels:
        """See Device."""
        self._call("kernels")
        self._hold("a compiler")
        if self.habits.torch_kernels:
            return TorchKernels(tables.word_bytes, groups)
        return AddressKernels(tables.word_bytes, self.habits.digests, self.touch)

    def launch(self, work: Callable[[], None], stream: Stream) -> None:
        """See Device."""
        self._call("launch")
        if self._actor in self._uncleared:
            self._uncleared.discard(self._actor)
            raise DeviceError("the error of an earlier call")
        self._streams[stream].append(Operation(work))

    def register(self, address: int, size: int) -> bool:
        """See Device."""
        self._call("register")
        self._hold("a registration")
        if any(one.touches(address, size) for one in self._registered.values()):
            self._uncleared.add(self._actor)
            self.registered_twice += 1
            return False
        running = next((one for one in self._lanes if one.name == self._actor), None)
        if self.habits.slow_registration and running is not None:
            running.asleep = True
        self.habits.registers -= 1
        if self.habits.registers < 0:
            self._uncleared.add(self._actor)
            self.refusals += 1
            return False
        self._registered[address] = Range(address, size)
        return True

    def unregister(self, address: int) -> None:
        """See Device."""
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
        """See Device."""
        self._uncleared.discard(self._actor)

    def call(self, work: Callable[[], bytes]) -> Result:
        """See Device."""
        result = Result(work)
        self._results.append(result)
        return result

    def start(self, name: str, lane: Lane) -> None:
        """See Device."""
        self._lanes.append(Running(name, lane))

    def enter_thread(self) -> None:
        """See Device."""
        self._call("enter_thread")
        self._entered.add(self._actor)

    def wait(self, waitable: Waitable) -> None:
        """See Device."""
        self._hold("an event")
        while not waitable.ready():
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
        """Whatever other threads and the device do before the caller has the interpreter again."""
        if self._actor != MODEL and self._rng.random() < self.habits.interrupts:
            is_lane = any(running.name == self._actor for running in self._lanes)
            if self.engine_step is not None and is_lane and self._rng.random() < 0.1:
                with self.acting(ENGINE):
                    self.engine_step()
            self.turn_some(self._rng.choice((1, 3, 30)))

    def _wrong(self, what: str) -> AssertionError:
        self.wrongs.append(what)
        return AssertionError(what)

    def _count(self, what: str, more: int) -> None:
        self.counts[self._actor, what] += more

    def _hold(self, why: str) -> None:
        if self.in_hook and self._actor == ENGINE:
            self.held.append(why)

    def _reaches(self, address: int, size: int) -> bool:
        """Whether the memory is the device's or pinned; raises where a part of it is."""
        ranges = [*self._device, *self._pinned, *self._registered.values()]
        if any(one.holds(address, size) for one in ranges):
            return True
        if any(one.touches(address, size) for one in ranges):
            raise self._wrong("a copy crosses from one pinned piece to the next")
        return False

    def _memmove(self, to: int, source: int, size: int) -> None:
        if not self._reaches(to, size) or not self._reaches(source, size):
            raise self._wrong("the memory is not pinned any more")
        ctypes.memmove(to, source, size)

    def _can_run(self, operation: Operation) -> bool:
        return operation.event is None or operation.event.over

    def _run_head(self, number: int) -> None:
        operation = self._streams[number].popleft()
        self.ran += 1
        if self.ran == self.habits.breaks_at:
            self.fail("an illegal address was used")
        elif operation.run is not None:
            operation.run()

    def _resume(self, running: Running) -> None:
        before, self._actor = self._actor, running.name
        in_hook, self.in_hook = self.in_hook, False
        running.is_running = True
        try:
            running.waits = next(running.lane)
        except StopIteration:
            self._lanes.remove(running)
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
    """See Touch: all of the process's memory may be used."""
    assert address % alignment == 0, f"{address:#x} is no address of {alignment} bytes"


class AddressKernels:
    """The kernels byte by byte, from what the descriptors say when they run."""

    def __init__(self, word_bytes: int, digests: bool, touch: Touch = check_alignment) -> None:
        self.digests = digests
        self._word = word_bytes
        self._touch = touch

    def move(self, move: Move, is_gather: bool) -> None:
        """See Kernels."""
        grid = len(move.ops), move.rows, -(-move.run_words // TILE_WORDS)
        assert is_launchable(grid), grid
        entries = move.descriptors.data_ptr()
        move_words(self._touch, grid, entries, move.table, self._word, is_gather)

    def digest(self, entries: int, objects: int, pieces: int, out: int) -> None:
        """See Kernels."""
        digest_pieces(self._touch, (pieces, objects), entries, out)


def move_words(
    touch: Touch, grid: tuple[int, int, int], entries: int, table: int, word: int, is_gather: bool
) -> None:
    """What a launch of triton_kernels._move does: nothing for what is outside the grid."""
    entries_count, rows_max, tiles = grid
    for number in range(entries_count):
        entry = _read(touch, entries + number * ENTRY * NUMBER_BYTES, ENTRY)
        part, count, first, size, start, row, rows, _ = entry
        blocks = _read(touch, entries + start * NUMBER_BYTES, size)
        rows = min(rows, rows_max)
        numbers = _read(touch, table + row * ROW * NUMBER_BYTES, rows * ROW)
        for at in range(0, rows * ROW, ROW):
            sizes = (words * word for words in numbers[at + 1 : at + ROW])
            stride, run, block_bytes, before, inside = sizes
            run = min(run, tiles * TILE_WORDS * word)
            for block, block_id in enumerate(blocks, first):
                engine = numbers[at] + block_id * stride
                stored = part + before * count + block * block_bytes + inside
                touch(engine, run, word)
                touch(stored, run, word)
                to, source = (stored, engine) if is_gather else (engine, stored)
                ctypes.memmove(to, source, run)


def digest_pieces(touch: Touch, grid: tuple[int, int], entries: int, out: int) -> None:
    """What a launch of triton_kernels._digest does."""
    pieces_max, entries_count = grid
    for number in range(entries_count):
        entry = _read(touch, entries + number * ENTRY * NUMBER_BYTES, ENTRY)
        part, pieces = entry[0], min(entry[7], pieces_max)
        for piece in range(pieces):
            start = part + piece * PIECE_BYTES
            place = out + (number * pieces_max + piece) * NUMBER_BYTES
            touch(start, PIECE_BYTES, NUMBER_BYTES)
            touch(place, NUMBER_BYTES, NUMBER_BYTES)
            digest = xxh3_64_intdigest(ctypes.string_at(start, PIECE_BYTES))
            ctypes.memmove(place, digest.to_bytes(NUMBER_BYTES, "little"), NUMBER_BYTES)


def is_launchable(grid: Sequence[int]) -> bool:
    """Whether CUDA takes a grid of these sizes."""
    return all(1 <= size <= limit for size, limit in zip(grid, GRID_MAX, strict=False))


def _fill(tensor: torch.Tensor) -> None:
    tensor.fill_(0xC3)


def _read(touch: Touch, address: int, count: int) -> "array[int]":
    touch(address, count * NUMBER_BYTES, NUMBER_BYTES)
    numbers = array("q")
    numbers.frombytes(ctypes.string_at(address, count * NUMBER_BYTES))
    return numbers
