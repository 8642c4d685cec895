"""The tier with faults on purpose, which a checkout has and a release has not."""

from pathlib import Path

import pytest

from hybridkv.core.errors import ConfigError
from hybridkv.core.tier_urls import parse_tier
from hybridkv.tiers.conformance.samples import make_sample, read
from hybridkv.tiers.contract import DamagedError, MissingError, Tier, TierError
from hybridkv.tiers.factory import make_tier
from tests.unit.tiers import test_disk

pytest.importorskip("hybridkv_fault_injection", reason="a release does not have it")


class TestInjected(test_disk.TestDisk):
    """What nothing is done to passes as it is."""

    def make_tier(self) -> Tier:
        return make_tier(
            parse_tier(f"inject+disk://{self._root}?bytes=64MiB&latency=0.0001&rate=1GiB", "disk"),
            "here",
        )


def test_faults_come_as_often_as_asked_for(tmp_path: Path) -> None:
    def errors(option: str) -> list[TierError | None]:
        url = f"inject+disk://{tmp_path}/{option}?bytes=64MiB&{option}=0.5&seed=3"
        tier = make_tier(parse_tier(url, "disk"), "here")
        tier.open()
        samples = [make_sample(number) for number in range(40)]
        for sample in samples:
            while tier.put([sample.write_request()]) != [None]:
                pass
        found: list[TierError | None] = []
        for sample in samples:
            try:
                found.append(read(tier, sample))
            except AssertionError:
                found.append(DamagedError("seen by whoever proves it"))
        return found

    for option, kind in (("fail", TierError), ("lose", MissingError), ("damage", DamagedError)):
        found = errors(option)
        assert 10 < sum(type(error) is kind for error in found) < 30
        assert 10 < found.count(None) < 30


def test_options_that_are_no_numbers_are_one_sentence(tmp_path: Path) -> None:
    for option in ("latency=x", "fail=-1", "rate=fast"):
        with pytest.raises(ConfigError, match=option.partition("=")[0]):
            make_tier(parse_tier(f"inject+disk://{tmp_path}?{option}", "disk"), "here")
