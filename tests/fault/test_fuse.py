"""The tests' file system keeps every promise of a tier, unless a test tells it otherwise."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from hybridkv.core.tier_urls import parse_tier
from hybridkv.tiers.conformance.samples import make_sample, read
from hybridkv.tiers.conformance.suite import TierSuite
from hybridkv.tiers.contract import Tier, TierError
from hybridkv.tiers.disk.tier import DiskTier
from tests.fault.fuse import FaultyFs, Op
from tests.waiting import until


class TestOverFuse(TierSuite):
    shared = False

    @pytest.fixture(autouse=True)
    def _file_system(self, tmp_path: Path) -> Iterator[None]:
        for name in ("backing", "shown"):
            (tmp_path / name).mkdir()
        with FaultyFs(tmp_path / "backing", tmp_path / "shown") as self._fs:
            yield

    def make_tier(self) -> Tier:
        return DiskTier(parse_tier(f"disk://{self._fs.mountpoint}?bytes=64MiB", "disk", "here"))

    def make_away(self) -> Tier:
        (self._fs.mountpoint / "objects").touch()
        return self.make_tier()

    def test_it_is_what_it_shows(self) -> None:
        tier = self.opened()
        assert tier.put([make_sample(number).write_request() for number in range(5)]) == [None] * 5
        shown, backing = (
            {path.relative_to(root): path.read_bytes() for path in root.glob("objects/here/??/*")}
            for root in (self._fs.mountpoint, self._fs.backing)
        )
        assert shown == backing
        assert len(shown) == 5

    def test_what_hangs_comes_late_and_right(self) -> None:
        tier = self.opened()
        record, outcomes = make_sample(1, 3 << 20), list[TierError | None]()
        assert tier.put([record.write_request()]) == [None]
        self._fs.hang(Op.READ)
        thread = threading.Thread(target=lambda: outcomes.append(read(tier, record)))
        thread.start()
        until(lambda: self._fs.held(Op.READ) > 0, "it hangs")
        assert not outcomes
        self._fs.heal()
        thread.join()
        assert outcomes == [None]

    def test_its_end_ends_what_hangs(self) -> None:
        tier = self.opened()
        record, outcomes = make_sample(1), list[TierError | None]()
        assert tier.put([record.write_request()]) == [None]
        self._fs.hang()
        thread = threading.Thread(target=lambda: outcomes.append(read(tier, record)))
        thread.start()
        until(lambda: self._fs.held() > 0, "it hangs")
        self._fs.end()
        thread.join()
        assert isinstance(outcomes[0], TierError)
        assert not os.listdir(self._fs.mountpoint)
