"""What people pin and unpin: retention of what RAM has now, by request, identity or tenant."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile

from hybridkv.core.keys import HASH_BYTES
from hybridkv.daemon.advice import AdviceQueue, ends_at
from hybridkv.daemon.sessions import ClientConnection, RequestError, Sessions
from hybridkv.observe.history import RequestHistory
from hybridkv.store.index import IndexEntry, Namespace
from hybridkv.store.store import Store
from hybridkv.wire import messages as wire
from hybridkv.wire.protocol import ErrorCode

PINS_MAX = 256
"""The most pins that are remembered, so that they can be listed."""


@dataclass(eq=False, slots=True)
class ChosenChunks:
    """One wish to pin chunks, and how far it is done."""

    request: wire.Pin
    until: float
    chunks: int = 0  # Those that RAM has.
    kept: int = 0  # Those of them that are retained for its sake.
    is_done: bool = False


class PinList:
    """The pins whose time is not over. Their chunks are in `Store.retention`, as all others."""

    def __init__(
        self, store: Store, sessions: Sessions, history: RequestHistory, advice: AdviceQueue
    ) -> None:
        self._store, self._sessions, self._history = store, sessions, history
        self._advice = advice
        self._pins: list[ChosenChunks] = []

    def answer(self, connection: ClientConnection, request: wire.Pin, now: float) -> wire.Pinned:
        """Begin to pin or unpin what a request names, and list all pins. Raises RequestError."""
        self._pins = [pin for pin in self._pins if not pin.is_done or pin.until > now]
        if request.names_anything:
            pin = ChosenChunks(request, ends_at(request.ttl_ms, now))
            entries = self._choose(connection, request)
            same = [known for known in self._pins if known.request.names_same(request)]
            if request.ttl_ms and len(self._pins) - len(same) >= PINS_MAX:
                raise RequestError(ErrorCode.PIN, f"there are {PINS_MAX} pins already")
            self._pins = [known for known in self._pins if known not in same]
            self._pins += [pin] if request.ttl_ms else []
            work = self._keep(pin, entries) if request.ttl_ms else self._end(entries)
            self._advice.append_work(work, 1)
        retention = self._store.retention
        return wire.Pinned(
            id=request.id,
            pins=[
                wire.WirePin(
                    request_id=pin.request.request_id,
                    identity=pin.request.identity,
                    tenant=pin.request.tenant,
                    left_ms=max(0, round((pin.until - now) * 1e3)),
                    chunks=pin.chunks,
                    kept=pin.kept,
                )
                for pin in self._pins
            ],
            tenants=[
                wire.RetainedBytes(tenant, size, retention.share_bytes(tenant))
                for tenant, size in retention.charged.most_common(wire.TENANTS_LISTED_MAX)
            ],
            is_busy=self._advice.is_behind,
        )

    def _choose(
        self, connection: ClientConnection, request: wire.Pin
    ) -> Iterator[IndexEntry | None]:
        """Return what a request names, in any order. Raises RequestError where it names nothing."""
        if request.request_id:
            return self._chunks_of(request.request_id)
        if request.tenant is not None and connection.tenant:
            fault = "with user quotas the daemon knows no salts; an identity works"
            raise RequestError(ErrorCode.PIN, fault)
        namespaces = [
            namespace
            for namespace in self._sessions.namespaces.values()
            if namespace.identity.hex().startswith(request.identity)
        ]
        if request.identity and not namespaces:
            raise RequestError(ErrorCode.PIN, f"nothing has the identity {request.identity!r}")
        return _chosen(namespaces, request.tenant)

    def _chunks_of(self, request_id: str) -> Iterator[IndexEntry | None]:
        known = self._history.find_request(request_id)
        if known is None:
            fault = f"no request {request_id!r} ended lately; hybridkv explain lists the latest"
            raise RequestError(ErrorCode.PIN, fault)
        name, namespace = (
            known.explanation.last_chunk,
            self._sessions.namespaces.get(known.identity),
        )
        entry = namespace.entries.get(name) if namespace is not None else None
        if entry is None or len(name) != HASH_BYTES:
            fault = f"RAM has not the last whole chunk of the prompt of {known.request_id!r}"
            raise RequestError(ErrorCode.PIN, fault)
        return reversed(list(_back(entry)))

    def _keep(self, pin: ChosenChunks, entries: Iterator[IndexEntry | None]) -> Iterator[None]:
        tried = set[IndexEntry]()
        for entry in entries:
            slot = next(filter(None, entry.slots), None) if entry is not None else None
            if entry is not None and slot is not None:
                # From the first chunk on that is not retained for so long. Each is tried once.
                lacking = takewhile(
                    lambda before: before not in tried and not _is_kept(before, pin.until),
                    _back(entry),
                )
                for before in reversed(list(lacking)):
                    tried.add(before)
                    self._store.retention.retain_chunk(
                        before.namespace, before.chunk_hash, slot.tenant, pin.until
                    )
                    yield
                pin.chunks += 1
                pin.kept += _is_kept(entry, 0.0)
            yield
        pin.is_done = True

    def _end(self, entries: Iterator[IndexEntry | None]) -> Iterator[None]:
        """End every retention of what a request names, whoever wished it."""
        for entry in entries:
            if entry is not None:
                self._store.retention.end_chunk(entry.namespace, entry.chunk_hash)
            yield


def _is_kept(entry: IndexEntry, until: float) -> bool:
    """Return True where a chunk is kept until then, or longer."""
    chunk = entry.namespace.retained.get(entry.chunk_hash)
    return chunk is not None and chunk.is_kept and chunk.until >= until


def _chosen(namespaces: list[Namespace], tenant: int | None) -> Iterator[IndexEntry | None]:
    """Yield the chunks of namespaces, of one tenant where it is given. None for each other."""
    for namespace in namespaces:
        # While no engine has greeted with the identity, its chunks are in no order.
        for entry in list(namespace.entries.values()) if namespace.shapes else ():
            slots = filter(None, entry.slots)
            yield entry if tenant is None or any(slot.tenant == tenant for slot in slots) else None


def _back(entry: IndexEntry) -> Iterator[IndexEntry]:
    """Yield a chunk and those before it that RAM has, from the last one on."""
    yield entry
    while (parent := entry.parent) is not None and parent.prefixes:
        entry = parent
        yield entry
