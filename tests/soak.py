"""`scripts/soak [SECTION...] --minutes N`: what the gate leaves out, as long as there is time.

It runs beside other work, at a low priority, and blocks nothing. Each finding is tried three times
more and appended to build/soak/findings.jsonl; what the system killed counts neither way. A section
goes on where its last run stopped. A finding becomes a fixed seed (tests/found.py) or a small test.
"""

import argparse
import datetime
import os
import random
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import msgspec

from hybridkv.lab.daemon_process import ending_with_parent
from tests.chance import EXAMPLES_VARIABLE, SEED_VARIABLE
from tests.gate import commit

ROOT = Path(__file__).parents[1]
DIRECTORY = ROOT / "build" / "soak"
FINDINGS = DIRECTORY / "findings.jsonl"
RESULT = "result "
RETRIES = 3
NICENESS = 10
EXAMPLES = 4
SEED_BITS = 32
PYTEST = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider")


@dataclass(frozen=True)
class Command:
    """A command line, and the variables that it gets beside the environment."""

    words: tuple[str, ...]
    variables: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        """The command as one types it in a shell."""
        return " ".join(
            [*(f"{name}={value}" for name, value in self.variables.items()), *self.words]
        )


class Finding(msgspec.Struct):
    """A line of findings.jsonl: something that failed."""

    section: str
    command: str
    commit: str
    date: str
    message: str
    repeats: int
    """How often it failed again in RETRIES tries."""


class Failure(msgspec.Struct):
    """A seed that failed, as its program prints it."""

    command: str
    message: str = ""


class Outcome(msgspec.Struct):
    """The last line that a random program prints, as far as the soak reads it."""

    seeds: int = 0
    killed: int = 0
    failures: list[Failure] = msgspec.field(default_factory=list)


class Ran(NamedTuple):
    """The result of a command that has ended."""

    status: int
    output: str

    @property
    def was_killed(self) -> bool:
        """Whether the system ended the command, most likely for want of memory."""
        return self.status in (-signal.SIGKILL, 128 + signal.SIGKILL)

    @property
    def failed(self) -> bool:
        """Whether the command found something."""
        return self.status != 0 and not self.was_killed

    @property
    def last_line(self) -> str:
        """The last line that the command printed."""
        lines = self.output.strip().splitlines()
        return lines[-1] if lines else f"ended with status {self.status}"


