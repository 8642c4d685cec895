"""Jobs of a tier's threads: they copy objects between slots and a tier, and prove them on the way.

A job is a value; `execute` does it, in a thread that may hang, and touches only slots that the
daemon keeps for the job until its outcome is known.
"""

import mmap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import accumulate, islice
from typing import NamedTuple

from hybridkv.core.errors import ConfigError
from hybridkv.shm.signature import sign
from hybridkv.shm.slots import HEADER_BYTES
from hybridkv.store.index import Slot
from hybridkv.tiers.contract import DamagedError, ReadRequest, Tier, TierError, WriteRequest
from hybridkv.tiers.record import Record, head_bytes, is_whole, read_head, write_head

CLEAR_KEYS = 1024
"""Records that are removed in one call."""


class WrongBytesError(TierError):
    """The slot does not hold the bytes that were stored."""


class JobKind(StrEnum):
    """What a job does."""

    OPEN = "open"
    TEND = "tend"
    FIND = "find"
    READ = "read"
    WRITE = "write"
    DISCARD = "discard"
    CLEAR = "clear"


class JobItem(NamedTuple):
    """One object. Without a slot only its name counts."""

    record: Record
    """What is written. For a read: the name, the shape, and the seed of the slot's signatures."""
    slot: Slot | None = None

    @property
    def key(self) -> bytes:
        """The bytes that name the object in tiers."""
        return self.record.name.key


@dataclass(eq=False, slots=True)
class TierJob:
    """Work for a thread of a tier."""

    kind: JobKind
    tier: int
    """The tier's number."""
    items: Sequence[JobItem] = ()
    submitted_at: float = 0.0
    is_late: bool = False
    damaged: bool = False
    """For DISCARD: whether the records are damaged."""

    @property
    def size_bytes(self) -> int:
        """Bytes of all records."""
        return sum(item.record.size_bytes for item in self.items)


@dataclass(slots=True)
class JobOutcome:
    """What became of a job."""

    error: TierError | None = None
    """The error of the whole job, which did nothing."""
    errors: Sequence[TierError | None] = field(default_factory=list)
    """For READ and WRITE: the error of each item, or None."""
    found: Sequence[bool] = ()
    """For FIND: whether each record is there."""
    tenants: Sequence[int] = ()
    """For READ: the tenant of each item."""
    config: ConfigError | None = None
    """For OPEN: the error where the tier's settings can never work."""


def execute(tier: Tier, job: TierJob, memory: memoryview) -> JobOutcome:
    """Do a job, with slots in `memory`. Never raises an Exception."""
    try:
        match job.kind:
            case JobKind.OPEN:
                tier.open()
            case JobKind.TEND:
                tier.tend()
            case JobKind.FIND:
                return JobOutcome(found=tier.find([item.key for item in job.items]))
            case JobKind.DISCARD:
                tier.discard([item.key for item in job.items], job.damaged)
            case JobKind.CLEAR:
                keys = tier.keys()
                while some := list(islice(keys, CLEAR_KEYS)):
                    tier.discard(some)
            case JobKind.READ:
                return _read(tier, job.items, memory)
            case JobKind.WRITE:
                return JobOutcome(errors=_write(tier, job.items, memory))
    except TierError as error:
        return JobOutcome(error=error)
    except ConfigError as error:
        return JobOutcome(error=TierError(str(error)), config=error)
    except Exception as error:  # noqa: BLE001  # the boundary of all tiers: a fault is a miss
        return JobOutcome(error=TierError(f"{type(error).__name__}: {error}"))
    return JobOutcome()


_Place = tuple[JobItem, memoryview, memoryview, list[memoryview]]
"""An item, memory for its record's first pages, its slot, and the record: those, then the slot."""


def _places(items: Sequence[JobItem], memory: memoryview) -> Iterator[_Place]:
    sizes = [head_bytes(item.record.parts) for item in items]
    pages = memoryview(mmap.mmap(-1, sum(sizes)))
    for item, size, end in zip(items, sizes, accumulate(sizes), strict=True):
        assert item.slot is not None, "a job that copies has slots"
        head, slot = pages[end - size : end], memory[item.slot.offset :][: item.record.size_bytes]
        yield item, head, slot, [piece for piece in (head, slot[size:]) if piece]


def _read(tier: Tier, items: Sequence[JobItem], memory: memoryview) -> JobOutcome:
    places = list(_places(items, memory))
    errors = tier.get([ReadRequest(item.key, pieces) for item, _, _, pieces in places])
    tenants = [0] * len(items)
    proven: list[TierError | None] = []
    for at, ((item, head, slot, _), wrong) in enumerate(zip(places, errors, strict=True)):
        try:
            if wrong is None:
                tenants[at] = _prove(item.record, head, slot)
            proven.append(wrong)
        except DamagedError as error:
            proven.append(error)
    return JobOutcome(errors=proven, tenants=tenants)


def _prove(wanted: Record, head: memoryview, slot: memoryview) -> int:
    """Turn a record into the content of its slot; its tenant. Raises DamagedError if unsound."""
    record = read_head(head)
    if record is None:
        raise DamagedError("its header is not sound")
    if (record.name, record.shape) != (wanted.name, wanted.shape):
        raise DamagedError("it is another object")
    slot[HEADER_BYTES : len(head)] = head[HEADER_BYTES:]
    if not is_whole(record, slot):
        raise DamagedError("its bytes are not those that were stored")
    sign(slot, record.part_bytes, record.parts, wanted.seed)
    return record.tenant


def _write(tier: Tier, items: Sequence[JobItem], memory: memoryview) -> list[TierError | None]:
    errors: list[TierError | None] = [None] * len(items)
    requests: dict[int, WriteRequest] = {}
    found = tier.find([item.key for item in items])
    for at, (item, head, slot, pieces) in enumerate(_places(items, memory)):
        record = item.record
        try:
            if not found[at]:
                write_head(record, slot, head)
                requests[at] = WriteRequest(item.key, pieces, record.parent, record.interior)
        except ValueError as wrong:
            errors[at] = WrongBytesError(str(wrong))
    told = tier.put(list(requests.values()))
    for at, error in zip(requests, told, strict=True):
        errors[at] = error
    return errors
