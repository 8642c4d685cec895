"""Clients that crash by the thousand leave nothing behind in a real daemon."""

import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest

from hybridkv.client.control import ControlClient
from hybridkv.core.packed import SLOT_BYTES, pack_u64
from hybridkv.lab.daemon_process import DaemonProcess
from hybridkv.shm.slots import slot_bytes
from hybridkv.wire.codec import encode
from hybridkv.wire.messages import (
    GREETING_NEVER,
    PROTOCOL_VERSION,
    Commit,
    Drained,
    Hello,
    Lookup,
    Reserve,
    Reserved,
)
from tests.programs.daemon.holder import HASHES, OBJECTS, PART, SLOTS, engine_hello, take
from tests.waiting import DEADLINE_SECONDS

pytestmark = pytest.mark.soak

WARM_UP = 300
CYCLES = 1000
PROCESSES = 32
AT_ONCE = 4
MEMORY_TOLERANCE_KB = 512
"""A leak of half a kilobyte per crash is seen."""
KEPT = (
    "sessions",
    "leases",
    "bytes_writing",
    "bytes_committed",
    "objects",
    "connections",
    "evicted",
)


class Footprint(NamedTuple):
    """The resources of the daemon."""

    memory_kb: int
    """Resident kilobytes without the arena."""
    descriptors: int


def footprint(daemon: DaemonProcess) -> Footprint:
    """Returns the resources of the daemon."""
    assert daemon.process is not None
    proc = Path(f"/proc/{daemon.process.pid}")
    lines = (line.split() for line in (proc / "status").read_text().splitlines())
    kilobytes = {words[0]: int(words[1]) for words in lines if words[0] in ("VmRSS:", "RssShmem:")}
    return Footprint(
        memory_kb=kilobytes["VmRSS:"] - kilobytes["RssShmem:"],
        descriptors=len(list((proc / "fd").iterdir())),
    )


def settled(control: ControlClient) -> dict[str, float]:
    """Wait until only `control` is connected, and return the daemon's values.

    The daemon notices the end of a client a little later.
    """
    deadline = time.monotonic() + DEADLINE_SECONDS
    while (values := control.stats().values)["connections"] > 1 or values["sessions"]:
        assert time.monotonic() < deadline
    return values


@pytest.fixture
def stocked(daemon: DaemonProcess) -> DaemonProcess:
    """A daemon that has some objects and has reserved all of its arena."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    with ControlClient(daemon.socket_path, hello=engine_hello("stock")) as engine:
        slots, reserved_bytes = b"", 0
        while reserved_bytes < engine.welcome.slots_bytes:
            assert time.monotonic() < deadline
            reply = engine.call(Reserve(2, PART, 1, OBJECTS - len(slots) // SLOT_BYTES))
            assert isinstance(reply, Reserved)
            slots += reply.slots
            reserved_bytes = reply.reserved_bytes
        engine.tell(Commit(slots, pack_u64([0] * OBJECTS), HASHES))
        assert engine.stats().values["objects"] == OBJECTS
    return daemon


def nothing_is_read(control: ControlClient) -> None:
    """Drop every object, which the daemon may do because no lease keeps one."""
    assert control.clear_objects() == OBJECTS
    values = control.stats().values
    assert (values["objects"], values["bytes_committed"]) == (0, 0)


def crash(socket_path: str, rng: random.Random, number: int) -> None:
    """Connect as an engine and its worker, take what there is, and die, mostly in mid-action."""
    name = f"e{number}"
    if rng.random() < 0.5:
        with (
            ControlClient(socket_path, hello=engine_hello(name)) as engine,
            ControlClient(socket_path, hello=Hello(1, PROTOCOL_VERSION, "worker", name)) as worker,
        ):
            take(engine)
            # This process lives on, and while its worker may copy nothing of the engine's ends.
            worker.tell(Drained(GREETING_NEVER))
        return
    hello = encode(engine_hello(name))
    message_bytes = hello + encode(Lookup(2, 1, HASHES)) + encode(Reserve(3, PART, 1, SLOTS))
    size = rng.choice((len(message_bytes), rng.randrange(len(message_bytes))))
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(DEADLINE_SECONDS)
        client.connect(socket_path)
        client.sendall(message_bytes[:size])
        if size >= len(hello) and rng.random() < 0.5:
            assert client.recv(rng.randrange(1, 100))


def test_a_thousand_crashes_leave_nothing_behind(
    stocked: DaemonProcess, rng: random.Random
) -> None:
    with ControlClient(stocked.socket_path) as control:
        for number in range(WARM_UP):
            crash(stocked.socket_path, rng, number)
        before, footprint_before = settled(control), footprint(stocked)
        for number in range(CYCLES):
            crash(stocked.socket_path, rng, WARM_UP + number)
        after, footprint_after = settled(control), footprint(stocked)
        nothing_is_read(control)
    memory_kb = footprint_before.memory_kb
    print(f"resident {memory_kb} kB, after {CYCLES} crashes {footprint_after.memory_kb} kB")
    assert {name: after[name] for name in KEPT} == {name: before[name] for name in KEPT}
    assert after["bytes_writing"] == after["leases"] == after["sessions"] == 0
    assert footprint_after.descriptors == footprint_before.descriptors
    assert footprint_after.memory_kb - memory_kb <= MEMORY_TOLERANCE_KB
    assert after["slots_granted"] - before["slots_granted"] >= SLOTS * CYCLES // 3, (
        "many crashes held slots"
    )
    assert not [name for name in after if name.startswith("refused_")]


def test_processes_killed_with_leases_and_slots_leave_nothing_behind(
    stocked: DaemonProcess,
) -> None:
    with ControlClient(stocked.socket_path) as control:
        before, footprint_before = settled(control), footprint(stocked)
        for batch in range(0, PROCESSES, AT_ONCE):
            holders = [
                subprocess.Popen(
                    [
                        sys.executable,
                        "-m",
                        "tests.programs.daemon.holder",
                        stocked.socket_path,
                        f"h{number}",
                    ],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                )
                for number in range(batch, batch + AT_ONCE)
            ]
            for holder in holders:
                assert holder.stdout is not None
                assert holder.stdout.readline() == b"held\n"
            held = control.stats().values
            assert (held["sessions"], held["leases"]) == (AT_ONCE, 2 * AT_ONCE)
            assert held["bytes_writing"] == AT_ONCE * SLOTS * slot_bytes(PART, 1)
            for holder in holders:
                os.kill(holder.pid, signal.SIGKILL)
            for holder in holders:
                holder.communicate(timeout=DEADLINE_SECONDS)
            after = settled(control)
            assert {name: after[name] for name in KEPT} == {name: before[name] for name in KEPT}
        assert footprint(stocked).descriptors == footprint_before.descriptors
        nothing_is_read(control)
