"""Prompts that part, on a real engine: `python -m benchmarks.branches agents.jsonl`.

The engine answers the prompts of a trace (`benchmarks.agents`) one after the other, and forgets its
own cache after each, so that every hit comes from outside, as from another replica. Lengths are
divided by `--scale`. Then it computes pairs of prompts that share a prefix: the first leaves a
state at its end, the second one where they part as well, and neither hits anything.
"""

import argparse
import json
import random
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.chats import BLOCK_TOKENS
from benchmarks.engines import connected_engine
from benchmarks.large_hits import VOCABULARY
from benchmarks.rows import print_rows
from hybridkv.client.control import ControlClient
from hybridkv.lab.daemon_process import DaemonProcess
from hybridkv.lab.engine_process import EngineProcess

LENGTH = 16_384  # Tokens of the longest prompt.
STEP_TOKENS = 2_048
PAIRS, SHARED_TOKENS, OWN_TOKENS = 20, 3_000, 700
RAM, KV_BYTES = "4GiB", 256 << 20
WAIT_SECONDS = 60.0


def prompts(trace: Path, scale: int) -> Iterator[list[int]]:
    """Yields the tokens of each prompt of a trace, whose blocks stand for random ones."""
    for line in trace.read_text().splitlines():
        request = json.loads(line)
        tokens = [
            token
            for number in request["hash_ids"]
            for token in random.Random(number).choices(VOCABULARY, k=BLOCK_TOKENS // scale)
        ]
        yield tokens[: request["input_length"] // scale]


def engine(model: str, socket_path: str, directory: Path) -> EngineProcess:
    """Returns an engine that never reads its weights anew, so that it may forget at any time."""
    return connected_engine(
        model,
        socket_path,
        directory,
        f"--kv-cache-memory-bytes={KV_BYTES}",
        f"--max-num-batched-tokens={STEP_TOKENS}",
        settings={"load_policy": "always", "weights_identity": "branches"},
        max_position_embeddings=LENGTH,
    )


def day(running: EngineProcess, texts: Iterator[list[int]], socket_path: str) -> dict[str, object]:
    """Returns a row of what the prompts of a trace hit."""
    asked = hit = seconds = count = 0
    for text in texts:
        (result,) = running.generate(text, max_tokens=2)
        running.reset_caches()
        count += 1
        asked += len(text)
        hit += result["cached_tokens"]
        seconds += result["ttft_seconds"]
    with ControlClient(socket_path, WAIT_SECONDS) as control:
        stored = control.stats().values["bytes_committed"]
    return {
        "prompts": count,
        "tokens": asked,
        "tokens hit": f"{hit / asked:.1%}",
        "MiB stored": round(stored / (1 << 20), 1),
        "seconds to all first tokens": round(seconds, 1),
    }


def pairs(running: EngineProcess) -> dict[str, object]:
    """Returns a row of how long the first tokens take of prompts that leave a state more."""
    chance = random.Random(1)
    ratios, firsts = [], []
    for _ in range(PAIRS):
        shared = chance.choices(VOCABULARY, k=SHARED_TOKENS)
        times = []
        for _ in range(2):
            text = [*shared, *chance.choices(VOCABULARY, k=OWN_TOKENS)]
            (result,) = running.generate(text, max_tokens=2)
            running.reset_caches()
            assert not result["cached_tokens"], "a pair hits nothing"
            times.append(result["ttft_seconds"])
        firsts.append(times[0])
        ratios.append(times[1] / times[0])
    return {
        "pairs": PAIRS,
        "tokens": SHARED_TOKENS + OWN_TOKENS,
        "ms to the first token": round(1e3 * statistics.median(firsts)),
        "ratio with a state where prompts part": round(statistics.median(ratios), 3),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--model", default="granitehybrid")
    parser.add_argument("--scale", type=int, default=4, choices=(1, 2, 4, 8))
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hybridkv-branches-") as name:
        directory = Path(name)
        path = str(directory / "daemon.sock")
        with DaemonProcess(path, RAM), engine(arguments.model, path, directory) as running:
            row = day(running, prompts(arguments.trace, arguments.scale), path)
            print_rows([row], arguments.json)
            print_rows([pairs(running)], arguments.json)
