"""A fake of torch.cuda on the fake runtime: `with fake_cuda() as cuda:`.

Tensors "on the device" are tensors of the host whose memory the runtime knows as the device's. An
operation with one runs at once, after all that its stream has before it, which is an order that
CUDA allows. Triton's kernels are queued when they are launched (see Launcher).
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from hybridkv.connector.copy import cuda_device, tables, triton_kernels
from hybridkv.connector.copy.tables import NUMBER_BYTES
from hybridkv.shm.slots import PIECE_BYTES
from tests.devicesim.device import (
    TILE_WORDS,
    DigestGrid,
    MoveGrid,
    MoveTables,
    Range,
    Touch,
    digest_pieces,
    is_launchable,
    move_words,
)
from tests.fakecuda.runtime import LEGACY_STREAM, OUT_OF_MEMORY, SUCCESS, FakeRuntime, Mark

DEVICES = 2
WORKER = 1
"""The device of the worker; a thread has the first one until it chooses."""
FRESH = 0xC3
"""The byte that fills memory which nobody has written."""
_VIEWS = {
    *("__len__", "as_strided", "data_ptr", "dim", "element_size", "expand", "flatten"),
    *("is_contiguous", "narrow", "numel", "reshape", "select", "size", "storage_offset", "stride"),
    *("unbind", "unflatten", "untyped_storage", "view", "view_as"),
}
"""Operations that read no byte."""
_TO_HOST = {"__bool__", "__repr__", "cpu", "equal", "item", "tolist"}
"""Operations whose result is the host's."""
_MIXED = {"__getitem__", "__setitem__", "copy_", "equal", "to"}
"""Operations that take tensors of the host and of the device; `equal` says so itself."""


class Thread(threading.local):
    """The state that torch keeps for each thread."""

    stream = LEGACY_STREAM
    mode: "DeviceMode | None" = None


class Stream:
    """A fake of torch.cuda.ExternalStream."""

    def __init__(self, cuda: "FakeCuda", stream_ptr: int, device: Any = None) -> None:
        assert stream_ptr in cuda.runtime.streams, "it is no stream"
        self.cuda_stream = stream_ptr
        self.device = torch.device("cuda", cuda.index(device, is_optional=True))
        self._cuda = cuda

    def wait_event(self, event: "Event") -> None:
        event.wait(self)

    def synchronize(self) -> None:
        self._cuda.runtime.finish(self.cuda_stream)
        self._cuda.check()


class Event:
    """A fake of torch.cuda.Event. It stands for what it recorded last."""

    def __init__(
        self,
        cuda: "FakeCuda",
        enable_timing: bool = False,
        blocking: bool = False,
        interprocess: bool = False,
    ) -> None:
        self._cuda = cuda
        self._mark: Mark | None = None
        cuda.spinning_events += not blocking

    def record(self, stream: Stream | None = None) -> None:
        self._cuda.check()
        handle = self._cuda.thread.stream if stream is None else stream.cuda_stream
        self._mark = self._cuda.runtime.record(handle)

    def wait(self, stream: Stream | None = None) -> None:
        self._cuda.check()
        handle = self._cuda.thread.stream if stream is None else stream.cuda_stream
        if self._mark is not None:
            self._cuda.runtime.await_mark(handle, self._mark)

    def query(self) -> bool:
        """Return True if the event is over. A bit of the stream's work runs meanwhile."""
        self._cuda.check()
        if self._mark is None or self._mark.is_over:
            return True
        self._cuda.runtime.run_one(self._mark.stream)
        return False

    def synchronize(self) -> None:
        if self._mark is not None:
            self._cuda.runtime.run_until(self._mark)
        self._cuda.check()


