"""Runs the random programs: one seed after the other, in processes of their own.

`python -m PROGRAM --seeds A:B|SEED|fresh:COUNT` runs seeds; `--minutes N` runs new ones until the
time is over, and finishes those that began. The last line is "result " and a `Result` as JSON.
"""

import argparse
import gc
import itertools
import json
import os
import random
import runpy
import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import AbstractContextManager, closing, suppress
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait

PROGRESS_SECONDS = 10.0
FRESH_SEED_BITS = 40
END_SECONDS = 60.0  # A process that takes longer to end is killed.
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")

Options = Mapping[str, str]
"""Names and values of a program's own command-line options."""
RunSeed = Callable[[int, Options], Mapping[str, int]]
"""Runs a seed and returns its counts. An exception fails the seed."""


@dataclass(frozen=True)
class Program:
    """A random program: the module that has it as PROGRAM runs seeds."""

    name: str  # `python -m NAME` runs it.
    open: Callable[[], AbstractContextManager[RunSeed]]  # Once in each process.
    options: Options = field(default_factory=dict)  # Their help.


@dataclass(frozen=True)
class Case:
    """A seed of a program, with options."""

    program: str
    seed: int
    options: Options = field(default_factory=dict)

    @property
    def command(self) -> str:
        """The command line that repeats the case."""
        given = "".join(f" --{name} {value}" for name, value in self.options.items())
        return f"python -m {self.program} --seeds {self.seed}{given}"


@dataclass(frozen=True)
class Outcome:
    """The counts of a case, or why it did not pass."""

    case: Case
    counts: Mapping[str, int] = field(default_factory=dict)
    error: str = ""  # A traceback, or how the process ended; "" = none.
    is_killed: bool = False  # Whether SIGKILL ended the process, as where memory is short.


@dataclass(frozen=True)
class Failure:
    """A seed that failed, as the last line of a program says it."""

    command: str
    seed: int
    message: str  # The last line of the traceback.


@dataclass
class Result:
    """The sum of outcomes. A case that was killed has neither passed nor failed."""

    seeds: int = 0  # Seeds that passed or failed.
    failed: int = 0
    killed: int = 0
    failures: list[Failure] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def add(self, outcome: Outcome) -> None:
        """Count a case, and print how to repeat it where it did not pass."""
        case, error = outcome.case, outcome.error.strip()
        self.counts.update(outcome.counts)
        self.seeds += not outcome.is_killed
        self.killed += outcome.is_killed
        if error and not outcome.is_killed:
            self.failed += 1
            self.failures.append(Failure(case.command, case.seed, error.splitlines()[-1]))
        if error:
            verdict = "KILLED" if outcome.is_killed else "FAILED"
            print(f"{error}\n{verdict}: {case.command}", flush=True)


def outcomes(cases: Iterable[Case], jobs: int = 1) -> Generator[Outcome, None, None]:
    """Run cases of one program in `jobs` processes. Yields the outcome of each as it ends."""
    waiting = iter(cases)
    workers = [_Worker(case) for case in itertools.islice(waiting, jobs)]
    try:
        while workers:
            ready = wait([worker.connection for worker in workers])
            for worker in [worker for worker in workers if worker.connection in ready]:
                outcome = worker.outcome()
                if outcome is not None:
                    yield outcome
                case = next(waiting, None) if worker.case else None
                if worker.is_alive:
                    worker.give(case)
                else:
                    workers.remove(worker)
                    workers += [_Worker(case)] if case else []
    finally:
        for worker in workers:
            worker.end()


def passed(cases: Iterable[Case]) -> Counter[str]:
    """Run cases one after the other. Returns their counts.

    Raises AssertionError where one does not pass.
    """
    result = Result()
    for outcome in outcomes(cases):
        result.add(outcome)
    assert result.seeds, "no case ran"
    assert not result.failures, result.failures
    assert not result.killed, f"SIGKILL ended {result.killed} processes: is memory short?"
    return result.counts


