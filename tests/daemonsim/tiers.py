"""Simulated tiers: dictionaries with faults, and the daemon's threads, run one at a time."""

import itertools
import random
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from hybridkv.core.refusals import Refusal
from hybridkv.core.tier_urls import TierSpec
from hybridkv.shm.slots import part_digests, payload_offset, sign, slot_bytes
from hybridkv.tiers.contract import (
    START_BYTES,
    DamagedError,
    FindRequest,
    FullError,
    MissingError,
    ReadRequest,
    RecordStart,
    Tier,
    TierError,
    WriteRequest,
)
from hybridkv.tiers.jobs import THREADS, JobOutcome, TierJob, execute
from hybridkv.tiers.record import (
    Record,
    RecordName,
    head_bytes,
    proven_digests,
    read_head,
    write_head,
)
from tests.daemonsim.oracle import Books, Name, content
from tests.daemonsim.system import SECOND, Delays, SlotsMemory, Strand, System

ILLS = {
    "tier_slow": "a tier takes up to half a second for everything",
    "tier_hang": "calls of a tier do not return, for a while or until all is well",
    "tier_error": "calls of a tier fail, some after half of their work",
    "tier_full": "a tier has no room",
    "tier_loss": "a tier loses records",
    "tier_damage": "records of a tier change: bits, length, another one's bytes",
    "tier_stale": "a tier says wrong things about what it has",
    "tier_shut": "a tier cannot be opened",
    "tier_other": "another node puts records",
    "tier_alone": "the machine reboots: what was in RAM is lost",
}
HANGS_SECONDS = (0.2, 2.0, 20.0, None)
"""The times for which calls hang, None = until all is well."""


CALLS = ("open", "find", "get", "put", "discard", "tend")


class WrongError(BaseException):
    """A fault of the daemon that a tier saw. No handler takes it for a fault of the tier."""


