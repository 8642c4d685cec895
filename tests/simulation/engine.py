"""One engine without a model: vLLM's scheduler, our connector, and memory that an oracle knows.

It replaces the model runner. Hooks are called in vLLM's order (KVConnectorModelRunnerMixin).
"""

import copy
import functools
import socket
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from vllm.config import KVEventsConfig, KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

import hybridkv.connector.scheduler.role
import hybridkv.connector.worker.role
from hybridkv.client.link import RECONNECT_SECONDS
from hybridkv.connector import HybridKVConnector
from hybridkv.connector.copy.host import HostCopier
from hybridkv.connector.copy.part import Copier
from hybridkv.core.copies import CopyOp
from hybridkv.core.errors import HybridKVError
from hybridkv.lab.models import bundled_models
from hybridkv.vllm.block_room import ROOM_SECONDS
from hybridkv.vllm.layout import group_geometry
from hybridkv.wire.messages import Report, Stats
from tests.simulation.layouts import WORD, Layout
from tests.simulation.node import Clock, Node, wait_readable
from tests.simulation.oracle import Content, GroupWords, Oracle, read_by
from tests.simulation.router import Dashboard, Router
from tests.waiting import DEADLINE_SECONDS

POISON = -0x5151515151515151
BARRIER_ID = 1 << 40
CLOCK = Clock()


@dataclass(frozen=True)
class Shape:
    """How an engine is set up."""

    layout: Layout
    num_blocks: int
    max_model_len: int
    budget: int
    """max_num_batched_tokens."""
    max_seqs: int
    retention: int | None
    ranks: int
    packed: bool
    """Whether all layers of a block stand together, or all blocks of a layer."""
    settings: dict[str, object]


@dataclass(frozen=True)
class Chance:
    """What the simulation decides while an engine runs."""

    late: Callable[[], int]
    """Steps that a load takes."""
    shed: Callable[[], bool]
    """Whether a store finds no room in the worker."""
    repeat: Callable[[], int]
    """In how many steps a report reaches the connector once more; 0 = never."""
    between: Callable[[], None]
    """What happens after the scheduler planned a step and before the workers run it."""


class BusyCopier:
    """The real copier with habits of a GPU's: loads take some steps, and some stores are shed."""

    def __init__(self, copier: Copier, chance: Chance) -> None:
        self._copier = copier
        self._chance = chance
        self._waiting: list[list[Any]] = []

    def store(self, ops: Sequence[CopyOp], done: Callable[[CopyOp, bool], None]) -> None:
        """At once or never: the blocks are the engine's again when this returns."""
        kept = []
        for op in ops:
            if self._chance.shed():
                done(op, False)
            else:
                kept.append(op)
        self._copier.store(kept, done)

    def load(self, ops: Sequence[CopyOp], done: Callable[[HybridKVError | None], None]) -> None:
        """Some steps later."""
        self._waiting.append([self._chance.late(), ops, done])

    def tick(self) -> None:
        """One step has passed."""
        due = [entry for entry in self._waiting if entry[0] <= 0]
        self._waiting = [entry for entry in self._waiting if entry[0] > 0]
        for entry in self._waiting:
            entry[0] -= 1
        for _, ops, done in due:
            self._copier.load(ops, done)

    def close(self) -> None:
        """Finish what is waiting."""
        for entry in self._waiting:
            entry[0] = 0
        self.tick()
        self._copier.close()


class Traced:
    """A request and the content of its tokens."""

    def __init__(self, request: Request, salt: int) -> None:
        self.request = request
        self.content = Content(request.all_token_ids, salt)
        self.named = 0
        """Block hashes whose content is known to the audits."""

    def forget(self, salt: int) -> None:
        """The weights changed and everything of the request is computed again."""
        self.content = Content(self.request.all_token_ids, salt)
        self.named = 0


