"""Connectors for tests of MultiConnector. vLLM's factory loads them, and a script drives each."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

SCRIPTS: dict[str, "Script"] = {}
"""By the child's extra config `script`; both roles of a child share one."""


class ScriptedError(Exception):
    """The fault of a child whose script says that a hook raises."""


@dataclass(eq=False)
class Script:
    """What a child does in both roles, and what was seen of it."""

    tokens: Callable[[Any, int], int | None] = lambda request, local: 0
    is_async: bool = True
    raises: set[str] = field(default_factory=set)
    """Hooks that raise, for ever."""
    load_steps: int = 0
    fails: bool = False
    """Whether its loads fail."""
    repeats: int = 1
    """How often it reports that a transfer ended."""
    holds: bool = False
    """Whether it holds the blocks of finished requests, for `hold_steps`."""
    hold_steps: int = 0
    bad_blocks: set[int] = field(default_factory=set)
    sources: dict[Any, int] | None = None
    calls: Counter[str] = field(default_factory=Counter)
    seen: list[tuple[Any, ...]] = field(default_factory=list)
    events: list[Any] = field(default_factory=list)
    """KV events of the workers, as the scheduler role got them in each step."""
    notes: list["Note | None"] = field(default_factory=list)
    """The workers' messages, as the scheduler role got them in each step."""
    extra: dict[str, Any] = field(default_factory=dict)
    engine_ids: set[str] = field(default_factory=set)


@dataclass
class Plan(KVConnectorMetadata):
    """A child's message to its workers: the requests whose loads begin."""

    loads: list[str]


@dataclass
class Note(KVConnectorWorkerMetadata):
    """A child's message of its workers: how many steps they did."""

    steps: int

    def aggregate(self, note: KVConnectorWorkerMetadata) -> "Note":
        assert isinstance(note, Note)
        return Note(self.steps + note.steps)


@dataclass(frozen=True)
class Shake(KVConnectorHandshakeMetadata):
    """The handshake of one child's worker."""

    script: str


class ScriptedStats(KVConnectorStats):
    """A child's statistics: how often it was asked for tokens."""

    def reset(self) -> None:
        self.data.clear()

    def aggregate(self, later: KVConnectorStats) -> "ScriptedStats":
        return ScriptedStats({"asked": self.data.get("asked", 0) + later.data.get("asked", 0)})

    def reduce(self) -> dict[str, int | float]:
        return dict(self.data)

    def is_empty(self) -> bool:
        return not self.data


