"""The real daemon, killed with -9 at any line while it serves, writes to a directory, or starts.

`python -m tests.fault.kills --seeds A:B` runs it, with KILLS of them in each seed. Half of the
seeds have a small directory below RAM. A client with a small arena stores, looks up and evicts
until the daemon dies: at a drawn line of the code that changes the arena or handles the files, in
the middle of a write, or at a drawn moment. The next daemon may be killed while it takes over, as
often as drawn. It may have lost the memory or its name where it has a directory. Then:

- An object that a lookup finds has the bytes of its name and is signed, whatever a living writer
  of an earlier life still writes.
- That writer's slots are held until it says that it copies nothing more; without such a writer
  they are free at once. Then no slot is left over, and there is room for every object again.
- Nothing that was begun in the directory is left, the records of a lost name are taken over, every
  file is whole, and the bound holds for what the files take. Daemons with and without a codec
  follow each other.
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
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from hybridkv.client.control import ControlClient, DaemonUnreachableError
from hybridkv.core.coverage import part_bytes
from hybridkv.core.keys import HASH_BYTES
from hybridkv.core.packed import SLOT_BYTES, SlotRef, pack_slots, pack_u64
from hybridkv.core.policies import EvictionClass
from hybridkv.daemon.filesystem import stale_arenas
from hybridkv.lab.daemon_process import ending_with_parent
from hybridkv.shm.slots import payload_offset, slot_bytes
from hybridkv.tiers.disk.fsck import fsck, list_files
from hybridkv.tiers.disk.writers import LOST_SECONDS
from hybridkv.tiers.record import is_encoded
from hybridkv.wire import messages as wire
from tests.seeds import Options, Program, main
from tests.unit.daemon import tierclient
from tests.unit.daemon.tierclient import DISK, GEOMETRY, hashes, object_files, real_bytes
from tests.waiting import DEADLINE_SECONDS, until

KILLS = 8
RAM = "512KiB"
BOUND_BYTES = 768 << 10
SIZES = [part_bytes(GEOMETRY, group, 0) for group in GEOMETRY.groups]
PROMPTS = 20
CHUNKS = 2
"""Chunks of a prompt. All prompts together are more than the arena has room for, or the bound."""
NAMES = [name for prompt in range(PROMPTS) for name in hashes(prompt, CHUNKS)]
CODECS = ("none", "none", "zplanes", "zplanes")
"""The codecs of one daemon after the other. Each reads what the last one wrote."""

CORE = (
    *("store/store.py", "store/extents.py", "store/index.py", "store/eviction.py"),
    *("shm/trailer.py", "shm/slots.py", "daemon/handlers.py"),
)
DISK_FILES = tuple(f"tiers/disk/{name}.py" for name in ("tier", "index", "writers", "files"))
TRACED = {"core line": CORE, "tier line": (*DISK_FILES, "tiers/jobs.py", "tiers/encoded.py")}
"""Files whose lines are counted, by the kind of the kill."""
NUMBERS_MAX = {"core line": 15000, "tier line": 6000, "write": 60, "moment": 400}
"""A start takes some 2,000 lines of the core and 1,500 of the tier, an object some 100."""
START_LINES_MAX = 2500

STEPS = {"store": 6, "lookup": 4, "reserve": 3, "commit": 6, "free": 1, "clear": 0.05}
"""The steps of a client, with their weights."""
STEPS_MAX = 1000
KEPT_MAX = 12
LEASES_MAX = 2
WORK_WAIT_MS = 200
CHECK_WAIT_MS = 2000
WORKER = wire.Hello(1, wire.PROTOCOL_VERSION, "worker", "killed")

_DAEMON = """
import faulthandler, os, signal, sys, threading
faulthandler.enable()
traced, lines, writes = sys.argv.pop(1).split(","), int(sys.argv.pop(1)), int(sys.argv.pop(1))

def line(frame, event, arg):
    global lines
    if event == "line":
        lines -= 1
        if lines == 0:
            os.kill(os.getpid(), signal.SIGKILL)
    return line

def call(frame, event, arg):
    return line if frame.f_code.co_filename.endswith(tuple(traced)) else None

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
if lines:
    threading.settrace(call)
    sys.settrace(call)
