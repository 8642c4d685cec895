"""The eviction classes of a prompt's objects, against what hits at its boundaries need."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridkv.core.coverage import needed_chunks
from hybridkv.core.eviction_classes import SPACING_TOKENS, eviction_classes
from hybridkv.core.geometry import Geometry, Group, GroupKind
from hybridkv.core.junctions import has_junctions
from hybridkv.core.policies import EvictionClass
from tests.layouts import LAYOUTS

LETTERS = {
    EvictionClass.PROMPT: "P",
    EvictionClass.INTERIOR: "i",
    EvictionClass.GENERATED: "g",
    EvictionClass.UNLIKELY: "u",
}
FULL, WINDOW = Group(0, GroupKind.FULL, 16, (8,)), Group(1, GroupKind.SLIDING, 16, (8,), 512)


def letters(geometry: Geometry, group: Group, *junctions: int) -> str:
    classes = eviction_classes(geometry, group, range(32), 30, junctions)
    return "".join(LETTERS[EvictionClass(number)] for number in classes)


def test_windows_are_for_ends_for_junctions_and_every_so_many_tokens() -> None:
    geometry = Geometry((FULL, WINDOW), 128, 16, 16)
    assert letters(geometry, WINDOW, 6) == "uuPPPPuuuuuuiiiiuuuuuuuuuPPPPPgg"
    assert letters(geometry, FULL, 6) == "P" * 30 + "gg"


def test_without_full_attention_no_window_is_unlikely() -> None:
    assert letters(Geometry((WINDOW,), 128, 16, 16), WINDOW) == "i" * 25 + "PPPPPgg"


@pytest.mark.parametrize("tokens", [SPACING_TOKENS, 8192])
def test_of_a_large_window_next_to_nothing_is_unlikely(tokens: int) -> None:
    large = Group(1, GroupKind.SLIDING, 16, (8,), tokens)
    assert "u" not in letters(Geometry((FULL, large), 128, 16, 16), large)[16:]


@given(
    name=st.sampled_from(sorted(LAYOUTS)),
    prompt_chunks=st.integers(0, 40),
    junctions=st.lists(st.integers(1, 45), max_size=4),
    cuts=st.tuples(st.integers(0, 44), st.integers(0, 44)),
)
def test_each_object_has_the_class_of_the_likeliest_hit_that_needs_it(
    name: str, prompt_chunks: int, junctions: list[int], cuts: tuple[int, int]
) -> None:
    geometry, chunks = LAYOUTS[name], range(min(cuts), max(cuts))
    spacing = max(1, SPACING_TOKENS // geometry.chunk_tokens)
    for group in geometry.groups:
        has_unlikely = group.window_tokens > 0 and has_junctions(geometry)
        likely = {prompt_chunks, max(0, prompt_chunks - 1)}
        likely |= {min(at, prompt_chunks) for at in junctions} if has_unlikely else set()
        expected = []
        for chunk in chunks:
            if chunk >= prompt_chunks:
                expected.append(EvictionClass.GENERATED)
            elif any(chunk in needed_chunks(geometry, group, at) for at in likely):
                expected.append(EvictionClass.PROMPT)
            elif has_unlikely and not any(
                chunk in needed_chunks(geometry, group, at)
                for at in range(spacing, prompt_chunks, spacing)
            ):
                expected.append(EvictionClass.UNLIKELY)
            else:
                expected.append(EvictionClass.INTERIOR)
        classes = eviction_classes(geometry, group, chunks, prompt_chunks, junctions)
        assert [*classes] == expected
