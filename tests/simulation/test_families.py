"""Drawn families of prompts with common prefixes: their hits, next to the engine's own.

One engine answers all prompts of a family and has its own cache alone. The other forgets its cache
after each prompt, so that all of its hits come from outside. Both compute what the oracle checks.
"""

import gc
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from hybridkv.connector.metrics import JUNCTIONS_STORED
from hybridkv.core.junctions import JUNCTIONS_MAX
from tests.simulation.configs import Shape
from tests.simulation.node import Node
from tests.simulation.served import Served, shape_of

pytestmark = pytest.mark.engine

PROMPTS = 9
CHUNKS = 14  # More than the longest prompt has.
VOCABULARY = range(2, 2000)

Prefix = tuple[int, ...]


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    node = Node(tmp_path_factory.mktemp("families"), "roomy")
    yield node
    node.close()


def family(rng: random.Random, unit: int) -> list[list[int]]:
    """Prompts of system prompts, documents and questions, each of which may be missing.

    Parts end anywhere in a block. Each question is asked once.
    """

    def part(chunks: int) -> list[int]:
        return rng.choices(VOCABULARY, k=rng.randrange(unit // 2, chunks * unit))

    systems = [part(4) for _ in range(2)]
    documents = [part(3) for _ in range(3)]
    return [
        [
            *rng.choice(systems),
            *rng.choice([*documents, []]),
            *rng.choice([*documents, [], []]),
            *part(2),
        ]
        for _ in range(PROMPTS)
    ]


def shape_for(name: str, rng: random.Random) -> Shape:
    """An engine that keeps a state at the end of a prompt alone, as vLLM does by default.

    It copies on the host: a device's staging may have no room for what a step computes.
    """
    shape = shape_of(name, chunks=CHUNKS)
    unit = shape.layout.unit
    budget = rng.choice((unit, 2 * unit + unit // 3, CHUNKS * unit))
    return replace(
        shape,
        retention=0,
        budget=budget,
        num_blocks=PROMPTS * shape.layout.blocks_for(CHUNKS * unit, budget),
        settings={**shape.settings, "audit": "off"},
    )


def hits(served: Served, prompts: Sequence[list[int]], node: Node | None) -> list[int]:
    """Returns the tokens of each prompt that the engine did not compute.

    With a `node` what that has is cleared before each prompt. Without one the engine forgets.
    """
    found = []
    for tokens in prompts:
        if node is not None:
            node.control.clear_objects()
        before = served.engine.counts["tokens"]
        served.ask(tokens, stores_all=True)
        # The token of the answer that is computed is the first of two.
        found.append(len(tokens) + 1 - (served.engine.counts["tokens"] - before))
        if node is None:
            assert served.engine.scheduler.reset_prefix_cache()
    return found


def chunk_prefixes(tokens: Sequence[int], unit: int) -> list[Prefix]:
    """Returns the prefixes of whole chunks at which a hit may end, ascending."""
    return [tuple(tokens[:end]) for end in range(unit, len(tokens), unit)]


class Model:
    """What is stored of prompts, by their tokens: an independent statement of the rules."""

    def __init__(self, unit: int) -> None:
        self._unit = unit
        self._computed: set[Prefix] = set()
        self._states: set[Prefix] = set()
        self._parted: dict[Prefix, int] = {}

    def clear(self) -> None:
        """The daemon's objects are gone. It remembers where prompts parted."""
        self._computed.clear()
        self._states.clear()

    def ask(self, tokens: Sequence[int]) -> int:
        """Returns the hit of a prompt, and stores it."""
        prefixes = chunk_prefixes(tokens, self._unit)
        hit = max((len(p) for p in prefixes if p in self._states), default=0)
        shared = [p for p in prefixes if p in self._computed]
        # An earlier prompt went another way, and neither ended there.
        is_inside = shared and hit < len(shared[-1]) < len(prefixes[-1])
        if is_inside and self._goes_on(shared[-1]):
            self._parted[shared[-1]] = self._parted.get(shared[-1], 0) + 1
        known = [p for p in prefixes if len(p) > hit and p in self._parted]
        known.sort(key=lambda p: -self._parted[p])
        self._states.update(known[:JUNCTIONS_MAX], prefixes[-1:])
        self._computed.update(prefixes)
        return hit

    def _goes_on(self, prefix: Prefix) -> bool:
        longer = len(prefix) + self._unit
        return any(len(p) == longer and p[: len(prefix)] == prefix for p in self._computed)


@pytest.mark.parametrize(
    ("name", "families"),
    [
        ("falconh1_small", range(2)),
        ("qwen3next_1056_small", range(1)),
        *(
            pytest.param(name, range(2, 10), marks=pytest.mark.soak)
            for name in ("falconh1_small", "qwen3next_1056_small", "qwen3next_small", "lfm2_small")
        ),
    ],
)
def test_families_hit_as_often_as_in_the_engines_own_cache(
    name: str, families: range, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where all objects were cleared: the prompts that follow leave every state at once.

    The engine's own cache does not ask what a state costs, so here it costs nothing.
    """
    monkeypatch.setattr("hybridkv.connector.scheduler.junctions.tokens_of_cost", lambda *_: 0.0)
    stored = 0
    for number in families:
        gc.collect()
        rng = random.Random(f"{name} {number}")
        shape = shape_for(name, rng)
        unit = shape.layout.unit
        prompts = family(rng, unit)
        node.fresh()
        own = Served(shape, node, f"own{number}")
        expected = hits(own, prompts, node)
        own.engine.close()
        node.fresh()
        outside = Served(shape, node, f"outside{number}")
        model = Model(unit)
        try:
            found = hits(outside, prompts, None)
            assert found == [model.ask(tokens) for tokens in prompts], number
            assert all(ours >= theirs for ours, theirs in zip(found, expected, strict=True))
            node.control.clear_objects()
            model.clear()
            rng.shuffle(prompts)
            again = [
                [*tokens[: -unit // 2], *rng.choices(VOCABULARY, k=unit)] for tokens in prompts
            ]
            assert hits(outside, again, None) == [model.ask(tokens) for tokens in again], number
            stored += outside.counted(JUNCTIONS_STORED)
        finally:
            outside.engine.close()
    assert stored > 2 * len(families)