class Rank:
    """One worker: its memory, its connector, and what it would compute."""

    def __init__(self, shape: Shape, vllm_config: Any, rank: int) -> None:
        parallel = copy.copy(vllm_config.parallel_config)
        parallel.rank = rank
        config = copy.copy(vllm_config)
        config.parallel_config = parallel
        layout = shape.layout
        kv_config = layout.config(config, shape.num_blocks, worker=True)
        rows = max(len(member.layers) for member in layout.members)
        page = max(member.block_words for member in layout.members)
        order = (shape.num_blocks, rows) if shape.packed else (rows, shape.num_blocks)
        self.memory = torch.full((*order, page), POISON, dtype=torch.int64)
        if shape.packed:
            self.memory = self.memory.transpose(0, 1)
        self.words = self.memory.numpy()
        tensors: dict[str, torch.Tensor] = {}
        groups = []
        for gid, member in enumerate(layout.members):
            layers = []
            tokens = 1 if member.is_recurrent else member.block
            for layer, (name, width) in enumerate(
                zip(layout.layer_names(gid), member.layers, strict=True)
            ):
                view = self.memory[layer][:, : tokens * width].view(
                    shape.num_blocks, 1, tokens, width
                )
                tensors[name] = view.view(torch.int8) if member.is_recurrent else view
                layers.append(view.numpy()[:, 0])
            if gid in kv_config.prefix_cacheable_group_ids:
                spec = kv_config.kv_cache_groups[gid].kv_cache_spec
                group = group_geometry(gid, spec, (WORD,))
                groups.append(GroupWords(group, layers, 0 if group.replicated else rank))
        self.scratch = [
            gid for gid, member in enumerate(layout.members) if member.what == "scratch"
        ]
        self.oracle = Oracle(groups)
        self.connector = HybridKVConnector(config, KVConnectorRole.WORKER, kv_config)
        self.connector.register_kv_caches(tensors)
        self.side: Any = self.connector._worker

    def run(
        self, output: Any, fresh: list[int], work: list[tuple[Traced, int, int, Any]]
    ) -> KVConnectorOutput:
        """One step: zero and copy blocks, compute, then the connector's part after the forward."""
        self.words[:, fresh] = POISON
        for copied in output.kv_cache_block_copies or ():
            self.words[:, copied.dst_block_id] = self.words[:, copied.src_block_id]
        # A layer writes the keys and values of all the step's tokens before any token reads.
        # So a request may share blocks that another request fills in this very step.
        # Recurrent state is read first, then written.
        for traced, start, _, table in work:
            self.oracle.check(
                traced.request.request_id, traced.content, start, table, recurrent=True
            )
        for traced, start, end, table in work:
            self.oracle.write(traced.content, start, end, table)
            for gid in self.scratch:
                self.words[:, table[gid][0]] = POISON + end
        for traced, start, _, table in work:
            self.oracle.check(
                traced.request.request_id, traced.content, start, table, recurrent=False
            )
        assert not output.has_sync_kv_loads
        self.connector.bind_connector_metadata(output.kv_connector_metadata)
        self.connector.handle_preemptions(output.kv_connector_metadata)
        self.connector.start_load_kv(None)
        self.connector.wait_for_save()
        for _, copier in self.side._copiers.values():
            copier.tick()
        results = self.connector.get_transfer_results(output.finished_req_ids)
        done = KVConnectorOutput(
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
            kv_connector_worker_meta=self.connector.build_connector_worker_meta(),
        )
        self.connector.clear_connector_metadata()
        return done


