"""The daemon as a process: over its real socket, with its real arena."""

import json
import os
import re
import signal
import socket
import stat
import time
from pathlib import Path

import msgspec
import pytest

from hybridkv.cli.main import main
from hybridkv.client.control import ControlClient, DaemonRefusedError
from hybridkv.client.link import Link
from hybridkv.client.start_daemon import ensure_daemon
from hybridkv.core.errors import ConfigError, HybridKVError
from hybridkv.core.packed import SLOT_BYTES, pack_u64, unpack_slots
from hybridkv.daemon.filesystem import stale_arenas
from hybridkv.lab.daemon_process import DaemonProcess
from hybridkv.shm.arena import ArenaGoneError, attach_arena, machine_memory_bytes
from hybridkv.shm.slots import committed_slots, slot_bytes
from hybridkv.wire.codec import Frames, decode_reply, encode
from hybridkv.wire.messages import (
    PROTOCOL_VERSION,
    Commit,
    Drained,
    Error,
    Found,
    Free,
    Hello,
    Identify,
    Lookup,
    Reply,
    Reserve,
    Reserved,
    Stats,
)
from tests.forked_daemon import Fork, ForkedDaemon, run_forked
from tests.layouts import LAYOUTS
from tests.unit.daemon.harness import engine_hello
from tests.waiting import DEADLINE_SECONDS, until

QWEN3 = LAYOUTS["qwen3"]
PART = QWEN3.groups[0].block_bytes
SLOT = slot_bytes(PART, 1)
WORKER = Hello(1, PROTOCOL_VERSION, "worker", "test")
HELLO = engine_hello(QWEN3, "test", b"n" * 32)


def store(control: ControlClient, count: int) -> None:
    """Store `count` objects. A young daemon grants fewer slots while it reserves pages."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    stored = 0
    while stored < count:
        assert time.monotonic() < deadline
        granted = control.call(Reserve(2, PART, 1, count - stored))
        assert isinstance(granted, Reserved)
        slots = len(granted.slots) // SLOT_BYTES
        names = b"".join(bytes([stored + number]) * 32 for number in range(slots))
        control.tell(Commit(granted.slots, pack_u64([0] * slots), names))
        stored += slots


def test_an_arena_whose_name_was_removed_is_taken_from_the_daemon(daemon: DaemonProcess) -> None:
    with ControlClient(daemon.socket_path, hello=HELLO) as engine:
        store(engine, 3)
        assert engine.call(Lookup(3, 1, names(3))), "its answer comes after the commits"
        path, size_bytes = Path(engine.welcome.arena_path), engine.welcome.arena_bytes
        path.unlink()
        for pid_without_it in (0, os.getpid()):
            with pytest.raises(ArenaGoneError, match=r"cannot be opened: No such file"):
                attach_arena(path, size_bytes, pid=pid_without_it)
        arena = attach_arena(path, size_bytes, pid=engine.welcome.pid)
        assert len(list(committed_slots(arena.memory))) == 3
        arena.close()


def test_only_the_owner_may_touch_socket_and_arena(daemon: DaemonProcess) -> None:
    with ControlClient(daemon.socket_path) as control:
        arena = Path(control.welcome.arena_path)
    for path in (Path(daemon.socket_path), arena):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert path.stat().st_uid == os.geteuid()


def granted_slots(engine: ControlClient, count: int) -> Reserved:
    """Return that many write slots. A young daemon has none yet."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while time.monotonic() < deadline:
        granted = engine.call(Reserve(2, PART, 1, count))
        assert isinstance(granted, Reserved)
        if len(granted.slots) // SLOT_BYTES == count:
            return granted
        engine.tell(Free(granted.slots))
    raise AssertionError("no write slots")


def names(count: int) -> bytes:
    return b"".join(bytes([number]) * 32 for number in range(count))


