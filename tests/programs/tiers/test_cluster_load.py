"""Two daemons with four clients over a Valkey cluster whose slots move and whose primary dies.

The clients do over a daemon's socket what engines do, and prove every byte.
"""

import contextlib
import itertools
import random
import threading
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from hybridkv.lab.daemon_process import DaemonProcess
from hybridkv.tiers.valkey.slots import SLOTS
from tests.forked_daemon import ForkedDaemon
from tests.programs.tiers.cluster import ValkeyCluster
from tests.unit.daemon.tierclient import Client, stats
from tests.waiting import DEADLINE_SECONDS, until

PROMPTS, CHUNKS = 60, 8
CLIENTS = 4
RAM = "4MiB"  # A fraction of the prompts, so that most lookups read the tier.
WAIT_MS = 2000
SLACK_SECONDS = 5.0
LOOKUPS = 60  # In each phase, at least.
MOVES = 150


class Load:
    """Clients that look up prompts, each in a thread of its own, until it is closed."""

    def __init__(self, daemons: list[DaemonProcess]) -> None:
        self.phase = "well"
        self.lookups: Counter[str] = Counter()
        self.chunks: Counter[str] = Counter()
        self.longest_seconds: defaultdict[str, float] = defaultdict(float)
        self.reasons: Counter[str] = Counter()  # For which a hit was shorter than its prompt.
        self.faults: list[BaseException] = []
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._stored = itertools.count(PROMPTS)
        self._threads = [
            threading.Thread(target=self._work, args=(number, daemons[number % len(daemons)]))
            for number in range(CLIENTS)
        ]

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(DEADLINE_SECONDS)

    def wait(self, phase: str) -> None:
        """Begin a phase, and wait until it has LOOKUPS."""
        self.phase = phase
        until(lambda: bool(self.faults) or self.lookups[phase] >= LOOKUPS, f"lookups while {phase}")
        for fault in self.faults:
            raise fault

    def _work(self, number: int, daemon: DaemonProcess) -> None:
        rng = random.Random(number)
        try:
            with Client(daemon.socket_path, name=f"client{number}") as client:
                while not self._over.is_set():
                    phase = self.phase
                    if rng.random() < 0.1:
                        client.store(next(self._stored), 2)
                    answer = client.look_up(rng.randrange(PROMPTS), CHUNKS, WAIT_MS)
                    with self._lock:
                        self.lookups[phase] += 1
                        self.chunks[phase] += answer.found.chunks
                        if answer.found.chunks < CHUNKS:
                            self.reasons[f"{phase} ({answer.found.why or 'no reason'})"] += 1
                        longest = max(self.longest_seconds[phase], answer.seconds)
                        self.longest_seconds[phase] = longest
        except BaseException as fault:  # noqa: BLE001  # raised by the test's own thread
            self.faults.append(fault)


def is_written(daemon: DaemonProcess) -> bool:
    """Whether the tier has every object that was stored."""
    values = stats(daemon.socket_path)
    written = values.get("tier_valkey_objects_written", 0)
    return not values["writes_waiting"] and written >= values["objects_stored"]


def hit_chunks(daemon: DaemonProcess) -> int:
    with Client(daemon.socket_path, name="reader") as client:
        return sum(client.look_up(prompt, CHUNKS, 20_000).found.chunks for prompt in range(PROMPTS))


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_a_cluster_that_loses_a_primary_and_moves_slots_under_load(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        cluster = stack.enter_context(ValkeyCluster(tmp_path / "cluster", replicas=1))
        primary, second, third = cluster.primaries
        (replica,) = cluster.replicas
        hosts = f"127.0.0.1:{primary.port},127.0.0.1:{second.port}"
        daemons: list[DaemonProcess] = []
        for name in ("first", "second"):
            (tmp_path / name).mkdir(mode=0o700)
            options = ["--node", name, "--tier", f"valkey://{hosts}/0?timeout=1"]
            started = ForkedDaemon(str(tmp_path / name / "daemon.sock"), RAM, options=options)
            daemons.append(stack.enter_context(started))
        with Client(daemons[0].socket_path, name="writer") as client:
            for prompt in range(PROMPTS):
                client.store(prompt, CHUNKS)
                until(lambda: is_written(daemons[0]), "everything is written")
        until(lambda: replica.call("DBSIZE") == primary.call("DBSIZE"), "the replica has it all")
        moved = [slot for slot in range(SLOTS) if cluster.owner(slot) == 1][:MOVES]
        with Load(daemons) as load:
            load.wait("well")
            load.phase = "slots move"
            for slot in moved:
                cluster.move_slot(slot, second, third)
            load.wait("slots move")
            load.phase = "a primary is dead"
            primary.kill()
            # It is elected by the primaries that are left.
            until(lambda: replica.call("ROLE")[0] == b"master", "the replica takes over")
            load.wait("the replica has taken over")
            load.phase = "slots move back"
            for slot in moved:
                cluster.move_slot(slot, third, second)
            load.wait("slots move back")
        for fault in load.faults:
            raise fault
        for phase, lookups in load.lookups.items():
            share = load.chunks[phase] / (lookups * CHUNKS)
            longest = load.longest_seconds[phase]
            print(f"{phase}: {lookups} lookups, {share:.1%} of chunks hit, longest {longest:.3f} s")
        for reason, count in load.reasons.items():
            print(f"{count} hits were short while {reason}")
        assert max(load.longest_seconds.values()) < WAIT_MS / 1e3 + SLACK_SECONDS
        for daemon in daemons:
            until(lambda: hit_chunks(daemon) == PROMPTS * CHUNKS, "hits come back")  # noqa: B023
            values = stats(daemon.socket_path)
            assert not values.get("tier_valkey_objects_damaged")
            assert not values.get("tier_valkey_objects_wrong_in_ram")
