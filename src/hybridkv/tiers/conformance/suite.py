"""The conformance suite of tiers: subclass TierSuite in a test module, and say how to make a tier.

::

    class TestMyTier(TierSuite):
        url = "my-scheme:///where/it/is"

        def make_tier(self) -> Tier:
            return MyTier(parse_tier(self.url, "tier"))

The suite puts whole records, and proves what it reads as the daemon does. `hybridkv tier-check URL`
runs it over any tier whose storage is empty.
"""

import contextlib
import itertools
import os
import random
import resource
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from hybridkv.core.errors import ConfigError
from hybridkv.core.tier_urls import TIMEOUT_SECONDS
from hybridkv.shm.slots import SHORT_HASH_BYTES, SLOT_ALIGN
from hybridkv.tiers.conformance import writer
from hybridkv.tiers.conformance.samples import PARENT, make_sample, pages, read
from hybridkv.tiers.conformance.waiting import DEADLINE_SECONDS, until
from hybridkv.tiers.contract import (
    DamagedError,
    FindRequest,
    FullError,
    MissingError,
    ReadRequest,
    RecordStart,
    Tier,
    TierError,
    WriteRequest,
)
from hybridkv.tiers.record import read_start

THREADS = 4
CALLS = 20  # Calls that `waits` makes.
BOUND_BYTES = 256 << 10
PUTS_BEFORE_KILL = (1, 4, 13)  # Of writers that are killed one after the other.
SLACK_SECONDS = 5.0  # For a busy machine.
ALONE = "its storage takes one daemon at a time"


def waits(call: Callable[[], object]) -> bool:
    """Whether each call waits for something, or reads or writes a file or pipe.

    It is counted by the kernel for this thread. So a busy machine changes nothing: it takes the
    processor away from a thread, and does not make it wait in each call.
    """

    def counts() -> tuple[int, int]:
        fields = dict(
            line.split(": ") for line in Path("/proc/thread-self/io").read_text().splitlines()
        )
        switches = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
        return switches, int(fields["syscr"]) + int(fields["syscw"])

    def grown(times: int) -> list[int]:
        before = counts()
        for _ in range(times):
            call()
        return [after - number for number, after in zip(before, counts(), strict=True)]

    nothing = grown(0)
    return any(number - idle >= CALLS for number, idle in zip(grown(CALLS), nothing, strict=True))


def resources() -> list[int]:
    """The open files, threads and children of this process: how many of each."""
    children = 0
    for path in Path("/proc/self/task").glob("*/children"):
        # The thread ended between the listing and the look at it.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            children += len(path.read_text().split())
    return [len(os.listdir("/proc/self/fd")), threading.active_count(), children]


