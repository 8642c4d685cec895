"""What a drafter leaves in the engine's blocks, and what of it may be stored."""

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

from hybridkv.connector.scheduler.drafted import DraftedBlocks
from hybridkv.connector.scheduler.requests import RequestLoad, TrackedRequest
from hybridkv.core.geometry import Geometry, Group, GroupKind
from hybridkv.core.keys import HASH_BYTES
from hybridkv.vllm.adapters import Adapters
from hybridkv.vllm.batch_faults import BatchFaults
from hybridkv.vllm.drafters import NO_DRAFTER, Drafter
from tests.unit.connector.requests import make_context, registry, step_of

BLOCK = 4
BLOCKS = 64
GEOMETRY = Geometry((Group(0, GroupKind.FULL, BLOCK, (8,)),), BLOCK, BLOCK, BLOCK, 1, 1)
EAGLE = Drafter(lookahead_tokens=1, drafts=2, tokens_max=1000, is_stale_at_ends=False)
DRAFT_MODEL = Drafter(lookahead_tokens=0, drafts=2, tokens_max=1000, is_stale_at_ends=False)
STALE = Drafter(lookahead_tokens=1, drafts=2, tokens_max=1000, is_stale_at_ends=True)
SHORT = Drafter(lookahead_tokens=1, drafts=2, tokens_max=20, is_stale_at_ends=False)


class Engine:
    """Requests of one engine, and the blocks that each has."""

    def __init__(
        self,
        drafter: Drafter = EAGLE,
        faults: BatchFaults = BatchFaults(),  # noqa: B008  # It is a frozen value.
        geometry: Geometry = GEOMETRY,
    ) -> None:
        self.has_states = len(geometry.groups) > 1
        self.states: dict[str, list[int]] = {}
        """Tables of the recurrent group, for which blocks of the attention group stand."""
        self.registry = registry(geometry)
        self.tracked = self.registry.by_id
        context = make_context(geometry, drafter=drafter, pool_blocks=BLOCKS - 1, faults=faults)
        self.drafted = DraftedBlocks(context, self.registry)
        self.tables: dict[str, list[int]] = {}
        self.requests: dict[str, Any] = {}

    def add(
        self,
        name: str,
        tokens: Sequence[int],
        table: list[int],
        tracked: bool = True,
        image: tuple[str, int, int] | None = None,
        adapter: bool = False,
    ) -> None:
        """`image`: its hash, its first place and how many places it has."""
        request = SimpleNamespace(
            **dict.fromkeys(("lora_request", "cache_salt", "prompt_embeds")),
            request_id=name,
            all_token_ids=[],
            num_preemptions=0,
            mm_features=[],
            resumable=False,
        )
        if image is not None:
            place = PlaceholderRange(offset=image[1], length=image[2])
            request.mm_features = [MultiModalFeatureSpec(None, "image", image[0], place)]
        self.requests[name], self.tables[name] = request, table
        self.grow(name, tokens)
        if tracked:
            self.tracked[name] = TrackedRequest(request)
            if adapter:
                lora = SimpleNamespace(lora_int_id=1, lora_name="a", lora_path="/a")
                request.lora_request = lora
                self.tracked[name].adapter = Adapters(1).on_new_request(request)

    def grow(self, name: str, tokens: Sequence[int]) -> None:
        request = self.requests[name]
        request.all_token_ids = [*request.all_token_ids, *tokens]
        request.num_tokens = len(request.all_token_ids)
        ends = range(BLOCK, request.num_tokens + 1, BLOCK)
        request.block_hashes = [
            hash(tuple(request.all_token_ids[:end])).to_bytes(HASH_BYTES, "little", signed=True)
            for end in ends
        ]

    def step(self, **steps: tuple[int, int]) -> dict[str, int]:
        """A step of (start, scheduled) for each request; returns what may be stored of each."""
        output = SimpleNamespace(
            num_scheduled_tokens={name: count for name, (_, count) in steps.items()},
            scheduled_new_reqs=[],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[*steps], num_computed_tokens=[start for start, _ in steps.values()]
            ),
        )
        self.drafted.on_step_planned(step_of(output, self.block_tables), 0.0)
        known = ((name, self.tracked[name].drafted) for name in steps if name in self.tracked)
        return {name: drafted.storable for name, drafted in known if drafted is not None}

    def block_tables(self, name: str) -> list[list[int]]:
        table = self.tables[name]
        if not self.has_states:
            return [table]
        # A block of its own for each state: those of attention blocks, from 32 on.
        states = self.states.get(name, table)
        return [table, [32 + block if block else 0 for block in states]]


