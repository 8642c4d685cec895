"""What engines that watch are told of: objects of their identity that RAM has no more.

Never more than the engine reads: only so many messages are on their way to one that says nothing, which then steps so
rarely that nobody hears its events. What waits meanwhile is bounded as well, and beyond that one word stands for all.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

from hybridkv.storage.store import Namespace, Slot
from hybridkv.wire.messages import REMOVED_MAX, Removed

QUEUE_MAX = 1 << 16
"""Objects that wait to be told to one engine; with more it is told that any may be gone."""
UNHEARD_MAX = 8
"""Messages to an engine since it said something."""


@dataclass(eq=False)
class Watcher:
    """One session that watches."""

    namespace: Namespace
    queue: dict[tuple[bytes, int], None] = field(default_factory=dict)
    """(chunk hash, group index) of what went and is not told, oldest first."""
    is_over: bool = False
    """Whether more went than was kept."""
    unheard: int = 0


class Removals:
    """Every session that watches, by connection."""

    def __init__(self) -> None:
        self._watchers: dict[int, Watcher] = {}
        self.overflows = 0

    def __len__(self) -> int:
        """Sessions that watch."""
        return len(self._watchers)

    def watch(self, connection_id: int, namespace: Namespace) -> None:
        """From here on; also with another identity, of whose objects nothing has been told."""
        self._watchers[connection_id] = Watcher(namespace)

    def identified(self, connection_id: int, namespace: Namespace) -> None:
        """The session has another identity."""
        if connection_id in self._watchers:
            self.watch(connection_id, namespace)

    def forget(self, connection_id: int) -> None:
        """The connection ended."""
        self._watchers.pop(connection_id, None)

    def heard(self, connection_id: int) -> None:
        """The engine said something, so it reads."""
        if self._watchers and connection_id in self._watchers:
            self._watchers[connection_id].unheard = 0

    def witness(self, slot: Slot, is_there: bool) -> None:
        """See Store.witness."""
        entry = slot.entry
        if not self._watchers or entry is None:
            return
        for watcher in self._watchers.values():
            if watcher.namespace is not entry.namespace:
                continue
            if is_there:
                watcher.queue.pop((entry.chunk_hash, slot.group_index), None)
            else:
                self._queue(watcher, entry.chunk_hash, slot.group_index)

    def missing(self, connection_id: int | None, chunk_hash: bytes, group_index: int) -> None:
        """What an engine committed did not become an object, and it does not know."""
        watcher = self._watchers.get(connection_id) if connection_id is not None else None
        if watcher is not None and group_index < len(watcher.namespace.gids):
            entry = watcher.namespace.entries.get(chunk_hash)
            if entry is None or entry.slots[group_index] is None:
                self._queue(watcher, chunk_hash, group_index)

    def due(self) -> Iterator[tuple[int, Removed]]:
        """(connection, message) of what may be told now."""
        for number, watcher in self._watchers.items():
            while (watcher.queue or watcher.is_over) and watcher.unheard < UNHEARD_MAX:
                told = list(islice(watcher.queue, REMOVED_MAX))
                for one in told:
                    del watcher.queue[one]
                is_over, watcher.is_over = watcher.is_over, False
                watcher.unheard += 1
                yield number, Removed(0, b"".join(name for name, _ in told), bytes(group for _, group in told), is_over)

    def _queue(self, watcher: Watcher, chunk_hash: bytes, group_index: int) -> None:
        if len(watcher.queue) >= QUEUE_MAX:
            # What is queued is among what may be gone.
            watcher.queue.clear()
            watcher.is_over = True
            self.overflows += 1
        if not watcher.is_over:
            watcher.queue[chunk_hash, group_index] = None
