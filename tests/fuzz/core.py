"""Lies told to the daemon's core in this process; its answers must agree with our own books."""

import random
import time
from collections import Counter
from dataclasses import dataclass, field

from hybridkv.core.coverage import needed_chunks
from hybridkv.core.geometry import Geometry
from hybridkv.core.keys import HASH_BYTES
from hybridkv.core.packed import unpack_u64
from hybridkv.core.tier_urls import parse_tier
from hybridkv.daemon.handlers import Daemon
from hybridkv.daemon.sessions import ClientConnection, Process
from hybridkv.daemon.slot_requests import clear
from hybridkv.shm.slots import HEADER_BYTES, SlotHeader, SlotState, slot_bytes, unpack_header
from hybridkv.store.store import Store
from hybridkv.tiers.contract import TierError
from hybridkv.tiers.jobs import JobOutcome, TierJob, execute
from hybridkv.tiers.state import TierState as TierLine
from hybridkv.wire.codec import Frames, WireError, decode_reply, decode_request, encode
from hybridkv.wire.messages import (
    BATCH_MAX,
    PROTOCOL_VERSION,
    Clear,
    Commit,
    Drained,
    Error,
    Found,
    Free,
    Hello,
    Identify,
    Lookup,
    Pending,
    Release,
    Reply,
    Request,
    Reserved,
    Welcome,
    geometry_from_wire,
)
from hybridkv.wire.protocol import CLOSING, RULES, ConnectionState, ErrorCode, refused
from tests.fuzz.liar import KINDS, Liar, Peer
from tests.invariants import check_daemon
from tests.unit.daemon.dict_tier import DictTier

ARENA_BYTES = 1 << 19
CHECK_EVERY = 512
STALL_SECONDS = 2.0
"""Of the processor's time, for one message."""
FIRST_GENERATION = 1 << 32

Name = tuple[int, int]
"""(offset, generation) of a slot."""


@dataclass(eq=False)
class Account:
    """What a session must hold, by our own books."""

    geometry: Geometry
    identity: bytes
    number: int
    """Of its engine's greetings."""
    leases: dict[int, list[Name]] = field(default_factory=dict)
    waits: dict[int, tuple[Lookup, bytes, float]] = field(default_factory=dict)
    """By lease, lookups that tiers are asked for: identity and deadline."""
    writing: set[Name] = field(default_factory=set)


@dataclass(eq=False)
class TierState:
    """One connection to the daemon, and what our books say of it."""

    number: int
    peer: Peer
    frames: Frames = field(default_factory=Frames)
    state: ConnectionState = ConnectionState.NEW
    engine_id: str = ""
    drained: int = 0
    """Of a worker: the greeting before which it copies nothing."""
    account: Account | None = None
    closed: bool = False
    """The last answer was one that closes the connection."""