def run(command: Command) -> Ran:
    """Run a command to its end, at a low priority."""
    words = ending_with_parent(["nice", "-n", str(NICENESS), *command.words])
    ran = subprocess.run(
        words,
        cwd=ROOT,
        env={**os.environ, **command.variables},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    return Ran(ran.returncode, ran.stdout)


@dataclass(frozen=True)
class Seeds:
    """A section that is a random program, which draws new seeds until its time is over."""

    module: str

    def run(self, soak: "Soak", name: str, minutes: float) -> None:
        """Run the program for all of the time, in one process."""
        words = (sys.executable, "-m", self.module, f"--minutes={minutes:.2f}", "--keep-going")
        ran = run(Command(words))
        lines = [line for line in ran.output.splitlines() if line.startswith(RESULT)]
        outcomes = [msgspec.json.decode(line.removeprefix(RESULT), type=Outcome) for line in lines]
        failures = [failure for outcome in outcomes for failure in outcome.failures]
        for failure in failures:
            soak.found(name, Command(tuple(shlex.split(failure.command))), failure.message)
        if ran.failed and not outcomes:
            soak.found(name, Command(words), ran.last_line)
        soak.count(name, sum(outcome.seeds for outcome in outcomes))
        soak.killed[name] += sum(outcome.killed for outcome in outcomes)


@dataclass(frozen=True)
class Tests:
    """A section that runs one test after the other, and goes on where its last run stopped."""

    marked: str
    paths: tuple[str, ...]
    variables: Mapping[str, str] = field(default_factory=dict)
    is_drawn: bool = False
    """Whether the tests draw other things than in the gate, and more of them."""

    def run(self, soak: "Soak", name: str, minutes: float) -> None:
        """Run as many tests as the time lets begin, and one at least."""
        deadline = time.monotonic() + 60 * minutes
        while time.monotonic() < deadline and (test := soak.next_of(name, self.collected)):
            variables, options = dict(self.variables), []
            if self.is_drawn:
                seed = random.SystemRandom().getrandbits(SEED_BITS)
                variables |= {SEED_VARIABLE: str(seed), EXAMPLES_VARIABLE: str(EXAMPLES)}
                options = [f"--hypothesis-seed={seed}"]
            command = Command((*PYTEST, "-m", self.marked, *options, test), variables)
            ran = run(command)
            if ran.failed:
                soak.found(name, command, ran.last_line)
            soak.count(name, 1, ran.was_killed)

    def collected(self) -> list[str]:
        """Returns the node ids of the section's tests."""
        words = (*PYTEST, "--collect-only", "-m", self.marked, *self.paths)
        lines = run(Command(words, self.variables)).output.splitlines()
        return [line for line in lines if line.startswith("tests/") and "::" in line]


@dataclass(frozen=True)
class Mutations:
    """A section that puts in one known fault after the other. Tests must notice each."""

    def run(self, soak: "Soak", name: str, minutes: float) -> None:
        """Run as many faults as the time lets begin."""
        deadline = time.monotonic() + 60 * minutes
        while time.monotonic() < deadline and (fault := soak.next_of(name, self.named)):
            command = Command((sys.executable, "-m", "tests.mutations", fault))
            ran = run(command)
            if ran.failed:
                soak.found(name, command, ran.last_line)
            soak.count(name, 1, ran.was_killed)

    def named(self) -> list[str]:
        """Returns the names of all faults."""
        from tests.mutations.table import MUTATIONS

        return [mutation.name for mutation in MUTATIONS]


class Section(NamedTuple):
    """A program, and its share of the time."""

    program: Seeds | Tests | Mutations
    weight: float


GATE = "not gpu and not soak"
SECTIONS = {
    "simulation": Section(Seeds("tests.simulation"), 4),
    "daemonsim": Section(Seeds("tests.daemonsim"), 4),
    "devicesim": Section(Seeds("tests.devicesim"), 1),
    "fuzz": Section(Seeds("tests.fuzz"), 1),
    "kills": Section(Seeds("tests.fault.kills"), 4),
    "drawn": Section(Tests(f"{GATE} and not engine", ("tests/unit",), {}, True), 2),
    "tests": Section(Tests("soak and not gpu", ("tests",)), 8),
    "avx2": Section(Tests(GATE, ("tests/engine",), {"HYBRIDKV_TEST_CPU": "avx2"}), 2),
    "mutations": Section(Mutations(), 4),
}


class Soak:
    """The state of a run: findings, counts, and where each section stopped."""

    def __init__(self) -> None:
        DIRECTORY.mkdir(parents=True, exist_ok=True)
        self.findings: list[Finding] = []
        self.ran: Counter[str] = Counter()
        self.killed: Counter[str] = Counter()
        self._left: dict[str, list[str]] = {}

    def found(self, section: str, command: Command, message: str) -> None:
        """Run the command of a finding again, and write the finding down."""
        repeats = sum(run(command).failed for _ in range(RETRIES))
        date = datetime.datetime.now().isoformat(timespec="seconds")
        finding = Finding(
            section=section,
            command=str(command),
            commit=commit(),
            date=date,
            message=message,
            repeats=repeats,
        )
        self.findings.append(finding)
        with FINDINGS.open("ab") as file:
            file.write(msgspec.json.encode(finding) + b"\n")
        print(f"FOUND ({repeats} of {RETRIES} again): {command}\n  {message}", flush=True)

    def count(self, section: str, amount: int, was_killed: bool = False) -> None:
        """Count what has run. A run that the system killed is counted as killed alone."""
        self.killed[section] += was_killed
        self.ran[section] += 0 if was_killed else amount

    def next_of(self, section: str, names: Callable[[], list[str]]) -> str | None:
        """Returns the name after the one that ran last, so that every name has its turn.

        Returns None once every name has run.
        """
        last = DIRECTORY / f"{section}.last"
        if section not in self._left:
            every = names()
            done = last.read_text() if last.exists() else ""
            at = every.index(done) + 1 if done in every else 0
            self._left[section] = [*every[at:], *every[:at]]
        if not self._left[section]:
            return None
        name = self._left[section].pop(0)
        last.write_text(name)
        return name


def main() -> int:
    """Run the sections. Returns 1 where a finding failed again."""
    parser = argparse.ArgumentParser(prog="scripts/soak", description=__doc__)
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=", ".join(SECTIONS))
    parser.add_argument("--minutes", type=float, default=30.0, help="for all sections together")
    options = parser.parse_args()
    if unknown := [name for name in options.sections if name not in SECTIONS]:
        parser.error(f"{unknown[0]} is no section: {', '.join(SECTIONS)} work")
    chosen = {name: SECTIONS[name] for name in options.sections or SECTIONS}
    total = sum(section.weight for section in chosen.values())
    soak = Soak()
    for name, section in chosen.items():
        minutes = options.minutes * section.weight / total
        print(f"{name}: {minutes:.1f} minutes", flush=True)
        section.program.run(soak, name, minutes)
        print(f"{name}: {soak.ran[name]} run, {soak.killed[name]} killed by the system", flush=True)
    print(f"{len(soak.findings)} found; {FINDINGS.relative_to(ROOT)} has all of them")
    return int(any(finding.repeats for finding in soak.findings))


if __name__ == "__main__":
    sys.exit(main())