sys.exit(main(["serve", *sys.argv[1:]]))
"""


class Kill(NamedTuple):
    """The end of a daemon: at a line, in a write, or a moment after it began to serve."""

    kind: str
    number: int  # Of the line or write, counted from 1, or a moment's milliseconds.


NEVER = Kill("none", 0)


def draw_kill(rng: random.Random, has_directory: bool) -> Kill:
    """Returns the end of a daemon that serves. A line may be one of its start."""
    weights = {"core line": 5, "moment": 1}
    if has_directory:
        weights = {"core line": 3, "tier line": 5, "write": 3, "moment": 2}
    kind = rng.choices(list(weights), list(weights.values()))[0]
    return Kill(kind, rng.randrange(1, NUMBERS_MAX[kind]))


def draw_early_kill(rng: random.Random, has_directory: bool) -> Kill:
    """Return the end of a daemon that takes over what the last one left, or has just done so."""
    kind = rng.choice(list(TRACED)) if has_directory else "core line"
    return Kill(kind, rng.randrange(1, START_LINES_MAX))


class Daemon:
    """A daemon on one socket, started after each end, with or without a directory below RAM."""

    def __init__(self, directory: Path, has_directory: bool) -> None:
        self.socket_path = str(directory / "k.sock")
        self.has_directory = has_directory
        self.root = directory / "disk"
        self.node = "node-1"
        self._starts = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._stderr = directory / "stderr"

    def start(self, kill: Kill = NEVER) -> bool:
        """Return True when it serves, and False where it was killed before that."""
        self._starts += 1
        options = ["--metrics-port", "-1", "--salt-quota", "64KiB"]
        options += ["--ram", RAM, "--socket", self.socket_path]
        if self.has_directory:
            codec = CODECS[self._starts % len(CODECS)]
            url = f"disk://{self.root}?bytes={BOUND_BYTES}&codec={codec}"
            options += ["--tier", url, "--node", self.node]
        line, write = kill.number * (kill.kind in TRACED), kill.number * (kill.kind == "write")
        counted = [",".join(TRACED.get(kill.kind, ())), str(line), str(write)]
        command = ending_with_parent([sys.executable, "-c", _DAEMON, *counted, *options])
        with self._stderr.open("wb") as stderr:
            self._process = process = subprocess.Popen(command, stderr=stderr)
        deadline = time.monotonic() + DEADLINE_SECONDS
        while time.monotonic() < deadline:
            with contextlib.suppress(DaemonUnreachableError), ControlClient(self.socket_path, 0.2):
                if kill.kind == "moment":
                    threading.Timer(kill.number / 1000, process.kill).start()
                return True
            if self.is_dead:
                return False
        process.send_signal(signal.SIGABRT)
        process.wait()
        raise AssertionError(f"{self._stderr.read_text()}\nthe daemon does not answer")

    @property
    def is_dead(self) -> bool:
        """Whether it was killed. Raises AssertionError where it ended in another way."""
        assert self._process is not None
        status = self._process.poll()
        assert status in (None, -signal.SIGKILL), f"{self._stderr.read_text()}\nended with {status}"
        return status is not None

    def kill(self) -> None:
        """End it with -9, where that has not happened."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        assert self.is_dead

    def close(self) -> None:
        """Leave nothing of it but the directory."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self.lose_memory()

    def lose_memory(self) -> None:
        """Remove the arena, as a reboot does."""
        for arena in stale_arenas(Path(self.socket_path)):
            arena.unlink(missing_ok=True)

    def lose_name(self) -> None:
        """Make the next daemon another node, by whose clock this one was lost long ago."""
        alive = self.root / "objects" / self.node / "alive"
        with contextlib.suppress(FileNotFoundError):
            now = alive.stat().st_mtime
            os.utime(alive, (now - 2 * LOST_SECONDS,) * 2)
        self.node = f"node-{int(self.node.partition('-')[2]) + 1}"

    def homes(self) -> list[str]:
        """Return the names of the directories of all writers."""
        home = self.root / "objects"
        return os.listdir(home) if home.exists() else []

    def begun_files(self) -> dict[Path, int]:
        """Return when each file that is not finished changed last."""
        return {path: path.stat().st_ctime_ns for path in self.root.glob("objects/*/tmp/*/*")}

    def check_bound(self) -> None:
        """Check the bytes that all files of objects take."""
        taken_bytes = real_bytes(self.root)
        assert taken_bytes <= BOUND_BYTES, f"files take {taken_bytes} bytes"


class WriteSlot(NamedTuple):
    """A slot that the daemon granted."""

    offset: int
    generation: int
    group_index: int


class Client(tierclient.Client):
    """An engine and its worker, or an engine alone, which live on when a daemon dies.

    It is entered once in each life of the daemon, and greets with the next number each time.
    """

    def __init__(self, daemon: Daemon, rng: random.Random, counts: Counter[str]) -> None:
        super().__init__(daemon.socket_path, name=WORKER.engine_id)
        self.has_worker = rng.random() < 0.8
        self.kept: list[WriteSlot] = []
        """Slots granted in this life, and neither committed nor freed."""
        self.stray: list[WriteSlot] = []
        """Slots kept when a daemon died. The worker still writes them."""
        self._daemon = daemon
        self._rng = rng
        self._counts = counts
        self._leases: list[int] = []

    def __enter__(self) -> "Client":
        """Connect. Raises DaemonUnreachableError where the daemon is gone."""
        self._replies.clear()
        self._leases.clear()
        deadline = time.monotonic() + DEADLINE_SECONDS
        while self.link.welcome is None:
            self.link.poll(time.monotonic())
            if not self.link.is_served:
                raise DaemonUnreachableError("the daemon is gone")
            assert time.monotonic() < deadline, "the daemon does not greet"
            self._wait(0.02)
        super().__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stray += self.kept if self.has_worker else ()
        self.kept.clear()
        self.link.drop_connection("the life is over", time.monotonic())
        self.arena.close()

    def work(self) -> None:
        """Do random steps until the daemon is gone, or has written all that it will.

        Where encoded records of all prompts are within the bound, none is written any more.
        """
        daemon = self._daemon
        try:
            with self._worker() if self.has_worker else contextlib.nullcontext(), self:
                for _ in range(STEPS_MAX):
                    self._step()
                    refusals = [reply for reply in self._replies if isinstance(reply, wire.Error)]
                    assert not refusals, f"refused: {refusals}"
                    if daemon.homes() == [daemon.node]:
                        daemon.check_bound()
        except DaemonUnreachableError:
            until(lambda: daemon.is_dead, "the end of a daemon that hung up")

    def look_everything_up(self) -> None:
        """Prove every object of every prompt that is found."""
        for prompt in range(PROMPTS):
            self._counts["objects"] += self.look_up(prompt, CHUNKS, CHECK_WAIT_MS).found.chunks

    def check_slots(self) -> None:
        """Slots of dead daemons are nobody else's while they may be written, and then come back."""
        for prompt in range(PROMPTS):
            self._store_where_room(prompt)
        stray_bytes = 0
        for slot in self.stray:
            size, start = SIZES[slot.group_index], slot.offset + payload_offset(1)
            self.arena.memory[start : start + size] = b"\xee" * size
            stray_bytes += slot_bytes(size, 1)
        self.stray.clear()
        self.look_everything_up()
        held_bytes = self.values()["bytes_held"]
        assert held_bytes >= stray_bytes, f"{held_bytes} bytes are held, and {stray_bytes} written"
        if self.has_worker:
            self._counts["held"] += held_bytes > 0
            with self._worker() as worker:
                worker.tell(wire.Drained(self.link.greetings))
                held_bytes = worker.stats().values["bytes_held"]
        assert not held_bytes, f"{held_bytes} bytes are held for nobody"
        until(lambda: self.values()["bytes_writing"] == 0, "no write slot is left over")
        for prompt in range(PROMPTS):
            self.store(prompt, CHUNKS)
        self.look_everything_up()
        values = self.values()
        assert values["bytes_committed"] <= values["bytes_reserved"] <= values["bytes_arena"]

    def _worker(self) -> ControlClient:
        return ControlClient(self._daemon.socket_path, DEADLINE_SECONDS, WORKER)

    def _step(self) -> None:
        rng = self._rng
        step = rng.choices(list(STEPS), list(STEPS.values()))[0]
        self._counts[step] += 1
        match step:
            case "store":
                self._store_where_room(rng.randrange(PROMPTS))
            case "lookup":
                self._look_up_and_keep(rng.randrange(PROMPTS))
            case "reserve" if len(self.kept) < KEPT_MAX:
                self.kept += self._reserve(rng.randrange(len(SIZES)), rng.randrange(1, 9))
            case "commit" | "free" if self.kept:
                rng.shuffle(self.kept)
                # Whether a dying daemon heard what becomes of a slot is not known.
                slots = [self.kept.pop() for _ in self.kept[: rng.randrange(1, 6)]]
                if step == "free":
                    self.abandon([SlotRef(slot.offset, slot.generation) for slot in slots])
                else:
                    names, parents = (rng.choices(NAMES, k=len(slots)) for _ in range(2))
                    self._commit(slots, names, parents)
            case "clear":
                self._call(wire.Clear(self.new_id()))

    def _reserve(self, group_index: int, count: int) -> list[WriteSlot]:
        slots = self.want(SIZES[group_index], 1, count)
        return [WriteSlot(offset, generation, group_index) for offset, generation in slots]

    def _commit(self, slots: list[WriteSlot], names: list[bytes], parents: list[bytes]) -> None:
        """Write objects of `names` into slots and commit them."""
        for slot, name in zip(slots, names, strict=True):
            ref = SlotRef(slot.offset, slot.generation)
            self.fill(ref, slot.group_index, name, SIZES[slot.group_index], 1)
        commit = wire.Commit(
            slots=pack_slots((slot.offset, slot.generation) for slot in slots),
            groups=pack_u64([slot.group_index for slot in slots]),
            hashes=b"".join(names),
        )
        classes = bytes(self._rng.choices(list(EvictionClass), k=len(slots)))
        tenants = pack_u64(self._rng.choices((0, 0, 0, 0, 1, 2), k=len(slots)))
        parent_hashes = b"".join(parents)
        self.tell(replace(commit, parents=parent_hashes, classes=classes, tenants=tenants))

    def _store_where_room(self, prompt: int) -> None:
        """Store the objects of a prompt for which there are slots at once."""
        parent = bytes(HASH_BYTES)
        for name in hashes(prompt, CHUNKS):
            for group_index in range(len(SIZES)):
                if slots := self._reserve(group_index, 1):
                    self._commit(slots, [name], [parent])
            parent = name

    def _look_up_and_keep(self, prompt: int) -> None:
        """Prove a hit, maybe say that it is wrong, and maybe keep its lease for a while."""
        lease = self.ask(prompt, CHUNKS, WORK_WAIT_MS)
        found = self.answer(lease)
        self.prove(found, prompt)
        self._counts["hits"] += found.chunks
        if found.chunks and self._rng.random() < 0.2:
            self._counts["condemned"] += 1
            self.tell(wire.ReportCorrupt(found.slots[:SLOT_BYTES]))
        self._leases.append(lease)
        if self._rng.random() < 0.8:
            self.release(self._leases.pop())
        if len(self._leases) > LEASES_MAX:
            self.release(self._leases.pop(0))