class _Worker:
    """A process that runs one case after the other."""

    def __init__(self, case: Case) -> None:
        # Beside real engines it is a fork of a process that has imported vLLM.
        context = get_context("forkserver")
        self.connection, theirs = context.Pipe()
        self._process = context.Process(target=_work, args=(case.program, theirs))
        self._process.start()
        theirs.close()
        self.is_alive = True
        self._last = case
        self.give(case)

    def give(self, case: Case | None) -> None:
        """Give the process its next case, or None to end it."""
        self.case = case
        self._last = case or self._last
        with suppress(BrokenPipeError):
            self.connection.send(case)

    def outcome(self) -> Outcome | None:
        """Returns the outcome of the case, or of the process's end.

        Returns None where the process ended because there was no next case.
        """
        with suppress(EOFError, ConnectionResetError):
            outcome = self.connection.recv()
            assert isinstance(outcome, Outcome)
            return outcome
        self.end()
        status = self._process.exitcode
        if status == 0 and self.case is None:
            return None
        is_killed = status == -signal.SIGKILL
        return Outcome(self._last, {}, f"the process ended with {status}", is_killed)

    def end(self) -> None:
        """Wait for the end of the present case, and of the process."""
        self.is_alive = False
        self.connection.close()
        self._process.join(END_SECONDS)
        self._process.kill()
        self._process.join()


def _work(name: str, connection: Connection) -> None:
    """Run the cases that come over `connection`, in the process of a worker."""
    # A process uses one core, and may be forked.
    os.environ.update(ONE_THREAD)
    program: Program = runpy.run_module(name)["PROGRAM"]
    # What is gone with the other side of the connection is nobody's business any more.
    with program.open() as run_seed, suppress(EOFError, BrokenPipeError):
        for number, case in enumerate(iter(connection.recv, None)):
            try:
                outcome = Outcome(case, dict(run_seed(case.seed, case.options)))
            except Exception:  # noqa: BLE001  # whatever it is, it failed this seed
                outcome = Outcome(case, error=traceback.format_exc())
            connection.send(outcome)
            # Engines are in cycles, of too few objects for a collection. What the first seed
            # imported is not looked through again.
            gc.collect()
            if number == 0:
                gc.freeze()
    gc.unfreeze()


def main(program: Program, description: str | None) -> int:
    """Run the command line.

    Returns 1 where a seed failed, and 137 where none did and a process was killed.
    """
    parser = argparse.ArgumentParser(prog=f"python -m {program.name}", description=description)
    length = parser.add_mutually_exclusive_group(required=True)
    length.add_argument("--seeds", type=_seeds, help="A:B, one seed, or fresh:COUNT")
    length.add_argument("--minutes", type=float, help="new seeds until so much time is over")
    parser.add_argument("--jobs", type=int, default=1, help="processes that share the seeds")
    parser.add_argument("--keep-going", action="store_true", help="go on after a seed that failed")
    for name, meaning in program.options.items():
        parser.add_argument(f"--{name}", help=meaning)
    parsed = parser.parse_args()
    options = {name: getattr(parsed, name) for name in program.options if getattr(parsed, name)}
    started = reported = time.monotonic()
    ends = started + 60 * parsed.minutes if parsed.minutes is not None else float("inf")
    seeds = parsed.seeds or _seeds(f"fresh:{1 << FRESH_SEED_BITS}")
    print(f"{program.name}: seeds from {seeds.start} on", flush=True)
    in_time = itertools.takewhile(lambda _: time.monotonic() < ends, seeds)
    result = Result()
    running = outcomes((Case(program.name, seed, options) for seed in in_time), parsed.jobs)
    with closing(running):
        for outcome in running:
            result.add(outcome)
            if result.failed and not parsed.keep_going:
                break
            if (now := time.monotonic()) > reported + PROGRESS_SECONDS:
                reported = now
                print(
                    f"  {result.seeds} seeds, {result.seeds / (now - started):.1f} a second",
                    flush=True,
                )
    seconds = time.monotonic() - started
    print(f"{result.seeds} seeds, {result.failed} failed, {result.killed} killed, {seconds:.1f} s")
    print(f"result {json.dumps(result, default=vars)}", flush=True)
    return 1 if result.failed else 128 + signal.SIGKILL if result.killed else 0


def _seeds(text: str) -> range:
    first, _, last = text.partition(":")
    if first == "fresh":
        start = random.SystemRandom().getrandbits(FRESH_SEED_BITS)
        return range(start, start + int(last))
    seeds = range(int(first), int(last) if last else int(first) + 1)
    if not seeds:
        raise argparse.ArgumentTypeError(f"{text} is no seed: 0:100 works")
    return seeds
