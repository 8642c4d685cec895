"""The bytes that every object must have, and the rules that every reply must keep."""

import dataclasses
import functools
import hashlib
import itertools
import random
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import xxhash

from hybridkv.core.coverage import SlotShape, largest_hit, needed_chunks, part_bytes, slot_shapes
from hybridkv.core.geometry import Geometry
from hybridkv.core.keys import HASH_BYTES
from hybridkv.core.packed import unpack_slots
from hybridkv.core.policies import Advice
from hybridkv.shm import slots as signatures
from hybridkv.shm.slots import (
    CHECKSUM_BYTES,
    HEADER_BYTES,
    PIECE_BYTES,
    SlotHeader,
    SlotState,
    checksum_offset,
    payload_offset,
    read_generation,
    slot_bytes,
    unpack_header,
)
from hybridkv.store.index import Namespace, Slot
from hybridkv.tiers.jobs import JobKind
from hybridkv.wire.codec import WireError, decode_reply, encode
from hybridkv.wire.messages import (
    BATCH_MAX,
    Advise,
    Error,
    Found,
    Hello,
    Identify,
    Lookup,
    Pending,
    Pin,
    Release,
    Reply,
    Request,
    Reserved,
)
from hybridkv.wire.protocol import CLOSING, RULES, ConnectionState, ErrorCode, refused
from tests.daemonsim.system import SECOND, ArenaFile, System, untraced
from tests.layouts import LAYOUTS, wide

CHUNKS = 6
PROMPTS = 5
STALL_SECONDS = 2.0
"""The most of the processor's time that one message may take."""
GEOMETRIES = {
    "full": wide(LAYOUTS["qwen3"], 5),
    "gemma3": wide(LAYOUTS["gemma3"], 1, 1, 14),
    "gemma4": wide(LAYOUTS["gemma4"], 3, 9),
    "llama4": wide(LAYOUTS["llama4"], 7, 15),
    "qwen3next": wide(LAYOUTS["qwen3next"], 1, 20, 5),
    "falconh1": wide(LAYOUTS["falconh1"], 2, 12),
    "deepseekv4": wide(LAYOUTS["deepseekv4"], 3, 3, 8, 9, 9),
    "odd_window": wide(LAYOUTS["odd_window"], 7, 30, 1),
    "two_ranks": wide(LAYOUTS["two_ranks"], 4, 11),
    "two_ranks_mla": wide(LAYOUTS["two_ranks_mla"], 9, 9),
    "four_ranks": dataclasses.replace(wide(LAYOUTS["gemma4"], 3, 5), ranks=4),
}
"""Slots of one page and more, every kind of group, one to four ranks."""


class Name(NamedTuple):
    """The name of an object."""

    identity: bytes
    gid: int
    chunk_hash: bytes


class Span(NamedTuple):
    """Bytes of a part: [start, stop)."""

    start: int
    stop: int


class LeaseKey(NamedTuple):
    """A lease of a connection."""

    connection: int
    lease: int


class ReplyKey(NamedTuple):
    """A reply that is to be sent on a connection."""

    connection: int
    id: int


class AskedLease(NamedTuple):
    """A lookup that asked for a lease, and the identity that its session had then."""

    identity: bytes
    lookup: Lookup


@functools.cache
def prompt_hashes(prompt: int) -> tuple[bytes, ...]:
    """Prompts share their first two chunks."""
    return tuple(
        hashlib.sha256(f"{prompt if at >= 2 else 0} {at}".encode()).digest() for at in range(CHUNKS)
    )


@functools.cache
def chunk_before(chunk_hash: bytes) -> bytes:
    """Return the chunk before a chunk of a prompt. Zeros for the first."""
    for prompt in range(PROMPTS):
        hashes = prompt_hashes(prompt)
        if chunk_hash in hashes[1:]:
            return hashes[hashes.index(chunk_hash) - 1]
    return bytes(HASH_BYTES)


@functools.lru_cache(maxsize=8192)
def content(name: Name, part: int, size: int) -> bytes:
    """Return the bytes of a part of an object."""
    identity, gid, chunk_hash = name
    return hashlib.shake_128(identity + bytes([gid, part]) + chunk_hash).digest(size)


