"""The ceiling is the hit of an unlimited cache: against one that is written down as a set."""

from hypothesis import given
from hypothesis import strategies as st

from hybridkv.core.ceiling import Ceiling
from hybridkv.core.coverage import largest_hit
from hybridkv.core.geometry import Geometry
from hybridkv.core.keys import HASH_BYTES
from tests.layouts import LAYOUTS

IDENTITIES = (b"a" * HASH_BYTES, b"b" * HASH_BYTES)


def name(prompt: int, chunk: int) -> bytes:
    """Of a chunk; two prompts share their first ones."""
    return (bytes([0 if chunk < 2 else prompt, chunk]) * HASH_BYTES)[:HASH_BYTES]


def names(prompt: int, chunks: int) -> bytes:
    return b"".join(name(prompt, chunk) for chunk in range(chunks))


class Unlimited:
    """Everything that was ever stored, and a real cache that holds some of it."""

    def __init__(self, geometry: Geometry) -> None:
        self.geometry = geometry
        self.ever: set[tuple[bytes, int, bytes]] = set()
        self.held: set[tuple[bytes, int, bytes]] = set()
        self.asked = self.hit = self.ceiling = 0

    def look_up(self, identity: bytes, hashes: list[bytes]) -> tuple[list[bytes], int]:
        """What a lookup finds in the real one; the sums go on."""

        def masks(cache: set[tuple[bytes, int, bytes]]) -> list[bytes]:
            groups = range(len(self.geometry.groups))
            return [bytes((identity, group, chunk) in cache for chunk in hashes) for group in groups]

        found = masks(self.held)
        hit = largest_hit(self.geometry, found, len(hashes))
        tokens = self.geometry.chunk_tokens
        self.asked += len(hashes) * tokens
        self.hit += hit * tokens
        self.ceiling += largest_hit(self.geometry, masks(self.ever), len(hashes)) * tokens
        return found, hit


def drain(ceiling: Ceiling) -> None:
    while ceiling.work():
        pass


@st.composite
def runs(draw: st.DrawFn) -> tuple[str, list[tuple[str, int, int, int, int]]]:
    layout = draw(st.sampled_from(sorted(LAYOUTS)))
    kinds = st.sampled_from(("store", "store", "store", "evict", "ask", "ask", "lose", "clear", "work"))
    small = st.integers(0, 3)
    return layout, draw(st.lists(st.tuples(kinds, st.integers(0, 1), small, st.integers(0, 7), small), max_size=60))


@given(runs())
def test_it_is_the_hit_of_a_cache_that_forgets_nothing(run: tuple[str, list[tuple[str, int, int, int, int]]]) -> None:
    layout, steps = run
    geometry = LAYOUTS[layout]
    model, ceiling = Unlimited(geometry), Ceiling(step=2)
    for kind, which, prompt, chunk, number in steps:
        identity, group = IDENTITIES[which], number % len(geometry.groups)
        thing = identity, group, name(prompt, chunk)
        match kind:
            case "store":
                model.ever.add(thing)
                model.held.add(thing)
                # One message with several, of one chunk and of the next.
                ceiling.stored(identity, [group], thing[2])
            case "evict":
                model.held.discard(thing)
            case "lose" if thing in model.held:
                model.held.discard(thing)
                model.ever.discard(thing)
                ceiling.lost(*thing)
            case "clear":
                drain(ceiling)
                model.held.clear()
                model.ever.clear()
                ceiling.cleared()
            case "ask":
                asked = [name(prompt, at) for at in range(chunk + 1)]
                ceiling.answered(identity, geometry, b"".join(asked), *model.look_up(identity, asked))
            case "work":
                ceiling.work()
    drain(ceiling)
    assert ceiling.lookups_left_out == ceiling.forgotten == 0
    assert (ceiling.asked_tokens, ceiling.hit_tokens) == (model.asked, model.hit)
    assert ceiling.ceiling_tokens == model.ceiling
    assert ceiling.hit_tokens <= ceiling.ceiling_tokens <= ceiling.asked_tokens


