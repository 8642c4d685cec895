"""Copies between the arena's slots and an engine's blocks on a CUDA device.

    store   compute stream: blocks -> staging    side stream: staging -> slot    thread: checksum
    load    thread: checksum    side stream: slot -> staging -> blocks    thread: wait, recheck

The engine may overwrite a block as soon as its gather is queued on the compute stream. It may use a
loaded block only after `done`, which is called when the side stream's work is over.
"""

import logging
import queue
import threading
from collections.abc import Callable, Iterator, Sequence

import torch

from hybridkv.connector.copy.part import BadSlotError, PartLayout
from hybridkv.core.copies import CopyOp
from hybridkv.core.errors import HybridKVError
from hybridkv.shm.arena import Arena
from hybridkv.vllm.blocks import as_words, block_bytes, part_pieces

logger = logging.getLogger("vllm.hybridkv")

STAGING_BYTES = 256 << 20  # Device memory for copies in flight, for each direction.
PIN_STEP_BYTES = 64 << 20
"""The arena is pinned in pieces of this size; no single copy crosses from one to the next."""


class CudaCopier:
    """See Copier."""

    def __init__(
        self, arena: Arena, groups: Sequence[Sequence[torch.Tensor]], part: PartLayout
    ) -> None:
        self._arena = arena
        self._part = part
        self._groups = [as_words(views) for views in groups]
        self._block_bytes: list[int] = [sum(map(block_bytes, views)) for views in self._groups]
        self._num_blocks = [min(view.shape[0] for view in views) for views in self._groups]
        self._device = self._groups[0][0].device
        self._memory = torch.frombuffer(arena.memory, dtype=torch.uint8)
        self._pinned: list[int] = []
        self._streams = {way: torch.cuda.Stream(self._device) for way in ("store", "load")}
        self._staging = {way: _Staging(self._device) for way in self._streams}
        self._jobs: queue.SimpleQueue[tuple[Callable[[], None], Callable[[Exception], None]] | None]
        self._jobs = queue.SimpleQueue()
        """The work, and what is called if it fails, so that every copy's end is reported."""
        self._thread = threading.Thread(target=self._work, name="hybridkv-cuda", daemon=True)
        self._thread.start()

    def pin(self, reserved_bytes: int) -> None:
        """Register the arena's pages below `reserved_bytes` with CUDA, which speeds up copies."""

        def register() -> None:
            is_all = reserved_bytes == self._arena.slots_bytes
            stop = reserved_bytes if is_all else reserved_bytes - PIN_STEP_BYTES + 1
            for at in range(len(self._pinned) * PIN_STEP_BYTES, stop, PIN_STEP_BYTES):
                size = min(PIN_STEP_BYTES, self._arena.slots_bytes - at)
                address = self._arena.address + at
                status = int(torch.cuda.cudart().cudaHostRegister(address, size, 0))
                if status != 0:
                    text = "hybridkv: pinning the arena failed (CUDA error %d); copies are slower"
                    logger.warning(text, status)
                    return
                self._pinned.append(at)

        def fail(error: Exception) -> None:
            logger.warning("hybridkv: pinning failed: %s", error)

        self._jobs.put((register, fail))

    def store(self, ops: Sequence[CopyOp], done: Callable[[CopyOp, bool], None]) -> None:
        """Gather in the step on the current stream; the side stream and the thread do the rest."""
        side, staging = self._streams["store"], self._staging["store"]
        gathered: list[tuple[CopyOp, torch.Tensor]] = []
        for op in ops:
            buffer = staging.take(self._part_bytes(op)) if self._valid(op) else None
            if buffer is None:
                done(op, False)
                continue
            ids = self._ids(op)
            for view, piece in part_pieces(self._groups[op.group_index], op, buffer):
                torch.index_select(view, 0, ids, out=piece)
            gathered.append((op, buffer))
        if not gathered:
            return
        side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(side):
            for op, buffer in gathered:
                for at, piece in self._slot(op):
                    piece.copy_(buffer[at : at + len(piece)], non_blocking=True)
            event = torch.cuda.Event()
            event.record(side)

        def finish() -> None:
            event.synchronize()
            for op, buffer in gathered:
                self._part.sign(self._arena, op, self._part_bytes(op))
                staging.give_back(buffer)
            for op, _ in gathered:
                done(op, True)

        def fail(error: Exception) -> None:
            for op, _ in gathered:
                done(op, False)

        self._jobs.put((finish, fail))

    def load(self, ops: Sequence[CopyOp], done: Callable[[HybridKVError | None], None]) -> None:
        """Copy in the thread and on the side stream, after the compute stream's present work."""
        ready = torch.cuda.Event()
        ready.record(torch.cuda.current_stream(self._device))

        def run() -> None:
            for op in ops:
                self._load_one(op, ready)
            done(None)

        def fail(error: Exception) -> None:
            # Queued work must not write into blocks that the engine gives to other requests.
            self._streams["load"].synchronize()
            done(error if isinstance(error, HybridKVError) else HybridKVError(str(error)))

        self._jobs.put((run, fail))

    def close(self) -> None:
        """Finish what is queued, then unpin."""
        self._jobs.put(None)
        self._thread.join()
        torch.cuda.synchronize(self._device)
        for at in self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self._arena.address + at)
        del self._memory

    def _load_one(self, op: CopyOp, ready: torch.cuda.Event) -> None:
        if not self._valid(op):
            raise BadSlotError(op, "a block id is outside the engine's blocks")
        part_bytes = self._part_bytes(op)
        self._part.prove(self._arena, op, part_bytes)
        side, staging = self._streams["load"], self._staging["load"]
        buffer = staging.take(part_bytes)
        if buffer is None:
            raise HybridKVError(f"an object of {part_bytes} bytes does not fit the device staging")
        with torch.cuda.stream(side):
            side.wait_event(ready)
            for at, piece in self._slot(op):
                buffer[at : at + len(piece)].copy_(piece, non_blocking=True)
            ids = self._ids(op)
            for view, piece in part_pieces(self._groups[op.group_index], op, buffer):
                view.index_copy_(0, ids, piece)
            event = torch.cuda.Event()
            event.record(side)
        event.synchronize()
        staging.give_back(buffer)
        self._part.recheck(self._arena, op)

    def _slot(self, op: CopyOp) -> Iterator[tuple[int, torch.Tensor]]:
        """This rank's part of the slot, cut where pinned pieces end: (offset, bytes)."""
        part_bytes = self._part_bytes(op)
        start = at = self._part.payload(op, part_bytes)
        while at < start + part_bytes:
            stop = min(start + part_bytes, (at // PIN_STEP_BYTES + 1) * PIN_STEP_BYTES)
            yield at - start, self._memory[at:stop]
            at = stop

    def _part_bytes(self, op: CopyOp) -> int:
        return op.count * self._block_bytes[op.group_index]

    def _ids(self, op: CopyOp) -> torch.Tensor:
        return torch.tensor(op.blocks, dtype=torch.int64).to(self._device, non_blocking=True)

    def _valid(self, op: CopyOp) -> bool:
        return min(op.blocks) >= 0 and max(op.blocks) < self._num_blocks[op.group_index]

    def _work(self) -> None:
        torch.cuda.set_device(self._device)
        # The engine's tensors may be of inference mode, which is set thread by thread.
        with torch.inference_mode():
            while (item := self._jobs.get()) is not None:
                job, failed = item
                try:
                    job()
                except Exception as error:  # `failed` reports it
                    if not isinstance(error, HybridKVError):
                        logger.exception("hybridkv: a copy failed")
                    failed(error)


class _Staging:
    """Device memory by size; a buffer is kept for the next object of its size."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._spare: dict[int, list[torch.Tensor]] = {}
        self._taken_bytes = 0

    def take(self, size: int) -> torch.Tensor | None:
        """A buffer of `size` bytes; None where the staging is full. A single object always fits."""
        with self._lock:
            if self._taken_bytes and self._taken_bytes + size > STAGING_BYTES:
                return None
            self._taken_bytes += size
            spare = self._spare.get(size)
            if spare:
                return spare.pop()
        return torch.empty(size, dtype=torch.uint8, device=self._device)

    def give_back(self, buffer: torch.Tensor) -> None:
        with self._lock:
            self._taken_bytes -= buffer.numel()
            self._spare.setdefault(buffer.numel(), []).append(buffer)
