"""A day with real models: `python -m benchmarks.realday [MODEL_DIR...] [--quick] [--write]`.

Real `vllm serve` processes compute prompts of real text, hit them in their own cache, after a
restart, and from a directory once RAM is lost. Beside them run vLLM's own offloading and LMCache,
where they run. Stdout gets tables in Markdown, or JSON; progress goes to stderr. --write puts the
tables into docs/BENCHMARKS.md, and the picture into docs/images. The status is 1 where an answer is
another one than it must be.
"""

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

from tests.documents import DOCS, filled

from benchmarks.realday import page, plot
from benchmarks.realday.day import Day, Plan
from benchmarks.realday.results import Run
from benchmarks.realmodels import RECIPES, default_directory, make_checkpoint
from hybridkv import __version__
from hybridkv.cli.arguments import ended_by_exception
from hybridkv.core.errors import HybridKVError

LENGTHS, LENGTHS_LONG, LENGTHS_QUICK = (1024, 2048, 4096, 6144), (2048, 4096, 8192, 16384), (640,)
LONG_CONTEXT = 16_640
PAGE, PICTURE = DOCS / "BENCHMARKS.md", DOCS / page.PICTURE


def directory_of(model: str) -> Path:
    """Return the directory of a model. That of a recipe is made if it is not there."""
    if model not in RECIPES:
        return Path(model)
    directory = default_directory(model)
    make_checkpoint(model, directory)
    return directory


def lengths_of(model: Path, given: str, is_quick: bool) -> list[int]:
    """Return the prompts' tokens: those that were given, else as the model's context allows."""
    if given:
        return sorted(map(int, given.split(",")))
    if is_quick:
        return [*LENGTHS_QUICK, 2 * LENGTHS_QUICK[0]]
    config = json.loads((model / "config.json").read_text())
    context = config.get("text_config", config)["max_position_embeddings"]
    return [*(LENGTHS_LONG if context >= LONG_CONTEXT else LENGTHS)]


def plan_of(lengths: list[int], is_quick: bool) -> Plan:
    """Return the sizes of a day, with prompts of these lengths."""
    if is_quick:
        return Plan(lengths, user_tokens=512, turns=4, rounds=3, cost_tokens=512, decoded_tokens=16)
    return Plan(lengths, user_tokens=2048, turns=8, rounds=8)


def machine() -> str:
    """Return the processor's name, and how much of the machine this process may use."""
    info = Path("/proc/cpuinfo").read_text()
    names = [line.partition(":")[2].strip() for line in info.splitlines() if "model name" in line]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)
    cores = len(os.sched_getaffinity(0))
    name = (names or [platform.machine()])[0]
    return f"{cores} cores of {name}, {memory:.0f} GiB, no GPU"


@contextmanager
def progress(model: Path) -> Iterator[None]:
    """Print a model's name and how long its day took."""
    started = time.monotonic()
    print(f"{model.name} ...", file=sys.stderr, flush=True)
    yield
    print(f"{model.name}: {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)


def main() -> int:
    """Run a day of each model, and print or write what it showed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.realday", description=__doc__)
    what = f"directories of models, or of {', '.join(RECIPES)} (default: these)"
    parser.add_argument("models", nargs="*", default=[*RECIPES], help=what)
    parser.add_argument("--quick", action="store_true", help="short prompts, to try the command")
    parser.add_argument("--lengths", default="", help="tokens of the prompts, with commas")
    parser.add_argument("--dtype", default="float32", help="of weights and KV (default: float32)")
    parser.add_argument("--lmcache", default="", help="a Python that has vLLM and LMCache")
    parser.add_argument("--json", type=Path, help="a file for all figures")
    parser.add_argument("--write", action="store_true", help=f"write docs/{PAGE.name}")
    options = parser.parse_args()
    models = [*map(directory_of, options.models)]
    for model in models:
        if not (model / "config.json").is_file():
            parser.error(f"{model} has no config.json; a directory with a checkpoint works")
    versions = {"hybridkv": __version__, "vLLM": version("vllm"), "torch": version("torch")}
    run = Run(time.strftime("%Y-%m-%d"), machine(), versions, os.getloadavg()[0])
    minutes = "a minute or two" if options.quick else "some fifteen minutes"
    print(f"{minutes} a model on quiet cores", file=sys.stderr)
    faults: list[str] = []
    for model in models:
        plan = plan_of(lengths_of(model, options.lengths, options.quick), options.quick)
        # A short name: paths of sockets have a limit of 107 bytes.
        with (
            progress(model),
            ended_by_exception(),
            tempfile.TemporaryDirectory(prefix="hkv-day-") as directory,
        ):
            day = Day(model, plan, options.dtype, Path(directory), _Clock().say)
            try:
                run.days.append(day.run(options.lmcache))
            except (AssertionError, OSError, HybridKVError) as error:
                # The other models' figures are whole all the same.
                faults.append(f"{model.name}: its day is left out: {error}")
        if options.json:
            options.json.write_text(json.dumps(asdict(run), indent=1) + "\n")
    text = page.text_of(run)
    if options.write and run.days:
        PICTURE.write_text(plot.picture(run.days, f"{run.date}, {run.machine}."))
        PAGE.write_text(filled(PAGE.read_text(), {"realday": lambda: text}))
    else:
        print(text, end="")
    faults += page.faults_of(run)
    for fault in faults:
        print(f"not as promised: {fault}", file=sys.stderr)
    return int(bool(faults))


class _Clock:
    """Says what is done next, and when."""

    def __init__(self) -> None:
        self._started = time.monotonic()

    def say(self, text: str) -> None:
        seconds = time.monotonic() - self._started
        print(f"{seconds:5.0f} s  {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
