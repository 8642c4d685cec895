"""HybridKVConnector: vLLM's hooks, each handed to one side under supervision."""

import logging
import os
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from vllm.distributed.kv_events import KVCacheEvent
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from hybridkv.client.control import Control, DaemonRefusedError, DaemonUnreachableError
from hybridkv.client.spawn import ensure_daemon
from hybridkv.connector.about import wire_model
from hybridkv.connector.events import Events
from hybridkv.connector.hashing import ENGINE_HASHES
from hybridkv.connector.identity import identity_facts
from hybridkv.connector.layout import build_geometry
from hybridkv.connector.metadata import StepPlan, StepReport, WorkerLayout
from hybridkv.connector.preflight import config_findings, group_findings, settings_of, state_rule
from hybridkv.connector.scheduler import SchedulerSide
from hybridkv.connector.stats import Deltas, HybridKVPromMetrics, HybridKVStats
from hybridkv.connector.supervise import Supervisor
from hybridkv.connector.tracked import block_tables
from hybridkv.connector.worker import WorkerSide
from hybridkv.core.errors import ConfigError
from hybridkv.core.findings import Finding, Verdict, raise_first
from hybridkv.core.geometry import Geometry
from hybridkv.core.keys import fingerprint
from hybridkv.core.paths import socket_of_server
from hybridkv.core.plan import length_finding, state_findings
from hybridkv.core.settings import Settings
from hybridkv.core.sources import RAM
from hybridkv.shm.arena import check_ram

logger = logging.getLogger("vllm.hybridkv")

SERVER_CHECK_SECONDS = 1.0


