"""Live audits next to engines that compute other bytes under one identity, which no digest sees."""

import gc
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from hybridkv.connector.metrics import audited, declined
from hybridkv.core.audit import AuditOutcome
from hybridkv.core.coverage import stored_blocks
from hybridkv.wire.messages import Decline
from tests.simulation.configs import Shape
from tests.simulation.node import Node
from tests.simulation.served import Served, shape_of

pytestmark = pytest.mark.engine

NAMES = (
    "full",
    "gemma3_small",
    "gptoss_small",
    "llama4_small",
    "mistral",
    "deepseekv4_small",
    "lfm2_small",
    "falconh1_small",
    "qwen3next_small",
    "eagle_full",
)
CHUNKS = 4
LIE = 5
"""The salt of a liar's bytes. The digest of its weights is that of salt 0."""


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    node = Node(tmp_path_factory.mktemp("audits"), "roomy")
    yield node
    node.close()


@pytest.fixture(scope="module", autouse=True)
def imported() -> Iterator[None]:
    """Objects of imported modules are not looked through for each test."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def no_engine_of_before() -> None:
    """Engines are full of circles, and each keeps its blocks."""
    gc.collect()


def stored(node: Node, shape: Shape, tokens: list[int]) -> None:
    """Store a prompt in the daemon with an engine that then ends.

    The engine copies on the host: a device's staging may have no room for what a step computes.
    """
    node.fresh()
    first = Served(replace(shape, device=None), node, "first")
    first.ask(tokens, stores_all=True)
    first.engine.close()


def prompt_of(shape: Shape) -> list[int]:
    return random.Random(3).choices(range(2, 2000), k=CHUNKS * shape.layout.unit + 3)


@pytest.mark.parametrize(
    ("name", "device"), [*((name, 7) for name in NAMES), ("gemma3_small", None)]
)
def test_an_engine_that_computes_other_bytes_is_cut_off_at_its_first_hit(
    name: str, device: int | None, node: Node
) -> None:
    shape = shape_of(name, device)
    tokens = prompt_of(shape)
    stored(node, shape, tokens)
    liar = Served(shape, node, "second", LIE)
    try:
        before = node.control.stats().values
        loaded = liar.ask(tokens)
        assert loaded <= (CHUNKS - 1) * shape.layout.unit
        assert liar.counted(audited(AuditOutcome.DIFFERED)) == 1
        assert liar.engine.scheduler.reset_prefix_cache()
        assert not liar.ask(tokens)
        assert liar.counted(declined(Decline.AUDIT)) == 1
        values = node.control.stats().values
        assert values["audits_differed"] - before.get("audits_differed", 0) == 1
        # What it computed before the verdict may be there: objects after the hit.
        new_objects = values["objects_stored"] - before["objects_stored"]
        assert new_objects <= len(shape.layout.members)
        assert not values["leases"]
    finally:
        liar.engine.close()


@pytest.mark.parametrize(
    ("name", "device"), [*((name, 7) for name in NAMES), ("gemma3_small", None)]
)
def test_an_engine_that_computes_the_same_bytes_is_served_on(
    name: str, device: int | None, node: Node
) -> None:
    """All groups are compared, states too. The first hit is a chunk shorter, the next is not."""
    shape = shape_of(name, device)
    tokens = prompt_of(shape)
    stored(node, shape, tokens)
    honest = Served(shape, node, "second")
    try:
        audits = honest.engine.side.audits
        compared: list[int] = []
        finish = audits.finish

        def watched(audit, verdict, now):  # type: ignore[no-untyped-def]
            compared.extend(item.pair.group_index for item in audit.objects.values())
            finish(audit, verdict, now)

        audits.finish = watched
        assert honest.ask(tokens) == (CHUNKS - 1) * shape.layout.unit
        assert honest.counted(audited(AuditOutcome.PASSED)) == 1
        geometry = honest.engine.geometry
        assert sorted(compared) == [
            index
            for index, group in enumerate(geometry.groups)
            if stored_blocks(geometry, group, CHUNKS - 1)
        ]
        assert honest.engine.scheduler.reset_prefix_cache()
        assert honest.ask(tokens) == CHUNKS * shape.layout.unit
        assert honest.counted(audited(AuditOutcome.PASSED)) == 1
        assert not node.control.stats().values["leases"]
    finally:
        honest.engine.close()
