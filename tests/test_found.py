"""Every seed that has failed once with this vLLM.

Those of the simulation import vLLM. The gate has those of a named layout in tests.simulation.
"""

import pytest
import vllm

from tests.found import FOUND, Found
from tests.seeds import outcomes

pytestmark = pytest.mark.engine

VLLM = ".".join(vllm.__version__.split(".")[:2])
HERE = [found for found in FOUND if found.vllm == VLLM]
assert HERE, f"no seed is for vLLM {VLLM}: is PINNED of tests/found.py another version?"


@pytest.mark.parametrize(
    "found",
    [
        pytest.param(
            found,
            id=f"{found.program} {found.seed}",
            marks=[pytest.mark.soak] if found.program == "tests.simulation" else [],
        )
        for found in HERE
    ],
)
def test_a_seed_that_failed_once_passes(found: Found) -> None:
    (outcome,) = outcomes([found.case])
    assert not outcome.error, f"{outcome.error}{found.case.command}"
    is_same = not found.layout or f"layout_{found.layout}" in outcome.counts
    assert is_same, f"it draws another layout than {found.layout}: find another seed, or none"
