"""Prompts that share a prefix and nothing more, on the real engine with recurrent layers."""

from pathlib import Path
from typing import Any

import pytest

from hybridkv.cli.main import main
from hybridkv.lab.daemon_process import DaemonProcess
from hybridkv.lab.engine_process import EngineProcess
from hybridkv.lab.models import V2_RUNNER_ENV
from tests.engine.support import answer, engine, forget, prompt, stats
from tests.forked_daemon import ForkedDaemon

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

SYSTEM, DOCUMENT = prompt(0, 600), prompt(1, 500)
QUESTIONS = [prompt(2 + number, 400) for number in range(7)]
FIRST = [*([*SYSTEM, *DOCUMENT, *text] for text in QUESTIONS[:3]), [*SYSTEM, *QUESTIONS[3]]]
"""Three prompts about one document, and one that has the system prompt alone."""
AFRESH = [*SYSTEM, *DOCUMENT, *QUESTIONS[4]]
HITS = [[*SYSTEM, *QUESTIONS[5]], [*SYSTEM, *DOCUMENT, *QUESTIONS[6]]]


PARANOID: dict[str, object] = {"checksum": "paranoid", "load_policy": "always"}
SHAPES = {
    "one step": (),
    "chunked": ("--max-num-batched-tokens=320",),
    "long prefill": ("--long-prefill-token-threshold=300",),
    "synchronous": ("--no-async-scheduling",),
}
"""vLLM's options that move where steps end, or when they are planned, by what they do."""


def own_answers(model: str, directory: Path, *options: str) -> list[dict[str, Any]]:
    """Returns the answers of an engine that has its own cache alone."""
    with engine(model, directory / "own.log", None, *options) as running:
        return [running.generate(text, max_tokens=4)[0] for text in FIRST]


def outside(running: EngineProcess, text: list[int]) -> dict[str, Any]:
    """Returns the answer to a prompt, after which the engine forgets its own cache."""
    (result,) = running.generate(text, max_tokens=4)
    forget(running)
    return result


