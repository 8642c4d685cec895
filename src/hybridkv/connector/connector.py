"""HybridKVConnector: vLLM's hooks, each handed to one role under supervision."""

import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
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
from hybridkv.connector.messages import StepPlan, StepReport
from hybridkv.connector.scheduler.hits import RAM
from hybridkv.connector.scheduler.kv_events import NO_GROUP, KVEventPublisher, event_group
from hybridkv.connector.scheduler.requests import block_tables
from hybridkv.connector.scheduler.role import SchedulerRole
from hybridkv.connector.scheduler.weights import WeightsWatch
from hybridkv.connector.stats import HybridKVPromMetrics, HybridKVStats
from hybridkv.connector.worker.role import WorkerRole
from hybridkv.connector.worker.worker_settings import WorkerSettings
from hybridkv.core.errors import ConfigError
from hybridkv.core.findings import Finding, Verdict, raise_first
from hybridkv.core.geometry import length_finding
from hybridkv.core.keys import fingerprint
from hybridkv.core.paths import socket_of_server
from hybridkv.core.settings import Settings
from hybridkv.core.state_boundaries import state_findings
from hybridkv.shm.access import group_id
from hybridkv.shm.arena import check_ram, shm_directory
from hybridkv.vllm.drafters import drafter_of
from hybridkv.vllm.hashing import ENGINE_HASHES
from hybridkv.vllm.hook_guard import HookGuard
from hybridkv.vllm.identity import identity_facts, weights_fact
from hybridkv.vllm.layout import WorkerLayout, build_geometry, group_keeping, kv_dtype
from hybridkv.vllm.metrics import Deltas
from hybridkv.vllm.preflight import (
    config_findings,
    group_findings,
    settings_of,
    state_rule,
    tails_finding,
)
from hybridkv.vllm.versions import CacheHitSource, resolve_hits
from hybridkv.wire.messages import TEXT_MAX, WireModel

logger = logging.getLogger("vllm.hybridkv")

SERVER_CHECK_SECONDS = 1.0
Result = TypeVar("Result")
Default = TypeVar("Default")
Finished = tuple[bool, dict[str, Any] | None]
"""Whether blocks are held after a request, and what its client is sent."""


