"""Hits that end inside a block, on the real engine."""

from pathlib import Path

import pytest

from hybridkv.lab.daemon_process import DaemonProcess
from tests.engine.support import answer, engine, forget, prompt, since_vllm, stats
from tests.waiting import until

pytestmark = [
    pytest.mark.engine,
    pytest.mark.soak,
    pytest.mark.timeout(600),
    since_vllm(32, "hits inside a block are not served"),
]

UNIT = 32
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
