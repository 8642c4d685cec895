"""Sessions that subscribed are told which objects of their identity RAM has no more.

A session that sends nothing is sent only UNHEARD_MAX messages, and what it is not told meanwhile is
queued. A queue that would be longer than QUEUE_MAX is replaced by one flag: any object may be gone.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

from hybridkv.daemon.sessions import ClientConnection
from hybridkv.store.index import Namespace, Slot
from hybridkv.wire.messages import REMOVED_MAX, Removed, Subscribe

QUEUE_MAX = 1 << 16
"""Objects that wait to be told to one session."""
UNHEARD_MAX = 8
"""Messages to a session since it last sent one."""


@dataclass(eq=False)
class Subscriber:
    """One session that subscribed."""

    namespace: Namespace
    queue: dict[tuple[bytes, int], None] = field(default_factory=dict)
    """(chunk hash, group index) of objects that went and are not told, the oldest first."""
    everything: bool = False
    """Whether more objects went than the queue takes."""
    unheard: int = 0


class Subscriptions:
    """Every session that subscribed, by its connection."""

    def __init__(self) -> None:
        self._subscribers: dict[int, Subscriber] = {}
        self.overflows = 0

    def __len__(self) -> int:
        """Sessions that subscribed."""
        return len(self._subscribers)

    def subscribe(self, connection: ClientConnection, _: Subscribe | None = None) -> None:
        """Tell a session of objects that go from now on."""
        self._subscribers[connection.number] = Subscriber(connection.session.namespace)

    def identified(self, connection: ClientConnection) -> None:
        """The session has another identity, of whose objects it was told nothing."""
        if connection.number in self._subscribers:
            self.subscribe(connection)

    def forget(self, connection_id: int) -> None:
        """The connection has ended."""
        self._subscribers.pop(connection_id, None)

    def heard(self, connection_id: int) -> None:
        """The session sent a message, so it reads."""
        if self._subscribers and connection_id in self._subscribers:
            self._subscribers[connection_id].unheard = 0

    def object_changed(self, slot: Slot, is_there: bool) -> None:
        """The store has the slot's object from now on, or no longer."""
        entry = slot.entry
        if not self._subscribers or entry is None:
            return
        for subscriber in self._subscribers.values():
            if subscriber.namespace is not entry.namespace:
                continue
            if is_there:
                subscriber.queue.pop((entry.chunk_hash, slot.group_index), None)
            else:
                self._queue(subscriber, entry.chunk_hash, slot.group_index)

    def missing(self, connection_id: int | None, chunk_hash: bytes, group_index: int) -> None:
        """A slot that a session committed did not become an object, which it does not know."""
        subscriber = self._subscribers.get(connection_id) if connection_id is not None else None
        if subscriber is not None and group_index < len(subscriber.namespace.gids):
            entry = subscriber.namespace.entries.get(chunk_hash)
            if entry is None or entry.slots[group_index] is None:
                self._queue(subscriber, chunk_hash, group_index)

    def due(self) -> Iterator[tuple[int, Removed]]:
        """(connection, message) of everything that may be told now."""
        for number, subscriber in self._subscribers.items():
            while (subscriber.queue or subscriber.everything) and subscriber.unheard < UNHEARD_MAX:
                told = list(islice(subscriber.queue, REMOVED_MAX))
                for one in told:
                    del subscriber.queue[one]
                everything, subscriber.everything = subscriber.everything, False
                subscriber.unheard += 1
                hashes = b"".join(chunk_hash for chunk_hash, _ in told)
                groups = bytes(group for _, group in told)
                yield number, Removed(0, hashes, groups, everything)

    def _queue(self, subscriber: Subscriber, chunk_hash: bytes, group_index: int) -> None:
        if len(subscriber.queue) >= QUEUE_MAX:
            subscriber.queue.clear()
            subscriber.everything = True
            self.overflows += 1
        if not subscriber.everything:
            subscriber.queue[chunk_hash, group_index] = None
