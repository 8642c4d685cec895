"""Copies between the arena's slots and an engine's blocks in ordinary memory."""

import ctypes
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch

from hybridkv.connector.copy.part import BadSlotError, PartLayout
from hybridkv.core.copies import CopyOp
from hybridkv.core.errors import HybridKVError
from hybridkv.core.packed import consecutive
from hybridkv.shm.arena import Arena
from hybridkv.shm.slots import hasher
from hybridkv.vllm.blocks import block_bytes, block_runs

BATCH_BYTES = 256 << 10
WORD_BYTES = 8
STRIDED_WORDS_MAX = 32 * 1024 - 1
"""The most elements that torch copies in the calling thread (its grain size, less one)."""
BAND_BLOCK_BYTES_MAX = 128 << 10
"""Larger blocks are copied faster by memmove, which then writes past the cache."""
Move = tuple[int, int, int]  # (address in the slot, address in the engine's block, bytes).
PARALLEL_BYTES_MIN = 1 << 20
"""Fewer bytes are copied by one thread, because a second one costs more than it saves."""


@dataclass(frozen=True, slots=True)
class _HostLayer:
    address: int
    storage: int  # The address of the allocation.
    stride_bytes: int
    block_bytes: int
    runs: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class _Band:
    """Consecutive layers of a group whose blocks are equally spaced in one allocation.

    One strided copy copies a block of all layers. A single layer has no `words` and is copied run
    by run.
    """

    layers: list[_HostLayer]
    layer_bytes: int  # Bytes of one block in all layers.
    words: torch.Tensor | None  # The blocks as 64-bit words: [layer, block, word].


