"""Sessions that subscribed: what left RAM, and what is there, for their KV events.

Removed messages name the objects of a session's identity that left RAM, and say which of these a
tier below has, as far as a tier knows that at once. Every LOOK_SECONDS, up to LOOKS_MAX of these
are checked again, and reported as removed once no tier has them. While a session sends nothing, at
most UNANSWERED_MAX messages are sent to it, and further objects are queued. A queue of more than
QUEUE_MAX is replaced by one flag: any object may be gone.

Announced messages name described chunks (daemon.token_book) that are there: first all, then those
that come, whoever stored them. A session asks for each message, so that its steps stay short.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from hybridkv.core.keys import HASH_BYTES, unpack_hashes
from hybridkv.daemon.sessions import ClientConnection, RequestError, Sessions
from hybridkv.daemon.token_book import ChunkDescription, ChunkName, DescribedChunk, TokenBook
from hybridkv.store.index import Namespace, Slot
from hybridkv.tiers.health import TierState
from hybridkv.tiers.record import RecordName
from hybridkv.wire import messages as wire
from hybridkv.wire.messages import NO_PARENT, Reply
from hybridkv.wire.protocol import ErrorCode

QUEUE_MAX = 1 << 16
UNANSWERED_MAX = 8
BELOW_MAX = 1 << 17  # The most objects of one session that are reported as being in a tier.
LOOKS_MAX = 2048  # So many of these are looked at again in LOOK_SECONDS.
LOOK_SECONDS = 1.0


class RemovedObject(NamedTuple):
    """An object of a subscriber's namespace that left RAM."""

    chunk_hash: bytes
    group_index: int


class OutgoingMessage(NamedTuple):
    """A message that is to be sent beside the replies to requests."""

    connection_id: int
    message: Reply


@dataclass(eq=False)
class Subscriber:
    """A session that subscribed, and what it does not know yet."""

    namespace: Namespace
    queue: dict[RemovedObject, None] = field(default_factory=dict)
    """Objects that left RAM and are not reported, the oldest first."""
    everything: bool = False  # True after more objects left than the queue takes.
    unanswered: int = 0  # Messages that were sent to the session since its last message.
    below: dict[RemovedObject, bytes] = field(default_factory=dict)
    """Objects that were reported as being in a tier, with their keys there.

    The one that was looked at longest ago comes first.
    """
    unannounced: dict[bytes, None] = field(default_factory=dict)
    """Described chunks that are to be announced, or looked at, by their hashes."""
    wanted: wire.ReadAnnouncements | None = None
    """What the session asked for and did not get."""


