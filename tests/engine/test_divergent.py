"""Hits where the engine has deeper attention blocks than states, on the real engine."""

from pathlib import Path

import pytest

from hybridkv.lab.daemon_process import DaemonProcess
from tests.engine.support import answer, engine, forget, prompt, stats
from tests.waiting import until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

BLOCK = 256
STEPS = (
    *("--max-num-batched-tokens", str(BLOCK), "--enable-chunked-prefill"),
    *("--prefix-cache-retention-interval", str(BLOCK)),
)
SHARED = 2 * BLOCK + 90  # Tokens that the second prompt shares with the first.


def test_a_state_at_the_depth_of_the_engines_attention_blocks_is_a_hit(
    daemon: DaemonProcess, tmp_path: Path
) -> None:
    """A load restores the last state alone, and attention blocks from the first on.

    A prompt that leaves the first one earlier finds the engine with its attention blocks and
    without a state. The cache has the state at exactly that depth. The answer is that of the
    engine's own hit of the same length.
    """
    first = prompt(1, 3 * BLOCK + 100)
    second = [*first[:SHARED], *prompt(2, 200)]
    with engine("qwen3next", tmp_path / "own.log", None, *STEPS) as running:
        running.generate(first, max_tokens=4)
        (own,) = running.generate(second, max_tokens=4)
    assert own["cached_tokens"] == 2 * BLOCK
    extra: dict[str, object] = {"checksum": "paranoid", "load_policy": "always"}
    server = daemon.socket_path
    with engine("qwen3next", tmp_path / "e.log", server, *STEPS, extra=extra) as running:
        running.generate(first, max_tokens=4)
        until(lambda: stats(server)["objects"] >= 4 * 3, "all is stored")
        forget(running)
        (again,) = running.generate(first, max_tokens=4)
        assert again["cached_tokens"] == 3 * BLOCK
        before = stats(server)["tokens_loaded"]
        (loaded,) = running.generate(second, max_tokens=4)
    values = stats(server)
    assert loaded["cached_tokens"] == 2 * BLOCK
    assert values["tokens_loaded"] - before == 2 * BLOCK, "none of it was the engine's own hit"
    assert not values.get("loads_failed")
    assert answer(loaded) == answer(own)
