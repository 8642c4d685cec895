"""The tests of test_nfs.py, which run on the machine that has NFS."""

import contextlib
import errno
import itertools
import os
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import pytest

from hybridkv.core.tier_urls import parse_tier
from hybridkv.lab.daemon_process import DaemonProcess
from hybridkv.tiers.conformance.samples import make_sample, read
from hybridkv.tiers.contract import FindRequest, MissingError, TierError
from hybridkv.tiers.disk import fsck as disk_fsck
from hybridkv.tiers.disk.tier import DiskTier
from hybridkv.tiers.disk.writers import LOST_SECONDS, QUIET_SECONDS, clock, home_of, silent_seconds
from tests.fault.nfs.nodes import LEASE_SECONDS, MOUNT, MOUNTS, Client, Server
from tests.fault.test_tier_faults import CHUNKS, LONG_MS, WAIT_MS, forget, in_time, serve, value
from tests.invariants import check_disk
from tests.unit.daemon.tierclient import Client as Engine
from tests.unit.daemon.tierclient import is_written
from tests.waiting import until

SAMPLES = range(20)
NAMES_SECONDS = 70.0  # A client keeps names and times for 60 s at most.
BACK_SECONDS = 6 * LEASE_SECONDS  # The longest that clients take to find a server that is back.
_tiers: dict[str, DiskTier] = {}
"""The tiers of a client's process, by the name of the writer."""
_fds: list[int] = []  # What a client's process has open.
_clocks = [time.time]  # This machine's clock.
_daemons: list[DaemonProcess] = []  # The daemons of a client's process.


@pytest.fixture(scope="session")
def server() -> Server:
    return Server()


@pytest.fixture(scope="module", params=[*MOUNTS.values()], ids=[*MOUNTS])
def clients(server: Server, request: pytest.FixtureRequest) -> Iterator[list[Client]]:
    with Client(1, request.param) as first, Client(2, request.param) as second:
        yield [first, second]


@pytest.fixture
def nodes(server: Server, clients: list[Client]) -> Iterator[list[Client]]:
    """Two clients, the tiers node0 and node1 of which are open."""
    for number, client in enumerate(clients):
        client.call(open_tier, f"node{number}")
    yield clients
    for client in clients:
        client.call(close_all)
    server.empty()


# What clients do


def open_tier(writer: str, size: str = "64MiB") -> None:
    tier = DiskTier(parse_tier(f"disk://{MOUNT}/tier?bytes={size}", "disk", writer))
    tier.open()
    _tiers[writer] = tier


def close_all() -> None:
    for tier in _tiers.values():
        tier.close()
    _tiers.clear()
    time.time = _clocks[0]
    while _fds:
        os.close(_fds.pop())


def put(writer: str, numbers: range) -> list[TierError | None]:
    return _tiers[writer].put([make_sample(number).write_request() for number in numbers])


def find_again(writer: str, numbers: range) -> list[bool]:
    return _tiers[writer].find_again([FindRequest(make_sample(number).key) for number in numbers])


def read_all(writer: str, numbers: range) -> list[TierError | None]:
    return [read(_tiers[writer], make_sample(number)) for number in numbers]


def discard(writer: str, numbers: range) -> None:
    _tiers[writer].discard([make_sample(number).key for number in numbers])


def tend(writer: str) -> None:
    """Look after the tier, and at all other writers, however short ago that was."""
    tier = _tiers[writer]
    tier.writers.alive_due_at = tier.writers.look_due_at = 0
    tier.tend()


def check(writer: str) -> None:
    check_disk(_tiers[writer])


def bytes_held(writer: str) -> int:
    """Returns the bytes that an index takes the files to have, after the index was checked."""
    index = _tiers[writer].index
    with index.lock:
        index.check_index()
        return index.held_bytes


def direct_io(writer: str) -> bool:
    return bool(_tiers[writer]._direct)  # noqa: SLF001  # only the log says it otherwise


