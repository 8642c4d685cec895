"""Codecs are measured on what a directory has."""

from pathlib import Path

from benchmarks.codec_speed import measure_coding, sample_of

from hybridkv.core.tier_urls import parse_tier
from hybridkv.tiers.coding import Codec, Coding
from hybridkv.tiers.conformance.samples import make_sample
from hybridkv.tiers.disk.tier import DiskTier


def test_the_objects_of_a_directory_are_measured(tmp_path: Path) -> None:
    tier = DiskTier(parse_tier(f"disk://{tmp_path}?bytes=64MiB", "disk", "here"))
    tier.open()
    requests = [make_sample(number, 100_000).write_request() for number in range(3)]
    assert tier.put(requests) == [None] * 3
    sample = sample_of(tmp_path)
    assert len(sample) == 3
    row = measure_coding(Coding(Codec.ZPLANES), sample)
    # The samples are half bytes, so half of their bits say nothing.
    assert 1.9 < row["ratio"] < 2.1
    assert row["encode GB/s"] > 0 < row["decode GB/s"]
