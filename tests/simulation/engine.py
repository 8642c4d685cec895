"""One engine without a model: vLLM's scheduler, our connector, and memory that an oracle knows.

It replaces the model runner. Hooks are called in vLLM's order (KVConnectorModelRunnerMixin).
"""

import copy
import functools
import json
import operator
import random
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from vllm.config import KVEventsConfig, KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker.utils import allocate_kv_cache

import hybridkv.connector.scheduler.role
import hybridkv.connector.worker.copiers
import hybridkv.connector.worker.role
import hybridkv.vllm.drafters
from hybridkv.client.link import RECONNECT_SECONDS
from hybridkv.connector import HybridKVConnector
from hybridkv.connector.copy.host import HostCopier
from hybridkv.connector.copy.part import Copier, PartLayout
from hybridkv.core.copies import CopyOp
from hybridkv.core.coverage import slot_shapes
from hybridkv.core.errors import HybridKVError
from hybridkv.core.geometry import GroupKind
from hybridkv.core.keys import fingerprint
from hybridkv.lab.models import bundled_arguments, bundled_models
from hybridkv.shm.arena import Arena
from hybridkv.vllm.block_room import ROOM_SECONDS
from hybridkv.vllm.blocks import block_bytes
from hybridkv.vllm.layout import WorkerLayout, build_geometry, group_geometry
from hybridkv.vllm.weights_digest import digest_weights
from hybridkv.wire.messages import Report, Stats
from tests.devicesim.device import COMPUTE, Habits, SimulatedDevice
from tests.simulation.layouts import WORD, Layout, Placement
from tests.simulation.node import Clock, Node, wait_readable
from tests.simulation.oracle import (
    Content,
    DraftedStep,
    GroupWords,
    Oracle,
    StatePlace,
    StateStep,
    read_by,
    token_of,
)
from tests.simulation.router import Dashboard, Router
from tests.waiting import DEADLINE_SECONDS

POISON = -0x5151515151515151
BARRIER_ID = 1 << 40
ENDS = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)
CLOCK = Clock()
PAUSE_STEPS = 12  # How many steps the first pause of a role lasts that is switched off.
BREAKABLE = {
    "": "on_new_request offer_hit on_allocated _make_plan on_report on_finished on_step_end "
    "identify poll on_reply",
    "audits": "on_answer begin on_store_begun must_wait put_into on_report settle",
    "lookups": "look_up offer on_found on_flush",
    "loads": "on_allocated put_into on_load_end",
    "stores": "plan_stores on_report",
    "requests": "advance release",
    "session": "send follow",
    "session.link": "poll flush",
}
"""Methods of the scheduler role and of its parts that a fault may break."""
BREAKABLE_IN_WORKERS = "start_loads start_stores _load _expect _stored _attach _send_drained"


class BrokenError(Exception):
    """A fault inside a hook."""


class Saboteur:
    """Breaks methods of one connector's role: each once, before or after its work, in a hook."""

    def __init__(self, connector: Any) -> None:
        self.fired = 0
        self.others: list[Exception] = []
        """What hooks raised besides."""
        self.guard = connector.guard
        self._hook_thread = 0
        """The thread that is in a hook; 0 = none. Copies that a thread ends are no hook's."""
        self._undo: Callable[[], None] = lambda: None
        self.guard._clock, self.guard._began = CLOCK.monotonic, CLOCK.now
        run = self.guard.run
        self.guard.run = lambda hook, work, *more, **how: run(
            hook, lambda: self._in_hook(work), *more, **how
        )

    def arm(self, part: Any, name: str, after: bool) -> None:
        """The next call of the method fails; one that was armed earlier does not any more."""
        self._undo()
        work = getattr(part, name)
        self._undo = lambda: vars(part).pop(name, None)

        def broken(*args: Any, **kwargs: Any) -> Any:
            if self._hook_thread != threading.get_ident():
                return work(*args, **kwargs)
            self._undo()
            if after:
                work(*args, **kwargs)
            self.fired += 1
            raise BrokenError(f"{name} is broken")

        setattr(part, name, broken)

    def disarm(self) -> None:
        """Nothing fails any more."""
        self._undo()

    def _in_hook(self, work: Callable[[], Any]) -> Any:
        before, self._hook_thread = self._hook_thread, threading.get_ident()
        try:
            return work()
        except Exception as error:
            if not isinstance(error, BrokenError):
                self.others.append(error)
            raise
        finally:
            self._hook_thread = before


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
    placement: Placement
    settings: dict[str, object]
    is_async: bool = False
    """Asynchronous scheduling: a step is planned before the one before it is reported."""
    staging: float | None = None
    """Room in each worker's staging, in objects of the largest size; None = no bound."""
    device: int | None = None
    """The seed of a simulated device that copies the blocks; None = the processor does."""
    drafts: int = 0  # Tokens that the layout's drafter proposes in a step.
    match_unit: int | None = None  # vLLM's prefix_match_unit, which divides a block.
    drafter_tokens_max: int | None = None  # The draft model's max_model_len; None = the target's.
    is_block_dropped: bool = True  # Whether vLLM's own hits leave out the block before their end.
    is_padded: bool = True  # Whether the drafter runs on padded batches.