@pytest.mark.parametrize("lookahead", [0, 1])
def test_names_cover_the_token_behind_a_chunk(lookahead: int) -> None:
    geometry = replace(GEOMETRY, lookahead_tokens=lookahead)
    engine = Engine()
    names = []
    for number, tokens in enumerate(([4, 5], [4, 6], [9, 9])):
        engine.add(f"r{number}", [*range(4), *tokens], [])
        names.append(engine.tracked[f"r{number}"].chunk_hashes(geometry, 0, 1))
    assert names[0] == names[1]
    assert (names[0] == names[2]) == (lookahead == 0)


def test_a_prompt_may_be_stored_as_far_as_the_next_token_is_known() -> None:
    """The last position's drafter KV depends on a token that is sampled in this very step."""
    engine = Engine()
    engine.add("a", range(12), [1, 2, 3, 4])
    assert engine.step(a=(0, 8)) == {"a": 8}
    assert engine.step(a=(8, 4)) == {"a": 11}
    engine.grow("a", [100])
    assert engine.step(a=(12, 3)) == {"a": 12}, "two of the three are drafts"


def test_a_draft_model_reads_no_later_token() -> None:
    engine = Engine(DRAFT_MODEL)
    engine.add("a", range(12), [1, 2, 3, 4])
    assert engine.step(a=(0, 12)) == {"a": 12}


def test_drafts_that_are_computed_and_not_verified_are_never_stored() -> None:
    """With asynchronous scheduling the start of a step counts the drafts of the one before."""
    engine = Engine(DRAFT_MODEL)
    engine.add("a", range(7), [1, 2, 3, 4])
    assert engine.step(a=(0, 7)) == {"a": 7}
    assert engine.step(a=(7, 3)) == {"a": 7}
    assert engine.step(a=(10, 3)) == {"a": 7}


@pytest.mark.parametrize("last", [4, 99])
def test_a_hit_of_the_engine_is_stored_only_where_the_same_token_followed(last: int) -> None:
    engine = Engine()
    engine.add("a", range(9), [1, 2, 3])
    engine.step(a=(0, 9))
    # As after `disable_eagle_block_drop`: the hit ends where the prompts part.
    engine.add("b", [*range(4), last, *range(5, 9)], [1, 5, 6])
    assert engine.step(b=(4, 5)) == {"b": 8 if last == 4 else 0}


def test_a_block_that_another_prompt_computed_last_is_not_the_prompts_own() -> None:
    """Of two blocks with one name the engine gives either; their last tokens' KV may differ."""
    engine = Engine()
    engine.add("a", range(9), [1, 2, 3])
    engine.add("b", [*range(4), *range(50, 55)], [4, 5, 6])
    engine.step(a=(0, 9), b=(0, 9))
    engine.add("c", [*range(4), *range(50, 58)], [1, 5, 7])
    assert engine.step(c=(8, 4)) == {"c": 0}
    engine.add("d", [*range(4), *range(50, 58)], [4, 5, 8])
    assert engine.step(d=(8, 4)) == {"d": 11}


