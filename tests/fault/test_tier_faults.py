"""Real daemons over storage that is damaged, full, read-only, failing, hung or out of descriptors.

Tests assert what a client of the daemon sees. It is answered by its own deadline, RAM goes on,
other tiers and sessions go on, every byte is right, and the bound holds. What was wrong is over
when the storage is well again.
"""

import contextlib
import errno
import os
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest

from hybridkv.client.start_daemon import EXIT_ALREADY_SERVED, daemon_command
from hybridkv.core.errors import ConfigError
from hybridkv.core.packed import SlotRef
from hybridkv.core.tier_urls import parse_tier
from hybridkv.daemon.filesystem import stale_arenas
from hybridkv.lab.daemon_process import DaemonProcess
from hybridkv.shm.slots import payload_offset
from hybridkv.tiers.disk.tier import DiskTier
from hybridkv.tiers.record import RecordName
from tests.fault.fuse import FaultyFs, Op, mounted
from tests.fault.test_shortage import pid_of
from tests.forked_daemon import ForkedDaemon
from tests.unit.daemon.tierclient import (
    DISK,
    GEOMETRY,
    IDENTITY,
    Answer,
    Client,
    hashes,
    is_written,
    real_bytes,
    stats,
)
from tests.waiting import DEADLINE_SECONDS, until

CHUNKS = 3
PROMPTS = 20
HOT = 1 << 20
"""A prompt that is read all the time, so it stays in RAM."""
WAIT_MS = 400
"""The patience of a lookup that will not get what it waits for."""
LONG_MS = 10_000
"""The patience of a lookup that will get it."""
SLACK_SECONDS = DEADLINE_SECONDS
"""More time for an answer on a busy machine. Alone it takes a millisecond."""
TIMEOUT = "timeout=0.5"


def serve(
    directory: Path, root: Path, size: str = "64MiB", ram: str = "16MiB", second_root: str = ""
) -> DaemonProcess:
    """A daemon (not started) over the tier at `root`, and over one at `second_root`."""
    tiers = [f"disk://{path}?bytes={size}&{TIMEOUT}" for path in (root, second_root) if path]
    options = ["--node", "here", *(word for url in tiers for word in ("--tier", url))]
    return ForkedDaemon(str(directory / "d.sock"), ram, options=options)


def forget(daemon: DaemonProcess) -> None:
    """Kill the daemon and take its memory away, as a reboot does."""
    daemon.kill()
    for arena in stale_arenas(Path(daemon.socket_path)):
        arena.unlink()


def in_time(answer: Answer, wait_ms: int = 0) -> Answer:
    assert answer.seconds <= wait_ms / 1e3 + SLACK_SECONDS, f"answered after {answer.seconds:.3f} s"
    return answer


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with PROMPTS that a daemon has written."""
    place = tmp_path_factory.mktemp("written")
    with serve(place, place / "disk") as daemon, Client(daemon.socket_path) as client:
        for prompt in range(PROMPTS):
            client.store(prompt, CHUNKS)
        until(lambda: is_written(daemon.socket_path), "everything is written")
    return place / "disk"


def preload(written: Path, *roots: Path) -> None:
    for root in roots:
        shutil.copytree(written, root, dirs_exist_ok=True)


def value(daemon: DaemonProcess, name: str) -> float:
    return stats(daemon.socket_path).get(DISK + name, 0.0)


def is_up(daemon: DaemonProcess) -> None:
    """Wait until the daemon's tier is open, which may be after it began to serve."""
    until(lambda: value(daemon, "is_open") == 1, "the tier is open")


# Corruption


def file_of(root: Path, prompt: int, chunk: int = 0, group: int = 0) -> Path:
    key = RecordName(IDENTITY, GEOMETRY.groups[group].gid, hashes(prompt, chunk + 1)[chunk]).key
    (path,) = root.glob(f"objects/*/*/{key.hex()}.*")
    return path


def edit(change: Callable[[bytearray], None]) -> Callable[[Path, Path], None]:
    def damage(path: Path, second: Path) -> None:
        raw = bytearray(path.read_bytes())
        change(raw)
        path.write_bytes(raw)

    return damage


def swap(path: Path, second: Path) -> None:
    raw = path.read_bytes()
    path.write_bytes(second.read_bytes())
    second.write_bytes(raw)


