"""Fifty requests at once: how much of them comes from outside, and that nothing is wrong (B44)."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hybridkv.lab.daemon_process import DaemonProcess
from hybridkv.lab.engine_process import EngineProcess
from hybridkv.lab.judging import NOISE_FACTOR, NOISE_MIN, deviation
from tests.engine.support import answer, engine, forget, prompt, stats
from tests.waiting import until

pytestmark = [pytest.mark.engine, pytest.mark.soak, pytest.mark.timeout(1800)]

REQUESTS = 50
CHUNK = 128  # Tokens, of gemma3.
CHUNKS = 4
TOKENS = CHUNKS * CHUNK + 24
MAX_RATE = CHUNKS * CHUNK / TOKENS  # 95.5 % of a prompt is whole chunks.
EXTRA: dict[str, object] = {
    "checksum": "paranoid",
    "load_policy": "always",
    "lookup_timeout_ms": 30_000,
}
Answers = list[dict[str, Any]]


def one_by_one(running: EngineProcess, prompts: list[list[int]]) -> Answers:
    return [running.run(text, max_tokens=4)[0] for text in prompts]


def at_once(running: EngineProcess, prompts: list[list[int]]) -> Answers:
    return running.run(*prompts, max_tokens=4)


def test_hit_rates_in_a_session_after_a_restart_and_under_load(tmp_path: Path) -> None:
    """Of 50 prompts, in one engine that forgot them, in the next one, and there all at once.

    One by one the answers are those of the engine's own hits to the last bit. At once they run in
    other batches, which change last bits, and are compared within what the engine itself differs
    by; restored bytes are compared either way ("paranoid").
    """
    prompts = [prompt(seed, TOKENS) for seed in range(REQUESTS)]
    with engine("gemma3", tmp_path / "r.log", None) as running:
        alone, own = one_by_one(running, prompts), one_by_one(running, prompts)
        running.reset()
        noise = deviation(at_once(running, prompts), alone)
    rates = {}
    with DaemonProcess(str(tmp_path / "daemon.sock"), "1GiB") as daemon:

        def measured(
            name: str,
            running: EngineProcess,
            ask: Callable[[EngineProcess, list[list[int]]], Answers],
        ) -> Answers:
            before = stats(daemon.socket_path).get("tokens_loaded", 0)
            answers = ask(running, prompts)
            until(lambda: not stats(daemon.socket_path)["leases"], "all loads have ended")
            loaded = stats(daemon.socket_path).get("tokens_loaded", 0) - before
            rates[name] = loaded / (REQUESTS * TOKENS)
            return answers

        with engine("gemma3", tmp_path / "a.log", daemon.socket_path, extra=EXTRA) as running:
            cold = measured("cold", running, one_by_one)
            forget(running)
            session = measured("same session", running, at_once)
        with engine("gemma3", tmp_path / "b.log", daemon.socket_path, extra=EXTRA) as running:
            restarted = measured("after a restart", running, one_by_one)
            forget(running)
            load = measured("under load", running, at_once)
        values = stats(daemon.socket_path)
    print(f"external hit rates: {rates}; noise {noise:.2g}")
    assert [answer(result) for result in cold] == [answer(result) for result in alone]
    assert [answer(result) for result in restarted] == [answer(result) for result in own]
    tolerance = max(NOISE_MIN, NOISE_FACTOR * noise)
    for answers in (session, load):
        assert deviation(answers, alone) <= tolerance
    assert not values.get("loads_failed")
    assert rates["cold"] == 0
    assert rates["after a restart"] == pytest.approx(MAX_RATE)
    assert min(rates["same session"], rates["under load"]) >= 0.9, rates
