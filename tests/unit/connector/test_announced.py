"""Which chunks are shown, against the plain rule: a chunk is shown while a hit needs it."""

from hypothesis import given, settings
from hypothesis import strategies as st

from hybridkv.connector.scheduler.announced import AnnouncedChunks
from hybridkv.core.coverage import largest_hit, needed_chunks
from hybridkv.core.geometry import Geometry, GroupKind
from hybridkv.core.keys import HASH_BYTES
from tests.chance import examples
from tests.layouts import LAYOUTS

NAMES = ("qwen3", "mistral_swa", "gemma3", "llama4", "qwen3next", "odd_window", "gpu_blocks")
CHUNKS = 6
PROMPTS = 3
SHARED = 2
"""Chunks that all prompts begin with."""


def keys_of(prompt: int) -> list[bytes]:
    names = ((prompt if chunk >= SHARED else 99, chunk) for chunk in range(CHUNKS))
    return [bytes(name).ljust(HASH_BYTES) for name in names]


def hits_in(geometry: Geometry, present: set[tuple[bytes, int]], keys: list[bytes]) -> list[int]:
    """The chunks with which a hit ends, by what the groups need."""
    ends = []
    for chunk in range(len(keys)):
        needs = [
            (keys[at], index)
            for index, group in enumerate(geometry.groups)
            for at in needed_chunks(geometry, group, chunk + 1)
        ]
        if all(need in present for need in needs):
            ends.append(chunk)
    return ends


Step = tuple[int, int, int, int]


def check(announced: AnnouncedChunks) -> None:
    """Derive anew what is shown; raises AssertionError where it differs."""
    shown = announced.shown
    assert announced.hidden.keys() == announced.present.keys() - shown.rows.keys()
    for chunk_hash, row in shown.rows.items():
        following = [*shown.following(row)]
        assert shown.hashes[row] == chunk_hash
        assert shown.is_end[row] or following, "a chunk that is not useful is shown"
        assert not shown.is_end[row] or announced.may_end(row)
        assert announced.present.get(chunk_hash, 0) & announced.full == announced.full
        previous = shown.previous[row]
        if previous < 0:
            assert shown.chunks[row] == 0
        else:
            assert shown.rows[shown.hashes[previous]] == previous
            assert row in shown.following(previous)
            assert shown.chunks[previous] == shown.chunks[row] - 1
        assert len(following) == len(set(following))
        assert all(shown.previous[later] == row for later in following)


@settings(max_examples=examples(400))
@given(
    name=st.sampled_from(NAMES),
    steps=st.lists(
        st.tuples(
            st.integers(0, 5),
            st.integers(0, PROMPTS - 1),
            st.integers(0, CHUNKS),
            st.integers(0, 9),
        ),
        max_size=60,
    ),
)
def test_what_is_shown_is_of_use_and_what_is_of_use_is_shown(name: str, steps: list[Step]) -> None:
    geometry = LAYOUTS[name]
    announced = AnnouncedChunks(geometry)
    present: set[tuple[bytes, int]] = set()
    shown: set[bytes] = set()
    for what, prompt, chunk, pick in steps:
        keys, index = keys_of(prompt), pick % len(geometry.groups)
        if what == 0 and chunk < CHUNKS:
            gone = announced.lose(keys[chunk], index)
            present.discard((keys[chunk], index))
            assert len(gone) == len(set(gone))
            assert shown.issuperset(gone)
            shown.difference_update(gone)
        elif what == 1 and chunk == CHUNKS:
            assert {*announced.shown.rows} == shown
            announced.forget_all()
            assert len(announced) == 0
            present.clear()
            shown.clear()
        else:
            # As a prefill does it: everything of some chunks, now and then without one group's.
            first = 0
            news = []
            for at in range(first, chunk):
                for group in range(len(geometry.groups)):
                    if what < 4 or group != index:
                        news += [at] if announced.learn(keys[at], group) else []
                        present.add((keys[at], group))
            start = min(news, default=CHUNKS)
            # As chunks that follow others are announced: from a shown one on, before all windows.
            before = start - announced.reach - 1
            if what == 3 and before >= 0 and keys[before] in announced:
                fresh = announced.show(keys[before + 1 :], announced.reach, keys[before])
                fresh = [before + 1 + at for at in fresh]
            else:
                fresh = announced.show(keys, start)
            assert fresh == sorted(fresh)
            assert shown.isdisjoint(keys[at] for at in fresh)
            shown.update(keys[at] for at in fresh)
            ends = hits_in(geometry, present, keys)
            assert shown.issuperset(keys[: max(ends, default=-1) + 1]), (
                "what a lookup would hit is shown"
            )
        check(announced)
        assert {
            key for prompt in range(PROMPTS) for key in keys_of(prompt) if key in announced
        } == shown
        assert len(announced) == len(shown)
        useful = {
            key
            for prompt in range(PROMPTS)
            for key in keys_of(prompt)[
                : max(hits_in(geometry, present, keys_of(prompt)), default=-1) + 1
            ]
        }
        assert shown <= useful, "what is shown is part of a hit"


