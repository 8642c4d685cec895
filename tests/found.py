"""Seeds that have failed once. `tests/test_found.py` runs those that failed with this vLLM.

A seed that the soak finds comes here with what mends it, and stays as long as it draws the same.
"""

from dataclasses import dataclass, field

from tests.seeds import Case, Options

PINNED = "0.32"
"""The version of vLLM in requirements/engine.txt."""


@dataclass(frozen=True)
class Found:
    """A seed that failed, and passes."""

    program: str
    seed: int
    commit: str  # It passes from this one on, at the latest; "" = the one that added the line.
    meaning: str  # What fails where it fails, or what the seed has.
    options: Options = field(default_factory=dict)
    layout: str = ""  # What the simulation draws by it, of the layouts as they are.
    vllm: str = PINNED  # The version of vLLM that it failed with.

    @property
    def case(self) -> Case:
        """The case that runs the seed."""
        return Case(self.program, self.seed, self.options)


FOUND = (
    Found(
        "tests.daemonsim",
        245521993885,
        "",
        "a lookup that waited for tiers lost the hit that RAM had, to whoever needed the room",
    ),
    Found(
        "tests.simulation",
        777923884911,
        "a7b45c9",
        "two engines with a draft model, hooks that fail, and weights that change",
        layout="draft_model_full",
    ),
    Found(
        "tests.simulation",
        314697924345,
        "a7b45c9",
        "two engines of two ranks, hooks that fail, aborts and resets",
        layout="gptoss_small",
    ),
    Found(
        "tests.simulation",
        124,
        "a7b45c9",
        "two engines over tiers, flipped bits, aborts, and weights that change",
        layout="recurrent_fine",
    ),
    Found(
        "tests.simulation",
        124,
        "a7b45c9",
        "two engines over tiers, flipped bits, aborts, and weights that change",
        layout="wide_full",
        vllm="0.30",
    ),
    Found(
        "tests.simulation",
        230571802339,
        "a7b45c9",
        "late loads and stores, a daemon that stops, and resets with the connector",
        layout="qwen3next_1056_small",
        vllm="0.30",
    ),
    Found(
        "tests.simulation",
        462016520534,
        "a7b45c9",
        "two engines of two ranks on simulated devices, over tiers, with flipped bits and aborts",
        layout="qwen3next_small",
        vllm="0.30",
    ),
    Found(
        "tests.simulation",
        3083,
        "",
        "vLLM clears all prefixes between two moves of one that two chunks share",
        options={"layout": "eagle_recurrent"},
        layout="eagle_recurrent",
    ),
    Found(
        "tests.simulation",
        102718577528,
        "a7b45c9",
        "late loads and stores over tiers, a daemon that stops, and weights that change",
        layout="lfm2_small",
        vllm="0.31",
    ),
    Found(
        "tests.simulation",
        586370958014,
        "a7b45c9",
        "two engines on simulated devices, cut connections, and late loads",
        layout="deepseekv4_small",
        vllm="0.33",
    ),
)
