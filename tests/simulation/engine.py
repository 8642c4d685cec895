"""One engine without a model: vLLM's scheduler, our connector, and memory that an oracle knows.

It replaces the model runner. Hooks are called in vLLM's order (KVConnectorModelRunnerMixin).
"""

import copy
import functools
import operator
import random
import socket
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import torch
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.worker.utils import allocate_kv_cache

import hybridkv.connector.scheduler.role
import hybridkv.connector.worker.copier_factory
import hybridkv.connector.worker.role
import hybridkv.vllm.seams
from hybridkv.client.link import RECONNECT_SECONDS
from hybridkv.connector import HybridKVConnector
from hybridkv.connector.copy.host import HostCopier
from hybridkv.connector.copy.part import Copier, PartLayout
from hybridkv.connector.copy.shards import ShardsCopier
from hybridkv.connector.messages import Answers, Mail
from hybridkv.connector.scheduler.nodes import node_identity
from hybridkv.connector.worker.relay import Relay
from hybridkv.core.copies import CopyOp
from hybridkv.core.coverage import slot_shapes
from hybridkv.core.errors import HybridKVError
from hybridkv.core.geometry import GroupKind
from hybridkv.core.keys import fingerprint
from hybridkv.shm.arena import Arena
from hybridkv.vllm.block_room import ROOM_SECONDS
from hybridkv.vllm.blocks import block_bytes
from hybridkv.vllm.hook_guard import RESUMED
from hybridkv.vllm.layout import (
    Parallelism,
    WorkerLayout,
    block_views,
    build_geometry,
    group_geometry,
    worker_layout,
)
from hybridkv.vllm.stages import BlockBytes, is_padding
from hybridkv.vllm.weights_digest import digest_weights
from hybridkv.wire.messages import Found, Lookup, Release, Report, Stats
from tests.devicesim.device import COMPUTE, Habits, SimulatedDevice
from tests.simulation.configs import Shape, block_hasher, config_of, structured_output_manager
from tests.simulation.layouts import WORD
from tests.simulation.node import Clock, Node, wait_readable
from tests.simulation.oracle import (
    Content,
    DraftedStep,
    GroupWords,
    Oracle,
    StatePlace,
    StateSpan,
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
NODES_SECONDS = 1.0
"""The longest time for which answers of several nodes are late without a fault of a hook."""
PAUSE_STEPS = 12  # How many steps the first pause of a role lasts that is switched off.
BREAKABLE = {
    "": "on_new_request offer_hit on_allocated make_plan on_report on_finished on_step_end "
    "change_identity exchange_messages on_reply",
    "audits": "on_answer offer_chunk on_store_begun must_wait on_step_planned on_report "
    "end_if_over",
    "lookups": "look_up tokens_to_load on_found on_flush",
    "loads": "on_allocated on_step_planned on_load_end",
    "stores": "plan_stores on_report",
    "requests": "advance on_asked",
    "session": "queue_message follow",
    "session.link": "poll queue flush",
}
"""Methods of the scheduler role and of its parts that a fault may break."""
BREAKABLE_ON_NODES = "plan_nodes on_report"
"""Methods of the link to several nodes that a fault may break too."""
BREAKABLE_IN_WORKERS = (
    "start_loads start_stores load_request expect_stores on_store_done attach_arena send_drained"
)


class BrokenError(Exception):
    """A fault that a Saboteur raises inside a hook."""


class Saboteur:
    """Breaks methods of a connector's role: each fails once in a hook, before or after its work."""

    def __init__(self, connector: Any) -> None:
        self.fired = 0
        self.unexpected: list[Exception] = []
        """Errors that hooks raised and that this saboteur did not make."""
        self.guard = connector.guard
        self._hook_thread = 0
        """The thread that is in a hook, or 0. Copies that another thread ends belong to no hook."""
        self._undo: Callable[[], None] = lambda: None
        self.guard.clock, self.guard.began_at = CLOCK.monotonic, CLOCK.now
        run = self.guard.run_hook
        self.guard.run_hook = lambda hook, work, *arguments, **how: run(
            hook, lambda: self._in_hook(work), *arguments, **how
        )

    def arm(self, part: Any, name: str, after: bool) -> None:
        """Let the next call of the method fail. A method that was armed before works again."""
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
        """Let every method work again."""
        self._undo()

    def _in_hook(self, work: Callable[[], Any]) -> Any:
        before, self._hook_thread = self._hook_thread, threading.get_ident()
        try:
            return work()
        except Exception as error:
            if not isinstance(error, BrokenError):
                self.unexpected.append(error)
            raise
        finally:
            self._hook_thread = before


@dataclass(frozen=True)
class Chance:
    """Functions that draw what happens while an engine runs."""

    load_delay: Callable[[], int]
    """Draws the steps that a load takes."""
    store_delay: Callable[[], int]
    """Draws the steps that a store takes after the step that it is planned for."""
    sheds_store: Callable[[], bool]
    """Draws whether a store finds no room in the worker."""
    repeat_delay: Callable[[], int]
    """Draws after how many steps a report reaches the connector once more, or 0 for never."""
    on_step_planned: Callable[[], None]
    """Called between the scheduler's plan of a step and the workers' run of it."""


class StagedStore(NamedTuple):
    """A store whose blocks are in the staging, and not in their slot yet."""

    op: CopyOp
    delay_steps: int
    size_bytes: int


@dataclass
class DelayedCopy:
    """A load or store that a worker has begun, and that ends some steps later."""

    steps_left: int
    finish: Callable[[], None]


class BusyCopier:
    """The real copier with habits of a GPU's.

    Loads take some steps. Stores pass through a staging of `staging_bytes`, and may reach their
    slots some steps later or be shed. A full staging sheds too. That only happens after a fault
    (`has_faulted`), because the planner then does not know all stores that are under way.
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
        self._delayed: list[DelayedCopy] = []
        self._staged_bytes = 0

    def store(self, ops: Sequence[CopyOp], done: Callable[[CopyOp, bool], None]) -> None:
        """Store or stage the blocks, which are the engine's again when this returns."""
        stores = []
        for op in ops:
            size_bytes = op.count * sum(map(block_bytes, self._groups[op.group_index]))
            staged_bytes = self._staged_bytes + size_bytes
            is_full = self._staging_bytes is not None and staged_bytes > self._staging_bytes
            assert not is_full or self._has_faulted(), "more is planned than the staging holds"
            if is_full or self._chance.sheds_store():
                done(op, False)
            elif delay_steps := self._chance.store_delay():
                self._staged_bytes = staged_bytes
                stores.append(StagedStore(op, delay_steps, size_bytes))
            else:
                self._copier.store([op], done)
        if not stores:
            return
        indices = {store.op.group_index for store in stores}
        copies = [
            [_copied(view) for view in views] if index in indices else views
            for index, views in enumerate(self._groups)
        ]
        copier = self._make(copies)

        # A copier keeps addresses alone, so the copies must live as long as this function.
        def finish(store: StagedStore, _: Any = copies) -> None:
            self._staged_bytes -= store.size_bytes
            copier.store([store.op], done)

        self._delayed += [
            DelayedCopy(store.delay_steps, functools.partial(finish, store)) for store in stores
        ]

    def load(self, ops: Sequence[CopyOp], done: Callable[[HybridKVError | None], None]) -> None:
        """Load the blocks some steps later."""
        finish = functools.partial(self._copier.load, ops, done)
        self._delayed.append(DelayedCopy(self._chance.load_delay(), finish))

    def tick(self) -> None:
        """Finish the copies whose delay is over, and count a step of all others."""
        due = [delayed for delayed in self._delayed if delayed.steps_left <= 0]
        self._delayed = [delayed for delayed in self._delayed if delayed.steps_left > 0]
        for delayed in self._delayed:
            delayed.steps_left -= 1
        for delayed in due:
            delayed.finish()

    def close(self) -> None:
        """Finish every copy."""
        for delayed in self._delayed:
            delayed.steps_left = 0
        self.tick()
        self._copier.close()


def _copied(view: torch.Tensor) -> torch.Tensor:
    """A copy of the blocks, with the strides that they have. Padding is never written."""
    if is_padding(view):
        return view
    return torch.empty_strided(view.shape, view.stride(), dtype=view.dtype).copy_(view)


class Traced:
    """A request as the workers know it, with the content of its tokens."""

    def __init__(self, request: Request, salt: int) -> None:
        self.request = request
        self.drafts: list[int] = []  # What the drafter proposes for the next step.
        self.state = StatePlace()
        self.named_blocks = 0
        """Block hashes whose content the audits know."""
        self.forget(salt)

    def forget(self, salt: int) -> None:
        """Begin anew after a change of the weights: everything is computed again."""
        self.tokens = list(self.request.all_token_ids)
        """All tokens, with those that the scheduler has not heard of yet."""
        self.content = Content(self.tokens, salt)
        self.named_blocks = 0

    def sample(self, end: int, drafts: int) -> list[int]:
        """Returns the tokens that a step samples which computes up to token `end`.

        There are none while tokens of the prompt follow. The step also computes the next `drafts`
        drafts, and accepts those that are right.
        """
        if end < len(self.tokens):
            return []
        before = len(self.tokens)
        for draft in (*self.drafts[:drafts], None):
            self.tokens.append(token_of(int(self.content.upto(len(self.tokens))[-1])))
            if draft != self.tokens[-1]:
                break
        return self.tokens[before:]


class WatchedRelay(Relay):
    """A relay that knows which lookups its daemon has not answered."""

    asked: set[int]

    def deliver(self, mail: Mail, now: float) -> None:
        """Send a plan's messages, and note their lookups."""
        if mail.hello is not None:
            self.asked = set()
        super().deliver(mail, now)
        for message in mail.messages:
            if isinstance(message, Lookup):
                self.asked.add(message.lease)
            elif isinstance(message, Release):
                self.asked.discard(message.lease)

    def awaited_fd(self) -> int | None:
        """The descriptor that becomes readable with an answer that is owed; None = none is."""
        self.receive(CLOCK.now)
        if self.link is None:
            return None
        is_owed = self.asked - {reply.lease for reply in self.replies if isinstance(reply, Found)}
        return self.link.fd if self.link.welcome is None or is_owed else None

    def take_answers(self, now: float) -> Answers | None:
        """Return the news, and forget the lookups that are answered."""
        answers = super().take_answers(now)
        for reply in answers.replies if answers is not None else ():
            if isinstance(reply, Found):
                self.asked.discard(reply.lease)
        return answers


class Weights(torch.nn.Module):
    """A rank's model: one buffer with the salt of the rank's bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("salt", torch.zeros(1, dtype=torch.int64))


@dataclass(frozen=True)
class RequestStep:
    """The tokens that a step computes of one request, and where they are in memory."""

    traced: Traced
    start: int  # The first token that is computed.
    states: StateStep
    table: Any  # Block numbers by group.
    drafts: DraftedStep | None  # None = the layout drafts nothing.
    restored: range  # Tokens that a load restored since the last step.

    @property
    def name(self) -> str:
        """The request's id."""
        return cast(str, self.traced.request.request_id)


class Rank:
    """One worker: its memory, its connector, and the oracle of what it must compute."""

    def __init__(self, shape: Shape, vllm_config: Any, rank: int) -> None:
        parallel = copy.copy(vllm_config.parallel_config)
        parallel.rank = rank
        config = copy.copy(vllm_config)
        config.parallel_config = parallel
        layout, stage = shape.layout, shape.stage(rank)
        names = layout.stage_layers(shape.cuts, stage)
        self.config = kv_config = layout.config(
            config, shape.num_blocks, True, shape.placement, names
        )
        kernels = layout.kernel_blocks(shape.placement)
        tensors = allocate_kv_cache(kv_config, torch.device("cpu"), shape.placement.layout, kernels)
        self.words: dict[str, Any] = {}
        """Memory by layer: `[block, token, head, word]`. Groups share one allocation."""
        for name, tensor in tensors.items():
            words = tensor.view(torch.int64).unflatten(0, (shape.num_blocks, -1)).transpose(2, 3)
            self.words[name] = words.view(shape.num_blocks, -1, *words.shape[3:]).numpy()
            self.words[name][:] = POISON
        groups = []
        for gid in range(len(layout.members)):
            layers = [self.words[name] for name in names[gid]]
            if gid in kv_config.prefix_cacheable_group_ids:
                spec = kv_config.kv_cache_groups[gid].kv_cache_spec
                group = group_geometry(gid, spec, (WORD,))
                drafting = layout.drafting
                drafter = drafting.layers if drafting else ()
                own = frozenset(layer for of, layer in drafter if of == gid)
                ahead = drafting.lookahead if drafting else 0
                if group.replicated:
                    groups.append(GroupWords(group, layers, stage, own, ahead))
                elif shape.shards:
                    first_head = rank * shape.placement.heads
                    groups.append(GroupWords(group, layers, first_head=first_head))
                else:
                    groups.append(GroupWords(group, layers, rank, own, ahead))
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
        self.tensors = tensors
        if self.side.relay is not None:
            self.side.relay.__class__ = WatchedRelay

    def words_of(self, gid: int) -> GroupWords:
        """The memory of a group that is served."""
        return next(words for words in self.oracle.groups if words.group.gid == gid)

    def awaited_fd(self) -> int | None:
        """The descriptor of an answer that the rank's relay waits for; None = there is none."""
        relay = self.side.relay
        fd: int | None = relay.awaited_fd() if relay is not None else None
        return fd

    def block_bytes(self) -> BlockBytes:
        """Returns what the worker tells the other stages."""
        return worker_layout(self.config, block_views(self.config, self.tensors)).padded_block_bytes

    def register(self, everyones: Sequence[BlockBytes] = ()) -> None:
        """Let the connector take the tensors. `everyones` are the `block_bytes` of all stages."""
        self.side.exchange = lambda own: everyones
        self.connector.register_kv_caches(self.tensors)
        if self.device is not None:
            views = [view for group in self.side.factory.shards[0].groups for view in group]
            for padding in filter(is_padding, views):
                self.device.adopt(padding)

    def layout(self) -> WorkerLayout:
        """Returns what the worker says of its tensors at the handshake."""
        layout = self.connector.get_handshake_metadata()
        assert isinstance(layout, WorkerLayout)
        return layout

    def update_weights(self, salt: int) -> None:
        """Set the weights by the method's name in vLLM, so that the connector hears of it."""
        self.model.salt.fill_(salt)

    def run(
        self, output: Any, fresh: list[int], request_steps: list[RequestStep]
    ) -> KVConnectorOutput:
        """Run one step: zero the `fresh` blocks, copy, compute, and call the connector's hooks."""
        if self.device is not None:
            # The model's kernels follow those that the connector put into the engine's stream.
            self.device.finish(COMPUTE)
        for words in self.words.values():
            words[fresh] = POISON
        for copied in output.kv_cache_block_copies or ():
            for words in self.words.values():
                words[copied.dst_block_id] = words[copied.src_block_id]
        # A layer writes the keys and values of all the step's tokens before any token reads.
        # So a request may share blocks that another request fills in this very step.
        # Recurrent state is read first, then written.
        for step in request_steps:
            self.oracle.check(step.name, step.traced.content, step.start, step.table, step.states)
        for step in request_steps:
            self.drafter_blocks += self.oracle.check_drafter(
                step.name, step.traced.content, step.restored, step.table
            )
        for step in request_steps:
            computed = range(step.start, step.states.end)
            self.oracle.write(step.traced.content, computed, step.table, step.states, step.drafts)
            for gid in self.scratch:
                for words in self.words.values():
                    words[step.table[gid][0]] = POISON + step.states.end
        for step in request_steps:
            self.oracle.check(step.name, step.traced.content, step.start, step.table)
        assert not output.has_sync_kv_loads
        self.connector.bind_connector_metadata(output.kv_connector_metadata)
        self.connector.handle_preemptions(output.kv_connector_metadata)
        with nullcontext() if self.device is None else self.device.hook():
            self.connector.start_load_kv(None)
            for step in request_steps:
                self.oracle.on_tokens_accepted(step.table, step.states)
            self.connector.wait_for_save()
        # So that a seed repeats: a thread compares.
        self.side.auditor.join()
        if self.device is not None:
            self.device.turn_some(self._rng.choice((1, 10, 100, 1000)))
            assert not self.device.held, f"a hook waited for {self.device.held}"
        for mapped in self.side.mapped.values():
            for copier in _copiers(mapped.copier):
                copier.tick()
        results = self.connector.get_transfer_results(output.finished_req_ids)
        done = KVConnectorOutput(
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
            kv_connector_worker_meta=self.connector.build_connector_worker_meta(),
        )
        self.connector.clear_connector_metadata()
        return done


def _copiers(copier: Copier) -> list[BusyCopier]:
    """A copier's copiers by shard, or itself. A device has none of them."""
    own = copier.copiers if isinstance(copier, ShardsCopier) else (copier,)
    return [busy for busy in own if isinstance(busy, BusyCopier)]


DEVICE_BYTES = 16 << 20
"""Free on a device: room for all that a step stores. The loads' staging would take 512 MiB, which
is written to, and takes a second of each seed."""


def _habits(rng: random.Random) -> Habits:
    return Habits(
        free_bytes=DEVICE_BYTES,
        can_digest=rng.random() < 0.7,
        registers=rng.choice((0, 5, 1 << 30, 1 << 30)),
        slow_registration=rng.random() < 0.5,
        breaks_at=rng.randrange(20000) if rng.random() < 0.1 else -1,
    )


@dataclass(frozen=True)
class StepAhead:
    """A step that the workers have run, and whose results the scheduler has not taken yet."""

    output: Any
    sampled: dict[str, list[int]]


class AskedLookup(NamedTuple):
    """Since when a request waits for its lookup, or for what the daemon reads of tiers for it."""

    since: float
    digests: Any  # Those of the weights at that time.
    is_pending: bool  # True if tiers are read for it.


class RepeatedReport(NamedTuple):
    """A report that reaches the connector a second time, in the step of this number."""

    step: int
    report: KVConnectorOutput


class Engine:
    """A scheduler and its workers, whose reports reach it `lag` steps late."""

    def __init__(self, shape: Shape, node: Node, engine_id: str, chance: Chance, lag: int) -> None:
        """`node` is the first of the nodes."""
        self.counts: Counter[str] = Counter()
        self.traced: dict[str, Traced] = {}
        config = config_of(shape, node.pattern if shape.nodes > 1 else node.socket_path, engine_id)
        kv_config = shape.layout.config(
            config,
            shape.num_blocks,
            False,
            shape.placement,
            shape.layout.stage_layers(shape.cuts, 0),
        )
        self.hash_tokens = kv_config.hash_block_size
        self.hasher = block_hasher(self.hash_tokens)
        self._lag = lag
        self._chance = chance
        self._drafts = shape.drafts
        self._is_ngram = shape.layout.drafting is not None and not shape.layout.drafting.has_layers
        self._state_tokens = shape.layout.state_tokens
        # The V2 model runner runs the drafter in every step, and knows a prompt's next token.
        longest = min(shape.max_model_len, shape.drafter_tokens_max or shape.max_model_len)
        self._drafter_tokens_max = sys.maxsize if shape.is_v2 else longest
        drafting = shape.layout.drafting
        is_stale = drafting and drafting.lookahead and shape.is_padded and not shape.is_v2
        self._is_stale_at_ends = bool(is_stale)
        self._rng = random.Random(shape.num_blocks)  # Draws which drafts are wrong.
        self._patience = float(str(shape.settings["lookup_timeout_ms"])) / 1e3
        if shape.nodes > 1:
            # Steps carry the question and the answer, and rounds of both where nodes differ.
            self._patience += NODES_SECONDS
        self._asked: dict[str, AskedLookup] = {}
        """Requests that wait for their lookup, by name."""
        self._namespaces: dict[tuple[str, ...], bytes] = {}
        """Identities by the digests of all ranks."""
        vars(hybridkv.connector.scheduler.role).update(time=CLOCK)
        vars(hybridkv.connector.worker.role).update(time=CLOCK)
        vars(hybridkv.connector.worker.copier_factory).update(HostCopier=self._copier)
        # No kernel of vLLM's CPU build runs here.
        vars(hybridkv.vllm.seams).update(has_wrong_drafted_states=lambda: False)
        make = AsyncScheduler if shape.is_async else Scheduler
        self.scheduler: Any = make(
            vllm_config=config,
            kv_cache_config=kv_config,
            structured_output_manager=structured_output_manager(),
            block_size=shape.layout.unit,
            hash_block_size=self.hash_tokens,
            log_stats=True,
        )
        self.router, self.dashboard = Router(), Dashboard()
        self.scheduler.kv_event_publisher.publish = lambda batch: self.router.hear(batch.events)
        self.connector = self.scheduler.connector
        self.ranks = [Rank(shape, config, rank) for rank in range(shape.ranks)]
        everyones = [rank.block_bytes() for rank in self.ranks[:: shape.ranks // shape.stages]]
        for rank in self.ranks:
            rank.register(everyones)
        layouts = {number: rank.layout() for number, rank in enumerate(self.ranks)}
        self._staging_bytes: int | None = None
        if shape.staging is not None:
            chunk_tokens = shape.settings.get("hybrid_chunk_size")
            geometry = build_geometry(
                kv_config,
                layouts,
                cast("int | None", chunk_tokens),
                Parallelism(shape.stages, shape.nodes, shape.shards),
            )
            shapes = (slot for group in geometry.groups for slot in slot_shapes(geometry, group))
            self._staging_bytes = int(shape.staging * max(size for size, _ in shapes))
        sharers = shape.ranks // shape.stages
        self.connector.set_xfer_handshake_metadata_pp_aware(
            {
                divmod(number, sharers): layout
                if shape.device is not None
                else replace(layout, staging_bytes=self._staging_bytes)
                for number, layout in layouts.items()
            }
        )
        self.saboteurs = [Saboteur(connector) for connector in (self.connector, *self._workers())]
        self.geometry = self.side.geometry
        self._aggregator = KVOutputAggregator.from_connector(self.connector, shape.ranks)
        self._ahead: deque[StepAhead] = deque()
        self._ahead_max = config.max_concurrent_batches - 1
        self._reports: deque[list[KVConnectorOutput]] = deque()
        self._repeats: list[RepeatedReport] = []
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
        """The scheduler role. A new one replaces a role that was switched off."""
        return self.connector.scheduler_role

    def relays(self) -> list[Relay]:
        """The relays of the nodes that have a connection, by node; none where there is one node."""
        relays = [rank.side.relay for rank in self.ranks]
        return [relay for relay in relays if relay is not None and relay.link is not None]

    def namespace_on(self, node: int, namespace: bytes) -> bytes:
        """The identity at a node's daemon."""
        nodes = self.geometry.nodes
        return node_identity(namespace, node, nodes) if nodes > 1 else namespace

    @property
    def true_namespace(self) -> bytes:
        """The identity of the bytes that are computed now, whatever the connector knows."""
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
        """Let one of the methods that hooks call fail."""
        saboteur, after = rng.choice(self.saboteurs), rng.random() < 0.5
        if saboteur is self.saboteurs[0]:
            where = rng.choice(sorted(BREAKABLE))
            part = operator.attrgetter(where)(self.side) if where else self.side
            names = BREAKABLE[where]
            if where == "session.link" and self.geometry.nodes > 1:
                names += f" {BREAKABLE_ON_NODES}"
            saboteur.arm(part, rng.choice(names.split()), after)
        else:
            part = self.ranks[self.saboteurs.index(saboteur) - 1].side
            names = BREAKABLE_IN_WORKERS
            if part.relay is not None and rng.random() < 0.3:
                part, names = part.relay, "deliver _send"
            saboteur.arm(part, rng.choice(names.split()), after)

    def fresh(self) -> None:
        """Wait for the end of every pause, and replace each role that faulted and goes on."""
        for saboteur in self.saboteurs:
            saboteur.disarm()
            if saboteur.fired:
                saboteur.guard.pause("the audit wants a fresh one")
        while not all(saboteur.guard.is_on for saboteur in self.saboteurs):
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
        """Add a request as it arrives."""
        self.traced[request.request_id] = Traced(request, salt)
        self.scheduler.add_request(request)

    def abort(self, name: str) -> None:
        """Abort a request whose client went away."""
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        del self.traced[name]

    def holding(self) -> int:
        """Returns how many requests have blocks and do not run: they load, or were aborted."""
        manager = self.scheduler.kv_cache_manager
        waiting = self.scheduler.requests.keys() - {r.request_id for r in self.scheduler.running}
        return sum(any(manager.get_block_ids(name)) for name in waiting)

    def _refuse_false_local_hits(self) -> None:
        """Drop hits of null blocks.

        vLLM 0.32 offers them where an attention chunk ends within a block.
        """
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
            # And from the answer on that tiers are read it waits for these anew.
            watch, name = self.side.weights, request.request_id
            tracked = self.side.requests.by_id.get(name)
            is_pending = tracked is not None and tracked.lookup.pending is not None
            asked_now = AskedLookup(CLOCK.now, watch.identity_digests, is_pending)
            first_asked = self._asked.setdefault(name, asked_now)
            is_same = first_asked.digests is watch.identity_digests
            if not is_same or first_asked.is_pending != is_pending:
                first_asked = self._asked[name] = asked_now
            known = self.side.lookups.patience
            patience = self._patience + ROOM_SECONDS * bool(self.side.room)
            patience += known.answer_seconds(request.num_tokens) - known.answer_seconds(0)
            is_attached = self.side.session.workers_attached()
            if watch.question or self.connector.counters.get(RESUMED) or not is_attached:
                # A role that begins anew asks for the weights too.
                patience += known.tier_wait(request.num_tokens).seconds
            if tracked is not None and tracked.lookup.lost:
                # After the loss of its connection it is looked up once more.
                patience += known.answer_seconds(request.num_tokens)
            if is_pending:
                patience += tracked.lookup.pending.wait_ms / 1e3
            began = first_asked.since
            if tracked is not None and tracked.lookup.lost:
                began = max(began, tracked.lookup.sent_at)
            waited = CLOCK.now - began
            story = self.side.requests.story(name)
            assert waited <= patience, (
                f"{name} waits for its lookup past the deadline, {waited} of {patience} s: {story}"
            )
        else:
            self._asked.pop(request.request_id, None)
        tracked = self.side.requests.by_id.get(request.request_id)
        answer = tracked.lookup.found if tracked else None
        found = answer.depth * self.geometry.chunk_tokens if answer else 0
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

        With `supports_divergent_local_hybrid_hits` vLLM would ask from the end of those blocks on,
        and take no hit that does not end after them.
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
        """Step as vLLM's EngineCore does while it has requests. Returns the answered requests."""
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
        """Run a step without requests, which in vLLM only the next request would bring."""
        self._schedule()
        self.drain()

    def drain(self) -> list[str]:
        """Let the scheduler take the results of every step. Returns the requests they answer."""
        return [
            name for _ in range(len(self._ahead)) for name in self._update(self._ahead.popleft())
        ]

    def is_busy(self) -> bool:
        """Whether the engine has requests or results to take."""
        return bool(self._ahead) or self.scheduler.has_requests()

    def _schedule(self) -> bool:
        """Plan a step and let the workers run it. Returns whether there was anything to compute."""
        tracked = self.side.requests.by_id.items()
        # What has no tokens computed was preempted since its load, and is asked for again.
        restored: dict[str, range] = {}
        for name, request in tracked:
            if request.request.num_computed_tokens:
                restored[name] = request.load.restored
        output = self.scheduler.schedule()
        fresh_requests = [request.req_id for request in output.scheduled_new_reqs]
        for name in (*fresh_requests, *output.scheduled_cached_reqs.resumed_req_ids):
            traced = self.traced[name]
            traced.tokens[:] = traced.request.all_token_ids
            traced.drafts, traced.state = [], StatePlace()
        running = {*fresh_requests, *output.scheduled_cached_reqs.resumed_req_ids}
        restored = {name: restored[name] for name in running & restored.keys() if self._drafts}
        request_steps, sampled = [], {}
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
            drafted = None
            if self._drafts:
                stale = traced.tokens[-1] if is_inside and self._is_stale_at_ends else None
                last = end + accepted + self._drafts
                drafted = DraftedStep(start + count, last, is_drafted, stale)
                draft_count = self._rng.randint(0, self._drafts) if self._is_ngram else self._drafts
                guess = traced.content.guess(draft_count) if is_drafted else []
                traced.drafts = [token + (self._rng.random() < 0.4) for token in guess]
            request_steps.append(
                RequestStep(
                    traced=traced,
                    start=start,
                    states=traced.state.step(
                        StateSpan(start, end, drafts, accepted), self._state_tokens
                    ),
                    table=table,
                    drafts=drafted,
                    restored=restored.get(name, range(0)),
                )
            )
        self.counts["steps_undrafted"] += bool(request_steps) and not is_drafted
        fresh, self._fresh = self._fresh, []
        self._chance.on_step_planned()
        self._reports.append([rank.run(output, fresh, request_steps) for rank in self.ranks])
        self._ahead.append(StepAhead(output, sampled))
        self.counts["tokens"] += sum(step.states.end - step.start for step in request_steps)
        self.counts["blocks_copied"] += len(output.kv_cache_block_copies or ())
        self.counts["planned_ahead"] += len(self._ahead) > 1
        return bool(request_steps)

    def _update(self, step: StepAhead) -> list[str]:
        """Let the scheduler take the results of a step. Returns the requests that it answers."""
        output, names = step.output, list(step.sampled)
        due = len(self._reports) > self._lag + len(self._ahead)
        report = self._report() if due else KVConnectorOutput()
        result = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=list(step.sampled.values()),
            kv_connector_output=report,
        )
        for outputs in self.scheduler.update_from_output(output, result).values():
            if outputs.scheduler_stats is not None:
                self.dashboard.take(outputs.scheduler_stats)
        if self._drafts and not self._ahead_max:
            proposed = {name: self.traced[name].drafts for name in names if name in self.traced}
            drafts = DraftTokenIds([*proposed], [*proposed.values()])
            self.scheduler.update_draft_token_ids(drafts)
        if delay_steps := self._chance.repeat_delay():
            self._repeats.append(RepeatedReport(self._steps + delay_steps - 1, report))
        answered = [
            name
            for name in names
            if name in self.traced and RequestStatus.is_finished(self.traced[name].request.status)
        ]
        for name in answered:
            request = self.traced.pop(name).request
            assert request.status in ENDS, request.status
            self.counts["preemptions"] += request.num_preemptions
            self.counts["stopped_ahead"] += any(name in ahead.sampled for ahead in self._ahead)
        return answered

    def _report(self) -> KVConnectorOutput:
        """Returns the oldest step's reports of all ranks, as vLLM aggregates them."""
        outputs = [
            ModelRunnerOutput(req_ids=[], req_id_to_index={}, kv_connector_output=output)
            for output in self._reports.popleft()
        ]
        report = self._aggregator.aggregate(outputs).kv_connector_output
        self.counts["failed_loads"] += len(report.failed_recving)
        return report

    def _repeat_due(self) -> None:
        """Give the connector the reports that are due a second time."""
        for repeated in self._repeats:
            if repeated.step <= self._steps:
                self.counts["repeated_reports"] += 1
                self.connector.update_connector_output(repeated.report)
        self._repeats = [repeated for repeated in self._repeats if repeated.step > self._steps]

    def is_quiet(self) -> bool:
        """Whether the workers have nothing under way that the scheduler role waits for.

        A role that is switched off waits for no store, and its successor for none of its stores.
        """
        outputs = [output for outputs in self._reports for output in outputs]
        is_on = self.saboteurs[0].guard.is_on
        awaited = self.side.stores.storing.keys() if is_on else set()
        return not self._repeats and not any(
            output.finished_recving or output.kv_connector_worker_meta.done.keys() & awaited
            for output in outputs
        )

    # The daemon

    def computes_for_others(self) -> bool:
        """Whether others may wait for what its next steps compute."""
        return any(promise.is_begun for promise in self.side.promises.open.values())

    def settle(self, awaits_steps: bool = False) -> None:
        """Wait until the daemon has answered every message, so that a seed nearly repeats.

        `awaits_steps`: a lookup may wait for the steps of other engines, which come later.
        """
        deadline = time.monotonic() + DEADLINE_SECONDS
        for rank in self.ranks:
            reading = rank.side.weights.reading
            if reading is not None and reading.thread is not None:
                reading.thread.join()
        while True:
            waiting = []
            if self.saboteurs[0].guard.is_on:
                self.side.exchange_messages(CLOCK.now)
            for link in (rank.side.link for rank in self.ranks):
                if link.welcome is None:
                    link.poll(CLOCK.now)
                if link.fd is not None and link.welcome is None:
                    waiting.append(link.fd)
            link = self.side.session.link
            if link.fd is not None and (link.welcome is None or self._is_owed(awaits_steps)):
                waiting.append(link.fd)
            waiting += [fd for rank in self.ranks if (fd := rank.awaited_fd()) is not None]
            if not waiting:
                return
            wait_readable(waiting, deadline)

    def cut(self) -> None:
        """Cut the scheduler role's connection to the daemon."""
        link: Any = self.side.session.link
        if self.side.session.nodes is not None:
            relays = self.relays()
            link = relays[self._steps % len(relays)].link if relays else None
        sock = link.sock if link is not None else None
        if sock is not None:
            sock.shutdown(socket.SHUT_RDWR)

    def barrier(self) -> dict[str, float] | None:
        """Wait until the daemon has seen every message. Returns its values, None without a link."""
        link = self.side.session.link
        deadline = time.monotonic() + DEADLINE_SECONDS
        if self.side.session.nodes is not None:
            for relay in self.relays():
                self._pass_barrier(relay, deadline)
            return None
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

    def _pass_barrier(self, relay: Relay, deadline: float) -> None:
        """Wait until a node's daemon has seen every message. The relay keeps other answers."""
        link = relay.link
        if link is None or not link.send(Stats(BARRIER_ID), CLOCK.now):
            return
        is_passed = False
        while not is_passed and relay.link is not None and link.fd is not None:
            relay.receive(CLOCK.now)
            is_passed = any(isinstance(reply, Report) for reply in relay.replies)
            relay.replies = [reply for reply in relay.replies if not isinstance(reply, Report)]
            if not is_passed and relay.link is not None and link.fd is not None:
                wait_readable([link.fd], deadline)

    def _is_owed(self, awaits_steps: bool) -> bool:
        asked = any(pool.asked for pool in self.side.stores.credits.pools.values())
        return asked or any(
            tracked.is_prefetching
            and tracked.lookup.sent
            and tracked.lookup.found is None
            and not (awaits_steps and tracked.lookup.pending)
            for tracked in self.side.requests.by_lease.values()
        )

    def close(self) -> None:
        """End the session while connected. The process lives on, so workers must say `drained`."""
        # Or the connector keeps this engine and its memory.
        vars(hybridkv.connector.worker.copier_factory).update(HostCopier=HostCopier)
        deadline = time.monotonic() + DEADLINE_SECONDS
        for link in (rank.side.link for rank in self.ranks):
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
    """The digest of a rank's weights with this salt."""
    model = Weights()
    model.salt.fill_(salt)
    return digest_weights({"model": model}).digest