def test_chunks_between_two_states_come_and_go_with_the_later_one() -> None:
    """Recurrent states stand where the engine offers them; full attention is stored throughout."""
    geometry = LAYOUTS["qwen3next"]
    keys = keys_of(0)
    full = next(
        index for index, group in enumerate(geometry.groups) if group.kind is GroupKind.FULL
    )
    announced = AnnouncedChunks(geometry)

    def state(chunk: int) -> None:
        for index in range(len(geometry.groups)):
            if index != full:
                announced.learn(keys[chunk], index)

    for key in keys:
        announced.learn(key, full)
    assert announced.show(keys) == []
    state(1)
    assert announced.show(keys, 1) == [0, 1]
    state(4)
    assert announced.show(keys, 4) == [2, 3, 4]
    assert announced.lose(keys[1], 0) == [], "of use to the later hit"
    assert announced.lose(keys[5], full) == [], "never shown"
    assert sorted(announced.lose(keys[4], 0)) == sorted(keys[:5])
    assert len(announced) == 0
    state(4)
    assert announced.show(keys[:5], 4) == [0, 1, 2, 3, 4]
    state(1)
    assert announced.show(keys[:5], 1) == [], "shown already, and now a hit may end there"
    assert sorted(announced.lose(keys[4], 0)) == sorted(keys[2:5])


def test_no_more_is_known_than_there_is_room_for() -> None:
    geometry = LAYOUTS["qwen3"]
    announced = AnnouncedChunks(geometry, chunks_max=2)
    keys = keys_of(0)
    assert [announced.learn(key, 0) for key in keys] == [True, True, False, False, False, False]
    assert announced.show(keys) == [0, 1]
    assert announced.lose(keys[1], 0) == [keys[1]]
    assert announced.learn(keys[1], 0)
    assert not announced.learn(keys[2], 0)
    assert announced.show(keys) == [1]
    assert largest_hit(geometry, [b"\1\1\0"], 3) == 2


def test_a_chunk_that_is_not_of_use_gives_its_place_to_a_new_one() -> None:
    """Never one that is shown, and never one of the prompt that is learned just now."""
    announced = AnnouncedChunks(LAYOUTS["qwen3"], chunks_max=3)
    old, new = keys_of(0), keys_of(1)
    assert all(announced.learn(old[chunk], 0) for chunk in (4, 5))
    assert announced.show(old) == [], "nothing before them is there"
    assert [announced.learn(key, 0) for key in new[:4]] == [True, True, True, False]
    assert announced.show(new) == [0, 1, 2]
    check(announced)
    assert announced.lose(old[4], 0) == [], "it is not known any more"
    assert announced.lose(new[1], 0) == [new[2], new[1]]
    check(announced)
    assert announced.learn(old[5], 0), "there is room"
    assert announced.learn(old[4], 0), "what was shown once gives its place too"
    assert not announced.learn(new[1], 0)
