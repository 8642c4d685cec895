"""Copies between the arena's slots and an engine's blocks in ordinary memory."""

import ctypes
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain, groupby
from typing import NamedTuple

import numpy as np
import torch

from hybridkv.connector.copy.part import BadSlotError, Copier, PartLayout, load_error
from hybridkv.core.copies import CopyOp
from hybridkv.core.errors import HybridKVError
from hybridkv.core.packed import pack_u64
from hybridkv.shm.arena import Arena
from hybridkv.shm.slots import PIECE_BYTES, hash_pieces
from hybridkv.vllm.blocks import block_bytes, block_runs

BATCH_BYTES = 256 << 10  # What is copied before it is hashed, so that it is in a core's cache.
WORD_BYTES = 8
PARALLEL_BYTES_MIN = 1 << 20
"""Fewer bytes are copied by one thread, because a second one costs more than it saves."""


Words = np.ndarray[tuple[int, ...], np.dtype[np.int64]]  # Memory as words of WORD_BYTES.


class _HostLayer(NamedTuple):
    address: int
    storage: int  # The address of the allocation.
    stride_bytes: int
    block_bytes: int
    runs: tuple[tuple[int, int], ...]  # Byte offset and bytes of each (vllm.blocks.block_runs).


class _PieceMove(NamedTuple):
    """The memmove of one piece of a stored block, of at most BATCH_BYTES."""

    offset: int  # In the band's bytes of the slot.
    number: int  # Of the stored block.
    address: int  # Of the piece in the engine's block 0.
    stride_bytes: int
    size_bytes: int


class _MoveBatch(NamedTuple):
    """Moves of about BATCH_BYTES, in the slot's order."""

    moves: list[_PieceMove]
    end: int  # Where they end in the band's bytes of the slot.


@dataclass(frozen=True, slots=True)
class _Band:
    """Consecutive layers of a group that are copied in the same way.

    Where blocks are equally spaced in one allocation, there are `words`: one strided copy copies a
    block of some layers, in which no other thread waits for this one. All others are copied run by
    run.
    """

    layers: list[_HostLayer]
    layer_bytes: int  # Bytes of one block in all layers.
    words: Words | None  # The blocks: [layer, block, word].
    _batches: dict[int, list[_MoveBatch]] = field(default_factory=dict)  # By `count`.

    def rows(self, count: int) -> int:
        """Return how many layers of `count` stored blocks make a batch."""
        return BATCH_BYTES * len(self.layers) // (count * self.layer_bytes)

    def batches(self, count: int) -> list[_MoveBatch]:
        """Return the moves of `count` stored blocks in the slot's order."""
        if count not in self._batches:
            batches: list[_MoveBatch] = []
            moves: list[_PieceMove] = []
            start = 0
            for move in _moves(self.layers, count):
                moves.append(move)
                end = move.offset + move.size_bytes
                if end - start >= BATCH_BYTES or end == count * self.layer_bytes:
                    batches.append(_MoveBatch(moves, end))
                    moves, start = [], end
            self._batches[count] = batches
        return self._batches[count]