@dataclass(frozen=True)
class Chance:
    """What the simulation decides while an engine runs."""

    late: Callable[[], int]
    """Steps that a load takes."""
    behind: Callable[[], int]
    """Steps that a store takes after the one that it is planned for."""
    shed: Callable[[], bool]
    """Whether a store finds no room in the worker."""
    repeat: Callable[[], int]
    """In how many steps a report reaches the connector once more; 0 = never."""
    between: Callable[[], None]
    """What happens after the scheduler planned a step and before the workers run it."""


class BusyCopier:
    """The real copier with habits of a GPU's.

    Loads take some steps. Stores pass through a staging of `staging_bytes` and may reach their
    slots some steps later, and some are shed. A staging without room sheds too, which only happens
    after a fault (`has_faulted`): then the planner does not know of all that is under way.
    """

    def __init__(
        self,
        make: Callable[[Sequence[Sequence[torch.Tensor]]], Copier],
        groups: Sequence[Sequence[torch.Tensor]],
        chance: Chance,
        staging_bytes: int | None,
        has_faulted: Callable[[], bool],
    ) -> None:
        self._make = make
        self._groups = groups
        self._copier = make(groups)
        self._chance = chance
        self._staging_bytes = staging_bytes
        self._has_faulted = has_faulted
        self._waiting: list[list[Any]] = []
        """[steps left, what is done then] of each load and store."""
        self._staged_bytes = 0

    def store(self, ops: Sequence[CopyOp], done: Callable[[CopyOp, bool], None]) -> None:
        """The blocks are the engine's again when this returns."""
        kept, staged = [], {}
        for op in ops:
            size = op.count * sum(map(block_bytes, self._groups[op.group_index]))
            staged_bytes = self._staged_bytes + size
            is_full = self._staging_bytes is not None and staged_bytes > self._staging_bytes
            assert not is_full or self._has_faulted(), "more is planned than the staging holds"
            if is_full or self._chance.shed():
                done(op, False)
            elif late := self._chance.behind():
                staged[op.slot] = late, size
                self._staged_bytes = staged_bytes
                kept.append(op)
            else:
                self._copier.store([op], done)
        if not kept:
            return
        indices = {op.group_index for op in kept}
        copies = [
            [_copied(view) for view in views] if index in indices else views
            for index, views in enumerate(self._groups)
        ]
        copier = self._make(copies)

        # A copier keeps addresses alone, so the copies must live as long as this function.
        def reach(op: CopyOp, _: Any = copies) -> None:
            self._staged_bytes -= staged[op.slot][1]
            copier.store([op], done)

        self._waiting += [[staged[op.slot][0], functools.partial(reach, op)] for op in kept]

    def load(self, ops: Sequence[CopyOp], done: Callable[[HybridKVError | None], None]) -> None:
        """Some steps later."""
        work = functools.partial(self._copier.load, ops, done)
        self._waiting.append([self._chance.late(), work])

    def tick(self) -> None:
        """One step has passed."""
        due = [entry for entry in self._waiting if entry[0] <= 0]
        self._waiting = [entry for entry in self._waiting if entry[0] > 0]
        for entry in self._waiting:
            entry[0] -= 1
        for _, work in due:
            work()

    def close(self) -> None:
        """Finish what is waiting."""
        for entry in self._waiting:
            entry[0] = 0
        self.tick()
        self._copier.close()


def _copied(view: torch.Tensor) -> torch.Tensor:
    """The same blocks in memory of their own."""
    return torch.empty_strided(view.shape, view.stride(), dtype=view.dtype).copy_(view)


