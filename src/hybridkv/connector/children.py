"""The connectors inside a MultiConnector: their configuration, and each under a supervisor of its own."""

import copy
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from vllm.config.kv_transfer import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from hybridkv.connector.supervise import Supervisor
from hybridkv.core.breaker import Breaker
from hybridkv.core.choice import PATIENCE_SECONDS_MAX, parse_weight
from hybridkv.core.errors import ConfigError
from hybridkv.core.worth import Speed

Result = TypeVar("Result")

GRACE_MS = 10.0
"""A lookup on the node takes 0.1 to 2 ms, an engine's step 5 to 50: with this much a late child is asked once more."""
GRACE_MS_MAX = 1000.0
SETTLE_SECONDS = 10.0
"""Copies of a child that failed may still be under way: so long the engine does not get their blocks back."""
SETTLE_SECONDS_MAX = 30.0
OWN_KEYS = ("load_weight", "name")
"""Of a child's extra config, but ours: the child does not see them."""
_NAME = re.compile(r"(?!__)[\w.:-]{1,64}", re.ASCII)
_RANK = re.compile(r"_dp\d+$")
"""What vLLM appends to the id of a data-parallel engine."""
_WHERE = "kv_connector_extra_config"


class ChildSpec(NamedTuple):
    """One entry of `connectors`."""

    name: str
    """Unique among them; the label of its statistics."""
    connector: type
    config: Any
    """vLLM's configuration as the child sees it."""
    weight: float
    """See core.choice."""


@dataclass(frozen=True, slots=True)
class MultiSettings:
    """`kv_connector_extra_config` of MultiConnector, but for `connectors`."""

    grace_ms: float = GRACE_MS
    """How long a request with a hit in hand waits for children that could have a better one."""
    patience_seconds: float | None = None
    """How long a request without a hit waits for children that still look; None = by its length (core.choice)."""
    settle_seconds: float = SETTLE_SECONDS
    """How long after a child's fault its loads and saves that are under way may take to end."""


@dataclass(eq=False, slots=True)
class Child:
    """One connector in one role."""

    place: int
    name: str
    connector: Any
    supervisor: Supervisor
    weight: float = 1.0
    speed: Speed = field(default_factory=Speed)
    """Tokens per second of its loads."""
    breaker: Breaker = field(default_factory=Breaker)
    """Open after answers that did not come in time."""
    dead_since: float | None = None
    """When it was known to be switched off, here or in a worker."""
    withdrawn: bool = False
    """Whether it was asked to withdraw what it announced, after it was switched off."""
    mute: bool = False
    """Whether it cannot even say any more what became of its transfers."""

    @property
    def alive(self) -> bool:
        """Whether its hooks are called."""
        return self.supervisor.healthy

    def run(self, hook: str, work: Callable[[], Result], otherwise: Result, fatal: bool = False) -> Result:
        """`work()`, or `otherwise` where it raises or the child is switched off; see Supervisor.run."""
        return self.supervisor.run(hook, work, lambda: otherwise, fatal)

    def call(self, hook: str, otherwise: Any, *args: Any, fatal: bool = False, **kwargs: Any) -> Any:
        """The connector's own hook, as `run` does it."""
        return self.run(hook, lambda: getattr(self.connector, hook)(*args, **kwargs), otherwise, fatal)


def parse_multi(extra: Mapping[str, object]) -> MultiSettings:
    """MultiConnector's own settings; raises ConfigError."""
    limits = {"grace_ms": (0.0, GRACE_MS_MAX, "10"), "patience_seconds": (0.0, PATIENCE_SECONDS_MAX, "2")}
    limits["settle_seconds"] = (0.0, SETTLE_SECONDS_MAX, "10")
    values: dict[str, float] = {}
    for key, value in extra.items():
        if key == "connectors":
            continue
        if key not in limits:
            known = ", ".join(["connectors", *limits])
            raise ConfigError(f"{_WHERE}: unknown key {key!r} of MultiConnector; it knows {known}")
        low, high, works = limits[key]
        if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:
            raise ConfigError(f"{_WHERE}.{key}={value!r} must be a number from {low:g} to {high:g}; {works} works")
        values[key] = float(value)
    return MultiSettings(**values)