def test_an_interrupted_daemon_takes_its_arena_with_it(daemon: DaemonProcess) -> None:
    with ControlClient(daemon.socket_path) as control:
        arena = Path(control.welcome.arena_path)
    assert daemon.process is not None
    daemon.process.send_signal(signal.SIGINT)
    assert daemon.process.wait(DEADLINE_SECONDS) == 0
    assert not arena.exists()
    assert not Path(daemon.socket_path).exists()
    with pytest.raises(ArenaGoneError):
        attach_arena(arena, 64 << 20)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_as_soon_as_the_socket_is_there_is_heard(
    tmp_path: Path, number: signal.Signals
) -> None:
    code = (
        "import os, signal, sys\n"
        "from hybridkv.cli.main import main\n"
        "from hybridkv.daemon import loop\n"
        "class Server(loop.DaemonServer):\n"
        "    def __init__(self, options):\n"
        "        super().__init__(options)\n"
        f"        os.kill(os.getpid(), {number})\n"
        "loop.DaemonServer = Server\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)"
        "  # as a shell starts what it does not wait for\n"
        "sys.exit(main(['serve', '--socket', sys.argv[1], '--ram', '16MiB',"
        " '--metrics-port', '-1']))"
    )
    process = Fork([str(tmp_path / "private" / "daemon.sock")], [1, 2], code)
    try:
        assert process.wait(DEADLINE_SECONDS) == 0
    finally:
        process.kill()
        process.wait()
        for arena in stale_arenas(tmp_path / "private" / "daemon.sock"):
            arena.unlink()


@pytest.mark.parametrize("how", ["stop", "kill"])
def test_the_next_daemon_goes_on_with_the_arena(daemon: DaemonProcess, how: str) -> None:
    with ControlClient(daemon.socket_path, hello=HELLO) as engine:
        store(engine, 3)
        assert engine.stats().values["objects"] == 3
        old = engine.welcome
        arena = attach_arena(Path(old.arena_path), old.arena_bytes)
        stored = list(committed_slots(arena.memory))
        arena.close()
    if how == "stop":
        daemon.stop()
    else:
        daemon.kill()
    daemon.start()
    with ControlClient(daemon.socket_path) as control:
        assert control.welcome.boot != old.boot
        assert control.welcome.arena_path == old.arena_path
        values = control.stats().values
        assert (values["objects"], values["bytes_writing"], values["sessions"]) == (3, 0, 0)
    with ControlClient(daemon.socket_path, hello=HELLO) as engine:
        found = engine.call(Lookup(3, 1, names(4)))
        assert isinstance(found, Found)
        assert found.chunks == 3
        assert sorted([slot.offset for slot in unpack_slots(found.slots)]) == sorted(
            offset for offset, _ in stored
        )
        granted = engine.call(Reserve(2, PART, 1, 5))
        assert isinstance(granted, Reserved)
        assert not {slot.offset for slot in unpack_slots(granted.slots)} & {
            offset for offset, _ in stored
        }
        latest = max(header.generation for _, header in stored)
        assert min([slot.generation for slot in unpack_slots(granted.slots)]) > latest


def test_an_arena_that_cannot_be_taken_over_keeps_nobody_from_serving(
    daemon: DaemonProcess,
) -> None:
    """With an impossible worker process id in the arena, the next daemon serves, and is empty."""
    with (
        ControlClient(daemon.socket_path, hello=WORKER),
        ControlClient(daemon.socket_path, hello=HELLO) as engine,
    ):
        store(engine, 3)
        assert engine.stats().values["objects"] == 3
        old = engine.welcome
        daemon.kill()
    arena = attach_arena(Path(old.arena_path), old.arena_bytes)
    pid = os.getpid().to_bytes(8, "little")
    at = bytes(arena.memory[old.slots_bytes :]).index(pid) + old.slots_bytes
    arena.memory[at : at + 8] = b"\xff" * 8
    arena.close()
    daemon.start()
    with ControlClient(daemon.socket_path, hello=HELLO) as engine:
        assert engine.stats().values["objects"] == 0
        assert engine.welcome.arena_path != old.arena_path
        assert not Path(old.arena_path).exists()
        store(engine, 3)


