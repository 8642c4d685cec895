"""The real daemon, killed with -9 at any line of store, commit, evict and restart.

`python -m tests.fault.killpoints --seeds A:B` runs it, with KILLS of them in each seed. A client
with a small arena stores, looks up and evicts until the daemon dies at the drawn line of the code
that changes the arena. The next daemon may be killed while it takes the arena over, as often as
drawn. Then every object that a lookup finds must hold exactly the bytes that were written for its
name, whatever a living writer still writes.
"""

import contextlib
import hashlib
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from hybridkv.client.control import ControlClient, DaemonUnreachableError
from hybridkv.core.errors import HybridKVError
from hybridkv.core.geometry import Geometry, Group, GroupKind
from hybridkv.core.keys import HASH_BYTES
from hybridkv.core.packed import pack_u64, unpack_u64
from hybridkv.daemon.filesystem import stale_arenas
from hybridkv.lab.daemon_process import ending_with_parent
from hybridkv.shm.arena import Arena, attach_arena
from hybridkv.shm.slots import payload_offset
from hybridkv.wire.messages import (
    PROTOCOL_VERSION,
    Commit,
    Drained,
    Found,
    Free,
    Hello,
    Lookup,
    Release,
    ReportCorrupt,
    Request,
    Reserve,
    Reserved,
    geometry_to_wire,
)
from tests.fault.killing import killing
from tests.seeds import main
from tests.waiting import DEADLINE_SECONDS

KILLS = 10
GEOMETRY = Geometry(
    tuple(Group(gid, GroupKind.FULL, 128, (size,)) for gid, size in enumerate((3000, 5000, 9000))),
    128,
    128,
    128,
)
"""Slots of one, two and three pages."""
SIZES = [group.block_bytes for group in GEOMETRY.groups]
NAMES = 12
RAM = "512KiB"
LINES_MAX = 15000
"""A restart takes some 2,000; the rest is a client's work."""
SESSION = Hello(
    1, PROTOCOL_VERSION, "engine", "killed", b"k" * HASH_BYTES, geometry_to_wire(GEOMETRY)
)
WORKER = Hello(1, PROTOCOL_VERSION, "worker", "killed")

_DAEMON = """
import os, signal, sys
left = int(sys.argv.pop(1))
TRACED = (
    *("store/store.py", "store/extents.py", "store/index.py", "store/eviction.py"),
    *("shm/trailer.py", "shm/slots.py", "daemon/handlers.py"),
)

def line(frame, event, arg):
    global left
    if event == "line":
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
    return line

from hybridkv.cli.main import main
if left:
    sys.settrace(
        lambda frame, event, arg: line if frame.f_code.co_filename.endswith(TRACED) else None
    )
serve = ["serve", "--metrics-port", "-1", "--salt-quota", "64KiB"]
sys.exit(main([*serve, "--ram", sys.argv[2], "--socket", sys.argv[1]]))
"""


class Killed(Exception):  # not an error of anybody
    """The daemon is gone."""


