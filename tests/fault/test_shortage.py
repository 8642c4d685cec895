"""Clients that are served stay served when descriptors or connections run out."""

import contextlib
import dataclasses
import errno
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from hybridkv.client.control import ControlClient, DaemonUnreachableError
from hybridkv.core.packed import SLOT_BYTES
from hybridkv.core.sizes import parse_size
from hybridkv.daemon.filesystem import stale_arenas
from hybridkv.daemon.loop import RESERVE_AHEAD_BYTES, RESERVE_STEP_BYTES, DaemonServer, ServeOptions
from hybridkv.lab.daemon_process import DaemonProcess
from hybridkv.lab.daemon_process import engine_hello as bench_hello
from hybridkv.wire.codec import Frames, decode_reply
from hybridkv.wire.messages import PROTOCOL_VERSION, Error, Hello, Reserve, Reserved
from tests.programs.daemon.holder import GEOMETRY, PART, SLOTS, engine_hello
from tests.waiting import DEADLINE_SECONDS, until

BUSY_SHARE = 0.25
"""The most that an idle daemon takes of a processor. A loop that spins takes all of one."""
WATCHED_SECONDS = 1.0
CONNECTIONS = 3
WAITING = 4


def pid_of(daemon: DaemonProcess) -> int:
    assert daemon.process is not None
    return daemon.process.pid


def descriptors(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def busy_share(pid: int) -> float:
    """Returns the share of a processor that a process takes while nobody asks it anything."""

    def seconds() -> float:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")

    before, started = seconds(), time.monotonic()
    threading.Event().wait(WATCHED_SECONDS)
    return (seconds() - before) / (time.monotonic() - started)


@contextlib.contextmanager
def allowed(pid: int, extra_descriptors: int) -> Iterator[None]:
    """Let the process open so many descriptors besides those that it has."""
    soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (descriptors(pid) + extra_descriptors, hard))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))


def greeted(socket_path: str) -> bool:
    try:
        with ControlClient(socket_path, 0.5):
            return True
    except DaemonUnreachableError:
        return False


def last_word(client: socket.socket) -> Error:
    """The only reply there is, before the daemon closes."""
    client.settimeout(DEADLINE_SECONDS)
    received = b""
    while piece := client.recv(1 << 16):
        received += piece
    (reply,) = [decode_reply(body) for body in Frames().feed(received)]
    assert isinstance(reply, Error)
    return reply


@pytest.mark.soak
def test_without_descriptors_the_daemon_rests_and_serves_who_is_there(
    daemon: DaemonProcess,
) -> None:
    """Those who wait are heard as soon as a descriptor is free, and told what is wrong."""
    pid = pid_of(daemon)
    with contextlib.ExitStack() as stack, ControlClient(daemon.socket_path) as there:
        with ControlClient(daemon.socket_path):
            assert there.stats().values["connections"] == 2
            stack.enter_context(allowed(pid, 0))
            clients = [stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(WAITING)]
            for client in clients:
                client.connect(daemon.socket_path)
            share = busy_share(pid)
            assert there.stats().values["connections"] == 2, "and answers"
        for client in clients:
            assert last_word(client).code == "connections"
    assert greeted(daemon.socket_path), "everybody is served again"
    print(f"{share:.1%} of a processor")
    assert share < BUSY_SHARE


@pytest.mark.soak
def test_without_descriptors_metrics_rest_too(daemon: DaemonProcess) -> None:
    pid = pid_of(daemon)
    with ControlClient(daemon.socket_path) as there:
        url = there.stats().metrics_url
        port = int(url.rpartition(":")[2].partition("/")[0])
        with allowed(pid, 0), socket.create_connection(("127.0.0.1", port)):
            share = busy_share(pid)
            assert there.stats().values["connections"] == 1
    print(f"{share:.1%} of a processor")
    assert share < BUSY_SHARE
    with urllib.request.urlopen(url, timeout=DEADLINE_SECONDS) as answer:
        assert b"hybridkv_daemon_connections" in answer.read()


def test_a_process_that_cannot_be_watched_is_not_served(daemon: DaemonProcess) -> None:
    """Its slots would be freed with its connection, while it may still write into them."""
    pid = pid_of(daemon)
    with ControlClient(daemon.socket_path) as there:
        until(lambda: there.stats().values["connections"] == 1, "whoever awaited its start is gone")
        with allowed(pid, 1):
            code = (
                "import socket, sys; s = socket.socket(socket.AF_UNIX); "
                "s.connect(sys.argv[1]); s.settimeout(20)\n"
                "while piece := s.recv(65536): sys.stdout.buffer.write(piece)"
            )
            received = subprocess.run(
                [sys.executable, "-c", code, daemon.socket_path],
                capture_output=True,
                timeout=DEADLINE_SECONDS,
                check=True,
            ).stdout
        (reply,) = [decode_reply(body) for body in Frames().feed(received)]
        assert isinstance(reply, Error)
        assert reply.code == "connections"
        assert "cannot be watched (Too many open files)" in reply.message
        assert there.stats().values["connections"] == 1


