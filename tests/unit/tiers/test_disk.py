"""The directory tier on a real file system."""

import errno
import os
import random
import resource
import signal
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from hybridkv.core.errors import ConfigError
from hybridkv.core.keys import KEY_BYTES
from hybridkv.core.tier_urls import parse_tier
from hybridkv.shm.slots import SLOT_ALIGN
from hybridkv.tiers.conformance.samples import SampleObject, make_sample, read
from hybridkv.tiers.conformance.suite import BOUND_BYTES, TierSuite
from hybridkv.tiers.contract import DamagedError, FullError, MissingError, Tier, TierError
from hybridkv.tiers.disk.alive import Life, proven_life
from hybridkv.tiers.disk.files import (
    FAILED_IN_A_ROW_MAX,
    QUARANTINE_MAX,
    FileName,
    parse_name,
    prove_file,
)
from hybridkv.tiers.disk.index import STUCK_MAX, FileIndex
from hybridkv.tiers.disk.tier import DiskTier
from hybridkv.tiers.disk.writers import LAYOUT_FILE, QUIET_SECONDS, check_root
from hybridkv.tiers.factory import make_tier
from tests.invariants import check_disk


def disk(root: Path, writer: str = "here", size: str = "64MiB") -> DiskTier:
    return DiskTier(parse_tier(f"disk://{root}?bytes={size}", "disk", writer))


def opened(root: Path, writer: str = "here", size: str = "64MiB") -> DiskTier:
    tier = disk(root, writer, size)
    tier.open()
    return tier


def look(tier: DiskTier) -> None:
    """Tend the tier, and look at the other writers however short ago that was."""
    tier.writers.look_due_at = 0
    tier.tend()


def path_of(tier: DiskTier, key: bytes) -> str:
    path = tier.index.path_of(key)
    assert path is not None
    return path


def real_bytes(root: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in root.glob("objects/*/??/*"))


class TestDisk(TierSuite):
    shared = False

    @pytest.fixture(autouse=True)
    def _directory(self, tmp_path: Path) -> None:
        self._root = tmp_path / "tier"

    def make_tier(self) -> Tier:
        return disk(self._root)

    def make_away(self) -> Tier:
        self._root.touch()
        return disk(self._root / "tier")

    def make_bounded(self) -> Tier:
        return disk(self._root, size=str(BOUND_BYTES))


class TestSharedDirectory(TierSuite):
    """Each tier object is another node."""

    @pytest.fixture(autouse=True)
    def _directory(self, tmp_path: Path) -> None:
        self._root = tmp_path / "tier"
        self._count = 0

    def make_tier(self) -> DiskTier:
        self._count += 1
        return disk(self._root, f"node-{self._count}")

    def make_away(self) -> DiskTier:
        self._root.touch()
        return self.make_tier()


class TestWithoutDirectIO(TestDisk):
    @pytest.fixture(autouse=True)
    def _no_flag(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(os, "O_DIRECT", 0)


class TestCompressed(TestDisk):
    encoded = True

    def make_tier(self) -> Tier:
        url = f"disk://{self._root}?bytes=64MiB&codec=zplanes"
        return make_tier(parse_tier(url, "disk"), "here")


class TestEncrypted(TestDisk):
    encoded = True

    def make_tier(self) -> Tier:
        key = self._root.with_name("tier.key")
        key.write_bytes(bytes(range(32)))
        key.chmod(0o600)
        url = f"disk://{self._root}?bytes=64MiB&codec=zplanes&key=file:{key}"
        return make_tier(parse_tier(url, "disk"), "here")


def test_a_file_system_without_direct_io_is_told_of_at_the_first_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    real = os.open

    def without(path: str, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), path)
        return real(path, flags, mode)

    with mock.patch("os.open", without), caplog.at_level("INFO", "hybridkv.daemon"):
        tier = opened(tmp_path)
        assert tier.put([make_sample(1).write_request()]) == [None]
    assert [line.endswith("; no direct I/O there") for line in caplog.messages] == [True]


def chain(length: int, start: int = 0, part_bytes: int = 9000) -> list[tuple[SampleObject, bytes]]:
    """Records of one prompt's prefix, each with the tag of the one before."""
    samples = [make_sample(start + 5 * n, part_bytes, namespace=b"n" * 32) for n in range(length)]
    parents = [bytes(8), *(sample.record.name.chunk_hash[:8] for sample in samples[:-1])]
    return list(zip(samples, parents, strict=True))


