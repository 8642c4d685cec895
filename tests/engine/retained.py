"""Histories that a request's hint retains, and a scan of ten times RAM between two turns.

Run as `python -m tests.engine.retained SOCKET`; prints a line of JSON: how many tokens each history
hit, by what was asked of the cache for it.
"""

import json
import sys
from typing import Any

from hybridkv.vllm.hints import RETAIN_SECONDS
from tests.engine.hunt import Hunted
from tests.engine.support import LOOKUP_TIMEOUT_MS, arguments_of, prompt, stats
from tests.waiting import until

RAM = 80 << 20
TOKENS = 3_988  # 31 chunks of 128 tokens, and 20 more.
HISTORY_BYTES = 31 * 128 * 4096
"""Of the bundled qwen3: keys and values of two heads of 64 in four layers, in float32."""
LONG, BRIEF = 3600, 1  # Seconds.


class Histories:
    """An engine, and prompts of which it is told how long they are needed."""

    def __init__(self, hunted: Hunted, socket_path: str) -> None:
        self._hunted, self._socket_path = hunted, socket_path
        self._scanned = 100

    def ask(self, number: int, salt: str = "", seconds: int = 0) -> Any:
        """Answer a prompt, which is retained for so many seconds. Returns vLLM's output."""
        params = {"kv_transfer_params": {RETAIN_SECONDS: seconds}} if seconds else {}
        name = self._hunted.add(prompt(number, TOKENS), salt=salt, extra_args=params)
        return self._hunted.drive()[name]

    def hit_tokens(self, number: int, salt: str = "") -> int:
        """How many tokens of a prompt come from outside. The engine's own cache is emptied."""
        assert self._hunted.engine.reset_prefix_cache()
        return int(self.ask(number, salt).num_cached_tokens)

    def scan(self, times: int) -> None:
        """Ask for prompts of so many times the size of RAM, which nobody repeats."""
        for _ in range(-(-times * RAM // HISTORY_BYTES)):
            self._scanned += 1
            self.ask(self._scanned)

    def value(self, name: str) -> float:
        """Returns a value of the daemon's stats."""
        return stats(self._socket_path)[name]


def main() -> None:
    """Print what became of each history."""
    socket_path = sys.argv[1]
    extra = {"load_policy": "always", "lookup_timeout_ms": LOOKUP_TIMEOUT_MS}
    with Hunted(arguments_of("qwen3", socket_path, extra=extra)) as hunted:
        histories = Histories(hunted, socket_path)
        histories.ask(1, seconds=LONG)
        until(lambda: histories.value("retained_bytes") >= HISTORY_BYTES, "all of it is retained")
        alone = histories.value("retained_bytes")
        histories.ask(2, salt="brief", seconds=BRIEF)
        histories.ask(3)
        until(lambda: histories.value("retentions_expired") > 0, "the brief one's time is over")
        until(lambda: histories.value("retained_bytes") == alone, "none of it is retained")
        histories.scan(10)
        found = {
            "retained": histories.hit_tokens(1),
            "retained until then": histories.hit_tokens(2, salt="brief"),
            "not retained": histories.hit_tokens(3),
            "share": alone / HISTORY_BYTES,
        }
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
