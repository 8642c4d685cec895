"""The ratio of a codec, and its speed by a thread's processor time."""

import mmap
import statistics
import time
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

from hybridkv.tiers.coding import Coding
from hybridkv.tiers.disk.files import records
from hybridkv.tiers.disk.writers import homes
from hybridkv.tiers.record import is_encoded

ROUNDS = 3
SAMPLE_BYTES_MAX = 64 << 20  # Bytes of a directory's objects that are measured.


def sample_of(root: Path) -> list[memoryview]:
    """Return records of a tier's directory without a codec, SAMPLE_BYTES_MAX at most."""
    sample: list[memoryview] = []
    for path, _ in chain.from_iterable(map(records, homes(root))):
        record = memoryview(Path(path).read_bytes())
        if sum(map(len, sample)) + len(record) > SAMPLE_BYTES_MAX:
            break
        sample.append(record)
    return sample


def measure_coding(coding: Coding, sample: Sequence[memoryview]) -> dict[str, float]:
    """Return the ratio, and plain GB in a second of processor time, the medians of ROUNDS.

    Raises AssertionError where a record does not come back as it was.
    """
    total = sum(map(len, sample))
    rates: dict[str, list[float]] = {"encode": [], "decode": []}
    encoded: list[memoryview] = []
    for _ in range(ROUNDS):
        started = time.thread_time()
        results = [coding.encode([record]) for record in sample]
        rates["encode"].append(total / (time.thread_time() - started))
        encoded = [
            record if result is None else result
            for record, result in zip(sample, results, strict=True)
        ]
        into = [memoryview(mmap.mmap(-1, len(record))) for record in sample]
        started = time.thread_time()
        for record, memory in zip(encoded, into, strict=True):
            if is_encoded(record):
                coding.decode([record], [memory])
            else:
                memory[:] = record
        rates["decode"].append(total / (time.thread_time() - started))
        assert into == list(sample), "a record is not what it was"
    medians = {f"{name} GB/s": statistics.median(each) / 1e9 for name, each in rates.items()}
    return {
        "ratio": round(total / sum(map(len, encoded)), 3),
        **{name: round(rate, 3) for name, rate in medians.items()},
    }