def hold_open(writer: str, number: int) -> None:
    path = _tiers[writer].index.path_of(make_sample(number).key)
    assert path is not None
    _fds.append(os.open(path, os.O_RDONLY))


def release_files() -> list[int]:
    """Close the files, and read the first bytes of each first. Returns their lengths, or errors."""
    found = []
    while _fds:
        fd = _fds.pop()
        try:
            found.append(len(os.read(fd, 100)))
        except OSError as error:
            found.append(-(error.errno or 0))
        os.close(fd)
    return found


class StaleRead(NamedTuple):
    """The result of reading a record whose file is removed after it was opened."""

    error: TierError | None
    was_stale: bool  # Whether the client said ESTALE.


def read_while_another_removes(writer: str, number: int, opened: Path, removed: Path) -> StaleRead:
    """Read a record whose file is removed after it was opened, which these files say."""
    tier, real, turns = _tiers[writer], os.preadv, itertools.count()
    stale: list[OSError] = []

    def preadv(fd: int, *args: object) -> int:
        if next(turns) == 0:
            opened.touch()
            until(removed.exists, "it is removed", BACK_SECONDS)
        try:
            return real(fd, *args)  # type: ignore[arg-type]
        except OSError as error:
            if error.errno == errno.ESTALE:
                stale.append(error)
            raise

    with mock.patch("os.preadv", preadv):
        error = read(tier, make_sample(number))
    return StaleRead(error, bool(stale))


def keys_of(writer: str) -> int:
    return len(list(_tiers[writer].keys()))


def open_with_clock(writer: str, ahead_seconds: float) -> float:
    """Set the clock that the tier sees. Returns how far the tier finds the server's clock ahead."""
    real = _clocks[0]
    time.time = lambda: real() + ahead_seconds
    open_tier(writer)
    tend(writer)
    return _tiers[writer].index.clock_ahead_seconds


def silence_of(writer: str) -> float:
    """Returns the seconds for which a writer has been silent, as this client sees it."""
    root = MOUNT / "tier"
    silent = silent_seconds(home_of(root, writer), clock(root))
    assert silent is not None
    return silent


def fsck(writer: str) -> tuple[int, int, bool]:
    """Returns how many files of a writer are foreign, how many left over, and whether it lives."""
    root = MOUNT / "tier"
    report = disk_fsck.fsck(root, disk_fsck.list_files(root), repair=False, step=lambda: None)
    (found,) = (each for each in report.writers if each.name == writer)
    return found.foreign, found.leftovers, found.is_alive


def serve_daemon(directory: Path) -> None:
    """Write prompts by a daemon, and start it anew without what it had in RAM."""
    directory.mkdir()
    daemon = serve(directory, MOUNT / "tier")
    daemon.start()
    _daemons.append(daemon)
    with Engine(daemon.socket_path) as engine:
        for prompt in range(12):
            engine.store(prompt, CHUNKS)
        until(lambda: is_written(daemon.socket_path), "everything is written")
    forget(daemon)
    daemon.start()
    until(lambda: value(daemon, "is_open") == 1, "the tier is open", 60)
    with Engine(daemon.socket_path) as engine:
        assert engine.look_up(0, CHUNKS, LONG_MS).found.chunks == CHUNKS


def look_up_without_server() -> float:
    """Look up what is in RAM and what is not. Returns the seconds of the slowest answer."""
    (daemon,) = _daemons
    slowest = 0.0
    with Engine(daemon.socket_path) as engine:

        def is_left_alone() -> bool:
            nonlocal slowest
            for prompt in range(1, 8):
                answer = in_time(engine.look_up(prompt, CHUNKS, WAIT_MS), WAIT_MS)
                slowest = max(slowest, answer.seconds)
                assert answer.found.chunks == 0
            assert in_time(engine.look_up(0, CHUNKS, WAIT_MS)).found.chunks == CHUNKS
            return value(daemon, "breaker_open") == 1

        until(is_left_alone, "the tier is left alone", 60)
        answer = in_time(engine.look_up(8, CHUNKS, LONG_MS), LONG_MS)
        assert answer.seconds < 1, "a tier that is left alone is not waited for"
    return slowest


