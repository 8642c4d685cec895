"""vLLM's real scheduler with MultiConnector in both roles; what it replaces is the model runner."""

import copy
import functools
import random
from collections import Counter
from typing import Any

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request

from hybridkv.core.metrics import Metric
from hybridkv.multi.stats import OWN, OwnStats
from tests.simulation.configs import base_config, block_hasher, structured_output_manager
from tests.simulation.layouts import LAYOUTS
from tests.unit.multi.scripted import SCRIPTS, Script

BLOCK = 16
HERE = "tests.unit.multi.scripted"
ENGINE_ID = "the-engine"
HIT = 96


def child(script: Script, connector: str = "Scripted", **extra: Any) -> dict[str, Any]:
    """A child's entry of the configuration."""
    key = str(len(SCRIPTS))
    SCRIPTS[key] = script
    return {
        "kv_connector": connector,
        "kv_connector_module_path": HERE,
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"script": key, **extra},
    }


@functools.cache
def hybrid() -> Any:
    """A layout with sliding and full attention."""
    return LAYOUTS["odd_window"]


@functools.cache
def single() -> Any:
    """A layout with one group of full attention."""
    return LAYOUTS["full"]


def multi_config(children: list[dict[str, Any]], layout: Any, ranks: int = 1, **extra: Any) -> Any:
    """vLLM's configuration with MultiConnector over these."""
    config = copy.copy(base_config())
    for part in ("model_config", "cache_config", "scheduler_config", "parallel_config"):
        setattr(config, part, copy.copy(getattr(config, part)))
    config.cache_config.block_size = layout.block_size
    config.scheduler_config.disable_hybrid_kv_cache_manager = False
    config.parallel_config.tensor_parallel_size = ranks
    config.parallel_config.distributed_executor_backend = "mp"
    config.kv_transfer_config = KVTransferConfig(
        kv_connector="MultiConnector",
        kv_connector_module_path="hybridkv.connector",
        kv_role="kv_both",
        engine_id=ENGINE_ID,
        kv_connector_extra_config={"connectors": children, **extra},
    )
    return config


def connector(config: Any, layout: Any, role: KVConnectorRole, blocks: int = 200) -> Any:
    """A MultiConnector, made by vLLM's factory."""
    groups = layout.config(config, blocks, worker=role == KVConnectorRole.WORKER)
    return KVConnectorFactory.create_connector(config, role, groups)


