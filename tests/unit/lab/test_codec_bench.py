"""Codecs are measured on what a directory has, and each row says what that was."""

from pathlib import Path

import pytest

from hybridkv.core.errors import ConfigError
from hybridkv.core.tier_urls import parse_tier
from hybridkv.lab.codec_bench import measure_codecs
from hybridkv.tiers.conformance.samples import make_sample
from hybridkv.tiers.disk.tier import DiskTier


def test_the_objects_of_a_directory_are_measured(tmp_path: Path) -> None:
    tier = DiskTier(parse_tier(f"disk://{tmp_path}/tier?bytes=64MiB", "disk", "here"))
    tier.open()
    assert (
        tier.put([make_sample(number, 100_000).write_request() for number in range(3)])
        == [None] * 3
    )
    rows = measure_codecs(str(tmp_path / "tier"))
    assert [row["codec"] for row in rows] == ["zplanes", "none, key", "zplanes, key"]
    assert {row["objects"] for row in rows} == {f"3 objects of {tmp_path}/tier"}
    # The samples are half bytes, so half of their bits say nothing.
    assert [1.9 < row["ratio"] < 2.1 for row in rows] == [True, False, True]
    assert all(value > 0 for row in rows for name, value in row.items() if "GB/s" in name)


def test_a_directory_without_objects_is_one_sentence(tmp_path: Path) -> None:
    DiskTier(parse_tier(f"disk://{tmp_path}/tier?bytes=64MiB", "disk", "here")).open()
    with pytest.raises(ConfigError, match="has no object that could be measured"):
        measure_codecs(str(tmp_path / "tier"))
    with pytest.raises(ConfigError, match="--sample"):
        measure_codecs(str(tmp_path))