def flip(at: int) -> Callable[[bytearray], None]:
    return lambda raw: raw.__setitem__(at, raw[at] ^ 0x10)


DAMAGES: dict[str, Callable[[Path, Path], None]] = {
    "magic": edit(flip(0)),
    "key field": edit(flip(40)),
    "length field": edit(flip(16)),
    "seed": edit(flip(115)),
    "signature": edit(flip(131)),
    "payload": edit(flip(payload_offset(1))),
    "last byte of the payload": edit(flip(payload_offset(1) + 8999)),
    "tail": edit(flip(-1)),
    "cut": edit(lambda raw: raw.__delitem__(slice(512, None))),
    "a sector short": edit(lambda raw: raw.__delitem__(slice(-512, None))),
    "torn": edit(lambda raw: raw.__setitem__(slice(4096, None), bytes(len(raw) - 4096))),
    "empty": edit(lambda raw: raw.clear()),
    "other bytes": edit(lambda raw: raw.__setitem__(slice(None), os.urandom(len(raw)))),
    "swapped": swap,
}


def test_damaged_files_are_misses_and_put_aside(tmp_path: Path, written: Path) -> None:
    root, daemon = tmp_path / "disk", serve(tmp_path, tmp_path / "disk")
    whole, spare = PROMPTS - 1, PROMPTS - 2
    preload(written, root)
    for prompt, damage in enumerate(DAMAGES.values()):
        damage(file_of(root, prompt), file_of(root, spare))
    with daemon, Client(daemon.socket_path) as client:
        is_up(daemon)
        for prompt, how in enumerate(DAMAGES):
            answer = in_time(client.look_up(prompt, CHUNKS, LONG_MS))
            assert answer.found.chunks == 0, how
            assert value(daemon, "objects_damaged") == prompt + 1, how
            # `until` calls this before the loop goes on.
            until(
                lambda: len(list((root / "quarantine").iterdir())) == prompt + 1,  # noqa: B023
                how,
            )
        assert client.look_up(spare, CHUNKS, LONG_MS).found.chunks == 0, (
            "the other half of the swap"
        )
        assert client.look_up(whole, CHUNKS, LONG_MS).found.chunks == CHUNKS
        assert not value(daemon, "failures")
        assert not value(daemon, "breaker_open"), "damage says nothing of the tier"
        # What was computed again is kept again.
        for prompt in range(len(DAMAGES)):
            client.store(prompt, CHUNKS)
        until(lambda: not stats(daemon.socket_path)["writes_waiting"], "everything is written")
        forget(daemon)
    with daemon, Client(daemon.socket_path) as client:
        is_up(daemon)
        for prompt in range(len(DAMAGES)):
            assert client.look_up(prompt, CHUNKS, LONG_MS).found.chunks == CHUNKS
        assert not value(daemon, "objects_damaged")


# Full


class SmallFileSystem(NamedTuple):
    """A small file system with a directory for a tier."""

    root: Path
    """The tier's directory."""
    remount: Callable[[str], None]
    """Mounts the file system again, "ro" or "rw"."""


@contextlib.contextmanager
def small(kind: str, tmp_path: Path) -> Iterator[SmallFileSystem]:
    size = {"tmpfs": "6m", "ext4": str(10 << 20)}[kind]
    with mounted(kind, tmp_path / "small", size, tmp_path / "image") as remount:
        (tmp_path / "small/tier").mkdir()
        (tmp_path / "small/ballast").touch()
        yield SmallFileSystem(tmp_path / "small/tier", remount)


def fill(root: Path) -> Path:
    """Fill the file system with a file beside the tier; returns the file's path."""
    path = root.parent / "ballast"
    fd = os.open(path, os.O_WRONLY | os.O_APPEND)
    for size in (1 << 20, 1 << 16, 1 << 12):
        with contextlib.suppress(OSError):
            while os.write(fd, bytes(size)) == size:
                pass
    os.close(fd)
    return path


