"""The speed of a tier below RAM with objects of given sizes, in jobs like those of the daemon.

Objects are random bytes, so that no codec makes them smaller.
"""

import contextlib
import mmap
import os
import random
import shutil
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from hybridkv.core.coverage import SlotShape
from hybridkv.core.keys import HASH_BYTES, KEY_BYTES
from hybridkv.core.tier_urls import TierSpec
from hybridkv.shm.slots import (
    SLOT_ALIGN,
    SlotHeader,
    SlotState,
    part_digests,
    payload_offset,
    sign,
    slot_bytes,
)
from hybridkv.store.index import Slot
from hybridkv.tiers.contract import Tier, TierError
from hybridkv.tiers.factory import make_tier
from hybridkv.tiers.health import JOB_BYTES_MAX, JOB_ITEMS_MAX
from hybridkv.tiers.jobs import LIMITS, JobItem, JobKind, TierJob, execute
from hybridkv.tiers.record import Record, RecordName

ARENA_BYTES = 128 << 20
LATENCY_CALLS = 5
NOISE_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class TierSpeed:
    """What was measured of a tier."""

    read_bytes_per_second: float
    write_bytes_per_second: float
    latency_seconds: float  # Of one call that finds nothing: the median.


class TierLoad:
    """Objects that are written to a tier and read back, in jobs."""

    def __init__(self, shapes: Counter[SlotShape]) -> None:
        """`shapes` says how many objects of each shape there are."""
        largest = max(slot_bytes(*shape) for shape in shapes)
        arena_bytes = max(ARENA_BYTES, len(shapes) * largest)
        self._memory = memoryview(mmap.mmap(-1, arena_bytes))
        self._jobs: list[list[JobItem]] = [[]]
        self.size_bytes = 0
        rng, start = random.Random(0), 0
        share = arena_bytes // len(shapes) // SLOT_ALIGN * SLOT_ALIGN
        for shape, count in shapes.items():
            size = slot_bytes(*shape)
            slots = [self._filled(start + at * size, shape) for at in range(share // size)[:count]]
            start += share
            for number in range(count):
                name = RecordName(bytes(HASH_BYTES), 0, rng.randbytes(HASH_BYTES))
                self._add(JobItem(Record(name, *shape, seed=1), slots[number % len(slots)]))

    @property
    def record_keys(self) -> list[bytes]:
        """The keys of all objects."""
        return [item.key for items in self._jobs for item in items]

    def move_objects(self, tier: Tier, kind: JobKind) -> None:
        """Write or read all objects, by as many threads as the daemon has. Raises TierError."""
        jobs = [TierJob(kind, 0, items) for items in self._jobs]
        with ThreadPoolExecutor(LIMITS[kind]) as pool:
            for outcome in pool.map(lambda job: execute(tier, job, self._memory), jobs):
                for error in filter(None, (outcome.error, *outcome.errors)):
                    raise error

    def _add(self, item: JobItem) -> None:
        size = item.record.size_bytes
        last = self._jobs[-1]
        is_full = sum(other.record.size_bytes for other in last) + size > JOB_BYTES_MAX
        if last and (is_full or len(last) == JOB_ITEMS_MAX):
            self._jobs.append([])
        self._jobs[-1].append(item)
        self.size_bytes += size

    def _filled(self, offset: int, shape: SlotShape) -> Slot:
        """Returns a committed slot of random bytes."""
        part_bytes, parts = shape
        slot = Slot(offset, part_bytes, parts, generation=1)
        view = self._memory[offset : offset + slot.size_bytes]
        head = SlotHeader(SlotState.COMMITTED, 1, parts, part_bytes).pack()
        view[: len(head)] = head
        noise = os.urandom(NOISE_BYTES) * (len(view) // NOISE_BYTES + 1)
        view[payload_offset(parts) :] = noise[payload_offset(parts) : len(view)]
        sign(view, part_digests(view, part_bytes, parts), 1)
        return slot


def measure_tier(spec: TierSpec, shapes: Counter[SlotShape]) -> TierSpeed:
    """Write objects of these shapes to a tier, read them, and remove them.

    Of a directory, a new one inside it is measured, so that nobody's objects are touched. Raises
    ConfigError and TierError.
    """
    name = f"doctor-{os.urandom(4).hex()}"
    if spec.kind == "disk":
        spec = replace(spec, location=f"{spec.location}/{name}")
    tier, load = make_tier(spec, name), TierLoad(shapes)
    try:
        tier.open()
        latency = _latency(tier)
        try:
            written = _seconds(tier, load, JobKind.WRITE)
            read = _seconds(tier, load, JobKind.READ)
        finally:
            with contextlib.suppress(TierError):  # What cannot be removed is of no name in use.
                tier.erase(load.record_keys)
    finally:
        tier.close()
        if spec.kind == "disk":
            shutil.rmtree(Path(spec.location.removeprefix("disk://")), ignore_errors=True)
    return TierSpeed(load.size_bytes / read, load.size_bytes / written, latency)


def _seconds(tier: Tier, load: TierLoad, kind: JobKind) -> float:
    started = time.perf_counter()
    load.move_objects(tier, kind)
    return time.perf_counter() - started


def _latency(tier: Tier) -> float:
    """Returns the median of the seconds that a call about a missing object takes."""
    seconds: list[float] = []
    for _ in range(LATENCY_CALLS):
        missing: Sequence[bytes] = [os.urandom(KEY_BYTES)]
        started = time.perf_counter()
        if tier.find(missing) != [False]:
            raise TierError("it finds an object that nobody wrote")
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)
