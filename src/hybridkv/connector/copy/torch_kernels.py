"""Gather and scatter with torch, a launch for each object and layer, where Triton cannot run."""

from collections.abc import Sequence

import torch

from hybridkv.connector.copy.device import Kernels
from hybridkv.connector.copy.tables import ENTRY, KernelLaunch
from hybridkv.vllm.blocks import part_pieces
from hybridkv.vllm.stages import is_padding

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


class TorchKernels(Kernels):
    """Kernels that torch has. They hash nothing. `groups` has physical views."""

    can_digest = False

    def __init__(self, word_bytes: int, groups: Sequence[Sequence[torch.Tensor]]) -> None:
        word = _WORDS[word_bytes]
        self._groups = [[view.view(word) for view in views] for views in groups]

    def copy_blocks(self, launch: KernelLaunch, is_gather: bool) -> None:
        numbers = launch.descriptors.view(torch.int64)
        first_number = len(launch.ops) * ENTRY
        # The engine's tensors may be of inference mode, which is set thread by thread.
        with torch.inference_mode():
            for op, part_offset in zip(launch.ops, launch.part_offsets, strict=True):
                blocks = numbers[first_number : first_number + len(op.blocks)]
                first_number += len(op.blocks)
                views = self._groups[op.group_index]
                for view, piece in part_pieces(views, op, launch.staging[part_offset:]):
                    if is_gather:
                        torch.index_select(view, 0, blocks, out=piece)
                    elif not is_padding(view):
                        view.index_copy_(0, blocks, piece)

    def digest_pieces(
        self, entries_address: int, objects: int, pieces_max: int, digests_address: int
    ) -> None:
        """Raise NotImplementedError. `can_digest` is False, so nobody calls it."""
        raise NotImplementedError