class FakeCuda:
    """torch.cuda, and the memory of both sides."""

    def __init__(self, runtime: FakeRuntime, free_bytes: int) -> None:
        self.runtime = runtime
        self.free_bytes = free_bytes
        self.refuses_pinned = False
        self.spinning_events = 0
        """Events whose waits use a core."""
        self.thread = Thread()
        self._kept: list[torch.Tensor] = []
        """All memory, so that no address is used twice."""

    # torch.cuda

    def set_device(self, device: Any) -> None:
        self.runtime.threads.device = self.index(device)
        if self.thread.mode is None:
            self.thread.mode = DeviceMode(self)
            self.thread.mode.__enter__()

    def current_device(self) -> int:
        return self.runtime.threads.device

    def current_stream(self, device: Any = None) -> Stream:
        return Stream(self, self.thread.stream, device)

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.thread.stream = self.thread.stream, stream.cuda_stream
        try:
            yield
        finally:
            self.thread.stream = before

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        self.index(device, is_optional=True)
        self.check()
        return self.free_bytes, 1 << 40

    def synchronize(self, device: Any = None) -> None:
        self.index(device, is_optional=True)
        self.runtime.finish_all()
        self.check()

    # What the tests use

    def queue(self, work: Callable[[], None]) -> None:
        """Queue a kernel in the thread's current stream. It runs as late as it may."""
        self.check_launch()
        self.runtime.queue(self.thread.stream, work)

    # Within

    def index(self, device: Any, is_optional: bool = False) -> int:
        """Return the number of a device. Torch refuses one without it where it is not optional."""
        if isinstance(device, str):
            device = torch.device(device)
        number = device if isinstance(device, int) else getattr(device, "index", None)
        if number is None and not is_optional:
            raise ValueError(
                f"Expected a torch.device with a specified index or an integer, but got:{device}"
            )
        number = self.runtime.threads.device if number is None else number
        if not 0 <= number < DEVICES:
            raise RuntimeError("CUDA error: invalid device ordinal")
        return number

    def check(self) -> None:
        """Raise RuntimeError as torch does once the context has ended."""
        if self.runtime.lost:
            raise RuntimeError(f"CUDA error: {self.runtime.lost}")

    def check_launch(self) -> None:
        """Raise RuntimeError where a launch would fail, for an earlier error too."""
        self.check()
        status, self.runtime.threads.last_error = self.runtime.threads.last_error, SUCCESS
        if status:
            raise RuntimeError(f"CUDA error: {status}, of a call before this launch")
        if self.runtime.threads.device != self.runtime.device:
            thread = threading.current_thread().name
            raise self.runtime.misuse(f"{thread} launches on the first device")

    def allocate(self, tensor: torch.Tensor, is_pinned: bool) -> torch.Tensor:
        """Return the tensor, whose memory is the device's from now on, or pinned."""
        self.check()
        size = tensor.untyped_storage().nbytes()
        if is_pinned:
            if self.refuses_pinned:
                raise RuntimeError(f"CUDA error: {OUT_OF_MEMORY}")
            ranges = self.runtime.pinned_memory
        else:
            if size > self.free_bytes:
                raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {size} bytes")
            self.free_bytes -= size
            ranges = self.runtime.device_memory
        with self.runtime.lock:
            ranges.append(Range(tensor.untyped_storage().data_ptr(), size))
            self._kept.append(tensor)
        return tensor

    def is_on_device(self, tensor: torch.Tensor) -> bool:
        """Return True if the tensor's memory is the device's."""
        address = tensor.untyped_storage().data_ptr()
        return any(memory.start == address for memory in self.runtime.device_memory)

    def run(self, function: Any, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
        """Run an operation of torch that has tensors of the device among its arguments."""
        name = function.__name__
        if name == "__get__" or (name == "__getitem__" and not _has_tensor(arguments[1])):
            return function(*arguments, **keywords)
        self.check_launch()
        self.runtime.finish(self.thread.stream)
        self.check()
        found = list(_tensors([arguments, keywords]))
        if name not in _MIXED and any(
            tensor.dim() and not self.is_on_device(tensor) for tensor in found
        ):
            raise RuntimeError("Expected all tensors to be on the same device")
        result = function(*arguments, **keywords)
        if name in _TO_HOST:
            return result.clone() if name == "cpu" else result
        known = {tensor.untyped_storage().data_ptr() for tensor in found}
        for tensor in _tensors([result]):
            if tensor.untyped_storage().data_ptr() not in known:
                self.allocate(tensor, is_pinned=False)
        return result


class DeviceMode(TorchFunctionMode):
    """Torch's operations in one thread, as if there were a device."""

    def __init__(self, cuda: FakeCuda) -> None:
        super().__init__()
        self._cuda = cuda

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func.__name__ in _VIEWS:
            return func(*args, **(kwargs or {}))
        cuda, keywords = self._cuda, dict(kwargs or {})
        if func == torch.Tensor.device.__get__ and cuda.is_on_device(args[0]):
            return torch.device("cuda", cuda.runtime.device)
        if func == torch.Tensor.is_cuda.__get__:
            return cuda.is_on_device(args[0])
        if func is torch.Tensor.numpy and cuda.is_on_device(args[0]):
            raise TypeError("can't convert cuda device type tensor to numpy")
        if func in {torch.Tensor.to, torch.Tensor.cuda}:
            return self._moved(func, args, keywords)
        device = keywords.get("device")
        if device is not None and torch.device(device).type == "cuda":
            cuda.index(device, is_optional=True)
            result = func(*args, **{**keywords, "device": "cpu"})
            if func is torch.empty:
                result.untyped_storage().fill_(FRESH)
            return cuda.allocate(result, is_pinned=False)
        if keywords.pop("pin_memory", False):
            result = func(*args, **keywords)
            if func is torch.empty:
                result.untyped_storage().fill_(FRESH)
            return cuda.allocate(result, is_pinned=True)
        if any(cuda.is_on_device(tensor) for tensor in _tensors([args, keywords])):
            return cuda.run(func, args, keywords)
        return func(*args, **keywords)

    def _moved(self, func: Any, args: Sequence[Any], keywords: dict[str, Any]) -> Any:
        """Do `tensor.to(device)`, `tensor.to(dtype)` or `tensor.cuda()`."""
        cuda, tensor = self._cuda, args[0]
        wanted = [keywords["device"]] if "device" in keywords else []
        wanted += [argument for argument in args[1:] if isinstance(argument, (torch.device, str))]
        is_on_device = cuda.is_on_device(tensor)
        to_device = func is torch.Tensor.cuda or is_on_device
        if wanted:
            to_device = torch.device(wanted[0]).type == "cuda"
        types = [argument for argument in args[1:] if isinstance(argument, torch.dtype)]
        types += [keywords["dtype"]] if "dtype" in keywords else []
        if is_on_device:
            if to_device and not types:
                return tensor
            cuda.run(torch.Tensor.clone, [tensor], {})
        copied = tensor.clone() if not types else tensor.to(types[0], copy=True)
        return cuda.allocate(copied, is_pinned=False) if to_device else copied


class Launcher:
    """A fake of triton.JITFunction: `kernel[grid](...)` queues `run(touch, grid, ...)`."""

    def __init__(self, cuda: FakeCuda, run: Callable[..., None]) -> None:
        self._cuda, self._run = cuda, run

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: Any, **constants: Any) -> None:
            self._cuda.check_launch()
            if not is_launchable(grid):
                raise RuntimeError("Triton Error [CUDA]: invalid argument")
            assert all(type(argument) is int for argument in arguments), "an address is a number"
            work = partial(self._run, self._cuda.runtime.touch, grid, *arguments, **constants)
            self._cuda.queue(work)

        return launch


