"""Many requests at once and long ones: how much comes from outside, and that it is right (B44)."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hybridkv.client.control import ControlClient
from hybridkv.lab.engine_process import EngineProcess
from hybridkv.lab.judging import NOISE_FACTOR, NOISE_MIN, deviation
from tests.engine.support import answer, engine, forget, prompt, stats
from tests.forked_daemon import ForkedDaemon
from tests.programs.tiers.servers import ValkeyServer
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
    return [running.generate(text, max_tokens=4)[0] for text in prompts]


def at_once(running: EngineProcess, prompts: list[list[int]]) -> Answers:
    return running.generate(*prompts, max_tokens=4)


def test_hit_rates_in_a_session_after_a_restart_and_under_load(tmp_path: Path) -> None:
    """The rates of 50 prompts: in one engine that forgot them, in the next, and there all at once.

    One by one the answers are those of the engine's own hits to the last bit. At once they run in
    other batches, which change last bits. Then they may differ by as much as the engine's own do.
    Restored bytes are compared either way ("paranoid").
    """
    prompts = [prompt(seed, TOKENS) for seed in range(REQUESTS)]
    with engine("gemma3", tmp_path / "r.log", None) as running:
        alone, own = one_by_one(running, prompts), one_by_one(running, prompts)
        running.reset_caches()
        noise = deviation(at_once(running, prompts), alone)
    rates = {}
    with ForkedDaemon(str(tmp_path / "daemon.sock"), "1GiB") as daemon:

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


LONG = 100_000
LONG_ARGUMENTS = (
    "--block-size=32",
    f"--max-model-len={LONG + 64}",
    f"--hf-overrides={json.dumps({'max_position_embeddings': LONG + 64})}",
    "--max-num-batched-tokens=4096",
    f"--kv-cache-memory-bytes={2 << 30}",
)
LONG_EXTRA: dict[str, object] = {
    "hybrid_chunk_size": 32,  # 3,125 chunks of at least two groups: more than one question.
    "load_policy": "always",
    "lookup_timeout_ms": 30_000,
    "load_timeout_seconds": 30,
}


@pytest.mark.parametrize("model", ["gemma3", "lfm2"])
def test_a_server_gives_the_hit_of_ram_to_prompts_of_100_000_tokens(
    model: str, tmp_path: Path
) -> None:
    """Whatever number of objects a tier can be asked about at once."""
    text = prompt(3, LONG)
    seconds: dict[str, float] = {}
    with ValkeyServer(tmp_path) as server:
        options = ["--tier", f"valkey+unix://{server.socket}?timeout=30"]
        with (
            ForkedDaemon(str(tmp_path / "daemon.sock"), "4GiB", options=options) as daemon,
            engine(
                model, tmp_path / "log", daemon.socket_path, *LONG_ARGUMENTS, extra=LONG_EXTRA
            ) as running,
        ):

            def ask(name: str) -> dict[str, Any]:
                (result,) = running.generate(text, max_tokens=4)
                seconds[name] = result["ttft_seconds"]
                return result

            computed = ask("computed")
            until(lambda: not stats(daemon.socket_path)["writes_waiting"], "all is written")
            objects = stats(daemon.socket_path)["objects"]
            own = ask("own hit")
            forget(running)
            from_ram = ask("RAM")
            with ControlClient(daemon.socket_path) as control:
                control.clear_objects()
            forget(running)
            from_tier = ask("server")
    times = ", ".join(f"{name} {value:.2f} s" for name, value in seconds.items())
    print(f"{model}: {objects:.0f} objects, hit {from_tier['cached_tokens']} of {LONG}")
    print(f"{model}, time to the first token: {times}")
    assert computed["cached_tokens"] == 0
    assert from_ram["cached_tokens"] > LONG - 2 * 4096
    assert from_tier["cached_tokens"] == from_ram["cached_tokens"]
    if own["cached_tokens"] == from_ram["cached_tokens"]:
        assert answer(own) == answer(from_ram)
    assert answer(from_tier) == answer(from_ram)
