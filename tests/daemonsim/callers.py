"""What every client of a seed has: its habits, its scene, and a connection for requests."""

import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

from hybridkv.client.link import Link
from hybridkv.core.coverage import needed_chunks
from hybridkv.core.geometry import Geometry
from hybridkv.core.keys import HASH_BYTES
from hybridkv.core.packed import pack_u64, unpack_u64
from hybridkv.wire.messages import (
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
from tests.daemonsim.system import SECOND, SOCKET_PATH, System

Ref = tuple[int, int]
"""(offset, generation) of a slot."""


@dataclass
class Habits:
    """How the clients of a seed behave; times in microseconds."""

    steps: tuple[int, int] = (3_000, 30_000)
    checksum: bool = True
    pieces: int = 3
    """Pieces that a worker copies in a step, at most."""
    loads: int = 4
    """Loads that an engine has at once, at most."""
    partial: float = 0.2
    """How often a load needs the end of a part only."""
    waits_ms: tuple[int, ...] = (0,)
    """How long lookups may take for what is below RAM, each as likely."""
    misbehave: frozenset[str] = frozenset()
    """Of "late" and "twice" (commits), "fail" (stores that a rank does not do)."""


@dataclass
class Scene:
    """What all clients of a seed share."""

    system: System
    books: Books
    habits: Habits
    counts: Counter[str]
    calm: bool = False
    """No new work is begun: the end is near."""

    @property
    def rng(self) -> random.Random:
        return self.system.rng


class Client:
    """Something that steps while its process lives."""

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
        """Whether it will step again."""
        return self.process.alive and not self.has_left

    def step(self) -> None:
        """What it does each time."""
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
        system.after(*self.scene.habits.steps, self._step)


RATES = (0, 0, 1, 10_000, 1_000_000, 1 << 40)
"""Tokens per second that an engine says it computes."""


class Caller:
    """A link that checks replies: each request gets its own, in order, except slow lookups."""

    def __init__(self, scene: Scene, hello: Hello, on_loss: Callable[[], None]) -> None:
        self._scene = scene
        self._on_loss = on_loss
        self.awaited: deque[tuple[int, type[Reply], int]] = deque()
        """Number of a request, kind of its reply, and when it was sent."""
        self._pending: dict[int, int | None] = {}
        """Lookups that wait for tiers: None, or the last request's number when one was given up."""
        self._given_up: dict[int, int] = {}
        """The same of those of which nothing was heard."""
        self._ids = 1
        self.link = Link(str(SOCKET_PATH), hello, self._lost)

    def poll(self) -> list[Reply]:
        """Replies, proven to be those to what was asked."""
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
        number, kind, _ = self.awaited.popleft()
        assert reply.id == number, f"the reply to {reply.id} instead of {number}"
        if isinstance(reply, Pending) and kind is Found:
            self._pending[number] = self._given_up.pop(number, None)
            return
        self._given_up.pop(number, None)
        assert isinstance(reply, kind), f"{type(reply).__name__} instead of {kind.__name__}"
        # Requests are heard in order: the daemon knows by now which lookups were given up.
        for lookup, last in list(self._pending.items()):
            if last is not None and number > last:
                del self._pending[lookup]

    def give_up(self, number: int, lease: int) -> None:
        """Release a lookup that may not have been answered yet: it may be, or never is."""
        if self.tell(Release(lease)):
            where = self._pending if number in self._pending else self._given_up
            where[number] = self._ids

    @property
    def asked(self) -> int:
        """The number of the last request."""
        return self._ids

    @property
    def waits(self) -> bool:
        """Whether some answer is still to come."""
        return bool(self.awaited) or None in self._pending.values()

    @property
    def is_due(self) -> bool:
        """Whether an answer is to come that must before an engine is settled.

        While RAM has no room, slots are asked for all the time, and one answer or other is always
        on its way. So only a reservation of more than a second ago counts.
        """
        before = self._scene.system.now - SECOND
        late = any(kind is not Reserved or sent_at < before for _, kind, sent_at in self.awaited)
        return late or None in self._pending.values()

    def ask(self, make: Callable[[int], Request], kind: type[Reply]) -> bool:
        """Send a request that has a reply."""
        self._ids += 1
        sent = self.tell(make(self._ids))
        if sent:
            self.awaited.append((self._ids, kind, self._scene.system.now))
        return sent

    def tell(self, request: Request) -> bool:
        """Send a request."""
        self._scene.counts[f"say_{type(request).__name__.lower()}"] += 1
        return self.link.send(request, self._scene.system.seconds())

    def _lost(self, why: str) -> None:
        self._scene.counts["losses"] += 1
        self.awaited.clear()
        self._pending.clear()
        self._given_up.clear()
        self._on_loss()


def named(geometry: Geometry, found: Found) -> list[tuple[Ref, int, int]]:
    """(slot, group index, chunk) of everything that a hit needs."""
    places = [
        (index, chunk)
        for index, group in enumerate(geometry.groups)
        for chunk in (needed_chunks(geometry, group, found.chunks) if found.chunks else ())
    ]
    refs = refs_of(found.offsets, found.generations)
    return [(ref, *place) for ref, place in zip(refs, places, strict=True)]


def refs_of(offsets: bytes, generations: bytes) -> list[Ref]:
    return list(zip(unpack_u64(offsets), unpack_u64(generations), strict=True))


def packed_of(refs: list[Ref]) -> tuple[bytes, bytes]:
    return pack_u64([offset for offset, _ in refs]), pack_u64(
        [generation for _, generation in refs]
    )


def commit_of(objects: list[tuple[Ref, int, bytes]]) -> Commit:
    assert all(len(chunk_hash) == HASH_BYTES for _, _, chunk_hash in objects)
    groups = pack_u64([index for _, index, _ in objects])
    names = [chunk_hash for _, _, chunk_hash in objects]
    return Commit(
        *packed_of([ref for ref, _, _ in objects]),
        groups,
        b"".join(names),
        parents=b"".join(map(chunk_before, names)),
        classes=bytes(name[0] % 3 for name in names),
        tenants=pack_u64([name[1] % 3 for name in names]),
    )
