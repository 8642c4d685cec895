"""The real daemon with a small directory, killed with -9 while it writes there.

`python -m tests.fault.tierkills --seeds A:B` runs it, with KILLS of them in each seed. A client
stores, looks up and evicts until the daemon dies, at a drawn line of the code that handles the
files or at a drawn moment. The next daemon keeps the memory or has lost it, and has the same name
or another one; it takes over what the dead one left. Then nothing that was begun is left, and the
bound holds for what the files take. Every file is whole, and whatever is found has exactly the
bytes of its name. Some daemons encode what they write, and others do not.
"""

import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

from hybridkv.client.control import ControlClient, DaemonUnreachableError
from hybridkv.daemon.filesystem import stale_arenas
from hybridkv.lab.daemon_process import ending_with_parent
from hybridkv.tiers.disk.fsck import fsck, list_files
from hybridkv.tiers.disk.writers import LOST_SECONDS
from hybridkv.tiers.record import is_encoded
from tests.fault.killing import killing
from tests.seeds import main
from tests.unit.daemon.tierclient import DISK, Client, object_files, real_bytes
from tests.waiting import DEADLINE_SECONDS, until

KILLS = 5
BOUND_BYTES = 1 << 20
RAM = "1MiB"
PROMPTS = 14
CHUNKS = 2
"""Of each: all together are more than the bound."""
LINES_MAX = 6000
"""A restart takes some 1,500, an object some 100."""
WRITES_MAX = 60
MOMENT_SECONDS = 0.4
OPERATIONS_MAX = 1000
CODINGS = ("codec=none", "codec=none", "codec=zplanes", "codec=zplanes")
"""Of one daemon after the other: each is followed by one that reads what it wrote."""

_DAEMON = """
import faulthandler, os, signal, sys, threading
faulthandler.enable()
left, writes = int(sys.argv.pop(1)), int(sys.argv.pop(1))
DISK = tuple(f"tiers/disk/{name}.py" for name in ("tier", "index", "writers", "files"))
TRACED = (*DISK, "tiers/jobs.py", "tiers/encoded.py")

def line(frame, event, arg):
    global left
    if event == "line":
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
    return line

pwritev = os.pwritev

def torn(fd, pieces, at):
    global writes
    writes -= 1
    if writes == 0:
        pwritev(fd, pieces[:1], at)
        os.kill(os.getpid(), signal.SIGKILL)
    return pwritev(fd, pieces, at)

os.pwritev = torn
from hybridkv.cli.main import main
if left:
    threading.settrace(
        lambda frame, event, arg: line if frame.f_code.co_filename.endswith(TRACED) else None
    )
socket_path, ram, url, node = sys.argv[1:]
options = ["--metrics-port", "-1", "--ram", ram, "--socket", socket_path]
sys.exit(main(["serve", *options, "--tier", url, "--node", node]))
"""


class Daemon:
    """One daemon at a time."""

    def __init__(self, socket_path: str, root: Path) -> None:
        self.socket_path = socket_path
        self.root = root
        self.node = "node-1"
        self._starts = 0
        self.process: subprocess.Popen[bytes] | None = None
        self._said = tempfile.TemporaryFile("w+b", buffering=0)  # noqa: SIM115  # as long as this

    def start(self, line: int = 0, write: int = 0) -> bool:
        """Whether it serves; False where it was killed before that.

        It kills itself at that line, or in the middle of that write (0: never).
        """
        self._starts += 1
        url = f"disk://{self.root}?bytes={BOUND_BYTES}&{CODINGS[self._starts % len(CODINGS)]}"
        command = [
            sys.executable,
            "-c",
            _DAEMON,
            *map(str, (line, write)),
            self.socket_path,
            RAM,
            url,
            self.node,
        ]
        self._said.truncate(0)
        self.process = subprocess.Popen(ending_with_parent(command), stderr=self._said)
        deadline = time.monotonic() + DEADLINE_SECONDS
        while time.monotonic() < deadline:
            with contextlib.suppress(DaemonUnreachableError), ControlClient(self.socket_path, 0.2):
                return True
            if self.process.poll() is not None:
                assert self.process.returncode == -signal.SIGKILL, self._words(
                    f"ended: {self.process.returncode}"
                )
                return False
        self.process.send_signal(signal.SIGABRT)
        self.process.wait()
        raise AssertionError(self._words("it does not answer"))

    def _words(self, what: str) -> str:
        self._said.seek(0)
        return f"{what}\n{self._said.read().decode(errors='replace')}"

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        self._said.close()

    def lose_memory(self) -> None:
        """As a reboot does."""
        for arena in stale_arenas(Path(self.socket_path)):
            arena.unlink(missing_ok=True)

    def lose_name(self) -> None:
        """The next one is another node, and this one is lost for long."""
        alive = self.root / "objects" / self.node / "alive"
        with contextlib.suppress(FileNotFoundError):
            now = alive.stat().st_mtime
            os.utime(alive, (now - 2 * LOST_SECONDS,) * 2)
        self.node = f"node-{int(self.node.partition('-')[2]) + 1}"