def signature(generation: int, payload: bytes | bytearray | memoryview) -> bytes:
    """Sign a part as a worker does. It is written anew here, so that a wrong signature is seen."""
    pieces = [payload[at : at + PIECE_BYTES] for at in range(0, len(payload), PIECE_BYTES)]
    digests = b"".join(xxhash.xxh3_64_digest(piece)[::-1] for piece in pieces)
    digest = xxhash.xxh3_64_intdigest(digests, seed=generation)
    return (digest | 1).to_bytes(8, "little")


def largest_slot(geometry: Geometry) -> int:
    """Return the bytes of the largest slot that an object of the geometry has."""
    return max(
        slot_bytes(size, parts)
        for group in geometry.groups
        for size, parts in slot_shapes(geometry, group)
    )


@dataclass(eq=False)
class Copy:
    """A copy of a part of an object between a worker and its slot, which is done in pieces."""

    file: ArenaFile
    offset: int
    generation: int
    name: Name
    part: int
    parts: int
    size: int
    checksum: bool
    boot: str
    pieces: list[Span] = field(default_factory=list)
    """The spans of the part that are not copied yet."""

    @property
    def start(self) -> int:
        """The offset of the part in the arena."""
        return self.offset + payload_offset(self.parts) + self.part * self.size

    @property
    def signed(self) -> slice:
        """The place of the part's checksum in the arena."""
        at = self.offset + checksum_offset(self.part)
        return slice(at, at + CHECKSUM_BYTES)

    @property
    def payload(self) -> memoryview:
        """The bytes of the part in the arena."""
        return self.file.bytes[self.start : self.start + self.size]

    @property
    def expected(self) -> bytes:
        """The bytes that the part must have."""
        return content(self.name, self.part, self.size)

    def is_there(self) -> bool:
        """Return True where the slot still has the same generation."""
        return read_generation(self.file.bytes, self.offset) == self.generation

    def is_signed(self, payload: bytes | bytearray | memoryview) -> bool:
        """Return True where the writer signed these bytes."""
        return bytes(self.file.bytes[self.signed]) == signature(self.generation, payload)

    @property
    def is_unsigned(self) -> bool:
        """True where the writer signed nothing."""
        return bytes(self.file.bytes[self.signed]) == signatures.UNSIGNED


def cut(rng: random.Random, start: int, stop: int) -> list[Span]:
    """Cut [start, stop) into one to four pieces, in any order, as copy engines may."""
    edges = sorted({start, stop, *(rng.randrange(start, stop) for _ in range(rng.randrange(4)))})
    pieces = [Span(low, high) for low, high in itertools.pairwise(edges)]
    rng.shuffle(pieces)
    return pieces