class Vault:
    """The records of a tier, which outlive daemons, and its faults."""

    def __init__(
        self, system: System, books: Books, is_remote: bool, max_bytes: int | None
    ) -> None:
        self.system = system
        self.books = books
        self.is_remote = is_remote
        """True for a tier that must be asked which objects it has."""
        self.max_bytes = max_bytes
        self.records: dict[bytes, bytes] = {}
        self.login = 0  # The number of its login, as settings say it. It may change at any time.
        self.delays = Delays(1, 300)
        self.ills: dict[str, int] = {}
        """The time until which each fault lasts, by its name."""
        self.sick_calls: tuple[str, ...] = CALLS
        """The calls that hang or fail while the tier hangs or fails."""
        self.counts: Counter[str] = Counter()

    def is_ill(self, name: str, rate: float = 1.0) -> bool:
        """Return True where the fault of that name shows now."""
        return self.ills.get(name, 0) > self.system.now and self.system.rng.random() < rate

    def heal(self) -> None:
        """All is well from now on."""
        self.ills.clear()
        self.delays = Delays(1, 300)

    def sound(self, key: bytes) -> Record | None:
        """Return the head of a record if every byte of it is as it was put, else None."""
        image = self.records.get(key)
        record = read_head(memoryview(image)) if image is not None else None
        if image is None or record is None or record.name.key != key:
            return None
        return record if proven_digests(record, memoryview(image)) else None

    def publish(self, key: bytes, image: bytes) -> None:
        """Add a record, as a whole."""
        self.records.pop(key, None)
        self.records[key] = image
        record = self.sound(key)
        if record is None and self.books.is_exact:
            raise WrongError("a record was put whose bytes were changed on their way")
        if record is not None:
            self._prove(record, image)

    def audit(self) -> int:
        """Every sound record has the bytes of its name. Returns the number of sound records."""
        records = [(self.sound(key), image) for key, image in self.records.items()]
        for record, image in records:
            if record is not None:
                self._prove(record, image)
        return sum(record is not None for record, _ in records)

    def _prove(self, record: Record, image: bytes) -> None:
        name = Name(record.name.namespace, record.name.gid, record.name.chunk_hash)
        if name in self.books.written and self.books.is_exclusive:
            for part in range(record.parts):
                start = payload_offset(record.parts) + part * record.part_bytes
                if image[start : start + record.part_bytes] != content(
                    name, part, record.part_bytes
                ):
                    shown = f"{name.gid}:{name.chunk_hash.hex()[:8]}"
                    raise WrongError(f"LIE: the record of {shown} has other bytes, signed")

    def lose(self) -> None:
        """Remove a random share of the records."""
        rate = self.system.rng.choice((0.1, 0.5, 1.0))
        for key in list(self.records):
            if self.system.rng.random() < rate:
                del self.records[key]

    def damage(self) -> None:
        """Change bytes of a few records."""
        rng = self.system.rng
        for key in rng.sample(list(self.records), min(len(self.records), rng.randrange(1, 6))):
            image = bytearray(self.records[key])
            match rng.randrange(5):
                case 0 if image:
                    image[rng.randrange(len(image))] ^= 1 << rng.randrange(8)
                case 1 if image:
                    del image[rng.randrange(len(image)) :]
                case 2:
                    image = bytearray(self.records[rng.choice(list(self.records))])
                case 3:
                    foreign = self.records[rng.choice(list(self.records))]
                    start = rng.randrange(len(image) + 1)
                    image[start:] = foreign[start : len(image)].ljust(len(image) - start, b"\0")
                case _:
                    image[len(image) // 2 :] = bytes(len(image) - len(image) // 2)
            self.records[key] = bytes(image)
            self.counts["records_damaged"] += 1


def make_record(name: Name, part_bytes: int, parts: int, seed: int) -> bytes:
    """Return the record of an object, as another node puts it."""
    slot = memoryview(bytearray(slot_bytes(part_bytes, parts)))
    for part in range(parts):
        start = payload_offset(parts) + part * part_bytes
        slot[start : start + part_bytes] = content(name, part, part_bytes)
    sign(slot, part_digests(slot, part_bytes, parts), seed)
    head = memoryview(bytearray(head_bytes(parts)))
    record_name = RecordName(name.identity, name.gid, name.chunk_hash)
    record = Record(record_name, part_bytes, parts, seed, tenant=name.chunk_hash[1] % 3)
    write_head(record, slot, head)
    return bytes(head) + bytes(slot[len(head) :])


class SimTier(Tier):
    """A tier over a vault, for one life of the daemon. Calls that would block `pause`."""

    name = "sim"

    def __init__(self, vault: Vault) -> None:
        self._vault = vault
        self._system = vault.system
        self._known: dict[bytes, None] = {}
        self._login = -1  # That of the last `open`.

    @property
    def _rng(self) -> random.Random:
        return self._system.rng

    @property
    def is_served(self) -> bool:
        """True where it was opened with the login that the vault has."""
        return self._login == self._vault.login

    def open(self) -> None:
        self._login = self._vault.login
        self._call("open")
        if self._vault.is_ill("tier_shut"):
            raise TierError("it does not answer")
        self._known = {} if self._vault.is_remote else dict.fromkeys(self._vault.records)

    def peek(self, key: bytes) -> bool | None:
        is_there = key in self._known
        if self._vault.is_ill("tier_stale", 0.3):
            return self._rng.choice((True, False, None))
        return (is_there or None) if self._vault.is_remote else is_there

    def find(self, keys: Sequence[bytes]) -> Sequence[bool | None]:
        self._call("find")
        if self._vault.is_ill("tier_stale", 0.3):
            return [self._rng.choice((True, False, None)) for _ in keys]
        return [key in self._vault.records for key in keys]

    def find_again(self, wanted: Sequence[FindRequest]) -> Sequence[bool | None]:
        found = super().find_again(wanted)
        self._vault.counts["asked_again"] += 1
        self._vault.counts["come_meanwhile"] += sum(map(bool, found))
        return found

    def get(self, items: Sequence[ReadRequest]) -> list[TierError | None]:
        self._call("get")
        return [self._get(item) for item in items]

    def read_starts(self, keys: Sequence[bytes]) -> list[RecordStart | TierError]:
        self._call("read_starts")
        records = (self._vault.records.get(key) for key in keys)
        return [
            MissingError("it is not there")
            if image is None
            else RecordStart(bytes(image[:START_BYTES]), len(image))
            for image in records
        ]

    def put(self, items: Sequence[WriteRequest]) -> list[TierError | None]:
        self._call("put")
        return [self._put(item) for item in items]

    def discard(self, keys: Sequence[bytes], damaged: bool = False) -> None:
        self._call("discard")
        for key in keys:
            self._vault.records.pop(key, None)
            self._known.pop(key, None)

    def keys(self) -> Iterator[bytes]:
        yield from list(self._vault.records)

    def tend(self) -> None:
        self._call("tend")
        if not self._vault.is_remote:
            self._known = dict.fromkeys(self._vault.records)

    def gauges(self) -> Mapping[str, float]:
        return {"objects": float(len(self._known))}

    def close(self) -> None:
        self._login = -1

    def _call(self, name: str) -> None:
        vault = self._vault
        self._system.pause(vault.delays.low, vault.delays.high)
        if not self.is_served:
            vault.counts["logins_refused"] += 1
            raise TierError("wrong login")
        if vault.is_ill("tier_slow"):
            self._system.pause(1, SECOND // 2)
        if name not in vault.sick_calls:
            return
        if vault.is_ill("tier_hang", 0.5):
            vault.counts["calls_hung"] += 1
            seconds = self._rng.choice(HANGS_SECONDS)
            self._system.hang(None if seconds is None else int(seconds * SECOND))
        if vault.is_ill("tier_error", 0.5):
            raise TierError("Input/output error")

    def _breath(self, name: str) -> None:
        """Let others run within a call."""
        if self._rng.random() < 0.2:
            self._system.pause(self._vault.delays.low, self._vault.delays.high)
        if name in self._vault.sick_calls and self._vault.is_ill("tier_hang", 0.1):
            self._vault.counts["calls_hung"] += 1
            self._system.hang(None)

    def _get(self, item: ReadRequest) -> TierError | None:
        self._breath("get")
        image = self._vault.records.get(item.key)
        if image is None:
            self._known.pop(item.key, None)
            return MissingError("it is not there")
        size = sum(len(piece) for piece in item.pieces)
        if len(image) != size and self._rng.random() < 0.5:
            return DamagedError(f"{len(image)} bytes instead of {size}")
        fails = "get" in self._vault.sick_calls and self._vault.is_ill("tier_error", 0.3)
        fails_at = self._rng.randrange(size) if fails else size
        done = 0
        for piece in item.pieces:
            stop = min(len(piece), fails_at - done, max(0, len(image) - done))
            for start, end in itertools.pairwise(sorted({0, stop, self._rng.randrange(stop + 1)})):
                piece[start:end] = image[done + start : done + end]
                self._breath("get")
            done += len(piece)
            if done > fails_at:
                return TierError("Input/output error")
        return None

    def _put(self, item: WriteRequest) -> TierError | None:
        vault = self._vault
        if "put" in vault.sick_calls and vault.is_ill("tier_error", 0.3):
            return TierError("Input/output error")
        image = bytearray()
        for piece in item.pieces:
            self._breath("put")
            half = self._rng.randrange(len(piece) + 1)
            image += piece[:half]
            self._breath("put")
            image += piece[half:]
        if vault.is_ill("tier_full", 0.8):
            return FullError("no room", Refusal.NO_SPACE)
        if vault.max_bytes is not None:
            if len(image) > vault.max_bytes:
                return FullError("no room", Refusal.BOUND)
            while sum(map(len, vault.records.values())) + len(image) > vault.max_bytes:
                evicted = next(iter(vault.records))
                del vault.records[evicted]
                self._known.pop(evicted, None)
        vault.publish(item.key, bytes(image))
        vault.counts["records_put"] += 1
        self._known[item.key] = None
        return None


class SimThreads:
    """Stands for tiers.jobs.TierThreads. One thread runs at a time, from pause to pause."""

    def __init__(
        self,
        system: System,
        tier: Tier,
        memory: SlotsMemory,
        done: Callable[[TierJob, JobOutcome], None],
        counts: Counter[str],
    ) -> None:
        self._system = system
        self._tier = tier
        self._memory: Any = memory
        self._done = done
        self._counts = counts
        self._waiting: deque[TierJob] = deque()
        self._running = 0
        self._is_closed = False

    def start_or_queue(self, job: TierJob) -> None:
        self._counts[f"jobs_{job.kind}"] += 1
        self._waiting.append(job)
        if self._running < THREADS:
            self._running += 1
            self._system.start(Strand(self._system, self._work))

    def close(self, seconds: float) -> bool:
        self._is_closed = True
        self._system.run_strands(
            self._system.now + int(seconds * SECOND), lambda: not self._running
        )
        return not self._running

    def _work(self, strand: Strand) -> None:
        self._system.pause(1, 500)
        while self._waiting and not self._is_closed:
            strand.job = job = self._waiting.popleft()
            outcome = execute(self._tier, job, self._memory)
            strand.job = None
            self._system.trace(
                "job",
                job.kind,
                len(job.items),
                str(outcome.error),
                [str(error) for error in outcome.errors],
            )
            self._done(job, outcome)
        self._running -= 1


class TierMaker:
    """Stands for tiers.factory.make_tier: the tiers of a seed, by the numbers in their URLs."""

    def __init__(self, vaults: Sequence[Vault]) -> None:
        self._vaults = vaults

    def __call__(self, spec: TierSpec, node: str) -> SimTier:
        return SimTier(self._vaults[int(spec.location.removeprefix("sim://"))])
