"""What the scheduler role and the worker role send each other, through vLLM's own channels."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from hybridkv.core.copies import CopyRun

Key = TypeVar("Key")
Number = TypeVar("Number", int, float)


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """A request's copies out of the arena of one life of the daemon, named by `boot`."""

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
    """Requests that wait for a load which nobody begins; workers report them as failed."""
    stores: dict[int, CopyRun] = field(default_factory=dict)
    """By the number under which the workers report the run."""


@dataclass
class StepReport(KVConnectorWorkerMetadata):
    """What workers did in one step."""

    boots: dict[str, int] = field(default_factory=dict)
    """The number of ranks that map the arena, by the daemon's life."""
    done: dict[int, set[int]] = field(default_factory=dict)
    """Ranks that are done with a store run, written or not, by the run's number."""
    unstored: dict[int, set[int]] = field(default_factory=dict)
    """Places in a store run of objects that some rank did not write, by the run's number."""
    corrupt: set[tuple[int, int]] = field(default_factory=set)
    """(offset, generation) of slots whose bytes were proven wrong."""
    counters: dict[str, float] = field(default_factory=dict)

    def aggregate(self, other: "StepReport") -> "StepReport":
        """The report of the workers of both."""
        return StepReport(
            _sums(self.boots, other.boots),
            _unions(self.done, other.done),
            _unions(self.unstored, other.unstored),
            self.corrupt | other.corrupt,
            _sums(self.counters, other.counters),
        )


def _unions(one: Mapping[int, set[int]], other: Mapping[int, set[int]]) -> dict[int, set[int]]:
    return {key: one.get(key, set()) | other.get(key, set()) for key in (*one, *other)}


def _sums(one: Mapping[Key, Number], other: Mapping[Key, Number]) -> dict[Key, Number]:
    return {key: one.get(key, 0) + other.get(key, 0) for key in (*one, *other)}
