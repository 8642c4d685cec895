"""Stages of a pipeline: each worker has the layers of its stage, and parts of one size.

The parts of an object have one size (shm.slots). Stages have other layers, and a stage may have
fewer of a group than another one, or none. So the workers tell each other the bytes of their
blocks, and a worker with fewer adds *padding*, zeros after its layers::

    stage 0   |layer 0|layer 1|layer 2|
    stage 1   |layer 3|layer 4|padding|

To what copies, padding is one more layer, all of whose blocks are the same memory. It is stored,
signed and compared as layers are, and never written.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from vllm.distributed.parallel_state import get_pp_group

from hybridkv.core.errors import GeometryError

BlockBytes = Mapping[int, int]
"""The bytes of a block in all layers of a worker, by gid."""
Exchange = Callable[[BlockBytes | None], Sequence[BlockBytes | None]]
"""Gives what a worker has to the workers of its rank in all stages. Returns what these have."""


def exchange_in_pipeline(own: BlockBytes | None) -> Sequence[BlockBytes | None]:
    """Exchange by vLLM's own process group. Every worker of the pipeline is to call this.

    It waits for the others no longer than the timeout of that group, and then raises.
    """
    pipeline = get_pp_group()
    everyones: list[BlockBytes | None] = [None] * pipeline.world_size
    torch.distributed.all_gather_object(everyones, own, group=pipeline.cpu_group)
    return everyones


def stage_padding(own: BlockBytes, everyones: Sequence[BlockBytes | None]) -> dict[int, int]:
    """Return the bytes of padding that a block needs, by gid, of groups that need any.

    Raises GeometryError where a stage could not read its layers.
    `stage_padding({0: 64, 1: 32}, [{0: 64, 1: 32}, {0: 96, 1: 0}]) -> {0: 32}`
    """
    if None in everyones:
        what = f"stage {everyones.index(None)} of the pipeline has no KV cache that can be restored"
        raise GeometryError(what)
    padding = {
        gid: max(stage[gid] for stage in everyones if stage is not None) - size
        for gid, size in own.items()
    }
    return {gid: size for gid, size in padding.items() if size}


def padding_view(size: int, num_blocks: int, device: torch.device) -> torch.Tensor:
    """Return padding as a layer's physical view, `[block, byte]` (vllm.blocks)."""
    return torch.zeros(size, dtype=torch.uint8, device=device).expand(num_blocks, size)


def is_padding(view: torch.Tensor) -> bool:
    """Return True for a `padding_view`, whose blocks are the same memory."""
    return bool(view.stride(0) == 0)