class Subscriptions:
    """Every session that subscribed, by its connection."""

    def __init__(self, tiers: Sequence[TierState], sessions: Sessions) -> None:
        self._subscribers: dict[int, Subscriber] = {}
        self._tiers, self._sessions = tiers, sessions
        self.book = TokenBook()
        self.on_described: Callable[[list[DescribedChunk]], None] = lambda chunks: None
        """Called with chunks that are new in the book."""
        self.on_forgotten: Callable[[], None] = lambda: None
        """Called where chunks of the book were forgotten, so that its file forgets them too."""
        self._has_forgotten = False
        self._look_at = 0.0  # When tiers are looked at next.
        self.overflows = 0
        self.unreported = 0  # Objects that a tier has, and that were reported as being in none.

    def __len__(self) -> int:
        """The number of sessions that subscribed."""
        return len(self._subscribers)

    def subscribe(self, connection: ClientConnection, _: wire.Subscribe | None = None) -> None:
        """Report objects to a session that leave RAM from now on, and what is there now."""
        namespace = connection.session.namespace
        subscriber = self._subscribers.get(connection.number)
        if subscriber is None or subscriber.namespace is not namespace:
            subscriber = self._subscribers[connection.number] = Subscriber(namespace)
        subscriber.unannounced = dict.fromkeys(self.book.chunks_of(namespace.identity))
        subscriber.wanted = None

    def describe(self, connection: ClientConnection, request: wire.Describe) -> None:
        """Keep descriptions, and announce their chunks to the other sessions. Raises RequestError.

        Those of a session that did not subscribe are passed over.
        """
        count = len(request.descriptions)
        if {len(request.hashes), len(request.parents)} != {count * HASH_BYTES}:
            fault = f"{count} descriptions with more or less of what belongs to them"
            raise RequestError(ErrorCode.DESCRIBE, fault)
        if connection.number not in self._subscribers:
            return
        namespace, new = connection.session.namespace, list[DescribedChunk]()
        others = [
            subscriber
            for number, subscriber in self._subscribers.items()
            if number != connection.number and subscriber.namespace is namespace
        ]
        fields = zip(
            unpack_hashes(request.hashes),
            unpack_hashes(request.parents),
            request.descriptions,
            strict=True,
        )
        for chunk_hash, parent, content in fields:
            name = ChunkName(namespace.identity, chunk_hash)
            before = b"" if parent == NO_PARENT else parent
            chunk = DescribedChunk(name, ChunkDescription(before, content))
            if self._keep(chunk):
                new.append(chunk)
                for subscriber in others:
                    subscriber.unannounced[chunk_hash] = None
        if new:
            self.on_described(new)

    def forget_description(self, name: ChunkName) -> None:
        """Forget a chunk's description, as somebody asked for its deletion."""
        known = self.book.chunks_of(name.identity)
        self._has_forgotten |= name.chunk_hash in known
        self.book.forget_chunk(name)

    def finish_forgetting(self) -> None:
        """Have the file forget what was forgotten since the last call."""
        if self._has_forgotten:
            self._has_forgotten = False
            self.on_forgotten()

    def on_book_read(self, chunks: Iterable[DescribedChunk]) -> None:
        """Take what an earlier daemon had described. Those that are lost are forgotten in time."""
        for chunk in chunks:
            self._keep(chunk)
        self.on_tier_opened()

    def read_announcements(
        self, connection: ClientConnection, request: wire.ReadAnnouncements
    ) -> None:
        """Announce chunks to the session, as soon as there are some."""
        subscriber = self._subscribers.get(connection.number)
        if subscriber is not None:
            subscriber.wanted = request

    def on_tier_opened(self) -> None:
        """A tier tells now what it has."""
        for subscriber in self._subscribers.values():
            described = self.book.chunks_of(subscriber.namespace.identity)
            subscriber.unannounced |= dict.fromkeys(described)

    def on_identified(self, connection: ClientConnection) -> None:
        """The session has another identity now, of whose objects nothing was reported to it."""
        if connection.number in self._subscribers:
            self.subscribe(connection)

    def on_disconnect(self, connection_id: int) -> None:
        """The connection has ended, and its subscription with it."""
        self._subscribers.pop(connection_id, None)

    def on_message(self, connection_id: int) -> None:
        """The session sent a message, so it reads."""
        if self._subscribers and connection_id in self._subscribers:
            self._subscribers[connection_id].unanswered = 0

    def on_object_changed(self, slot: Slot, is_there: bool) -> None:
        """The slot's object has entered the index, or is about to leave it."""
        entry = slot.entry
        if entry is None:
            return
        is_described = entry.chunk_hash in self.book.chunks_of(entry.namespace.identity)
        if is_described:
            name = ChunkName(entry.namespace.identity, entry.chunk_hash)
            if is_there:
                self.book.unseen.pop(name, None)
            elif sum(entry.presence) == 1:
                self.book.unseen[name] = None
        changed = RemovedObject(entry.chunk_hash, slot.group_index)
        for subscriber in self._subscribers.values():
            if subscriber.namespace is not entry.namespace:
                continue
            if is_there:
                subscriber.queue.pop(changed, None)
                subscriber.below.pop(changed, None)
                if is_described:
                    subscriber.unannounced[entry.chunk_hash] = None
            else:
                self._queue(subscriber, changed)

    def on_not_stored(self, connection_id: int | None, chunk_hash: bytes, group_index: int) -> None:
        """A slot that a session committed did not become an object.

        The session believes that it did, so a Removed message is queued unless RAM has the object.
        """
        subscriber = self._subscribers.get(connection_id) if connection_id is not None else None
        if subscriber is not None and group_index < len(subscriber.namespace.gids):
            entry = subscriber.namespace.entries.get(chunk_hash)
            if entry is None or entry.slots[group_index] is None:
                self._queue(subscriber, RemovedObject(chunk_hash, group_index))

    def take_due(self, now: float) -> Iterator[OutgoingMessage]:
        """Yield the messages that may be sent now, and empty the queues by that."""
        if now >= self._look_at:
            self._look_at = now + LOOK_SECONDS
            for subscriber in self._subscribers.values() if self._tiers else ():
                self._look_below(subscriber)
            self._forget_lost()
        for connection_id, subscriber in self._subscribers.items():
            while (
                subscriber.queue or subscriber.everything
            ) and subscriber.unanswered < UNANSWERED_MAX:
                yield OutgoingMessage(connection_id, self._next_message(subscriber))
            wanted = subscriber.wanted
            if wanted is not None and subscriber.unannounced and not subscriber.queue:
                announced = self._announce(subscriber, wanted)
                if announced.hashes or announced.more:
                    subscriber.wanted = None
                    yield OutgoingMessage(connection_id, announced)

    def _next_message(self, subscriber: Subscriber) -> wire.Removed:
        """Return a message with the oldest objects of the queue, and take them off it."""
        objects = list(islice(subscriber.queue, wire.REMOVED_MAX))
        for removed in objects:
            del subscriber.queue[removed]
        everything, subscriber.everything = subscriber.everything, False
        subscriber.unanswered += 1
        hashes = b"".join(removed.chunk_hash for removed in objects)
        groups = bytes(removed.group_index for removed in objects)
        below = bytes(self._note_below(subscriber, removed) for removed in objects if self._tiers)
        return wire.Removed(0, hashes, groups, everything, below)

    def _keep(self, chunk: DescribedChunk) -> bool:
        """Put a chunk into the book. Returns False where it is there, or there is no room."""
        is_new = self.book.add_chunk(chunk.name, chunk.description)
        namespace = self._sessions.namespaces.get(chunk.name.identity)
        if is_new and (namespace is None or chunk.name.chunk_hash not in namespace.entries):
            self.book.unseen[chunk.name] = None
        return is_new

    def _announce(self, subscriber: Subscriber, wanted: wire.ReadAnnouncements) -> wire.Announced:
        """Return a message with the next chunks, and take them off the queue.

        At most LOOKS_MAX chunks are looked at for it.
        """
        namespace = subscriber.namespace
        described = self.book.chunks_of(namespace.identity)
        hashes: list[bytes] = []
        rows: list[bytes] = []
        left = wanted.description_bytes
        for chunk_hash in islice(self._next_chunks(subscriber), LOOKS_MAX):
            description = described.get(chunk_hash)
            size = len(description.content) if description is not None else 0
            if hashes and (size > left or len(hashes) == wire.CHANGES_MAX):
                break
            del subscriber.unannounced[chunk_hash]
            row = self._presence(subscriber, chunk_hash) if description is not None else b""
            if any(row):
                left -= size
                hashes.append(chunk_hash)
                rows.append(row)
        chunks = [described[chunk_hash] for chunk_hash in hashes]
        groups, packed = len(namespace.gids), b"".join(rows)
        return wire.Announced(
            id=wanted.number,
            hashes=b"".join(hashes),
            parents=b"".join(chunk.parent or NO_PARENT for chunk in chunks),
            descriptions=[chunk.content for chunk in chunks],
            masks=[packed[index::groups] for index in range(groups)],
            more=bool(subscriber.unannounced),
        )

    def _next_chunks(self, subscriber: Subscriber) -> Iterator[bytes]:
        """Yield chunks to announce, each after the chunk before it. The caller takes them off."""
        described = self.book.chunks_of(subscriber.namespace.identity)
        while subscriber.unannounced:
            chunk_hash = next(iter(subscriber.unannounced))
            # The chunks before it that are to be announced too. A circle ends where it began.
            chain: dict[bytes, None] = {}
            while chunk_hash in subscriber.unannounced and chunk_hash not in chain:
                chain[chunk_hash] = None
                description = described.get(chunk_hash)
                chunk_hash = description.parent if description is not None else b""
            yield from reversed(chain)

    def _presence(self, subscriber: Subscriber, chunk_hash: bytes) -> bytes:
        """Return the bytes of a chunk in the masks of Announced, by group."""
        namespace = subscriber.namespace
        entry = namespace.entries.get(chunk_hash)
        row = bytearray(entry.presence if entry is not None else bytes(len(namespace.gids)))
        for index, is_there in enumerate(row):
            absent = RemovedObject(chunk_hash, index)
            if not is_there and self._tiers and self._note_below(subscriber, absent):
                row[index] = wire.BELOW
        return bytes(row)

    def _forget_lost(self) -> None:
        """Forget those of the next LOOKS_MAX chunks which RAM lacks, and no tier has either.

        What a tier has that is not open is unknown.
        """
        if not all(tier.is_open for tier in self._tiers):
            return
        for name in list(islice(self.book.unseen, LOOKS_MAX)):
            namespace = self._sessions.namespaces.get(name.identity)
            if self._tiers and namespace is None:
                # The groups of its objects are not known until an engine greets.
                self.book.unseen.move_to_end(name)
                continue
            gids = namespace.gids if namespace is not None else ()
            keys = (RecordName(name.identity, gid, name.chunk_hash).key for gid in gids)
            if any(map(self._is_below, keys)):
                self.book.unseen.move_to_end(name)
            else:
                self.book.forget_chunk(name)

    def _note_below(self, subscriber: Subscriber, removed: RemovedObject) -> bool:
        """Return True where a tier has the object, and note it so that it is looked at again."""
        subscriber.below.pop(removed, None)
        namespace = subscriber.namespace
        gid = namespace.gids[removed.group_index]
        key = RecordName(namespace.identity, gid, removed.chunk_hash).key
        if not self._is_below(key):
            return False
        if len(subscriber.below) >= BELOW_MAX:
            self.unreported += 1
            return False
        subscriber.below[removed] = key
        return True

    def _is_below(self, key: bytes) -> bool:
        return any(tier.peek(key) for tier in self._tiers)

    def _look_below(self, subscriber: Subscriber) -> None:
        """Queue those of the next LOOKS_MAX objects of `below` that no tier has any more."""
        for removed, key in list(islice(subscriber.below.items(), LOOKS_MAX)):
            del subscriber.below[removed]
            if self._is_below(key):
                subscriber.below[removed] = key
            else:
                self._queue(subscriber, removed)

    def _queue(self, subscriber: Subscriber, removed: RemovedObject) -> None:
        if len(subscriber.queue) >= QUEUE_MAX:
            subscriber.queue.clear()
            subscriber.below.clear()
            subscriber.everything = True
            self.overflows += 1
        if not subscriber.everything:
            subscriber.queue[removed] = None