def test_another_size_than_before_is_told_and_begins_empty(daemon: DaemonProcess) -> None:
    with ControlClient(daemon.socket_path, hello=HELLO) as engine:
        store(engine, 3)
        old = Path(engine.welcome.arena_path)
    daemon.stop()
    with ForkedDaemon(daemon.socket_path, "32MiB"), ControlClient(daemon.socket_path) as control:
        assert control.stats().values["objects"] == 0
        assert not old.exists()
    why = "it has 64MiB, and --ram asks for 32MiB; what tiers have stays"
    log = Path(daemon.socket_path).with_suffix(".log").read_text()
    assert f"{old.name} is not taken over: {why}\n" in log


@pytest.mark.parametrize("at", ["superblock", "size"])
def test_an_arena_of_another_size_or_version_is_not_taken_over(
    daemon: DaemonProcess, at: str
) -> None:
    with ControlClient(daemon.socket_path, hello=HELLO) as engine:
        store(engine, 3)
        old = engine.welcome
    daemon.kill()
    if at == "size":
        os.truncate(old.arena_path, old.arena_bytes - 4096)
    else:
        arena = attach_arena(Path(old.arena_path), old.arena_bytes)
        arena.memory[old.arena_bytes - 4096] ^= 1
        arena.close()
    daemon.start()
    with ControlClient(daemon.socket_path) as control:
        assert control.welcome.arena_path != old.arena_path
        assert not Path(old.arena_path).exists()
        assert control.stats().values["objects"] == 0


def test_there_is_one_daemon_per_socket(daemon: DaemonProcess) -> None:
    second = run_forked(["serve", "--socket", daemon.socket_path, "--ram", "64MiB"])
    assert second.returncode == 3
    assert "already serving" in second.stderr
    with ControlClient(daemon.socket_path):
        pass


@pytest.mark.parametrize("unread", [0, 2000])
def test_a_refused_identity_ends_the_connection(daemon: DaemonProcess, unread: int) -> None:
    """The engine's next messages would be about bytes that belong to neither identity."""
    hello = engine_hello(LAYOUTS["gemma3"], "other", b"o" * 32)
    with ControlClient(daemon.socket_path, hello=hello) as owner:
        with (
            ControlClient(daemon.socket_path, hello=HELLO) as engine,
            socket.socket(socket.AF_UNIX) as raw,
        ):
            store(engine, 1)
            slots = granted_slots(engine, 1)
            raw.settimeout(DEADLINE_SECONDS)
            raw.connect(daemon.socket_path)
            raw.sendall(encode(HELLO) + encode(Reserve(2, PART, 1, 1)))
            frames, replies = Frames(), list[Reply]()
            while len(replies) < 2:
                replies += map(decode_reply, frames.feed(raw.recv(1 << 16)))
            granted = replies[1]
            assert isinstance(granted, Reserved)
            commit = Commit(granted.slots, pack_u64([0]), names(2)[32:])
            identify, lookup = Identify(4, b"o" * 32), Lookup(5, 1, names(1))
            raw.sendall(
                encode(Stats(3)) * unread + encode(identify) + encode(lookup) + encode(commit)
            )
            until(lambda: "refused_identify" in engine.stats().values, "it is refused")
            received = b""
            while piece := raw.recv(1 << 16):
                received += piece
            *reports, refused = map(decode_reply, frames.feed(received))
            assert len(reports) == unread
            assert isinstance(refused, Error)
            assert (refused.id, refused.code) == (4, "identify")
            until(lambda: engine.stats().values["sessions"] == 2, "two sessions")
            found = engine.call(Lookup(6, 1, names(2)))
            assert isinstance(found, Found)
            assert found.chunks == 1, "nothing was stored under the old identity"
            values = engine.stats().values
            assert (values["leases"], values["bytes_writing"]) == (1, SLOT)
            engine.tell(Free(slots.slots))
        until(lambda: owner.stats().values["sessions"] == 1, "one session is left")


def test_a_stopped_daemon_blocks_nobody(daemon: DaemonProcess) -> None:
    """Messages are queued up to the bound. Then the link counts the daemon as gone."""
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
    ensure_daemon(socket_path, ["--ram", "64MiB"])
    with ControlClient(socket_path) as control:
        pid = control.welcome.pid
        assert os.getsid(pid) == pid, "a session of its own"
    ensure_daemon(socket_path, ["--ram", "64MiB"])
    with ControlClient(socket_path) as control:
        assert control.welcome.pid == pid
    os.kill(pid, signal.SIGINT)
    until(lambda: not Path(socket_path).exists(), "the daemon ends")


