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
LIMIT_SECONDS = 900  # Of a step at least: this machine may be slow.
REACHED = "DRIVER REACHED"
TEST_FAILED = re.compile(r"^(?:FAILED|ERROR) .*", re.MULTILINE)
TESTS = re.compile(r"\d+ (?:failed|passed|skipped|error|deselected).* in .*s", re.MULTILINE)
WHOLE_ERRORS = "-vvv"  # Each failed test's error, not cut to the terminal's width.


@dataclass
class Rehearsed:
    """The result of a step up to its first call of CUDA."""

    stage: str
    step: str
    ok: bool
    verdict: str  # "reached CUDA", "passed" or "FAILED BEFORE CUDA".
    seconds: float
    where: str  # The innermost line of ours or of vLLM's that called the driver first.
    last_line: str  # The last line of its output that matters.


def rehearse(stage: str, step: Step, directory: Path) -> Rehearsed:
    """Run one step; its output and its driver log go to files below `directory`."""
    stem = re.sub(r"[^a-z0-9]+", "-", f"{stage} {step.name}".lower())
    log_path, driver_log = directory / f"{stem}.log", directory / f"{stem}.driver"
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
                timeout=max(step.limit_seconds, LIMIT_SECONDS),
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            status = None
    seconds = round(time.monotonic() - started, 1)
    output = log_path.read_text(errors="replace")
    reached = driver_log.read_text() if driver_log.exists() else ""
    failures = [line for line in TEST_FAILED.findall(output) if not REFUSED.search(line)]
    if status == 0:
        verdict = "passed"
    elif status is not None and reached and REFUSED.search(output) and not failures:
        verdict = "reached CUDA"
    else:
        verdict = "FAILED BEFORE CUDA"
    lines = [line.strip() for line in output.splitlines() if line.strip()] or [f"status {status}"]
    tests = TESTS.findall(output)
    last_line = (failures or tests or lines)[-1] if status is not None else "did not end in time"
    return Rehearsed(
        stage=stage,
        step=step.name,
        ok=verdict != "FAILED BEFORE CUDA",
        verdict=verdict,
        seconds=seconds,
        where=_where(reached),
        last_line=last_line[:300],
    )


def _where(reached: str) -> str:
    """Return the last line of the first stack that is not PyTorch's.

    `vllm/platforms/cuda.py:83 get_device` has the file, the line and the function.
    """
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
    if unknown := [name for name in arguments.stages if name not in REHEARSED]:
        parser.error(f"{unknown[0]} is no stage; one of {', '.join(REHEARSED)} works")
    directory = Path(os.environ["OUT"])
    rehearsed: list[Rehearsed] = []
    table = Table("stage", "step", "", "seconds", "the first call", "last line")
    for name in arguments.stages or REHEARSED:
        for step in REHEARSED[name].steps:
            if arguments.only not in step.name:
                continue
            result = rehearse(name, step, directory)
            rehearsed.append(result)
            print(f"{result.verdict}: {name} {result.step} ({result.seconds} s)", file=sys.stderr)
            seconds = str(result.seconds)
            table.add_row(
                name, result.step, result.verdict, seconds, result.where, result.last_line
            )
            text = json.dumps([*map(asdict, rehearsed)], indent=1)
            (directory / "rehearsal.json").write_text(text)
    Console(width=180).print(table)
    return int(not all(result.ok for result in rehearsed))


if __name__ == "__main__":
    sys.exit(main())
