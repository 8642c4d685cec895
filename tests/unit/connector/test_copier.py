"""Bytes are copied out of blocks and back, through a real arena, for every memory layout."""

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from hybridkv.connector.copy.cuda import CudaCopier
from hybridkv.connector.copy.host import HostCopier
from hybridkv.connector.copy.part import BadSlotError, Copier, PartLayout
from hybridkv.core.copies import CopyOp, SlotRef
from hybridkv.core.errors import HybridKVError
from hybridkv.shm.arena import SHM_DIR, Arena, create_arena
from hybridkv.shm.slots import HEADER_BYTES, SlotHeader, SlotState, payload_offset, slot_bytes
from hybridkv.vllm.blocks import as_words, block_bytes, block_runs, part_pieces

BLOCKS = 9
ARENA = 8 << 20
DONE_SECONDS = 60.0

gpu = pytest.param("cuda", marks=pytest.mark.gpu)


def flat(device: str, layers: int, content: tuple[int, ...], order: str) -> list[torch.Tensor]:
    """Layers of one flat allocation as in vLLM: [L, B, H, N, C] in the given physical order."""
    sizes = dict(zip("LBHNC", (layers, BLOCKS, *content), strict=True))
    raw = torch.randint(
        0, 2**15, tuple(sizes[dim] for dim in order), dtype=torch.int16, device=device
    )
    logical = raw.permute(*(order.index(dim) for dim in "LBHNC"))
    return [logical[layer] for layer in range(layers)]


def padded(device: str, layers: int, content: int, stride: int) -> list[torch.Tensor]:
    """Recurrent states: raw bytes with padding behind each block, in `as_strided` views."""
    raw = torch.randint(-128, 127, (layers, BLOCKS * stride), dtype=torch.int8, device=device)
    return [
        layer.as_strided((BLOCKS, 1, 1, content), (stride, content, content, 1)) for layer in raw
    ]


LAYOUTS = {
    "LBHNC": lambda device: flat(device, 3, (2, 16, 8), "LBHNC"),
    "LBNHC": lambda device: flat(device, 3, (2, 16, 8), "LBNHC"),
    "LHBNC": lambda device: flat(device, 3, (2, 16, 8), "LHBNC"),
    "BLHNC": lambda device: flat(device, 3, (2, 16, 8), "BLHNC"),
    "BHLNC": lambda device: flat(device, 3, (2, 16, 8), "BHLNC"),
    "one layer": lambda device: flat(device, 1, (1, 16, 8), "LBHNC"),
    "large blocks": lambda device: flat(device, 2, (4, 128, 128), "LBHNC"),
    "padded states": lambda device: padded(device, 3, 1000, 1536),
    "odd bytes": lambda device: padded(device, 2, 333, 401),
    "unequal layers": lambda device: [
        *flat(device, 2, (2, 16, 8), "LBHNC"),
        *padded(device, 2, 96, 128),
    ],
    "band between odd bytes": lambda device: [
        *padded(device, 1, 333, 401),
        *flat(device, 2, (2, 16, 8), "LBHNC"),
        *padded(device, 1, 331, 401),
    ],
}


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = create_arena(SHM_DIR / f"hybridkv-test-{threading.get_native_id()}", ARENA)
    made.unlink()
    made.reserve(0, ARENA)
    yield made
    made.close()


class Rig:
    """Copiers of every rank over one arena, and slots in it."""

    def __init__(
        self,
        arena: Arena,
        ranks: Sequence[Sequence[torch.Tensor]],
        checksum: str,
        shared: bool = False,
    ) -> None:
        self.arena = arena
        self.ranks = ranks
        self.part_bytes = sum(view[0].numel() * view.element_size() for view in ranks[0])
        self.parts = [
            PartLayout(rank, len(ranks), checksum, frozenset({0} if shared else ()))
            for rank in range(len(ranks))
        ]
        self.slot_parts = 1 if shared else len(ranks)
        self.copiers = [self.copier(rank, views) for rank, views in enumerate(ranks)]
        self.next = 0

    def copier(self, rank: int, views: Sequence[torch.Tensor]) -> Copier:
        part = self.parts[rank]
        if views[0].is_cuda:
            made = CudaCopier(self.arena, [views], part)
            made.pin(ARENA)
            return made
        return HostCopier(self.arena, [views], part)

    def slot(self, count: int) -> SlotRef:
        ref = SlotRef(self.next, 1000 + self.next)
        header = SlotHeader(
            SlotState.WRITING, ref.generation, self.slot_parts, count * self.part_bytes
        )
        self.arena.memory[ref.offset : ref.offset + HEADER_BYTES] = header.pack()
        self.next += slot_bytes(count * self.part_bytes, self.slot_parts)
        return ref

    def store(self, ops: Sequence[CopyOp]) -> list[bool]:
        outcomes: list[bool] = []
        for copier, part in zip(self.copiers, self.parts, strict=True):
            mine = [op for op in ops if part.writes(op)]
            left = threading.Semaphore(0)

            def done(op: CopyOp, stored: bool, left: threading.Semaphore = left) -> None:
                outcomes.append(stored)
                left.release()

            copier.store(mine, done)
            assert all(left.acquire(timeout=DONE_SECONDS) for _ in mine)
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
        for copier in self.copiers:
            copier.close()


