"""The conformance suite over the tier of a URL, as `hybridkv tier-check` runs it.

The storage must be empty: each test removes all that it holds. Each tier object is another node.
"""

import contextlib
import itertools
import subprocess
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import pytest

from hybridkv.core.errors import ConfigError
from hybridkv.core.tier_urls import CodecName, parse_tier
from hybridkv.tiers.conformance.suite import BOUND_BYTES, TierSuite
from hybridkv.tiers.conformance.waiting import DEADLINE_SECONDS
from hybridkv.tiers.contract import Tier, TierError
from hybridkv.tiers.factory import make_tier

COMMAND_SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedUrl:
    """A tier to check, and what its user says of it."""

    url: str
    away_url: str = ""  # A tier of the same kind whose storage is not there. Empty = none is given.
    stop: str = ""  # A shell command that stops the storage. Empty = none is given.
    start: str = ""  # A shell command that starts it again.
    persistent: bool = True
    shared: bool = True
    discards_for_all: bool = True


class CheckedUrlPlugin:
    """A plug-in of pytest that gives the suite its URL."""

    def __init__(self, checked: CheckedUrl) -> None:
        self._checked = checked

    @pytest.fixture
    def checked_url(self) -> CheckedUrl:
        return self._checked


def empty_storage(url: str) -> None:
    """Remove all records of a tier. Raises TierError and ConfigError."""
    with _opened(url) as tier:
        tier.empty_quarantine()
        deadline = time.monotonic() + DEADLINE_SECONDS
        while keys := list(tier.keys()):
            if time.monotonic() > deadline:
                raise TierError(f"{len(keys)} records cannot be removed")
            tier.erase(keys)
            tier.tend()


def count_records(url: str) -> int:
    """Returns how many records a tier holds. Raises TierError and ConfigError."""
    with _opened(url) as tier:
        return len(list(tier.keys()))


@contextlib.contextmanager
def _opened(url: str) -> Iterator[Tier]:
    tier = make_tier(parse_tier(url, "tier"), "check-0")
    try:
        tier.open()
        tier.tend()
        yield tier
    finally:
        tier.close()


class TestUrl(TierSuite):
    """Every test of the suite, over one URL."""

    @pytest.fixture(autouse=True)
    def _storage(self, checked_url: CheckedUrl) -> Iterator[None]:
        self._checked = checked_url
        self._spec = parse_tier(checked_url.url, "tier")
        self._numbers = itertools.count(1)
        self.url = self.writer_url = checked_url.url
        self.persistent, self.shared = checked_url.persistent, checked_url.shared
        self.discards_for_all = checked_url.discards_for_all
        self.encoded = self._spec.codec is not CodecName.NONE or bool(self._spec.key_path)
        self.timeout_seconds = self._spec.timeout_seconds
        empty_storage(self.url)
        yield
        empty_storage(self.url)

    def make_tier(self) -> Tier:
        number = next(self._numbers) if self.shared else 1
        return make_tier(self._spec, f"check-{number}")

    def make_away(self) -> Tier | None:
        url = self._checked.away_url
        return make_tier(parse_tier(url, "away"), "check-1") if url else None

    def make_bounded(self) -> Tier | None:
        try:
            return make_tier(replace(self._spec, max_bytes=BOUND_BYTES), "check-1")
        except ConfigError:  # Its servers have a bound, or it takes no bound as small as this.
            return None

    def storage_stopped(self) -> AbstractContextManager[None] | None:
        return self._stopped() if self._checked.stop else None

    @contextlib.contextmanager
    def _stopped(self) -> Iterator[None]:
        run_shell(self._checked.stop)
        try:
            yield
        finally:
            run_shell(self._checked.start)


def run_shell(command: str) -> None:
    """Run the user's command. Raises CalledProcessError."""
    subprocess.run(command, shell=True, check=True, timeout=COMMAND_SECONDS)