@pytest.mark.parametrize("kind", ["tmpfs", pytest.param("ext4", marks=pytest.mark.soak)])
def test_a_full_file_system(tmp_path: Path, kind: str) -> None:
    """The bound is above what there is. Then others take the rest, and give it back."""
    with (
        small(kind, tmp_path) as (root, _),
        serve(tmp_path, root) as daemon,
        Client(daemon.socket_path) as client,
    ):
        prompts = iter(range(100_000))
        client.store(HOT, CHUNKS)

        def store() -> int:
            prompt = next(prompts)
            client.store(prompt, CHUNKS)
            in_time(client.look_up(prompt, CHUNKS, WAIT_MS), WAIT_MS)
            assert in_time(client.look_up(HOT, CHUNKS)).found.chunks == CHUNKS, "RAM goes on"
            return prompt

        def refused() -> bool:
            store()
            return value(daemon, "objects_refused") > 0

        until(refused, "it is full")
        written = value(daemon, "objects_written")
        until(
            lambda: store() >= 0 and value(daemon, "objects_written") > written + 9,
            "the oldest make room",
        )
        ballast = fill(root)

        def gives_up() -> bool:
            fill(root)
            store()
            return value(daemon, "breaker_open") > 0

        until(gives_up, "nothing can be written")
        in_time(client.look_up(HOT + 1, CHUNKS, WAIT_MS), WAIT_MS)
        os.truncate(ballast, 0)
        written = value(daemon, "objects_written")
        until(
            lambda: store() >= 0 and value(daemon, "objects_written") > written + 9,
            "it is written again",
        )
        until(lambda: value(daemon, "breaker_open") == 0, "the breaker is closed")
        last = store()
        until(lambda: not stats(daemon.socket_path)["writes_waiting"], "all is said")
        assert value(daemon, "bytes") >= real_bytes(root)
        forget(daemon)
        daemon.start()
        is_up(daemon)
        with Client(daemon.socket_path) as again:
            answers = [
                again.look_up(prompt, CHUNKS, LONG_MS).found.chunks for prompt in range(last + 1)
            ]
        assert any(answers), "and can be read"
        assert not value(daemon, "objects_damaged")


def test_a_daemon_starts_on_a_full_file_system(tmp_path: Path, written: Path) -> None:
    """With all but a little of what it has there."""
    with small("tmpfs", tmp_path) as (root, _):
        preload(written, root)
        fill(root)
        with serve(tmp_path, root) as daemon, Client(daemon.socket_path) as client:
            is_up(daemon)
            hits = [
                client.look_up(prompt, CHUNKS, LONG_MS).found.chunks for prompt in range(PROMPTS)
            ]
            assert hits.count(CHUNKS) >= PROMPTS - 2


def test_a_daemon_starts_without_tiers_that_are_full_or_read_only(
    tmp_path: Path, written: Path
) -> None:
    """RAM serves until there is room. A directory that can never be written to is reported."""
    (tmp_path / "other").mkdir()
    with (
        small("tmpfs", tmp_path) as (root, _),
        small("tmpfs", tmp_path / "other") as (second_root, remount),
    ):
        ballast = fill(root)
        preload(written, second_root)
        remount("ro")
        with (
            serve(tmp_path, root, second_root=str(second_root)) as daemon,
            Client(daemon.socket_path) as client,
        ):
            client.store(50, CHUNKS)
            assert in_time(client.look_up(50, CHUNKS, WAIT_MS), WAIT_MS).found.chunks == CHUNKS
            assert not value(daemon, "is_open")
            remount("rw")
            os.truncate(ballast, 0)
            until(lambda: value(daemon, "is_open") == 1, "it opens by itself")
            until(
                lambda: value(daemon, "objects_written") == CHUNKS * 3,
                "what was stored before is written",
            )
            until(
                lambda: client.look_up(0, CHUNKS, LONG_MS).found.chunks == CHUNKS,
                "the other is read",
            )
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="a directory that you may write to works"):
        serve(tmp_path, tmp_path / "file").start()


def test_a_sign_of_life_needs_no_room(tmp_path: Path) -> None:
    """A daemon without a sign of life would be taken for another one of its name for ever."""
    with small("tmpfs", tmp_path) as (root, _):
        tier = DiskTier(parse_tier(f"disk://{root}?bytes=1MiB", "disk", "here"))
        tier.open()
        fill(root)
        for _ in range(2):
            os.utime(root / "objects/here/alive", (1, 1))
            tier.writers.alive_due_at = 0
            tier.tend()
            assert (root / "objects/here/alive").stat().st_mtime > 1
        assert (root / "objects/here/alive").read_text()


# Read-only