def put(tier: DiskTier, records: list[tuple[SampleObject, bytes]]) -> list[TierError | None]:
    return tier.put([sample.write_request()._replace(parent=parent) for sample, parent in records])


def test_the_bound_holds_for_what_the_files_really_take(tmp_path: Path, rng: random.Random) -> None:
    tier = opened(tmp_path, size="1MiB")
    for number in range(200):
        assert tier.put([make_sample(number, rng.randrange(1, 60_000)).write_request()]) == [None]
        assert real_bytes(tmp_path) <= 1 << 20
        check_disk(tier)
    assert tier.gauges()["bytes"] > 800 << 10


def test_what_never_fits_is_refused(tmp_path: Path) -> None:
    tier = opened(tmp_path, size="64KiB")
    assert tier.put([make_sample(1).write_request()]) == [None]
    (error,) = tier.put([make_sample(2, 100_000).write_request()])
    assert isinstance(error, FullError)
    assert read(tier, make_sample(1)) is None


def test_a_lower_bound_holds_as_soon_as_the_next_one_opens(tmp_path: Path) -> None:
    tier = opened(tmp_path, size="4MiB")
    tier.put([make_sample(number, 100_000).write_request() for number in range(15)])
    assert real_bytes(tmp_path) > 1 << 20
    again = opened(tmp_path, size="1MiB")
    assert real_bytes(tmp_path) <= 1 << 20
    check_disk(again)
    assert read(again, make_sample(14, 100_000)) is None, "the oldest go"


def test_suffixes_go_before_prefixes_also_after_a_restart(tmp_path: Path) -> None:
    records = chain(20)
    for restart in (False, True):
        root = tmp_path / str(restart)
        tier = opened(root, size="480KiB")
        assert put(tier, records) == [None] * 20
        if restart:
            tier = opened(root, size="480KiB")
        put(tier, chain(8, start=1000))
        there = tier.find([sample.key for sample, _ in records])
        assert there[0]
        assert sorted(there, reverse=True) == there, "what is left is a prefix"
        assert not all(there)
        check_disk(tier)


def test_a_killed_writers_leftovers_go(tmp_path: Path) -> None:
    opened(tmp_path)
    (tmp_path / "objects/here/tmp/7/9").write_bytes(bytes(10_000))
    opened(tmp_path)
    assert not list(tmp_path.glob("objects/here/tmp/*/*"))


def test_what_a_lost_writer_left_is_taken_over_within_the_bound(tmp_path: Path) -> None:
    lost = opened(tmp_path, "lost")
    samples = [make_sample(number, 100_000) for number in range(15)]
    lost.put([sample.write_request() for sample in samples])
    tier = opened(tmp_path, size="1MiB")
    assert all(tier.find([sample.key for sample in samples])), (
        "others' files are read where they are"
    )
    tier.tend()
    assert (tmp_path / "objects/lost").exists(), "it may still live"
    os.utime(tmp_path / "objects/lost/alive", (1, 1))
    look(tier)
    assert not (tmp_path / "objects/lost").exists()
    assert 500 << 10 < real_bytes(tmp_path) <= 1 << 20
    check_disk(tier)
    look(tier)
    kept = [
        sample
        for sample, there in zip(
            samples, tier.find([sample.key for sample in samples]), strict=True
        )
        if there
    ]
    assert kept
    assert [read(tier, sample) for sample in kept] == [None] * len(kept)
    for sample in samples:
        assert isinstance(read(lost, sample), MissingError | None)


@pytest.mark.parametrize("lives", [2, 4])
def test_a_daemon_under_a_new_name_keeps_the_bound_of_all_its_lives(
    tmp_path: Path, lives: int
) -> None:
    """A container that is made anew has another host name."""
    for life in range(lives):
        tier = opened(tmp_path, f"c{life}", "1MiB")
        samples = [make_sample(100 * life + number, 100_000) for number in range(12)]
        for sample in samples:
            assert tier.put([sample.write_request()]) == [None]
            assert real_bytes(tmp_path) <= 1 << 20
        check_disk(tier)
        tier.close()
    assert os.listdir(tmp_path / "objects") == [f"c{lives - 1}"]
    again = opened(tmp_path, "last", "1MiB")
    there = again.find([sample.key for sample in samples])
    assert there.count(True) > 3, "what the life before stored is still hit"