class MultiEngine:
    """One engine. `now` is the clock that the choice goes by; a step takes 10 ms of it."""

    def __init__(
        self, children: list[dict[str, Any]], layout: Any, ranks: int = 1, blocks: int = 200
    ) -> None:
        config = multi_config(children, layout, ranks)
        config.cache_config.num_gpu_blocks = blocks
        config.scheduler_config.max_num_batched_tokens = 256
        config.scheduler_config.max_num_seqs = 8
        groups = layout.config(config, blocks, worker=False)
        self.scheduler: Any = Scheduler(
            vllm_config=config,
            kv_cache_config=groups,
            structured_output_manager=structured_output_manager(),
            block_size=layout.unit,
            hash_block_size=groups.hash_block_size,
            log_stats=True,
        )
        self.connector: Any = self.scheduler.connector
        self.workers = [
            connector(config, layout, KVConnectorRole.WORKER, blocks) for _ in range(ranks)
        ]
        self.connector.set_xfer_handshake_metadata_pp_aware(
            {(0, rank): worker.get_handshake_metadata() for rank, worker in enumerate(self.workers)}
        )
        self.now = 1000.0
        self.connector.part.clock = lambda: self.now
        self._hasher = block_hasher(groups.hash_block_size)
        self._aggregator = KVOutputAggregator.from_connector(self.connector, ranks)
        self._names = 0
        self.steps = 0
        self.invalid: set[int] = set()
        self.payloads: list[dict[str, Any]] = []
        self.totals: Counter[str] = Counter()
        self.pool = self.scheduler.kv_cache_manager.block_pool

    def add(self, tokens: list[int], max_tokens: int = 3) -> Request:
        """Add a request of this prompt."""
        self._names += 1
        request = Request(
            request_id=f"r{self._names}",
            prompt_token_ids=tokens,
            sampling_params=SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0),
            pooling_params=None,
            block_hasher=self._hasher,
        )
        self.scheduler.add_request(request)
        return request

    def step(self) -> None:
        """Run one step: schedule, all workers, and the scheduler's update."""
        self.steps += 1
        output = self.scheduler.schedule()
        self.now += 0.01
        reports = [self._run(worker, output) for worker in self.workers]
        done = self._aggregator.aggregate(
            [
                ModelRunnerOutput(req_ids=[], req_id_to_index={}, kv_connector_output=report)
                for report in reports
            ]
        )
        self.invalid |= done.kv_connector_output.invalid_block_ids
        names = list(output.num_scheduled_tokens)
        requests = self.scheduler.requests
        sampled = [
            [7] if requests[name].num_computed_tokens >= requests[name].num_tokens else []
            for name in names
        ]
        result = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=sampled,
            kv_connector_output=done.kv_connector_output,
        )
        for outputs in self.scheduler.update_from_output(output, result).values():
            stats = outputs.scheduler_stats
            if stats is not None:
                if stats.kv_connector_stats:
                    self.payloads.append(stats.kv_connector_stats)
                self.totals["hits"] += stats.connector_prefix_cache_stats.hits
                hits_by_source = stats.connector_prefix_cache_stats.hits_by_source
                self.totals.update({str(source): hits for source, hits in hits_by_source.items()})

    def run(self, steps_max: int = 300) -> None:
        """Run steps until no request is left. No block may be held then."""
        for _ in range(steps_max):
            if not self.scheduler.has_requests():
                break
            self.step()
        assert not self.scheduler.has_requests(), f"unfinished: {self.scheduler.requests}"
        assert self.pool.get_num_free_blocks() == self.pool.num_gpu_blocks - 1, "blocks are kept"

    def serve(self, tokens: list[int]) -> None:
        """Serve one request of this prompt to its end."""
        self.add(tokens)
        self.run()

    def selection(self, name: str) -> Counter[str]:
        """One child's counts of the choices, summed over all payloads."""
        counts: Counter[str] = Counter()
        for payload in self.payloads:
            own = OwnStats(payload.get(OWN))
            pending = own.gauges.get(Metric("pending_loads", (name,)), counts["last_pending"])
            counts["last_pending"] = int(pending)
            for (family, labels), value in own.counters.items():
                counts[family] += int(value) if labels == (name,) else 0
        return counts

    def _run(self, worker: Any, output: Any) -> KVConnectorOutput:
        worker.handle_preemptions(output.kv_connector_metadata)
        worker.bind_connector_metadata(output.kv_connector_metadata)
        if output.has_sync_kv_loads:
            worker.start_load_kv(None)
        worker.wait_for_layer_load("layer")
        worker.save_kv_layer("layer", None, None)
        worker.finish_forward()
        if not output.has_sync_kv_loads:
            worker.start_load_kv(None)
        worker.wait_for_save()
        results = worker.get_transfer_results(output.finished_req_ids)
        done = KVConnectorOutput(
            finished_sending=results.finished_sending or None,
            finished_recving=results.finished_recving or None,
            failed_recving=results.failed_recving,
            invalid_block_ids=worker.get_block_ids_with_load_errors(),
            kv_connector_stats=worker.get_kv_connector_stats(),
            kv_cache_events=worker.get_kv_connector_kv_cache_events(),
            kv_connector_worker_meta=worker.build_connector_worker_meta(),
        )
        worker.clear_connector_metadata()
        return done


def upto(end: int) -> Any:
    """Returns the answers of a child that has each prompt up to `end`."""
    return lambda request, local: max(
        0, min(end, (request.num_tokens - 1) // BLOCK * BLOCK) - local
    )


def prompt(rng: random.Random, length: int = 200) -> list[int]:
    """A prompt of that many random tokens."""
    return rng.choices(range(2, 2000), k=length)
