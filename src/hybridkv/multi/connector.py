"""MultiConnector: several connectors at once, of which the best hit by weight is loaded.

No connector can block or end the engine. vLLM's own MultiConnector is the base, and its start-up is
kept (children, memory pool, registration, layouts, counts): a mistake there raises. Every hook that
vLLM calls afterwards is written here, and each child is called under a HookGuard of its own.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partialmethod
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1 import multi_connector
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
)

from hybridkv.core.findings import raise_first
from hybridkv.core.metrics import Metric
from hybridkv.multi.children import ChildConnectors, check_hma, check_keys, child_specs
from hybridkv.multi.ranking import WEIGHT_AUTO
from hybridkv.multi.scheduler import MultiScheduler
from hybridkv.multi.stats import MultiKVConnectorStats, MultiMetrics
from hybridkv.multi.worker import MultiWorker
from hybridkv.vllm.block_room import BlockRoom
from hybridkv.vllm.executors import executor_finding
from hybridkv.vllm.hook_guard import logger
from hybridkv.vllm.layout import group_keeping
from hybridkv.vllm.plugin import recompute_failed_loads


@dataclass(frozen=True)
class MultiHandshake(KVConnectorHandshakeMetadata):
    """A worker's handshake: each child's own, by the child's index."""

    metadata: tuple[KVConnectorHandshakeMetadata | None, ...]