class HostCopier(Copier):
    """The Copier of engines on a processor. Copies happen in the step.

    Two threads copy, because memmove and torch release the GIL.
    """

    def __init__(
        self, arena: Arena, groups: Sequence[Sequence[torch.Tensor]], part: PartLayout
    ) -> None:
        self._arena = arena
        self._words: Words = np.frombuffer(arena.memory, dtype=np.int64)
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
        errors: list[HybridKVError] = []
        for error in filter(None, self._each(self._load_one, ops)):
            if not isinstance(error, HybridKVError):
                raise error
            errors.append(error)
        done(load_error(errors))

    def close(self) -> None:
        self._pool.shutdown()

    def _each(
        self, work: Callable[[CopyOp], None], ops: Sequence[CopyOp]
    ) -> list[Exception | None]:
        """Run `work` on every op, on two threads if that is faster.

        Returns the error of each op, or None.
        """
        errors: list[Exception | None] = [None] * len(ops)
        remaining = iter(enumerate(ops))  # Both threads take from it: neither waits for a slow one.

        def run() -> None:
            # The engine's tensors may be of inference mode, which is set thread by thread.
            with torch.inference_mode():
                for number, op in remaining:
                    try:
                        work(op)
                    except Exception as error:  # noqa: BLE001  # the caller raises it
                        errors[number] = error

        total = sum(len(op.blocks) * self._block_bytes[op.group_index] for op in ops)
        is_shared = total >= PARALLEL_BYTES_MIN and len(ops) > 1
        second_run = self._pool.submit(run) if is_shared else None
        run()
        if second_run is not None and not second_run.cancel():
            second_run.result()
        return errors

    def _store_one(self, op: CopyOp) -> None:
        part_bytes = op.count * self._block_bytes[op.group_index]
        digests = self._copy(op, part_bytes, into_slot=True)
        if digests is not None:
            self._part.write_signature(self._arena, op, digests)
        if self._part.checksum == "paranoid":
            self._compare(op, part_bytes)

    def _load_one(self, op: CopyOp) -> None:
        """Copy and prove at once. The engine does not read the blocks of a load that fails."""
        part_bytes = op.count * self._block_bytes[op.group_index]
        self._part.check_generation(self._arena, op)
        digests = self._copy(op, part_bytes, into_slot=False)
        if len(op.blocks) < op.count:
            self._part.check_part(self._arena, op, part_bytes)
        if digests is not None:
            self._part.check_signature(self._arena, op, digests)
        self._part.check_generation(self._arena, op)
        if self._part.checksum == "paranoid":
            self._compare(op, part_bytes)

    def _copy(self, op: CopyOp, part_bytes: int, into_slot: bool) -> bytes | None:
        """Copy, and return the part's digests.

        They are None where only some blocks of the part are copied, and without checksums.
        """
        num_blocks = self._num_blocks[op.group_index]
        if min(op.blocks) < 0 or max(op.blocks) >= num_blocks:
            raise HybridKVError(f"a block id is outside the engine's {num_blocks} blocks")
        start = self._part.part_offset(op, part_bytes)
        steps = self._steps(op, start, into_slot)
        if self._part.checksum == "off" or len(op.blocks) < op.count:
            for _ in steps:
                pass
            return None
        # Each piece is hashed right after its copy, while it is in the cache.
        part = self._arena.memory[start : start + part_bytes]
        digests: list[int] = []
        hashed = 0
        for end in steps:
            copied = end - start
            whole = copied if copied == part_bytes else copied - copied % PIECE_BYTES
            digests += hash_pieces(part, range(hashed, whole, PIECE_BYTES))
            hashed = whole
        return pack_u64(digests)

    def _steps(self, op: CopyOp, at: int, into_slot: bool) -> Iterator[int]:
        """Copy the part, which is at the offset `at` of the arena, in batches.

        Yields, after each batch of about BATCH_BYTES, the offset in the arena that was reached.
        """
        base, memmove, blocks, first = self._arena.address, ctypes.memmove, op.blocks, op.first
        for band in self._groups[op.group_index]:
            if band.words is not None and at % WORD_BYTES == 0 and band.rows(op.count) > 1:
                yield from self._band_steps(op, band, band.words, at, into_slot)
            else:
                for moves, end in band.batches(op.count):
                    for offset, number, address, stride_bytes, size in moves:
                        if number >= first:
                            slot = base + at + offset
                            block = address + blocks[number - first] * stride_bytes
                            if into_slot:
                                memmove(slot, block, size)
                            elif stride_bytes:  # Padding is never written (vllm.stages).
                                memmove(block, slot, size)
                    yield at + end
            at += op.count * band.layer_bytes

    def _band_steps(
        self, op: CopyOp, band: _Band, words: Words, at: int, into_slot: bool
    ) -> Iterator[int]:
        """Do as `_steps` for one band with `words`, several layers at a time."""
        layers, _, width = words.shape
        row_words, rows = op.count * width, band.rows(op.count)
        for row in range(0, layers, rows):
            engine, start = words[row : row + rows], at // WORD_BYTES + row * row_words
            end = start + len(engine) * row_words
            slot = self._words[start:end].reshape(len(engine), op.count, width)
            for number, block in enumerate(op.blocks, op.first):
                if into_slot:
                    slot[:, number] = engine[:, block]
                else:
                    engine[:, block] = slot[:, number]
            yield end * WORD_BYTES

    def _compare(self, op: CopyOp, part_bytes: int) -> None:
        """Raise BadSlotError where the slot and the blocks have not the same bytes."""
        at = self._arena.address + self._part.part_offset(op, part_bytes)
        for band in self._groups[op.group_index]:
            for move in chain.from_iterable(batch.moves for batch in band.batches(op.count)):
                if move.number >= op.first:
                    block = op.blocks[move.number - op.first]
                    block_address = move.address + block * move.stride_bytes
                    in_slot = ctypes.string_at(at + move.offset, move.size_bytes)
                    if in_slot != ctypes.string_at(block_address, move.size_bytes):
                        raise BadSlotError(op, "the engine's blocks are not what was copied")
            at += op.count * band.layer_bytes


