"""Copies between the arena's slots and an engine's blocks in ordinary memory."""

import ctypes
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from hybridkv.connector.copy.contract import BadSlotError
from hybridkv.connector.copy.part import PartLayout
from hybridkv.core.copies import CopyOp
from hybridkv.core.errors import HybridKVError
from hybridkv.core.packed import consecutive
from hybridkv.shm.arena import Arena
from hybridkv.vllm.blocks import block_bytes, block_runs

COPY_THREADS = 2
BATCH_BYTES = 256 << 10
WORD_BYTES = 8
STRIDED_WORDS_MAX = 32 * 1024 - 1
"""The most elements that torch copies in the calling thread (its grain size, less one)."""
BAND_BLOCK_BYTES_MAX = 128 << 10
"""Larger blocks are copied faster by memmove, which then writes past the cache."""
Move = tuple[int, int, int]
"""(address in the slot, address in the engine's block, bytes)."""
PARALLEL_BYTES_MIN = 1 << 20
"""Fewer bytes are copied by one thread, because a second one costs more than it saves."""


@dataclass(frozen=True, slots=True)
class _HostLayer:
    address: int
    stride_bytes: int
    block_bytes: int
    runs: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class _Band:
    """Consecutive layers of a group whose blocks are equally spaced in one allocation.

    One strided copy copies a block of all layers. A single layer has no `words` and is copied run
    by run.
    """

    layers: tuple[_HostLayer, ...]
    words: torch.Tensor | None = None
    """The whole allocation as 64-bit words."""
    first_word: int = 0
    layer_words: int = 0


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
        self._part_bytes = [
            sum(layer.block_bytes for band in bands for layer in band.layers)
            for bands in self._groups
        ]
        self._pool = ThreadPoolExecutor(COPY_THREADS, thread_name_prefix="hybridkv-copy")

    def store(self, ops: Sequence[CopyOp], done: Callable[[CopyOp, bool], None]) -> None:
        """See Copier."""
        for op, error in zip(ops, self._each(self._store_one, ops), strict=True):
            if error is not None and not isinstance(error, HybridKVError):
                raise error
            done(op, error is None)

    def load(self, ops: Sequence[CopyOp], done: Callable[[HybridKVError | None], None]) -> None:
        """See Copier."""
        for error in self._each(self._load_one, ops):
            if isinstance(error, HybridKVError):
                done(error)
                return
            if error is not None:
                raise error
        done(None)

    def close(self) -> None:
        """See Copier."""
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

        total = sum(len(op.blocks) * self._part_bytes[op.group_index] for op in ops)
        if total < PARALLEL_BYTES_MIN or len(ops) < 2:
            return run(ops)
        half = len(ops) // 2
        other = self._pool.submit(run, ops[half:])
        mine = run(ops[:half])
        return mine + other.result()

    def _store_one(self, op: CopyOp) -> None:
        part_bytes = op.count * self._part_bytes[op.group_index]
        digest = self._copy(op, part_bytes, into_slot=True)
        if digest is not None:
            self._part.write_signature(self._arena, op, digest)
        if self._part.checksum == "paranoid":
            self._compare(op, part_bytes)

    def _load_one(self, op: CopyOp) -> None:
        """Copy and prove at once: if the proof fails the load fails, and no block of it is read."""
        part_bytes = op.count * self._part_bytes[op.group_index]
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
        hasher = self._part.hasher(op)
        for start, size in steps:
            hasher.update(self._memory_at(start, size))
        return hasher.intdigest()

    def _steps(self, op: CopyOp, part_bytes: int, into_slot: bool) -> Iterator[tuple[int, int]]:
        """Copy piece by piece in the slot's order; yields (address in the slot, bytes) of each."""
        if min(op.blocks) < 0 or max(op.blocks) >= self._num_blocks[op.group_index]:
            most = self._num_blocks[op.group_index]
            raise BadSlotError(op, f"a block id is outside the engine's {most} blocks")
        at = self._arena.address + self._part.payload(op, part_bytes)
        for band in self._groups[op.group_index]:
            if band.words is not None and part_bytes % WORD_BYTES == 0:
                yield from self._band_steps(op, band, band.words, at, into_slot)
            else:
                for batch, start, size in _batches(_moves(op, band, at)):
                    for slot_at, block_at, piece in batch:
                        ctypes.memmove(
                            *((slot_at, block_at) if into_slot else (block_at, slot_at)), piece
                        )
                    yield start, size
            at += op.count * sum(layer.block_bytes for layer in band.layers)

    def _band_steps(
        self, op: CopyOp, band: _Band, words: torch.Tensor, at: int, into_slot: bool
    ) -> Iterator[tuple[int, int]]:
        """As `_steps`, some layers at a time, which torch copies in this thread and its cache."""
        layer = band.layers[0]
        width = layer.block_bytes // WORD_BYTES
        slot_word = (at - self._arena.address) // WORD_BYTES
        rows_max = max(1, STRIDED_WORDS_MAX // (width * op.count))
        for row in range(0, len(band.layers), rows_max):
            rows = min(rows_max, len(band.layers) - row)
            for number, block in enumerate(op.blocks):
                slot = self._words.as_strided(
                    (rows, width),
                    (op.count * width, 1),
                    slot_word + (row * op.count + op.first + number) * width,
                )
                engine = words.as_strided(
                    (rows, width),
                    (band.layer_words, 1),
                    band.first_word
                    + row * band.layer_words
                    + block * layer.stride_bytes // WORD_BYTES,
                )
                if into_slot:
                    slot.copy_(engine)
                else:
                    engine.copy_(slot)
            yield at + row * op.count * layer.block_bytes, rows * op.count * layer.block_bytes

    def _memory_at(self, address: int, size: int) -> memoryview:
        at = address - self._arena.address
        return self._arena.memory[at : at + size]

    def _compare(self, op: CopyOp, part_bytes: int) -> None:
        at = self._arena.address + self._part.payload(op, part_bytes)
        for band in self._groups[op.group_index]:
            for slot_at, block_at, size in _moves(op, band, at):
                if ctypes.string_at(slot_at, size) != ctypes.string_at(block_at, size):
                    raise BadSlotError(op, "the engine's blocks are not what was copied")
            at += op.count * sum(layer.block_bytes for layer in band.layers)


def _bands(views: Sequence[torch.Tensor]) -> list[_Band]:
    """The layers of a group, joined where their blocks are small and equally spaced."""
    bands: list[_Band] = []
    start = 0
    while start < len(views):
        stop = start + 1
        while stop < len(views) and _continues(views, start, stop):
            stop += 1
        layers = tuple(_host_layer(view) for view in views[start:stop])
        if len(layers) == 1:
            bands.append(_Band(layers))
        else:
            storage = views[start].untyped_storage()
            words = torch.empty(0, dtype=torch.int64)
            words.set_(storage, 0, (storage.nbytes() // WORD_BYTES,), (1,))
            first = (layers[0].address - storage.data_ptr()) // WORD_BYTES
            bands.append(
                _Band(layers, words, first, (layers[1].address - layers[0].address) // WORD_BYTES)
            )
        start = stop
    return bands


def _continues(views: Sequence[torch.Tensor], start: int, at: int) -> bool:
    """Whether layer `at` continues the band that begins at `start`."""
    first, here = _host_layer(views[start]), _host_layer(views[at])
    storage = views[start].untyped_storage().data_ptr()
    step = _host_layer(views[start + 1]).address - first.address
    numbers = (
        first.address - storage,
        here.address - storage,
        first.stride_bytes,
        first.block_bytes,
    )
    return (
        views[at].untyped_storage().data_ptr() == storage
        and (here.stride_bytes, here.block_bytes, here.runs)
        == (first.stride_bytes, first.block_bytes, first.runs)
        and len(first.runs) == 1
        and here.address - first.address == (at - start) * step
        and step > 0
        and first.block_bytes <= BAND_BLOCK_BYTES_MAX
        and all(number % WORD_BYTES == 0 for number in numbers)
    )


def _host_layer(view: torch.Tensor) -> _HostLayer:
    return _HostLayer(
        view.data_ptr(),
        view.stride(0) * view.element_size(),
        block_bytes(view),
        tuple(block_runs(view)),
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


def _batches(moves: Iterable[Move]) -> Iterator[tuple[list[Move], int, int]]:
    """The moves in batches of about BATCH_BYTES: (moves, address in the slot, bytes).

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
                yield batch, batch[0][0], total
                batch, total = [], 0
    if batch:
        yield batch, batch[0][0], total