def work(daemon: Daemon, rng: random.Random, counts: Counter[str]) -> None:
    """Random stores and lookups until the daemon is gone, or has written all that it will.

    Where encoded records of all prompts are within the bound, none is written any more.
    """
    with contextlib.suppress(DaemonUnreachableError), Client(daemon.socket_path) as client:
        for _ in range(OPERATIONS_MAX):
            prompt = rng.randrange(PROMPTS)
            if rng.random() < 0.6:
                client.store(prompt, CHUNKS)
                counts["stores"] += 1
            else:
                counts["hits"] += client.look_up(prompt, CHUNKS, 200).found.chunks
            if (
                os.path.isdir(daemon.root / "objects" / daemon.node)
                and len(homes(daemon.root)) == 1
            ):
                taken = real_bytes(daemon.root)
                assert taken <= BOUND_BYTES, f"{taken} bytes"


def homes(root: Path) -> list[str]:
    return os.listdir(root / "objects") if (root / "objects").exists() else []


def check(daemon: Daemon, begun: dict[Path, int], counts: Counter[str]) -> None:
    """A daemon that follows a killed one; `begun` has the files that were open, and when."""
    with Client(daemon.socket_path) as client:
        until(lambda: client.values()[f"{DISK}is_open"] == 1, "the tier is open")
        until(lambda: homes(daemon.root) == [daemon.node], "what others left is taken over")
        assert real_bytes(daemon.root) <= BOUND_BYTES
        for path, changed in begun.items():
            with contextlib.suppress(FileNotFoundError):
                assert path.stat().st_ctime_ns != changed, f"{path} is left"
        files = list_files(daemon.root)
        report = fsck(daemon.root, files, repair=False, step=lambda: None)
        assert not report.damaged, report.findings
        foreign = sum(writer.foreign for writer in report.writers)
        assert not foreign
        for prompt in range(PROMPTS):
            counts["objects"] += client.look_up(prompt, CHUNKS, 2000).found.chunks
        values = client.values()
        assert not values.get(f"{DISK}objects_damaged")
        assert not values.get(f"{DISK}failures")
        assert values[f"{DISK}bytes"] <= BOUND_BYTES
        assert real_bytes(daemon.root) <= BOUND_BYTES


def run(seed: int, directory: Path) -> Counter[str]:
    """Kill daemons until KILLS of them died; raises AssertionError on the first lie."""
    rng = random.Random(seed)
    counts: Counter[str] = Counter()
    daemon = Daemon(str(directory / "k.sock"), directory / "disk")
    try:
        while counts["kills"] < KILLS:
            how = rng.choices(("line", "write", "moment"), (5, 3, 2))[0]
            counts[f"kills by {how}"] += 1
            line = rng.randrange(1, LINES_MAX) if how == "line" else 0
            write = rng.randrange(1, WRITES_MAX) if how == "write" else 0
            if daemon.start(line, write):
                timer = None
                if how == "moment":
                    assert daemon.process is not None
                    timer = threading.Timer(rng.random() * MOMENT_SECONDS, daemon.process.kill)
                    timer.start()
                work(daemon, rng, counts)
                if timer is not None:
                    timer.join()
            else:
                counts["kills while starting"] += 1
            daemon.kill()
            counts["kills"] += 1
            begun = {
                path: path.stat().st_ctime_ns for path in daemon.root.glob("objects/*/tmp/*/*")
            }
            counts["files begun"] += len(begun)
            counts["memory lost"] += (lost := rng.random() < 0.5)
            if lost:
                daemon.lose_memory()
            if rng.random() < 0.2:
                counts["names lost"] += 1
                daemon.lose_name()
            assert daemon.start()
            check(daemon, begun, counts)
            daemon.kill()
    finally:
        daemon.kill()
        daemon.lose_memory()
        daemon.close()
    files = object_files(daemon.root)
    counts["files"] = len(files)
    counts["files encoded"] = sum(is_encoded(path.read_bytes()) for path in files)
    return counts


PROGRAM = killing("tests.fault.tierkills", run)

if __name__ == "__main__":
    sys.exit(main(PROGRAM, __doc__))