class Traced:
    """A request as the workers know it, and the content of its tokens."""

    def __init__(self, request: Request, salt: int) -> None:
        self.request = request
        self.drafts: list[int] = []  # What the drafter proposes for the next step.
        self.state = StatePlace()
        self.named = 0
        """Block hashes whose content is known to the audits."""
        self.forget(salt)

    def forget(self, salt: int) -> None:
        """The weights changed and everything of the request is computed again."""
        self.tokens = list(self.request.all_token_ids)
        """With those that the scheduler has not heard of yet."""
        self.content = Content(self.tokens, salt)
        self.named = 0

    def sample(self, end: int, drafts: int) -> list[int]:
        """The tokens that computing the first `end` gives, if they are all there are.

        The next `drafts` of them were computed too; those that are right are accepted.
        """
        if end < len(self.tokens):
            return []
        before = len(self.tokens)
        for draft in (*self.drafts[:drafts], None):
            self.tokens.append(token_of(int(self.content.upto(len(self.tokens))[-1])))
            if draft != self.tokens[-1]:
                break
        return self.tokens[before:]


class Weights(torch.nn.Module):
    """A rank's model: one buffer, which says what the rank's bytes depend on."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("salt", torch.zeros(1, dtype=torch.int64))


class Rank:
    """One worker: its memory, its connector, and what it would compute."""

    def __init__(self, shape: Shape, vllm_config: Any, rank: int) -> None:
        parallel = copy.copy(vllm_config.parallel_config)
        parallel.rank = rank
        config = copy.copy(vllm_config)
        config.parallel_config = parallel
        layout = shape.layout
        kv_config = layout.config(config, shape.num_blocks, True, shape.placement)
        kernels = layout.kernel_blocks(shape.placement)
        tensors = allocate_kv_cache(kv_config, torch.device("cpu"), shape.placement.layout, kernels)
        self.words: dict[str, Any] = {}
        """By layer: `[block, token, head, word]`. Groups overlay each other in one allocation."""
        for name, tensor in tensors.items():
            words = tensor.view(torch.int64).unflatten(0, (shape.num_blocks, -1)).transpose(2, 3)
            self.words[name] = words.view(shape.num_blocks, -1, *words.shape[3:]).numpy()
            self.words[name][:] = POISON
        groups = []
        for gid in range(len(layout.members)):
            layers = [self.words[name] for name in layout.layer_names(gid)]
            if gid in kv_config.prefix_cacheable_group_ids:
                spec = kv_config.kv_cache_groups[gid].kv_cache_spec
                group = group_geometry(gid, spec, (WORD,))
                drafting = layout.drafting
                drafter = drafting.layers if drafting else ()
                own = frozenset(layer for of, layer in drafter if of == gid)
                ahead = drafting.lookahead if drafting else 0
                place = 0 if group.replicated else rank
                groups.append(GroupWords(group, layers, place, own, ahead))
        self.scratch = [
            gid for gid, member in enumerate(layout.members) if member.what == "scratch"
        ]
        self.oracle = Oracle(groups)
        self.drafter_blocks = 0
        """Blocks whose restored bytes of the drafter were compared."""
        self.model = Weights()
        self.connector = HybridKVConnector(config, KVConnectorRole.WORKER, kv_config)
        self.side = cast(Any, self.connector.worker_role)
        self.device: SimulatedDevice | None = None
        if shape.device is not None:
            self._rng = random.Random(shape.device + rank)
            self.device = SimulatedDevice(self._rng, _habits(self._rng))
            storage = next(iter(tensors.values())).untyped_storage()
            self.device.adopt(torch.empty(0, dtype=torch.uint8).set_(storage))
            self.side.device = self.device
        self.connector.register_kv_caches(tensors)

    def layout(self) -> WorkerLayout:
        """What it says of its tensors."""
        layout = self.connector.get_handshake_metadata()
        assert isinstance(layout, WorkerLayout)
        return layout

    def update_weights(self, salt: int) -> None:
        """As vLLM's workers name it, so that the connector hears of it."""
        self.model.salt.fill_(salt)

    def run(
        self,
        output: Any,
        fresh: list[int],
        work: list[tuple[Traced, int, StateStep, Any]],
        drafted: dict[str, DraftedStep],
        restored: dict[str, range],
    ) -> KVConnectorOutput:
        """One step: zero and copy blocks, compute, then the connector's part after the forward."""
        if self.device is not None:
            # The model's kernels come behind what the connector put into the engine's stream.
            self.device.finish(COMPUTE)
        for words in self.words.values():
            words[fresh] = POISON
        for copied in output.kv_cache_block_copies or ():
            for words in self.words.values():
                words[copied.dst_block_id] = words[copied.src_block_id]
        # A layer writes the keys and values of all the step's tokens before any token reads.
        # So a request may share blocks that another request fills in this very step.
        # Recurrent state is read first, then written.
        for traced, start, states, table in work:
            self.oracle.check(traced.request.request_id, traced.content, start, table, states)
        for traced, _, _, table in work:
            name = traced.request.request_id
            loaded = restored.get(name, range(0))
            first, end = loaded.start, loaded.stop
            self.drafter_blocks += self.oracle.check_drafter(
                name, traced.content, first, end, table
            )
        for traced, start, states, table in work:
            drafts, end = drafted.get(traced.request.request_id), states.end
            self.oracle.write(traced.content, start, end, table, states, drafts)
            for gid in self.scratch:
                for words in self.words.values():
                    words[table[gid][0]] = POISON + end
        for traced, start, _, table in work:
            self.oracle.check(traced.request.request_id, traced.content, start, table)
        assert not output.has_sync_kv_loads
        self.connector.bind_connector_metadata(output.kv_connector_metadata)
        self.connector.handle_preemptions(output.kv_connector_metadata)
        with nullcontext() if self.device is None else self.device.hook():
            self.connector.start_load_kv(None)
            for _, _, states, table in work:
                self.oracle.verified(table, states)
            self.connector.wait_for_save()
        # So that a seed repeats: a thread compares.
        self.side._auditor.join()
        if self.device is not None:
            self.device.turn_some(self._rng.choice((1, 10, 100, 1000)))
            assert not self.device.held, f"a hook waited for {self.device.held}"
        for _, copier in self.side._copiers.values():
            if isinstance(copier, BusyCopier):
                copier.tick()
        results = self.connector.get_transfer_results(output.finished_req_ids)
        done = KVConnectorOutput(
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
            kv_connector_worker_meta=self.connector.build_connector_worker_meta(),
        )
        self.connector.clear_connector_metadata()
        return done


