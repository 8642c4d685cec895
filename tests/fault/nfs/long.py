"""Two daemons for long over NFS, each with two clients that prove every byte.

The server is away again and again and loses all handles once, daemons are killed, and one of them
has a clock that is off by minutes. test_nfs.py runs it on the machine that has NFS.
"""

import contextlib
import json
import os
import random
import subprocess
import time
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from typing import IO

import pytest

from hybridkv.client.control import DaemonUnreachableError
from hybridkv.client.start_daemon import daemon_command
from hybridkv.lab.daemon_process import DaemonProcess, ending_with_parent
from hybridkv.tiers.disk.files import parse_name
from tests.fault.nfs.inside import bytes_held, close_all, open_tier
from tests.fault.nfs.nodes import LEASE_SECONDS, MOUNT, MOUNTS, Client, Server
from tests.fault.test_tier_faults import TIMEOUT, forget, in_time, value
from tests.load import Asked, Load
from tests.unit.daemon.tierclient import Client as Engine
from tests.waiting import until

MINUTES = float(os.environ.get("NFS_MINUTES", "4"))
RESTART_SECONDS, AWAY_SECONDS = 60.0, 5.0
"""How often the server restarts, and for how long it is away."""
QUIET_SECONDS = 2.0 * LEASE_SECONDS  # After which all clients have found the server again.
LIFE_SECONDS = 97.0  # How long a daemon lives until it is killed.
CLOCKS_AHEAD = (0.0, 600.0)  # Seconds by which the clock of each daemon is ahead.
PROMPTS, CHUNKS, ENGINES = 200, 3, 2
BOUND_BYTES, RAM = 8 << 20, "4MiB"
"""The prompts take 24 MB, so objects are removed and written all the time."""
WAIT_MS = 2000
CLOCK = """
import runpy, sys, time
now, ahead = time.time, float(sys.argv.pop(1))
time.time = lambda: now() + ahead
runpy.run_module("hybridkv", run_name="__main__", alter_sys=True)
"""


class Daemon(DaemonProcess):
    """A daemon with a clock that is ahead."""

    def __init__(self, writer: str, directory: Path, ahead_seconds: float) -> None:
        url = f"disk://{MOUNT}/tier?bytes={BOUND_BYTES}&{TIMEOUT}"
        super().__init__(str(directory / "d.sock"), RAM, options=["--node", writer, "--tier", url])
        self._ahead_seconds = ahead_seconds

    def _begin(self, log: IO[bytes]) -> "subprocess.Popen[bytes]":
        python, _, _, *words = daemon_command(self.socket_path, self._options)
        command = [python, "-c", CLOCK, str(self._ahead_seconds), *words]
        return subprocess.Popen(ending_with_parent(command), stderr=log)


def ask(socket_path: str, seed: str) -> Generator[Asked, None, None]:
    """Look up prompts without an end, prove their bytes, and store those that are not hit whole."""
    rng = random.Random(seed)
    while True:
        # A daemon that was killed serves again soon.
        with contextlib.suppress(DaemonUnreachableError), Engine(socket_path, name=seed) as engine:
            while True:
                prompt = rng.randrange(PROMPTS)
                found, seconds = in_time(engine.look_up(prompt, CHUNKS, WAIT_MS), WAIT_MS)
                yield Asked(found.chunks / CHUNKS, seconds, found.why)
                if found.chunks < CHUNKS:
                    engine.store(prompt, CHUNKS)


def work(
    writer: str, directory: Path, seconds: float, ahead_seconds: float, seed: int
) -> dict[str, float]:
    """Load a daemon, and kill it again and again. Returns the counts of what happened."""
    directory.mkdir()
    daemon = Daemon(writer, directory, ahead_seconds)
    ends_at, sums = time.monotonic() + seconds, Counter[str]()
    workers = [ask(daemon.socket_path, f"{seed} {writer} {number}") for number in range(ENGINES)]
    with daemon, Load(workers) as load:
        while time.monotonic() < ends_at and not load.faults:
            dies_at = min(time.monotonic() + LIFE_SECONDS, ends_at)
            while time.monotonic() < dies_at and not load.faults:
                time.sleep(1)
            for name in ("objects_damaged", "objects_read", "objects_written", "failures"):
                sums[name] += int(value(daemon, name))
            if time.monotonic() < ends_at:
                forget(daemon)
                daemon.start()
                sums["deaths"] += 1
        until(lambda: bool(load.faults) or value(daemon, "is_open") == 1, "the tier is open again")
    load.raise_faults()
    return {
        **sums,
        "lookups": load.lookups[load.phase],
        "prompts hit": round(load.hit_shares[load.phase]),
        "longest_seconds": round(load.longest_seconds[load.phase], 3),
    }


def held_bytes(writer: str) -> int:
    """Open the tier. Returns the bytes that it takes its files to have."""
    open_tier(writer, str(BOUND_BYTES))
    held = bytes_held(writer)
    close_all()
    return held


def own_bytes(served: Path, writer: str) -> int:
    """Returns the bytes of a writer's records, as the server has them."""
    taken = 0
    for path in served.glob(f"tier/objects/{writer}/*/**/*"):
        with contextlib.suppress(FileNotFoundError):
            if path.is_file() and (parse_name(path.name) or path.parent.parent.name == "tmp"):
                taken += path.stat().st_blocks * 512
    return taken


@pytest.mark.timeout(0)
def test_two_daemons_for_long(tmp_path: Path) -> None:
    server = Server()
    for mount, options in MOUNTS.items():
        with Client(1, options) as first, Client(2, options) as second:
            load_for_long(server, [first, second], tmp_path / mount)
        server.empty()


def load_for_long(server: Server, clients: list[Client], place: Path) -> None:
    place.mkdir()
    seconds, seed = 60 * MINUTES / len(MOUNTS), random.randrange(1 << 30)
    started, back_at, most, restarts = time.monotonic(), 0.0, 0, 0
    for number, (client, ahead_seconds) in enumerate(zip(clients, CLOCKS_AHEAD, strict=True)):
        writer = f"node{number}"
        client.begin(work, writer, place / writer, seconds, ahead_seconds, seed)
    while (passed := time.monotonic() - started) < seconds:
        time.sleep(2)
        # A process whose call waits for the server would be stopped in part, and for long.
        is_calm = passed > back_at + QUIET_SECONDS
        for number, client in enumerate(clients if is_calm else ()):
            with client.stopped():
                taken = own_bytes(server.path, f"node{number}")
            most = max(most, taken)
            assert taken <= BOUND_BYTES
        if passed > RESTART_SECONDS * (restarts + 1):
            restarts += 1
            if restarts == int(seconds / RESTART_SECONDS / 2):
                server.restore()
            with server.stopped():
                time.sleep(AWAY_SECONDS)
            back_at = time.monotonic() - started
    counts = [client.result() for client in clients]
    for number, client in enumerate(clients):
        held = client.call(held_bytes, f"node{number}")
        assert own_bytes(server.path, f"node{number}") <= held
    figures = {"seed": seed, "most_bytes": most, "restarts": restarts, "counts": counts}
    print(f"\n{place.name} {json.dumps(figures)}", flush=True)
    for each in counts:
        assert each["prompts hit"] > seconds / CHUNKS
        assert not each["objects_damaged"]