class Daemon:
    """One daemon at a time, which kills itself at the given line."""

    def __init__(self, socket_path: str) -> None:
        self.socket_path = socket_path
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, line: int) -> bool:
        """Whether it serves; False where it was killed before that. line 0: it is not killed."""
        command = [sys.executable, "-c", _DAEMON, str(line), self.socket_path, RAM]
        self.process = subprocess.Popen(ending_with_parent(command), stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + DEADLINE_SECONDS
        while time.monotonic() < deadline:
            with contextlib.suppress(DaemonUnreachableError), ControlClient(self.socket_path, 0.2):
                return True
            if self.process.poll() is not None:
                assert self.process.returncode == -signal.SIGKILL, (
                    f"the daemon ended with {self.process.returncode}"
                )
                return False
        raise AssertionError("the daemon does not answer")

    def end(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()


def name(number: int) -> bytes:
    return bytes([number]) * HASH_BYTES


def content(group: int, number: int) -> bytes:
    """What the object of a name holds."""
    stream = hashlib.shake_128(bytes([group, number]))
    return stream.digest(SIZES[group])


class Client:
    """An engine and its worker in one process; it keeps its write slots over restarts."""

    def __init__(self, rng: random.Random, counts: Counter[str]) -> None:
        self._rng = rng
        self._counts = counts
        self.stray: list[tuple[int, int]] = []
        """(offset, part bytes) of write slots of earlier lives."""
        self._leases = 0

    def work(self, socket_path: str) -> None:
        """Random requests until the daemon is gone."""
        try:
            with (
                ControlClient(socket_path, hello=WORKER) as worker,
                ControlClient(socket_path, hello=SESSION) as engine,
            ):
                arena = attach_arena(Path(engine.welcome.arena_path), engine.welcome.arena_bytes)
                slots: list[tuple[int, int, int]] = []
                try:
                    while True:
                        self._one(engine, worker, arena, slots)
                finally:
                    self.stray += [(offset, SIZES[group]) for offset, _, group in slots]
                    arena.close()
        except DaemonUnreachableError as error:
            raise Killed from error

    def _one(
        self,
        engine: ControlClient,
        worker: ControlClient,
        arena: Arena,
        slots: list[tuple[int, int, int]],
    ) -> None:
        rng = self._rng
        what = rng.choices(
            ("want", "commit", "lookup", "abandon", "condemn", "clear"), (4, 8, 4, 1, 1, 0.2)
        )[0]
        self._counts[what] += 1
        if what == "want":
            group = rng.randrange(len(SIZES))
            granted = _call(engine, Reserve(2, SIZES[group], 1, rng.randrange(1, 9)))
            assert isinstance(granted, Reserved)
            refs = zip(unpack_u64(granted.offsets), unpack_u64(granted.generations), strict=True)
            slots += [(*ref, group) for ref in refs]
        elif what in ("commit", "abandon") and slots:
            taken = [
                slots.pop(rng.randrange(len(slots)))
                for _ in range(min(len(slots), rng.randrange(1, 6)))
            ]
            offsets, generations = (
                pack_u64([slot[0] for slot in taken]),
                pack_u64([slot[1] for slot in taken]),
            )
            if what == "abandon":
                engine.tell(Free(offsets, generations))
                return
            numbers = [rng.randrange(NAMES) for _ in taken]
            for (offset, _, group), number in zip(taken, numbers, strict=True):
                _write(arena, offset, content(group, number))
            groups = pack_u64([group for _, _, group in taken])
            names = b"".join(map(name, numbers))
            parents = b"".join(map(name, (rng.randrange(NAMES) for _ in numbers)))
            tenants = pack_u64([rng.randrange(3) for _ in numbers])
            engine.tell(
                Commit(
                    offsets,
                    generations,
                    groups,
                    names,
                    0,
                    parents,
                    rng.randbytes(len(numbers)),
                    tenants,
                )
            )
        elif what == "lookup":
            self._leases += 1
            found = _call(engine, Lookup(3, self._leases, b"".join(map(name, range(NAMES)))))
            assert isinstance(found, Found)
            if found.chunks and rng.random() < 0.3:
                engine.tell(ReportCorrupt(found.offsets[:8], found.generations[:8]))
            if rng.random() < 0.8:
                engine.tell(Release(self._leases))
        elif what == "clear" and rng.random() < 0.2:
            engine.clear()


def check(socket_path: str, client: Client, counts: Counter[str]) -> None:
    """Every object is exact while stray writers write; their slots come back when they say so."""
    session = Hello(
        1, PROTOCOL_VERSION, "engine", "killed", SESSION.namespace, SESSION.geometry, session=10
    )
    with ControlClient(socket_path, hello=session) as engine:
        arena = attach_arena(Path(engine.welcome.arena_path), engine.welcome.arena_bytes)
        try:
            for number in range(NAMES):
                _store(engine, arena, number)
            for offset, size in client.stray:
                _write(arena, offset, b"\xee" * size)
            found = 0
            for number in range(NAMES):
                reply = _call(engine, Lookup(3, 1000 + number, name(number)))
                assert isinstance(reply, Found)
                for group, offset in _objects(reply):
                    start = offset + payload_offset(1)
                    held = bytes(arena.memory[start : start + SIZES[group]])
                    assert held == content(group, number), (
                        f"object {number} of group {group} is wrong"
                    )
                    found += 1
                engine.tell(Release(1000 + number))
            counts["objects"] += found
            with ControlClient(socket_path, hello=WORKER) as worker:
                counts["held"] += engine.stats().values["bytes_held"] > 0
                worker.tell(Drained(11))
                assert worker.stats().values["bytes_held"] == 0
            values = engine.stats().values
            assert values["bytes_writing"] == 0
            assert values["bytes_committed"] <= values["bytes_reserved"] <= values["bytes_arena"]
        finally:
            client.stray.clear()
            arena.close()


def _store(engine: ControlClient, arena: Arena, number: int) -> None:
    """Every object of a name, where there are slots for it."""
    for group, size in enumerate(SIZES):
        granted = _call(engine, Reserve(2, size, 1, 1))
        assert isinstance(granted, Reserved)
        for offset in unpack_u64(granted.offsets):
            _write(arena, offset, content(group, number))
            engine.tell(
                Commit(granted.offsets, granted.generations, pack_u64([group]), name(number))
            )


def _objects(found: Found) -> Iterator[tuple[int, int]]:
    """(group, offset) of a hit of one chunk, which has one object of every group."""
    if found.chunks:
        yield from enumerate(unpack_u64(found.offsets))


def _write(arena: Arena, offset: int, payload: bytes) -> None:
    start = offset + payload_offset(1)
    arena.memory[start : start + len(payload)] = payload


def _call(engine: ControlClient, request: Request) -> object:
    try:
        return engine.call(request)
    except DaemonUnreachableError:
        raise
    except HybridKVError as error:
        raise AssertionError(f"refused: {error}") from error


def run(seed: int, directory: Path) -> Counter[str]:
    """Kill daemons until KILLS of them died; raises AssertionError on the first lie."""
    rng = random.Random(seed)
    counts: Counter[str] = Counter()
    socket_path = str(directory / "killed.sock")
    daemon = Daemon(socket_path)
    client = Client(rng, counts)
    try:
        while counts["kills"] < KILLS:
            while not daemon.start(rng.randrange(1, LINES_MAX)):
                counts["kills"] += 1
                counts["kills while starting"] += 1
            with contextlib.suppress(Killed):
                client.work(socket_path)
            daemon.end()
            counts["kills"] += 1
            while rng.random() < 0.3 and not daemon.start(rng.randrange(1, 2500)):
                counts["kills"] += 1
                counts["kills while starting"] += 1
            daemon.end()
            assert daemon.start(0)
            check(socket_path, client, counts)
            daemon.end()
    finally:
        daemon.end()
        for arena in stale_arenas(Path(socket_path)):
            arena.unlink(missing_ok=True)
    assert counts["objects"], "no object was found again"
    return counts


PROGRAM = killing("tests.fault.killpoints", run)

if __name__ == "__main__":
    sys.exit(main(PROGRAM, __doc__))
