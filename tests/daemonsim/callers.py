"""The parts of every client of a seed: its habits, its scene, and a connection for requests."""

import random
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from hybridkv.client.link import Link
from hybridkv.core.coverage import needed_chunks
from hybridkv.core.geometry import Geometry
from hybridkv.core.keys import HASH_BYTES
from hybridkv.core.packed import SlotRef, pack_slots, pack_u64, unpack_slots
from hybridkv.core.policies import EvictionClass
from hybridkv.wire.messages import (
    AuditOffer,
    Commit,
    Error,
    Found,
    Hello,
    Pending,
    Release,
    Reply,
    Request,
    Reserved,
)
from tests.daemonsim.oracle import Books, chunk_before
from tests.daemonsim.sockets import SimProcess
from tests.daemonsim.system import SECOND, SOCKET_PATH, Delays, System


class AwaitedReply(NamedTuple):
    """The reply to a request that was sent."""

    number: int  # The request's id.
    kind: type[Reply]
    sent_at: int


class NeededSlot(NamedTuple):
    """A slot that a hit needs."""

    ref: SlotRef
    group_index: int
    chunk: int


class WrittenSlot(NamedTuple):
    """A slot that is to be committed."""

    ref: SlotRef
    group_index: int
    chunk_hash: bytes


@dataclass
class Habits:
    """The behaviour of the clients of a seed. Times are in microseconds."""

    steps: Delays = Delays(3_000, 30_000)
    checksum: bool = True
    pieces: int = 3
    """The most pieces that a worker copies in a step."""
    loads: int = 4
    """The most loads that an engine has at once."""
    partial: float = 0.2
    """The share of loads that need the end of a part only."""
    waits_ms: tuple[int, ...] = (0,)
    """The times that lookups may wait for tiers, each as likely."""
    audits: bool = False
    """Whether every second lookup asks for a live audit."""
    advises: bool = False
    """Whether schedulers advise the daemon about chunks, and commands pin them."""
    consumers: bool = False
    """Whether lookups say that another engine computes the prompt."""
    expects: bool = False
    """Whether engines say which prompts they expect."""
    misbehave: frozenset[str] = frozenset()
    """Of "late" and "twice" (commits), "fail" (stores that a rank does not do)."""


@dataclass
class Scene:
    """The state that all clients of a seed share."""

    system: System
    books: Books
    habits: Habits
    counts: Counter[str]
    calm: bool = False
    """True once no new work is begun, because the end is near."""

    @property
    def rng(self) -> random.Random:
        return self.system.rng


class Client:
    """A client, which steps while its process lives."""

    def __init__(self, scene: Scene, process: SimProcess) -> None:
        self.scene = scene
        self.process = process
        self.has_left = False
        scene.system.after(1, 3000, self._step)

    @property
    def rng(self) -> random.Random:
        return self.scene.rng

    @property
    def is_alive(self) -> bool:
        """True where it will step again."""
        return self.process.alive and not self.has_left

    def step(self) -> None:
        """Do the work of one step."""
        raise NotImplementedError

    def _step(self) -> None:
        system = self.scene.system
        if not self.is_alive:
            return
        if self.process.stopped_until > system.now:
            system.at(self.process.stopped_until, self._step)
            return
        before, system.current = system.current, self.process
        try:
            self.step()
        finally:
            system.current = before
        steps = self.scene.habits.steps
        system.after(steps.low, steps.high, self._step)


RATES = (0, 0, 1, 10_000, 1_000_000, 1 << 40)
"""Tokens per second that engines compute, by their lookups."""


