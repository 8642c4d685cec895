"""What the scheduler role and the worker role send each other, through vLLM's own channels."""

import operator
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from vllm.distributed.kv_transfer.kv_connector.v1 import base

from hybridkv.core.audit import AuditVerdict
from hybridkv.core.copies import CopyRun, SlotRef
from hybridkv.vllm.adapters import AdapterWeights
from hybridkv.vllm.weights import WeightsAnswer

Key = TypeVar("Key")
Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """A request's copies out of the arena of one life of the daemon, named by `boot`."""

    boot: str
    runs: tuple[CopyRun, ...]
    adapter: AdapterWeights | None = None
    """The LoRA adapter that computed the objects; workers load them only while they have it."""


@dataclass(frozen=True, slots=True)
class ObjectPair:
    """One object of `count` stored blocks in two slots, which a live audit compares."""

    group_index: int
    chunk: int
    count: int
    stored: SlotRef
    computed: SlotRef


@dataclass
class StepPlan(base.KVConnectorMetadata):
    """What every worker does in one step."""

    number: int = 0  # Counts the plans of one scheduler role from 1 on.
    boot: str = ""  # The daemon's life that the stores are for.
    session: int = 0  # The engine's greeting that the stores are for.
    reserved_bytes: int = 0
    loads: dict[str, LoadPlan] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)
    """Requests that wait for a load which nobody begins; workers report them as failed."""
    stores: dict[int, CopyRun] = field(default_factory=dict)
    """By the number under which the workers report the run."""
    is_idle: bool = False  # Whether the step computes nothing.
    question: int = 0  # Workers read their weights once for each number.
    eras: tuple[int, ...] = ()
    """The eras of the weights that loads and stores are for, by rank; empty = not known yet."""
    audits: dict[int, ObjectPair] = field(default_factory=dict)
    """By the number under which the workers report what they found; slots of the life `boot`."""


@dataclass
class StepReport(base.KVConnectorWorkerMetadata):
    """What workers did in one step.

    The ends of loads and stores may be those of any earlier step. With asynchronous scheduling
    the scheduler makes the next plan before it has the report of this one.
    """

    number: int = 0  # The plan that every rank has begun; 0 = some rank could not.
    boots: dict[str, int] = field(default_factory=dict)
    """The number of ranks that map the arena, by the daemon's life."""
    done: dict[int, set[int]] = field(default_factory=dict)
    """Ranks that are done with a store run, written or not, by the run's number."""
    unstored: dict[int, set[int]] = field(default_factory=dict)
    """Places in a store run of objects that some rank did not write, by the run's number."""
    corrupt: set[tuple[int, int]] = field(default_factory=set)
    """(offset, generation) of slots whose bytes were proven wrong."""
    audits: dict[int, dict[int, AuditVerdict]] = field(default_factory=dict)
    """The verdict of each rank that has compared a pair, by the pair's number."""
    weights: dict[int, WeightsAnswer] = field(default_factory=dict)
    """What each rank's EngineWeights answers."""
    counters: dict[str, float] = field(default_factory=partial(defaultdict, int))
    is_disabled: bool = False
    """Whether some rank copies nothing: its device failed or had no room, or it pauses."""
    adapters: dict[int, dict[int, bytes]] = field(default_factory=dict)
    """The digests of the LoRA adapters that each rank had loaded in the step, by lora_int_id."""

    def aggregate(self, other: "StepReport") -> "StepReport":
        """The report of the workers of both."""
        return StepReport(
            min(self.number, other.number),
            _merged(self.boots, other.boots, operator.add),
            _merged(self.done, other.done, operator.or_),
            _merged(self.unstored, other.unstored, operator.or_),
            self.corrupt | other.corrupt,
            _merged(self.audits, other.audits, operator.or_),
            {**self.weights, **other.weights},
            _merged(self.counters, other.counters, operator.add),
            self.is_disabled or other.is_disabled,
            {**self.adapters, **other.adapters},
        )


def _merged(
    one: dict[Key, Value], other: dict[Key, Value], join: Callable[[Value, Value], Value]
) -> dict[Key, Value]:
    joined = {key: join(one[key], other[key]) for key in one.keys() & other.keys()}
    return {**one, **other, **joined}
