"""The connectors inside a MultiConnector: their configuration, each one's guard, counters."""

import copy
import logging
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, count
from typing import Any, NamedTuple

from vllm.config.kv_transfer import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from hybridkv.core.breaker import Breaker
from hybridkv.core.errors import ConfigError
from hybridkv.core.speed import Speed
from hybridkv.multi.ranking import PATIENCE_SECONDS_MAX, parse_weight
from hybridkv.vllm.hook_guard import HookGuard

logger = logging.getLogger("vllm.hybridkv")

LIMITS = {
    "grace_ms": (1000.0, "10"),
    "patience_seconds": (PATIENCE_SECONDS_MAX, "2"),
    "settle_seconds": (30.0, "10"),
}
"""The largest value of each setting, and one that works."""
OWN_KEYS = ("load_weight", "name")  # Keys of a child's extra config that the child does not see.
HOOK_SECONDS_MAX = 1.0
"""A child that keeps the engine's scheduler for so long pauses (hook_guard.SLOW_MAX). In workers a
child may load and save within the step, which takes as long as it takes."""
_NAME = re.compile(r"(?!__)[\w.:-]{1,64}", re.ASCII)
_RANK = re.compile(r"_dp\d+$")  # What vLLM appends to the id of a data-parallel engine.
_EXTRA = "kv_connector_extra_config"


class ChildSpec(NamedTuple):
    """One entry of `connectors`."""

    name: str  # The label of its statistics, which no other child has.
    connector: type
    config: Any  # vLLM's configuration as the child sees it.
    weight: float  # See multi.ranking.


@dataclass(frozen=True, slots=True)
class MultiSettings:
    """`kv_connector_extra_config` of MultiConnector, without `connectors`."""

    grace_ms: float = 10.0
    """How long a request with a hit waits for children that could have a better one.
    A lookup on the node takes 0.1 to 2 ms and a step 5 to 50: a late child is asked once more.
    """
    patience_seconds: float | None = None
    """How long a request waits for children that still look while the others have nothing; None =
    as long as computing it takes. With 0 it waits only while all children look.
    """
    settle_seconds: float = 10.0
    """How long after a child's fault the engine waits for the ends of its transfers."""


@dataclass(eq=False, slots=True)
class ChildConnector:
    """One connector in one role."""

    index: int
    name: str
    connector: Any
    guard: HookGuard
    weight: float = 1.0
    speed: Speed = field(default_factory=Speed)  # Tokens per second of its loads.
    breaker: Breaker = field(default_factory=Breaker)  # Open after answers that came too late.
    dead_since: float | None = None  # When it was known to be switched off, here or in a worker.
    withdrawn: bool = False  # Whether it was asked for its last events after it was switched off.
    mute: bool = False  # Whether it cannot report any more what became of its transfers.

    @property
    def alive(self) -> bool:
        """Whether its hooks are called: all of them, or in a pause those that it must not miss."""
        return not self.guard.is_over

    def attempt(
        self, fault: str, says: str, otherwise: Any, work: Callable[..., Any], *args: Any
    ) -> Any:
        """`work(*args)`, also of a child that is switched off, or `otherwise` where it raises.

        Then `fault` is counted, and the log has what it `says` of the child.
        """
        try:
            return work(*args)
        except Exception:  # the supervised boundary of a child that may be switched off already
            self.guard.counters[fault] += 1
            logger.exception(f"hybridkv: {says}", self.name)
            return otherwise

    def call(
        self,
        hook: str,
        otherwise: Any,
        *args: Any,
        fatal: bool = False,
        pauses: bool = True,
        **kw: Any,
    ) -> Any:
        """What the connector's own hook answers, or `otherwise` (see HookGuard.run)."""
        return self.guard.run(
            hook,
            lambda: getattr(self.connector, hook)(*args, **kw),
            lambda: otherwise,
            fatal,
            pauses=pauses,
        )