def check(daemon: Daemon, client: Client, begun: Mapping[Path, int]) -> None:
    """Check a daemon that follows killed ones. `begun` has the files that they did not finish."""
    with client:
        if daemon.has_directory:
            until(lambda: client.values()[f"{DISK}is_open"] == 1, "the tier is open")
            until(lambda: daemon.homes() == [daemon.node], "what others left is taken over")
            daemon.check_bound()
            for path, changed in begun.items():
                with contextlib.suppress(FileNotFoundError):
                    assert path.stat().st_ctime_ns != changed, f"{path} is left"
            report = fsck(daemon.root, list_files(daemon.root), repair=False, step=lambda: None)
            assert not report.damaged, report.findings
            assert not any(writer.foreign for writer in report.writers)
        client.look_everything_up()
        client.check_slots()
        if daemon.has_directory:
            values = client.values()
            assert not values.get(f"{DISK}objects_damaged")
            assert not values.get(f"{DISK}failures")
            assert values[f"{DISK}bytes"] <= BOUND_BYTES
            daemon.check_bound()


def run_life(
    daemon: Daemon, client: Client, kill: Kill, counts: Counter[str], begun: dict[Path, int]
) -> None:
    """Start a daemon, work until it is killed, and add to `begun` the files it did not finish."""
    if daemon.start(kill):
        client.work()
        counts[f"kills by {kill.kind}" if daemon.is_dead else "kills after all steps"] += 1
    else:
        counts["kills while starting"] += 1
    daemon.kill()
    counts["kills"] += 1
    begun |= daemon.begun_files()


