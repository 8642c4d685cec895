"""Where an answer says that a prompt parts from others: a state is worth keeping there."""

from pathlib import Path

import pytest

from hybridkv.core.junctions import JUNCTIONS_MAX
from hybridkv.core.policies import EvictionClass
from hybridkv.wire.messages import Clear, Found
from tests.layouts import LAYOUTS
from tests.unit.daemon.harness import engine
from tests.unit.daemon.tier_node import Node

RECURRENT = LAYOUTS["qwen3next"]


def node_of(*urls: str, layout: str = "qwen3next") -> Node:
    node = Node(*urls, arena=4 << 20)
    engine(node.daemon, 1, LAYOUTS[layout])
    return node


def ask(node: Node, *numbers: int, lease: int = 7) -> Found:
    """Ask about a prompt. A tier is not waited for."""
    found = node.ask(*numbers, lease=lease)
    assert isinstance(found, Found), found
    return found


def test_prompts_part_where_both_go_on() -> None:
    """The earlier prompt left its one state at its end, which is not this prompt's."""
    node = node_of()
    node.store(RECURRENT, [1, 2, 3, 4, 5], states=[5])
    found = ask(node, 1, 2, 3, 8, 9)
    assert (found.chunks, found.junctions) == (0, [3])
    node.store(RECURRENT, [1, 2, 3], states=[3])
    found = ask(node, 1, 2, 3, 8, 9, lease=8)
    assert (found.chunks, found.junctions) == (3, []), "the state is there now"
    found = ask(node, 8, 9, lease=9)
    assert (found.chunks, found.junctions) == (0, []), "nobody began like this"


def test_a_conversation_that_goes_on_does_not_part() -> None:
    """Its last answer, chunks 4 and 5, has no state at its end, and nothing comes after it."""
    node = node_of()
    node.store(RECURRENT, [1, 2, 3, 4, 5], states=[3])
    found = ask(node, 1, 2, 3, 4, 5, 6, 7)
    assert (found.chunks, found.junctions) == (3, [])
    node.store(RECURRENT, [1, 2, 3, 4, 5, 6, 7], states=[7])
    found = ask(node, 1, 2, 3, 4, 5, 8, lease=8)
    assert (found.chunks, found.junctions) == (3, [5]), "the last turn was asked otherwise"


def test_the_end_of_a_prompt_has_its_state_anyway() -> None:
    node = node_of()
    node.store(RECURRENT, [1, 2, 3, 4, 5], states=[5])
    found = ask(node, 1, 2, 3)
    assert (found.chunks, found.junctions) == (0, [])


def test_what_a_tier_alone_has_may_go_on(tmp_path: Path) -> None:
    url = f"disk://{tmp_path}?bytes=64MiB"
    node = node_of(url)
    node.store(RECURRENT, [1, 2, 3, 4, 5], states=[5])
    node.work()
    node = node_of(url)
    found = ask(node, 1, 2, 3, 8, 9)
    assert (found.chunks, found.junctions) == (0, [3])


def test_where_prompts_parted_is_known_after_everything_is_gone() -> None:
    """The first prompt that is computed anew leaves all states that others need."""
    node = node_of()
    node.store(RECURRENT, [1, 2, 3, 4, 5, 6, 7], states=[7])
    for lease, prompt in enumerate([(1, 2, 8, 9), (1, 2, 3, 4, 5, 8), (1, 2, 8, 7)], 20):
        node.ask(*prompt, lease=lease)
    node.daemon.handle(1, Clear(3), node.now)
    found = ask(node, 1, 2, 3, 4, 5, 6, 9, lease=30)
    assert (found.chunks, found.junctions) == (0, [2, 5])


def test_a_prompt_is_asked_for_a_few_states_where_others_parted_most_often() -> None:
    node = node_of()
    node.store(RECURRENT, [*range(1, 13)], states=[12])
    lease = 20
    for times in (1, 2):
        for shared in range(times, 10):
            lease += 1
            node.ask(*range(1, shared + 1), 99, lease=lease)
    node.daemon.handle(1, Clear(3), node.now)
    found = ask(node, *range(1, 13), 98, lease=90)
    assert len(found.junctions) == JUNCTIONS_MAX
    assert found.junctions == sorted(found.junctions)
    assert 1 not in found.junctions, "prompts parted there once, and twice elsewhere"


@pytest.mark.parametrize("layout", ["gemma3", "deepseekv4", "llama4"])
def test_prompts_part_where_windows_inside_an_earlier_one_went_first(layout: str) -> None:
    geometry = LAYOUTS[layout]
    node = node_of(layout=layout)
    node.store(geometry, [*range(1, 11)], eviction_class=None, states=())
    for slot in [*node.daemon.sessions.stored_slots()]:
        if slot.eviction_class is EvictionClass.UNLIKELY:
            node.daemon.store.drop(slot)
    found = ask(node, 1, 2, 3, 98, 99)
    assert (found.chunks, found.junctions) == (0, [3])