@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
def test_a_file_system_that_turns_read_only(tmp_path: Path, kind: str) -> None:
    """As ext4 does after an error: files are read, nothing is forgotten, so the bound holds."""
    bound = 2 << 20
    with (
        small(kind, tmp_path) as (root, remount),
        serve(tmp_path, root, "2MiB", "1MiB") as daemon,
        Client(daemon.socket_path) as client,
    ):
        for prompt in range(20):
            client.store(prompt, CHUNKS)
            until(lambda: is_written(daemon.socket_path), "everything is written")
            assert real_bytes(root) <= bound
        os.sync()
        until(lambda: read_only(remount), "nothing is open for writing")
        there = value(daemon, "objects")
        for prompt in range(20, 30):
            client.store(prompt, CHUNKS)
            assert in_time(client.look_up(prompt, CHUNKS, WAIT_MS), WAIT_MS).found.chunks == CHUNKS
        until(lambda: value(daemon, "breaker_open") == 1, "nothing can be written")
        assert value(daemon, "objects") == there, "nothing was evicted in vain"
        until(
            lambda: client.look_up(18, CHUNKS, WAIT_MS).found.chunks == CHUNKS,
            "what is there is read",
        )
        remount("rw")
        written = value(daemon, "objects_written")
        for prompt in range(100, 1000):
            client.store(prompt, CHUNKS)
            assert real_bytes(root) <= bound
            if value(daemon, "objects_written") > written + 60:
                break
        until(lambda: value(daemon, "breaker_open") == 0, "the breaker is closed")
        assert value(daemon, "objects_written") > written + 60
        until(lambda: not stats(daemon.socket_path)["writes_waiting"], "all is said")
        assert real_bytes(root) <= value(daemon, "bytes") <= bound


def read_only(remount: Callable[[str], None]) -> bool:
    try:
        remount("ro")
    except OSError:
        return False
    return True


# Failing


@pytest.fixture
def faulty(tmp_path: Path) -> Iterator[FaultyFs]:
    """A file system over `tmp_path / "backing"` that does what is said."""
    for name in ("backing", "faulty"):
        (tmp_path / name).mkdir()
    with FaultyFs(tmp_path / "backing", tmp_path / "faulty") as fs:
        yield fs


NAMING = (Op.LOOKUP, Op.GETATTR, Op.OPENDIR, Op.CREATE, Op.RENAME, Op.UNLINK)


class Failure(NamedTuple):
    """Requests of the kernel, and the error with which they fail."""

    error_number: int
    ops: tuple[Op, ...]


FAILURES = {
    "reads": Failure(errno.EIO, (Op.READ,)),
    "writes": Failure(errno.EIO, (Op.WRITE,)),
    "names": Failure(errno.ESTALE, NAMING),
}


@pytest.mark.parametrize("what", FAILURES)
def test_a_file_system_that_fails(
    tmp_path: Path, faulty: FaultyFs, written: Path, what: str
) -> None:
    failure = FAILURES[what]
    daemon = serve(tmp_path, faulty.mountpoint)
    preload(written, faulty.backing)
    with daemon, faulty.healing(), Client(daemon.socket_path) as client:
        is_up(daemon)
        faulty.fail(failure.error_number, *failure.ops)
        turns = iter(range(10_000))

        def gives_up() -> bool:
            turn = next(turns)
            if what == "writes":
                client.store(100 + turn, 1)
                assert in_time(client.look_up(100 + turn, 1, WAIT_MS), WAIT_MS).found.chunks == 1
            else:
                assert (
                    in_time(client.look_up(turn % 12, CHUNKS, WAIT_MS), WAIT_MS).found.chunks == 0
                )
            return value(daemon, "breaker_open") > 0

        until(gives_up, "the breaker opens")
        client.store(50, CHUNKS)
        assert in_time(client.look_up(50, CHUNKS, LONG_MS)).found.chunks == CHUNKS, "RAM goes on"
        assert value(daemon, "objects_damaged") == 0
        faulty.heal()
        until(lambda: client.look_up(7, CHUNKS, LONG_MS).found.chunks == CHUNKS, "it is read again")
        client.store(60, CHUNKS)
        until(lambda: value(daemon, "breaker_open") == 0, "the breaker closes")
        forget(daemon)
    with daemon, faulty.healing(), Client(daemon.socket_path) as client:
        is_up(daemon)
        for prompt in range(12):
            assert client.look_up(prompt, CHUNKS, LONG_MS).found.chunks == CHUNKS, (
                "nothing was lost"
            )


