"""Kernels that copy wrongly are found before they are used, and the blocks they were tried on."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

from hybridkv.connector.copy.cuda_device import kernels_agree
from hybridkv.connector.copy.device import DeviceError, Kernels
from hybridkv.connector.copy.tables import ENTRY, KernelLaunch, make_tables
from hybridkv.connector.copy.torch_kernels import TorchKernels
from hybridkv.shm.slots import PIECE_BYTES
from tests.devicesim.device import AddressKernels

Groups = list[list[torch.Tensor]]
Fault = Callable[[Kernels, KernelLaunch, bool, int], None]


def layers(count: int, *shape: int) -> list[torch.Tensor]:
    return list(torch.zeros(count, *shape, dtype=torch.uint8))


def heads(count: int, blocks: int) -> list[torch.Tensor]:
    """Blocks that are several pieces of memory."""
    return [torch.zeros(2, blocks, 48, dtype=torch.uint8).transpose(0, 1) for _ in range(count)]


def shared() -> Groups:
    """Two groups in the same memory, of which one splits its blocks in two."""
    whole = torch.zeros(9, 128, dtype=torch.uint8)
    return [[whole], [whole.view(18, 64)]]


GROUPS: dict[str, Callable[[], Groups]] = {
    "blocks": lambda: [layers(3, 9, 64)],
    "one block": lambda: [layers(2, 1, 64)],
    "two blocks": lambda: [layers(2, 2, 64)],
    "three blocks": lambda: [layers(1, 3, 7)],
    "several pieces": lambda: [heads(2, 9)],
    "two groups": lambda: [layers(2, 9, 64), heads(3, 5)],
    "split blocks": shared,
    "blocks of a half of the staging": lambda: [layers(2, 9, 65536), layers(2, 9, 8)],
}


def moved(kernels: Kernels, launch: KernelLaunch, is_gather: bool, ids: Sequence[int]) -> None:
    """Launch a copy of other blocks than the launch names."""
    numbers = launch.descriptors.view(torch.int64).clone()
    numbers[len(launch.ops) * ENTRY :] = torch.tensor(ids)
    kernels.copy_blocks(replace(launch, descriptors=numbers.view(torch.uint8)), is_gather)


def ids_of(launch: KernelLaunch) -> list[int]:
    return [block for op in launch.ops for block in op.blocks]


def writes_nothing(kernels: Kernels, launch: KernelLaunch, is_gather: bool, blocks: int) -> None:
    """Copy nothing."""


def another_block(kernels: Kernels, launch: KernelLaunch, is_gather: bool, blocks: int) -> None:
    moved(kernels, launch, is_gather, [(block + 1) % blocks for block in ids_of(launch)])


def first_block(kernels: Kernels, launch: KernelLaunch, is_gather: bool, blocks: int) -> None:
    moved(kernels, launch, is_gather, [0 for _ in ids_of(launch)])


def all_other_blocks(kernels: Kernels, launch: KernelLaunch, is_gather: bool, blocks: int) -> None:
    kernels.copy_blocks(launch, is_gather)
    asked = ids_of(launch)
    for block in set(range(blocks)) - set(asked):
        moved(kernels, launch, is_gather, [block] * len(asked))
    if not is_gather:
        kernels.copy_blocks(launch, is_gather)


FAULTS: dict[str, Fault] = {
    fault.__name__: fault
    for fault in (writes_nothing, another_block, first_block, all_other_blocks)
}


class Faulty:
    """Kernels with a fault in one direction, or in both."""

    can_digest = True

    def __init__(
        self, kernels: Kernels, fault: Fault, directions: Sequence[bool], blocks: int
    ) -> None:
        self._kernels, self._fault, self._directions, self._blocks = (
            kernels,
            fault,
            directions,
            blocks,
        )

    def copy_blocks(self, launch: KernelLaunch, is_gather: bool) -> None:
        if is_gather in self._directions:
            self._fault(self._kernels, launch, is_gather, self._blocks)
        else:
            self._kernels.copy_blocks(launch, is_gather)

    def digest_pieces(
        self, entries_address: int, objects: int, pieces_max: int, digests_address: int
    ) -> None:
        self._kernels.digest_pieces(entries_address, objects, pieces_max, digests_address)


def tried(groups: Groups, wrapped: Callable[[Kernels], Kernels] = lambda kernels: kernels) -> bool:
    """Return True if the kernels are accepted. Asserts that the engine's memory is as before."""
    tables = make_tables(groups)
    largest = max(group.block_bytes for group in tables.groups)
    staging = torch.full((max(2 * largest, PIECE_BYTES + 100),), 0xC3, dtype=torch.uint8)
    before = [view.clone() for views in groups for view in views]
    reference = TorchKernels(tables.word_bytes, groups)
    kernels = wrapped(AddressKernels(tables.word_bytes, True))
    accepted = kernels_agree(kernels, reference, tables, torch.tensor(tables.rows), staging)
    after = [view for views in groups for view in views]
    assert not accepted or all(map(torch.equal, after, before))
    return accepted


