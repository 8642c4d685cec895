"""The CUDA runtime library as `ctypes.CDLL` gives it, on memory of the host.

Work runs as late as it may: when its event, or its stream, is waited for. Then what is not ordered
by an event is in the wrong order. A call that C would take in silence raises Misuse, which is also
in `wrongs`, because the copier catches errors of its own.
"""

import ctypes
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from ctypes import c_size_t
from dataclasses import dataclass
from enum import Enum, auto
from itertools import pairwise
from typing import Any

from tests.devicesim.device import Range
from tests.fakecuda.prototypes import Misuse, Prototype, prototypes

SUCCESS = 0
INVALID_VALUE = 1
OUT_OF_MEMORY = 2
INVALID_DIRECTION = 21
INVALID_HANDLE = 400
ILLEGAL_ADDRESS = 700
ALREADY_REGISTERED = 712
NOT_REGISTERED = 713
MISALIGNED_ADDRESS = 716
"""Values of cudaError_t (driver_types.h)."""
LEGACY_STREAM = 0
LEAST_PRIORITY, GREATEST_PRIORITY = 0, -5
NON_BLOCKING = 1
PAGE_BYTES = 4096
STREAM_ORDER = 1
"""cudaMemcpySrcAccessOrderStream; with the other orders the source may be read at once."""
_NO_INDEX = (1 << 64) - 1


class Attributes(ctypes.Structure):
    """The structure cudaMemcpyAttributes, with its two cudaMemLocation."""

    _fields_ = (
        ("order", ctypes.c_int),
        ("source_type", ctypes.c_int),
        ("source_id", ctypes.c_int),
        ("to_type", ctypes.c_int),
        ("to_id", ctypes.c_int),
        ("flags", ctypes.c_uint),
    )


class MemoryKind(Enum):
    """Whose memory some bytes are, as CUDA sees it."""

    DEVICE = auto()
    PINNED = auto()
    PAGEABLE = auto()
    CROSSING = auto()  # They begin in one registration and end elsewhere.


@dataclass
class Mark:
    """The place in a stream at which an event was recorded."""

    stream: int
    is_over: bool = False


@dataclass
class Work:
    """One entry of a stream: what runs, or the mark that the stream waits for."""

    run: Callable[[], None] | None
    awaited: Mark | None = None


@dataclass
class FakeStream:
    """A stream of the runtime, with the work that it has to do."""

    device: int
    flags: int
    priority: int
    queue: deque[Work]


@dataclass
class BatchCopy:
    """One copy of cudaMemcpyBatchAsync."""

    to: int
    source: int
    size: int
    content: bytes | None = None
    """The bytes that were read when the batch was queued; None = they are read when it runs."""


@dataclass
class Refusal:
    """Calls of one function that fail, while the context lives on."""

    name: str
    status: int
    skipped: int
    """Calls before the first that fails."""
    count: int


class ThreadState(threading.local):
    """The state that CUDA keeps for each thread."""

    device = 0
    last_error = SUCCESS


class Function:
    """A function of the library, called as ctypes._FuncPtr is."""

    def __init__(
        self, runtime: "FakeRuntime", prototype: Prototype, work: Callable[..., int]
    ) -> None:
        self.argtypes: Sequence[Any] | None = None
        self.restype: Any = ctypes.c_int
        self._runtime, self._prototype, self._work = runtime, prototype, work

    def __call__(self, *arguments: Any) -> int:
        """Check the arguments and call the function. Returns the status."""
        runtime, name = self._runtime, self._prototype.name
        try:
            values = self._prototype.values(arguments, self.argtypes)
        except Misuse as error:
            raise runtime.misuse(str(error)) from None
        with runtime.lock:
            return runtime.called(name, self._work, values)


