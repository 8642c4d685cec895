"""`python -m tests.gpu.checks.restart`: what a restart costs a model of true size.

Seconds to the first token of 1, 4 and 16 users at once, over prompts of 8K, 32K and 128K tokens:
computed, by the engine's own hit, after a restart of the engine (from the daemon's RAM), from disk,
and from vLLM's own offloading, in one run. Weights are drawn, so answers say little, and bytes are
proven elsewhere. A cell that the time does not suffice for is null.
"""

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.storing import wait_until_stored

from hybridkv.client.control import ControlClient
from hybridkv.core.errors import HybridKVError
from hybridkv.lab.daemon_process import DaemonProcess
from hybridkv.lab.engine_process import EngineProcess
from hybridkv.lab.models import bundled_models
from hybridkv.vllm.preflight import CONNECTOR
from tests.gpu.shapes import SHAPES, shaped_engine

WARM_TOKENS = 4096
STEP_TOKENS = 8192  # What vLLM's server takes in a step on such a device.
ROOM_TOKENS = 64  # Of an engine's context, beyond the longest prompt.
HIT_SHARE_MIN = 0.9
"""What must come back from RAM after a restart, of what the engine's own cache has."""


@dataclass(frozen=True)
class Cell:
    """So many users at once, each with a new prompt of so many tokens."""

    tokens: int
    users: int
    name: str = ""
    """Cells of the same size with other names have other prompts."""

    def prompts(self, vocabulary: int) -> list[list[int]]:
        """Return the cell's prompts, the same in each process."""
        rng = random.Random(f"{self.tokens} {self.users} {self.name}")
        return [rng.choices(range(2, vocabulary), k=self.tokens) for _ in range(self.users)]


@dataclass
class Measured:
    """How one way of beginning served a cell."""

    median_seconds: float
    last_seconds: float
    cached_share: float
    answers: list[list[int]] = field(repr=False)


@dataclass
class Table:
    """All measures, by arm and cell. An arm has a share of the time, after which it begins none."""

    cells: Sequence[Cell]
    vocabulary: int
    started: float = field(default_factory=time.monotonic)
    measures: dict[str, dict[Cell, Measured]] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)

    def ask(self, engine: EngineProcess, cell: Cell, arm: str) -> None:
        """Ask all prompts of a cell at once, and keep what was measured."""
        prompts = cell.prompts(self.vocabulary)
        results = engine.generate(*prompts, max_tokens=1)
        seconds = [result["ttft_seconds"] for result in results]
        cached = sum(result["cached_tokens"] for result in results)
        measured = Measured(
            median_seconds=round(statistics.median(seconds), 4),
            last_seconds=round(max(seconds), 4),
            cached_share=round(cached / (cell.tokens * cell.users), 3),
            answers=[result["tokens"] for result in results],
        )
        self.measures.setdefault(arm, {})[cell] = measured
        say(f"{arm}, {cell.tokens} tokens, {cell.users} at once: {measured}")

    def each(self, until_seconds: float, ask: Callable[[Cell], None]) -> None:
        """Call `ask` for the cells, in their order, until so many seconds after the start."""
        for cell in self.cells:
            if time.monotonic() - self.started < until_seconds:
                ask(cell)

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each cell: seconds, shares, and whether answers are the same."""
        return [self._row(cell) for cell in self.cells]

    def _row(self, cell: Cell) -> dict[str, Any]:
        row: dict[str, Any] = {"tokens": cell.tokens, "users": cell.users}
        own = self.measures.get("own hit", {}).get(cell)
        for arm, measures in self.measures.items():
            measured = measures.get(cell)
            row[arm] = measured and {
                "median_s": measured.median_seconds,
                "last_s": measured.last_seconds,
                "cached": measured.cached_share,
                "as_own_hit": own and measured.answers == own.answers,
            }
        return row

    def is_right(self) -> bool:
        """Return True if what the engine's own cache has comes back after a restart."""
        own, back = self.measures.get("own hit", {}), self.measures.get("restarted", {})
        return (
            "error" not in self.notes
            and bool(back)
            and all(
                back[cell].cached_share >= HIT_SHARE_MIN * own[cell].cached_share
                for cell in back
                if cell in own
            )
        )


def say(text: str) -> None:
    """Print a line of progress."""
    print(text, file=sys.stderr, flush=True)


def _drop_page_cache(directory: Path) -> None:
    """Let the kernel forget the files, so that the next read is the disk's."""
    os.sync()
    for path in directory.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


def _transfer_option(socket_path: str) -> str:
    settings = {"server": f"unix://{socket_path}", "audit": "off"}
    return (
        f"--kv-transfer-config={json.dumps({**CONNECTOR, 'kv_connector_extra_config': settings})}"
    )


