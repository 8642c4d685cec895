"""Jobs of a tier's threads, which copy objects between slots and a tier and prove their bytes.

A job is a value. `execute` does it in a thread that may hang. It touches only slots that the daemon
keeps for the job until the outcome is known. Each tier has its own threads, so that a tier that
hangs blocks no other.
"""

import contextlib
import mmap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import accumulate, islice
from queue import SimpleQueue
from typing import NamedTuple

from hybridkv.core.errors import ConfigError
from hybridkv.core.selection import HeldObject
from hybridkv.shm.slots import HEADER_BYTES, sign
from hybridkv.store.index import Slot
from hybridkv.tiers.contract import (
    DamagedError,
    FindRequest,
    MissingError,
    ReadRequest,
    RecordStart,
    Tier,
    TierError,
    WriteRequest,
)
from hybridkv.tiers.record import (
    Record,
    head_bytes,
    proven_digests,
    read_head,
    read_start,
    write_head,
)

CLEAR_KEYS = 1024  # Records that are removed in one call.
LIST_KEYS = 256  # Records whose starts are read in one call.


class WrongBytesError(TierError):
    """The slot does not hold the bytes that were stored."""


class JobKind(StrEnum):
    """The kinds of jobs, which are also names in metrics and spans."""

    OPEN = "open"
    TEND = "tend"
    FIND = "find"
    USE = "use"  # The tier counts records as used, and says whether it still has them.
    READ = "read"
    WRITE = "write"
    DISCARD = "discard"  # Damaged records go to quarantine.
    CLEAR = "clear"
    LIST = "list"  # The next records of a `Listing`, for people.
    ERASE = "erase"  # Records are removed because somebody asked for their deletion.


LIMITS = {JobKind.READ: 4, JobKind.WRITE: 4, JobKind.FIND: 2}
"""Jobs of a kind that may run at once. Of each other kind 1 may run."""
THREADS = sum(LIMITS.values()) + 6
"""Threads of a tier: one for each job that may run at once, so that no job waits for a hung one."""


class JobItem(NamedTuple):
    """One object of a job. Without a slot only its name counts."""

    record: Record
    """The record to write. For a read: its name, its shape, and the seed of the slot."""
    slot: Slot | None = None
    replaces: bool = False  # It is written even where a record is there, which may be damaged.

    @property
    def key(self) -> bytes:
        """The bytes that name the object in tiers."""
        return self.record.name.key


@dataclass(eq=False, slots=True)
class Listing:
    """A walk over all records of a tier, a page at a time. Its jobs come one after the other."""

    keys: Iterator[bytes] | None = None  # Those of the pages to come. None = it has not begun.


@dataclass(eq=False, slots=True)
class TierJob:
    """Work for a thread of a tier."""

    kind: JobKind
    tier: int  # The tier's number.
    items: Sequence[JobItem] = ()
    submitted_at: float = 0.0
    is_late: bool = False  # It ran longer than the tier's timeout.
    is_again: bool = False  # Of FIND: the tier looks at its storage (`Tier.find_again`).
    listing: Listing | None = None  # For LIST.
    keys: Sequence[bytes] = ()  # For ERASE. Without any, damaged records that were put aside go.

    @property
    def size_bytes(self) -> int:
        """Bytes of all records of the job."""
        return sum(item.record.size_bytes for item in self.items)


@dataclass(slots=True)
class JobOutcome:
    """The results of a tier's job, as a whole and for each of its items."""

    error: TierError | None = None  # The error of the whole job, which then did nothing.
    errors: Sequence[TierError | None] = field(default_factory=list)
    """For READ and WRITE: the error of each item, or None. For ERASE: that of each key."""
    found: Sequence[bool | None] = ()
    """For FIND and USE: whether each record is there. None = nobody said so. For WRITE: whether it
    was there already."""
    tenants: Sequence[int] = ()  # For READ: the tenant of each item.
    page: Sequence[HeldObject] = ()  # For LIST: the next records. Empty = there are no more.
    config: ConfigError | None = None  # For OPEN: why the tier's settings can never work.


