"""Makes the copier of each arena: with the processor, or over one pipeline on the device."""

import math
import threading
from collections.abc import Sequence

import torch
from vllm.v1.kv_cache_interface import KVCacheConfig

from hybridkv.connector.copy.cuda import CudaCopier
from hybridkv.connector.copy.cuda_device import CudaDevice
from hybridkv.connector.copy.device import Device
from hybridkv.connector.copy.host import HostCopier
from hybridkv.connector.copy.part import Copier, PartLayout
from hybridkv.connector.copy.pipeline import CopyPipeline, Demand
from hybridkv.core.coverage import stored_counts
from hybridkv.core.geometry import Geometry
from hybridkv.shm.arena import Arena
from hybridkv.vllm.layout import WorkerLayout, build_geometry


class Copiers:
    """A worker's copiers, which share its device. `groups` has physical views by served group."""

    def __init__(
        self,
        groups: Sequence[Sequence[torch.Tensor]],
        part: PartLayout,
        pipeline: CopyPipeline | None,
    ) -> None:
        self.groups = groups
        self._part = part
        self.pipeline = pipeline
        self._prepared_bytes = 0

    @property
    def is_alive(self) -> bool:
        """Whether copies can succeed."""
        return self.pipeline is None or self.pipeline.is_alive

    def make(self, arena: Arena) -> Copier:
        """A copier of the arena."""
        self._prepared_bytes = 0
        if self.pipeline is not None:
            return CudaCopier(self.pipeline, arena, self._part)
        return HostCopier(arena, self.groups, self._part)

    def prepare(self, arena: Arena, copier: Copier, reserved_bytes: int) -> None:
        """Prepare new pages ahead of their first use, which would take longer than a step.

        The arena is that of the last `make`, and has pages below `reserved_bytes`. Each step calls
        this.
        """
        new = self._prepared_bytes, reserved_bytes
        if isinstance(copier, CudaCopier):
            copier.pin(reserved_bytes)
        elif reserved_bytes > self._prepared_bytes:
            self._prepared_bytes = reserved_bytes
            threading.Thread(target=arena.populate, args=new, daemon=True).start()

    def retire(self, copier: Copier) -> None:
        """Close a copier without waiting: there may be copies to finish, gigabytes to unpin."""
        if isinstance(copier, CudaCopier):
            copier.retire()
        else:
            threading.Thread(target=copier.close, daemon=True).start()

    def drain(self) -> None:
        """Wait for all copies, also those of copiers that were retired."""
        if self.pipeline is not None:
            self.pipeline.drain()

    def close(self) -> None:
        """After the last copier was closed."""
        if self.pipeline is not None:
            self.pipeline.close()


def open_pipeline(
    config: KVCacheConfig,
    layout: WorkerLayout,
    ranks: int,
    chunk_tokens: int | None,
    step_tokens: int,
    groups: Sequence[Sequence[torch.Tensor]],
    device: Device | None,
) -> CopyPipeline | None:
    """The pipeline of a worker, on `device` or on CUDA; None for engines on a processor.

    Raises DeviceError where the device has no room for it.
    """
    if device is None and layout.device != "cuda":
        return None
    layouts = dict.fromkeys(range(ranks), layout)
    geometry = build_geometry(config, layouts, chunk_tokens)
    device = device or CudaDevice(groups[0][0].device)
    return CopyPipeline(device, groups, demand(geometry, step_tokens))


def demand(geometry: Geometry, step_tokens: int) -> Demand:
    """What the objects of a model ask of the staging; a step may complete one chunk more."""
    chunks = math.ceil(step_tokens / geometry.chunk_tokens) + 1
    counts = [max(stored_counts(geometry, group)) for group in geometry.groups]
    parts = [
        count * group.block_bytes for count, group in zip(counts, geometry.groups, strict=True)
    ]
    return Demand(max(parts), max(counts), chunks * sum(parts))
