"""The real daemon processes that the seeds of a process share, and the connector's clock."""

import os
import random
import select
import shutil
import signal
import time
from pathlib import Path
from typing import NamedTuple

from hybridkv.client.control import ControlClient
from hybridkv.core.keys import HASH_BYTES
from hybridkv.shm.arena import attach_arena
from hybridkv.shm.slots import checksum_offset, committed_slots, payload_offset
from hybridkv.tiers.disk.files import parse_name
from tests.forked_daemon import ForkedDaemon
from tests.waiting import DEADLINE_SECONDS, is_stopped, until

QUOTA_BYTES = 256 << 10
DISK_THROUGH = "disk://{directory}/through?bytes=4MiB"
DISK_BACK = "disk://{directory}/back?bytes=16MiB&write=back"


class DaemonOptions(NamedTuple):
    """The memory and the options of a daemon's command line."""

    ram: str
    options: tuple[str, ...] = ()


ARENAS = {
    "roomy": DaemonOptions("16MiB"),
    "tight": DaemonOptions("1MiB"),
    "shared": DaemonOptions("1MiB", ("--salt-quota", str(QUOTA_BYTES))),
    "deep": DaemonOptions("1MiB", ("--tier", DISK_THROUGH, "--tier", DISK_BACK)),
}
"""The daemons of the simulation, by the name of their arena."""


class ObjectName(NamedTuple):
    """A group and a chunk hash: what names an object under one identity."""

    gid: int
    chunk_hash: bytes


class SlotVersion(NamedTuple):
    """A slot as long as it holds the same object."""

    offset: int
    generation: int


class Clock:
    """Stands in for the module `time`. Only the simulation moves it."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        """Returns the simulated time, in seconds."""
        return self.now

    def perf_counter(self) -> float:
        """Returns the simulated time, in seconds."""
        return self.now

    def time_ns(self) -> int:
        """Returns the simulated time, in nanoseconds."""
        return round(self.now * 1e9)


class Node:
    """A daemon process that seeds kill, stop and clear, and whose arena they tamper with."""

    def __init__(self, directory: Path, arena: str, number: int = 0) -> None:
        """`number` is that of the node among those of an engine."""
        ram, options = ARENAS[arena]
        self.quota_bytes = QUOTA_BYTES if "--salt-quota" in options else None
        self.pattern = str(directory / f"{arena}-{{node}}.sock")
        """The path of the daemon's socket, with "{node}" in the place of `number`."""
        self._disks = directory / f"{arena}-{number}-disks"
        options = tuple(option.format(directory=self._disks) for option in options)
        self.is_deep = "--tier" in options
        """Whether the daemon has tiers below RAM. Then `kill` takes its arena away too."""
        self._daemon = ForkedDaemon(self.pattern.format(node=number), ram, options=options)
        self._control: ControlClient | None = None
        self.stopped = False
        self.spoilt: set[SlotVersion] = set()
        """Slots whose bytes were changed from outside."""

    @property
    def socket_path(self) -> str:
        """The path of the daemon's socket."""
        return self._daemon.socket_path

    @property
    def control(self) -> ControlClient:
        """A control connection. After a kill a new one is made."""
        if self._daemon.process is None:
            self._daemon.start()
        if self._control is None:
            self._control = ControlClient(self.socket_path, DEADLINE_SECONDS)
            self._control.__enter__()
            self._until("bytes_reserved", self._control.stats().values["bytes_arena"])
        return self._control

    def fresh(self) -> None:
        """Clear what earlier seeds left. Raises AssertionError where something is still held."""
        for name in ("sessions", "leases", "bytes_writing"):
            self._until(name, 0)
        if self.is_deep:
            self._until("lookups_waiting", 0)
            self._until("writes_waiting", 0)
            self._end()
            shutil.rmtree(self._disks)
        self.control.clear_objects()
        self._until("bytes_committed", 0)
        self.spoilt.clear()

    def kill(self) -> None:
        """End the daemon with -9 and start another, which takes over its arena or its tiers."""
        self.resume()
        self._end()
        self._daemon.start()
        assert self.control

    def _end(self) -> None:
        self._daemon.kill()
        if self.is_deep:
            self._daemon.__exit__()
        self._daemon.process = None
        if self._control is not None:
            self._control.__exit__()
            self._control = None

    def stop(self) -> None:
        """Stop the daemon with SIGSTOP, and return once the kernel has stopped it."""
        assert self._daemon.process is not None
        pid = self._daemon.process.pid
        os.kill(pid, signal.SIGSTOP)
        until(lambda: is_stopped(pid), "the stop of every thread")
        self.stopped = True

    def resume(self) -> None:
        """Let a stopped daemon go on."""
        if self.stopped:
            assert self._daemon.process is not None
            self._daemon.process.send_signal(signal.SIGCONT)
            self.stopped = False

    def on_disk(self, namespace: bytes) -> set[ObjectName]:
        """Returns the objects that the daemon's directories have under an identity."""
        names = (parse_name(path.name) for path in self._disks.rglob("*.*"))
        keys = [name.key for name in names if name is not None]
        return {
            ObjectName(
                gid=int.from_bytes(key[2 * HASH_BYTES :], "big"),
                chunk_hash=key[HASH_BYTES : 2 * HASH_BYTES],
            )
            for key in keys
            if key.startswith(namespace)
        }

    def flip(self, rng: random.Random, count: int) -> int:
        """Flip a bit of the payload, checksum or generation of up to `count` slots.

        Returns in how many committed slots there is a flipped bit.
        """
        welcome = self.control.welcome
        arena = attach_arena(Path(welcome.arena_path), welcome.arena_bytes)
        slots = list(committed_slots(arena.memory))
        chosen = rng.sample(slots, min(count, len(slots)))
        for offset, header in chosen:
            rank = rng.randrange(header.parts)
            payload = offset + payload_offset(header.parts) + rank * header.part_bytes
            at = rng.choice(
                (payload + rng.randrange(header.part_bytes), offset + checksum_offset(rank) + 3)
            )
            arena.memory[at] ^= 1 << rng.randrange(1, 8)
            self.spoilt.add(SlotVersion(offset, header.generation))
        arena.close()
        return len(chosen)

    def close(self) -> None:
        """End the daemon."""
        self.resume()
        if self._control is not None:
            self._control.__exit__()
        self._daemon.__exit__()

    def _until(self, name: str, wanted: float) -> None:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while (value := self.control.stats().values[name]) != wanted:
            assert time.monotonic() < deadline, f"the daemon's {name} stays at {value}"


def wait_readable(descriptors: list[int], deadline: float) -> None:
    """Return when a descriptor can be read. Raises AssertionError past the deadline."""
    left = deadline - time.monotonic()
    assert left > 0, "the daemon does not answer"
    select.select(descriptors, [], [], left)