class TierSuite(ABC):
    """Every promise of tiers.contract. Each test gets a tier of its own, with nothing in it."""

    encoded = False
    """Whether records are encoded, which only memory of just their size can be filled with."""
    persistent = True
    """Whether records outlive the tier object."""
    shared = True
    """Whether two tier objects may use the storage at once."""
    discards_for_all = True
    """Whether what one tier object discarded is missing for others at once, not only later."""

    writer_url = ""
    """What makes the same tier in a process that is killed. Empty = that is left out."""
    release_seconds = DEADLINE_SECONDS
    """The longest that resources may take to go after `close`."""
    timeout_seconds = TIMEOUT_SECONDS
    """The longest that a call may take while the storage does not answer."""

    @abstractmethod
    def make_tier(self) -> Tier:
        """A tier over this test's storage: the first finds nothing, later ones what was put."""

    def make_away(self) -> Tier | None:
        """A tier whose storage is not there. None = that cannot be made."""
        return None

    def storage_stopped(self) -> AbstractContextManager[None] | None:
        """Stops the storage, which answers nobody inside. None = that cannot be done."""
        return None

    def make_bounded(self) -> Tier | None:
        """A tier with a bound of BOUND_BYTES. None = the kind has no bound of its own."""
        return None

    def opened(self) -> Tier:
        """A tier that can be used."""
        tier = self.make_tier()
        tier.open()
        return tier

    def close(self, tiers: Iterable[Tier]) -> None:
        """Close the tiers of a test, after it."""
        for tier in tiers:
            tier.close()

    def test_what_was_put_comes_back(self) -> None:
        tier = self.opened()
        shapes = [(1, 1), (100, 3), (4096, 1), (9000, 2), (1 << 20, 1), (300_000, 4)]
        samples = [make_sample(n, *shape) for n, shape in enumerate(shapes)]
        assert tier.put([sample.write_request() for sample in samples]) == [None] * len(samples)
        assert tier.find([sample.key for sample in samples]) == [True] * len(samples)
        assert all(tier.peek(sample.key) in (True, None) for sample in samples)
        assert [read(tier, sample) for sample in samples] == [None] * len(samples)
        assert sorted(tier.keys()) == sorted(sample.key for sample in samples)
        self.close([tier])

    def test_pieces_are_one_record(self) -> None:
        tier = self.opened()
        first, second = make_sample(1, 20_000), make_sample(2, 20_000)
        assert tier.put([first.write_request(cut=1), second.write_request(cut=3)]) == [None, None]
        assert read(tier, first, cut=2) is None
        assert read(tier, second) is None
        self.close([tier])

    def test_what_is_not_there_is_missing(self) -> None:
        tier = self.opened()
        there, missing = make_sample(1), make_sample(2)
        assert tier.put([there.write_request()]) == [None]
        assert tier.find([missing.key, there.key])[0] is False
        assert tier.peek(missing.key) in (False, None)
        assert isinstance(read(tier, missing), MissingError)
        into = [pages(len(sample.memory)) for sample in (missing, there)]
        errors = tier.get([ReadRequest(missing.key, [into[0]]), ReadRequest(there.key, [into[1]])])
        assert isinstance(errors[0], MissingError)
        assert errors[1] is None
        assert into[1] == there.memory
        self.close([tier])

    def test_a_record_of_another_length_is_an_error(self) -> None:
        tier = self.opened()
        sample = make_sample(1)
        assert tier.put([sample.write_request()]) == [None]
        for size in (len(sample.memory) - SLOT_ALIGN, SLOT_ALIGN):
            (error,) = tier.get([ReadRequest(sample.key, [pages(size)])])
            assert isinstance(error, TierError)
        assert read(tier, sample) is None
        self.close([tier])

    def test_behind_a_shorter_record_is_nothing(self) -> None:
        tier = self.opened()
        sample, page = make_sample(1), SLOT_ALIGN
        assert tier.put([sample.write_request()]) == [None]
        for cut in (0, page, len(sample.memory), len(sample.memory) + page):
            into = pages(len(sample.memory) + 3 * page)
            into[:] = b"\xa5" * len(into)
            pieces = [into[:cut], into[cut:]] if cut else [into]
            (error,) = tier.get([ReadRequest(sample.key, pieces)])
            if error is None:
                assert into[: len(sample.memory)] == sample.memory
                assert not bytes(into[len(sample.memory) :]).strip(b"\0")
            else:
                assert self.encoded
                assert isinstance(error, DamagedError)
        self.close([tier])

    def test_putting_twice_changes_nothing(self) -> None:
        tier = self.opened()
        sample = make_sample(1)
        for _ in range(3):
            assert tier.put([sample.write_request(), sample.write_request()]) == [None, None]
        assert read(tier, sample) is None
        assert list(tier.keys()) == [sample.key]
        self.close([tier])

    def test_discarded_is_missing_and_may_come_again(self) -> None:
        tier = self.opened()
        first, second, damaged = make_sample(1), make_sample(2), make_sample(3)
        assert (
            tier.put([first.write_request(), second.write_request(), damaged.write_request()])
            == [None] * 3
        )
        tier.discard([first.key, make_sample(9).key])
        tier.discard([damaged.key], damaged=True)
        assert isinstance(read(tier, first), MissingError)
        assert isinstance(read(tier, damaged), MissingError)
        assert tier.find([damaged.key]) == [False]
        assert read(tier, second) is None
        assert list(tier.keys()) == [second.key]
        assert tier.put([first.write_request(), damaged.write_request()]) == [None, None]
        assert read(tier, first) is None
        assert read(tier, damaged) is None
        self.close([tier])

    def test_the_start_of_a_record_says_what_it_is(self) -> None:
        tier = self.opened()
        shapes = [(100, 3), (9000, 2), (300_000, 4)]
        samples = [make_sample(n, *shape) for n, shape in enumerate(shapes)]
        missing = make_sample(9)
        assert tier.put([sample.write_request() for sample in samples]) == [None] * len(samples)
        *starts, absent = tier.read_starts([sample.key for sample in (*samples, missing)])
        for sample, found in zip(samples, starts, strict=True):
            assert isinstance(found, RecordStart)
            assert read_start(found.start, sample.key) == sample.record
            assert read_start(found.start, missing.key) is None
            assert self.encoded or found.size_bytes == len(sample.memory)
        assert isinstance(absent, MissingError)
        self.close([tier])

    def test_what_is_erased_is_found_by_nobody(self) -> None:
        tier = self.opened()
        erased, kept, damaged = make_sample(1), make_sample(2), make_sample(3)
        tier.put([sample.write_request() for sample in (erased, kept, damaged)])
        tier.discard([damaged.key], damaged=True)
        others = [self.opened()] if self.shared else []
        assert tier.erase([erased.key, make_sample(9).key]) == [None, None]
        tier.empty_quarantine()
        for reader in (tier, *others):
            reader.tend()
            assert reader.find_again([FindRequest(erased.key)]) == [False]
            assert isinstance(read(reader, erased), MissingError)
            assert read(reader, kept) is None
        assert list(tier.keys()) == [kept.key]
        assert tier.put([erased.write_request()]) == [None]
        assert read(tier, erased) is None
        self.close([tier, *others])

    def test_nothing_is_asked_of_an_empty_list(self) -> None:
        tier = self.opened()
        assert tier.put([]) == []
        assert tier.get([]) == []
        assert tier.find([]) == []
        assert tier.read_starts([]) == []
        assert tier.erase([]) == []
        tier.discard([])
        tier.tend()
        self.close([tier])

    def test_the_next_one_finds_it(self) -> None:
        if not self.persistent:
            pytest.skip("its records end with the tier object")
        first = self.opened()
        samples = [make_sample(n) for n in range(20)]
        first.put([sample.write_request() for sample in samples])
        self.close([first])
        second = self.opened()
        assert second.find([sample.key for sample in samples]) == [True] * len(samples)
        assert [read(second, sample) for sample in samples] == [None] * len(samples)
        self.close([second])

    def test_two_at_once_see_what_the_other_put(self) -> None:
        if not self.shared:
            pytest.skip(ALONE)
        here, there = self.opened(), self.opened()
        sample = make_sample(1)
        assert here.put([sample.write_request()]) == [None]
        there.tend()
        assert there.find([sample.key]) == [True]
        assert read(there, sample) is None
        here.discard([sample.key])
        there.tend()
        assert isinstance(read(there if self.discards_for_all else here, sample), MissingError)
        self.close([here, there])

    def test_what_another_puts_is_found_again_at_once(self) -> None:
        if not self.shared:
            pytest.skip(ALONE)
        here, there = self.opened(), self.opened()
        samples = [make_sample(number) for number in range(4)]
        parents, interiors = (bytes(SHORT_HASH_BYTES), PARENT), (False, True)
        requests = [
            sample.write_request()._replace(parent=parent, interior=interior)
            for sample, (parent, interior) in zip(
                samples, itertools.product(parents, interiors), strict=True
            )
        ]
        wanted = [FindRequest(request.key, request.parent) for request in requests]
        missing = FindRequest(make_sample(9).key)
        assert there.find([request.key for request in wanted]) == [False] * 4
        assert there.find_again([*wanted, missing]) == [False] * 5
        assert here.put(requests) == [None] * 4
        assert there.has_other_writers(), "it was opened after the other one"
        assert there.find_again([*wanted, missing]) == [True] * 4 + [False]
        assert [read(there, sample) for sample in samples] == [None] * 4
        assert there.find_again(wanted) == [True] * 4
        here.discard([sample.key for sample in samples])
        there.tend()
        self.close([here, there])

    def test_many_threads_never_see_half_a_record(self) -> None:
        tier = self.opened()
        samples = [make_sample(n, 40_000) for n in range(6)]
        faults: list[BaseException] = []

        def work(number: int) -> None:
            rng = random.Random(number)
            try:
                for _ in range(60):
                    sample = rng.choice(samples)
                    what = rng.random()
                    if what < 0.4:
                        assert tier.put([sample.write_request()]) == [None]
                    elif what < 0.5:
                        tier.discard([sample.key])
                    else:
                        assert isinstance(read(tier, sample), MissingError | None)
            except BaseException as error:  # noqa: BLE001  # told by the test's own thread
                faults.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for fault in faults:
            raise fault
        self.close([tier])

    def test_gauges_are_numbers(self) -> None:
        tier = self.opened()
        tier.put([make_sample(1).write_request()])
        assert all(value >= 0 for value in tier.gauges().values())
        self.close([tier])

    def test_what_the_loop_calls_returns_at_once(self) -> None:
        tier, there, missing = self.make_tier(), make_sample(1), make_sample(2)
        assert tier.peek(there.key) in (False, None), "it works before `open`"
        tier.gauges()
        tier.open()
        assert tier.put([there.write_request()]) == [None]
        for key in (there.key, missing.key):
            assert not waits(lambda key=key: tier.peek(key)), "peek"  # type: ignore[misc]
        assert not waits(tier.gauges), "gauges"
        self.close([tier])

    def test_a_record_that_ends_within_a_page_is_damaged(self) -> None:
        if self.encoded:
            pytest.skip("an encoded record has any length")
        tier, sample = self.opened(), make_sample(1)
        cut = WriteRequest(sample.key, [sample.memory[: len(sample.memory) - 100]])
        (error,) = tier.put([cut])
        if error is None:
            (error,) = tier.get([ReadRequest(sample.key, [pages(len(sample.memory))])])
            assert isinstance(error, DamagedError)
        self.close([tier])

    def test_use_finds(self) -> None:
        tier, there, missing = self.opened(), make_sample(1), make_sample(2)
        assert tier.put([there.write_request()]) == [None]
        assert tier.use([missing.key, there.key]) == [False, True]
        self.close([tier])

    def test_memory_is_the_callers_again_after_a_call(self) -> None:
        tier, sample, other = self.opened(), make_sample(1), make_sample(2)
        assert tier.put([sample.write_request(), other.write_request()]) == [None, None]
        into = pages(len(sample.memory))
        assert tier.get([ReadRequest(sample.key, [into])]) == [None]
        into[:] = b"\xa5" * len(into)
        assert read(tier, other) is None
        tier.tend()
        assert into == b"\xa5" * len(into)
        self.close([tier])

    def test_the_bound_of_bytes_is_kept(self) -> None:
        tier = self.make_bounded()
        if tier is None:
            pytest.skip("it has no bound of its own")
        tier.open()
        samples = [make_sample(number, 20_000) for number in range(30)]
        for sample in samples:
            (error,) = tier.put([sample.write_request()])
            assert error is None or isinstance(error, FullError)
            kept = [one for one in samples if not self.encoded and read(tier, one) is None]
            assert sum(len(one.memory) for one in kept) <= BOUND_BYTES
            gauges = tier.gauges()
            assert gauges["bytes"] <= gauges["bytes_max"] == BOUND_BYTES
        assert any(tier.find([sample.key for sample in samples]))
        noise = random.Random(1).randbytes(2 * BOUND_BYTES)  # No codec makes it smaller.
        large, small = make_sample(1000, payload=noise), make_sample(1001)
        errors = tier.put([large.write_request(), small.write_request()])
        assert isinstance(errors[0], FullError)
        assert errors[0].refusal is not None
        assert errors[1] is None, "a fault of one item is the error of that item"
        self.close([tier])

    def test_opening_asks_the_storage(self) -> None:
        tier = self.make_away()
        if tier is None:
            pytest.skip("no tier without storage can be made")
        with pytest.raises((TierError, ConfigError)):
            tier.open()
        self.close([tier])

    def test_closing_releases_everything(self) -> None:
        sample = make_sample(1)
        before: list[int] = []
        for _ in range(2):  # What a library keeps for the next tier is there after the first one.
            before = resources()
            tier = self.opened()
            assert tier.put([sample.write_request()]) == [None]
            assert read(tier, sample) is None
            self.close([tier])
        until(
            lambda: all(now <= then for now, then in zip(resources(), before, strict=True)),
            "open files, threads and processes are gone",
            self.release_seconds,
        )
        del tier  # Until here it was held, so that nothing was released by its end.

    def test_closed_and_opened_again_it_works(self) -> None:
        tier, sample = self.opened(), make_sample(1)
        for _ in range(2):
            assert tier.put([sample.write_request()]) == [None]
            assert read(tier, sample) is None
            self.close([tier, tier])
            with contextlib.suppress(TierError):  # A closed tier may fail.
                tier.find([sample.key])
            assert isinstance(read(tier, sample), TierError | None)
            tier.open()
            assert read(tier, sample) is None or not self.persistent
        self.close([tier])

    def test_a_call_ends_where_the_tier_is_closed(self) -> None:
        tier, sample = self.opened(), make_sample(1, 300_000)
        begun, over = threading.Barrier(THREADS + 1), threading.Event()
        faults: list[BaseException] = []

        def work() -> None:
            try:
                begun.wait(DEADLINE_SECONDS)
                errors: list[TierError | None] = []
                while not over.is_set():
                    errors += [*tier.put([sample.write_request()]), read(tier, sample)]
                assert all(isinstance(error, TierError | None) for error in errors)
            except BaseException as error:  # noqa: BLE001  # raised by the test's own thread
                faults.append(error)

        threads = [threading.Thread(target=work) for _ in range(THREADS)]
        for thread in threads:
            thread.start()
        begun.wait(DEADLINE_SECONDS)
        self.close([tier])
        over.set()
        for thread in threads:
            thread.join(DEADLINE_SECONDS)
        assert not any(thread.is_alive() for thread in threads)
        assert faults == []

    def test_a_writer_that_is_killed_leaves_whole_records(self) -> None:
        if not (self.writer_url and self.shared and self.persistent):
            pytest.skip("no URL is given for a process that puts and is killed")
        command = [sys.executable, "-m", writer.__name__, self.writer_url]
        for puts in PUTS_BEFORE_KILL:
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as killed:
                assert killed.stdout is not None
                assert [killed.stdout.readline() for _ in range(puts)] == ["put\n"] * puts
                killed.kill()
            tier = self.opened()
            errors = [read(tier, sample) for sample in writer.written_samples()]
            assert None in errors, "what was put before is there"
            assert all(isinstance(error, MissingError | None) for error in errors), errors
            self.close([tier])

    def test_a_storage_that_stops_is_an_error_in_time(self) -> None:
        stopped = self.storage_stopped()
        if stopped is None:
            pytest.skip("nothing says how its storage is stopped")
        tier, there, other = self.opened(), make_sample(1), make_sample(2)
        assert tier.put([there.write_request()]) == [None]
        calls: dict[str, Callable[[], object]] = {
            "find": lambda: tier.find([other.key]) == [False],
            "get": lambda: isinstance(read(tier, there), TierError | None),
            "put": lambda: isinstance(tier.put([other.write_request()])[0], TierError | None),
            "read_starts": lambda: tier.read_starts([there.key]),
            "tend": tier.tend,
        }
        with stopped:
            for name, call in calls.items():
                started = time.monotonic()
                with contextlib.suppress(TierError):  # It is what a call should raise.
                    assert call() is not False, name
                seconds = time.monotonic() - started
                assert seconds < self.timeout_seconds + SLACK_SECONDS, f"{name}: {seconds:.1f} s"

        def works() -> bool:
            """As the daemon does: a tier that goes on failing is closed, and opened again."""
            tier.close()
            with contextlib.suppress(TierError, ConfigError):  # It is tried again.
                tier.open()
                return tier.put([other.write_request()]) == [None]
            return False

        until(works, "the tier takes records again")
        assert read(tier, other) is None
        assert isinstance(read(tier, there), MissingError | None)
        self.close([tier])