def child_specs(vllm_config: Any) -> list[ChildSpec]:
    """Every child as configured, in order; raises ConfigError.

    A child sees its own entry, with the engine's id and failure policy where it has none, and without OWN_KEYS. No two
    of one class have the same id: whoever they talk to takes their workers for those of one engine.
    """
    transfer = vllm_config.kv_transfer_config
    entries = transfer.kv_connector_extra_config.get("connectors")
    if not isinstance(entries, Sequence) or not entries or not all(isinstance(entry, Mapping) for entry in entries):
        works = '[{"kv_connector":"HybridKVConnector","kv_connector_module_path":"hybridkv.connector"'
        raise ConfigError(f'{_WHERE}.connectors must be a list of connectors; {works},"kv_role":"kv_both"}}] works')
    specs: list[ChildSpec] = []
    for number, entry in enumerate(entries):
        where = f"{_WHERE}.connectors[{number}].{_WHERE}"
        extra = dict(entry.get(_WHERE) or {})
        weight = parse_weight(extra.get("load_weight", 1.0), f"{where}.load_weight")
        name = extra.get("name", entry.get("kv_connector"))
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ConfigError(f'{where}.name={name!r} must be letters, digits and ".:-_"; "fast" works')
        for key in OWN_KEYS:
            extra.pop(key, None)
        shared = {"kv_load_failure_policy": transfer.kv_load_failure_policy}
        config = copy.copy(vllm_config)
        config.kv_transfer_config = KVTransferConfig(**{**shared, **entry, _WHERE: extra})
        connector = KVConnectorFactory.get_connector_class(config.kv_transfer_config)
        taken = [spec.config.kv_transfer_config.engine_id for spec in specs if spec.connector is connector]
        config.kv_transfer_config.engine_id = _engine_id(transfer.engine_id, entry.get("engine_id"), taken)
        specs.append(ChildSpec(_unique(name, [spec.name for spec in specs]), connector, config, weight))
    return specs


def check_hma(vllm_config: Any) -> None:
    """Raise TypeError where the hybrid manager is on and a child does not support it (requirements B22)."""
    if vllm_config.scheduler_config.disable_hybrid_kv_cache_manager is not False:
        return
    without = [
        spec.name
        for spec in child_specs(vllm_config)
        if not KVConnectorFactory.supports_hma_config(spec.config.kv_transfer_config)
    ]
    if without:
        raise TypeError(
            f"MultiConnector has HMA enabled but these child connectors do not support it: {', '.join(without)}. "
            "Either use --disable-hybrid-kv-cache-manager or replace the non-HMA connectors."
        )


def _engine_id(engines: str, own: object, taken: Sequence[str]) -> str:
    """A child's engine id; of several data-parallel engines each has its own, as vLLM makes the engine's."""
    if own is None:
        return _unique(engines, taken)
    rank = _RANK.search(engines)
    engine_id = f"{own}{rank.group() if rank else ''}"
    if engine_id in taken:
        raise ConfigError(f"engine_id={own!r} is that of another child of the same class; leaving it out works")
    return engine_id


def _unique(name: str, taken: Sequence[str]) -> str:
    """The name, or name-2, name-3, ... where others have it."""
    number, unique = 1, name
    while unique in taken:
        number += 1
        unique = f"{name}-{number}"
    return unique


def all_counters(own: Counter[str], children: Sequence[Child]) -> Counter[str]:
    """A role's own counters by name, each child's as "child: name"."""
    counters = Counter(own)
    for child in children:
        counters.update({f"{child.name}: {name}": count for name, count in child.supervisor.counters.items()})
    return counters
