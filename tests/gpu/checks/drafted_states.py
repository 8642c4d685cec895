"""`python -m tests.gpu.checks.drafted_states`: states that accepted drafts led to.

Prompts end just before a boundary at which a state is kept, so that drafts reach it. Their next
turns are answered from the daemon, and must be answered as by an engine's own cache.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

from hybridkv.client.control import ControlClient
from hybridkv.lab.daemon_process import DaemonProcess
from hybridkv.lab.engine_process import EngineProcess
from tests.engine.drafted import run_turns


def main() -> int:
    """Print the figures; 1 where an answer is wrong, or no such state was restored."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="qwen3next_mtp")
    parser.add_argument("--boundary-tokens", type=int, default=80, help="the end of a block")
    parser.add_argument("words", nargs="*", help="vLLM's arguments, after --")
    asked = parser.parse_args()
    boundary = asked.boundary_tokens
    with tempfile.TemporaryDirectory(prefix="hybridkv-gpu-") as directory:
        socket_path = str(Path(directory) / "daemon.sock")
        with DaemonProcess(socket_path, "1GiB"):
            turns = run_turns(
                asked.model,
                Path(directory),
                socket_path,
                boundary,
                *asked.words,
                kind=EngineProcess,
            )
            with ControlClient(socket_path) as control:
                loaded = int(control.stats().values.get("tokens_loaded", 0))
    hits, differences = turns.hits(), turns.differences()
    ok = not differences and boundary in hits and loaded == sum(hits)
    facts = {
        "model": asked.model,
        "differences": differences,
        "hits": hits,
        "own_hits": [result["cached_tokens"] for result in turns.own[len(hits) :]],
        "tokens_loaded": loaded,
        "accepted_tokens": turns.accepted_tokens(),
    }
    print(json.dumps({"ok": ok, **facts}))
    return int(not ok)


if __name__ == "__main__":
    sys.exit(main())
