"""Jobs of a tier's threads: objects between slots and a tier, proven on the way.

A job is a value of what to do; `execute` does it, in a thread that may hang, and touches only slots that the daemon
keeps for the job until its outcome is known.
"""

import mmap
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import islice
from typing import NamedTuple

from hybridkv.core.errors import ConfigError
from hybridkv.shm.signature import sign
from hybridkv.shm.slots import HEADER_BYTES
from hybridkv.storage.record import Record, head_bytes, is_whole, read_head, write_head
from hybridkv.storage.store import Slot
from hybridkv.storage.tiers.base import DamagedError, Getting, Putting, Tier, TierError

CLEAR_KEYS = 1024
"""Records that are removed in one call."""


class WrongBytesError(TierError):
    """The slot itself does not hold what was stored."""


class Work(StrEnum):
    """What a job does."""

    OPEN = "open"
    TEND = "tend"
    FIND = "find"
    READ = "read"
    WRITE = "write"
    DISCARD = "discard"
    CLEAR = "clear"


class Item(NamedTuple):
    """One object. Without a slot only its name counts."""

    record: Record
    """What is written; of what is read, the name and the shape, and the seed of the slot that takes it."""
    slot: Slot | None = None

    @property
    def key(self) -> bytes:
        """Its name in tiers."""
        return self.record.name.key


@dataclass(eq=False, slots=True)
class Job:
    """Something for a tier's thread."""

    work: Work
    line: int
    """Which tier."""
    items: Sequence[Item] = ()
    submitted_at: float = 0.0
    is_late: bool = False
    damaged: bool = False
    """Of DISCARD."""

    @property
    def size_bytes(self) -> int:
        """Bytes of the records."""
        return sum(item.record.size_bytes for item in self.items)


@dataclass(slots=True)
class Outcome:
    """What became of a job."""

    error: TierError | None = None
    """Of the whole job: nothing was done."""
    errors: Sequence[TierError | None] = field(default_factory=list)
    """Of each item."""
    found: Sequence[bool] = ()
    """Of FIND."""
    tenants: Sequence[int] = ()
    """Of READ: whose quota each item counts against."""
    config: str = ""
    """Of OPEN: the sentence of a ConfigError."""


def execute(tier: Tier, job: Job, memory: memoryview) -> Outcome:
    """Do a job, with slots in `memory`. Never raises an Exception."""
    try:
        match job.work:
            case Work.OPEN:
                tier.open()
            case Work.TEND:
                tier.tend()
            case Work.FIND:
                return Outcome(found=tier.find([item.key for item in job.items]))
            case Work.DISCARD:
                tier.discard([item.key for item in job.items], job.damaged)
            case Work.CLEAR:
                _clear(tier)
            case Work.READ:
                return _read(tier, job.items, memory)
            case Work.WRITE:
                return Outcome(errors=_write(tier, job.items, memory))
    except TierError as error:
        return Outcome(error=error)
    except ConfigError as error:
        return Outcome(error=TierError(str(error)), config=str(error))
    except Exception as error:  # noqa: BLE001  # the supervised boundary: a tier's fault is a miss, and is counted
        return Outcome(error=TierError(f"{type(error).__name__}: {error}"))
    return Outcome()


def _slot_memory(item: Item, memory: memoryview) -> memoryview:
    assert item.slot is not None, "a job that copies has slots"
    return memory[item.slot.offset : item.slot.offset + item.record.size_bytes]


def _heads(items: Sequence[Item]) -> list[memoryview]:
    """Memory for the first pages of records, which are not those of their slots."""
    sizes = [head_bytes(item.record.parts) for item in items]
    pages = memoryview(mmap.mmap(-1, sum(sizes)))
    ends = [sum(sizes[: at + 1]) for at in range(len(sizes))]
    return [pages[end - size : end] for end, size in zip(ends, sizes, strict=True)]


def _read(tier: Tier, items: Sequence[Item], memory: memoryview) -> Outcome:
    heads = _heads(items)
    slots = [_slot_memory(item, memory) for item in items]
    errors = tier.get(
        [Getting(item.key, _pieces(head, slot)) for item, head, slot in zip(items, heads, slots, strict=True)]
    )
    proven: list[TierError | None] = []
    tenants: list[int] = []
    for item, head, slot, told in zip(items, heads, slots, errors, strict=True):
        wrong, tenant = told, 0
        try:
            if wrong is None:
                tenant = _prove(item.record, head, slot)
        except DamagedError as error:
            wrong = error
        proven.append(wrong)
        tenants.append(tenant)
    return Outcome(errors=proven, tenants=tenants)


def _prove(wanted: Record, head: memoryview, slot: memoryview) -> int:
    """Make a record's bytes those of a slot; its tenant. Raises DamagedError unless it is what was stored so named."""
    record = read_head(head)
    if record is None:
        raise DamagedError("its header is not sound")
    if record.name != wanted.name or (record.part_bytes, record.parts) != (wanted.part_bytes, wanted.parts):
        raise DamagedError("it is another object")
    slot[HEADER_BYTES : len(head)] = head[HEADER_BYTES:]
    if not is_whole(record, slot):
        raise DamagedError("its bytes are not those that were stored")
    sign(slot, record.part_bytes, record.parts, wanted.seed)
    return record.tenant


def _write(tier: Tier, items: Sequence[Item], memory: memoryview) -> list[TierError | None]:
    errors: list[TierError | None] = [None] * len(items)
    puttings: dict[int, Putting] = {}
    there = tier.find([item.key for item in items])
    heads = _heads(items)
    for at, (item, head) in enumerate(zip(items, heads, strict=True)):
        slot = _slot_memory(item, memory)
        try:
            if not there[at]:
                write_head(item.record, slot, head)
                puttings[at] = Putting(item.key, _pieces(head, slot), item.record.parent, item.record.interior)
        except ValueError as wrong:
            errors[at] = WrongBytesError(str(wrong))
    told = tier.put(list(puttings.values()))
    for at, error in zip(puttings, told, strict=True):
        errors[at] = error
    return errors


def _clear(tier: Tier) -> None:
    keys = tier.keys()
    while some := list(islice(keys, CLEAR_KEYS)):
        tier.discard(some)


def _pieces(head: memoryview, slot: memoryview) -> list[memoryview]:
    return [head, slot[len(head) :]] if len(slot) > len(head) else [head]
