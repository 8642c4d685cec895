"""`scripts/gpu` runs the stages on a machine with a CUDA device, or packs vLLM for one.

Each stage is one command: `scripts/gpu a`. It prints a line for each step, and writes two files
below build/gpu ($OUT where that is set) anew after each: gpu.json, and logs.tar.gz, which has what
each step printed and the end of its engines' logs.
"""

import argparse
import io
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.gpu.pack import ROOT, SITE, pack, unpack
from tests.gpu.stages import STAGE_SECONDS, STAGES, Step

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "2",  # Several engines share the machine's processors.
    "PYTHONUNBUFFERED": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # It is not carried.
}
KILL_SECONDS = 10.0
ENGINE_LOG_LINES = 300
LOG_BYTES_MAX = 1 << 20  # Of one step.


@dataclass
class Outcome:
    """The result of a step. `figures` is the JSON document that it printed last, if any."""

    stage: str
    step: str
    ok: bool
    seconds: float
    result: str  # The last line of its output, or why it ended.
    figures: Any = None


def step_environment(step: Step, temporary: str) -> dict[str, str]:
    """Return the environment variables of a step's process."""
    paths = [str(SITE), str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        **ENVIRONMENT,
        **dict(step.environment),
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "TMPDIR": temporary,
    }


def run_step(stage: str, step: Step, logs: Path, stop_at: float) -> Outcome:
    """Run one step within its limit, and not beyond `stop_at` (time.monotonic).

    Its whole output goes to a file below `logs`.
    """
    log_path = logs / f"{re.sub(r'[^a-z0-9]+', '-', step.name.lower())}.log"
    started = time.monotonic()
    limit_seconds = min(step.limit_seconds, stop_at - started)
    if limit_seconds <= 0:
        result = f"not begun: the stage has {STAGE_SECONDS} s"
        return Outcome(stage, step.name, ok=False, seconds=0.0, result=result)
    with (
        tempfile.TemporaryDirectory(prefix="hkv-") as temporary,
        tempfile.TemporaryFile() as printed_file,
        log_path.open("wb") as log,
    ):
        try:
            process = subprocess.Popen(
                [*step.under, sys.executable, *step.command],
                stdin=subprocess.DEVNULL,
                stdout=printed_file,
                stderr=log,
                env=step_environment(step, temporary),
                cwd=ROOT,
                start_new_session=True,
            )
        except OSError as error:
            return Outcome(stage, step.name, ok=False, seconds=0.0, result=str(error))
        limit = "" if _ends_within(process, limit_seconds) else f"ended after {limit_seconds:.0f} s"
        printed_file.seek(0)
        printed = printed_file.read().decode(errors="replace")
        log.write(printed.encode())
        for engine_log in sorted(Path(temporary).glob("hybridkv-verify-logs-*/*.log")):
            lines = engine_log.read_bytes().splitlines(keepends=True)
            log.write(f"\n-- {engine_log.name} ends with\n".encode())
            log.write(b"".join(lines[-ENGINE_LOG_LINES:]))
    lines_printed = [line for line in printed.splitlines() if line.strip()]
    last = lines_printed[-1].strip() if lines_printed else f"exit status {process.returncode}"
    seconds = round(time.monotonic() - started, 1)
    figures = _document(printed)
    ok = not limit and (step.judge(figures) if step.judge else process.returncode == 0)
    return Outcome(
        stage=stage,
        step=step.name,
        ok=ok,
        seconds=seconds,
        result=(limit or last)[:200],
        figures=figures,
    )


def _ends_within(process: "subprocess.Popen[bytes]", limit_seconds: float) -> bool:
    """Return True if the process ends by itself in time. Else terminate it, and kill it at last."""
    try:
        process.wait(limit_seconds)
    except subprocess.TimeoutExpired:
        process.terminate()
        try:
            process.wait(KILL_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        return False
    return True


def _document(printed: str) -> Any:
    """Return the JSON document that the output is, or its last line; None for anything else."""
    for text in (printed, printed.rstrip().rpartition("\n")[2]):
        try:
            return json.loads(text)
        except ValueError:
            continue
    return None


def run_stages(names: Sequence[str], only: Collection[str], directory: Path) -> int:
    """Run the stages in their order, each step once; 0 = every step passed."""
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="hybridkv-gpu-logs-") as logs_directory:
        logs = Path(logs_directory)
        for name in names:
            stage = STAGES[name]
            done = {outcome.step for outcome in outcomes}
            steps = [step for step in stage.steps if step.name not in done]
            steps = [step for step in steps if not only or step.name in only]
            print(f"stage {name}: {stage.title}", file=sys.stderr, flush=True)
            stop_at = time.monotonic() + STAGE_SECONDS
            with ThreadPoolExecutor(stage.jobs) as pool:
                runs = [pool.submit(run_step, name, step, logs, stop_at) for step in steps]
                for run in as_completed(runs):
                    outcomes.append(run.result())
                    _print(outcomes[-1])
                    _write(directory, outcomes, logs)
    return int(not all(outcome.ok for outcome in outcomes))


def _print(outcome: Outcome) -> None:
    word = "ok" if outcome.ok else "FAILED"
    result = json.dumps(outcome.figures) if outcome.figures is not None else outcome.result
    print(f"{word:6} {outcome.step} {outcome.seconds} s: {result[:1500]}", flush=True)


def _write(directory: Path, outcomes: Sequence[Outcome], logs: Path) -> None:
    """Write all files of the results, each of them as a whole."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "gpu.json").write_text(json.dumps([*map(asdict, outcomes)], indent=1))
    with tarfile.open(directory / "logs.tar.gz", "w:gz") as archive:
        for path in sorted(logs.glob("*.log")):
            content = path.read_bytes()[-LOG_BYTES_MAX:]
            member = tarfile.TarInfo(path.name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


def print_plan(names: Sequence[str], only: Collection[str]) -> None:
    """Print what the stages would run."""
    for name in names:
        stage = STAGES[name]
        steps = [step for step in stage.steps if not only or step.name in only]
        limit = sum(step.limit_seconds for step in steps)
        print(f"stage {name}: {stage.title}; {stage.jobs} at a time, limits {limit} s in all")
        for step in steps:
            words = [*(f"{key}={value}" for key, value in step.environment), *step.under]
            print(f"  {step.name} ({step.limit_seconds} s): {' '.join([*words, *step.command])}")


def main() -> int:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(prog="scripts/gpu", description=__doc__)
    parser.add_argument("what", nargs="+", choices=[*STAGES, "pack", "unpack"])
    parser.add_argument("--only", action="append", default=[], help="a step's name; repeatable")
    parser.add_argument("--dry-run", action="store_true", help="print what would run")
    arguments = parser.parse_args()
    what: list[str] = arguments.what
    stages = [name for name in what if name in STAGES]
    if arguments.dry_run:
        print_plan(stages, arguments.only)
        return 0
    if "pack" in what:
        pack()
    if "unpack" in what:
        unpack()
    if not stages:
        return 0
    import torch

    if not torch.cuda.is_available():
        text = "error: this machine has no CUDA device; scripts/gpu pack works anywhere"
        print(text, file=sys.stderr)
        return 2
    return run_stages(stages, arguments.only, Path(os.environ.get("OUT", ROOT / "build" / "gpu")))


if __name__ == "__main__":
    sys.exit(main())
