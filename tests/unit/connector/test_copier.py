"""Bytes are copied out of blocks and back, through a real arena, for every memory layout."""

import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import ClassVar

import pytest
import torch
import xxhash
from vllm.v1.kv_cache_interface import KVCacheLayout

from hybridkv.connector.copy.cuda import CudaCopier
from hybridkv.connector.copy.cuda_device import CudaDevice
from hybridkv.connector.copy.host import HostCopier
from hybridkv.connector.copy.part import BadSlotError, Copier, PartLayout, load_error
from hybridkv.connector.copy.pipeline import CopyPipeline, Demand
from hybridkv.core.copies import CopyOp
from hybridkv.core.errors import HybridKVError
from hybridkv.core.packed import SlotRef
from hybridkv.shm.arena import SHM_DIR, Arena, attach_arena, create_arena
from hybridkv.shm.slots import (
    HEADER_BYTES,
    PIECE_BYTES,
    SlotHeader,
    SlotState,
    checksum_offset,
    payload_offset,
    slot_bytes,
)
from hybridkv.vllm.blocks import block_bytes, block_runs, physical
from hybridkv.vllm.stages import padding_view
from tests.arenas import unnamed_arena, whole_object
from tests.kv_memory import BLOCKS, CACHES, Cache, KVMemory, full, layers

ARENA = 8 << 20
DONE_SECONDS = 60.0
POISON = 0x5A

gpu = pytest.param("cuda", marks=pytest.mark.gpu)


def blocks_of(cache: str, device: str = "cpu") -> list[torch.Tensor]:
    """Return the layers of the first group of such a cache."""
    return CACHES[cache].memory(device).groups[0]


def spaced(device: str, count: int, content: int, stride: int) -> list[torch.Tensor]:
    """Return layers of blocks of `content` bytes, which are `stride` bytes apart."""
    raw = torch.randint(-128, 127, (count, BLOCKS * stride), dtype=torch.int8, device=device)
    return [layer.as_strided((BLOCKS, content), (stride, 1)) for layer in raw]


def in_memory(memory: KVMemory, gid: int, block: int) -> bytes:
    """Return a block's bytes layer by layer, in the order of their addresses."""
    found = b""
    for layer in range(len(memory.groups[gid])):
        marked = torch.ones_like(memory.buffer)
        memory.within(marked, gid)[layer][block] = 0
        found += memory.buffer[marked == 0].cpu().numpy().tobytes()
    return found


@pytest.fixture
def arena() -> Iterator[Arena]:
    with unnamed_arena(ARENA) as own_arena:
        yield own_arena
        # Those of a test that has failed: pinned memory must not be unmapped.
        for rig in list(Rig.opened):
            rig.close()