@pytest.mark.parametrize("make", GROUPS.values(), ids=GROUPS)
def test_right_kernels_are_accepted_and_leave_the_blocks_as_they_were(
    make: Callable[[], Groups],
) -> None:
    groups = make()
    assert tried(groups)
    draw = torch.Generator().manual_seed(1)
    for views in groups:
        for view in views:
            view.copy_(torch.randint(256, view.shape, dtype=torch.uint8, generator=draw))
    assert tried(groups)


@pytest.mark.parametrize("directions", [(True,), (False,), (True, False)], ids=str)
@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
@pytest.mark.parametrize("make", GROUPS.values(), ids=GROUPS)
def test_a_fault_is_found_on_memory_of_zeros(
    make: Callable[[], Groups], fault: Fault, directions: tuple[bool, ...]
) -> None:
    groups = make()
    blocks = min(len(view) for views in groups for view in views)
    if blocks == 1 and fault is not writes_nothing:
        pytest.skip("there is no other block")
    if fault is all_other_blocks and directions == (True,):
        pytest.skip("a gather overwrites no block")
    assert not tried(groups, lambda kernels: Faulty(kernels, fault, directions, blocks))


def test_wrong_digests_are_found() -> None:
    class Wrong(AddressKernels):
        def digest_pieces(
            self, entries_address: int, objects: int, pieces_max: int, digests_address: int
        ) -> None:
            for index in range(objects):
                own_address = digests_address + 8 * index * pieces_max
                super().digest_pieces(entries_address, 1, pieces_max, own_address)

    # The second part has a piece less than the first one.
    assert not tried(GROUPS["blocks"](), lambda _: Wrong(8, True))


def test_blocks_are_restored_where_kernels_do_not_run() -> None:
    def fails(*_: object) -> None:
        raise DeviceError("no compiler")

    groups = GROUPS["blocks"]()
    with pytest.raises(DeviceError):
        tried(groups, lambda kernels: Faulty(kernels, fails, (True,), 9))
    assert not any(view.any() for view in groups[0])


def test_a_grid_that_cuda_has_not_is_refused_in_a_sentence() -> None:
    """Torch's kernels have no such limit."""
    pytest.importorskip("triton")
    from hybridkv.connector.copy.triton_kernels import TritonKernels

    tables = make_tables([[torch.zeros(2, 8, dtype=torch.uint8)]])
    launch = KernelLaunch(
        ops=[],
        part_offsets=[],
        staging=torch.empty(0),
        rows_address=0,
        descriptors=torch.empty(0),
        rows_max=65_536,
        run_words_max=1,
    )
    with pytest.raises(DeviceError, match="a block has 65536 pieces in memory"):
        TritonKernels(tables.word_bytes, torch.device("cpu")).copy_blocks(launch, is_gather=True)