class Books:
    """A record of what clients did, with which the daemon's answers are compared."""

    def __init__(self, system: System) -> None:
        self._system = system
        self.written: set[Name] = set()
        """Every object that an engine ever committed."""
        self.is_exact = True
        """False once a bit was flipped. Until then a right generation means right bytes."""
        self.flipped_at = 0
        """The time of the last flip."""
        self.is_exclusive = True
        """False once a header was spoilt that tells a restarted daemon who may still write."""

    def losses(self) -> tuple[object, ...]:
        """Return counts that change whenever an object may be lost."""
        server = self._system.server
        if server is None:
            return ("down", self._system.lives)
        daemon = server.daemon
        deletions = daemon.requests["clear"] + daemon.requests["forget"]
        counts = (daemon.counters["objects_condemned"], deletions)
        wrong = sum(line.counters["objects_wrong_in_ram"] for line in daemon.tiers)
        return (self._system.lives, daemon.store.evicted, daemon.store.over_quota, *counts, wrong)

    def owns(self, copy: Copy) -> None:
        """The worker that may still write into a slot is the only one."""
        server = self._system.server
        if server is None or self._system.arena is not copy.file or not self.is_exclusive:
            return
        slot = server.daemon.store.slot_at(copy.offset, copy.generation)
        assert slot is not None, f"slot {copy.offset} was taken from a living writer"
        assert slot.state is SlotState.WRITING, (
            f"slot {copy.offset} became {slot.state.name} under a living writer"
        )

    def accepted(self, copy: Copy, loaded: bytes, start: int) -> None:
        """A load accepted these bytes of the part, from `start` on, as the object's."""
        # Of two writers in one slot, the later one signs the bytes that both have written.
        name = f"{copy.name.gid}:{copy.name.chunk_hash.hex()[:8]}"
        assert loaded == copy.expected[start:] or not self.is_exclusive, (
            f"LIE: a load of part {copy.part} of {name} accepted other bytes"
        )

    def found(
        self,
        geometry: Geometry,
        identity: bytes,
        hashes: tuple[bytes, ...],
        masks: list[bytes],
        chunks: int,
    ) -> None:
        """An answer claims only objects that were stored, and a hit lacks none."""
        assert all(len(mask) == len(hashes) for mask in masks)
        for group, mask in zip(geometry.groups, masks, strict=True):
            for is_there, chunk_hash in zip(mask, hashes, strict=True):
                assert not is_there or Name(identity, group.gid, chunk_hash) in self.written, (
                    "what nobody stored is found"
                )
            assert all(mask[at] for at in needed_chunks(geometry, group, chunks)), (
                "a hit lacks a chunk"
            )

    def shown(self, copy: Copy) -> None:
        """A slot that an answer names has the bytes of its object, signed, while it is there."""
        if not copy.is_there() or not self.is_exclusive:
            return
        is_proven = copy.is_signed(copy.payload)
        name = copy.name.chunk_hash.hex()[:8]
        if self.is_exact:
            assert copy.payload == copy.expected, f"LIE: an answer names other bytes than {name}"
            # Workers that do not check do not sign.
            assert is_proven or (not copy.checksum and copy.is_unsigned), (
                "what is found is not signed"
            )
        elif is_proven:
            assert copy.payload == copy.expected, f"LIE: other bytes than {name} are signed"

    def jobs(self) -> None:
        """Slots that tiers' threads read from or write into stay as they are."""
        server = self._system.server
        if server is None:
            return
        for strand in self._system.strands:
            if strand.job is None or strand.job.kind not in (JobKind.READ, JobKind.WRITE):
                continue
            for item in strand.job.items:
                assert item.slot is not None
                slot = server.daemon.store.slot_at(item.slot.offset, item.record.seed)
                assert slot is item.slot, "a slot was taken from a thread that is at work on it"
                if strand.job.kind is JobKind.READ:
                    assert slot.state is SlotState.WRITING, "a slot is found before it is read"
                else:
                    assert slot.state is SlotState.COMMITTED
                    assert slot.pins, "a slot that is being written to a tier may go"

    def audit(self) -> int:
        """Every object has the bytes of its name, or is visibly damaged.

        Returns the number of objects. Only those that engines have written have known bytes.
        """
        server, file = self._system.server, self._system.arena
        assert server is not None
        assert file is not None
        objects = 0
        for identity, namespace in server.daemon.sessions.namespaces.items():
            for chunk_hash, entry in namespace.entries.items():
                for index, slot in enumerate(entry.slots):
                    if slot is not None:
                        name = Name(identity, namespace.gids[index], chunk_hash)
                        self._audit(file, slot, name)
                        objects += 1
        return objects

    def _audit(self, file: ArenaFile, slot: Slot, name: Name) -> None:
        header = unpack_header(bytes(file.bytes[slot.offset : slot.offset + HEADER_BYTES]))
        if header is None:
            assert not self.is_exact, "a header is broken"
            return
        assert (header.state, header.generation) == (SlotState.COMMITTED, slot.generation)
        assert (header.namespace, header.gid, header.chunk_hash) == name
        assert (header.part_bytes, header.parts) == slot.shape
        if name not in self.written:
            return
        for part in range(slot.parts):
            copy = Copy(
                file=file,
                offset=slot.offset,
                generation=slot.generation,
                name=name,
                part=part,
                parts=slot.parts,
                size=slot.part_bytes,
                checksum=True,
                boot="",
            )
            if self.is_exact or copy.is_signed(copy.payload):
                self.accepted(copy, bytes(copy.payload), 0)


class Witness:
    """Sees the daemon's messages in both directions, and keeps faults until `check`.

    An error that is raised within the daemon's loop would be taken for a client's fault.
    """

    def __init__(self, system: System) -> None:
        self._system = system
        self._wrong: list[str] = []

    def check(self) -> None:
        """Raise AssertionError where there was a fault until now."""
        assert not self._wrong, self._wrong

    def _expect(self, is_right: bool, otherwise: str, *facts: object) -> None:
        if not is_right:
            self._wrong.append(", ".join((otherwise, *(f"{fact!r:.99}" for fact in facts))))


