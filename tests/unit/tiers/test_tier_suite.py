"""The suite of tiers itself: it passes a right tier, and each wrong one fails."""

import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from hybridkv.core.refusals import Refusal
from hybridkv.tiers import contract
from hybridkv.tiers.conformance.suite import BOUND_BYTES, TierSuite
from hybridkv.tiers.contract import (
    START_BYTES,
    FullError,
    ReadRequest,
    RecordStart,
    Tier,
    TierError,
    WriteRequest,
)

PAUSE_SECONDS = 0.002


class SqliteTier(Tier):
    """Records in a file of SQLite, the oldest of which make room."""

    name = "sqlite"

    def __init__(self, path: Path, max_bytes: int = 64 << 20) -> None:
        self.path, self.max_bytes = path, max_bytes
        self.lock = threading.Lock()
        self.database: sqlite3.Connection | None = None
        self.bytes, self.objects = 0, 0

    def open(self) -> None:
        try:
            with self.lock:
                self.database = sqlite3.connect(
                    self.path, check_same_thread=False, isolation_level=None
                )
                self.database.execute("CREATE TABLE IF NOT EXISTS r (k BLOB PRIMARY KEY, v BLOB)")
        except sqlite3.Error as error:
            raise TierError(str(error)) from error
        self.count()

    def ask(self, query: str, *values: object) -> list[tuple[object, ...]]:
        """The rows of a query, or TierError."""
        with self.lock:
            if self.database is None:
                raise TierError("closed")
            return self.database.execute(query, values).fetchall()

    def count(self) -> None:
        """Know the values of `gauges`."""
        ((size, objects),) = self.ask("SELECT coalesce(sum(length(v)), 0), count(*) FROM r")
        assert isinstance(size, int)
        assert isinstance(objects, int)
        self.bytes, self.objects = size, objects

    def find(self, keys: Sequence[bytes]) -> list[bool]:
        return [bool(self.ask("SELECT 1 FROM r WHERE k = ?", key)) for key in keys]

    def get(self, items: Sequence[ReadRequest]) -> list[TierError | None]:
        return [self._caught(self.read, item) for item in items]

    def read_starts(self, keys: Sequence[bytes]) -> list[RecordStart | TierError]:
        return list(map(self.start, keys))

    def start(self, key: bytes) -> RecordStart | TierError:
        rows = self.ask("SELECT substr(v, 1, ?), length(v) FROM r WHERE k = ?", START_BYTES, key)
        if not rows:
            return contract.MissingError("it is not there")
        start, size = rows[0]
        assert isinstance(start, bytes)
        assert isinstance(size, int)
        return RecordStart(start, size)

    def put(self, items: Sequence[WriteRequest]) -> list[TierError | None]:
        errors = [self._caught(self.write, item) for item in items]
        if self.database is not None:
            self._caught(lambda _: self.count(), None)
        return errors

    @staticmethod
    def _caught(call: Callable[[Any], None], item: object) -> TierError | None:
        try:
            call(item)
        except TierError as error:
            return error
        return None

    def read(self, item: ReadRequest) -> None:
        """Read a record. Raises TierError."""
        rows = self.ask("SELECT v FROM r WHERE k = ?", item.key)
        if not rows:
            raise contract.MissingError("it is not there")
        (value,) = rows[0]
        assert isinstance(value, bytes)
        if not self.is_length(len(value), sum(map(len, item.pieces))):
            raise contract.DamagedError("it has another length")
        rest = value
        for piece in contract.first_bytes(item.pieces, len(value)):
            piece[:], rest = rest[: len(piece)], rest[len(piece) :]
        self.zero_after(item.pieces, len(value))

    def is_length(self, size: int, most: int) -> bool:
        return contract.is_length(size, most)

    def zero_after(self, pieces: Sequence[memoryview], size: int) -> None:
        contract.zero_after(pieces, size)

    def write(self, item: WriteRequest) -> None:
        """Write a record. Raises TierError."""
        value = b"".join(item.pieces)
        if len(value) > self.max_bytes:
            raise FullError("it is too large", Refusal.BOUND)
        self.ask("INSERT OR IGNORE INTO r VALUES (?, ?)", item.key, value)
        self.keep_bound()

    def keep_bound(self) -> None:
        self.count()
        while self.bytes > self.max_bytes:
            self.ask("DELETE FROM r WHERE rowid = (SELECT min(rowid) FROM r)")
            self.count()

    def discard(self, keys: Sequence[bytes], damaged: bool = False) -> None:
        for key in keys:
            self.ask("DELETE FROM r WHERE k = ?", key)

    def keys(self) -> Iterator[bytes]:
        for (key,) in self.ask("SELECT k FROM r"):
            assert isinstance(key, bytes)
            yield key

    def gauges(self) -> Mapping[str, float]:
        return {"bytes": self.bytes, "bytes_max": self.max_bytes, "objects": self.objects}

    def close(self) -> None:
        with self.lock:
            if self.database is not None:
                self.database.close()
            self.database = None


