"""The messages between the scheduler role and the worker roles, in vLLM's own channels."""

import operator
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

from vllm.distributed.kv_transfer.kv_connector.v1 import base

from hybridkv.core.audit import AuditVerdict
from hybridkv.core.copies import CopyRun
from hybridkv.core.metrics import Metric
from hybridkv.core.packed import SlotRef, on_node
from hybridkv.vllm.adapters import AdapterWeights
from hybridkv.vllm.weights import WeightsAnswer
from hybridkv.wire.messages import Hello, Reply, Request, Welcome

Key = TypeVar("Key")
Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """The copies of one request from the arena into the engine's blocks."""

    boot: str  # The life of the daemon whose arena it is.
    runs: tuple[CopyRun, ...]
    adapter: AdapterWeights | None = None
    """The LoRA adapter that computed the objects. Workers load them only while they have it."""


@dataclass(frozen=True, slots=True)
class ObjectPair:
    """Two slots with the same object, which a live audit compares."""

    group_index: int
    chunk: int
    count: int  # The number of stored blocks in the object.
    tickets: bytes  # The stored object's, and that of the computed one (core.packed).


@dataclass(frozen=True, slots=True)
class Mail:
    """Messages of the scheduler role to the daemon of a node, which the node's relay passes on."""

    greeting: int  # The number of the connection that they are for.
    number: int  # Counts the mail of one connection from 0 on, so that a lost one is noticed.
    hello: Hello | None  # Makes the connection, with number 0; None afterwards, and to end it.
    messages: tuple[Request, ...]


@dataclass(frozen=True, slots=True)
class Answers:
    """All that a node's relay has heard of the daemon since its last answers."""

    greeting: int
    number: int  # As in Mail.
    welcome: Welcome | None  # The daemon's greeting, once for each connection.
    replies: tuple[Reply, ...]
    lost: str = ""  # The reason why the connection ended, or could not be made; empty = it goes on.


@dataclass
class StepPlan(base.KVConnectorMetadata):
    """The work of every worker in one step."""

    number: int = 0  # Counts the plans of one scheduler role from 1 on.
    boot: str = ""  # The daemon's life that the stores are for.
    session: int = 0  # The engine's greeting that the stores are for.
    reserved_bytes: int = 0
    loads: dict[str, LoadPlan] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)
    """Requests that wait for a load which no worker begins. Workers report them as failed."""
    stores: dict[int, CopyRun] = field(default_factory=dict)
    """The runs to store, by the number under which the workers report the run."""
    is_idle: bool = False  # True if the step computes nothing.
    question: int = 0  # Workers read their weights once for each number.
    eras: tuple[int, ...] = ()
    """The eras of the weights that loads and stores are for, by rank. Empty = not known yet."""
    audits: dict[int, ObjectPair] = field(default_factory=dict)
    """The pairs to compare, by the number under which the workers report their verdict. The slots
    are those of the life `boot`."""
    mail: Mail | None = None
    """The messages for the node's daemon, where the engine's workers are on several nodes."""


@dataclass(frozen=True, slots=True)
class NodeShare:
    """What is one node's own of a step's plan."""

    boot: str  # The life of its daemon. Empty = there is no connection.
    reserved_bytes: int
    mail: Mail | None  # The messages for its daemon.


@dataclass
class NodePlans(base.KVConnectorMetadata):
    """The work of one step where workers are on several nodes: a plan, and what nodes differ in.

    A node's workers find its slots in the tickets, and its daemon's life in place of `boot`.
    """

    plan: StepPlan
    boot: str  # The connection with all daemons, as loads have it. Empty = there is none.
    shares: tuple[NodeShare, ...]

    def on_node(self, node: int) -> StepPlan:
        """Return the plan of the workers on one node.

        Loads that were planned before a loss of the connection fail, and nothing is stored.
        """
        share, nodes = self.shares[node], len(self.shares)
        loads = {
            name: replace(
                load,
                boot=share.boot if load.boot == self.boot else "",
                runs=tuple(run.on_node(node, nodes) for run in load.runs),
            )
            for name, load in self.plan.loads.items()
        }
        stores = {number: run.on_node(node, nodes) for number, run in self.plan.stores.items()}
        audits = {
            number: replace(pair, tickets=on_node(pair.tickets, node, nodes))
            for number, pair in self.plan.audits.items()
        }
        return replace(
            self.plan,
            boot=share.boot,
            reserved_bytes=share.reserved_bytes,
            loads=loads,
            stores=stores if share.boot else {},
            audits=audits if share.boot else {},
            mail=share.mail,
        )


@dataclass
class StepReport(base.KVConnectorWorkerMetadata):
    """The results of one step of some workers. `aggregate` joins the reports of all workers.

    Loads and stores that end may be those of any earlier step. With asynchronous scheduling the
    scheduler makes the next plan before it has the report of this one.
    """

    number: int = 0  # The plan that every rank has begun; 0 = some rank could not.
    boots: dict[str, int] = field(default_factory=dict)
    """The number of ranks that map the arena, by the daemon's life."""
    done: dict[int, set[int]] = field(default_factory=dict)
    """Ranks that are done with a store run, written or not, by the run's number."""
    unstored: dict[int, set[int]] = field(default_factory=dict)
    """The objects of a store run that some rank did not write, by the run's number. An object is
    given by its place in the run."""
    corrupt: dict[int, set[SlotRef]] = field(default_factory=dict)
    """Slots whose bytes were proven wrong, by node."""
    audits: dict[int, dict[int, AuditVerdict]] = field(default_factory=dict)
    """The verdict of each rank that has compared a pair, by the pair's number."""
    weights: dict[int, WeightsAnswer] = field(default_factory=dict)
    """The answer of each rank's EngineWeights."""
    counters: dict[Metric, float] = field(default_factory=partial(defaultdict, int))
    is_disabled: bool = False
    """True if some rank copies nothing: its device failed or had no room, or it pauses."""
    adapters: dict[int, dict[int, bytes]] = field(default_factory=dict)
    """The digests of the LoRA adapters that each rank had loaded in the step, by lora_int_id."""
    answers: dict[int, Answers] = field(default_factory=dict)
    """The news of each node's relay, by node. Empty where all workers are on one node."""

    def aggregate(self, report: "StepReport") -> "StepReport":
        """Return the report of the workers of both reports."""
        return StepReport(
            number=min(self.number, report.number),
            boots=_merge(self.boots, report.boots, operator.add),
            done=_merge(self.done, report.done, operator.or_),
            unstored=_merge(self.unstored, report.unstored, operator.or_),
            corrupt=_merge(self.corrupt, report.corrupt, operator.or_),
            audits=_merge(self.audits, report.audits, operator.or_),
            weights={**self.weights, **report.weights},
            counters=_merge(self.counters, report.counters, operator.add),
            is_disabled=self.is_disabled or report.is_disabled,
            adapters={**self.adapters, **report.adapters},
            answers={**self.answers, **report.answers},
        )


def _merge(
    left: dict[Key, Value], right: dict[Key, Value], join: Callable[[Value, Value], Value]
) -> dict[Key, Value]:
    """Return the items of both. Where both have a key, `join` makes one value of the two.

    `_merge({"a": 1, "b": 2}, {"b": 3}, operator.add) -> {"a": 1, "b": 5}`
    """
    joined = {key: join(left[key], right[key]) for key in left.keys() & right.keys()}
    return {**left, **right, **joined}
