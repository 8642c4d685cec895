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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hybridkv.connector.copy.device import (
    CopyList,
    Device,
    DeviceError,
    DeviceMemoryError,
    Kernels,
    Lane,
    Result,
    Stream,
    Waitable,
)
from hybridkv.connector.copy.tables import ENTRY, BlockTables, KernelLaunch, encode
from hybridkv.connector.copy.torch_kernels import TorchKernels
from hybridkv.core.copies import CopyOp
from hybridkv.core.packed import SlotRef
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


class CudaEvent(Waitable):
    """An event of torch, as a Waitable. The thread that waits for it sleeps."""

    def __init__(self) -> None:
        self.event = torch.cuda.Event(blocking=True)

    def is_over(self) -> bool:
        with translated():
            return bool(self.event.query())

    def wait(self) -> None:
        with contextlib.suppress(RuntimeError):
            self.event.synchronize()


class HashResult(Result):
    """The Result of work in a thread for hashing."""

    def __init__(self, future: "Future[bytes]") -> None:
        self._future = future

    def is_over(self) -> bool:
        return self._future.done()

    def wait(self) -> None:
        wait([self._future])

    def result(self) -> bytes:
        return self._future.result()


class CudaDevice(Device):
    """The Device of a worker. It is made on the engine's thread, whose device is the worker's."""

    def __init__(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self._device = torch.device("cuda", index)
        self._runtime = load_runtime()
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
        with translated():
            return int(torch.cuda.mem_get_info(self._device)[0])

    def allocate(self, size: int, pinned: bool = False) -> torch.Tensor:
        with translated():
            if pinned:
                return torch.empty(size, dtype=torch.uint8, pin_memory=True)
            return torch.empty(size, dtype=torch.uint8, device=self._device)

    def current_stream(self) -> Stream:
        stream = torch.cuda.current_stream(self._device)
        self._streams[stream.cuda_stream] = stream
        return Stream(stream.cuda_stream)

    def new_stream(self, *, is_urgent: bool = False) -> Stream:
        """Create a stream that is not one of torch's, which others use as well."""
        handle = ctypes.c_void_p()
        priority = self._highest_priority if is_urgent else _DEFAULT_PRIORITY
        self._run("cudaStreamCreateWithPriority", ctypes.byref(handle), _NON_BLOCKING, priority)
        assert handle.value
        self._streams[handle.value] = torch.cuda.ExternalStream(handle.value, self._device)
        return Stream(handle.value)

    def record(self, stream: Stream) -> CudaEvent:
        event = CudaEvent()
        with translated():
            event.event.record(self._streams[stream])
        return event

    def wait_event(self, stream: Stream, event: Waitable) -> None:
        assert isinstance(event, CudaEvent)
        with translated():
            self._streams[stream].wait_event(event.event)

    def copy(self, to: int, source: int, size: int, stream: Stream) -> None:
        self._run(
            "cudaMemcpyAsync",
            ctypes.c_void_p(to),
            ctypes.c_void_p(source),
            ctypes.c_size_t(size),
            _DEFAULT_KIND,
            ctypes.c_void_p(stream),
        )

    def copy_all(self, copies: CopyList, stream: Stream) -> None:
        """Queue all in one call where CUDA has it, which is since 12.8, and else one by one."""
        is_batch = self._copies_batches and len(copies.sizes) > 1
        if not is_batch or not self._copy_batch(copies, stream):
            for target, source, size in copies:
                self.copy(target, source, size, stream)

    def _copy_batch(self, copies: CopyList, stream: Stream) -> bool:
        """Queue all in one call. Returns False where CUDA refuses, after which no call is tried."""
        arguments: list[Any] = [
            ctypes.c_void_p(copies.targets.buffer_info()[0]),
            ctypes.c_void_p(copies.sources.buffer_info()[0]),
            ctypes.c_void_p(copies.sizes.buffer_info()[0]),
            ctypes.c_size_t(len(copies.sizes)),
            # One set of attributes, which copies have from the first one on.
            ctypes.byref(_IN_ORDER),
            ctypes.byref(ctypes.c_size_t(0)),
            ctypes.c_size_t(1),
        ]
        if self._runtime_version < _CUDA_13:
            arguments.append(ctypes.byref(ctypes.c_size_t()))  # The index of a refused copy.
        arguments.append(ctypes.c_void_p(stream))
        status = self._runtime.cudaMemcpyBatchAsync(*arguments)
        if status:
            self.clear_error()
            self._copies_batches = False
            logger.warning("hybridkv: CUDA refused copies in one call (error %s)", status)
        return bool(status == 0)

    def make_kernels(
        self,
        tables: BlockTables,
        device_rows: torch.Tensor,
        groups: Sequence[Sequence[torch.Tensor]],
        staging: torch.Tensor,
    ) -> Kernels:
        """Return kernels of Triton, or those of torch where Triton's fail or copy other bytes."""
        reference = TorchKernels(tables.word_bytes, groups)
        try:
            kernels = TritonKernels(tables.word_bytes, self._device)
            if kernels_agree(kernels, reference, tables, device_rows, staging):
                return kernels
            logger.warning("hybridkv: Triton copies other bytes than torch, which is used instead")
        except Exception as error:  # noqa: BLE001  # the message has it
            text = "hybridkv: Triton does not run here; torch copies instead, and slower: %s"
            logger.warning(text, error)
        return reference

    def launch(self, work: Callable[[], None], stream: Stream) -> None:
        with translated(), torch.cuda.stream(self._streams[stream]):
            work()

    def register(self, address: int, size: int) -> bool:
        call = self._runtime.cudaHostRegister
        return bool(call(ctypes.c_void_p(address), ctypes.c_size_t(size), 0) == 0)

    def unregister(self, address: int) -> None:
        self._run("cudaHostUnregister", ctypes.c_void_p(address))

    def clear_error(self) -> None:
        self._runtime.cudaGetLastError()

    def submit(self, work: Callable[[], bytes]) -> HashResult:
        return HashResult(self._hashing.submit(work))

    def start_lane(self, name: str, lane: Lane) -> None:
        threading.Thread(target=drive, args=(lane,), name=name, daemon=True).start()

    def enter_thread(self) -> None:
        with translated():
            torch.cuda.set_device(self._device)

    def wait_for(self, waitable: Waitable) -> None:
        while not waitable.is_over():
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
    """Raise what torch and Triton raise as a DeviceError."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise DeviceMemoryError(str(error)) from error
    except RuntimeError as error:
        raise DeviceError(str(error)) from error


def load_runtime() -> Any:
    """Return the CUDA runtime that torch has loaded. Another copy would have errors of its own."""
    path = runtime_path(Path("/proc/self/maps").read_text())
    if path is None:
        raise DeviceError("torch has loaded no CUDA runtime")
    return ctypes.CDLL(path)


def runtime_path(maps: str) -> str | None:
    """Return the library of `/proc/self/maps` that is torch's CUDA runtime, or None.

    Torch's is `libcudart.so.13`. torchvision brings a copy of its own, whose name has a hash:
    `libcudart.faf08d9a.so.13`.
    """
    paths = {line.split(maxsplit=5)[-1] for line in maps.splitlines()}
    found = sorted(path for path in paths if Path(path).name.startswith("libcudart"))
    plain = (path for path in found if Path(path).name.startswith("libcudart.so"))
    return next(plain, found[0] if found else None)


def kernels_agree(
    kernels: Kernels,
    reference: Kernels,
    tables: BlockTables,
    device_rows: torch.Tensor,
    staging: torch.Tensor,
) -> bool:
    """Compile the kernels and try them. Returns True if they copy and hash the right bytes.

    Copies are compared with those of `reference`, and digests with xxhash. Nothing is cached yet.
    The first blocks of each group and the last ones get random bytes, and then what they had.
    `staging` is the store ring, which holds the largest object and is not in use yet.
    """
    generator = torch.Generator().manual_seed(0)
    for index, group in enumerate(tables.groups):
        room = min(len(staging), TRIED_BYTES_MAX) // group.block_bytes
        count = max(1, min(TRIED_BLOCKS, group.blocks, room))
        trial = _GroupTrial(tables, device_rows, index, staging[: count * group.block_bytes])
        if not _copies_agree(kernels, reference, trial, generator):
            return False
    return _digests_agree(kernels, staging, generator)


@dataclass(frozen=True, slots=True)
class _GroupTrial:
    """Copies of blocks of one group, from and to a part in the staging."""

    tables: BlockTables
    device_rows: torch.Tensor
    group_index: int
    part: torch.Tensor

    def gather(self, kernels: Kernels, blocks: Sequence[int]) -> torch.Tensor:
        """Gather the blocks into the part. Returns its bytes."""
        return self._copy(kernels, blocks, None)

    def scatter(self, kernels: Kernels, blocks: Sequence[int], content: torch.Tensor) -> None:
        """Scatter `content`, which the part gets before, into the blocks."""
        self._copy(kernels, blocks, content)

    def _copy(
        self, kernels: Kernels, blocks: Sequence[int], content: torch.Tensor | None
    ) -> torch.Tensor:
        """Scatter the content, or gather where there is none. The blocks are those of two ops."""
        part, group = self.part, self.tables.groups[self.group_index]
        ops = [
            CopyOp(
                slot=SlotRef(0, 0),
                group_index=self.group_index,
                chunk=0,
                count=len(own),
                first=0,
                blocks=tuple(own),
            )
            for own in (blocks[:1], blocks[1:])
            if own
        ]
        part_offsets = [0, group.block_bytes][: len(ops)]
        words = encode(self.tables, ops, part_offsets, part.data_ptr())
        descriptors = torch.tensor(words, dtype=torch.int64).to(part.device).view(torch.uint8)
        if content is None:
            part.zero_()
        else:
            part.copy_(content)
        launch = KernelLaunch(
            ops=ops,
            part_offsets=part_offsets,
            staging=part,
            rows_address=self.device_rows.data_ptr(),
            descriptors=descriptors,
            rows_max=group.rows,
            run_words_max=group.run_words,
        )
        kernels.copy_blocks(launch, is_gather=content is None)
        return part.to("cpu", copy=True)


def _copies_agree(
    kernels: Kernels, reference: Kernels, trial: _GroupTrial, generator: torch.Generator
) -> bool:
    """Return True if gathers and scatters of the kernels do what those of `reference` do."""
    group = trial.tables.groups[trial.group_index]
    count = len(trial.part) // group.block_bytes
    last = range(group.blocks - count // 2, group.blocks)
    blocks = [*range(count - count // 2), *last]
    shuffled = blocks[1::2] + blocks[::2]
    earlier = trial.gather(reference, blocks)
    size = 2, len(trial.part)
    content, new_content = torch.randint(256, size, dtype=torch.uint8, generator=generator)
    outcomes: list[torch.Tensor] = []
    try:
        for tried in (reference, kernels):
            trial.scatter(reference, blocks, content)
            outcomes.append(trial.gather(tried, shuffled[:-1] or shuffled))
            trial.scatter(tried, shuffled[::2], new_content)
            outcomes.append(trial.gather(reference, blocks))
    finally:
        trial.scatter(reference, blocks, earlier)
    return all(map(torch.equal, outcomes[:2], outcomes[2:]))


def _digests_agree(kernels: Kernels, staging: torch.Tensor, generator: torch.Generator) -> bool:
    """Return True if the kernels hash pieces as xxhash does, into the host's memory.

    They hash the same part twice, the second time without its last piece.
    """
    pieces = min(TRIED_PIECES, len(staging) // PIECE_BYTES)
    data = torch.randint(256, (pieces, PIECE_BYTES), dtype=torch.uint8, generator=generator)
    staging[: pieces * PIECE_BYTES].copy_(data.flatten())
    entries = torch.zeros(2, ENTRY, dtype=torch.int64)
    entries[:, 0], entries[:, -1] = staging.data_ptr(), torch.tensor([pieces, pieces - 1])
    entries = entries.to(staging.device)
    digests = torch.zeros(2, pieces, dtype=torch.int64, pin_memory=staging.is_cuda)
    expected = [piece_digests(memoryview(piece.numpy())) for piece in data]
    if pieces:
        kernels.digest_pieces(entries.data_ptr(), 2, pieces, digests.data_ptr())
        staging[:1].cpu()  # It waits for the device.
        expected += [*expected[:-1], bytes(8)]
    return bool(digests.numpy().tobytes() == b"".join(expected))