class Caller:
    """A link that checks replies. Each request has its own, in order, except slow lookups."""

    def __init__(self, scene: Scene, hello: Hello, on_loss: Callable[[], None]) -> None:
        self._scene = scene
        self._on_loss = on_loss
        self.awaited: deque[AwaitedReply] = deque()
        self._pending: dict[int, int | None] = {}
        """Lookups that wait for tiers. Where a lookup was given up: the number of the request that
        was the last one then."""
        self._given_up: dict[int, int] = {}
        """Lookups that were given up before Pending came, with the same number."""
        self._ids = 1
        self.link = Link(str(SOCKET_PATH), hello, self._lost)

    def poll(self) -> list[Reply]:
        """Return the replies, after a proof that they answer the requests."""
        replies = self.link.poll(self._scene.system.seconds())
        assert self.link.refusal is None, f"a greeting was refused: {self.link.refusal}"
        for reply in replies:
            assert not isinstance(reply, Error), f"refused: {reply}"
            self._expect(reply)
        return [reply for reply in replies if not isinstance(reply, Pending)]

    def _expect(self, reply: Reply) -> None:
        if isinstance(reply, Found) and reply.id in self._pending:
            del self._pending[reply.id]
            return
        assert self.awaited, f"nobody asked for {type(reply).__name__}"
        awaited = self.awaited.popleft()
        number, kind = awaited.number, awaited.kind
        assert reply.id == number, f"the reply to {reply.id} instead of {number}"
        if isinstance(reply, Pending) and kind is Found:
            self._pending[number] = self._given_up.pop(number, None)
            return
        self._given_up.pop(number, None)
        assert isinstance(reply, kind), f"{type(reply).__name__} instead of {kind.__name__}"
        # Requests are handled in order, so the daemon knows by now which lookups were given up.
        for lookup, last in list(self._pending.items()):
            if last is not None and number > last:
                del self._pending[lookup]

    def give_up(self, number: int, lease: int) -> None:
        """Release a lookup that may not have been answered yet, and may never be."""
        if self.tell(Release(lease)):
            where = self._pending if number in self._pending else self._given_up
            where[number] = self._ids

    @property
    def asked(self) -> int:
        """The number of the last request with a reply."""
        return self._ids

    @property
    def waits(self) -> bool:
        """True while an answer is still to come."""
        return bool(self.awaited) or None in self._pending.values()

    @property
    def is_due(self) -> bool:
        """True while an answer is to come that must come before an engine is settled.

        While RAM has no room, slots are asked for all the time, and an answer is always on its way.
        So only a reservation of more than a second ago counts.
        """
        before = self._scene.system.now - SECOND
        is_late = any(
            reply.kind is not Reserved or reply.sent_at < before for reply in self.awaited
        )
        return is_late or None in self._pending.values()

    def ask(self, make: Callable[[int], Request], kind: type[Reply]) -> bool:
        """Send a request that has a reply. Returns False where it cannot be sent."""
        self._ids += 1
        is_sent = self.tell(make(self._ids))
        if is_sent:
            self.awaited.append(AwaitedReply(self._ids, kind, self._scene.system.now))
        return is_sent

    def tell(self, request: Request) -> bool:
        """Send a message, and count it. Returns False where it cannot be sent."""
        self._scene.counts[f"say_{type(request).__name__.lower()}"] += 1
        return self.link.send(request, self._scene.system.seconds())

    def _lost(self, why: str) -> None:
        self._scene.counts["losses"] += 1
        self.awaited.clear()
        self._pending.clear()
        self._given_up.clear()
        self._on_loss()


def needed_slots(geometry: Geometry, found: Found) -> list[NeededSlot]:
    """Return the slots that a hit needs, each with its place in the prompt."""
    return _slots_of_hit(geometry, found.depth, found.slots)


def audited_slots(geometry: Geometry, offer: AuditOffer) -> list[NeededSlot]:
    """Return the slots of an audit, each with its place in the prompt: those of the chunk that is
    computed, and of the shorter hit before it where the offer has one."""
    refs = [*unpack_slots(offer.slots)]
    compared = [
        NeededSlot(ref, index, offer.chunk) for index, ref in enumerate(refs) if ref.generation
    ]
    if not offer.shorter_slots:
        return compared
    shorter = _slots_of_hit(geometry, offer.chunk, offer.shorter_slots)
    return [*compared, *shorter]


def _slots_of_hit(geometry: Geometry, chunks: int, slots: bytes) -> list[NeededSlot]:
    places = [
        (index, chunk)
        for index, group in enumerate(geometry.groups)
        for chunk in (needed_chunks(geometry, group, chunks) if chunks else ())
    ]
    refs = [*unpack_slots(slots)]
    return [NeededSlot(ref, index, chunk) for ref, (index, chunk) in zip(refs, places, strict=True)]


def commit_of(slots: Iterable[WrittenSlot]) -> Commit:
    """Return a commit of slots. Classes and tenants come from the chunks' hashes."""
    slots = list(slots)
    packed = pack_slots(slot.ref for slot in slots)
    hashes = [slot.chunk_hash for slot in slots]
    assert all(len(chunk_hash) == HASH_BYTES for chunk_hash in hashes)
    return Commit(
        slots=packed,
        groups=pack_u64([slot.group_index for slot in slots]),
        hashes=b"".join(hashes),
        parents=b"".join(map(chunk_before, hashes)),
        classes=bytes(chunk_hash[0] % len(EvictionClass) for chunk_hash in hashes),
        tenants=pack_u64([chunk_hash[1] % 3 for chunk_hash in hashes]),
    )