class ChildConnectors:
    """All children of one role, and what the role counts."""

    def __init__(self, role: str, specs: Sequence[ChildSpec], connectors: Sequence[Any]) -> None:
        slow_seconds = HOOK_SECONDS_MAX if role == "scheduler" else math.inf
        guards = [HookGuard(f"{spec.name} ({role})", slow_seconds=slow_seconds) for spec in specs]
        self.all = [
            ChildConnector(index, spec.name, one, guards[index], spec.weight)
            for index, (spec, one) in enumerate(zip(specs, connectors, strict=True))
        ]
        self.counters: Counter[str] = Counter()
        """MultiConnector's own; the others are in the children's guards."""
        self._told: Counter[str] = Counter()

    @property
    def alive(self) -> list[ChildConnector]:
        """The children whose hooks are called."""
        return [child for child in self.all if child.alive]

    def call(
        self, hook: str, otherwise: Any, *args: Any, **how: bool
    ) -> list[tuple[ChildConnector, Any]]:
        """What each living child answers to its own hook."""
        return [(one, one.call(hook, otherwise, *args, **how)) for one in self.alive]

    def step_begins(self) -> None:
        """Children whose pause is over are asked again."""
        for child in self.all:
            child.guard.begin_anew(lambda: None)

    def totals(self) -> Counter[str]:
        """All counts, MultiConnector's by name and each child's as "child: name"."""
        totals = Counter(self.counters)
        for child in self.all:
            counters = child.guard.counters
            totals.update({f"{child.name}: {name}": many for name, many in counters.items()})
        return totals

    def take_counts(self) -> Counter[str]:
        """What was added to `totals` since the last call."""
        told, self._told = self._told, self.totals()
        return self._told - told


def parse_multi(extra: Mapping[str, object]) -> MultiSettings:
    """MultiConnector's own settings; raises ConfigError."""
    values: dict[str, float] = {}
    for key, value in extra.items():
        if key == "connectors":
            continue
        if key not in LIMITS:
            knows = f"it knows {', '.join(['connectors', *LIMITS])}"
            raise ConfigError(f"{_EXTRA}: unknown key {key!r} of MultiConnector", knows)
        most, works = LIMITS[key]
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 <= value <= most:  # type: ignore[operator]  # a number
            what = f"{_EXTRA}.{key}={value!r} must be a number from 0 to {most:g}"
            raise ConfigError(what, f"{works} works")
        values[key] = float(value)  # type: ignore[arg-type]  # a number
    return MultiSettings(**values)


def _check_extra(extra: Mapping[str, Any], where: str) -> None:
    """Raise ConfigError for what was proven with one connector alone."""
    if extra.get("sub_block_hits", False) is not False:
        what = f"{where}.sub_block_hits is not proven with several connectors"
        raise ConfigError(what, "leaving it out works")


def child_specs(vllm_config: Any) -> list[ChildSpec]:
    """Every child as configured, in order; raises ConfigError.

    A child sees its own entry, with the engine's id and failure policy where it has none, and
    without OWN_KEYS. No two of one class have the same id: whoever they talk to takes their workers
    for those of one engine.
    """
    transfer = vllm_config.kv_transfer_config
    entries = transfer.kv_connector_extra_config.get("connectors")
    is_list = isinstance(entries, Sequence) and all(isinstance(one, Mapping) for one in entries)
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
        taken = [config.engine_id for config in alike]
        own.engine_id = _engine_id(transfer.engine_id, entry.get("engine_id"), taken)
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


def _engine_id(engine: str, own: object, taken: Sequence[str]) -> str:
    """A child's engine id, which data-parallel engines tell apart as vLLM does its own."""
    if own is None:
        return _unique(engine, taken)
    rank = _RANK.search(engine)
    engine_id = f"{own}{rank.group() if rank else ''}"
    if engine_id in taken:
        what = f"engine_id={own!r} is that of another child of the same class"
        raise ConfigError(what, "leaving it out works")
    return engine_id


def _unique(name: str, taken: Sequence[str]) -> str:
    """The name, or name-2, name-3, ... where others have it."""
    names = chain([name], (f"{name}-{number}" for number in count(2)))
    return next(one for one in names if one not in taken)
