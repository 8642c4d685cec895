"""A simulated engine that answers one prompt at a time."""

import random

from vllm import SamplingParams
from vllm.v1.request import Request

from hybridkv.connector.metrics import TOKENS_LOADED
from hybridkv.core.metrics import Metric
from tests.simulation.configs import Shape
from tests.simulation.engine import CLOCK, Chance, Engine
from tests.simulation.layouts import LAYOUTS
from tests.simulation.node import Node
from tests.simulation.world import draw
from tests.waiting import until

STEPS_MAX = 500


def shape_of(name: str, device: int | None = None, chunks: int = 8) -> Shape:
    """An engine for prompts of so many chunks, which keeps a state at the end of each."""
    layout = LAYOUTS[name]
    drawn = draw(random.Random(1), layout, 1).shape
    sparse = {"sliding", "mla_sliding", "recurrent"} & {member.what for member in layout.members}
    return Shape(
        layout=layout,
        num_blocks=4 * layout.blocks_for(chunks * layout.unit, layout.unit, drawn.drafts) + 16,
        max_model_len=chunks * layout.unit,
        budget=layout.unit,
        max_seqs=2,
        retention=layout.unit if sparse else 0,
        ranks=1,
        placement=drawn.placement,
        settings={
            "lookup_timeout_ms": 10_000,
            "hybrid_chunk_size": layout.unit,
            "load_policy": "always",
            "audit": "on",
        },
        device=device,
        drafts=drawn.drafts,
        is_padded=False,
    )


class Served:
    """An engine that answers one prompt at a time, and can store before the first."""

    def __init__(self, shape: Shape, node: Node, name: str, salt: int = 0) -> None:
        chance = Chance(
            load_delay=lambda: 0,
            store_delay=lambda: 0,
            sheds_store=lambda: False,
            repeat_delay=lambda: 0,
            on_step_planned=lambda: None,
        )
        self.engine = Engine(shape, node, name, chance, 0)
        self._salt = salt
        self._name, self._requests = name, 0
        if salt:
            for rank in self.engine.ranks:
                # The oracle would see at once that a liar reads what it did not compute.
                rank.oracle.check = lambda *about: None  # type: ignore[method-assign]
                rank.oracle.check_drafter = lambda *about: 0  # type: ignore[method-assign]
        until(self._can_store, "there are write slots, and workers that can copy")

    def has_slots(self) -> bool:
        """Whether a chunk's objects can be stored, as far as the daemon has answered."""
        self.engine.settle()
        return all(pool.tickets for pool in self.engine.side.stores.credits.pools.values())

    def _can_store(self) -> bool:
        self.engine.step_idle()
        return self.has_slots() and bool(self.engine.side.session.workers_attached())

    def ask(self, tokens: list[int], stores_all: bool = False) -> int:
        """Answer a prompt. Returns how many of its tokens were loaded.

        With `stores_all` every step begins with write slots. Otherwise a state whose step has none
        would not be stored at all.
        """
        self._requests += 1
        before = self.counted(TOKENS_LOADED)
        parameters = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=2)
        request = Request(
            f"{self._name}-{self._requests}",
            tokens,
            parameters,
            None,
            block_hasher=self.engine.hasher,
        )
        self.engine.add(request, self._salt)
        for _ in range(STEPS_MAX):
            CLOCK.now += 0.005
            self.engine.settle()
            if stores_all:
                until(self.has_slots, "there are write slots")
            self.engine.step()
            if not self.engine.is_busy() and self.engine.is_quiet():
                break
        else:
            raise AssertionError("the request is never answered")
        for _ in range(4):
            self.engine.step_idle()
            self.engine.barrier()
        return self.counted(TOKENS_LOADED) - before

    def counted(self, metric: Metric) -> int:
        return int(self.engine.connector.counters.get(metric, 0))
