"""Promises: what engines compute now, so that others of the node wait for it where that is sooner.

An engine whose lookup was answered with less than it asked for computes the rest, and stores it.
The answer makes that a *promise*. The engine says when it begins to compute, and when all that it
stores of the prompt is committed. A lookup that would end shorter waits until then (`Promotion`).

1. A promise is no proof. What a lookup gets is what RAM has when its wait ends.
2. Nobody waits longer than computing would take. A promise that is not begun in time, or that is
   overdue, is waited for no more.
3. There is no circle and no chain: a promise is made by the answer to a lookup, so a request that
   others wait for waits for nobody.
4. Whoever breaks a promise is not believed for a while, twice as long each time.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from hybridkv.core.coverage import Hit
from hybridkv.core.geometry import GroupKind
from hybridkv.store.index import Namespace
from hybridkv.tiers.doubts import JudgedWaits
from hybridkv.tiers.object_search import LookupKey, LookupRequest

BEGIN_SECONDS = 0.25
"""The time from an answer to the beginning of computing, after which nobody waits for it."""
SLOWER_MAX = 4.0
"""A promise is waited for if keeping it takes at most so many times as long as computing, by the
speeds that both engines measured. Engines that share cores measure a quarter of their speed while
four compute, and the one that computes alone has all of it."""
LATE_MAX = 2.5  # So many times as long as it should take: a promise is overdue.
PROMISES_MAX = 1024  # Of one connection. The oldest one gives way.


@dataclass(eq=False)
class Promise:
    """What one request of an engine is about to compute and store."""

    key: LookupKey  # The lookup after whose answer it is computed.
    namespace: Namespace
    names: tuple[bytes, ...]
    """The hashes of the chunks that the answer lacked, in the prompt's order, then those of tails
    that may be its last one."""
    chunks: int  # How many of `names` are of chunks.
    chunk_seconds: float  # The seconds in which the engine computes a chunk. 0 = not known.
    made_at: float
    begun_at: float | None = None  # None = it has not begun to compute.
    is_open: bool = True
    is_lost: bool = False  # True where its connection was closed.

    def is_credible(self, now: float) -> bool:
        """Return False once it should have begun, or should be kept, long ago."""
        return now < self.fails_at()

    def fails_at(self) -> float:
        """Return when it is not credible any more, as far as is known now."""
        if self.begun_at is None:
            return self.made_at + BEGIN_SECONDS
        expected = self.chunks * self.chunk_seconds
        if not expected:
            return float("inf")
        return self.begun_at + BEGIN_SECONDS + LATE_MAX * expected


class PromisedWait:
    """A wait for a promise."""

    def __init__(self, promise: Promise, latest: float) -> None:
        self.promise = promise
        self.latest = latest  # When computing would be over.

    def is_wait_over(self, now: float) -> bool:
        """Return True once the promise was kept or broken, or waiting would not pay."""
        return not self.promise.is_open or now >= self.ends_at()

    def ends_at(self) -> float:
        """Return when it is over at the latest, as far as is known now."""
        return min(self.latest, self.promise.fails_at())


class Promises(JudgedWaits):
    """All open promises, by the names of what is promised. Connections that broke some are doubted.

    Waits after which RAM had more were kept.
    """

    def __init__(self) -> None:
        super().__init__()
        self.by_connection: dict[int, dict[LookupKey, Promise]] = {}
        """By the number of the connection. Each one's oldest promise is first."""
        self.by_name: dict[Namespace, dict[bytes, Promise]] = {}

    def __len__(self) -> int:
        return sum(map(len, self.by_connection.values()))

    def has_promises(self, namespace: Namespace) -> bool:
        """Return True if anything of the identity is promised."""
        return namespace in self.by_name

    def is_promised(self, namespace: Namespace, name: bytes) -> bool:
        """Return True if an open promise has the hash of a chunk, or the name of a tail."""
        return name in self.by_name.get(namespace, ())

    def add_promise(self, request: LookupRequest, hit: Hit, now: float) -> bool:
        """Note that the engine of a lookup computes what the hit lacks. False = it lacks nothing.

        What another engine has promised already stays with that, while it is believed. An earlier
        promise under the same key ends.
        """
        self.end_promise(request.key)
        positions = range(hit.chunks, request.chunks)
        tails = range(request.chunks + hit.tail, request.chunks + request.tail_count)
        names = tuple(request.hash_of(position) for position in (*positions, *tails))
        if not names:
            return False
        own = self.by_connection.setdefault(request.connection_id, {})
        if len(own) >= PROMISES_MAX:
            self._close(next(iter(own.values())))
        chunk_seconds = request.geometry.chunk_tokens * request.token_seconds
        promise = Promise(
            key=request.key,
            namespace=request.namespace,
            names=names,
            chunks=len(positions),
            chunk_seconds=chunk_seconds,
            made_at=now,
        )
        own[promise.key] = promise
        by_name = self.by_name.setdefault(request.namespace, {})
        for name in names:
            earlier = by_name.get(name)
            if earlier is None or not self._is_believed(earlier, now):
                by_name[name] = promise
        return True

    def begin_promise(self, key: LookupKey, now: float) -> None:
        """The engine has begun to compute it."""
        promise = self.by_connection.get(key.connection_id, {}).get(key)
        if promise is not None and promise.begun_at is None:
            promise.begun_at = now

    def end_promise(self, key: LookupKey) -> None:
        """All that the engine stores of it is committed, or it computes it no more."""
        promise = self.by_connection.get(key.connection_id, {}).get(key)
        if promise is not None:
            self._close(promise)

    def on_disconnect(self, connection_id: int) -> None:
        """End all promises of a connection that was closed."""
        for promise in [*self.by_connection.get(connection_id, {}).values()]:
            promise.is_lost = True
            self._close(promise)
        super().on_disconnect(connection_id)

    def find_wait(
        self, request: LookupRequest, hit: Hit, now: float, latest: float
    ) -> PromisedWait | None:
        """Return a wait for what the hit of a lookup lacks, until `latest` or earlier.

        None = computing is as soon.
        """
        latest = min(latest, request.deadline)
        positions = list(self._missing(request, hit))
        by_name = self.by_name.get(request.namespace)
        promise = by_name.get(request.hash_of(positions[0])) if by_name and positions else None
        is_own = promise is not None and promise.key.connection_id == request.connection_id
        if promise is None or is_own or now >= latest:
            return None
        if not self._is_believed(promise, now):
            return None
        promised = {*promise.names}
        names = [request.hash_of(position) for position in positions]
        count = next((at for at, name in enumerate(names) if name not in promised), len(names))
        recurrent = any(group.kind is GroupKind.RECURRENT for group in request.geometry.groups)
        if recurrent and promise.chunks and promise.names[promise.chunks - 1] not in names:
            # It keeps states where its own prompt ends.
            return None
        chunks = sum(position < request.chunks for position in positions[:count])
        geometry = request.geometry
        compute_seconds = (chunks or 1) * geometry.chunk_tokens * request.token_seconds
        if not compute_seconds:
            return PromisedWait(promise, latest)
        last = promise.names.index(names[count - 1])
        until = min(last + 1, promise.chunks) * promise.chunk_seconds
        begun = now if promise.begun_at is None else promise.begun_at
        if begun + until - now > SLOWER_MAX * compute_seconds:
            return None
        return PromisedWait(promise, min(latest, now + compute_seconds))

    def judge_promise(self, promise: Promise, is_kept: bool, now: float) -> None:
        """Note what came of a wait for a promise."""
        self.judge_wait(promise.key.connection_id, is_kept, now)
        if promise.is_lost:  # Nobody can be doubted any more.
            super().on_disconnect(promise.key.connection_id)

    def _is_believed(self, promise: Promise, now: float) -> bool:
        return promise.is_credible(now) and not self.is_doubted(promise.key.connection_id, now)

    def _close(self, promise: Promise) -> None:
        own = self.by_connection[promise.key.connection_id]
        del own[promise.key]
        if not own:
            del self.by_connection[promise.key.connection_id]
        promise.is_open = False
        by_name = self.by_name.get(promise.namespace, {})
        for name in promise.names:
            if by_name.get(name) is promise:
                del by_name[name]
        if not by_name:
            # Later promises may have taken the place of others under all names.
            self.by_name.pop(promise.namespace, None)

    def _missing(self, request: LookupRequest, hit: Hit) -> Iterator[int]:
        """Yield the positions of what a hit lacks of a lookup."""
        yield from range(hit.chunks, request.chunks)
        yield from range(request.chunks + hit.tail, request.chunks + request.tail_count)
