"""MultiConnector: several connectors at once, the best hit chosen by worth, none able to block or end the engine.

On vLLM's own, whose start-up (children, memory pool, registration, layouts, counts) is kept: there a mistake raises.
Every hook that vLLM calls afterwards is here, and every child is called under a supervisor of its own.
"""

import logging
from collections import Counter
from collections.abc import Mapping
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1 import multi_connector
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
)

from hybridkv.connector.children import Child, all_counters, check_hma, child_specs, parse_multi
from hybridkv.connector.layout import group_keeping
from hybridkv.connector.multimessages import MultiEvents, MultiHandshake, MultiPlan, MultiReport
from hybridkv.connector.multischeduler import MultiScheduler
from hybridkv.connector.multistats import MultiKVConnectorStats, MultiPromMetrics, stats_from
from hybridkv.connector.multiworker import MultiWorker
from hybridkv.connector.supervise import Supervisor
from hybridkv.core.choice import WEIGHT_AUTO

logger = logging.getLogger("vllm.hybridkv")


class MultiConnector(multi_connector.MultiConnector):
    """Asks all children, loads from the best, stores to all. vLLM knows it by this name (requirements B19-B31).

    Inherited are the hooks of the start and the properties: `register_kv_caches`, `bind_kv_cache_manager`,
    `bind_gpu_block_pool`, `set_host_xfer_buffer_ops` go to every child; `get_mem_pool_context` comes from the only
    child that has one; `get_finished_count` is the children's common one; `requires_piecewise_for_cudagraph` and
    `requires_kv_delivery` hold if they do for any child, `supports_divergent_local_hybrid_hits` if for all;
    `sub_connectors`; `get_finished` is `get_transfer_results`.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        settings = parse_multi(vllm_config.kv_transfer_config.kv_connector_extra_config)
        check_hma(vllm_config)
        super().__init__(vllm_config, role, kv_cache_config)
        self._counters: Counter[str] = Counter()
        specs = child_specs(vllm_config)
        self._children = [
            Child(place, spec.name, connector, Supervisor(f"{spec.name} ({role.name.lower()})"), spec.weight)
            for place, (spec, connector) in enumerate(zip(specs, self._connectors, strict=True))
        ]
        self._scheduler: MultiScheduler | None = None
        self._worker: MultiWorker | None = None
        groups = kv_cache_config.kv_cache_groups
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler = MultiScheduler(
                self._children,
                settings,
                self._counters,
                tuple(kv_cache_config.prefix_cacheable_group_ids),
                [group_keeping(gid, group.kv_cache_spec) for gid, group in enumerate(groups)],
                kv_cache_config.num_blocks - 1,
                vllm_config.scheduler_config.max_num_batched_tokens,
            )
            weights = ", ".join(
                f"{spec.name} {spec.weight if spec.weight != WEIGHT_AUTO else 'auto'}" for spec in specs
            )
            logger.info("hybridkv: MultiConnector loads from the best of: %s", weights)
        else:
            self._worker = MultiWorker(self._children, self._counters, len(groups))

    @classmethod
    def _get_connector_classes_and_configs(cls, vllm_config: Any) -> list[tuple[type, Any]]:
        """The children as vLLM's own code wants them."""
        return [(spec.connector, spec.config) for spec in child_specs(vllm_config)]

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """The children's common one. Asked for before any connector is made, so misconfiguration is told here."""
        check_hma(vllm_config)
        layout: str | None = super().get_required_kvcache_layout(vllm_config)
        return layout

    @property
    def counters(self) -> Mapping[str, int]:
        """Of this role: its own by name, each child's as "child: name"."""
        return dict(all_counters(self._counters, self._children))

    # Worker role

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Each child gets its own."""
        self._connector_metadata = connector_metadata
        if self._worker is not None:
            self._worker.bind(connector_metadata)

    def clear_connector_metadata(self) -> None:
        """As bound."""
        self._connector_metadata = None
        if self._worker is not None:
            self._worker.unbind()

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        """Metadata, or a set of request ids as older engines have it."""
        if self._worker is not None:
            self._worker.preempted(kv_connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """All children that have a plan."""
        self._each("start_load_kv", forward_context, loads=True, **kwargs)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """All children that have a plan."""
        self._each("wait_for_layer_load", layer_name, loads=True)

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """All children that have a plan: whoever loads, everybody stores."""
        self._each("save_kv_layer", layer_name, kv_layer, attn_metadata, **kwargs)

    def wait_for_save(self) -> None:
        """All children that have a plan."""
        self._each("wait_for_save")

    def finish_forward(self) -> None:
        """All children that have a plan."""
        self._each("finish_forward")

    def reset_capture_state(self) -> None:
        """All children; none has a plan while graphs are captured."""
        for child in self._children:
            child.call("reset_capture_state", None)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Every load and every save once, also where children say it twice, or one says it that did not load."""
        if self._worker is None:
            return KVConnectorTransferResults()
        return self._worker.results(finished_req_ids)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """The children's, as `get_transfer_results` just heard them."""
        return self._worker.bad_blocks() if self._worker is not None else set()

    def build_connector_worker_meta(self) -> MultiReport | None:
        """The children's, and which of them are switched off."""
        return self._worker.report() if self._worker is not None else None

    def get_kv_connector_kv_cache_events(self) -> MultiEvents | None:
        """The children's."""
        return self._worker.events() if self._worker is not None else None

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """The children's, at start-up."""
        metadata = tuple(child.connector.get_handshake_metadata() for child in self._children)
        return MultiHandshake(metadata) if any(part is not None for part in metadata) else None

    # Scheduler role

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        """At start-up: each child gets its own."""
        for child in self._children:
            child.connector.set_xfer_handshake_metadata(_own(metadata, child.place))

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """At start-up: each child gets its own, by (pp rank, tp rank)."""
        for child in self._children:
            child.connector.set_xfer_handshake_metadata_pp_aware(_own(metadata, child.place))

    def on_new_request(self, request: Any) -> None:
        """All children may begin to look."""
        if self._scheduler is not None:
            self._scheduler.arrived(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """The best child's hit; (None, False) while nobody has one and somebody still looks."""
        if self._scheduler is None:
            return 0, False
        return self._scheduler.matched(request, num_computed_tokens)

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        """The chosen child's."""
        if self._scheduler is None:
            return tuple(self._kv_cache_config.prefix_cacheable_group_ids)
        return self._scheduler.loaded_group_ids(request)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """The chosen child loads; the others hear 0 and let go of what they hold for the request."""
        if self._scheduler is not None:
            self._scheduler.allocated(request, blocks, num_external_tokens)

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[Any, int]:
        """The chosen child's, if they add up."""
        if self._scheduler is None:
            return {}
        return self._scheduler.hit_sources(request, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> MultiPlan:
        """The children's plans, and who owes what."""
        assert self._scheduler is not None
        return self._scheduler.planned(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        """Each child hears of its own loads, saves and messages."""
        if self._scheduler is not None:
            self._scheduler.reported(connector_output)

    def request_finished(self, request: Any, blocks: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Of an engine with one group."""
        return self.request_finished_all_groups(request, (blocks,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """All children; the blocks are held until every child that holds them has reported, or is given up."""
        if self._scheduler is None:
            return False, None
        return self._scheduler.finished(request, block_ids)

    def register_finished_partial_tail(
        self, request: Any, block_ids: tuple[list[int], ...], partial_tail_offloads: list[tuple[int, int, int]]
    ) -> bool:
        """All children; who takes it on owes a report of the request's save."""
        if self._scheduler is None:
            return False
        return self._scheduler.partial_tail(request, block_ids, partial_tail_offloads)

    def take_events(self) -> list[Any]:
        """The children's."""
        return self._scheduler.events() if self._scheduler is not None else []

    def has_pending_block_frees(self) -> bool:
        """Whether any child says so."""
        return self._scheduler is not None and self._scheduler.any_pending("has_pending_block_frees")

    def has_pending_push_work(self) -> bool:
        """Whether any child says so."""
        return self._scheduler is not None and self._scheduler.any_pending("has_pending_push_work")

    def reset_cache(self) -> bool:
        """All children; one that cannot is not used any more."""
        return self._scheduler.reset_cache() if self._scheduler is not None else True

    # Both roles

    def shutdown(self) -> None:
        """All children, those that are switched off too."""
        for child in self._children:
            try:
                child.connector.shutdown()
            except Exception:  # the supervised boundary of a child that may be switched off already
                logger.exception("hybridkv: %s failed to shut down", child.name)

    def get_kv_connector_stats(self) -> MultiKVConnectorStats | None:
        """The children's own, and in the scheduler the choices."""
        if self._worker is not None:
            return self._worker.stats()
        return self._scheduler.stats() if self._scheduler is not None else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> MultiKVConnectorStats:
        """From what travelled."""
        return stats_from(data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> MultiPromMetrics:
        """The choices' and the children's."""
        return MultiPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues, child_specs(vllm_config))

    def _each(self, hook: str, *args: Any, loads: bool = False, **kwargs: Any) -> None:
        if self._worker is not None:
            self._worker.each(hook, *args, loads=loads, **kwargs)


def _own(metadata: Mapping[Any, KVConnectorHandshakeMetadata], place: int) -> dict[Any, KVConnectorHandshakeMetadata]:
    """One child's part of the workers' handshakes, as if it were the engine's only connector."""
    parts = {rank: said.metadata[place] for rank, said in metadata.items() if isinstance(said, MultiHandshake)}
    return {rank: part for rank, part in parts.items() if part is not None}