@pytest.mark.parametrize(
    ("model", "steps"),
    [
        ("granitehybrid", "one step"),
        *(
            pytest.param(model, steps, marks=pytest.mark.soak)
            for model, steps in (
                ("qwen3next", "one step"),
                ("qwen35", "one step"),
                ("falconh1", "one step"),
                ("qwen3next", "chunked"),
                ("qwen3next", "long prefill"),
                ("qwen3next", "synchronous"),
                ("falconh1", "chunked"),
            )
        ),
    ],
)
def test_the_third_prompt_with_a_shared_prefix_hits_it(
    model: str, steps: str, daemon: DaemonProcess, tmp_path: Path
) -> None:
    """As the engine's own cache has it, and with its answers to the last bit.

    "paranoid" compares the restored bytes. After everything is gone the family is still known: a
    prompt that is computed anew leaves both states, and the next ones hit.
    """
    options = SHAPES[steps]
    own = own_answers(model, tmp_path, *options)
    hits = [result["cached_tokens"] for result in own]
    assert hits == [0, 0, hits[2], 0]
    assert len(SYSTEM) < hits[2] <= len(SYSTEM) + len(DOCUMENT)
    with engine(model, tmp_path / "e.log", daemon.socket_path, *options, extra=PARANOID) as running:
        loaded = [outside(running, text) for text in FIRST]
        assert [result["cached_tokens"] for result in loaded] == hits
        assert [answer(result) for result in loaded] == [answer(result) for result in own]
        again = []
        for is_kept in (True, False):
            # Where a step ends moves the last bits. So the engine's own hits are of the same steps.
            assert main(["clear", "--socket", daemon.socket_path]) == 0
            for text in (AFRESH, *HITS):
                again += running.generate(text, max_tokens=4)
                if not is_kept:
                    forget(running)
            forget(running)
    assert [result["cached_tokens"] for result in again[3:]] == [
        0,
        again[1]["cached_tokens"],
        hits[2],
    ]
    assert 0 < again[1]["cached_tokens"] <= len(SYSTEM)
    assert [answer(result) for result in again[3:]] == [answer(result) for result in again[:3]]
    assert not stats(daemon.socket_path).get("loads_failed")


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("model", ["lfm2", "qwen3next"])
def test_the_v2_model_runner_hits_it_too(
    model: str, daemon: DaemonProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In Triton's interpreter, which a process reads at its start. It takes minutes."""
    monkeypatch.setenv(V2_RUNNER_ENV, "1")
    with engine(model, tmp_path / "own.log", None, kind=EngineProcess) as running:
        own = [running.generate(text, max_tokens=4)[0] for text in FIRST]
    server, log_path = daemon.socket_path, tmp_path / "e.log"
    with engine(model, log_path, server, extra=PARANOID, kind=EngineProcess) as running:
        loaded = [outside(running, text) for text in FIRST]
    hits = [result["cached_tokens"] for result in own]
    assert hits == [0, 0, hits[2], 0]
    assert len(SYSTEM) < hits[2] <= len(SYSTEM) + len(DOCUMENT)
    assert [result["cached_tokens"] for result in loaded] == hits
    assert [answer(result) for result in loaded] == [answer(result) for result in own]
    assert "Using V2 Model Runner" in log_path.read_text()


@pytest.mark.soak
def test_with_a_drafter_the_hit_is_longer_than_the_engines_own(
    daemon: DaemonProcess, tmp_path: Path
) -> None:
    """vLLM's own hit leaves out the block before the junction, which the drafter may miss."""
    own = own_answers("qwen3next_mtp", tmp_path)
    with engine("qwen3next_mtp", tmp_path / "e.log", daemon.socket_path, extra=PARANOID) as running:
        loaded = [outside(running, text) for text in FIRST]
    assert [result["tokens"] for result in loaded] == [result["tokens"] for result in own]
    hits = [result["cached_tokens"] for result in loaded]
    assert hits == [0, 0, hits[2], 0]
    assert own[2]["cached_tokens"] < hits[2] <= len(SYSTEM) + len(DOCUMENT)


@pytest.mark.soak
@pytest.mark.parametrize("model", ["qwen3next", "granitehybrid"])
def test_each_prompt_on_another_engine_and_daemon_over_a_directory(
    model: str, tmp_path: Path
) -> None:
    """Nothing but the directory outlives a prompt, and its hits are those of one engine."""
    own = own_answers(model, tmp_path)
    found = []
    for text in FIRST:
        options = ("--disk", str(tmp_path / "disk"), "--disk-bytes", "1GiB")
        with (
            ForkedDaemon(str(tmp_path / "d.sock"), "64MiB", options=options) as daemon,
            engine(model, tmp_path / "e.log", daemon.socket_path, extra=PARANOID) as running,
        ):
            found += running.generate(text, max_tokens=4)
    assert [result["cached_tokens"] for result in found] == [r["cached_tokens"] for r in own]
    assert [answer(result) for result in found] == [answer(result) for result in own]


@pytest.mark.soak
def test_requests_that_are_preempted_leave_their_states_all_the_same(
    daemon: DaemonProcess, tmp_path: Path
) -> None:
    """They come back to a pool without their blocks, while others wait for theirs."""
    own = own_answers("qwen3next", tmp_path)
    with engine("qwen3next", tmp_path / "e.log", daemon.socket_path, extra=PARANOID) as running:
        outside(running, FIRST[0])
        others = [[*SYSTEM, *DOCUMENT, *prompt(20 + number, 300)] for number in range(3)]
        results = running.generate(*others, max_tokens=300, starve=True)
        assert results[0]["preemptions"]
        forget(running)
        (third,) = running.generate(FIRST[2], max_tokens=4)
    assert third["cached_tokens"] == own[2]["cached_tokens"]
    assert third["tokens"] == own[2]["tokens"]
    assert not stats(daemon.socket_path).get("loads_failed")
