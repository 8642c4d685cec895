"""`hybridkv bench disk`: the directory tier beside `fio` and `dd` with direct I/O, in one run."""

import json
import mmap
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hybridkv.core.errors import ConfigError
from hybridkv.core.keys import HASH_BYTES
from hybridkv.core.sizes import format_size
from hybridkv.core.tier_urls import TierSpec
from hybridkv.shm.slots import SlotHeader, SlotState, payload_offset, sign, slot_bytes
from hybridkv.store.index import Slot
from hybridkv.tiers.disk.tier import DiskTier
from hybridkv.tiers.jobs import LIMITS, JobItem, JobKind, TierJob, execute
from hybridkv.tiers.record import Record, RecordName
from hybridkv.tiers.state import JOB_BYTES_MAX, JOB_ITEMS_MAX

READS_MAX, WRITES_MAX = LIMITS[JobKind.READ], LIMITS[JobKind.WRITE]
OBJECT_BYTES = (1 << 20, 4 << 20, 16 << 20)
"""Objects of models have some MB: 3 for gpt-oss-20b, 8 for Gemma 3 12B, 9 for DeepSeek-V3."""
ARENA_BYTES = 128 << 20
ROUNDS = 5
DD_BLOCK_BYTES = 8 << 20


def measure_disk(directory: str | None, total_bytes: int) -> list[dict[str, Any]]:
    """Rates for objects of several sizes: medians of ROUNDS rounds that measure everything."""
    least = WRITES_MAX * OBJECT_BYTES[-1]
    if total_bytes < least:
        raise ConfigError(
            f"--bytes {format_size(total_bytes)} is less than"
            f" what {WRITES_MAX} threads write at once",
            f"{format_size(least)} works",
        )
    try:
        with tempfile.TemporaryDirectory(prefix="hybridkv-bench-", dir=directory) as place:
            return [_measure(Path(place), size, total_bytes) for size in OBJECT_BYTES]
    except OSError as error:
        raise ConfigError(
            f"--directory {directory} cannot be used ({error.strerror})",
            "one that you may write to works",
        ) from error


def _measure(place: Path, object_bytes: int, total_bytes: int) -> dict[str, Any]:
    samples: dict[str, list[float]] = {}
    jobs = _jobs(object_bytes, total_bytes)
    moved = sum(job.size_bytes for job in jobs[JobKind.WRITE])
    memory = memoryview(mmap.mmap(-1, ARENA_BYTES))
    _fill(memory, jobs[JobKind.WRITE])

    def timed(name: str, work: Callable[..., object], *arguments: object) -> None:
        started = time.perf_counter()
        work(*arguments)
        samples.setdefault(name, []).append(moved / (time.perf_counter() - started))

    raw = place / "raw"
    spec = TierSpec(kind="disk", location=f"disk://{place}/tier", max_bytes=2 * total_bytes)
    for round_number in range(ROUNDS):
        tier = DiskTier(spec, "bench")
        tier.open()
        timed("write", _run, tier, jobs[JobKind.WRITE], memory, WRITES_MAX)
        timed("read", _run, tier, jobs[JobKind.READ], memory, READS_MAX)
        shutil.rmtree(place / "tier")
        timed("dd_write", _dd, moved, f"of={raw}", "if=/dev/zero", "oflag=direct")
        timed("dd_read", _dd, moved, f"if={raw}", "of=/dev/null", "iflag=direct")
        os.unlink(raw)
        if shutil.which("fio"):
            for verb, threads in (("write", WRITES_MAX), ("read", READS_MAX)):
                samples.setdefault(f"fio_{verb}", []).append(_fio(place, verb, moved, threads))
        print(f"{format_size(object_bytes)}: round {round_number + 1} of {ROUNDS}", file=sys.stderr)
    rates = {name: statistics.median(each) for name, each in samples.items()}
    row: dict[str, Any] = {"object": format_size(object_bytes), "moved": format_size(moved)}
    for verb in ("write", "read"):
        row[f"{verb} GB/s"] = round(rates[verb] / 1e9, 3)
        for other in ("dd", "fio"):
            if f"{other}_{verb}" in rates:
                row[f"{verb} / {other}"] = round(rates[verb] / rates[f"{other}_{verb}"], 2)
    return row


def _jobs(object_bytes: int, total_bytes: int) -> dict[JobKind, list[TierJob]]:
    """Jobs as the daemon makes them that write, and that read, the same objects."""
    shape = object_bytes - payload_offset(1), 1
    size = slot_bytes(*shape)
    slots = ARENA_BYTES // size
    rng = random.Random(0)
    items = [
        JobItem(
            Record(RecordName(bytes(HASH_BYTES), 0, rng.randbytes(HASH_BYTES)), *shape, 1),
            Slot(number % slots * size, *shape, 1),
        )
        for number in range(total_bytes // size)
    ]
    step = max(1, min(JOB_ITEMS_MAX, JOB_BYTES_MAX // size))
    cut = [items[at : at + step] for at in range(0, len(items), step)]
    return {
        work: [TierJob(work, 0, some) for some in cut] for work in (JobKind.WRITE, JobKind.READ)
    }


def _fill(memory: memoryview, jobs: Sequence[TierJob]) -> None:
    items = [item for job in jobs for item in job.items]
    for slot in {item.slot.offset: item.slot for item in items if item.slot is not None}.values():
        view = memory[slot.offset : slot.offset + slot.size_bytes]
        head = SlotHeader(SlotState.COMMITTED, 1, slot.parts, slot.part_bytes).pack()
        view[: len(head)] = head
        noise = os.urandom(1 << 16) * (len(view) // (1 << 16) + 1)
        view[payload_offset(1) :] = noise[payload_offset(1) : len(view)]
        sign(view, *slot.shape, 1)


def _run(tier: DiskTier, jobs: Sequence[TierJob], memory: memoryview, threads: int) -> None:
    with ThreadPoolExecutor(threads) as pool:
        for outcome in pool.map(lambda job: execute(tier, job, memory), jobs):
            for wrong in (outcome.error, *outcome.errors):
                if wrong is not None:
                    raise wrong


def _dd(size: int, *options: str) -> None:
    count = -(-size // DD_BLOCK_BYTES)
    subprocess.run(
        ["dd", f"bs={DD_BLOCK_BYTES}", f"count={count}", *options], check=True, capture_output=True
    )


def _fio(place: Path, verb: str, size: int, threads: int) -> float:
    """Bytes per second of as many threads as the tier's, each on a file of its own."""
    command = ["fio", "--name=bench", f"--directory={place}", f"--rw={verb}", "--bs=1M"]
    command += [f"--size={size // threads}", f"--numjobs={threads}", "--direct=1"]
    command += ["--ioengine=psync", "--group_reporting", "--output-format=json"]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    rate: float = json.loads(output[output.index("{") :])["jobs"][0][verb]["bw_bytes"]
    if verb == "read":
        for path in place.glob("bench.*"):
            path.unlink()
    return rate