def run(seed: int, options: Options) -> Counter[str]:
    """Kill daemons until KILLS of them have died. Raises AssertionError on the first lie."""
    rng = random.Random(seed)
    counts: Counter[str] = Counter()
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="hybridkv-kill-"))
        daemon = Daemon(Path(directory), rng.random() < 0.5)
        stack.callback(daemon.close)
        client = Client(daemon, random.Random(rng.random()), counts)
        while counts["kills"] < KILLS:
            begun: dict[Path, int] = {}
            run_life(daemon, client, draw_kill(rng, daemon.has_directory), counts, begun)
            while rng.random() < 0.3:
                run_life(daemon, client, draw_early_kill(rng, daemon.has_directory), counts, begun)
            counts["files begun"] += len(begun)
            if daemon.has_directory and rng.random() < 0.5:
                counts["memory lost"] += 1
                daemon.lose_memory()
                client.stray.clear()
            if daemon.has_directory and rng.random() < 0.2:
                counts["names lost"] += 1
                daemon.lose_name()
            assert daemon.start()
            check(daemon, client, begun)
            daemon.kill()
        files = object_files(daemon.root)
        counts["files"] = len(files)
        counts["files encoded"] = sum(is_encoded(path.read_bytes()) for path in files)
        counts["seeds with a directory"] = daemon.has_directory
    assert counts["objects"], "no object was found again"
    return counts


PROGRAM = Program("tests.fault.kills", lambda: contextlib.nullcontext(run))

if __name__ == "__main__":
    sys.exit(main(PROGRAM, __doc__))