class Engine:
    """A scheduler and its workers, which are heard of `lag` steps after theirs."""

    def __init__(self, shape: Shape, node: Node, engine_id: str, chance: Chance, lag: int) -> None:
        self.node = node
        self.counts: Counter[str] = Counter()
        self.traced: dict[str, Traced] = {}
        config = _vllm_config(shape, node.socket_path, engine_id)
        kv_config = shape.layout.config(config, shape.num_blocks, worker=False)
        self.hash_tokens = kv_config.hash_block_size
        self.hasher = _hasher(self.hash_tokens)
        self._lag = lag
        self._chance = chance
        self._patience = float(str(shape.settings["lookup_timeout_ms"])) / 1e3
        self._asked_since: dict[str, float] = {}
        vars(hybridkv.connector.scheduler.role).update(time=CLOCK)
        vars(hybridkv.connector.worker.role).update(
            time=CLOCK, HostCopier=lambda *args: BusyCopier(HostCopier(*args), chance)
        )
        self.scheduler: Any = Scheduler(
            vllm_config=config,
            kv_cache_config=kv_config,
            structured_output_manager=_structured_output_manager(),
            block_size=shape.layout.unit,
            hash_block_size=self.hash_tokens,
            log_stats=True,
        )
        self.router, self.dashboard = Router(), Dashboard()
        self.scheduler.kv_event_publisher.publish = lambda batch: self.router.hear(batch.events)
        self.connector = self.scheduler.connector
        self.ranks = [Rank(shape, config, rank) for rank in range(shape.ranks)]
        self.connector.set_xfer_handshake_metadata(
            {
                number: rank.connector.get_handshake_metadata()
                for number, rank in enumerate(self.ranks)
            }
        )
        self.side: Any = self.connector._scheduler
        self.geometry = self.side._geometry
        self._aggregator = KVOutputAggregator.from_connector(self.connector, shape.ranks)
        self._reports: deque[list[KVConnectorOutput]] = deque()
        self._repeats: list[tuple[int, KVConnectorOutput]] = []
        self._steps = 0
        self.pool: Any = self.scheduler.kv_cache_manager.block_pool
        self._fresh: list[int] = []
        take = self.pool.get_new_blocks

        def get_new_blocks(count: int) -> Any:
            blocks = take(count)
            self._fresh.extend(block.block_id for block in blocks)
            return blocks

        self.pool.get_new_blocks = get_new_blocks
        self._refuse_false_local_hits()
        matched = self.connector.get_num_new_matched_tokens

        def get_num_new_matched_tokens(request: Request, local: int) -> tuple[int | None, bool]:
            tokens, is_async = matched(request, local)
            self._count_hit(request, local, tokens)
            return tokens, is_async

        self.connector.get_num_new_matched_tokens = get_num_new_matched_tokens

    # Requests

    def add(self, request: Request, salt: int) -> None:
        """A request arrives."""
        self.traced[request.request_id] = Traced(request, salt)
        self.scheduler.add_request(request)

    def abort(self, name: str) -> None:
        """Its client went away."""
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        del self.traced[name]

    def loading(self) -> bool:
        """Whether a request that does not run holds blocks: it loads, did so, or was aborted."""
        manager, running = (
            self.scheduler.kv_cache_manager,
            {r.request_id for r in self.scheduler.running},
        )
        return any(
            any(manager.get_block_ids(name))
            for name in self.scheduler.requests
            if name not in running
        )

    def _refuse_false_local_hits(self) -> None:
        """Where an attention chunk ends within a block, vLLM 0.32 offers hits of null blocks."""
        manager = self.scheduler.kv_cache_manager
        find, groups = manager.get_computed_blocks, self.ranks[0].oracle.groups

        def get_computed_blocks(request: Request) -> Any:
            blocks, tokens, boundary = find(request)
            for group in (words.group for words in groups):
                read = read_by(group, tokens)
                kept = (
                    blocks.blocks[group.gid][read.start // group.tokens_per_block :] if read else ()
                )
                if any(block.is_null for block in kept):
                    self.counts["false_local_hits"] += 1
                    return manager.empty_kv_cache_blocks, 0, 0
            return blocks, tokens, boundary

        manager.get_computed_blocks = get_computed_blocks

    def _count_hit(self, request: Request, local: int, tokens: int | None) -> None:
        if tokens is None:
            since = self._asked_since.setdefault(request.request_id, CLOCK.now)
            asked = self.side._requests.by_id.get(request.request_id)
            patience = self._patience + ROOM_SECONDS * bool(self.side._room)
            if asked is not None and asked.lookup.pending is not None:
                patience += self._patience + asked.lookup.pending.wait_ms / 1e3
            assert CLOCK.now - since <= patience, (
                f"{request.request_id} waits for its lookup past the deadline"
            )
        else:
            self._asked_since.pop(request.request_id, None)
        tracked = self.side._requests.by_id.get(request.request_id)
        answer = tracked.lookup.found if tracked else None
        found = answer.chunks * self.geometry.chunk_tokens if answer else 0
        if tokens:
            kind = (
                "external"
                if not local
                else "mixed"
                if local % self.geometry.chunk_tokens == 0
                else "mixed_unaligned"
            )
            self.counts[f"hit_{kind}"] += 1
            self.counts["hit_resumed"] += request.num_preemptions > 0
            self.counts["hit_whole_prompt"] += (
                local + tokens + self.geometry.chunk_tokens >= request.num_tokens
            )
        elif found and local:
            self.counts["hit_local_longer" if local > found else "hit_local_equal"] += (
                local >= found
            )

    # Steps

    def step(self) -> list[str]:
        """One step of the engine; returns the requests that are answered by it."""
        self._steps += 1
        output = self.scheduler.schedule()
        work = []
        for name, count in output.num_scheduled_tokens.items():
            # schedule() has already counted this step's tokens as computed.
            end = self.traced[name].request.num_computed_tokens
            table = self.scheduler.kv_cache_manager.get_block_ids(name)
            work.append((self.traced[name], end - count, end, table))
        fresh, self._fresh = self._fresh, []
        self._chance.between()
        self._reports.append([rank.run(output, fresh, work) for rank in self.ranks])
        names = list(output.num_scheduled_tokens)
        report = self._report() if len(self._reports) > self._lag else KVConnectorOutput()
        result = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=[_sample(traced, end) for traced, _, end, _ in work],
            kv_connector_output=report,
        )
        for told in self.scheduler.update_from_output(output, result).values():
            if told.scheduler_stats is not None:
                self.dashboard.take(told.scheduler_stats)
        self._repeat(self._chance.repeat(), report)
        self.counts["tokens"] += sum(end - start for _, start, end, _ in work)
        answered = [
            name for name in names if RequestStatus.is_finished(self.traced[name].request.status)
        ]
        for name in answered:
            request = self.traced.pop(name).request
            assert request.status == RequestStatus.FINISHED_LENGTH_CAPPED, request.status
            self.counts["preemptions"] += request.num_preemptions
        return answered

    def _report(self) -> KVConnectorOutput:
        """The oldest step's reports as vLLM's aggregation of all ranks."""
        outputs = [
            ModelRunnerOutput(req_ids=[], req_id_to_index={}, kv_connector_output=output)
            for output in self._reports.popleft()
        ]
        report = self._aggregator.aggregate(outputs).kv_connector_output
        self.counts["failed_loads"] += len(report.failed_recving)
        return report

    def _repeat(self, steps: int, report: KVConnectorOutput) -> None:
        """A report reaches the connector a second time, this step (1) or later."""
        if steps:
            self._repeats.append((self._steps + steps - 1, report))
        for at, repeated in self._repeats:
            if at <= self._steps:
                self.counts["repeated_reports"] += 1
                self.connector.update_connector_output(repeated)
        self._repeats = [entry for entry in self._repeats if entry[0] > self._steps]

    def quiet(self) -> bool:
        """Whether nothing that anybody waits for is under way in the workers."""
        outputs = [output for outputs in self._reports for output in outputs]
        return not self._repeats and not any(
            output.finished_recving or output.kv_connector_worker_meta.done for output in outputs
        )

    # The daemon

    def settle(self) -> None:
        """Wait until the daemon has answered everything, so that a seed repeats nearly the same."""
        deadline = time.monotonic() + DEADLINE_SECONDS
        while True:
            waiting = []
            self.side._poll(CLOCK.now)
            for link in (rank.side._link for rank in self.ranks):
                if link.welcome is None:
                    link.poll(CLOCK.now)
                if link.fd is not None and link.welcome is None:
                    waiting.append(link.fd)
            link = self.side._session.link
            if link.fd is not None and (link.welcome is None or self._is_owed()):
                waiting.append(link.fd)
            if not waiting:
                return
            wait_readable(waiting, deadline)

    def cut(self) -> None:
        """The connection ends under the scheduler role."""
        sock = self.side._session.link._sock
        if sock is not None:
            sock.shutdown(socket.SHUT_RDWR)

    def barrier(self) -> dict[str, float] | None:
        """Wait until the daemon has seen all that was sent; its values, or None without a link."""
        link = self.side._session.link
        deadline = time.monotonic() + DEADLINE_SECONDS
        if not link.send(Stats(BARRIER_ID), CLOCK.now):
            return None
        while link.fd is not None:
            values = None
            for reply in link.poll(CLOCK.now):
                if isinstance(reply, Report):
                    values = reply.values
                else:
                    self.side._take(reply, CLOCK.now)
            if values is not None:
                return values
            if link.fd is not None:
                wait_readable([link.fd], deadline)
        return None

    def _is_owed(self) -> bool:
        asked = any(pool.asked for pool in self.side._stores.credits._pools.values())
        return asked or any(
            tracked.is_prefetching and tracked.lookup.sent and tracked.lookup.found is None
            for tracked in self.side._requests.by_lease.values()
        )

    def close(self) -> None:
        """End the session while connected: this process lives on, so workers must say `drained`."""
        deadline = time.monotonic() + DEADLINE_SECONDS
        for link in (rank.side._link for rank in self.ranks):
            # A link may not have noticed yet that its daemon was killed.
            while link.poll(CLOCK.now) or link.welcome is None:
                CLOCK.now += RECONNECT_SECONDS
                if link.fd is not None and link.welcome is None:
                    wait_readable([link.fd], deadline)
                assert time.monotonic() < deadline
        self.connector.shutdown()
        for rank in self.ranks:
            rank.connector.shutdown()