class FakeRuntime:
    """The runtime library. `version` is that of CUDART_VERSION: 12090, 13000."""

    def __init__(self, version: int = 13000, device: int = 0) -> None:
        self.version = version
        self.device = device
        """The worker's device. A thread that has chosen none would call the first one."""
        self.lock = threading.RLock()
        self.threads = ThreadState()
        self.calls: Counter[str] = Counter()
        self.wrongs: list[str] = []
        self.pageable_copies = 0
        self.lost = SUCCESS
        """The error that ended the context. Every call returns it from then on."""
        self.device_memory: list[Range] = []
        self.pinned_memory: list[Range] = []
        self.registered: dict[int, Range] = {}
        self.streams = {LEGACY_STREAM: FakeStream(device, 0, 0, deque())}
        self._refusals: list[Refusal] = []
        self._name = f"libcudart.so.{version // 1000}"
        self._prototypes = prototypes(version)
        self._works: dict[str, Callable[..., int]] = {
            "cudaDeviceGetStreamPriorityRange": self._priority_range,
            "cudaGetLastError": self._last_error,
            "cudaHostRegister": self._register,
            "cudaHostUnregister": self._unregister,
            "cudaMemcpyAsync": self._copy,
            "cudaMemcpyBatchAsync": self._copy_batch,
            "cudaPeekAtLastError": self._peek_error,
            "cudaRuntimeGetVersion": self._get_version,
            "cudaStreamCreateWithPriority": self._create_stream,
        }

    def __getattr__(self, name: str) -> Function:
        """Return a function of the library. As with ctypes, it is the same object each time."""
        prototypes = self.__dict__.get("_prototypes", {})
        if name not in prototypes:
            raise AttributeError(f"{self.__dict__.get('_name')}: undefined symbol: {name}")
        function = Function(self, prototypes[name], self._works[name])
        self.__dict__[name] = function
        return function

    # What the tests use

    def refuse(self, name: str, status: int, skipped: int = 0, count: int = 1) -> None:
        """Let `count` calls of the function fail with `status`, after `skipped` that do not."""
        self._refusals.append(Refusal(name, status, skipped, count))

    def unmap(self, memory: Sequence[Range]) -> None:
        """Unmap memory of the device, as a sleep of vLLM does."""
        with self.lock:
            for mapped in memory:
                self.device_memory.remove(mapped)

    # What torch does with it

    def queue(self, stream: int, run: Callable[[], None]) -> None:
        """Queue a kernel."""
        with self.lock:
            self.streams[stream].queue.append(Work(run))

    def record(self, stream: int) -> Mark:
        """Record an event: its place in the stream."""
        with self.lock:
            mark = Mark(stream)

            def pass_mark() -> None:
                mark.is_over = True

            self.streams[stream].queue.append(Work(pass_mark))
            return mark

    def await_mark(self, stream: int, mark: Mark) -> None:
        """Let the stream wait for an event, as cudaStreamWaitEvent does."""
        with self.lock:
            self.streams[stream].queue.append(Work(None, mark))

    def run_until(self, mark: Mark) -> None:
        """Run all that must be over before the mark is."""
        with self.lock:
            while not mark.is_over and not self.lost:
                self.run_one(mark.stream)

    def finish(self, stream: int) -> None:
        """Run all that a stream has."""
        self.run_until(self.record(stream))

    def finish_all(self) -> None:
        """Run all that all streams have, as cudaDeviceSynchronize does."""
        with self.lock:
            for handle in self.streams:
                self.finish(handle)

    def run_one(self, stream: int) -> None:
        """Run the first entry of a stream, if it has one."""
        with self.lock:
            queue = self.streams[stream].queue
            if not queue or self.lost:
                return
            work = queue.popleft()
            if work.awaited is not None:
                self.run_until(work.awaited)
            elif work.run is not None:
                with suppress(Misuse):  # It has ended the context, as the caller will hear.
                    work.run()

    def touch(self, address: int, size: int, alignment: int) -> None:
        """Let a kernel use this memory. Raises Misuse, and ends the context, where it cannot."""
        if address % alignment:
            raise self.lose(MISALIGNED_ADDRESS, f"a kernel uses the address {address:#x}")
        if self.memory_kind(address, size) in {MemoryKind.PAGEABLE, MemoryKind.CROSSING}:
            raise self.lose(ILLEGAL_ADDRESS, f"a kernel uses {size} bytes at {address:#x}")

    def fail(self, status: int) -> None:
        """End the context: nothing that is queued runs."""
        with self.lock:
            self.lost = self.lost or status
            for stream in self.streams.values():
                stream.queue.clear()

    def lose(self, status: int, why: str) -> Misuse:
        """End the context for what the copier did. Returns the error to raise."""
        self.fail(status)
        return self.misuse(f"CUDA error {status}: {why}")

    def misuse(self, why: str) -> Misuse:
        """Note what was wrong with a call. Returns the error to raise."""
        self.wrongs.append(why)
        return Misuse(why)

    def memory_kind(self, address: int, size: int) -> MemoryKind:
        """Return whose memory it is."""
        kinds = (
            (MemoryKind.DEVICE, self.device_memory),
            (MemoryKind.PINNED, self.pinned_memory),
            (MemoryKind.PINNED, self.registered.values()),
        )
        found = MemoryKind.PAGEABLE
        for kind, ranges in kinds:
            for memory in ranges:
                if memory.holds(address, size):
                    return kind
                if memory.touches(address, size):
                    found = MemoryKind.CROSSING
        return found

    def called(self, name: str, work: Callable[..., int], values: Sequence[int]) -> int:
        """Return the status of a call. Its error is the thread's until somebody takes it."""
        self.calls[name] += 1
        if self.threads.device != self.device:
            raise self.misuse(f"{name}: {threading.current_thread().name} uses the first device")
        if name in {"cudaGetLastError", "cudaPeekAtLastError"}:
            return work(*values)
        status = self.lost or self._refused(name) or work(*values)
        if status:
            self.threads.last_error = status
        return status

    # The functions

    def _priority_range(self, least: int, greatest: int) -> int:
        for address, value in ((least, LEAST_PRIORITY), (greatest, GREATEST_PRIORITY)):
            if address:
                ctypes.c_int.from_address(address).value = value
        return SUCCESS

    def _last_error(self) -> int:
        status = self._peek_error()
        self.threads.last_error = SUCCESS
        return status

    def _peek_error(self) -> int:
        return self.lost or self.threads.last_error

    def _get_version(self, version: int) -> int:
        if not version:
            return INVALID_VALUE
        ctypes.c_int.from_address(version).value = self.version
        return SUCCESS

    def _create_stream(self, stream: int, flags: int, priority: int) -> int:
        if not stream or flags not in {0, NON_BLOCKING}:
            return INVALID_VALUE
        # A handle needs more than 32 bits, so that one that was cut off is nobody's.
        handle = (0x7F5A << 32) + 64 * len(self.streams)
        clamped = max(GREATEST_PRIORITY, min(LEAST_PRIORITY, priority))
        self.streams[handle] = FakeStream(self.threads.device, flags, clamped, deque())
        ctypes.c_void_p.from_address(stream).value = handle
        return SUCCESS

    def _register(self, address: int, size: int, flags: int) -> int:
        if not address or not size or flags & ~0xF:
            return INVALID_VALUE
        first = address - address % PAGE_BYTES
        pages = -(-(address + size) // PAGE_BYTES) * PAGE_BYTES - first
        if any(memory.touches(first, pages) for memory in self.registered.values()):
            return ALREADY_REGISTERED
        self.registered[address] = Range(address, size)
        return SUCCESS

    def _unregister(self, address: int) -> int:
        return SUCCESS if self.registered.pop(address, None) else NOT_REGISTERED

    def _copy(self, to: int, source: int, size: int, kind: int, stream: int) -> int:
        if stream not in self.streams:
            raise self.misuse(f"cudaMemcpyAsync: {stream:#x} is no stream")
        if not size:
            return SUCCESS
        memory_kinds = self.memory_kind(to, size), self.memory_kind(source, size)
        if MemoryKind.CROSSING in memory_kinds:
            self.misuse("a copy crosses from one pinned piece to the next")
            return INVALID_VALUE
        # By cudaMemcpyKind: whether the bytes come to the device, and from the device.
        directions = ((False, False), (True, False), (False, True), (True, True))
        on_device = tuple(memory_kind is MemoryKind.DEVICE for memory_kind in memory_kinds)
        if kind not in range(5) or (kind < 4 and directions[kind] != on_device):
            return INVALID_DIRECTION
        if MemoryKind.PAGEABLE in memory_kinds:
            # The call returns when the copy, and all that the stream has before it, is over.
            self.pageable_copies += 1
            self.finish(stream)
            ctypes.memmove(to, source, size)
        else:
            self.queue(stream, lambda: self._move_bytes(to, source, size))
        return SUCCESS

    def _copy_batch(  # noqa: PLR0913, PLR0917  # CUDA's own
        self,
        to: int,
        source: int,
        sizes: int,
        count: int,
        attributes: int,
        first_of: int,
        attributes_count: int,
        *rest: int,
    ) -> int:
        *fail_index, stream = rest
        if stream not in self.streams:
            raise self.misuse(f"cudaMemcpyBatchAsync: {stream:#x} is no stream")
        failed = c_size_t.from_address(fail_index[0]) if any(fail_index) else c_size_t()
        failed.value = _NO_INDEX
        if stream == LEGACY_STREAM or not 1 <= attributes_count <= count:
            return INVALID_VALUE
        firsts = _read_sizes(first_of, attributes_count)
        sets = (Attributes * attributes_count).from_address(attributes)
        orders = [copy_attributes.order for copy_attributes in sets]
        rising = all(first < after for first, after in pairwise([*firsts, count]))
        if firsts[0] or not rising or not set(orders) <= {1, 2, 3}:
            return INVALID_VALUE
        targets, sources = _read_sizes(to, count), _read_sizes(source, count)
        copies = list(map(BatchCopy, targets, sources, _read_sizes(sizes, count)))
        for number, copy in enumerate(copies):
            memory_kinds = {
                self.memory_kind(copy.to, copy.size),
                self.memory_kind(copy.source, copy.size),
            }
            if not copy.size or MemoryKind.CROSSING in memory_kinds:
                failed.value = number
                return INVALID_VALUE
            self.pageable_copies += MemoryKind.PAGEABLE in memory_kinds
        ordered = sorted(copies, key=lambda copy: copy.to)
        if any(copy.to + copy.size > after.to for copy, after in pairwise(ordered)):
            raise self.misuse("cudaMemcpyBatchAsync: copies of one batch write the same bytes")
        for order, first, end in zip(orders, firsts, [*firsts[1:], count], strict=True):
            for copy in copies[first:end]:
                if order != STREAM_ORDER:
                    copy.content = ctypes.string_at(copy.source, copy.size)

        def run() -> None:
            # Within a batch the order is anyone's.
            for copy in reversed(copies):
                self._run_copy(copy)

        self.queue(stream, run)
        return SUCCESS

    # Within

    def _refused(self, name: str) -> int:
        for refusal in self._refusals:
            if refusal.name == name and refusal.count:
                if refusal.skipped:
                    refusal.skipped -= 1
                else:
                    refusal.count -= 1
                    return refusal.status
        return SUCCESS

    def _run_copy(self, copy: "BatchCopy") -> None:
        if copy.content is None:
            self._move_bytes(copy.to, copy.source, copy.size)
        else:
            ctypes.memmove(copy.to, copy.content, copy.size)

    def _move_bytes(self, to: int, source: int, size: int) -> None:
        for address in (to, source):
            if self.memory_kind(address, size) not in {MemoryKind.DEVICE, MemoryKind.PINNED}:
                self.lose(ILLEGAL_ADDRESS, f"a copy uses {size} bytes at {address:#x}")
                return
        ctypes.memmove(to, source, size)


def _read_sizes(address: int, count: int) -> list[int]:
    return list((c_size_t * count).from_address(address))
