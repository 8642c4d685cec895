"""The daemon as a process: over its real socket, with its real arena."""

import json
import os
import random
import re
import signal
import socket
import stat
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from hybridkv.cli.main import main
from hybridkv.client.control import Control, DaemonRefusedError
from hybridkv.client.link import Link
from hybridkv.client.spawn import ensure_daemon
from hybridkv.core.errors import ConfigError, HybridKVError
from hybridkv.core.packed import pack_u64, unpack_u64
from hybridkv.shm.arena import ArenaGoneError, attach_arena, machine_memory_bytes
from hybridkv.shm.inspect import committed_slots
from hybridkv.testing.daemon import DaemonProcess
from hybridkv.wire.codec import Frames, decode_reply, encode
from hybridkv.wire.messages import (
    PROTOCOL_VERSION,
    Commit,
    Error,
    Found,
    Granted,
    Hello,
    Lookup,
    Release,
    Want,
    geometry_to_wire,
)
from tests.conftest import DEADLINE_SECONDS
from tests.layouts import LAYOUTS

QWEN3 = LAYOUTS["qwen3"]
PART = QWEN3.groups[0].block_bytes
HELLO = Hello(1, PROTOCOL_VERSION, "engine", "test", b"n" * 32, geometry_to_wire(QWEN3))


