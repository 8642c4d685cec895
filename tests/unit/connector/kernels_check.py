"""`python -m tests.unit.connector.kernels_check` compares the kernels with each other.

For every memory layout of CUDA: Triton's, in its interpreter, against torch's and against an
object's bytes block by block; and the digests against `xxhash`. It is a program because Triton
reads TRITON_INTERPRET when it is imported, which vLLM may do first.
"""

import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import torch

from hybridkv.connector.copy.cuda_device import kernels_agree
from hybridkv.connector.copy.tables import ENTRY, KernelLaunch, encode, make_tables
from hybridkv.connector.copy.torch_kernels import TorchKernels
from hybridkv.connector.copy.triton_kernels import TILE_WORDS, TritonKernels
from hybridkv.core.copies import CopyOp
from hybridkv.core.packed import SlotRef
from hybridkv.shm.slots import PIECE_BYTES, piece_digests
from hybridkv.vllm.blocks import block_runs, physical
from hybridkv.vllm.stages import padding_view
from tests.kv_memory import CACHES, KVMemory

SLOT = SlotRef(0, 1)
CHOICES = ((4, 0, (3, 1, 5, 2)), (3, 1, (7, 4)), (1, 0, (8,)))
"""(stored blocks, first, engine's blocks) of the objects of each group: see CopyOp."""


def expected(views: list[torch.Tensor], op: CopyOp, part: bytes) -> bytes:
    """Return the part after a gather, by the layout of an object (core.copies)."""
    gathered, at = bytearray(part), 0
    for view in views:
        flat = torch.empty(0, dtype=torch.uint8).set_(view.untyped_storage()).numpy().tobytes()
        base = view.storage_offset() * view.element_size()
        runs = list(block_runs(view))
        size = sum(length for _, length in runs)
        for number, block in enumerate(op.blocks, op.first):
            start, to = base + block * view.stride(0) * view.element_size(), at + number * size
            for offset, length in runs:
                gathered[to : to + length] = flat[start + offset : start + offset + length]
                to += length
        at += op.count * size
    return bytes(gathered)


def check_moves(name: str, memory: KVMemory) -> int:
    """Gather all objects at once and compare, then scatter them into other memory and compare.

    Returns the bytes of the words in which the kernels copy.
    """
    groups = [[physical(view) for view in views] for views in memory.groups]
    tables = make_tables(groups)
    ops = [
        CopyOp(SLOT, group_index=index, chunk=0, count=count, first=first, blocks=blocks)
        for index in range(len(groups))
        for count, first, blocks in CHOICES
    ]
    sizes = [tables.part_bytes(op) for op in ops]
    part_offsets = [sum(sizes[:number]) for number in range(len(sizes))]
    device_rows = torch.tensor(tables.rows)
    kernels = TritonKernels(tables.word_bytes, torch.device("cpu"))
    stagings = []
    for kernel in (kernels, TorchKernels(tables.word_bytes, groups)):
        staging = torch.full((sum(sizes),), 0xC3, dtype=torch.uint8)
        words = encode(tables, ops, part_offsets, staging.data_ptr())
        launch = KernelLaunch(
            ops=ops,
            part_offsets=part_offsets,
            staging=staging,
            rows_address=device_rows.data_ptr(),
            descriptors=torch.tensor(words).view(torch.uint8),
            rows_max=max(group.rows for group in tables.groups),
            run_words_max=max(group.run_words for group in tables.groups),
        )
        kernel.copy_blocks(launch, True)
        stagings.append(staging)
        for op, offset, size in zip(ops, part_offsets, sizes, strict=True):
            wanted = expected(groups[op.group_index], op, b"\xc3" * size)
            assert staging[offset : offset + size].numpy().tobytes() == wanted, (name, op)
        before = memory.buffer.clone()
        memory.buffer.fill_(0x5A)
        kernel.copy_blocks(launch, False)
        after = memory.buffer.clone()
        memory.buffer.fill_(0x5A)
        restored = [memory.within(before, gid) for gid in range(len(groups))]
        for op in ops:
            for view, old in zip(groups[op.group_index], restored[op.group_index], strict=True):
                for block in op.blocks:
                    view[block] = physical(old)[block]
        assert torch.equal(after, memory.buffer), f"{name}: other bytes than the blocks changed"
        memory.buffer.copy_(before)
    assert torch.equal(stagings[0], stagings[1]), name
    # The trial that CudaDevice makes before it uses the kernels.
    reference = TorchKernels(tables.word_bytes, groups)
    staging = torch.zeros(max(sizes) + PIECE_BYTES, dtype=torch.uint8)
    before = memory.buffer.clone()
    assert kernels_agree(kernels, reference, tables, device_rows, staging), name
    assert torch.equal(memory.buffer, before), f"{name}: the trial changed blocks"
    return tables.word_bytes


