"""Makes the copier of each arena: with the processor, or over one pipeline on the device."""

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from vllm.v1.kv_cache_interface import KVCacheConfig

from hybridkv.connector.copy.cuda import CudaCopier
from hybridkv.connector.copy.cuda_device import CudaDevice
from hybridkv.connector.copy.device import Device
from hybridkv.connector.copy.host import HostCopier
from hybridkv.connector.copy.part import Copier, PartLayout
from hybridkv.connector.copy.pipeline import CopyPipeline, Demand
from hybridkv.connector.copy.shards import ShardsCopier
from hybridkv.connector.worker.worker_settings import WorkerSettings
from hybridkv.core.coverage import stored_counts
from hybridkv.core.geometry import Geometry
from hybridkv.shm.arena import Arena
from hybridkv.vllm.layout import WorkerLayout, build_geometry


class MappedArena(NamedTuple):
    """An arena that this process has mapped, and its copier."""

    arena: Arena
    copier: Copier


@dataclass(frozen=True, slots=True)
class ShardBlocks:
    """The blocks of one shard of a rank's heads, which is the whole rank without `share_tp`."""

    part: PartLayout
    groups: Sequence[Sequence[torch.Tensor]]
    """The physical views of each served group."""


class CopierFactory:
    """Makes a worker's copiers, which share its device.

    `pipeline` is None on a processor. With a pipeline there is one shard (vllm.shards refuses
    others).
    """

    def __init__(self, shards: Sequence[ShardBlocks], pipeline: CopyPipeline | None) -> None:
        self.shards = shards
        self.pipeline = pipeline
        self._prepared_bytes = 0  # Of the last arena: pages below have been prepared.

    @property
    def can_copy(self) -> bool:
        """False once an error of the device has ended all copies."""
        return self.pipeline is None or self.pipeline.can_copy

    def make_copier(self, arena: Arena) -> Copier:
        """Return a new copier of the arena."""
        self._prepared_bytes = 0
        if self.pipeline is not None:
            (shard,) = self.shards
            return CudaCopier(self.pipeline, arena, shard.part)
        copiers = [HostCopier(arena, shard.groups, shard.part) for shard in self.shards]
        if len(copiers) == 1:
            return copiers[0]
        return ShardsCopier([shard.part for shard in self.shards], copiers)

    def prepare(self, mapped: MappedArena, reserved_bytes: int) -> None:
        """Prepare new pages ahead of their first use, which would take longer than a step.

        The arena is that of the last `make`, and has pages below `reserved_bytes`. Each step calls
        this.
        """
        if isinstance(mapped.copier, CudaCopier):
            mapped.copier.pin_below(reserved_bytes)
        elif reserved_bytes > self._prepared_bytes:
            pages = self._prepared_bytes, reserved_bytes
            self._prepared_bytes = reserved_bytes
            threading.Thread(target=mapped.arena.populate, args=pages, daemon=True).start()

    def retire_copier(self, copier: Copier) -> None:
        """Close a copier without waiting: there may be copies to finish, gigabytes to unpin."""
        if isinstance(copier, CudaCopier):
            copier.retire()
        else:
            threading.Thread(target=copier.close, daemon=True).start()

    def drain_copiers(self) -> None:
        """Wait for all copies, also those of copiers that were retired."""
        if self.pipeline is not None:
            self.pipeline.drain()

    def close(self) -> None:
        """End the pipeline, after the last copier was closed."""
        if self.pipeline is not None:
            self.pipeline.close()


def open_pipeline(
    settings: WorkerSettings,
    config: KVCacheConfig,
    layout: WorkerLayout,
    groups: Sequence[Sequence[torch.Tensor]],
    device: Device | None,
) -> CopyPipeline | None:
    """Return the pipeline of a worker, on `device` or on CUDA. None for engines on a processor.

    Raises DeviceError where the device has no room for it.
    """
    if device is None and layout.device != "cuda":
        return None
    geometry = build_geometry(config, {0: layout}, settings.chunk_tokens)
    device = device or CudaDevice(groups[0][0].device)
    return CopyPipeline(device, groups, demand(geometry, settings.step_tokens))


def demand(geometry: Geometry, step_tokens: int) -> Demand:
    """Return the staging that a model's objects ask for.

    A step of N chunks of tokens may complete N + 1 chunks.
    """
    chunks = math.ceil(step_tokens / geometry.chunk_tokens) + 1
    counts = [max(stored_counts(geometry, group)) for group in geometry.groups]
    parts = [
        count * group.block_bytes for count, group in zip(counts, geometry.groups, strict=True)
    ]
    return Demand(max(parts), max(counts), chunks * sum(parts))