def _sample(traced: Traced, end: int) -> list[int]:
    if end < traced.request.num_tokens:
        return []
    return [int(traced.content.upto(end)[-1]) % 1998 + 2]


@functools.cache
def _base_config() -> Any:
    """Of a small model: no part of the scheduler or the connector looks at what it is."""
    arguments = EngineArgs(
        model=str(bundled_models()["qwen3"]),
        skip_tokenizer_init=True,
        load_format="dummy",
        enforce_eager=True,
        max_model_len=4096,
        dtype="float32",
        async_scheduling=False,
    )
    return arguments.create_engine_config()


@functools.cache
def _structured_output_manager() -> Any:
    return StructuredOutputManager(_base_config())


def _vllm_config(shape: Shape, socket_path: str, engine_id: str) -> Any:
    config = copy.copy(_base_config())
    for part in ("model_config", "cache_config", "scheduler_config", "parallel_config"):
        setattr(config, part, copy.copy(getattr(config, part)))
    config.model_config.max_model_len = shape.max_model_len
    config.cache_config.num_gpu_blocks = shape.num_blocks
    config.cache_config.block_size = shape.layout.block_size
    config.cache_config.prefix_cache_retention_interval = shape.retention
    config.cache_config.mamba_cache_mode = "align" if shape.layout.has_recurrent else "none"
    config.scheduler_config.max_num_batched_tokens = shape.budget
    config.scheduler_config.max_num_seqs = shape.max_seqs
    config.scheduler_config.max_model_len = shape.max_model_len
    config.parallel_config.tensor_parallel_size = shape.ranks
    config.kv_events_config = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    config.kv_transfer_config = KVTransferConfig(
        kv_connector="HybridKVConnector",
        kv_connector_module_path="hybridkv.connector",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        engine_id=engine_id,
        kv_connector_extra_config={"server": f"unix://{socket_path}", **shape.settings},
    )
    return config


@functools.cache
def _hasher(hash_tokens: int) -> Any:
    hash_fn = get_hash_fn_by_name("sha256")
    init_none_hash(hash_fn)
    return get_request_block_hasher(hash_tokens, hash_fn)
