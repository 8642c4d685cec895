"""What a scheduler role is made of: facts that never change, and state that outlives it.

A role that was switched off is replaced by a new role (`vllm.hook_guard`). Both have the same
SchedulerContext and the same EngineLife.
"""

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hybridkv.connector.scheduler.weights import WeightsWatch
from hybridkv.core.audit import AuditBudget
from hybridkv.core.geometry import Geometry
from hybridkv.core.metrics import Metric
from hybridkv.core.settings import Settings
from hybridkv.vllm.adapters import Adapters
from hybridkv.vllm.batch_faults import BatchFaults
from hybridkv.vllm.block_room import BlockRoom, Retention, retention_of
from hybridkv.vllm.drafters import Drafter
from hybridkv.vllm.media import MediaContents
from hybridkv.vllm.prometheus import StatsCollector
from hybridkv.wire.messages import WireModel


@dataclass(frozen=True, kw_only=True)
class SchedulerContext:
    """The configuration of one engine, as its scheduler roles need it."""

    settings: Settings
    geometry: Geometry
    engine_id: str
    socket_path: str  # The daemon's socket.
    step_tokens: int  # The most tokens of a step.
    pool_blocks: int  # Blocks of the engine's pool, without the null block.
    inflight_tokens: int | None = None
    """The most tokens of all steps that the engine plans at once. None = those of one step."""
    retention: Sequence[Retention] | None = None
    """What the engine keeps of a request in each group. None = what the groups say, no drafts."""
    staging_bytes: int | None = None  # The smallest staging of all ranks; None = no bound.
    own_hashes: bool = False  # True if the engine's block hashes cannot be used.
    with_tails: bool = False
    """True if hits may end inside a chunk (core.tails). It needs the engine's own hashes."""
    why_computed: str = ""
    """Why all requests are computed, and none is looked up or stored. Empty = hits are served."""
    media_refusal: str = ""  # Why no media have names (`vllm.media`). Empty = they have.
    drafter: Drafter | None = None  # The drafter whose layers have a KV cache, if there is one.
    faults: BatchFaults = BatchFaults()  # Where the engine's own KV may be wrong.
    model: WireModel | None = None  # The model, as the daemon shows it.
    publishes_events: bool = False  # True if vLLM publishes KV events.
    stores_answers: bool = True
    """False if only prompts are stored."""
    promises: bool = True
    """True if other engines of the node may wait for what this one computes (`tiers.promises`)."""
    is_producer: bool = False  # True if it computes prompts for other engines (`kv_producer`).
    is_consumer: bool = False  # True if others compute its prompts (`kv_consumer`).


class EngineLife:
    """The state of one engine that outlives a scheduler role.

    The requests of a role that was switched off are not tracked any more. But workers may still
    report plans of that role, and the engine keeps the blocks that it computed and loaded.
    """

    def __init__(
        self,
        context: SchedulerContext,
        counters: Counter[Metric],
        weights: WeightsWatch | None = None,
    ) -> None:
        """`weights` follow the weights that the identity names. None = these never change."""
        geometry = context.geometry
        self.counters = counters
        self.weights = weights or WeightsWatch()
        self.adapters = Adapters(geometry.ranks)
        self.media = MediaContents(context.media_refusal)
        self._faults = context.faults
        self.had_unproven_session = False
        """True once a session has computed blocks which may be wrong (`vllm.batch_faults`)."""
        self.meter = StatsCollector()
        retention = context.retention or [*map(retention_of, geometry.groups)]
        inflight_tokens = context.inflight_tokens or context.step_tokens
        self.room = BlockRoom(retention, context.pool_blocks, inflight_tokens)
        self.audit_budget = AuditBudget(context.settings.audit)
        self.plan_numbers = itertools.count(1)
        self.run_numbers = itertools.count(1)
        """Numbers of store runs. No role may take a late report for one of its own runs."""
        self.to_fail: list[str] = []
        """Requests that wait for a load which no worker knows of. The next plan fails them."""
        self.last_greeting = 0
        """The number of the last greeting that workers are done with. 0 = there is none."""

    def note_session(self, request: Any) -> None:
        """Note a new request if it is a session that this engine may compute wrongly.

        A fallback calls this too, and must not raise.
        """
        is_session = getattr(request, "resumable", True)
        self.had_unproven_session |= self._faults.in_sessions and is_session