@pytest.mark.parametrize("device", ["cpu", gpu])
def test_ranks_take_turns_with_what_they_share(arena: Arena, device: str) -> None:
    """Each object has one part, which one rank writes and every rank loads."""
    views = [LAYOUTS["LBNHC"](device) for _ in range(2)]
    for mine, others in zip(*views, strict=True):
        others.copy_(mine)
    rig = Rig(arena, views, "on", shared=True)
    before = [view.clone() for view in views[0]]
    ops = [CopyOp(rig.slot(1), 0, chunk, 1, 0, (chunk + 1,)) for chunk in range(4)]
    assert [[part.writes(op) for op in ops] for part in rig.parts] == [
        [True, False] * 2,
        [False, True] * 2,
    ]
    assert rig.store(ops) == [True] * 4
    for rank in range(2):
        for view in views[rank]:
            view.zero_()
        assert rig.load(rank, ops) is None
        for view, old in zip(views[rank], before, strict=True):
            assert torch.equal(view[1:5], old[1:5])
    rig.close()


@pytest.mark.parametrize("device", ["cpu", gpu])
@pytest.mark.parametrize("checksum", ["off", "on", "paranoid"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_bytes_come_back_into_other_blocks(
    arena: Arena, layout: str, checksum: str, device: str
) -> None:
    views = [LAYOUTS[layout](device) for _ in range(2)]
    rig = Rig(arena, views, checksum)
    before = [[view.clone() for view in rank] for rank in views]
    sources = ((1, 2, 3), (8, 4, 6), (5,))
    ops = [
        CopyOp(rig.slot(len(ids)), 0, chunk, len(ids), 0, ids) for chunk, ids in enumerate(sources)
    ]
    assert rig.store(ops) == [True] * 6
    for view in (view for rank in views for view in rank):
        view.zero_()
    targets = ((6, 5, 4), (1, 2, 3), (8,))
    moved = [
        CopyOp(op.slot, 0, op.chunk, op.count, 0, ids) for op, ids in zip(ops, targets, strict=True)
    ]
    for rank in range(2):
        assert rig.load(rank, moved) is None
        for view, old in zip(views[rank], before[rank], strict=True):
            for source, target in zip(sources, targets, strict=True):
                for one, other in zip(source, target, strict=True):
                    assert torch.equal(view[other], old[one])
            for untouched in (0, 7):
                assert not view[untouched].any(), "no other block is touched"
    rig.close()


@pytest.mark.parametrize("device", ["cpu", gpu])
def test_tensors_made_in_inference_mode(arena: Arena, device: str) -> None:
    """vLLM makes such tensors. More than PARALLEL_BYTES_MIN are copied in another thread too."""
    with torch.inference_mode():
        views = flat(device, 8, (2, 128, 128), "LBHNC")
        rig = Rig(arena, [views], "paranoid")
    ops = [CopyOp(rig.slot(1), 0, chunk, 1, 0, (chunk + 1,)) for chunk in range(4)]
    assert rig.store(ops) == [True] * 4
    assert rig.load(0, ops) is None
    rig.close()


@pytest.mark.parametrize("device", ["cpu", gpu])
@pytest.mark.parametrize("layout", ["LBHNC", "padded states", "large blocks"])
def test_a_part_of_an_object_can_be_loaded(arena: Arena, layout: str, device: str) -> None:
    """A local hit inside a chunk keeps its blocks: only the rest is loaded (C34)."""
    views = LAYOUTS[layout](device)
    rig = Rig(arena, [views], "on")
    before = [view.clone() for view in views]
    op = CopyOp(rig.slot(4), 0, 0, 4, 0, (1, 2, 3, 4))
    assert rig.store([op]) == [True]
    for view in views:
        view.zero_()
    assert rig.load(0, [CopyOp(op.slot, 0, 0, 4, 2, (7, 8))]) is None
    for view, old in zip(views, before, strict=True):
        assert torch.equal(view[7], old[3])
        assert torch.equal(view[8], old[4])
        assert not view[:7].any()
    rig.close()


@pytest.mark.parametrize("device", ["cpu", gpu])
def test_every_flipped_byte_is_found(arena: Arena, device: str) -> None:
    views = LAYOUTS["LBHNC"](device)
    rig = Rig(arena, [views], "on")
    op = CopyOp(rig.slot(1), 0, 0, 1, 0, (3,))
    rig.store([op])
    for at in range(0, rig.part_bytes, 37):
        place = op.slot.offset + payload_offset(1) + at
        arena.memory[place] ^= 0x10
        error = rig.load(0, [op])
        assert isinstance(error, BadSlotError)
        assert error.op == op
        arena.memory[place] ^= 0x10
    assert rig.load(0, [op]) is None
    rig.close()


@pytest.mark.parametrize("device", ["cpu", gpu])
def test_a_slot_that_changed_hands_is_refused(arena: Arena, device: str) -> None:
    views = LAYOUTS["LBHNC"](device)
    rig = Rig(arena, [views], "off")
    op = CopyOp(rig.slot(1), 0, 0, 1, 0, (3,))
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
    rig = Rig(arena, [LAYOUTS["LBHNC"](device)], "on")
    op = CopyOp(rig.slot(1), 0, 0, 1, 0, (block,))
    assert rig.store([op]) == [False]
    assert isinstance(rig.load(0, [op]), BadSlotError)
    rig.close()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("first", "blocks"), [(0, (3, 1, 5, 2)), (1, (7, 2, 4))])
def test_gather_and_scatter_by_words(layout: str, first: int, blocks: tuple[int, ...]) -> None:
    """What CUDA does with a part, on the CPU: the same place in the part as by runs, and back."""
    views = as_words(LAYOUTS[layout]("cpu"))
    op = CopyOp(SlotRef(0, 1), 0, 0, 4, first, blocks)
    part = torch.zeros(4 * sum(map(block_bytes, views)), dtype=torch.uint8)
    ids = torch.tensor(op.blocks)
    for view, piece in part_pieces(views, op, part):
        torch.index_select(view, 0, ids, out=piece)
    expected = bytearray(len(part))
    at = 0
    for view in views:
        for number, block in enumerate(blocks):
            start = at + (first + number) * block_bytes(view)
            expected[start : start + block_bytes(view)] = (
                view[block].contiguous().view(torch.uint8).numpy().tobytes()
            )
        at += 4 * block_bytes(view)
    assert part.numpy().tobytes() == bytes(expected)
    before = [view.clone() for view in views]
    for view in views:
        view.zero_()
    for view, piece in part_pieces(views, op, part):
        view.index_copy_(0, ids, piece)
    for view, old in zip(views, before, strict=True):
        for block in range(BLOCKS):
            assert torch.equal(
                view[block], old[block] if block in blocks else torch.zeros_like(old[block])
            )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_runs_cover_a_block_once(layout: str) -> None:
    for view in LAYOUTS[layout]("cpu"):
        covered: set[int] = set()
        for offset, size in block_runs(view):
            run = set(range(offset, offset + size))
            assert not covered & run
            covered |= run
        assert len(covered) == view[0].numel() * view.element_size()


@pytest.mark.gpu
def test_a_block_may_be_overwritten_as_soon_as_store_returns(arena: Arena) -> None:
    """A store's copy does not change with what the compute stream does to the blocks next."""
    views = LAYOUTS["large blocks"]("cuda")
    rig = Rig(arena, [views], "on")
    for _ in range(50):
        rig.next = 0
        expected = [view[1:7].clone() for view in views]
        ops = [CopyOp(rig.slot(1), 0, chunk, 1, 0, (chunk + 1,)) for chunk in range(6)]
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
    made = create_arena(SHM_DIR / f"hybridkv-test-{threading.get_native_id()}-private", 4096)
    try:
        assert Path(made.path).stat().st_mode & 0o077 == 0
    finally:
        made.unlink()
        made.close()