class HostCopier:
    """See Copier. Copies happen in the step; two threads copy, because memmove and torch release
    the GIL."""

    def __init__(
        self, arena: Arena, groups: Sequence[Sequence[torch.Tensor]], part: PartLayout
    ) -> None:
        self._arena = arena
        self._words = torch.frombuffer(arena.memory, dtype=torch.int64)
        self._part = part
        self._groups = [_bands(views) for views in groups]
        self._num_blocks = [min(view.shape[0] for view in views) for views in groups]
        self._block_bytes = [sum(band.layer_bytes for band in bands) for bands in self._groups]
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="hybridkv-copy")

    def store(self, ops: Sequence[CopyOp], done: Callable[[CopyOp, bool], None]) -> None:
        for op, error in zip(ops, self._each(self._store_one, ops), strict=True):
            if error is not None and not isinstance(error, HybridKVError):
                raise error
            done(op, error is None)

    def load(self, ops: Sequence[CopyOp], done: Callable[[HybridKVError | None], None]) -> None:
        for error in self._each(self._load_one, ops):
            if isinstance(error, HybridKVError):
                done(error)
                return
            if error is not None:
                raise error
        done(None)

    def close(self) -> None:
        self._pool.shutdown()

    def _each(
        self, work: Callable[[CopyOp], None], ops: Sequence[CopyOp]
    ) -> list[Exception | None]:
        """Run `work` on every op, on two threads if that is faster; the error of each, or None."""

        def run(share: Sequence[CopyOp]) -> list[Exception | None]:
            errors: list[Exception | None] = []
            # The engine's tensors may be of inference mode, which is set thread by thread.
            with torch.inference_mode():
                for op in share:
                    try:
                        work(op)
                        errors.append(None)
                    except Exception as error:  # noqa: BLE001  # the caller raises it
                        errors.append(error)
            return errors

        total = sum(len(op.blocks) * self._block_bytes[op.group_index] for op in ops)
        if total < PARALLEL_BYTES_MIN or len(ops) < 2:
            return run(ops)
        half = len(ops) // 2
        other = self._pool.submit(run, ops[half:])
        return run(ops[:half]) + other.result()

    def _store_one(self, op: CopyOp) -> None:
        part_bytes = op.count * self._block_bytes[op.group_index]
        digest = self._copy(op, part_bytes, into_slot=True)
        if digest is not None:
            self._part.write_signature(self._arena, op, digest)
        if self._part.checksum == "paranoid":
            self._compare(op, part_bytes)

    def _load_one(self, op: CopyOp) -> None:
        """Copy and prove at once: if the proof fails the load fails, and no block of it is read."""
        part_bytes = op.count * self._block_bytes[op.group_index]
        if len(op.blocks) < op.count:
            self._part.prove(self._arena, op, part_bytes)
        self._part.recheck(self._arena, op)
        digest = self._copy(op, part_bytes, into_slot=False)
        if digest is not None:
            self._part.check_signature(self._arena, op, digest)
        self._part.recheck(self._arena, op)
        if self._part.checksum == "paranoid":
            self._compare(op, part_bytes)

    def _copy(self, op: CopyOp, part_bytes: int, into_slot: bool) -> int | None:
        """Copy; the part's digest if the whole part was copied and checksums are on, else None."""
        steps = self._steps(op, part_bytes, into_slot)
        if self._part.checksum == "off" or len(op.blocks) < op.count:
            for _ in steps:
                pass
            return None
        # Each piece is hashed right after its copy, while it is in the cache.
        hashed = hasher(op.slot.generation)
        for start, size in steps:
            hashed.update(self._arena.memory[start : start + size])
        return hashed.intdigest()

    def _steps(self, op: CopyOp, part_bytes: int, into_slot: bool) -> Iterator[tuple[int, int]]:
        """Copy piece by piece in the slot's order; yields (offset in the arena, bytes) of each."""
        most, base = self._num_blocks[op.group_index], self._arena.address
        if min(op.blocks) < 0 or max(op.blocks) >= most:
            raise BadSlotError(op, f"a block id is outside the engine's {most} blocks")
        at = self._part.payload(op, part_bytes)
        for band in self._groups[op.group_index]:
            if band.words is not None and at % WORD_BYTES == 0:
                yield from self._band_steps(op, band, band.words, at, into_slot)
            else:
                for batch, size in _batches(_moves(op, band, base + at)):
                    for slot_at, block_at, piece in batch:
                        to, source = (slot_at, block_at) if into_slot else (block_at, slot_at)
                        ctypes.memmove(to, source, piece)
                    yield batch[0][0] - base, size
            at += op.count * band.layer_bytes

    def _band_steps(
        self, op: CopyOp, band: _Band, words: torch.Tensor, at: int, into_slot: bool
    ) -> Iterator[tuple[int, int]]:
        """As `_steps`, some layers at a time, which torch copies in this thread and its cache."""
        layers, _, width = words.shape
        row_words = op.count * width
        rows_max = max(1, STRIDED_WORDS_MAX // row_words)
        for row in range(0, layers, rows_max):
            engine = words if rows_max >= layers else words[row : row + rows_max]
            rows, start = len(engine), at // WORD_BYTES + row * row_words
            for number, block in enumerate(op.blocks, op.first):
                slot = self._words.as_strided((rows, width), (row_words, 1), start + number * width)
                if into_slot:
                    slot.copy_(engine.select(1, block))
                else:
                    engine.select(1, block).copy_(slot)
            yield start * WORD_BYTES, rows * row_words * WORD_BYTES

    def _compare(self, op: CopyOp, part_bytes: int) -> None:
        at = self._arena.address + self._part.payload(op, part_bytes)
        for band in self._groups[op.group_index]:
            for slot_at, block_at, size in _moves(op, band, at):
                if ctypes.string_at(slot_at, size) != ctypes.string_at(block_at, size):
                    raise BadSlotError(op, "the engine's blocks are not what was copied")
            at += op.count * band.layer_bytes


def _bands(views: Sequence[torch.Tensor]) -> list[_Band]:
    """The layers of a group, joined where their blocks are small and equally spaced."""
    joined: list[list[_HostLayer]] = []
    for view in views:
        layer = _HostLayer(
            view.data_ptr(),
            view.untyped_storage().data_ptr(),
            view.stride(0) * view.element_size(),
            block_bytes(view),
            tuple(block_runs(view)),
        )
        if joined and _continues(joined[-1], layer):
            joined[-1].append(layer)
        else:
            joined.append([layer])
    bands: list[_Band] = []
    at, blocks = 0, min(map(len, views))
    for layers in joined:
        first = layers[0]
        words: torch.Tensor | None = None
        if len(layers) > 1:
            shape = len(layers), blocks, first.block_bytes // WORD_BYTES
            step, start = layers[1].address - first.address, first.address - first.storage
            strides = step // WORD_BYTES, first.stride_bytes // WORD_BYTES, 1
            words = torch.empty(0, dtype=torch.int64)
            words.set_(views[at].untyped_storage(), start // WORD_BYTES, shape, strides)
        bands.append(_Band(layers, sum(layer.block_bytes for layer in layers), words))
        at += len(layers)
    return bands


def _continues(layers: Sequence[_HostLayer], layer: _HostLayer) -> bool:
    """Whether a band of these layers can go on with `layer`."""
    first = layers[0]
    step = layer.address - layers[-1].address
    numbers = first.address - first.storage, step, first.stride_bytes, first.block_bytes
    return (
        replace(layer, address=first.address) == first
        and len(first.runs) == 1
        and first.block_bytes <= BAND_BLOCK_BYTES_MAX
        and step > 0
        and step * (len(layers) - 1) == layers[-1].address - first.address
        and not any(number % WORD_BYTES for number in numbers)
    )


def _moves(op: CopyOp, band: _Band, at: int) -> Iterator[Move]:
    """The moves of a band in the slot's order; adjacent blocks and runs are joined if possible."""
    for layer in band.layers:
        slot_at = at + op.first * layer.block_bytes
        if len(layer.runs) == 1 and layer.stride_bytes == layer.block_bytes:
            for run in consecutive(op.blocks):
                size = len(run) * layer.block_bytes
                yield slot_at, layer.address + run.start * layer.stride_bytes, size
                slot_at += size
        else:
            for block in op.blocks:
                for offset, size in layer.runs:
                    yield slot_at, layer.address + block * layer.stride_bytes + offset, size
                    slot_at += size
        at += op.count * layer.block_bytes


def _batches(moves: Iterable[Move]) -> Iterator[tuple[list[Move], int]]:
    """The moves in batches of about BATCH_BYTES, each with its bytes.

    A batch is contiguous in the slot, and stays in a core's cache until it is hashed.
    """
    batch: list[Move] = []
    total = 0
    for slot_at, block_at, size in moves:
        for at in range(0, size, BATCH_BYTES):
            piece = min(BATCH_BYTES, size - at)
            batch.append((slot_at + at, block_at + at, piece))
            total += piece
            if total >= BATCH_BYTES:
                yield batch, total
                batch, total = [], 0
    if batch:
        yield batch, total
