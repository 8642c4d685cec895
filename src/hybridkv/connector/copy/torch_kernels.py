"""Gather and scatter with torch, a launch for each object and layer, where Triton cannot run."""

from collections.abc import Sequence

import torch

from hybridkv.connector.copy.tables import ENTRY, Move
from hybridkv.vllm.blocks import part_pieces

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


class TorchKernels:
    """See Kernels. `groups` has physical views."""

    digests = False

    def __init__(self, word_bytes: int, groups: Sequence[Sequence[torch.Tensor]]) -> None:
        word = _WORDS[word_bytes]
        self._groups = [[view.view(word) for view in views] for views in groups]

    def move(self, move: Move, is_gather: bool) -> None:
        """See Kernels."""
        numbers = move.descriptors.view(torch.int64)
        at = len(move.ops) * ENTRY
        # The engine's tensors may be of inference mode, which is set thread by thread.
        with torch.inference_mode():
            for op, place in zip(move.ops, move.places, strict=True):
                blocks = numbers[at : at + len(op.blocks)]
                at += len(op.blocks)
                views = self._groups[op.group_index]
                for view, piece in part_pieces(views, op, move.staging[place:]):
                    if is_gather:
                        torch.index_select(view, 0, blocks, out=piece)
                    else:
                        view.index_copy_(0, blocks, piece)

    def digest(self, entries: int, objects: int, pieces: int, out: int) -> None:
        """See Kernels: it is never called."""
        raise NotImplementedError
