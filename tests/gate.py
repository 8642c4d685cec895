"""`python -m tests.gate`: what every change must pass, the same tests with the same seeds.

Three lanes run side by side, and each has its tests in one process and in one order. It ends with a
line of pytest's form and with build/gate.json; the exit status is 0 only where nothing failed.
"""

import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import msgspec

from hybridkv.core.sizes import format_size
from hybridkv.lab.daemon_process import ending_with_parent
from hybridkv.shm.arena import SHM_DIR
from tests.chance import EXAMPLES_VARIABLE, SEED_VARIABLE

ROOT = Path(__file__).parents[1]
REPORT = ROOT / "build" / "gate.json"
RUN_VARIABLE = "HYBRIDKV_TEST_RUN"
"""In the environment of every process of a run, also of one that has left its parent."""
MEMORY_BYTES_MIN = 5 << 30
SHM_BYTES_MIN = 2 << 30
LANE_SECONDS_MAX = 3600.0
LEAVE_SECONDS = 15.0
SAMPLE_SECONDS = 2.0
ENGINES = (
    "tests/engine",
    "tests/simulation",
    "tests/daemonsim",
    "tests/devicesim",
    "tests/test_found.py",
)
"""Their processes are forks of one that has imported vLLM."""
PROGRAMS = ("tests/programs", "tests/fault")
"""These wait for other processes half of the time, while two cores have the other lanes to run."""
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
"""Threads that wait for each other at barriers would take the cores of other lanes."""
TOOLS = {
    "promtool": "alert rules",
    "helm": "the chart",
    "unshare": "other namespaces",
    "mount": "file systems",
    "git": "the commit in the report",
}


class Skip(NamedTuple):
    """A test that was skipped, and why."""

    test: str
    reason: str


@dataclass
class Lane:
    """Commands that run one after the other, and their results."""

    name: str
    commands: Sequence[Sequence[str]]
    niceness: int
    """The longest lane has the least, so that it does not end alone."""
    failed: list[str] = field(default_factory=list)
    """Tests and commands."""
    passed: int = 0
    skipped: list[Skip] = field(default_factory=list)
    seconds: float = 0.0

    def run(self, environment: Mapping[str, str], directory: Path) -> None:
        """Run every command, also after one that failed."""
        started = time.monotonic()
        for command in self.commands:
            report = directory / f"{self.name}.xml"
            is_pytest = command[0] == "pytest"
            words = [*command, f"--junitxml={report}"] if is_pytest else command
            status = self._run_command(words, environment)
            if is_pytest and report.exists():
                self._read(report)
            elif status:
                self.failed.append(" ".join(command))
            if is_pytest and status and not self.failed:
                self.failed.append(f"{' '.join(command)} ended with status {status}")
        self.seconds = time.monotonic() - started

    def _run_command(self, words: Sequence[str], environment: Mapping[str, str]) -> int:
        """Run a command and print its output with the lane's name. Returns its exit status."""
        print(f"{self.name}| + {' '.join(words)}", flush=True)
        process = subprocess.Popen(
            ending_with_parent(["nice", f"-n{self.niceness}", *words]),
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        limit = threading.Timer(LANE_SECONDS_MAX, process.kill)
        limit.start()
        assert process.stdout is not None
        for line in process.stdout:
            print(f"{self.name}| {line}", end="", flush=True)
        limit.cancel()
        return process.wait()

    def _read(self, report: Path) -> None:
        for case in ElementTree.parse(report).getroot().iter("testcase"):
            test = f"{case.get('classname')}::{case.get('name')}"
            outcome = {child.tag: child for child in case}
            if "failure" in outcome or "error" in outcome:
                self.failed.append(test)
            elif "skipped" in outcome:
                self.skipped.append(Skip(test, outcome["skipped"].get("message", "")))
            else:
                self.passed += 1


class Watch(threading.Thread):
    """Samples the most memory that the processes of a run take, in bytes.

    Pages of files can be dropped at any time, so it counts private memory and arenas.
    """

    def __init__(self, run: str, before: Set[Path]) -> None:
        super().__init__(daemon=True)
        self.peak_bytes = 0
        self._run, self._before, self._ended = run, before, threading.Event()

    def run(self) -> None:
        """Take a sample every SAMPLE_SECONDS."""
        while not self._ended.wait(SAMPLE_SECONDS):
            private = sum(_private_bytes(pid) for pid in processes_of(self._run))
            shared = sum(_file_bytes(path) for path in arenas() - self._before)
            self.peak_bytes = max(self.peak_bytes, private + shared)

    def end(self) -> None:
        """Take no more samples."""
        self._ended.set()
        self.join()


def processes_of(run: str) -> Iterator[int]:
    """Yields the processes of a run, without this one."""
    mark = f"{RUN_VARIABLE}={run}".encode()
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            is_ours = mark in path.read_bytes().split(b"\0")
        except OSError:
            continue
        if is_ours and int(path.parent.name) != os.getpid():
            yield int(path.parent.name)


def _private_bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    sizes = (line.split() for line in lines if line.startswith("Pss_Anon:"))
    return sum(int(words[1]) << 10 for words in sizes)


def _file_bytes(path: Path) -> int:
    """Returns the bytes that a file takes on its file system, or 0 where it is gone."""
    try:
        return path.stat().st_blocks * 512
    except OSError:
        return 0


def arenas() -> set[Path]:
    """Returns every arena of this machine, of any user."""
    return set(SHM_DIR.glob("hybridkv-*"))


def left_behind(run: str) -> list[str]:
    """Kill the processes that a run leaves for LEAVE_SECONDS. Returns a line for each."""
    deadline = time.monotonic() + LEAVE_SECONDS
    while any(processes_of(run)) and time.monotonic() < deadline:
        time.sleep(0.1)
    left = []
    for pid in processes_of(run):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            variables = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
            os.kill(pid, signal.SIGKILL)
            tests = [text for text in variables if text.startswith("PYTEST_CURRENT_TEST=")]
            left.append(f"process {pid} is left: {words} {' '.join(tests)}")
        except OSError:
            continue
    return left


def look() -> str | None:
    """Print what this machine has and lacks.

    Returns a sentence where the gate cannot run on it, None elsewhere.
    """
    memory = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(memory["MemAvailable"].split()[0]) << 10
    shm = shutil.disk_usage(SHM_DIR).free
    flags = Path("/proc/cpuinfo").read_text().split()
    kinds = [name for name in ("avx2", "avx512f", "avx512_bf16", "amx_tile") if name in flags]
    cores, load = len(os.sched_getaffinity(0)), os.getloadavg()[0]
    print(
        f"{platform.machine()} with {', '.join(kinds)}; {cores} cores, load {load:.1f}; "
        f"{format_size(available)} of memory and {format_size(shm)} in /dev/shm are free"
    )
    lacks = [f"{name} ({what})" for name, what in TOOLS.items() if not shutil.which(name)]
    lacks += [] if os.geteuid() == 0 else ["root (namespaces, file systems, other users)"]
    lacks += [] if Path("/dev/fuse").exists() else ["/dev/fuse (file systems that fail)"]
    print(f"skipped for what is not here: {', '.join(lacks) or 'nothing'}", flush=True)
    if available < MEMORY_BYTES_MIN or shm < SHM_BYTES_MIN:
        return (
            f"the gate needs {format_size(MEMORY_BYTES_MIN)} of free memory and "
            f"{format_size(SHM_BYTES_MIN)} in /dev/shm: daemons that nobody needs end with "
            "`hybridkv stop --free`"
        )
    return None


def lanes() -> list[Lane]:
    """Returns the lanes. A new directory of tests runs in the last."""
    pytest = ["pytest", "-q", "-p", "no:cacheprovider", "--durations=20"]
    pytest += ["-m", "not gpu and not soak"]
    others = [f"--ignore={name}" for name in (*ENGINES, *PROGRAMS)]
    linters = (
        ["ruff", "check", "-q"],
        ["ruff", "format", "--check", "-q"],
        ["mypy"],
        ["lint-imports", "--no-cache"],
        ["scripts/docs"],
    )
    return [
        Lane("engines", [[*pytest, *ENGINES]], niceness=0),
        Lane("programs", [[*pytest, *PROGRAMS]], niceness=5),
        Lane("others", [*linters, [*pytest, *others]], niceness=5),
    ]


def commit() -> str:
    """Returns the commit that is checked out, and whether files differ from it."""

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", *words], cwd=ROOT, capture_output=True, text=True, check=False
        ).stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no")
    return git("rev-parse", "HEAD") + (" and changes" if changed else "")


