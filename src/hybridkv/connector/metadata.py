"""What crosses between the scheduler role and the worker role, through vLLM's own channels."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from hybridkv.core.plans import CopyRun

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
    runs: tuple[CopyRun, ...]


@dataclass
class StepPlan(KVConnectorMetadata):
    """What every worker does in one step."""

    boot: str = ""
    """The daemon's life that the stores are for."""
    session: int = 0
    """The engine's greeting that the stores are for."""
    reserved_bytes: int = 0
    loads: dict[str, LoadPlan] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)
    """Requests that wait for a load which will not come; workers report them as failed."""
    stores: dict[int, CopyRun] = field(default_factory=dict)
    """By number, under which the workers report them."""


@dataclass
class StepReport(KVConnectorWorkerMetadata):
    """What workers did."""

    boots: dict[str, int] = field(default_factory=dict)
    """Number of ranks that are attached, by the daemon's life they are attached to."""
    done: dict[int, set[int]] = field(default_factory=dict)
    """Ranks that are done with a store run, written or not, by its number."""
    unstored: dict[int, set[int]] = field(default_factory=dict)
    """Objects of a store run, by their place in it, that some rank did not write."""
    condemned: set[tuple[int, int]] = field(default_factory=set)
    """(offset, generation) of slots whose bytes were proven wrong."""
    counters: dict[str, float] = field(default_factory=dict)

    def aggregate(self, other: "StepReport") -> "StepReport":
        """The report of both."""
        return StepReport(
            _sums(self.boots, other.boots),
            _unions(self.done, other.done),
            _unions(self.unstored, other.unstored),
            self.condemned | other.condemned,
            _sums(self.counters, other.counters),
        )


def _unions(one: Mapping[int, set[int]], other: Mapping[int, set[int]]) -> dict[int, set[int]]:
    return {key: one.get(key, set()) | other.get(key, set()) for key in (*one, *other)}


def _sums(one: Mapping[Key, Number], other: Mapping[Key, Number]) -> dict[Key, Number]:
    return {key: one.get(key, 0) + other.get(key, 0) for key in (*one, *other)}