class ScriptedProm(KVConnectorPromMetrics):
    """A child's metrics: ScriptedStats as a counter."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: Any, values: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, values)
        family = self._counter_cls(
            name="vllm:scripted_asked", documentation="Asked.", labelnames=labelnames
        )
        self._asked = {engine: family.labels(*labels) for engine, labels in values.items()}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        self._asked[engine_idx].inc(transfer_stats_data["asked"])


class Plain(KVConnectorBase_V1):
    """A connector without support for the hybrid manager, and without metrics."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        self.script = SCRIPTS[transfer.kv_connector_extra_config["script"]]
        self.script.extra = transfer.kv_connector_extra_config
        self.script.engine_ids.add(str(transfer.engine_id))
        self._to_load: list[str] = []
        self.loading: dict[str, int] = {}
        self.holding: dict[str, int] = {}
        self._asked = 0

    def _do(self, hook: str, *seen: Any) -> None:
        self.script.calls[hook] += 1
        self.script.seen.append((hook, *seen))
        if hook in self.script.raises:
            raise ScriptedError(hook)

    # Scheduler role

    def on_new_request(self, request: Any) -> None:
        self._do("on_new_request", request.request_id)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        self._do("get_num_new_matched_tokens", request.request_id)
        self._asked += 1
        tokens = self.script.tokens(request, num_computed_tokens)
        return tokens, self.script.is_async and bool(tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._do("update_state_after_alloc", request.request_id, num_external_tokens)
        if num_external_tokens:
            self._to_load.append(request.request_id)

    def get_external_cache_hit_sources(
        self, request: Any, num_external_tokens: int
    ) -> dict[CacheHitSource, int]:
        self._do("get_external_cache_hit_sources")
        return self.script.sources or {CacheHitSource.HOST: num_external_tokens}

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        self._do("get_loaded_kv_cache_group_ids")
        return super().get_loaded_kv_cache_group_ids(request)  # type: ignore[no-any-return]

    def build_connector_meta(self, scheduler_output: Any) -> Plan:
        self._do("build_connector_meta")
        plan, self._to_load = Plan(self._to_load), []
        return plan

    def update_connector_output(self, connector_output: Any) -> None:
        self._do(
            "update_connector_output",
            frozenset(connector_output.finished_recving or ()),
            frozenset(connector_output.finished_sending or ()),
        )
        note = connector_output.kv_connector_worker_meta
        assert note is None or isinstance(note, Note)
        self.script.notes.append(note)
        self.script.events.append(connector_output.kv_cache_events)

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        self._do("request_finished")
        return self.script.holds, None

    def take_events(self) -> list[Any]:
        self._do("take_events")
        return []

    def has_pending_push_work(self) -> bool:
        self._do("has_pending_push_work")
        return False

    def has_pending_block_frees(self) -> bool:
        self._do("has_pending_block_frees")
        return False

    def reset_cache(self) -> bool:
        self._do("reset_cache")
        return True

    def set_xfer_handshake_metadata(self, metadata: Any) -> None:
        self._do("set_xfer_handshake_metadata", tuple(metadata.items()))

    # Worker role

    def get_handshake_metadata(self) -> Shake:
        return Shake(self.script.extra["script"])

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        self._do("bind_connector_metadata")
        assert isinstance(connector_metadata, Plan)
        super().bind_connector_metadata(connector_metadata)

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        self._do("handle_preemptions", type(kv_connector_metadata))

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._do("start_load_kv")
        if self.script.is_async:
            self.loading.update(
                dict.fromkeys(self._get_connector_metadata().loads, self.script.load_steps)
            )

    def wait_for_layer_load(self, layer_name: str) -> None:
        self._do("wait_for_layer_load")

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        self._do("save_kv_layer")

    def wait_for_save(self) -> None:
        self._do("wait_for_save")

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        self._do("get_transfer_results")
        ended = {name for name, steps in self.loading.items() if steps <= 0}
        self.loading = {
            name: steps - 1
            for name, steps in self.loading.items()
            if steps > 1 - self.script.repeats
        }
        sent = {name for name, steps in self.holding.items() if steps <= 0}
        self.holding = {
            name: steps - 1
            for name, steps in self.holding.items()
            if steps > 1 - self.script.repeats
        }
        if self.script.holds:
            self.holding.update(dict.fromkeys(finished_req_ids, self.script.hold_steps))
        return KVConnectorTransferResults(
            finished_recving=ended,
            failed_recving=set(ended) if self.script.fails else set(),
            finished_sending=sent,
        )

    def get_block_ids_with_load_errors(self) -> set[int]:
        self._do("get_block_ids_with_load_errors")
        bad_blocks, self.script.bad_blocks = self.script.bad_blocks, set()
        return bad_blocks

    def build_connector_worker_meta(self) -> Note:
        self._do("build_connector_worker_meta")
        return Note(1)

    # Both

    def get_kv_connector_stats(self) -> ScriptedStats | None:
        self._do("get_kv_connector_stats")
        asked, self._asked = self._asked, 0
        return ScriptedStats({"asked": asked}) if asked else None

    def shutdown(self) -> None:
        self._do("shutdown")


class Scripted(Plain, SupportsHMA):
    """A connector with support for the hybrid manager, statistics and metrics."""

    def request_finished_all_groups(
        self, request: Any, block_ids: Any
    ) -> tuple[bool, dict[str, Any] | None]:
        self._do("request_finished_all_groups")
        return self.script.holds, None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> ScriptedStats:
        return ScriptedStats(data=data or {})

    @classmethod
    def build_prom_metrics(cls, *args: Any) -> ScriptedProm:
        return ScriptedProm(*args)


class Unmeasured(Plain, SupportsHMA):
    """A connector with support for the hybrid manager, and with statistics but no metrics."""

    def request_finished_all_groups(
        self, request: Any, block_ids: Any
    ) -> tuple[bool, dict[str, Any] | None]:
        return False, None