class HybridKVConnector(base.KVConnectorBase_V1, base.SupportsHMA):
    """A KV cache outside the engine. A wrong configuration raises at start-up; no hook raises."""

    CHILD_SETTINGS: ClassVar[Mapping[str, object]] = {"sub_block_hits": False}
    """Settings that a child of MultiConnector has, which compares hits of whole blocks."""

    def __init__(self, vllm_config: Any, role: base.KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._settings = check_config(vllm_config, kv_cache_config)
        resolve_hits(kv_cache_config, vllm_config)
        place = runtime_directory(), os.geteuid()
        self._socket_path = socket_of_server(self._settings.server, *place)
        self._guard = HookGuard(role.name.lower())
        self._uncounted = Deltas(self._guard.counters)
        self._scheduler: SchedulerRole | None = None
        self._worker: WorkerRole | None = None
        self._weights = WeightsWatch()
        self._make_scheduler: Callable[[], None]
        """Makes a scheduler role of the present identity; set when the layouts are known."""
        self.tails: Finding | None = None
        """Whether hits can end inside a block; set when the layouts are known."""
        self._blocks_of: Callable[[str], Any] | None = None
        """The engine's function that returns a request's blocks."""
        engine_id = str(vllm_config.kv_transfer_config.engine_id)
        if role == base.KVConnectorRole.SCHEDULER:
            self._start_daemon()
        else:
            ranks = vllm_config.parallel_config.tensor_parallel_size
            rank = vllm_config.parallel_config.rank % ranks
            settings = self._settings
            worker_settings = WorkerSettings(
                socket_path=self._socket_path,
                engine_id=engine_id,
                rank=rank,
                ranks=ranks,
                checksum=settings.checksum,
                chunk_tokens=settings.hybrid_chunk_size,
                step_tokens=vllm_config.scheduler_config.max_num_batched_tokens,
                shm_dir=settings.daemon.shm_dir,
                group=group_id(settings.daemon.group),
            )
            self._worker = WorkerRole(kv_cache_config, worker_settings)

    @property
    def requires_kv_delivery(self) -> bool:
        """False: a lost store is only a later miss."""
        return False

    @property
    def counters(self) -> Mapping[str, int]:
        """The counters of this role by name."""
        return dict(self._guard.counters)

    # Worker role

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Take the engine's tensors; raises GeometryError where a layout is not understood."""
        assert self._worker is not None
        self._worker.register(kv_caches)

    def get_handshake_metadata(self) -> base.KVConnectorHandshakeMetadata | None:
        """The registered tensors' layout, for the scheduler's geometry and identity."""
        assert self._worker is not None
        return self._worker.layout

    def unregister_kv_caches(self) -> None:
        """Before a sleep of the engine (vLLM 0.33): finish the copies and unpin the arena."""
        worker = self._worker
        assert worker is not None
        self._guard.run("unregister_kv_caches", worker.detach, lambda: None, pauses=False)

    def restore_kv_caches(self) -> None:
        """After a sleep; the next step maps the arena anew, and the tensors are where they were."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begin this step's loads. All are asynchronous, so vLLM's forward pass comes first."""
        worker, plan = self._worker, self._connector_metadata
        if worker is not None and isinstance(plan, StepPlan):
            self._guard.begin_anew(worker.begin_anew)
            self._guard.run(
                "start_load_kv", lambda: worker.start_loads(plan), lambda: worker.fail_all(plan)
            )

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: loads are asynchronous."""

    def save_kv_layer(self, layer_name: str, *args: Any, **kwargs: Any) -> None:
        """Nothing: wait_for_save stores all layers, also those that never call this."""

    def wait_for_save(self) -> None:
        """Copy out what this step completed; on return its blocks are the engine's again."""
        worker, plan = self._worker, self._connector_metadata
        if worker is not None and isinstance(plan, StepPlan) and plan.stores:
            self._guard.run(
                "wait_for_save", lambda: worker.start_stores(plan), lambda: worker.fail_stores(plan)
            )

    def get_transfer_results(self, finished_req_ids: set[str]) -> base.KVConnectorTransferResults:
        """Loads that ended, and which of them failed (requirements D4)."""
        assert self._worker is not None
        finished, failed = self._worker.collect()
        return base.KVConnectorTransferResults(finished_recving=finished, failed_recving=failed)

    def build_connector_worker_meta(self) -> StepReport | None:
        """What else the worker did in this step."""
        assert self._worker is not None
        report = self._worker.report()
        # The scheduler role also exports what this role's hooks counted.
        report.counters.update(self._uncounted.take())
        if not self._guard.healthy:
            # This worker loads nothing any more, so nothing may be offered.
            report.boots, report.is_disabled = {}, True
        return report

    def handle_preemptions(self, kv_connector_metadata: base.KVConnectorMetadata) -> None:
        """Nothing: no copy reads a block after the step that owned it (requirements D14)."""

    # Scheduler role

    def set_xfer_handshake_metadata(self, metadata: Mapping[int, Any]) -> None:
        """At start-up, once the workers' layouts are known: geometry, identity, session."""
        layouts = {rank: one for rank, one in metadata.items() if isinstance(one, WorkerLayout)}
        drafter = drafter_of(self._vllm_config)
        ahead = drafter.lookahead_tokens if drafter else 0
        size = self._settings.hybrid_chunk_size
        geometry = build_geometry(self._kv_cache_config, layouts, size, ahead)
        staging = [one.staging_bytes for one in layouts.values() if one.staging_bytes is not None]
        config, kv_config = self._vllm_config, self._kv_cache_config
        model, states = config.model_config, state_rule(config)
        length = length_finding(geometry, model.max_model_len)
        if length.verdict is Verdict.FAIL:
            # Nothing is ever cached, which is no reason not to serve (B8).
            logger.error("hybridkv: %s", length.sentence)
        else:
            _report([length])
        _report(state_findings(geometry, states))
        facts = identity_facts(config, kv_config, geometry, layouts, self._settings)
        first = tuple(layout.weights for _, layout in sorted(layouts.items()))

        def facts_of(digests: Sequence[str]) -> Mapping[str, object]:
            return {**facts, "weights": weights_fact(self._settings, digests, first)}

        self._weights = WeightsWatch(first, facts_of)
        counters = self._guard.counters
        wire_model = WireModel(
            str(model.served_model_name)[-TEXT_MAX:],
            model.max_model_len,
            kv_dtype(config, layouts[0]),
            [len(layers) for layers in layouts[0].layers.values()],
            states.retention_tokens,
            states.step_tokens,
        )

        self.tails = tails_finding(config, kv_config, geometry)
        wanted = self._settings.sub_block_hits
        if wanted:
            _report([self.tails])
        with_tails = wanted is not False and self.tails.verdict is Verdict.OK
        specs = [group.kv_cache_spec for group in kv_config.kv_cache_groups]
        publishes = wants_events(config)
        named = event_group(geometry, specs) if publishes else NO_GROUP
        keeps = [group_keeping(one.gid, specs[one.gid]) for one in geometry.groups]

        def make() -> None:
            present = facts_of(self._weights.named)
            self._scheduler = SchedulerRole(
                self._settings,
                geometry,
                fingerprint(present),
                str(config.kv_transfer_config.engine_id),
                self._socket_path,
                config.scheduler_config.max_num_batched_tokens,
                counters,
                kv_config.num_blocks - 1,
                own_hashes=str(config.cache_config.prefix_caching_hash_algo) not in ENGINE_HASHES,
                facts=present,
                model=wire_model,
                events=KVEventPublisher(geometry, counters, publishes, named),
                staging_bytes=min(staging, default=None),
                inflight_tokens=config.max_in_flight_tokens,
                before=self._scheduler,
                weights=self._weights,
                drafter=drafter,
                keeps=keeps,
                with_tails=with_tails,
            )
            self._weights.is_identified = True

        make()
        self._make_scheduler = make
        served = [f"{one.gid}:{one.kind}/{one.tokens_per_block}" for one in geometry.groups]
        namespace = fingerprint(facts).hex()[:12]
        said = ", ".join(served), geometry.chunk_tokens, namespace, self._socket_path
        logger.info("hybridkv: groups %s; chunk %d tokens; identity %s; daemon %s", *said)

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        """Keep the engine's `get_blocks`: `get_block_ids` would read every block of a request.

        Resets are followed here, because vLLM tells connectors only of some (`reset_connector`).
        """
        super().bind_kv_cache_manager(kv_cache_manager)
        self._blocks_of = kv_cache_manager.get_blocks
        reset = kv_cache_manager.reset_prefix_cache

        def followed() -> bool:
            is_empty = False
            try:
                is_empty = bool(reset())
            finally:
                self._reset("reset_prefix_cache", is_empty)
            return is_empty

        kv_cache_manager.reset_prefix_cache = followed

    def on_new_request(self, request: Any) -> None:
        """Send the lookup on arrival."""
        self._run(
            "on_new_request",
            lambda role: role.arrived(request),
            None,
            lambda role: role.passed_by(request),
        )

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """(tokens, True) = asynchronous load, (None, False) = ask again, (0, False) = no hit."""
        hook = "get_num_new_matched_tokens"
        tokens = self._run(hook, lambda role: role.matched(request, num_computed_tokens), 0)
        return tokens, bool(tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Plan the load into the blocks that the engine has for it; 0 tokens = it loads nothing."""
        self._run(
            "update_state_after_alloc",
            lambda role: role.allocated(request, block_tables(blocks), num_external_tokens),
            None,
            lambda role: role.must_fail(request.request_id, num_external_tokens),
        )

    def build_connector_meta(self, scheduler_output: Any) -> base.KVConnectorMetadata:
        """This step's plan for the workers."""
        role = self._scheduler
        if role is None:
            return StepPlan()
        return self._guard.run(
            "build_connector_meta",
            lambda: role.run(lambda role: role.planned(scheduler_output, self._tables)),
            lambda: (
                role.emergency(scheduler_output.num_scheduled_tokens)
                if self._guard.healthy
                else role.quit(scheduler_output.num_scheduled_tokens)
            ),
        )

    def update_connector_output(self, connector_output: Any) -> None:
        """Take what the workers did."""
        told = connector_output.kv_connector_worker_meta
        report = told if isinstance(told, StepReport) else None
        self._run(
            "update_connector_output",
            lambda role: role.reported(
                set(connector_output.finished_recving or ()),
                set(connector_output.failed_recving or ()),
                report,
            ),
            None,
            lambda role: role.overheard(report),
        )

    def has_pending_push_work(self) -> bool:
        """Whether stores are not committed yet: then the engine steps on without requests."""
        return self._run("has_pending_push_work", SchedulerRole.has_pending, False)

    def request_finished(self, request: Any, block_ids: list[int]) -> Finished:
        """False: no block is held after a request (requirements D10)."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Finished:
        """False: no block is held after a request (requirements D10)."""
        self._run(
            "request_finished",
            lambda role: role.finished(request.request_id),
            None,
            lambda role: role.gone(request.request_id),
        )
        return False, None

    def get_external_cache_hit_sources(
        self, request: Any, num_external_tokens: int
    ) -> dict[CacheHitSource, int]:
        """The tokens of a planned load by source; their sum is `num_external_tokens` (B30)."""
        hook, tokens = "get_external_cache_hit_sources", max(0, num_external_tokens)
        none: dict[str, int] = {}
        by_tier = self._run(hook, lambda role: role.sources(request.request_id, tokens), none)
        return hit_sources(by_tier, tokens)

    def get_kv_connector_stats(self) -> metrics.KVConnectorStats | None:
        """What is new since the last step; the workers' reports have brought their counters."""
        off = self._guard.off_since, self._guard.pause_seconds
        hook = "get_kv_connector_stats"
        return self._run(hook, lambda role: role.take_stats(*off), None, tells=True)

    def take_events(self) -> Iterable[KVCacheEvent]:
        """The last hook of a step: KV events about the daemon's RAM, if vLLM publishes events.

        A scheduler role that is switched off is replaced here, after its pause: no request is
        between its offer and its plan.
        """
        events = self._run("take_events", SchedulerRole.step_ended, [], SchedulerRole.withdraw)
        self._guard.begin_anew(self._renew)
        return events

    def withdraw(self) -> Iterable[KVCacheEvent]:
        """End the session of a connector that is switched off: its last KV events.

        MultiConnector calls this, and no hook afterwards.
        """
        if self._scheduler is None:
            return ()
        self._scheduler.close()
        return self._scheduler.withdraw()

    @classmethod
    def build_kv_connector_stats(cls, data: Any = None) -> metrics.KVConnectorStats | None:
        """The statistics of a payload that has travelled."""
        return HybridKVStats(data)

    @classmethod
    def build_prom_metrics(cls, *vllm_arguments: Any) -> metrics.KVConnectorPromMetrics:
        """This connector's metrics at the API server's /metrics."""
        return HybridKVPromMetrics(*vllm_arguments)

    def reset_cache(self) -> bool:
        """The weights may have changed; what was stored stays for engines that have them."""
        self._reset("reset_cache", False)
        return True

    def shutdown(self) -> None:
        """End the session and unmap the arena."""
        if self._scheduler is not None:
            self._scheduler.close()
            self._scheduler = None
        if self._worker is not None:
            self._worker.close()

    def _reset(self, hook: str, is_empty: bool) -> None:
        def give_up(role: SchedulerRole) -> None:
            # Nothing else keeps what was found before from being loaded.
            self._guard.switch_off(f"a fault in {hook}")
            role.close()
            # A role that begins anew later asks for the weights too.
            self._weights.reset(is_empty)
            if is_empty:
                role.emptied()

        self._run(hook, lambda role: role.reset(is_empty), None, give_up)

    def _run(
        self,
        hook: str,
        work: Callable[[SchedulerRole], Result],
        default: Default,
        otherwise: Callable[[SchedulerRole], Result] | None = None,
        tells: bool = False,
    ) -> Result | Default:
        """`work` under supervision, else `otherwise`; `default` where that or the role is None."""
        role = self._scheduler
        if role is None:
            return default
        return self._guard.run(
            hook,
            lambda: role.run(work),
            lambda: otherwise(role) if otherwise else default,
            tells=tells,
        )

    def _renew(self) -> None:
        """Put a fresh scheduler role in the place of one that was switched off."""
        if self._scheduler is not None:
            self._scheduler.close()
            self._make_scheduler()

    def _tables(self, request_id: str) -> Sequence[Sequence[int]]:
        assert self._blocks_of is not None, "bound when the engine's scheduler was made"
        return block_tables(self._blocks_of(request_id))

    def _start_daemon(self) -> None:
        """Start a daemon where the setting is "auto"; else check the one at the socket."""
        is_auto, ram_bytes = self._settings.server == "auto", self._settings.daemon.ram_bytes
        if is_auto and ram_bytes is not None:
            directory = shm_directory(self._settings.daemon.shm_dir)
            check_ram(ram_bytes, "kv_connector_extra_config.ram", directory)
        try:
            if is_auto:
                ensure_daemon(self._socket_path, self._settings.daemon_options)
                return
            group = group_id(self._settings.daemon.group)
            with ControlClient(self._socket_path, SERVER_CHECK_SECONDS, group=group):
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
    ("mooncake", CacheHitSource.P2P),
)
"""vLLM's source for each tier, by the start of its name; vLLM counts object stores as DISK too."""


def hit_sources(by_tier: Mapping[str, int], tokens: int) -> dict[CacheHitSource, int]:
    """Tokens by vLLM's sources; their sum is `tokens`, some of an unspecified source if need be."""
    sources: Counter[CacheHitSource] = Counter()
    if sum(by_tier.values()) != tokens or min(by_tier.values(), default=0) < 0:
        by_tier = {"": tokens}
    for tier, part in by_tier.items():
        known = (source for name, source in SOURCES if tier.startswith(name))
        sources[next(known, CacheHitSource.EXTERNAL_UNSPECIFIED)] += part
    return {source: part for source, part in sources.items() if part}


def check_config(vllm_config: Any, kv_cache_config: Any) -> Settings:
    """The settings of an engine; raises ConfigError where it cannot be served."""
    _report(config_findings(vllm_config))
    _report(group_findings(kv_cache_config, vllm_config))
    return settings_of(vllm_config)


def wants_events(vllm_config: Any) -> bool:
    """Whether vLLM publishes KV events."""
    config = vllm_config.kv_events_config
    return config is not None and bool(config.enable_kv_cache_events)


def _report(findings: Iterable[Finding]) -> None:
    """Raise ConfigError for the first FAIL, and log every warning."""
    for finding in raise_first(findings):
        if finding.verdict is Verdict.WARN:
            logger.warning("hybridkv: %s", finding.sentence)