class TestSqlite(TierSuite):
    kind: ClassVar[type[SqliteTier]] = SqliteTier

    @pytest.fixture(autouse=True)
    def storage(self, tmp_path: Path) -> None:
        self.path = tmp_path / "records"
        self.tiers: list[SqliteTier] = []

    def make_tier(self) -> Tier:
        self.tiers.append(self.kind(self.path))
        return self.tiers[-1]

    def make_away(self) -> Tier:
        return self.kind(self.path / "nowhere")

    def make_bounded(self) -> Tier:
        self.tiers.append(self.kind(self.path, BOUND_BYTES))
        return self.tiers[-1]


# Wrong tiers


class NothingZeroed(SqliteTier):
    def zero_after(self, pieces: Sequence[memoryview], size: int) -> None:
        """Leave what was there."""


class PutInTwoSteps(SqliteTier):
    def write(self, item: WriteRequest) -> None:
        value = b"".join(item.pieces)
        self.ask("INSERT OR REPLACE INTO r VALUES (?, ?)", item.key, bytes(len(value)))
        time.sleep(PAUSE_SECONDS)
        self.ask("UPDATE r SET v = ? WHERE k = ?", value, item.key)


class KeysTwice(SqliteTier):
    def keys(self) -> Iterator[bytes]:
        yield from super().keys()
        yield from super().keys()


class NothingDiscarded(SqliteTier):
    def discard(self, keys: Sequence[bytes], damaged: bool = False) -> None:
        """Keep all."""


class NothingErased(SqliteTier):
    def erase(self, keys: Sequence[bytes]) -> list[TierError | None]:
        return [None for _ in keys]


class StartsOfAnother(SqliteTier):
    def read_starts(self, keys: Sequence[bytes]) -> list[RecordStart | TierError]:
        return super().read_starts([keys[0]] * len(keys))


class AllFound(SqliteTier):
    def find(self, keys: Sequence[bytes]) -> list[bool]:
        return [True for _ in keys]


class NoBound(SqliteTier):
    def keep_bound(self) -> None:
        """Grow."""


class NoBoundToBeSeen(NoBound):
    """Its gauges say what should be."""

    def gauges(self) -> Mapping[str, float]:
        gauges = super().gauges()
        return {**gauges, "bytes": min(gauges["bytes"], gauges["bytes_max"])}


class AnyLength(SqliteTier):
    def is_length(self, size: int, most: int) -> bool:
        return 0 < size <= most


class PeekAsks(SqliteTier):
    def peek(self, key: bytes) -> bool | None:
        return self.find([key])[0] if self.database is not None else None


class PeekSleeps(SqliteTier):
    def peek(self, key: bytes) -> bool | None:
        time.sleep(PAUSE_SECONDS)
        return None


