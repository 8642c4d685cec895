"""The ceiling is the hit of an unlimited cache: against one that is written down as a set."""

from typing import NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from hybridkv.core.coverage import largest_hit
from hybridkv.core.geometry import Geometry
from hybridkv.core.keys import HASH_BYTES
from hybridkv.observe.ceiling import HitRateCeiling
from tests.layouts import LAYOUTS

IDENTITIES = (b"a" * HASH_BYTES, b"b" * HASH_BYTES)


def name(prompt: int, chunk: int) -> bytes:
    """The hash of a chunk. All prompts share their first two chunks."""
    return (bytes([0 if chunk < 2 else prompt, chunk]) * HASH_BYTES)[:HASH_BYTES]


def names(prompt: int, chunks: int) -> bytes:
    return b"".join(name(prompt, chunk) for chunk in range(chunks))


class StoredObject(NamedTuple):
    identity: bytes
    group: int
    chunk_hash: bytes


class LookupResult(NamedTuple):
    """What a lookup finds in the real cache."""

    masks: list[bytes]  # By group, a byte for each chunk.
    chunks: int  # The chunks of the hit.


class Unlimited:
    """Everything that was ever stored, and a real cache that holds a part of it."""

    def __init__(self, geometry: Geometry) -> None:
        self.geometry = geometry
        self.ever: set[StoredObject] = set()
        self.held: set[StoredObject] = set()
        self.asked = self.hit = self.ceiling = 0

    def look_up(self, identity: bytes, hashes: list[bytes]) -> LookupResult:
        """Look chunks up in the real cache, and add to the sums."""

        def masks(cache: set[StoredObject]) -> list[bytes]:
            groups = range(len(self.geometry.groups))
            return [
                bytes(StoredObject(identity, group, chunk) in cache for chunk in hashes)
                for group in groups
            ]

        found = masks(self.held)
        hit = largest_hit(self.geometry, found, len(hashes))
        tokens = self.geometry.chunk_tokens
        self.asked += len(hashes) * tokens
        self.hit += hit * tokens
        self.ceiling += largest_hit(self.geometry, masks(self.ever), len(hashes)) * tokens
        return LookupResult(found, hit)


def drain(ceiling: HitRateCeiling) -> None:
    while ceiling.work():
        pass


class Step(NamedTuple):
    """Something that happens to the chunks `first` to `last` of a prompt, in some groups."""

    kind: str
    identity: bytes
    prompt: int
    first: int
    last: int
    groups: tuple[int, ...]

    @property
    def objects(self) -> list[StoredObject]:
        """The objects of these chunks and groups."""
        return [
            StoredObject(self.identity, group, name(self.prompt, at))
            for group in self.groups
            for at in range(self.first, self.last + 1)
        ]


KINDS = (*("store", "evict", "ask") * 5, "ask", "lose", "lose", "clear", "work")


@st.composite
def runs(draw: st.DrawFn) -> tuple[Geometry, list[Step]]:
    geometry = LAYOUTS[draw(st.sampled_from(sorted(LAYOUTS)))]
    every = tuple(range(len(geometry.groups)))
    steps: list[Step] = []
    for _ in range(draw(st.integers(4, 24))):
        first, length = draw(st.sampled_from((0, 0, 0, 0, 1, 3))), draw(st.integers(0, 5))
        groups = draw(st.sampled_from((every, every, *((group,) for group in every))))
        steps.append(
            Step(
                kind=draw(st.sampled_from(KINDS)),
                identity=draw(st.sampled_from((*IDENTITIES, *IDENTITIES[:1] * 4))),
                prompt=draw(st.integers(1, 2)),
                first=first,
                last=first + length,
                groups=groups,
            )
        )
    return geometry, steps


def happen(step: Step, model: Unlimited, ceiling: HitRateCeiling) -> None:
    """Let a step happen to the model and to the ceiling."""
    objects = step.objects
    match step.kind:
        case "store":
            model.ever.update(objects)
            model.held.update(objects)
            ceiling.on_stored(
                step.identity,
                [stored.group for stored in objects],
                b"".join(stored.chunk_hash for stored in objects),
            )
        case "evict":
            model.held.difference_update(objects)
        case "lose":
            for stored in objects:
                if stored in model.held:
                    model.held.discard(stored)
                    model.ever.discard(stored)
                    ceiling.on_lost(stored.identity, stored.group, stored.chunk_hash)
        case "ask":
            asked = [name(step.prompt, at) for at in range(step.last + 1)]
            found = model.look_up(step.identity, asked)
            hashes = b"".join(asked)
            ceiling.on_answered(step.identity, model.geometry, hashes, found.masks, found.chunks)
        case "work":
            ceiling.work()


