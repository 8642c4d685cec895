"""Hits that end inside a block, on the real engine."""

from pathlib import Path
from typing import Any

import pytest

from hybridkv.lab.daemon_process import DaemonProcess
from hybridkv.lab.engine_process import EngineProcess
from tests.engine.support import answer, engine, forget, prompt, since_vllm, stats
from tests.forked_daemon import ForkedDaemon
from tests.waiting import until

pytestmark = [
    pytest.mark.engine,
    pytest.mark.soak,
    pytest.mark.timeout(600),
    since_vllm(32, "hits inside a block are not served"),
]

UNIT = 32
ALIGNMENT = 128  # Of hits of the bundled models without states, and the size of their chunks.
FIRST = 1000  # Tokens of the first turn, in blocks of 256.
NEW = (100, 300, 500)  # New tokens of second turns.


def test_second_turns_hit_to_within_a_match_unit_of_the_first_ones_end(
    daemon: DaemonProcess, tmp_path: Path
) -> None:
    """Answers are those of the engine's own hits of the same length, to the last bit.

    "paranoid" compares the restored bytes, and every engine has the same match unit.
    """
    unit = "--prefix-match-unit", str(UNIT)
    first = [prompt(seed, FIRST) for seed in range(len(NEW))]
    second = [[*text, *prompt(100 + new, new)] for text, new in zip(first, NEW, strict=True)]
    own, hit = [], FIRST - 1 - (FIRST - 1) % UNIT
    with engine("qwen3next", tmp_path / "own.log", None, *unit) as running:
        for text, turn in zip(first, second, strict=True):
            running.generate(text, max_tokens=4)
            own += running.generate(turn, max_tokens=4)
    assert [result["cached_tokens"] for result in own] == [hit] * len(NEW)
    extra: dict[str, object] = {"checksum": "paranoid", "load_policy": "always"}
    with engine("qwen3next", tmp_path / "e.log", daemon.socket_path, *unit, extra=extra) as running:
        for text in first:
            running.generate(text, max_tokens=4)
        until(lambda: stats(daemon.socket_path)["objects"] >= 3 * (3 + 4), "all is stored")
        forget(running)
        loaded = [running.generate(turn, max_tokens=4)[0] for turn in second]
    values = stats(daemon.socket_path)
    assert [result["cached_tokens"] for result in loaded] == [hit] * len(NEW)
    assert values["tokens_loaded"] == hit * len(NEW)
    assert not values.get("loads_failed")
    assert [answer(result) for result in loaded] == [answer(result) for result in own]


@pytest.mark.parametrize("model", ["qwen3next", "qwen35", "gemma3", "llama4"])
def test_each_turn_of_a_conversation_hits_to_the_last_turns_end(model: str, tmp_path: Path) -> None:
    """From RAM, with a new engine after three turns and a new daemon after six.

    Each hit is as long as the engine's own, whose answers it has to the last bit.
    """
    has_states = model.startswith("qwen")
    unit = UNIT if has_states else ALIGNMENT
    options = ["--prefix-match-unit", str(unit)] if has_states else []
    text: list[int] = []
    turns: list[list[int]] = []
    own: list[dict[str, Any]] = []
    with engine(model, tmp_path / "own.log", None, *options) as running:
        for turn in range(10):
            text = [*text, *prompt(turn, 100 + 400 * (7 * turn % 10) // 9)]
            turns.append(text)
            own += running.generate(text, max_tokens=4)
            text = [*text, *own[-1]["tokens"]]
    extra: dict[str, object] = {"checksum": "paranoid", "load_policy": "always"}
    loaded: list[dict[str, Any]] = []
    with ForkedDaemon(str(tmp_path / "s.sock"), "1GiB") as daemon:
        socket_path = daemon.socket_path
        for part in (turns[:3], turns[3:]):
            log = tmp_path / f"{len(part)}.log"
            with engine(model, log, socket_path, *options, extra=extra) as running:
                for text in part:
                    if len(loaded) == 6:
                        daemon.stop()
                        daemon.start()
                        until(lambda: _is_connected(socket_path, running), "it is connected")
                    loaded += running.generate(text, max_tokens=4)
                    forget(running)
        values = stats(socket_path)
    assert not values.get("loads_failed")
    hits = [result["cached_tokens"] for result in loaded]
    assert hits == [result["cached_tokens"] for result in own]
    ends = [0, *map(len, turns)]
    assert all(end - hit <= unit for end, hit in zip(ends, hits, strict=False))
    assert [answer(result) for result in loaded] == [answer(result) for result in own]


def _is_connected(socket_path: str, running: EngineProcess) -> bool:
    running.generate(prompt(9, 10), max_tokens=1)
    return stats(socket_path)["sessions"] >= 1
