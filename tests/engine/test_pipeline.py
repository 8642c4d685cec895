"""A pipeline whose workers are killed, with several steps under way."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from hybridkv.lab.daemon_process import DaemonProcess
from hybridkv.lab.engine_process import EngineError, EngineProcess
from tests.engine.support import answer, begin_storing, engine, forget, prompt, since_vllm, stats
from tests.waiting import until

pytestmark = [
    pytest.mark.engine,
    pytest.mark.soak,
    pytest.mark.timeout(600),
    since_vllm(32, "pipelines are refused"),
]

CHUNK, CHUNKS = 128, 3
RANKS = ("--pipeline-parallel-size=2", "--tensor-parallel-size=2")


@pytest.mark.parametrize("victim", [0, 1, 2, 3], ids=["rank 0", "rank 1", "rank 2", "rank 3"])
def test_a_killed_worker_leaves_no_slot_and_the_next_engine_hits(
    victim: int, daemon: DaemonProcess, tmp_path: Path
) -> None:
    """vLLM ends an engine that lost a worker. Ranks 0 and 1 are the first stage."""
    prompts = [prompt(seed, CHUNKS * CHUNK + 20) for seed in range(4)]
    with engine("gemma3", tmp_path / "a.log", daemon.socket_path, *RANKS) as running:
        own = [run(running, text) for text in (*prompts, *prompts)][len(prompts) :]
        forget(running)
        begin_storing(running, daemon.socket_path, prompts)
        os.kill(workers(running.process.pid)[victim], signal.SIGKILL)
        with pytest.raises(EngineError):
            running.end_command()
    until(lambda: stats(daemon.socket_path)["connections"] == 1, "all processes have ended")
    left = stats(daemon.socket_path)
    assert (left["sessions"], left["leases"], left["bytes_writing"]) == (0, 0, 0)
    with engine("gemma3", tmp_path / "b.log", daemon.socket_path, *RANKS) as running:
        for text, result in zip(prompts, own, strict=True):
            hit = run(running, text)
            assert hit["cached_tokens"] == result["cached_tokens"] == CHUNKS * CHUNK
            assert answer(hit) == answer(result)


def run(running: EngineProcess, text: list[int]) -> dict[str, Any]:
    (result,) = running.generate(text, max_tokens=4)
    return result


def workers(pid: int) -> list[int]:
    """Return the process ids of an engine's four workers by rank, as vLLM names them."""
    pids = list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))
    names = [Path(f"/proc/{child}/cmdline").read_bytes().rstrip(b"\0").decode() for child in pids]
    named = dict(zip(names, pids, strict=True))
    return [named[f"VLLM::Worker_PP{rank // 2}_TP{rank % 2}"] for rank in range(4)]
