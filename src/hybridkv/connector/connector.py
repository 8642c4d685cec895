"""HybridKVConnector: vLLM's hooks, each handed to one role under supervision.

`scheduler.fallbacks` lists the hooks of the scheduler role: what each answers while the role is on,
switched off, and after its end.
"""

import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, TypeVar

import torch
from vllm.distributed.kv_events import KVCacheEvent
from vllm.distributed.kv_transfer.kv_connector.v1 import base, metrics

from hybridkv.client.control import (
    ControlClient,
    DaemonRefusedError,
    DaemonUnreachableError,
    DaemonVersionError,
    runtime_directory,
)
from hybridkv.client.start_daemon import ensure_daemon
from hybridkv.connector.heartbeat import Heartbeat
from hybridkv.connector.messages import NodePlans, StepPlan, StepReport
from hybridkv.connector.scheduler.context import EngineLife, SchedulerContext
from hybridkv.connector.scheduler.fallbacks import NoRole, RoleFallback
from hybridkv.connector.scheduler.listeners import EngineIdentity
from hybridkv.connector.scheduler.loads import RAM
from hybridkv.connector.scheduler.requests import block_tables
from hybridkv.connector.scheduler.role import SchedulerRole
from hybridkv.connector.scheduler.weights import WeightsWatch
from hybridkv.connector.stats import HybridKVStats, export_metrics
from hybridkv.connector.worker.role import WorkerRole
from hybridkv.connector.worker.worker_settings import WorkerSettings
from hybridkv.core.errors import ConfigError
from hybridkv.core.findings import Finding, Verdict, raise_first
from hybridkv.core.geometry import Geometry, length_finding
from hybridkv.core.keys import fingerprint
from hybridkv.core.metrics import Metric
from hybridkv.core.paths import socket_of_server
from hybridkv.core.settings import Settings
from hybridkv.core.state_boundaries import state_findings
from hybridkv.shm.access import group_id
from hybridkv.shm.arena import check_ram, shm_directory
from hybridkv.vllm.batch_faults import batch_faults
from hybridkv.vllm.drafters import drafter_of
from hybridkv.vllm.hashing import ENGINE_HASHES
from hybridkv.vllm.hook_guard import HookGuard
from hybridkv.vllm.identity import identity_facts, weights_fact
from hybridkv.vllm.layout import (
    WorkerLayout,
    build_geometry,
    group_keeping,
    kv_dtype,
    layer_count,
    parallelism_of,
)
from hybridkv.vllm.media import media_refusal
from hybridkv.vllm.plugin import recompute_failed_loads
from hybridkv.vllm.prefix_caching import why_computed_here
from hybridkv.vllm.preflight import (
    config_findings,
    group_findings,
    settings_of,
    state_rule,
    tails_finding,
)
from hybridkv.vllm.prometheus import Increments, attempt
from hybridkv.vllm.seams import engine_loop_on_stack
from hybridkv.vllm.shards import shard_findings
from hybridkv.vllm.versions import CacheHitSource, resolve_hits
from hybridkv.wire.messages import TEXT_MAX, WireModel

logger = logging.getLogger("vllm.hybridkv")

SERVER_CHECK_SECONDS = 1.0
Result = TypeVar("Result")
Finished = tuple[bool, dict[str, Any] | None]
"""(True if blocks are held after a request, the parameters that its client is sent)."""
NO_ROLE = NoRole()