def test_auto_says_why_a_daemon_cannot_start(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"ram=.* is larger than this machine's memory of .* works"
    ):
        ensure_daemon(str(tmp_path / "daemon.sock"), ["--ram", str(machine_memory_bytes() * 2)])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--ram", "lots"], "ram='lots' is not a size; write it like \"1GiB\""),
        (["--ram", "100TiB"], "is larger than this machine's memory"),
        (["--socket", "relative"], 'socket: .* "/tmp/hybridkv/daemon.sock" works'),
        (
            ["--socket", "/proc/nowhere/d.sock"],
            "socket: directory /proc/nowhere cannot be made .* works",
        ),
    ],
)
def test_serve_says_what_works(
    arguments: list[str], says: str, capfd: pytest.CaptureFixture[str]
) -> None:
    ended = run_forked(["serve", *arguments])
    assert ended.returncode == 2
    assert len(ended.stderr.strip().splitlines()) == 1
    assert re.search(says, ended.stderr), ended.stderr


def test_a_directory_that_others_may_write_to_is_refused(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(HybridKVError, match="others may write to"):
        ensure_daemon(str(shared / "daemon.sock"), ["--ram", "64MiB"])
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    with pytest.raises(HybridKVError, match="not a directory of its own"):
        ensure_daemon(str(link / "daemon.sock"), ["--ram", "64MiB"])


def test_another_users_socket_is_refused_on_both_sides(other_users_socket: str) -> None:
    """A daemon serves its own user only, and we do not talk to another user's."""
    with (
        pytest.raises(DaemonRefusedError, match="is served by another user"),
        ControlClient(other_users_socket),
    ):
        pass
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(DEADLINE_SECONDS)
        client.connect(other_users_socket)
        (reply,) = [decode_reply(body) for body in Frames().feed(client.recv(65536))]
    assert isinstance(reply, Error)
    assert reply.code == "other_user"


def test_stats_and_clear_commands(
    daemon: DaemonProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["stats", "--socket", daemon.socket_path, "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert (values["bytes_arena"], "slots_granted" in values) == (64 << 20, False)
    assert main(["stats", "--socket", daemon.socket_path, "--json", "--debug"]) == 0
    assert values.keys() < json.loads(capsys.readouterr().out).keys() >= {"slots_granted"}
    assert main(["stats", "--socket", daemon.socket_path]) == 0
    assert "64MiB" in capsys.readouterr().out
    assert main(["clear", "--socket", daemon.socket_path, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"dropped": 0}
    assert main(["stats", "--socket", "/tmp/hybridkv-no-such.sock"]) == 2
    assert "hybridkv serve --socket" in capsys.readouterr().err


def test_write_slots_of_a_living_worker_are_kept_over_a_restart(daemon: DaemonProcess) -> None:
    """Until it says that it copies nothing any more for what its engine was before."""
    with (
        ControlClient(daemon.socket_path, hello=WORKER),
        ControlClient(daemon.socket_path, hello=HELLO) as engine,
    ):
        held = {slot.offset for slot in unpack_slots(granted_slots(engine, 5).slots)}
        daemon.kill()
    daemon.start()
    with ControlClient(
        daemon.socket_path, hello=msgspec.structs.replace(HELLO, session=1)
    ) as engine:
        assert engine.stats().values["bytes_held"] > 0
        again = engine.call(Reserve(2, PART, 1, 1000))
        assert isinstance(again, Reserved)
        assert not held & {slot.offset for slot in unpack_slots(again.slots)}
        with ControlClient(daemon.socket_path, hello=WORKER) as worker:
            worker.tell(Drained(1))
            assert worker.stats().values["bytes_held"] > 0, "that was the greeting before"
            worker.tell(Drained(2))
            assert worker.stats().values["bytes_held"] == 0
