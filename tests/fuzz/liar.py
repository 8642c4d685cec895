"""Clients that lie: true messages with untrue contents, and frames that are not messages."""

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

import msgspec

from hybridkv.core.coverage import slot_shapes
from hybridkv.core.geometry import GroupKind
from hybridkv.core.keys import HASH_BYTES
from hybridkv.core.packed import SlotRef, pack_slots, pack_u64, unpack_slots
from hybridkv.core.policies import Advice
from hybridkv.wire.codec import Frames, decode_reply, encode
from hybridkv.wire.messages import (
    MESSAGE_BYTES_MAX,
    PROTOCOL_VERSION,
    Advise,
    Clear,
    Commit,
    Describe,
    Drained,
    Explain,
    Forget,
    Found,
    Free,
    Hello,
    Identify,
    ListEngines,
    ListObjects,
    Lookup,
    Pending,
    Pin,
    Prefetch,
    ReadAnnouncements,
    ReadPrefetches,
    ReadQuotas,
    Release,
    Reply,
    ReportCorrupt,
    ReportIdentity,
    ReportMapping,
    ReportRequest,
    ReportStale,
    Request,
    RequestExplanation,
    Reserve,
    Reserved,
    SetQuota,
    StartPrefetch,
    Stats,
    Subscribe,
    Welcome,
    WireGeometry,
    WireGroup,
    WireModel,
    geometry_to_wire,
)
from hybridkv.wire.protocol import ConnectionState
from tests.layouts import LAYOUTS

NAMES = ("qwen3", "gemma3", "llama4", "qwen3next", "two_ranks_mla", "odd_window")
USUAL = (*NAMES, *["qwen3"] * 4)
"""The layouts of engines. Most have a single group: more of their chunks are complete and found."""
WIRED = {name: geometry_to_wire(LAYOUTS[name]) for name in NAMES}
SHAPES = {
    name: [shape for group in LAYOUTS[name].groups for shape in slot_shapes(LAYOUTS[name], group)]
    for name in NAMES
}
FITS = {
    name: {
        size: [
            index
            for index, group in enumerate(LAYOUTS[name].groups)
            if size in [shape[0] for shape in slot_shapes(LAYOUTS[name], group)]
        ]
        for size, _ in SHAPES[name]
    }
    for name in NAMES
}
"""Group indices by the bytes of one part."""
HASHES = [bytes([number]) * HASH_BYTES for number in range(24)]
U64_MAX = (1 << 64) - 1
NUMBERS = (
    0,
    1,
    2,
    3,
    7,
    255,
    4096,
    65535,
    65536,
    (1 << 30) - 1,
    1 << 30,
    1 << 40,
    1 << 62,
    (1 << 63) - 1,
    U64_MAX,
)
JUNK: tuple[Any, ...] = (
    *NUMBERS,
    None,
    True,
    -1,
    -(1 << 63),
    1.5,
    float("nan"),
    float("inf"),
    "",
    "engine",
    "x" * 300,
    b"",
    b"x" * 31,
    b"x" * 33,
    [],
    {},
    [[[]]],
    {"a": {}},
    {1: 2},
    msgspec.msgpack.Ext(5, b"ext"),
)
TOKENS = bytes(
    (
        0xC0,
        0xC1,
        0xC4,
        0xC6,
        0xC9,
        0xCB,
        0xCF,
        0xD3,
        0xD9,
        0xDB,
        0xDC,
        0xDD,
        0xDE,
        0xDF,
        0x80,
        0x90,
        0xFF,
    )
)
RECEIVE_BYTES = 1 << 18


class Kind(NamedTuple):
    """The role of a client, and the share of its frames that are broken."""

    role: ConnectionState
    noise: float


KINDS = (
    *[Kind(ConnectionState.ENGINE, 0.0)] * 5,
    Kind(ConnectionState.ENGINE, 0.01),
    Kind(ConnectionState.WORKER, 0.05),
    Kind(ConnectionState.CONTROL, 0.05),
    *[Kind(ConnectionState.ENGINE, 0.8)] * 3,
    Kind(ConnectionState.NEW, 0.8),
    Kind(ConnectionState.NEW, 0.05),
)


class GrantedSlot(NamedTuple):
    """A slot that was granted to a peer, or one that it only claims: of 0 bytes."""

    offset: int
    generation: int
    part_bytes: int