class Protocol(Witness):
    """Every message of every client and every reply to it, by the tables of wire.protocol."""

    def __init__(self, system: System, books: Books) -> None:
        super().__init__(system)
        self._books = books
        self._states: dict[int, ConnectionState] = {}
        """The state of each connection that was greeted, by its number."""
        self._refused: set[int] = set()
        """Connections on which a message was refused."""
        self._ended: set[int] = set()
        """Connections that must be closed, because of the last reply."""
        self._asked: dict[LeaseKey, AskedLease] = {}

    def attend(self, server: Any) -> None:
        """Watch a new life of the daemon."""
        self._states, self._asked = {}, {}
        self._refused, self._ended = set(), set()
        daemon, clients = server.daemon, server.clients
        handle, send = daemon.handle, clients.queue_reply

        def on_request(number: int, request: Request, now: float) -> Reply | None:
            with untraced():
                # An engine that does not lie is never refused, so that it need not be compared.
                is_compared = number not in self._states or number in self._refused
                before = _values(daemon, number) if is_compared else None
            started = time.process_time()
            reply: Reply | None = handle(number, request, now)
            seconds = time.process_time() - started
            with untraced():
                self._expect(seconds < STALL_SECONDS, "STALL: a message takes long", request)
                self._expect(number not in self._ended, "a closed connection is served")
                self._answer(number, request, reply)
                if isinstance(request, Lookup) and isinstance(reply, Found | Pending):
                    session = daemon.sessions.connections[number].session
                    asked = AskedLease(session.namespace.identity, request)
                    self._asked[LeaseKey(number, request.lease)] = asked
                if is_compared and isinstance(reply, Error):
                    is_same = before == _values(daemon, number)
                    self._expect(is_same, "a refused message changed something", reply, request)
            return reply

        def on_reply(peer: Any, reply: Reply) -> None:
            with untraced():
                self._expect(peer.number not in self._ended, "a reply after the last one")
                if isinstance(reply, Error) and reply.code in CLOSING:
                    self._ended.add(peer.number)
                    self._expect(reply.code != ErrorCode.INTERNAL, "the daemon fails", reply)
                self._read(server, peer.number, reply)
            send(peer, reply)

        daemon.handle, clients.queue_reply = on_request, on_reply

    def _answer(self, number: int, request: Request, reply: Reply | None) -> None:
        """Only messages that the rules forbid are refused, and each reply has the right type."""
        kind, answer = type(request), None if reply is None else type(reply)
        refusal = refused(self._states.get(number, ConnectionState.NEW), kind)
        if isinstance(reply, Error):
            self._refused.add(number)
            self._expect(refusal in (None, reply.code), "refused for another reason", kind, reply)
            is_open = reply.code not in CLOSING or kind is Identify
            self._expect(is_open, "a message ends its connection", kind, reply)
        else:
            is_first = answer is not None and answer is RULES[kind].first
            is_reply = is_first or answer is RULES[kind].reply
            self._expect(refusal is None, "not refused", kind, refusal)
            self._expect(is_reply, "answered with another type", kind, answer)
            if isinstance(request, Hello):
                self._states[number] = ConnectionState(request.role)
        if reply is not None:
            self._expect(reply.id == getattr(request, "id", 0), "another id", kind, reply)

    def _read(self, server: Any, number: int, reply: Reply) -> None:
        """A reply can be decoded, and the slots that it names are as it says."""
        try:
            is_whole = decode_reply(encode(reply)[4:]) == reply
        except WireError:
            is_whole = False
        self._expect(is_whole, "no reply of this protocol", reply)
        file = self._system.arena
        assert file is not None
        if isinstance(reply, Reserved):
            granted = SlotState.WRITING, reply.part_bytes, reply.parts
            for generation, header in _headers(file, reply):
                is_new = generation not in file.granted
                self._expect(is_new, "a generation was given twice", generation)
                file.granted.add(generation)
                state = header and (header.state, header.part_bytes, header.parts)
                is_granted = state == granted or not self._books.is_exact
                self._expect(is_granted, "a slot is not as it was granted", state)
        elif isinstance(reply, Found):
            self._find(server, number, reply, file)

    def _find(self, server: Any, number: int, found: Found, file: ArenaFile) -> None:
        """The slots of a hit are those that it needs, of the identity that asked."""
        asked = self._asked.pop(LeaseKey(number, found.lease), None)
        if asked is None:
            self._expect(False, "nobody asked for what is found")
            return
        identity, lookup = asked
        geometry = server.daemon.sessions.connections[number].session.geometry
        hashes = [
            lookup.hashes[at : at + HASH_BYTES] for at in range(0, len(lookup.hashes), HASH_BYTES)
        ][: BATCH_MAX // len(geometry.groups)]
        is_asked = [len(mask) for mask in found.masks] == [len(hashes)] * len(geometry.groups)
        self._expect(is_asked and found.depth <= len(hashes), "what nobody asked for is found")
        if found.tail or not self._books.is_exact:
            return
        needed = [
            (identity, group.gid, hashes[chunk], SlotState.COMMITTED)
            for group in geometry.groups
            for chunk in (needed_chunks(geometry, group, found.depth) if found.depth else ())
        ]
        named = [
            header and (header.namespace, header.gid, header.chunk_hash, header.state)
            for _, header in _headers(file, found)
        ]
        self._expect(named == needed, "a hit names other slots than it needs")


def _headers(file: ArenaFile, reply: Found | Reserved) -> Iterator[tuple[int, SlotHeader | None]]:
    """Yield the generation of each slot that a reply names, and its header if it has that one."""
    names = unpack_slots(reply.slots)
    for offset, generation in names:
        header = unpack_header(bytes(file.bytes[offset : offset + HEADER_BYTES]))
        is_there = header is not None and header.generation == generation
        yield generation, header if is_there else None


def _values(daemon: Any, number: int) -> tuple[object, ...]:
    """Return all that a refused message must leave as it was: all but the counts of messages."""
    values = daemon.view.metric_values()
    counts = {key: value for key, value in values.items() if key[0] not in ("requests", "refused")}
    connection, sessions = daemon.sessions.connections[number], daemon.sessions
    session = getattr(connection, "session", None)
    identity = session and session.namespace.identity
    return counts, connection.state, identity, len(sessions.namespaces), daemon.store.generation


@dataclass
class Wait:
    """A lookup that was answered with Pending."""

    id: int
    deadline: float
    """By the loop's clock, in seconds."""
    hit: int
    """The hit in chunks that RAM alone had when the lookup came."""
    drops: tuple[object, ...]
    """The `_drops` of that moment."""


class Waits(Witness):
    """Lookups that were answered with Pending, by the daemon's messages in both directions."""

    def __init__(self, system: System) -> None:
        super().__init__(system)
        self._due: dict[LeaseKey, Wait] = {}
        """Lookups that are not answered yet."""
        self._direct: ReplyKey | None = None
        """The Found that is to be sent next."""
        self.counts: Counter[str] = Counter()

    def attend(self, server: Any) -> None:
        """Watch a new life of the daemon."""
        self._due.clear()
        clients = server.clients
        handle, send, disconnect = server.daemon.handle, clients.queue_reply, clients.disconnect

        def on_request(number: int, request: Request, now: float) -> Reply | None:
            if isinstance(request, Release):
                wait = self._due.pop(LeaseKey(number, request.lease), None)
                if wait is not None:
                    self.counts["waits_aborted"] += 1
            reply: Reply | None = handle(number, request, now)
            if isinstance(reply, Pending):
                assert isinstance(request, Lookup)
                self._expect(request.wait_ms > 0, "who has no patience is kept waiting")
                self.counts["waits"] += 1
                session = server.daemon.sessions.connections[number].session
                self._due[LeaseKey(number, request.lease)] = Wait(
                    id=request.id,
                    deadline=now + request.wait_ms / 1e3,
                    hit=largest_hit(session.geometry, reply.masks, len(reply.masks[0])),
                    drops=_drops(server, session.namespace),
                )
            if isinstance(reply, Found):
                self._direct = ReplyKey(number, reply.id)
                assert isinstance(request, Lookup)
                session = server.daemon.sessions.connections[number].session
                masks = session.namespace.present(request.hashes).masks
                self._expect(masks == reply.masks, "an answer says what was so a moment ago")
            return reply

        def on_reply(peer: Any, reply: Reply) -> None:
            if isinstance(reply, Error) and reply.code in CLOSING:
                # Nothing more is sent, though the connection is open until the error is read.
                self._leave(peer.number)
            if isinstance(reply, Found):
                if self._direct == ReplyKey(peer.number, reply.id):
                    self._direct = None
                else:
                    self._answered(server, peer, reply)
            send(peer, reply)

        def on_disconnect(peer: Any) -> None:
            self._leave(peer.number)
            disconnect(peer)

        server.daemon.handle = on_request
        clients.queue_reply, clients.disconnect = on_reply, on_disconnect

    def on_turn(self) -> None:
        """A round of the loop is over. No lookup waits whose deadline was past when it began."""
        now = self._system.now / SECOND
        self._expect(
            all(wait.deadline > now for wait in self._due.values()),
            "STALL: a lookup waits for too long",
        )
        server = self._system.server
        assert server is not None
        for line, leaving in zip(server.daemon.tiers, server.daemon.demotion.leaving, strict=True):
            self._expect(
                not leaving or line.may_write(now + 1.0),
                "RAM is held for a tier that takes nothing",
            )

    def check(self) -> None:
        """Raise AssertionError where there was a fault until now."""
        super().check()
        system = self._system
        if (
            system.server is None
            or system.turn_is_due
            or system.now < system.server_process.stopped_until
        ):
            return
        assert all(wait.deadline >= system.now / SECOND for wait in self._due.values()), (
            "STALL: nobody wakes the loop"
        )

    def _leave(self, number: int) -> None:
        """A connection waits for nothing any more."""
        for key in [key for key in self._due if key.connection == number]:
            del self._due[key]
            self.counts["waits_left"] += 1

    def _answered(self, server: Any, peer: Any, found: Found) -> None:
        """A lookup that waited is answered."""
        wait = self._due.pop(LeaseKey(peer.number, found.lease), None)
        if wait is None or wait.id != found.id:
            self._expect(False, "a lookup is answered twice, or for nobody")
            return
        session = server.daemon.sessions.connections[peer.number].session
        if wait.drops == _drops(server, session.namespace):
            self._expect(found.depth >= wait.hit, "waiting cost the hit that there was")
        lease = session.leases.get(found.lease)
        slots = lease.slots if lease is not None else ()
        is_own = all(slot.entry.namespace is session.namespace for slot in slots)
        self._expect(is_own, "bytes of other weights are found")
        self.counts["waits_to_the_end"] += wait.deadline <= self._system.now / SECOND


class RetainedObject(NamedTuple):
    """An object that the daemon retains."""

    namespace: Namespace
    chunk_hash: bytes
    group_index: int


class Retained(Witness):
    """Retained objects are there until their time. What readers and writers need is no excuse."""

    def __init__(self, system: System) -> None:
        super().__init__(system)
        self._kept: dict[RetainedObject, float] = {}
        """The ends of the times of those that the last check saw."""
        self._losses: tuple[object, ...] = ()
        self._ended = 0  # Messages that end a retention.
        self.counts: Counter[str] = Counter()

    def attend(self, server: Any) -> None:
        """Watch a new life of the daemon."""
        handle = server.daemon.handle

        def on_request(number: int, request: Request, now: float) -> Reply | None:
            is_advice = isinstance(request, Advise) and request.advice is not Advice.RETAIN
            is_end = isinstance(request, Advise | Pin) and not request.ttl_ms
            self._ended += is_advice or is_end
            reply: Reply | None = handle(number, request, now)
            return reply

        server.daemon.handle = on_request

    def check(self) -> None:
        """Raise AssertionError where an object is gone before its time."""
        server = self._system.server
        assert server is not None
        daemon = server.daemon
        _, *losses = _drops(server, None)
        found = (self._system.lives, self._ended, daemon.store.retained_evicted, *losses)
        for kept, until in self._kept.items() if found == self._losses else ():
            namespace, chunk_hash, group_index = kept
            is_there = namespace.find_slot(chunk_hash, group_index) is not None
            assert is_there or until <= daemon.now, "a retained object goes before its time"
        self._losses, self._kept = found, {}
        for namespace in daemon.sessions.namespaces.values():
            for slot in namespace.slots_by_chunk():
                if slot.is_retained and slot.entry is not None:
                    kept = RetainedObject(namespace, slot.entry.chunk_hash, slot.group_index)
                    self._kept[kept] = namespace.retained[kept.chunk_hash].until
        self.counts["retained_seen"] += len(self._kept)


def _drops(server: Any, namespace: object) -> tuple[object, ...]:
    """Return facts that change whenever an object that is held may be lost."""
    state = server.daemon
    wrong = sum(line.counters["objects_wrong_in_ram"] for line in server.daemon.tiers)
    deletions = state.requests["clear"] + state.requests["forget"]
    return namespace, state.counters["objects_condemned"], deletions, wrong


def shape_of(geometry: Geometry, index: int, chunk: int) -> SlotShape:
    """Return the shape of the object of a group in a chunk. It has no bytes where there is none."""
    group = geometry.groups[index]
    return part_bytes(geometry, group, chunk), geometry.parts(group)