def test_a_block_has_no_mark_from_its_life_before() -> None:
    """It is taken by a request that is not tracked, and by one that ends at the block's end."""
    for tracked in (False, True):
        engine = Engine()
        engine.add("a", range(9), [1, 2, 3])
        engine.step(a=(0, 9))
        engine.add("b", range(4), [1, 2], tracked=tracked)
        engine.step(b=(0, 4))
        engine.add("c", range(9), [1, 7, 8])
        assert engine.step(c=(4, 5)) == {"c": 0}


def test_what_was_loaded_is_proven_by_its_name() -> None:
    engine = Engine()
    engine.add("a", range(13), [1, 2, 3, 4])
    engine.tracked["a"].load = RequestLoad(restored=range(8))
    assert engine.step(a=(8, 5)) == {"a": 12}
    engine.add("b", range(13), [1, 2, 7, 8])
    assert engine.step(b=(8, 5)) == {"b": 12}, "of which this one hits the blocks"


def test_a_load_proves_nothing_after_the_request_was_preempted() -> None:
    engine = Engine()
    engine.add("a", range(13), [1, 2, 3, 4])
    engine.tracked["a"].load = RequestLoad(restored=range(8))
    engine.step(a=(8, 5))
    engine.requests["a"].num_preemptions = 1
    assert not engine.registry.on_asked(engine.tracked["a"], 8, 0.0), "it waits for its lookup"
    engine.tables["a"] = [11, 12, 3, 4]
    assert engine.step(a=(8, 5)) == {"a": 0}


def test_the_end_of_a_step_inside_a_prompt_is_stale_with_the_v1_runner() -> None:
    """vLLM 0.32 takes the prompt's last token for the one behind the step."""
    engine = Engine(STALE)
    engine.add("a", range(21), [1, 2, 3, 4, 5, 6])
    assert engine.step(a=(0, 8)) == {"a": 7}
    assert engine.step(a=(8, 8)) == {"a": 7}
    assert engine.step(a=(16, 5)) == {"a": 7}
    engine.add("b", range(21), [1, 2, 3, 14, 15, 16])
    assert engine.step(b=(12, 9)) == {"b": 4}, "nor may others store it"


@pytest.mark.parametrize("image", ["cat", "dog"])
def test_a_hit_is_stored_only_where_the_same_image_followed(image: str) -> None:
    """Every image has the same token in its places."""
    engine = Engine()
    tokens = [*range(8), 9, 9, 9, 9, 10]
    engine.add("a", tokens, [1, 2, 3, 4], image=("cat", 8, 4))
    assert engine.step(a=(0, 13)) == {"a": 12}
    engine.add("b", tokens, [1, 2, 5, 6], image=(image, 8, 4))
    assert engine.step(b=(8, 5)) == {"b": 12 if image == "cat" else 4}


@pytest.mark.parametrize("drafter", [EAGLE, DRAFT_MODEL])
def test_the_end_of_a_step_before_an_image_is_stale(drafter: Drafter) -> None:
    """vLLM may not have encoded it yet, and then drafts from the token in its place."""
    engine = Engine(drafter)
    engine.add("a", [*range(8), 9, 9, 9, 9, 10], [1, 2, 3, 4], image=("cat", 8, 4))
    stale = drafter is EAGLE
    assert engine.step(a=(0, 8)) == {"a": 7 if stale else 8}
    assert engine.step(a=(8, 5)) == {"a": 7 if stale else 13}
    engine.add("b", [*range(8), 9, 9, 9, 9, 10], [5, 6, 7, 8], image=("cat", 8, 4))
    assert engine.step(b=(0, 6)) == {"b": 6}
    assert engine.step(b=(6, 7)) == {"b": 12 if stale else 13}


