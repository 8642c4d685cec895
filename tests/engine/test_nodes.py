"""An engine whose ranks are on two nodes, each with a daemon: on one machine, and really vLLM's."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hybridkv.lab.daemon_process import DaemonProcess, ending_with_parent
from hybridkv.lab.engine_process import ENGINE_ENVIRONMENT
from hybridkv.lab.models import bundled_environment
from tests.engine.server import Server
from tests.engine.support import (
    answer,
    arguments_of,
    engine,
    forget,
    is_served,
    prompt,
    since_vllm,
    stats,
)
from tests.engine.test_verify import verify
from tests.forked_daemon import ForkedDaemon
from tests.waiting import until

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(1200),
    pytest.mark.soak,
    since_vllm(32, "an engine is on one node"),
]

TWO_RANKS = "--tensor-parallel-size=2"
CHUNK = 256  # Of qwen3next.


@pytest.fixture
def daemons(tmp_path: Path) -> Iterator[list[DaemonProcess]]:
    """A daemon for each of two nodes."""
    both: list[DaemonProcess] = [
        ForkedDaemon(str(tmp_path / f"{node}.sock"), "64MiB") for node in range(2)
    ]
    with both[0], both[1]:
        yield both


def pattern(daemons: list[DaemonProcess]) -> str:
    """Return the path of the daemons' sockets, as the setting `server` has it."""
    return str(Path(daemons[0].socket_path).with_name("{node}.sock"))


@pytest.mark.parametrize("model", ["qwen3", "gemma3", "qwen3next", "deepseekv2"])
@pytest.mark.parametrize("ranks", [TWO_RANKS, "--pipeline-parallel-size=2"])
def test_every_answer_and_every_byte_is_right(model: str, ranks: str) -> None:
    if not is_served(model):
        pytest.skip("vLLM turns prefix caching off for MLA here")
    if model == "qwen3next" and ranks != TWO_RANKS:
        pytest.skip("its layers differ, and a stage would lack some")
    status, proof = verify("--model", model, "--nodes", "2", "--", ranks)
    assert status == 0, proof


def test_many_requests_while_either_daemon_is_stopped_killed_and_back(
    daemons: list[DaemonProcess], tmp_path: Path
) -> None:
    """Every answer is right, and none waits. Hits come back with the daemon."""
    prompts = [prompt(seed, 2 * CHUNK + 100 + seed) for seed in range(3)]
    extra: dict[str, object] = {"lookup_timeout_ms": 1000, "nodes": 2}
    log = tmp_path / "e.log"
    with engine("qwen3next", log, pattern(daemons), TWO_RANKS, extra=extra) as running:

        def fresh(text: list[int]) -> dict[str, Any]:
            forget(running)
            (result,) = running.generate(text, max_tokens=6)
            return result

        alone = [fresh(text) for text in prompts]

        def hits(text: list[int]) -> bool:
            result = fresh(text)
            known = alone if not result["cached_tokens"] else again
            assert not known or answer(result) == answer(known[prompts.index(text)])
            return bool(result["cached_tokens"] == 2 * CHUNK)

        def until_hits(text: list[int], what: str) -> None:
            until(lambda: hits(text), what)

        again: list[dict[str, Any]] = []
        for text in prompts:
            until_hits(text, "hits of what is stored")
        again = [fresh(text) for text in prompts]
        assert [result["cached_tokens"] for result in again] == [2 * CHUNK] * len(prompts)

        for victim in daemons:
            assert victim.process is not None
            victim.process.send_signal(signal.SIGSTOP)
            for index, text in enumerate(prompts):
                result = fresh(text)
                assert result["cached_tokens"] == 0, "a daemon that hangs is a miss"
                assert answer(result) == answer(alone[index])
            victim.process.send_signal(signal.SIGCONT)
            until_hits(prompts[0], "the engine asks again after the pause")

            forget(running)
            lookups = stats(victim.socket_path)["lookups"]
            running.begin_command("generate", prompts=prompts, max_tokens=60)

            def asks(socket_path: str = victim.socket_path, before: float = lookups) -> bool:
                return stats(socket_path)["lookups"] > before

            until(asks, "the engine asks the daemon that dies")
            victim.kill()
            results = running.end_command()
            assert [len(result["tokens"]) for result in results] == [60] * len(prompts)
            assert all(result["finish_reason"] == "length" for result in results)
            victim.start()
            for text in prompts:
                until_hits(text, "hits are back")


def test_two_launches_of_vllm_as_on_two_nodes(daemons: list[DaemonProcess], tmp_path: Path) -> None:
    """`--nnodes 2`: vLLM says itself where its ranks are, and each launch has an id of its own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = arguments_of(
        "qwen3",
        pattern(daemons),
        TWO_RANKS,
        "--nnodes=2",
        "--master-addr=127.0.0.1",
        f"--master-port={port}",
        "--distributed-executor-backend=mp",
        extra={"checksum": "paranoid", "audit": "on", "load_policy": "always"},
    )
    environment = {**bundled_environment("qwen3"), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", *arguments]
    with (tmp_path / "node1.log").open("wb") as log:
        second = subprocess.Popen(
            ending_with_parent([*command, "--node-rank=1", "--headless"]),
            stdout=log,
            stderr=log,
            env={**ENGINE_ENVIRONMENT, **os.environ, **environment},
        )
    try:
        with Server([*arguments, "--node-rank=0"], tmp_path / "node0.log", environment) as server:
            text, name = prompt(1, 700), "vllm:hybridkv_loaded_tokens_total"
            computed = server.complete(text)

            def hits() -> bool:
                server.post("/reset_prefix_cache")
                server.complete(prompt(2, 10))
                assert server.complete(text) == computed
                return server.total(name) >= 512

            until(hits, "a hit of both nodes")
            assert server.total("vllm:hybridkv_audits_total", outcome="passed") >= 1
            assert not server.total("vllm:hybridkv_loads_total", result="failed")
            assert [stats(daemon.socket_path)["sessions"] for daemon in daemons] == [1, 1]
    finally:
        second.send_signal(signal.SIGINT)
        second.wait(60)
