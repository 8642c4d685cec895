"""`scripts/gpu-rehearsal`: the steps of the stages, each up to its first call of CUDA.

The driver of this machine refuses every call, with an error that no real driver gives. A step is
right where it passes, or where all that fails in it fails with that error.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.gpu.__main__ import ENVIRONMENT
from tests.gpu.stages import STAGES, Stage, Step

REHEARSED = {"imports": Stage("", (Step("imports", ("-m", "tests.gpu.imports"), 180),)), **STAGES}

REFUSED = re.compile(r"CUDA driver is a stub library|CUDA error 34\b")
REACHED = "DRIVER REACHED"
TEST_FAILED = re.compile(r"^(?:FAILED|ERROR) .*", re.MULTILINE)
TESTS = re.compile(r"\d+ (?:failed|passed|skipped|error|deselected).* in .*s", re.MULTILINE)
WHOLE_ERRORS = "-vvv"  # Each failed test's error, not cut to the terminal's width.


@dataclass
class Rehearsed:
    """What became of a step before and at its first call of CUDA."""

    stage: str
    step: str
    ok: bool
    verdict: str  # "reached CUDA", "passed" or "FAILED BEFORE CUDA".
    seconds: float
    where: str  # The innermost line of ours or of vLLM's that called the driver first.
    said: str


def rehearse(stage: str, step: Step, place: Path) -> Rehearsed:
    """Run one step; its output and its driver log go to files below `place`."""
    stem = re.sub(r"[^a-z0-9]+", "-", f"{stage} {step.name}".lower())
    log_path, driver_log = place / f"{stem}.log", place / f"{stem}.driver"
    environment = {**os.environ, **ENVIRONMENT, **dict(step.environment)}
    environment |= {"HYBRIDKV_DRIVER_LOG": str(driver_log), "PYTEST_ADDOPTS": WHOLE_ERRORS}
    command = [sys.executable, *(word for word in step.command if word != "-x")]
    started = time.monotonic()
    with log_path.open("wb") as log:
        try:
            status: int | None = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                timeout=step.limit_seconds,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            status = None
    seconds = round(time.monotonic() - started, 1)
    output = log_path.read_text(errors="replace")
    reached = driver_log.read_text() if driver_log.exists() else ""
    others = [line for line in TEST_FAILED.findall(output) if not REFUSED.search(line)]
    if status == 0:
        verdict = "passed"
    elif status is not None and reached and REFUSED.search(output) and not others:
        verdict = "reached CUDA"
    else:
        verdict = "FAILED BEFORE CUDA"
    lines = [line.strip() for line in output.splitlines() if line.strip()] or [f"status {status}"]
    tests = TESTS.findall(output)
    said = (others or tests or lines)[-1] if status is not None else "did not end in time"
    ok = verdict != "FAILED BEFORE CUDA"
    return Rehearsed(stage, step.name, ok, verdict, seconds, _where(reached), said[:300])


def _where(reached: str) -> str:
    """The last line of the first stack that is no PyTorch's: file, number and function."""
    first = reached.split(REACHED)[1] if reached else ""
    frames = re.findall(r'File "(.*?)", line (\d+), in (\S+)', first)
    own = [frame for frame in frames if "/torch/" not in frame[0]]
    if not own:
        return ""
    path, line, function = own[-1]
    return f"{'/'.join(Path(path).parts[-2:])}:{line} {function}"


def main() -> int:
    """Rehearse the stages; 0 = no step failed before its first call of CUDA."""
    parser = argparse.ArgumentParser(prog="scripts/gpu-rehearsal", description=__doc__)
    parser.add_argument("stages", nargs="*", metavar="STAGE", help=", ".join(REHEARSED))
    parser.add_argument("--only", default="", help="steps that have this text in their name")
    arguments = parser.parse_args()
    place = Path(os.environ["OUT"])
    rehearsed: list[Rehearsed] = []
    table = Table("stage", "step", "", "seconds", "the first call", "said")
    for name in arguments.stages or REHEARSED:
        for step in REHEARSED[name].steps:
            if arguments.only not in step.name:
                continue
            one = rehearse(name, step, place)
            rehearsed.append(one)
            print(f"{one.verdict}: {name} {one.step} ({one.seconds} s)", file=sys.stderr)
            table.add_row(name, one.step, one.verdict, str(one.seconds), one.where, one.said)
            text = json.dumps([asdict(each) for each in rehearsed], indent=1)
            (place / "rehearsal.json").write_text(text)
    Console(width=180).print(table)
    return int(not all(one.ok for one in rehearsed))


if __name__ == "__main__":
    sys.exit(main())