def _run_copy_blocks(
    touch: Touch, grid: tuple[int, int, int], entries: int, rows: int, **constants: Any
) -> None:
    word, is_gather = constants.pop("WORD"), constants.pop("GATHER")
    assert constants == {"ENTRY": tables.ENTRY, "ROW": tables.ROW, "TILE": TILE_WORDS}
    word_bytes = word.primitive_bitwidth // 8
    move_words(touch, MoveGrid(*grid), MoveTables(entries, rows, word_bytes), is_gather)


def _run_digest(
    touch: Touch, grid: tuple[int, int], *addresses: int, ENTRY: int, BLOCKS: int, STEP: int
) -> None:
    entries, keys, digests = addresses
    assert (ENTRY, 1024 * BLOCKS) == (tables.ENTRY, PIECE_BYTES)
    assert BLOCKS % STEP == 0
    touch(keys, len(triton_kernels.DIGEST_KEYS) * NUMBER_BYTES, NUMBER_BYTES)
    digest_pieces(touch, DigestGrid(*grid), entries, digests)


@contextmanager
def fake_cuda(
    version: int = 13000, free_bytes: int = 1 << 30, has_triton: bool = True
) -> Iterator[FakeCuda]:
    """Replace torch.cuda. The calling thread is the engine's, on the worker's device."""
    runtime = FakeRuntime(version, WORKER)
    cuda = FakeCuda(runtime, free_bytes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_device, "load_runtime", lambda: runtime)
        patch.setattr(torch.cuda, "Event", partial(Event, cuda))
        patch.setattr(torch.cuda, "ExternalStream", partial(Stream, cuda))
        for name in ("set_device", "current_device", "current_stream", "stream"):
            patch.setattr(torch.cuda, name, getattr(cuda, name))
        for name in ("mem_get_info", "synchronize"):
            patch.setattr(torch.cuda, name, getattr(cuda, name))
        if has_triton:
            patch.setattr(triton_kernels, "copy_blocks_kernel", Launcher(cuda, _run_copy_blocks))
            patch.setattr(triton_kernels, "digest_kernel", Launcher(cuda, _run_digest))
        mode = cuda.thread.mode = DeviceMode(cuda)
        with mode:
            cuda.set_device(WORKER)
            yield cuda


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    """Yield all tensors in nested sequences and mappings."""
    for value in values.values() if isinstance(values, Mapping) else values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple, Mapping)):
            yield from _tensors(value)


def _has_tensor(index: Any) -> bool:
    return any(True for _ in _tensors([index]))
