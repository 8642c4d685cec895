"""MultiConnector: several connectors at once, of which the best hit by weight is loaded.

No connector can block or end the engine. vLLM's own MultiConnector is the base, and its start-up is
kept (children, memory pool, registration, layouts, counts): a mistake there raises. Every hook that
vLLM calls afterwards is here, and each child is called under a supervisor of its own.
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

from hybridkv.multi.children import ChildConnectors, check_hma, child_specs, parse_multi
from hybridkv.multi.ranking import WEIGHT_AUTO
from hybridkv.multi.scheduler import MultiScheduler
from hybridkv.multi.stats import MultiKVConnectorStats, MultiPromMetrics
from hybridkv.multi.worker import MultiWorker
from hybridkv.vllm.block_room import BlockRoom
from hybridkv.vllm.hook_guard import logger
from hybridkv.vllm.layout import group_keeping


@dataclass(frozen=True)
class MultiHandshake(KVConnectorHandshakeMetadata):
    """A worker's handshake: each child's own (vLLM gives the first one to all)."""

    metadata: tuple[KVConnectorHandshakeMetadata | None, ...]


class MultiConnector(multi_connector.MultiConnector):
    """Asks all children, loads from the best, stores to all (requirements B19-B31).

    vLLM knows it by this name. Inherited are the properties and the hooks of the start:
    `register_kv_caches`, `bind_kv_cache_manager`, `bind_gpu_block_pool` and
    `set_host_xfer_buffer_ops` go to every child; `get_mem_pool_context` is that of the only child
    that has one, `get_finished_count` the children's common one. `get_finished` is
    `get_transfer_results`.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        settings = parse_multi(vllm_config.kv_transfer_config.kv_connector_extra_config)
        super().__init__(vllm_config, role, kv_cache_config)
        specs = child_specs(vllm_config)
        self._children = ChildConnectors(role.name.lower(), specs, self._connectors)
        groups = kv_cache_config.kv_cache_groups
        if role == KVConnectorRole.WORKER:
            self._part: MultiScheduler | MultiWorker = MultiWorker(self._children, len(groups))
            return
        kept = [group_keeping(gid, group.kv_cache_spec) for gid, group in enumerate(groups)]
        inflight_tokens = vllm_config.max_in_flight_tokens
        self._part = MultiScheduler(
            self._children,
            settings,
            tuple(kv_cache_config.prefix_cacheable_group_ids),
            kept,
            BlockRoom(kept, kv_cache_config.num_blocks - 1, inflight_tokens),
        )
        weights = (f"{s.name} {'auto' if s.weight == WEIGHT_AUTO else s.weight}" for s in specs)
        logger.info("hybridkv: MultiConnector loads from the best of: %s", ", ".join(weights))

    @classmethod
    def _get_connector_classes_and_configs(cls, vllm_config: Any) -> list[tuple[type, Any]]:
        """The children for vLLM's own code, which asks first for the layout that it needs."""
        check_hma(vllm_config)
        return [(spec.connector, spec.config) for spec in child_specs(vllm_config)]

    @property
    def counters(self) -> Mapping[str, int]:
        """The counts of this role: its own by name, each child's as "child: name"."""
        return dict(self._children.totals())

    def _forward(self, hook: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._part, hook)(*args, **kwargs)

    def _shake(self, hook: str, metadata: Mapping[Any, Any]) -> None:
        """Give each child its own handshakes by rank, as if it were the only connector."""
        said = {rank: one for rank, one in metadata.items() if isinstance(one, MultiHandshake)}
        for child in self._children.all:
            parts = {rank: one.metadata[child.index] for rank, one in said.items()}
            own = {rank: part for rank, part in parts.items() if part is not None}
            getattr(child.connector, hook)(own)

    set_xfer_handshake_metadata = partialmethod(_shake, "set_xfer_handshake_metadata")
    set_xfer_handshake_metadata_pp_aware = partialmethod(
        _shake, "set_xfer_handshake_metadata_pp_aware"
    )

    def request_finished(self, request: Any, block_ids: list[int]) -> Any:
        """As `request_finished_all_groups`, of an engine with one group."""
        return self.request_finished_all_groups(request, (block_ids,))

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Give each child its own part, and keep the whole for vLLM's base."""
        self._connector_metadata = connector_metadata
        self._forward("bind_connector_metadata", connector_metadata)

    def clear_connector_metadata(self) -> None:
        """Undo `bind_connector_metadata`."""
        self._connector_metadata = None
        self._forward("clear_connector_metadata")

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """The children's handshakes, at start-up."""
        parts = tuple(child.connector.get_handshake_metadata() for child in self._children.all)
        return MultiHandshake(parts) if any(part is not None for part in parts) else None

    def unregister_kv_caches(self) -> None:
        """Before a sleep of the engine (vLLM 0.33)."""
        self._children.call("unregister_kv_caches", None)

    def restore_kv_caches(self) -> None:
        """After a sleep."""
        self._children.call("restore_kv_caches", None)

    def shutdown(self) -> None:
        """Shut down all children, those that are switched off too."""
        says = "%s failed to shut down"
        for child in self._children.all:
            child.attempt("fault_shutdown", says, None, child.connector.shutdown)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> MultiKVConnectorStats:
        """The statistics of a payload."""
        return MultiKVConnectorStats.restored(data)

    @classmethod
    def build_prom_metrics(cls, vllm_config: Any, *vllm_arguments: Any) -> MultiPromMetrics:
        """The metrics of the choices and of the children."""
        return MultiPromMetrics(child_specs(vllm_config), vllm_config, *vllm_arguments)


# Each other hook of the role's part is a hook of MultiConnector.
for _hook in {*vars(MultiScheduler), *vars(MultiWorker)} - vars(MultiConnector).keys():
    if not _hook.startswith("_"):
        setattr(MultiConnector, _hook, partialmethod(MultiConnector._forward, _hook))