@given(runs())
def test_it_is_the_hit_of_a_cache_that_forgets_nothing(run: tuple[Geometry, list[Step]]) -> None:
    geometry, steps = run
    model, ceiling = Unlimited(geometry), HitRateCeiling(step=2)
    for step in steps:
        happen(step, model, ceiling)
        if step.kind == "clear":
            drain(ceiling)
            model.held.clear()
            model.ever.clear()
            ceiling.on_cleared()
    drain(ceiling)
    assert ceiling.lookups_left_out == ceiling.forgotten == 0
    assert (ceiling.asked_tokens, ceiling.hit_tokens) == (model.asked, model.hit)
    assert ceiling.ceiling_tokens == model.ceiling
    assert ceiling.hit_tokens <= ceiling.ceiling_tokens <= ceiling.asked_tokens


@given(runs(), st.integers(1, 6), st.integers(1, 30))
def test_whatever_it_forgets_it_stays_between_hit_and_asked(
    run: tuple[Geometry, list[Step]], remembered: int, queued: int
) -> None:
    geometry, steps = run
    model, ceiling = Unlimited(geometry), HitRateCeiling(remembered, queued, step=2)
    for step in steps:
        before = ceiling.asked_tokens, ceiling.hit_tokens, ceiling.ceiling_tokens
        happen(step, model, ceiling)
        if step.kind == "clear":
            ceiling.on_cleared()
        assert len(ceiling) <= remembered
        assert ceiling.asked_tokens - before[0] >= ceiling.ceiling_tokens - before[2]
        assert ceiling.ceiling_tokens - before[2] >= ceiling.hit_tokens - before[1]
    drain(ceiling)
    assert ceiling.lookups + ceiling.lookups_left_out == sum(step.kind == "ask" for step in steps)
    assert ceiling.hit_tokens <= ceiling.ceiling_tokens <= ceiling.asked_tokens <= model.asked
    assert not ceiling.has_work


def test_what_is_forgotten_is_what_was_longest_not_asked_for() -> None:
    geometry = LAYOUTS["qwen3"]
    ceiling = HitRateCeiling(remembered_max=4)
    nothing = [bytes(2)]
    ceiling.on_stored(IDENTITIES[0], [0, 0], names(1, 2))
    ceiling.on_stored(IDENTITIES[1], [0, 0], names(2, 2))
    ceiling.on_answered(IDENTITIES[0], geometry, names(1, 2), nothing, 0)
    ceiling.on_stored(IDENTITIES[1], [0], name(3, 3))
    drain(ceiling)
    assert (len(ceiling), ceiling.forgotten) == (4, 1)
    for identity, tokens in ((IDENTITIES[0], 2 * geometry.chunk_tokens), (IDENTITIES[1], 0)):
        before = ceiling.ceiling_tokens
        ceiling.on_answered(identity, geometry, names(1, 2), nothing, 0)
        drain(ceiling)
        assert ceiling.ceiling_tokens - before == tokens


def test_what_was_cleared_is_not_counted_as_forgotten() -> None:
    ceiling = HitRateCeiling(remembered_max=2)
    ceiling.on_stored(IDENTITIES[0], [0, 0], names(1, 2))
    drain(ceiling)
    ceiling.on_cleared()
    ceiling.on_stored(IDENTITIES[0], [0, 0], names(1, 2))
    drain(ceiling)
    assert (len(ceiling), ceiling.forgotten) == (2, 0)
    ceiling.on_stored(IDENTITIES[0], [0], name(3, 3))
    drain(ceiling)
    assert ceiling.forgotten == 1


def test_too_much_at_once_is_left_out_of_all_three_sums() -> None:
    geometry = LAYOUTS["qwen3"]
    ceiling = HitRateCeiling(queued_max=3)
    for _ in range(2):
        ceiling.on_answered(IDENTITIES[0], geometry, names(1, 2), [bytes(2)], 0)
    ceiling.on_stored(IDENTITIES[0], [0, 0], names(1, 2))
    assert (ceiling.lookups_left_out, ceiling.forgotten) == (1, 2), (
        "one lookup, and two chunks that were not taken in"
    )
    drain(ceiling)
    assert (ceiling.lookups, ceiling.asked_tokens) == (1, 2 * geometry.chunk_tokens)
    ceiling.on_answered(IDENTITIES[0], geometry, names(1, 2), [bytes(2)], 0)
    drain(ceiling)
    assert (ceiling.lookups, ceiling.lookups_left_out) == (2, 1), "there is room again"


def test_one_step_looks_at_few_chunks() -> None:
    geometry = LAYOUTS["mistral_swa"]
    ceiling = HitRateCeiling(step=4)
    ceiling.on_answered(IDENTITIES[0], geometry, names(1, 40), [bytes(40)], 0)
    steps = 1
    while ceiling.work():
        steps += 1
    assert steps == 40 // 4 + 1