def test_a_worker_that_the_next_daemon_cannot_watch_keeps_its_slots(
    daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A daemon that is short of descriptors starts with an arena where nobody writes."""

    def short(pid: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with (
        ControlClient(daemon.socket_path, hello=Hello(1, PROTOCOL_VERSION, "worker", "e")),
        ControlClient(daemon.socket_path, hello=engine_hello("e")) as engine,
    ):
        until(lambda: got_slots(engine), "write slots")
        old = engine.welcome
        daemon.kill()
    monkeypatch.setattr("os.pidfd_open", short)
    server = DaemonServer(ServeOptions(Path(daemon.socket_path), 64 << 20, metrics_port=-1))
    assert stale_arenas(Path(daemon.socket_path)) != [Path(old.arena_path)], (
        "those slots are not free to be given away"
    )
    server.end_run(keep_arena=False)
    server.run()


def got_slots(engine: ControlClient) -> bool:
    granted = engine.call(Reserve(3, PART, 1, SLOTS))
    assert isinstance(granted, Reserved)
    return len(granted.slots) // SLOT_BYTES == SLOTS


@pytest.fixture
def small(tmp_path: Path) -> Iterator[str]:
    """The socket of a daemon that keeps few connections."""
    socket_path = str(tmp_path / "small.sock")
    code = (
        "import sys; from hybridkv.daemon import clients; from hybridkv.cli.main import main;"
        f" clients.CONNECTIONS_MAX = {CONNECTIONS};"
        " sys.exit(main(['serve', '--socket', sys.argv[1], '--ram', '16MiB',"
        " '--metrics-port', '-1']))"
    )
    with subprocess.Popen([sys.executable, "-c", code, socket_path]) as process:
        try:
            until(lambda: Path(socket_path).is_socket() and greeted(socket_path), "it serves")
            yield socket_path
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(DEADLINE_SECONDS)


def test_one_connection_too_many_is_refused_and_the_others_go_on(small: str) -> None:
    with contextlib.ExitStack() as stack:
        served = [stack.enter_context(ControlClient(small)) for _ in range(CONNECTIONS)]
        for _ in range(3):
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(small)
                refused = last_word(client)
            assert refused.code == "connections"
            assert refused.message == f"there are {CONNECTIONS} connections already"
        for control in served:
            values = control.stats().values
            assert (values["connections"], values["refused_connections"]) == (CONNECTIONS, 3)
        served.pop().__exit__()
        until(lambda: greeted(small), "the place of one who left is free")
    with ControlClient(small, hello=Hello(1, PROTOCOL_VERSION, "control")) as control:
        assert control.stats().values["connections"] == 1


class OwnMemory(NamedTuple):
    """A daemon that has shared memory of its own."""

    socket_path: str
    directory: Path
    """The shared memory's directory, as this process sees it."""


@pytest.fixture
def own_memory(tmp_path: Path) -> Iterator[OwnMemory]:
    mount = ["unshare", "-m", "mount", "-t", "tmpfs", "none", "/mnt"]
    if subprocess.run(mount, check=False).returncode:
        pytest.skip("needs the right to mount")
    socket_path = str(tmp_path / "own.sock")
    serve = f"{sys.executable} -m hybridkv serve --socket {socket_path} --metrics-port -1"
    script = f"mount -t tmpfs -o size=1200m none /dev/shm && exec {serve} --ram 1000MiB"
    with subprocess.Popen(["unshare", "-m", "sh", "-c", script]) as process:
        try:
            until(lambda: Path(socket_path).is_socket() and greeted(socket_path), "it serves")
            yield OwnMemory(socket_path, Path(f"/proc/{process.pid}/root/dev/shm"))
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(DEADLINE_SECONDS)


def test_an_arena_grows_again_once_there_is_memory(own_memory: OwnMemory) -> None:
    """Somebody else fills /dev/shm while the arena grows, and leaves."""
    socket_path, directory = own_memory
    part_bytes = 1 << 20
    group = dataclasses.replace(GEOMETRY.groups[0], layer_bytes=(part_bytes,))
    hello = bench_hello((group,), GEOMETRY.chunk_tokens)
    with ControlClient(socket_path, hello=hello) as engine:

        def pages(slots: int) -> int:
            granted = engine.call(Reserve(3, part_bytes, 1, slots))
            assert isinstance(granted, Reserved)
            return granted.reserved_bytes

        until(lambda: pages(1) > RESERVE_AHEAD_BYTES, "what is reserved ahead")
        filler = directory / "other"
        with filler.open("wb") as file, contextlib.suppress(OSError):
            for at in range(0, 1 << 30, 1 << 20):
                os.posix_fallocate(file.fileno(), at, 1 << 20)
        before = pages(256)
        until(lambda: engine.stats().values.get("reserves_failed", 0) > 1, "it looks for memory")
        assert pages(1) <= before + RESERVE_STEP_BYTES, "there is no more"
        shown = engine.stats(status=True).status
        assert shown is not None
        assert "warn" in [
            finding.level for finding in shown.health if "could not grow" in finding.text
        ]
        filler.unlink()
        until(lambda: pages(1) > before + (128 << 20), "the arena grows")


class ControlGroup:
    """A control group of this machine with a memory limit, and the processes in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.processes: list[subprocess.Popen[str]] = []

    @property
    def is_first(self) -> bool:
        """True for a group of version 1."""
        return (self.path / "memory.limit_in_bytes").exists()

    def limit(self, limit_bytes: int) -> None:
        name = "memory.limit_in_bytes" if self.is_first else "memory.max"
        (self.path / name).write_text(str(limit_bytes))

    def start(self, *command: str) -> "subprocess.Popen[str]":
        """Start a program in the group."""
        enter = f'echo $$ >"{self.path}/cgroup.procs" && exec "$@"'
        process = subprocess.Popen(
            ["sh", "-c", enter, "sh", *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.processes.append(process)
        return process

    def killed(self) -> int:
        """The processes that the kernel has ended for want of memory."""
        events = (self.path / ("memory.oom_control" if self.is_first else "memory.events")).open()
        with events:
            counted = dict(line.split() for line in events)
        return int(counted["oom_kill"])


@pytest.fixture
def control_group() -> Iterator[ControlGroup]:
    tops = (Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup"))
    top = next((top for top in tops if (top / "cgroup.procs").exists()), tops[1])
    group = ControlGroup(top / f"hybridkv-test-{os.getpid()}")
    try:
        group.path.mkdir()
    except OSError:
        pytest.skip("needs the right to make a control group")
    try:
        if not (group.is_first or (group.path / "memory.max").exists()):
            pytest.skip("needs a control group with the memory controller")
        yield group
    finally:
        for process in group.processes:
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=DEADLINE_SECONDS)
        group.path.rmdir()


def test_the_cache_leaves_others_of_its_control_group_their_memory(
    control_group: ControlGroup, tmp_path: Path
) -> None:
    """The daemon that an engine starts is in the engine's group, whose limit may change later."""
    socket_path = str(tmp_path / "own.sock")
    hold = "held = bytearray(200 << 20); print(); input(); held += bytearray(20 << 20); print()"
    engine = control_group.start(sys.executable, "-uc", f"{hold}; input()")
    assert engine.stdin is not None
    assert engine.stdout is not None
    engine.stdout.readline()
    control_group.limit(640 << 20)
    serve = [sys.executable, "-m", "hybridkv", "serve", "--metrics-port", "-1"]
    serve += ["--socket", socket_path, "--ram"]

    _, refusal = control_group.start(*serve, "1GiB").communicate(timeout=DEADLINE_SECONDS)
    assert f"ram=1GiB is larger than the memory limit of 640MiB of {control_group.path}" in refusal
    fitting = control_group.start(*serve, refusal.partition('; "')[2].partition('" works')[0])
    until(lambda: Path(socket_path).is_socket() and greeted(socket_path), "it serves")
    fitting.send_signal(signal.SIGINT)
    assert "WARNING" not in fitting.communicate(timeout=DEADLINE_SECONDS)[1], "it fits"

    control_group.limit(512 << 20)
    daemon = control_group.start(*serve, "500MiB")
    assert daemon.stderr is not None
    warning = next(line for line in daemon.stderr if "WARNING" in line)
    assert "ram=500MiB leaves no room in the memory limit of 512MiB" in warning
    warning = next(line for line in daemon.stderr if "arena stays at" in line)
    assert f"512MiB of {control_group.path} has no room for more; a limit of" in warning
    with ControlClient(socket_path) as control:

        def held_bytes() -> int:
            return int(control.stats().values["bytes_reserved"])

        assert 64 << 20 < held_bytes() < RESERVE_AHEAD_BYTES
        engine.stdin.write("\n")
        engine.stdin.flush()
        engine.stdout.readline()
        assert not control_group.killed()
        works = warning.rpartition("a limit of ")[2].partition(" works")[0]
        control_group.limit(parse_size(works, "limit"))
        until(lambda: held_bytes() >= RESERVE_AHEAD_BYTES, "the arena grows")
