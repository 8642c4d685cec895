"""The connectors inside a MultiConnector: their configuration, their states and their counters."""

import copy
import logging
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import chain, count
from typing import Any, NamedTuple

from vllm.config.kv_transfer import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from hybridkv.core.breaker import Breaker
from hybridkv.core.errors import ConfigError
from hybridkv.core.metrics import Metric
from hybridkv.core.speed import Speed
from hybridkv.multi.metrics import of_child
from hybridkv.multi.ranking import parse_weight
from hybridkv.vllm.hook_guard import HookGuard, fault
from hybridkv.vllm.prometheus import Increments

logger = logging.getLogger("vllm.hybridkv")


OWN_KEYS = ("load_weight", "name")  # Keys of a child's extra config that the child does not see.
HOOK_SECONDS_MAX = 1.0
"""A child whose hooks keep the engine's scheduler for so long pauses (hook_guard.SLOW_MAX).

In workers there is no such limit, because a child may load and save within the step."""
_NAME = re.compile(r"(?!__)[\w.:-]{1,64}", re.ASCII)
_RANK = re.compile(r"_dp\d+$")  # What vLLM appends to the id of a data-parallel engine.
_EXTRA = "kv_connector_extra_config"


class ChildSpec(NamedTuple):
    """A child as it is configured: one entry of `connectors`."""

    name: str  # The label of its statistics, which no other child has.
    connector: type
    config: Any  # vLLM's configuration as the child sees it.
    weight: float  # See multi.ranking.


class ChildState(Enum):
    """States of a child in one role. A pause ends with SERVING. All other changes lead downwards.

    ======== ==================================== ===========================================
    state    begins with                          hooks that are called
    ======== ==================================== ===========================================
    SERVING  the start, or the end of a pause     all
    PAUSED   too many faults, or slow hooks       those that it must not miss a call of
    OFF      a fault that left something half     in a worker, while the child owes transfers:
             done, here or in another process     `get_transfer_results`
    SILENT   scheduler: SETTLE_SECONDS in OFF;    none
             worker: a fault of
             `get_transfer_results`
    ======== ==================================== ===========================================

    The scheduler role also calls `withdraw` once in OFF or SILENT (`is_withdrawn`). `shutdown` is
    called in every state.
    """

    SERVING = auto()
    PAUSED = auto()
    OFF = auto()
    SILENT = auto()


@dataclass(eq=False, slots=True)
class ChildConnector:
    """A child in one role. Its `state` follows from its guard and from `is_silent`."""

    index: int
    name: str
    connector: Any
    guard: HookGuard
    weight: float = 1.0
    speed: Speed = field(default_factory=Speed)  # Tokens per second of its loads.
    breaker: Breaker = field(default_factory=Breaker)  # Open after answers that came too late.
    off_since: float | None = None  # When the scheduler role saw first that it is OFF.
    is_silent: bool = False  # Whether nobody waits any more for what it says of its transfers.
    is_withdrawn: bool = False  # Whether it was asked for its last events.

    @property
    def state(self) -> ChildState:
        """The state, which decides which hooks are called."""
        if self.is_alive:
            return ChildState.SERVING if self.guard.is_on else ChildState.PAUSED
        return ChildState.SILENT if self.is_silent else ChildState.OFF

    @property
    def is_alive(self) -> bool:
        """True while it is SERVING or PAUSED. Its guard decides then which hooks are called."""
        return not self.guard.is_over

    def attempt(
        self, part: str, message: str, otherwise: Any, work: Callable[..., Any], *args: Any
    ) -> Any:
        """Returns `work(*args)`, in any state, or `otherwise` where it raises.

        A fault is counted as one of `part`, and logged as `message` % the child's name.
        """
        try:
            return work(*args)
        except Exception:  # the supervised boundary of a child that may be switched off already
            self.guard.counters[fault(part)] += 1
            logger.exception(f"hybridkv: {message}", self.name)
            return otherwise

    def call_hook(
        self,
        hook: str,
        otherwise: Any,
        *args: Any,
        fatal: bool = False,
        pauses: bool = True,
        **kw: Any,
    ) -> Any:
        """Returns what the connector's hook returns, or `otherwise` (see HookGuard.run_hook)."""
        return self.guard.run_hook(
            hook,
            lambda: getattr(self.connector, hook)(*args, **kw),
            lambda: otherwise,
            fatal,
            pauses=pauses,
        )


class ChildReply(NamedTuple):
    """The value that a child's hook returned."""

    child: ChildConnector
    value: Any