class Rig:
    """Copiers of every rank over one arena, and slots in it."""

    opened: ClassVar[list["Rig"]] = []

    def __init__(
        self,
        arena: Arena,
        ranks: Sequence[Sequence[torch.Tensor]],
        checksum: str,
        shared: bool = False,
        stages: int = 1,
    ) -> None:
        self.arena = arena
        # As in an engine: CUDA does not register one address twice in a process.
        mapped_again = [attach_arena(arena.path, ARENA, pid=os.getpid()) for _ in ranks[1:]]
        self.arenas = [arena, *mapped_again]
        self.pipelines: list[CopyPipeline] = []
        self.copiers: list[Copier] = []
        self.opened.append(self)
        self.ranks = ranks
        self.part_bytes = sum(view[0].numel() * view.element_size() for view in ranks[0])
        self.parts = [
            PartLayout(rank, len(ranks), checksum, frozenset({0} if shared else ()), stages)
            for rank in range(len(ranks))
        ]
        self.slot_parts = stages if shared else len(ranks)
        self.copiers += (self.make_copier(rank, views) for rank, views in enumerate(ranks))
        self.next_offset = 0

    def make_copier(self, rank: int, views: Sequence[torch.Tensor]) -> Copier:
        part, blocks = self.parts[rank], [[*map(physical, views)]]
        if views[0].is_cuda:
            largest = Demand(4 * self.part_bytes, 4, 16 * self.part_bytes)
            pipeline = CopyPipeline(CudaDevice(views[0].device), blocks, largest)
            self.pipelines.append(pipeline)
            copier = CudaCopier(pipeline, self.arenas[rank], part)
            copier.pin_below(ARENA)
            return copier
        return HostCopier(self.arenas[rank], blocks, part)

    def slot(self, count: int) -> SlotRef:
        """Return a new slot of `count` stored blocks, which is being written."""
        ref = SlotRef(self.next_offset, 1000 + self.next_offset)
        header = SlotHeader(
            SlotState.WRITING, ref.generation, self.slot_parts, count * self.part_bytes
        )
        self.arena.memory[ref.offset : ref.offset + HEADER_BYTES] = header.pack()
        self.next_offset += slot_bytes(count * self.part_bytes, self.slot_parts)
        return ref

    def store(self, ops: Sequence[CopyOp]) -> list[bool]:
        """Let every rank store its parts. Returns the outcomes in any order."""
        outcomes: list[bool] = []
        for copier, part in zip(self.copiers, self.parts, strict=True):
            own_ops = [op for op in ops if part.writes(op)]
            finished = threading.Semaphore(0)

            def done(op: CopyOp, stored: bool, finished: threading.Semaphore = finished) -> None:
                outcomes.append(stored)
                finished.release()

            copier.store(own_ops, done)
            assert all(finished.acquire(timeout=DONE_SECONDS) for _ in own_ops)
        return outcomes

    def load(self, rank: int, ops: Sequence[CopyOp]) -> HybridKVError | None:
        errors: list[HybridKVError | None] = []
        ended = threading.Event()

        def done(error: HybridKVError | None) -> None:
            errors.append(error)
            ended.set()

        self.copiers[rank].load(ops, done)
        assert ended.wait(DONE_SECONDS)
        return errors[0]

    def close(self) -> None:
        self.opened.remove(self)
        for copier in self.copiers:
            copier.close()
        for pipeline in self.pipelines:
            pipeline.close()
        for arena in self.arenas[1:]:
            arena.close()


@pytest.mark.parametrize("device", ["cpu", gpu])
@pytest.mark.parametrize(("stages", "shared"), [(1, True), (2, True), (2, False)])
def test_ranks_take_turns_with_what_they_share(
    arena: Arena, stages: int, shared: bool, device: str
) -> None:
    """The two ranks of a stage keep the same bytes, and may share a part, which one of them writes.

    Each stage of a pipeline has parts of its own.
    """
    views = [blocks_of("LBHNC", device) for _ in range(2 * stages)]
    for first in range(0, 2 * stages, 2):
        for view, same in zip(views[first], views[first + 1], strict=True):
            same.copy_(view)
    rig = Rig(arena, views, "on", shared, stages)
    before = [[view.clone() for view in rank] for rank in views]
    ops = [whole_object(rig.slot(1), chunk, (chunk + 1,)) for chunk in range(4)]
    turns = [[True, False] * 2, [False, True] * 2] if shared else [[True] * 4] * 2
    assert [[part.writes(op) for op in ops] for part in rig.parts] == turns * stages
    assert rig.store(ops) == [True] * (4 * rig.slot_parts)
    for rank in range(2 * stages):
        for view in views[rank]:
            view.zero_()
        assert rig.load(rank, ops) is None
        for view, old in zip(views[rank], before[rank], strict=True):
            assert torch.equal(view[1:5], old[1:5])
    rig.close()


@pytest.mark.parametrize("device", ["cpu", gpu])
@pytest.mark.parametrize("has_layers", [True, False])
def test_padding_is_stored_as_zeros_and_never_written(
    arena: Arena, has_layers: bool, device: str
) -> None:
    """A stage that has fewer layers of a group than another one, or none of them."""
    padding = padding_view(96, BLOCKS, torch.device(device))
    rig = Rig(arena, [[*(blocks_of("LBHNC", device) if has_layers else ()), padding]], "off")
    ops = [whole_object(rig.slot(2), chunk, (chunk + 1, chunk + 2)) for chunk in range(2)]
    assert rig.store(ops) == [True] * 2
    for op in ops:
        end = op.slot.offset + payload_offset(1) + 2 * rig.part_bytes
        assert bytes(arena.memory[end - 192 : end]) == bytes(192)
        arena.memory[end - 192 : end] = b"X" * 192
    assert rig.load(0, ops) is None
    assert not padding.any(), "another object's padding would be wrong"
    rig.close()


