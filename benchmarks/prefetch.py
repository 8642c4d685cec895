"""The first token after a prefetch: `python -m benchmarks.prefetch [--rounds COUNT]`.

A real engine gets prompts again that it has computed, of which its own cache has nothing. A hit is
in RAM, or in a directory alone, or in a directory and was prefetched before by `hybridkv prefetch`.
The three are measured by turns in one run. The last column has the medians' ratio to that of RAM.
"""

import argparse
import contextlib
import io
import random
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.engine.support import forget
from tests.waiting import until

from benchmarks.engines import connected_engine
from benchmarks.rows import print_rows
from hybridkv.cli.main import main as hybridkv
from hybridkv.client.control import ControlClient
from hybridkv.lab.daemon_process import DaemonProcess
from hybridkv.lab.engine_process import EngineProcess

RAM = "2GiB"
VOCABULARY = range(2, 2000)
PLACES = ("RAM", "disk", "disk, prefetched")


def ask(engine: EngineProcess, control: ControlClient, text: list[int]) -> tuple[float, str]:
    """Returns the seconds to the first token, and the request's id."""
    before = set(control.explain("").latest)
    (result,) = engine.generate(text, max_tokens=1)

    def reported() -> list[str]:
        return [name for name in control.explain("").latest if name not in before]

    until(lambda: bool(reported()), "the engine has reported the request")
    return result["ttft_seconds"], reported()[0]


def measure(model: str, tokens: int, rounds: int) -> list[dict[str, Any]]:
    """Returns a row for each place."""
    seconds: dict[str, list[float]] = {place: [] for place in PLACES}
    from_disk = dict.fromkeys(PLACES, 0)
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        options = ["--node", "bench", "--tier", f"disk://{directory}/disk?bytes=8GiB"]
        socket_path = str(directory / "d.sock")
        stack.enter_context(DaemonProcess(socket_path, RAM, options=options))
        engine = stack.enter_context(
            connected_engine(
                model,
                socket_path,
                directory,
                settings={"load_policy": "always"},
                max_position_embeddings=tokens + 64,
            )
        )
        control = stack.enter_context(ControlClient(socket_path, 60.0))
        for seed in range(rounds):
            text = random.Random(seed).choices(VOCABULARY, k=tokens)
            _, name = ask(engine, control, text)
            ask(engine, control, text)  # Its steps commit what the first one has stored.
            until(lambda: not control.stats().values["writes_waiting"], "everything is written")
            loaded: set[int] = set()
            for place in PLACES:
                forget(engine)
                if place != "RAM":
                    control.clear_objects()
                if place == "disk, prefetched":
                    with contextlib.redirect_stdout(io.StringIO()):
                        assert hybridkv(["prefetch", name, "--wait", "--socket", socket_path]) == 0
                first_token, request_id = ask(engine, control, text)
                explanation = control.explain(request_id).explanation
                assert explanation is not None
                loaded.add(explanation.loaded_tokens)
                assert len(loaded) == 1, f"{place}: {explanation}"
                seconds[place].append(first_token)
                from_disk[place] += sum(explanation.tiers.values())
    in_ram = statistics.median(seconds["RAM"])
    return [
        {
            "the prompt is in": place,
            "chunks that its lookups read": from_disk[place],
            "first token": f"{1e3 * statistics.median(seconds[place]):.0f} ms",
            "from, to": f"{1e3 * min(seconds[place]):.0f}, {1e3 * max(seconds[place]):.0f}",
            "to RAM": f"{statistics.median(seconds[place]) / in_ram:.2f}",
        }
        for place in PLACES
    ]


def main() -> int:
    """Print the rows."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.prefetch", description=__doc__)
    parser.add_argument("--model", default="gemma3", help="a bundled model (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=8192, help="of a prompt (default: 8192)")
    parser.add_argument("--rounds", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--json", action="store_true", help="print one JSON array")
    options = parser.parse_args()
    print_rows(measure(options.model, options.tokens, options.rounds), options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
