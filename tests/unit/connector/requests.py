"""What tests of the scheduler role begin with: a role, vLLM's requests, and write slots."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

from hybridkv.core.geometry import Geometry
from hybridkv.core.keys import HASH_BYTES
from hybridkv.core.metrics import Metric
from hybridkv.core.settings import Settings


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
    from hybridkv.connector.scheduler.context import EngineLife, SchedulerContext
    from hybridkv.connector.scheduler.role import SchedulerRole
    from hybridkv.connector.scheduler.session import EngineIdentity

    context = SchedulerContext(
        settings=settings,
        geometry=geometry,
        engine_id="e",
        socket_path=settings.server.removeprefix("unix://"),
        step_tokens=2048,
        pool_blocks=1000,
        **facts,
    )
    life = EngineLife(context, counters, weights)
    return SchedulerRole(context, life, EngineIdentity(namespace, {}))


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