def _bands(views: Sequence[torch.Tensor]) -> list[_Band]:
    """Return the layers of a group, joined where their blocks are equally spaced."""
    joined: list[list[_HostLayer]] = []
    for view in views:
        layer = _HostLayer(
            address=view.data_ptr(),
            storage=view.untyped_storage().data_ptr(),
            stride_bytes=view.stride(0) * view.element_size(),
            block_bytes=block_bytes(view),
            runs=tuple(block_runs(view)),
        )
        if joined and _continues(joined[-1], layer):
            joined[-1].append(layer)
        else:
            joined.append([layer])
    bands: list[_Band] = []
    next_layer, blocks = 0, min(map(len, views))
    for is_alone, neighbours in groupby(joined, lambda layers: len(layers) == 1):
        # Layers that are joined with no other make one band, which is copied run by run.
        for layers in [list(chain.from_iterable(neighbours))] if is_alone else neighbours:
            words: Words | None = None
            if not is_alone:
                first = layers[0]
                shape = len(layers), blocks, first.block_bytes // WORD_BYTES
                step, start = layers[1].address - first.address, first.address - first.storage
                strides = step // WORD_BYTES, first.stride_bytes // WORD_BYTES, 1
                memory = torch.empty(0, dtype=torch.int64)
                memory.set_(
                    views[next_layer].untyped_storage(), start // WORD_BYTES, shape, strides
                )
                words = memory.numpy()
            bands.append(_Band(layers, sum(layer.block_bytes for layer in layers), words))
            next_layer += len(layers)
    return bands


def _continues(layers: Sequence[_HostLayer], layer: _HostLayer) -> bool:
    """Return True if `layer` is spaced as these layers are, so that it can be in their band."""
    first = layers[0]
    step = layer.address - layers[-1].address
    numbers = first.address - first.storage, step, first.stride_bytes, first.block_bytes
    return (
        layer._replace(address=first.address) == first
        and len(first.runs) == 1
        and step > 0
        and step * (len(layers) - 1) == layers[-1].address - first.address
        and not any(number % WORD_BYTES for number in numbers)
    )


def _moves(layers: Sequence[_HostLayer], count: int) -> Iterator[_PieceMove]:
    """Yield all moves of `count` stored blocks in the slot's order."""
    offset = 0
    for layer in layers:
        for number in range(count):
            for start, size in layer.runs:
                for cut in range(0, size, BATCH_BYTES):
                    size_bytes = min(size - cut, BATCH_BYTES)
                    address = layer.address + start + cut
                    yield _PieceMove(offset, number, address, layer.stride_bytes, size_bytes)
                    offset += size_bytes