@pytest.mark.parametrize("device", ["cpu", gpu])
@pytest.mark.parametrize("checksum", ["off", "on", "paranoid"])
@pytest.mark.parametrize("cache", CACHES)
def test_bytes_come_back_into_other_blocks(
    arena: Arena, cache: str, checksum: str, device: str
) -> None:
    """And no other byte of the whole allocation is touched, neither of a block nor of padding."""
    ranks = [CACHES[cache].memory(device) for _ in range(2)]
    sources, targets = ((1, 2, 3), (8, 4, 6), (5,)), ((6, 5, 4), (1, 2, 3), (8,))
    for gid in range(len(ranks[0].groups)):
        rig = Rig(arena, [rank.groups[gid] for rank in ranks], checksum)
        ops = [whole_object(rig.slot(len(ids)), chunk, ids) for chunk, ids in enumerate(sources)]
        assert rig.store(ops) == [True] * 6
        moved = [whole_object(op.slot, op.chunk, ids) for op, ids in zip(ops, targets, strict=True)]
        for number, rank in enumerate(ranks):
            before = rank.buffer.clone()
            expected = rank.buffer.fill_(POISON).clone()
            views = zip(rank.within(expected, gid), rank.within(before, gid), strict=True)
            for view, old in views:
                view[list(sum(targets, ()))] = old[list(sum(sources, ()))]
            assert rig.load(number, moved) is None
            assert torch.equal(rank.buffer, expected)
            rank.buffer.copy_(before)
        rig.close()


@pytest.mark.parametrize("device", ["cpu", gpu])
@pytest.mark.parametrize("cache", CACHES)
def test_a_block_stands_in_an_object_as_in_memory(arena: Arena, cache: str, device: str) -> None:
    memory = CACHES[cache].memory(device)
    for gid, views in enumerate(memory.groups):
        rig = Rig(arena, [views], "on")
        op = whole_object(rig.slot(1), 0, (3,))
        assert rig.store([op]) == [True]
        start = op.slot.offset + payload_offset(1)
        stored = bytes(arena.memory[start : start + rig.part_bytes])
        assert stored == in_memory(memory, gid, 3)
        rig.close()


@pytest.mark.parametrize("device", ["cpu", gpu])
def test_tensors_made_in_inference_mode(arena: Arena, device: str) -> None:
    """vLLM makes such tensors. More than PARALLEL_BYTES_MIN are copied in another thread too."""
    with torch.inference_mode():
        cache = Cache("LBHNC", layers("full", full(2, 128, 64), 8))
        views = cache.memory(device).groups[0]
        rig = Rig(arena, [views], "paranoid")
    ops = [whole_object(rig.slot(1), chunk, (chunk + 1,)) for chunk in range(4)]
    assert rig.store(ops) == [True] * 4
    assert rig.load(0, ops) is None
    rig.close()


@pytest.mark.parametrize("device", ["cpu", gpu])
@pytest.mark.parametrize("cache", ["LBHNC", "padded states", "large blocks"])
def test_a_part_of_an_object_can_be_loaded(arena: Arena, cache: str, device: str) -> None:
    """A local hit inside a chunk keeps its blocks: only the rest is loaded (C34)."""
    views = blocks_of(cache, device)
    rig = Rig(arena, [views], "on")
    before = [view.clone() for view in views]
    op = whole_object(rig.slot(4), 0, (1, 2, 3, 4))
    assert rig.store([op]) == [True]
    for view in views:
        view.zero_()
    assert rig.load(0, [replace(op, first=2, blocks=(7, 8))]) is None
    for view, old in zip(views, before, strict=True):
        assert torch.equal(view[7], old[3])
        assert torch.equal(view[8], old[4])
        assert not view[:7].any()
    rig.close()


