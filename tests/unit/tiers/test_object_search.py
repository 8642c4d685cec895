"""The rounds in which tiers are asked."""

import random

import pytest

from hybridkv.core.coverage import Hit, stored_counts, whole_hit
from hybridkv.core.geometry import GroupKind
from hybridkv.core.keys import HASH_BYTES
from hybridkv.store.index import Namespace
from hybridkv.tiers import object_search
from hybridkv.tiers.object_search import LookupRequest, ObjectPlace, ObjectSearch
from tests.layouts import LAYOUTS

CHUNKS = 24


def search_of(layout: str) -> ObjectSearch:
    """The search for CHUNKS chunks, of which RAM has none and all objects are unknown."""
    geometry = LAYOUTS[layout]
    groups = geometry.groups
    prefixes = tuple(group.kind is GroupKind.FULL for group in groups)
    gids = tuple(group.gid for group in groups)
    namespace = Namespace(bytes(HASH_BYTES), gids, (frozenset(),) * len(groups), prefixes)
    hashes = b"".join(bytes([chunk + 1]) * HASH_BYTES for chunk in range(CHUNKS))
    request = LookupRequest(
        connection_id=1,
        id=1,
        lease=1,
        namespace=namespace,
        geometry=geometry,
        hashes=hashes,
        asked_at=0.0,
        deadline=1.0,
        tokens_per_second=0,
        resident=whole_hit(geometry, 0),
    )
    search = ObjectSearch(request, None)
    for index, group in enumerate(groups):
        counts = stored_counts(geometry, group)
        for chunk in range(CHUNKS):
            if counts[chunk % len(counts)]:
                search.unknown[ObjectPlace(index, chunk)] = None
    return search


def hit_after_finds(search: ObjectSearch, there: set[ObjectPlace]) -> tuple[Hit, list[int]]:
    """The longest hit after all rounds, and how many objects each round asked about."""
    rounds: list[int] = []
    while search.asked or not rounds:
        rounds.append(len(search.next_round([])))
        for place in set(search.asked) & there:
            search.located[place] = None  # type: ignore[assignment]  # no tier is asked here
    return search.longest_hit(search.masks()), rounds


@pytest.mark.parametrize("layout", ["qwen3", "gemma3", "llama4", "qwen3next", "mistral_swa"])
def test_rounds_find_the_hit_that_one_question_finds(
    layout: str, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = longest = 0
    for _ in range(60):
        everything = set(search_of(layout).unknown)
        share = rng.choice((0.5, 0.9, 1.0))
        there = {place for place in everything if rng.random() < share}
        if rng.random() < 0.5:
            # As eviction leaves it: whole prefixes of full attention, ends of the others.
            reach = rng.randrange(CHUNKS + 1)
            groups = LAYOUTS[layout].groups
            there = {
                place
                for place in everything
                if place.position < reach
                and (groups[place.group_index].kind is GroupKind.FULL or place in there)
            }
        monkeypatch.setattr(object_search, "FIND_KEYS_MAX", 1 << 30)
        monkeypatch.setattr(object_search, "FIND_KEYS_FIRST", 1 << 30)
        hit, rounds = hit_after_finds(search_of(layout), there)
        assert rounds == [len(everything), 0]
        most, first = rng.choice((1, 5, 16, 100)), rng.choice((2, 8))
        monkeypatch.setattr(object_search, "FIND_KEYS_MAX", most)
        monkeypatch.setattr(object_search, "FIND_KEYS_FIRST", first)
        bounded, rounds = hit_after_finds(search_of(layout), there)
        assert bounded == hit, (most, sorted(there))
        assert max(rounds) <= most
        if any(group.kind is GroupKind.FULL for group in LAYOUTS[layout].groups):
            assert rounds[0] <= first
        asked += sum(rounds) < len(everything)
        longest = max(longest, hit.chunks)
    assert longest > CHUNKS // 2
    # Windows of these two are nearly as long as the prompts.
    if layout not in ("llama4", "mistral_swa"):
        assert asked > 20, "what no hit needs is not asked about"
