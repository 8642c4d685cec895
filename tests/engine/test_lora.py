"""LoRA adapters on the real engine: other weights never share bytes; see tests.engine.adapters.

Answers are compared with those of an engine without a connector, to which the same is done.
"""

import json
import os
from pathlib import Path
from typing import NamedTuple

import pytest

from hybridkv.lab.daemon_process import DaemonProcess
from hybridkv.lab.models import BUNDLED_ENVIRONMENT
from tests.engine.forked import lines_of
from tests.engine.weights import CHUNK

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

HIT = 3 * CHUNK


class Answer(NamedTuple):
    """The answer to one request."""

    chances: list[float]
    """The log-probability of each token."""
    cached: int
    objects: float
    """The daemon's objects after the request."""


def answers(socket_path: str, way: str, directory: Path, *, own_process: bool) -> dict[str, Answer]:
    """Returns the answers by name. Engines are forks, or each in a process of its own below one."""
    directory.mkdir()
    variables = {**os.environ, **BUNDLED_ENVIRONMENT}
    variables["VLLM_ENABLE_V1_MULTIPROCESSING"] = str(int(own_process))
    words = [socket_path, str(directory), way]
    lines = lines_of("tests.engine.adapters", words, directory / "log", variables)
    found = [json.loads(line) for line in lines if line.startswith("{")]
    return {
        line["name"]: Answer(line["chances"], line["cached"], line["objects"]) for line in found
    }


def check_answers(served: dict[str, Answer], plain: dict[str, Answer], old: str, new: str) -> None:
    """Check that answers are the same but for rounding, and that two are of different weights."""
    assert plain[old].chances != pytest.approx(plain[new].chances, abs=0.01)
    for what, answer in served.items():
        assert answer.chances == pytest.approx(plain[what].chances, abs=0.001), what


@pytest.fixture(scope="module")
def exchanged(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Answer]:
    """The answers of engines without a connector."""
    return answers("-", "exchanged", tmp_path_factory.mktemp("plain") / "w", own_process=False)


@pytest.mark.parametrize(
    "own_process", [pytest.param(False, id="in process"), pytest.param(True, id="own process")]
)
@pytest.mark.soak
def test_an_adapter_is_what_the_engine_loaded(
    daemon: DaemonProcess, tmp_path: Path, exchanged: dict[str, Answer], own_process: bool
) -> None:
    """Its directory is another one by the first request, and both are older than the engine."""
    served = answers(daemon.socket_path, "exchanged", tmp_path / "served", own_process=own_process)
    check_answers(served, exchanged, "old, then new, first", "new, then new, first")
    assert {what: answer.cached for what, answer in served.items()} == {
        "old, then new, first": 0,
        "old, then new, again": HIT,
        "new, then new, first": 0,
        "new, then new, again": HIT,
        "old, then old, first": HIT,
        "old, then old, again": HIT,
    }


@pytest.mark.parametrize("stages", [1, pytest.param(2, marks=pytest.mark.soak)])
def test_other_weights_under_the_same_name(
    daemon: DaemonProcess, tmp_path: Path, stages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loaded in place, removed and added, evicted and loaded again, and by the next engine."""
    if stages > 1:
        monkeypatch.setenv("HYBRIDKV_TEST_STAGES", str(stages))
        monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    plain = answers("-", "replaced", tmp_path / "plain", own_process=False)
    served = answers(daemon.socket_path, "replaced", tmp_path / "served", own_process=False)
    check_answers(served, plain, "one engine, old", "one engine, new")
    hits = {what.removeprefix("one engine, "): answer.cached for what, answer in served.items()}
    known = {"old, known", "new, known", "old, removed and added", "old, once more"}
    known |= {"new, loaded no more", "next engine, new, known"}
    own = {"new over blocks of the old"}
    assert {what for what, cached in hits.items() if cached} == known | own
    assert {hits[what] for what in known} == {HIT}
    before = served["one engine, old, known"].objects
    for what in ("new over blocks of the old", "new, another prompt"):
        assert served[f"one engine, {what}"].objects == before, "nothing of mixed blocks is stored"
    assert served["one engine, new"].objects > before