def main() -> int:
    """Run the gate. Returns 1 where something failed, 2 where the machine has no room."""
    started = time.monotonic()
    if refusal := look():
        print(f"error: {refusal}", file=sys.stderr)
        return 2
    run = uuid.uuid4().hex
    # A short name: paths of sockets have a limit of 107 bytes.
    with tempfile.TemporaryDirectory(prefix="hkv-") as directory:
        environment = {**os.environ, **ONE_THREAD, "PYTHONHASHSEED": "0", "TMPDIR": directory}
        environment[RUN_VARIABLE] = run
        for name in (SEED_VARIABLE, EXAMPLES_VARIABLE):
            environment.pop(name, None)
        before = arenas()
        watch = Watch(run, before)
        watch.start()
        all_lanes = lanes()
        threads = [
            threading.Thread(target=lane.run, args=(environment, Path(directory)))
            for lane in all_lanes
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        left = left_behind(run)
        watch.end()
    for path in sorted(arenas() - before):
        print(f"{path} came meanwhile and is there: `hybridkv arenas` says whose it is")
    return _sum_up(all_lanes, left, watch.peak_bytes, time.monotonic() - started)


def _sum_up(all_lanes: Sequence[Lane], left: Sequence[str], peak: int, seconds: float) -> int:
    passed = sum(lane.passed for lane in all_lanes)
    failed = [*(name for lane in all_lanes for name in lane.failed), *left]
    skipped = [skip for lane in all_lanes for skip in lane.skipped]
    report = {
        "commit": commit(),
        "seconds": round(seconds),
        "passed": passed,
        "failed": len(failed),
        "failures": failed,
        "skipped": [skip._asdict() for skip in skipped],
        "peak_bytes": peak,
        "lanes": {lane.name: round(lane.seconds) for lane in all_lanes},
    }
    REPORT.parent.mkdir(exist_ok=True)
    REPORT.write_bytes(msgspec.json.format(msgspec.json.encode(report)))
    for reason, count in sorted(Counter(skip.reason for skip in skipped).items()):
        print(f"skipped {count}: {reason}")
    for name in failed:
        print(f"FAILED {name}")
    times = ", ".join(f"{lane.name} {lane.seconds:.0f} s" for lane in all_lanes)
    print(f"{times}; at most {format_size(peak)} of memory; {REPORT.relative_to(ROOT)}")
    parts = [f"{len(failed)} failed"] * bool(failed) + [f"{passed} passed"]
    parts += [f"{len(skipped)} skipped"] * bool(skipped)
    print(f"==== {', '.join(parts)} in {seconds:.2f}s ====", flush=True)
    return int(bool(failed) or not passed)


if __name__ == "__main__":
    sys.exit(main())
