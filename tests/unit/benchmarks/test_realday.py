"""What a real day publishes: its tables, its picture, and whether all is as promised."""

from dataclasses import replace

import pytest
from benchmarks.realday.page import faults_of, text_of
from benchmarks.realday.results import (
    FROM_DISK,
    LMCACHE,
    OWN_HIT,
    RESTARTED,
    WAYS,
    Cost,
    Killed,
    ModelDay,
    Prompt,
    Ratios,
    Run,
    Turns,
)

from tests.engine.server import Streamed

pytestmark = pytest.mark.engine

ANSWER = Streamed(
    first_seconds=2.0, seconds=3.0, tokens=[1, 2, 3], prompt_tokens=1024, cached_tokens=0
)
SAME = Ratios([1.0, 1.0, 1.0], [1.0, 1.0, 1.0])
OTHER = replace(ANSWER, tokens=[1, 2, 4])


def day() -> ModelDay:
    """Returns a day on which all was right, of two prompts and two users."""
    answers = {way: replace(ANSWER, first_seconds=2 / (at + 1)) for at, way in enumerate(WAYS)}
    return ModelDay(
        "small",
        "float32",
        groups="0:full/128",
        chunk_tokens=128,
        stored_token_bytes=46080,
        prompts=[Prompt(tokens, dict(answers)) for tokens in (1024, 2048)],
        users=[Prompt(512, dict(answers)) for _ in range(2)],
        turns=Turns(1, [ANSWER, ANSWER], [ANSWER, ANSWER]),
        killed=Killed(ANSWER, ANSWER, is_same=True),
        cost=Cost(1024, 64, [Ratios([0.99, 1.0, 1.02], [1.0, 1.01, 1.01]), SAME]),
        lookups={"hit: found": 3},
        codecs=[{"codec": "zplanes", "dtype": "float32", "ratio": 1.19}],
        peers={LMCACHE: "not run: no --lmcache"},
        seconds=120.0,
    )


def run_of(*days: ModelDay) -> Run:
    return Run("2026-11-28", "2 cores", {"vLLM": "0.32.0"}, load=0.1, days=[*days])


def test_another_answer_is_a_fault_unless_the_engines_own_hit_gives_it() -> None:
    """The engine's own hit may differ from what it computes, in a token that is nearly as likely
    as another."""
    bad = day()
    bad.prompts[0].answers[RESTARTED] = OTHER
    bad.killed = Killed(ANSWER, OTHER, is_same=False)
    assert len(faults_of(run_of(bad))) == 2
    assert f"{RESTARTED} 3 of 4" in text_of(run_of(bad))
    near = day()
    for way in (OWN_HIT, RESTARTED, FROM_DISK):
        near.prompts[0].answers[way] = OTHER
    assert faults_of(run_of(near)) == []


def test_a_cost_above_two_percent_is_a_fault() -> None:
    dear = day()
    ratios = Ratios([1.0, 1.0, 1.0], [1.03, 1.03, 1.04])
    dear.cost = Cost(1024, 64, [ratios, ratios])
    (fault,) = faults_of(run_of(dear))
    assert "decode costs 1.030" in fault
    dear.cost = Cost(1024, 64, [ratios, SAME])
    assert faults_of(run_of(dear)) == [], "two starts of the other engine differ as much"
