"""Stores: what a step looks at, and what a commit says."""

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.lora.request import LoRARequest

from hybridkv.connector.messages import StepReport
from hybridkv.connector.metrics import TAILS_STORED, Shed, stores_shed
from hybridkv.connector.scheduler.requests import (
    DraftedTokens,
    RequestLookup,
    StoreProgress,
    TrackedRequest,
    block_tables,
)
from hybridkv.core.coverage import needed_chunks, part_bytes, slot_shapes
from hybridkv.core.geometry import GroupKind
from hybridkv.core.keys import HASH_BYTES, adapter_hashes
from hybridkv.core.metrics import Metric
from hybridkv.core.packed import pack_u64, unpack_u64
from hybridkv.core.policies import EvictionClass
from hybridkv.vllm.adapters import Adapters
from hybridkv.wire.messages import Commit, Found, Free
from tests.layouts import LAYOUTS
from tests.packing import packed_slots
from tests.unit.connector.requests import registry, step_of, store_planner

STEP_CHUNKS = 4
STEPS = 8
OLD, NEW = b"o" * HASH_BYTES, b"n" * HASH_BYTES
"""Digests of adapters."""


class Watched(list[Any]):
    """The engine's blocks of one group, and how many of them were looked at."""

    seen = 0

    def __getitem__(self, at: Any) -> Any:
        found = super().__getitem__(at)
        self.seen += len(found) if isinstance(at, slice) else 1
        return found


