"""Staging is a credit: a rank's copies never need more of it, and what has no room is not lost."""

import random
from collections import Counter, deque
from types import SimpleNamespace
from typing import NamedTuple

import pytest

from hybridkv.connector.messages import StepReport
from hybridkv.connector.metrics import Shed, stores_shed
from hybridkv.connector.scheduler.requests import StoreProgress, TrackedRequest
from hybridkv.core.copies import NULL_BLOCK, CopyRun
from hybridkv.core.coverage import slot_shapes, stored_counts
from hybridkv.core.geometry import Geometry, GroupKind
from hybridkv.core.metrics import Metric
from tests.layouts import LAYOUTS
from tests.packing import packed_slots
from tests.unit.connector.requests import registry, step_of, store_planner

STEP_TOKENS = 8192
PROMPT_TOKENS = 128 << 10
CHUNKED = ["qwen3", "gemma3", "llama4", "qwen3next", "deepseekv4", "two_ranks", "two_ranks_mla"]
"""Layouts whose chunks divide a step."""


class StoredObject(NamedTuple):
    """An object by its group and chunk."""

    group_index: int
    chunk: int


class Prefill:
    """One request, computed step by step, and workers whose reports come `late` steps late."""

    def __init__(self, geometry: Geometry, staging_bytes: int, late: int, generated: int) -> None:
        self.geometry = geometry
        self.staging_bytes = staging_bytes
        self.counters: Counter[Metric] = Counter()
        tokens = PROMPT_TOKENS + generated
        self.request = SimpleNamespace(
            num_tokens=PROMPT_TOKENS,
            num_prompt_tokens=PROMPT_TOKENS,
            num_computed_tokens=0,
            block_hashes=[
                at.to_bytes(32, "little") for at in range(tokens // geometry.hash_tokens)
            ],
        )
        progress = StoreProgress([0] * len(geometry.groups))
        tracked = TrackedRequest(self.request, progress=progress)
        self.planner = store_planner(
            registry(geometry, self.counters, r=tracked),
            step_tokens=STEP_TOKENS,
            staging_bytes=staging_bytes,
        )
        self.stored: set[StoredObject] = set()  # Those that are planned.
        self.reports = deque([StepReport()] * late)
        self.inflight: list[CopyRun] = []

    def step(self, tokens: int) -> int:
        """Run one step, and then take the oldest report. Returns how many objects it stores."""
        geometry, request = self.geometry, self.request
        first = request.num_computed_tokens
        end = first + tokens
        request.num_tokens = max(request.num_tokens, end)
        tables, offers = [], []
        for group in geometry.groups:
            size = group.tokens_per_block
            kept = 0
            if group.kind is GroupKind.SLIDING:
                kept = max(0, first - group.window_tokens + 1) // size
            elif group.kind is GroupKind.CHUNKED_LOCAL:
                kept = first // group.window_tokens * group.window_tokens // size
            elif group.kind is GroupKind.RECURRENT:
                offers.append((group.gid, -(-end // size), end))
            tables.append([NULL_BLOCK] * kept + [*range(1 + kept, 1 + -(-end // size))])
        for shape in {shape for group in geometry.groups for shape in slot_shapes(geometry, group)}:
            slots = packed_slots(range(64))
            self.planner.credits.on_granted(shape, slots * 8, 0.0)
        state = SimpleNamespace(boundary_state_offloads={"r": offers})
        output = SimpleNamespace(num_scheduled_tokens={"r": tokens}, kv_connector_block_state=state)
        runs = self.planner.plan_stores(step_of(output, lambda _: tables))
        request.num_computed_tokens = end
        ranks = set(range(geometry.ranks))
        self.reports.append(StepReport(done=dict.fromkeys(runs, ranks)))
        self.inflight += runs.values()
        self.check()
        for run in runs.values():
            chunks = range(run.span.first_chunk, run.span.first_chunk + run.objects)
            self.stored |= {StoredObject(run.span.group_index, chunk) for chunk in chunks}
        report = self.reports.popleft()
        ended = [self.planner.storing[number].run for number in report.done]
        ended_ids = {id(run) for run in ended}
        self.inflight = [run for run in self.inflight if id(run) not in ended_ids]
        self.planner.on_report(report, 0.0)
        return sum(run.objects for run in runs.values())

    def stored_of(self, group_index: int) -> int:
        """Return how many objects of a group are planned."""
        return sum(stored.group_index == group_index for stored in self.stored)

    def check(self) -> None:
        """Assert, object by object, that no rank's copies need more than its staging."""
        geometry = self.geometry
        for rank in range(geometry.ranks):
            held = 0
            for run in self.inflight:
                group = geometry.groups[run.span.group_index]
                for chunk in range(run.span.first_chunk, run.span.first_chunk + run.objects):
                    if not group.replicated or chunk % geometry.ranks == rank:
                        held += run.span.count * group.block_bytes
            assert held <= self.staging_bytes, f"rank {rank}"

    def missing(self) -> set[StoredObject]:
        """Return objects of attention groups that are not stored, though the prompt has them."""
        geometry = self.geometry
        chunks = PROMPT_TOKENS // geometry.chunk_tokens
        wanted = {
            StoredObject(index, chunk)
            for index, group in enumerate(geometry.groups)
            if group.kind is not GroupKind.RECURRENT
            for chunk in range(chunks)
            if stored_counts(geometry, group)[chunk % len(stored_counts(geometry, group))]
        }
        return wanted - self.stored


def step_bytes(geometry: Geometry) -> int:
    """Return the bytes that one step of STEP_TOKENS tokens needs in one rank, with its states."""
    total = 0
    for group in geometry.groups:
        counts = stored_counts(geometry, group)
        chunks = STEP_TOKENS // geometry.chunk_tokens
        if group.kind is GroupKind.RECURRENT:
            total += group.block_bytes
            continue
        share = geometry.ranks if group.replicated else 1
        blocks = sum(counts[chunk % len(counts)] for chunk in range(0, chunks, share))
        total += blocks * group.block_bytes
    return total


@pytest.mark.parametrize("name", CHUNKED)
def test_a_long_prefill_is_stored_whole_with_the_staging_of_one_step(name: str) -> None:
    """128 Ki tokens in steps of 8 Ki: nothing waits, and states are stored at every step's end."""
    geometry = LAYOUTS[name]
    prefill = Prefill(geometry, step_bytes(geometry), 0, 0)
    for _ in range(PROMPT_TOKENS // STEP_TOKENS):
        prefill.step(STEP_TOKENS)
    assert prefill.missing() == set()
    for index, group in enumerate(geometry.groups):
        if group.kind is GroupKind.RECURRENT:
            assert prefill.stored_of(index) == PROMPT_TOKENS // STEP_TOKENS
    assert not [metric for metric in prefill.counters if metric.family == "stores_shed"]
    assert not prefill.planner.has_open_stores


@pytest.mark.parametrize("name", CHUNKED)
@pytest.mark.parametrize("late", [1, 2, 5])
def test_what_has_no_room_waits_until_reports_come(name: str, late: int) -> None:
    """All that the engine keeps is stored while it generates, however late the reports are."""
    geometry = LAYOUTS[name]
    steps = PROMPT_TOKENS // STEP_TOKENS
    prefill = Prefill(geometry, step_bytes(geometry), late, 200 * geometry.hash_tokens)
    for _ in range(steps):
        prefill.step(STEP_TOKENS)
    assert prefill.counters[stores_shed(Shed.NO_STAGING)]
    for _ in range((late + 1) * steps * 2):
        prefill.step(1)
    groups = geometry.groups
    missing = {groups[stored.group_index].kind for stored in prefill.missing()}
    assert GroupKind.FULL not in missing
    assert not prefill.planner.has_open_stores


def test_what_the_engine_lets_go_of_comes_first() -> None:
    """Half a step's staging: windows and states are all stored, full attention waits."""
    for name in ("gemma3", "qwen3next"):
        geometry = LAYOUTS[name]
        full = sum(g.block_bytes for g in geometry.groups if g.kind is GroupKind.FULL)
        chunks = STEP_TOKENS // geometry.chunk_tokens
        prefill = Prefill(geometry, step_bytes(geometry) - full * chunks // 2, 0, 0)
        for number in range(PROMPT_TOKENS // STEP_TOKENS):
            prefill.step(STEP_TOKENS)
            boundary = (number + 1) * chunks
            for index, group in enumerate(geometry.groups):
                if group.kind is not GroupKind.FULL:
                    assert StoredObject(index, boundary - 1) in prefill.stored
                else:
                    assert prefill.stored_of(index) == boundary // 2


def test_an_object_that_no_staging_holds_is_declined() -> None:
    """It is counted once and never planned again; smaller objects of other groups are stored."""
    geometry = LAYOUTS["deepseekv4"]
    sizes = {
        shape[0]
        for group in geometry.groups
        for shape in slot_shapes(geometry, group)
        if group.kind is GroupKind.FULL
    }
    prefill = Prefill(geometry, max(sizes) - 1, 0, 0)
    prefill.step(STEP_TOKENS)
    stored = {geometry.groups[stored.group_index].kind for stored in prefill.stored}
    assert stored
    assert GroupKind.FULL not in stored
    declined = STEP_TOKENS // geometry.chunk_tokens
    assert prefill.counters[stores_shed(Shed.TOO_LARGE)] == declined
    prefill.step(1)
    assert prefill.counters[stores_shed(Shed.TOO_LARGE)] == declined

    states = LAYOUTS["qwen3next"]
    prefill = Prefill(states, 1, 0, 0)
    prefill.step(STEP_TOKENS)
    assert prefill.stored == set()
    assert prefill.counters[stores_shed(Shed.TOO_LARGE)] == STEP_TOKENS // states.chunk_tokens + 2


def test_a_lost_daemon_gives_no_staging_back() -> None:
    """Workers go on copying to slots that are gone; their reports give it back, and no slot."""
    geometry = LAYOUTS["qwen3"]
    prefill = Prefill(geometry, step_bytes(geometry), 1, 0)
    assert prefill.step(STEP_TOKENS)
    prefill.planner.on_connection_lost(0.0)
    assert prefill.step(STEP_TOKENS) == 0
    assert prefill.counters[stores_shed(Shed.NO_STAGING)] == 1
    assert prefill.planner.changes == []
    assert prefill.step(1) == STEP_TOKENS // geometry.chunk_tokens


def test_random_spans_and_reports_never_need_more_than_there_is(rng: random.Random) -> None:
    for _ in range(60):
        geometry = LAYOUTS[rng.choice(CHUNKED)]
        staging = rng.randrange(1, 2 * step_bytes(geometry))
        prefill = Prefill(geometry, staging, rng.randrange(4), 0)
        for _ in range(rng.randrange(1, 12)):
            prefill.step(rng.choice((STEP_TOKENS, geometry.chunk_tokens, 1)))