class HybridKVConnector(base.KVConnectorBase_V1, base.SupportsHMA):
    """A KV cache outside the engine. A wrong configuration raises at start-up. No hook raises."""

    CHILD_SETTINGS: ClassVar[Mapping[str, object]] = {"sub_block_hits": False}
    """The settings of a child of MultiConnector, which compares hits of whole blocks."""

    _heartbeat: Heartbeat | None = None
    """Steps of an idle engine. None where vLLM publishes no KV events."""

    def __init__(self, vllm_config: Any, role: base.KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        recompute_failed_loads(vllm_config.kv_transfer_config)
        self._settings = check_config(vllm_config, kv_cache_config)
        resolve_hits(kv_cache_config, vllm_config)
        self.socket_path = self._socket_on(0)
        self.guard = HookGuard(role.name.lower())
        self.uncounted = Increments()
        self.scheduler_role: SchedulerRole | None = None
        self.worker_role: WorkerRole | None = None
        self._context: SchedulerContext | None = None  # Set when the layouts are known.
        self.life: EngineLife | None = None
        """The state that outlives a scheduler role. It is set when the layouts are known."""
        self.tails: Finding | None = None
        """The finding on hits that end inside a block. It is set when the layouts are known."""
        self._blocks_of: Callable[[str], Any] | None = None
        """The engine's function that returns a request's blocks."""
        engine_id = str(vllm_config.kv_transfer_config.engine_id)
        if role == base.KVConnectorRole.SCHEDULER:
            loop = engine_loop_on_stack() if wants_events(vllm_config) else None
            self._heartbeat = None if loop is None else Heartbeat(loop)
            self._start_daemon()
        else:
            parallel, settings = vllm_config.parallel_config, self._settings
            parallelism = parallelism_of(parallel, settings)
            ranks = parallel.tensor_parallel_size * parallelism.stages
            rank = parallel.rank % ranks
            worker_settings = WorkerSettings(
                socket_path=self._socket_on(rank * parallelism.nodes // ranks),
                engine_id=engine_id,
                rank=rank,
                ranks=ranks,
                stages=parallelism.stages,
                checksum=settings.checksum,
                chunk_tokens=settings.hybrid_chunk_size,
                step_tokens=vllm_config.scheduler_config.max_num_batched_tokens,
                shm_dir=settings.daemon.shm_dir,
                group=group_id(settings.daemon.group),
                nodes=parallelism.nodes,
                shards=parallelism.shards,
            )
            self.worker_role = WorkerRole(kv_cache_config, worker_settings)

    @property
    def requires_kv_delivery(self) -> bool:
        """Return False: a lost store is only a later miss."""
        return False

    @property
    def counters(self) -> Mapping[Metric, int]:
        """The counters of this role since its process began, by metric."""
        return dict(self.guard.counters)

    # Worker role

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Take the engine's tensors. Raises GeometryError where a layout is not understood."""
        assert self.worker_role is not None
        self.worker_role.register_tensors(kv_caches)

    def get_handshake_metadata(self) -> base.KVConnectorHandshakeMetadata | None:
        """Return the registered tensors' layout, for the scheduler's geometry and identity."""
        assert self.worker_role is not None
        return self.worker_role.layout

    def unregister_kv_caches(self) -> None:
        """Finish the copies and unpin the arena, before a sleep of the engine (vLLM 0.33)."""
        worker = self.worker_role
        assert worker is not None
        self.guard.run_hook("unregister_kv_caches", worker.detach_arena, lambda: None, pauses=False)

    def restore_kv_caches(self) -> None:
        """Do nothing after a sleep: the next step maps the arena, and tensors keep their place."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begin this step's loads. They are asynchronous, so vLLM's forward pass need not wait."""
        worker, plan = self.worker_role, self._plan
        if worker is not None and plan is not None:
            self.guard.resume(worker.remap_arena)
            self.guard.run_hook(
                "start_load_kv",
                lambda: worker.start_loads(self._plan_on(worker.node)),
                lambda: worker.fail_all(plan),
            )

    @property
    def _plan(self) -> StepPlan | None:
        """The plan of this step, as all nodes have it. None = there is none."""
        plan = self._connector_metadata
        if isinstance(plan, NodePlans):
            return plan.plan
        return plan if isinstance(plan, StepPlan) else None

    def _plan_on(self, node: int) -> Any:
        """Return the plan of this step with one node's slots. It is a part of a hook's work."""
        plan = self._connector_metadata
        return plan.on_node(node) if isinstance(plan, NodePlans) else plan

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing, because loads are asynchronous."""

    def save_kv_layer(self, layer_name: str, *args: Any, **kwargs: Any) -> None:
        """Do nothing: wait_for_save stores all layers, also layers that never call this."""

    def wait_for_save(self) -> None:
        """Copy out what this step completed. On return the engine may overwrite its blocks."""
        worker, plan = self.worker_role, self._plan
        if worker is not None and plan is not None and plan.stores:
            self.guard.run_hook(
                "wait_for_save",
                lambda: worker.start_stores(self._plan_on(worker.node)),
                lambda: worker.fail_stores(plan),
            )

    def get_transfer_results(self, finished_req_ids: set[str]) -> base.KVConnectorTransferResults:
        """Return the loads that ended, and which of them failed (requirements D4)."""
        assert self.worker_role is not None
        finished, failed = self.worker_role.take_finished()
        return base.KVConnectorTransferResults(finished_recving=finished, failed_recving=failed)

    def build_connector_worker_meta(self) -> StepReport | None:
        """Return the worker's report of this step."""
        assert self.worker_role is not None
        report = self.worker_role.take_step_report()
        # The scheduler role also exports what this role's hooks counted.
        report.counters.update(self.uncounted.take(self.guard.counters))
        if not self.guard.is_on:
            # A worker that is off loads nothing, so nothing may be offered.
            report.boots, report.is_disabled = {}, True
        return report

    def handle_preemptions(self, kv_connector_metadata: base.KVConnectorMetadata) -> None:
        """Do nothing: no copy reads a block after the step that owned it (requirements D14)."""

    # Scheduler role

    def set_xfer_handshake_metadata_pp_aware(self, metadata: Mapping[tuple[int, int], Any]) -> None:
        """Take the workers' layouts by (stage, rank in the stage), in vLLM's order of ranks."""
        ranks = self._vllm_config.parallel_config.tensor_parallel_size
        self.set_xfer_handshake_metadata(
            {stage * ranks + rank: layout for (stage, rank), layout in metadata.items()}
        )

    def set_xfer_handshake_metadata(self, metadata: Mapping[int, Any]) -> None:
        """Make the scheduler role at start-up, once the workers' layouts are known by rank."""
        layouts = {
            rank: layout for rank, layout in metadata.items() if isinstance(layout, WorkerLayout)
        }
        context = self._make_context(layouts)
        config, geometry = self._vllm_config, context.geometry
        facts = identity_facts(config, self._kv_cache_config, geometry, layouts, self._settings)
        digests = tuple(layout.weights for _, layout in sorted(layouts.items()))

        def facts_of(later_digests: Sequence[str]) -> Mapping[str, object]:
            return {**facts, "weights": weights_fact(self._settings, later_digests, digests)}

        weights = WeightsWatch(digests, facts_of)
        self._context = context
        self.life = EngineLife(context, self.guard.counters, weights)
        self.make_scheduler_role()
        groups = [f"{group.gid}:{group.kind}/{group.tokens_per_block}" for group in geometry.groups]
        logger.info(
            "hybridkv: groups %s; chunk %d tokens; identity %s; daemon %s",
            ", ".join(groups),
            geometry.chunk_tokens,
            fingerprint(facts).hex()[:12],
            self.socket_path,
        )

    def _make_context(self, layouts: Mapping[int, WorkerLayout]) -> SchedulerContext:
        """Return the engine's facts for its scheduler roles. Warnings about it are logged."""
        config, kv_config, settings = self._vllm_config, self._kv_cache_config, self._settings
        drafter = drafter_of(config)
        lookahead = drafter.lookahead_tokens if drafter else 0
        geometry = build_geometry(
            config=kv_config,
            layouts=layouts,
            chunk_tokens=settings.hybrid_chunk_size,
            parallelism=parallelism_of(config.parallel_config, settings),
            lookahead_tokens=lookahead,
        )
        model, states = config.model_config, state_rule(config)
        _report_length(geometry, model.max_model_len)
        _report(state_findings(geometry, states))
        self.tails = tails_finding(config, kv_config, geometry)
        if settings.sub_block_hits:
            _report([self.tails])
        allows_tails = settings.sub_block_hits is not False
        staging = [
            layout.staging_bytes for layout in layouts.values() if layout.staging_bytes is not None
        ]
        specs = [group.kv_cache_spec for group in kv_config.kv_cache_groups]
        transfer = config.kv_transfer_config
        return SchedulerContext(
            settings=settings,
            geometry=geometry,
            engine_id=str(transfer.engine_id),
            socket_path=self.socket_path,
            step_tokens=config.scheduler_config.max_num_batched_tokens,
            pool_blocks=kv_config.num_blocks - 1,
            inflight_tokens=config.max_in_flight_tokens,
            retention=[group_keeping(group.gid, specs[group.gid]) for group in geometry.groups],
            staging_bytes=min(staging, default=None),
            own_hashes=str(config.cache_config.prefix_caching_hash_algo) not in ENGINE_HASHES,
            with_tails=allows_tails and self.tails.verdict is Verdict.OK,
            why_computed=why_computed_here(config),
            stores_answers=settings.store_generated and transfer.kv_role != "kv_producer",
            promises=transfer.kv_role != "kv_consumer",
            is_producer=transfer.kv_role == "kv_producer",
            is_consumer=transfer.kv_role == "kv_consumer",
            media_refusal=media_refusal(config),
            drafter=drafter,
            faults=batch_faults(config, specs),
            model=WireModel(
                name=str(model.served_model_name)[-TEXT_MAX:],
                max_model_len=model.max_model_len,
                kv_dtype=kv_dtype(config, layouts[0]),
                layers=[
                    layer_count(layouts, group.gid, geometry.stages) for group in geometry.groups
                ],
                retention_tokens=states.retention_tokens,
                step_tokens=states.step_tokens,
                keeps_junctions=states.keeps_junctions,
            ),
            publishes_events=wants_events(config),
        )

    def make_scheduler_role(self) -> None:
        """Make a scheduler role of the identity that the engine has now."""
        assert self._context is not None
        assert self.life is not None
        weights = self.life.weights
        identity = EngineIdentity.of_facts(weights.facts_of(weights.identity_digests))
        self.scheduler_role = SchedulerRole(self._context, self.life, identity)
        weights.is_identified = True

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        """Keep the engine's `get_blocks`: `get_block_ids` would read every block of a request.

        Resets are followed here too, because vLLM calls `reset_cache` only for some of them.
        """
        super().bind_kv_cache_manager(kv_cache_manager)
        self._blocks_of = kv_cache_manager.get_blocks
        reset = kv_cache_manager.reset_prefix_cache

        def reset_prefix_cache() -> bool:
            is_empty = False
            try:
                is_empty = bool(reset())
            finally:
                self._on_reset("reset_prefix_cache", is_empty)
            return is_empty

        kv_cache_manager.reset_prefix_cache = reset_prefix_cache

    def on_new_request(self, request: Any) -> None:
        """Look the request up when it arrives."""
        self._run("on_new_request", lambda role: role.on_new_request(request))

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return the tokens that can be loaded beyond the engine's own hit.

        (tokens, True) = asynchronous load, (None, False) = ask again, (0, False) = no hit.
        """
        hook = "get_num_new_matched_tokens"
        tokens = self._run(hook, lambda role: role.offer_hit(request, num_computed_tokens))
        return tokens, bool(tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Plan the load into the blocks that the engine has for it. 0 tokens = it loads nothing."""
        tables = partial(block_tables, blocks)
        self._run(
            "update_state_after_alloc",
            lambda role: role.on_allocated(request, tables, num_external_tokens),
        )

    def build_connector_meta(self, scheduler_output: Any) -> base.KVConnectorMetadata:
        """Return this step's plan for the workers."""
        return self._run(
            "build_connector_meta", lambda role: role.plan_step(scheduler_output, self.tables_of)
        )

    def update_connector_output(self, connector_output: Any) -> None:
        """Take the workers' results of a step."""
        message = connector_output.kv_connector_worker_meta
        report = message if isinstance(message, StepReport) else None
        finished = connector_output.finished_recving or ()
        failed = connector_output.failed_recving or ()
        self._run("update_connector_output", lambda role: role.on_report(finished, failed, report))

    def has_pending_push_work(self) -> bool:
        """Return True while stores are not committed: the engine steps on without requests."""
        wants_step = self._heartbeat is not None and self._heartbeat.wants_step
        return wants_step or self._run(
            "has_pending_push_work", lambda role: role.has_pending_work()
        )

    def request_finished(self, request: Any, block_ids: list[int]) -> Finished:
        """End a request, of which no block is held afterwards (requirements D10)."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Finished:
        """End a request, of which no block is held afterwards (requirements D10)."""
        self._run("request_finished", lambda role: role.on_finished(request.request_id))
        return False, None

    def get_external_cache_hit_sources(
        self, request: Any, num_external_tokens: int
    ) -> dict[CacheHitSource, int]:
        """Return a load's tokens by source. They add up to `num_external_tokens` (B30)."""
        hook, tokens = "get_external_cache_hit_sources", max(0, num_external_tokens)
        by_tier = self._run(hook, lambda role: role.load_sources(request.request_id, tokens))
        return hit_sources(by_tier, tokens)

    def get_kv_connector_stats(self) -> metrics.KVConnectorStats | None:
        """Return what is new since the last step, with the counters that workers reported."""
        off_since, off_seconds = self.guard.off_since, self.guard.pause_seconds
        hook = "get_kv_connector_stats"
        return self._run(
            hook, lambda role: role.take_stats(off_since, off_seconds), shows_counters=True
        )

    def take_events(self) -> Iterable[KVCacheEvent]:
        """Return the KV events about the daemon's RAM. This is the last hook of a step.

        There are none where vLLM publishes no events. A scheduler role that is switched off is
        replaced here, after its pause, because no request is between its offer and its plan.
        """
        if self._heartbeat is not None:
            self._heartbeat.on_step()
        events = self._run("take_events", lambda role: role.on_step_end())
        self.guard.resume(self._renew)
        return events

    def withdraw(self) -> Iterable[KVCacheEvent]:
        """End the session of a connector that is switched off. Returns its last KV events.

        MultiConnector calls this, and no hook afterwards.
        """
        if self._heartbeat is not None:
            self._heartbeat.close()
            self._heartbeat = None
        if self.scheduler_role is None:
            return ()
        self.scheduler_role.close()
        return self.scheduler_role.final_events()

    @classmethod
    def build_kv_connector_stats(cls, data: Any = None) -> metrics.KVConnectorStats | None:
        """Return the statistics of a payload that has travelled between processes."""
        work = partial(HybridKVStats, data)
        return attempt(cls.__name__, "build_kv_connector_stats", work, lambda: None)

    @classmethod
    def build_prom_metrics(cls, *vllm_arguments: Any) -> metrics.KVConnectorPromMetrics:
        """Return this connector's metrics at the API server's /metrics."""
        return export_metrics(*vllm_arguments)

    def reset_cache(self) -> bool:
        """Ask for the weights, which may have changed. Stored objects stay."""
        self._on_reset("reset_cache", False)
        return True

    def shutdown(self) -> None:
        """End the session and unmap the arena."""
        if self._heartbeat is not None:
            self._heartbeat.close()
        if self.scheduler_role is not None:
            self.scheduler_role.close()
            self.scheduler_role = None
        if self.worker_role is not None:
            self.worker_role.close()

    def _on_reset(self, hook: str, is_empty: bool) -> None:
        if not self._run(hook, lambda role: role.on_reset(is_empty)):
            # Nothing else keeps hits that were found before from being loaded.
            self.guard.pause(f"a fault in {hook}")

    def _run(
        self,
        hook: str,
        work: Callable[[SchedulerRole | NoRole], Result],
        *,
        shows_counters: bool = False,
    ) -> Result:
        """Return `work` of the scheduler role, or of its fallback where that fails or is off.

        `work` only calls one method. Whatever else it did would fail for the fallback too.
        `shows_counters` is that of HookGuard.run_hook.
        """
        role = self.scheduler_role
        if role is None:
            return work(NO_ROLE)
        return self.guard.run_hook(
            hook,
            lambda: role.run_work(work),
            lambda: work(RoleFallback(role, self.guard)),
            shows_counters=shows_counters,
        )

    def _renew(self) -> None:
        """Put a new scheduler role in the place of one that was switched off."""
        if self.scheduler_role is not None:
            self.scheduler_role.close()
            self.scheduler_role.hand_over()
            self.make_scheduler_role()

    def tables_of(self, request_id: str) -> Sequence[Sequence[int]]:
        assert self._blocks_of is not None, "bound when the engine's scheduler was made"
        return block_tables(self._blocks_of(request_id))

    def _socket_on(self, node: int) -> str:
        """Return the path of the daemon's socket on a node."""
        return socket_of_server(self._settings.server, runtime_directory(), os.geteuid(), node)

    def _start_daemon(self) -> None:
        """Start a daemon where the setting is "auto", else check the daemon at the socket."""
        is_auto, ram_bytes = self._settings.server == "auto", self._settings.daemon.ram_bytes
        if is_auto and ram_bytes is not None:
            directory = shm_directory(self._settings.daemon.shm_dir)
            check_ram(ram_bytes, "kv_connector_extra_config.ram", directory)
        try:
            if is_auto:
                ensure_daemon(self.socket_path, self._settings.daemon_options)
                return
            group = group_id(self._settings.daemon.group)
            with ControlClient(self.socket_path, SERVER_CHECK_SECONDS, group=group):
                pass
        except DaemonVersionError as error:
            logger.warning("hybridkv: everything is computed until there is a daemon: %s", error)
        except DaemonRefusedError as error:
            what = f"kv_connector_extra_config.server: {error}"
            raise ConfigError(what, '"auto" works') from error
        except DaemonUnreachableError as error:
            logger.warning("hybridkv: everything is computed until there is a daemon: %s", error)


SOURCES = (
    (RAM, CacheHitSource.HOST),
    ("disk", CacheHitSource.DISK),
    ("s3", CacheHitSource.DISK),
    ("gs", CacheHitSource.DISK),
    ("az", CacheHitSource.DISK),
    ("mooncake", CacheHitSource.P2P),
)
"""vLLM's source of each tier, by the start of the tier's name. Object stores count as DISK."""


def hit_sources(by_tier: Mapping[str, int], tokens: int) -> dict[CacheHitSource, int]:
    """Return tokens by vLLM's sources. Their sum is `tokens`.

    The source is unspecified for tiers without a source, and for all tokens where the tiers do not
    add up to `tokens`. `hit_sources({"ram": 100, "disk2": 50}, 150) -> {HOST: 100, DISK: 50}`
    """
    sources: Counter[CacheHitSource] = Counter()
    if sum(by_tier.values()) != tokens or min(by_tier.values(), default=0) < 0:
        by_tier = {"": tokens}
    for tier, tier_tokens in by_tier.items():
        known = (source for prefix, source in SOURCES if tier.startswith(prefix))
        sources[next(known, CacheHitSource.EXTERNAL_UNSPECIFIED)] += tier_tokens
    return {source: source_tokens for source, source_tokens in sources.items() if source_tokens}


def check_config(vllm_config: Any, kv_cache_config: Any) -> Settings:
    """Return the settings of an engine. Raises ConfigError where it cannot be served."""
    _report(config_findings(vllm_config))
    _report(group_findings(kv_cache_config, vllm_config))
    settings = settings_of(vllm_config)
    _report(shard_findings(kv_cache_config, vllm_config, settings))
    return settings


def wants_events(vllm_config: Any) -> bool:
    """Return True if vLLM's configuration publishes KV events."""
    config = vllm_config.kv_events_config
    return config is not None and bool(config.enable_kv_cache_events)


def _report_length(geometry: Geometry, max_model_len: int) -> None:
    """Log an error where no prompt has a whole chunk. Other findings of the length are reported."""
    length = length_finding(geometry, max_model_len)
    if length.verdict is Verdict.FAIL:
        # Nothing is ever cached, which is no reason not to serve (B8).
        logger.error("hybridkv: %s", length.sentence)
    else:
        _report([length])


def _report(findings: Iterable[Finding]) -> None:
    """Raise ConfigError for the first FAIL, and log every warning."""
    for finding in raise_first(findings):
        if finding.verdict is Verdict.WARN:
            logger.warning("hybridkv: %s", finding.sentence)