@dataclass(eq=False)
class Peer:
    """What the liar knows of one connection, from the messages that it sent and received there."""

    noise: float
    role: ConnectionState
    engine_id: str
    layout: str
    state: ConnectionState = ConnectionState.NEW
    leases: list[int] = field(default_factory=list)
    slots: list[GrantedSlot] = field(default_factory=list)
    """Granted slots that the peer has neither committed nor freed."""


@dataclass(eq=False)
class Line:
    """A liar's connection."""

    sock: Any
    """A socket that does not block, of this machine or of a simulated one."""
    peer: Peer
    frames: Frames = field(default_factory=Frames)
    out: bytearray = field(default_factory=bytearray)
    """Bytes that the daemon has not taken yet."""
    is_greeting: bool = False
    """True from the first piece until the first reply."""
    is_over: bool = False
    """True once the daemon has closed the connection and all its replies are read."""

    def flush(self) -> None:
        """Send as much of `out` as fits, and drop all of it where the connection is closed."""
        try:
            while self.out:
                del self.out[: self.sock.send(self.out)]
        except BlockingIOError:
            pass
        except (BrokenPipeError, ConnectionResetError):
            self.out.clear()

    def receive(self) -> list[Reply]:
        """Returns the replies that have come. Raises WireError where the bytes are no reply."""
        replies: list[Reply] = []
        try:
            while received := self.sock.recv(RECEIVE_BYTES):
                replies += map(decode_reply, self.frames.feed(received))
            self.is_over = True
        except BlockingIOError:
            pass
        except ConnectionResetError:
            self.is_over = True
        return replies