@contextlib.contextmanager
def none_left(pid: int) -> Iterator[None]:
    """The process may open nothing any more: all descriptors below the limit are open."""
    soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    assert {str(number) for number in range(8)} <= set(os.listdir(f"/proc/{pid}/fd"))
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (8, hard))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))


def test_no_descriptor_is_left_for_files(tmp_path: Path, written: Path) -> None:
    daemon = serve(tmp_path, tmp_path / "disk")
    preload(written, tmp_path / "disk")
    with (
        daemon,
        Client(daemon.socket_path) as client,
        Client(daemon.socket_path, name="other") as neighbour,
    ):
        is_up(daemon)
        neighbour.store(50, CHUNKS)
        until(lambda: is_written(daemon.socket_path), "everything is written")
        turns = iter(range(10_000))
        with none_left(pid_of(daemon)):

            def gives_up() -> bool:
                assert (
                    in_time(client.look_up(next(turns) % 12, CHUNKS, WAIT_MS), WAIT_MS).found.chunks
                    == 0
                )
                assert in_time(neighbour.look_up(50, CHUNKS)).found.chunks == CHUNKS
                return client.values()[f"{DISK}breaker_open"] > 0

            until(gives_up, "the breaker opens")
            client.store(60, CHUNKS)
            assert in_time(client.look_up(60, CHUNKS)).found.chunks == CHUNKS
        until(lambda: client.look_up(7, CHUNKS, LONG_MS).found.chunks == CHUNKS, "it is read again")
        client.store(61, CHUNKS)
        until(lambda: value(daemon, "breaker_open") == 0, "the breaker closes")
        for prompt in range(12):
            assert client.look_up(prompt, CHUNKS, LONG_MS).found.chunks == CHUNKS
        assert value(daemon, "objects_damaged") == 0


# Hung

HANGS: dict[str, tuple[Op, ...]] = {
    "reads": (Op.READ,),
    "writes": (Op.WRITE,),
    "names": (Op.LOOKUP, Op.CREATE, Op.RENAME, Op.UNLINK, Op.OPENDIR, Op.SETATTR),
    "everything": (),
}


@pytest.mark.parametrize("what", [*HANGS, "deaf"])
def test_a_file_system_that_hangs(
    tmp_path: Path, faulty: FaultyFs, written: Path, what: str
) -> None:
    """It is left alone, and the tier below it and other sessions go on. Then it is used again."""
    daemon = serve(tmp_path, faulty.mountpoint, second_root=str(tmp_path / "well"))
    preload(written, faulty.backing, tmp_path / "well")
    slowest = 0.0
    with (
        daemon,
        faulty.healing(),
        Client(daemon.socket_path) as client,
        Client(daemon.socket_path, name="other") as neighbour,
    ):
        is_up(daemon)
        neighbour.store(50, CHUNKS)
        until(lambda: is_written(daemon.socket_path), "everything is written")
        if what == "deaf":
            faulty.be_deaf()
        else:
            faulty.hang(*HANGS[what])
        client.store(60, CHUNKS)
        number = client.ask(0, CHUNKS, WAIT_MS)
        for _ in range(20):
            slowest = max(slowest, in_time(neighbour.look_up(50, CHUNKS, LONG_MS)).seconds)
            assert in_time(neighbour.look_up(60, CHUNKS)).found.chunks == CHUNKS
        started = time.monotonic()
        found = client.answer(number)
        assert time.monotonic() - started < WAIT_MS / 1e3 + SLACK_SECONDS
        client.prove(found, 0)
        client.release(number)
        until(lambda: value(daemon, "breaker_open") == 1, "it is known to hang")
        for prompt in range(1, 8):
            answer = in_time(client.look_up(prompt, CHUNKS, LONG_MS), LONG_MS)
            slowest = max(slowest, answer.seconds)
            assert answer.found.chunks == CHUNKS
            assert answer.found.tiers == {"disk2": CHUNKS}, "the tier below it has it"
        assert value(daemon, "jobs_late") >= 1
        faulty.heal()
        until(lambda: value(daemon, "breaker_open") == 0, "it is used again")
        until(lambda: value(daemon, "objects_written") == 2 * CHUNKS * 3, "all is written")
        for prompt in (*range(8), 50, 60):
            assert client.look_up(prompt, CHUNKS, LONG_MS).found.chunks == CHUNKS
        forget(daemon)
    print(f"{what}: the slowest other answer took {slowest * 1e3:.0f} ms")
    with daemon, faulty.healing(), Client(daemon.socket_path) as client:
        is_up(daemon)
        for prompt in (*range(8), 50, 60):
            assert client.look_up(prompt, CHUNKS, LONG_MS).found.tiers == {"disk": CHUNKS}, (
                "and has it all"
            )


