"""CUDA as the copier's device: torch, and the calls of the CUDA runtime that torch does not have.

Tests run it on a fake runtime (tests.fakecuda), and all above it on a simulated device. What a GPU
has shown is in docs/gpu.md.
"""

import contextlib
import ctypes
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hybridkv.connector.copy.device import (
    DeviceError,
    DeviceMemoryError,
    Kernels,
    Lane,
    Pieces,
    Stream,
    Waitable,
)
from hybridkv.connector.copy.tables import ENTRY, BlockTables, Move, encode
from hybridkv.connector.copy.torch_kernels import TorchKernels
from hybridkv.core.copies import CopyOp, SlotRef
from hybridkv.shm.slots import PIECE_BYTES, piece_digests

try:
    from hybridkv.connector.copy.triton_kernels import TritonKernels
except ImportError:
    TritonKernels = None  # type: ignore[assignment,misc]

logger = logging.getLogger("vllm.hybridkv")

HASH_THREADS = 4  # Where Triton cannot run, they hash at about the rate of a PCIe link.
_NON_BLOCKING = 1  # cudaStreamNonBlocking: our streams do not wait for the default stream.
_DEFAULT_PRIORITY = 0  # That of the engine's stream, and the least that there is.
TRIED_BLOCKS = 5  # Of each group, before the kernels are used; fewer where they are large.
TRIED_BYTES_MAX = 64 << 20
TRIED_PIECES = 3
_CUDA_13 = 13_000
_IN_ORDER = (ctypes.c_int * 6)(1)
"""cudaMemcpyAttributes: cudaMemcpySrcAccessOrderStream, no hints of locations, no flags."""
_DEFAULT_KIND = 4  # cudaMemcpyDefault: the direction follows from the addresses.


class CudaEvent:
    """See Waitable."""

    def __init__(self) -> None:
        self.event = torch.cuda.Event(blocking=True)

    def ready(self) -> bool:
        """See Waitable."""
        with translated():
            return bool(self.event.query())

    def wait(self) -> None:
        """See Waitable."""
        with contextlib.suppress(RuntimeError):
            self.event.synchronize()


class HashResult:
    """See Result."""

    def __init__(self, future: "Future[bytes]") -> None:
        self._future = future

    def ready(self) -> bool:
        """See Waitable."""
        return self._future.done()

    def wait(self) -> None:
        """See Waitable."""
        wait([self._future])

    def result(self) -> bytes:
        """See Result."""
        return self._future.result()


