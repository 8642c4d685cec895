"""Real scheduler, block pool, tensors, connector and daemon under random load, with an oracle.

A position is only computed from bytes that are this request's own: see tests/engine/simulation.py.
"""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from hybridkv.lab.engine_process import ENGINE_ENVIRONMENT
from hybridkv.lab.models import bundled_environment
from tests.engine.support import since_vllm

pytestmark = [pytest.mark.engine, pytest.mark.soak, pytest.mark.timeout(600)]

FIXED_SEEDS = range(4)
FRESH_SEEDS = 4
TIGHT = (
    "--no-async-scheduling",
    "--max-num-batched-tokens=512",
    "--max-num-seqs=6",
    "--max-model-len=2048",
    "--num-gpu-blocks-override=52",
)


@pytest.mark.parametrize(
    "model",
    [
        "gemma3",
        "qwen3next",
        pytest.param("lfm2", marks=since_vllm(32, "its CPU kernel refuses LFM2's convolution")),
        *(pytest.param(model, marks=pytest.mark.soak) for model in ("gemma4", "llama4")),
    ],
)
def test_no_position_is_ever_computed_from_other_bytes(
    model: str, tmp_path: Path, rng: random.Random
) -> None:
    """Arena and block pool are small. The daemon is killed, stopped and cleared, and bits flip."""
    seeds = [*FIXED_SEEDS, *(rng.getrandbits(32) for _ in range(FRESH_SEEDS))]
    command = [
        sys.executable,
        "-m",
        "tests.engine.simulation",
        model,
        str(tmp_path / "d.sock"),
        "32MiB",
        *TIGHT,
    ]
    child = subprocess.run(
        [*command, *map(str, seeds)],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[2],
        env={**ENGINE_ENVIRONMENT, **os.environ, **bundled_environment(model)},
    )
    results = [json.loads(line) for line in child.stdout.splitlines() if line.startswith("{")]
    failed = seeds[len(results) :]
    assert child.returncode == 0, (
        f"seed {failed[0] if failed else '?'} of {model}:\n{child.stderr[-3000:]}"
    )
    assert [result["seed"] for result in results] == seeds
    total = {
        key: sum(result.get(key, 0) for result in results)
        for key in ("loaded", "aborts", "kill", "stop", "flip")
    }
    assert results[-1]["loaded"] > 1000, "the load found the cache"
    assert all(total.values()), total