def test_what_comes_late_is_written_over_nothing(
    tmp_path: Path, faulty: FaultyFs, written: Path
) -> None:
    """All other memory is given to others and full of poison when the reads complete at last."""
    daemon = serve(tmp_path, faulty.mountpoint, ram="2MiB")
    preload(written, faulty.backing)
    size, parts = 30_000, 1
    with daemon, faulty.healing(), Client(daemon.socket_path) as client:
        is_up(daemon)
        with Client(daemon.socket_path, name="gone") as gone:
            faulty.hang(Op.READ)
            for prompt in range(8):
                (gone if prompt % 2 else client).ask(prompt, CHUNKS, WAIT_MS)
            until(lambda: faulty.held(Op.READ) > 0, "reads hang")
            reading = client.values()["bytes_writing"]
            assert reading > 0
        until(lambda: client.values()["lookups_waiting"] == 0, "all were answered, or are gone")
        until(lambda: value(daemon, "breaker_open") == 1, "it is known to hang")
        assert client.values()["bytes_writing"] == reading, "whoever may write there, has it"
        slots: list[SlotRef] = []
        until(lambda: not grown(client, slots, size, parts), "all that is granted")
        assert len(slots) > 3
        with Client(daemon.socket_path, name="more") as neighbour:
            for prompt in range(100, 130):
                neighbour.store(prompt, 1)
            assert neighbour.values()["evicted"] > 0
        poison = [
            (start(offset), bytes([0xEE - number % 50]) * size)
            for number, (offset, _) in enumerate(slots)
        ]
        memory = client.arena.memory
        for at, poisoned in poison:
            memory[at : at + size] = poisoned
        in_ram = [prompt for prompt in range(100, 130) if client.look_up(prompt, 1).found.chunks]
        assert in_ram
        faulty.heal()
        until(lambda: value(daemon, "breaker_open") == 0, "the reads are over")
        until(lambda: client.values()["lookups_waiting"] == 0, "all is said")
        assert all(memory[at : at + size] == poisoned for at, poisoned in poison)
        for prompt in in_ram:
            client.look_up(prompt, 1)
        client.abandon(slots)
        until(lambda: client.values()["bytes_writing"] == 0, "nobody keeps anything")
        for prompt in (*range(8), *range(100, 130)):
            client.look_up(prompt, CHUNKS if prompt < 8 else 1, LONG_MS)
        assert value(daemon, "objects_damaged") == 0


def start(offset: int) -> int:
    return offset + payload_offset(1)


def grown(client: Client, slots: list[SlotRef], size: int, parts: int) -> bool:
    granted = client.want(size, parts, 8)
    slots += granted
    return bool(granted)


@pytest.mark.parametrize(
    "deaf", [False, pytest.param(True, marks=pytest.mark.soak)], ids=["hung", "deaf"]
)
def test_a_daemon_starts_on_a_hung_file_system(
    tmp_path: Path, faulty: FaultyFs, written: Path, deaf: bool
) -> None:
    daemon = serve(tmp_path, faulty.mountpoint)
    preload(written, faulty.backing)
    if deaf:
        faulty.be_deaf()
    else:
        faulty.hang()
    with daemon, faulty.healing(), Client(daemon.socket_path) as client:
        client.store(50, CHUNKS)
        assert in_time(client.look_up(50, CHUNKS, LONG_MS)).found.chunks == CHUNKS
        assert in_time(client.look_up(0, CHUNKS, LONG_MS)).found.chunks == 0
        faulty.heal()
        until(
            lambda: client.look_up(0, CHUNKS, LONG_MS).found.chunks == CHUNKS, "it opens by itself"
        )