class PeekNeedsOpen(SqliteTier):
    def peek(self, key: bytes) -> bool | None:
        assert self.database is not None
        return None


class GaugesAsk(SqliteTier):
    def gauges(self) -> Mapping[str, float]:
        if self.database is not None:
            self.count()
        return super().gauges()


class GaugesSleep(SqliteTier):
    def gauges(self) -> Mapping[str, float]:
        time.sleep(PAUSE_SECONDS)
        return super().gauges()


class NothingClosed(SqliteTier):
    def close(self) -> None:
        """Hold all."""


class ClosedForGood(SqliteTier):
    was_closed = False

    def open(self) -> None:
        if self.was_closed:
            raise TierError("closed")
        super().open()

    def close(self) -> None:
        self.was_closed = True
        super().close()


class OpenAsksNothing(SqliteTier):
    """It connects when it is first used."""

    is_open = False

    def open(self) -> None:
        self.is_open = True

    def ask(self, query: str, *values: object) -> list[tuple[object, ...]]:
        if self.is_open and self.database is None:
            super().open()
        return super().ask(query, *values)

    def count(self) -> None:
        if self.database is not None:
            super().count()

    def close(self) -> None:
        self.is_open = False
        super().close()


class OneFaultFailsAll(SqliteTier):
    def put(self, items: Sequence[WriteRequest]) -> list[TierError | None]:
        errors = super().put(items)
        first = next(filter(None, errors), None)
        return [first] * len(items)


class UseFindsNothing(SqliteTier):
    def use(self, keys: Sequence[bytes]) -> list[bool]:
        return [False for _ in keys]


WRONG = {
    NothingZeroed: TierSuite.test_behind_a_shorter_record_is_nothing,
    PutInTwoSteps: TierSuite.test_many_threads_never_see_half_a_record,
    KeysTwice: TierSuite.test_putting_twice_changes_nothing,
    NothingDiscarded: TierSuite.test_discarded_is_missing_and_may_come_again,
    NothingErased: TierSuite.test_what_is_erased_is_found_by_nobody,
    StartsOfAnother: TierSuite.test_the_start_of_a_record_says_what_it_is,
    AllFound: TierSuite.test_what_is_not_there_is_missing,
    NoBound: TierSuite.test_the_bound_of_bytes_is_kept,
    NoBoundToBeSeen: TierSuite.test_the_bound_of_bytes_is_kept,
    AnyLength: TierSuite.test_a_record_that_ends_within_a_page_is_damaged,
    PeekAsks: TierSuite.test_what_the_loop_calls_returns_at_once,
    PeekSleeps: TierSuite.test_what_the_loop_calls_returns_at_once,
    PeekNeedsOpen: TierSuite.test_what_the_loop_calls_returns_at_once,
    GaugesAsk: TierSuite.test_what_the_loop_calls_returns_at_once,
    GaugesSleep: TierSuite.test_what_the_loop_calls_returns_at_once,
    NothingClosed: TierSuite.test_closing_releases_everything,
    ClosedForGood: TierSuite.test_closed_and_opened_again_it_works,
    OpenAsksNothing: TierSuite.test_opening_asks_the_storage,
    OneFaultFailsAll: TierSuite.test_the_bound_of_bytes_is_kept,
    UseFindsNothing: TierSuite.test_use_finds,
}
"""The test of the suite that notices each wrong tier."""


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.__name__)
def test_a_wrong_tier_fails(wrong: type[SqliteTier], tmp_path: Path) -> None:
    suite = TestSqlite()
    suite.path, suite.tiers, suite.release_seconds = tmp_path / "records", [], 0.1
    suite.kind = wrong  # type: ignore[misc]
    with pytest.raises((AssertionError, TierError, pytest.fail.Exception)):
        WRONG[wrong](suite)
    # Python 3.13 warns of what a failed test leaves open.
    for tier in suite.tiers:
        SqliteTier.close(tier)
