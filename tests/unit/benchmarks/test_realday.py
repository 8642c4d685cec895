"""What a real day publishes: its tables, its picture, and whether all is as promised."""

from dataclasses import replace
from xml.etree import ElementTree

import pytest
from benchmarks.realday.page import faults_of, text_of
from benchmarks.realday.plot import picture
from benchmarks.realday.results import (
    COMPUTED,
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


def test_a_day_as_promised_has_its_tables() -> None:
    run = run_of(day())
    text = text_of(run)
    assert faults_of(run) == []
    assert "| 1,024 | 2.00 | 1.00 (0) | 0.67 (0) | 0.50 (0) |" in text
    assert f"{OWN_HIT} 4 of 4; {RESTARTED} 4 of 4; {FROM_DISK} 4 of 4" in text
    assert "ratios 1.000" in text
    assert "LMCache: not run: no --lmcache." in text


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


def test_the_picture_has_a_line_for_each_way_and_a_point_for_each_prompt() -> None:
    root = ElementTree.fromstring(picture([day(), replace(day(), model="<other>")], "two cores"))
    names = [element.tag.rpartition("}")[2] for element in root.iter()]
    assert names.count("polyline") == 2 * len(WAYS)
    assert names.count("circle") == 2 * 2 * len(WAYS)
    lines = [element.get("points", "") for element in root.iter() if element.get("points")]
    heights = [float(line.split()[0].split(",")[1]) for line in lines[: len(WAYS)]]
    assert heights == sorted(heights), "less seconds are lower"
    assert COMPUTED in "".join(root.itertext())