def is_over(pid: int) -> bool:
    """Whether the process has ended, except for threads that wait for their storage."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


@contextlib.contextmanager
def started(daemon: DaemonProcess) -> Iterator[DaemonProcess]:
    """Gives a daemon that is started and left alone, and killed at the end."""
    daemon.start()
    try:
        yield daemon
    finally:
        assert daemon.process is not None
        daemon.process.kill()


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.soak)]
)
@pytest.mark.parametrize(
    "deaf", [False, pytest.param(True, marks=pytest.mark.soak)], ids=["hung", "deaf"]
)
def test_a_daemon_ends_while_its_storage_hangs(
    tmp_path: Path, faulty: FaultyFs, written: Path, number: signal.Signals, deaf: bool
) -> None:
    """The next daemon serves, with its own memory while an old thread may write into the old."""
    daemon = serve(tmp_path, faulty.mountpoint)
    preload(written, faulty.backing)
    with started(daemon), Client(daemon.socket_path) as client:
        is_up(daemon)
        if deaf:
            faulty.be_deaf()
        else:
            faulty.hang()
        client.store(50, CHUNKS)
        for prompt in range(4):
            client.ask(prompt, CHUNKS, LONG_MS)
        until(lambda: value(daemon, "breaker_open") == 1, "it hangs")
        assert client.values()["bytes_writing"] > 0, "reads hang"
        old, arena = daemon.process, client.arena.path
        assert old is not None
        old.send_signal(number)
        since = time.monotonic()
        until(lambda: is_over(old.pid), "it ends")
        print(f"{number.name}: over after {time.monotonic() - since:.1f} s")
        assert not Path(daemon.socket_path).exists()
        assert arena.exists() == (number is signal.SIGTERM)
    with daemon, faulty.healing(), Client(daemon.socket_path) as client:
        if not deaf:
            assert client.arena.path != arena, "what hangs may still come, into that one"
        client.store(60, CHUNKS)
        assert in_time(client.look_up(60, CHUNKS, WAIT_MS), WAIT_MS).found.chunks == CHUNKS
        faulty.heal()
        assert old.wait(DEADLINE_SECONDS) is not None
        until(lambda: value(daemon, "is_open") == 1, "it opens by itself")

        def is_read(prompt: int) -> bool:
            return client.look_up(prompt, CHUNKS, LONG_MS).found.chunks == CHUNKS

        for prompt in range(4):
            until(partial(is_read, prompt), "it is read")
        assert client.look_up(60, CHUNKS).found.chunks == CHUNKS
        assert value(daemon, "objects_damaged") == 0


def test_a_daemon_that_was_killed_while_its_storage_hung(
    tmp_path: Path, faulty: FaultyFs, written: Path
) -> None:
    """The old process ends when the storage answers. Then the next one serves the right bytes."""
    daemon = serve(tmp_path, faulty.mountpoint)
    preload(written, faulty.backing)
    with started(daemon), Client(daemon.socket_path) as client:
        client.store(50, CHUNKS)
        until(lambda: is_written(daemon.socket_path), "everything is written")
        faulty.hang(Op.READ, Op.WRITE)
        client.store(60, CHUNKS)
        for prompt in range(4):
            client.ask(prompt, CHUNKS, LONG_MS)
        until(lambda: faulty.held(Op.READ) > 0 and faulty.held(Op.WRITE) > 0, "it hangs")
        assert stats(daemon.socket_path)["writes_waiting"] == CHUNKS * len(GEOMETRY.groups), (
            "those being written too"
        )
        old = daemon.process
        assert old is not None
        old.kill()
        until(lambda: is_over(old.pid), "it is killed")
        command = daemon_command(daemon.socket_path, ["--metrics-port", "-1"])
        assert subprocess.run(command, check=False).returncode == EXIT_ALREADY_SERVED, (
            "its threads are still there"
        )
        faulty.heal()
        assert old.wait(DEADLINE_SECONDS) == -signal.SIGKILL
    with daemon, faulty.healing(), Client(daemon.socket_path) as client:
        is_up(daemon)
        for prompt in (0, 1, 2, 3, 50, 60):
            chunks = client.look_up(prompt, CHUNKS, LONG_MS).found.chunks
            assert chunks == CHUNKS, prompt
        assert value(daemon, "objects_damaged") == 0
        # What only the arena had is being written by now; nothing of the killed daemon stays.
        unfinished = "objects/*/tmp/*/*"
        until(lambda: not list(faulty.mountpoint.glob(unfinished)), "no unfinished file is left")
