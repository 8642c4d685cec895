"""One seed: engines, a daemon, random requests and faults; AssertionError: a lie or a stall."""

import dataclasses
import gc
import itertools
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import xor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import vllm
from vllm import SamplingParams
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    get_block_hash,
    get_group_id,
    maybe_convert_block_hash,
)
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import Request

import hybridkv.vllm.hook_guard
from hybridkv.client.link import RECONNECT_SECONDS
from hybridkv.connector.metrics import (
    DAEMON_LOSSES,
    JUNCTIONS_FOUND,
    JUNCTIONS_STORED,
    LOADS_DONE,
    LOOKUPS_OUTRUN,
    LOOKUPS_PROMOTED,
    OBJECTS_STORED,
    PLAN_FAILED,
    TAILS_LOADED,
    TAILS_STORED,
    TOKENS_LOADED,
    Shed,
    audited,
    declined,
    stores_shed,
)
from hybridkv.core.audit import AuditOutcome
from hybridkv.core.coverage import largest_hit, stored_blocks
from hybridkv.core.geometry import Geometry, GroupKind
from hybridkv.core.keys import tenant_of
from hybridkv.shm.arena import attach_arena
from hybridkv.shm.slots import committed_slots, payload_offset, short_hash, slot_bytes
from hybridkv.vllm.hook_guard import RESUMED
from hybridkv.vllm.preflight import NAMED_LATE
from hybridkv.vllm.proven import SHARED_SIZES, STAGED
from hybridkv.vllm.versions import minor_version
from hybridkv.wire.messages import Decline
from tests.simulation.configs import Shape
from tests.simulation.engine import CLOCK, PAUSE_STEPS, Chance, Engine, Rank, Traced
from tests.simulation.layouts import LAYOUTS, Layout, Member, Placement
from tests.simulation.node import ARENAS, Node, ObjectName, SlotVersion
from tests.simulation.oracle import Content, GroupWords, Words, block_tokens
from tests.waiting import DEADLINE_SECONDS

STEPS_MAX = 4000
FAULTS_UNTIL = STEPS_MAX // 2
"""Most seeds take a hundred steps. Weight updates preempt all requests, and may keep them from
ending before this step. Afterwards the requests must end."""
FAULTS = (
    "reset",
    "flush",
    "clear",
    "stop",
    "flip",
    "identity",
    "forget",
    "abort",
    "late",
    "behind",
    "repeat",
    "cut",
    "shed",
)
FAULT_RATE = 0.3
"""The share of seeds that have a fault at all, for each fault, so that seeds differ."""
KILL_RATE = 0.05
"""A daemon takes a third of a second to start, so few seeds kill it."""
HOOKS_RATE = 0.25
"""The share of seeds that break hooks. FAULTS_MAX faults switch a role off."""
COUNTED = {
    "loads": LOADS_DONE,
    "tokens_loaded": TOKENS_LOADED,
    "objects_stored": OBJECTS_STORED,
    "plan_failed": PLAN_FAILED,
    "lookups_late_answer": declined(Decline.LATE_ANSWER),
    "losses": DAEMON_LOSSES,
    "lookups_promoted": LOOKUPS_PROMOTED,
    "lookups_outrun": LOOKUPS_OUTRUN,
    "tails_stored": TAILS_STORED,
    "tails_loaded": TAILS_LOADED,
    "junctions_found": JUNCTIONS_FOUND,
    "junctions_stored": JUNCTIONS_STORED,
    "stores_no_staging": stores_shed(Shed.NO_STAGING),
    "stores_too_large": stores_shed(Shed.TOO_LARGE),
    "states_freed": stores_shed(Shed.STATE_FREED),
    "audits_passed": audited(AuditOutcome.PASSED),
    "audits_unmade": audited(AuditOutcome.INCONCLUSIVE),
}
"""The counters of the engines among the counts of a seed."""
TAILS_RATE = 0.6
"""The share of seeds with hits inside a block, where the layout can have them."""
FAMILIES_RATE = 0.5
"""The share of seeds with families of prompts, where the layout has recurrent layers."""
STUCK_STEPS = 500
NODES_STEPS = 3
"""Steps in which what a node's daemon tells unasked reaches the connector, reports that are late
apart."""
SALTS = (0, 3, 5)
"""The salts of an engine's weights, on which its bytes depend. 0 is the first."""
VOCABULARY = range(2, 2000)


STAGES_RATE = 0.15
"""The share of seeds with two stages of a pipeline."""
NODES_RATE = 0.15
"""The share of seeds whose ranks are on two nodes, with a daemon each."""
SIZES_RATE = 0.5
"""The share of seeds with engines of several tensor parallel sizes, where the layout can be."""
SIZES = ((1,), (1, 2), (2, 1), (2, 1, 1))
"""Tensor parallel sizes of engines that share what they store in SHARDS."""
SHARDS = 2


@dataclass(frozen=True)
class Draw:
    """The sizes, faults and settings that a seed draws before it begins."""

    shape: Shape
    arena: str
    faults: frozenset[str]
    requests: int
    engines: int
    rate: float
    fault_rate: float
    step_seconds: float
    intermission: str
    """What is lost after half of the requests: "engine" (its own cache), "daemon" or "nothing"."""
    lag: int
    """Steps by which the workers' reports come late."""
    hooks: random.Random
    """Draws faults of hooks where `hook_rate` is above 0. No other draw depends on it."""
    hook_rate: float
    """Faults of hooks in each step."""
    hook_faults: int
    """How many faults of hooks switch a role off."""
    sizes: tuple[int, ...]
    """The tensor parallel size of each engine with `share_tp`. Empty = without."""
    turns: random.Random | None
    """Draws next turns of prompts alone. None = hits end at whole blocks."""
    families: random.Random | None
    """Draws prompts that share a system prompt and a document alone. None = there are none."""


