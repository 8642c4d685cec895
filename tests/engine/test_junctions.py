"""Prompts that share a prefix and nothing more, on the real engine with recurrent layers."""

from pathlib import Path

import pytest

from hybridkv.cli.main import main
from hybridkv.lab.daemon_process import DaemonProcess
from tests.engine.support import answer, engine, forget, prompt, stats

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

SYSTEM, DOCUMENT = prompt(0, 600), prompt(1, 500)
QUESTIONS = [prompt(2 + number, 400) for number in range(7)]
FIRST = [*([*SYSTEM, *DOCUMENT, *text] for text in QUESTIONS[:3]), [*SYSTEM, *QUESTIONS[3]]]
"""Three prompts about one document, and one that has the system prompt alone."""
AFRESH = [*SYSTEM, *DOCUMENT, *QUESTIONS[4]]
HITS = [[*SYSTEM, *QUESTIONS[5]], [*SYSTEM, *DOCUMENT, *QUESTIONS[6]]]


@pytest.mark.parametrize(
    "model",
    [
        "qwen3next",
        *(
            pytest.param(name, marks=pytest.mark.soak)
            for name in ("qwen35", "granitehybrid", "falconh1")
        ),
    ],
)
def test_the_third_prompt_with_a_shared_prefix_hits_it(
    model: str, daemon: DaemonProcess, tmp_path: Path
) -> None:
    """As the engine's own cache has it, and with its answers to the last bit.

    "paranoid" compares the restored bytes. After everything is gone the family is still known: a
    prompt that is computed anew leaves both states, and the next ones hit.
    """
    with engine(model, tmp_path / "own.log", None) as running:
        own = [running.generate(text, max_tokens=4)[0] for text in FIRST]
    hits = [result["cached_tokens"] for result in own]
    assert hits == [0, 0, hits[2], 0]
    assert len(SYSTEM) < hits[2] <= len(SYSTEM) + len(DOCUMENT)
    extra: dict[str, object] = {"checksum": "paranoid", "load_policy": "always"}
    with engine(model, tmp_path / "e.log", daemon.socket_path, extra=extra) as running:
        loaded = []
        for text in FIRST:
            loaded += running.generate(text, max_tokens=4)
            forget(running)
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
