"""Clients that do not read, finish or pause, or are stopped: others are answered in time."""

import contextlib
import os
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hybridkv.client.control import ControlClient
from hybridkv.core.packed import pack_u64
from hybridkv.daemon.clients import SEND_QUEUE_BYTES_MAX
from hybridkv.lab.daemon_process import DaemonProcess
from hybridkv.shm.slots import slot_bytes
from hybridkv.wire.codec import encode
from hybridkv.wire.messages import (
    CHUNKS_MAX,
    MESSAGE_BYTES_MAX,
    Commit,
    Found,
    Lookup,
    Release,
    Reserve,
    Reserved,
    Stats,
)
from tests.programs.daemon.holder import HASHES, OBJECTS, PART, SLOTS, engine_hello
from tests.waiting import DEADLINE_SECONDS

pytestmark = pytest.mark.soak

SLOWEST_SECONDS = 5.0
"""The longest lookup on a busy machine. Alone it takes about a tenth of a millisecond."""
USUAL_SECONDS = 1.0
"""A bound of the median, which does not hang on what else the machine does."""
LOOKUPS = 40
SLACK_KB = 24 << 10


class Other:
    """An engine that has stored something, and looks it up again and again."""

    def __init__(self, engine: ControlClient) -> None:
        self._engine = engine
        self._leases = 0
        granted = engine.call(Reserve(2, PART, 1, OBJECTS))
        assert isinstance(granted, Reserved)
        engine.tell(Commit(granted.slots, pack_u64([0] * OBJECTS), HASHES))
        self.look_up()

    def look_up(self) -> float:
        """Returns the seconds that a hit took."""
        self._leases += 1
        started = time.monotonic()
        found = self._engine.call(Lookup(3, self._leases, HASHES))
        seconds = time.monotonic() - started
        assert isinstance(found, Found)
        assert found.chunks == OBJECTS
        self._engine.tell(Release(self._leases))
        return seconds

    def slowest(self) -> float:
        """Returns the longest of LOOKUPS lookups, in seconds."""
        took = [self.look_up() for _ in range(LOOKUPS)]
        assert statistics.median(took) < USUAL_SECONDS
        return max(took)


@pytest.fixture
def bystander(daemon: DaemonProcess) -> Iterator[Other]:
    deadline = time.monotonic() + DEADLINE_SECONDS
    with ControlClient(
        daemon.socket_path, timeout_seconds=DEADLINE_SECONDS, hello=engine_hello("other")
    ) as engine:
        reserved = 0
        while reserved < engine.welcome.slots_bytes:
            assert time.monotonic() < deadline
            granted = engine.call(Reserve(2, PART, 1, 0))
            assert isinstance(granted, Reserved)
            reserved = granted.reserved_bytes
        yield Other(engine)