@given(runs(), st.integers(1, 6), st.integers(1, 12))
def test_whatever_it_forgets_it_stays_between_hit_and_asked(
    run: tuple[str, list[tuple[str, int, int, int, int]]], remembered: int, queued: int
) -> None:
    layout, steps = run
    geometry = LAYOUTS[layout]
    model, ceiling = Unlimited(geometry), Ceiling(remembered, queued, step=2)
    asked_of_it = 0
    for kind, which, prompt, chunk, number in steps:
        identity, group = IDENTITIES[which], number % len(geometry.groups)
        thing = identity, group, name(prompt, chunk)
        before = ceiling.asked_tokens, ceiling.hit_tokens, ceiling.ceiling_tokens
        match kind:
            case "store":
                model.ever.add(thing)
                model.held.add(thing)
                ceiling.stored(identity, [group], thing[2])
            case "evict" | "lose":
                model.held.discard(thing)
            case "clear":
                ceiling.cleared()
            case "ask":
                asked_of_it += 1
                asked = [name(prompt, at) for at in range(chunk + 1)]
                ceiling.answered(identity, geometry, b"".join(asked), *model.look_up(identity, asked))
            case "work":
                ceiling.work()
        assert len(ceiling) <= remembered
        assert ceiling.asked_tokens - before[0] >= ceiling.ceiling_tokens - before[2]
        assert ceiling.ceiling_tokens - before[2] >= ceiling.hit_tokens - before[1]
    drain(ceiling)
    assert ceiling.lookups + ceiling.lookups_left_out == asked_of_it
    assert ceiling.hit_tokens <= ceiling.ceiling_tokens <= ceiling.asked_tokens <= model.asked
    assert not ceiling.has_work


def test_what_is_forgotten_is_what_was_longest_not_asked_for() -> None:
    geometry = LAYOUTS["qwen3"]
    ceiling = Ceiling(remembered_max=4)
    nothing = [bytes(2)]
    ceiling.stored(IDENTITIES[0], [0, 0], names(1, 2))
    ceiling.stored(IDENTITIES[1], [0, 0], names(2, 2))
    ceiling.answered(IDENTITIES[0], geometry, names(1, 2), nothing, 0)
    ceiling.stored(IDENTITIES[1], [0], name(3, 3))
    drain(ceiling)
    assert (len(ceiling), ceiling.forgotten) == (4, 1)
    for identity, tokens in ((IDENTITIES[0], 2 * geometry.chunk_tokens), (IDENTITIES[1], 0)):
        before = ceiling.ceiling_tokens
        ceiling.answered(identity, geometry, names(1, 2), nothing, 0)
        drain(ceiling)
        assert ceiling.ceiling_tokens - before == tokens


def test_what_was_cleared_is_not_counted_as_forgotten() -> None:
    ceiling = Ceiling(remembered_max=2)
    ceiling.stored(IDENTITIES[0], [0, 0], names(1, 2))
    drain(ceiling)
    ceiling.cleared()
    ceiling.stored(IDENTITIES[0], [0, 0], names(1, 2))
    drain(ceiling)
    assert (len(ceiling), ceiling.forgotten) == (2, 0)
    ceiling.stored(IDENTITIES[0], [0], name(3, 3))
    drain(ceiling)
    assert ceiling.forgotten == 1


def test_too_much_at_once_is_left_out_of_all_three_sums() -> None:
    geometry = LAYOUTS["qwen3"]
    ceiling = Ceiling(queued_max=3)
    for _ in range(2):
        ceiling.answered(IDENTITIES[0], geometry, names(1, 2), [bytes(2)], 0)
    ceiling.stored(IDENTITIES[0], [0, 0], names(1, 2))
    assert (ceiling.lookups_left_out, ceiling.forgotten) == (1, 2), "one lookup, and two chunks that were not taken in"
    drain(ceiling)
    assert (ceiling.lookups, ceiling.asked_tokens) == (1, 2 * geometry.chunk_tokens)
    ceiling.answered(IDENTITIES[0], geometry, names(1, 2), [bytes(2)], 0)
    drain(ceiling)
    assert (ceiling.lookups, ceiling.lookups_left_out) == (2, 1), "there is room again"


def test_one_step_looks_at_few_chunks() -> None:
    geometry = LAYOUTS["mistral_swa"]
    ceiling = Ceiling(step=4)
    ceiling.answered(IDENTITIES[0], geometry, names(1, 40), [bytes(40)], 0)
    steps = 1
    while ceiling.work():
        steps += 1
    assert steps == 40 // 4 + 1
