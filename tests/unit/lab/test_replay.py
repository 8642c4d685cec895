"""What `hybridkv replay` says, against the definition of a hit."""

from dataclasses import replace

import pytest
from benchmarks.policies import ForesightCache, all_reads
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridkv.core.geometry import Geometry, GroupKind
from hybridkv.core.state_boundaries import StateRule
from hybridkv.lab.capacity import stored_shapes
from hybridkv.lab.replay import (
    ReplayHits,
    ReplayModel,
    TracePrompt,
    TraceReplay,
    UnlimitedCache,
    known_tokens,
)
from hybridkv.shm.slots import slot_bytes
from tests.chance import examples
from tests.invariants import check_store
from tests.layouts import LAYOUTS

PLENTY = 1 << 30
RULE = StateRule(None, 2048)


def last(cache: TraceReplay | UnlimitedCache, prompts: list[TracePrompt]) -> ReplayHits:
    total = sum(map(cache.serve, prompts), ReplayHits())
    if isinstance(cache, TraceReplay):
        check_store(cache.store)
    return total


@st.composite
def traces(draw: st.DrawFn, block_tokens: int) -> list[TracePrompt]:
    """Prompts that share beginnings; the last block of each may be its own, and only started."""
    names: dict[tuple[int, ...], int] = {}
    prompts = []
    for _ in range(draw(st.integers(1, 8))):
        words = draw(st.lists(st.integers(0, 1), min_size=1, max_size=6))
        rest = draw(st.integers(1, block_tokens))
        chain = [tuple(words[: end + 1]) for end in range(len(words))]
        if rest < block_tokens:
            chain[-1] = (*chain[-1], -rest)
        blocks = [names.setdefault(word, len(names)) for word in chain]
        prompts.append(TracePrompt((len(words) - 1) * block_tokens + rest, blocks))
    return prompts


@settings(max_examples=examples(60))
@given(
    st.sampled_from(["qwen3", "falconh1", "gpu_blocks"]),
    st.sampled_from([64, 512, 1000]),
    st.data(),
)
def test_without_bound_a_hit_is_the_longest_beginning_that_was_there(
    name: str, block_tokens: int, data: st.DataObject
) -> None:
    geometry = LAYOUTS[name]
    full = replace(
        geometry, groups=tuple(group for group in geometry.groups if group.kind is GroupKind.FULL)
    )
    prompts = data.draw(traces(block_tokens))
    model = ReplayModel(full, StateRule(), block_tokens)
    chunk = model.geometry.chunk_tokens
    assert chunk % geometry.chunk_tokens == 0
    assert chunk < block_tokens + geometry.chunk_tokens
    cache = UnlimitedCache(model)
    for number, prompt in enumerate(prompts):
        best = 0
        for earlier in prompts[:number]:
            for end in range(chunk, min(prompt.tokens - 1, earlier.tokens) + 1, chunk):
                at = (end - 1) // block_tokens
                if prompt.blocks[at] == earlier.blocks[at]:
                    best = max(best, end)
        hit = cache.serve(prompt)
        assert hit == ReplayHits(1, int(best > 0), prompt.tokens, best)


@settings(max_examples=examples(60))
@given(st.sampled_from(sorted(LAYOUTS)), st.sampled_from([64, 512, 1000]), st.data())
def test_with_plenty_of_room_nothing_is_lost_and_with_little_nothing_is_won(
    name: str, block_tokens: int, data: st.DataObject
) -> None:
    prompts = data.draw(traces(block_tokens))
    model = ReplayModel(LAYOUTS[name], RULE, block_tokens)
    ceiling = last(UnlimitedCache(model), prompts)
    with TraceReplay(model, PLENTY) as cache:
        assert last(cache, prompts) == ceiling
    with TraceReplay(model, 3 * model.smallest_bytes) as cache:
        assert last(cache, prompts).tokens_hit <= ceiling.tokens_hit


@settings(max_examples=examples(60))
@given(
    st.sampled_from(["qwen3next", "falconh1"]),
    st.sampled_from([2, 4, 8]),
    st.sampled_from([64, 512, 1000]),
    st.data(),
)
def test_tails_lose_nothing_and_the_store_has_them_as_a_cache_without_bound_does(
    name: str, units: int, block_tokens: int, data: st.DataObject
) -> None:
    prompts = data.draw(traces(block_tokens))
    fine = fine_geometry(name, units)
    whole, model = (ReplayModel(geometry, RULE, block_tokens) for geometry in (LAYOUTS[name], fine))
    ceiling = last(UnlimitedCache(model), prompts)
    assert ceiling.tokens_hit >= last(UnlimitedCache(whole), prompts).tokens_hit
    with TraceReplay(model, PLENTY) as cache:
        assert last(cache, prompts) == ceiling
    with TraceReplay(model, 3 * model.smallest_bytes) as cache:
        assert last(cache, prompts).tokens_hit <= ceiling.tokens_hit


