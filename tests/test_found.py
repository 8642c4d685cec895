"""Every seed that has failed once with this vLLM."""

from functools import cache

import pytest
import vllm

from tests.found import FOUND, Found
from tests.seeds import Outcome, outcomes

pytestmark = pytest.mark.engine

VLLM = ".".join(vllm.__version__.split(".")[:2])
HERE = [found for found in FOUND if found.vllm == VLLM]
assert HERE, f"no seed is for vLLM {VLLM}: is PINNED of tests/found.py another version?"


@cache
def ran(program: str) -> dict[int, Outcome]:
    """Run the seeds of a program one after the other in one process. Returns the outcomes."""
    cases = [found.case for found in HERE if found.program == program]
    return {outcome.case.seed: outcome for outcome in outcomes(cases)}


@pytest.mark.parametrize("found", HERE, ids=lambda found: f"{found.program} {found.seed}")
def test_a_seed_that_failed_once_passes(found: Found) -> None:
    outcome = ran(found.program)[found.seed]
    assert not outcome.error, f"{outcome.error}{found.case.command}"
    is_same = not found.layout or f"layout_{found.layout}" in outcome.counts
    assert is_same, f"it draws another layout than {found.layout}: find another seed, or none"