def _habits(rng: random.Random) -> Habits:
    return Habits(
        digests=rng.random() < 0.7,
        registers=rng.choice((0, 5, 1 << 30, 1 << 30)),
        slow_registration=rng.random() < 0.5,
        breaks_at=rng.randrange(20000) if rng.random() < 0.1 else -1,
    )


@dataclass(frozen=True)
class Step:
    """A step that the workers have run, and whose results the scheduler has not taken yet."""

    output: Any
    sampled: dict[str, list[int]]


class Engine:
    """A scheduler and its workers, which are heard of `lag` steps after theirs."""

    def __init__(self, shape: Shape, node: Node, engine_id: str, chance: Chance, lag: int) -> None:
        self.node = node
        self.counts: Counter[str] = Counter()
        self.traced: dict[str, Traced] = {}
        config = _vllm_config(shape, node.socket_path, engine_id)
        kv_config = shape.layout.config(config, shape.num_blocks, False, shape.placement)
        self.hash_tokens = kv_config.hash_block_size
        self.hasher = _hasher(self.hash_tokens)
        self._lag = lag
        self._chance = chance
        self._drafts = shape.drafts
        self._is_ngram = shape.layout.drafting is not None and not shape.layout.drafting.has_layers
        self._state_tokens = shape.layout.state_tokens
        self._drafter_tokens_max = min(
            shape.max_model_len, shape.drafter_tokens_max or shape.max_model_len
        )
        drafting = shape.layout.drafting
        self._is_stale_at_ends = bool(drafting and drafting.lookahead and shape.is_padded)
        self._rng = random.Random(shape.num_blocks)  # Draws which drafts are wrong.
        self._patience = float(str(shape.settings["lookup_timeout_ms"])) / 1e3
        self._asked_since: dict[str, tuple[float, tuple[str, ...]]] = {}
        self._namespaces: dict[tuple[str, ...], bytes] = {}
        """By the digests of all ranks."""
        vars(hybridkv.connector.scheduler.role).update(time=CLOCK)
        vars(hybridkv.connector.worker.role).update(time=CLOCK)
        vars(hybridkv.connector.worker.copiers).update(HostCopier=self._copier)
        # No kernel of vLLM's CPU build runs here.
        vars(hybridkv.vllm.drafters).update(is_cpu_mended=True)
        make = AsyncScheduler if shape.is_async else Scheduler
        self.scheduler: Any = make(
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
        layouts = {number: rank.layout() for number, rank in enumerate(self.ranks)}
        self._staging_bytes: int | None = None
        if shape.staging is not None:
            chunk_tokens = shape.settings.get("hybrid_chunk_size")
            geometry = build_geometry(kv_config, layouts, cast("int | None", chunk_tokens))
            shapes = (slot for one in geometry.groups for slot in slot_shapes(geometry, one))
            self._staging_bytes = int(shape.staging * max(size for size, _ in shapes))
        self.connector.set_xfer_handshake_metadata(
            {
                number: one
                if shape.device is not None
                else replace(one, staging_bytes=self._staging_bytes)
                for number, one in layouts.items()
            }
        )
        self.saboteurs = [Saboteur(one) for one in (self.connector, *self._workers())]
        self.geometry = self.side.geometry
        self._aggregator = KVOutputAggregator.from_connector(self.connector, shape.ranks)
        self._ahead: deque[Step] = deque()
        self._ahead_max = 1 if shape.is_async else 0
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

    @property
    def side(self) -> Any:
        """The scheduler role, which another one replaces where it was switched off."""
        return self.connector.scheduler_role

    @property
    def true_namespace(self) -> bytes:
        """The identity of what is computed now, whatever the connector knows of it."""
        digests = tuple(_digest(int(rank.model.salt)) for rank in self.ranks)
        if digests not in self._namespaces:
            facts = self.connector.life.weights.facts_of(digests)
            self._namespaces[digests] = fingerprint(facts)
        return self._namespaces[digests]

    @property
    def namespace(self) -> bytes:
        """The identity that the engine has for its daemon."""
        watch = self.connector.life.weights
        return fingerprint(watch.facts_of(watch.identity_digests))

    def _workers(self) -> list[HybridKVConnector]:
        return [rank.connector for rank in self.ranks]

    # Faults of hooks

    def sabotage(self, rng: random.Random) -> None:
        """One of the methods that hooks call will fail."""
        saboteur, after = rng.choice(self.saboteurs), rng.random() < 0.5
        if saboteur is self.saboteurs[0]:
            where = rng.choice(sorted(BREAKABLE))
            part = operator.attrgetter(where)(self.side) if where else self.side
            saboteur.arm(part, rng.choice(BREAKABLE[where].split()), after)
        else:
            part = self.ranks[self.saboteurs.index(saboteur) - 1].side
            saboteur.arm(part, rng.choice(BREAKABLE_IN_WORKERS.split()), after)

    def fresh(self) -> None:
        """Wait for the end of every pause; a role that faulted and goes on is replaced as well."""
        for saboteur in self.saboteurs:
            saboteur.disarm()
            if saboteur.fired:
                saboteur.guard.switch_off("the audit wants a fresh one")
        while not all(saboteur.guard.healthy for saboteur in self.saboteurs):
            CLOCK.now += max(saboteur.guard.pause_seconds for saboteur in self.saboteurs)
            self.step_idle()

    def _copier(self, arena: Arena, groups: Any, part: PartLayout) -> BusyCopier:
        def make(tensors: Any) -> Copier:
            return HostCopier(arena, tensors, part)

        def has_faulted() -> bool:
            return any(saboteur.fired for saboteur in self.saboteurs)

        return BusyCopier(make, groups, self._chance, self._staging_bytes, has_faulted)

    # Requests

    def add(self, request: Request, salt: int) -> None:
        """A request arrives."""
        self.traced[request.request_id] = Traced(request, salt)
        self.scheduler.add_request(request)

    def abort(self, name: str) -> None:
        """Its client went away."""
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        del self.traced[name]

    def holding(self) -> int:
        """Requests that do not run and have blocks: they load, did so, or were aborted."""
        manager = self.scheduler.kv_cache_manager
        waiting = self.scheduler.requests.keys() - {r.request_id for r in self.scheduler.running}
        return sum(any(manager.get_block_ids(name)) for name in waiting)

    def _refuse_false_local_hits(self) -> None:
        """Where an attention chunk ends within a block, vLLM 0.32 offers hits of null blocks."""
        manager = self.scheduler.kv_cache_manager
        find, groups = manager.get_computed_blocks, self.ranks[0].oracle.groups

        def get_computed_blocks(request: Request, *limits: int) -> Any:
            blocks, tokens, *rest = find(request, *limits)
            for group in (words.group for words in groups):
                read = read_by(group, tokens)
                kept = (
                    blocks.blocks[group.gid][read.start // group.tokens_per_block :] if read else ()
                )
                if any(block.is_null for block in kept):
                    self.counts["false_local_hits"] += 1
                    return manager.empty_kv_cache_blocks, 0, *(0 for _ in rest)
            return blocks, tokens, *rest

        manager.get_computed_blocks = get_computed_blocks
        truncate: Any = getattr(manager, "truncate_computed_blocks", None)

        def truncate_computed_blocks(*arguments: Any) -> Any:
            # The engine's own hit ends inside a block, and a longer one is loaded from there on.
            self.counts["local_tails_outdone"] += 1
            return truncate(*arguments)

        if truncate is not None:
            manager.truncate_computed_blocks = truncate_computed_blocks

    def _count_hit(self, request: Request, local: int, tokens: int | None) -> None:
        if tokens is None:
            # With other weights it is looked up again, also if they change back before it asks.
            # While they are read it waits longer.
            watch, asked_at = self.side.weights, (CLOCK.now, self.side.weights.identity_digests)
            since, named = self._asked_since.setdefault(request.request_id, asked_at)
            if named is not watch.identity_digests:
                since, _ = self._asked_since[request.request_id] = asked_at
            asked = self.side.requests.by_id.get(request.request_id)
            patience = self._patience + ROOM_SECONDS * bool(self.side.room)
            if watch.question or self.connector.counters.get("begun_anew"):
                # A role that begins anew asks for the weights too.
                patience += self.side.lookups.patience.wait_for(request.num_tokens).seconds
            if asked is not None and asked.lookup.pending is not None:
                patience += self._patience + asked.lookup.pending.wait_ms / 1e3
            assert CLOCK.now - since <= patience, (
                f"{request.request_id} waits for its lookup past the deadline"
            )
        else:
            self._asked_since.pop(request.request_id, None)
        tracked = self.side.requests.by_id.get(request.request_id)
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
            self.counts["tails_promoted"] += bool(answer and answer.tail and answer.tiers)
            self._count_divergent(request, local, local + tokens)
            self.counts["hit_whole_prompt"] += (
                local + tokens + self.geometry.chunk_tokens >= request.num_tokens
            )
        elif found and local:
            self.counts["hit_local_longer" if local > found else "hit_local_equal"] += (
                local >= found
            )

    def _count_divergent(self, request: Request, local: int, end: int) -> None:
        """Count a hit up to `end` where the engine has deeper attention blocks than states.

        With `supports_divergent_local_hybrid_hits` vLLM would ask behind those blocks, and take no
        hit that does not end beyond them.
        """
        coordinator = self.scheduler.kv_cache_manager.coordinator
        gid = getattr(coordinator, "full_attention_group_id", None)
        kinds = {group.kind for group in self.geometry.groups}
        if gid is None or GroupKind.RECURRENT not in kinds:
            return
        hashes = request.block_hashes
        _, depths = coordinator.find_longest_cache_hit_per_group(hashes, request.num_tokens - 1)
        depth = depths[gid]
        if depth > local and max(depths) == depth:
            where = "at" if end == depth else "below" if end < depth else "beyond"
            self.counts[f"hit_divergent_{where}"] += 1

    # Steps

    def step(self) -> list[str]:
        """As vLLM's EngineCore, which steps while it has requests; returns those it answered."""
        self._steps += 1
        if self.scheduler.has_requests():
            is_executed = self._schedule()
            is_full = len(self._ahead) > self._ahead_max
            if not is_full and (is_executed or self.scheduler.has_requests()):
                return []
        answered = self._update(self._ahead.popleft()) if self._ahead else []
        self._repeat_due()
        return answered

    def step_idle(self) -> None:
        """A step that nothing but the next request would bring."""
        self._schedule()
        self.drain()

    def drain(self) -> list[str]:
        """The scheduler takes the results of every step; returns the requests answered by them."""
        return [
            name for _ in range(len(self._ahead)) for name in self._update(self._ahead.popleft())
        ]

    def is_busy(self) -> bool:
        """Whether the engine steps on."""
        return bool(self._ahead) or self.scheduler.has_requests()

    def _schedule(self) -> bool:
        """Plan a step, and let the workers run it; False where there is nothing to compute."""
        tracked = self.side.requests.by_id.items()
        # What has no tokens computed was preempted since its load, and is asked for again.
        restored = {
            name: one.load.restored for name, one in tracked if one.request.num_computed_tokens
        }
        output = self.scheduler.schedule()
        fresh_requests = [request.req_id for request in output.scheduled_new_reqs]
        for name in (*fresh_requests, *output.scheduled_cached_reqs.resumed_req_ids):
            traced = self.traced[name]
            traced.tokens[:] = traced.request.all_token_ids
            traced.drafts, traced.state = [], StatePlace()
        running = {*fresh_requests, *output.scheduled_cached_reqs.resumed_req_ids}
        restored = {name: restored[name] for name in running & restored.keys() if self._drafts}
        work, sampled, drafted = [], {}, {}
        ends = [
            self.traced[name].request.num_computed_tokens for name in output.num_scheduled_tokens
        ]
        is_drafted = max(ends, default=0) + self._drafts <= self._drafter_tokens_max
        for name, count in output.num_scheduled_tokens.items():
            traced = self.traced[name]
            drafts = len(output.scheduled_spec_decode_tokens.get(name, ()))
            # schedule() has already counted this step's tokens as computed, and with asynchronous
            # scheduling all drafts of the step before.
            start = min(traced.request.num_computed_tokens - count, len(traced.tokens) - 1)
            end = start + count - drafts
            table = self.scheduler.kv_cache_manager.get_block_ids(name)
            is_inside = end < len(traced.tokens)
            sampled[name] = traced.sample(end, drafts)
            accepted = max(0, len(sampled[name]) - 1)
            self.counts["drafts_accepted"] += accepted
            self.counts["drafts_rejected"] += drafts - accepted
            states = traced.state.step(self._state_tokens, start, end, drafts, accepted)
            work.append((traced, start, states, table))
            if self._drafts:
                stale = traced.tokens[-1] if is_inside and self._is_stale_at_ends else None
                last = end + accepted + self._drafts
                drafted[name] = DraftedStep(start + count, last, is_drafted, stale)
                count = self._rng.randint(0, self._drafts) if self._is_ngram else self._drafts
                guess = traced.content.guess(count) if is_drafted else []
                traced.drafts = [t + (self._rng.random() < 0.4) for t in guess]
        self.counts["steps_undrafted"] += bool(work) and not is_drafted
        fresh, self._fresh = self._fresh, []
        self._chance.between()
        run = output, fresh, work, drafted, restored
        self._reports.append([rank.run(*run) for rank in self.ranks])
        self._ahead.append(Step(output, sampled))
        self.counts["tokens"] += sum(states.end - start for _, start, states, _ in work)
        self.counts["blocks_copied"] += len(output.kv_cache_block_copies or ())
        self.counts["planned_ahead"] += len(self._ahead) > 1
        return bool(work)

    def _update(self, step: Step) -> list[str]:
        """The scheduler takes the results of a step; returns the requests that it answers."""
        output, names = step.output, list(step.sampled)
        due = len(self._reports) > self._lag + len(self._ahead)
        report = self._report() if due else KVConnectorOutput()
        result = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=list(step.sampled.values()),
            kv_connector_output=report,
        )
        for told in self.scheduler.update_from_output(output, result).values():
            if told.scheduler_stats is not None:
                self.dashboard.take(told.scheduler_stats)
        if self._drafts and not self._ahead_max:
            proposed = {name: self.traced[name].drafts for name in names if name in self.traced}
            drafts = DraftTokenIds([*proposed], [*proposed.values()])
            self.scheduler.update_draft_token_ids(drafts)
        if steps := self._chance.repeat():
            self._repeats.append((self._steps + steps - 1, report))
        answered = [
            name
            for name in names
            if name in self.traced and RequestStatus.is_finished(self.traced[name].request.status)
        ]
        for name in answered:
            request = self.traced.pop(name).request
            assert request.status in ENDS, request.status
            self.counts["preemptions"] += request.num_preemptions
            self.counts["stopped_ahead"] += any(name in other.sampled for other in self._ahead)
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

    def _repeat_due(self) -> None:
        """Some reports reach the connector a second time."""
        for at, repeated in self._repeats:
            if at <= self._steps:
                self.counts["repeated_reports"] += 1
                self.connector.update_connector_output(repeated)
        self._repeats = [entry for entry in self._repeats if entry[0] > self._steps]

    def quiet(self) -> bool:
        """Whether nothing that anybody waits for is under way in the workers.

        A role that is switched off waits for no store, and the next one for none of its stores.
        """
        outputs = [output for outputs in self._reports for output in outputs]
        is_on = self.saboteurs[0].guard.healthy
        awaited = self.side.stores.storing.keys() if is_on else set()
        return not self._repeats and not any(
            output.finished_recving or output.kv_connector_worker_meta.done.keys() & awaited
            for output in outputs
        )

    # The daemon

    def settle(self) -> None:
        """Wait until the daemon has answered everything, so that a seed repeats nearly the same."""
        deadline = time.monotonic() + DEADLINE_SECONDS
        for rank in self.ranks:
            reading = rank.side._weights._reading
            if reading is not None and reading.thread is not None:
                reading.thread.join()
        while True:
            waiting = []
            if self.saboteurs[0].guard.healthy:
                self.side.poll(CLOCK.now)
            for link in (rank.side._link for rank in self.ranks):
                if link.welcome is None:
                    link.poll(CLOCK.now)
                if link.fd is not None and link.welcome is None:
                    waiting.append(link.fd)
            link = self.side.session.link
            if link.fd is not None and (link.welcome is None or self._is_owed()):
                waiting.append(link.fd)
            if not waiting:
                return
            wait_readable(waiting, deadline)

    def cut(self) -> None:
        """The connection ends under the scheduler role."""
        sock = self.side.session.link._sock
        if sock is not None:
            sock.shutdown(socket.SHUT_RDWR)

    def barrier(self) -> dict[str, float] | None:
        """Wait until the daemon has seen all that was sent; its values, or None without a link."""
        link = self.side.session.link
        deadline = time.monotonic() + DEADLINE_SECONDS
        if not link.send(Stats(BARRIER_ID), CLOCK.now):
            return None
        while link.fd is not None:
            values = None
            for reply in link.poll(CLOCK.now):
                if isinstance(reply, Report):
                    values = reply.values
                else:
                    self.side.on_reply(reply, CLOCK.now)
            if values is not None:
                return values
            if link.fd is not None:
                wait_readable([link.fd], deadline)
        return None

    def _is_owed(self) -> bool:
        asked = any(pool.asked for pool in self.side.stores.credits._pools.values())
        return asked or any(
            tracked.is_prefetching and tracked.lookup.sent and tracked.lookup.found is None
            for tracked in self.side.requests.by_lease.values()
        )

    def close(self) -> None:
        """End the session while connected: this process lives on, so workers must say `drained`."""
        # Or the connector keeps this engine and its memory.
        vars(hybridkv.connector.worker.copiers).update(HostCopier=HostCopier)
        deadline = time.monotonic() + DEADLINE_SECONDS
        for link in (rank.side._link for rank in self.ranks):
            # A link may not have noticed yet that its daemon was killed, even after it greeted.
            is_welcome = False
            while link.poll(CLOCK.now) or link.welcome is None or not is_welcome:
                is_welcome = link.welcome is not None
                CLOCK.now += RECONNECT_SECONDS
                if link.fd is not None and link.welcome is None:
                    wait_readable([link.fd], deadline)
                assert time.monotonic() < deadline
        self.connector.shutdown()
        for rank in self.ranks:
            rank.connector.shutdown()


@functools.cache
def _digest(salt: int) -> str:
    """That of the weights of a rank."""
    model = Weights()
    model.salt.fill_(salt)
    return digest_weights({"model": model}).digest


SPECULATIVE = {"ngram": "qwen3_ngram", "eagle": "llama_eagle", "draft_model": "qwen3_draft"}
SPECULATIVE_HYBRIDS = {"ngram": "qwen3next_ngram", "eagle": "qwen3next_mtp"}
"""The bundled models whose configuration of speculation a method has."""


@functools.cache
def _base_config(name: str = "qwen3") -> Any:
    """Of a small model: only what is proven of speculation depends on which it is."""
    given = bundled_arguments(name)
    option = "--speculative-config"
    drafting = json.loads(given[given.index(option) + 1]) if option in given else None
    arguments = EngineArgs(
        model=str(bundled_models()[name]),
        speculative_config=drafting,
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
    drafting = shape.layout.drafting
    known = SPECULATIVE_HYBRIDS if shape.layout.has_recurrent else SPECULATIVE
    config = copy.copy(_base_config(known[drafting.method] if drafting else "qwen3"))
    if drafting is not None:
        speculative = config.speculative_config = copy.copy(config.speculative_config)
        speculative.num_speculative_tokens = shape.drafts
        speculative.disable_eagle_block_drop = not shape.is_block_dropped
        speculative.disable_padded_drafter_batch = not shape.is_padded
        draft = speculative.draft_model_config = copy.copy(speculative.draft_model_config)
        draft.max_model_len = shape.drafter_tokens_max or shape.max_model_len
    for part in ("model_config", "cache_config", "scheduler_config", "parallel_config"):
        setattr(config, part, copy.copy(getattr(config, part)))
    config.model_config.max_model_len = shape.max_model_len
    config.cache_config.num_gpu_blocks = shape.num_blocks
    config.cache_config.block_size = shape.layout.block_size
    config.cache_config.prefix_cache_retention_interval = shape.retention
    config.cache_config.prefix_match_unit = shape.match_unit
    config.cache_config.mamba_cache_mode = "align" if shape.layout.has_recurrent else "none"
    config.scheduler_config.max_num_batched_tokens = shape.budget
    config.scheduler_config.max_num_seqs = shape.max_seqs
    config.scheduler_config.max_model_len = shape.max_model_len
    config.scheduler_config.async_scheduling = shape.is_async
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