class Liar:
    """Makes the bytes that a peer sends next."""

    def __init__(self, rng: random.Random, engine_ids: Sequence[str] = ()) -> None:
        """Lying workers also claim to belong to the engines `engine_ids`, which do not lie."""
        self._rng = rng
        self._engine_ids = engine_ids
        self._slots: deque[SlotRef] = deque([SlotRef(0, 1)], maxlen=256)
        """Slots that any peer has heard of, for every peer to name."""
        self._frames: deque[bytes] = deque([encode(Stats(1))], maxlen=64)
        self._role_makers: list[Callable[[Peer], Request]] = [
            self._drained,
            self._explain,
            lambda peer: ReportMapping(self._rng.random() < 0.5),
            lambda peer: Stats(self._id()),
            lambda peer: ListEngines(self._id()),
            self._start_prefetch,
            lambda peer: ReadPrefetches(self._id(), [self._rng.choice(NUMBERS[:-2]), 1, 2]),
            self._pin,
            lambda peer: ListObjects(self._id(), self._place(), self._rng.choice(NUMBERS[:-2])),
            self._forget,
            lambda peer: ReadQuotas(self._id()),
            self._set_quota,
        ]
        """Messages that workers and control connections may send. Most others are refused there."""
        makers: dict[Callable[[Peer], Request], float] = {
            self._hello: 1,
            self._lookup: 20,
            self._prefetch: 2,
            self._reserve: 12,
            self._commit: 24,
            self._free: 4,
            self._release: 16,
            self._report_corrupt: 3,
            lambda peer: ReportStale(self._rng.random() < 0.5): 0.5,
            self._identify: 3,
            self._report_request: 2,
            self._report_identity: 1,
            lambda peer: Subscribe(): 2,
            self._describe: 3,
            self._advise: 3,
            lambda peer: ReadAnnouncements(self._id(), self._rng.choice((1, 1 << 20))): 3,
            **dict.fromkeys(self._role_makers, 0.5),
            lambda peer: Clear(self._id()): 0.1,
            self._huge_request: 0.1,
        }
        self._makers = list(makers)
        self._weights = list(accumulate(makers.values()))
        self._breakers: list[Callable[[], bytes]] = [
            self._flipped,
            self._flipped_inside,
            self._truncated,
            self._cut,
            self._repeated,
            self._swapped,
            self._spliced,
            self._stuffed,
            self._mislabelled,
            self._retyped,
            self._retyped,
            self._retyped,
            self._random_bytes,
            self._random_values,
            self._deep,
        ]

    def peer(self, kind: int) -> Peer:
        """Returns a new client of the kind KINDS[kind]."""
        role, noise = KINDS[kind]
        return Peer(noise, role, f"e{self._rng.randrange(6)}", self._rng.choice(USUAL))

    def piece(self, peer: Peer) -> bytes:
        """Returns the bytes that this peer sends next, in most cases one frame."""
        rng = self._rng
        if (
            peer.state is ConnectionState.NEW
            and peer.role is not ConnectionState.NEW
            and rng.random() < 0.9
        ):
            return encode(self._greeting(peer))
        maker = rng.choices(self._makers, cum_weights=self._weights)[0]
        if peer.role is not ConnectionState.ENGINE and rng.random() < 0.5:
            is_new = peer.role is ConnectionState.NEW
            maker = self._hello if is_new else rng.choice(self._role_makers)
        frame = encode(maker(peer))
        if len(frame) < 4096:
            self._frames.append(frame)
        return rng.choice(self._breakers)() if rng.random() < peer.noise else frame

    def on_reply(self, peer: Peer, reply: Reply) -> None:
        """Learn from a reply, so that later lies are near the truth."""
        if isinstance(reply, Welcome):
            peer.state = peer.role
        elif isinstance(reply, Found):
            if reply.depth:
                peer.leases.append(reply.lease)
                self._slots.extend(_slot_names(reply)[:4])
        elif isinstance(reply, Pending):
            peer.leases.append(reply.lease)
        elif isinstance(reply, Reserved):
            names = _slot_names(reply)
            self._slots.extend(names[:4])
            peer.slots += [
                GrantedSlot(name.offset, name.generation, reply.part_bytes) for name in names[:512]
            ]

    def learn_slot(self, offset: int, generation: int) -> None:
        """Learn the name of a slot of any client."""
        self._slots.append(SlotRef(offset, generation))

    # True messages

    def _id(self) -> int:
        return self._rng.randrange(1 << 16)

    def _identity(self, peer: Peer) -> bytes:
        layout = peer.layout if self._rng.random() < 0.95 else self._rng.choice(NAMES)
        return bytes([NAMES.index(layout) * 2 + (self._rng.random() < 0.3)]) * HASH_BYTES

    def _greeting(self, peer: Peer) -> Hello:
        if peer.role is not ConnectionState.ENGINE:
            engine_id = self._rng.choice((peer.engine_id, *self._engine_ids))
            return Hello(self._id(), PROTOCOL_VERSION, peer.role, engine_id)
        model = WireModel(
            name=peer.layout,
            max_model_len=4096,
            kv_dtype="auto",
            layers=[1, 2],
            retention_tokens=None,
            step_tokens=2048,
        )
        return Hello(
            id=self._id(),
            version=PROTOCOL_VERSION,
            role="engine",
            engine_id=peer.engine_id,
            namespace=self._identity(peer),
            geometry=WIRED[peer.layout],
            model=model,
        )

    def _hello(self, peer: Peer) -> Hello:
        rng = self._rng
        number = rng.choice(NUMBERS[:-2])
        identity = rng.choice((self._identity(peer), *[rng.randbytes(HASH_BYTES)] * 5))
        return Hello(
            id=number,
            version=PROTOCOL_VERSION if rng.random() < 0.9 else number,
            role=rng.choice(("engine", "engine", "engine", "worker", "control")),
            engine_id=peer.engine_id if rng.random() < 0.9 else rng.choice(("", "e" * 256)),
            namespace=identity if rng.random() < 0.9 else None,
            geometry=rng.choice((None, WIRED[peer.layout], *[self._geometry()] * 4)),
        )

    def _geometry(self) -> WireGeometry:
        """Returns any geometry. Half of them have no plain contradiction, to pass more checks."""
        rng = self._rng
        is_plausible = rng.random() < 0.5
        sizes = (1, 2, 16, 100, 128, 1000, (1 << 30) - 1, 1 << 30)
        groups: list[WireGroup] = []
        for gid in range(256 if rng.random() < 0.01 else rng.choice((1, 1, 2, 5))):
            kind = rng.choice(tuple(GroupKind))
            has_window = kind in (GroupKind.SLIDING, GroupKind.CHUNKED_LOCAL)
            groups.append(
                WireGroup(
                    gid=gid if is_plausible else rng.randrange(1 << 16),
                    kind=kind,
                    tokens_per_block=rng.choice((1, 16, 128) if is_plausible else sizes),
                    block_bytes=rng.choice((1, 8, 4096, 1 << 40)),
                    window_tokens=rng.choice(sizes) if has_window or not is_plausible else 0,
                    extra_retained_tokens=0 if is_plausible else rng.choice((0, 3, 1 << 30)),
                    replicated=rng.random() < 0.5,
                )
            )
        chunk = rng.choice((128, 128, 1 << 30) if is_plausible else sizes)
        return WireGeometry(
            groups=groups,
            chunk_tokens=chunk,
            alignment_tokens=rng.choice((1, 16, chunk)),
            hash_tokens=rng.choice((1, 16)),
            ranks=rng.choice((1, 2, 1024)),
            stages=rng.choice((1, 1, 2)),
        )

    def _lookup(self, peer: Peer) -> Lookup:
        rng = self._rng
        hashes = b"".join(HASHES[: rng.randrange(len(HASHES) + 1)])
        if rng.random() < 0.05:
            hashes = hashes[: rng.randrange(len(hashes) + 1)] + rng.randbytes(rng.randrange(40))
        lease = (
            rng.choice(peer.leases)
            if peer.leases and rng.random() < 0.1
            else rng.randrange(1 << 40)
        )
        if rng.random() < 0.4:
            return Lookup(self._id(), lease, hashes)
        wait_ms = (
            rng.choice((0, 1, 100, 30_000))
            if rng.random() < 0.98
            else rng.choice((-1, 30_001, 1 << 63))
        )
        return Lookup(self._id(), lease, hashes, wait_ms, rng.choice((0, 1, 10_000, 1 << 62)))

    def _prefetch(self, peer: Peer) -> Prefetch:
        rng = self._rng
        hashes = b"".join(HASHES[: rng.randrange(len(HASHES) + 1)])
        tails = b"".join(rng.sample(HASHES, rng.randrange(3)))
        return Prefetch(
            hashes[: rng.choice((None, None, None, 5))],
            rng.choice((0, 1, 100, *NUMBERS[:-2])),
            tails,
            rng.choice((0, 1, *NUMBERS[:-2])),
        )

    def _start_prefetch(self, peer: Peer) -> StartPrefetch:
        rng = self._rng
        family = rng.choice(HASHES)[: rng.choice((0, 1, 32))]
        return StartPrefetch(self._id(), rng.choice(("", "r", "0")), family, rng.choice((0, 100)))

    def _advise(self, peer: Peer) -> Advise:
        rng = self._rng
        names = b"".join(HASHES[: rng.randrange(len(HASHES) + 1)])[: rng.choice((None, None, 40))]
        tenant, ttl_ms = rng.choice(NUMBERS), rng.choice(NUMBERS[:-2])
        return Advise(rng.choice(tuple(Advice)), names, tenant, ttl_ms)

    def _pin(self, peer: Peer) -> Pin:
        rng = self._rng
        return Pin(
            id=self._id(),
            ttl_ms=rng.choice(NUMBERS[:-2]),
            request_id=rng.choice(("", "", "r", f"r{rng.randrange(100)}-x")),
            identity=rng.choice(("", self._identity(peer).hex(), "0", "00" * HASH_BYTES)),
            tenant=rng.choice((None, None, 0, *NUMBERS)),
        )

    def _place(self) -> int:
        return self._rng.choice((0, 0, 1, 2, *NUMBERS[:-2]))

    def _forget(self, peer: Peer) -> Forget:
        rng = self._rng
        names = [
            self._identity(peer) + rng.choice(HASHES) + rng.choice((0, 1, 2)).to_bytes(2, "big")
            for _ in range(rng.choice((0, 1, 1, 5)))
        ]
        keys = b"".join(names)[: rng.choice((None, None, None, 40))]
        return Forget(self._id(), self._place(), keys, rng.random() < 0.2)

    def _set_quota(self, peer: Peer) -> SetQuota:
        rng = self._rng
        bound_bytes = rng.choice((None, *NUMBERS[:-2]))
        return SetQuota(self._id(), rng.choice(NUMBERS), bound_bytes, rng.random() < 0.3)

    def _reserve(self, peer: Peer) -> Reserve:
        rng = self._rng
        if rng.random() < 0.05:
            return Reserve(self._id(), rng.choice((1, 512, 1 << 40)), rng.choice((1, 2, 1024)), 1)
        part_bytes, parts = rng.choice(SHAPES[peer.layout])
        return Reserve(self._id(), part_bytes, parts, rng.randrange(12))

    def _take_slots(self, peer: Peer, lie_share: float) -> list[GrantedSlot]:
        """Take up to six slots from the peer.

        With the chance `lie_share` there are also slots of other peers, or slots that never were.
        """
        rng = self._rng
        count = rng.randrange(7)
        slots, peer.slots[:count] = peer.slots[:count], []
        if rng.random() < lie_share:
            offset, generation = rng.choice(self._slots)
            delta = rng.choice((0, 0, 1, -1, 1 << 32))
            claimed = GrantedSlot(offset, max(0, generation + delta), 0)
            slots.insert(rng.randrange(len(slots) + 1), claimed)
            slots += slots[:1] if rng.random() < 0.3 else []
            if rng.random() < 0.2:
                slots.append(GrantedSlot(rng.choice(NUMBERS), rng.choice(NUMBERS), 0))
        return slots

    def _packed(self, slots: Sequence[GrantedSlot | SlotRef]) -> bytes:
        """Returns packed slots, which may be cut off anywhere."""
        packed = pack_slots((slot.offset, slot.generation) for slot in slots)
        return (
            packed if self._rng.random() < 0.97 else packed[: self._rng.randrange(len(packed) + 1)]
        )

    def _commit(self, peer: Peer) -> Commit:
        rng = self._rng
        slots = self._take_slots(peer, 0.1)
        fits = FITS[peer.layout]
        start = rng.choice((0, 0, 0, rng.randrange(16)))
        groups = [rng.choice(fits.get(slot.part_bytes, (0,))) for slot in slots]
        if groups and rng.random() < 0.03:
            groups[rng.randrange(len(groups))] = rng.choice((0, 1, 2, *NUMBERS))
            peer.slots += slots
        hashes = b"".join(HASHES[start : start + len(slots)])
        if rng.random() < 0.02:
            hashes = hashes[: rng.randrange(len(hashes) + 1)]
        if rng.random() < 0.3:
            groups = groups[:1]
        commit = Commit(
            slots=self._packed(slots),
            groups=pack_u64(groups),
            hashes=hashes,
            tokens=rng.randrange(999),
        )
        if rng.random() < 0.3:
            return commit
        size = rng.choice((1, len(slots))) if rng.random() < 0.98 else rng.randrange(20)
        return msgspec.structs.replace(
            commit,
            parents=b"".join(rng.choice((bytes(32), *HASHES[:16])) for _ in range(size)),
            classes=bytes(
                rng.choice((0, 0, 1, 2, 3, 4) if rng.random() < 0.02 else (0, 1, 2, 3))
                for _ in range(size if rng.random() < 0.02 else len(slots))
            ),
            tenants=pack_u64([rng.choice(NUMBERS) % (1 << 64) for _ in range(size)]),
        )

    def _free(self, peer: Peer) -> Free:
        slots = self._take_slots(peer, 0.3)
        return Free(self._packed(slots))

    def _report_corrupt(self, peer: Peer) -> ReportCorrupt:
        slots = [self._rng.choice(self._slots) for _ in range(self._rng.randrange(3))]
        return ReportCorrupt(self._packed(slots))

    def _release(self, peer: Peer) -> Release:
        rng = self._rng
        if peer.leases and rng.random() < 0.9:
            return Release(
                peer.leases.pop(rng.randrange(len(peer.leases))), 128, 512, rng.random() < 0.1
            )
        return Release(rng.choice(NUMBERS[:-2]), rng.choice(NUMBERS[:-2]), 0, False)

    def _drained(self, peer: Peer) -> Drained:
        return Drained(self._rng.choice((0, 1, 2, 1 << 53, 1 << 62)))

    def _identify(self, peer: Peer) -> Identify:
        return Identify(self._id(), self._identity(peer))

    def _describe(self, peer: Peer) -> Describe:
        """Describe chunks, with any parents and with lengths that need not fit."""
        names = self._rng.choices(HASHES, k=self._rng.randrange(4))
        parents = self._rng.choices((*HASHES, bytes(HASH_BYTES)), k=len(names))
        sizes = self._rng.choices((0, 9, 5000), k=len(names) + self._rng.choice((0, 0, 0, 1)))
        return Describe(b"".join(names), b"".join(parents), [bytes(size) for size in sizes])

    def _report_request(self, peer: Peer) -> ReportRequest:
        first = self._rng.choice((HASHES[0], b"no hash", b""))
        explanation = RequestExplanation(self._rng.choice(NUMBERS[:-2]), 0, first_chunk=first)
        return ReportRequest(
            self._rng.choice(("", "r", f"r{self._rng.randrange(100)}-x")), explanation
        )

    def _report_identity(self, peer: Peer) -> ReportIdentity:
        return ReportIdentity(
            {f"f{self._rng.randrange(9)}": "\0" * self._rng.randrange(512) for _ in range(3)}
        )

    def _explain(self, peer: Peer) -> Explain:
        return Explain(self._id(), self._rng.choice(("", "r", "x", f"r{self._rng.randrange(100)}")))

    def _huge_request(self, peer: Peer) -> Request:
        rng = self._rng
        if rng.random() < 0.5:
            return Lookup(
                self._id(), rng.randrange(1 << 40), rng.choice((HASHES[0], HASHES[5])) * (1 << 16)
            )
        part_bytes, parts = SHAPES[peer.layout][0]
        return Reserve(self._id(), part_bytes, parts, 1 << 16)

    # Broken frames

    def _frame(self) -> bytes:
        return self._frames[-1] if self._rng.random() < 0.7 else self._rng.choice(self._frames)

    def _flipped(self) -> bytes:
        frame = bytearray(self._frame())
        for _ in range(self._rng.randrange(1, 9)):
            frame[self._rng.randrange(len(frame))] ^= 1 << self._rng.randrange(8)
        return bytes(frame)

    def _flipped_inside(self) -> bytes:
        body = bytearray(self._frame()[4:])
        for _ in range(self._rng.randrange(1, 4)):
            body[self._rng.randrange(len(body))] ^= 1 << self._rng.randrange(8)
        return _framed(bytes(body))

    def _truncated(self) -> bytes:
        body = self._frame()[4:]
        return _framed(body[: self._rng.randrange(len(body))])

    def _cut(self) -> bytes:
        frame = self._frame()
        return frame[: self._rng.randrange(1, len(frame))]

    def _repeated(self) -> bytes:
        return self._frame() * self._rng.randrange(2, 5)

    def _swapped(self) -> bytes:
        frames = [self._frame() for _ in range(self._rng.randrange(2, 5))]
        self._rng.shuffle(frames)
        return b"".join(frames)

    def _spliced(self) -> bytes:
        first, second = self._frame()[4:], self._rng.choice(self._frames)[4:]
        return _framed(
            first[: self._rng.randrange(len(first))] + second[self._rng.randrange(len(second)) :]
        )

    def _stuffed(self) -> bytes:
        body = self._frame()[4:]
        at = self._rng.randrange(len(body))
        stuff = bytes([self._rng.choice(TOKENS)]) + self._rng.randbytes(self._rng.randrange(6))
        return _framed(body[:at] + stuff + body[at + self._rng.randrange(3) :])

    def _mislabelled(self) -> bytes:
        size = self._rng.choice((0, 1, MESSAGE_BYTES_MAX, MESSAGE_BYTES_MAX + 1, (1 << 32) - 1))
        return size.to_bytes(4, "little") + self._frame()[4:]

    def _retyped(self) -> bytes:
        """Returns a frame of which one value, at any depth, is replaced."""
        value = msgspec.msgpack.decode(self._frame()[4:])
        inside: Any = value
        while True:
            keys = list(inside) if isinstance(inside, dict) else range(len(inside))
            if not keys:
                break
            key = self._rng.choice(keys)
            if not isinstance(inside[key], (list, dict)) or self._rng.random() < 0.3:
                inside[key] = self._rng.choice(JUNK)
                break
            inside = inside[key]
        return _framed(msgspec.msgpack.encode(value))

    def _random_bytes(self) -> bytes:
        body = self._rng.randbytes(self._rng.randrange(80))
        return _framed(body) if self._rng.random() < 0.8 else body

    def _random_values(self) -> bytes:
        tag = msgspec.msgpack.decode(self._rng.choice(self._frames)[4:])[0]
        values = [self._rng.choice(JUNK) for _ in range(self._rng.randrange(9))]
        return _framed(msgspec.msgpack.encode([tag, *values]))

    def _deep(self) -> bytes:
        """Returns arrays in arrays, as a value or after a whole message, where they are skipped."""
        depth = self._rng.choice((10, 1000, 100_000)) if self._rng.random() < 0.2 else 10
        start = (
            b"",
            b"\x81\xa1x",
            b"\x98\xa5hello\x01\x01",
            b"\x93\xa5stats\x01",
            b"\x93\xa5clear\x01",
        )
        return _framed(self._rng.choice(start) + b"\x91" * depth + b"\xc0")


def _framed(body: bytes) -> bytes:
    return len(body).to_bytes(4, "little") + body


def _slot_names(reply: Found | Reserved) -> list[SlotRef]:
    return list(unpack_slots(reply.slots))
