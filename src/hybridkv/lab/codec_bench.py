"""`hybridkv bench codecs`: the ratio of each codec, and its speed by a thread's processor time."""

import mmap
import os
import random
import statistics
import struct
import time
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from hybridkv.core.errors import ConfigError
from hybridkv.core.keys import HASH_BYTES
from hybridkv.core.sizes import format_size
from hybridkv.shm.slots import payload_offset
from hybridkv.tiers import coding as codings
from hybridkv.tiers import encryption
from hybridkv.tiers.coding import PLAIN, Codec, Coding
from hybridkv.tiers.disk import files
from hybridkv.tiers.disk.writers import check_root, homes
from hybridkv.tiers.record import Record, RecordName, head_bytes, is_encoded, write_head

ROUNDS = 3
SAMPLE_BYTES_MAX = 64 << 20  # Bytes of a directory's objects that are measured.
DRAWN_BYTES = 4 << 20  # Bytes of each object of numbers that are drawn at random.
_TILE_NUMBERS = 1 << 17
"""Numbers that are drawn. The rest of an object repeats them, farther apart than a codec looks."""


def measure_codecs(directory: str | None) -> list[dict[str, Any]]:
    """Return a row for each codec and key: its ratio, and plain GB in a second of processor time.

    The objects are those of a tier's `directory`, or else numbers drawn at random. Each row says
    which. Rates are medians of ROUNDS. Raises ConfigError where the directory has no objects.
    """
    samples = {description: [memory] for description, memory in _drawn()}
    if directory is not None:
        found = _records(Path(directory))
        samples = {f"{len(found)} objects of {directory}": found}
    key = encryption.TierKey(os.urandom(32)) if encryption.is_installed() else None
    named_codings = {"zplanes": Coding(Codec.ZPLANES)} if codings.is_installed() else {}
    if key is not None:
        named_codings["none, key"] = Coding(key=key)
    if codings.is_installed() and key is not None:
        named_codings["zplanes, key"] = Coding(Codec.ZPLANES, key)
    return [
        {"objects": description, "codec": name, **_measure(coding, records)}
        for description, records in samples.items()
        for name, coding in named_codings.items()
    ]


def _measure(coding: Coding, records: Sequence[memoryview]) -> dict[str, float]:
    """Return the ratio and the median rates of a coding.

    Raises AssertionError where a record does not come back as it was.
    """
    total = sum(map(len, records))
    rates: dict[str, list[float]] = {"encode": [], "decode": []}
    encoded: list[memoryview] = []
    for _ in range(ROUNDS):
        started = time.thread_time()
        results = [coding.encode([record]) for record in records]
        rates["encode"].append(total / (time.thread_time() - started))
        encoded = [
            record if result is None else result
            for record, result in zip(records, results, strict=True)
        ]
        into = [memoryview(mmap.mmap(-1, len(record))) for record in records]
        started = time.thread_time()
        for record, memory in zip(encoded, into, strict=True):
            if is_encoded(record):
                coding.decode([record], [memory])
            else:
                memory[:] = record
        rates["decode"].append(total / (time.thread_time() - started))
        assert into == list(records), "a record is not what it was"
    medians = {f"{name} GB/s": statistics.median(each) / 1e9 for name, each in rates.items()}
    return {
        "ratio": round(total / sum(map(len, encoded)), 3),
        **{name: round(rate, 3) for name, rate in medians.items()},
    }


def _records(root: Path) -> list[memoryview]:
    """Return plain records of a directory, SAMPLE_BYTES_MAX at most."""
    check_root(root, "--sample")
    found: list[memoryview] = []
    for path, name in chain.from_iterable(map(files.records, homes(root))):
        proof = files.prove_file(path, name)
        if proof is None or proof.damage or proof.undecodable or proof.record is None:
            continue
        plain = proof.memory
        if is_encoded(plain):
            plain = memoryview(mmap.mmap(-1, proof.record.size_bytes))
            PLAIN.decode([proof.memory], [plain])
        if sum(map(len, found)) + len(plain) > SAMPLE_BYTES_MAX:
            break
        found.append(plain)
    if not found:
        what = f"--sample {root} has no object that could be measured"
        raise ConfigError(what, "the directory of a daemon that has stored something works")
    return found


def _drawn() -> Iterator[tuple[str, memoryview]]:
    """Yield (description, record) of normally distributed numbers, for each width."""
    rng = random.Random(0)
    numbers = [rng.gauss(0.0, 1.0) for _ in range(_TILE_NUMBERS)]
    singles = struct.pack(f"<{len(numbers)}f", *numbers)
    # A bf16 is the upper half of a float32.
    halves = b"".join(singles[at + 2 : at + 4] for at in range(0, len(singles), 4))
    for kind, tile in (("bf16", halves), ("float32", singles)):
        payload = tile * (DRAWN_BYTES // len(tile))
        record = Record(
            RecordName(bytes(HASH_BYTES), 0, rng.randbytes(HASH_BYTES)), len(payload), 1, 1
        )
        memory = memoryview(mmap.mmap(-1, record.size_bytes))
        start = payload_offset(1)
        memory[start : start + len(payload)] = payload
        head = memoryview(bytearray(head_bytes(1)))
        write_head(record, memory, head)
        memory[: len(head)] = head
        yield f"{format_size(len(payload))} of {kind} drawn at random, of no model", memory