def store(control: Control, count: int) -> None:
    """Store `count` objects; a young daemon grants fewer slots than asked for while pages are being reserved."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    stored = 0
    while stored < count:
        assert time.monotonic() < deadline
        granted = control.call(Want(2, PART, 1, count - stored))
        assert isinstance(granted, Granted)
        more = len(unpack_u64(granted.offsets))
        names = b"".join(bytes([stored + number]) * 32 for number in range(more))
        control.tell(Commit(granted.offsets, granted.generations, pack_u64([0] * more), names))
        stored += more


def test_store_and_find_over_the_socket(daemon: DaemonProcess) -> None:
    with Control(daemon.socket_path, hello=HELLO) as engine:
        store(engine, 3)
        found = engine.call(Lookup(3, 1, b"".join(bytes([number]) * 32 for number in range(4))))
        assert isinstance(found, Found)
        assert found.chunks == 3, "read your writes: a commit is seen by the next lookup"
        arena = attach_arena(Path(engine.welcome.arena_path), engine.welcome.arena_bytes)
        assert [header.chunk_hash[0] for _, header in committed_slots(arena.memory)] == [0, 1, 2]
        arena.close()
        engine.tell(Release(1))
    with Control(daemon.socket_path) as control:
        assert control.stats().values["objects"] == 3
        assert control.clear() == 3
        assert control.stats().values["objects"] == 0


def test_only_the_owner_may_touch_socket_and_arena(daemon: DaemonProcess) -> None:
    with Control(daemon.socket_path) as control:
        arena = Path(control.welcome.arena_path)
    for path in (Path(daemon.socket_path), arena):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert path.stat().st_uid == os.geteuid()


def test_the_arena_goes_with_the_daemon(daemon: DaemonProcess) -> None:
    with Control(daemon.socket_path) as control:
        arena = Path(control.welcome.arena_path)
    assert daemon.stop() == 0
    assert not arena.exists()
    assert not Path(daemon.socket_path).exists()
    with pytest.raises(ArenaGoneError):
        attach_arena(arena, 64 << 20)


def test_a_killed_daemon_is_replaced_and_its_arena_removed(daemon: DaemonProcess) -> None:
    with Control(daemon.socket_path) as control:
        old = control.welcome
    daemon.kill()
    assert Path(old.arena_path).exists()
    daemon.start()
    with Control(daemon.socket_path) as control:
        assert control.welcome.boot != old.boot
    assert not Path(old.arena_path).exists()


def test_there_is_one_daemon_per_socket(daemon: DaemonProcess) -> None:
    second = subprocess.run(
        [sys.executable, "-m", "hybridkv", "serve", "--socket", daemon.socket_path, "--ram", "64MiB"],
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
        check=False,
    )
    assert second.returncode == 3
    assert "already serving" in second.stderr
    with Control(daemon.socket_path):
        pass


def test_metrics_in_prometheus_form(daemon: DaemonProcess) -> None:
    with Control(daemon.socket_path, hello=HELLO) as engine:
        store(engine, 2)
        url = engine.stats().info["metrics"]
        assert url.startswith("http://127.0.0.1:")
        with urllib.request.urlopen(url, timeout=DEADLINE_SECONDS) as answer:
            text = answer.read().decode()
    assert "hybridkv_daemon_objects 2.0" in text
    assert "hybridkv_daemon_objects_stored_total 2.0" in text


def test_bytes_that_are_no_message_get_an_error_and_a_closed_connection(
    daemon: DaemonProcess, rng: random.Random
) -> None:
    for number in range(200):
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(DEADLINE_SECONDS)
            client.connect(daemon.socket_path)
            body = rng.randbytes(rng.randrange(1, 60))
            if number % 2:
                client.sendall(encode(HELLO) if number % 4 == 1 else b"")
            client.sendall(len(body).to_bytes(4, "little") + body)
            client.shutdown(socket.SHUT_WR)
            received = b""
            try:
                while piece := client.recv(65536):
                    received += piece
            except ConnectionResetError:
                continue
        replies = [decode_reply(body) for body in Frames().feed(received)]
        assert isinstance(replies[-1], Error)
    with Control(daemon.socket_path) as control:
        values = control.stats().values
    assert values["connections"] == 1
    assert values["sessions"] == 0


def test_a_client_that_left_before_its_answers_is_no_fault_of_the_daemon(daemon: DaemonProcess) -> None:
    """What it said after the first answer that nobody took is not looked at."""
    assert daemon.process is not None
    daemon.process.send_signal(signal.SIGSTOP)
    try:
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(daemon.socket_path)
            client.sendall(encode(HELLO) + encode(Want(2, PART, 1, 1)) * 3)
    finally:
        daemon.process.send_signal(signal.SIGCONT)
    with Control(daemon.socket_path) as control:
        values = control.stats().values
    assert not [name for name in values if name.startswith("refused_")]
    assert (values["connections"], values["sessions"], values["bytes_writing"]) == (1, 0, 0)


def test_start_and_idle_footprint(tmp_path: Path) -> None:
    """Resident memory outside the arena stays under 60 MB."""
    running = DaemonProcess(str(tmp_path / "d.sock"), "256MiB")
    running.start()
    assert running.process is not None
    status = Path(f"/proc/{running.process.pid}/status").read_text()
    kilobytes = {
        line.split(":")[0]: int(line.split()[1])
        for line in status.splitlines()
        if line.startswith(("VmRSS", "RssShmem"))
    }
    assert kilobytes["VmRSS"] - kilobytes["RssShmem"] < 60_000
    assert running.stop() == 0


def test_a_link_comes_back_by_itself(daemon: DaemonProcess) -> None:
    losses: list[str] = []
    link = Link(daemon.socket_path, HELLO, losses.append)

    def until(condition: str, connected: bool) -> None:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while (link.welcome is not None) != connected:
            assert time.monotonic() < deadline, condition
            link.poll(time.monotonic())

    until("connected", True)
    assert link.welcome is not None
    boot = link.welcome.boot
    daemon.kill()
    until("loss noticed", False)
    assert losses
    assert not link.send(Release(1), time.monotonic())
    daemon.start()
    until("connected again", True)
    assert link.welcome is not None
    assert link.welcome.boot != boot
    link.close()


def test_a_stopped_daemon_blocks_nobody(daemon: DaemonProcess) -> None:
    """SIGSTOP: sending goes on until the queue bound, then the link counts the daemon as gone."""
    losses: list[str] = []
    link = Link(daemon.socket_path, HELLO, losses.append)
    deadline = time.monotonic() + DEADLINE_SECONDS
    while link.welcome is None:
        assert time.monotonic() < deadline
        link.poll(time.monotonic())
    assert daemon.process is not None
    daemon.process.send_signal(signal.SIGSTOP)
    try:
        lookup = Lookup(1, 1, bytes(1 << 20))
        while not losses:
            assert time.monotonic() < deadline
            link.send(lookup, time.monotonic())
        assert losses == ["the daemon does not read"]
    finally:
        daemon.process.send_signal(signal.SIGCONT)
    link.close()


def test_auto_starts_a_daemon_that_outlives_the_caller(tmp_path: Path) -> None:
    socket_path = str(tmp_path / "auto" / "daemon.sock")
    ensure_daemon(socket_path, 64 << 20)
    with Control(socket_path) as control:
        pid = control.welcome.pid
        assert os.getsid(pid) == pid, "a session of its own"
    ensure_daemon(socket_path, 64 << 20)
    with Control(socket_path) as control:
        assert control.welcome.pid == pid
    os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + DEADLINE_SECONDS
    while Path(socket_path).exists():
        assert time.monotonic() < deadline


def test_auto_says_why_a_daemon_cannot_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"ram=.* is larger than this machine's memory of .* works"):
        ensure_daemon(str(tmp_path / "daemon.sock"), machine_memory_bytes() * 2)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--ram", "lots"], "ram='lots' is not a size; write it like \"1GiB\""),
        (["--ram", "100TiB"], "is larger than this machine's memory"),
        (["--socket", "relative"], 'socket: .* "/tmp/hybridkv/daemon.sock" works'),
        (["--socket", "/proc/nowhere/d.sock"], "socket: directory /proc/nowhere cannot be made .* works"),
    ],
)
def test_serve_says_what_works(arguments: list[str], says: str, capfd: pytest.CaptureFixture[str]) -> None:
    said = subprocess.run(
        [sys.executable, "-m", "hybridkv", "serve", *arguments],
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
        check=False,
    )
    assert said.returncode == 2
    assert len(said.stderr.strip().splitlines()) == 1
    assert re.search(says, said.stderr), said.stderr


def test_a_directory_that_others_may_write_to_is_refused(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(HybridKVError, match="others may write to"):
        ensure_daemon(str(shared / "daemon.sock"), 64 << 20)
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    with pytest.raises(HybridKVError, match="not a directory of its own"):
        ensure_daemon(str(link / "daemon.sock"), 64 << 20)


def test_another_users_socket_is_refused_on_both_sides(other_users_socket: str) -> None:
    """A daemon serves its own user only, and we do not talk to another user's."""
    with pytest.raises(DaemonRefusedError, match="is served by another user"), Control(other_users_socket):
        pass
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(DEADLINE_SECONDS)
        client.connect(other_users_socket)
        (reply,) = [decode_reply(body) for body in Frames().feed(client.recv(65536))]
    assert isinstance(reply, Error)
    assert reply.code == "other_user"


def test_stats_and_clear_commands(daemon: DaemonProcess, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stats", "--socket", daemon.socket_path, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["bytes_arena"] == 64 << 20
    assert main(["stats", "--socket", daemon.socket_path]) == 0
    assert "64MiB" in capsys.readouterr().out
    assert main(["clear", "--socket", daemon.socket_path, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"dropped": 0}
    assert main(["stats", "--socket", "/tmp/hybridkv-no-such.sock"]) == 2
    assert "hybridkv serve --socket" in capsys.readouterr().err
