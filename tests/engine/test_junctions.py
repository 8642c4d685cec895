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
LATER = [[*SYSTEM, *DOCUMENT, *QUESTIONS[4]], [*SYSTEM, *QUESTIONS[5]]]
LATER += [[*SYSTEM, *DOCUMENT, *QUESTIONS[6]]]


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
        own = [running.generate(text, max_tokens=4)[0] for text in (*FIRST, *LATER)]
    document = own[2]["cached_tokens"]
    assert len(SYSTEM) < document <= len(SYSTEM) + len(DOCUMENT)
    system = own[5]["cached_tokens"]
    assert 0 < system <= len(SYSTEM)
    extra: dict[str, object] = {"checksum": "paranoid", "load_policy": "always"}
    loaded = []
    with engine(model, tmp_path / "e.log", daemon.socket_path, extra=extra) as running:
        for number, text in enumerate([*FIRST, *LATER]):
            if number == len(FIRST):
                assert main(["clear", "--socket", daemon.socket_path]) == 0
            loaded += running.generate(text, max_tokens=4)
            forget(running)
    hits = [result["cached_tokens"] for result in loaded]
    assert hits == [0, 0, document, 0, 0, system, document]
    alike = [number for number, result in enumerate(own) if result["cached_tokens"] == hits[number]]
    assert alike == [0, 1, 2, 3, 5, 6], "the engine itself still had the document"
    assert [answer(loaded[number]) for number in alike] == [answer(own[number]) for number in alike]
    assert not stats(daemon.socket_path).get("loads_failed")
