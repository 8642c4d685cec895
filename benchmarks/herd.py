"""What engines of a node compute that get one prompt at once: `python -m benchmarks.herd`.

Each row has as many engines, started beside each other, and one daemon. In each round all of them
get a new prompt at the same time, and generate one token. Where they are `kv_consumer`, nobody
waits for what another engine computes, as without promises (docs/decisions/0023).
"""

import argparse
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.engines import connected_engine
from benchmarks.rows import print_rows
from hybridkv.client.control import ControlClient
from hybridkv.lab.daemon_process import DaemonProcess
from hybridkv.lab.engine_process import EngineProcess

RAM = "1GiB"
VOCABULARY = 2000
ROLES = {"kv_consumer": "each for itself", "kv_both": "promises"}
WARM_UP = 2
"""Rounds before the first measured one: an engine learns how fast it computes."""


def measure(model: str, role: str, count: int, rounds: int, tokens: int) -> dict[str, Any]:
    """Returns a row with the medians of the rounds."""
    rng = random.Random(1)
    computed: list[int] = []
    walls: list[float] = []
    with tempfile.TemporaryDirectory(prefix="hybridkv-bench-") as name, ExitStack() as stack:
        directory = Path(name)
        daemon = stack.enter_context(DaemonProcess(str(directory / "d.sock"), RAM))

        def start(number: int) -> EngineProcess:
            return connected_engine(
                model,
                daemon.socket_path,
                directory,
                settings={},
                role=role,
                log=f"{number}.log",
                max_position_embeddings=2 * tokens,
            )

        engines = [start(number) for number in range(count)]
        with ThreadPoolExecutor(count) as pool:
            [*pool.map(stack.enter_context, engines)]
            for _ in range(WARM_UP + rounds):
                prompt = [rng.randrange(2, VOCABULARY) for _ in range(tokens)]
                seconds, cached = answer_at_once(pool, engines, prompt)
                walls.append(seconds)
                computed.append(count * tokens - sum(cached))
            with ControlClient(daemon.socket_path) as control:
                values = control.stats().values
    return {
        "engines": f"{count}, {ROLES[role]}",
        "tokens computed": round(statistics.median(computed[WARM_UP:])),
        "of": count * tokens,
        "all answered s": round(statistics.median(walls[WARM_UP:]), 2),
        "from, to": f"{min(walls[WARM_UP:]):.2f}, {max(walls[WARM_UP:]):.2f}",
        "waits kept": int(values["promises_kept"]),
        "broken": int(values["promises_broken"]),
    }


def answer_at_once(
    pool: ThreadPoolExecutor, engines: Sequence[EngineProcess], prompt: list[int]
) -> tuple[float, list[int]]:
    """Give all engines a prompt. Returns the seconds until the last answer, and cached tokens."""
    barrier = threading.Barrier(len(engines))

    def ask(engine: EngineProcess) -> int:
        barrier.wait()
        (answer,) = engine.generate(prompt, max_tokens=1)
        return int(answer["cached_tokens"])

    began = time.monotonic()
    cached = [*pool.map(ask, engines)]
    return time.monotonic() - began, cached


def main() -> int:
    """Print a row without promises, and a row with them."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.herd", description=__doc__)
    parser.add_argument("--model", default="gemma3", help="a bundled model (default: %(default)s)")
    parser.add_argument("--engines", type=int, default=4, help="default: %(default)s")
    parser.add_argument("--tokens", type=int, default=4096, help="of a prompt (default: 4096)")
    parser.add_argument("--rounds", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--json", action="store_true", help="print one JSON array")
    options = parser.parse_args()
    rows = [
        measure(options.model, role, options.engines, options.rounds, options.tokens)
        for role in ROLES
    ]
    print_rows(rows, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