def test_a_step_reads_no_more_of_the_block_tables_than_it_stores() -> None:
    geometry = LAYOUTS["gemma3"]
    step = STEP_CHUNKS * geometry.chunk_tokens
    request = SimpleNamespace(num_tokens=STEPS * step, num_prompt_tokens=STEPS * step)
    request.block_hashes = [
        bytes([number % 256]) * 32 for number in range(STEPS * step // geometry.hash_tokens)
    ]
    tracked = TrackedRequest(request, progress=StoreProgress([0] * len(geometry.groups)))
    stores = store_planner(registry(geometry, r=tracked), step_tokens=step)
    groups = [
        Watched(
            SimpleNamespace(block_id=1 + at) for at in range(STEPS * step // group.tokens_per_block)
        )
        for group in geometry.groups
    ]
    offset = 0
    for number in range(STEPS):
        for group in geometry.groups:
            for shape in slot_shapes(geometry, group):
                slots = packed_slots(range(offset, offset + STEP_CHUNKS))
                stores.credits.on_granted(shape, slots, 0.0)
                offset += STEP_CHUNKS
        request.num_computed_tokens = number * step
        before = [group.seen for group in groups]
        output = SimpleNamespace(
            num_scheduled_tokens={"r": step},
            kv_connector_block_state=SimpleNamespace(boundary_state_offloads={}),
        )
        runs = stores.plan_stores(
            step_of(output, lambda _: block_tables(SimpleNamespace(blocks=groups)))
        )
        assert sum(run.objects for run in runs.values()) == STEP_CHUNKS * len(geometry.groups)
        for group, blocks, seen in zip(geometry.groups, groups, before, strict=True):
            assert blocks.seen - seen <= step // group.tokens_per_block


@pytest.mark.parametrize(
    "name", ["qwen3", "gemma3", "llama4", "gpu_blocks", "odd_window", "two_ranks"]
)
@pytest.mark.parametrize("prompt_chunks", [0, 1, 7, 20])
def test_a_commit_has_parents_tenants_and_eviction_classes(name: str, prompt_chunks: int) -> None:
    """20 chunks of prompt and generated tokens are stored in one step, and committed."""
    geometry = LAYOUTS[name]
    chunks = 20
    tokens = chunks * geometry.chunk_tokens
    request = SimpleNamespace(
        num_tokens=tokens,
        num_prompt_tokens=prompt_chunks * geometry.chunk_tokens + 1,
        num_computed_tokens=0,
        block_hashes=[
            number.to_bytes(32, "little") for number in range(1, 1 + tokens // geometry.hash_tokens)
        ],
    )
    progress = StoreProgress([0] * len(geometry.groups))
    tracked = TrackedRequest(request, tenant=77, progress=progress)
    stores = store_planner(registry(geometry, r=tracked), step_tokens=tokens)
    hashes = [tracked.chunk_hashes(geometry, chunk, 1) for chunk in range(chunks)]
    groups = [
        [SimpleNamespace(block_id=1 + at) for at in range(tokens // group.tokens_per_block)]
        for group in geometry.groups
    ]
    for shape in {shape for group in geometry.groups for shape in slot_shapes(geometry, group)}:
        slots = packed_slots(range(chunks * len(groups)))
        stores.credits.on_granted(shape, slots, 0.0)
    output = SimpleNamespace(
        num_scheduled_tokens={"r": tokens},
        kv_connector_block_state=SimpleNamespace(boundary_state_offloads={}),
    )
    runs = stores.plan_stores(
        step_of(output, lambda _: block_tables(SimpleNamespace(blocks=groups)))
    )
    report = StepReport(done={number: set(range(geometry.ranks)) for number in runs})
    seen = set()
    stores.on_report(report, 0.0)
    for commit in stores.changes:
        assert isinstance(commit, Commit)
        assert unpack_u64(commit.tenants).tolist() == [77]
        (index,) = unpack_u64(commit.groups)
        group, before = geometry.groups[index], commit.parents
        assert len(commit.hashes) == len(commit.classes) * HASH_BYTES
        for at in range(len(commit.classes)):
            chunk = hashes.index(commit.hashes[at * HASH_BYTES : (at + 1) * HASH_BYTES])
            assert before == (hashes[chunk - 1] if chunk else bytes(HASH_BYTES))
            before = hashes[chunk]
            ends = (prompt_chunks, max(0, prompt_chunks - 1))
            place = f"chunk {chunk} of group {group.gid}"
            wanted = any(chunk in needed_chunks(geometry, group, end) for end in ends)
            if chunk >= prompt_chunks:
                assert commit.classes[at] == EvictionClass.GENERATED, place
            elif group.kind is GroupKind.FULL or wanted:
                assert commit.classes[at] == EvictionClass.PROMPT, f"{place} is needed at the end"
            elif chunk < min(
                (needed_chunks(geometry, group, end) or range(end, end)).start
                for end in ends
                if end
            ):
                inside = (EvictionClass.INTERIOR, EvictionClass.UNLIKELY)
                assert commit.classes[at] in inside, place
            seen.add((index, chunk))
    assert len(seen) == sum(
        part_bytes(geometry, group, chunk) > 0
        for group in geometry.groups
        for chunk in range(chunks)
    )


class Step:
    """A request of one layout in one step, with all the write slots that it could take."""

    def __init__(self, name: str, chunks: int, unit: int = 0, lookahead: int = 0) -> None:
        """`unit` is the engine's match unit, where tails are stored; 0 = they are not."""
        self.geometry = LAYOUTS[name]
        self.geometry = replace(self.geometry, lookahead_tokens=lookahead)
        if unit:
            self.geometry = replace(self.geometry, hash_tokens=unit, alignment_tokens=unit)
        self.tokens = chunks * self.geometry.chunk_tokens
        self.counters: Counter[Metric] = Counter()
        self.request = SimpleNamespace(
            request_id="r",
            num_tokens=self.tokens,
            num_prompt_tokens=self.tokens,
            num_computed_tokens=0,
            mm_features=[],
            all_token_ids=[*range(self.tokens)],
            block_hashes=[
                number.to_bytes(32, "little")
                for number in range(self.tokens // self.geometry.hash_tokens)
            ],
        )
        progress = StoreProgress([0] * len(self.geometry.groups))
        self.tracked = TrackedRequest(self.request, progress=progress)
        requests = registry(self.geometry, self.counters, r=self.tracked)
        self.stores = store_planner(requests, step_tokens=self.tokens, with_tails=bool(unit))
        self.tables = [
            # With room for tokens that are not known yet.
            [
                SimpleNamespace(block_id=1 + at)
                for at in range(2 * self.tokens // group.tokens_per_block)
            ]
            for group in self.geometry.groups
        ]
        for shape in {
            shape for group in self.geometry.groups for shape in slot_shapes(self.geometry, group)
        }:
            slots = packed_slots(range(chunks * len(self.tables)))
            self.stores.credits.on_granted(shape, slots, 0.0)

    def found(self, masks: list[bytes], chunks: int = 0, tails: bytes = b"") -> None:
        """A lookup has found these chunks, or the second of the tails."""
        found = Found(1, 1, chunks, masks, b"", tail=2 if tails else 0)
        self.tracked.lookup = RequestLookup(tails=tails, found=found)

    def settled(self) -> list[Commit | Free]:
        """What is sent once all ranks have reported all runs."""
        ranks = set(range(self.geometry.ranks))
        self.stores.on_report(StepReport(done=dict.fromkeys([*self.stores.storing], ranks)), 0.0)
        return self.stores.changes

    def stored(
        self, scheduled: int, offers: list[tuple[int, int, int]] | None = None, number: int = 0
    ) -> dict[int, set[int]]:
        """Chunks that a step of `scheduled` tokens stores, by group index.

        `number` is that of its plan.
        """
        state = SimpleNamespace(boundary_state_offloads={"r": offers or []})
        output = SimpleNamespace(
            num_scheduled_tokens={"r": scheduled}, kv_connector_block_state=state
        )
        tables = block_tables(SimpleNamespace(blocks=self.tables))
        runs = self.stores.plan_stores(step_of(output, lambda _: tables, number))
        chunks: dict[int, set[int]] = {index: set() for index in range(len(self.tables))}
        for run in runs.values():
            chunks[run.span.group_index] |= set(
                range(run.span.first_chunk, run.span.first_chunk + run.objects)
            )
        return chunks


def test_only_whole_chunks_that_this_step_has_computed_are_stored() -> None:
    """A chunk counts once its last token is computed (D1, D2), and half a chunk does not count."""
    step = Step("gemma4", 4)
    chunk = step.geometry.chunk_tokens
    assert step.stored(chunk - 1) == {0: set(), 1: set()}
    step.request.num_computed_tokens = chunk - 1
    assert step.stored(chunk) == {0: {0}, 1: {0}}
    step.request.num_computed_tokens = 2 * chunk - 1
    assert step.stored(1) == {0: {1}, 1: {1}}
    step.request.num_computed_tokens = 3 * chunk
    assert step.stored(2 * chunk) == {0: {2, 3}, 1: {2, 3}}, (
        "drafts beyond the request's tokens are not its own"
    )
    assert step.stored(2 * chunk) == {0: set(), 1: set()}, "each is stored once"


def test_a_group_without_blocks_stores_less_and_never_something_else() -> None:
    """A24, A26: a table that is too short is an under-store of its group, to the whole chunk."""
    step = Step("gemma4", 4)
    chunk = step.geometry.chunk_tokens
    per_chunk = step.geometry.blocks_per_chunk(step.geometry.groups[1])
    assert per_chunk == 2
    whole = step.tables[1]
    step.tables[1] = whole[: 3 * per_chunk - 1]
    assert step.stored(4 * chunk) == {0: {0, 1, 2, 3}, 1: {0, 1}}
    step.tables[1] = []
    assert step.stored(4 * chunk) == {0: set(), 1: set()}
    step.tables[1] = whole
    assert step.stored(4 * chunk) == {0: set(), 1: {2, 3}}


def test_a_state_is_taken_where_it_stands_and_nowhere_else() -> None:
    """B34: at a boundary of ours that the step has reached, once, and never the null block."""
    step = Step("qwen3next", 4)
    chunk = step.geometry.chunk_tokens
    offers = [(0, 1, chunk), (1, 1, chunk + 1), (0, 0, 2 * chunk), (1, 3, 3 * chunk), (9, 1, chunk)]
    assert step.stored(2 * chunk, offers)[0] == {0}
    assert step.counters[stores_shed(Shed.STATE_UNALIGNED)] == 4
    assert step.stored(2 * chunk, offers)[0] == set(), "offered again after a load"
    step.found([b"", b"\0\0\1", b""])
    assert step.stored(3 * chunk, [(1, 3, 3 * chunk)])[1] == set(), "the lookup found it"


@pytest.mark.parametrize("block", [99, 2], ids=["another_request_s", "at_another_place"])
def test_a_state_whose_block_the_request_has_lost_is_not_stored(block: int) -> None:
    """With asynchronous scheduling the offered block may be written in this step.

    vLLM may have given it to another request, or to the same one for a later state.
    """
    step = Step("qwen3next", 4)
    chunk = step.geometry.chunk_tokens
    assert step.stored(chunk, [(0, 1, chunk), (1, block, chunk)]) == {0: {0}, 1: set(), 2: {0}}
    assert step.counters[stores_shed(Shed.STATE_FREED)] == 1


@pytest.mark.parametrize("is_sampled", [True, False])
def test_a_state_is_named_when_the_token_after_it_is_sampled(is_sampled: bool) -> None:
    """A drafter's names look ahead, and the engine offers a state in the step that computes it."""
    step = Step("qwen3next", 4, lookahead=1)
    chunk, request = step.geometry.chunk_tokens, step.request
    tokens = request.all_token_ids
    request.all_token_ids, request.num_tokens = tokens[: 2 * chunk], 2 * chunk
    step.tracked.drafted = DraftedTokens(0, proven=4 * chunk, storable=2 * chunk - 1)
    assert step.stored(2 * chunk, [(0, 2, 2 * chunk)]) == {0: {1}, 1: set(), 2: {0}}
    if is_sampled:
        request.all_token_ids, request.num_tokens = tokens, len(tokens)
    named = step.tracked.chunk_hashes(step.geometry, 0, 2) if is_sampled else b""
    messages = step.settled()
    commits = [message for message in messages if isinstance(message, Commit)]
    states = [commit for commit in commits if commit.groups == pack_u64([0])]
    assert [commit.parents + commit.hashes for commit in states] == ([named] if is_sampled else [])
    freed = [message for message in messages if isinstance(message, Free)]
    assert len(freed) == (not is_sampled), "without a name it is given back"


def test_what_is_not_stored_for_want_of_proof_is_counted_once() -> None:
    """Neither what was stored before, nor what the daemon has, nor what only waits for a token."""
    step = Step("gemma4", 4)
    chunk = step.geometry.chunk_tokens
    step.tracked.drafted = DraftedTokens(0, proven=9 * chunk, storable=chunk)
    assert step.stored(2 * chunk) == {0: {0}, 1: {0}}
    assert step.counters[stores_shed(Shed.UNPROVEN)] == 0
    step.tracked.drafted = DraftedTokens(0, proven=0)
    step.found([b"\0\0\1\0", b"\0\0\0\0"])
    for _ in range(2):
        assert step.stored(3 * chunk + 1) == {0: set(), 1: set()}
        assert step.counters[stores_shed(Shed.UNPROVEN)] == 1 + 2
    step.request.num_computed_tokens = 3 * chunk + 1
    step.stored(chunk)
    assert step.counters[stores_shed(Shed.UNPROVEN)] == 3 + 2


def test_a_tail_is_stored_where_every_state_is_offered_inside_a_chunk() -> None:
    """Once, with the attention block that its end is in, under the name of its end."""
    step = Step("qwen3next", 4, unit=64)
    end = 2 * step.geometry.chunk_tokens + 128
    offers = [(0, 50, end), (1, 60, end)]
    step.stored(end - 64, offers)
    assert step.counters[TAILS_STORED] == 0, "the step does not reach its end"
    step.stored(end, offers[:1])
    assert step.counters[TAILS_STORED] == 0, "a group has no state there"
    assert step.stored(end, offers) == {0: {2}, 1: {2}, 2: {2}}
    tails = [storing for storing in step.stores.storing.values() if storing.tail_tokens]
    assert [[*tail.run.span.blocks] for tail in tails] == [[50], [60], [3]]
    hashes = step.request.block_hashes
    assert {tail.hashes for tail in tails} == {hashes[2 * 4 - 1] + hashes[2 * 4 + 1]}
    assert not any(step.stored(end, offers).values()), "offered again"
    step.tracked.progress.forget()
    step.stored(end, offers)
    assert step.counters[TAILS_STORED] == 2, "what is there is of other weights"
    found = Step("qwen3next", 4, unit=64)
    found.found([b""] * 3, 3, tails=hashes[2 * 4] + hashes[2 * 4 + 1])
    found.stored(end, offers)
    assert found.counters[TAILS_STORED] == 0, "the lookup found it"


def test_without_slots_a_store_waits_with_its_prefix_first() -> None:
    """B40: what finds no slot is shed from this step and counted, never waited for."""
    step = Step("qwen3", 4)
    (shape,) = {
        shape for group in step.geometry.groups for shape in slot_shapes(step.geometry, group)
    }
    step.stores.credits.forget_slots()
    assert step.stored(step.tokens) == {0: set()}
    assert step.counters[stores_shed(Shed.NO_SLOT)] == 1
    slots = packed_slots([1, 2, 3])
    step.stores.credits.on_granted(shape, slots, 0.0)
    assert step.stored(step.tokens) == {0: {0, 1, 2}}


@pytest.mark.parametrize("loaded", [OLD, NEW, b""], ids=["the same", "another", "none"])
def test_what_a_step_computed_is_committed_if_it_had_the_adapter_of_its_plan(loaded: bytes) -> None:
    """The engine may load other weights in the step that computes, and tells nobody."""
    step, adapters = Step("qwen3", 2), Adapters(1)
    lora = LoRARequest("a", 1, "/a")
    asked = SimpleNamespace(request_id="r", lora_request=lora, mm_features=[], cache_salt=None)
    step.tracked.adapter = adapters.on_new_request(asked)
    tokens = step.geometry.chunk_tokens
    assert step.stored(tokens) == {0: set()}, "the adapter is not known"
    adapters.on_step_planned(1, ["r"])
    adapters.on_report(1, {0: {1: OLD}})
    assert step.stored(tokens, number=2) == {0: {0}}
    adapters.on_step_planned(2, ["r"])
    adapters.on_report(2, {0: {1: loaded} if loaded else {}})
    messages = step.settled()
    assert [type(message) for message in messages] == [Commit if loaded == OLD else Free]
    if loaded == OLD:
        (commit,) = messages
        name = step.request.block_hashes[tokens // step.geometry.hash_tokens - 1]
        assert isinstance(commit, Commit)
        assert commit.hashes == adapter_hashes(name, OLD)
    assert not step.stores.has_open_stores


def test_what_was_planned_with_another_adapter_than_the_present_one_is_not_committed() -> None:
    """A reset lies between, after which the new weights are served."""
    step, adapters = Step("qwen3", 2), Adapters(1)
    lora = LoRARequest("a", 1, "/a")
    asked = SimpleNamespace(request_id="r", lora_request=lora, mm_features=[], cache_salt=None)
    step.tracked.adapter = adapters.on_new_request(asked)
    adapters.on_step_planned(1, [])
    adapters.on_report(1, {0: {1: OLD}})
    adapters.on_cache_emptied()
    step.stored(step.geometry.chunk_tokens, number=2)
    adapters.on_step_planned(2, ["r"])
    adapters.on_report(2, {0: {1: NEW}})
    assert step.tracked.has_hashes()
    assert [type(message) for message in step.settled()] == [Free]
