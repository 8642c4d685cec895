"""What tests of the scheduler role begin with: a role, vLLM's requests, and write slots."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

from hybridkv.connector.messages import StepPlan
from hybridkv.connector.scheduler.audits import Audits
from hybridkv.connector.scheduler.context import EngineLife, SchedulerContext
from hybridkv.connector.scheduler.kv_events import KVEventPublisher
from hybridkv.connector.scheduler.listeners import Step
from hybridkv.connector.scheduler.requests import RequestRegistry
from hybridkv.connector.scheduler.stores import StorePlanner
from hybridkv.core.audit import AuditBudget
from hybridkv.core.geometry import Geometry
from hybridkv.core.keys import HASH_BYTES
from hybridkv.core.metrics import Metric
from hybridkv.core.settings import Settings, parse_settings
from hybridkv.vllm.block_room import BlockRoom

NO_SETTINGS = parse_settings({})


def make_role(
    settings: Settings,
    geometry: Geometry,
    namespace: bytes,
    counters: Counter[Metric],
    *,
    weights: Any = None,
    **facts: Any,
) -> Any:
    """Return the first scheduler role of an engine, over the daemon at `settings.server`.

    A step has 2048 tokens at most, and the engine 1000 blocks. `facts` are more of its context.
    """
    from hybridkv.connector.scheduler.listeners import EngineIdentity
    from hybridkv.connector.scheduler.role import SchedulerRole

    context = make_context(geometry, settings, **facts)
    life = EngineLife(context, counters, weights)
    return SchedulerRole(context, life, EngineIdentity(namespace, {}))


def make_context(
    geometry: Geometry, settings: Settings = NO_SETTINGS, **facts: Any
) -> SchedulerContext:
    """Return the configuration of an engine, with these facts in place of small ones."""
    small = {"engine_id": "e", "step_tokens": 2048, "pool_blocks": 1000}
    path = settings.server.removeprefix("unix://")
    return SchedulerContext(
        settings=settings, geometry=geometry, socket_path=path, **{**small, **facts}
    )


def registry(
    geometry: Geometry, counters: Counter[Metric] | None = None, **by_id: Any
) -> RequestRegistry:
    """Return requests that are tracked by these ids. The daemon is sent nothing about them."""
    daemon: Any = SimpleNamespace(
        is_connected=False, boot="", queue_message=lambda message, now: False
    )
    meter: Any = None
    counters = Counter() if counters is None else counters
    room = BlockRoom((), 1000, 2048)
    return RequestRegistry(geometry, daemon, room, meter, counters, {**by_id})


def store_planner(requests: RequestRegistry, **facts: Any) -> StorePlanner:
    """Return what plans their stores. The weights are always proven, and nothing is audited."""
    context = make_context(requests.geometry, **facts)
    life = EngineLife(context, requests.counters)
    audits = Audits(requests, AuditBudget(0.0), bytes(HASH_BYTES))
    events = KVEventPublisher(requests.geometry, requests.counters, is_on=False)
    return StorePlanner(context, life, requests, audits, events)


def step_of(output: Any, tables: Any = None, number: int = 0) -> Step:
    """Return a step with the plan of this number, over an arena that all workers map."""
    return Step(StepPlan(number), output, tables, can_store=True)


def request(name: str, tokens: int, names: bytes, preemptions: int = 0) -> Any:
    """Return a prompt as the connector sees vLLM's request; none of its tokens is computed.

    `names` has the hashes of its blocks.
    """
    return SimpleNamespace(
        request_id=name,
        prompt_embeds=None,
        mm_features=[],
        resumable=False,
        lora_request=None,
        cache_salt=None,
        num_tokens=tokens,
        num_prompt_tokens=tokens,
        num_computed_tokens=0,
        num_preemptions=preemptions,
        block_hashes=[names[at : at + HASH_BYTES] for at in range(0, len(names), HASH_BYTES)],
    )


def has_write_slots(role: Any) -> bool:
    """Return True if a scheduler role has slots of every shape.

    The first answer of a daemon that has just started grants none.
    """
    return all(pool.tickets for pool in role.stores.credits.pools.values())
