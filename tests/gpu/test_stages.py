"""The runner of the stages: what a run that is cut off leaves, and what counts as right."""

import json
import math
import os
from pathlib import Path

import pytest

from tests.gpu import __main__ as runner
from tests.gpu.stages import STAGES, Stage, Step, is_detected
from tests.waiting import DEADLINE_SECONDS

WAITS = """
import json, pathlib, sys, time
path = pathlib.Path(sys.argv[1])
while not (path.exists() and json.loads(path.read_text())):
    time.sleep(0.01)
print(json.dumps({"seen": path.read_text().count('"step"')}))
"""


def test_results_are_written_as_steps_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step ends only once the results of the second one are there."""
    limit = int(DEADLINE_SECONDS)
    steps = (
        Step("waits", ("-c", WAITS, str(tmp_path / "gpu.json")), limit),
        Step("fails", ("-c", "raise SystemExit(3)"), limit),
    )
    monkeypatch.setitem(STAGES, "t", Stage("a test", steps, jobs=2))
    assert runner.run_stages(["t", "t"], (), tmp_path) == 1
    results = json.loads((tmp_path / "gpu.json").read_text())
    named = {result["step"]: result for result in results}
    assert list(named) == ["fails", "waits"], "each step once, in the order of their ends"
    assert not named["fails"]["ok"]
    assert named["waits"]["figures"] == {"seen": 1}
    assert sorted(os.listdir(tmp_path)) == ["gpu.json", "logs.tar.gz"]


def test_a_flipped_byte_is_detected_where_one_arm_computes_instead() -> None:
    warm = {"name": "warm", "ok": False, "same_tokens": True, "external_tokens": 0}
    cold = {"name": "cold", "ok": True}
    assert is_detected({"arms": [cold, warm]})
    assert not is_detected({"arms": [cold, warm | {"same_tokens": False}]})
    assert not is_detected({"arms": [cold | {"ok": False}, warm]})
    assert not is_detected({"arms": [cold, warm | {"ok": True}]})
    assert not is_detected(None)


def test_a_stage_ends_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs is ended, and what has not begun is named."""
    monkeypatch.setattr(runner, "STAGE_SECONDS", 0)
    step = Step("waits", ("-c", "raise SystemExit(0)"), int(DEADLINE_SECONDS))
    monkeypatch.setitem(STAGES, "t", Stage("a test", (step,)))
    assert runner.run_stages(["t"], (), tmp_path) == 1
    (result,) = json.loads((tmp_path / "gpu.json").read_text())
    assert result["result"] == "not begun: the stage has 0 s"
    endless = Step("endless", ("-c", "import time; time.sleep(1000)"), 1)
    outcome = runner.run_step("t", endless, tmp_path, math.inf)
    assert not outcome.ok
    assert outcome.result == "ended after 1 s"


def test_no_stage_has_a_step_twice() -> None:
    for name, stage in STAGES.items():
        names = [step.name for step in stage.steps]
        assert len({*names}) == len(names), name