def measure(asked: argparse.Namespace, directory: Path) -> Table:
    """Run all arms, each with an engine of its own."""
    shaped = shaped_engine(asked.model, directory / "model")
    longest = max(asked.prompts)
    arguments = [
        *shaped.arguments,
        f"--max-model-len={longest + ROOM_TOKENS}",
        f"--max-num-batched-tokens={min(STEP_TOKENS, longest)}",
        *asked.words,
    ]
    cells = [
        Cell(tokens, users)
        for tokens in asked.prompts
        for users in asked.users
        if tokens * users <= asked.tokens_max
    ]
    cells.sort(key=lambda cell: cell.tokens * cell.users)
    table = Table(cells, shaped.vocabulary, notes={"shape": shaped.said})
    warm = Cell(min(WARM_TOKENS, longest), 1, "warm")
    socket_path, disk = str(directory / "daemon.sock"), directory / "disk"

    def engine(name: str, *options: str) -> EngineProcess:
        log_path = directory / f"{name}.log"
        return EngineProcess([*arguments, *options], log_path, say, shaped.environment)

    def begin(arm: str, of: EngineProcess) -> None:
        say(f"{arm}: {time.monotonic() - table.started:.0f} s")
        for _ in range(2):
            of.generate(*warm.prompts(shaped.vocabulary), max_tokens=1)

    def offloading(name: str) -> None:
        with engine(name, f"--kv-offloading-size={asked.gib}") as native:
            begin(name, native)

            def ask(cell: Cell) -> None:
                table.ask(native, cell, "computed, offloading")
                native.reset_caches()
                table.ask(native, cell, name)

            table.each(asked.seconds * 0.3, ask)

    def hybridkv() -> None:
        ram = f"{asked.gib}GiB"
        with DaemonProcess(socket_path, ram, options=("--tier", f"disk://{disk}?bytes={ram}")):
            with engine("stores", _transfer_option(socket_path)) as ours:
                begin("computed", ours)

                def ask(cell: Cell) -> None:
                    table.ask(ours, cell, "computed")
                    table.ask(ours, cell, "own hit")

                table.each(asked.seconds * 0.65, ask)
            table.cells = [cell for cell in cells if cell in table.measures.get("own hit", {})]
            with (
                engine("restarted", _transfer_option(socket_path)) as again,
                ControlClient(socket_path) as control,
            ):
                begin("restarted", again)
                table.each(asked.seconds, lambda cell: table.ask(again, cell, "restarted"))
                wait_until_stored(socket_path, asked.seconds)
                control.clear_objects()
                again.reset_caches()
                _drop_page_cache(disk)
                table.each(asked.seconds, lambda cell: table.ask(again, cell, "from disk"))
                table.notes["daemon"] = json.dumps(
                    {
                        key: value
                        for key, value in control.stats(debug=False).values.items()
                        if value
                        and key.startswith(("loads", "tokens_", "bytes_", "tier_disk_bytes"))
                    }
                )

    try:
        offloading("vLLM's offloading")
    except HybridKVError as error:
        table.notes["vLLM's offloading"] = str(error)
    try:
        hybridkv()
    except (HybridKVError, AssertionError) as error:
        # What was measured before is kept.
        table.notes["error"] = str(error)
        for log in sorted(directory.glob("*.log")):
            say(f"-- {log.name} ends with\n{log.read_text(errors='replace')[-4000:]}")
    table.cells = cells
    return table


def main() -> int:
    """Print the table as one JSON document; 1 where a restart lost what RAM had."""
    parser = argparse.ArgumentParser(description=__doc__)
    names = ", ".join(SHAPES)
    parser.add_argument("--model", default="qwen3.5-9b", help=f"{names}, or a bundled tiny model")
    parser.add_argument("--prompts", type=int, nargs="+", default=[8192, 32768, 131072])
    parser.add_argument("--users", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--tokens-max", type=int, default=160_000, help="of a cell, all prompts")
    quarter = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 32  # In GiB.
    sizes = "of RAM, of disk, and of offloading (default: a quarter of the memory, at most 40)"
    parser.add_argument("--gib", type=int, default=min(40, quarter), help=sizes)
    parser.add_argument("--seconds", type=float, default=360, help="after which no cell is begun")
    parser.add_argument("words", nargs="*", help="vLLM's arguments, after --")
    asked = parser.parse_args()
    if asked.model not in {*SHAPES, *bundled_models()}:
        parser.error(f"--model {asked.model}: {names} works")
    with tempfile.TemporaryDirectory(prefix="hybridkv-gpu-") as directory:
        table = measure(asked, Path(directory))
    ok = table.is_right()
    print(json.dumps({"ok": ok, "model": asked.model, "rows": table.rows(), **table.notes}))
    return int(not ok)


if __name__ == "__main__":
    sys.exit(main())