def fine_geometry(name: str, units: int) -> Geometry:
    """The layout with a match unit, so many of them in a chunk."""
    unit = LAYOUTS[name].chunk_tokens // units
    return replace(LAYOUTS[name], hash_tokens=unit, alignment_tokens=unit)


def test_a_turn_hits_all_but_the_last_match_unit_of_the_one_before() -> None:
    """Also where that ends with a chunk, or inside the first one."""
    geometry = fine_geometry("qwen3next", 8)
    chunk, unit = geometry.chunk_tokens, geometry.hash_tokens
    model = ReplayModel(geometry, StateRule(), chunk)
    lengths = [chunk // 2, 3 * chunk // 2, 3 * chunk, 5 * chunk + 1, 5 * chunk + unit + 1]
    prompts = [TracePrompt(length, range(7)) for length in lengths]
    prompts.append(TracePrompt(7 * chunk, range(7)))
    with TraceReplay(model, PLENTY) as cache:
        hits = [cache.serve(prompt).tokens_hit for prompt in prompts]
    assert hits == [0, *((length - 1) // unit * unit for length in lengths)]


def test_a_tail_that_a_prompt_went_on_after_goes_first() -> None:
    """Four conversations take turns in room for their chunks and for few tails."""
    geometry = fine_geometry("qwen3next", 8)
    chunk, unit = geometry.chunk_tokens, geometry.hash_tokens
    model = ReplayModel(geometry, StateRule(), chunk)
    with TraceReplay(model, 72 * model.smallest_bytes) as cache:
        for turn in range(1, 21):
            for number in range(4):
                tokens = turn * 5 * unit
                blocks = range(100 * number, 100 * number + 1 + tokens // chunk)
                hit = cache.serve(TracePrompt(tokens, blocks)).tokens_hit
                assert hit == max(0, (turn - 1) * 5 * unit - unit)


@pytest.mark.parametrize("name", sorted(LAYOUTS))
@pytest.mark.parametrize("block_tokens", [1, 512, 5000])
def test_a_prompt_takes_what_the_plan_says(name: str, block_tokens: int) -> None:
    geometry = LAYOUTS[name]
    model = ReplayModel(geometry, RULE, block_tokens)
    tokens = 6 * model.geometry.chunk_tokens
    prompt = TracePrompt(tokens, range(-(-tokens // block_tokens)))
    cache = UnlimitedCache(model)
    assert cache.serve(prompt) == ReplayHits(1, 0, tokens, 0)
    shapes = stored_shapes(geometry, RULE, tokens)
    assert cache.stored_bytes == sum(
        slot_bytes(part_bytes, parts) * count for (part_bytes, parts), count in shapes.items()
    )


def test_what_is_read_again_stays() -> None:
    """A conversation outlives prompts that nobody repeats, in a cache of three times its size."""
    model = ReplayModel(LAYOUTS["qwen3"], StateRule(), 128)
    chat = list(range(10))
    prompts = []
    for turn in range(20):
        chat.append(10 + turn)
        prompts.append(TracePrompt(128 * len(chat) + 1, [*chat, 1000 + turn]))
        fresh = 10_000 * (1 + turn)
        prompts.append(TracePrompt(128 * 30 + 1, range(fresh, fresh + 31)))
    with TraceReplay(model, 90 * model.smallest_bytes) as cache:
        total = last(cache, prompts)
    assert total.prompts_hit == 19
    assert total.tokens_hit == sum(128 * (11 + turn) for turn in range(19))
    assert total.evicted > 100


@pytest.mark.parametrize(("name", "chunks"), [("qwen3", 4), ("qwen3next", 3), ("gemma3", 5)])
def test_a_hit_ends_before_the_prompts_last_token(name: str, chunks: int) -> None:
    """And where a state stands: at the last boundary of an earlier prompt."""
    geometry = LAYOUTS[name]
    size = geometry.chunk_tokens
    model = ReplayModel(geometry, StateRule(), size)
    cache = UnlimitedCache(model)
    first, longer = (
        TracePrompt(chunks * size + 1, range(chunks + 1)),
        TracePrompt((chunks + 2) * size, [*range(chunks), 90, 91]),
    )
    assert cache.serve(first).tokens_hit == 0
    assert cache.serve(first).tokens_hit == chunks * size
    assert cache.serve(longer).tokens_hit == chunks * size
    assert cache.serve(longer).tokens_hit == (chunks + 1) * size
    short = TracePrompt(chunks * size, range(chunks))
    assert cache.serve(short).tokens_hit == (0 if name == "qwen3next" else (chunks - 1) * size)


def test_what_was_read_goes_last() -> None:
    model = ReplayModel(LAYOUTS["qwen3"], StateRule(), 128)
    first, second, third, fourth = (
        TracePrompt(4 * 128 + 1, range(start, start + 5)) for start in range(0, 40, 10)
    )
    with TraceReplay(model, 3 * 4 * model.smallest_bytes) as cache:
        prompts = (first, second, first, third, fourth, first)
        hits = [cache.serve(prompt).prompts_hit for prompt in prompts]
    assert hits == [0, 0, 1, 0, 0, 1]


def test_of_a_prompt_that_does_not_fit_the_beginning_stays() -> None:
    model = ReplayModel(LAYOUTS["qwen3"], StateRule(), 128)
    prompt = TracePrompt(20 * 128 + 1, range(21))
    with TraceReplay(model, 10 * model.smallest_bytes) as cache:
        assert cache.serve(prompt).tokens_hit == 0
        assert 8 * 128 <= cache.serve(prompt).tokens_hit <= 10 * 128


@settings(max_examples=examples(60))
@given(st.sampled_from(sorted(LAYOUTS)), st.sampled_from([64, 512, 1000]), st.data())
def test_foresight_with_room_for_everything_misses_nothing(
    name: str, block_tokens: int, data: st.DataObject
) -> None:
    prompts = data.draw(traces(block_tokens))
    model = ReplayModel(LAYOUTS[name], RULE, block_tokens)
    ceiling, cache = UnlimitedCache(model), ForesightCache(model, PLENTY, all_reads(model, prompts))
    for prompt in prompts:
        assert cache.serve(prompt) == ceiling.serve(prompt)


@settings(max_examples=examples(100))
@given(st.integers(0, 12), st.data())
def test_the_store_hits_no_more_than_foresight(objects: int, data: st.DataObject) -> None:
    """Objects of one size and of one group, where farthest next read is known to be best."""
    geometry = LAYOUTS["qwen3"]
    model = ReplayModel(geometry, RULE, geometry.chunk_tokens)
    prompts = data.draw(traces(geometry.chunk_tokens))
    ram_bytes = objects * model.smallest_bytes
    reads = all_reads(model, prompts)
    cache = ForesightCache(model, ram_bytes, reads)
    best = sum(map(cache.serve, prompts), ReplayHits())
    assert cache.kept_bytes <= ram_bytes
    for room in range(objects + 1):
        least = ForesightCache(model, room * model.smallest_bytes, reads)
        assert sum(map(least.serve, prompts), ReplayHits()).tokens_hit <= best.tokens_hit
    if objects:
        with TraceReplay(model, ram_bytes) as replay:
            assert last(replay, prompts).tokens_hit <= best.tokens_hit


@settings(max_examples=examples(60))
@given(st.sampled_from([1, 7, 512]), st.data())
def test_what_is_known_is_the_longest_beginning_of_an_earlier_prompt(
    block_tokens: int, data: st.DataObject
) -> None:
    prompts = data.draw(traces(block_tokens))
    for index, known in enumerate(known_tokens(prompts, block_tokens)):
        prompt, best = prompts[index], 0
        for earlier in prompts[:index]:
            shared = 0
            for number, earlier_number in zip(prompt.blocks, earlier.blocks, strict=False):
                if number != earlier_number:
                    break
                shared += block_tokens
            best = max(best, min(shared, prompt.tokens - 1, earlier.tokens))
        assert known == best


def test_denser_states_hit_more_of_prompts_that_part_early() -> None:
    geometry = LAYOUTS["qwen3next"]
    size = geometry.chunk_tokens
    hits = []
    for retention in (0, 4 * size, size):
        cache = UnlimitedCache(ReplayModel(geometry, StateRule(retention, size), size))
        cache.serve(TracePrompt(8 * size + 1, range(9)))
        hits.append(cache.serve(TracePrompt(9 * size, [*range(6), 90, 91, 92])).tokens_hit)
    assert hits == [0, 4 * size, 6 * size]