def execute(tier: Tier, job: TierJob, memory: memoryview) -> JobOutcome:
    """Do a job, with slots in `memory`. Never raises an Exception."""
    try:
        match job.kind:
            case JobKind.OPEN:
                # What was settled when it was opened is settled anew.
                tier.close()
                tier.open()
            case JobKind.TEND:
                tier.tend()
            case JobKind.FIND if job.is_again:
                wanted = [FindRequest(item.key, item.record.parent) for item in job.items]
                return JobOutcome(found=tier.find_again(wanted))
            case JobKind.FIND:
                return JobOutcome(found=tier.find([item.key for item in job.items]))
            case JobKind.USE:
                return JobOutcome(found=tier.use([item.key for item in job.items]))
            case JobKind.DISCARD:
                tier.discard([item.key for item in job.items], damaged=True)
            case JobKind.CLEAR | JobKind.LIST | JobKind.ERASE:
                return _list_or_remove(tier, job)
            case JobKind.READ:
                return _read(tier, job.items, memory)
            case JobKind.WRITE:
                return _write(tier, job.items, memory)
    except TierError as error:
        return JobOutcome(error=error)
    except ConfigError as error:
        return JobOutcome(error=TierError(str(error)), config=error)
    except Exception as error:  # noqa: BLE001  # the boundary of all tiers: a fault is a miss
        return JobOutcome(error=TierError(f"{type(error).__name__}: {error}"))
    return JobOutcome()


def _list_or_remove(tier: Tier, job: TierJob) -> JobOutcome:
    """Do a job that people asked for. Raises TierError."""
    if job.kind is JobKind.LIST:
        assert job.listing is not None
        return JobOutcome(page=_list(tier, job.listing))
    if job.kind is JobKind.CLEAR:
        keys = tier.keys()
        while batch := list(islice(keys, CLEAR_KEYS)):
            tier.discard(batch)
    elif job.keys:
        return JobOutcome(errors=tier.erase(job.keys))
    else:
        tier.empty_quarantine()
    return JobOutcome()


def _list(tier: Tier, listing: Listing) -> list[HeldObject]:
    """Returns what the next records of a tier say. Raises TierError."""
    if listing.keys is None:
        tier.tend()  # It finds what other writers have put.
        listing.keys = tier.keys()
    page: list[HeldObject] = []
    now = time.time()
    # Where all records of a page are gone by now, the next page is read, as an empty one is the
    # last.
    while not page and (keys := list(islice(listing.keys, LIST_KEYS))):
        for key, start in zip(keys, tier.read_starts(keys), strict=True):
            if not isinstance(start, MissingError):
                page.append(_held(key, start, now))
    return page


def _held(key: bytes, found: RecordStart | TierError, now: float) -> HeldObject:
    if isinstance(found, TierError):
        return HeldObject(key, None, None, None, None, None)
    record = read_start(found.start, key)
    written, used = (
        None if at is None else max(0.0, now - at) for at in (found.written_at, found.used_at)
    )
    return HeldObject(
        key=key,
        size_bytes=found.size_bytes,
        tenant=None if record is None else record.tenant,
        parent=None if record is None else int.from_bytes(record.parent, "little"),
        written_seconds=written,
        used_seconds=used,
    )


class ItemMemory(NamedTuple):
    """The memory of one item of a job that copies."""

    item: JobItem
    head: memoryview  # Pages for the record's first `head_bytes`.
    slot: memoryview
    pieces: list[memoryview]  # The whole record: `head`, then the rest of the slot.


def _item_memories(items: Sequence[JobItem], memory: memoryview) -> Iterator[ItemMemory]:
    sizes = [head_bytes(item.record.parts) for item in items]
    pages = memoryview(mmap.mmap(-1, sum(sizes)))
    for item, size, end in zip(items, sizes, accumulate(sizes), strict=True):
        assert item.slot is not None, "a job that copies has slots"
        head, slot = pages[end - size : end], memory[item.slot.offset :][: item.record.size_bytes]
        pieces = [piece for piece in (head, slot[size:]) if piece]
        yield ItemMemory(item, head, slot, pieces)