def _cut(member: Member, chance: float) -> int:
    """Return the layers of a group on the first stage, chosen by a number in [0, 1).

    vLLM 0.32 does not start where a stage has no layer of a group whose layers differ.
    """
    count, fewest = len(member.layers), int(len(set(member.layers)) > 1)
    return fewest + int(chance * (count - 2 * fewest + 1))


def _cuts(layout: Layout, rng: random.Random) -> tuple[int, ...]:
    """Draw the layers of each group on the first of two stages, each of which has a served layer.

    Empty where there are too few layers.
    """
    served = [gid for gid, member in enumerate(layout.members) if member.what != "scratch"]
    count = sum(len(layout.members[gid].layers) for gid in served)
    while count > 1:
        cuts = tuple(map(_cut, layout.members, [rng.random() for _ in layout.members]))
        if 0 < sum(cuts[gid] for gid in served) < count:
            return cuts
    return ()


def _split_placements(layout: Layout) -> list[Placement]:
    """Return the placements with SHARDS heads that ranks with one head may have too."""
    whole = layout.placements()
    return [
        placement
        for placement in whole
        if placement.heads == SHARDS and dataclasses.replace(placement, heads=1) in whole
    ]


def _with_size(shape: Shape, size: int) -> Shape:
    """Return the shape of an engine of another tensor parallel size, which shares."""
    placement = dataclasses.replace(shape.placement, heads=SHARDS // size)
    settings = {**shape.settings, "share_tp": SHARDS, "weights_identity": "named"}
    return dataclasses.replace(
        shape, ranks=size, placement=placement, settings=settings, shards=SHARDS, staging=None
    )


def draw(rng: random.Random, layout: Layout | None, seed: int) -> Draw:
    """Draw a seed's sizes, near those at which its layout changes its behaviour."""
    hooks = random.Random(f"hooks of {seed}")
    drafting = random.Random(f"drafts of {seed}")
    if layout is None:
        names = sorted(name for name in LAYOUTS if LAYOUTS[name].is_served)
        layout = LAYOUTS[rng.choices(names, [LAYOUTS[name].weight for name in names])[0]]
    unit = layout.unit
    chunk = unit * rng.choice((1, 1, 2, 3)) if unit < 256 else unit
    derived = rng.random() < 0.15 and unit >= 32
    if derived:
        chunk = -(-128 // unit) * unit
    max_model_len = chunk * (
        rng.choice((4, 6, 9)) if unit < 256 else rng.choice((3, 4))
    ) + rng.randrange(unit)
    budget = rng.choice(
        (unit, unit + rng.randrange(unit), 2 * unit + 1, chunk, 2 * chunk + rng.randrange(chunk))
    )
    budget = max(16, budget, *(member.block for member in layout.members if member.is_recurrent))
    runner = random.Random(f"runners of {seed}")
    is_v2 = layout.drafts_on_v2 and runner.random() < 0.5
    # vLLM has no asynchronous scheduling with n-gram speculation. With asynchronous scheduling and
    # the V1 model runner hybridkv refuses drafters of recurrent layers.
    is_async = rng.random() < 0.5 and (is_v2 or not (layout.has_recurrent and layout.drafting))
    drafts = drafting.choice((1, 2, 3)) if layout.drafting else 0
    cuts: tuple[int, ...] = ()
    stages = random.Random(f"stages of {seed}")
    if layout.drafting is None and minor_version() in STAGED and stages.random() < STAGES_RATE:
        cuts = _cuts(layout, stages)
    # vLLM admits a request where all its steps fit that may be under way.
    needed = layout.blocks_for(max_model_len, budget * (1 + is_async + bool(cuts)), drafts)
    sparse = any(
        member.what in ("sliding", "mla_sliding", "recurrent") for member in layout.members
    )
    ranks = 2 if rng.random() < 0.15 else 1
    nodes = 1
    if minor_version() in STAGED and random.Random(f"nodes of {seed}").random() < NODES_RATE:
        nodes, ranks = 2, ranks if cuts else 2
    faults = frozenset(fault for fault in FAULTS if rng.random() < FAULT_RATE)
    if rng.random() < KILL_RATE:
        faults |= {"kill"}
    arena = rng.choice(tuple(ARENAS))
    settings: dict[str, object] = {
        "lookup_timeout_ms": rng.choice((20, 100, 1000)),
        "store_generated": rng.random() < 0.8,
        "checksum": rng.choice(
            ("on", "paranoid") if "flip" in faults else ("on", "off", "paranoid")
        ),
        "load_policy": rng.choice(("always", "faster")),
    }
    settings["audit"] = random.Random(f"audits of {seed}").choice(("off", "on", 1.0))
    if not derived:
        settings["hybrid_chunk_size"] = chunk
    match_unit = None
    tails = random.Random(f"tails of {seed}")
    is_refused = is_async and ".".join(vllm.__version__.split(".")[:2]) in NAMED_LATE
    if layout.has_tails and tails.random() < TAILS_RATE and not is_refused:
        match_unit = tails.choice([size for size in range(2, unit // 2 + 1) if unit % size == 0])
        settings |= {"sub_block_hits": True, "hybrid_chunk_size": unit}
        arena = "deep" if tails.random() < 0.3 else arena
    if arena == "deep":
        # Clearing leaves only what is below RAM.
        faults |= {"clear"}
    placements = layout.placements()
    sizes: tuple[int, ...] = ()
    sharing = random.Random(f"sizes of {seed}")
    can_share = not (layout.has_recurrent or layout.drafting or cuts or nodes > 1)
    # Every third seed has a device, of which a rank has one shard.
    if can_share and minor_version() in SHARED_SIZES and seed % 3 != 2:
        split = _split_placements(layout)
        if split and sharing.random() < SIZES_RATE:
            sizes, placements = sharing.choice(SIZES), split
    families = random.Random(f"families of {seed}")
    has_families = layout.has_recurrent and families.random() < FAMILIES_RATE
    shape = Shape(
        layout=layout,
        num_blocks=int(needed * rng.choice((1.0, 1.1, 1.5, 2.5, 4.0)))
        + 2
        + 2 * len(layout.members),
        max_model_len=max_model_len,
        budget=budget,
        max_seqs=rng.choice((2, 4, 8)),
        retention=rng.choice((0, 0, None, unit, 3 * unit)) if sparse else rng.choice((0, None)),
        ranks=ranks * 2 if cuts else ranks,
        placement=placements[int(rng.random() * len(placements))],
        settings=settings,
        is_async=is_async,
        staging=rng.choice((*[None] * 6, 0.5, 1.0, 2.5, 2.5, 8.0)),
        drafts=drafts,
        match_unit=match_unit,
        drafter_tokens_max=drafting.choice((None, None, None, max_model_len * 2 // 3)),
        is_block_dropped=drafting.random() < 0.8,
        # With padding no prompt of several steps is stored where there are states.
        is_padded=drafting.random() < (0.2 if layout.has_recurrent else 0.5),
        # The V1 model runner has no asynchronous scheduling with pipeline parallelism.
        is_v2=is_v2 or (is_async and bool(cuts)),
        cuts=cuts,
        nodes=nodes,
    )
    return Draw(
        shape=shape,
        arena=arena,
        faults=faults,
        requests=rng.randrange(10, 19),
        engines=2 if rng.random() < 0.25 or (match_unit and tails.random() < 0.7) else 1,
        rate=rng.choice((0.15, 0.4, 1.0)),
        fault_rate=rng.choice((0.02, 0.08, 0.2)),
        step_seconds=rng.choice((0.002, 0.005, 0.03)),
        intermission=rng.choice(("engine", "engine", "engine", "daemon", "nothing")),
        lag=rng.choice((0, 0, 0, 1, 4)),
        hooks=hooks,
        hook_rate=hooks.choice((0.03, 0.1, 0.3)) if hooks.random() < HOOKS_RATE else 0.0,
        hook_faults=hooks.choice((1, 1, 3)),
        sizes=sizes,
        turns=tails if match_unit else None,
        families=families if has_families else None,
    )


class Prefix(NamedTuple):
    """The first `end` tokens of a content."""

    content: Content
    end: int

    @property
    def words(self) -> Words:
        """The contents of the prefix's tokens."""
        return self.content.upto(self.end)


class NamedPrefix(NamedTuple):
    """A prefix with the hash of its last block."""

    block_hash: bytes
    prefix: Prefix


class Progress(NamedTuple):
    """The number of tokens an engine has computed, and the step in which that changed."""

    tokens: int
    step: int


class ChunkName(NamedTuple):
    """An identity and a chunk hash: what names a chunk in the arena."""

    namespace: bytes
    chunk_hash: bytes


@dataclass
class Site:
    """An engine of this world, and the tokens that its hashes name."""

    engine: Engine
    salt: int = 0
    """The weights' salt."""
    names: dict[bytes, Prefix] = field(default_factory=dict)
    """The prefix that each block hash names, with the present weights."""
    names_ever: dict[bytes, Prefix] = field(default_factory=dict)
    """The same with any weights: if weights come back, their blocks may be announced again."""
    ahead: dict[bytes, set[bytes]] = field(default_factory=dict)
    """The chunk hashes that were made of a block hash, each with another token after it."""
    progress: Progress = Progress(0, 0)
    done: list[list[int]] = field(default_factory=list)
    """All tokens of answered requests, for next turns."""


class World:
    """The daemons of one process, and `run`, which is one seed."""

    def __init__(self, directory: Path) -> None:
        self._nodes = {
            arena: [Node(directory, arena, number) for number in range(2)] for arena in ARENAS
        }
        self._seeds = 0
        # Engines are full of circles, and each keeps its blocks. What was imported stays.
        gc.freeze()

    def close(self) -> None:
        """End the daemons of all arenas."""
        gc.unfreeze()
        for node in itertools.chain(*self._nodes.values()):
            node.close()

    def run(self, seed: int, layout: Layout | None = None) -> dict[str, Any]:
        """Run one seed, and return its counts."""
        gc.collect()
        rng = random.Random(seed)
        drawn = draw(rng, layout, seed)
        if seed % 3 == 2:
            # Nothing else of a seed depends on who copies, except that four devices take too much
            # memory.
            shape = dataclasses.replace(drawn.shape, device=seed)
            engines = 1 if shape.nodes > 1 else drawn.engines
            drawn = dataclasses.replace(drawn, shape=shape, engines=engines)
        vars(hybridkv.vllm.hook_guard).update(
            FAULTS_MAX=drawn.hook_faults,
            PAUSE_SECONDS=PAUSE_STEPS * drawn.step_seconds,
            PAUSE_SECONDS_MAX=4 * PAUSE_STEPS * drawn.step_seconds,
        )
        nodes = self._nodes[drawn.arena][: drawn.shape.nodes]
        for node in nodes:
            node.fresh()
        self._seeds += 1
        life = _Life(rng, drawn, nodes, f"s{self._seeds}")
        try:
            life.live()
            if "kill" in drawn.faults and rng.random() < 0.5:
                # The engine may end before it notices.
                nodes[-1].kill()
        finally:
            for node in nodes:
                node.resume()
            for site in life.sites:
                site.engine.close()
        return {
            "layout": drawn.shape.layout.name,
            "arena": drawn.arena,
            "devices": int(drawn.shape.device is not None),
            "nodes": int(drawn.shape.nodes > 1),
            "sizes": int(bool(drawn.sizes)),
            **life.totals(),
        }


class _Life:
    """The run of one seed, from its first request to its audits."""

    def __init__(self, rng: random.Random, drawn: Draw, nodes: Sequence[Node], name: str) -> None:
        self._rng = rng
        self._drawn = drawn
        self._nodes = nodes
        self.counts: Counter[str] = Counter()
        self.sites: list[Site] = []
        self._names: dict[ChunkName, Prefix] = {}
        """The tokens that each chunk's name stands for."""
        for number in range(len(drawn.sizes) or drawn.engines):
            shape = drawn.shape
            if drawn.sizes:
                shape = _with_size(shape, drawn.sizes[number])
            if number:
                shape = dataclasses.replace(shape, num_blocks=shape.num_blocks + rng.randrange(20))
            chance = Chance(
                load_delay=self._load_delay,
                store_delay=self._store_delay,
                sheds_store=self._sheds_store,
                repeat_delay=self._repeat_delay,
                on_step_planned=self._on_step_planned,
            )
            self.sites.append(Site(Engine(shape, nodes[0], f"{name}.{number}", chance, drawn.lag)))
        self._geometry: Geometry = self.sites[0].engine.geometry
        chunk = self._geometry.chunk_tokens
        self._room = drawn.shape.max_model_len - 2
        self._stems = [rng.choices(VOCABULARY, k=rng.randrange(1, self._room)) for _ in range(3)]
        self._stems.append(rng.choices(VOCABULARY, k=self._room // chunk * chunk))
        self._systems = self._parts(3, self._room // 2)
        self._documents = self._parts(2, self._room // 4)
        self._resume_at = 0
        self._is_settling = False  # Whether what happened is to reach every connector, and no more.
        self._requests = 0

    def live(self) -> None:
        """Random requests and faults until all are answered, then the audits."""
        drawn, rng = self._drawn, self._rng
        idle, due = 0, drawn.requests // 2
        for step in range(STEPS_MAX):
            CLOCK.now += drawn.step_seconds
            if self._requests < due and rng.random() < drawn.rate:
                self._add(rng.choice(self.sites))
            if self._is_stopped and step >= self._resume_at:
                self._resume()
            if rng.random() < drawn.fault_rate and step < FAULTS_UNTIL:
                self._fault(step)
            if drawn.hooks.random() < drawn.hook_rate and step < FAULTS_UNTIL:
                drawn.hooks.choice(self.sites).engine.sabotage(drawn.hooks)
            for site in self.sites:
                self._step(site)
                self._check_progress(site, step)
            is_busy = any(s.engine.is_busy() or not s.engine.is_quiet() for s in self.sites)
            idle = 0 if is_busy or self._requests < due else idle + 1
            if idle == 2 and due == drawn.requests:
                break
            if idle == 2:
                due = drawn.requests
                self._intermission()
        else:
            raise AssertionError(
                f"requests wait for ever: {[s.engine.scheduler.requests for s in self.sites]}"
            )
        self.counts["steps"] = step
        self._resume()
        self._audit()

    @property
    def _is_stopped(self) -> bool:
        """Whether some daemon is stopped."""
        return any(node.stopped for node in self._nodes)

    def _resume(self) -> None:
        for node in self._nodes:
            node.resume()

    def totals(self) -> dict[str, int]:
        """Counts of the seed and of its engines."""
        totals = Counter(self.counts)
        for site in self.sites:
            totals.update(site.engine.counts)
            totals.update(site.engine.router.counts)
            totals["drafter_blocks"] += sum(rank.drafter_blocks for rank in site.engine.ranks)
            for name, metric in COUNTED.items():
                totals[name] += int(site.engine.connector.counters.get(metric, 0))
        return dict(totals)

    # What happens

    def _load_delay(self) -> int:
        return self._rng.choice((0, 0, 1, 3, 7)) if "late" in self._drawn.faults else 0

    def _store_delay(self) -> int:
        return self._rng.choice((0, 1, 1, 2, 9)) if "behind" in self._drawn.faults else 0

    def _repeat_delay(self) -> int:
        rng = self._rng
        return rng.choice((1, 2, 6)) if "repeat" in self._drawn.faults and rng.random() < 0.2 else 0

    def _sheds_store(self) -> bool:
        is_shed = "shed" in self._drawn.faults and self._rng.random() < 0.2
        self.counts["shed"] += is_shed
        return is_shed

    def _on_step_planned(self) -> None:
        rng, faults = self._rng, sorted(self._drawn.faults & {"flip", "clear", "kill", "cut"})
        if self._is_settling:
            return
        if faults and rng.random() < self._drawn.fault_rate / 4 and not self._is_stopped:
            self._harm(rng.choice(faults), rng.choice(self.sites), 0)
            self.counts["harm_between"] += 1

    def _parts(self, count: int, most: int) -> list[list[int]]:
        """Draws parts of a family's prompts, of up to so many tokens."""
        rng = self._drawn.families
        if rng is None:
            return []
        return [rng.choices(VOCABULARY, k=rng.randrange(1, most)) for _ in range(count)]

    def _add(self, site: Site) -> None:
        rng, chunk, turns = self._rng, self._geometry.chunk_tokens, self._drawn.turns
        stem = rng.choice([*self._stems, *site.done[-3:]])
        cut = rng.choice(
            (
                "any",
                "any",
                "boundary",
                "boundary",
                "before",
                "after",
                "whole",
                "whole",
                "whole",
                "short",
            )
        )
        boundary = rng.randrange(len(stem) // chunk + 1) * chunk
        kept = {
            "any": rng.randrange(1, len(stem) + 1),
            "boundary": boundary,
            "before": boundary - 1,
            "after": boundary + 1,
            "whole": len(stem),
            "short": rng.randrange(1, chunk + 1),
        }[cut]
        prompt = stem[: max(0, kept)]
        if rng.random() < 0.3 or not prompt:
            prompt = prompt + rng.choices(VOCABULARY, k=rng.choice((1, 5, chunk // 2 + 1, chunk)))
        done = [tokens for each_site in self.sites for tokens in each_site.done[-3:]]
        # What another engine answered after this one's turn: it has more than what is here.
        further = [t for t in done if any(t[: len(d)] == d != t for d in site.done)]
        if turns is not None and done and turns.random() < 0.7:
            # The next turn of a prompt whose end inside a block was stored, here or elsewhere.
            next_turn = turns.choices(VOCABULARY, k=turns.randrange(1, 2 * chunk))
            prompt = [*turns.choice(further or done), *next_turn]
        families = self._drawn.families
        if families is not None and families.random() < 0.7:
            question = families.choices(VOCABULARY, k=families.randrange(1, 2 * chunk))
            system = families.choice(self._systems)
            prompt = [*system, *families.choice([*self._documents, []]), *question]
        prompt = prompt[: self._room]
        self._requests += 1
        generated = rng.choice(
            (1, 1, 2, 5, min(self._geometry.hash_tokens + 1, 40), min(chunk + 3, 40))
        )
        salt = rng.choice(("a", "b")) if rng.random() < 0.1 else None
        request = Request(
            f"r{self._requests}",
            prompt,
            SamplingParams(
                temperature=0.0,
                ignore_eos=True,
                max_tokens=generated,
                stop_token_ids=rng.sample(VOCABULARY, 150) if rng.random() < 0.3 else None,
            ),
            None,
            block_hasher=site.engine.hasher,
            cache_salt=salt,
        )
        site.engine.add(request, _salt(site, request))
        self.counts["requests"] += 1
        self.counts[f"prompt_{cut}"] += 1

    def _fault(self, step: int) -> None:
        if not self._drawn.faults:
            return
        what = self._rng.choice(sorted(self._drawn.faults))
        site = self._rng.choice(self.sites)
        scheduler = site.engine.scheduler
        if what == "abort":
            self._abort(site)
        elif what == "reset":
            self.counts[what] += bool(scheduler.reset_prefix_cache())
        elif what == "identity":
            self._new_weights(site)
        elif what == "forget":
            scheduler.reset_prefix_cache(reset_connector=True)
            self.counts[what] += 1
        elif what == "flush":
            self._drain(site)
            if not site.engine.holding():
                scheduler.reset_prefix_cache(reset_running_requests=True)
                self.counts[what] += 1
        else:
            self._harm(what, site, step)

    def _harm(self, what: str, site: Site, step: int) -> None:
        """Do a fault to the daemon, or to a connection to it."""
        rng = self._rng
        node = self._nodes[0] if len(self._nodes) == 1 else rng.choice(self._nodes)
        if not self._is_stopped:
            # So that what the daemon has seen by then does not depend on the machine's speed.
            for each_site in self.sites:
                each_site.engine.barrier()
        if what == "cut":
            site.engine.cut()
            self.counts[what] += 1
        elif what == "flip":
            self.counts[what] += node.flip(rng, rng.choice((3, 30)))
        elif not self._is_stopped and what in ("clear", "stop", "kill"):
            if what == "clear":
                node.control.clear_objects()
            elif what == "stop":
                node.stop()
                self._resume_at = step + rng.randrange(1, 60)
            else:
                node.kill()
            self.counts[what] += 1

    def _intermission(self) -> None:
        """Clear one cache while nothing runs: the engine's own, or the daemon's."""
        what = self._drawn.intermission
        if what == "engine":
            for site in self.sites:
                assert site.engine.scheduler.reset_prefix_cache()
        elif what == "daemon" and not self._is_stopped:
            self._clear()
        self.counts[f"intermission_{what}"] += 1

    def _clear(self) -> None:
        for site in self.sites:
            site.engine.barrier()
        for node in self._nodes:
            node.control.clear_objects()

    def _abort(self, site: Site) -> None:
        """Abort a request of a drawn state, so that rare states are aborted as well."""
        by_state: dict[str, list[str]] = {}
        for name, traced in site.engine.traced.items():
            tracked = site.engine.side.requests.by_id.get(name)
            state = (
                f"{traced.request.status.name.lower()}_{tracked.state if tracked else 'untracked'}"
            )
            by_state.setdefault(state, []).append(name)
        if by_state:
            state = self._rng.choice(sorted(by_state))
            site.engine.abort(self._rng.choice(by_state[state]))
            self.counts[f"abort_{state}"] += 1

    def _new_weights(self, site: Site) -> None:
        """Update the weights as a trainer does: everything is computed again, with other bytes.

        A trainer resets the cache before or after the update, with steps of a paused engine
        between. It writes by vLLM's method or by code of its own. Weights come back too.
        """
        engine, rng = site.engine, self._rng
        self._drain(site)
        if engine.holding():
            return
        if rng.random() < 0.3:
            for name in [*engine.traced]:
                engine.abort(name)
        site.salt = rng.choice(SALTS)
        is_followed, is_first = rng.random() < 0.5, rng.random() < 0.5
        engine.scheduler.set_pause_state(PauseState.PAUSED_ALL)
        for turn in ("update", "reset") if is_first else ("reset", "update"):
            if turn == "reset":
                engine.scheduler.reset_prefix_cache(
                    reset_running_requests=True, reset_connector=rng.random() < 0.5
                )
            for rank in engine.ranks if turn == "update" else ():
                if is_followed:
                    rank.update_weights(site.salt)
                else:
                    rank.model.salt.fill_(site.salt)
            for _ in range(rng.choice((0, 0, 1, 3))):
                if not self._is_stopped:
                    engine.settle()
                engine.step_idle()
        engine.scheduler.set_pause_state(PauseState.UNPAUSED)
        for traced in engine.traced.values():
            traced.forget(_salt(site, traced.request))
        site.names.clear()
        self.counts["identity"] += 1
        self.counts["unfollowed"] += not is_followed

    def _step(self, site: Site) -> None:
        others = [each.engine for each in self.sites if each is not site]
        if not self._is_stopped:
            site.engine.settle(any(engine.computes_for_others() for engine in others))
        self._take(site, site.engine.step)

    def _drain(self, site: Site) -> None:
        """End every step that is under way: only then does vLLM preempt all requests."""
        self._take(site, site.engine.drain)

    def _take(self, site: Site, work: Callable[[], list[str]]) -> None:
        """Do `work`, which returns the requests it answers, and name the tokens it adds to them."""
        traced = dict(site.engine.traced)
        self._name(site, traced)
        answered = work()
        self._name(site, traced)
        for name in answered:
            site.done.append(list(traced[name].request.all_token_ids)[: self._room])
            self.counts["answered"] += 1

    def _check_progress(self, site: Site, step: int) -> None:
        """Check that loads do not fill the pool: only running requests give blocks back."""
        engine = site.engine
        if engine.counts["tokens"] != site.progress.tokens:
            site.progress = Progress(engine.counts["tokens"], step)
        holding = engine.holding()
        is_stuck = (
            step - site.progress.step > STUCK_STEPS
            and engine.is_quiet()
            and not engine.scheduler.running
        )
        assert not (is_stuck and holding > 1), (
            f"{holding} requests hold the blocks that each of them needs to run"
        )

    # What must hold

    def _name(self, site: Site, requests: Mapping[str, Traced]) -> None:
        unit = site.engine.hash_tokens
        for traced in requests.values():
            hashes, tokens = traced.request.block_hashes, traced.request.all_token_ids
            known = min(len(hashes), (len(tokens) - self._geometry.lookahead_tokens) // unit)
            for index in range(traced.named_blocks, len(hashes)):
                prefix = Prefix(traced.content, (index + 1) * unit)
                block_hash = bytes(hashes[index])
                site.names[block_hash] = site.names_ever[block_hash] = prefix
                if index < known:
                    next_token = tokens[prefix.end] if self._geometry.lookahead_tokens else 0
                    chunk_hash = _looking_ahead(block_hash, next_token)
                    site.ahead.setdefault(block_hash, set()).add(chunk_hash)
                    self._names[ChunkName(site.engine.true_namespace, chunk_hash)] = prefix
            traced.named_blocks = known

    def _audit(self) -> None:
        """Check that nothing is held, no hook faulted, and no cache has wrong bytes."""
        for site in self.sites:
            engine = site.engine
            engine.fresh()
            side = engine.side
            free, blocks = engine.pool.get_num_free_blocks(), engine.pool.num_gpu_blocks
            assert free == blocks - 1, (
                f"{blocks - 1 - free} blocks of the engine are never given back"
            )
            requests, staging = side.requests, side.stores.staging
            assert not any(staging.used_bytes), f"staging is never given back: {staging.used_bytes}"
            stories = {name: requests.story(name) for name in requests.by_id}
            assert not stories, f"requests are tracked for ever: {stories}"
            assert not requests.by_lease, f"leases are tracked for ever: {list(requests.by_lease)}"
            assert not side.stores.storing, f"stores are never settled: {list(side.stores.storing)}"
            for saboteur in engine.saboteurs:
                assert not saboteur.unexpected, f"hooks faulted: {saboteur.unexpected}"
                self.counts["hook"] += saboteur.fired
                self.counts["begun_anew"] += saboteur.guard.counters[RESUMED]
            assert not engine.connector.counters.get(audited(AuditOutcome.DIFFERED)), (
                "a false alarm"
            )
            refused = [m for m in engine.connector.counters if m.family == "daemon_refusals"]
            assert not refused, f"the daemon refused: {refused}"
            engine.barrier()
            self._audit_engine(site)
        # What a cut connection held ends when the workers were told of the next one, in a step.
        deadline = time.monotonic() + DEADLINE_SECONDS
        while leases := sum(node.control.stats().values["leases"] for node in self._nodes):
            assert time.monotonic() < deadline, f"{leases} leases are kept"
            CLOCK.now += RECONNECT_SECONDS
            for site in self.sites:
                site.engine.step_idle()
        audits = [site.engine.side.audits.current for site in self.sites]
        assert not any(audits), f"audits never end: {audits}"
        # The daemon tells of evictions at the end of its turn; the second answer comes after that.
        # From here on each step may ask for slots, and evictions are told after it.
        for _ in range(2):
            for site in self.sites:
                site.engine.barrier()
        if len(self._nodes) > 1:
            self._settle_nodes()
        present = [self._present(site.engine.namespace) for site in self.sites]
        for site, objects in zip(self.sites, present, strict=True):
            self._audit_statistics(site)
            self._audit_router(site, "CPU", objects)
            self._audit_storage(site, objects)
        for number in range(len(self._nodes)):
            self._audit_arena(number)

    def _settle_nodes(self) -> None:
        """Step until all that the daemons of several nodes tell has reached the connectors.

        The first steps may ask for slots, for which objects are evicted. The last ones do not.
        """
        self._is_settling = True
        for _ in range(2 * (NODES_STEPS + self._drawn.lag)):
            for site in self.sites:
                site.engine.step_idle()
            for _ in range(2):
                for site in self.sites:
                    site.engine.barrier()
        for _ in range(NODES_STEPS + self._drawn.lag):
            for site in self.sites:
                site.engine.step_idle()

    def _audit_statistics(self, site: Site) -> None:
        """Check that every count has arrived at the dashboard."""
        engine = site.engine
        engine.step_idle()
        stats = engine.connector.get_kv_connector_stats()
        if stats is not None:
            engine.dashboard.add(stats.to_dict())
        has_faulted = any(saboteur.fired for saboteur in engine.saboteurs)
        engine.dashboard.check(engine.connector.counters, has_faulted)

    def _audit_storage(self, site: Site, present: set[ObjectName]) -> None:
        """As `_audit_router` for directories, once the daemon has told what they have lost."""
        deadline = time.monotonic() + DEADLINE_SECONDS
        while site.engine.router.media["STORAGE"]:
            try:
                there = present | self._nodes[0].on_disk(site.engine.namespace)
                self._audit_router(site, "STORAGE", there)
                break
            except AssertionError:
                if time.monotonic() > deadline:
                    raise
            site.engine.barrier()
            site.engine.step_idle()

    def _audit_router(self, site: Site, medium: str, present: set[ObjectName]) -> None:
        """Check that lookups would hit every prefix that the engine's events announce."""
        engine, geometry = site.engine, self._geometry
        names = {
            maybe_convert_block_hash(BlockHash(block_hash)): NamedPrefix(block_hash, prefix)
            for each in self.sites
            for block_hash, prefix in each.names_ever.items()
        }
        for announced in engine.router.chains(medium):
            tokens, prefix = announced.tokens, names[announced.block_hashes[-1]].prefix
            assert len(tokens) == prefix.end, "the tokens of a prefix"
            assert list(prefix.content.tokens[: prefix.end]) == tokens
            chain = [names[block_hash] for block_hash in announced.block_hashes]
            chunk_ends = [
                named.block_hash for named in chain if named.prefix.end % geometry.chunk_tokens == 0
            ]
            # The token after the prefix is that of any prompt that went on there.
            hits = []
            ahead = [each.ahead.get(chunk_ends[-1], set()) for each in self.sites]
            for last in set[bytes]().union(*ahead) or {chunk_ends[-1]}:
                chunk_hashes = [
                    _looking_ahead(block_hash, tokens[at * geometry.chunk_tokens])
                    if geometry.lookahead_tokens
                    else block_hash
                    for at, block_hash in enumerate(chunk_ends[:-1], 1)
                ]
                masks = [
                    bytes(
                        ObjectName(group.gid, chunk_hash) in present
                        for chunk_hash in (*chunk_hashes, last)
                    )
                    for group in geometry.groups
                ]
                hits.append(largest_hit(geometry, masks, len(chunk_ends)) * geometry.chunk_tokens)
            assert prefix.end in hits, (
                f"{prefix.end} tokens are announced, a lookup would hit {hits}"
            )
            self.counts["announced_chains"] += 1
            is_others = BlockHash(chunk_ends[-1]) not in site.names_ever
            self.counts["announced_of_others"] += is_others
            self.counts["announced_storage"] += medium == "STORAGE"

    def _present(self, namespace: bytes) -> set[ObjectName]:
        """Returns the objects that every daemon has in RAM under an identity."""
        engine, present = self.sites[0].engine, []
        for number, node in enumerate(self._nodes):
            welcome = node.control.welcome
            arena = attach_arena(Path(welcome.arena_path), welcome.arena_bytes)
            try:
                headers = [header for _, header in committed_slots(arena.memory)]
            finally:
                arena.close()
            own = engine.namespace_on(number, namespace)
            present.append(
                {
                    ObjectName(header.gid, header.chunk_hash)
                    for header in headers
                    if header.namespace == own
                }
            )
        return set.intersection(*present)

    def _audit_engine(self, site: Site) -> None:
        """Check that each block that the engine could hit holds what its hash says."""
        for rank in site.engine.ranks:
            groups = {words.group.gid: words for words in rank.oracle.groups}
            for block in site.engine.pool.blocks:
                words = (
                    groups.get(get_group_id(block.block_hash))
                    if block.block_hash is not None
                    else None
                )
                if words is None:
                    continue
                boundary = block.block_hash_num_tokens
                prefix = site.names[bytes(get_block_hash(block.block_hash))]
                assert prefix.end == boundary, (
                    f"block {block.block_id} is named for {prefix.end} tokens and holds {boundary}"
                )
                assert rank.oracle.holds(words, block.block_id, prefix.content, boundary), (
                    f"block {block.block_id} of group {words.group.gid} at {boundary} "
                    "is cached and wrong"
                )
                self.counts["blocks_audited"] += 1

    def _audit_arena(self, number: int) -> None:
        """Check that each object in a node's RAM holds what its name says, and names its parent."""
        node, engine = self._nodes[number], self.sites[0].engine
        welcome = node.control.welcome
        names = {
            ChunkName(engine.namespace_on(number, name.namespace), name.chunk_hash): prefix
            for name, prefix in self._names.items()
        }
        by_short_hash = {
            (name.namespace, short_hash(name.chunk_hash)): prefix for name, prefix in names.items()
        }
        tenant_bytes: Counter[int] = Counter()
        arena = attach_arena(Path(welcome.arena_path), welcome.arena_bytes)
        try:
            for offset, header in committed_slots(arena.memory):
                if SlotVersion(offset, header.generation) in node.spoilt:
                    continue
                prefix = names.get(ChunkName(header.namespace, header.chunk_hash))
                assert prefix is not None, (
                    f"the object at {offset} has a name that nothing was computed for"
                )
                parent = (
                    by_short_hash.get((header.namespace, header.parent_short))
                    if header.parent_short
                    else Prefix(prefix.content, 0)
                )
                assert parent is not None, (
                    f"the object at {offset} comes after a chunk that nobody knows"
                )
                chunk_tokens = self._geometry.chunk_tokens
                assert parent.end == (prefix.end - 1) // chunk_tokens * chunk_tokens
                assert np.array_equal(parent.words, prefix.words[: parent.end])
                tenant_bytes[header.tenant] += slot_bytes(header.part_bytes, header.parts)
                start = offset + payload_offset(header.parts)
                count = len(engine.ranks) // len(self._nodes)
                ranks = engine.ranks[number * count : (number + 1) * count]
                for place in range(header.parts):
                    part_start = start + place * header.part_bytes
                    part = arena.memory[part_start : part_start + header.part_bytes]
                    numbers = np.frombuffer(part, np.int64).copy()
                    rank, own_parts = ranks[place * count // header.parts], header.parts // count
                    words = rank.words_of(header.gid)
                    if own_parts > 1:
                        words = words.shard(place % own_parts, own_parts)
                    self._audit_part(rank, words, numbers, prefix)
                self.counts["objects_audited"] += 1
                self.counts["objects_of_tenants"] += header.tenant != 0
        finally:
            arena.close()
        quota = node.quota_bytes
        assert quota is None or all(
            size <= quota for tenant, size in tenant_bytes.items() if tenant
        ), tenant_bytes
        assert set(tenant_bytes) <= {0, tenant_of("a"), tenant_of("b")}

    def _audit_part(self, rank: Rank, words: GroupWords, part: Any, prefix: Prefix) -> None:
        gid = words.group.gid
        size = len(part) - self._padding_words(rank, gid, len(part))
        assert not part[size:].any(), f"padding of group {gid} at {prefix.end} is not zeros"
        part = part[:size]
        chunk, tail_tokens = divmod(prefix.end, self._geometry.chunk_tokens)
        if tail_tokens:
            assert self._drawn.shape.match_unit, "no match unit is set"
            is_right = _is_tail(words, prefix, part)
            self.counts["tails_audited"] += 1
        else:
            positions = stored_blocks(self._geometry, words.group, chunk - 1)
            is_right = np.array_equal(part, _stored(words, prefix.content, positions))
        assert is_right, f"the object of group {gid} at {prefix.end} is wrong"

    def _padding_words(self, rank: Rank, gid: int, words: int) -> int:
        """The words of padding in a part of so many words, of the blocks that are stored."""
        layout = rank.side.layout
        padding = layout.padding.get(gid, 0)
        self.counts["parts_padded"] += padding > 0
        size: int = words * padding // sum(layout.sizes[gid])
        return size


def _stored(words: GroupWords, content: Content, positions: range) -> Any:
    """The words of one rank's part of an object: by layer, then block, then as in memory."""
    size = words.group.tokens_per_block
    cells = slice(positions.start * size, positions.stop * size)
    if words.group.kind is GroupKind.RECURRENT:
        cells = slice(cells.stop - 1, cells.stop)
    layers = []
    for layer, view in enumerate(words.layers):
        blocks = words.expected(layer, content, cells).reshape(len(positions), *view.shape[1:])
        order = sorted((1, 2, 3), key=view.strides.__getitem__, reverse=True)
        layers.append(blocks.transpose(0, *order).ravel())
    return np.concatenate([*layers, np.empty(0, np.int64)])


def _is_tail(words: GroupWords, prefix: Prefix, part: Any) -> bool:
    """Whether one rank's part of a tail's object is right, up to the prefix's end."""
    cells, at = block_tokens(words.group, prefix.end), 0
    for layer, view in enumerate(words.layers):
        order = sorted((1, 2, 3), key=view.strides.__getitem__, reverse=True)
        shape = [view.shape[axis] for axis in order]
        size = int(np.prod(shape))
        block = part[at : at + size].reshape(shape).transpose(np.argsort(order))
        expected = words.expected(layer, prefix.content, cells)
        held = block[: len(expected)]
        if not np.array_equal(held, np.broadcast_to(expected, held.shape)):
            return False
        at += size
    return at == len(part)


def _looking_ahead(name: bytes, token: int) -> bytes:
    """Returns the chunk hash of a block hash and the token after it.

    For token 0 that is the block hash: (h, 0) -> h.
    """
    return bytes(map(xor, name, token.to_bytes(len(name), "little")))


def _salt(site: Site, request: Request) -> int:
    """Returns the salt of a request's bytes: of the weights and of its tenant."""
    return site.salt + {None: 0, "a": 1 << 50, "b": 1 << 51}[request.cache_salt]