class MultiConnector(multi_connector.MultiConnector):
    """Asks all children, loads from the best, stores to all (requirements B19-B31).

    vLLM knows it by this name. The properties and the hooks of the start are inherited:
    `register_kv_caches`, `bind_kv_cache_manager`, `bind_gpu_block_pool` and
    `set_host_xfer_buffer_ops` go to every child. `get_mem_pool_context` is that of the only child
    that has one, and `get_finished_count` the children's common one. `get_finished` calls
    `get_transfer_results`.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        raise_first([executor_finding(vllm_config.parallel_config)])
        recompute_failed_loads(vllm_config.kv_transfer_config)
        check_keys(vllm_config.kv_transfer_config.kv_connector_extra_config)
        super().__init__(vllm_config, role, kv_cache_config)
        specs = child_specs(vllm_config)
        self.children = ChildConnectors(role.name.lower(), specs, self._connectors)
        groups = kv_cache_config.kv_cache_groups
        if role == KVConnectorRole.WORKER:
            self.part: MultiScheduler | MultiWorker = MultiWorker(self.children, len(groups))
            return
        kept = [group_keeping(gid, group.kv_cache_spec) for gid, group in enumerate(groups)]
        inflight_tokens = vllm_config.max_in_flight_tokens
        self.part = MultiScheduler(
            children=self.children,
            group_ids=tuple(kv_cache_config.prefix_cacheable_group_ids),
            groups=kept,
            room=BlockRoom(kept, kv_cache_config.num_blocks - 1, inflight_tokens),
        )
        weights = (f"{s.name} {'auto' if s.weight == WEIGHT_AUTO else s.weight}" for s in specs)
        logger.info("hybridkv: MultiConnector loads from the best of: %s", ", ".join(weights))

    @classmethod
    def _get_connector_classes_and_configs(cls, vllm_config: Any) -> list[tuple[type, Any]]:
        """Returns the children for vLLM's own code, which asks for their layout before a start."""
        check_hma(vllm_config)
        return [(spec.connector, spec.config) for spec in child_specs(vllm_config)]

    @property
    def counters(self) -> Mapping[Metric, int]:
        """All counts that this role knows."""
        return self.children.totals()

    def _forward(self, hook: str, *args: Any, **kwargs: Any) -> Any:
        """Call the hook of the role's part."""
        return getattr(self.part, hook)(*args, **kwargs)

    # Hooks of the scheduler role, see MultiScheduler.
    on_new_request = partialmethod(_forward, "on_new_request")
    get_num_new_matched_tokens = partialmethod(_forward, "get_num_new_matched_tokens")
    update_state_after_alloc = partialmethod(_forward, "update_state_after_alloc")
    get_loaded_kv_cache_group_ids = partialmethod(_forward, "get_loaded_kv_cache_group_ids")
    get_external_cache_hit_sources = partialmethod(_forward, "get_external_cache_hit_sources")
    build_connector_meta = partialmethod(_forward, "build_connector_meta")
    update_connector_output = partialmethod(_forward, "update_connector_output")
    request_finished_all_groups = partialmethod(_forward, "request_finished_all_groups")
    register_finished_partial_tail = partialmethod(_forward, "register_finished_partial_tail")
    take_events = partialmethod(_forward, "take_events")
    has_pending_block_frees = partialmethod(_forward, "has_pending_block_frees")
    has_pending_push_work = partialmethod(_forward, "has_pending_push_work")
    reset_cache = partialmethod(_forward, "reset_cache")

    # Hooks of the worker role, see MultiWorker.
    handle_preemptions = partialmethod(_forward, "handle_preemptions")
    start_load_kv = partialmethod(_forward, "start_load_kv")
    wait_for_layer_load = partialmethod(_forward, "wait_for_layer_load")
    save_kv_layer = partialmethod(_forward, "save_kv_layer")
    wait_for_save = partialmethod(_forward, "wait_for_save")
    finish_forward = partialmethod(_forward, "finish_forward")
    reset_capture_state = partialmethod(_forward, "reset_capture_state")
    get_transfer_results = partialmethod(_forward, "get_transfer_results")
    get_block_ids_with_load_errors = partialmethod(_forward, "get_block_ids_with_load_errors")
    build_connector_worker_meta = partialmethod(_forward, "build_connector_worker_meta")

    # A hook of both roles.
    get_kv_connector_stats = partialmethod(_forward, "get_kv_connector_stats")

    def _set_handshakes(self, hook: str, metadata: Mapping[Any, Any]) -> None:
        """Give each child its own handshakes by rank, as if it were the only connector."""
        by_rank = {
            rank: handshake.metadata
            for rank, handshake in metadata.items()
            if isinstance(handshake, MultiHandshake)
        }
        for child in self.children.all:
            parts = {rank: handshakes[child.index] for rank, handshakes in by_rank.items()}
            own = {rank: part for rank, part in parts.items() if part is not None}
            getattr(child.connector, hook)(own)

    set_xfer_handshake_metadata = partialmethod(_set_handshakes, "set_xfer_handshake_metadata")
    set_xfer_handshake_metadata_pp_aware = partialmethod(
        _set_handshakes, "set_xfer_handshake_metadata_pp_aware"
    )

    def request_finished(self, request: Any, block_ids: list[int]) -> Any:
        """The form of `request_finished_all_groups` for an engine with one group."""
        return self.request_finished_all_groups(request, (block_ids,))

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Give each child its own part, and keep the whole for vLLM's base."""
        self._connector_metadata = connector_metadata
        self._forward("bind_connector_metadata", connector_metadata)

    def clear_connector_metadata(self) -> None:
        """End the step: forget its plan, and let each child forget its own."""
        self._connector_metadata = None
        self._forward("clear_connector_metadata")

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """Returns the handshakes of a worker's children. None = none has one."""
        parts = tuple(child.connector.get_handshake_metadata() for child in self.children.all)
        return MultiHandshake(parts) if any(part is not None for part in parts) else None

    def unregister_kv_caches(self) -> None:
        """Let the children forget the KV memory before the engine sleeps (vLLM 0.33)."""
        self.children.call_hooks("unregister_kv_caches", None)

    def restore_kv_caches(self) -> None:
        """Let the children use the KV memory again after the engine's sleep (vLLM 0.33)."""
        self.children.call_hooks("restore_kv_caches", None)

    def shutdown(self) -> None:
        """Shut down all children, those that are switched off too."""
        message = "%s failed to shut down"
        for child in self.children.all:
            child.attempt("shutdown", message, None, child.connector.shutdown)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> MultiKVConnectorStats:
        """Returns the statistics of a payload that came from an engine's process."""
        return MultiKVConnectorStats.restored(data)

    @classmethod
    def build_prom_metrics(cls, vllm_config: Any, *vllm_arguments: Any) -> MultiMetrics:
        """Returns the metrics of the choices and of the children, for the API server."""
        return MultiMetrics(child_specs(vllm_config), vllm_config, *vllm_arguments)
