"""`scripts/gpu` runs the stages on a machine with a CUDA device, or packs vLLM for one.

Each stage is one command: `scripts/gpu a`. It prints a table and writes what each step printed
below build/gpu ($OUT where that is set): NAME.log of each step, and gpu.json of all of them.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.gpu.pack import PIECES, ROOT, SITE, pack, unpack
from tests.gpu.stages import STAGES, Step

ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "PYTHONUNBUFFERED": "1"}
KILL_SECONDS = 10.0


@dataclass
class Outcome:
    """What a step did; `figures` is the JSON document that it printed last, if any."""

    stage: str
    step: str
    ok: bool
    seconds: float
    said: str  # The last line of its output, or why it ended.
    figures: Any = None


def run_step(stage: str, step: Step, place: Path) -> Outcome:
    """Run one step within its limit; its whole output goes to a file below `place`."""
    log_path = place / f"{stage}-{re.sub(r'[^a-z0-9]+', '-', step.name.lower())}.log"
    paths = [str(SITE), str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, **ENVIRONMENT, **dict(step.environment)}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    started = time.monotonic()
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, *step.command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            env=environment,
            cwd=ROOT,
            text=True,
            errors="replace",
        )
        try:
            printed, _ = process.communicate(timeout=step.limit_seconds)
            why = None
        except subprocess.TimeoutExpired:
            why = f"did not end within {step.limit_seconds} s"
            process.terminate()
            try:
                printed, _ = process.communicate(timeout=KILL_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                printed, _ = process.communicate()
        log.write(printed.encode())
    lines = [line for line in printed.splitlines() if line.strip()]
    said = why or (lines[-1].strip() if lines else f"exit status {process.returncode}")
    seconds = round(time.monotonic() - started, 1)
    ok = why is None and process.returncode == 0
    return Outcome(stage, step.name, ok, seconds, said[:200], _document(printed))


def _document(printed: str) -> Any:
    """The JSON document that the output is, or that its last line is; None for anything else."""
    for text in (printed, printed.rstrip().rpartition("\n")[2]):
        try:
            return json.loads(text)
        except ValueError:
            continue
    return None


def run_stages(names: Sequence[str], place: Path) -> int:
    """Run the stages in their order; 0 = every step passed."""
    place.mkdir(parents=True, exist_ok=True)
    outcomes: list[Outcome] = []
    table = Table("stage", "step", "", "seconds", "said")
    for name in names:
        stage = STAGES[name]
        print(f"stage {name}: {stage.title}", file=sys.stderr, flush=True)
        with ThreadPoolExecutor(stage.jobs) as pool:
            for outcome in pool.map(partial(run_step, name, place=place), stage.steps):
                outcomes.append(outcome)
                word = "ok" if outcome.ok else "FAILED"
                print(f"  {word} {outcome.step} {outcome.seconds} s", file=sys.stderr, flush=True)
                table.add_row(name, outcome.step, word, str(outcome.seconds), outcome.said)
                text = json.dumps([asdict(one) for one in outcomes], indent=1)
                (place / "gpu.json").write_text(text)
    Console(width=140).print(table)
    return int(not all(outcome.ok for outcome in outcomes))


def main() -> int:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(prog="scripts/gpu", description=__doc__)
    parser.add_argument("what", nargs="+", choices=[*STAGES, "pack", "unpack"])
    what: list[str] = parser.parse_args().what
    if what == ["pack"]:
        pack()
        return 0
    if "unpack" in what:
        unpack(sorted(PIECES.glob("p*.tar")))
    stages = [name for name in what if name in STAGES]
    if stages:
        import torch

        if not torch.cuda.is_available():
            text = "error: this machine has no CUDA device; scripts/gpu pack works anywhere"
            print(text, file=sys.stderr)
            return 2
    return run_stages(stages, Path(os.environ.get("OUT", ROOT / "build" / "gpu"))) if stages else 0


if __name__ == "__main__":
    sys.exit(main())