def look_up_with_server() -> float:
    """Look up everything, until it is there. Returns the seconds that it took."""
    (daemon,) = _daemons
    started = time.monotonic()
    with Engine(daemon.socket_path) as engine:
        for prompt in range(12):

            def is_hit(prompt: int = prompt) -> bool:
                return engine.look_up(prompt, CHUNKS, WAIT_MS).found.chunks == CHUNKS

            until(is_hit, "it is hit again", 2 * BACK_SECONDS)
        assert value(daemon, "objects_damaged") == 0
    return time.monotonic() - started


def end_daemon() -> None:
    forget(_daemons.pop())


# Tests


def test_what_another_node_wrote_is_read_or_missing(nodes: list[Client]) -> None:
    assert nodes[1].call(find_again, "node1", SAMPLES) == [False] * len(SAMPLES)
    assert nodes[0].call(put, "node0", SAMPLES) == [None] * len(SAMPLES)
    found = nodes[1].call(find_again, "node1", SAMPLES)
    errors = nodes[1].call(read_all, "node1", SAMPLES)
    for is_found, error in zip(found, errors, strict=True):
        assert error is None if is_found else isinstance(error, MissingError)
    started = time.monotonic()
    until(
        lambda: all(nodes[1].call(find_again, "node1", SAMPLES)),
        "the client forgets that they were missing",
        NAMES_SECONDS,
    )
    print(f"found at once: {found.count(True)}; all after {time.monotonic() - started:.1f} s")
    assert nodes[1].call(read_all, "node1", SAMPLES) == [None] * len(SAMPLES)
    print("direct I/O:", nodes[0].call(direct_io, "node0"))
    nodes[0].call(check, "node0")


@pytest.mark.parametrize("is_restarted", [False, True])
def test_a_file_that_another_node_removed_while_it_is_open_is_missing(
    server: Server, nodes: list[Client], tmp_path: Path, is_restarted: bool
) -> None:
    assert nodes[0].call(put, "node0", SAMPLES) == [None] * len(SAMPLES)
    nodes[1].call(tend, "node1")
    until(lambda: all(nodes[1].call(find_again, "node1", SAMPLES)), "they are seen", NAMES_SECONDS)
    opened, removed = tmp_path / "opened", tmp_path / "removed"
    nodes[1].begin(read_while_another_removes, "node1", 3, opened, removed)
    until(opened.exists, "it is opened")
    (path,) = server.path.glob(f"tier/objects/node0/??/{make_sample(3).key.hex()}.*")
    path.unlink()
    # The server of NFS 4 keeps a file that a client has open, but not over its own end.
    with server.stopped() if is_restarted else contextlib.nullcontext():
        pass
    removed.touch()
    result = nodes[1].result()
    print(f"the client said ESTALE: {result.was_stale}; then the read is {result.error!r}")
    if result.was_stale or isinstance(result.error, MissingError):
        assert isinstance(result.error, MissingError)
    elif is_restarted:
        assert type(result.error) is TierError
    else:
        assert result.error is None
    nodes[0].call(discard, "node0", range(5, 10))
    errors = nodes[1].call(read_all, "node1", SAMPLES)
    for number, error in zip(SAMPLES, errors, strict=True):
        is_gone = number == 3 or number in range(5, 10)
        assert isinstance(error, MissingError) if is_gone else error is None