class CoreFuzz:
    """One daemon's core with some liars. Methods raise AssertionError on the daemon's faults."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._liar = Liar(self._rng)
        self._memory = memoryview(bytearray(ARENA_BYTES))
        store = Store(self._memory, FIRST_GENERATION)
        store.extents.grow(ARENA_BYTES)
        self._jobs: list[TierJob] = []
        self._now = 1.0
        tiers = [DictTier({}, is_remote) for is_remote in (False, True)]
        lines = [
            TierLine(
                at,
                f"sim{at}",
                tier,
                parse_tier(f"sim://{at}?write={write}", "tier"),
                self._jobs.append,
            )
            for at, (tier, write) in enumerate(zip(tiers, ("through", "back"), strict=True))
        ]
        self.daemon = Daemon(
            store,
            Welcome(0, PROTOCOL_VERSION, "boot", "/nowhere", ARENA_BYTES, ARENA_BYTES, 1),
            lines,
        )
        self._numbers = 0
        self._generation = FIRST_GENERATION
        self._accounts: dict[Account, str] = {}
        """Every session that has not ended, and its engine_id."""
        self._lines: list[TierState] = [self._open(kind) for kind in range(len(KINDS))]
        self.seen: Counter[str] = Counter()
        """What came of the cases: replies by type, refusals by code."""

    def run(self, cases: int) -> None:
        """So many pieces of bytes."""
        for case in range(1, cases + 1):
            self._case()
            if not case % CHECK_EVERY:
                self.check()
        self.check()

    def finish(self) -> None:
        """Everybody hangs up: nothing may be left but objects."""
        for line in self._lines:
            self.daemon.disconnect(line.number)
        self._tick()
        while self._jobs:
            self._work(None)
        values = self.daemon.view.values().named()
        for name in ("sessions", "leases", "connections", "bytes_writing", "lookups_waiting"):
            assert values[name] == 0, f"{name} {values[name]} after the last client"
        while clear(self.daemon, ClientConnection(0, Process(0, 0)), Clear(0)).count:
            pass
        assert self.daemon.store.objects == 0
        check_daemon(self.daemon)

    def check(self) -> None:
        """The daemon's books in themselves, with ours, and with the headers in the arena."""
        check_daemon(self.daemon)
        values = self.daemon.view.values().named()
        assert values["connections"] == len(self._lines)
        assert values["sessions"] == len(self._accounts)
        assert values["leases"] == sum(len(account.leases) for account in self._accounts)
        writing = 0
        for account in self._accounts:
            for names in account.leases.values():
                for name in names:
                    state = self._header(name).state
                    assert state in (SlotState.COMMITTED, SlotState.DROPPED), (
                        "a slot under a lease is not what it was"
                    )
            for name in account.writing:
                header = self._header(name)
                assert header.state is SlotState.WRITING
                writing += slot_bytes(header.part_bytes, header.parts)
        assert values["bytes_writing"] == writing + sum(
            read.slot.size_bytes for read in self.daemon.promotion._reads.values()
        )
        waits = [
            wait
            for line in self._lines
            if line.account is not None
            for wait in line.account.waits.values()
        ]
        assert values["lookups_waiting"] == len(waits)
        assert all(deadline > self._now for _, _, deadline in waits), "a lookup waits for too long"

    # Tiers

    def _work(self, ill: type[TierError] | None) -> None:
        """A tier's thread has done something, or failed."""
        job = self._jobs.pop(self._rng.randrange(len(self._jobs)))
        tier = self.daemon.tiers[job.tier].tier
        assert isinstance(tier, DictTier)
        tier.ill = ill
        outcome: JobOutcome = execute(tier, job, self._memory)
        tier.ill = None
        self.daemon.transferred(job, outcome, self._now)
        self._tick()
        self.seen[f"job_{job.kind}"] += 1

    def _tick(self) -> None:
        self.daemon.tick(self._now)
        while self.daemon.later:
            number, found = self.daemon.later.popleft()
            (account,) = [line.account for line in self._lines if line.number == number]
            assert account is not None
            assert isinstance(found, Found)
            assert decode_reply(encode(found)[4:]) == found
            lookup, identity, _ = account.waits.pop(found.lease)
            assert found.id == lookup.id
            assert identity == account.identity or not found.chunks, (
                "other weights' bytes are found"
            )
            self._found(account, lookup, found)
            self.seen["found_later"] += 1
            self.seen["found_in_tiers"] += sum(found.tiers.values())

    def _case(self) -> None:
        self._now += self._rng.choice((0.0, 0.0, 1e-4, 0.01))
        self._tick()
        if self._jobs and self._rng.random() < 0.3:
            self._work(self._rng.choice((None, None, None, TierError)))
        at = self._rng.randrange(len(KINDS))
        line = self._lines[at]
        if self._rng.random() < 0.002:
            self._again(at)
            return
        piece = self._liar.piece(line.peer)
        cut = self._rng.randrange(len(piece)) if piece and self._rng.random() < 0.05 else 0
        try:
            for part in (piece[:cut], piece[cut:]):
                bodies = line.frames.feed(part)
                for body in bodies:
                    self._message(line, decode_request(body))
                    if line.closed:
                        self._again(at)
                        return
        except WireError as error:
            refusal = self.daemon.refuse(0, ErrorCode.WIRE, str(error))
            assert decode_reply(encode(refusal)[4:]) == refusal
            self.seen["wire"] += 1
            self._again(at)
            return
        if not bodies and self._rng.random() < 0.5:
            # It waits for the rest of a frame, and would take what follows for it.
            self._again(at)

    def _open(self, kind: int) -> TierState:
        self._numbers += 1
        self.daemon.sessions.connect(self._numbers)
        return TierState(self._numbers, self._liar.peer(kind))

    def _again(self, kind: int) -> None:
        """This client hangs up, and another one of its kind comes."""
        self.daemon.disconnect(self._lines[kind].number)
        self._lines[kind] = self._open(kind)
        self._retire()

    def _retire(self) -> None:
        """Sessions whose engine is gone end when no worker of it can be copying for them."""
        open_ones = {line.account for line in self._lines}
        workers = [line for line in self._lines if line.state is ConnectionState.WORKER]
        self._accounts = {
            account: name
            for account, name in self._accounts.items()
            if account in open_ones
            or any(line.engine_id == name and line.drained <= account.number for line in workers)
        }

    def _message(self, line: TierState, request: Request) -> None:
        before = self.daemon.view.values().named() if self._rng.random() < 0.02 else None
        started = time.process_time()
        reply = self.daemon.handle(line.number, request, self._now)
        seconds = time.process_time() - started
        assert seconds < STALL_SECONDS, (
            f"{type(request).__name__} took {seconds:.1f} s of the processor"
        )
        self.seen[type(reply).__name__ if not isinstance(reply, Error) else reply.code] += 1
        if reply is not None:
            assert reply.id == getattr(request, "id", 0)
            assert decode_reply(encode(reply)[4:]) == reply, (
                "a reply that its own protocol does not allow"
            )
            self._liar.heard(line.peer, reply)
        because = refused(line.state, type(request))
        if isinstance(reply, Error):
            assert because in (None, reply.code)
            assert before is None or _kept(before) == _kept(self.daemon.view.values().named()), (
                "a refused message changed something"
            )
            line.closed = reply.code in CLOSING
            assert not line.closed or isinstance(request, Identify)
            return
        assert because is None
        expected = RULES[type(request)]
        if isinstance(reply, Pending):
            assert expected.first is Pending
        else:
            assert type(reply) is expected.reply if expected.reply is not None else reply is None
        self._account(line, request, reply)

    def _account(self, line: TierState, request: Request, reply: Reply | None) -> None:
        """Keep our books of a message that was taken, and look at what the answer says."""
        if isinstance(request, Hello):
            self._greeted(line, request)
        if isinstance(request, Drained):
            line.drained = max(line.drained, request.session)
            self._retire()
        account = line.account
        if account is None:
            return
        match request:
            case Identify():
                account.identity = request.namespace
            case Lookup() if isinstance(reply, Pending):
                assert request.wait_ms
                account.waits[request.lease] = (
                    request,
                    account.identity,
                    self._now + request.wait_ms / 1e3,
                )
            case Lookup():
                assert isinstance(reply, Found)
                self._found(account, request, reply)
            case Release():
                account.waits.pop(request.lease, None)
                account.leases.pop(request.lease, None)
            case Commit():
                self._committed(account, request)
            case Free():
                account.writing.difference_update(_names(request))
        if isinstance(reply, Reserved):
            names = _names(reply)
            for name in names:
                assert name[1] > self._generation, "a generation was used twice"
                self._generation = name[1]
                header = self._header(name)
                assert (header.state, header.part_bytes, header.parts) == (
                    SlotState.WRITING,
                    reply.part_bytes,
                    reply.parts,
                )
            account.writing.update(names)

    def _greeted(self, line: TierState, hello: Hello) -> None:
        line.state = ConnectionState(hello.role)
        if line.state is ConnectionState.CONTROL:
            return
        line.engine_id = hello.engine_id
        if line.state is ConnectionState.ENGINE:
            assert hello.geometry is not None
            assert hello.namespace is not None
            line.account = Account(
                geometry_from_wire(hello.geometry), hello.namespace, hello.session
            )
            self._accounts[line.account] = hello.engine_id

    def _found(self, account: Account, lookup: Lookup, found: Found) -> None:
        """Every slot of a hit must be the object that was asked for, as its header says."""
        geometry = account.geometry
        asked = min(len(lookup.hashes) // HASH_BYTES, BATCH_MAX // len(geometry.groups))
        assert [len(mask) for mask in found.masks] == [asked] * len(geometry.groups)
        assert found.lease == lookup.lease
        assert found.chunks <= asked
        expected = [
            (
                account.identity,
                group.gid,
                lookup.hashes[chunk * HASH_BYTES : (chunk + 1) * HASH_BYTES],
            )
            for group in geometry.groups
            for chunk in (needed_chunks(geometry, group, found.chunks) if found.chunks else ())
        ]
        names = _names(found)
        headers = [self._header(name) for name in names]
        assert [(header.namespace, header.gid, header.chunk_hash) for header in headers] == expected
        assert all(header.state is SlotState.COMMITTED for header in headers)
        if found.chunks:
            assert found.lease not in account.leases
            account.leases[found.lease] = names

    def _committed(self, account: Account, commit: Commit) -> None:
        """A slot of ours is now the object it was said to be, or free; no other has changed."""
        groups = unpack_u64(commit.groups)
        if len(groups) == 1:
            groups *= len(_names(commit))
        for at, (name, group) in enumerate(zip(_names(commit), groups, strict=True)):
            if name not in account.writing:
                continue
            header = unpack_header(bytes(self._memory[name[0] : name[0] + HEADER_BYTES]))
            chunk_hash = commit.hashes[at * HASH_BYTES : (at + 1) * HASH_BYTES]
            if (
                _names(commit).count(name) == 1
                and header is not None
                and header.state is not SlotState.FREE
            ):
                gid = account.geometry.groups[group].gid
                assert header.generation == name[1]
                assert header.state is SlotState.COMMITTED
                assert (header.namespace, header.gid, header.chunk_hash) == (
                    account.identity,
                    gid,
                    chunk_hash,
                )
        account.writing.difference_update(_names(commit))

    def _header(self, name: Name) -> SlotHeader:
        header = unpack_header(bytes(self._memory[name[0] : name[0] + HEADER_BYTES]))
        assert header is not None
        assert header.generation == name[1]
        return header


def _names(message: Found | Reserved | Commit | Free) -> list[Name]:
    return list(zip(unpack_u64(message.offsets), unpack_u64(message.generations), strict=True))


def _kept(values: dict[str, float]) -> dict[str, float]:
    """What a refused message must not change: everything but the counts of messages."""
    return {
        name: value
        for name, value in values.items()
        if not name.startswith(("requests_", "refused_"))
    }