class CudaDevice:
    """See Device. It is made on the engine's thread, whose device is the worker's."""

    def __init__(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self._device = torch.device("cuda", index)
        self._runtime = _runtime()
        self._streams: dict[int, Any] = {}
        self._hashing = ThreadPoolExecutor(HASH_THREADS, thread_name_prefix="hybridkv-hash")
        highest = ctypes.c_int()
        self._run("cudaDeviceGetStreamPriorityRange", None, ctypes.byref(highest))
        self._highest_priority = highest.value
        version = ctypes.c_int()
        self._run("cudaRuntimeGetVersion", ctypes.byref(version))
        self._runtime_version = version.value
        self._copies_batches = hasattr(self._runtime, "cudaMemcpyBatchAsync")

    def free_bytes(self) -> int:
        """See Device."""
        with translated():
            return int(torch.cuda.mem_get_info(self._device)[0])

    def allocate(self, size: int, pinned: bool = False) -> torch.Tensor:
        """See Device."""
        with translated():
            if pinned:
                return torch.empty(size, dtype=torch.uint8, pin_memory=True)
            return torch.empty(size, dtype=torch.uint8, device=self._device)

    def current_stream(self) -> Stream:
        """See Device."""
        stream = torch.cuda.current_stream(self._device)
        self._streams[stream.cuda_stream] = stream
        return Stream(stream.cuda_stream)

    def new_stream(self, *, is_urgent: bool = False) -> Stream:
        """See Device. It is not one of torch's streams, which others use as well."""
        handle = ctypes.c_void_p()
        priority = self._highest_priority if is_urgent else _DEFAULT_PRIORITY
        self._run("cudaStreamCreateWithPriority", ctypes.byref(handle), _NON_BLOCKING, priority)
        assert handle.value
        self._streams[handle.value] = torch.cuda.ExternalStream(handle.value, self._device)
        return Stream(handle.value)

    def record(self, stream: Stream) -> CudaEvent:
        """See Device."""
        event = CudaEvent()
        with translated():
            event.event.record(self._streams[stream])
        return event

    def wait_event(self, stream: Stream, event: Waitable) -> None:
        """See Device."""
        assert isinstance(event, CudaEvent)
        with translated():
            self._streams[stream].wait_event(event.event)

    def copy(self, to: int, source: int, size: int, stream: Stream) -> None:
        """See Device."""
        addresses = ctypes.c_void_p(to), ctypes.c_void_p(source)
        on = ctypes.c_void_p(stream)
        self._run("cudaMemcpyAsync", *addresses, ctypes.c_size_t(size), _DEFAULT_KIND, on)

    def copy_all(self, pieces: Pieces, stream: Stream) -> None:
        """See Device. In one call where CUDA has it, which is since 12.8."""
        is_batch = self._copies_batches and len(pieces.sizes) > 1
        if not is_batch or not self._copy_batch(pieces, stream):
            for target, source, size in pieces:
                self.copy(target, source, size, stream)

    def _copy_batch(self, pieces: Pieces, stream: Stream) -> bool:
        """Queue all in one call. False where that is refused, which is not tried again."""
        arrays = pieces.targets, pieces.sources, pieces.sizes
        arguments: list[Any] = [ctypes.c_void_p(numbers.buffer_info()[0]) for numbers in arrays]
        arguments.append(ctypes.c_size_t(len(pieces.sizes)))
        # All copies have the attributes that begin with the first one.
        arguments += ctypes.byref(_IN_ORDER), ctypes.byref(ctypes.c_size_t(0)), ctypes.c_size_t(1)
        if self._runtime_version < _CUDA_13:
            arguments.append(ctypes.byref(ctypes.c_size_t()))  # Which copy was refused.
        status = self._runtime.cudaMemcpyBatchAsync(*arguments, ctypes.c_void_p(stream))
        if status:
            self.clear_error()
            self._copies_batches = False
            logger.warning("hybridkv: CUDA refused copies in one call (error %s)", status)
        return bool(status == 0)

    def kernels(
        self,
        tables: BlockTables,
        table: torch.Tensor,
        groups: Sequence[Sequence[torch.Tensor]],
        staging: torch.Tensor,
    ) -> Kernels:
        """See Device. Kernels of Triton that do not do what torch's do are not used."""
        plain = TorchKernels(tables.word_bytes, groups)
        try:
            kernels = TritonKernels(tables.word_bytes, self._device)
            if agree(kernels, plain, tables, table, staging):
                return kernels
            logger.warning("hybridkv: Triton copies other bytes than torch, which is used instead")
        except Exception as error:  # noqa: BLE001  # the message has it
            text = "hybridkv: Triton does not run here; torch copies instead, and slower: %s"
            logger.warning(text, error)
        return plain

    def launch(self, work: Callable[[], None], stream: Stream) -> None:
        """See Device."""
        with translated(), torch.cuda.stream(self._streams[stream]):
            work()

    def register(self, address: int, size: int) -> bool:
        """See Device."""
        call = self._runtime.cudaHostRegister
        return bool(call(ctypes.c_void_p(address), ctypes.c_size_t(size), 0) == 0)

    def unregister(self, address: int) -> None:
        """See Device."""
        self._run("cudaHostUnregister", ctypes.c_void_p(address))

    def clear_error(self) -> None:
        """See Device."""
        self._runtime.cudaGetLastError()

    def call(self, work: Callable[[], bytes]) -> HashResult:
        """See Device."""
        return HashResult(self._hashing.submit(work))

    def start(self, name: str, lane: Lane) -> None:
        """See Device."""
        threading.Thread(target=drive, args=(lane,), name=name, daemon=True).start()

    def enter_thread(self) -> None:
        """See Device."""
        with translated():
            torch.cuda.set_device(self._device)

    def wait(self, waitable: Waitable) -> None:
        """See Device."""
        while not waitable.ready():
            waitable.wait()

    def _run(self, name: str, *arguments: Any) -> None:
        status = getattr(self._runtime, name)(*arguments)
        if status:
            self.clear_error()
            raise DeviceError(f"{name} failed with CUDA error {status}")


def drive(lane: Lane) -> None:
    """Run a lane in this thread to its end."""
    # The engine's tensors may be of inference mode, which is set thread by thread.
    with torch.inference_mode():
        for waitable in lane:
            waitable.wait()


@contextlib.contextmanager
def translated() -> Iterator[None]:
    """What torch and Triton raise, as a DeviceError."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise DeviceMemoryError(str(error)) from error
    except RuntimeError as error:
        raise DeviceError(str(error)) from error


def _runtime() -> Any:
    """The CUDA runtime that torch has loaded; another copy would have errors of its own."""
    path = runtime_path(Path("/proc/self/maps").read_text())
    if path is None:
        raise DeviceError("torch has loaded no CUDA runtime")
    return ctypes.CDLL(path)


def runtime_path(maps: str) -> str | None:
    """The library of `/proc/self/maps` that is torch's CUDA runtime; None if there is none.

    torchvision brings a copy of its own, whose name has a hash: `libcudart.faf08d9a.so.13`.
    """
    paths = {line.split(maxsplit=5)[-1] for line in maps.splitlines()}
    found = sorted(path for path in paths if Path(path).name.startswith("libcudart"))
    plain = (path for path in found if Path(path).name.startswith("libcudart.so"))
    return next(plain, found[0] if found else None)


def agree(
    kernels: Kernels,
    plain: Kernels,
    tables: BlockTables,
    table: torch.Tensor,
    staging: torch.Tensor,
) -> bool:
    """Compile the kernels and try them; whether they do what torch's do, and hash as xxhash.

    Nothing is cached yet. The first blocks of each group and the last ones get random bytes, and
    then what they had. `staging` is the store ring, which holds the largest object and is not in
    use yet.
    """
    draw = torch.Generator().manual_seed(0)
    for index, group in enumerate(tables.groups):
        room = min(len(staging), TRIED_BYTES_MAX) // group.block_bytes
        count = max(1, min(TRIED_BLOCKS, group.blocks, room))
        part = staging[: count * group.block_bytes]
        move = partial(_move_blocks, tables, table, index, part)
        last = range(group.blocks - count // 2, group.blocks)
        blocks = [*range(count - count // 2), *last]
        shuffled = blocks[1::2] + blocks[::2]
        earlier = move(plain, blocks)
        content, other = torch.randint(256, (2, len(part)), dtype=torch.uint8, generator=draw)
        outcomes: list[torch.Tensor] = []
        try:
            for tried in (plain, kernels):
                move(plain, blocks, content)
                outcomes.append(move(tried, shuffled[:-1] or shuffled))
                move(tried, shuffled[::2], other)
                outcomes.append(move(plain, blocks))
        finally:
            move(plain, blocks, earlier)
        if not all(map(torch.equal, outcomes[:2], outcomes[2:])):
            return False
    # Of the same part twice, the second time without its last piece, into the host's memory.
    pieces = min(TRIED_PIECES, len(staging) // PIECE_BYTES)
    data = torch.randint(256, (pieces, PIECE_BYTES), dtype=torch.uint8, generator=draw)
    staging[: pieces * PIECE_BYTES].copy_(data.flatten())
    entries = torch.zeros(2, ENTRY, dtype=torch.int64)
    entries[:, 0], entries[:, -1] = staging.data_ptr(), torch.tensor([pieces, pieces - 1])
    entries = entries.to(staging.device)
    digests = torch.zeros(2, pieces, dtype=torch.int64, pin_memory=staging.is_cuda)
    expected = [piece_digests(memoryview(piece.numpy())) for piece in data]
    if pieces:
        kernels.digest(entries.data_ptr(), 2, pieces, digests.data_ptr())
        staging[:1].cpu()  # It waits for the device.
        expected += [*expected[:-1], bytes(8)]
    return bool(digests.numpy().tobytes() == b"".join(expected))


def _move_blocks(
    tables: BlockTables,
    table: torch.Tensor,
    index: int,
    part: torch.Tensor,
    kernels: Kernels,
    blocks: Sequence[int],
    content: torch.Tensor | None = None,
) -> torch.Tensor:
    """Scatter `content` out of `part`, or gather into it; what it has then. The ops are two."""
    group = tables.groups[index]
    ops = [
        CopyOp(SlotRef(0, 0), index, 0, len(some), 0, tuple(some))
        for some in (blocks[:1], blocks[1:])
        if some
    ]
    places = [0, group.block_bytes][: len(ops)]
    words = encode(tables, ops, places, part.data_ptr())
    descriptors = torch.tensor(words, dtype=torch.int64).to(part.device).view(torch.uint8)
    if content is None:
        part.zero_()
    else:
        part.copy_(content)
    kernels.move(
        Move(ops, places, part, table.data_ptr(), descriptors, group.rows, group.run_words),
        is_gather=content is None,
    )
    return part.to("cpu", copy=True)