def test_a_file_that_is_removed_while_its_own_client_has_it_open(
    server: Server, nodes: list[Client]
) -> None:
    """The client gives it another name, which is no record's, and does not count for long."""
    assert nodes[0].call(put, "node0", SAMPLES) == [None] * len(SAMPLES)
    for number in range(3):
        nodes[0].call(hold_open, "node0", number)
    nodes[0].call(discard, "node0", SAMPLES)
    assert len(list(server.path.glob("tier/objects/node0/??/.nfs*"))) == 3
    nodes[1].call(tend, "node1")
    assert nodes[1].call(keys_of, "node1") == 0
    assert nodes[0].call(fsck, "node0") == (0, 3, True)
    nodes[0].call(open_tier, "node0")
    nodes[0].call(check, "node0")
    assert nodes[0].call(keys_of, "node0") == 0
    assert nodes[0].call(release_files) == [100] * 3, "its bytes are there as long as it is open"
    nodes[0].call(tend, "node0")
    assert not list(server.path.glob("tier/objects/node0/??/.nfs*"))
    nodes[0].call(check, "node0")


def test_what_a_client_that_died_left_is_removed(server: Server, nodes: list[Client]) -> None:
    """A machine that loses power removes no file that its NFS client had renamed."""
    assert nodes[0].call(put, "node0", SAMPLES) == [None] * len(SAMPLES)
    (path, *_) = sorted(server.path.glob("tier/objects/node0/??/*"))
    orphan = path.with_name(".nfs000000000000a0010000000b")
    orphan.write_bytes(bytes(40_000))
    nodes[0].call(open_tier, "node0")
    assert not orphan.exists()
    nodes[0].call(check, "node0")


def test_who_is_taken_over_whose_file_is_open_is_gone_once_it_is_closed(
    server: Server, nodes: list[Client]
) -> None:
    nodes[0].call(open_tier, "left")
    assert nodes[0].call(put, "left", SAMPLES) == [None] * len(SAMPLES)
    nodes[1].call(tend, "node1")
    until(lambda: all(nodes[1].call(find_again, "node1", SAMPLES)), "they are seen", NAMES_SECONDS)
    for number in range(3):
        nodes[1].call(hold_open, "node1", number)
    os.utime(server.path / "tier/objects/left/alive", (0, 0))
    nodes[1].call(tend, "node1")
    nodes[1].call(check, "node1")
    assert nodes[1].call(release_files) == [100] * 3
    assert nodes[1].call(read_all, "node1", SAMPLES) == [None] * len(SAMPLES)
    names = [path.name for path in server.path.glob("tier/objects/*") if any(path.glob("*/*"))]
    assert sorted(names) in (["node1"], ["node0", "node1"]), names


def test_a_writer_that_lives_keeps_its_files_over_a_server_that_restarts(
    server: Server, nodes: list[Client]
) -> None:
    for number, client in enumerate(nodes):
        samples = range(100 * number, 100 * number + 20)
        assert client.call(put, f"node{number}", samples) == [None] * 20
    with server.stopped():
        pass
    for number, client in enumerate(nodes):
        wait_for_server(client, f"node{number}")
    # As after an outage of two hours: the last sign of life of each writer is that old.
    for number in range(2):
        alive = server.path / f"tier/objects/node{number}/alive"
        then = alive.stat().st_mtime - 2 * LOST_SECONDS
        os.utime(alive, (then, then))
    time.sleep(4)  # The times of files that are cached for 3 s are old enough by then.
    nodes[0].call(tend, "node0")
    nodes[1].call(tend, "node1")
    for number, client in enumerate(nodes):
        client.call(check, f"node{number}")
        samples = range(100 * number, 100 * number + 20)
        assert client.call(read_all, f"node{number}", samples) == [None] * 20
        assert client.call(keys_of, f"node{number}") == 40
    homes = sorted(path.name for path in server.path.glob("tier/objects/*"))
    assert homes == ["node0", "node1"]


def wait_for_server(client: Client, writer: str) -> None:
    def is_back() -> bool:
        try:
            client.call(tend, writer)
        except TierError:
            return False
        return True

    until(is_back, "the server is back", BACK_SECONDS)