class HybridKVConnector(KVConnectorBase_V1, SupportsHMA):
    """A KV cache outside the engine. Misconfiguration raises here, at start-up; nothing raises later."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._settings = check_config(vllm_config, kv_cache_config)
        self._socket_path = socket_of_server(self._settings.server, os.environ, os.geteuid())
        self._supervisor = Supervisor(role.name.lower())
        self._uncounted = Deltas(self._supervisor.counters)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._facts: dict[str, object] = {}
        self._has_events = False
        self._blocks_of: Callable[[str], Any] | None = None
        """The engine's own look at a request's blocks."""
        engine_id = str(vllm_config.kv_transfer_config.engine_id)
        if role == KVConnectorRole.SCHEDULER:
            self._start_daemon()
        else:
            parallel = vllm_config.parallel_config
            self._worker = WorkerSide(
                kv_cache_config,
                self._socket_path,
                engine_id,
                parallel.rank % parallel.tensor_parallel_size,
                parallel.tensor_parallel_size,
                self._settings.checksum,
            )

    @property
    def requires_kv_delivery(self) -> bool:
        """A lost store is only a later miss."""
        return False

    @property
    def counters(self) -> Mapping[str, int]:
        """Every decline, fault and count of this role by name."""
        return dict(self._supervisor.counters)

    # Worker role

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """At start-up; a layout that is not understood is refused here."""
        assert self._worker is not None
        self._worker.register(kv_caches)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """The registered tensors' layout, for the scheduler's geometry and identity."""
        assert self._worker is not None
        return self._worker.layout

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begin this step's loads (after the forward pass: all loads are asynchronous)."""
        worker, plan = self._worker, self._connector_metadata
        if worker is not None and isinstance(plan, StepPlan):
            self._supervisor.run("start_load_kv", lambda: worker.start_loads(plan), lambda: worker.fail_all(plan))

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: loads are asynchronous."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing: stores happen in wait_for_save, which also covers layers that never call this."""

    def wait_for_save(self) -> None:
        """Copy out what this step completed; its blocks are the engine's again on return."""
        worker, plan = self._worker, self._connector_metadata
        if worker is not None and isinstance(plan, StepPlan) and plan.stores:
            self._supervisor.run("wait_for_save", lambda: worker.start_stores(plan), lambda: worker.fail_stores(plan))

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Loads that ended; failed ones are named, never passed off as good (requirements D4)."""
        assert self._worker is not None
        finished, failed = self._worker.collect()
        return KVConnectorTransferResults(finished_recving=finished, failed_recving=failed)

    def build_connector_worker_meta(self) -> StepReport | None:
        """What else happened in this step."""
        assert self._worker is not None
        report = self._worker.report()
        # The scheduler role exports what this role's hooks counted as well.
        report.counters.update(self._uncounted.take())
        if not self._supervisor.healthy:
            # It loads nothing any more, so nothing may be offered.
            report.boots = {}
        return report

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Nothing: no copy reads a block after the step that owned it (both signatures, requirements D14)."""

    # Scheduler role

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        """At start-up, once the workers' layouts are known: geometry, identity, session."""
        layouts = {rank: layout for rank, layout in metadata.items() if isinstance(layout, WorkerLayout)}
        geometry = build_geometry(self._kv_cache_config, layouts, self._settings.hybrid_chunk_size)
        config = self._vllm_config
        _report([length_finding(geometry, config.model_config.max_model_len)])
        _report(state_findings(geometry, state_rule(config)))
        self._has_events = wants_events(config)
        self._facts = identity_facts(config, self._kv_cache_config, geometry, layouts, self._settings)
        namespace = fingerprint(self._facts)
        self._scheduler = SchedulerSide(
            self._settings,
            geometry,
            namespace,
            str(config.kv_transfer_config.engine_id),
            self._socket_path,
            config.scheduler_config.max_num_batched_tokens,
            self._supervisor.counters,
            self._kv_cache_config.num_blocks - 1,
            own_hashes=str(config.cache_config.prefix_caching_hash_algo) not in ENGINE_HASHES,
            facts=self._facts,
            model=wire_model(config, layouts[0]),
            events=Events(geometry, self._supervisor.counters) if self._has_events else None,
        )
        _announce(geometry, namespace, self._socket_path)

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        """Block tables are read where the engine keeps them: its `get_block_ids` lists every block of a request."""
        super().bind_kv_cache_manager(kv_cache_manager)
        self._blocks_of = kv_cache_manager.get_blocks

    def on_new_request(self, request: Any) -> None:
        """Send the lookup on arrival."""
        scheduler = self._scheduler
        if scheduler is not None:
            self._supervisor.run("on_new_request", lambda: scheduler.arrived(request), lambda: None)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """(tokens, True) for a hit, (None, False) = ask again, (0, False) = none. Loads are always asynchronous."""
        scheduler = self._scheduler
        if scheduler is None:
            return 0, False
        tokens = self._supervisor.run(
            "get_num_new_matched_tokens", lambda: scheduler.matched(request, num_computed_tokens), lambda: 0
        )
        return tokens, bool(tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Plan the load into the blocks that the engine gives, or learn that there is none."""
        scheduler = self._scheduler
        if scheduler is not None:
            self._supervisor.run(
                "update_state_after_alloc",
                lambda: scheduler.allocated(request, block_tables(blocks), num_external_tokens),
                lambda: scheduler.must_fail(request.request_id, num_external_tokens),
            )

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """This step's plan."""
        scheduler = self._scheduler
        if scheduler is None:
            return StepPlan()

        def otherwise() -> StepPlan:
            return scheduler.emergency() if self._supervisor.healthy else scheduler.quit()

        return self._supervisor.run(
            "build_connector_meta", lambda: scheduler.planned(scheduler_output, self._tables), otherwise
        )

    def update_connector_output(self, connector_output: Any) -> None:
        """What the workers did."""
        scheduler = self._scheduler
        if scheduler is None:
            return
        report = connector_output.kv_connector_worker_meta
        self._supervisor.run(
            "update_connector_output",
            lambda: scheduler.reported(
                set(connector_output.finished_recving or ()),
                set(connector_output.failed_recving or ()),
                report if isinstance(report, StepReport) else None,
            ),
            lambda: None,
        )

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Never holds blocks."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Never holds blocks (requirements D10)."""
        scheduler = self._scheduler
        if scheduler is not None:
            self._supervisor.run("request_finished", lambda: scheduler.finished(request.request_id), lambda: None)
        return False, None

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[CacheHitSource, int]:
        """The tokens of a planned load by where they were; always `num_external_tokens` in all (requirements B30)."""
        scheduler = self._scheduler
        tokens = max(0, num_external_tokens)
        by_tier: dict[str, int] = {}
        if scheduler is not None and tokens:
            by_tier = self._supervisor.run(
                "get_external_cache_hit_sources", lambda: scheduler.sources(request.request_id, tokens), dict
            )
        return hit_sources(by_tier, tokens)

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """What is new since the last step; the workers' numbers come to the scheduler role with their reports."""
        scheduler = self._scheduler
        if scheduler is None:
            return None
        return self._supervisor.run("get_kv_connector_stats", scheduler.take_stats, lambda: None, tells=True)

    def take_events(self) -> Iterable[KVCacheEvent]:
        """The last call of every step; what routers are to hear of the daemon's RAM where vLLM's KV events are on."""
        scheduler = self._scheduler
        if scheduler is None:
            return ()
        return self._supervisor.run("take_events", scheduler.step_ended, scheduler.withdraw)

    def withdraw(self) -> Iterable[KVCacheEvent]:
        """The last events where nobody will call the scheduler role again, as MultiConnector does; ends the session."""
        scheduler = self._scheduler
        if scheduler is None:
            return ()
        scheduler.close()
        return scheduler.withdraw() if self._has_events else ()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        """The statistics of a payload that has travelled."""
        return HybridKVStats(data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics:
        """Our metrics at the API server's /metrics."""
        return HybridKVPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def reset_cache(self) -> bool:
        """vLLM's weights may have changed: nothing stored so far is this engine's any more.

        The epoch is random, because two engines that were both updated once do not have the same weights.
        """
        scheduler = self._scheduler
        if scheduler is None:
            return True

        def reset() -> bool:
            facts = {**self._facts, "epoch": uuid.uuid4().hex}
            scheduler.identify(fingerprint(facts), facts)
            return True

        def give_up() -> bool:
            # What was found before is not this engine's any more, and nothing else keeps it from being loaded.
            self._supervisor.switch_off("a fault in reset_cache")
            scheduler.close()
            return True

        return self._supervisor.run("reset_cache", reset, give_up)

    def shutdown(self) -> None:
        """End the session and let go of the arena."""
        if self._scheduler is not None:
            self._scheduler.close()
            self._scheduler = None
        if self._worker is not None:
            self._worker.close()

    def _tables(self, request_id: str) -> Sequence[Sequence[int]]:
        assert self._blocks_of is not None, "bound when the engine's scheduler was made"
        return block_tables(self._blocks_of(request_id))

    def _start_daemon(self) -> None:
        """At start-up: have a daemon with "auto"; with a socket, say at once what is wrong with it."""
        if self._settings.server == "auto":
            if self._settings.ram_bytes is not None:
                check_ram(self._settings.ram_bytes, "kv_connector_extra_config.ram")
            ensure_daemon(self._socket_path, self._settings.daemon_options())
            return
        try:
            with Control(self._socket_path, SERVER_CHECK_SECONDS):
                pass
        except DaemonRefusedError as error:
            raise ConfigError(f'kv_connector_extra_config.server: {error}; "auto" works') from error
        except DaemonUnreachableError as error:
            logger.warning("hybridkv: everything is computed until there is a daemon: %s", error)


SOURCES = (
    (RAM, CacheHitSource.HOST),
    ("disk", CacheHitSource.DISK),
    ("s3", CacheHitSource.DISK),
    ("mooncake", CacheHitSource.P2P),
)
"""What vLLM calls the tiers, by how their names begin; an object store is DISK to its own tiers as well."""


def hit_sources(by_tier: Mapping[str, int], tokens: int) -> dict[CacheHitSource, int]:
    """Tokens by vLLM's sources; `tokens` in all, of which those of unknown origin have the source for that."""
    sources: Counter[CacheHitSource] = Counter()
    if sum(by_tier.values()) != tokens or min(by_tier.values(), default=0) < 0:
        by_tier = {"": tokens}
    for tier, part in by_tier.items():
        known = (source for name, source in SOURCES if tier.startswith(name))
        sources[next(known, CacheHitSource.EXTERNAL_UNSPECIFIED)] += part
    return {source: part for source, part in sources.items() if part}


def check_config(vllm_config: Any, kv_cache_config: Any) -> Settings:
    """The settings, if this engine's configuration can be served at all; raises ConfigError."""
    _report(config_findings(vllm_config))
    _report(group_findings(kv_cache_config, vllm_config.speculative_config))
    return settings_of(vllm_config)


def wants_events(vllm_config: Any) -> bool:
    """Whether vLLM publishes KV events."""
    config = vllm_config.kv_events_config
    return config is not None and bool(config.enable_kv_cache_events)


def _report(findings: Iterable[Finding]) -> None:
    """Raise the first FAIL, log every warning."""
    for finding in raise_first(findings):
        if finding.verdict is Verdict.WARN:
            logger.warning("hybridkv: %s", finding.sentence)


def _announce(geometry: Geometry, namespace: bytes, socket_path: str) -> None:
    kinds = ", ".join(f"{group.gid}:{group.kind}/{group.tokens_per_block}" for group in geometry.groups)
    logger.info(
        "hybridkv: groups %s; chunk %d tokens; identity %s; daemon %s",
        kinds,
        geometry.chunk_tokens,
        namespace.hex()[:12],
        socket_path,
    )