@pytest.mark.parametrize("device", ["cpu", gpu])
def test_every_bad_slot_of_a_load_is_told(arena: Arena, device: str) -> None:
    """A region is damaged, or a slot is another object's by now: one load finds all of it."""
    rig = Rig(arena, [blocks_of("LBHNC", device)], "on")
    ops = [whole_object(rig.slot(1), chunk, (chunk + 1,)) for chunk in range(4)]
    rig.store(ops)
    for op in ops[1:3]:
        arena.memory[op.slot.offset + payload_offset(1) + 5] ^= 0x10
    reused = whole_object(ops[3].slot._replace(generation=1), 3, (4,))
    error = rig.load(0, [*ops[:3], reused])
    assert isinstance(error, BadSlotError)
    assert sorted(error.slots, key=lambda slot: slot.offset) == [
        *(ops[1].slot, ops[2].slot, reused.slot)
    ]
    assert rig.load(0, ops[:1]) is None
    rig.close()


def test_bad_slots_are_told_whatever_else_went_wrong() -> None:
    bad = [BadSlotError(whole_object(SlotRef(4096 * at, 1), at, (1,)), "torn") for at in range(2)]
    error = load_error([HybridKVError("a block is outside"), *bad])
    assert isinstance(error, BadSlotError)
    assert [slot.offset for slot in error.slots] == [0, 4096]
    assert load_error([]) is None


@pytest.mark.parametrize("device", ["cpu", gpu])
def test_every_flipped_byte_is_found(arena: Arena, device: str) -> None:
    views = blocks_of("LBHNC", device)
    rig = Rig(arena, [views], "on")
    op = whole_object(rig.slot(1), 0, (3,))
    rig.store([op])
    for at in range(0, rig.part_bytes, 37):
        offset = op.slot.offset + payload_offset(1) + at
        arena.memory[offset] ^= 0x10
        error = rig.load(0, [op])
        assert isinstance(error, BadSlotError)
        assert error.slots == [op.slot]
        arena.memory[offset] ^= 0x10
    assert rig.load(0, [op]) is None
    rig.close()


@pytest.mark.parametrize("device", ["cpu", gpu])
@pytest.mark.parametrize(
    "layout", ["many layers", "many odd layers", "several batches", "large blocks", "huge blocks"]
)
def test_every_piece_is_proven(arena: Arena, layout: str, device: str) -> None:
    """A byte at either end of a piece is wrong, or two pieces have changed places."""
    make_views = {
        "many layers": lambda: (
            Cache("LBHNC", layers("full", full(2, 16, 64), 30)).memory(device).groups[0]
        ),
        "many odd layers": lambda: spaced(device, 30, 17_777, 20_001),
        "several batches": lambda: spaced(device, 7, 40_000, 40_960),
        "large blocks": lambda: blocks_of("large blocks", device),
        "huge blocks": lambda: spaced(device, 2, 700_001, 700_100),
    }
    views = make_views[layout]()
    before = [view.clone() for view in views]
    rig = Rig(arena, [views], "on")
    op = whole_object(rig.slot(2), 0, (3, 5))
    assert rig.store([op]) == [True]
    start = op.slot.offset + payload_offset(1)
    end = start + 2 * rig.part_bytes
    part = arena.memory[start:end]
    pieces = [part[at : at + PIECE_BYTES] for at in range(0, len(part), PIECE_BYTES)]
    assert len(pieces) > 3
    digests = b"".join(xxhash.xxh3_64_digest(piece)[::-1] for piece in pieces)
    signed = xxhash.xxh3_64_intdigest(digests, seed=op.slot.generation) | 1
    offset = op.slot.offset + checksum_offset(0)
    assert arena.memory[offset : offset + 8] == signed.to_bytes(8, "little")
    for piece in pieces:
        for at in (0, -1):
            piece[at] ^= 0x10
            assert isinstance(rig.load(0, [op]), BadSlotError)
            piece[at] ^= 0x10
    for piece, next_piece in pairwise(pieces[:-1]):
        piece[:], next_piece[:] = bytes(next_piece), bytes(piece)
        assert isinstance(rig.load(0, [op]), BadSlotError)
        piece[:], next_piece[:] = bytes(next_piece), bytes(piece)
    for layer in views:
        layer.zero_()
    assert rig.load(0, [op]) is None
    for layer, old in zip(views, before, strict=True):
        assert torch.equal(layer[3], old[3])
        assert torch.equal(layer[5], old[5])
    for view in (*pieces, part):
        view.release()
    rig.close()