@pytest.mark.parametrize("ahead_seconds", [-600.0, 600.0])
def test_the_clock_of_a_client_may_be_minutes_off(
    server: Server, nodes: list[Client], ahead_seconds: float
) -> None:
    assert nodes[0].call(put, "node0", SAMPLES) == [None] * len(SAMPLES)
    found = nodes[1].call(open_with_clock, "node1", ahead_seconds)
    assert abs(found + ahead_seconds) < 60
    assert nodes[1].call(fsck, "node0") == (0, 0, True)
    alive = server.path / "tier/objects/node0/alive"
    for seconds in (QUIET_SECONDS / 2, LOST_SECONDS - QUIET_SECONDS):
        touched_at = _clocks[0]() - seconds
        os.utime(alive, (touched_at, touched_at))
        nodes[1].call(tend, "node1")
        assert alive.exists()
        assert nodes[1].call(fsck, "node0")[2] == (seconds < QUIET_SECONDS)
    nodes[0].call(tend, "node0")
    nodes[0].call(check, "node0")


def test_no_lock_is_asked_for(nodes: list[Client]) -> None:
    """A lock proves nothing there, so it makes no difference whether the server has locks."""
    assert nodes[0].call(put, "node0", SAMPLES) == [None] * len(SAMPLES)
    inodes = {line.split()[5] for line in Path("/proc/locks").read_text().splitlines()}
    alive = {str(path.stat().st_ino) for path in Path("/tmp/server/export").glob("**/alive")}
    assert alive
    assert not {text.rpartition(":")[2] for text in inodes} & alive


def test_a_server_that_lost_all_handles(server: Server, nodes: list[Client]) -> None:
    """Its files are restored from a copy: no handle that a client has is known any more."""
    for number, client in enumerate(nodes):
        samples = range(100 * number, 100 * number + 20)
        assert client.call(put, f"node{number}", samples) == [None] * 20
        client.call(hold_open, f"node{number}", samples[0])
    server.restore()
    for number, client in enumerate(nodes):
        wait_for_server(client, f"node{number}")
        errors = client.call(read_all, f"node{number}", range(100 * number, 100 * number + 20))
        print("with the old handles:", Counter(type(error).__name__ for error in errors))
        assert all(error is None or isinstance(error, TierError) for error in errors)
        client.call(open_tier, f"node{number}")
        errors = client.call(read_all, f"node{number}", range(100 * number, 100 * number + 20))
        assert errors == [None] * 20
        client.call(check, f"node{number}")


def test_no_lookup_waits_for_a_server_that_is_away(
    server: Server, clients: list[Client], tmp_path: Path
) -> None:
    clients[0].call(serve_daemon, tmp_path / "daemon")
    with server.stopped():
        slowest = clients[0].call(look_up_without_server)
    back = clients[0].call(look_up_with_server)
    clients[0].call(end_daemon)
    server.empty()
    print(f"slowest answer {slowest * 1e3:.0f} ms; all is hit again after {back:.1f} s")


@pytest.mark.parametrize("mount", ["v42", "v3"])
def test_options_that_keep_times_for_long_and_no_missing_names(server: Server, mount: str) -> None:
    options = f"{MOUNTS[mount]},actimeo=3600,lookupcache=positive"
    with Client(3, MOUNTS[mount]) as writer, Client(4, options) as reader:
        writer.call(open_tier, "node0")
        reader.call(open_tier, "node1")
        assert reader.call(find_again, "node1", SAMPLES) == [False] * len(SAMPLES)
        assert writer.call(put, "node0", SAMPLES) == [None] * len(SAMPLES)
        assert reader.call(find_again, "node1", SAMPLES) == [True] * len(SAMPLES)
        assert reader.call(read_all, "node1", SAMPLES) == [None] * len(SAMPLES)
        alive = server.path / "tier/objects/node0/alive"
        touched_at = alive.stat().st_mtime
        os.utime(alive, (touched_at - LOST_SECONDS,) * 2)
        assert reader.call(silence_of, "node0") > LOST_SECONDS - 60
        writer.call(tend, "node0")
        assert reader.call(silence_of, "node0") < 60
        for client in (writer, reader):
            client.call(close_all)
    server.empty()