def resident_kb(daemon: DaemonProcess, what: str) -> int:
    assert daemon.process is not None
    lines = Path(f"/proc/{daemon.process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(what))


@contextlib.contextmanager
def flood(daemon: DaemonProcess, message: bytes, reads: bool) -> Iterator[Callable[[], bool]]:
    """Sends one message over and over from a thread. Gives whether the daemon still serves it."""
    client = socket.socket(socket.AF_UNIX)
    client.connect(daemon.socket_path)
    client.sendall(encode(engine_hello("flood")))
    client.settimeout(0.1)
    ended = threading.Event()
    cut = threading.Event()

    def say() -> None:
        block = message * max(1, (1 << 20) // len(message))
        at = 0
        while not ended.is_set():
            try:
                at = (at + client.send(block[at:])) % len(block)
            except TimeoutError:
                continue
            except OSError:
                cut.set()
                return

    def read() -> None:
        while not ended.is_set():
            with contextlib.suppress(TimeoutError, ConnectionError):
                client.recv(1 << 20)

    threads = [threading.Thread(target=work) for work in ((say, read) if reads else (say,))]
    for thread in threads:
        thread.start()
    try:
        yield lambda: not cut.is_set()
    finally:
        ended.set()
        for thread in threads:
            thread.join(DEADLINE_SECONDS)
        client.close()


def test_a_client_that_never_reads_is_cut_off_at_its_bound(
    daemon: DaemonProcess, bystander: Other
) -> None:
    slowest = 0.0
    before = resident_kb(daemon, "VmRSS:")
    deadline = time.monotonic() + DEADLINE_SECONDS
    with flood(daemon, encode(Stats(7)), reads=False) as served:
        while served():
            assert time.monotonic() < deadline, "its queue has no end"
            slowest = max(slowest, bystander.look_up())
    most = resident_kb(daemon, "VmHWM:")
    print(f"slowest lookup {slowest * 1e3:.1f} ms, resident {before} kB, at most {most} kB")
    assert slowest < SLOWEST_SECONDS
    assert most < before + (SEND_QUEUE_BYTES_MAX >> 10) + SLACK_KB


@pytest.mark.parametrize(
    "message",
    [
        Lookup(7, 1, HASHES),
        Lookup(7, 1, bytes(32 * CHUNKS_MAX)),
        Stats(7),
        Release(1),
        Reserve(7, PART, 1, 100),
    ],
)
def test_a_client_that_never_pauses_delays_nobody(
    daemon: DaemonProcess, bystander: Other, message: Lookup | Stats | Release | Reserve
) -> None:
    with flood(daemon, encode(message), reads=True) as served:
        slowest = bystander.slowest()
        assert served()
    print(f"{type(message).__name__}: slowest lookup {slowest * 1e3:.1f} ms")
    assert slowest < SLOWEST_SECONDS


def test_half_frames_that_are_never_finished_delay_nobody(
    daemon: DaemonProcess, bystander: Other
) -> None:
    """What is kept of them is what was sent, and at most one frame of each."""
    clients = 8
    half = encode(engine_hello("half")) + MESSAGE_BYTES_MAX.to_bytes(4, "little") + bytes(1 << 20)
    before = resident_kb(daemon, "VmRSS:")
    with contextlib.ExitStack() as stack:
        for _ in range(clients):
            client = stack.enter_context(socket.socket(socket.AF_UNIX))
            client.settimeout(DEADLINE_SECONDS)
            client.connect(daemon.socket_path)
            client.sendall(half)
        slowest = bystander.slowest()
        assert resident_kb(daemon, "VmHWM:") < before + clients * (len(half) >> 10) + SLACK_KB
    print(f"slowest lookup {slowest * 1e3:.1f} ms")
    assert slowest < SLOWEST_SECONDS


def test_a_frame_over_the_limit_ends_its_connection(
    daemon: DaemonProcess, bystander: Other
) -> None:
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(DEADLINE_SECONDS)
        client.connect(daemon.socket_path)
        client.sendall((MESSAGE_BYTES_MAX + 1).to_bytes(4, "little"))
        while client.recv(1 << 16):
            pass
    assert bystander.look_up() < SLOWEST_SECONDS


def test_a_stopped_client_keeps_its_leases_and_delays_nobody(
    daemon: DaemonProcess, bystander: Other
) -> None:
    """A stopped process is not a dead one: it may still copy when it goes on."""
    command = [sys.executable, "-m", "tests.programs.daemon.holder", daemon.socket_path, "stopped"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == b"held\n"
            holder.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, holder.pid, os.WSTOPPED | os.WNOWAIT)
            assert bystander.slowest() < SLOWEST_SECONDS
            with ControlClient(daemon.socket_path) as control:
                held = control.stats().values
                assert control.clear_objects() == OBJECTS
                assert (held["sessions"], held["leases"]) == (2, 2)
                assert held["bytes_writing"] == SLOTS * slot_bytes(PART, 1)
                kept = control.stats().values
                assert (kept["objects"], kept["leases"]) == (OBJECTS, 2), (
                    "what it reads stays where it is"
                )
                holder.kill()
                deadline = time.monotonic() + DEADLINE_SECONDS
                while (left := control.stats().values)["sessions"] > 1:
                    assert time.monotonic() < deadline
                assert (left["objects"], left["leases"], left["bytes_writing"]) == (0, 0, 0)
        finally:
            holder.kill()