@pytest.mark.parametrize("device", ["cpu", gpu])
def test_a_slot_that_changed_hands_is_refused(arena: Arena, device: str) -> None:
    views = blocks_of("LBHNC", device)
    rig = Rig(arena, [views], "off")
    op = whole_object(rig.slot(1), 0, (3,))
    rig.store([op])
    header = SlotHeader(SlotState.COMMITTED, op.slot.generation + 1, 1, rig.part_bytes)
    arena.memory[op.slot.offset : op.slot.offset + HEADER_BYTES] = header.pack()
    error = rig.load(0, [op])
    assert isinstance(error, BadSlotError)
    assert "given to another object" in str(error)
    rig.close()


@pytest.mark.parametrize("device", ["cpu", gpu])
@pytest.mark.parametrize("block", [-1, BLOCKS])
def test_a_block_id_outside_the_engines_memory_is_refused(
    arena: Arena, device: str, block: int
) -> None:
    rig = Rig(arena, [blocks_of("LBHNC", device)], "on")
    op = whole_object(rig.slot(1), 0, (block,))
    assert rig.store([op]) == [False]
    error = rig.load(0, [op])
    assert isinstance(error, HybridKVError)
    assert not isinstance(error, BadSlotError), "the slot is good"
    rig.close()


def test_each_object_has_its_own_error(arena: Arena) -> None:
    """Two threads store more than PARALLEL_BYTES_MIN; some objects name no block of the engine."""
    rig = Rig(arena, [blocks_of("large blocks")], "on")
    ids = [1, BLOCKS, 2, 3, -1, 4, 5, 6, BLOCKS + 7, 7, 8]
    ops = [whole_object(rig.slot(1), chunk, (block,)) for chunk, block in enumerate(ids)]
    outcomes: dict[int, bool] = {}
    rig.copiers[0].store(ops, lambda op, stored: outcomes.update({op.chunk: stored}))
    assert list(outcomes.values()) == [0 <= block < BLOCKS for block in ids]
    assert rig.load(0, [op for op in ops if outcomes[op.chunk]]) is None
    error = rig.load(0, ops)
    assert isinstance(error, HybridKVError)
    assert not isinstance(error, BadSlotError), "no slot is at fault"
    rig.close()


@pytest.mark.parametrize("cache", CACHES)
def test_a_block_that_is_one_piece_of_memory_is_one_run(cache: str) -> None:
    """In the other layouts it is one for each head, and runs go up in memory."""
    compact = KVCacheLayout[CACHES[cache].layout].is_block_compact
    for views in CACHES[cache].memory().groups:
        for view in views:
            runs = list(block_runs(physical(view)))
            assert len(runs) == (1 if compact else view.shape[1])
            assert sum(size for _, size in runs) == block_bytes(view)
            ends = [start + size for start, size in runs]
            assert all(end <= start for end, (start, _) in zip(ends, runs[1:], strict=False))


@pytest.mark.gpu
def test_a_block_may_be_overwritten_as_soon_as_store_returns(arena: Arena) -> None:
    """A store's copy does not change with what the compute stream does to the blocks next."""
    views = blocks_of("large blocks", "cuda")
    rig = Rig(arena, [views], "on")
    for _ in range(50):
        rig.next_offset = 0
        expected = [view[1:7].clone() for view in views]
        ops = [whole_object(rig.slot(1), chunk, (chunk + 1,)) for chunk in range(6)]
        finished = threading.Semaphore(0)
        rig.copiers[0].store(
            ops,
            lambda op, stored, finished=finished: finished.release(),  # type: ignore[misc]
        )
        for view in views:
            view.add_(1)
        assert all(finished.acquire(timeout=DONE_SECONDS) for _ in ops)
        assert rig.load(0, ops) is None
        for view, old in zip(views, expected, strict=True):
            assert torch.equal(view[1:7], old)
            view.random_(0, 2**15)
    rig.close()


def test_arena_file_is_private() -> None:
    arena = create_arena(SHM_DIR / f"hybridkv-test-{threading.get_native_id()}-private", 4096)
    try:
        assert Path(arena.path).stat().st_mode & 0o077 == 0
    finally:
        arena.unlink()
        arena.close()