def check_padding() -> None:
    """Gather the padding of a stage of a pipeline, which is zeros, and scatter other bytes."""
    padding, op = padding_view(96, 8, torch.device("cpu")), CopyOp(SLOT, 0, 0, 3, 1, (7, 4))
    tables, rows = make_tables([[padding]]), torch.tensor(make_tables([[padding]]).rows)
    for kernel in (
        TritonKernels(tables.word_bytes, torch.device("cpu")),
        TorchKernels(tables.word_bytes, [[padding]]),
    ):
        staging = torch.full((3 * 96,), 0xC3, dtype=torch.uint8)
        launch = KernelLaunch(
            ops=[op],
            part_offsets=[0],
            staging=staging,
            rows_address=rows.data_ptr(),
            descriptors=torch.tensor(encode(tables, [op], [0], staging.data_ptr())).view(
                torch.uint8
            ),
            rows_max=1,
            run_words_max=tables.groups[0].run_words,
        )
        kernel.copy_blocks(launch, True)
        assert staging.tolist() == [0xC3] * 96 + [0] * 2 * 96
        staging.fill_(0xC3)
        kernel.copy_blocks(launch, False)
        assert not padding.any()


def check_long_run() -> None:
    """Gather a block that is longer than what one program copies."""
    view = torch.randint(256, (2, 8 * (2 * TILE_WORDS - 1)), dtype=torch.uint8)
    tables, rows = make_tables([[view]]), torch.tensor(make_tables([[view]]).rows)
    staging, op = torch.zeros(view.shape[1], dtype=torch.uint8), CopyOp(SLOT, 0, 0, 1, 0, (1,))
    words = torch.tensor(encode(tables, [op], [0], staging.data_ptr()))
    launch = KernelLaunch(
        ops=[op],
        part_offsets=[0],
        staging=staging,
        rows_address=rows.data_ptr(),
        descriptors=words.view(torch.uint8),
        rows_max=1,
        run_words_max=tables.groups[0].run_words,
    )
    TritonKernels(tables.word_bytes, torch.device("cpu")).copy_blocks(launch, True)
    assert torch.equal(staging, view[1])


def main() -> None:
    """Check the layouts that are named, or all; then digests of parts of several lengths."""
    names = sys.argv[1:] or list(CACHES)
    words = {name: check_moves(name, CACHES[name].memory()) for name in names}
    assert set(words.values()) >= {1, 8} or sys.argv[1:], words
    check_padding()
    check_long_run()
    kernels = TritonKernels(8, torch.device("cpu"))
    counts = [0, 2]
    draw = torch.Generator().manual_seed(1)
    data = torch.randint(0, 256, (2, 2 * PIECE_BYTES), dtype=torch.uint8, generator=draw)
    entries = torch.zeros(2, ENTRY, dtype=torch.int64)
    for number, pieces in enumerate(counts):
        entries[number, 0], entries[number, 7] = data[number].data_ptr(), pieces
    digests = torch.zeros(2, 2, dtype=torch.int64)
    kernels.digest_pieces(entries.data_ptr(), 2, 2, digests.data_ptr())
    for number, pieces in enumerate(counts):
        found = digests[number].numpy().tobytes()
        part = memoryview(data[number, : pieces * PIECE_BYTES].numpy())
        assert found == piece_digests(part).ljust(16, bytes(1))
    print(f"{len(words)} layouts and the digests of Triton, of torch and of xxhash are equal")


if __name__ == "__main__":
    main()