def test_a_new_daemon_leaves_what_it_has_no_room_for_until_its_writer_is_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It may come back under its own name in a minute."""
    caplog.set_level("INFO")
    dead = opened(tmp_path, "dead", "2MiB")
    samples = [make_sample(number, 100_000) for number in range(10)]
    dead.put([sample.write_request() for sample in samples])
    dead.close()
    tier = opened(tmp_path, size="1MiB")
    assert "that dead left; 5 stay where they are for lack of room" in caplog.text
    assert "and 5 of 1 other writers" in caplog.text
    check_disk(tier)
    tier.tend()
    assert [read(tier, sample) for sample in samples] == [None] * 10, "read where it is"
    (home,) = tmp_path.glob("objects/dead*")
    os.utime(home, (1, 1))
    look(tier)
    assert os.listdir(tmp_path / "objects") == ["here"]
    check_disk(tier)


def test_a_daemon_that_runs_gives_a_dead_one_time_to_come_back(tmp_path: Path) -> None:
    tier, other, sample = opened(tmp_path), opened(tmp_path, "other"), make_sample(1)
    other.put([sample.write_request()])
    other.close()
    look(tier)
    back = opened(tmp_path, "other")
    assert back.index.own_count
    silent = time.time() - 2 * QUIET_SECONDS
    os.utime(tmp_path / "objects/other/alive", (silent, silent))
    look(tier)
    assert not tier.index.own_count, "it lives, and has only been silent"


def test_a_dead_writer_of_this_machine_is_taken_over_within_minutes(tmp_path: Path) -> None:
    tier, other, sample = opened(tmp_path), opened(tmp_path, "other"), make_sample(1)
    other.put([sample.write_request()])
    other.close()
    silent = time.time() - 2 * QUIET_SECONDS
    os.utime(tmp_path / "objects/other/alive", (silent, silent))
    look(tier)
    assert tier.index.own_bytes(sample.key)
    assert os.listdir(tmp_path / "objects") == ["here"]


@pytest.mark.parametrize("why", ["network", "older version"])
def test_a_silent_writer_that_may_live_is_left_and_the_log_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    if why == "network":
        monkeypatch.setattr("hybridkv.tiers.disk.alive.file_system", lambda _: 0x6969)
    opened(tmp_path, "other").put([make_sample(number).write_request() for number in range(3)])
    alive = tmp_path / "objects/other/alive"
    if why == "older version":
        alive.write_text("0" * 32)
    tier = opened(tmp_path)
    assert not caplog.text
    silent = time.time() - 2 * QUIET_SECONDS
    os.utime(alive, (silent, silent))
    for _ in range(3):
        look(tier)
    assert sorted(os.listdir(tmp_path / "objects")) == ["here", "other"]
    (message,) = caplog.messages
    assert "the writer other of" in message
    assert "about 60KiB in 3 objects stay beside the bound" in message


def test_a_writer_that_is_being_taken_over_opens_when_that_is_done(tmp_path: Path) -> None:
    opened(tmp_path, "back").close()
    with proven_life(tmp_path / "objects/back/alive") as life:
        assert life is Life.DEAD
        with pytest.raises(TierError, match="temporarily unavailable"):
            opened(tmp_path, "back")
    back = opened(tmp_path, "back")
    with proven_life(tmp_path / "objects/back/alive") as life:
        assert life is Life.ALIVE
    assert back.put([make_sample(1).write_request()]) == [None]


def test_a_killed_process_is_a_dead_writer_at_once(tmp_path: Path) -> None:
    code = (
        "import sys; from hybridkv.core.tier_urls import parse_tier;"
        "from hybridkv.tiers.disk.tier import DiskTier;"
        "tier = DiskTier(parse_tier(sys.argv[1], 'disk', 'killed')); tier.open();"
        "print(flush=True); sys.stdin.read()"
    )
    words = [sys.executable, "-c", code, f"disk://{tmp_path}?bytes=64MiB"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as killed:
        assert killed.stdout is not None
        assert killed.stdout.readline() == b"\n"
        opened(tmp_path).close()
        assert (tmp_path / "objects/killed").exists()
        killed.kill()
    opened(tmp_path, "next")
    assert os.listdir(tmp_path / "objects") == ["next"]


@pytest.mark.parametrize("is_chain", [True, False])
def test_a_file_costs_the_index_few_bytes(
    tmp_path: Path, rng: random.Random, is_chain: bool
) -> None:
    count, namespace = 5_000, rng.randbytes(32)
    names = [FileName(bytes(KEY_BYTES))]
    for _ in range(count):
        head = namespace + rng.randbytes(32) if is_chain else rng.randbytes(64)
        parent = names[-1].key[32:40] if is_chain else rng.randbytes(8)
        names.append(FileName(head + b"\0\1", parent))
    index = FileIndex(1 << 40, tmp_path)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        with index.lock:
            for name in names[1:]:
                index.insert_file(name, 4096, 1.0)
        used = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert used / count < (280 if is_chain else 360)
    assert 0.8 < index.memory_bytes / used < 1.25
    index.check_index()


def test_two_daemons_of_one_name_do_not_write_over_each_other(tmp_path: Path) -> None:
    first = opened(tmp_path)
    first.tend()
    opened(tmp_path).tend()
    first.writers.alive_due_at = 0
    with pytest.raises(TierError, match="another daemon"):
        first.tend()


def test_a_writer_that_was_silent_for_too_long_goes_on(tmp_path: Path) -> None:
    """As after a night in standby: the others have its objects, and it writes new ones."""
    tier, neighbour = opened(tmp_path), opened(tmp_path, "other")
    tier.put([make_sample(1).write_request()])
    os.utime(tmp_path / "objects/here/alive", (1, 1))
    look(neighbour)
    assert isinstance(read(tier, make_sample(1)), MissingError)
    tier.tend()
    assert read(tier, make_sample(1)) is None, "it is the other's now"
    assert tier.put([make_sample(2).write_request()]) == [None]
    assert read(tier, make_sample(2)) is None
    check_disk(tier)


def test_what_cannot_be_removed_counts(tmp_path: Path) -> None:
    """A file system that is read-only for a while: nothing is forgotten that is still there."""
    tier = opened(tmp_path, size="256KiB")
    samples = [make_sample(number, 9000) for number in range(9)]
    assert tier.put([sample.write_request() for sample in samples]) == [None] * 9
    read_only = OSError(errno.EROFS, os.strerror(errno.EROFS))
    with (
        mock.patch("os.unlink", side_effect=read_only),
        mock.patch("os.rename", side_effect=read_only),
    ):
        for number in range(9, 30):
            (error,) = tier.put([make_sample(number, 9000).write_request()])
            assert isinstance(error, TierError)
            assert real_bytes(tmp_path) <= 256 << 10
        assert all(tier.find([sample.key for sample in samples])), "nothing was evicted in vain"
        tier.discard([samples[0].key], damaged=True)
        assert isinstance(read(tier, samples[0]), MissingError)
        check_disk(tier)
    for number in range(40, 60):
        assert tier.put([make_sample(number, 9000).write_request()]) == [None]
        check_disk(tier)
    tier.tend()
    assert not list(tmp_path.glob("objects/here/tmp/*/*"))
    assert not [
        path
        for path in tmp_path.glob("objects/here/??/*")
        if path.name.startswith(samples[0].key.hex())
    ]
    check_disk(tier)


def before_write(action: Callable[[], None]) -> Any:
    """Patches os.pwritev, so that `action` is called before the first write to a file."""
    real, turns = os.pwritev, iter([True])

    def pwritev(*args: Any) -> int:
        if next(turns, False):
            action()
        return real(*args)

    return mock.patch("os.pwritev", pwritev)


def test_one_object_under_two_names_is_one_file(tmp_path: Path) -> None:
    """Two threads put it at the same time, of two prompts: its prefix is told differently."""
    tier = opened(tmp_path)
    sample = make_sample(1)

    def put_second_name() -> None:
        assert tier.put([sample.write_request()._replace(parent=b"parent__")]) == [None]

    with before_write(put_second_name):
        assert tier.put([sample.write_request()]) == [None]
    assert len(list(tmp_path.glob("objects/here/??/*"))) == 1
    assert read(tier, sample) is None
    check_disk(tier)


@pytest.mark.parametrize("cut", range(0, 24_576, 512))
def test_a_file_that_was_cut_is_damaged(tmp_path: Path, cut: int) -> None:
    tier = opened(tmp_path)
    sample = make_sample(1)
    tier.put([sample.write_request()])
    (path,) = tmp_path.glob("objects/here/??/*")
    if cut < path.stat().st_size:
        os.truncate(path, cut)
        assert isinstance(read(tier, sample), DamagedError)


def test_quarantine_keeps_a_few(tmp_path: Path) -> None:
    tier = opened(tmp_path)
    for number in range(QUARANTINE_MAX + 5):
        tier.put([make_sample(number).write_request()])
        tier.discard([make_sample(number).key], damaged=True)
    assert len(list((tmp_path / "quarantine").iterdir())) == QUARANTINE_MAX
    assert tier.gauges()["bytes"] == 0


def test_a_file_that_vanished_is_missing(tmp_path: Path) -> None:
    tier = opened(tmp_path)
    tier.put([make_sample(1).write_request()])
    (path,) = tmp_path.glob("objects/here/??/*")
    path.unlink()
    assert isinstance(read(tier, make_sample(1)), MissingError)
    assert tier.find([make_sample(1).key]) == [False]
    check_disk(tier)


@pytest.mark.parametrize(
    "number", [errno.EIO, errno.EROFS, errno.ESTALE, errno.EMFILE, errno.ENOSPC]
)
def test_an_error_of_the_file_system_is_the_items_own(tmp_path: Path, number: int) -> None:
    tier = opened(tmp_path)
    tier.put([make_sample(1).write_request()])
    with mock.patch("os.pwritev", side_effect=OSError(number, os.strerror(number))):
        (error,) = tier.put([make_sample(2).write_request()])
    assert isinstance(error, FullError) == (number == errno.ENOSPC)
    assert isinstance(error, TierError)
    with mock.patch("os.preadv", side_effect=OSError(number, os.strerror(number))):
        assert isinstance(read(tier, make_sample(3)), MissingError)
        if number != errno.ENOSPC:
            assert isinstance(read(tier, make_sample(1)), TierError)
    check_disk(tier)
    assert not list(tmp_path.glob("objects/here/tmp/*/*"))
    assert tier.put([make_sample(2).write_request()]) == [None]


def test_a_real_limit_on_file_size_leaves_nothing_behind(tmp_path: Path) -> None:
    tier = opened(tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (SLOT_ALIGN, limits[1]))
    try:
        (error,) = tier.put([make_sample(1, 20_000).write_request()])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert isinstance(error, TierError)
    assert not list(tmp_path.glob("objects/here/??/*"))
    check_disk(tier)


def test_another_versions_directory_is_refused(tmp_path: Path) -> None:
    opened(tmp_path)
    (tmp_path / "hybridkv-tier").write_text("99\n")
    with pytest.raises(ConfigError, match="a new directory works"):
        opened(tmp_path)


def test_a_directory_that_cannot_be_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="a directory that you may write to works"):
        opened(tmp_path / "file")


@pytest.mark.parametrize("writer", ["here", "other"])
def test_what_is_put_again_while_a_reader_finds_nothing_stays(tmp_path: Path, writer: str) -> None:
    tier, sample = opened(tmp_path), make_sample(1)
    opened(tmp_path, writer).put([sample.write_request()])
    tier.open()
    real, turns = os.open, iter([True])

    def meanwhile(*args: Any) -> int:
        if not next(turns, False):
            return real(*args)
        tier.discard([sample.key])
        try:
            return real(*args)
        finally:
            assert tier.put([sample.write_request()]) == [None]

    with mock.patch("os.open", meanwhile):
        assert isinstance(read(tier, sample), MissingError)
    check_disk(tier)
    assert read(tier, sample) is None


def test_a_quarantine_that_somebody_removed_is_made_again(tmp_path: Path) -> None:
    tier = opened(tmp_path)
    tier.put([make_sample(1).write_request()])
    (tmp_path / "quarantine").rmdir()
    tier.discard([make_sample(1).key], damaged=True)
    assert len(list((tmp_path / "quarantine").iterdir())) == 1
    assert real_bytes(tmp_path) == tier.gauges()["bytes"] == 0
    check_disk(tier)


@pytest.mark.parametrize("damaged", [False, True])
def test_what_is_discarded_counts_until_it_is_gone(tmp_path: Path, damaged: bool) -> None:
    """Whoever puts meanwhile must not be given its room."""
    tier = opened(tmp_path)
    tier.put([make_sample(number).write_request() for number in range(3)])
    name = "rename" if damaged else "unlink"
    real, spare = getattr(os, name), []

    def watched(*args: Any) -> None:
        spare.append(tier.gauges()["bytes"] - real_bytes(tmp_path))
        real(*args)

    with mock.patch(f"os.{name}", watched):
        tier.discard([make_sample(number).key for number in range(3)], damaged)
    assert spare == [0, 0, 0]
    assert tier.gauges()["bytes"] == 0
    check_disk(tier)


def test_a_second_name_counts_until_it_is_gone(tmp_path: Path) -> None:
    tier, sample = opened(tmp_path), make_sample(1)
    unlink, spare = os.unlink, []

    def put_second_name() -> None:
        assert tier.put([sample.write_request()._replace(parent=b"parent__")]) == [None]

    def watched(path: str) -> None:
        spare.append(tier.gauges()["bytes"] - real_bytes(tmp_path))
        unlink(path)

    with before_write(put_second_name), mock.patch("os.unlink", watched):
        assert tier.put([sample.write_request()]) == [None]
    assert [bytes_ >= 0 for bytes_ in spare] == [True]
    check_disk(tier)


def failing(*paths: str) -> Any:
    """os.unlink fails of these files, or of all."""
    unlink = os.unlink

    def fails(path: str) -> None:
        if not paths or path in paths:
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        unlink(path)

    return mock.patch("os.unlink", fails)


def test_files_that_cannot_be_removed_do_not_end_all_puts(tmp_path: Path) -> None:
    tier = opened(tmp_path, size="256KiB")
    records = [make_sample(number, 9000) for number in range(12)]
    tier.put([sample.write_request() for sample in records])
    bad = [path_of(tier, sample.key) for sample in records if tier.index.own_bytes(sample.key)][
        : STUCK_MAX + 2
    ]
    with failing(*bad):
        tier.put([make_sample(20, 9000).write_request()])
        tier.tend()
        for number in range(30, 60):
            assert tier.put([make_sample(number, 9000).write_request()]) == [None]
            check_disk(tier)
        assert all(map(os.path.exists, bad))
    tier.tend()
    assert not any(map(os.path.exists, bad))
    check_disk(tier)


def test_a_leftover_that_cannot_be_removed_counts_when_it_is_opened_again(tmp_path: Path) -> None:
    tier = opened(tmp_path)
    enter = tier.writers.make_directories

    def then() -> None:
        enter()
        with (
            failing(),
            mock.patch("os.rename", side_effect=OSError(errno.EIO, os.strerror(errno.EIO))),
        ):
            assert isinstance(tier.put([make_sample(1).write_request()])[0], TierError)

    with mock.patch.object(tier.writers, "make_directories", then):
        tier.open()
    assert list(tmp_path.glob("objects/here/tmp/*/*"))
    check_disk(tier)
    tier.open()
    assert tier.gauges()["bytes"] == 0
    check_disk(tier)


def unreadable(number: int, *paths: str) -> Any:
    """These files, or all, cannot be opened to read."""
    real = os.open

    def fails(path: str, flags: int, *mode: int) -> int:
        if not flags & os.O_CREAT and (not paths or path in paths):
            raise OSError(number, os.strerror(number), path)
        return real(path, flags, *mode)

    return mock.patch("os.open", fails)


@pytest.mark.parametrize("number", [errno.EIO, errno.EUCLEAN, errno.EBADMSG, errno.EACCES])
@pytest.mark.parametrize("stuck", [False, True])
def test_a_file_that_alone_cannot_be_read_is_damaged(
    tmp_path: Path, number: int, stuck: bool
) -> None:
    """`stuck`: it can neither be put aside nor removed."""
    tier, bad, sound = opened(tmp_path), make_sample(1), make_sample(2)
    tier.put([bad.write_request(), sound.write_request()])
    path = path_of(tier, bad.key)
    error = OSError(errno.EIO, os.strerror(errno.EIO))
    with unreadable(number, path):
        assert [type(read(tier, bad)) for _ in range(3)] == [TierError] * 3, "nothing was read"
        assert read(tier, sound) is None
        assert type(read(tier, bad)) is DamagedError
        with mock.patch("os.rename", side_effect=error if stuck else os.rename), failing(path):
            tier.discard([bad.key], damaged=True)
    assert os.path.exists(path) == stuck
    assert not tier.peek(bad.key)
    check_disk(tier)
    assert tier.put([bad.write_request()]) == [None]
    assert read(tier, bad) is None
    check_disk(tier)


def test_a_disk_that_cannot_be_read_damages_nothing(tmp_path: Path) -> None:
    """It fails for a while, is well, and fails again."""
    tier, samples = opened(tmp_path), [make_sample(number) for number in range(5)]
    tier.put([sample.write_request() for sample in samples])
    for _ in range(3):
        with unreadable(errno.EIO):
            for _ in range(2):
                assert [type(read(tier, sample)) for sample in samples] == [TierError] * 5
        assert [read(tier, sample) for sample in samples] == [None] * 5


@pytest.mark.parametrize(
    "number", [errno.EMFILE, errno.ENOMEM, errno.EINTR, errno.ESTALE, errno.ETIMEDOUT]
)
def test_an_error_that_says_nothing_of_the_file_does_not_damage_it(
    tmp_path: Path, number: int
) -> None:
    tier, unreadable_sample, sound_sample = opened(tmp_path), make_sample(1), make_sample(2)
    tier.put([unreadable_sample.write_request(), sound_sample.write_request()])
    with unreadable(number, path_of(tier, unreadable_sample.key)):
        for _ in range(3):
            assert type(read(tier, unreadable_sample)) is TierError
            assert read(tier, sound_sample) is None


def failing_on(name: str, number: int, *paths: str) -> Any:
    """This function of `os` fails of these files."""
    real = getattr(os, name)

    def fails(path: Any, *args: Any, **options: Any) -> Any:
        if str(path) in paths:
            raise OSError(number, os.strerror(number), str(path))
        return real(path, *args, **options)

    return mock.patch(f"os.{name}", fails)


FILE_ERRORS = [errno.EIO, errno.EPERM, errno.EACCES]


@pytest.mark.parametrize("number", FILE_ERRORS)
def test_a_file_that_cannot_be_looked_at_keeps_no_other_from_being_found(
    tmp_path: Path, number: int, caplog: pytest.LogCaptureFixture
) -> None:
    samples = [make_sample(number) for number in range(5)]
    opened(tmp_path).put([sample.write_request() for sample in samples])
    (path,) = (str(path) for path in tmp_path.glob(f"objects/here/??/{samples[2].key.hex()}.*"))
    with failing_on("stat", number, path):
        tier = opened(tmp_path)
        assert tier.find([sample.key for sample in samples]) == [True, True, False, True, True]
    assert tier.gauges()["files_failed"] == 1
    assert f"left as they are: 1 ({os.strerror(number)}: {path})" in caplog.text
    check_disk(opened(tmp_path))


@pytest.mark.parametrize("number", FILE_ERRORS)
def test_a_leftover_that_cannot_be_removed_keeps_no_tier_from_being_opened(
    tmp_path: Path, number: int, caplog: pytest.LogCaptureFixture
) -> None:
    opened(tmp_path).put([make_sample(1).write_request()])
    leftovers = [tmp_path / f"objects/here/tmp/7/{name}" for name in "123"]
    for path in leftovers:
        path.write_bytes(bytes(10_000))
    with failing_on("unlink", number, str(leftovers[1])):
        tier = opened(tmp_path)
    assert [path.exists() for path in leftovers] == [False, True, False]
    assert read(tier, make_sample(1)) is None
    assert tier.gauges()["files_failed"] == 1
    assert f"left as they are: 1 ({os.strerror(number)}: {leftovers[1]})" in caplog.text


@pytest.mark.parametrize("number", FILE_ERRORS)
@pytest.mark.parametrize("call", ["stat", "rename"])
def test_a_file_that_cannot_be_taken_over_keeps_no_other_from_it(
    tmp_path: Path, number: int, call: str, caplog: pytest.LogCaptureFixture
) -> None:
    samples = [make_sample(number) for number in range(5)]
    lost = opened(tmp_path, "lost")
    lost.put([sample.write_request() for sample in samples])
    tier = opened(tmp_path)
    os.utime(tmp_path / "objects/lost/alive", (1, 1))
    bad = os.path.basename(path_of(tier, samples[2].key))
    real = getattr(os, call)

    def fails(path: Any, *args: Any, **options: Any) -> Any:
        if os.path.basename(path) == bad and "lost" in str(path):
            raise OSError(number, os.strerror(number), str(path))
        return real(path, *args, **options)

    with mock.patch(f"os.{call}", fails):
        for _ in range(3):
            look(tier)
        assert [read(tier, sample) for sample in samples] == [None] * 5, "it is read where it is"
    assert tier.index.own_count == 4
    assert tier.gauges()["files_failed"] == 1, "and is not tried again each second"
    assert f"left as they are: 1 ({os.strerror(number)}: {tmp_path}" in caplog.text
    check_disk(tier)


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE])
def test_a_directory_that_cannot_be_listed_is_an_error_of_the_tier(
    tmp_path: Path, number: int
) -> None:
    opened(tmp_path).put([make_sample(1).write_request()])
    with failing_on("scandir", number, str(tmp_path / "objects/here")), pytest.raises(TierError):
        opened(tmp_path)
    assert read(opened(tmp_path), make_sample(1)) is None


def test_where_all_files_fail_the_tier_does(tmp_path: Path) -> None:
    opened(tmp_path).put(
        [make_sample(number).write_request() for number in range(2 * FAILED_IN_A_ROW_MAX)]
    )
    paths = [str(path) for path in tmp_path.glob("objects/here/??/*")]
    with failing_on("stat", errno.EIO, *paths), pytest.raises(TierError, match="Input/output"):
        opened(tmp_path)
    with failing_on("stat", errno.ESTALE, paths[0]), pytest.raises(TierError, match="Stale"):
        opened(tmp_path)


def test_of_what_a_lost_writer_left_the_newest_is_taken_over(
    tmp_path: Path, rng: random.Random, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    samples = [make_sample(number, 100_000) for number in range(20)]
    opened(tmp_path, "lost").put([sample.write_request() for sample in samples])
    paths = list(tmp_path.glob("objects/lost/??/*"))
    rng.shuffle(paths)
    for age, path in enumerate(paths):
        os.utime(path, (1e9 - age, 1e9 - age))
    os.utime(tmp_path / "objects/lost/alive", (1, 1))
    tier = opened(tmp_path, size="1MiB")
    tier.tend()
    names = [parse_name(path.name) for path in paths]
    ages = [name is not None and tier.index.own_bytes(name.key) is not None for name in names]
    kept = ages.count(True)
    assert kept > 3
    assert ages == [True] * kept + [False] * (20 - kept)
    text = f"took over {kept} objects that lost left; {20 - kept} were dropped for lack of room"
    assert text in caplog.text
    check_disk(tier)
    assert tier.put([make_sample(30, 100_000).write_request()]) == [None]
    ages = [name is not None and tier.index.own_bytes(name.key) is not None for name in names]
    assert ages == [True] * (kept - 1) + [False] * (21 - kept), "the oldest goes first"


def test_no_fifo_keeps_a_thread_waiting(tmp_path: Path) -> None:
    """Whoever may write in a shared directory can put one in a file's place."""
    tier, neighbour, sample = opened(tmp_path), opened(tmp_path, "other"), make_sample(1)
    assert tier.put([sample.write_request()]) == [None]
    neighbour.tend()
    (path,) = tmp_path.glob("objects/here/??/*")
    path.unlink()
    os.mkfifo(path)
    for reader in (tier, neighbour):
        assert isinstance(read(reader, sample), MissingError)
    assert tier.put([sample.write_request()]) == [None]
    assert read(tier, sample) is None
    assert prove_file(str(path), parse_name(path.name)) is not None
    path.unlink()
    os.mkfifo(path)
    assert prove_file(str(path), parse_name(path.name)) is None
    layout = tmp_path / LAYOUT_FILE
    layout.unlink()
    os.mkfifo(layout)
    with pytest.raises(ConfigError, match="no directory of records"):
        check_root(tmp_path)
    layout.unlink()
    alive = tmp_path / "objects" / "here" / "alive"
    alive.unlink()
    os.mkfifo(alive)
    with pytest.raises(TierError, match="No such device or address"):
        tier.open()
