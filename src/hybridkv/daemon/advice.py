"""What engines advise about the future use of chunks, done in bounded steps.

One message may name as many chunks as a lookup. The daemon's loop does STEPS_MAX steps of this work
in a turn, and each takes some 10 us. So does the end of retentions.
"""

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from hybridkv.core.keys import HASH_BYTES, unpack_hashes
from hybridkv.core.policies import Advice
from hybridkv.daemon.sessions import ClientConnection, RequestError
from hybridkv.store.index import IndexEntry, Namespace
from hybridkv.store.retention import RetentionRefusal
from hybridkv.store.store import Store
from hybridkv.tiers.demotion import Demotion
from hybridkv.wire import messages as wire
from hybridkv.wire.messages import RETENTION_MS_MAX
from hybridkv.wire.protocol import ErrorCode

STEPS_MAX = 256
"""Steps of this work in one turn of the loop, and as many for retentions that end."""
WAITING_MAX = 1 << 18
"""Chunks of all advice that waits. More advice is refused, and counted."""


@dataclass(eq=False, slots=True)
class WaitingAdvice:
    """Advice that is not done yet."""

    steps: Iterator[None]
    chunks: int


class AdviceQueue:
    """The advice that waits, in order, and its effect on the store."""

    def __init__(self, store: Store, demotion: Demotion) -> None:
        self._store, self._demotion = store, demotion
        self._works: deque[WaitingAdvice] = deque()
        self.waiting_chunks = 0
        self._has_more_due = False  # True where the last turn left retentions that are over.

    def advise(self, connection: ClientConnection, request: wire.Advise, now: float) -> None:
        """Take the advice of an engine. Raises RequestError."""
        hashes, namespace = request.hashes, connection.session.namespace
        chunks, rest = divmod(len(hashes), HASH_BYTES)
        if rest:
            fault = f"{len(hashes)} bytes are no whole number of hashes"
            raise RequestError(ErrorCode.HASHES, fault)
        if self.waiting_chunks + chunks > WAITING_MAX:
            self._store.retention.refused[RetentionRefusal.WAITING] += chunks
            return
        if request.advice is Advice.RETAIN:
            tenant = connection.tenant or request.tenant
            if request.ttl_ms > RETENTION_MS_MAX:
                self._store.retention.shortened += chunks
            until = ends_at(request.ttl_ms, now)
            steps = self._retain_chunks(namespace, hashes, tenant, until)
        else:
            is_demoted = request.advice is Advice.DEMOTE
            steps = self.release_chunks(namespace, hashes, is_demoted)
        self.append_work(steps, chunks)

    @property
    def is_behind(self) -> bool:
        """True while there is work that the next turn goes on with."""
        is_ended = self._store.retention.next_end() == -math.inf
        return bool(self._works) or self._has_more_due or is_ended

    def append_work(self, steps: Iterator[None], chunks: int) -> None:
        """Have work done in order, about so many chunks. Each of its steps takes some 10 us."""
        self._works.append(WaitingAdvice(steps, chunks))
        self.waiting_chunks += chunks

    def tick(self, now: float) -> None:
        """Do the work of one turn."""
        steps = self._store.retention.expire(now, STEPS_MAX)
        self._has_more_due = steps == STEPS_MAX
        left = STEPS_MAX
        while self._works and left:
            done = sum(1 for _ in islice(self._works[0].steps, left))
            if done < left:
                self.waiting_chunks -= self._works.popleft().chunks
            left -= done

    def wakes_at(self) -> float:
        """Return when `tick` has something to do: at once if the last turn left work."""
        return -math.inf if self.is_behind else self._store.retention.next_end()

    def _retain_chunks(
        self, namespace: Namespace, hashes: bytes, tenant: int, until: float
    ) -> Iterator[None]:
        retention = self._store.retention
        for chunk_hash in unpack_hashes(hashes):
            if until == -math.inf:
                retention.end_chunk(namespace, chunk_hash)
            else:
                retention.retain_chunk(namespace, chunk_hash, tenant, until)
            yield

    def release_chunks(
        self, namespace: Namespace, hashes: bytes, is_demoted: bool
    ) -> Iterator[None]:
        """Let the chunks go first that no other prompt has, as far as RAM tells: from the end on.

        A prompt's chunk has no other child than those that were let go::

            0 - 1 - 2 - 3 - 4      4, 3 and 2 are let go, and 1 is not:
                 \\ 5 - 6           another prompt goes on from it
        """
        let_go: dict[IndexEntry, list[IndexEntry]] = {}  # By the entry before them.
        for chunk_hash in reversed(unpack_hashes(hashes)):
            entry = namespace.entries.get(chunk_hash)
            if entry is not None:
                own = sum(child.parent is entry for child in let_go.pop(entry, ()))
                if entry.children > own:
                    return
                if entry.parent is not None:
                    let_go.setdefault(entry.parent, []).append(entry)
            self._store.retention.end_chunk(namespace, chunk_hash)
            for slot in entry.slots if entry is not None else ():
                if slot is None:
                    continue
                if is_demoted:
                    self._demotion.queue_demotion(slot)
                else:
                    self._store.let_go_first(slot)
            yield


def ends_at(ttl_ms: int, now: float) -> float:
    """Return when a retention ends that begins now. With 0 it ends what there is."""
    return now + min(ttl_ms, RETENTION_MS_MAX) / 1e3 if ttl_ms else -math.inf