def _read(tier: Tier, items: Sequence[JobItem], memory: memoryview) -> JobOutcome:
    copies = list(_item_memories(items, memory))
    errors = list(tier.get([ReadRequest(copy.item.key, copy.pieces) for copy in copies]))
    tenants = [0] * len(items)
    for at, copy in enumerate(copies):
        try:
            if errors[at] is None:
                tenants[at] = _prove(copy.item.record, copy.head, copy.slot)
        except DamagedError as error:
            errors[at] = error
    return JobOutcome(errors=errors, tenants=tenants)


def _prove(wanted: Record, head: memoryview, slot: memoryview) -> int:
    """Turn a record into the content of its slot. Returns the tenant. Raises DamagedError."""
    record = read_head(head)
    if record is None:
        raise DamagedError("its header is not sound")
    if (record.name, record.shape) != (wanted.name, wanted.shape):
        raise DamagedError("it is another object")
    slot[HEADER_BYTES : len(head)] = head[HEADER_BYTES:]
    digests = proven_digests(record, slot)
    if digests is None:
        raise DamagedError("its bytes are not those that were stored")
    sign(slot, digests, wanted.seed)
    return record.tenant


def _write(tier: Tier, items: Sequence[JobItem], memory: memoryview) -> JobOutcome:
    errors: list[TierError | None] = [None] * len(items)
    requests: dict[int, WriteRequest] = {}
    if replaced := [item.key for item in items if item.replaces]:
        with contextlib.suppress(TierError):  # A tier that cannot remove it may write over it.
            tier.discard(replaced)
    found = [
        bool(is_there) and not item.replaces
        for item, is_there in zip(items, tier.find([item.key for item in items]), strict=True)
    ]
    for at, copy in enumerate(_item_memories(items, memory)):
        record = copy.item.record
        try:
            if not found[at]:
                write_head(record, copy.slot, copy.head)
                requests[at] = WriteRequest(
                    copy.item.key, copy.pieces, record.parent, record.interior
                )
        except ValueError as error:
            errors[at] = WrongBytesError(str(error))
    for at, put_error in zip(requests, tier.put(list(requests.values())), strict=True):
        errors[at] = put_error
    return JobOutcome(errors=errors, found=found)


class TierThreads:
    """The threads of one tier, which start when they are needed. They are daemon threads."""

    def __init__(
        self, tier: Tier, memory: memoryview, done: Callable[[TierJob, JobOutcome], None]
    ) -> None:
        """`done` is called after each job, by its thread, or by the caller where none starts."""
        self._tier = tier
        self._memory = memory
        self._done = done
        self._jobs: SimpleQueue[TierJob | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._idle = 0  # Threads without a job. If negative, jobs that wait for a thread.
        self._closed = False

    def start_or_queue(self, job: TierJob) -> None:
        """Give a job to a thread. Where none can start, it waits for a running one, or fails."""
        with self._lock:
            self._idle -= 1
            missing = -self._idle
        for _ in range(min(missing, THREADS - len(self._threads))):
            name = f"tier-{self._tier.name}"
            thread = threading.Thread(target=self._work, name=name, daemon=True)
            try:
                thread.start()
            except RuntimeError:
                break
            self._threads.append(thread)
            self._count_idle()
        if not self._threads:
            self._count_idle()
            self._done(job, JobOutcome(error=TierError("no thread can be started")))
            return
        self._jobs.put(job)

    def close(self, seconds: float) -> bool:
        """End the threads, wait at most `seconds` for running jobs, and close the tier.

        Returns whether all threads have ended. Otherwise the tier and the memory may still be used.
        """
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join(seconds / max(1, len(self._threads)))
        self._closed = True  # No job that waits opens the tier again.
        closing = threading.Thread(target=self._tier.close, daemon=True)
        closing.start()
        closing.join(seconds)
        return not any(thread.is_alive() for thread in self._threads)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None and not self._closed:
            try:
                outcome = execute(self._tier, job, self._memory)
            except BaseException as error:  # noqa: BLE001  # a library's panic must not lose a job
                outcome = JobOutcome(error=TierError(f"{type(error).__name__}: {error}"))
            self._count_idle()
            self._done(job, outcome)

    def _count_idle(self) -> None:
        with self._lock:
            self._idle += 1