class ChildConnectors:
    """All children of one role, and what the role counts."""

    def __init__(self, role: str, specs: Sequence[ChildSpec], connectors: Sequence[Any]) -> None:
        slow_seconds = HOOK_SECONDS_MAX if role == "scheduler" else math.inf
        guards = [HookGuard(f"{spec.name} ({role})", slow_seconds=slow_seconds) for spec in specs]
        self.all = [
            ChildConnector(index, spec.name, connector, guard, spec.weight)
            for index, (spec, connector, guard) in enumerate(
                zip(specs, connectors, guards, strict=True)
            )
        ]
        self.counters: Counter[Metric] = Counter()
        """MultiConnector's own and those that workers reported. See `totals`."""
        self._increments = Increments()

    @property
    def alive(self) -> list[ChildConnector]:
        """The children whose hooks are called."""
        return [child for child in self.all if child.is_alive]

    def call_hooks(
        self, hook: str, otherwise: Any, *args: Any, fatal: bool = False, pauses: bool = True
    ) -> list[ChildReply]:
        """Call a hook of each living child. Returns their replies, see ChildConnector.call_hook."""
        return [
            ChildReply(child, child.call_hook(hook, otherwise, *args, fatal=fatal, pauses=pauses))
            for child in self.alive
        ]

    def step_begins(self) -> None:
        """End the pauses that are over: their children are asked again."""
        for child in self.all:
            child.guard.resume(lambda: None)

    def count(self, event: Metric, number: int = 1) -> None:
        """Count an event of MultiConnector itself."""
        self.counters[of_child("", event)] += number

    def totals(self) -> Counter[Metric]:
        """All counts: MultiConnector's, those of workers, and those of each child's guard."""
        totals = Counter(self.counters)
        for child in self.all:
            for metric, number in child.guard.counters.items():
                totals[of_child(child.name, metric)] += number
        return totals

    def take_counts(self) -> Counter[Metric]:
        """Returns what was added to `totals` since the last call."""
        return Counter(self._increments.take(self.totals()))


def check_keys(extra: Mapping[str, object]) -> None:
    """Raise ConfigError for a key of MultiConnector's extra config that it does not know."""
    for key in extra:
        if key != "connectors":
            what = f"{_EXTRA}: unknown key {key!r} of MultiConnector"
            raise ConfigError(what, "it knows connectors alone")


def _check_extra(extra: Mapping[str, Any], where: str) -> None:
    """Raise ConfigError for a setting that was proven with one connector alone."""
    if extra.get("sub_block_hits", False) is not False:
        what = f"{where}.sub_block_hits is not proven with several connectors"
        raise ConfigError(what, "leaving it out works")


def child_specs(vllm_config: Any) -> list[ChildSpec]:
    """Returns every child as configured, in order. Raises ConfigError.

    A child sees its own entry without OWN_KEYS. It has the engine's id and failure policy where its
    entry has none. No two children of one class have the same engine id, because their servers
    would take the workers of both for those of one engine.
    """
    transfer = vllm_config.kv_transfer_config
    entries = transfer.kv_connector_extra_config.get("connectors")
    is_list = isinstance(entries, Sequence) and all(isinstance(entry, Mapping) for entry in entries)
    if not is_list or not entries:
        works = (
            '[{"kv_connector":"HybridKVConnector","kv_connector_module_path":"hybridkv.connector",'
            '"kv_role":"kv_both"}] works'
        )
        raise ConfigError(f"{_EXTRA}.connectors must be a list of connectors", works)
    shared = {"kv_load_failure_policy": transfer.kv_load_failure_policy}
    specs: list[ChildSpec] = []
    for number, entry in enumerate(entries):
        where = f"{_EXTRA}.connectors[{number}].{_EXTRA}"
        extra = dict(entry.get(_EXTRA) or {})
        _check_extra(extra, where)
        weight = parse_weight(extra.get("load_weight", 1.0), f"{where}.load_weight")
        name = extra.get("name", entry.get("kv_connector"))
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            what = f'{where}.name={name!r} must be letters, digits and ".:-_"'
            raise ConfigError(what, '"fast" works')
        seen = {key: value for key, value in extra.items() if key not in OWN_KEYS}
        config = copy.copy(vllm_config)
        config.kv_transfer_config = own = KVTransferConfig(**{**shared, **entry, _EXTRA: seen})
        connector = KVConnectorFactory.get_connector_class(own)
        own.kv_connector_extra_config = {**getattr(connector, "CHILD_SETTINGS", {}), **seen}
        alike = [spec.config.kv_transfer_config for spec in specs if spec.connector is connector]
        used_ids = [config.engine_id for config in alike]
        own.engine_id = _engine_id(transfer.engine_id, entry.get("engine_id"), used_ids)
        name = _unique(name, [spec.name for spec in specs])
        specs.append(ChildSpec(name, connector, config, weight))
    return specs


def check_hma(vllm_config: Any) -> None:
    """Raise TypeError where the hybrid manager is on and a child does not support it (B22)."""
    if vllm_config.scheduler_config.disable_hybrid_kv_cache_manager is not False:
        return
    without = [
        spec.name
        for spec in child_specs(vllm_config)
        if not KVConnectorFactory.supports_hma_config(spec.config.kv_transfer_config)
    ]
    if without:
        raise TypeError(
            "MultiConnector has HMA enabled but these child connectors do not support it: "
            f"{', '.join(without)}. Either use --disable-hybrid-kv-cache-manager or replace "
            "the non-HMA connectors."
        )


def _engine_id(engine: str, own: object, used_ids: Sequence[str]) -> str:
    """A child's engine id: its `own`, or the engine's.

    Data-parallel engines have ids of their own: engine "e_dp3", own "mine" -> "mine_dp3".
    """
    if own is None:
        return _unique(engine, used_ids)
    rank = _RANK.search(engine)
    engine_id = f"{own}{rank.group() if rank else ''}"
    if engine_id in used_ids:
        what = f"engine_id={own!r} is that of another child of the same class"
        raise ConfigError(what, "leaving it out works")
    return engine_id


def _unique(name: str, used_names: Sequence[str]) -> str:
    """The name, or name-2, name-3, ... where others have it."""
    candidates = chain([name], (f"{name}-{number}" for number in count(2)))
    return next(candidate for candidate in candidates if candidate not in used_names)
