"""The simulation on the gate's seeds: nothing is computed from other bytes, and nothing is kept."""

from collections import Counter

import pytest
import vllm

from tests.found import FOUND, PINNED
from tests.seeds import Case, passed
from tests.simulation.cases import BEHAVIOURS, INSIDE_A_BLOCK, SEEDS
from tests.simulation.layouts import LAYOUTS

pytestmark = [pytest.mark.engine, pytest.mark.timeout(3600)]


def test_every_layout_comes_to_every_behaviour() -> None:
    """All layouts that this vLLM is served with, the true sizes among them, and found seeds.

    An older vLLM has not all of the behaviours.
    """
    served = {name for name, layout in LAYOUTS.items() if layout.is_served}
    assert served <= SEEDS.keys(), f"no seeds of {sorted(served - SEEDS.keys())} are chosen"
    cases = [
        *(
            Case("tests.simulation", seed, {"layout": name})
            for name in SEEDS
            if name in served
            for seed in SEEDS[name]
        ),
        *(
            found.case
            for found in FOUND
            if found.program == "tests.simulation" and found.options.get("layout") in served
        ),
    ]
    counts = passed(cases)
    wanted = Counter(case.options["layout"] for case in cases)
    assert all(counts[f"layout_{name}"] == count for name, count in wanted.items())
    never = [name for name in (*BEHAVIOURS, *INSIDE_A_BLOCK) if not counts[name]]
    is_pinned = vllm.__version__.startswith(f"{PINNED}.")
    assert not is_pinned or not never, f"no seed came to {never}"


@pytest.mark.soak
def test_drawn_layouts_come_to_every_behaviour() -> None:
    """Fresh seeds draw the layouts and the faults that these do."""
    counts = passed(Case("tests.simulation", seed) for seed in range(150))
    never = [name for name in BEHAVIOURS if not counts[name]]
    assert not never, f"no seed came to {never}"


@pytest.mark.soak
def test_hits_inside_a_block_come_from_everywhere() -> None:
    """From RAM and from below it, and next to hits of the engine that end elsewhere."""
    counts = passed(Case("tests.simulation", seed, {"layout": "lfm2_small"}) for seed in range(100))
    never = [name for name in INSIDE_A_BLOCK if not counts[name]]
    assert not never, f"no seed came to {never}"
