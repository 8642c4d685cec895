"""The weights in memory are the identity, whatever way they came; see tests.engine.weights.

Answers are compared with those of an engine without a connector, which has the same weights.
"""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from hybridkv.lab.daemon_process import DaemonProcess
from hybridkv.lab.engine_process import ENGINE_ENVIRONMENT
from hybridkv.lab.models import BUNDLED_ENVIRONMENT
from tests.engine.forked import lines_of

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

HIT = 3 * 128
OWN_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}


class Answer(NamedTuple):
    """The answer to one request."""

    tokens: list[int]
    loaded: int | None  # Tokens from outside; None without a connector.


class Answers(dict[str, Answer]):
    """Answers by the name of what was asked."""

    stale: frozenset[str] = frozenset()
    """The names of answers during which the daemon showed an engine that serves nothing."""


def answers(way: str, daemon: DaemonProcess, tmp_path: Path) -> Answers:
    """Returns the answers of engines in a fork."""
    words = [daemon.socket_path, str(tmp_path), way]
    variables = {**os.environ, **BUNDLED_ENVIRONMENT}
    return by_name(lines_of("tests.engine.weights", words, tmp_path / "log", variables))


def by_name(lines: Sequence[str]) -> Answers:
    """Returns the answers by name: the last one where a name is twice."""
    print(*(line for line in lines if "were read in" in line), sep="\n")
    records = [json.loads(line) for line in lines if line.startswith("{")]
    found = Answers({line["name"]: Answer(line["tokens"], line["loaded"]) for line in records})
    found.stale = frozenset(line["name"] for line in records if line["stale"])
    return found


def check_two(found: Answers, first: str, second: str) -> None:
    """Check that neither model takes the other's KV, and that the first finds its own again.

    The last answer of the first is the one that is seen.
    """
    assert found[f"plain {first}"].tokens != found[f"plain {second}"].tokens, "the models differ"
    assert found[f"cached {second}"] == (found[f"plain {second}"].tokens, 0)
    assert found[f"cached {first}"] == (found[f"plain {first} again"].tokens, HIT)


@pytest.mark.soak
def test_a_hubs_names_with_their_weights_elsewhere(daemon: DaemonProcess, tmp_path: Path) -> None:
    """Row 1: `--download-dir` has the weights, and two repositories have equal JSON files."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {
        "HF_HUB_OFFLINE": "0",
        "HF_ENDPOINT": f"http://127.0.0.1:{port}",
        "HF_HOME": str(tmp_path / "home"),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }
    ran = subprocess.run(
        [sys.executable, "-m", "tests.engine.weights", daemon.socket_path, str(tmp_path), "hub"],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[2],
        env={**ENGINE_ENVIRONMENT, **os.environ, **BUNDLED_ENVIRONMENT, **environment},
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    check_two(by_name(ran.stdout.splitlines()), "a", "b")


@pytest.mark.soak
def test_object_storage(daemon: DaemonProcess, tmp_path: Path) -> None:
    """Row 2: only JSON files are in the model's directory, and the URL stands elsewhere."""
    check_two(answers("storage", daemon, tmp_path), "a", "b")


@pytest.mark.soak
def test_a_custom_loader(daemon: DaemonProcess, tmp_path: Path) -> None:
    """Row 3: one directory, and a loader whose own config says where the weights are."""
    check_two(answers("loader", daemon, tmp_path), "a", "b")


@pytest.mark.soak
def test_two_quantization_configs(daemon: DaemonProcess, tmp_path: Path) -> None:
    """Row 4: one method, of which each leaves out another layer."""
    check_two(answers("quantization", daemon, tmp_path), "first", "last")


@pytest.mark.soak
def test_integers_that_onednn_keeps(daemon: DaemonProcess, tmp_path: Path) -> None:
    """Two INT8 checkpoints that differ in nothing else."""
    check_two(answers("int8", daemon, tmp_path), "a", "b")


@pytest.mark.soak
def test_an_empty_parameter_costs_no_hit(daemon: DaemonProcess, tmp_path: Path) -> None:
    """As every layer has one that Marlin computes: after a reset, and after a restart."""
    found = answers("empty", daemon, tmp_path)
    assert {name: answer.loaded for name, answer in found.items()} == {
        "first": 0,
        "first reset": HIT,
        "second": HIT,
        "second reset": HIT,
    }


@pytest.mark.soak
def test_what_cannot_be_read_has_a_name(daemon: DaemonProcess, tmp_path: Path) -> None:
    found = answers("unread", daemon, tmp_path)
    assert {name: answer.loaded for name, answer in found.items()} == {
        "first": 0,
        "first reset": HIT,
        "second": 0,
        "second reset": HIT,
        "first these": 0,
        "first these reset": HIT,
        "second these": HIT,
        "second these reset": HIT,
    }


@pytest.mark.soak
@pytest.mark.parametrize("way", ["in place", "ranks", "multi"])
def test_weights_that_change_while_the_engine_serves(
    way: str, daemon: DaemonProcess, tmp_path: Path
) -> None:
    """Row 5, and all that resets a cache or may change weights: the same weights hit at once."""
    found = answers(way, daemon, tmp_path)
    old, new = found["plain old, reset"].tokens, found["plain new, reset"].tokens
    assert old != new
    assert found["cached old"] == (old, 0)
    assert found["cached old, reset"] == (old, HIT), "the first request after a reset"
    assert found["cached new"] == (new, 0), "nothing of the old weights"
    assert found["cached new, reset"] == (new, HIT)
    assert found["cached old again"] == (old, HIT), "what was stored stays for whoever goes back"
    if way == "ranks":
        return
    assert found["cached awake from 1"] == found["cached awake from 2"] == (old, HIT)
    assert found["cached new, paused meanwhile"] == (new, HIT)
    mixed = "cached old, and blocks of the new"
    assert found[mixed].loaded == 0, (
        "the engine's own cache is of other weights: nothing is offered"
    )
    assert found.stale == {mixed}, "the daemon hears when that begins, and when it ends"
    assert found["cached old once more"] == (old, HIT), "and nothing of it was stored"
    first = "cached new, updated before anything else"
    assert found[first] == (new, 0), "what was found is of the weights of the files"


class Trained(NamedTuple):
    """The answer to a request of an engine in a process of its own."""

    tokens: list[int]
    fresh: list[int]  # The tokens that the engine itself computes at that time.
    cached: int  # Tokens that were not computed.


def test_trainers_orders_of_updates_and_resets(daemon: DaemonProcess, tmp_path: Path) -> None:
    """An engine in a process of its own, updated by code that vLLM does not know, and put to sleep.

    Whatever comes first, its answers are those of the weights that it has.
    """
    variables = {**os.environ, **BUNDLED_ENVIRONMENT, **OWN_PROCESS}
    words = [daemon.socket_path, str(tmp_path)]
    printed = lines_of("tests.engine.trainers", words, tmp_path / "log", variables)
    lines = [json.loads(line) for line in printed if line.startswith("{")]
    found = {line.pop("name"): Trained(**line) for line in lines}
    print(found)
    for what, answer in found.items():
        assert answer.tokens == answer.fresh, what
    assert found["old"].tokens != found["new, reset"].tokens
    assert found["new, reset first"].cached == 0, "what was found is of the old weights"
    misses = ("old", "other", "new, reset first", "old, without a reset")
    assert {what for what, answer in found.items() if answer.cached != HIT} == {*misses}
