"""Prompts that share a prefix and nothing more, on the real engine with recurrent layers."""

from pathlib import Path

import pytest

from hybridkv.cli.main import main
from hybridkv.lab.daemon_process import DaemonProcess
from tests.engine.support import answer, engine, forget, prompt, stats

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

SYSTEM, DOCUMENT = prompt(0, 600), prompt(1, 500)
QUESTIONS = [prompt(2 + number, 400) for number in range(9)]
FIRST = [*([*SYSTEM, *DOCUMENT, *text] for text in QUESTIONS[:3]), [*SYSTEM, *QUESTIONS[3]]]
"""Three prompts about one document, and one that has the system prompt alone."""
AFRESH = [*SYSTEM, *DOCUMENT, *QUESTIONS[4]]
HITS = [[*SYSTEM, *QUESTIONS[5]], [*SYSTEM, *DOCUMENT, *QUESTIONS[6]]]
LEARNING = [[*SYSTEM, *QUESTIONS[7]], [*SYSTEM, *DOCUMENT, *QUESTIONS[8]]]
"""What the engine needs between the two, to have states where AFRESH leaves them at once."""


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

    "paranoid" compares the restored bytes. After everything is gone the family is still known: the
    first prompt leaves both states, and the next ones hit.
    """
    with engine(model, tmp_path / "own.log", None) as running:
        own = [running.generate(text, max_tokens=4)[0] for text in FIRST]
        running.reset_caches()
        own += running.generate(AFRESH, max_tokens=4)
        for text in LEARNING:
            running.generate(text, max_tokens=4)
        own += [running.generate(text, max_tokens=4)[0] for text in HITS]
    hits = [result["cached_tokens"] for result in own]
    assert hits == [0, 0, hits[2], 0, 0, hits[5], hits[2]]
    assert 0 < hits[5] <= len(SYSTEM) < hits[2] <= len(SYSTEM) + len(DOCUMENT)
    extra: dict[str, object] = {"checksum": "paranoid", "load_policy": "always"}
    loaded = []
    with engine(model, tmp_path / "e.log", daemon.socket_path, extra=extra) as running:
        for text in (*FIRST, AFRESH, *HITS):
            if text is AFRESH:
                assert main(["clear", "--socket", daemon.socket_path]) == 0
            loaded += running.generate(text, max_tokens=4)
            forget(running)
    assert [result["cached_tokens"] for result in loaded] == hits
    # A step that ends elsewhere may move the last bits, as any chunked prefill does.
    assert loaded[4]["tokens"] == own[4]["tokens"]
    del loaded[4], own[4]
    assert [answer(result) for result in loaded] == [answer(result) for result in own]
    assert not stats(daemon.socket_path).get("loads_failed")
