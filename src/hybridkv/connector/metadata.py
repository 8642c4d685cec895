"""What crosses between the scheduler role and the worker role, through vLLM's own channels."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from hybridkv.core.plans import CopyOp

Key = TypeVar("Key")
Number = TypeVar("Number", int, float)


@dataclass(frozen=True)
class LayerLayout:
    """One registered tensor: what a block of a layer is, physically."""

    name: str
    block_bytes: int
    dtype: str
    shape: tuple[int, ...]
    """Of one block."""
    stride: tuple[int, ...]
    """Elements, of one block."""
    block_stride_bytes: int


@dataclass(frozen=True)
class WorkerLayout(KVConnectorHandshakeMetadata):
    """All layers of one rank by gid, in the order in which their bytes stand in an object."""

    layers: dict[int, tuple[LayerLayout, ...]]
    device: str


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """A request's copies out of the arena of one life of the daemon."""

    boot: str
    ops: tuple[CopyOp, ...]


@dataclass
class StepPlan(KVConnectorMetadata):
    """What every worker does in one step."""

    boot: str = ""
    """The daemon's life that the stores are for."""
    reserved_bytes: int = 0
    loads: dict[str, LoadPlan] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)
    """Requests that wait for a load which will not come; workers report them as failed."""
    stores: list[CopyOp] = field(default_factory=list)


@dataclass
class StepReport(KVConnectorWorkerMetadata):
    """What workers did. Slots are named by (offset, generation); counts are of ranks."""

    boots: dict[str, int] = field(default_factory=dict)
    """Ranks that are attached, by the daemon's life they are attached to."""
    done: dict[tuple[int, int], int] = field(default_factory=dict)
    """Ranks that are done with a store, written or not."""
    unstored: set[tuple[int, int]] = field(default_factory=set)
    """Stores that some rank did not write."""
    condemned: set[tuple[int, int]] = field(default_factory=set)
    """Slots whose bytes were proven wrong."""
    counters: dict[str, float] = field(default_factory=dict)

    def aggregate(self, other: "StepReport") -> "StepReport":
        """The report of both."""
        merged = StepReport(
            dict(self.boots),
            dict(self.done),
            self.unstored | other.unstored,
            self.condemned | other.condemned,
            dict(self.counters),
        )
        _add(merged.boots, other.boots)
        _add(merged.done, other.done)
        _add(merged.counters, other.counters)
        return merged


def _add(counts: dict[Key, Number], more: Mapping[Key, Number]) -> None:
    for key, count in more.items():
        counts[key] = counts.get(key, 0) + count
