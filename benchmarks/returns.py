"""Users who come back at once, with RAM for few of them: `python -m benchmarks.returns`.

Each user has a history that was computed before, one after the other, and is in a directory. RAM
has room for a part of the users. All of them return at the same time, with the engine's own cache
empty. What is measured is the time until the last one has its answer, and until each has its first
token.

In the first row as many users are new: their prompts are computed, which is what a cache is
compared with. `--users` and `--fit` change how many there are, and how many RAM has room for.
"""

import argparse
import contextlib
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.engine.support import forget
from tests.waiting import until

from benchmarks.engines import connected_engine
from benchmarks.rows import print_rows
from hybridkv.client.control import ControlClient
from hybridkv.lab.daemon_process import DaemonProcess
from hybridkv.lab.engine_process import EngineProcess

VOCABULARY = range(2, 2000)
ANSWER_TOKENS = 8


class Scene:
    """An engine and a daemon with a directory below."""

    def __init__(
        self, model: str, tokens: int, users: int, ram_bytes: int, stack: contextlib.ExitStack
    ) -> None:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        options = ["--tier", f"disk://{directory}/disk?bytes=16GiB"]
        daemon = DaemonProcess(str(directory / "d.sock"), str(ram_bytes), options=options)
        stack.enter_context(daemon)
        self.engine: EngineProcess = stack.enter_context(
            connected_engine(
                model,
                daemon.socket_path,
                directory,
                f"--kv-cache-memory-bytes={2 << 30}",
                f"--max-num-seqs={users}",
                settings={},
                max_position_embeddings=tokens + 64,
            )
        )
        self.control = stack.enter_context(ControlClient(daemon.socket_path, 60.0))

    def settle(self) -> None:
        """Commit what the last steps stored, and wait until tiers have it."""
        self.engine.generate([1, 2, 3], max_tokens=2)
        until(lambda: not self.control.stats().values["writes_waiting"], "everything is written")

    def ask(self, prompts: list[list[int]]) -> dict[str, Any]:
        """Returns a row of what it took to answer all prompts at once."""
        before = self.control.stats().values
        began = time.monotonic()
        answers = self.engine.generate(*prompts, max_tokens=ANSWER_TOKENS)
        seconds = time.monotonic() - began
        after = self.control.stats().values
        first = sorted(answer["ttft_seconds"] for answer in answers)
        cached = sum(answer["cached_tokens"] for answer in answers)
        changes = {name: int(after[name] - before.get(name, 0)) for name in sorted(after)}
        return {
            "all answered s": seconds,
            "first tokens s": (statistics.median(first), first[-1]),
            "hit tokens": cached,
            "of": sum(map(len, prompts)),
            "cut": sum(count for name, count in changes.items() if "no_room" in name),
            "waited for room": changes.get("room_waits_kept", 0),
            "in vain": changes.get("room_waits_broken", 0),
        }


def history_bytes(model: str, tokens: int) -> int:
    """Returns the bytes of RAM that the objects of one history take."""
    with contextlib.ExitStack() as stack:
        scene = Scene(model, tokens, 1, 1 << 30, stack)
        scene.engine.generate(history(0, tokens), max_tokens=ANSWER_TOKENS)
        scene.settle()
        return int(scene.control.stats().values["bytes_committed"])


def history(seed: int, tokens: int) -> list[int]:
    """Returns the history of a user."""
    return random.Random(seed).choices(VOCABULARY, k=tokens)


def measure(model: str, tokens: int, users: int, fit: float, rounds: int) -> list[dict[str, Any]]:
    """Returns a row for new users, and one for users who return."""
    ram_bytes = int(fit * history_bytes(model, tokens))
    rows: dict[str, list[dict[str, Any]]] = {"new": [], "return": []}
    with contextlib.ExitStack() as stack:
        scene = Scene(model, tokens, users, ram_bytes, stack)
        for number in range(rounds + 1):  # The engine learns how fast it computes in the first.
            others = [history(-number * users - user - 1, tokens) for user in range(users)]
            prompts = [history(number * users + user + 1, tokens) for user in range(users)]
            rows["new"].append(scene.ask(others))
            for prompt in prompts:
                scene.engine.generate(prompt, max_tokens=ANSWER_TOKENS)
                scene.settle()
            forget(scene.engine)
            rows["return"].append(scene.ask(prompts))
            forget(scene.engine)
            print(f"round {number}: {rows['return'][-1]}", file=sys.stderr, flush=True)
    return [
        {
            "users": f"{users}, {kind}; RAM for {fit:g}",
            "all answered s": f"{median(measured, 'all answered s'):.2f}",
            "first token, median s": f"{median(measured, 'first tokens s', 0):.2f}",
            "the last s": f"{median(measured, 'first tokens s', 1):.2f}",
            **{
                name: round(median(measured, name))
                for name in ("hit tokens", "of", "cut", "waited for room", "in vain")
            },
        }
        for kind, measured in rows.items()
    ]


def median(rows: list[dict[str, Any]], name: str, index: int | None = None) -> float:
    """Returns the median of a column, without the first round."""
    values = [row[name] if index is None else row[name][index] for row in rows[1:]]
    return float(statistics.median(values))


def main() -> int:
    """Print the rows."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.returns", description=__doc__)
    parser.add_argument("--model", default="gemma3", help="a bundled model (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=4096, help="of a history (default: 4096)")
    parser.add_argument("--users", type=int, default=16, help="default: %(default)s")
    parser.add_argument("--fit", type=float, default=4.5, help="users in RAM (default: 4.5)")
    parser.add_argument("--rounds", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--json", action="store_true", help="print one JSON array")
    options = parser.parse_args()
    rows = measure(options.model, options.tokens, options.users, options.fit, options.rounds)
    print_rows(rows, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