def test_a_step_without_the_drafter_leaves_gaps_in_all_of_its_requests() -> None:
    """vLLM leaves the drafter out where any request is too long for it."""
    engine = Engine(SHORT)
    engine.add("a", range(9), [1, 2, 3])
    assert engine.step(a=(0, 4)) == {"a": 4}
    engine.add("long", range(100, 119), [21, 22, 23, 24, 25], tracked=False)
    assert engine.step(a=(4, 4), long=(0, 19)) == {"a": 4}
    assert engine.step(a=(8, 1)) == {"a": 4}
    engine.add("b", range(9), [1, 2, 7])
    assert engine.step(b=(8, 1)) == {"b": 4}


def test_after_a_step_of_which_nothing_is_known_no_block_is_proven() -> None:
    engine = Engine()
    engine.add("a", range(13), [1, 2, 3, 4])
    engine.step(a=(0, 8))
    engine.drafted.on_unobserved_steps(0.0)
    assert engine.step(a=(8, 5)) == {"a": 0}
    engine.add("b", range(13), [1, 2, 7, 8])
    assert engine.step(b=(8, 5)) == {"b": 0}
    engine.add("c", range(13), [11, 12, 13, 14])
    assert engine.step(c=(0, 13)) == {"c": 12}


def test_a_request_beside_an_adapter_is_not_stored_where_the_kernel_is_wrong() -> None:
    """vLLM's CPU kernel gives it the KV of the adapter in the last slot."""
    engine = Engine(NO_DRAFTER, BatchFaults(beside_adapters=True))
    engine.add("base", range(16), [1, 2, 3, 4])
    engine.add("adapted", range(50, 66), [5, 6, 7, 8], adapter=True)
    assert engine.step(base=(0, 4)) == {"base": 4}
    assert engine.step(base=(4, 4), adapted=(0, 8)) == {"base": 4, "adapted": 8}
    assert engine.step(base=(8, 4)) == {"base": 4}, "it reads what was wrong"
    engine.add("next", range(16), [1, 2, 3, 9])
    assert engine.step(next=(12, 4)) == {"next": 4}, "and so does who hits these blocks"
    engine.add("again", range(16), [11, 12, 13, 14])
    assert engine.step(again=(0, 16)) == {"again": 16}
    engine.add("after", range(16), [11, 12, 13, 15])
    assert engine.step(after=(12, 4)) == {"after": 16}


def test_a_request_beside_one_that_is_not_tracked_may_be_beside_an_adapter() -> None:
    engine = Engine(NO_DRAFTER, BatchFaults(beside_adapters=True))
    engine.add("base", range(8), [1, 2])
    engine.add("untracked", range(8), [3, 4], tracked=False)
    assert engine.step(base=(0, 8), untracked=(0, 8)) == {"base": 0}
    right = Engine(NO_DRAFTER, BatchFaults(in_sessions=True))
    right.add("base", range(8), [1, 2])
    right.add("adapted", range(8), [3, 4], adapter=True)
    assert right.step(base=(0, 8), adapted=(0, 8)) == {"base": 8, "adapted": 8}


def test_an_unproven_session_and_what_reads_its_blocks_are_not_stored() -> None:
    """The state that the session left is wrong as well as the attention blocks."""
    state = Group(1, GroupKind.RECURRENT, BLOCK, (8,))
    geometry = replace(GEOMETRY, groups=(*GEOMETRY.groups, state))
    engine = Engine(NO_DRAFTER, BatchFaults(in_sessions=True), geometry)
    engine.add("session", range(8), [1, 2, 3])
    engine.requests["session"].resumable = True
    engine.add("plain", range(9), [11, 12, 13])
    assert engine.step(session=(0, 8), plain=(0, 9)) == {"session": 0, "plain": 9}
    engine.add("hits both", range(9), [1, 2, 4])
    engine.add("hits the state", range(9), [11, 12, 14])
    engine.states["hits the state"] = [0, 2, 14]
    engine.add("hits the plain", range(9), [11, 12, 15])
    steps = dict.fromkeys(("hits both", "hits the state", "hits the plain"), (8, 1))
    assert engine.step(**steps) == {"hits both": 0, "hits the state": 4, "hits the plain": 9}
